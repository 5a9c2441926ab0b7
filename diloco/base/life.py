"""A life in pieces: generators that yield what they wait for. Whoever pushes one on, a front, is all that blocks.

    def piece() -> Life[int]:
        reply = yield from answered(exchange.speeds())   # yields `Wait` until the answer is there
        yield from other_piece()
        return reply

A front gets a `Wait`, or a `Train` (`diloco.base.decisions`), and goes on when that is over: a thread that sleeps
(`diloco.run.blocking`), or a clock that jumps.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Life = Generator[Any, None, T]
"""Yields `Wait` and `Train`; returns what the piece comes to."""

POLL_S = 0.2
"""Longest wait between two looks at a condition that no future tells of."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on once `future` is done, in good order or not, or after these seconds. None: after the seconds."""

    future: Future[Any] | None
    seconds: float


def answered(future: Future[T]) -> Life[T]:
    """Yield a `Wait` until any future is done; its result. Raises what the future does."""
    while not future.done():
        yield Wait(future, POLL_S)
    return future.result()


def done(value: T) -> Future[T]:
    """Any value as a future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
