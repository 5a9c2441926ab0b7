"""Base of the exchange and its lanes: tasks on an event loop, called from the training thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ExchangeTasks:
    """Tasks of the exchange or a lane on its loop's thread. A failure there fails every future that was given out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._promises: set[Future[Any]] = set()
        """Futures that somebody may wait for."""
        self._failure: BaseException | None = None

    def _ask(self, question: Callable[[], T]) -> Future[T]:
        """The answer of the exchange's or lane's loop thread to a question."""
        future = self._promised()
        self._call(lambda: _work(future, question))
        return future

    def _start_task(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Result of a task on the exchange's loop. Cancelling it cancels the task; its failure fails nothing else."""
        future = self._promised()

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            future.add_done_callback(lambda ended: self._cancel(task) if ended.cancelled() else None)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: _work(future, task.result))

        self._call(begin)
        return future

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(task.cancel)

    def _promised(self) -> Future[Any]:
        """A future that fails when this exchange or lane does, so that its waiter need not ask whether work goes on."""
        future: Future[Any] = Future()
        self._promises.add(future)
        future.add_done_callback(self._promises.discard)
        if self._failure is not None:
            _fail(future, self._failure)
        return future

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(self._guarded, function, *arguments)

    def _guarded(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # the loop would only log it, and the training side wait
            self.failed(error)

    def raise_failure(self) -> None:
        """Raises the error that ended this exchange or lane, if one did."""
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
        """End this exchange or lane with `error`, which the training side is to raise."""
        if self._failure is None:
            logger.error("the exchange failed", exc_info=error)
        self._failure = self._failure or error
        for future in list(self._promises):
            _fail(future, self._failure)

    def _end_tasks(self) -> None:
        """End the tasks of this exchange or lane. Another thread than the loop's waits until they have ended."""
        if self._loop.is_closed():
            return
        if self._is_here():
            self._cancel_tasks()
        else:
            asyncio.run_coroutine_threadsafe(self._ending(), self._loop).result(5.0)

    def _is_here(self) -> bool:
        """Whether the loop's thread is the one that runs."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def _ending(self) -> None:
        self._cancel_tasks()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()


def settle(future: Future[T] | None, value: T) -> None:
    """Give a future of the exchange its result, unless it was cancelled or has failed meanwhile. None: nobody waits."""
    if future is not None:
        with suppress(InvalidStateError):
            future.set_result(value)


def _work(future: Future[T], work: Callable[[], T]) -> None:
    try:
        settle(future, work())
    except BaseException as error:
        _fail(future, error)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
