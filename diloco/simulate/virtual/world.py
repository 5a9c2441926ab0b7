"""The simulated world in virtual time: events in order, the peers of one plan, and the end that all must come to."""

from __future__ import annotations

import heapq
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.protocol.roster import FORGET_S
from diloco.simulate.virtual import transcript
from diloco.simulate.virtual.disk import SimulatedDisk
from diloco.simulate.virtual.faults import strike
from diloco.simulate.virtual.gate import Violation
from diloco.simulate.virtual.host import SimulatedHost
from diloco.simulate.virtual.invariants import SimulationInvariants
from diloco.simulate.virtual.network import SimulatedNetwork
from diloco.simulate.virtual.operator import SimulatedOperator
from diloco.simulate.virtual.plan import NO_CLOCK, FaultPlan
from diloco.simulate.virtual.setup import SimulationSetup

HEAL_S = 25.0
"""After the last fault everybody must be together again, and versions must close, within this time; where there are
slow peers, within three of their rounds more. A life that its clock makes an earlier one must first be forgotten."""
OPERATOR_S = 8.0
"""An operator looks again this often."""
LOOK_S = 0.25
RETRY_S = 0.5


@dataclass
class Outcome:
    """End of one simulation."""

    plan: FaultPlan
    events: int
    virtual_s: float
    versions: int
    faults: Counter[str]
    discarded_tokens: int
    void_tokens: int
    violation: str = ""
    """Empty when all invariants held."""
    lines: Sequence[str] = field(default_factory=list)


class SimulatedWorld:
    """One simulation. Everything that happens in it is a function of the plan of faults."""

    keeps_ledgers = True
    """Every life writes one, and the code of `diloco audit` reads them in the end."""

    def __init__(self, plan: FaultPlan, record: bool = False) -> None:
        self.plan = plan
        self.record = record
        self.now = 0.0
        self.events = 0
        self.dice = Random(f"{plan.seed}/world")
        self.setup = SimulationSetup(plan)
        self.network = SimulatedNetwork(self, Random(f"{plan.seed}/network"), plan.delay_s, plan.loss)
        self.invariants = SimulationInvariants(self)
        self.hosts: dict[str, SimulatedHost] = {}
        self.ghosts: list[SimulatedHost] = []
        """Processes that somebody took for dead: another one has their name by now."""
        self.disks: dict[str, SimulatedDisk] = {}
        self.liars: set[str] = set()
        self.heal_s = HEAL_S + 3 * (plan.longest_round_s - plan.round_s)
        if any(fault.how == NO_CLOCK for fault in plan.faults):
            self.heal_s += FORGET_S
        self.clockless: dict[str, int] = {}
        """Peers whose clock begins anew at each start, and how often they started so."""
        self.faults: Counter[str] = Counter()
        self.lines: list[str] = []
        self._saying: tuple[float, str, str] | None = None
        self._lately: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=8))
        self.hostile = any(fault.kind == "lie" for fault in plan.faults)
        self.replays = any(fault.kind == "replay" for fault in plan.faults)
        self.twice = self.replays or plan.loss > 0
        """Whether messages may come a second time."""
        self._queue: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = count()
        self._lives = count()
        self._pieces = count()

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function later in virtual time."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), function, arguments))

    @torch.inference_mode()
    def run(self) -> Outcome:
        """Simulate until the faults are over and the run is well again, or an invariant is broken."""
        violation = ""
        try:
            self._begin()
            self._until(self.plan.quiet_s, lambda: False)
            self._heal()
        except Violation as broken:
            violation = str(broken)
        except Exception as crash:  # whatever the code under test raises is a finding, not ours to judge
            violation = f"crash: {type(crash).__name__} {crash} in {_where(crash)}"
        return Outcome(
            self.plan, self.events, self.now, len(self.invariants.commits), self.faults,
            self.invariants.discarded_tokens, self.invariants.void_tokens, violation, self.lines,
        )  # fmt: skip

    def _until(self, end_s: float, well: Callable[[], bool]) -> bool:
        """Let events happen until this virtual time; True as soon as all is well."""
        look_s = self.now
        while self._queue and self._queue[0][0] <= end_s:
            self.now, _, function, arguments = heapq.heappop(self._queue)
            self.events += 1
            function(*arguments)
            if self.now >= look_s:
                look_s = self.now + LOOK_S
                if well():
                    return True
        self.now = end_s
        return False

    # ------------------------------------------------------------ the plan

    def _begin(self) -> None:
        names = [f"p{index}" for index in range(self.plan.peers)]
        self.start(names[0], "lineage0", founder=True).training.found()
        for name in (*names[1:], *(f"w{index}" for index in range(self.plan.witnesses))):
            self.after(0.01, self.join, name, False)
        for fault in self.plan.faults:
            self.after(fault.at_s, strike, self, fault)

    def _heal(self) -> None:
        """End the faults of the simulation. All live simulated peers must come together, and versions must close."""
        self.network.loss = 0.0
        for ghost in self.ghosts:
            ghost.die("the operator ends it: another one has its name")
        self.log("", "the faults are over")
        SimulatedOperator(self).help()
        goal, end_s = self._newest() + 2, self.now + self.heal_s
        while not self._until(self.now + OPERATOR_S, lambda: self._well(goal)):
            if self.now >= end_s or not self._queue:
                raise Violation("I7", self._not_well(goal))
            SimulatedOperator(self).help()
        self.invariants.at_the_end(self._honest())
        self.invariants.replayed()

    def _well(self, goal: int) -> bool:
        hosts = self._honest()
        lineages = {host.machine.lineage for host in hosts}
        together = len(lineages) == 1 and all(host.machine.in_view for host in hosts)
        return self._all_left() or (together and min(host.machine.version for host in hosts) >= goal)

    def _all_left(self) -> bool:
        return all(host.witness for host in self._honest())

    def _not_well(self, goal: int) -> str:
        stands = ", ".join(map(_standing, self._honest()))
        return f"{self.heal_s:g} s after the faults not all are in the view at version {goal}: {stands}"

    def _honest(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.alive and host.name not in self.liars]

    def _newest(self) -> int:
        return max((host.machine.version for host in self.hosts.values() if host.alive), default=0)

    # ------------------------------------------------------------ peers

    def host(self, name: str) -> SimulatedHost | None:
        return self.hosts.get(name)

    def at(self, member: Member) -> SimulatedHost | None:
        """The simulated process at an address, if it lives."""
        host = self.hosts.get(member.peer)
        here = [host, *self.ghosts] if host is not None else self.ghosts
        return next((one for one in here if one.alive and one.address == member.address), None)

    def lives(self, member: Member) -> bool:
        """Whether this very life of a simulated peer goes on."""
        host = self.hosts.get(member.peer)
        lives = [host, *self.ghosts] if host is not None else self.ghosts
        return any(one.alive and one.machine.me == member for one in lives)

    def start(self, name: str, lineage: str, founder: bool) -> SimulatedHost:
        self.disks.setdefault(name, SimulatedDisk())
        life = next(self._lives)
        host = self.hosts[name] = SimulatedHost(self, name, life, self._address(name, life), lineage, founder)
        return host

    def _address(self, name: str, life: int) -> str:
        """The address of a simulated process: that of the one before it, or another."""
        same = f"{name}:same"
        free = not any(ghost.alive and ghost.address == same for ghost in self.ghosts)
        return same if self.plan.fixed_addresses and free else f"{name}:{life}"

    def join(self, name: str, with_disk: bool) -> None:
        """Start a simulated peer, which joins through any member that answers; it tries until one does."""
        known = self.hosts.get(name)
        if known is not None and known.alive:
            return
        doors = [
            host for host in self.hosts.values()
            if host.working and host.state is not None and host.name != name and self.network.connected(name, host.name)
        ]  # fmt: skip
        if not doors:
            self.after(RETRY_S, self.join, name, with_disk)
            return
        door = self.dice.choice(doors)
        self.log(name, f"joins through {door.name}{' with its disk' if with_disk else ''}")
        host = self.start(name, door.machine.lineage, founder=False)
        host.machine.forks = door.machine.forks
        snapshot = self.disks[name].load() if with_disk else None
        if snapshot is not None:
            host.training.restore(snapshot)
        members = [door.machine.me, *(member for member in door.machine.alive() if member != door.machine.me)]
        host.machine.roster.meet([member for member in members if member.peer != name], host.now)
        if not host.witness:
            host.training.join(members)

    def directory(self, asker: SimulatedHost) -> list[Member]:
        """Simulated peers that announced themselves, as far as they can be reached."""
        others = [host for host in self.hosts.values() if host is not asker and host.alive]
        return [host.machine.me for host in others if self.network.connected(asker.name, host.name)]

    def new_lineage(self) -> str:
        """The name of a simulated run that is founded anew."""
        lineage = f"lineage{len(self.invariants.refounded) + 1}"
        self.invariants.refounded.add(lineage)
        return lineage

    def next_piece(self) -> int:
        """Number of the next piece of simulated progress; no two are the same."""
        return next(self._pieces)

    # ------------------------------------------------------------ telling

    def count(self, fault: str) -> None:
        """Count a fault that happened in the simulation."""
        self.faults[fault] += 1

    def log(self, name: str, what: str) -> None:
        if self.record:
            self.lines.append(transcript.line(self.now, name, what))

    def _log_once(self, name: str, what: str) -> None:
        """Write a line to the simulation's transcript; one that repeats only the first time."""
        if what not in self._lately[name]:
            self._lately[name].append(what)
            self.log(name, what)

    def _log_sent(self, host: SimulatedHost, envelope: m.Envelope, to: Member) -> None:
        """Write one transcript line for a simulated message to several peers at once, none for one only repeated."""
        what = transcript.body(envelope.body)
        moment = (self.now, host.name, what)
        if moment == self._saying:
            self.lines[-1] = transcript.said_also_to(self.lines[-1], to.peer)
        elif what not in self._lately[host.name]:
            self._lately[host.name].append(what)
            self._saying = moment
            self.log(host.name, transcript.said(what, to.peer))

    def log_reply(self, envelope: m.Envelope, to: SimulatedHost, reply: m.Reply) -> None:
        """Write to the transcript that a simulated peer refused a message."""
        if self.record and reply not in (m.Reply.OK, m.Reply.STALE, m.Reply.REPLAYED):
            self._log_once(to.name, f"refuses {transcript.body(envelope.body)} of {envelope.sender.peer}: {reply.name}")

    def log_commit(self, host: SimulatedHost, commit: Commit) -> None:
        """Write to the transcript that a simulated peer is the first to close a version."""
        self.log(host.name, transcript.closed(commit))

    def performed(self, host: SimulatedHost, effect: m.Effect) -> None:
        """Write to the transcript an effect that a simulated peer is about to carry out."""
        if not self.record:
            return
        match effect:
            case m.Send(to, envelope) if not isinstance(envelope.body, transcript.QUIET):
                self._log_sent(host, envelope, to)
            case m.Note(reason, routine) if not routine:
                self._log_once(host.name, reason)


def _standing(host: SimulatedHost) -> str:
    machine = host.machine
    where = "in" if machine.in_view else "outside"
    return f"{host.name} at {machine.version} {where} the view of {machine.lineage} ({machine.reason})"


def _where(crash: Exception) -> str:
    frame = traceback.extract_tb(crash.__traceback__)[-1]
    return f"{frame.name}, {Path(frame.filename).name} line {frame.lineno}"
