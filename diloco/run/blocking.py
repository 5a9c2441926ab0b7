"""The front that blocks: it pushes a peer's life on, on the thread that asks, until somebody has to train.

It is a file of its own: only here is a `Wait` of a life waited for, so that another clock can drive one.
"""

from __future__ import annotations

import time
from concurrent.futures import wait as wait_for
from typing import TypeVar

from diloco.base.life import Life, Wait

T = TypeVar("T")


def block(piece: Life[T]) -> T:
    """Block the caller of a `Run` through a piece of its life in which nobody trains. Returns the piece's result."""
    try:
        wanted: Wait = next(piece)
        while True:
            try:
                if wanted.future is None:
                    time.sleep(wanted.seconds)
                else:
                    wait_for([wanted.future], wanted.seconds)
            except BaseException as error:  # a Ctrl-C is the piece's to hear of, too
                wanted = piece.throw(error)
            else:
                wanted = next(piece)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
