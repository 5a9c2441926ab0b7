"""Order of the parts that are sent, and the number taken ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from diloco.base.clock import monotonic_s
from diloco.exchange.outlets import Outlets, Precedence
from diloco.protocol.streams import Part
from diloco.transport.pace import AHEAD_BYTES, Outbox

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
        flow = outlets(3).flow(lambda part: part, precedence, set(), {0, 2})
        with precedence.first(1):
            with precedence.first(1):
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
        with precedence.first(1):
            flow = outlets(2).flow(lambda part: part, precedence, set(), {0, 1})
            assert [await asyncio.wait_for(sent(flow), PATIENCE_S) for _ in range(2)] == [0, 1]

    asyncio.run(scenario())


def test_what_went_out_on_a_line_that_broke_is_sent_again_at_once() -> None:
    """Its receiver may have it, and sees nothing new while it waits."""

    async def scenario() -> None:
        precedence, made, had = Precedence(PATIENCE_S), outlets(3), set[int]()
        broken = made.flow(lambda part: part, precedence, had, {0, 1, 2})
        assert [await sent(broken) for _ in range(2)] == [0, 1]
        await broken.aclose()
        with precedence.first(1):
            again = made.flow(lambda part: part, precedence, had, {0, 1, 2})
            assert [await asyncio.wait_for(sent(again), PATIENCE_S / 2) for _ in range(2)] == [0, 1]
            waiting = asyncio.create_task(sent(again))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, PATIENCE_S) == 2

    asyncio.run(scenario())


def test_a_contribution_that_breaks_off_holds_up_nobody() -> None:
    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)
        with pytest.raises(ConnectionError), precedence.first(1):
            raise ConnectionError
        assert await asyncio.wait_for(sent(outlets(1).flow(lambda part: part, precedence, set(), {0})), PATIENCE_S) == 0

    asyncio.run(scenario())


def test_who_takes_little_holds_up_nobody_for_long() -> None:
    """The rest has twice the time that half of all contributions took, which here is hardly any."""

    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)
        flow = outlets(3).flow(lambda part: part, precedence, set(), {0, 1, 2})
        with precedence.first(2) as slow, precedence.first(4) as fast:
            began_s = monotonic_s()
            fast()
            fast()
            slow()
            took_s = monotonic_s() - began_s
            assert [await sent(flow) for _ in range(3)] == [0, 1, 2]
            assert monotonic_s() - began_s < PATIENCE_S
            assert monotonic_s() - began_s >= 2 * took_s

    asyncio.run(scenario())


@pytest.mark.parametrize("steps", range(4))
def test_a_turn_that_is_cancelled_as_it_comes_is_cancelled(steps: int) -> None:
    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)
        with precedence.first(1):
            waiting = asyncio.create_task(precedence.turn())
            await asyncio.sleep(0)
        for _ in range(steps):  # of the loop, since its turn came
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(scenario())


def test_what_nobody_takes_more_of_is_closed() -> None:
    """Also where it was not at an end: a contribution that broke off must not hold up means until it is collected."""

    async def scenario() -> None:
        precedence = Precedence(PATIENCE_S)

        async def contribution() -> AsyncGenerator[Part]:
            with precedence.first(100) as out:
                for index in range(100):
                    out()
                    yield Part(index, bytes(AHEAD_BYTES))

        outbox = Outbox(contribution())
        assert await outbox.take(1)
        outbox.close()
        await asyncio.wait_for(precedence.turn(), PATIENCE_S / 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("part_bytes", [AHEAD_BYTES // 64, AHEAD_BYTES // 3, 2 * AHEAD_BYTES])
def test_no_more_is_taken_ahead_than_a_few_messages(part_bytes: int) -> None:
    async def scenario() -> None:
        taken = 0

        async def parts() -> AsyncGenerator[Part]:
            nonlocal taken
            for index in range(200):
                taken += 1
                yield Part(index, bytes(part_bytes))

        outbox, got = Outbox(parts()), 0
        while some := await outbox.take(1):
            got += len(some)
            for _ in range(300):  # until nothing more is taken
                await asyncio.sleep(0)
            ahead = -(-AHEAD_BYTES // part_bytes)
            assert taken == min(got + ahead, 200)
        assert got == 200
        outbox.close()

    asyncio.run(scenario())
