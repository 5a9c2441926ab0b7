"""Ends of simulated processes with an error for a person, who starts them again: a fault must explain each.

Such an error says that something is wrong with a machine, a disk or the network. Where nothing is, the error is a bug:
a peer that nobody lets in, or a state that nobody gives. Nobody would see it, as the process is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.base.errors import DilocoError, EvictedError, Interrupted, ResourceError, StateError, UnreachableError
from diloco.exchange.engine import Exchange
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.plan import Fault
from diloco.simulate.virtual.plans.setup import SUSPECT_S

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

DISTURBANCES = (
    "stop", "busy", "cut", "link", "tunnel", "slow", "late", "corrupt", "flip", "muffle", "duel", "replay", "lie",
    "drift",
)  # fmt: skip
"""Faults that keep a living peer from giving its state, or from being heard."""
REFUSED_S = 3 * SUSPECT_S
"""A joiner is refused for so long before it ends: by members that hear another of its name, or did `SUSPECT_S` ago."""
SLACK_S = 1.0


@dataclass(frozen=True)
class Explanation:
    """A fault that explains an error with which a simulated process ends."""

    error: type[DilocoError]
    words: str
    """They are in the error's cause."""
    fault: Callable[[SimulatedEndings, SimulatedProcess], bool]
    """Whether there is such a fault."""
    keeps_disk: bool = True
    """A person starts the process again with its disk; else with an empty one."""


@dataclass(frozen=True)
class _Beginning:
    """A process's beginning: when it was, and how often its disk had refused something until then."""

    at_s: float
    refusals: int


class SimulatedEndings:
    """Errors that end the processes of a simulation (I5, I7)."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._beginnings: dict[int, _Beginning] = {}
        """By life."""

    def begins(self, process: SimulatedProcess) -> None:
        """A process begins."""
        self._beginnings[process.life] = _Beginning(self.world.now, process.disk.refusals)

    def ends(self, process: SimulatedProcess, error: DilocoError) -> bool:
        """A process ends with an error. Returns whether a person starts it again with its disk."""
        self.world.count("errors")
        for one in EXPLANATIONS:
            if isinstance(error, one.error) and one.words in error.cause and one.fault(self, process):
                return one.keeps_disk
        invariant = "I5" if "checkpoint" in error.cause else "I7"
        cause = error.cause.replace(f"{process.disk.root}/", "")
        kind = type(error).__name__
        raise Violation(invariant, f"{process.name} ends with {kind}, and no fault explains it: {cause}")

    # ------------------------------------------------------------ faults that explain an error

    def refused(self, process: SimulatedProcess) -> bool:
        """Its disk was full, or refused a sync, as this life began: later that leaves a gap in what is kept."""
        return not process.up and process.disk.refusals > self._beginnings[process.life].refusals

    def unsaved(self, process: SimulatedProcess) -> bool:
        """It was at its end, and its disk has refused something in this life: its last checkpoint may be missing."""
        ending = process.leaving or (process.run is not None and process.run.done)
        return ending and process.disk.refusals > self._beginnings[process.life].refusals

    def damaged(self, process: SimulatedProcess) -> bool:
        """Somebody damaged its disk, or that lied about its syncs: no checkpoint on it is whole for certain."""
        return process.disk.damaged and process.disk.durable < 0

    def leaves(self, process: SimulatedProcess) -> bool:
        """It was asked to leave."""
        return process.leaving

    def has_twin(self, process: SimulatedProcess) -> bool:
        """Another process of its name lived while it was refused, or it is an earlier life: by its clock, or as a later
        one was started meanwhile. An earlier life is refused for good."""
        processes = [one for one in self.world.machines.processes() if one.name == process.name and one is not process]
        if process.name in self.world.clockless or any(one.life > process.life for one in processes):
            return True
        began_s = max(self._beginnings[process.life].at_s, self.world.now - REFUSED_S)
        since_s = began_s + REFUSED_S - SUSPECT_S - SLACK_S
        return any(one.up and one.loop.died_s >= since_s for one in processes)

    def parted(self, process: SimulatedProcess) -> bool:
        """Connections between the ranks of its island broke."""
        return self._met(process, lambda fault: fault.kind == "ranks" and fault.how == "broken")

    def jumped(self, process: SimulatedProcess) -> bool:
        """Its clock went on by more than its ranks wait for each other."""
        return self._jumped(process, self.world.setup.site.timeouts.collective_s)

    def _jumped(self, process: SimulatedProcess, timeout_s: float) -> bool:
        return self._met(process, lambda fault: fault.kind == "jump" and float(fault.how) >= timeout_s)

    def _met(self, process: SimulatedProcess, such: Callable[[Fault], bool]) -> bool:
        """Whether the process met such a fault of the plan in this life."""
        began_s, now_s = self._beginnings[process.life].at_s, self.world.now
        faults = [fault for fault in self.world.plan.faults if fault.peer == process.name and such(fault)]
        return any(began_s <= fault.at_s <= now_s for fault in faults)

    def unreached(self, process: SimulatedProcess) -> bool:
        """Messages of others may not have reached it."""
        return self._disturbed(process.name, self._beginnings[process.life].at_s)

    def uncopied(self, process: SimulatedProcess) -> bool:
        """All who had a state were disturbed while it wanted a copy, or it was itself, or its clock jumped. Who wants a
        copy, too, has none: where all do, one that had a state has ended, or somebody was disturbed before. It may
        know none who has one: where it joined through a copy of a disk, which hears no member, and has ended."""
        join_s = self.world.setup.site.timeouts.join_s
        since_s = max(self._beginnings[process.life].at_s, self.world.now - join_s)
        if self._disturbed(process.name, since_s) or self._jumped(process, join_s):
            return True
        others = [one for one in self.world.machines.processes() if one is not process and one.up and not one.witness]
        followed = _lineage(process)
        others = [one for one in others if not followed or _lineage(one) == followed]
        having = [one for one in others if self._beginnings[one.life].at_s < since_s and not _wants_state(one)]
        givers = [one for one in having if one.alive]
        if givers:
            known = [self.world.at(entry.member) for entry in process.machine.roster]
            return all(self._disturbed(one.name, since_s) for one in givers if one in known or not known)
        return bool(having) or any(self._disturbed(one.name, 0.0) for one in others)

    def _disturbed(self, name: str, since_s: float) -> bool:
        """Whether a fault of the plan concerned this peer since then."""
        return any(
            fault.kind in DISTURBANCES
            and (not fault.peer or name in fault.peer.split("+"))
            and fault.at_s <= self.world.now
            and fault.over_s >= since_s
            for fault in self.world.plan.faults
        )


def _lineage(host: SimulatedProcess) -> str:
    """Name of the lineage that a simulated peer follows; empty where there is none: before it listens, under gossip."""
    return host.machine.lineage if host.up and isinstance(host.exchange, Exchange) else ""


def _wants_state(host: SimulatedProcess) -> bool:
    """Whether a simulated peer has no state to give: none at all, or one that is too old or wrong."""
    exchange = host.exchange
    return isinstance(exchange, Exchange) and (exchange.behind or exchange.archive.state is None)


EXPLANATIONS = (
    Explanation(ResourceError, "another process", lambda endings, process: process.first is not None),
    Explanation(ResourceError, "", SimulatedEndings.refused),
    Explanation(ResourceError, "cannot write checkpoint", SimulatedEndings.unsaved),
    Explanation(ResourceError, "another rank", SimulatedEndings.parted),
    Explanation(ResourceError, "has not answered", SimulatedEndings.jumped),
    Explanation(StateError, "checkpoint", SimulatedEndings.damaged, keeps_disk=False),
    Explanation(Interrupted, "asked to leave", SimulatedEndings.leaves),
    Explanation(StateError, "state", SimulatedEndings.uncopied),
    Explanation(EvictedError, "live peer named", SimulatedEndings.has_twin),
    Explanation(UnreachableError, "nobody reaches", SimulatedEndings.unreached),
)
"""All that is excused. An error that is not among them, or has none of these faults, is a violation."""
