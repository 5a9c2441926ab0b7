"""Numbers and texts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "–"
"""Where a number would stand and there is none."""


def readable_bytes(count: float | None) -> str:
    """A number of bytes as text for people, in decimal units with three digits: 1.93 MB."""
    return NOTHING if count is None else _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def readable_count(count: float | None) -> str:
    """A count as text for people, three digits and a letter: 10.2k."""
    return NOTHING if count is None else _scaled(count, ("", "k", "M", "G", "T")).replace(" ", "")


def readable_duration(seconds: float | None) -> str:
    """A duration as text for people: 0.31 s, 44.0 s, 12:03 (minutes), 3:12:03 (hours)."""
    if seconds is None:
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def readable_times(factor: float | None) -> str:
    """A factor as text for people: 212×, 3.9×."""
    return NOTHING if factor is None else f"{_three_digits(factor)}×"


def readable_loss(loss: float | None) -> str:
    """A loss as text for people: 2.312 (nats per token)."""
    return NOTHING if loss is None else f"{loss:.3f}"


def readable_percent(share: float | None) -> str:
    """A signed difference as text for people: +1.2 %, −0.4 %."""
    return NOTHING if share is None else f"{100 * share:+.1f} %".replace("-", "−")


def readable_share(share: float | None) -> str:
    """A part of a whole as text for people, with two digits: 12 %, 0.43 %."""
    return NOTHING if share is None else f"{100 * share:.2g} %"


def readable_flops(flops_per_s: float | None) -> str:
    """A computing speed as text for people: 1.93 TFLOP/s."""
    units = ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s")
    return NOTHING if flops_per_s is None else _scaled(flops_per_s, units)


def readable_text(text: object, width: int = 32) -> str:
    """Text of another machine, safe to show on one line: all but plain ASCII is spelled out, and cut at `width`."""
    plain = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in str(text)[:width])
    return plain if len(plain) <= width and len(str(text)) <= width else plain[: width - 1] + "…"


def printable(text: str) -> str:
    """Text of another machine in full: only what moves a terminal's cursor, or turns the direction, is spelled out."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _scaled(count: float, units: Sequence[str]) -> str:
    scale = 0
    while abs(count) >= 999.5 and scale < len(units) - 1:
        count, scale = count / 1000, scale + 1
    number = f"{count:.0f}" if scale == 0 else _three_digits(count)
    return f"{number} {units[scale]}".rstrip()


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ", gap: str = "  ") -> list[str]:
    """Numbers and texts as an aligned table: a line for each row, the header first; all rows have as many cells.

    The first `left` columns, and those without a header, are aligned at the left, the others at the right.
    """
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        at_left = index < left or not column[0]
        columns.append([cell.ljust(width) if at_left else cell.rjust(width) for cell in column])
    return [indent + gap.join(cells).rstrip() for cells in zip(*columns, strict=True)]
