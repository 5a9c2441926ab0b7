"""The simulated world in virtual time: events in order, the peers of one plan, and the end that all must come to."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from diloco.base.clock import going_by
from diloco.base.files import on_disk
from diloco.base.threads import in_place
from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.roster import FORGET_S
from diloco.run.run import Run
from diloco.simulate.virtual import transcript
from diloco.simulate.virtual.disk import DiskOfTheMoment, SimulatedDisk
from diloco.simulate.virtual.faults import strike
from diloco.simulate.virtual.network import SimulatedNetwork
from diloco.simulate.virtual.operator import SimulatedOperator
from diloco.simulate.virtual.oracle.afterwards import SimulatedAftermath
from diloco.simulate.virtual.oracle.endings import SimulatedEndings
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.oracle.invariants import SimulationInvariants
from diloco.simulate.virtual.oracle.machines import SimulatedMachines
from diloco.simulate.virtual.oracle.promise import SimulatedPromise
from diloco.simulate.virtual.plans.plan import EXCHANGE_S, NO_CLOCK, Fault, FaultPlan
from diloco.simulate.virtual.plans.setup import STEPS, SimulationSetup, most_contributions
from diloco.simulate.virtual.process import SimulatedProcess
from diloco.simulate.virtual.ranks.threads import SimulatedCondition
from diloco.simulate.virtual.schedules import halve
from diloco.simulate.virtual.timeline import ProcessLoop, Timeline

HEAL_S = 25.0
"""After the last fault everybody must be together again, and versions must close, within this time; where there are
slow peers, within three of their rounds more, and where uplinks are slow, within one exchange of the slowest with
each peer, and three, more. A life that its clock makes an earlier one must first be forgotten."""
FIRST_LOOK_S, OPERATOR_S = 3.0, 8.0
"""A person comes so long after the last fault where one is needed, and looks again this often."""
MAX_HELP = 4
"""Times `HEAL_S` for which a person helps."""
LOOK_S = 0.25
RETRY_S = 0.5
CLOCK_S = 1000.0
"""By the clocks of machines, when a simulation begins."""
NO_CLOCK_S = 0.0004
"""Time between the starts of lives on a machine whose clock begins anew each time."""


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

    keeps_disks = True
    """Every peer has a folder, and the code of `diloco audit` reads them in the end."""

    def __init__(self, plan: FaultPlan, record: bool = False) -> None:
        self.plan = plan
        self.record = record
        self.timeline = Timeline()
        self.after = self.timeline.after
        """Calls a function later in virtual time."""
        self.dice = Random(f"{plan.seed}/world")
        self.setup = SimulationSetup(plan)
        self.machines = SimulatedMachines(self)
        self.promise = SimulatedPromise(self)
        self.endings = SimulatedEndings(self)
        self.operator = SimulatedOperator(self)
        self.network = SimulatedNetwork(self, Random(f"{plan.seed}/network"), plan.delay_s, plan.loss)
        self.invariants = SimulationInvariants(self)
        self.hosts: dict[str, SimulatedProcess] = {}
        self.ghosts: list[SimulatedProcess] = []
        """Processes that somebody took for dead: another one has their name by now."""
        self.disks: dict[str, SimulatedDisk] = {}
        self.slow_disks = any(fault.kind == "disk" and fault.how.startswith("late") for fault in plan.faults)
        self.liars: set[str] = set()
        self.plan_names = [f"p{index}" for index in range(plan.peers)]
        """Trainers of the beginning."""
        self.heal_s = HEAL_S + 3 * (plan.longest_round_s - plan.round_s)
        joiners = sum(fault.kind == "join" for fault in plan.faults)  # each copies a state, and is sent what it missed
        self.heal_s += (plan.peers + 2 * joiners + 3) * plan.longest_exchange_s
        if any(fault.how == NO_CLOCK for fault in plan.faults):
            self.heal_s += FORGET_S
        if plan.total_tokens:  # all of them, by a few peers
            rounds = plan.total_tokens / STEPS / max(1, plan.peers // 2)
            self.heal_s += rounds * (plan.longest_round_s + EXCHANGE_S + 4 * plan.delay_s)  # from `Begin` to the commit
        self.goal = 0
        """Version that all must come to after the faults."""
        self.halving: dict[str, str] = {}
        """Owners about to die of the fault "half", and how."""
        self.finished: dict[str, str] = {}
        """Digest of the last state, by lineage, of those that ended with `done`."""
        self.clockless: dict[str, int] = {}
        """Peers whose clock begins anew at each start, and how often they started so."""
        self.by_themselves: set[str] = set()
        """Simulated peers that go on from their disks without help, when they are started again."""
        self.faults: Counter[str] = Counter()
        self.lines: list[str] = []
        self._saying: tuple[float, str, str] | None = None
        self._lately: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=8))
        self.drifts = False
        """The state of a peer has changed in its memory."""
        self.hostile = any(fault.kind == "lie" for fault in plan.faults)
        self.replays = any(fault.kind == "replay" for fault in plan.faults)
        self.twice = self.replays or plan.loss > 0
        """Whether messages may come a second time."""
        self._root = Path()
        self._owner: dict[ProcessLoop, SimulatedProcess] = {}
        self._failed: set[str] = set()
        """Peers whose process ended with an error and is about to be started again."""
        self._lives = count()
        self._pieces = count()

    # ------------------------------------------------------------ time

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.timeline.now_s

    @torch.inference_mode()
    def run(self) -> Outcome:
        """Simulate until the faults are over and the run is well again, or an invariant is broken."""
        violation = ""
        try:
            with self.surroundings():
                self._begin()
                self._until(self.plan.quiet_s, lambda: False)
                self._heal()
        except Violation as broken:
            violation = str(broken)
        except Exception as crash:  # whatever the code under test raises is a finding, not ours to judge
            violation = f"crash: {type(crash).__name__} {crash} in {_where(crash)}"
        return Outcome(
            self.plan, self.timeline.events, self.now, self.versions(), self.faults,
            self.invariants.discarded_tokens, self.invariants.void_tokens, violation, self.lines,
        )  # fmt: skip

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Clock, threads and disk of this process are those of the simulation meanwhile."""
        with (
            TemporaryDirectory(prefix="diloco-virtual-", dir=memory_folder()) as root,
            going_by(self.timeline.clock_s),
            in_place(partial(SimulatedCondition, self.timeline)),
            on_disk(DiskOfTheMoment(self._disk_now)),
            quiet(),
            most_contributions(self.plan.most_peers),
        ):
            self._root = Path(root)
            try:
                yield
            finally:
                for loop, process in self._owner.items():
                    self.timeline.alone(loop, loop.bury)
                    process.close_files()

    def _disk_now(self) -> SimulatedDisk | None:
        running = self.timeline.running
        owner = self._owner.get(running) if running is not None and not running.dead else None
        return owner.disk if owner is not None else None

    def running(self) -> SimulatedProcess:
        """The simulated process to which something happens now."""
        assert self.timeline.running is not None
        return self._owner[self.timeline.running]

    def _until(self, end_s: float, well: Callable[[], bool]) -> bool:
        """Let events happen until this virtual time; True as soon as all is well."""
        return self.timeline.until(end_s, well, LOOK_S)

    # ------------------------------------------------------------ the plan

    def _begin(self) -> None:
        names = self.plan_names
        self.start(names[0], founder=True)
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
        self._until_well()
        SimulatedAftermath(self).check(self._honest())
        self.invariants.replayed()

    def _until_well(self) -> None:
        """Wait until all is well: without help for as long as the rules of the protocol promise that it comes."""
        self.goal, end_s = self._newest() + 2, self.now + self.heal_s
        last_s, look_s = end_s + MAX_HELP * self.heal_s, self.now + FIRST_LOOK_S
        while not self._until(min(look_s, end_s), self._well):
            look_s = self.now + OPERATOR_S
            needed = self.promise.person_needed()
            if needed and self.now < last_s:
                self.log_once("", f"a person is needed: {needed}")
                self.operator.look()
                end_s = self.now + self.heal_s
            elif self.now >= end_s:
                raise Violation("I7", self._not_well())

    def happens(self, fault: Fault) -> bool:
        """Whether a fault has a meaning in this simulation."""
        return True

    def mean_arrived(self, host: SimulatedProcess, event: m.MeanArrived) -> None:
        """A part of a mean has reached a simulated peer."""
        if self.halving:
            halve(self, host, event)

    def versions(self) -> int:
        """Versions of the simulation's run that closed."""
        return len(self.invariants.commits)

    def ends(self, host: SimulatedProcess, run: Run) -> None:
        """A simulated peer has seen the end of the run: all must have the same that took part in the final sync."""
        self.count("ends")
        if not self.plan.total_tokens:
            raise Violation("I2", f"{host.name} ends a run that has no end")
        line = host.line
        self.invariants.ended += [line.commit] if line.commit is not None else []
        lineage = line.commit.lineage if line.commit else ""
        late = host._leading.life.peer.ending.late  # type: ignore[union-attr]
        if not late and self.finished.setdefault(lineage, run.digest) != run.digest:
            raise Violation("I1", f"{host.name} ends with another state than others")
        if run.tokens < self.plan.total_tokens:
            raise Violation("I2", f"{host.name} ends after {run.tokens} tokens of {self.plan.total_tokens}")
        if line.trained.tokens:
            raise Violation("I2", f"{host.name} ends, and {line.trained.tokens} of its tokens are nowhere")

    def _well(self) -> bool:
        hosts = self._honest()
        if self.plan.total_tokens:
            return bool(self.finished) and not any(host.up for host in hosts)
        lineages = {host.machine.lineage for host in hosts if host.up}
        together = len(lineages) == 1 and all(host.up and host.machine.in_view for host in hosts)
        same = not any(host.drifted for host in hosts)
        well = together and same and not self._failed and min(host.machine.version for host in hosts) >= self.goal
        return well or self._all_left()

    def _all_left(self) -> bool:
        """Whether all trainers left in good order: nobody wants more of the run. Where one died, it is resumed, unless
        only a liar lives: nobody can tell that by its status."""
        trainers = [host for host in self.hosts.values() if not host.witness]
        honest = [host for host in trainers if host.name not in self.liars]
        if any(host.alive for host in honest):
            return False
        return all(host.gone for host in honest) or any(host.alive for host in trainers)

    def _not_well(self) -> str:
        stands = ", ".join(map(_standing, self._honest()))
        return f"{self.heal_s:g} s after the faults not all are in the view at version {self.goal}: {stands}"

    def _honest(self) -> list[SimulatedProcess]:
        return [host for host in self.hosts.values() if host.alive and host.name not in self.liars]

    def _newest(self) -> int:
        return max((host.machine.version for host in self.hosts.values() if host.alive and host.up), default=0)

    # ------------------------------------------------------------ peers

    def host(self, name: str) -> SimulatedProcess | None:
        return self.hosts.get(name)

    def at(self, member: Member) -> SimulatedProcess | None:
        """The simulated process at an address, if it lives."""
        return self.network.at(member.address)

    def living(self) -> Iterator[SimulatedProcess]:
        """Simulated processes that live."""
        return (host for host in (*self.hosts.values(), *self.ghosts) if host.alive)

    def lives(self, member: Member) -> bool:
        """Whether this very life of a simulated peer goes on."""
        return any(one.up and one.machine.me == member for one in self.living())

    def start(self, name: str, founder: bool = False, resumes: bool = False) -> SimulatedProcess:
        """Start a simulated process. `resumes`: from what its disk holds."""
        if name not in self.disks:
            self.disks[name] = SimulatedDisk(self._root, name)
        life = next(self._lives)
        host = self.hosts[name] = self.process_of(name, life, self._address(name, life), founder, resumes)
        self._owner[host.loop] = host
        host.loop.offset_s = CLOCK_S
        self.machines.starts(host)
        self.endings.begins(host)
        if name in self.clockless:
            self.clockless[name] += 1
            host.loop.offset_s = self.clockless[name] * NO_CLOCK_S - self.now
        host.begin()
        return host

    def process_of(self, name: str, life: int, address: str, founder: bool, resumes: bool) -> SimulatedProcess:
        """A new process of this simulation."""
        return SimulatedProcess(self, name, life, address, founder, resumes)

    def start_second(self, first: SimulatedProcess) -> None:
        """Start another process in the folder of a simulated peer that lives. It must not get far."""
        life = next(self._lives)
        second = self.process_of(first.name, life, f"{first.name}:{life + 2}", founder=False, resumes=True)
        second.first, second.disk = first, first.disk
        self._owner[second.loop] = second
        self.endings.begins(second)
        second.begin()

    def _address(self, name: str, life: int) -> str:
        """The address of a simulated process: that of the one before it, or another."""
        same = f"{name}:1"
        free = not any(ghost.alive and ghost.address == same for ghost in self.ghosts)
        return same if self.plan.fixed_addresses and free else f"{name}:{life + 2}"

    def join(self, name: str, with_disk: bool) -> None:
        """Start a simulated peer, which joins through any member that answers; it tries until one does."""
        self._failed.discard(name)
        known = self.hosts.get(name)
        if known is not None and known.alive:
            return
        if name in self.disks and not with_disk:
            self.disks[name] = self.disks[name].replaced()
        self.log(name, f"starts{' with its disk' if with_disk else ''}")
        self.start(name, resumes=with_disk)

    def doors(self, process: SimulatedProcess) -> list[str]:
        """Addresses of others that a simulated peer may have heard of, in any order."""
        others = [host.address for host in self.hosts.values() if host.name != process.name]
        return self.dice.sample(others, len(others))

    def started_again(self, process: SimulatedProcess, with_disk: bool) -> None:
        """A supervisor starts a simulated process again that ended with an error."""
        if self.hosts.get(process.name) is process:
            self._failed.add(process.name)
            self.after(RETRY_S, self.join, process.name, with_disk)

    def directory(self, asker: SimulatedProcess) -> list[Member]:
        """Simulated peers that announced themselves, as far as they can be reached."""
        others = [host for host in self.hosts.values() if host is not asker and host.alive and host.up]
        return [host.machine.me for host in others if self.network.connected(asker.name, host.name)]

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

    def log_once(self, name: str, what: str) -> None:
        """Write a line to the simulation's transcript; one that repeats only the first time."""
        if what not in self._lately[name]:
            self._lately[name].append(what)
            self.log(name, what)

    def _log_sent(self, host: SimulatedProcess, envelope: m.Envelope, to: Member) -> None:
        """Write one transcript line for a simulated message to several peers at once, none for one only repeated."""
        what = transcript.body(envelope.body)
        moment = (self.now, host.name, what)
        if moment == self._saying:
            self.lines[-1] = transcript.said_also_to(self.lines[-1], to.peer)
        elif what not in self._lately[host.name]:
            self._lately[host.name].append(what)
            self._saying = moment
            self.log(host.name, transcript.said(what, to.peer))

    def log_reply(self, envelope: m.Envelope, to: SimulatedProcess, reply: m.Reply) -> None:
        """Write to the transcript that a simulated peer refused a message."""
        if self.record and reply not in (m.Reply.OK, m.Reply.STALE, m.Reply.REPLAYED):
            self.log_once(to.name, f"refuses {transcript.body(envelope.body)} of {envelope.sender.peer}: {reply.name}")

    def log_commit(self, host: SimulatedProcess, commit: Commit) -> None:
        """Write to the transcript that a simulated peer is the first to close a version."""
        self.log(host.name, transcript.closed(commit))

    def performed(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Write to the transcript an effect that a simulated peer is about to carry out."""
        if not self.record:
            return
        match effect:
            case fx.Send(to, envelope) if not isinstance(envelope.body, transcript.QUIET):
                self._log_sent(host, envelope, to)
            case fx.Note(reason, routine) if not routine:
                self.log_once(host.name, reason)


def _standing(host: SimulatedProcess) -> str:
    if not host.up:
        return f"{host.name} joining"
    machine = host.machine
    where = "in" if machine.in_view else "outside"
    return f"{host.name} at {machine.version} {where} the view of {machine.lineage} ({machine.reason})"


def _where(crash: Exception) -> str:
    frame = traceback.extract_tb(crash.__traceback__)[-1]
    return f"{frame.name}, {Path(frame.filename).name} line {frame.lineno}"


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged meanwhile: what dies in the middle of something complains of it, and of what it had not
    begun."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        logging.disable(before)


@cache
def memory_folder() -> str | None:
    """A folder in memory, where this system has one."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None
