"""Bounds of a field, written in its annotation; whoever reads hostile bytes into the field holds them.

Without one a text has at most `MAX_TEXT` characters, a tuple at most `MAX_LIST` entries, a whole number is at least 0
and below 2^63, and a float is finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_TEXT: Final = 256
"""Characters of a name, an address, a digest."""
MAX_LIST: Final = 4096


@dataclass(frozen=True, slots=True)
class MinValue:
    """`Annotated[int, MinValue(-1)]`: the least number that is taken."""

    value: int


@dataclass(frozen=True, slots=True)
class MinLength:
    """The fewest entries of a tuple."""

    length: int


@dataclass(frozen=True, slots=True)
class MaxLength:
    """The most characters of a text, bytes of a `bytes`, entries of a tuple."""

    length: int
    cut: bool = False
    """A longer text is cut when it is sent, not refused: it is for people."""


@dataclass(frozen=True, slots=True)
class HexDigest:
    """A hexadecimal text that travels as its `size` raw bytes."""

    size: int
