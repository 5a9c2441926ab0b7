"""Parts on their way out: collected from whoever makes them, a little ahead of whoever sends them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from diloco.protocol.streams import Part

AHEAD_BYTES = 1 << 20
"""Bytes that are taken before earlier parts are sent: parts of 16 KB fill a message of any size."""


class Outbox:
    """Takes from `parts` in a task of its own, so that small ones that are ready at once can share a message, and
    those that are not yet ready hold up no others. Several streams may take from one outbox.
    """

    def __init__(self, parts: AsyncGenerator[Part]) -> None:
        self._ready: deque[Part] = deque()
        self._ready_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._fill(parts))
        self._task.add_done_callback(lambda _: self._news.set())

    @property
    def starved(self) -> bool:
        """Whether `take` would wait for whoever makes the parts."""
        return not (self._ready or self._task.done() or self._closed)

    async def take(self, max_bytes: int) -> list[Part]:
        """Parts that are ready, at least one and otherwise at most about `max_bytes`; waits for the first.

        Empty at the end or once closed. Raises what `parts` raised.
        """
        while self.starved:
            self._news.clear()
            await self._news.wait()
        if self._closed:
            return []
        taken: list[Part] = []
        taken_bytes = 0
        while self._ready and taken_bytes < max_bytes:
            taken.append(self._ready.popleft())
            taken_bytes += len(taken[-1].payload)
        self._ready_bytes -= taken_bytes
        self._room.set()
        if not taken:
            self._task.result()
        return taken

    def close(self) -> None:
        """Nobody wants the rest."""
        self._closed = True
        self._task.cancel()
        self._news.set()

    async def _fill(self, parts: AsyncGenerator[Part]) -> None:
        async with aclosing(parts):  # or it lives until the garbage collector finds it, with all that it holds up
            async for part in parts:
                self._ready.append(part)
                self._ready_bytes += len(part.payload)
                self._news.set()
                while self._ready_bytes >= AHEAD_BYTES:
                    self._room.clear()
                    await self._room.wait()
