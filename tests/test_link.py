"""One suite for both links: over gRPC on loopback, and inside the process."""
# ruff: noqa: N802  (the proto file names the methods)

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

import grpc.aio
import pytest
from google.protobuf.message import Message
from grpc.aio._call import StreamStreamCall

from diloco.base.errors import ResourceError, UsageError
from diloco.base.hashing import content_hash
from diloco.base.types import Closed, Commit, Leases, Member, Progress
from diloco.identity.keys import keys_of
from diloco.outer.average import mean_digest
from diloco.protocol import messages as m
from diloco.protocol.greetings import Acquaintance
from diloco.protocol.streams import CHUNK_BYTES, Kind, Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.simulate.memory_link import MemoryNetwork
from diloco.transport import grpc_link, grpc_server
from diloco.transport.address import is_loopback, join_address, split_address
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import Server, serve, server_credentials
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow
from diloco.transport.pace import MEASURED_S, MIN_VERSIONS, Uplink
from diloco.transport.process import this_process
from diloco.wire import chunks, convert
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from diloco.wire.v1.peer_pb2_grpc import PeerServicer, PeerStub, add_PeerServicer_to_server
from tests.peers import DEADLINE_S, KEYS, secure_channel

ALICE = Member("alice", 7, "127.0.0.1:1")
ENVELOPE = m.Envelope("run", "contract", "lineage", ALICE, 5, 1, 2, "head", 1, m.Gather(4, 1, "for a test"))
WORD = Acquaintance(ALICE, 3, Progress(tokens=5), 0.25, 1.5)
HEADER = StreamHeader("run", "contract", "lineage", ALICE, Kind.MEAN, 4, 1, 0, (WORD,))
WELCOME = Welcome(
    b'{"run":{}}',
    "lineage",
    3,
    True,
    (ALICE,),
    ("/ip4/127.0.0.1/tcp/1/p2p/Qm",),
    "layout",
    "data",
    (m.Fork("first", 7),),
)
MIB = 1 << 20
AT_ONCE_S = 5.0
"""For what takes a few hundredths of a second on an idle machine. Whatever waits longer ends as slow, not as down."""


def commit(version: int, parts: Sequence[bytes]) -> Commit:
    return Commit(
        version, version, "previous", "lineage", 0, (ALICE,), (), (), mean_digest(parts), 0, Leases(0, {}), "digest"
    )


class Listener:
    """A service that keeps what it gets and answers from what it has."""

    max_part_bytes = 8 * MIB

    def __init__(self) -> None:
        self.envelopes: list[m.Envelope] = []
        self.headers: list[StreamHeader] = []
        self.parts: list[Part] = []
        self.moved: list[tuple[StreamHeader, int]] = []
        """When bytes came: the stream, and how many parts had."""
        self.reply = m.Reply.OK
        self.reading = asyncio.Event()
        self.reading.set()
        self.ended: list[str] = []
        self.state = {0: b"s" * (4 * MIB), 1: b"t" * 10}
        self.closed = [Closed(commit(1, []), [])]
        self.closed += [Closed(commit(version, parts), parts) for version, parts in ((2, MEAN), (3, [b"z"]))]

    async def on_envelope(self, envelope: m.Envelope) -> m.Reply:
        self.envelopes.append(envelope)
        return self.reply

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        self.headers.append(header)
        try:
            if self.reply is not m.Reply.OK:
                return self.reply
            async for part in parts:
                self.parts.append(part)
                await self.reading.wait()
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("end")
        return m.Reply.OK

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        self.moved.append((header, len(self.parts)))

    def on_hello(self) -> Welcome:
        return WELCOME

    def on_lanes(self) -> tuple[str, ...]:
        return ("127.0.0.1:1", "127.0.0.1:2")

    async def on_fetch_commits(self, since: int) -> AsyncIterator[Closed]:
        for closed in self.closed:
            if closed.commit.version > since:
                yield closed

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        found = [closed.parts for closed in self.closed if closed.commit.mean_digest == mean_digest]
        return found[0] if found else None

    async def on_state_offer(self, have: str) -> StateOffer:
        if self.reply is not m.Reply.OK:
            raise LinkRefused(self.reply, "no state here yet")
        hashes = tuple(content_hash(chunk).hex() for chunk in self.state.values())
        return StateOffer(3, self.closed[-1].commit, "digest", (5, 6), hashes)

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        return self.state.get(chunk) if digest == "digest" else None

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        pass

    def on_status(self) -> str:
        return json.dumps({"version": 3})


MEAN = [b"a" * 16_384, b"b" * (2 * MIB + 5), b"", b"c"]
LIMITS = Limits(parts=4, part_bytes=3 * MIB, total_bytes=3 * MIB)

# ---------------------------------------------------------------- two networks


FIRST_BYTES = 1 << 19
"""Most payload of a stream's first message."""


class GrpcNet:
    """Real servers on loopback."""

    def __init__(self, send_bps: float = 0.0, streams: int = 1) -> None:
        self.link: Link = GrpcLink(rpc_s=0.5, keys=KEYS, send_bps=send_bps, streams=streams)
        self._servers: dict[str, Server] = {}

    async def start(self, service: Listener, address: str = "127.0.0.1:0") -> str:
        server = await serve(service, address, KEYS)
        self._servers[server.address] = server
        return server.address

    async def kill(self, address: str) -> None:
        await self._servers.pop(address).stop(0)

    async def close(self) -> None:
        await self.link.close()
        for address in list(self._servers):
            await self.kill(address)


class MemoryNet:
    def __init__(self, send_bps: float = 0.0) -> None:
        self.network = MemoryNetwork()
        self.link = self.network.link(rpc_s=0.5, send_bps=send_bps)

    async def start(self, service: Listener, address: str = "memory:1") -> str:
        self.network.attach(address, service)
        return address

    async def kill(self, address: str) -> None:
        self.network.detach(address)

    async def close(self) -> None:
        await self.link.close()


Net = GrpcNet | MemoryNet
Scenario = Callable[[Net], Awaitable[None]]


def play(net: Callable[[], Net], scenario: Scenario) -> None:
    async def run() -> None:
        playing = net()
        try:
            await scenario(playing)
        finally:
            await playing.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.fixture(params=[GrpcNet, MemoryNet], ids=["grpc", "memory"])
def net(request: pytest.FixtureRequest) -> Callable[[], Net]:
    return request.param


async def stream(*parts: Part) -> AsyncIterator[Part]:
    for part in parts:
        yield part


async def endless() -> AsyncIterator[Part]:
    while True:
        yield Part(0, bytes(MIB))


# ---------------------------------------------------------------- messages


def test_deliver_and_its_reply(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        for service.reply in m.Reply:
            assert await net.link.deliver(address, ENVELOPE) is service.reply
        assert service.envelopes == [ENVELOPE] * len(m.Reply)

    play(net, scenario)


def test_hello_status_and_state_offer(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        process = this_process() if isinstance(net, GrpcNet) else None  # the server's word, and not the service's
        assert await net.link.hello(address, 1.0) == replace(WELCOME, process=process)
        assert json.loads(await net.link.status(address, 1.0)) == {"version": 3}
        assert await net.link.fetch_state_offer(address, 1.0) == await service.on_state_offer("")

    play(net, scenario)


def test_a_refusal_of_the_service_travels_with_its_reason(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        service.reply = m.Reply.TOO_EARLY
        address = await net.start(service)
        with pytest.raises(LinkRefused, match=r"too_early: .*no state here yet") as refused:
            await net.link.fetch_state_offer(address, 1.0)
        assert refused.value.reply is m.Reply.TOO_EARLY

    play(net, scenario)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("sizes", [[], [5], [0, 1, 0], [16_384] * 500, [5_000_000, 3, 5_000_001], [CHUNK_BYTES] * 9])
def test_parts_arrive_whole_and_in_order(net, sizes):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        parts = [Part(7 + index, os.urandom(size)) for index, size in enumerate(sizes)]
        assert await net.link.send_parts(address, HEADER, stream(*parts), 5.0) is m.Reply.OK
        assert service.parts == parts
        assert service.headers == [HEADER]
        assert service.ended == ["end"]

    play(net, scenario)


def test_what_is_ready_does_not_wait_for_what_is_not(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        more = asyncio.Event()

        async def parts() -> AsyncIterator[Part]:
            yield Part(0, b"early")
            await more.wait()
            yield Part(1, b"late")

        sending = asyncio.create_task(net.link.send_parts(address, HEADER, parts(), 0.3))
        while not service.parts:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # the pause is ours, not the receiver's: longer than its stall_s is fine
        assert [part.payload for part in service.parts] == [b"early"]
        more.set()
        assert await sending is m.Reply.OK
        assert [part.payload for part in service.parts] == [b"early", b"late"]

    play(net, scenario)


def test_an_early_reply_ends_the_stream(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        service.reply = m.Reply.STALE
        address = await net.start(service)
        assert await net.link.send_parts(address, HEADER, endless(), 5.0) is m.Reply.STALE

        async def pausing() -> AsyncIterator[Part]:
            yield Part(0, b"x")
            await asyncio.Event().wait()

        assert await net.link.send_parts(address, HEADER, pausing(), 5.0) is m.Reply.STALE

    play(net, scenario)


def test_an_error_of_the_sender_is_the_senders_and_ends_the_call(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)

        async def failing() -> AsyncIterator[Part]:
            yield Part(0, b"x")
            await until(lambda: service.parts != [])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await net.link.send_parts(address, HEADER, failing(), 5.0)
        await until(lambda: service.ended != [])

    play(net, scenario)


def test_a_service_that_does_not_read_stalls_the_sender(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        service.reading.clear()
        address = await net.start(service)
        made, last_s = 0, 0.0

        async def parts() -> AsyncIterator[Part]:
            nonlocal made, last_s
            while True:
                made, last_s = made + 1, time.monotonic()
                yield Part(0, bytes(MIB))

        with pytest.raises(LinkSlow):
            await net.link.send_parts(address, HEADER, parts(), 0.5)
        assert time.monotonic() - last_s < 2.0  # since buffers took one, which a busy machine fills slowly
        assert made < 100, "memory must stay bounded"
        assert len(service.parts) == 1
        await until(lambda: service.ended == ["CancelledError"])

    play(net, scenario)


def test_a_part_larger_than_the_service_takes_is_refused(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        parts = stream(Part(0, b"fine"), Part(1, bytes(service.max_part_bytes + 1)))
        with pytest.raises(LinkRefused, match="8388609 bytes, at most 8388608") as refused:
            await net.link.send_parts(address, HEADER, parts, 5.0)
        assert refused.value.reply is m.Reply.MALFORMED
        assert [part.payload for part in service.parts] == [b"fine"]

    play(net, scenario)


# ---------------------------------------------------------------- fetches


def test_commits_and_means_are_fetched(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        assert await net.link.fetch_commits(address, 0, LIMITS, 1.0) == service.closed
        assert await net.link.fetch_commits(address, 2, LIMITS, 1.0) == service.closed[2:]
        assert await net.link.fetch_commits(address, 3, LIMITS, 1.0) == []
        assert await net.link.fetch_mean(address, service.closed[1].commit.mean_digest, LIMITS, 1.0) == MEAN

    play(net, scenario)


def test_commits_fill_no_memory(monkeypatch):
    """Those that are left out are asked for again."""

    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        address = await net.start(service)
        room_bytes = sum(32 + len(closed.commit.to_bytes()) for closed in service.closed[:2])
        monkeypatch.setattr("diloco.transport.grpc_link.MAX_COMMITS_BYTES", room_bytes)
        assert await net.link.fetch_commits(address, 0, LIMITS, 1.0) == service.closed[:2]

    play(GrpcNet, scenario)


def test_means_that_are_gone_or_too_large_are_refused(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        with pytest.raises(LinkRefused) as gone:
            await net.link.fetch_mean(address, "unknown", LIMITS, 1.0)
        assert gone.value.reply is m.Reply.STALE
        for limits, why in (
            (replace(LIMITS, part_bytes=2 * MIB), "at most 2097152"),
            (replace(LIMITS, parts=3), "parts"),
            (replace(LIMITS, total_bytes=sum(map(len, MEAN)) - 1), "more bytes of means than anybody keeps"),
        ):
            for fetch in (
                net.link.fetch_mean(address, service.closed[1].commit.mean_digest, limits, 1.0),
                net.link.fetch_commits(address, 0, limits, 1.0),
            ):
                with pytest.raises(LinkRefused, match=why) as large:
                    await fetch
                assert large.value.reply is m.Reply.MALFORMED
        with pytest.raises(LinkRefused, match="more bytes of means"):
            await net.link.fetch_commits(address, 0, replace(LIMITS, total_bytes=sum(map(len, MEAN))), 1.0)

    play(net, scenario)


def test_chunks_of_the_state_are_fetched_in_the_order_asked(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        fetched = net.link.fetch_state(address, "digest", [1, 0], 4 * MIB, 1.0)
        got = [(index, b"".join(pieces)) async for index, pieces in fetched]
        assert got == [(1, service.state[1]), (0, service.state[0])]

    play(net, scenario)


def test_one_host_has_half_of_all_fetches_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_FETCHES", 4)
    free = asyncio.Event()

    class Slow(Listener):
        async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
            await free.wait()
            return MEAN

    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Slow())
        fetches = [asyncio.create_task(net.link.fetch_mean(address, "digest", LIMITS, 5.0)) for _ in range(3)]
        done, waiting = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(LinkRefused, match="too many fetches"):
            await done.pop()
        free.set()
        assert [await fetch for fetch in waiting] == [MEAN, MEAN]
        assert await net.link.fetch_mean(address, "digest", LIMITS, 5.0) == MEAN

    play(GrpcNet, scenario)


def test_a_chunk_of_the_state_is_asked_for_once() -> None:
    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Listener())
        with pytest.raises(LinkRefused, match="each chunk of a state once"):
            [chunk async for chunk in net.link.fetch_state(address, "digest", [0, 0], 4 * MIB, 1.0)]

    play(GrpcNet, scenario)


def test_bytes_of_a_chunk_of_the_state_are_told_as_they_come(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        told: list[int] = []
        _ = [chunk async for chunk in net.link.fetch_state(address, "digest", [0], 4 * MIB, 1.0, told.append)]
        assert sum(told) == len(service.state[0])
        assert len(told) > 1 or isinstance(net, MemoryNet)

    play(net, scenario)


def test_chunks_of_the_state_that_are_gone_or_too_large_are_refused(net):
    async def scenario(net: Net) -> None:
        address = await net.start(Listener())
        for digest, asked, limit, reply in (
            ("digest", [1, 9], 4 * MIB, m.Reply.STALE),
            ("other", [1], 4 * MIB, m.Reply.STALE),
            ("digest", [0], 4 * MIB - 1, m.Reply.MALFORMED),
        ):
            with pytest.raises(LinkRefused) as refused:
                _ = [chunk async for chunk in net.link.fetch_state(address, digest, asked, limit, 1.0)]
            assert refused.value.reply is reply

    play(net, scenario)


# ---------------------------------------------------------------- death


def test_nobody_there_is_down_at_once(net):
    async def scenario(net: Net) -> None:
        address = await net.start(Listener())
        await net.kill(address)
        started = time.monotonic()
        for ask in (
            net.link.deliver(address, ENVELOPE),
            net.link.send_parts(address, HEADER, endless(), 5.0),
            net.link.hello(address, 5.0),
            net.link.fetch_commits(address, 0, LIMITS, 5.0),
            net.link.fetch_mean(address, "digest", LIMITS, 5.0),
            net.link.fetch_state_offer(address, 5.0),
            anext(net.link.fetch_state(address, "digest", [0], MIB, 5.0)),
        ):
            with pytest.raises(LinkDown):
                await ask
        assert time.monotonic() - started < AT_ONCE_S

    play(net, scenario)


@pytest.mark.parametrize("address", ["unix:/tmp/socket", "nonsense", "127.0.0.1:99999"])
def test_what_is_no_address_is_down(net, address):
    async def scenario(net: Net) -> None:
        with pytest.raises(LinkDown):
            await net.link.deliver(address, ENVELOPE)

    play(net, scenario)


def test_death_in_the_middle_of_a_stream_is_down(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        sending = asyncio.create_task(net.link.send_parts(address, HEADER, endless(), 5.0))
        await until(lambda: len(service.parts) > 3)
        await net.kill(address)
        with pytest.raises(LinkDown):
            await sending

    play(net, scenario)


def test_a_cancelled_sender_cancels_the_service(net):
    async def scenario(net: Net) -> None:
        service = Listener()
        address = await net.start(service)
        sending = asyncio.create_task(net.link.send_parts(address, HEADER, endless(), 5.0))
        await until(lambda: len(service.parts) > 3)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await until(lambda: service.ended != [])

    play(net, scenario)


@pytest.mark.slow(queued=False)
def test_a_peer_back_at_its_address_is_reached_within_two_seconds(net):
    async def scenario(net: Net) -> None:
        address = await net.start(Listener())
        await net.link.deliver(address, ENVELOPE)
        await net.kill(address)
        for _ in range(20):  # so long that the back-off has grown
            with pytest.raises(LinkDown):
                await net.link.deliver(address, ENVELOPE)
            await asyncio.sleep(0.1)
        service = Listener()
        assert await net.start(service, address) == address
        started = time.monotonic()
        while not service.envelopes:
            assert time.monotonic() - started < 2.0
            try:
                await net.link.deliver(address, ENVELOPE)
            except LinkDown:
                await asyncio.sleep(0.05)

    play(net, scenario)


def test_addresses_that_nobody_calls_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """But none with a call under way; and whoever is called after all is reached."""
    later_s = 0.0
    monkeypatch.setattr(grpc_link, "monotonic_s", lambda: time.monotonic() + later_s)

    async def scenario(net: GrpcNet) -> None:
        nonlocal later_s
        link = net.link
        assert isinstance(link, GrpcLink)
        quiet, busy, dead = Listener(), Listener(), Listener()
        at_quiet, at_busy, at_dead = [await net.start(service) for service in (quiet, busy, dead)]
        busy.reading.clear()
        sending = asyncio.create_task(link.send_parts(at_busy, HEADER, stream(Part(0, b"a"), Part(1, b"b")), 1e6))
        await until(lambda: busy.parts != [])
        await net.kill(at_dead)
        with pytest.raises(LinkDown):
            await link.lanes(at_dead, 1.0)
        assert (await link.hello(at_quiet, 1.0)).members == WELCOME.members
        assert at_quiet not in link._connections, "a hello may go to an address that is a stranger's word"
        assert await link.lanes(at_quiet, 1.0) == quiet.on_lanes()
        forgotten = [channel for at in (at_quiet, at_dead) for channel, _ in link._connections[at]._channels.values()]
        later_s = grpc_link.UNUSED_S + 1.0
        assert await link.lanes(at_busy, 1.0) == busy.on_lanes()
        assert list(link._connections) == [at_busy]
        assert [channel.get_state() for channel in forgotten] == [grpc.ChannelConnectivity.SHUTDOWN] * 2
        busy.reading.set()
        assert await sending is m.Reply.OK
        assert (await link.hello(at_quiet, 1.0)).members == WELCOME.members

    play(GrpcNet, scenario)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, as long as `play` lets it."""
    while not condition():
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- how fast


@pytest.mark.slow(queued=False)
def test_a_limit_is_shared_by_all_streams_and_is_no_stall_and_holds_up_no_message(net):
    async def scenario(net: Net) -> None:
        services = [Listener(), Listener()]
        addresses = [await net.start(services[0]), await net.start(services[1], "127.0.0.1:0")]
        for address in addresses:
            await net.link.send_parts(address, HEADER, stream(Part(9, b"connected")), 5.0)
        started = time.monotonic()
        sends = [net.link.send_parts(address, HEADER, stream(*halves), 1.0) for address in addresses * 2]
        sending = asyncio.gather(*sends)
        await until(lambda: any(len(service.parts) > 1 for service in services))
        assert await net.link.deliver(addresses[0], ENVELOPE) is m.Reply.OK
        assert not sending.done()
        assert await sending == [m.Reply.OK] * 4
        # The last one waits for the three before it: 3 x 64 KiB at 1 Mb/s are 1.6 s, less what is made up for.
        assert 1.2 < time.monotonic() - started < 10.0
        assert [len(service.parts) for service in services] == [5, 5]
        assert 0 < net.link.send_bps <= 1e6

    halves = [Part(index, bytes(32_768)) for index in range(2)]
    play(partial(net, send_bps=1e6), scenario)


@pytest.mark.slow(queued=False)
def test_a_stream_begins_with_little_however_fast_the_one_before_it_was():
    """The network may have become slow since: at 1 Mb/s half a MiB takes 4 s."""

    class Weighed(Listener):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[int] = []

        def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
            self.messages.append(size_bytes)

    async def scenario(net: GrpcNet) -> None:
        service = Weighed()
        address = await net.start(service)
        parts = [Part(index, bytes(4 * MIB)) for index in range(48)]
        for height in range(2):
            assert await net.link.send_parts(address, replace(HEADER, height=height), stream(*parts), 5.0) is m.Reply.OK
        total = 4 * MIB * len(parts)
        sums = list(accumulate(service.messages))
        second = service.messages[sums.index(total) + 1 :]
        assert max(service.messages) > FIRST_BYTES  # or nothing is shown: it was never fast
        assert second[0] <= FIRST_BYTES

    play(GrpcNet, scenario)


@pytest.mark.slow(queued=False)
def test_a_service_hears_of_bytes_before_a_part_is_whole():
    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        address = await net.start(service)
        assert await net.link.send_parts(address, HEADER, stream(Part(7, bytes(262_144))), 5.0) is m.Reply.OK
        assert len(service.parts) == 1
        assert service.moved.count((HEADER, 0)) >= 2

    play(GrpcNet, scenario)


class Slow(Listener):
    """Takes a part each 20 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []
        """Number of parts that came over each stream."""

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        self.headers.append(header)
        count = 0
        async for part in parts:
            await asyncio.sleep(0.02)
            self.parts.append(part)
            count += 1
        self.streams.append(count)
        return m.Reply.OK


def test_the_link_notices_how_fast_others_take_what_it_sends():
    async def scenario(net: GrpcNet) -> None:
        service = Slow()
        address = await net.start(service)
        await net.link.send_parts(address, HEADER, stream(Part(99, b"connected")), 5.0)
        started = time.monotonic()
        for height in range(1, 1 + MIN_VERSIONS):
            assert net.link.send_bps == 0
            await net.link.send_parts(address, replace(HEADER, height=height), stream(*parts), 5.0)
        bps = 8 * MIN_VERSIONS * sum(len(part.payload) for part in parts) / (time.monotonic() - started)
        assert 0.5 * bps < net.link.send_bps < 2 * bps

    parts = [Part(index, bytes(65_536)) for index in range(40)]
    play(GrpcNet, scenario)


@pytest.mark.slow(queued=False)
def test_a_sender_that_is_slow_itself_learns_nothing_of_its_link():
    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Listener())

        async def bursts() -> AsyncIterator[Part]:
            for index in range(20):
                yield Part(index, bytes(65_536))
                if index % 4 == 3:
                    await asyncio.sleep(0.4)

        await net.link.send_parts(address, HEADER, bursts(), 5.0)
        assert net.link.send_bps == 0

    play(GrpcNet, scenario)


def uplink_after(*versions: Sequence[float], limit_bps: float = 0.0) -> Uplink:
    """An uplink after these versions, in each as many kB in one sample of time after the other."""
    uplink = Uplink(limit_bps)
    for version, samples in enumerate(versions):
        uplink.begin(version)
        for place, kilobytes in enumerate(samples):
            start_s = 10.0 * version + MEASURED_S * place
            uplink.took(int(1000 * kilobytes), start_s, start_s + MEASURED_S)
    return uplink


def test_streams_that_share_an_uplink_add_up():
    uplink = uplink_after((3,), (3,), ())
    uplink.took(1000, 90.0, 90.0 + 0.75 * MEASURED_S)
    assert uplink.bps == 0  # too little to tell
    uplink.took(1000, 90.0, 90.0 + 0.75 * MEASURED_S)  # another stream
    uplink.took(1000, 99.0, 99.0 + MEASURED_S / 4)  # nothing was sent in between
    assert uplink.bps == 3 * 8000 / MEASURED_S


def test_an_uplink_is_as_fast_as_the_fastest_moments_of_most_versions():
    versions = [(1, 3), (2,), (30,), (2.5, 1)]  # others' links are full, or what they held back is taken at once
    assert uplink_after(*versions).bps == 8000 * (3 + 2.5) / 2 / MEASURED_S
    assert uplink_after(*versions, (1,), (1, 1), (1,)).bps == 8000 / MEASURED_S  # it has become slower


def test_no_estimate_exceeds_the_limit_which_stands_for_it_before_anything_is_measured():
    assert uplink_after(limit_bps=5000.0).bps == 5000
    assert uplink_after((9,), (9,), (9,), limit_bps=5000.0).bps == 5000
    assert uplink_after((0.1,), (0.1,), limit_bps=5000.0).bps == 5000
    assert uplink_after((0.1,), (0.1,), (0.1,), limit_bps=5000.0).bps == 800 / MEASURED_S


def test_an_offer_tells_the_rate():
    sent = replace(ENVELOPE, body=m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3, False, 10**9), "digest"))
    assert convert.unseal(convert.seal(sent)) == sent
    message = convert.envelope_to_wire(sent)
    message.ready.offer.send_bps = 2**63
    with pytest.raises(ValueError, match="send_bps"):
        convert.envelope_from_wire(message)


# ---------------------------------------------------------------- several streams


@asynccontextmanager
async def door(address: str, entered: list[str]) -> AsyncIterator[str]:
    """An address that leads to `address`, and notes each connection."""

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entered.append(address)
        other_reader, other_writer = await asyncio.open_connection(*split_address(address))
        await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(enter, "127.0.0.1", 0)
    try:
        yield join_address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


def test_parts_are_spread_over_several_connections_and_arrive_once():
    async def scenario(net: GrpcNet) -> None:
        service, entered = Slow(), []

        async def once_all_are_open() -> AsyncIterator[Part]:
            await until(lambda: len(service.headers) == 3)
            for part in parts:
                yield part

        async with door(await net.start(service), entered) as address:
            assert await net.link.send_parts(address, HEADER, once_all_are_open(), 5.0) is m.Reply.OK
            assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK
            assert sorted(service.parts, key=lambda part: part.index) == parts
            assert len(service.streams) == 3
            assert min(service.streams) > 0
            assert len(entered) == 3 + 1
            await net.link.close()

    parts = [Part(index, os.urandom(size)) for index, size in enumerate([65_536] * 30 + [0, 1, 2_000_000])]
    play(partial(GrpcNet, streams=3), scenario)


def test_what_one_stream_meets_ends_all():
    async def scenario(net: GrpcNet) -> None:
        refusing, service = Listener(), Listener()
        refusing.reply = m.Reply.STALE
        addresses = [await net.start(refusing), await net.start(service)]
        assert await net.link.send_parts(addresses[0], HEADER, endless(), 5.0) is m.Reply.STALE

        async def failing() -> AsyncIterator[Part]:
            for _ in range(20):
                yield Part(0, bytes(MIB))
            await until(lambda: len(service.headers) == 3)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await net.link.send_parts(addresses[1], HEADER, failing(), 5.0)
        await until(lambda: len(service.ended) == 3)  # gRPC may tell whoever reads of the end, and not why
        sending = asyncio.create_task(net.link.send_parts(addresses[1], HEADER, endless(), 5.0))
        await until(lambda: len(service.headers) == 6)
        await net.kill(addresses[1])
        with pytest.raises(LinkDown):
            await sending

    play(partial(GrpcNet, streams=3), scenario)


# ---------------------------------------------------------------- memory only


def test_a_frozen_peer_is_slow_until_it_thaws():
    async def scenario(net: MemoryNet) -> None:
        service = Listener()
        address = await net.start(service)
        sending = asyncio.create_task(net.link.send_parts(address, HEADER, endless(), 0.2))
        await until(lambda: len(service.parts) > 3)
        net.network.freeze(address)
        for ask in (sending, net.link.deliver(address, ENVELOPE), net.link.fetch_commits(address, 0, LIMITS, 0.2)):
            with pytest.raises(LinkSlow):
                await ask
        net.network.thaw(address)
        assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK

    play(MemoryNet, scenario)


# ---------------------------------------------------------------- gRPC only: crafted bytes, ports, processes


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with secure_channel(address) as channel:
        yield channel


def craft(*contents: parts_pb2.StreamHeader | parts_pb2.Chunks) -> list[parts_pb2.SendPartsRequest]:
    return [
        parts_pb2.SendPartsRequest(header=content)
        if isinstance(content, parts_pb2.StreamHeader)
        else parts_pb2.SendPartsRequest(chunks=content)
        for content in contents
    ]


def good_chunks(payload: bytes) -> parts_pb2.Chunks:
    return next(chunks.cut([Part(0, payload)], parts_pb2.SendPartsRequest, chunks.MessageSize())).chunks


def spoiled_chunks(payload: bytes) -> parts_pb2.Chunks:
    message = good_chunks(payload)
    message.chunks[0].payload = b"!" + payload[1:]
    return message


def other_version() -> parts_pb2.StreamHeader:
    header = convert.header_to_wire(HEADER)
    header.wire_version = 1
    return header


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ([good_chunks(b"payload")], "begins with its header"),
        ([], "begins with its header"),
        ([convert.header_to_wire(HEADER), spoiled_chunks(b"payload")], "wrong checksum at byte 0"),
        ([convert.header_to_wire(HEADER), convert.header_to_wire(HEADER)], "has one header"),
        ([convert.header_to_wire(HEADER), good_chunks(bytes(9 * MIB))], "9437184 bytes, at most 8388608"),
        ([convert.header_to_wire(HEADER), good_chunks(bytes(MIB))], "ends after 65536 of 1048576"),
        ([other_version()], "wire version 1 meets 2"),
    ],
)
def test_crafted_streams_are_refused(contents, reason):
    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        address = await net.start(service)
        async with raw(address) as channel:
            answer = [reply async for reply in PeerStub(channel).SendParts(iter(craft(*contents)))][-1].reply
        damaged = reason.startswith(("wrong checksum", "ends after"))  # the network's fault, and not the sender's
        assert answer.reply == (control_pb2.REPLY_DAMAGED if damaged else control_pb2.REPLY_MALFORMED)
        assert re.search(reason, answer.detail)
        assert service.parts == []

    play(GrpcNet, scenario)


def test_bytes_that_are_no_message_are_refused():
    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Listener())
        async with raw(address) as channel:
            call = channel.stream_stream("/diloco.wire.v1.Peer/SendParts")(iter([b"\xff" * 9]))
            answer = parts_pb2.SendPartsReply.FromString(await call.read())
            assert answer.reply.reply == control_pb2.REPLY_DAMAGED
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/diloco.wire.v1.Peer/Deliver")(b"\xff" * 9)
        assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK

    play(GrpcNet, scenario)


class Liar(PeerServicer):
    """A peer that answers with what the test crafted."""

    def __init__(self, *answers: Message) -> None:
        self.answers = answers

    async def Hello(self, request, context):
        return self.answers[0]

    async def SendParts(self, request_iterator, context):
        while True:
            await context.write(self.answers[0])
            await asyncio.sleep(0.02)

    async def FetchCommits(self, request, context):
        for answer in self.answers:
            await context.write(answer)

    FetchMean = FetchState = FetchCommits


@asynccontextmanager
async def lying(*answers: Message, service: PeerServicer | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_PeerServicer_to_server(service or Liar(*answers), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(KEYS))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("claimed_bytes", [0, 10**12])
def test_a_receiver_that_only_claims_progress_is_slow(claimed_bytes):
    async def scenario(net: GrpcNet) -> None:
        async with lying(parts_pb2.SendPartsReply(taken_bytes=claimed_bytes)) as address:
            with pytest.raises(LinkSlow):
                await net.link.send_parts(address, HEADER, stream(Part(0, b"x")), 0.3)

    play(GrpcNet, scenario)


ONE_PART = good_chunks(b"x")


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [parts_pb2.FetchMeanReply(chunks=ONE_PART)],
        [parts_pb2.FetchMeanReply(parts=2), parts_pb2.FetchMeanReply(chunks=ONE_PART)],
        [parts_pb2.FetchMeanReply(parts=2)] + 2 * [parts_pb2.FetchMeanReply(chunks=ONE_PART)],
        [parts_pb2.FetchMeanReply(parts=1), parts_pb2.FetchMeanReply(chunks=spoiled_chunks(b"xy"))],
        [parts_pb2.FetchMeanReply(parts=1), parts_pb2.FetchMeanReply(parts=1)],
        [parts_pb2.FetchMeanReply(parts=2**32 - 1)],
    ],
    ids=["empty", "no count", "too few", "one twice", "damaged", "two counts", "too many"],
)
def test_crafted_means_are_refused(answers):
    async def scenario(net: GrpcNet) -> None:
        async with lying(*answers) as address:
            with pytest.raises(LinkRefused) as refused:
                await net.link.fetch_mean(address, "digest", LIMITS, 1.0)
        assert refused.value.reply in (m.Reply.MALFORMED, m.Reply.DAMAGED)

    play(GrpcNet, scenario)


@pytest.mark.parametrize(
    "answers",
    [
        [parts_pb2.FetchCommitsReply(chunks=ONE_PART)],
        [parts_pb2.FetchCommitsReply(header=parts_pb2.CommitHeader(commit=b"{}"))],
        [parts_pb2.FetchCommitsReply(header=parts_pb2.CommitHeader(commit=commit(1, []).to_bytes(), parts=1))],
    ],
    ids=["no commit", "no valid commit", "no mean"],
)
def test_crafted_commits_are_refused(answers):
    async def scenario(net: GrpcNet) -> None:
        async with lying(*answers) as address:
            with pytest.raises(LinkRefused) as refused:
                await net.link.fetch_commits(address, 0, LIMITS, 1.0)
        assert refused.value.reply is m.Reply.MALFORMED

    play(GrpcNet, scenario)


class Breaking(Liar):
    """A peer that dies, or stands still, after what it answered."""

    def __init__(self, dies: bool, *answers: Message) -> None:
        super().__init__(*answers)
        self._dies = dies

    async def FetchCommits(self, request, context):
        await super().FetchCommits(request, context)
        await (context.abort(grpc.StatusCode.UNAVAILABLE) if self._dies else asyncio.sleep(DEADLINE_S))


@pytest.mark.parametrize("dies", [True, False], ids=["breaks", "stands still"])
def test_commits_that_came_whole_before_a_link_failed_count(dies: bool) -> None:
    """Over a link that fails more often than all of them take, a peer would never catch up."""
    one, two = commit(1, [b"x"]), commit(2, [b"x", b"y"])
    whole = [
        parts_pb2.FetchCommitsReply(header=parts_pb2.CommitHeader(commit=convert.commit_to_wire(one), parts=1)),
        parts_pb2.FetchCommitsReply(chunks=ONE_PART),
    ]
    half = [
        parts_pb2.FetchCommitsReply(header=parts_pb2.CommitHeader(commit=convert.commit_to_wire(two), parts=2)),
        parts_pb2.FetchCommitsReply(chunks=ONE_PART),
    ]

    async def scenario(net: GrpcNet) -> None:
        async with lying(service=Breaking(dies, *whole, *half)) as address:
            assert await net.link.fetch_commits(address, 0, LIMITS, 0.5) == [Closed(one, [b"x"])]
        async with lying(service=Breaking(dies, *half)) as address:
            with pytest.raises(LinkDown if dies else LinkSlow):
                await net.link.fetch_commits(address, 0, LIMITS, 0.5)

    play(GrpcNet, scenario)


@pytest.mark.parametrize("asked", [[0, 1], [1]], ids=["too few", "another one"])
def test_crafted_chunks_of_a_state_are_refused(asked):
    async def scenario(net: GrpcNet) -> None:
        async with lying(parts_pb2.FetchStateReply(chunks=ONE_PART)) as address:
            with pytest.raises(LinkRefused) as refused:
                _ = [chunk async for chunk in net.link.fetch_state(address, "digest", asked, MIB, 1.0)]
        assert refused.value.reply is m.Reply.MALFORMED

    play(GrpcNet, scenario)


def test_a_welcome_of_another_wire_version_or_of_another_protocol_is_refused():
    async def scenario(net: GrpcNet) -> None:
        for answer in (peer_pb2.Welcome(wire_version=1), parts_pb2.CommitHeader(commit=b"\xff" * 9)):
            async with lying(answer) as address:
                with pytest.raises(LinkRefused):
                    await net.link.hello(address, 1.0)

    play(GrpcNet, scenario)


def test_hello_of_another_wire_version_is_refused():
    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Listener())
        async with raw(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="wire version 9 meets 2"):
                await PeerStub(channel).Hello(peer_pb2.HelloRequest(wire_version=9))

    play(GrpcNet, scenario)


def test_a_stream_that_goes_quiet_is_ended():
    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        server = await serve(service, "127.0.0.1:0", KEYS, idle_s=0.2)

        async def pausing() -> AsyncIterator[Part]:
            yield Part(0, b"x")
            await asyncio.Event().wait()

        with pytest.raises(LinkSlow, match=r"no progress for 0.2 s"):
            await net.link.send_parts(server.address, HEADER, pausing(), 5.0)
        assert service.ended == ["LinkSlow"]
        await server.stop(0)

    play(GrpcNet, scenario)


def test_a_stream_that_waits_for_its_first_part_is_kept(monkeypatch: pytest.MonkeyPatch):
    """A mean is made when all contributions are here, which takes a slow link longer than `idle_s`."""
    monkeypatch.setattr(grpc_link, "KEEP_ALIVE_S", 0.1)

    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        server = await serve(service, "127.0.0.1:0", KEYS, idle_s=0.5)

        async def late() -> AsyncIterator[Part]:
            await asyncio.sleep(1.2)
            yield Part(0, b"x")

        assert await net.link.send_parts(server.address, HEADER, late(), 5.0) is m.Reply.OK
        assert [part.payload for part in service.parts] == [b"x"]
        await server.stop(0)

    play(GrpcNet, scenario)


def test_a_connection_that_breaks_while_a_stream_ends_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's end that waits behind what others have written fails in another way than they. gRPC seldom has it, and
    so its error is made here."""

    async def scenario(net: GrpcNet) -> None:
        service = Listener()
        server = await serve(service, "127.0.0.1:0", KEYS)
        done_writing = StreamStreamCall.done_writing

        async def breaks(call: StreamStreamCall) -> None:
            await server.stop(0)
            await done_writing(call)
            raise grpc.aio.InternalError('Failed "execute_batch"')

        async def parts() -> AsyncIterator[Part]:
            yield Part(0, b"x" * 1000)
            while not service.parts:
                await asyncio.sleep(0.01)

        monkeypatch.setattr(StreamStreamCall, "done_writing", breaks)
        with pytest.raises(LinkDown):
            await net.link.send_parts(server.address, HEADER, parts(), 8.0)

    play(GrpcNet, scenario)


def test_two_servers_on_one_port_is_an_error_with_a_way_out():
    async def scenario(net: GrpcNet) -> None:
        address = await net.start(Listener())
        with pytest.raises(ResourceError, match=f"cannot listen on {address}") as taken:
            await serve(Listener(), address, KEYS)
        assert "ss -ltnp" in taken.value.fix

    play(GrpcNet, scenario)


SERVER = """
import asyncio, sys
from diloco.transport.grpc_server import serve
from tests.peers import KEYS
from tests.test_link import Listener

async def main():
    server = await serve(Listener(), "127.0.0.1:0", KEYS)
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def serving_process() -> AsyncIterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_stopped_process_is_slow_and_a_killed_one_down():
    async def scenario(net: GrpcNet) -> None:
        async with serving_process() as (address, process):
            assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK
            sending = asyncio.create_task(net.link.send_parts(address, HEADER, endless(), 1.0))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(LinkSlow):
                await net.link.deliver(address, ENVELOPE)
            assert time.monotonic() - stopped < 0.5 + AT_ONCE_S
            with pytest.raises(LinkSlow):
                await sending
            assert time.monotonic() - stopped < 1.0 + AT_ONCE_S
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.1)
            assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK
            sending = asyncio.create_task(net.link.send_parts(address, HEADER, endless(), 1.0))
            await asyncio.sleep(0.3)
            process.kill()
            killed = time.monotonic()
            with pytest.raises(LinkDown):
                await sending
            with pytest.raises(LinkDown):
                await net.link.deliver(address, ENVELOPE)
            assert time.monotonic() - killed < AT_ONCE_S

    play(GrpcNet, scenario)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("node-3.example.org:0", ("node-3.example.org", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("my_host:1", ("my_host", 1)),
    ],
)
def test_addresses_are_split_and_joined(text, parts):
    assert split_address(text) == parts
    assert join_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:-1", "host:65536", "host:1x", "::1:80", "[::1", "[x]:1", "a b:1", "unix:/x",
     "http://host:1", "host:٣", "x" * 300 + ":1", "-x:1"],
)  # fmt: skip
def test_nonsense_is_no_address(text):
    with pytest.raises(UsageError) as error:
        split_address(text)
    assert "host:port" in error.value.fix


def test_loopback():
    assert all(is_loopback(text) for text in ("127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"))
    assert not any(is_loopback(text) for text in ("0.0.0.0:1", "10.0.0.1:1", "example.org:1", "[::]:1", "[fd00::1]:1"))


# ---------------------------------------------------------------- gRPC only: keys


def test_keys_are_the_same_everywhere_and_differ_by_secret() -> None:
    assert keys_of("a secret of the run") == keys_of("a secret of the run")
    assert keys_of("a secret of the run").certificate != keys_of("").certificate != b""


def test_who_has_another_secret_is_told_so_and_kept_out() -> None:
    async def scenario(net: GrpcNet) -> None:
        listener = Listener()
        address = await net.start(listener)
        stranger = GrpcLink(rpc_s=0.5, keys=keys_of("another secret of mine"))
        with pytest.raises(LinkDown, match="another DILOCO_SECRET"):
            await stranger.deliver(address, ENVELOPE)
        await stranger.close()
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await PeerStub(plain).Status(peer_pb2.StatusRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await net.link.deliver(address, ENVELOPE) is m.Reply.OK

    play(GrpcNet, scenario)
