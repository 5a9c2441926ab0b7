"""A front for tests: it pushes a piece of a peer's life on, and does inner steps where somebody has to train."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from diloco.base.decisions import Train
from diloco.base.life import Life

T = TypeVar("T")


def drive(piece: Life[T], inner_step: Callable[[], None] | None = None) -> T:
    """What a piece of life comes to. `inner_step`: does one, and tells the life of it."""
    while True:
        try:
            wanted = next(piece)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(wanted, Train):
            assert inner_step is not None, "nobody trains here"
            for _ in range(wanted.steps):
                inner_step()
        elif wanted.future is None:
            time.sleep(wanted.seconds)
        else:
            wait([wanted.future], wanted.seconds)
