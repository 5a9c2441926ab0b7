"""The local clock. Time is monotonic and local; no decision compares clocks of two machines."""

from __future__ import annotations

import time


def monotonic_s() -> float:
    """Seconds since some fixed moment of this machine."""
    return time.monotonic()


def unix_s() -> float:
    """Seconds since 1970, for people who read logs; nothing is decided by it."""
    return time.time()
