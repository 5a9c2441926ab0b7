"""Streams of parts that others may have open at one door of a peer: rank 0's, a lane's, or that of a gossiping peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.protocol.messages import Reply
from diloco.transport.link import LinkRefused

MAX_STREAMS = 64
"""Streams of parts that one peer may have at a door at once, and all strangers together: four times `network.streams`,
for a contribution and a mean, and as many that are about to end. A stream costs 180 kB."""


class StreamQuota:
    """Streams of parts that are open at one door, by sender."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def open(self, sender: str) -> Iterator[None]:
        """A stream while it is open; of strangers, `sender` is empty. Raises LinkRefused (TOO_EARLY) where the sender
        has as many as it may have."""
        if self._open[sender] >= MAX_STREAMS:
            raise LinkRefused(Reply.TOO_EARLY, f"{MAX_STREAMS} streams of this sender are open")
        self._open[sender] += 1
        try:
            yield
        finally:
            self._open[sender] -= 1
            self._open += Counter()  # without the names of those that have none
