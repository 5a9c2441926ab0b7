"""Threads that do one thing after another, beside the one that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_in_place = False


def one_thread(name: str) -> Executor:
    """A thread of that name, which does what it is given in order."""
    return InPlace() if _in_place else ThreadPoolExecutor(1, thread_name_prefix=name)


class InPlace(Executor):
    """Does what it is given at once, on the thread that gives it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextmanager
def in_place() -> Iterator[None]:
    """Meanwhile `one_thread` makes no threads in this whole process: a simulation's clock could not wait for them."""
    global _in_place
    before, _in_place = _in_place, True
    try:
        yield
    finally:
        _in_place = before
