"""The local clock. Time is monotonic and local; no decision compares clocks of two machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_now_s: Callable[[], float] = time.monotonic
_since_1970_s: Callable[[], float] = time.time


def monotonic_s() -> float:
    """The local monotonic clock: seconds since some fixed moment of this machine."""
    return _now_s()


@contextmanager
def going_by(clock: Callable[[], float]) -> Iterator[None]:
    """Replace the local clock, monotonic and Unix, by another one in this whole process meanwhile."""
    global _now_s, _since_1970_s
    before, (_now_s, _since_1970_s) = (_now_s, _since_1970_s), (clock, clock)
    try:
        yield
    finally:
        _now_s, _since_1970_s = before


def unix_s() -> float:
    """The local Unix clock: seconds since 1970, for people who read logs; nothing is decided by it."""
    return _since_1970_s()


def new_incarnation() -> int:
    """The clock's number for a life that begins now, larger than those of the same peer's earlier lives.

    It tells a peer's lives apart, and which is the later one, by that peer's own clock. Where that was set back, the
    new life is taken for an earlier one until the old one is forgotten.
    """
    return int(_since_1970_s() * 1e6)
