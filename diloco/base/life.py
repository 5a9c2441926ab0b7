"""A life in pieces: generators that yield what they wait for. Whoever pushes one on, a front, is all that blocks.

    def piece() -> Life[int]:
        reply = yield from answered(exchange.speeds())   # yields `Wait` until the answer is there
        yield from other_piece()
        return reply

A front gets a `Wait`, or a `Train` (`diloco.base.decisions`), and goes on when that is over: a thread that sleeps
(`diloco.run.blocking`), or a clock that jumps.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from diloco.base.types import Commit

T = TypeVar("T")
S = TypeVar("S")

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
    """Wait for a result. Raises what the future does."""
    while not future.done():
        yield Wait(future, POLL_S)
    return future.result()


def done(value: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class Stepped(Protocol[S]):
    """A version on its way into a state: average and outer step, made on another thread or at once."""

    @property
    def commit(self) -> Commit:
        """Commit of the version."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of `average` and `outer` so far, on the thread that makes them."""

    def averaged(self) -> Future[None]:
        """Done when every part of the mean held here is decoded. PayloadError: they are no mean."""

    def outer(self, in_place: bool) -> Future[S]:
        """The fragment's next state. `in_place`: the one before may be overwritten, once all parts were decoded."""
