"""Lineages apart under `continue`, judged by the messages that each life heard, and not by its own roster (I8)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.setup import SUSPECT_S

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

SLACK_S = 0.05


@dataclass(slots=True)
class Hearing:
    """Members that one process heard."""

    at_s: dict[Member, float] = field(default_factory=dict)
    """When it last heard each, by its own clock."""
    unreachable: set[Member] = field(default_factory=set)
    """Members to which nothing could be delivered once: they may not answer, whatever they say."""
    majority_s: float = -math.inf
    """When it last heard so many that they decide."""


class SimulatedApart:
    """Checks of those that found a lineage apart, and of those that follow them."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._hearings: dict[int, Hearing] = {}
        """By life."""

    def hears(self, host: SimulatedProcess, sender: Member, body: m.Body, taken: bool) -> None:
        """A simulated peer hears another, and takes the message or refuses it. A later life ends an earlier one."""
        if self.world.setup.rules.continue_after_s is None:
            return  # nobody goes apart
        hearing, commit = self._hearings.setdefault(host.life, Hearing()), host.machine.commit
        for known in [known for known in hearing.at_s if known.peer == sender.peer and known != sender]:
            del hearing.at_s[known]
        if isinstance(body, m.Goodbye) or (isinstance(body, m.Heartbeat) and body.deaf):
            hearing.at_s.pop(sender, None)
        elif taken:
            hearing.at_s[sender] = host.now
        if commit is not None and self._has_majority(host, hearing, commit):
            hearing.majority_s = host.now

    def loses(self, host: SimulatedProcess, member: Member) -> None:
        """Nothing can be delivered to a member."""
        self._hearings.setdefault(host.life, Hearing()).unreachable.add(member)

    def _has_majority(self, host: SimulatedProcess, hearing: Hearing, commit: Commit) -> bool:
        """Whether those heard lately have the votes that decide after a commit, and one of them trains and can propose:
        with its own, if it is of this life."""
        since_s = host.now - SUSPECT_S + SLACK_S
        lately = {one for one, at_s in hearing.at_s.items() if at_s > since_s} - hearing.unreachable
        heard = [one for one in commit.voting if one == host.machine.me or one in lately]
        enough = len(heard) >= self.world.invariants.ballots.needed(host, commit)
        return enough and not all(one.witness for one in heard)

    def founds(self, host: SimulatedProcess, commit: Commit) -> None:
        """Check that a lineage apart is founded by the first that lives, after its patience without a majority."""
        trainers = [member for member in commit.view if not member.witness]
        if trainers[0].peer != host.name:
            raise Violation("I8", f"{host.name} founds a lineage in place of {trainers[0].peer}")
        after_s = self.world.setup.rules.continue_after_s or 0.0
        if commit.evicted:
            return
        if host.now - self._hearings.setdefault(host.life, Hearing()).majority_s < after_s - SLACK_S:
            raise Violation("I8", f"{host.name} founds a lineage, and heard a majority less than {after_s:g} s ago")

    def follows(self, host: SimulatedProcess, commit: Commit) -> None:
        """Check that nobody follows a founder into a lineage apart who hears a majority in its own."""
        founder = next(member.peer for member in commit.view if not member.witness)
        before, hearing = self.world.invariants.commits[commit.previous], self._hearings.get(host.life)
        if host.name != founder and hearing is not None and self._has_majority(host, hearing, before):
            raise Violation("I8", f"{host.name} follows {founder} into a lineage apart, and hears a majority")
