"""What happened in a run, put together from what its processes wrote.

Reads the directory of a simulation (peers, baselines, `summary.json`, contract) or of a single peer (only its
`events.jsonl`), also while it grows. What is missing stays empty. For `diloco.observe.report` and
`diloco.observe.screen`.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.base.errors import DilocoError
from diloco.config.load import load_contract
from diloco.observe.event_log import EventLine as Event
from diloco.observe.event_log import read_lines
from diloco.observe.events import GOODBYES, STEPS
from diloco.observe.readable import readable_text

NAMES = {"ddp": "DDP", "average": "Plain averaging", "alone": "One peer alone", "sync": "All wait for the slowest"}
"""How the baselines are called, by their folder."""
MAX_WAITS = 400
"""Drawn; of more, the longest."""
MAX_FLIGHTS = 400
"""Drawn; of more, none: they would be one dark stripe."""
MAX_POINTS = 600
"""Of a curve; of more, means of as many groups."""
TOLD = ("version", "swap")
"""Events of a version: one that all agree on, or a peer's own."""
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "wait", "other")
"""Of an inner step, in order (`diloco.inner.meter`), and what is left of it."""
STAMP = ("t", "time", "peer", "kind")
"""Fields of every event."""
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "version": {"version": int, "tokens": int | float},
    "swap": {"version": int, "tokens": int | float},
    "eval": {"tokens": int | float},
    "step": {"tokens": int | float},
    "usage": {"inner_s": float | int, "wall_s": float | int, "inner_tokens": int, "phases": dict, "memory": list},
}
"""Fields without which an event of a kind says nothing."""
_TOLD_READ = (
    "version", "tokens", "fragment", "members", "counted", "own", "attempts", "loss", "spread", "inner_tokens",
    "tokens_per_s", "wire_bytes_sent", "seconds", "flight_s", "state_digest",
)  # fmt: skip
READ: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(TOLD, _TOLD_READ),
    "start": ("version", "run", "device", "ranks", "mesh", "peak_flops_per_rank"),
    "view": ("version", "joined", "left", "reason"),
    "skip": ("version", "reason"),
    "warning": ("version", "text"),
    "eval": ("version", "tokens", "val_loss"),
    "end": ("version", "tokens", "reason", "val_loss"),
    "step": ("tokens", "loss", "wall", "wire_bytes_sent"),
    "usage": ("inner_s", "wall_s", "inner_tokens", "flops", "phases", "memory"),
}
"""Fields that are read of an event of a kind, beside when and whose it is: all that is kept of a month of them."""
DRAWN = frozenset({"start", "view", "skip", "warning", "end", *NEEDED})
"""Kinds of events that say more than when their peer lived."""
RUNNING = frozenset({"view", "progress", *TOLD})
"""Events that only a peer in the view writes."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a curve is: loss (nats per token) and what it had cost until then."""

    loss: float
    tokens: float
    wall_s: float
    sent_bytes: float
    """Per peer."""


@dataclass(frozen=True, slots=True)
class Curve:
    key: str
    """`diloco`, or the folder of the baseline."""
    name: str
    """For people."""
    train: Sequence[Point]
    held_out: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Version:
    """One version over all peers that told about it."""

    version: int
    fragment: int
    tokens: int
    at_s: float
    told: int
    """How many peers told about it."""
    members: int
    counted: int
    loss: float | None
    val_loss: float | None
    seconds: Mapping[str, float]
    """Per step of the line, mean over peers."""
    tokens_per_s: float
    """Sum over peers."""
    sent_bytes: float
    """Since the run began, of a peer that was counted all along."""
    attempts: int
    """Of the exchange; 0 where nobody told."""
    digests: frozenset[str]
    spread: float | None
    """Under gossip, where peers have versions (swaps) of their own: between the two of a swap, mean over peers."""
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Stay:
    """A peer in the view, from and to (seconds of the run)."""

    peer: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a peer: it "joined", "left", "died", "skipped" a round or "warned"."""

    peer: str
    at_s: float
    kind: str
    version: int
    reason: str = ""

    def __str__(self) -> str:
        because = f": {readable_text(self.reason, 120)}" if self.reason else ""
        return f"{readable_text(self.peer)} {self.kind}{because}"


@dataclass(frozen=True, slots=True)
class PeerTime:
    """What a peer did with its time, over all versions that it told about."""

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
class Hardware:
    """What a peer's inner steps made of its hardware, over all that it told of since it was started last."""

    peer: str
    device: str
    ranks: int
    mesh: Mapping[str, int]
    """Sizes of more than one rank."""
    tokens_per_s: float | None
    """While it did inner steps; as the next three."""
    flops_per_s: float | None
    """Of all its ranks."""
    mfu: float | None
    mfu_wall: float | None
    """The same of all its time."""
    phases: Mapping[str, float]
    """Seconds by phase of an inner step, on rank 0; what is left of the inner steps is `other`."""
    memory: Sequence[tuple[int, int]]
    """By rank: most of the host's and of the device's memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the report shows it."""

    name: str
    versions: Sequence[Version]
    curves: Sequence[Curve]
    stays: Sequence[Stay]
    waits: Sequence[Stay]
    """When a peer waited, as far as a picture shows it."""
    flights: Sequence[Stay]
    """From when a peer measured a contribution until it stood on the version that counts it; none if they are many."""
    times: Sequence[PeerTime]
    hardware: Sequence[Hardware]
    marks: Sequence[Mark]
    resumed_s: Sequence[float]
    """Where the run went on after all its processes had been gone; the gaps themselves are cut out."""
    contract: Sequence[tuple[str, Any]]
    summary: Mapping[str, Any]


def read_run(directory: Path) -> Run:
    """Everything the report needs of a directory, with nothing where there is nothing."""
    folders = {path.parent.name: _events(path) for path in sorted(directory.glob("*/events.jsonl"))}
    baselines = _baselines(directory, folders)
    peers = [event for name, events in folders.items() if name not in baselines for event in events]
    events = sorted(peers or _events(directory / "events.jsonl"), key=lambda event: event["time"])
    clock = _RunClock(events)
    attendance = _Attendance(events, clock)
    versions = _versions(events, clock, attendance.marks)
    curves = [_curve(events, versions), *(_baseline(directory / name, len(versions)) for name in baselines)]
    contract = _contract(directory)
    name = next((str(event["run"]) for event in events if event.get("run")), directory.resolve().name)
    summary = _summary(directory, versions, curves, contract)
    timed = [event for event in events if event["kind"] in TOLD and event.get("seconds")]
    return Run(
        name, versions, curves, attendance.stays, _waits(timed, clock), _flights(timed, clock), _times(timed),
        _hardware(events), attendance.marks, clock.resumed_s, contract, summary,
    )  # fmt: skip


def _events(path: Path) -> list[Event]:
    """Those that can be shown. Of a peer's signs of life, two in a second, in a month five million, only the ends."""
    return list(_used_in_all(_lean(event) for event in read_lines(path, "progress") if _whole(event)))


def _whole(event: Event) -> bool:
    """Whether it has what is asked of its kind; a line that was damaged may still be JSON."""
    stamped = isinstance(event.get("peer"), str) and isinstance(event["kind"], str)
    if not stamped or not (_number(event.get("t")) and _number(event.get("time"))):
        return False
    needed = all(isinstance(event.get(name), kind) for name, kind in NEEDED.get(event["kind"], {}).items())
    return needed and (
        event["kind"] not in DRAWN or all(event.get(name) is None or FITS[name](event[name]) for name in FITS)
    )


def _number(value: object) -> bool:
    """Also one that can be drawn: not infinite, and not beyond all that was ever counted."""
    return isinstance(value, int | float) and -1e30 < value < 1e30


def _count(value: object) -> bool:
    return isinstance(value, int) and -(2**53) < value < 2**53


def _text(value: object) -> bool:
    return isinstance(value, str)


def _list(value: object) -> bool:
    return isinstance(value, list)


def _names(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _amounts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _memory(value: object) -> bool:
    names = ("host_peak_bytes", "device_peak_bytes")
    return isinstance(value, list) and all(
        isinstance(rank, dict) and all(_number(rank.get(name)) for name in names) for rank in value
    )


FITS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("tokens", "loss", "val_loss", "spread", "tokens_per_s", "flight_s", "wire_bytes_sent"), _number),
    **dict.fromkeys(("inner_tokens", "inner_s", "wall_s", "wall", "flops", "peak_flops_per_rank"), _number),
    **dict.fromkeys(("version", "fragment", "attempts", "ranks"), _count),
    **dict.fromkeys(("seconds", "phases", "mesh"), _amounts),
    "members": _names, "counted": _list, "joined": _list, "left": _list, "memory": _memory, "state_digest": _text,
}  # fmt: skip
"""What a field must be, where it is there: these files come from others, too."""


def _lean(event: Event) -> Event:
    """What is read of it, its `seconds` in the order of STEPS. Texts and lists of names are shared: most stay the same
    for long, and parsing makes each anew."""
    names = (*STAMP, *READ.get(event["kind"], ()))
    return {name: _shared(name, event[name]) for name in names if name in event}


def _shared(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return sys.intern(value)
    if name == "seconds":
        return array("d", (value.get(step) or 0.0 for step in STEPS)) if isinstance(value, dict) and value else None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return _one_of_equals(tuple(value))
    return value


@lru_cache(maxsize=64)
def _one_of_equals(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


def _used_in_all(events: Iterator[Event]) -> Iterator[Event]:
    """With the "usage" events of each life of a peer as one, the last, of all."""
    used: dict[str, Event] = {}
    for event in events:
        peer = event["peer"]
        if event["kind"] == "usage":
            used[peer] = _added(used[peer], event) if peer in used else event
            continue
        if event["kind"] == "start" and peer in used:
            yield used.pop(peer)
        yield event
    yield from used.values()


def _added(before: Event, usage: Event) -> Event:
    sums = {name: before[name] + usage[name] for name in ("inner_s", "wall_s", "inner_tokens")}
    known = [event["flops"] for event in (before, usage) if event.get("flops") is not None]
    phases = defaultdict(float, before["phases"])
    for name, seconds in usage["phases"].items():
        phases[name] += seconds
    return {**usage, **sums, "flops": sum(known) if known else None, "phases": dict(phases)}


def _baselines(directory: Path, folders: Mapping[str, Sequence[Event]]) -> list[str]:
    """The folders that hold another way to train: one with steps instead of versions, or a simulation of its own."""
    simulations = {path.parent.parent.name for path in directory.glob("*/*/events.jsonl")}
    found = {name for name, events in folders.items() if any(event["kind"] == "step" for event in events)}
    return [name for name in dict.fromkeys([*NAMES, *folders]) if name in (found | simulations) & folders.keys()]


class _RunClock:
    """Unix seconds -> seconds of the run, without the gaps in which no process of it was alive.

    The run's zero is the first sign of a peer in the view: starting processes and meeting is not the run.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        spans = _alive(events)
        gaps = [later[0] - sooner[1] for sooner, later in pairwise(spans)]
        zero: float = next((event["time"] for event in events if event["kind"] in RUNNING), 0.0)
        self._began = [start for start, _ in spans]
        self._lost = list(accumulate(gaps, initial=zero))
        self.resumed_s = [self(start) for start in self._began[1:]]

    def __call__(self, time: float) -> float:
        span = max(0, bisect_right(self._began, time) - 1)
        return max(0.0, time - self._lost[span])


def _alive(events: Sequence[Event]) -> list[tuple[float, float]]:
    """When at least one process was alive (unix seconds). A peer whose own clock goes back has started anew."""
    lives: list[list[float]] = []
    latest: dict[str, tuple[float, list[float]]] = {}
    for event in events:
        before_s, life = latest.get(event["peer"], (math.inf, []))
        if event["t"] < before_s:
            life = [event["time"], event["time"]]
            lives.append(life)
        life[1] = event["time"]
        latest[event["peer"]] = event["t"], life
    spans: list[tuple[float, float]] = []
    for start, stop in sorted((life[0], life[1]) for life in lives):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans


def _versions(events: Sequence[Event], clock: _RunClock, marks: Sequence[Mark]) -> list[Version]:
    """One row per version. A version done again after a resume counts as its peers told of it last."""
    reports: dict[int, dict[str, Event]] = defaultdict(dict)
    losses: dict[int, float] = {}
    for event in events:
        if event["kind"] in TOLD:
            reports[event["version"]][event["peer"]] = event
        if event["kind"] in ("eval", "end") and event.get("val_loss") is not None:
            losses.setdefault(event.get("version", -1), event["val_loss"])
    sent = _sent_bytes(reports)
    notes: dict[int, list[str]] = defaultdict(list)
    for mark in marks:
        notes[mark.version].append(str(mark))
    return [
        _version(list(told.values()), clock, sent[version], losses.get(version), notes.get(version, []))
        for version, told in sorted(reports.items())
    ]


def _version(
    told: Sequence[Event], clock: _RunClock, sent: float, val_loss: float | None, notes: Sequence[str]
) -> Version:
    first = told[0]
    losses = [event["loss"] for event in told if event.get("loss") is not None]
    timings = [event["seconds"] for event in told if event.get("seconds")]
    spreads = [event["spread"] for event in told if event.get("spread") is not None]
    return Version(
        version=first["version"],
        fragment=first.get("fragment", 0),
        tokens=round(fmean(event["tokens"] for event in told)),
        at_s=min(clock(event["time"]) for event in told),
        told=len(told),
        members=len(first.get("members") or told),
        counted=len(told) if first["kind"] == "swap" else len(first.get("counted") or ()),
        loss=fmean(losses) if losses else None,
        val_loss=val_loss,
        seconds=dict(zip(STEPS, map(fmean, zip(*timings, strict=True)), strict=True)) if timings else {},
        tokens_per_s=sum(event.get("tokens_per_s") or 0.0 for event in told),
        sent_bytes=sent,
        attempts=max(event.get("attempts") or 0 for event in told),
        digests=frozenset(event["state_digest"] for event in told if event.get("state_digest")),
        spread=fmean(spreads) if spreads else None,
        notes=notes,
    )


def _sent_bytes(reports: Mapping[int, Mapping[str, Event]]) -> dict[int, float]:
    """Per version, the bytes sent so far by a peer that was counted all along.

    The mean increment of the peers that were counted, summed up: a late joiner does not pull the curve down, and a
    counter that starts again with its process does not either.
    """
    total, before, sent = 0.0, dict[str, int](), {}
    for version, told in sorted(reports.items()):
        steps = []
        for peer, event in told.items():
            now, last = event.get("wire_bytes_sent") or 0, before.get(peer, 0)
            before[peer] = now
            if event.get("own", True):
                steps.append(now - last if now >= last else now)
        total += fmean(steps) if steps else 0.0
        sent[version] = total
    return sent


class _Attendance:
    """Who was in the view when, from what any peer said about it first: a change of the members, or a "view" event."""

    def __init__(self, events: Sequence[Event], clock: _RunClock) -> None:
        self.stays: list[Stay] = []
        self.marks: list[Mark] = []
        self._since: dict[str, float] = {}
        self._version: int | None = None
        self._heard = {event["peer"] for event in events}
        self._ended = {event["peer"] for event in events if event["kind"] == "end"}
        for event in events:
            self._take(event, clock(event["time"]))
        for peer in list(self._since):  # those who never left were there to the end
            self._close(peer, clock(events[-1]["time"]))
        self.stays.sort(key=lambda stay: (stay.start_s, stay.peer))

    def _take(self, event: Event, at_s: float) -> None:
        version = event.get("version") or self._version or 0
        match event["kind"]:
            case "view":
                joined = [str(peer) for peer in event.get("joined") or ()]
                self._change(joined, dict(departures(event)), version, at_s)
            case "version" if event.get("members") and (self._version is None or version > self._version):
                gone = {peer: "" for peer in self._since if peer not in event["members"]}
                self._change(event["members"], gone, version, at_s)
            case "skip":
                self.marks.append(Mark(event["peer"], at_s, "skipped", version, str(event.get("reason") or "")))
            case "warning":
                self.marks.append(Mark(event["peer"], at_s, "warned", version, str(event.get("text") or "")))
            case "end" if event.get("reason") == "left":
                self._change([], {event["peer"]: "left"}, version, at_s)
            case "end":
                self._close(event["peer"], at_s)

    def _change(self, joined: Sequence[str], gone: Mapping[str, str], version: int, at_s: float) -> None:
        for peer in joined:
            if peer not in self._since:
                self._since[peer] = at_s
                if self._version is not None and version > self._version:
                    self.marks.append(Mark(peer, at_s, "joined", version))
        for peer, reason in gone.items():
            if peer in self._since:
                self._close(peer, at_s)
                kind = self._how(peer, reason)
                self.marks.append(Mark(peer, at_s, kind, version, reason if kind == "died" else ""))
        self._version = max(version, self._version or 0)

    def _how(self, peer: str, reason: str) -> str:
        """Without a reason: whoever wrote an end left, and of those whose events are not here nobody knows better."""
        wilful = reason in GOODBYES if reason else peer in self._ended or peer not in self._heard
        return "left" if wilful else "died"

    def _close(self, peer: str, at_s: float) -> None:
        if peer in self._since:
            self.stays.append(Stay(peer, self._since.pop(peer), at_s))


def departures(event: Event) -> list[tuple[str, str]]:
    """(peer, reason) for everyone a "view" event says has left."""
    entries = [one if isinstance(one, dict) else {"peer": one} for one in event.get("left") or ()]
    return [(str(entry.get("peer")), str(entry.get("reason") or event.get("reason") or "")) for entry in entries]


def _times(timed: Sequence[Event]) -> list[PeerTime]:
    """By peer."""
    by_peer: dict[str, list[Event]] = defaultdict(list)
    for event in timed:
        by_peer[event["peer"]].append(event)
    return [_time(peer, told) for peer, told in sorted(by_peer.items())]


def _time(peer: str, told: Sequence[Event]) -> PeerTime:
    own = [event for event in told if event.get("own", True)]
    spent = {step: sum(event["seconds"][index] for event in told) for index, step in enumerate(STEPS)}
    inner_s, waited_s = spent.pop("inner"), spent.pop("exchange")
    tokens = sum(event.get("inner_tokens") or 0 for event in own)
    return PeerTime(peer, len(own), tokens, inner_s, waited_s, sum(spent.values()))


def _hardware(events: Sequence[Event]) -> list[Hardware]:
    """By peer, of those that told."""
    starts: dict[str, Event] = {}
    used: dict[str, Event] = {}
    for event in events:
        if event["kind"] == "start":
            starts[event["peer"]] = event
            used.pop(event["peer"], None)
        elif event["kind"] == "usage" and event["peer"] in starts:
            used[event["peer"]] = event
    return [_hardware_of(starts[peer], usage) for peer, usage in sorted(used.items())]


def _hardware_of(start: Event, usage: Event) -> Hardware:
    def rate(amount: float | None, over: float | None) -> float | None:
        return amount / over if amount is not None and over else None

    inner_s, wall_s, flops, spent = usage["inner_s"], usage["wall_s"], usage.get("flops"), usage["phases"]
    ranks, peak = start.get("ranks") or 1, start.get("peak_flops_per_rank")
    peak_of_all = None if peak is None else peak * ranks
    memory = [(rank["host_peak_bytes"], rank["device_peak_bytes"]) for rank in usage["memory"]]
    return Hardware(
        peer=start["peer"],
        device=str(start.get("device") or ""),
        ranks=ranks,
        mesh=start.get("mesh") or {},
        tokens_per_s=rate(usage["inner_tokens"], inner_s),
        flops_per_s=rate(flops, inner_s),
        mfu=rate(rate(flops, inner_s), peak_of_all),
        mfu_wall=rate(rate(flops, wall_s), peak_of_all),
        phases={**spent, "other": max(inner_s - sum(spent.values()), 0.0)},
        memory=memory,
    )


def _waits(timed: Sequence[Event], clock: _RunClock) -> list[Stay]:
    """A peer tells of a version when it stands on it: it waited until average, outer step and merge began."""

    def wait(event: Event) -> Stay:
        seconds = dict(zip(STEPS, event["seconds"], strict=True))
        stop_s = clock(event["time"]) - sum(seconds[step] for step in ("average", "outer", "merge"))
        return Stay(event["peer"], max(stop_s - seconds["exchange"], 0.0), max(stop_s, 0.0))

    longest = nsmallest(MAX_WAITS, map(wait, timed), key=lambda wait: wait.start_s - wait.stop_s)
    return sorted(longest, key=lambda wait: wait.start_s)


def _flights(timed: Sequence[Event], clock: _RunClock) -> list[Stay]:
    flown = [event for event in timed if event.get("flight_s")]
    if len(flown) > MAX_FLIGHTS:
        return []
    ends = [(event["peer"], clock(event["time"]), event["flight_s"]) for event in flown]
    return [Stay(peer, max(stop_s - flight_s, 0.0), stop_s) for peer, stop_s, flight_s in ends]


def _curve(events: Sequence[Event], versions: Sequence[Version]) -> Curve:
    def points(loss: Callable[[Version], float | None]) -> list[Point]:
        known = ((loss(row), row) for row in versions)
        return [Point(value, row.tokens, row.at_s, row.sent_bytes) for value, row in known if value is not None]

    start = [event["val_loss"] for event in events if event["kind"] == "eval" and event.get("version") == 0][:1]
    before = [Point(loss, 0.0, 0.0, 0.0) for loss in start if loss is not None]
    train, held_out = points(lambda row: row.loss), before + points(lambda row: row.val_loss)
    some = held_out[:: -_group(held_out)][::-1]  # the last of them in any case
    return Curve("diloco", "DiLoCo", _averaged(train), some)


def _averaged(points: Sequence[Point]) -> list[Point]:
    """Of many, the mean loss of each group, where its last one stood."""
    size = _group(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [replace(group[-1], loss=fmean(point.loss for point in group)) for group in groups]


def _group(points: Sequence[Point]) -> int:
    """How many of them are one of MAX_POINTS."""
    return -(-len(points) // MAX_POINTS) or 1


def _baseline(folder: Path, points: int) -> Curve:
    """A baseline's curve; its steps are averaged to about as many points as the run has versions, to be comparable."""
    name = NAMES.get(folder.name, readable_text(folder.name))
    events = _events(folder / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step" and event.get("loss") is not None]
    if not steps:
        return replace(read_run(folder).curves[0], key=folder.name, name=name)
    size = max(1, len(steps) // min(max(points, 20), 200))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    train = [_step_point(group[-1], fmean(step["loss"] for step in group)) for group in groups]
    seen = [step["tokens"] for step in steps]
    losses = {event["tokens"]: event["val_loss"] for event in events if event.get("val_loss") is not None}
    held_out = [_step_point(steps[max(0, bisect_right(seen, at) - 1)], loss) for at, loss in losses.items()]
    return Curve(folder.name, name, train, held_out)


def _step_point(step: Event, loss: float) -> Point:
    return Point(loss, step["tokens"], step.get("wall") or step["t"], step.get("wire_bytes_sent") or 0)


def _contract(directory: Path) -> list[tuple[str, Any]]:
    """(dotted key, effective value) of `contract.json` or `contract.toml`; none where there is none to read."""
    as_json, as_toml = directory / "contract.json", directory / "contract.toml"
    if as_json.is_file():
        tree = {section: keys for section, keys in _tree(as_json).items() if isinstance(keys, dict)}
        return [(f"{section}.{key}", value) for section, keys in tree.items() for key, value in keys.items()]
    if as_toml.is_file():
        with suppress(DilocoError):  # written by another release: the rest of the report is worth having without it
            return [(key, value) for key, value, _ in load_contract(as_toml).rows()]
    return []


def _tree(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none, or half of one that a full disk left."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


COST = ("val_loss", "tokens", "wall_s", "wire_bytes_sent_per_peer")
"""What is told of every method in a summary."""


def _costs(value: object) -> bool:
    return isinstance(value, dict) and all(value.get(name) is None or _number(value[name]) for name in COST)


WRITTEN: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys((*COST, "spread"), _number),
    **dict.fromkeys(("versions", "peers", "parameters", "h"), _count),
    **dict.fromkeys(("digest", "codec"), _text),
    "digests_agree": lambda value: isinstance(value, bool),
    "comparisons": lambda value: isinstance(value, dict) and all(map(_costs, value.values())),
    "baseline": _costs,
}
"""What a field of `summary.json` must be, where it is there; what fits not is as if it were not there."""


def _summary(
    directory: Path, versions: Sequence[Version], curves: Sequence[Curve], contract: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """`summary.json`, with what the events themselves say for all that is not in it."""
    tree = _tree(directory / "summary.json")
    written = {name: tree[name] for name, fits in WRITTEN.items() if name in tree and fits(tree[name])}
    settings = dict(contract)
    compared = [row for row in versions if row.told > 1 and row.digests]
    comparisons = {curve.key: _cost(curve) for curve in curves[1:]}
    told = {
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
    return {**told, **written}


def _cost(curve: Curve) -> dict[str, float | None]:
    """What a curve ended with."""
    ends = [*curve.train[-1:], *curve.held_out[-1:]]
    last = max(ends, key=lambda point: point.tokens, default=Point(0.0, 0.0, 0.0, 0.0))
    cost = {"tokens": last.tokens, "wall_s": last.wall_s, "wire_bytes_sent_per_peer": last.sent_bytes}
    return {"val_loss": curve.held_out[-1].loss if curve.held_out else None, **(cost if ends else {})}


# ---------------------------------------------------------------- how methods compare


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one method ended, beside the baseline. None: not known."""

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


def outcomes(summary: Mapping[str, Any]) -> list[Outcome]:
    """The methods of a `summary.json`: DiLoCo first, then its baseline, then the other comparisons."""
    baseline = summary.get("baseline") or {}
    base_name = str(baseline.get("name", "ddp"))
    others: dict[str, Mapping[str, Any]] = dict(summary.get("comparisons") or {})
    if baseline:
        others = {base_name: {**others.pop(base_name, {}), **baseline}, **others}
    rows = [_outcome("DiLoCo", summary, baseline)]
    for name, entry in others.items():
        same_tokens = {"tokens": summary.get("tokens"), **entry}
        rows.append(_outcome(NAMES.get(name, name), same_tokens, {} if name == base_name else baseline))
    return rows


def _outcome(name: str, entry: Mapping[str, Any], baseline: Mapping[str, Any]) -> Outcome:
    loss, sent = entry.get("val_loss"), entry.get("wire_bytes_sent_per_peer")
    base_loss, base_sent = baseline.get("val_loss"), baseline.get("wire_bytes_sent_per_peer")
    return Outcome(
        name=name,
        val_loss=loss,
        worse=None if loss is None or not base_loss else (loss - base_loss) / base_loss,
        wall_s=entry.get("wall_s"),
        wire_bytes_sent=sent,
        fewer=base_sent / sent if sent and base_sent else None,
        tokens=entry.get("tokens"),
    )
