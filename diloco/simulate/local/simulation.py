"""`diloco simulate`: N real peers as processes on loopback, through the code path of a real run, and baselines.

Each peer is a `diloco peer` of its own: the first founds, the others join by its ticket. What they write is merged
into one folder, from which the report is made.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from pathlib import Path
from typing import Any, TextIO

from diloco.base.clock import monotonic_s
from diloco.base.errors import DilocoError, Interrupted, ResourceError, UsageError
from diloco.base.readable import readable_loss
from diloco.config.contract import Contract
from diloco.config.load import load_contract, load_site
from diloco.observe.event_log import read_lines, read_on
from diloco.observe.events import BaselineStep, Ended, Stamped, from_json
from diloco.observe.report import write_plot, write_report
from diloco.observe.run_folder import read_state
from diloco.observe.run_state import RunState, mean
from diloco.observe.screen import Screen, summary_table
from diloco.simulate.local.processes import SimulationProcess, end_all

START_S = 120.0
"""Seconds for a founder to start listening: it imports torch and builds the model, on a machine that may be busy."""
OURS = frozenset({"contract.json", "summary.json", "events.jsonl", "report.html", "plot.png"})
OUR_FOLDERS = re.compile(r"p\d+|ddp|average|alone|sync")
ENDED_BY_SIGNAL = frozenset(code for number in (signal.SIGINT, signal.SIGTERM) for code in (-number, 128 + number))
"""Exit codes of a peer that was asked to leave before it could."""
POLL_S = 0.1


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `diloco simulate` on the command line."""

    contract: Path
    peers: int
    compare: tuple[str, ...] = ()
    out: Path | None = None
    site: Path | None = None
    contract_overrides: Sequence[str] = ()
    site_overrides: Sequence[str] = ()
    speeds: tuple[float, ...] = ()
    """Speed of each peer, as `device.speed`; empty: all 1."""


@dataclass(frozen=True)
class SimulationResult:
    """Results of `diloco simulate` and the folder that holds its files."""

    summary: dict[str, Any]
    text: str
    exit_code: int


@dataclass(frozen=True)
class SimulationPlan:
    """One run of `diloco simulate` on this machine: which contract, how many peers, where."""

    contract_path: Path
    contract: Contract
    overrides: tuple[str, ...]
    site: Path | None
    site_overrides: tuple[str, ...]
    data_root: Path
    peers: int
    directory: Path
    title: str
    threads: int
    """Threads of each process: also one peer alone gets no more than it would beside the others."""
    speeds: tuple[float, ...]
    """By peer (`device.speed`)."""

    @property
    def gossips(self) -> bool:
        """Whether each peer of the simulation has a state of its own."""
        return self.contract.membership.policy == "gossip"


COMPARISONS = ("ddp", "average", "alone", "sync")
SETTLED = {"membership.start_peers": "--peers", "peer.name": "simulate: p0, p1, ...", "storage.directory": "--out"}
"""Keys of contract and site that a simulation sets, and the option it does so by."""


def run_simulation(options: SimulateOptions, stop: Callable[[], bool], out: TextIO, live: bool) -> SimulationResult:
    """Simulate, compare, write summary.json, events.jsonl, plot.png and report.html. Raises DilocoError."""
    unknown = set(options.compare) - set(COMPARISONS)
    if unknown:
        raise UsageError(f"cannot compare with {', '.join(sorted(unknown))}", f"known: {', '.join(COMPARISONS)}")
    if len(set(options.speeds)) > 1 and "ddp" in options.compare:
        raise UsageError("ddp has no peers of different speeds", "its time is the slowest's: leave out --compare ddp")
    plan = _plan(options)
    if plan.gossips and "average" in options.compare:
        raise UsageError("gossip averages in pairs as it is", "leave out --compare average")
    _prepare(plan, options.compare)
    state = _train_peers(plan, stop, out, live)
    if stop() and not state.ends:
        raise Interrupted("stopped before anything was trained")
    summary = _summary(plan, state)
    for name in options.compare:
        compared = None if stop() else _compare(name, plan, stop, out, live)
        if compared is None:
            out.write(f"stopped: {name} was not trained{' to its end' if (plan.directory / name).exists() else ''}\n")
        else:
            summary["comparisons"][name] = compared
    if "ddp" in summary["comparisons"]:
        summary["baseline"] = {"name": "ddp", **summary["comparisons"]["ddp"]}
    (plan.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_plot(plan.directory)
    page = write_report(plan.directory)
    text = f"\n{summary_table(summary)}\nreport: {page}"
    return SimulationResult(summary, text, 1 if summary["digests_agree"] is False else 0)


# ---------------------------------------------------------------- preparing


def read_speeds(text: str, peers: int | None) -> tuple[float, ...]:
    """The simulated peers' speeds in a text like `1,0.5`; empty: none are given. Raises UsageError."""
    try:
        speeds = tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        speeds = (0.0,)
    if not all(0 < speed <= 1 for speed in speeds):
        raise UsageError(f"--speeds is {text!r}", "give each peer a number above 0, at most 1, as in 1,1,0.5,0.25")
    if peers and speeds and len(speeds) != peers:
        raise UsageError(f"{len(speeds)} speeds for {peers} peers", "give one for each, or leave out --peers")
    return speeds


def _plan(options: SimulateOptions) -> SimulationPlan:
    for text in (*options.contract_overrides, *options.site_overrides):
        if by := SETTLED.get(key := text.partition("=")[0].strip()):
            raise UsageError(f"a simulation does not take {key}: it is set by {by}", "leave it out of --set")
    overrides = (*options.contract_overrides, f"membership.start_peers={options.peers}")
    contract = load_contract(options.contract, overrides).value
    site = load_site(options.site, options.site_overrides).value
    directory = options.out or Path("runs") / contract.run.name
    return SimulationPlan(
        options.contract, contract, overrides, options.site, tuple(options.site_overrides), Path(site.data.root),
        options.peers, directory, contract.run.name, max(1, (os.cpu_count() or 1) // options.peers),
        options.speeds or (1.0,) * options.peers,
    )  # fmt: skip


def _prepare(plan: SimulationPlan, compare: Sequence[str]) -> None:
    """Make an empty folder for a simulation. Files of an earlier simulation are deleted, all others stay.

    Raises UsageError where those others would be in the way, and ResourceError."""
    directory = plan.directory
    try:
        if directory.exists() and any(directory.iterdir()):
            if not (directory / "contract.json").is_file():
                cause = f"{directory} is not empty, and not from an earlier simulation"
                raise UsageError(cause, "choose another --out")
            for entry in directory.iterdir():  # its peers have a log, its comparisons that or a contract
                marked = (entry / "log.txt").is_file() or (entry / "contract.json").is_file()
                if entry.name in OURS:
                    entry.unlink()
                elif marked and OUR_FOLDERS.fullmatch(entry.name):
                    shutil.rmtree(entry)
        directory.mkdir(parents=True, exist_ok=True)
        for name in (*(f"p{index}" for index in range(plan.peers)), *compare):
            if (directory / name).exists():
                raise UsageError(f"{directory / name} is not from an earlier simulation", "choose another --out")
        (directory / "contract.json").write_text(plan.contract.to_json())
    except OSError as error:
        raise ResourceError(f"cannot write to {directory}: {error.strerror}", "choose another --out") from error


# ---------------------------------------------------------------- peers


def _train_peers(plan: SimulationPlan, stop: Callable[[], bool], out: TextIO, live: bool) -> RunState:
    """Run the peer processes of a simulation to the end. Raises DilocoError when one fails."""
    names = [f"p{index}" for index in range(plan.peers)]
    tail = _EventTail([plan.directory / name / "events.jsonl" for name in names])
    children: list[SimulationProcess] = []
    try:
        with Screen(plan.title, names, plan.contract.run.total_tokens, live, out) as screen:
            how = [str(plan.contract_path), *_set(plan.overrides)]
            children.append(_start_peer(plan, names[0], how, plan.speeds[0]))
            ticket = _ticket(_card(plan.directory / names[0]), children[0], screen.tick, stop)
            others = zip(names[1:], plan.speeds[1:], strict=True) if ticket else ()
            children += [_start_peer(plan, name, ["--join", ticket], speed) for name, speed in others]
            _watch(children, tail, screen, stop)
    finally:
        end_all(children)
    by_time = merge(*map(read_lines, tail.paths), key=lambda event: float(event["time"]))
    with (plan.directory / "events.jsonl").open("w") as merged:
        merged.writelines(json.dumps(event) + "\n" for event in by_time)
    return screen.state


def _set(overrides: Sequence[str]) -> Iterator[str]:
    for text in overrides:
        yield from ("--set", text)


def _start_peer(plan: SimulationPlan, name: str, how: Sequence[str], speed: float) -> SimulationProcess:
    directory = plan.directory / name
    directory.mkdir(parents=True)
    arguments = ["peer", *how, "--name", name, "--dir", str(directory), "--json"]
    arguments += ["--site", str(plan.site)] if plan.site else []
    local = [f"device.threads={plan.threads}", f"device.speed={speed}", *plan.site_overrides]
    return SimulationProcess(name, "diloco", [*arguments, *_set(local)], directory / "log.txt", plan.threads)


def _card(directory: Path) -> Path:
    """The file that a simulation's peer process writes into its folder once it listens."""
    return directory / "peer.json"


def _ticket(card: Path, founder: SimulationProcess, tick: Callable[[], None], stop: Callable[[], bool]) -> str:
    """The ticket of the simulation's founder, once it listens. Empty: the simulation was stopped before."""
    deadline_s = monotonic_s() + START_S
    while not card.exists():
        if founder.exit_code is not None:
            raise founder.failure()
        if monotonic_s() > deadline_s:
            raise ResourceError(f"the founder does not listen after {START_S:g} s", f"see {founder.log}")
        if stop():
            return ""
        tick()
        time.sleep(POLL_S)
    return str(json.loads(card.read_text())["ticket"])


def _watch(children: Sequence[SimulationProcess], tail: _EventTail, screen: Screen, stop: Callable[[], bool]) -> None:
    """Wait until all peer processes of the simulation ended. One that fails ends it; a stop asks all to leave."""
    asked = False
    while True:
        ended = all(child.exit_code is not None for child in children)
        if stop() and not asked:
            asked = True
            for child in children:
                # A peer that does not listen yet has nothing to leave. Python may lose the KeyboardInterrupt of an
                # early SIGINT, as in a destructor, and a founder would wait for its joiners for ever. No SIGTERM is
                # lost.
                child.send(signal.SIGINT if _card(child.log.parent).exists() else signal.SIGTERM)
        for event in tail.read():
            screen.feed(event)
        screen.tick()
        for child in children:
            if child.exit_code and not (asked and child.exit_code in ENDED_BY_SIGNAL):
                raise child.failure()
        if ended:
            return
        time.sleep(POLL_S)


@dataclass
class _EventTail:
    """Follows growing event files of a simulation's processes."""

    paths: Sequence[Path]
    _seen: dict[Path, int] = field(default_factory=dict)

    def read(self) -> Iterator[Stamped]:
        """Events of whole lines that a simulation's processes wrote since the last call."""
        for path in self.paths:
            lines, self._seen[path] = read_on(path, self._seen.get(path, 0))
            yield from filter(None, map(from_json, lines))


# ---------------------------------------------------------------- results


def states_agree(ends: Sequence[Ended], peers: int) -> bool | None:
    """Whether all peers of a simulation end with one outer state. Peers that were asked to leave may end at different
    versions: then whether those at the same version agree. None: no two are at the same version."""
    states = [(end.version, end.state_digest) for end in ends]
    if len(ends) == peers and all(end.reason == "done" for end in ends):
        return len(set(states)) == 1
    versions = {version for version, _ in states}
    return len(set(states)) == len(versions) if len(states) > len(versions) else None


def _costs(directory: Path, ends: Sequence[Ended]) -> dict[str, Any]:
    """Figures of a simulation's end; the first peer's, where all are the same. Raises DilocoError without any."""
    if not ends:
        raise DilocoError("no peer reached an end", f"see {directory}/p0/log.txt")
    return {
        "val_loss": ends[0].val_loss,
        "tokens": max(end.tokens or 0 for end in ends),
        "wall_s": max(end.wall_s or 0.0 for end in ends),
        "wire_bytes_sent_per_peer": mean(end.wire_bytes_sent for end in ends),
    }


def _summary(plan: SimulationPlan, state: RunState) -> dict[str, Any]:
    """The tree of a simulation's `summary.json`, before anything is compared."""
    ends, costs = state.ends, _costs(plan.directory, state.ends)
    starts = [peer.started for peer in state.peers.values() if peer.started]
    return {
        "run": plan.contract.run.name,
        "peers": plan.peers,
        "speeds": plan.speeds,
        "versions": ends[0].version,
        "digest": ends[0].state_digest,
        "digests_agree": None if plan.gossips else states_agree(ends, plan.peers),
        "spread": max((end.spread for end in ends if end.spread is not None), default=None),
        **costs,
        "discarded_tokens": sum(end.discarded_tokens or 0 for end in ends),
        "h": plan.contract.inner.steps,
        "codec": plan.contract.codec.name,
        "parameters": starts[0].parameters if starts else None,
        "contract_digest": plan.contract.digest,
        "comparisons": {},
        "baseline": None,
    }


def _compare(
    name: str, plan: SimulationPlan, stop: Callable[[], bool], out: TextIO, live: bool
) -> dict[str, Any] | None:
    """Train a comparison of the simulation in a folder beside the peers'. Returns its costs; None: it was stopped."""
    directory = plan.directory / name
    directory.mkdir()
    if name == "ddp":
        return _train_ddp(plan, directory, stop, out)
    if name == "average":
        overrides = (*plan.overrides, "outer.optimizer=sgd", "outer.lr=1.0")
        peers, title = plan.peers, "plain averaging"
    elif name == "sync":
        overrides = (*plan.overrides, "membership.policy=sync", "inner.sized_by=contract")
        peers, title = plan.peers, "everybody waits for the slowest"
    else:
        alone_tokens = plan.contract.run.total_tokens // plan.peers
        overrides = (*plan.overrides, "membership.start_peers=1", f"run.total_tokens={alone_tokens}")
        peers, title = 1, "one peer alone, as many inner steps as each of the others"
    contract = load_contract(plan.contract_path, overrides).value
    other = replace(plan, overrides=overrides, contract=contract, directory=directory, title=title)
    other = replace(other, peers=peers, speeds=plan.speeds[:peers])
    (directory / "contract.json").write_text(contract.to_json())
    ends = _train_peers(other, stop, out, live).ends
    if stop() and (len(ends) < peers or any(end.reason != "done" for end in ends)):
        return None
    return {**_costs(directory, ends), "versions": ends[0].version}


def _train_ddp(plan: SimulationPlan, directory: Path, stop: Callable[[], bool], out: TextIO) -> dict[str, Any] | None:
    """Train the simulation's DDP baseline, a process per peer. Returns its costs; None: it was stopped."""
    contract = directory / "contract.json"
    contract.write_text(plan.contract.to_json())
    where = [str(directory), str(plan.data_root), str(plan.threads)]
    logs = [directory / ("log.txt" if rank == 0 else f"log{rank}.txt") for rank in range(plan.peers)]
    ranks = [
        SimulationProcess(
            f"ddp rank {rank}",
            "diloco.simulate.local.ddp",
            [str(contract), str(rank), str(plan.peers), *where],
            log,
            plan.threads,
        )
        for rank, log in enumerate(logs)
    ]
    tail = _EventTail([directory / "events.jsonl"])
    try:
        _watch_ddp(plan, ranks, tail, stop, out)
    finally:
        end_all(ranks)
    files = [directory / "events.jsonl", *(directory / f"rank{rank}.jsonl" for rank in range(1, plan.peers))]
    ends = [peer.ended for _, peer in sorted(read_state(files).peers.items()) if peer.ended]
    if len(ends) < plan.peers:
        if stop():
            return None
        raise DilocoError("the DDP baseline did not reach its end", f"see {logs[0]}")
    return _costs(directory, ends)


def _watch_ddp(
    plan: SimulationPlan, ranks: Sequence[SimulationProcess], tail: _EventTail, stop: Callable[[], bool], out: TextIO
) -> None:
    """Wait until the ranks of the simulation's DDP baseline ended; print a line for each tenth of its tokens."""
    total, said = plan.contract.run.total_tokens, -1
    out.write(f"DDP over gloo: {plan.peers} processes, {total:,} tokens\n")
    while any(rank.exit_code is None for rank in ranks):
        for event in (stamped.event for stamped in tail.read()):
            if isinstance(event, BaselineStep) and (tenth := 10 * event.tokens // total) > said:
                said = tenth
                out.write(f"ddp  {event.tokens / total:4.0%}  {event.tokens:,} tok  loss {readable_loss(event.loss)}\n")
                out.flush()
        if stop():
            return
        if failed := [rank for rank in ranks if rank.exit_code]:
            raise failed[0].failure()
        time.sleep(POLL_S)
