"""The report of a run: one HTML page that opens offline, and a picture of the loss.

Figures are drawn twice, for a wide and for a narrow screen, and their colours are CSS variables, so that the page
follows the reader's window and light or dark scheme. Names come from other machines: the template escapes everything,
and no figure reads them as mathematics.
"""

from __future__ import annotations

import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from diloco.base.errors import ResourceError, UsageError
from diloco.base.files import replacing_file
from diloco.base.readable import (
    NOTHING,
    printable,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_flops,
    readable_loss,
    readable_percent,
    readable_share,
    readable_text,
    readable_times,
)
from diloco.observe.events import STEPS
from diloco.observe.run_folder import PHASES, Curve, Point, RunFolder, outcomes, read_run
from diloco.observe.run_state import Version, in_groups, mean

COLORS = {
    # name: (on light paper, on dark paper). Series are Okabe and Ito's, which stay apart for colour-blind readers.
    "ink": ("#1d2430", "#e6e9ee"),
    "muted": ("#5c6675", "#9aa5b4"),
    "grid": ("#e3e7ec", "#2b323c"),
    "paper": ("#ffffff", "#14181e"),
    "diloco": ("#0072b2", "#5eb3ec"),
    "ddp": ("#d55e00", "#f08a4b"),
    "average": ("#009e73", "#3cc79b"),
    "alone": ("#a0699b", "#d09bcb"),
    "another": ("#7f7f7f", "#a8a8a8"),
    "stay": ("#8fbcdb", "#2f6488"),
    "died": ("#b3261e", "#ff8a80"),
    "step-inner": ("#d3dae2", "#384250"),
    "step-pseudo_gradient": ("#56b4e9", "#8fd0f5"),
    "step-compress": ("#009e73", "#3cc79b"),
    "step-exchange": ("#0072b2", "#3f8fcf"),
    "step-average": ("#e6a000", "#f0bd4a"),
    "step-outer": ("#a0699b", "#d09bcb"),
    "step-merge": ("#d55e00", "#f08a4b"),
    "step-other": ("#98a1ac", "#6f7a88"),
}
Ink = Mapping[str, str]
"""Colour by name, as matplotlib takes it."""
LIGHT: Ink = {name: light for name, (light, _) in COLORS.items()}
MARKERS = {"joined": (">", "▶"), "left": ("s", "■"), "died": ("X", "✖"), "skipped": ("|", "|")}
"""Marks of a peer's events: matplotlib's marker, and the sign in the legend."""
SHOWN = 0.95
"""Share of the points that the loss axis shows, if they are not few."""
FEW = 30
NICE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
"""Distances of ticks on a time axis, in seconds."""
WIDE_PT, NARROW_PT, PANEL_PT, TEXT_PT = 1040, 372, 336, 11.5
"""Widths of figures and size of their text; one point is shown as about one CSS pixel."""
MAX_ROWS = 400
"""Rows of the table of versions. Of more, a quarter for the newest, a quarter for those with something to say, and
half for the rest, some to a row."""
PLACES = 300
"""Along the time axis: of the same that happened to a peer at one of them, one is drawn."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Horizontal axis of a loss figure: what the loss is drawn against."""

    label: str
    of: Callable[[Point], float]
    text: Callable[[float], str]
    log: bool = False
    time: bool = False


AXES = (
    Axis("tokens trained on", lambda point: point.tokens, readable_count),
    Axis("wall time", lambda point: point.wall_s, readable_duration, time=True),
    Axis("bytes sent per peer, logarithmic", lambda point: point.sent_bytes, readable_bytes, log=True),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A bench's table, for the report of a run."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @staticmethod
    def read(path: Path) -> Table:
        """Read a bench's table for the report from its `--json` file. Raises UsageError."""
        fix = "give what `--json FILE` of scripts/bench-async, scripts/bench-quality or `diloco bench scaling` wrote"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))["table"]
            table = Table(str(tree["title"]), _texts(tree["header"]), tuple(map(_texts, tree["rows"])))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", fix) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} holds no table", fix) from error
        if any(len(row) != len(table.header) for row in table.rows):
            raise UsageError(f"{path}: a row of its table is not as long as the header", fix)
        return table


def _texts(cells: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(cell).replace("`", "") for cell in cells)


def write_report(directory: Path, tables: Sequence[Table] = ()) -> Path:
    """Write the report, `report.html`, into the folder of a simulation or a peer; its path. Raises ResourceError."""
    return _write(directory / "report.html", _page(read_run(directory), tables).encode())


def write_plot(directory: Path) -> Path:
    """Write the picture `plot.png`, loss against tokens, time and bytes per peer; its path. Raises ResourceError."""
    run = read_run(directory)
    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained", facecolor=LIGHT["paper"])
    for axes, axis in zip(figure.subplots(1, 3), AXES, strict=True):
        _draw_loss(axes, run.curves, axis, LIGHT)
    figure.axes[0].set_ylabel("loss, nats per token", color=LIGHT["muted"])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[0].legend(handles[::-1], labels[::-1], frameon=False, labelcolor=LIGHT["ink"])
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return _write(directory / "plot.png", picture.getvalue())


def _write(path: Path, content: bytes) -> Path:
    try:
        with replacing_file(path) as file:
            file.write(content)
    except OSError as error:
        fix = "free the disk, or copy the folder to where you may write"
        raise ResourceError(f"cannot write {path}: {error.strerror}", fix) from error
    return path


# ---------------------------------------------------------------- drawing


def _draw_loss(axes: Axes, curves: Sequence[Curve], axis: Axis, ink: Ink) -> None:
    """Draw the report's loss figure: training loss as a thin line, held-out loss as dots."""
    _calm(axes, ink)
    axes.set_xlabel(axis.label, color=ink["muted"], fontsize=TEXT_PT)
    if not any(_at(axis, [*curve.train, *curve.held_out])[0] for curve in curves):
        axes.set(xticks=[], yticks=[])
        style = {"ha": "center", "color": ink["muted"], "fontsize": TEXT_PT}
        axes.text(0.5, 0.5, "no data yet", style, transform=axes.transAxes)
        return
    for curve in reversed(curves):  # ours on top
        color = ink[_color_name(curve.key)]
        axes.plot(*_at(axis, curve.train), color=color, lw=1.5, alpha=0.75, solid_capstyle="round")
        size, edge = (5.5, 1.0) if len(curve.held_out) <= FEW else (3.5, 0.0)
        (dots,) = axes.plot(*_at(axis, curve.held_out), "o", ms=size, mew=edge, color=color, mec=ink["paper"], zorder=3)
        dots.set_label(curve.name)
    losses = [point.loss for curve in curves for point in (*curve.train, *curve.held_out)]
    if len(losses) >= FEW:  # the steep fall at the beginning would flatten all the rest: leave the highest few out
        low, top = min(losses), sorted(losses)[int(SHOWN * len(losses))]
        axes.set_ylim(low - 0.05 * (top - low), top + 0.05 * (top - low))
    if axis.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(_seconds_ticks(axes, 4) if axis.time else MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(axis.text(value))))


def _draw_view(axes: Axes, run: RunFolder, ink: Ink) -> None:
    """Draw the report's figure of the view: a row per peer in order of arrival, with a bar, and markers for notices."""
    _calm(axes, ink, grid="x")
    peers = list(dict.fromkeys(stay.peer for stay in run.stays))
    for color, shortest_s, bars in ((ink["stay"], 0.1, run.stays), (ink["step-exchange"], 0.0, run.waits)):
        for bar in bars:
            if bar.peer in peers:
                width_s = max(bar.stop_s - bar.start_s, shortest_s)
                axes.barh(peers.index(bar.peer), width_s, left=bar.start_s, height=0.5, color=color, lw=0)
    for flight in run.flights:
        if flight.peer in peers:
            row, color = peers.index(flight.peer) + 0.36, ink["average"]
            axes.plot((flight.start_s, flight.stop_s), (row, row), color=color, lw=1.5, solid_capstyle="butt")
            axes.plot(flight.stop_s, row, "o", ms=3.5, mew=0, color=color)
    place_s = max((stay.stop_s for stay in run.stays), default=0.0) / PLACES or 1.0
    notices = [notice for notice in run.notices if notice.peer in peers and notice.kind in MARKERS]
    for notice in {(notice.peer, notice.kind, notice.at_s // place_s): notice for notice in notices}.values():
        color, size = ink["died" if notice.kind == "died" else "ink"], 12 if notice.kind == "skipped" else 7
        row, marker = peers.index(notice.peer), MARKERS[notice.kind][0]
        axes.plot(notice.at_s, row, marker, ms=size, mew=1.5, color=color, clip_on=False)
    for at_s in run.resumed_s:
        axes.axvline(at_s, color=ink["muted"], lw=1, ls=(0, (3, 3)))
    axes.set_yticks(range(len(peers)), [readable_text(peer, 20) for peer in peers], parse_math=False)
    axes.tick_params(axis="y", labelcolor=ink["ink"], pad=8)
    axes.set_ylim(len(peers) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(_seconds_ticks(axes, 6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(readable_duration(value))))


def _draw_steps(axes: Axes, bars: Sequence[tuple[int, Mapping[str, float]]], steps: Sequence[str], ink: Ink) -> None:
    """Draw the report's figure of steps, a stacked bar per version (or per few of them): seconds of each of `steps`."""
    _calm(axes, ink)
    versions = [version for version, _ in bars]
    gap = min((later - sooner for sooner, later in pairwise(versions)), default=1)
    bottoms = [0.0] * len(bars)
    for step in steps:
        heights = [seconds[step] for _, seconds in bars]
        axes.bar(versions, heights, 0.8 * gap, bottoms, color=ink[f"step-{step}"], lw=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    margin = max(0.6 * gap, (8 * gap - (versions[-1] - versions[0])) / 2)  # a few bars stay slim
    axes.set_xlim(versions[0] - margin, versions[-1] + margin)
    axes.xaxis.set_major_locator(FixedLocator(versions) if len(versions) <= 12 else MaxNLocator(10, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _calm(axes: Axes, ink: Ink, grid: Literal["x", "y"] = "y") -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(ink["grid"])
    axes.tick_params(length=0, labelcolor=ink["muted"], labelsize=TEXT_PT)
    axes.grid(axis=grid, color=ink["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")


def _seconds_ticks(axes: Axes, most: int) -> MultipleLocator:
    """Ticks of a report's figure at round seconds, minutes, hours or days: about `most` at most."""
    left, right = axes.get_xlim()
    fitting = (step for step in NICE_S if (right - left) / step <= most + 1)
    return MultipleLocator(next(fitting, NICE_S[-1] * math.ceil((right - left) / NICE_S[-1] / most)))


def _at(axis: Axis, points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Places in a report's figure of the points that cost anything, and their losses."""
    costly = [point for point in points if axis.of(point) > 0]
    return [axis.of(point) for point in costly], [point.loss for point in costly]


def _color_name(key: str) -> str:
    return key if key in ("diloco", "ddp", "average", "alone") else "another"


def _tick(text: str) -> str:
    """Label of a tick in a report's figure, without needless zeros: 1.50 MB -> 1.5 MB, 10.0k -> 10k."""
    return re.sub(r"\.?0+(?=\D*$)", "", text) if "." in text else text


# ---------------------------------------------------------------- figures of the page

_STAND_IN = {name: f"#fe01{index:02x}" for index, name in enumerate(COLORS)}
"""Colours drawn with, each to be replaced by the CSS variable of its name."""
_SVG_SETTINGS = threading.Lock()
"""The way in which text is written to SVG is a process-wide setting of matplotlib."""


def _loss_figure(run: RunFolder, axis: Axis) -> Markup:
    figure = _figure(PANEL_PT, 290)
    _draw_loss(figure.subplots(), run.curves, axis, _STAND_IN)
    return _svg(figure, "loss" + axis.label[0], f"loss against {axis.label}")


def _view_figure(run: RunFolder, width_pt: int) -> Markup:
    figure = _figure(width_pt, 40 + 30 * len({stay.peer for stay in run.stays}))
    _draw_view(figure.subplots(), run, _STAND_IN)
    return _svg(figure, f"view{width_pt}", "peers in the view over time")


def _steps_figure(run: RunFolder, width_pt: int) -> Markup:
    """The report's figure of the whole round, and below it of all but the inner steps, which dwarf the rest."""
    figure = _figure(width_pt, 380)
    groups = in_groups([row for row in run.versions if row.seconds], width_pt // 12)
    bars = [(rows[0].version, {step: fmean(row.seconds[step] for row in rows) for step in STEPS}) for rows in groups]
    whole, sync = figure.subplots(2, 1, sharex=True)
    for axes, title, steps in (
        (whole, "Whole round, seconds", STEPS),
        (sync, "Without the inner steps, seconds", STEPS[1:]),
    ):
        _draw_steps(axes, bars, steps, _STAND_IN)
        axes.set_title(title, loc="left", fontsize=TEXT_PT, color=_STAND_IN["ink"])
    sync.set_xlabel("version", color=_STAND_IN["muted"], fontsize=TEXT_PT)
    return _svg(figure, f"steps{width_pt}", "seconds per step of the line for each version")


def _figure(width_pt: int, height_pt: int) -> Figure:
    return Figure(figsize=(width_pt / 72, height_pt / 72), layout="constrained")


def _svg(figure: Figure, name: str, title: str) -> Markup:
    """A figure of the HTML report as an `<svg>` element that takes its font, colours and width from the page.

    `name` keeps its ids apart from those of the other figures. Nothing in it refers to anything outside.
    """
    out = io.StringIO()
    with _SVG_SETTINGS, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg ") :], flags=re.DOTALL)
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    svg = f'<svg role="img" aria-label="{title}" {size[0]}>' + svg[svg.index(">") + 1 :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg.replace("xlink:href", "href"))
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    names = list(COLORS)
    return Markup(re.sub(r"#fe01([0-9a-f]{2})", lambda found: f"var(--{names[int(found[1], 16)]})", svg))


# ---------------------------------------------------------------- the page


def _plain(value: object) -> object:
    """A value of the page: in texts of other machines, what turns the direction or moves a cursor is spelled out."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _page(run: RunFolder, tables: Sequence[Table]) -> str:
    folder = Path(__file__).parent
    jinja = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_plain
    )
    jinja.filters |= {
        "bytes": readable_bytes,
        "count": readable_count,
        "duration": readable_duration,
        "flops": readable_flops,
        "loss": readable_loss,
        "most": lambda values: max(values, default=0) or None,
        "percent": readable_percent,
        "share": readable_share,
        "text": readable_text,
        "times": readable_times,
        "color": _color_name,
    }
    timed = [row.seconds for row in run.versions if row.seconds]
    steps = {step: sum(seconds[step] for seconds in timed) for step in STEPS} if timed else {}
    return jinja.get_template("report.html").render(
        run=run,
        cards=list(_cards(run)),
        methods=outcomes(run.summary),
        tables=tables,
        rows=_rows(run.versions),
        steps=steps,
        rounds=len(timed),
        phases=[name for name in PHASES if any(one.phases.get(name) for one in run.hardware)],
        attempts=any(row.attempts for row in run.versions),
        fragments=any(row.fragment for row in run.versions),
        spreads=any(row.spread is not None for row in run.versions),
        colors=COLORS,
        signs={kind: sign for kind, (_, sign) in MARKERS.items() if any(notice.kind == kind for notice in run.notices)},
        loss_figures=[_loss_figure(run, axis) for axis in AXES],
        view_figures=[_view_figure(run, width_pt) for width_pt in (WIDE_PT, NARROW_PT)] if run.stays else [],
        step_figures=[_steps_figure(run, width_pt) for width_pt in (WIDE_PT, NARROW_PT)] if steps else [],
        nothing=NOTHING,
    )


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the report's table of versions: one version, or the versions from `first` on as one."""

    first: int
    of: int
    shown: Version


def _rows(versions: Sequence[Version]) -> list[TableRow]:
    if len(versions) <= MAX_ROWS:
        return [TableRow(row.version, 1, row) for row in versions]
    older, newest = versions[: -MAX_ROWS // 4], versions[-MAX_ROWS // 4 :]
    full = [row for row in older if row.notes or len(row.digests) > 1][-MAX_ROWS // 4 :]
    folded = [TableRow(group[0].version, len(group), _as_one(group)) for group in in_groups(older, MAX_ROWS // 2)]
    rows = [*folded, *(TableRow(row.version, 1, row) for row in (*full, *newest))]
    return sorted(rows, key=lambda row: (row.first, -row.of))


def _as_one(group: Sequence[Version]) -> Version:
    """A row of the report for several versions: the last, with notes and digests of the others and means of all."""
    fewest = min(group, key=lambda row: row.counted)
    notes = sum(len(row.notes) for row in group)
    return replace(
        group[-1],
        counted=fewest.counted,
        members=fewest.members,
        loss=mean(row.loss for row in group),
        val_loss=next((row.val_loss for row in reversed(group) if row.val_loss is not None), None),
        tokens_per_s=fmean(row.tokens_per_s for row in group),
        attempts=max(row.attempts for row in group),
        digests=max((row.digests for row in reversed(group)), key=len),
        spread=mean(row.spread for row in group),
        notes=[f"{notes} note{'' if notes == 1 else 's'}"] if notes else [],
    )


def _cards(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Headlines of the report: title, number, and a line to read it by."""
    facts = run.summary
    ours, *others = outcomes(facts)
    base = others[0] if facts.get("baseline") else None
    if base and ours.worse is not None:
        note = f"{readable_loss(ours.val_loss)} beside {readable_loss(base.val_loss)}"
        yield f"Held-out loss vs {base.name}", readable_percent(ours.worse), note
    else:
        note = "no baseline to compare with" if ours.val_loss is not None else "no data yet"
        yield "Held-out loss", readable_loss(ours.val_loss), note
    sent = readable_bytes(ours.wire_bytes_sent)
    if base and ours.fewer is not None:
        note = f"{sent} per peer beside {readable_bytes(base.wire_bytes_sent)}"
        yield f"Fewer bytes than {base.name}", readable_times(ours.fewer), note
    else:
        yield "Sent per peer", sent, "no baseline to compare with" if ours.wire_bytes_sent else "no data yet"
    steps = f"every {facts['h']} inner steps" if facts.get("h") else "agreed anchors"
    gossips = any(row.spread is not None for row in run.versions)
    yield "Swaps per peer" if gossips else "Versions", str(facts["versions"]), steps
    agree, digest = facts.get("digests_agree"), str(facts.get("digest", ""))[:12]
    if gossips:
        yield "Spread between peers", readable_share(facts.get("spread")), "of the weights, when they met last"
    elif agree is None:
        yield "Digest", digest[:8] or NOTHING, "told by one peer only" if digest else "no data yet"
    elif agree:
        yield "Digests", "agree", f"{digest}, the same on all peers"
    else:
        yield "Digests", "differ", "a defect: the peers' states are not the same"
    pace = None  # committed tokens per second, since the run began or since the first version that is known
    if run.versions:
        first, last = run.versions[0], run.versions[-1]
        tokens, at_s = (0, 0.0) if first.version == 1 else (first.tokens, first.at_s)
        pace = (last.tokens - tokens) / (last.at_s - at_s) if last.at_s > at_s else None
    note = f"{ours.tokens:,} tokens in all" if ours.tokens else "no data yet"
    yield "Tokens per second", readable_count(pace), note
