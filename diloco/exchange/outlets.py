"""Parts that a lane sends in a version, and their order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.compress.encoding import Encoded
from diloco.protocol.streams import Part


class Precedence:
    """Order of a lane's parts: contributions go out before means, which get through one by one meanwhile.

    A mean that shares the uplink with contributions holds up the means of others: four peers at 100 Mbit/s had nothing
    to send for a quarter of a sync. But nobody must think that nothing moves, and who takes little, for his own link is
    slow or he means harm, must not hold up what others could take: with half of all contributions gone, the other half
    has twice as long as that took.

    Args:
        pause_s: between one mean of a stream and the next, while contributions go out.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._under_way = 0
        self._parts = self._gone = 0
        """Parts of all contributions, and how many of them were sent."""
        self._since_s = math.inf
        self._until_s = math.inf
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def first(self, parts: int) -> Iterator[Callable[[], None]]:
        """Let a contribution's parts go out of the lane before means. Yields a function to call for each part sent."""
        self._under_way += 1
        self._parts += parts
        self._since_s = min(self._since_s, monotonic_s())
        self._free.clear()
        try:
            yield self._went
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._free.set()

    async def turn(self) -> None:
        """Wait until a part of a mean may go out of the lane."""
        left_s = min(self._pause_s, self._until_s - monotonic_s())
        if self._free.is_set() or left_s <= 0:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):  # wait_for() of Python 3.11 may take a cancellation for its own
                await self._free.wait()

    def _went(self) -> None:
        self._gone += 1
        if 2 * self._gone >= self._parts and math.isinf(self._until_s):
            now_s = monotonic_s()
            self._until_s = now_s + 2 * (now_s - self._since_s)


class Outlets:
    """A lane's averaged parts on their way to every receiver, since `Begin` or since a repair.

    An averaged part stays here, so that a stream that broke can begin again.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = frozenset(parts)
        self.waiting = set(parts)
        """Parts that are not averaged yet."""
        self.streams: list[asyncio.Task[None]] = []
        self._count = len(parts)
        self._ready: list[Part] = []
        self._news = asyncio.Event()

    def put(self, part: Part) -> None:
        """Add a part that is averaged, to go out of the lane on every stream."""
        self.waiting.remove(part.index)
        self._ready.append(part)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end(self) -> None:
        """End the streams: no receiver needs the parts from this lane any more."""
        for stream in self.streams:
            stream.cancel()

    async def flow(
        self, fitted: Callable[[Part], Part], precedence: Precedence, sent: set[int], wanted: Collection[int]
    ) -> AsyncGenerator[Part]:
        """Parts of `wanted` for one stream of the lane, as they get ready, `fitted` to their receiver, in turn.

        `sent`: which of them had their turn, on a line that broke: their receiver may have them already, and must not
        wait through all their pauses for what is new.
        """
        for index in range(self._count):
            if index == self._count // 2:
                failpoints.hit("mid-mean")
            while index >= len(self._ready):
                await self._news.wait()
            part = self._ready[index]
            if part.index not in wanted:
                continue
            if part.index not in sent:
                await precedence.turn()
                sent.add(part.index)
            yield fitted(part)


class MovedBytes:
    """Count of the bytes that others took from a lane and brought to it, reported now and then.

    Args:
        pause_s: between two reports, at least; what comes meanwhile is in the next.
    """

    def __init__(self, pause_s: float, report: Callable[[int], None]) -> None:
        self._pause_s, self._report = pause_s, report
        self._bytes = 0
        self._reported_at_s = -math.inf

    def count(self, size_bytes: int) -> None:
        """Count bytes that moved in the lane just now."""
        self._bytes += size_bytes
        if self._bytes and monotonic_s() - self._reported_at_s >= self._pause_s:
            self._reported_at_s = monotonic_s()
            self._report(self._bytes)
            self._bytes = 0


async def encoded(parts: Sequence[bytes], index: int) -> bytes:
    """A part of the lane's contribution, once it is encoded; another thread waits for it."""
    if isinstance(parts, Encoded) and parts.ready(index):
        return parts[index]
    return await asyncio.to_thread(parts.__getitem__, index)
