"""Rows of text as aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row, the header first; all rows have as many cells.

    The first `left` columns, and those without a header, stand at the left, the others at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left or not rows[0][index] else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
