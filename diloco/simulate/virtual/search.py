"""Many seeds of the simulator, on all cores; and one seed, written out in full."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diloco.base.clock import monotonic_s
from diloco.base.errors import ConfigError, UsageError
from diloco.kernels.build import use_compiled
from diloco.simulate.local.processes import die_with_parent
from diloco.simulate.virtual import planted
from diloco.simulate.virtual.gossip import GossipWorld
from diloco.simulate.virtual.plans.draw import SIZES, draw
from diloco.simulate.virtual.plans.plan import FaultPlan, parse
from diloco.simulate.virtual.world import Outcome, SimulatedWorld, quiet

BATCH = 20
"""Seeds that a process takes at a time."""
MAX_SHOWN = 20
RULE = "----"
"""Between a plan and its transcript."""


@dataclass(frozen=True)
class SeedOptions:
    """Options for drawing the seeds' plans of faults."""

    policy: str = ""
    """Empty: as the seed says."""
    without_majority: str = ""
    bug: str = ""
    """A planted bug, see `diloco.simulate.virtual.planted`."""
    speeds: str = ""
    """`LOW:HIGH`: the slowest and the fastest that a peer may be."""
    size: str = "usual"
    """One of `diloco.simulate.virtual.plans.plan.SIZES`."""

    def draw(self, seed: int) -> FaultPlan:
        """A seed's plan of faults, with these options."""
        speeds = speed_range(self.speeds) if self.speeds else None
        return draw(seed, self.policy, self.without_majority, speeds, self.size)

    def check(self) -> None:
        """Raises UsageError where `diloco virtual` has no such option."""
        known = {
            "--policy": (self.policy, ("", "sync", "quorum", "async", "gossip")),
            "--without-majority": (self.without_majority, ("", "wait", "continue")),
            "--size": (self.size, tuple(SIZES)),
        }
        for option, (value, values) in known.items():
            if value not in values:
                raise UsageError(f"{option} is {value!r}", f"known: {', '.join(filter(None, values))}")
        if self.speeds:
            speed_range(self.speeds)


@dataclass
class SeedTally:
    """Sum over many seeds of the simulator."""

    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    versions: int = 0
    discarded_tokens: int = 0
    void_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    """Whether these are only the first of the seeds that were asked for."""
    waited_s: float = 0.0
    """Seconds since the last seed ended, when the search was interrupted: a seed that hangs shows here."""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.virtual_s += outcome.virtual_s
        self.versions += outcome.versions
        self.discarded_tokens += outcome.discarded_tokens
        self.void_tokens += outcome.void_tokens
        self.faults += outcome.faults
        if outcome.violation:
            self.violations.append({"seed": outcome.plan.seed, "violation": outcome.violation})

    def merge(self, other: SeedTally) -> None:
        """Add the tally of other seeds of the simulator."""
        for name in ("seeds", "events", "virtual_s", "versions", "discarded_tokens", "void_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.violations += other.violations

    def as_json(self, command: str, seconds: float) -> dict[str, Any]:
        """The simulator's tally as the content of the file that `--json FILE` names."""
        return {
            "command": command,
            "seeds": self.seeds,
            "interrupted": self.interrupted,
            "waited_s": round(self.waited_s, 1),
            "events": self.events,
            "faults": dict(sorted(self.faults.items())),
            "violations": len(self.violations),
            "violated": sorted(self.violations, key=lambda entry: int(entry["seed"])),
            "seconds": round(seconds, 1),
            "virtual_s": round(self.virtual_s),
            "versions": self.versions,
            "discarded_tokens": self.discarded_tokens,
            "void_tokens": self.void_tokens,
        }


def world_of(plan: FaultPlan, record: bool = False) -> SimulatedWorld:
    """The simulation of a plan of faults."""
    return (GossipWorld if plan.policy == "gossip" else SimulatedWorld)(plan, record)


def run_seeds(seeds: Iterable[int], choice: SeedOptions = SeedOptions(), until_found: bool = False) -> SeedTally:
    """Simulate these seeds in this process; with `until_found`, none after the first that breaks an invariant."""
    tally = SeedTally()
    with planted.plant(choice.bug) if choice.bug else nullcontext(), uncollected():
        for seed in seeds:
            tally.add(world_of(choice.draw(seed)).run())
            if until_found and tally.violations:
                break
    return tally


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector's visits, a tenth of the time, out of simulations: it comes at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        with quiet():  # of what the dead had not begun
            gc.collect()


def search(
    seeds: Sequence[int],
    choice: SeedOptions,
    on_batch: Callable[[int, int, int], None],
    jobs: int | None = None,
    until_found: bool = False,
) -> dict[str, Any]:
    """Simulate seeds, which ascend, in `jobs` processes; None: one for each core.

    `on_batch` hears of seeds done, seeds in all, violations. Returns what `--json FILE` writes; after a
    KeyboardInterrupt, of the seeds that were done until then.
    """
    started_s = ended_s = monotonic_s()
    size = 1 if jobs == 1 else BATCH  # in this process nothing is gained by more, and an interruption loses less
    batches = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    tally = SeedTally()
    try:
        with _processes(jobs) as run:
            for part in run(partial(_run_batch, choice, until_found), batches):
                tally.merge(part)
                ended_s = monotonic_s()
                on_batch(tally.seeds, len(seeds), len(tally.violations))
                if until_found and tally.violations:
                    break
    except KeyboardInterrupt:
        tally.interrupted, tally.waited_s = True, monotonic_s() - ended_s
    options = [f"--policy {choice.policy}"] if choice.policy else []
    options += [f"--without-majority {choice.without_majority}"] if choice.without_majority else []
    options += [f"--speeds {choice.speeds}"] if choice.speeds else []
    options += ["--until-found"] if until_found else []
    options += [f"--size {choice.size}"] if choice.size != "usual" else []
    named = f"{seeds.start}:{seeds.stop}" if isinstance(seeds, range) else ",".join(map(str, seeds))
    return tally.as_json(" ".join(["diloco virtual --seeds", named, *options]), monotonic_s() - started_s)


def read_seeds(text: str) -> Sequence[int]:
    """The simulator's seeds in `A:B`, or in a list as `7,12,20:30`, ascending. Raises UsageError."""
    ranges = [_seed_range(piece, text) for piece in text.split(",")]
    return ranges[0] if len(ranges) == 1 else sorted(set().union(*ranges))


def _seed_range(piece: str, text: str) -> range:
    first, colon, last = piece.partition(":")
    if first.isdigit() and not colon:
        return range(int(first), int(first) + 1)
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise UsageError(f"--seeds is {text!r}", "give A:B with A < B, for example 0:1000, or a list as 7,12,20:30")
    return range(int(first), int(last))


def speed_range(text: str) -> tuple[float, float]:
    """The simulated peers' speeds in `LOW:HIGH`. Raises UsageError."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low <= high:
        raise UsageError(f"--speeds is {text!r}", "give a range as LOW:HIGH, for example 0.1:1")
    return low, high


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report on the simulated seeds for people."""
    after = "interrupted after " if report["interrupted"] else ""
    lines = [
        f"{after}{report['seeds']:,} seeds, {report['events']:,} events, {report['versions']:,} versions, "
        f"{report['virtual_s']:,} virtual seconds in {report['seconds']:,} s",
        f"faults: {', '.join(f'{count:,} {kind}' for kind, count in report['faults'].items())}",
        f"{report['discarded_tokens']:,} tokens discarded, {report['void_tokens']:,} void with their lineage",
        f"{report['violations']} violations",
    ]
    shown = [f"  seed {entry['seed']}: {entry['violation']}" for entry in report["violated"][:MAX_SHOWN]]
    again = [f"see one:  diloco virtual --seed {report['violated'][0]['seed']}"] if shown else []
    return [*lines, *shown, *again]


def _alone() -> None:
    """Prepare a process to simulate on one thread: there is one for every core. Imports stay, and are not collected."""
    torch.set_num_threads(1)
    use_compiled()
    gc.collect()
    gc.freeze()


def _get_ready() -> None:
    """Prepare a process of the pool that simulates seeds: it ends with the one that started it."""
    die_with_parent(signal.SIGKILL)
    _alone()


@contextmanager
def _processes(jobs: int | None) -> Iterator[Callable[..., Iterator[SeedTally]]]:
    """A `map` over batches of seeds, in their order: in this process for one job, else in a pool."""
    if jobs == 1:
        _alone()
        yield map
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the pool inherits: Ctrl-C is for us
    with multiprocessing.get_context("spawn").Pool(jobs or os.cpu_count(), initializer=_get_ready) as pool:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        yield pool.imap


def _run_batch(choice: SeedOptions, until_found: bool, seeds: Sequence[int]) -> SeedTally:
    """Simulate a batch of seeds."""
    return run_seeds(seeds, choice, until_found)


# ---------------------------------------------------------------- one plan


def read_plan(path: Path) -> FaultPlan:
    """The plan of faults at the head of a text; a transcript may follow after a line of dashes. Raises UsageError."""
    try:
        return parse(path.read_text().partition(f"\n{RULE}\n")[0])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a file that begins with a plan") from error


def narrate(plan: FaultPlan) -> Outcome:
    """Simulate a plan of faults, and write down what happens."""
    _alone()
    return _outcome(plan, record=True)


def explain(plan: FaultPlan) -> Outcome:
    """The shortest plan of faults found that fails like this one, and what happens in it."""
    return narrate(shrink(plan))


def outcome_lines(outcome: Outcome) -> list[str]:
    """A plan of faults and the transcript of its simulation."""
    end = f"VIOLATION of {outcome.violation}" if outcome.violation else "all invariants hold"
    return [str(outcome.plan), RULE, *outcome.lines, end]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """A plan of faults and the transcript of its simulation, as JSON."""
    return {
        "plan": str(outcome.plan).splitlines(),
        "violation": outcome.violation,
        "events": outcome.events,
        "faults": dict(sorted(outcome.faults.items())),
        "transcript": list(outcome.lines),
    }


# ---------------------------------------------------------------- planted bugs


@dataclass(frozen=True)
class Caught:
    """A planted bug and the number of simulated seeds after which it was noticed."""

    bug: str
    what: str
    seeds: int
    """0: it was not noticed."""
    violation: str


def catch_planted(max_seeds: int, bugs: Sequence[str] = ()) -> Iterator[Caught]:
    """Plant each bug in turn in the simulated code, and try seeds until an invariant breaks."""
    for bug in bugs or planted.BUGS:
        yield _catch(bug, max_seeds)


def _catch(bug: str, max_seeds: int) -> Caught:
    choice = SeedOptions(bug=bug)
    for seed in filter(lambda seed: planted.shows(bug, choice.draw(seed)), range(max_seeds)):
        tally = run_seeds([seed], choice)
        if tally.violations:
            return Caught(bug, planted.BUGS[bug].what, seed + 1, str(tally.violations[0]["violation"]))
    return Caught(bug, planted.BUGS[bug].what, 0, "")


# ---------------------------------------------------------------- a failure made short: without what can be left out

MAX_RUNS = 300


def shrink(plan: FaultPlan) -> FaultPlan:
    """The shortest plan of faults found that breaks the same invariant; `plan` itself when it breaks none."""
    broken = kind_of(plan)

    def fails(shorter: FaultPlan) -> bool:
        try:
            return kind_of(shorter) == broken
        except ConfigError:  # no contract allows it
            return False

    return _shrink(plan, fails) if broken else plan


def kind_of(plan: FaultPlan) -> str:
    """The invariant that breaks when the plan of faults is simulated; empty if none."""
    return _outcome(plan).violation.partition(":")[0]


def _outcome(plan: FaultPlan, record: bool = False) -> Outcome:
    """Simulate a plan of faults. Peers that a violation cuts short in the middle of something end unheard."""
    with quiet(), uncollected():
        return world_of(plan, record).run()


def _shrink(plan: FaultPlan, fails: Callable[[FaultPlan], bool]) -> FaultPlan:
    runs = 0
    shorter = True
    while shorter and runs < MAX_RUNS:
        shorter = False
        for candidate in _simpler(plan):
            runs += 1
            if fails(candidate):
                plan, shorter = candidate, True
                break
    return plan


SETTINGS = (
    "loss", "witnesses", "fragments", "merge", "overlap", "feedback", "codec", "optimizer", "weighting", "uplinks",
    "backlog", "sized_by", "speeds", "policy", "proven", "delay_s", "most_peers", "radial", "fixed_addresses",
    "aggregation", "bandwidth", "stragglers", "total_tokens", "calm_s", "ranks", "elements",
)  # fmt: skip


def _simpler(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Plans of faults with one thing less, the most telling first."""
    for index in range(len(plan.faults)):
        yield replace(plan, faults=(*plan.faults[:index], *plan.faults[index + 1 :]))
    default = FaultPlan()
    for name in SETTINGS:
        if name == "total_tokens" and plan.policy == "gossip":
            continue  # such a run ends
        if getattr(plan, name) != getattr(default, name):
            yield replace(plan, **{name: getattr(default, name)})
    used = {peer for fault in plan.faults for peer in fault.peer.split("+")}
    if plan.peers > 2 and f"p{plan.peers - 1}" not in used:
        yield replace(plan, peers=plan.peers - 1)
    for index, fault in enumerate(plan.faults):
        changes = [replace(fault, at_s=float(round(fault.at_s)))] if fault.at_s != round(fault.at_s) else []
        changes += [replace(fault, for_s=round(fault.for_s / 2, 1))] if fault.for_s > 1 else []
        for change in changes:
            yield replace(plan, faults=(*plan.faults[:index], change, *plan.faults[index + 1 :]))
