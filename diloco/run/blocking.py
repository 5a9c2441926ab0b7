"""The front that blocks: it pushes a life on, on the thread that asks, until somebody has to train."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from typing import TypeVar

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Train
from diloco.base.life import Life, Wait

T = TypeVar("T")


def block(piece: Life[T], idle: Callable[[], None] = lambda: None) -> T:
    """The result of a piece in which nobody trains. `idle`: called between waits."""
    try:
        while True:
            _wait(next(piece), idle)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def push(piece: Life[T], idle: Callable[[], None], deadline_s: float) -> Train | None:
    """On, until somebody has to train. None: the piece has ended, or the deadline (`monotonic_s`) is over."""
    for wanted in piece:
        if isinstance(wanted, Train):
            return wanted
        _wait(wanted, idle)
        if monotonic_s() > deadline_s:
            return None
    return None


def _wait(wanted: Wait, idle: Callable[[], None]) -> None:
    if wanted.future is None:
        time.sleep(wanted.seconds)
    else:
        wait_for([wanted.future], wanted.seconds)
    idle()
