"""How fast to send what nobody is in a hurry for: a token bucket without I/O, after the generic cell rate algorithm.

The state for a joiner shares a peer's uplink and cores with its training, which goes first.
"""

from __future__ import annotations

BURST_S = 0.1
"""What was not sent in this time is not made up for: a busy event loop wakes up that late."""


class RateLimit:
    """Tells each sender when its turn is. Whoever asks first is served first, so several joiners share one limit.

    Args:
        bps: bits per second over all senders; 0: no limit.
    """

    def __init__(self, bps: float) -> None:
        self._bps = bps
        self._free_at_s = float("-inf")

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """How long to wait before sending so many bytes, which count as sent from now on. `now_s`: monotonic."""
        if not self._bps:
            return 0.0
        turn_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = turn_s + 8 * size_bytes / self._bps
        return max(turn_s - now_s, 0.0)
