"""What lives on the exchange's loop, and is talked to from the training thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from diloco.base.clock import monotonic_s
from diloco.base.errors import StateError

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ASK_TRIES = 60
"""Seconds for which the loop may be busy, at most."""


class Background:
    """Tasks on a loop of another thread. What fails there is raised here, at the next question."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the loop's thread. Tries are counted, and not seconds: this process may have been stopped."""

        async def answer() -> T:
            return question()

        future = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        for _ in range(MAX_ASK_TRIES):
            try:
                return future.result(1.0)
            except TimeoutError:
                self._raise_failure()
        raise AssertionError(f"the exchange's loop did not answer {MAX_ASK_TRIES} times")

    def _wanted(self, copying: Coroutine[Any, Any, T], timeout_s: float, waiting: Callable[[], bool]) -> T:
        """What `copying` gives. Raises what it raises, StateError once nobody is `waiting` any more, which is asked a
        few times a second, and TimeoutError after `timeout_s`."""
        future = asyncio.run_coroutine_threadsafe(copying, self._loop)
        deadline_s = monotonic_s() + timeout_s
        while not future.done():
            if monotonic_s() > deadline_s:
                future.cancel()
                raise TimeoutError
            if not waiting():
                future.cancel()
                raise StateError("asked to leave while the state was copied", "join again")
            wait([future], 0.2)
        return future.result()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                function(*arguments)
            except BaseException as error:  # the loop would only log it, and the training side wait
                self.failed(error)

        self._loop.call_soon_threadsafe(guarded)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ the loop's thread from here on

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """The training side is to end for it."""
        logger.error("the exchange failed", exc_info=error)
        self._failure = self._failure or error

    async def _stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
