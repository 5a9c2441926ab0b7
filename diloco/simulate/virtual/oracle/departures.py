"""Departures in a simulation (I7): a voter that leaves in its own time leaves most others able to go on (rule 9), and
whoever asked to leave is in no view that is made later.

Whoever goes too early takes a vote along that may be needed; and where a person is asked about the others, nobody sees
that it was this one's fault. Whoever is kept goes at the end of `leave_s`, and counts as a silent voter then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

DRAFTED_S = 2.0
"""A view that is proposed was made up by then: the record of it is on the disk before it is said."""


class SimulatedDepartures:
    """Peers of a simulation that said goodbye, and whether they might."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._gone: set[int] = set()
        """Lives that said goodbye."""
        self._asked_s: dict[tuple[int, Member], float] = {}
        """By life of a process, and by member that told it so: since when it knows that this one wants to leave."""
        self._left_at: dict[int, int] = {}
        """By life of a process: height of the commit that left it out, of those that it closed."""
        self._proposed: set[str] = set()
        """Commits that somebody proposed, by digest: one that is proposed again is as old as it was."""

    def on_message(self, host: SimulatedProcess, envelope: m.Envelope, reply: m.Reply) -> None:
        """Note who tells a simulated peer that it wants to leave."""
        if reply is m.Reply.OK and isinstance(envelope.body, m.Heartbeat):
            key = host.life, envelope.sender
            if envelope.body.leaving:
                self._asked_s.setdefault(key, self.world.now)
            else:
                self._asked_s.pop(key, None)

    def on_effect(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Check a commit that a simulated peer is about to propose."""
        match effect:
            case fx.Close(commit):
                self._note_left(host, commit)
            case fx.Send(_, m.Envelope(body=m.Propose(commit=commit))) if commit.digest not in self._proposed:
                self._proposed.add(commit.digest)
                self._check_view(host, commit)

    def _note_left(self, host: SimulatedProcess, commit: Commit) -> None:
        me, before = host.machine.me, self.world.invariants.commits.get(commit.previous)
        if me in commit.view:
            self._left_at.pop(host.life, None)
        elif before is not None and me in before.view:
            self._left_at.setdefault(host.life, commit.height)

    def _check_view(self, host: SimulatedProcess, commit: Commit) -> None:
        since_s = self.world.now - DRAFTED_S
        kept = [one.peer for one in commit.view if self._asked_s.get((host.life, one), math.inf) < since_s]
        if kept:
            raise Violation("I7", f"{host.name} keeps {', '.join(kept)} in the view, which asked to leave")

    def look(self, host: SimulatedProcess, event: m.Event | None = None) -> None:
        """Check a simulated peer that has just said goodbye. At the end of `leave_s` it may, whoever is there."""
        if not host.machine.gone or host.life in self._gone:
            return
        self._gone.add(host.life)
        if host.machine.commit is None or (isinstance(event, m.LeaveWanted) and event.now):
            return
        why = self._why_too_early(host)
        if why:
            raise Violation("I7", f"{host.name} leaves, and {why}")

    def _why_too_early(self, host: SimulatedProcess) -> str:
        """Reason why a simulated peer should have waited; empty: it had none."""
        membership, commit = host.machine._membership, host.machine.commit
        assert commit is not None
        if membership.in_view:
            alive = [member.peer for member in membership.alive() if member != membership.me]
            return f"the view has it yet, with {', '.join(alive)}" if alive else ""
        left_at = self._left_at.get(host.life)
        if left_at is None:
            return ""
        left = {entry.member for entry in membership.roster if entry.left}
        stand = (left | self.world.invariants.lives_from(commit, left_at)).intersection(commit.voting)
        if 2 * len(stand) > len(commit.voting):
            return ""
        names = ", ".join(sorted(member.peer for member in stand)) or "nobody"
        return f"of {len(commit.voting)} voters these stand on a commit without it: {names}"
