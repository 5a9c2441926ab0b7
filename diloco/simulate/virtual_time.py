"""Virtual time: peers of production on one thread, and a clock that jumps to whatever is next.

    with virtual_time() as loop:
        loop.run_until_complete(lived(trainer.live()))

Nothing that happens takes any time: an inner step takes what its site says, a message none, and work that has threads
of its own elsewhere is done in place. The same run gives the same bits each time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from diloco.base.clock import going_by
from diloco.base.life import Life
from diloco.base.threads import InPlace, in_place

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of virtual time, which goes on only when nothing is left to do, and then at once."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self._jump))
        self._now_s = 0.0
        self._clock_resolution = 1e-6  # a nanosecond is lost in the sum where months have passed

    def time(self) -> float:
        """Virtual time, in seconds since the loop was made."""
        return self._now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the function in place: virtual time has no threads."""
        return asyncio.wrap_future(InPlace().submit(func, *args), loop=self)

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError("everybody waits, and nothing is due")
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._jump(timeout)
        return ready


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Virtual time for this process until it is left: the clock of the loop, and no threads."""
    loop = VirtualLoop()
    with going_by(loop.time), in_place():
        try:
            yield loop
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()


async def lived(piece: Life[T]) -> T:
    """The result of a life driven in virtual time, in which nobody trains, as `diloco.run.blocking.block` has it."""
    try:
        while True:
            wanted = next(piece)
            if wanted.future is None:
                await asyncio.sleep(wanted.seconds)
            else:
                await asyncio.wait([asyncio.wrap_future(wanted.future)], timeout=wanted.seconds)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        piece.close()
