"""A run on the terminal: the live screen of `diloco simulate`, the table at its end, the answer of `diloco status`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.base.readable import (
    NOTHING,
    aligned,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_loss,
    readable_percent,
    readable_share,
    readable_text,
    readable_times,
)
from diloco.base.types import MAX_TEXT
from diloco.observe.events import Evaluated, Event, Remark, RoundSkipped, Stamped, SwapApplied, VersionClosed
from diloco.observe.run_folder import MethodResult, outcomes
from diloco.observe.run_state import Notice, PeerState, RunState, Version

MAX_NOTES = 6
REDRAW_S = 0.12
"""Between two redraws of the live table: eight a second look smooth, more only burn the trainers' CPU."""
HEARD_S = 5.0
"""A peer that was heard so lately is there, whether or not it can be reached."""
STRAGGLER_S = 3.0
"""Seconds for which a version's plain line waits for peers that have not reported it."""
RATE_VERSIONS = 8
"""The time left is estimated from this many versions back: long enough to be calm, short enough to see a change."""
STYLES = {"training": "green", "lost": "red"}
VERBS = {"skipped": "skipped", "left": "left at", "died": "was lost at", "gone": "is gone at"}
"""Kinds of notices on a peer as they read in a sentence, before the version."""


class Screen:
    """The live screen of a run: on a terminal one table, a row per peer; elsewhere plain lines, one per version and
    notable event.

    Use it as a context manager; `feed` it events and `tick` it a few times a second, on one thread. Both ways show a
    `RunState`; the screen itself remembers only what it has shown already.
    """

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
        self.state = RunState(peers={peer: PeerState() for peer in peers})
        self._pace: deque[tuple[float, int]] = deque(maxlen=RATE_VERSIONS)
        """Times, by `clock`, at which the run had so many tokens."""
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._held_notes: list[str] = []
        self._open: dict[int, float] = {}
        """Versions without a line yet, and when the first peer reported each."""
        self._said_version = 0
        self._said_share = -1
        """Tokens of a gossip run at its last line, in fiftieths of all."""
        self._drawn_s = 0.0
        self._live: Live | None = None
        if live:
            console = Console(file=out, highlight=False)
            self._live = Live(self.render(), console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        if self._live is None:
            self._write(f"{self._title}: {_peers(len(self.state.peers))}, {self._total_tokens:,} tokens")
        else:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._say_versions()
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def feed(self, stamped: Stamped) -> None:
        """Show one event of one peer on the screen."""
        for note in _sentences(self.state.fold(stamped)):
            self._say(note)
        match stamped.event:
            case VersionClosed() as event if event.version > self._said_version:
                self._say_versions(before=event.version)
                if event.version not in self._open:
                    self._open[event.version] = self._clock()
                    self._pace.append((self._open[event.version], event.tokens))
                if set(event.counted) <= self.state.versions[event.version].keys():
                    self._say_versions(before=event.version + 1)
            case SwapApplied() as event if (share := int(50 * event.tokens / self._total_tokens)) > self._said_share:
                self._said_share = share  # a line whenever the run has come on by 2 %, whoever reports it
                self._pace.append((self._clock(), event.tokens))
                self._write_line(
                    f"{min(event.tokens / self._total_tokens, 1):>4.0%}",
                    event.tokens,
                    event.loss,
                    f"{readable_text(stamped.peer)} with {readable_text(event.partner)}",
                    f"spread {readable_share(event.spread)}",
                    f"{readable_bytes(event.wire_bytes_sent)} sent",
                )
            case Evaluated(val_loss=float(val_loss), version=version):
                self._say(f"v{version or 0} held-out loss {readable_loss(val_loss)}")

    def tick(self) -> None:
        """Redraw the live table when it is due; without one, print the lines of versions that stragglers hold up."""
        now = self._clock()
        if self._live is None:
            if self._open and now - max(self._open.values()) > STRAGGLER_S:
                self._say_versions()
        elif now - self._drawn_s >= REDRAW_S:
            self._drawn_s = now
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The live screen as it is now: a header, a row per peer, the latest notable lines."""
        share = min(self.state.tokens / self._total_tokens, 1.0)
        header = Text(no_wrap=True, overflow="ellipsis")
        header.append(self._title, style="bold")
        header.append(f"   {self.state.tokens:,} of {self._total_tokens:,} tokens   {share:.0%}")
        if share < 1 and len(self._pace) > 1:  # minutes and seconds to the end at the pace of the latest versions
            (first_s, first_tokens), (last_s, last_tokens) = self._pace[0], self._pace[-1]
            pace = (last_s - first_s) / max(1, last_tokens - first_tokens)
            at_last_s = (self._total_tokens - last_tokens) * pace
            minutes, seconds = divmod(max(0, round(at_last_s - (self._clock() - last_s))), 60)
            header.append(f"   {minutes}:{seconds:02d} left")
        if self.state.evaluations:
            latest = self.state.evaluations[-1]
            header.append(f"   held-out {readable_loss(latest.val_loss)} at v{latest.version or 0}")
        notes = [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in self._notes]
        return Group(header, Text(), self._table(), *([Text(), *notes] if notes else []))

    # ------------------------------------------------------------ plain lines

    def _say_versions(self, before: float = math.inf) -> None:
        """Print the screen's line for each open version below `before`: all peers that it counts have reported it, or
        the others are not waited for."""
        for version in sorted(version for version in self._open if version < before):
            del self._open[version]
            self._said_version = version
            row = Version.of(self.state.versions[version].values())
            sync_s = sum(row.seconds.values()) - row.seconds["inner"] if row.seconds else None
            self._write_line(
                f"v{row.version:<4}{row.tokens / self._total_tokens:>4.0%}",
                row.tokens,
                row.loss,
                _peers(row.members) if row.counted >= row.members else f"{row.counted} of {_peers(row.members)}",
                f"{readable_count(row.tokens_per_s)} tok/s",
                f"{readable_bytes(row.sent_bytes)} sent/peer",
                f"{readable_duration(sync_s)} sync",
            )
        self._write_held_notes()

    def _say(self, note: str) -> None:
        self._notes.append(note)
        self._held_notes.append(f"      {note}")
        self._write_held_notes()

    def _write_held_notes(self) -> None:
        """Print plain notes on the screen, after the line of the version that was open when they came."""
        if not self._open:
            for note in self._held_notes:
                self._write(note)
            self._held_notes.clear()

    def _write_line(self, progress: str, tokens: int, loss: float | None, *rest: str) -> None:
        """Print the screen's plain line of a version or a swap."""
        width = len(f"{self._total_tokens:,}")
        self._write("  ".join((f"{progress} {tokens:>{width},} tok", f"loss {readable_loss(loss)}", *rest)))

    def _write(self, line: str) -> None:
        if self._live is None:
            self._out.write(line + "\n")
            self._out.flush()

    # ------------------------------------------------------------ the live picture

    def _table(self) -> Table:
        used = [peer.used for peer in self.state.peers.values() if peer.used]
        reported = {"MFU": any(one.mfu is not None for one in used), "memory": any(one.memory for one in used)}
        known = [name for name, is_known in reported.items() if is_known]
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
        table.add_column("peer", no_wrap=True, max_width=18)
        table.add_column("", no_wrap=True, min_width=8)
        table.add_column("progress", width=14)
        for name in ("version", "loss", "tok/s", *known, "sent"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
        for name, peer in self.state.peers.items():
            mfu, ranks = (peer.used.mfu, peer.used.memory) if peer.used else (None, ())
            memory = [rank.device_peak_bytes or rank.host_peak_bytes for rank in ranks]
            hardware = {"MFU": readable_share(mfu), "memory": readable_bytes(max(memory, default=None))}
            table.add_row(
                Text(readable_text(name)),
                Text(peer.phase, style=STYLES.get(peer.phase, "")),
                ProgressBar(total=self._total_tokens, completed=peer.tokens, width=14, complete_style="blue"),
                f"v{peer.version}",
                readable_loss(peer.loss),
                readable_count(peer.tokens_per_s),
                *(hardware[name] for name in known),
                readable_bytes(peer.wire_bytes_sent),
                Text(_last(peer.latest), style="dim"),
                style="dim" if peer.over else None,
            )
        return table


def _last(event: Event | None) -> str:
    """The remark at the end of a peer's row on the screen, on its latest event."""
    match event:
        case VersionClosed(own=False):
            return f"not counted in v{event.version}"
        case SwapApplied():
            return f"with {readable_text(event.partner)}, spread {readable_share(event.spread)}"
        case RoundSkipped():
            return readable_text(event.reason, 80)
        case Remark():
            return readable_text(event.text, 80)
    return ""


def _sentences(news: Sequence[Notice]) -> Iterator[str]:
    """The screen's plain line for each notice on a peer; peers that join together share one."""
    joined = [notice for notice in news if notice.kind == "joined"]
    if joined:
        yield f"{', '.join(readable_text(notice.peer) for notice in joined)} joined at v{joined[0].version}"
    for notice in news:
        peer, reason = readable_text(notice.peer), readable_text(notice.reason, 200)
        because = f": {reason}" if reason else ""
        if notice.kind == "warned":
            yield f"{peer}{because}"
        elif notice.kind in VERBS:
            yield f"{peer} {VERBS[notice.kind]} v{notice.version}{because}"


# ---------------------------------------------------------------- the table at the end


def summary_table(summary: Mapping[str, Any]) -> str:
    """The summary at the end of a run's screen: a row per method (DiLoCo, baselines), then the conclusion in sentences.
    Lines end in a newline."""
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
    lines = aligned([*zip(*columns, strict=True)], indent="", gap="   ")
    return "\n".join([*lines, "", *_conclusion(summary, methods)]) + "\n"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


def _conclusion(summary: Mapping[str, Any], methods: Sequence[MethodResult]) -> Iterator[str]:
    """The conclusion on a run's screen: whether the peers agree, and what it cost beside the baseline."""
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


UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration)
"""Errors of a status that no member answers with."""


def status_text(status: Mapping[str, Any]) -> str:
    """The screen of `diloco status`, from a member's answer: the run's progress, and a row per peer. Raises one of
    `UNREADABLE`."""
    total, tokens, peers = status["total_tokens"], status["tokens"], status["peers"]
    answering = next(peer for peer in peers if peer["peer"] == status["answering"])
    lines = [
        f"{readable_text(status['run'])}: version {status['version']:d}, {tokens:,} of {total:,} tokens "
        f"({tokens / max(total, 1):.0%}), says {readable_text(status['answering'])}",
        f"state {readable_text(status['state_digest'][:16]) or NOTHING}  "
        f"contract {readable_text(status['contract_digest'][:16])}",
        f"join with: diloco peer --join {readable_text(answering['address'], MAX_TEXT)}/"
        f"{readable_text(status['contract_digest'], 64)}",
    ]
    if status["reason"]:
        lines.append(readable_text(status["reason"], 200))
    if status.get("conflict"):
        lines.append(f"{readable_text(status['conflict'], 300)}: stop the peers of the wrong one and evict them")
    if status.get("votes_missing") and (status["votes"] < status["votes_needed"] or status.get("seats") == 0):
        names = ", ".join(map(readable_text, status["votes_missing"]))
        lines.append(f"no commit takes place: bring {names} back with the same disk, or evict who never comes back")
    if not status.get("durable", True) and answering["votes"]:
        lines.append("its votes are on no disk: after a restart it votes no more until it was let in anew")
    if answering.get("abstains"):
        lines.append("its disk takes no votes, so that it abstains: make room there, and it votes again")
    if status.get("mean_lost_with"):
        names = ", ".join(map(readable_text, status["mean_lost_with"]))
        lines.append(f"the mean of an accepted version is with none that lives: bring back, or evict, {names}")
    lines += [
        f"nobody reaches {readable_text(peer['address'])}: {readable_text(peer['peer'])} must let connections in "
        "there, or set network.advertise"
        for peer in peers
        if _unreached(peer) and not peer["in_view"]
    ]
    if "spread" in status:  # gossip: between each peer and the other of its latest swap
        agreement = ["spread", *(readable_share(peer["spread"]) for peer in peers)]
    else:
        first = [peer["first_counted_version"] for peer in peers]
        agreement = ["counted since", *(f"v{version}" if version >= 0 else "not yet" for version in first)]
    columns = [
        ["peer", *(readable_text(peer["peer"]) for peer in peers)],
        ["", *(_standing(peer) for peer in peers)],
        ["version", *(str(max(peer["version"], 0)) for peer in peers)],
        agreement,
        *([["votes", *map(_vote, peers)]] if "votes" in peers[0] else []),
        ["loss", *(readable_loss(peer["loss"] or None) for peer in peers)],
        ["tok/s", *(readable_count(peer["tokens_per_s"] or None) for peer in peers)],
        ["sent", *(readable_bytes(peer["wire_bytes_sent"]) for peer in peers)],
        ["heard", *(f"{peer['heard_s_ago']:.0f} s ago" for peer in peers)],
        ["address", *(readable_text(peer["address"]) for peer in peers)],
    ]
    return "\n".join([*lines, "", *aligned([*zip(*columns, strict=True)], left=2, indent="", gap="   ")])


def _vote(peer: Mapping[str, Any]) -> str:
    """Whether a peer on the screen of `diloco status` votes."""
    return "abstains" if peer.get("abstains") else "yes" if peer["votes"] else ""


def _standing(peer: Mapping[str, Any]) -> str:
    """A peer on the screen of `diloco status`: its phase, or why it has none."""
    if _unreached(peer):
        return "not reached"
    if not peer["alive"]:
        return "silent"
    return readable_text(peer["phase"]) if peer["in_view"] else "at the door"


def _unreached(peer: Mapping[str, Any]) -> bool:
    """Whether a peer on the screen of `diloco status` is heard, and nobody reaches it. Under gossip nobody asks."""
    return not peer.get("reached", True) and peer["heard_s_ago"] < HEARD_S
