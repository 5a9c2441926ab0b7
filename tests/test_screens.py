"""Hostile input from a peer is refused with a reason, and the state is as if that peer had been absent.

Single chunks, streams and messages are in test_link and test_wire, single payloads in test_compress, states in
test_statesync. Here a whole peer is hostile, over real gRPC, and the others commit without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
import pytest
import torch
import zstandard

import tests.local
from diloco.base.types import Skip
from diloco.compress import open_codec
from diloco.config.codec import CodecSection
from diloco.outer.average import MIN_RMS, BadTerm, fold, outlier
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Kind, Part
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import serve
from diloco.transport.link import Link
from tests.local import LocalPeer, LocalWorld
from tests.peers import KEYS, secure_channel

RATIO = 100.0

# ---------------------------------------------------------------- one part: who is absurd


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([], None),
        ([1e30], None),
        ([0.01, 0.02, 0.03], None),
        ([0.01, 1.01, 0.01], 1),
        ([0.01, 0.99, 0.01], None),
        ([0.01, 1.01], 1),
        ([2.0, 9.0, 0.01, 0.01], 1),  # two of four lie: the lower median is honest, and the larger goes first
        ([0.0, 0.0, 0.5], None),  # the others did not train
        ([0.0, 0.01, 1.5], 2),
        ([1e-9, 1e-9, 0.99 * RATIO * MIN_RMS], None),  # the others hardly moved: an honest step is no outlier
        ([1e-9, 1e-9, 1.01 * RATIO * MIN_RMS], 2),
        ([float("inf"), 0.01, 0.01], 0),
    ],
)
def test_the_largest_is_judged_by_the_lower_median(sizes: list[float], found: int | None) -> None:
    assert outlier(sizes, RATIO) == found


def test_a_ratio_of_zero_lets_everything_pass() -> None:
    assert outlier([0.01, 1e30], 0.0) is None


def test_the_owner_says_whose_part_is_refused() -> None:
    codec = open_codec(CodecSection(name="fp32", zstd=False))
    honest, huge = codec.encode(torch.full((8,), 0.01)), codec.encode(torch.full((8,), 5.0))
    with pytest.raises(BadTerm, match="absurd") as absurd:
        fold([(1, honest), (1, honest), (1, huge)], 8, codec, RATIO)
    assert absurd.value.index == 2
    with pytest.raises(BadTerm, match="31 bytes, expected 32") as short:
        fold([(1, honest), (1, honest[:-1]), (1, huge)], 8, codec, RATIO)
    assert short.value.index == 1
    assert fold([(1, honest), (1, huge)], 8, codec) == codec.encode(torch.full((8,), (0.01 + 5.0) / 2))


# ---------------------------------------------------------------- whole peers over gRPC


class GrpcRuntime:
    """`tests.local.LocalRuntime` with real sockets."""

    opened: list[GrpcRuntime]

    def __init__(self, world: LocalWorld, address: str) -> None:
        self.loop = world.loop
        self.link: Link = world.ask(lambda: GrpcLink(rpc_s=tests.local.SITE.timeouts.rpc_s, keys=KEYS))
        self._world = world
        self._server: Any = None
        self.opened.append(self)

    def serve(self, service: Any, listen: str) -> str:
        self._server = self._world.run(serve(service, "127.0.0.1:0", KEYS))
        return str(self._server.address)

    def answer_of(self, address: str) -> None:
        """Nobody has a directory to tell of."""

    def close(self) -> None:
        self._world.run(self._server.stop(0.2))
        self._world.run(self.link.close())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWorld]:
    """Three peers that talk gRPC; none has done a round."""
    GrpcRuntime.opened = []
    with monkeypatch.context() as patch:
        patch.setattr(tests.local, "LocalRuntime", GrpcRuntime)
        made = LocalWorld(3)
    yield made
    for peer in made.peers:
        peer.peer.close()
    for runtime in GrpcRuntime.opened:
        runtime.close()
    made.close()


class Hostile:
    """A link that sends other parts than it is given, and all messages twice."""

    def __init__(self, link: Link, spoil: Callable[[Part], list[Part]]) -> None:
        self._link = link
        self._spoil = spoil
        self.replies: list[Reply] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        reply = await self._link.deliver(address, envelope)
        self.replies.append(await self._link.deliver(address, envelope))
        return reply

    async def send_parts(self, address: str, header: Any, parts: AsyncIterator[Part], *rest: Any) -> Reply:
        async def spoiled() -> AsyncIterator[Part]:
            async for part in parts:
                for other in self._spoil(part) if header.kind is Kind.CONTRIBUTION else [part]:
                    yield other

        return await self._link.send_parts(address, header, spoiled(), *rest)


def turn_hostile(peer: LocalPeer, spoil: Callable[[Part], list[Part]]) -> Hostile:
    exchange = peer.peer.exchange
    hostile = Hostile(exchange.link, spoil)
    exchange.link = exchange.lane.sender.link = hostile  # type: ignore[assignment]
    return hostile


def first_version(count: int) -> str:
    """Digest of the state after one round of so many honest peers."""
    honest = LocalWorld(count)
    try:
        honest.rounds(honest.peers, 1)
        return honest.peers[0].digest
    finally:
        honest.close()


BOMB = zstandard.ZstdCompressor().compress(bytes(2**24))
"""Fits the limit of a part, and claims to hold 16 MiB."""


SPOILS: dict[str, Callable[[Part], list[Part]]] = {
    "too long": lambda part: [Part(part.index, bytes(2000))],
    "too short": lambda part: [Part(part.index, part.payload[:-1])],
    "inflating": lambda part: [Part(part.index, BOMB)],
    "no such part": lambda part: [Part(part.index + 1000, part.payload)],
    "not the receiver's part": lambda part: [Part((part.index + 2) % 5, part.payload)],
    "twice, with other bytes": lambda part: [part, Part(part.index, part.payload[::-1])],
    "another part's bytes": lambda part: [Part(part.index, b"\x28\xb5\x2f\xfd" + part.payload[4:][::-1])],
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_peer_that_sends_such_parts_is_left_out_and_leaves_no_trace(
    world: LocalWorld, spoil: Callable[[Part], list[Part]]
) -> None:
    good, bad = world.peers[:2], world.peers[2]
    turn_hostile(bad, spoil)
    world.pool.submit(bad.round)
    outcomes = world.rounds(good, 1)
    assert not any(isinstance(outcome, Skip) for each in outcomes for outcome in each)
    assert [entry.peer for entry in good[0].commits[-1].counted] == ["p0", "p1"]
    assert good[0].digest == good[1].digest == first_version(2)


def test_an_absurd_contribution_is_left_out_and_leaves_no_trace(world: LocalWorld) -> None:
    good, bad = world.peers[:2], world.peers[2]
    with torch.no_grad():
        bad.model.weight.add_(1e6)
    world.pool.submit(bad.round)
    world.rounds(good, 1)
    assert [entry.peer for entry in good[0].commits[-1].counted] == ["p0", "p1"]
    assert good[0].digest == good[1].digest == first_version(2)


def test_parts_and_messages_that_come_twice_count_once(world: LocalWorld) -> None:
    def twice(part: Part) -> list[Part]:
        return [part, part]

    hostile = turn_hostile(world.peers[2], twice)
    world.rounds(world.peers, 1)
    assert [entry.peer for entry in world.peers[0].commits[-1].counted] == ["p0", "p1", "p2"]
    assert {peer.digest for peer in world.peers} == {first_version(3)}
    assert Reply.REPLAYED in hostile.replies
    assert Reply.OK not in hostile.replies


@pytest.mark.parametrize("method", ["Deliver", "SendParts"])
def test_a_message_larger_than_any_of_ours_is_refused_before_it_is_read(world: LocalWorld, method: str) -> None:
    address = world.peers[0].peer.address

    async def send() -> grpc.StatusCode:
        async with secure_channel(address, ("grpc.max_send_message_length", -1)) as channel:
            path = f"/diloco.wire.v1.Peer/{method}"
            try:
                if method == "Deliver":
                    await channel.unary_unary(path)(bytes(5 * 2**20))
                else:
                    await channel.stream_stream(path)(iter([bytes(5 * 2**20)])).read()
            except grpc.aio.AioRpcError as error:
                return error.code()
        raise AssertionError("it was taken")

    assert asyncio.run(send()) is grpc.StatusCode.RESOURCE_EXHAUSTED  # on no peer's loop: to send it takes long
    world.rounds(world.peers, 1)
    assert {peer.digest for peer in world.peers} == {first_version(3)}
