"""Limit and measurement of the sending rate, without I/O.

The limit is a token bucket after the generic cell rate algorithm. The state for a joiner shares a peer's uplink and
cores with its training, which goes first; and a peer's rounds may share an uplink with its owner.
"""

from __future__ import annotations

import math
from statistics import median

SERVE_BPS_PER_CORE = 80e6
"""Bits per second to joiners that cost 5 % of a core: checksum, gRPC, TLS and TCP take 5 ns a byte beside training
(`scripts/bench-join`)."""

BURST_S = 0.1
"""Unused allowance older than this is not made up for: a busy event loop wakes up that late."""

MEASURED_S = 0.5
"""Seconds of sending in one sample of the rate: shorter ones measure busy cores more than the link."""
MEASURED_VERSIONS, MIN_VERSIONS = 4, 3
"""Versions whose samples are remembered, and versions that are needed for a rate: a process's first syncs are slow."""


class RateLimit:
    """Tells each sender when its turn is. Whoever asks first is served first, so several senders share one limit.

    Args:
        bps: bits per second over all senders; 0: no limit.
    """

    def __init__(self, bps: float) -> None:
        self._bps = bps
        self._free_at_s = float("-inf")

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds to wait before sending so many bytes, which count as sent from now on. `now_s`: monotonic."""
        if not self._bps:
            return 0.0
        turn_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = turn_s + 8 * size_bytes / self._bps
        return max(turn_s - now_s, 0.0)


class Uplink:
    """The rate at which others take what this peer sends, over all streams together, measured in passing.

    What was taken is divided by the time in which any stream had something to send: streams share the uplink. Such a
    rate is that of the uplink only while nothing else holds the streams up. Receivers with full downlinks, or cores
    that are busy, make it less, nothing makes it more for long; so a version's fastest MEASURED_S count (as in BBR,
    Cardwell et al. 2016), and of versions the median. By the mean of all, four equal peers at 100 Mbit/s differed by
    1.4, and what they owned of the fragment with them.

    Args:
        limit_bps: of a `RateLimit` before it, which no estimate exceeds; 0: none.
    """

    def __init__(self, limit_bps: float) -> None:
        self._limit_bps = limit_bps or math.inf
        self._version = -1
        self._bits = 0.0
        self._busy_s = 0.0
        self._busy_until_s = float("-inf")
        self._fastest: dict[int, float] = {}
        """By version, bits per second."""

    def begin(self, version: int) -> None:
        """Sending for this version."""
        self._version = version

    def took(self, size_bytes: int, since_s: float, now_s: float) -> None:
        """A receiver took so much since then, and there was more to send to it all the time. Times are monotonic."""
        self._bits += 8 * size_bytes
        self._busy_s += max(now_s - max(since_s, self._busy_until_s), 0.0)
        self._busy_until_s = max(now_s, self._busy_until_s)
        if self._busy_s >= MEASURED_S:
            self._sample(self._bits / self._busy_s)
            self._bits = self._busy_s = 0.0

    def _sample(self, bps: float) -> None:
        self._fastest[self._version] = max(bps, self._fastest.get(self._version, 0.0))
        if len(self._fastest) > MEASURED_VERSIONS:
            del self._fastest[next(iter(self._fastest))]

    @property
    def bps(self) -> int:
        """Bits per second. The limit, if there is one, before enough was measured; without either 0: unknown."""
        enough = len(self._fastest) >= MIN_VERSIONS
        measured_bps = median(self._fastest.values()) if enough else math.inf
        bps = min(measured_bps, self._limit_bps)
        return int(bps) if math.isfinite(bps) else 0
