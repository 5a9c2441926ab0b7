"""The front of virtual time: its loop, and a piece of life on it.

`tests/test_run.py` compares a whole run with one of real processes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from diloco.base.clock import monotonic_s
from diloco.base.life import Life, Wait, answered
from diloco.base.threads import one_thread
from diloco.simulate.virtual_time import lived, virtual_time


def test_a_year_passes_in_a_moment() -> None:
    before_s = time.monotonic()
    with virtual_time() as loop:
        loop.run_until_complete(asyncio.sleep(3.2e7))
        assert monotonic_s() == loop.time() == 3.2e7
    assert time.monotonic() - before_s < 10
    assert abs(monotonic_s() - time.monotonic()) < 10


def test_everything_happens_in_the_order_of_time_and_on_one_thread() -> None:
    before = set(threading.enumerate())  # those of other tests, which may end meanwhile
    seen: list[tuple[float, str]] = []

    async def sleeper(name: str, pause_s: float) -> None:
        for _ in range(3):
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(seen.append, (monotonic_s(), name))

    async def both() -> None:
        await asyncio.gather(sleeper("slow", 5.0), sleeper("fast", 2.0))

    with virtual_time() as loop:
        loop.run_until_complete(both())
        assert one_thread("w").submit(threading.get_ident).result() == threading.get_ident()
    assert seen == [(2, "fast"), (4, "fast"), (5, "slow"), (6, "fast"), (10, "slow"), (15, "slow")]
    assert not set(threading.enumerate()) - before


def test_a_piece_of_life_waits_for_futures_and_seconds() -> None:
    answer: Future[str] = Future()

    def piece() -> Life[tuple[bool, float, str]]:
        yield Wait(answer, 1.0)
        early = answer.done()
        yield Wait(None, 2.0)
        return early, monotonic_s(), (yield from answered(answer))

    with virtual_time() as loop:
        loop.call_later(5.0, answer.set_result, "yes")
        assert loop.run_until_complete(lived(piece())) == (False, 3.0, "yes")
        assert monotonic_s() == 5.0


def test_where_nothing_is_due_nobody_waits_for_ever() -> None:
    with virtual_time() as loop, pytest.raises(RuntimeError, match="nothing is due"):
        loop.run_until_complete(asyncio.Event().wait())
