"""The exchange's seam over gRPC: `GrpcLink` calls other peers, `grpc_server.serve` answers their calls.

Both live on one asyncio loop and thread, and speak TLS: see `keys.py`. Nothing that arrives is trusted: addresses are
checked before they are dialled (gRPC would also open `unix:` ones), sizes before bytes are kept. Liveness is progress:
a stopped process keeps its sockets open, so every wait for the other side has a deadline here, none is left to TCP.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from diloco.base.clock import monotonic_s
from diloco.base.errors import UsageError
from diloco.base.types import Closed
from diloco.identity.keys import SERVER_NAME, VARIABLE, Keys
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.address import join_address, split_address
from diloco.transport.grpc_server import REPLY_KEY, parsed, progress
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow, untold
from diloco.transport.pace import MIN_UNDER_WAY_BYTES, Outbox, RateLimit, UnderWay, Uplink
from diloco.wire import convert
from diloco.wire.chunks import MESSAGE_BYTES, MessageSize, PartAssembler, cut
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from diloco.wire.v1.peer_pb2_grpc import PeerStub

if TYPE_CHECKING:
    from diloco.wire.v1.peer_pb2_grpc import PeerAsyncStub

MAX_COMMITS_BYTES: Final = 1 << 24
"""Most of commits, without means, taken from one answer: 280 of 256 members."""

IDLE_MS: Final = 60_000
"""A connection that no call used for so long is closed. Without that gRPC tries to reach a dead peer once a second for
half an hour, and a long run has many dead peers."""

UNUSED_S: Final = 300.0
"""An address is forgotten after so long without a call, or twice that. A peer that comes back has another port, as a
rule, and gRPC keeps 60 kB for each address, connected or not."""

_CONTROL, _BULK = 0, 1  # numbers of the connections to one address: control messages, and from here on bulk

KEEP_ALIVE_S = 20.0
"""A stream with nothing to send for so long sends an empty message: `serve` ends one that is silent for a minute."""

M = TypeVar("M")


class GrpcLink(Link):
    """gRPC client: calls other peers over two or more connections per address, opened at the first call and mended.

    Args:
        rpc_s: deadline of `deliver`. A connection whose other end answers nothing is given up after 4 times that.
        keys: of the run; the other end must show the same.
        send_bps: most bits per second of `send_parts`, all calls together; 0: no limit. What TLS, TCP and IP put
            around them (about 5 %) is not counted.
        streams: connections over which the parts of one `send_parts` go at once. TCP fills a long link with losses
            the better the more there are.
    """

    def __init__(self, rpc_s: float, keys: Keys, send_bps: float = 0.0, streams: int = 1) -> None:
        self._rpc_s, self.keys = rpc_s, keys
        self._credentials = channel_credentials(keys)
        self._connections: dict[str, _Connections] = {}
        """By address."""
        self._swept_s = monotonic_s()
        """When unused addresses were last forgotten."""
        self._progress = _Progress()
        self._limit = RateLimit(send_bps)
        self._uplink = Uplink(send_bps)
        self._bulk = range(_BULK, _BULK + streams)

    @property
    def send_bps(self) -> int:
        return self._uplink.bps

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        request = convert.seal(envelope)
        return _reply(await self._ask(address, lambda peer: peer.Deliver(request, timeout=self._rpc_s)))

    async def send_parts(
        self,
        address: str,
        header: StreamHeader,
        parts: AsyncGenerator[Part],
        stall_s: float,
        taken: Callable[[int], None] = untold,
    ) -> Reply:
        first = parts_pb2.SendPartsRequest(header=convert.header_to_wire(header))
        self._uplink.begin(header.height)
        async with self._connected(address) as connections:
            with closing(Outbox(parts)) as outbox:
                streams: list[asyncio.Task[Reply]] = []
                try:
                    for connection in self._bulk:
                        call = connections.peer(connection).SendParts()  # type: ignore[call-arg]  # may be left out
                        size, way = connections.sizes[connection], connections.ways[connection].anew()
                        connections.ways[connection] = way
                        size.message_bytes = way.fitting(size.message_bytes)
                        sending = _Sending(call, stall_s, self._limit, self._uplink, size, way, self._progress, taken)
                        streams.append(asyncio.create_task(sending.run(first, outbox)))
                    for stream in asyncio.as_completed(streams):
                        if (reply := await stream) is not Reply.OK:
                            return reply
                    return Reply.OK
                except LinkSlow:
                    connections.sizes.clear()
                    connections.ways.clear()
                    raise
                finally:  # what one stream raises or answers other than OK ends the others
                    for running in streams:
                        running.cancel()
                    await asyncio.gather(*streams, return_exceptions=True)

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        request = peer_pb2.HelloRequest(wire_version=convert.WIRE_VERSION)
        answer = await self._ask(address, lambda peer: peer.Hello(request, timeout=timeout_s), once=True)
        return parsed(convert.welcome_from_wire, answer)

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        answer = await self._ask(address, lambda peer: peer.Lanes(peer_pb2.LanesRequest(), timeout=timeout_s))
        return parsed(convert.lanes_from_wire, answer)

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        request = parts_pb2.FetchCommitsRequest(since=since)
        found, room_bytes = list[Closed](), MAX_COMMITS_BYTES
        try:
            async with self._replies(address, lambda peer: peer.FetchCommits(request), stall_s) as replies:
                async for reply in replies:
                    commit = parsed(convert.commit_from_wire, reply.header.commit)
                    if (room_bytes := room_bytes - len(reply.header.commit)) < 0:
                        break  # they are asked for again
                    mean = await _read_mean(replies, reply.header.parts, limits)
                    limits = replace(limits, total_bytes=limits.total_bytes - sum(map(len, mean)))
                    found.append(Closed(commit, mean))
        except (LinkDown, LinkSlow):
            if not found:
                raise
        return found

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        request = parts_pb2.FetchMeanRequest(mean_digest=mean_digest)
        async with self._replies(address, lambda peer: peer.FetchMean(request), stall_s) as replies:
            first = await anext(replies, None)
            if first is None or first.WhichOneof("content") != "parts":
                raise LinkRefused(Reply.MALFORMED, "a mean begins with the number of its parts")
            return await _read_mean(replies, first.parts, limits)

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        request = peer_pb2.FetchStateOfferRequest(have=have)
        answer = await self._ask(address, lambda peer: peer.FetchStateOffer(request, timeout=timeout_s))
        return parsed(convert.state_offer_from_wire, answer)

    async def fetch_state(
        self,
        address: str,
        digest: str,
        chunks: Sequence[int],
        max_chunk_bytes: int,
        stall_s: float,
        came: Callable[[int], None] = untold,
    ) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
        request = parts_pb2.FetchStateRequest(digest=digest, chunks=chunks)
        assembler, wanted = PartAssembler(max_chunk_bytes), iter(chunks)
        async with self._replies(address, lambda peer: peer.FetchState(request), stall_s) as replies:
            async for reply in replies:
                before, whole = assembler.taken_bytes, parsed(assembler.pieces, reply.chunks)
                if assembler.taken_bytes > before:  # who sends empty messages makes no progress
                    came(assembler.taken_bytes - before)
                for index, pieces in whole:
                    if index != next(wanted, None):
                        raise LinkRefused(Reply.MALFORMED, f"chunk {index} of the state is not the next one")
                    yield index, pieces
        if next(wanted, None) is not None:
            raise LinkRefused(Reply.MALFORMED, "the stream ended before the last chunk of the state")

    async def status(self, address: str, timeout_s: float) -> str:
        return (await self._ask(address, lambda peer: peer.Status(peer_pb2.StatusRequest(), timeout=timeout_s))).json

    async def close(self) -> None:
        """Close all gRPC connections; calls that are under way are cancelled, but for a `Hello`, which soon ends."""
        while self._connections:
            await self._connections.popitem()[1].close()

    async def _ask(self, address: str, ask: Callable[[PeerAsyncStub], Awaitable[M | None]], once: bool = False) -> M:
        """A peer's answer to a gRPC call of one message."""
        async with self._connected(address, once) as connections:
            return _there(await ask(connections.peer()))

    @asynccontextmanager
    async def _replies(
        self, address: str, ask: Callable[[PeerAsyncStub], grpc.aio.UnaryStreamCall[Any, M]], stall_s: float
    ) -> AsyncIterator[AsyncIterator[M]]:
        """Messages that a peer streams in answer to a gRPC call for bulk. Each must come within `stall_s`."""
        async with self._connected(address) as one, aclosing(_within(stall_s, ask(one.peer(_BULK)))) as replies:
            yield replies

    @asynccontextmanager
    async def _connected(self, address: str, once: bool = False) -> AsyncIterator[_Connections]:
        """The gRPC connections to a peer, kept open for one call. Raises gRPC's errors as the link's. `once`: closed
        after it, as the address is perhaps a stranger's word: gRPC would keep 60 kB for it, and go on dialling."""
        connections = _Connections(partial(self._open, address))
        connections = connections if once else self._connections.setdefault(address, connections)
        connections.calls += 1
        try:
            await self._forget_unused()
            yield connections
        except grpc.aio.AioRpcError as error:
            raise _as_link_error(address, error) from None
        except DecodeError as error:
            raise LinkRefused(Reply.MALFORMED, f"{address} sent what is no message") from error
        finally:
            connections.calls -= 1
            connections.used_s = monotonic_s()
            if once:
                await connections.close()

    async def _forget_unused(self) -> None:
        """Close the gRPC connections to addresses without a call for `UNUSED_S`; looks for them as rarely."""
        now_s = monotonic_s()
        if now_s - self._swept_s < UNUSED_S:
            return
        self._swept_s = now_s
        for address, connections in list(self._connections.items()):
            if not connections.calls and now_s - connections.used_s >= UNUSED_S:
                self._connections.pop(address, None)  # `close` may have come in between
                await connections.close()

    def _open(self, address: str) -> grpc.aio.Channel:
        """A new gRPC connection to a peer, with TLS. Raises LinkDown when `address` is none."""
        try:
            target = join_address(*split_address(address))
        except UsageError as error:
            raise LinkDown(error.cause) from error
        rpc_ms = int(self._rpc_s * 1000)
        options = {
            "grpc.ssl_target_name_override": SERVER_NAME,
            "grpc.use_local_subchannel_pool": 1,  # connections and their back-off are this link's own
            "grpc.enable_http_proxy": 0,  # a proxy variable set for downloads must not catch peers
            "grpc.enable_retries": 0,  # what is tried again, and when, is the protocol's decision
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1000,  # a peer that is back is found within a second
            "grpc.min_reconnect_backoff_ms": 2 * rpc_ms,  # despite its name: how long one attempt to connect may take
            # After a partition TCP may wait minutes with its next try; a connection that answers no ping is replaced.
            # Far longer than the deadlines of calls, so that a frozen peer is seen as slow, and not as gone.
            "grpc.keepalive_time_ms": 2 * rpc_ms,
            "grpc.keepalive_timeout_ms": 4 * rpc_ms,
            "grpc.http2.ping_timeout_ms": 4 * rpc_ms,
            "grpc.client_idle_timeout_ms": IDLE_MS,
        }
        return grpc.aio.secure_channel(f"dns:///{target}", self._credentials, options=list(options.items()))


class _Connections:
    """The gRPC connections to one address, each opened at its first call."""

    def __init__(self, open_: Callable[[], grpc.aio.Channel]) -> None:
        self._open = open_
        self._channels: dict[int, tuple[grpc.aio.Channel, PeerAsyncStub]] = {}
        self.sizes: defaultdict[int, MessageSize] = defaultdict(MessageSize)
        self.ways: defaultdict[int, UnderWay] = defaultdict(lambda: UnderWay(MIN_UNDER_WAY_BYTES))
        """By connection, as its last streams left them: a new stream need not measure again how fast it is."""
        self.calls = 0
        """Calls that are under way."""
        self.used_s = monotonic_s()
        """When the latest call ended."""

    def peer(self, connection: int = _CONTROL) -> PeerAsyncStub:
        """Client stub of a peer's gRPC methods, over one of the connections.

        Bulk has connections of its own: at 4 Mb/s, heartbeats behind it in the same buffers took 3 s.
        """
        if connection not in self._channels:
            channel = self._open()
            self._channels[connection] = channel, PeerStub(channel)
        return self._channels[connection][1]

    async def close(self) -> None:
        """Close the gRPC connections to this address; calls that are under way are cancelled."""
        for channel, _ in self._channels.values():
            await channel.close(grace=None)


def channel_credentials(keys: Keys) -> grpc.ChannelCredentials:
    """TLS credentials of a gRPC client that connects only to servers with the same keys."""
    return grpc.ssl_channel_credentials(keys.certificate, keys.private_key, keys.certificate)


@dataclass
class _Progress:
    """Time at which a receiver took something, over all gRPC streams of a link."""

    moved_at_s: float = -math.inf


@dataclass
class _Sending:
    """One gRPC stream that sends parts to a peer.

    Progress is a message that gRPC took from us, or word from the receiver that it took some: with buffers between
    the two, either alone may pause for longer than `stall_s` on a slow link. As long as others take something, this
    stream may only wait for its share of the uplink. Waiting for parts, or for the turn that `limit` gives, is our own
    business. What the receiver takes while more is there for it goes to `uplink`.

    No more is sent than `way` allows to be under way: control messages share buffers on the way with it.
    """

    call: grpc.aio.StreamStreamCall[parts_pb2.SendPartsRequest, parts_pb2.SendPartsReply]
    stall_s: float
    limit: RateLimit
    uplink: Uplink
    size: MessageSize
    way: UnderWay
    others: _Progress
    """Progress of all streams of the link."""
    taken: Callable[[int], None]
    moved_at_s: float = field(default_factory=monotonic_s)
    """When there was progress last."""
    pausing: bool = False
    """Whether we wait for parts or for our turn, and not for the receiver."""
    fed_since_s: float = math.inf
    """Since then there was always something to send."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """The receiver has taken more."""

    async def run(self, first: parts_pb2.SendPartsRequest, outbox: Outbox) -> Reply:
        """Send parts from the shared outbox over this gRPC stream. Returns the receiver's answer."""
        writing = asyncio.create_task(self._write_all(first, outbox))
        answering = asyncio.create_task(self._answer())
        try:
            unfinished: set[asyncio.Task[Any]] = {writing, answering}
            while not answering.done():
                moved_at_s = max(self.moved_at_s, self.others.moved_at_s)
                left_s = self.stall_s if self.pausing else moved_at_s + self.stall_s - monotonic_s()
                if left_s <= 0:
                    raise LinkSlow(f"no progress for {self.stall_s:g} s")
                _, unfinished = await asyncio.wait(unfinished, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()  # raises what `parts` raised
            return _reply(answering.result())
        finally:
            writing.cancel()
            answering.cancel()
            self.call.cancel()

    async def _write_all(self, first: parts_pb2.SendPartsRequest, outbox: Outbox) -> None:
        """Write to the gRPC stream until the end, or until the receiver ends the call: its answer has the reason."""
        async with aclosing(self._messages(first, outbox)) as messages:
            async for message in messages:
                try:
                    await self.call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it ended now, or before
                    return
                self.moved_at_s = monotonic_s()
        with suppress(grpc.aio.InternalError):  # the connection broke while the end waited for what other streams wrote
            await self.call.done_writing()

    async def _messages(
        self, first: parts_pb2.SendPartsRequest, outbox: Outbox
    ) -> AsyncGenerator[parts_pb2.SendPartsRequest]:
        """Messages of a gRPC stream: `first`, then parts from the outbox, each when the rate limit allows it."""
        yield first
        while True:
            if outbox.starved:
                self.fed_since_s = math.inf
            with self._pause():
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        parts = await outbox.take(self.size.message_bytes)
                except TimeoutError:
                    parts = None
            if parts is None:
                yield parts_pb2.SendPartsRequest(chunks=parts_pb2.Chunks())
                continue
            self.fed_since_s = min(self.fed_since_s, monotonic_s())
            if not parts:
                return
            for message in cut(parts, parts_pb2.SendPartsRequest, self.size):
                size_bytes = sum(len(chunk.payload) for chunk in message.chunks.chunks)
                while not self.way.allows(size_bytes):
                    self.news.clear()
                    await self.news.wait()
                delay_s = self.limit.delay_s(message.ByteSize(), monotonic_s())
                if delay_s > 0:
                    with self._pause():
                        await asyncio.sleep(delay_s)
                self.way.sent(size_bytes, monotonic_s())
                yield message

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """The gRPC stream waits for parts or for its turn: the receiver's deadline begins anew when that is over."""
        self.pausing = True
        yield
        self.pausing = False
        self.moved_at_s = monotonic_s()

    async def _answer(self) -> control_pb2.DeliverReply:
        """The receiver's answer to the gRPC stream. Before it, reports of bytes taken set `size`, `way`, `uplink`."""
        way, reported_at_s, full = self.way, monotonic_s(), False
        async for reply in self.call:
            if _there(reply).HasField("reply"):
                return reply.reply
            taken_bytes = reply.taken_bytes - way.taken_bytes
            if not 0 < taken_bytes <= way.bytes:
                continue  # a report of no progress, or of bytes that were never sent
            now_s = self.moved_at_s = self.others.moved_at_s = monotonic_s()
            self.taken(taken_bytes)
            fed = full and self.fed_since_s <= reported_at_s
            way.took(reply.taken_bytes, self.fed_since_s, now_s)
            self.size.measured(taken_bytes, now_s - reported_at_s, fed)
            self.size.message_bytes = way.fitting(self.size.message_bytes)
            if fed:
                self.uplink.took(taken_bytes, reported_at_s, now_s)
            reported_at_s = now_s
            full = way.bytes >= way.fitting(MESSAGE_BYTES)  # with less, it is not the link that we wait for
            self.news.set()
        raise LinkRefused(Reply.MALFORMED, "a stream of parts was not answered")


async def _within(stall_s: float, call: grpc.aio.UnaryStreamCall[Any, M]) -> AsyncGenerator[M, None]:
    """Messages of a gRPC call as they arrive. Raises LinkSlow when one is not there within `stall_s`."""
    stream = aiter(call)
    try:
        while True:
            async with progress(stall_s):
                reply = await anext(stream, None)
            if reply is None:
                return
            yield reply
    finally:
        call.cancel()


async def _read_mean(replies: AsyncIterator[Any], count: int, limits: Limits) -> list[bytes]:
    """The `count` encoded parts of a mean from a gRPC stream. Raises LinkRefused if out of order or beyond `limits`."""
    if count > limits.parts:
        raise LinkRefused(Reply.MALFORMED, f"a mean of {count} parts, at most {limits.parts} may be")
    assembler = PartAssembler(limits.part_bytes)
    payloads: list[bytes] = []
    while len(payloads) < count:
        reply = await anext(replies, None)
        if reply is None or reply.WhichOneof("content") != "chunks":
            raise LinkRefused(Reply.MALFORMED, f"a mean ends after {len(payloads)} of {count} parts")
        for part in parsed(assembler.join, reply.chunks):
            if part.index != len(payloads):
                raise LinkRefused(Reply.MALFORMED, f"part {part.index} of a mean where {len(payloads)} should be")
            payloads.append(part.payload)
        if assembler.taken_bytes > limits.total_bytes:
            raise LinkRefused(Reply.MALFORMED, "more bytes of means than anybody keeps")
    return payloads


def _there(answer: M | None) -> M:
    """The answer to a gRPC call. gRPC has None where damaged bytes left a status but no message: raises LinkDown."""
    if answer is None:
        raise LinkDown("an answer without a message")
    return answer


def _reply(answer: control_pb2.DeliverReply) -> Reply:
    """The receiver's reply code in a gRPC answer. Raises LinkRefused when it did not understand the message itself."""
    reply, detail = parsed(convert.reply_from_wire, answer)
    if detail:
        raise LinkRefused(reply, detail)
    return reply


def _as_link_error(address: str, error: grpc.aio.AioRpcError) -> LinkDown | LinkSlow | LinkRefused:
    """A failed gRPC call as the link's error: advice that a person can act on in place of BoringSSL's terms."""
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        details = f"it has another {VARIABLE}"
    elif "Tls handshake failed" in details:
        details = "it does not speak TLS, or its bytes were damaged"
    detail = f"{address}: {details}"
    match error.code():
        # INTERNAL and UNKNOWN: it broke during a write, or does not speak HTTP/2; or TLS found damaged bytes.
        case StatusCode.UNAVAILABLE | StatusCode.CANCELLED | StatusCode.INTERNAL | StatusCode.UNKNOWN:
            return LinkDown(detail)
        case code if code is StatusCode.DEADLINE_EXCEEDED or "Concurrent RPC" in details:  # more than `serve` takes
            return LinkSlow(detail)
        case StatusCode.FAILED_PRECONDITION:
            metadata: Any = error.trailing_metadata() or ()
            name = str(dict(metadata).get(REPLY_KEY, ""))
            return LinkRefused(Reply.__members__.get(name, Reply.MALFORMED), detail)
        case code:
            return LinkRefused(Reply.MALFORMED, f"{detail} ({code.name})")
