"""Departures in a simulation (I7): a voter that leaves in its own time leaves most others able to go on (rule 9).

Whoever goes too early takes a vote along that may be needed; and where a person is asked about the others, nobody sees
that it was this one's fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld


class SimulatedDepartures:
    """Peers of a simulation that said goodbye, and whether they might."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._gone: set[int] = set()
        """Lives that said goodbye."""

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
        if membership._left_at is None:
            return ""
        left = {entry.member for entry in membership.roster if entry.left}
        stand = (left | self.world.invariants.lives_from(commit, membership._left_at)).intersection(commit.voting)
        if 2 * len(stand) > len(commit.voting):
            return ""
        names = ", ".join(sorted(member.peer for member in stand)) or "nobody"
        return f"of {len(commit.voting)} voters these stand on a commit without it: {names}"
