"""The chaos drill: peers of the production path under faults drawn from a seed, then a clean run of as many tokens.

The first part of the drill has no faults; what its peers train per second is what a peer is worth later.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from diloco.accounts.left_off import voters_in
from diloco.base.clock import monotonic_s, unix_s
from diloco.base.errors import DilocoError, UsageError
from diloco.simulate.chaos.fleet import POLL_S, ChaosFleet, ChaosLife, empty_folder
from diloco.simulate.chaos.network import ChaosNetwork, Rule
from diloco.simulate.chaos.verdict import DrillFault, has_rate, verdict

TOGETHER_S = 90.0
"""Without faults: until one version counts everybody; or two show what a peer trains in a second, and enough vote."""
SAY_EVERY_S = 10.0
SLOW_BYTES_PER_S = 100_000
FLIPS = 0.02
"""Each flip ends a TLS connection with all that it carried: at 5 % of the reads no state of a few MB gets through."""


@dataclass(frozen=True)
class DrillOptions:
    """Options of a chaos drill on the command line."""

    contract: Path
    directory: Path
    peers: int = 8
    minutes: float = 25.0
    quiet_s: float = 60.0
    """Without faults, to begin with; longer where two versions take longer."""
    seed: int = 0
    step_s: float = 0.3
    """Time of an inner step, so that the machine's cores are not what limits the peers."""
    every_s: tuple[float, float] = (9.0, 14.5)
    """From one fault to the next."""
    apart: bool = False
    """Each peer in a network namespace of its own, behind forwarders."""
    clean: bool = True
    """Whether to train a clean run afterwards."""


KINDS: Final = {
    "kill": 3, "kill, disk lost": 2, "stop": 3, "leave": 2, "cut off": 2, "cut one way": 2, "split": 1, "slow link": 2,
    "corrupt bytes": 2, "tunnel shut": 2, "filtered": 2, "reset": 2,
}  # fmt: skip
"""Weight of each kind of fault in the draw. The founder dies once, early."""
GENTLE: Final = ("slow link", "corrupt bytes", "reset")
"""Peers under these go on training, so that nobody else must be spared meanwhile."""


def run_drill(options: DrillOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a chaos drill and its clean run; returns the row of the results table. Raises DilocoError when the peers do
    not even get together."""
    if options.peers < 3:
        raise UsageError("chaos takes at least 3 peers", "with two, one is no majority")
    empty_folder(options.directory)
    network = ChaosNetwork(options.seed, options.apart)
    overrides = [f"membership.start_peers={options.peers}"]
    site = [f"device.step_s={options.step_s}", "device.threads=1"]
    fleet = ChaosFleet(options.contract, overrides, options.directory / "chaos", site, network)
    drill = ChaosDrill(options, fleet, network, say)
    try:
        drill.run()
    finally:
        fleet.end()
        network.close()
    result = verdict(fleet, drill.faults, drill.quiet_until_s, drill.ended_s, drill.problems)
    clean = clean_run(options, result["committed_tokens"], say) if options.clean else {}
    return {"minutes": options.minutes, "peers": options.peers, "seed": options.seed, **result, **clean}


def clean_run(options: DrillOptions, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The run beside a chaos drill: as many peers and tokens, no faults, at full speed; returns held-out loss."""
    say(f"clean run of {tokens:,} tokens")
    overrides = [f"membership.start_peers={options.peers}", f"run.total_tokens={tokens}"]
    fleet = ChaosFleet(options.contract, overrides, options.directory / "clean", ["device.threads=1"], None)
    try:
        founder = fleet.found("p0")
        for number in range(1, options.peers):
            fleet.join(f"p{number}", founder)
        limit_s = 120.0 + 60.0 * options.minutes
        fleet.until(lambda: all(life.of("end") for life in fleet.lives), "the clean run is done", limit_s)
        ends = [life.of("end")[-1] for life in fleet.lives]
    finally:
        fleet.end()
    return {"clean_val_loss": ends[0]["val_loss"], "clean_tokens": ends[0]["tokens"]}


def spare_votes(healthy: Sequence[ChaosLife]) -> int:
    """Voters that a chaos drill may take from these peers while the others still decide, by the ledger of each: where
    the only voter dies for good, a person is needed. Joiners vote a few versions after they came."""
    names = {life.name for life in healthy}
    known = [voters_in(life.directory) for life in healthy]
    return min((len(voters & names) - (len(voters) // 2 + 1) for voters in known), default=0)


@dataclass
class ChaosDrill:
    """One chaos drill: faults drawn from the seed, and their mending."""

    options: DrillOptions
    fleet: ChaosFleet
    network: ChaosNetwork
    say: Callable[[str], None]
    faults: list[DrillFault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    quiet_until_s: float = 0.0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.options.seed)
        self._names = (f"p{number}" for number in itertools.count())
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._said_s = 0.0
        self._does: dict[str, Callable[[DrillFault], None]] = {
            "kill": partial(self._kill, resume=True),
            "kill, disk lost": partial(self._kill, resume=False),
            "founder dies": self._replace_founder,
            "stop": self._stop,
            "leave": self._leave,
            "cut off": partial(self._cut, ways=2),
            "cut one way": partial(self._cut, ways=1),
            "split": self._split,
            "slow link": partial(self._degrade, passes=True, bytes_per_s=SLOW_BYTES_PER_S),
            "corrupt bytes": partial(self._degrade, flips=FLIPS),
            "tunnel shut": partial(self._close, how=self.network.shut),
            "filtered": partial(self._close, how=self.network.filter),
            "reset": self._reset,
        }

    def run(self) -> None:
        """Run the whole drill: gather the peers, a quiet part, the faults, all peers together again, the end."""
        names = list(itertools.islice(self._names, self.options.peers))
        founder = self.fleet.found(names[0])
        for name in names[1:]:
            self.fleet.join(name, founder)
        self.fleet.until(lambda: all(life.counted for life in self.fleet.lives), "a version counts everybody", 180.0)
        self.say(f"{len(names)} peers are together")
        self._live_until(monotonic_s() + self.options.quiet_s)
        ready = lambda: has_rate(self.fleet.lives, len(names)) and spare_votes(self._healthy()) > 0  # noqa: E731
        if not self._live_until(monotonic_s() + TOGETHER_S, ready):
            cause = "no two versions without faults, or too few of the peers vote"
            raise DilocoError(cause, f"see the logs below {self.options.directory}")
        self.quiet_until_s = unix_s()
        end_s = monotonic_s() + 60.0 * self.options.minutes
        self._after(0.0, self._next_fault)
        self._live_until(end_s)
        self._mend_all()
        self._together()
        self.ended_s = unix_s()
        for life in self.fleet.living():
            self.fleet.ask_to_leave(life)
        self.fleet.until(lambda: not any(life.child.exit_code is None for life in self.fleet.lives), "all left", 60.0)

    # ------------------------------------------------------------ time

    def _live_until(self, end_s: float, seen: Callable[[], bool] = lambda: False) -> bool:
        """Let the drill go on until then, or until the condition holds. Returns whether it does."""
        while not (holds := seen()) and monotonic_s() < end_s:
            self._live()
            time.sleep(POLL_S)
        return holds

    def _live(self) -> None:
        """Act on faults that are due, read the drilled peers' events, and note which faults' victims are back."""
        while self._later and self._later[0][0] <= monotonic_s():
            heapq.heappop(self._later)[2]()
        try:
            self.fleet.poll()
        except DilocoError as error:  # a peer ended unasked: a violation, and its place is filled all the same
            self.problems.append(error.cause)
            self.say(f"VIOLATION {error.cause}")
            for life in self.fleet.lives:
                if not life.ending and life.child.exit_code:
                    self.fleet.died(life)
                    self._join_new()
        for fault in self.faults:
            if fault.ended_s and not fault.back_s and all(map(partial(self._counted_since, fault), fault.victims)):
                fault.back_s = unix_s()
        if monotonic_s() - self._said_s > SAY_EVERY_S:
            self._said_s = monotonic_s()
            version = max((life.version["version"] for life in self.fleet.lives if life.version), default=0)
            back = sum(bool(fault.back_s) for fault in self.faults)
            living = sum(not life.stopped for life in self.fleet.living())
            self.say(f"version {version}, {living} peers run, faults {len(self.faults)}, recovered {back}")

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (monotonic_s() + seconds, next(self._numbers), action))

    # ------------------------------------------------------------ faults

    def _next_fault(self) -> None:
        """Draw a fault of the drill that leaves a majority at work; when there is none, look again soon."""
        healthy = self._healthy()
        spare = min(len(healthy) - (self.options.peers // 2 + 1), spare_votes(healthy))
        kinds = [kind for kind in KINDS if self._bearable(kind, healthy, spare)]
        if not kinds:
            self._after(0.5, self._next_fault)
            return
        kind = self._dice.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        count = len(healthy) // 2 if kind == "split" else 1
        victims = tuple(sorted(life.name for life in self._dice.sample(healthy, count)))
        founder_died = any(fault.kind == "founder dies" for fault in self.faults)
        if len(self.faults) >= 2 and spare > 0 and self.fleet.life("p0") in healthy and not founder_died:
            kind, victims = "founder dies", ("p0",)
        fault = DrillFault(kind, victims, unix_s())
        self.faults.append(fault)
        self.say(f"fault {len(self.faults)}: {kind}: {', '.join(victims)}")
        self._does[kind](fault)
        self._after(self._dice.uniform(*self.options.every_s), self._next_fault)

    def _bearable(self, kind: str, healthy: Sequence[ChaosLife], spare: int) -> bool:
        if kind in GENTLE:
            return bool(healthy)
        return len(healthy) == len(self.fleet.living()) if kind == "split" else spare > 0

    def _healthy(self) -> list[ChaosLife]:
        """The drill's peers at work that no fault holds up and that are back from the last one."""
        busy = {
            name for fault in self.faults if not fault.back_s and fault.kind not in GENTLE for name in fault.victims
        }
        return [life for life in self.fleet.living() if life.name not in busy and life.counted and not life.stopped]

    def _counted_since(self, fault: DrillFault, name: str) -> bool:
        life = self.fleet.life(name)
        if life.ending:
            return True  # of another fault, which is waited for instead
        version = life.version
        return version is not None and bool(version["own"]) and version["time"] > fault.ended_s

    def _mend_all(self) -> None:
        """Mend at once all faults of the drill that were to be mended later."""
        for _, _, action in sorted(self._later):
            if action != self._next_fault:
                action()
        self._later.clear()

    def _together(self) -> None:
        """Wait until one version counts all living peers of the drill (I7)."""
        mended_s = unix_s()

        def all_counted() -> bool:
            last = [life.version for life in self.fleet.living()]
            return all(version is not None and version["own"] and version["time"] > mended_s for version in last)

        if self._live_until(monotonic_s() + TOGETHER_S, all_counted):
            self.say("all peers are together again")
        else:
            self.problems.append(f"not all peers were counted {TOGETHER_S:g} s after the last fault was mended")

    # ------------------------------------------------------------ what is done to them

    def _kill(self, fault: DrillFault, resume: bool) -> None:
        """The fault "kill": kill a peer, and start it again. Without `resume` its disk is lost."""
        name = fault.victims[0]
        self.fleet.kill(self.fleet.life(name))
        self._mend_later(fault, 1.0, 6.0, lambda: self.fleet.join(name, *self._entries(), resume=resume))

    def _replace_founder(self, fault: DrillFault) -> None:
        """The fault "founder dies": kill the founder for good; another peer joins through another member."""
        self.fleet.kill(self.fleet.life(fault.victims[0]))
        self._after(1.0, partial(self._join_instead, fault))

    def _leave(self, fault: DrillFault) -> None:
        self.fleet.ask_to_leave(self.fleet.life(fault.victims[0]))
        self._after(self._dice.uniform(1.0, 6.0), partial(self._join_instead, fault))

    def _join_instead(self, fault: DrillFault) -> None:
        """A new peer takes the victim's place: the fault is over once a version counts it."""
        fault.victims = (self._join_new().name,)
        fault.ended_s = unix_s()

    def _join_new(self) -> ChaosLife:
        return self.fleet.join(next(self._names), *self._entries())

    def _entries(self) -> list[ChaosLife]:
        """Two members that a joiner of the drill is given: a fault may strike one before it is asked."""
        members = self._healthy() or self.fleet.living()
        return self._dice.sample(members, min(2, len(members)))

    def _stop(self, fault: DrillFault) -> None:
        life = self.fleet.life(fault.victims[0])
        self.fleet.stop(life)
        self._mend_later(fault, 5.0, 20.0, partial(self.fleet.resume, life))

    def _cut(self, fault: DrillFault, ways: int) -> None:
        """The fault "cut off": cut a peer off from the others, in both directions or in one."""
        fault.cut = fault.victims
        victims = frozenset(fault.victims)
        rules = [Rule(victims, None, passes=False), Rule(None, victims, passes=False)]
        self._for_a_while(fault, rules if ways == 2 else [self._dice.choice(rules)])

    def _split(self, fault: DrillFault) -> None:
        """The fault "split": cut the network between two halves of the peers."""
        half = frozenset(fault.victims)
        rest = frozenset(life.name for life in self.fleet.living()) - half
        fault.cut = tuple(sorted(half | rest))
        self._for_a_while(fault, [Rule(half, rest, passes=False), Rule(rest, half, passes=False)])

    def _degrade(self, fault: DrillFault, **how: Any) -> None:
        """The faults "slow link" and "corrupt bytes": slow the bytes from and to a peer, or damage some."""
        victims = frozenset(fault.victims)
        self._for_a_while(fault, [Rule(victims, None, **how), Rule(None, victims, **how)])

    def _close(self, fault: DrillFault, how: Callable[[Iterable[str]], None]) -> None:
        """The faults "tunnel shut" and "filtered": whoever dials a peer is refused, as by a machine where nothing
        listens, or hears nothing, as from behind a firewall."""
        fault.cut = fault.victims
        how(fault.victims)
        self._mend_later(fault, 5.0, 15.0, partial(self.network.reopen, fault.victims))

    def _reset(self, fault: DrillFault) -> None:
        """The fault "reset": all connections of a peer break once."""
        self.network.reset(fault.victims)
        fault.ended_s = unix_s()

    def _for_a_while(self, fault: DrillFault, rules: Sequence[Rule]) -> None:
        self.network.impose(rules)
        self._mend_later(fault, 5.0, 15.0, partial(self.network.lift, rules))

    def _mend_later(self, fault: DrillFault, min_s: float, max_s: float, undo: Callable[[], object]) -> None:
        def mend() -> None:
            undo()
            fault.ended_s = unix_s()

        self._after(self._dice.uniform(min_s, max_s), mend)
