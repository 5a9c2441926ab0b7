"""Threads that do one thing after another, beside the one that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_in_place = False
_condition: Callable[[], threading.Condition] = threading.Condition


def one_thread(name: str) -> Executor:
    """An executor with one thread of that name, which runs any calls in order."""
    return InPlace() if _in_place else ThreadPoolExecutor(1, thread_name_prefix=name)


def aside(name: str, work: Callable[[], T]) -> Future[T]:
    """Do any work on a daemon thread of that name, for which a process that must end does not wait."""
    if _in_place:
        return InPlace().submit(work)
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


def condition() -> threading.Condition:
    """A condition on which any thread waits, and of which any other tells."""
    return _condition()


class InPlace(Executor):
    """An executor without a thread: it runs each call at once, on the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run any call at once, on the caller's thread; a future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextmanager
def in_place(waits: Callable[[], threading.Condition] = threading.Condition) -> Iterator[None]:
    """Make `one_thread` return executors without threads meanwhile, in this whole process: a replaced clock could not
    wait for threads. `waits`: makes what `condition` returns."""
    global _in_place, _condition
    before = _in_place, _condition
    _in_place, _condition = True, waits
    try:
        yield
    finally:
        _in_place, _condition = before
