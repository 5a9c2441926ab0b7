"""Everything that happened in a run, folded from the events of its peers by one reducer.

The live screen, printed lines, the report and the summary of a simulation read a `RunState` and fold nothing
themselves. It has no clock and opens no file. Times are Unix seconds, as in the events; `RunClock` makes seconds of the
run of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TypeVar

from diloco.base.readable import readable_text
from diloco.observe import events
from diloco.observe.events import GOODBYES, STEPS, Event, Stamped

T = TypeVar("T")

RUNNING = (events.ViewChanged, events.TrainingProgress, events.VersionClosed, events.SwapApplied)
"""Events that only a peer in the view writes."""
VersionEvent = events.VersionClosed | events.SwapApplied
REMARKABLE = (events.VersionClosed, events.SwapApplied, events.RoundSkipped, events.Remark, events.Ended)
"""Events that replace what was last worth saying about a peer."""


@dataclass(frozen=True, slots=True)
class VersionReport:
    """A peer's report that it has a version: one that all agree on, or under gossip one of its own."""

    peer: str
    at_s: float
    event: VersionEvent

    @property
    def own(self) -> bool:
        """Whether a contribution of the peer is in the version, by its event."""
        return isinstance(self.event, events.SwapApplied) or self.event.own


@dataclass(frozen=True, slots=True)
class Stay:
    """A time that a peer was in the view, from its start to its end."""

    peer: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened to a peer and deserves a line, whoever reported it first."""

    peer: str
    at_s: float
    kind: str
    """It "joined", "left", "died", is "gone" (nobody gave a reason), "skipped" a round, or "warned"."""
    version: int
    reason: str = ""

    def __str__(self) -> str:
        because = f": {readable_text(self.reason, 120)}" if self.reason else ""
        return f"{readable_text(self.peer)} {self.kind}{because}"


@dataclass(slots=True)
class ProcessLife:
    """The time from the first to the last event of one peer's process."""

    start_s: float
    stop_s: float
    age_s: float
    """By the clock of the process. Where it goes back, another process has begun."""


@dataclass(slots=True)
class PeerState:
    """One peer, as of its latest events. What it has not reported is None."""

    phase: str = "starting"
    """Then "joining", "training", "averaging"; in the end "done", "left", or as others see it "lost" or "gone"."""
    version: int = 0
    tokens: int = 0
    """Committed in the whole run, as of that version."""
    loss: float | None = None
    tokens_per_s: float | None = None
    wire_bytes_sent: int | None = None
    started: events.Started | None = None
    used: events.HardwareUsed | None = None
    """Time, tokens and FLOPs are sums since the process started; rates and memory are the latest."""
    checkpoint: events.CheckpointWritten | None = None
    latest: Event | None = None
    """The latest of REMARKABLE events."""
    ended: events.Ended | None = None
    """End of the process that started last."""
    life: ProcessLife | None = None
    """None for a peer that only others mention."""

    @property
    def over(self) -> bool:
        return self.phase in ("done", "left", "lost", "gone")


@dataclass(frozen=True, slots=True)
class Version:
    """One version as all peers report it together: sums and means over them."""

    version: int
    fragment: int
    tokens: int
    at_s: float
    """When the first peer had it: Unix seconds, in a report seconds of the run."""
    reports: int
    """Peers that reported the version."""
    members: int
    counted: int
    loss: float | None
    seconds: Mapping[str, float]
    """Per step of the line, mean over peers."""
    tokens_per_s: float
    """Sum over peers."""
    sent_bytes: float | None
    """Until then, mean over peers; in a report of a peer that was counted all along."""
    attempts: int
    """Attempts of the exchange; 0 where nobody reported any."""
    digests: frozenset[str]
    spread: float | None
    """Under gossip, where peers have versions (swaps) of their own: between the two of a swap, mean over peers."""
    val_loss: float | None = None
    notes: Sequence[str] = ()

    @staticmethod
    def of(reports: Collection[VersionReport]) -> Version:
        """A version in the report or on the screen, folded from the events of its peers, at least one."""
        every = [report.event for report in reports]
        closed = [event for event in every if isinstance(event, events.VersionClosed)]
        timings = [event.seconds for event in every if event.seconds]
        return Version(
            version=every[0].version,
            fragment=closed[0].fragment if closed else 0,
            tokens=round(fmean(event.tokens for event in every)),
            at_s=min(report.at_s for report in reports),
            reports=len(every),
            members=(len(closed[0].members) if closed else 0) or len(every),
            counted=len(closed[0].counted) if closed else len(every),
            loss=mean(event.loss for event in every),
            seconds={step: fmean(seconds.get(step, 0.0) for seconds in timings) for step in STEPS} if timings else {},
            tokens_per_s=sum(event.tokens_per_s or 0.0 for event in every),
            sent_bytes=mean(event.wire_bytes_sent for event in every),
            attempts=max((event.attempts for event in closed), default=0),
            digests=frozenset(event.state_digest for event in closed if event.state_digest),
            spread=mean(event.spread for event in every if isinstance(event, events.SwapApplied)),
        )


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values in peers' events, for report and screen; None where no event has one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def in_groups(rows: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most `most` groups of a report's neighbouring versions or points, all of one size but the last."""
    size = -(-len(rows) // most) or 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(slots=True)
class RunState:
    """A run, as of the events folded into it.

    `kept` bounds what is remembered of the past, for a process that lives for months; None: all of it.
    """

    kept: int | None = None
    name: str = ""
    total_tokens: int = 0
    tokens: int = 0
    """Committed in the whole run."""
    peers: dict[str, PeerState] = field(default_factory=dict)
    view: dict[str, float] = field(default_factory=dict)
    """Peers in it, and since when."""
    view_version: int = -1
    versions: dict[int, dict[str, VersionReport]] = field(default_factory=dict)
    """By peer, as it reported a version last: one is done again after a resume."""
    evaluations: list[events.Evaluated] = field(default_factory=list)
    """With a loss."""
    baseline_steps: list[events.BaselineStep] = field(default_factory=list)
    """With a loss."""
    ends: list[events.Ended] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    past_stays: list[Stay] = field(default_factory=list)
    """Stays of peers that have left the view."""
    lives: list[ProcessLife] = field(default_factory=list)
    began_s: float | None = None
    """First sign of a peer in the view: starting processes and meeting is not the run."""
    latest_s: float = 0.0

    def fold(self, stamped: Stamped) -> Sequence[Notice]:
        """Fold one event of a peer in. Returns the notices that no event before it gave.

        Events of one peer come in its own order. Those of different peers may come somewhat late.
        """
        event, at_s, known = stamped.event, stamped.time_s, len(self.notices)
        peer = self._alive(stamped)
        if isinstance(event, RUNNING) and self.began_s is None:
            self.began_s = at_s
        match event:
            case events.Started():
                peer.started, peer.used, peer.ended, peer.phase = event, None, None, "joining"
                self.name, self.total_tokens = self.name or event.run, event.total_tokens or self.total_tokens
            case events.TrainingProgress():
                peer.phase = "training"
                peer.loss = peer.loss if event.loss is None else event.loss
            case events.VersionClosed() | events.SwapApplied():
                self._fold_version(stamped, event, peer)
            case events.VersionWitnessed():
                self._advance(peer, event.version, event.tokens)
            case events.StateCopied():
                peer.version = event.version
            case events.ViewChanged():
                left = {departure.peer: departure.reason for departure in event.left}
                self._change_view(event.joined, left, self._version_of(event), at_s)
            case events.RoundSkipped():
                self.notices.append(Notice(stamped.peer, at_s, "skipped", self._version_of(event), event.reason))
            case events.Warned():
                self.notices.append(Notice(stamped.peer, at_s, "warned", self._version_of(event), event.text))
            case events.Evaluated() if event.val_loss is not None:
                self.evaluations.append(event)
            case events.BaselineStep() if event.loss is not None:
                self.baseline_steps.append(event)
            case events.HardwareUsed():
                peer.used = event if peer.used is None else _added(peer.used, event)
            case events.CheckpointWritten():
                peer.checkpoint = event
            case events.Ended():
                self._fold_end(stamped, event, peer)
        if isinstance(event, REMARKABLE):
            peer.latest = event
        news = self.notices[known:]
        self._forget()
        return news

    def held_out(self) -> list[events.Evaluated | events.Ended]:
        """Held-out losses in the events: evaluations, then those at the ends of peers."""
        both: list[events.Evaluated | events.Ended] = [*self.evaluations, *self.ends]
        return [event for event in both if event.val_loss is not None]

    def stays(self) -> list[Stay]:
        """Stays of all peers in the view by their events, in order. One that did not leave stays until the latest."""
        there = [Stay(peer, since_s, self.latest_s) for peer, since_s in self.view.items()]
        return sorted([*self.past_stays, *there], key=lambda stay: (stay.start_s, stay.peer))

    # ------------------------------------------------------------ one event

    def _alive(self, stamped: Stamped) -> PeerState:
        peer, age_s = self.peers.setdefault(stamped.peer, PeerState()), stamped.t_s
        if peer.life is None or age_s < peer.life.age_s:
            peer.life = ProcessLife(stamped.time_s, stamped.time_s, age_s)
            self.lives.append(peer.life)
        peer.life.stop_s, peer.life.age_s = stamped.time_s, age_s
        self.latest_s = max(self.latest_s, stamped.time_s)
        return peer

    def _version_of(self, event: events.ViewChanged | events.RoundSkipped | events.Warned | events.Ended) -> int:
        """The version that the event is about, or else the one that the run is at."""
        return event.version or max(self.view_version, 0)

    def _advance(self, peer: PeerState, version: int, tokens: int) -> None:
        peer.version, peer.tokens = version, tokens
        self.tokens = max(self.tokens, tokens)

    def _fold_version(self, stamped: Stamped, event: VersionEvent, peer: PeerState) -> None:
        self._advance(peer, event.version, event.tokens)
        peer.phase = "averaging" if isinstance(event, events.SwapApplied) and event.final else "training"
        peer.loss = peer.loss if event.loss is None else event.loss
        peer.tokens_per_s = peer.tokens_per_s if event.tokens_per_s is None else event.tokens_per_s
        peer.wire_bytes_sent = peer.wire_bytes_sent if event.wire_bytes_sent is None else event.wire_bytes_sent
        report = VersionReport(stamped.peer, stamped.time_s, event)
        self.versions.setdefault(event.version, {})[stamped.peer] = report
        if isinstance(event, events.VersionClosed) and event.members and event.version > self.view_version:
            gone = {name: "" for name in self.view if name not in event.members}
            self._change_view(event.members, gone, event.version, stamped.time_s)

    def _fold_end(self, stamped: Stamped, event: events.Ended, peer: PeerState) -> None:
        name, version = stamped.peer, self._version_of(event)
        peer.ended, peer.phase = event, "left" if event.reason == "left" else "done"
        if event.version is not None and event.tokens is not None:
            self._advance(peer, event.version, event.tokens)
        peer.wire_bytes_sent = peer.wire_bytes_sent if event.wire_bytes_sent is None else event.wire_bytes_sent
        self.ends.append(event)
        if event.reason == "left":
            self._change_view((), {name: "left"}, version, stamped.time_s)
        else:
            self._close_stay(name, stamped.time_s)
        for index, notice in enumerate(self.notices):  # others missed it before it said so itself
            if notice.peer == name and notice.kind == "gone":
                self.notices[index] = replace(notice, kind="left")

    def _change_view(self, joined: Iterable[str], left: Mapping[str, str], version: int, at_s: float) -> None:
        """Fold a change of the view: all members have an event of it, the first one counts. The founding is no news."""
        founded = bool(self.view) and version > 0
        for name in joined:
            peer = self.peers.setdefault(name, PeerState())
            if name not in self.view and peer.ended is None:  # a late report may still list one that has ended
                self.view[name], peer.phase = at_s, "training"
                if founded:
                    self.notices.append(Notice(name, at_s, "joined", version))
        for name, reason in left.items():
            if name in self.view:
                kind = "left" if reason in GOODBYES else "died" if reason else "gone"
                self.notices.append(Notice(name, at_s, kind, version, reason if kind == "died" else ""))
                self.peers[name].phase = "lost" if kind == "died" else kind
                self._close_stay(name, at_s)
        self.view_version = max(self.view_version, version)

    def _close_stay(self, name: str, at_s: float) -> None:
        if name in self.view:
            self.past_stays.append(Stay(name, self.view.pop(name), at_s))

    def _forget(self) -> None:
        if self.kept is not None:
            while len(self.versions) > self.kept:
                del self.versions[next(iter(self.versions))]
            for past in (self.evaluations, self.baseline_steps, self.ends, self.notices, self.past_stays, self.lives):
                del past[: -self.kept]


def _added(before: events.HardwareUsed, latest: events.HardwareUsed) -> events.HardwareUsed:
    known = [flops for flops in (before.flops, latest.flops) if flops is not None]
    return replace(
        latest,
        inner_s=before.inner_s + latest.inner_s,
        wall_s=before.wall_s + latest.wall_s,
        inner_tokens=before.inner_tokens + latest.inner_tokens,
        flops=sum(known) if known else None,
        phases={
            name: before.phases.get(name, 0.0) + latest.phases.get(name, 0.0)
            for name in {**before.phases, **latest.phases}
        },
    )


class RunClock:
    """Unix seconds -> seconds of the run, without the gaps in which no process of it was alive."""

    def __init__(self, state: RunState) -> None:
        spans: list[list[float]] = []
        for life in sorted(state.lives, key=lambda life: life.start_s):
            if spans and life.start_s <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], life.stop_s)
            else:
                spans.append([life.start_s, life.stop_s])
        gaps = [later[0] - sooner[1] for sooner, later in pairwise(spans)]
        self._began_s = [start_s for start_s, _ in spans]
        self._lost_s = list(accumulate(gaps, initial=state.began_s or 0.0))
        self.resumed_s = [self(start_s) for start_s in self._began_s[1:]]

    def __call__(self, time_s: float) -> float:
        span = max(0, bisect_right(self._began_s, time_s) - 1)
        return max(0.0, time_s - self._lost_s[span])
