"""What `diloco simulate` shows while it runs, and the table at its end.

On a terminal one live table, a row per peer; elsewhere plain lines, one per version and notable event. Both are fed
with the peers' events (`diloco.observe.events`) by one thread. The screen keeps only what it shows; it decides
nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.observe.event_log import EventLine as Event
from diloco.observe.events import GOODBYES
from diloco.observe.history import Outcome, departures, outcomes
from diloco.observe.readable import (
    NOTHING,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_loss,
    readable_percent,
    readable_share,
    readable_text,
    readable_times,
)

MAX_NOTES = 6
REDRAW_S = 0.12
"""Between two redraws of the live table: eight a second look smooth, more only burn the trainers' CPU."""
STRAGGLER_S = 3.0
"""How long a version's plain line waits for peers that have not told about it."""
RATE_VERSIONS = 8
"""The time left is estimated from this many versions back: long enough to be calm, short enough to see a change."""
STYLES = {"training": "green", "syncing": "cyan", "lost": "red"}
PARTINGS = {"done": "left", "left": "left", "lost": "was lost", "gone": "is gone"}
"""How the phase of a peer that is out of the view reads in a sentence."""


@dataclass(slots=True)
class Row:
    """What is known of one peer."""

    phase: str = "starting"
    version: int = 0
    tokens: int = 0
    """Tokens committed in all, as of the peer's version."""
    loss: float | None = None
    tokens_per_s: float | None = None
    wire_bytes_sent: int | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    """The most that one of its ranks has taken: of its GPU, else of the host."""
    last: str = ""

    @property
    def over(self) -> bool:
        return self.phase in PARTINGS


class Screen:
    """Use as a context manager; `feed` it events, and `tick` it a few times a second."""

    def __init__(
        self,
        title: str,
        peers: Sequence[str],
        total_tokens: int,
        live: bool,
        out: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total_tokens, self._out, self._clock = title, total_tokens, out, clock
        self._rows = {peer: Row() for peer in peers}
        self._history: deque[tuple[float, int]] = deque(maxlen=RATE_VERSIONS)
        self._val_loss: tuple[int, float] | None = None
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._held_notes: list[str] = []
        self._view: set[str] = set()
        self._view_version = 0
        self._reports: dict[int, dict[str, Event]] = {}
        self._first_report_s = 0.0
        self._closed_version = 0
        self._said = -1
        """Of what is said of a gossip run, in fiftieths of its tokens."""
        self._drawn_s = 0.0
        self._live: Live | None = None
        if live:
            console = Console(file=out, highlight=False)
            self._live = Live(self.render(), console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        if self._live is None:
            self._write(f"{self._title}: {_peers(len(self._rows))}, {self._total_tokens:,} tokens")
        else:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_versions(before=None)
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def feed(self, event: Event) -> None:
        """Take one event of one peer in."""
        _update(self._rows.setdefault(str(event["peer"]), Row()), event)
        version = int(event.get("version") or 0)
        if event["kind"] == "view":
            self._change_view(event.get("joined") or (), dict(departures(event)), version)
        if event["kind"] == "version":
            members = event.get("members") or ()
            if members and version > self._view_version:
                self._change_view(members, {peer: "" for peer in self._view if peer not in members}, version)
            self._take_version(event)
        if event["kind"] == "swap":
            self._take_swap(event)
        if event["kind"] == "eval" and event.get("val_loss") is not None:
            self._val_loss = version, event["val_loss"]
        if note := _note(event):
            self._say(note)

    def tick(self) -> None:
        """Redraw what changed, if it is time to."""
        now = self._clock()
        if self._live is None:
            if self._reports and now - self._first_report_s > STRAGGLER_S:
                self._close_versions(before=None)
        elif now - self._drawn_s >= REDRAW_S:
            self._drawn_s = now
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The live picture: a header, a row per peer, the latest notable lines."""
        notes = [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in self._notes]
        return Group(self._header(), Text(), self._table(), *([Text(), *notes] if notes else []))

    # ------------------------------------------------------------ versions

    def _take_version(self, event: Event) -> None:
        version = int(event["version"])
        if version <= self._closed_version:
            return
        self._close_versions(before=version)
        if version not in self._reports:
            self._first_report_s = self._clock()
            self._history.append((self._first_report_s, int(event["tokens"])))
        reports = self._reports.setdefault(version, {})
        reports[str(event["peer"])] = event
        if set(event.get("counted") or ()) <= reports.keys():
            self._close_versions(before=version + 1)

    def _close_versions(self, before: int | None) -> None:
        """Say each version once, when everybody counted has reported it or nobody more is worth waiting for."""
        for version in sorted(self._reports):
            if before is None or version < before:
                self._closed_version = version
                self._write(_version_line(list(self._reports.pop(version).values()), self._total_tokens))
        if not self._reports:
            self._write_held_notes()

    def _take_swap(self, event: Event) -> None:
        """Under gossip: a line whenever the run has come on by 2 %, whoever tells of it."""
        step = int(50 * event["tokens"] / self._total_tokens)
        if step > self._said:
            self._said = step
            self._history.append((self._clock(), int(event["tokens"])))
            self._write(_swap_line(event, self._total_tokens))

    # ------------------------------------------------------------ what else happened

    def _change_view(self, joined: Iterable[str], gone: Mapping[str, str], version: int) -> None:
        """Everybody tells about a join or a departure; it is said once, the founding not at all."""
        new = [peer for peer in joined if peer not in self._view]
        if new and self._view:
            self._say(f"{', '.join(map(readable_text, new))} joined at v{version}")
        for peer in new:
            self._rows.setdefault(peer, Row()).phase = "training"
        lost = {peer: reason for peer, reason in gone.items() if peer in self._view}
        for peer, reason in lost.items():
            row = self._rows.setdefault(peer, Row())
            if not row.over:
                row.phase = "left" if reason in GOODBYES else "lost" if reason else "gone"
            self._say(f"{readable_text(peer)} {PARTINGS[row.phase]} at v{version}{_because(reason)}")
        self._view = (self._view | set(new)) - lost.keys()
        self._view_version = max(version, self._view_version)

    def _say(self, note: str) -> None:
        self._notes.append(note)
        self._held_notes.append(f"      {note}")
        if not self._reports:
            self._write_held_notes()

    def _write_held_notes(self) -> None:
        """Plain notes follow the line of the version that was open when they came."""
        for note in self._held_notes:
            self._write(note)
        self._held_notes.clear()

    def _write(self, line: str) -> None:
        if self._live is None:
            self._out.write(line + "\n")
            self._out.flush()

    # ------------------------------------------------------------ the live picture

    def _header(self) -> Text:
        tokens = self._history[-1][1] if self._history else 0
        share = min(tokens / self._total_tokens, 1.0)
        header = Text(no_wrap=True, overflow="ellipsis")
        header.append(self._title, style="bold")
        header.append(f"   {tokens:,} of {self._total_tokens:,} tokens   {share:.0%}")
        if share < 1 and len(self._history) > 1:
            header.append(f"   {self._left()} left")
        if self._val_loss:
            header.append(f"   held-out {readable_loss(self._val_loss[1])} at v{self._val_loss[0]}")
        return header

    def _left(self) -> str:
        """Minutes and seconds to the end at the pace of the latest versions."""
        (first_s, first_tokens), (last_s, last_tokens) = self._history[0], self._history[-1]
        pace = (last_s - first_s) / max(1, last_tokens - first_tokens)
        at_last_s = (self._total_tokens - last_tokens) * pace
        minutes, seconds = divmod(max(0, round(at_last_s - (self._clock() - last_s))), 60)
        return f"{minutes}:{seconds:02d}"

    @property
    def _known(self) -> list[str]:
        """Columns that not every run has."""
        rows = self._rows.values()
        told = {"MFU": any(row.mfu is not None for row in rows), "memory": any(row.memory_bytes for row in rows)}
        return [name for name, known in told.items() if known]

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
        table.add_column("peer", no_wrap=True, max_width=18)
        table.add_column("", no_wrap=True, min_width=8)
        table.add_column("progress", width=14)
        for name in ("version", "loss", "tok/s", *self._known, "sent"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
        for peer, row in self._rows.items():
            table.add_row(*self._cells(peer, row), style="dim" if row.over else None)
        return table

    def _cells(self, peer: str, row: Row) -> Iterator[RenderableType]:
        yield Text(readable_text(peer))
        yield Text(row.phase, style=STYLES.get(row.phase, ""))
        yield ProgressBar(total=self._total_tokens, completed=row.tokens, width=14, complete_style="blue")
        yield f"v{row.version}"
        yield readable_loss(row.loss)
        yield readable_count(row.tokens_per_s)
        told = {"MFU": readable_share(row.mfu), "memory": readable_bytes(row.memory_bytes)}
        yield from (told[name] for name in self._known)
        yield readable_bytes(row.wire_bytes_sent)
        yield Text(row.last, style="dim")


def _update(row: Row, event: Event) -> None:
    for name in ("phase", "version", "tokens", "loss", "tokens_per_s", "wire_bytes_sent", "mfu"):
        if event.get(name) is not None and not (name == "tokens" and event["kind"] == "progress"):
            setattr(row, name, event[name])
    match event["kind"]:
        case "start":
            row.phase = "joining"
        case "progress" if "phase" not in event:
            row.phase = "training"
        case "version":
            row.phase = "training"
            row.last = "" if event.get("own", True) else f"not counted in v{event['version']}"
        case "usage":
            memory = [rank["device_peak_bytes"] or rank["host_peak_bytes"] for rank in event["memory"]]
            row.memory_bytes = max(memory, default=None)
        case "swap":
            row.phase = "averaging" if event["final"] else "training"
            row.last = f"with {readable_text(event['partner'])}, spread {readable_share(event['spread'])}"
        case "skip" | "reason":
            row.last = readable_text(event.get("reason") or event.get("text") or "", 80)
        case "end":
            row.phase, row.last = ("left" if event.get("reason") == "left" else "done"), ""


def _note(event: Event) -> str:
    """A sentence on what deserves a line of its own, if anything does."""
    peer, at = readable_text(event["peer"]), f"v{event.get('version', 0)}"
    match event["kind"]:
        case "skip":
            return f"{peer} skipped {at}{_because(event.get('reason'))}"
        case "eval" if event.get("val_loss") is not None:
            return f"{at} held-out loss {readable_loss(event['val_loss'])}"
        case "note" | "warning":
            return f"{peer}: {readable_text(event['text'], 200)}"
    return ""


def _because(reason: object) -> str:
    return f": {readable_text(reason, 200)}" if reason and reason not in GOODBYES else ""


def _version_line(reports: Sequence[Event], total_tokens: int) -> str:
    """One version over all the peers that told about it."""
    first = reports[0]
    losses = [event["loss"] for event in reports if event.get("loss") is not None]
    syncs = [
        sum(seconds.values()) - seconds.get("inner", 0.0) for event in reports if (seconds := event.get("seconds"))
    ]
    sent = [event["wire_bytes_sent"] for event in reports if event.get("wire_bytes_sent") is not None]
    counted, members = len(first.get("counted") or ()), len(first.get("members") or ())
    width = len(f"{total_tokens:,}")
    fields = (
        f"v{first['version']:<4}{first['tokens'] / total_tokens:>4.0%} {first['tokens']:>{width},} tok",
        f"loss {readable_loss(fmean(losses) if losses else None)}",
        _peers(members) if counted >= members else f"{counted} of {_peers(members)}",
        f"{readable_count(sum(event.get('tokens_per_s') or 0.0 for event in reports))} tok/s",
        f"{readable_bytes(fmean(sent) if sent else None)} sent/peer",
        f"{readable_duration(fmean(syncs) if syncs else None)} sync",
    )
    return "  ".join(fields)


def _swap_line(event: Event, total_tokens: int) -> str:
    fields = (
        f"{min(event['tokens'] / total_tokens, 1):>4.0%} {event['tokens']:>{len(f'{total_tokens:,}')},} tok",
        f"loss {readable_loss(event.get('loss'))}",
        f"{readable_text(event['peer'])} with {readable_text(event['partner'])}",
        f"spread {readable_share(event['spread'])}",
        f"{readable_bytes(event.get('wire_bytes_sent'))} sent",
    )
    return "  ".join(fields)


# ---------------------------------------------------------------- the table at the end


def summary_table(summary: Mapping[str, Any]) -> str:
    """The end of a run for people: a row per method, then the conclusion in sentences. Lines end in a newline."""
    methods = outcomes(summary)
    columns = [
        ["", *(method.name for method in methods)],
        ["held-out loss", *(readable_loss(method.val_loss) for method in methods)],
        ["wall time", *(readable_duration(method.wall_s) for method in methods)],
        ["sent per peer", *(readable_bytes(method.wire_bytes_sent) for method in methods)],
        ["tokens", *(NOTHING if method.tokens is None else f"{method.tokens:,}" for method in methods)],
    ]
    if summary.get("baseline"):
        columns.insert(2, [f"against {methods[1].name}", *(readable_percent(method.worse) for method in methods)])
        columns.insert(5, ["fewer bytes", *(readable_times(method.fewer) for method in methods)])
    return "\n".join([*_aligned(columns), "", *_conclusion(summary, methods)]) + "\n"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


def _aligned(columns: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Lines of columns as wide as their widest cell: the first `words` of them to the left, the others to the right."""
    padded = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        padded.append([cell.ljust(width) if index < words else cell.rjust(width) for cell in column])
    return ["   ".join(row) for row in zip(*padded, strict=True)]


def _conclusion(summary: Mapping[str, Any], methods: Sequence[Outcome]) -> Iterator[str]:
    """One or two sentences: whether the peers agree, and what it cost beside the baseline."""
    versions, digest = summary.get("versions", 0), str(summary.get("digest", ""))[:12]
    agree = summary.get("digests_agree")
    if agree:
        yield f"All peers hold the same state, bit for bit, after {versions} versions (digest {digest})."
    elif agree is not None:
        yield f"The peers' states DIFFER after {versions} versions: a defect. Please report it."
    if summary.get("spread") is not None:
        yield (
            f"Peers averaged in pairs, about {versions} times each. Those that met in the end were at most "
            f"{readable_share(summary['spread'])} apart."
        )
    ours = methods[0]
    if ours.fewer is not None and ours.worse is not None:
        fewer, apart = readable_times(ours.fewer).rstrip("×"), f"{100 * abs(ours.worse):.1f} %"
        yield (
            f"Against {methods[1].name}, DiLoCo sent {fewer} times fewer bytes per peer "
            f"(H = {summary.get('h', NOTHING)} inner steps between syncs), "
            f"and its held-out loss is {apart} {'higher' if ours.worse >= 0 else 'lower'}."
        )


# ---------------------------------------------------------------- the answer of `diloco status`


def status_text(status: Mapping[str, Any]) -> str:
    """What a member answered about the run: where it stands, and a row per peer."""
    total, tokens = status["total_tokens"], status["tokens"]
    lines = [
        f"{readable_text(status['run'])}: version {status['version']}, {tokens:,} of {total:,} tokens "
        f"({tokens / max(total, 1):.0%}), says {readable_text(status['answering'])}",
        f"state {readable_text(status['state_digest'][:16]) or NOTHING}  "
        f"contract {readable_text(status['contract_digest'][:16])}",
        f"join with: diloco peer --join {_ticket(status)}",
    ]
    if status["reason"]:
        lines.append(readable_text(status["reason"], 200))
    peers = status["peers"]
    columns = [
        ["peer", *(readable_text(peer["peer"]) for peer in peers)],
        ["", *(_standing(peer) for peer in peers)],
        ["version", *(str(max(peer["version"], 0)) for peer in peers)],
        _gossip_column(peers) if "spread" in status else ["counted since", *(_first_counted(peer) for peer in peers)],
        ["loss", *(readable_loss(peer["loss"] or None) for peer in peers)],
        ["tok/s", *(readable_count(peer["tokens_per_s"] or None) for peer in peers)],
        ["sent", *(readable_bytes(peer["wire_bytes_sent"]) for peer in peers)],
        ["heard", *(f"{peer['heard_s_ago']:.0f} s ago" for peer in peers)],
        ["address", *(readable_text(peer["address"]) for peer in peers)],
    ]
    return "\n".join([*lines, "", *_aligned(columns, words=2)])


def _ticket(status: Mapping[str, Any]) -> str:
    """The join line's address: that of the member who answered."""
    mine = next(peer for peer in status["peers"] if peer["peer"] == status["answering"])
    return f"{readable_text(mine['address'], 80)}/{readable_text(status['contract_digest'][:12])}"


def _first_counted(peer: Mapping[str, Any]) -> str:
    version = peer["first_counted_version"]
    return f"v{version}" if version >= 0 else "not yet"


def _gossip_column(peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Between each peer and the other of its latest swap."""
    return ["spread", *(readable_share(peer["spread"]) for peer in peers)]


def _standing(peer: Mapping[str, Any]) -> str:
    if not peer["alive"]:
        return "silent"
    return readable_text(peer["phase"]) if peer["in_view"] else "at the door"
