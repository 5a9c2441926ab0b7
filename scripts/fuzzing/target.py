"""A target of fuzzing: a reader of bytes that others made, and the valid inputs that damage begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.fuzzing.spoiling import Spoil, spoiled_bytes


@dataclass(frozen=True)
class Target:
    """A reader of bytes, in a process and an empty working directory of its own."""

    name: str
    read: Callable[[bytes], object]
    """Reads one input. Any exception but a refusal is a finding."""
    corpus: Callable[[], Sequence[bytes]]
    """Makes valid inputs, which `read` must take, by the code that writes them."""
    refusals: tuple[type[Exception], ...] = (ValueError,)
    spoil: Spoil = spoiled_bytes
    share: int = 1
    """The inputs are so many times fewer: 10 for files and contracts, whose readers take longer."""
    cpu_s: float = 1.0
    """CPU that one input may take."""
    room_bytes: int = 2**21
    """Memory that one input may take beside 64 times its size: the bound that its reader sets."""


class Finding(Exception):
    """A reader did what it must not: said in one line."""
