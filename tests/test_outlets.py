"""What goes first, and how much is taken ahead of what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from diloco.exchange.link import Part
from diloco.exchange.outbox import AHEAD_BYTES, Outbox
from diloco.exchange.outlets import Outlets, Precedence

PATIENCE_S = 10.0


def outlets(parts: int) -> Outlets:
    """With all their parts ready."""
    made = Outlets(range(parts))
    for index in range(parts):
        made.put(Part(index, b"mean"))
    return made


async def sent(flow: AsyncIterator[Part]) -> int:
    return (await anext(flow)).index


def test_a_mean_waits_for_the_contributions() -> None:
    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)
        flow = outlets(3).flow(lambda part: part, precedence, {0, 2})
        with precedence.first():
            with precedence.first():
                waiting = asyncio.create_task(sent(flow))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()  # the other one still goes out
        assert await asyncio.wait_for(waiting, PATIENCE_S) == 0
        assert await asyncio.wait_for(sent(flow), PATIENCE_S) == 2

    asyncio.run(scenario())


def test_one_mean_after_the_other_gets_through_meanwhile() -> None:
    async def scenario() -> None:
        precedence = Precedence(0.01)
        with precedence.first():
            flow = outlets(2).flow(lambda part: part, precedence, {0, 1})
            assert [await asyncio.wait_for(sent(flow), PATIENCE_S) for _ in range(2)] == [0, 1]

    asyncio.run(scenario())


def test_a_contribution_that_breaks_off_holds_up_nobody() -> None:
    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)
        with pytest.raises(ConnectionError), precedence.first():
            raise ConnectionError
        assert await asyncio.wait_for(sent(outlets(1).flow(lambda part: part, precedence, {0})), PATIENCE_S) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("part_bytes", [AHEAD_BYTES // 64, AHEAD_BYTES // 3, 2 * AHEAD_BYTES])
def test_no_more_is_taken_ahead_than_a_few_messages(part_bytes: int) -> None:
    async def scenario() -> None:
        taken = 0

        async def parts() -> AsyncIterator[Part]:
            nonlocal taken
            for index in range(200):
                taken += 1
                yield Part(index, bytes(part_bytes))

        async with aclosing(parts()) as flow:
            outbox, got = Outbox(flow), 0
            while some := await outbox.take(1):
                got += len(some)
                for _ in range(300):  # until nothing more is taken
                    await asyncio.sleep(0)
                ahead = -(-AHEAD_BYTES // part_bytes)
                assert taken == min(got + ahead, 200)
            assert got == 200
            outbox.close()

    asyncio.run(scenario())
