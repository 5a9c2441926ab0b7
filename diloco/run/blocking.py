"""The front that blocks: it pushes a life on, on the thread that asks, until somebody has to train."""

from __future__ import annotations

import time
from concurrent.futures import wait as wait_for
from typing import TypeVar

from diloco.base.life import Life, Wait

T = TypeVar("T")


def block(piece: Life[T]) -> T:
    """The result of a piece in which nobody trains."""
    try:
        wanted = next(piece)
        while True:
            try:
                _wait(wanted)
            except BaseException as error:  # a Ctrl-C is the piece's to hear of, too
                wanted = piece.throw(error)
            else:
                wanted = next(piece)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _wait(wanted: Wait) -> None:
    if wanted.future is None:
        time.sleep(wanted.seconds)
    else:
        wait_for([wanted.future], wanted.seconds)
