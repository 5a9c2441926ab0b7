"""Floods by a member: it knows the secret, and says far more than honest peers do, under as many names as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count

from diloco.base.types import Member, Progress
from diloco.config.load import contract_from_json
from diloco.protocol import messages as m
from diloco.protocol.streams import Kind, Part, StreamHeader, Welcome
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow
from scripts.attacks.victims import CALM_S, Attack, NotHeld, Victims

RPC_S = 5.0
JOINERS = 300
STREAMS = 600
NO_ANSWER = (LinkDown, LinkSlow, LinkRefused)


@dataclass
class Intruder:
    """A caller of one peer, in this process, that speaks as whomever it likes."""

    link: GrpcLink
    address: str
    welcome: Welcome
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def envelope(self, sender: Member, body: m.Body, sequence: int = 0, boot: int = 1) -> m.Envelope:
        contract = contract_from_json(self.welcome.contract)
        number = sequence or next(self.numbers)
        terms = contract.run.name, contract.digest, self.welcome.lineage
        return m.Envelope(*terms, sender, boot, 0, 0, "", number, body)

    def beat(self, forks: tuple[m.Fork, ...] = ()) -> m.Heartbeat:
        """A heartbeat of a joiner that stands on the run's version."""
        return m.Heartbeat(self.welcome.version, -1, True, Progress(), forks=forks)

    async def say(self, envelope: m.Envelope) -> str:
        """The reply, or why there was none."""
        try:
            return (await self.link.deliver(self.address, envelope)).name
        except NO_ANSWER as error:
            return str(error)


def _flood(victims: Victims, act: Callable[[Intruder], Awaitable[str]]) -> str:
    """Speak to the first peer while its versions are counted."""

    async def run() -> str:
        link = GrpcLink(RPC_S, victims.keys)
        try:
            address = victims.address("p0")
            intruder = Intruder(link, address, await link.hello(address, RPC_S))
            acting = asyncio.ensure_future(act(intruder))
            assert victims.row is not None
            victims.row.versions_during = await asyncio.to_thread(victims.versions_in, CALM_S)
            return await acting
        finally:
            await link.close()

    return _LOOP.run(run())


_LOOP = asyncio.Runner()
"""One event loop for all floods of this process: calls that one of them gave up end after it, and gRPC has them end on
the loop where they began."""


async def _for_a_while(work: list[Awaitable[None]]) -> None:
    """Work for as long as versions are counted."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CALM_S):
            await asyncio.gather(*work)


# ---------------------------------------------------------------- what is kept and said again


def many_forks(victims: Victims) -> str:
    """One heartbeat names more lineages than any run had, which all would repeat for ever."""

    async def act(intruder: Intruder) -> str:
        forks = tuple(m.Fork(f"{number:0256}", number) for number in range(4096))
        stranger = Member("stranger", 1, "127.0.0.1:9")
        said = await intruder.say(intruder.envelope(stranger, intruder.beat(forks)))
        await asyncio.sleep(CALM_S / 2)
        taken = len((await intruder.link.hello(intruder.address, RPC_S)).forks)
        if taken:
            raise NotHeld(f"{taken} forks were taken from a stranger")
        return said

    return _flood(victims, act)


def far_sequence(victims: Victims) -> str:
    """A message as another member, with the last number there is: all that the member says after it counts as old."""

    async def act(intruder: Intruder) -> str:
        there = await intruder.link.hello(victims.address("p1"), RPC_S)
        beat = m.Heartbeat(there.version, -1, False, Progress())
        return await intruder.say(intruder.envelope(there.members[0], beat, 2**63 - 1, there.boot))

    return _flood(victims, act)


# ---------------------------------------------------------------- addresses that are dialled


def strange_joiners(victims: Victims) -> str:
    """Joiners that give a bystander's addresses: the peer dials them for the intruder."""

    async def act(intruder: Intruder) -> str:
        dialled = 0

        async def bystander(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal dialled
            dialled += 1
            writer.close()

        server = await asyncio.start_server(bystander, "0.0.0.0", 0)
        port = server.sockets[0].getsockname()[1]

        async def ask(number: int) -> None:
            joiner = Member(f"joiner{number}", 1, f"127.0.{1 + number // 250}.{1 + number % 250}:{port}")
            while True:
                await intruder.say(intruder.envelope(joiner, intruder.beat()))
                await asyncio.sleep(0.5)

        async with server:
            await _for_a_while([ask(number) for number in range(JOINERS)])
        said = f"dialled {dialled} times for {JOINERS} joiners in {CALM_S:g} s"
        if dialled > 2 * JOINERS:  # before there was a bound, 13 times for each
            raise NotHeld(said)
        return said

    return _flood(victims, act)


# ---------------------------------------------------------------- calls that do not end


def endless_streams(victims: Victims) -> str:
    """Streams of parts that say nothing more after their header."""

    async def act(intruder: Intruder) -> str:
        contract, said = contract_from_json(intruder.welcome.contract), dict[str, int]()
        terms = contract.run.name, contract.digest, intruder.welcome.lineage

        async def nothing() -> AsyncGenerator[Part]:
            await asyncio.sleep(CALM_S)
            yield Part(0, b"")

        async def stream(number: int) -> None:
            sender = Member(f"stranger{number}", 1, "127.0.0.1:9")
            header = StreamHeader(*terms, sender, Kind.CONTRIBUTION, 2**40, 0, 0)
            while True:
                try:
                    reply = (await intruder.link.send_parts(intruder.address, header, nothing(), CALM_S)).name
                except NO_ANSWER as error:
                    reply = str(error)
                said[reply] = said.get(reply, 0) + 1
                await asyncio.sleep(0.1)

        await _for_a_while([stream(number) for number in range(STREAMS)])
        return ", ".join(f"{number} {reply}" for reply, number in said.items())

    return _flood(victims, act)


def unread_states(victims: Victims) -> str:
    """Fetches of the same chunk of the state again and again, that nobody reads."""

    async def act(intruder: Intruder) -> str:
        said = dict[str, int]()

        async def fetch() -> None:
            chunks = [0] * (1 << 16)
            try:
                offer = await intruder.link.fetch_state_offer(intruder.address, CALM_S)
                stream = intruder.link.fetch_state(intruder.address, offer.digest, chunks, 1 << 24, CALM_S)
                async with aclosing(stream) as chunk:  # type: ignore[type-var]
                    await anext(chunk)
                    await asyncio.sleep(CALM_S)
            except NO_ANSWER as error:
                said[str(error)] = said.get(str(error), 0) + 1

        await _for_a_while([fetch() for _ in range(STREAMS)])
        return ", ".join(f"{number} {reply}" for reply, number in said.items())

    return _flood(victims, act)


ATTACKS = (
    Attack("many-forks", "member", many_forks, peers=2),
    Attack("far-sequence", "member", far_sequence, peers=2),
    Attack("strange-joiners", "member", strange_joiners, peers=2, short=False),
    Attack("endless-streams", "member", endless_streams, peers=2, short=False),
    Attack("unread-states", "member", unread_states, peers=2, short=False),
)
