"""The folder of a run, read for people.

Reads the directory of a simulation (peers, baselines, `summary.json`, contract) or of a single peer (only its
`events.jsonl`), also while it grows. What is missing stays empty. Events are folded by `RunState`; what is here is read
from it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import merge, nsmallest
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.base.errors import DilocoError
from diloco.base.readable import readable_text
from diloco.config.load import load_contract
from diloco.observe import events
from diloco.observe.event_log import read_events
from diloco.observe.events import MAX_COUNT, MAX_NUMBER, STEPS
from diloco.observe.run_state import Notice, RunClock, RunState, Stay, Version, VersionReport, in_groups, mean

NAMES = {"ddp": "DDP", "average": "Plain averaging", "alone": "One peer alone", "sync": "All wait for the slowest"}
"""Names of the baselines for people, by folder."""
MAX_WAITS = 400
"""Drawn; of more, the longest."""
MAX_OUTLIERS = 20
"""Peers in the table of outliers: the names are from files of other people."""
MAX_FLIGHTS = 400
"""Drawn; of more, none: they would be one dark stripe."""
MAX_POINTS = 600
"""Points of a curve; of more, means of as many groups."""
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "wait", "other")
"""Parts of an inner step, in order (`diloco.inner.meter`), and what is left of it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a loss curve: loss (nats per token) and the cost until then."""

    loss: float
    tokens: float
    wall_s: float
    sent_bytes: float
    """Per peer."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The loss curves of one method: training and held-out."""

    key: str
    """`diloco`, or the folder of the baseline."""
    name: str
    """For people."""
    train: Sequence[Point]
    held_out: Sequence[Point]


@dataclass(frozen=True, slots=True)
class PeerTime:
    """A peer's time over versions that it reported with their seconds."""

    peer: str
    counted: int
    """Versions with a contribution of its own."""
    tokens: int
    """In these."""
    inner_s: float
    waited_s: float
    """For the exchange, with nothing else to do."""
    other_s: float

    @property
    def total_s(self) -> float:
        return self.inner_s + self.waited_s + self.other_s


@dataclass(frozen=True, slots=True)
class PeerHardware:
    """A peer's hardware, and how its inner steps used it since its process started."""

    peer: str
    device: str
    ranks: int
    mesh: Mapping[str, int]
    """Sizes of more than one rank."""
    tokens_per_s: float | None
    """While it did inner steps; as the next three."""
    flops_per_s: float | None
    """Summed over all its ranks."""
    mfu: float | None
    mfu_wall: float | None
    """The same of all its time."""
    phases: Mapping[str, float]
    """Seconds by phase of an inner step, on rank 0; what is left of the inner steps is `other`."""
    memory: Sequence[tuple[int, int]]
    """By rank: most of the host's and of the device's memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A peer whose contributions were outliers, as the others report it (`VersionClosed.outliers`)."""

    peer: str
    versions: int
    """Versions in which at least one part was."""
    parts: int


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run as the report shows it. Times are seconds of the run."""

    name: str
    versions: Sequence[Version]
    curves: Sequence[Curve]
    stays: Sequence[Stay]
    waits: Sequence[Stay]
    """When a peer waited, as far as a picture shows it."""
    flights: Sequence[Stay]
    """From when a peer measured a contribution until it had the version that counts it; none if they are many."""
    times: Sequence[PeerTime]
    outliers: Sequence[Outlier]
    """The `MAX_OUTLIERS` that were outliers in most parts, those first."""
    hardware: Sequence[PeerHardware]
    notices: Sequence[Notice]
    resumed_s: Sequence[float]
    """Where the run went on after all its processes had been gone; the gaps themselves are cut out."""
    contract: Sequence[tuple[str, Any]]
    summary: Mapping[str, Any]


def read_run(directory: Path) -> RunFolder:
    """Read everything in a run folder that the report shows; what the folder does not hold stays empty."""
    folders = {path.parent.name: path for path in sorted(directory.glob("*/events.jsonl"))}
    baselines = _baselines(directory, folders)
    peers = [path for name, path in folders.items() if name not in baselines]
    state = read_state(peers or [directory / "events.jsonl"])
    clock = RunClock(state)
    notices = []
    for notice in state.notices:
        kind = notice.kind
        if kind == "gone":  # it died if its own events are here without an end; else nobody knows but that it left
            kind = "died" if state.peers[notice.peer].life is not None else "left"
        notices.append(replace(notice, at_s=clock(notice.at_s), kind=kind))
    versions = _versions(state, clock, notices)
    curves = [_curve(state, versions), *(_baseline(directory / name, len(versions)) for name in baselines)]
    contract = _contract(directory)
    stays = [Stay(stay.peer, clock(stay.start_s), clock(stay.stop_s)) for stay in state.stays()]
    reports = timed_reports(state)
    known = [(name, peer.started, peer.used) for name, peer in sorted(state.peers.items())]
    hardware = [_hardware(name, started, used) for name, started, used in known if started and used]
    return RunFolder(
        state.name or directory.resolve().name, versions, curves, stays, _waits(reports, clock),
        _flights(reports, clock), peer_times(reports), outlying_peers(state), hardware, notices, clock.resumed_s,
        contract, _summary(directory, versions, curves, contract),
    )  # fmt: skip


def read_state(paths: Sequence[Path]) -> RunState:
    """The state of a run from the event files of its peers. Of signs of life in a row only the ends are read."""
    state = RunState()
    for stamped in merge(
        *(read_events(path, events.TrainingProgress) for path in paths), key=lambda stamped: stamped.time_s
    ):
        state.fold(stamped)
    return state


def _baselines(directory: Path, folders: Mapping[str, Path]) -> list[str]:
    """The folders in a run folder that hold a baseline: with steps instead of versions, or a simulation of its own."""
    simulations = {path.parent.parent.name for path in directory.glob("*/*/events.jsonl")}
    firsts = {name: next(read_events(path), None) for name, path in folders.items()}
    found = {name for name, first in firsts.items() if first and isinstance(first.event, events.BaselineStep)}
    return [name for name in dict.fromkeys([*NAMES, *folders]) if name in (found | simulations) & folders.keys()]


def _versions(state: RunState, clock: RunClock, notices: Sequence[Notice]) -> list[Version]:
    """The report's versions in order, in seconds of the run. `sent_bytes`: by a peer that was counted all along."""
    losses: dict[int | None, float | None] = {}
    for event in state.held_out():
        losses.setdefault(event.version, event.val_loss)
    notes: dict[int, list[str]] = defaultdict(list)
    for notice in notices:
        notes[notice.version].append(str(notice))
    rows, total, before = [], 0.0, dict[str, int]()
    for version, reports in sorted(state.versions.items()):
        # The mean increment of the peers that were counted, summed up: a late joiner does not pull the curve down, and
        # a counter that starts again with its process does not either.
        steps = []
        for peer, report in reports.items():
            now, last = report.event.wire_bytes_sent or 0, before.get(peer, 0)
            before[peer] = now
            if report.own:
                steps.append(now - last if now >= last else now)
        total += fmean(steps) if steps else 0.0
        row, val_loss, said = Version.of(reports.values()), losses.get(version), notes.get(version, ())
        rows.append(replace(row, at_s=clock(row.at_s), sent_bytes=total, val_loss=val_loss, notes=said))
    return rows


def timed_reports(state: RunState) -> list[VersionReport]:
    """The peers' events on versions that have the seconds of their steps."""
    return [report for reports in state.versions.values() for report in reports.values() if report.event.seconds]


def peer_times(reports: Iterable[VersionReport]) -> list[PeerTime]:
    """Time of each peer for the report, over the versions in its events, by name."""
    by_peer: dict[str, list[VersionReport]] = defaultdict(list)
    for report in reports:
        by_peer[report.peer].append(report)
    times = []
    for peer, mine in sorted(by_peer.items()):
        own = [report.event for report in mine if report.own]
        spent = {step: sum(report.event.seconds.get(step, 0.0) for report in mine) for step in STEPS}
        inner_s, waited_s, tokens = spent.pop("inner"), spent.pop("exchange"), sum(event.inner_tokens for event in own)
        times.append(PeerTime(peer, len(own), tokens, inner_s, waited_s, sum(spent.values())))
    return times


def outlying_peers(state: RunState) -> list[Outlier]:
    """Peers that the report shows as outliers: in how many versions, and in how many parts."""
    parts: dict[str, Counter[int]] = defaultdict(Counter)
    for version, reports in state.versions.items():
        for event in (report.event for report in reports.values()):
            for peer, times in ((event.outliers or {}) if isinstance(event, events.VersionClosed) else {}).items():
                parts[peer][version] += times
    found = [Outlier(peer, len(by_version), by_version.total()) for peer, by_version in parts.items()]
    return sorted(found, key=lambda one: (-one.parts, one.peer))[:MAX_OUTLIERS]


def _hardware(peer: str, started: events.Started, used: events.HardwareUsed) -> PeerHardware:
    def rate(amount: float | None, over: float | None) -> float | None:
        return amount / over if amount is not None and over else None

    ranks, peak = started.ranks or 1, started.peak_flops_per_rank
    peak_of_all = None if peak is None else peak * ranks
    return PeerHardware(
        peer=peer,
        device=started.device,
        ranks=ranks,
        mesh=started.mesh,
        tokens_per_s=rate(used.inner_tokens, used.inner_s),
        flops_per_s=rate(used.flops, used.inner_s),
        mfu=rate(rate(used.flops, used.inner_s), peak_of_all),
        mfu_wall=rate(rate(used.flops, used.wall_s), peak_of_all),
        phases={**used.phases, "other": max(used.inner_s - sum(used.phases.values()), 0.0)},
        memory=[(rank.host_peak_bytes, rank.device_peak_bytes) for rank in used.memory],
    )


def _waits(reports: Iterable[VersionReport], clock: RunClock) -> list[Stay]:
    """Waits of the peers for the report: a version's event comes after average, outer step and merge."""

    waits = []
    for report in reports:
        seconds = report.event.seconds
        stop_s = clock(report.at_s) - sum(seconds.get(step, 0.0) for step in ("average", "outer", "merge"))
        waits.append(Stay(report.peer, max(stop_s - seconds.get("exchange", 0.0), 0.0), max(stop_s, 0.0)))
    longest = nsmallest(MAX_WAITS, waits, key=lambda wait: wait.start_s - wait.stop_s)
    return sorted(longest, key=lambda wait: wait.start_s)


def _flights(reports: Iterable[VersionReport], clock: RunClock) -> list[Stay]:
    flights = []
    for report in reports:
        if isinstance(report.event, events.VersionClosed) and report.event.flight_s:
            stop_s = clock(report.at_s)
            flights.append(Stay(report.peer, max(stop_s - report.event.flight_s, 0.0), stop_s))
    return flights if len(flights) <= MAX_FLIGHTS else []


def _curve(state: RunState, versions: Sequence[Version]) -> Curve:
    start = [evaluation.val_loss for evaluation in state.evaluations if evaluation.version == 0][:1]
    held_out = [Point(loss, 0.0, 0.0, 0.0) for loss in start if loss is not None]
    points: list[Point] = []
    for row in versions:
        for known, loss in ((points, row.loss), (held_out, row.val_loss)):
            if loss is not None:
                known.append(Point(loss, row.tokens, row.at_s, row.sent_bytes or 0.0))
    groups = in_groups(points, MAX_POINTS)
    train = [replace(group[-1], loss=fmean(point.loss for point in group)) for group in groups]
    last_first = in_groups(held_out[::-1], MAX_POINTS)  # counted from the end: the last point stays in any case
    return Curve("diloco", "DiLoCo", train, [group[0] for group in last_first][::-1])


def _baseline(folder: Path, points: int) -> Curve:
    """The report's loss curve of a baseline. Its steps are averaged to about as many points as the run has versions, to
    be comparable."""
    name = NAMES.get(folder.name, readable_text(folder.name))
    state = read_state([folder / "events.jsonl"])
    steps = state.baseline_steps
    if not steps:
        return replace(read_run(folder).curves[0], key=folder.name, name=name)
    size = max(1, len(steps) // min(max(points, 20), 200))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    train = [_step_point(group[-1], mean(step.loss for step in group)) for group in groups]
    seen = [step.tokens for step in steps]
    losses = {event.tokens: event.val_loss for event in state.held_out()}
    held_out = [_step_point(steps[max(0, bisect_right(seen, at or 0) - 1)], loss) for at, loss in losses.items()]
    return Curve(folder.name, name, train, held_out)


def _step_point(step: events.BaselineStep, loss: float | None) -> Point:
    return Point(loss or 0.0, step.tokens, step.wall_s or 0.0, step.wire_bytes_sent or 0)


def _contract(directory: Path) -> list[tuple[str, Any]]:
    """(dotted key, effective value) for the report, from a run folder's `contract.json` or `contract.toml` if any."""
    as_json, as_toml = directory / "contract.json", directory / "contract.toml"
    if as_json.is_file():
        tree = {section: keys for section, keys in _tree(as_json).items() if isinstance(keys, dict)}
        return [(f"{section}.{key}", value) for section, keys in tree.items() for key, value in keys.items()]
    if as_toml.is_file():
        with suppress(DilocoError):  # written by another release: the rest of the report is worth having without it
            return [(key, value) for key, value, _ in load_contract(as_toml).rows()]
    return []


def _tree(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder; empty where there is none, or half of one that a full disk left."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _number(value: object) -> bool:
    """Whether a field of `summary.json` is a number that the report can draw: finite, and below `MAX_NUMBER`."""
    return isinstance(value, int | float) and -MAX_NUMBER < value < MAX_NUMBER


COST = ("val_loss", "tokens", "wall_s", "wire_bytes_sent_per_peer")
"""Fields of every method in a summary."""


def _costs(value: object) -> bool:
    return isinstance(value, dict) and all(value.get(name) is None or _number(value[name]) for name in COST)


WRITTEN: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys((*COST, "spread"), _number),
    **dict.fromkeys(
        ("versions", "peers", "parameters", "h"),
        lambda value: isinstance(value, int) and -MAX_COUNT < value < MAX_COUNT,
    ),
    **dict.fromkeys(("digest", "codec"), lambda value: isinstance(value, str)),
    "digests_agree": lambda value: isinstance(value, bool),
    "comparisons": lambda value: isinstance(value, dict) and all(map(_costs, value.values())),
    "baseline": _costs,
}
"""Checks of the fields of `summary.json`. A field that fails its check is read as missing."""


def _summary(
    directory: Path, versions: Sequence[Version], curves: Sequence[Curve], contract: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """The run folder's `summary.json`; fields that it lacks are taken from the events."""
    tree = _tree(directory / "summary.json")
    written = {name: tree[name] for name, fits in WRITTEN.items() if name in tree and fits(tree[name])}
    settings = dict(contract)
    compared = [row for row in versions if row.reports > 1 and row.digests]
    comparisons = {curve.key: _cost(curve) for curve in curves[1:]}
    reported = {
        **_cost(curves[0]),
        "versions": versions[-1].version if versions else 0,
        "peers": max((row.members for row in versions), default=0),
        "digest": min(versions[-1].digests, default="") if versions else "",
        "digests_agree": all(len(row.digests) < 2 for row in compared) if compared else None,
        "spread": next((row.spread for row in reversed(versions) if row.spread is not None), None),
        "h": settings.get("inner.steps"),
        "codec": settings.get("codec.name"),
        "comparisons": comparisons,
        "baseline": {"name": "ddp", **comparisons["ddp"]} if "ddp" in comparisons else None,
    }
    return {**reported, **written}


def _cost(curve: Curve) -> dict[str, float | None]:
    """The last point of a method's loss curve, as fields of the report's summary."""
    ends = [*curve.train[-1:], *curve.held_out[-1:]]
    last = max(ends, key=lambda point: point.tokens, default=Point(0.0, 0.0, 0.0, 0.0))
    cost = {"tokens": last.tokens, "wall_s": last.wall_s, "wire_bytes_sent_per_peer": last.sent_bytes}
    return {"val_loss": curve.held_out[-1].loss if curve.held_out else None, **(cost if ends else {})}


# ---------------------------------------------------------------- how methods compare


@dataclass(frozen=True, slots=True)
class MethodResult:
    """The end of one method (DiLoCo, a baseline) in a run's summary, compared with the baseline. None: not known."""

    name: str
    val_loss: float | None
    worse: float | None
    """(val_loss - baseline's) / baseline's; None for the baseline itself."""
    wall_s: float | None
    wire_bytes_sent: float | None
    """Per peer, counted on the sockets."""
    fewer: float | None
    """The baseline's bytes / these; None for the baseline itself and where nothing was sent."""
    tokens: int | None


def outcomes(summary: Mapping[str, Any]) -> list[MethodResult]:
    """The methods in a run folder's `summary.json` for the report: DiLoCo first, its baseline, other comparisons."""
    baseline = summary.get("baseline") or {}
    base_name = str(baseline.get("name", "ddp"))
    others: dict[str, Mapping[str, Any]] = dict(summary.get("comparisons") or {})
    if baseline:
        others = {base_name: {**others.pop(base_name, {}), **baseline}, **others}
    methods = [("DiLoCo", summary, baseline)]
    for name, entry in others.items():
        same_tokens = {"tokens": summary.get("tokens"), **entry}
        methods.append((NAMES.get(name, readable_text(name)), same_tokens, {} if name == base_name else baseline))
    rows = []
    for name, entry, base in methods:
        loss, sent = entry.get("val_loss"), entry.get("wire_bytes_sent_per_peer")
        base_loss, base_sent = base.get("val_loss"), base.get("wire_bytes_sent_per_peer")
        worse = None if loss is None or not base_loss else (loss - base_loss) / base_loss
        fewer = base_sent / sent if sent and base_sent else None
        rows.append(MethodResult(name, loss, worse, entry.get("wall_s"), sent, fewer, entry.get("tokens")))
    return rows
