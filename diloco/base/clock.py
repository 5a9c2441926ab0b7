"""The local clock. Time is monotonic and local; no decision compares clocks of two machines."""

from __future__ import annotations

import time


def monotonic_s() -> float:
    """Seconds since some fixed moment of this machine."""
    return time.monotonic()


def unix_s() -> float:
    """Seconds since 1970, for people who read logs; nothing is decided by it."""
    return time.time()


def new_incarnation() -> int:
    """A number for a life that begins now, larger than those of the same peer's earlier lives.

    It tells a peer's lives apart, and which is the later one, by that peer's own clock. Where that was set back, the
    new life is taken for an earlier one until the old one is forgotten.
    """
    return time.time_ns() // 1000
