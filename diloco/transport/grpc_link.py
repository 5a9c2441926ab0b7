"""The exchange's seam over gRPC: `GrpcLink` asks other peers, `serve` answers them.

Both live on one asyncio loop and thread, and speak TLS: see `keys.py`. Nothing that arrives is trusted: addresses are
checked before they are dialled (gRPC would also open `unix:` ones), sizes before bytes are kept. Liveness is progress:
a stopped process keeps its sockets open, so every wait for the other side has a deadline here, none is left to TCP.
"""
# ruff: noqa: N802  (the proto file names the methods)

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at import; a lost peer is weather: no line on stderr for it

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError, UsageError
from diloco.base.types import Closed
from diloco.identity.keys import SERVER_NAME, VARIABLE, Keys
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.address import join_address, split_address
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow, Service
from diloco.transport.outbox import Outbox
from diloco.transport.pace import RateLimit, Uplink
from diloco.wire import convert
from diloco.wire.chunks import MESSAGE_BYTES, Damaged, Joiner, Pace, cut
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from diloco.wire.v1.peer_pb2_grpc import PeerServicer, PeerStub, add_PeerServicer_to_server

if TYPE_CHECKING:
    from diloco.wire.v1.peer_pb2_grpc import PeerAsyncStub

MAX_COMMITS: Final = 4096
"""Most commits taken from one answer."""

IDLE_MS: Final = 60_000
"""A connection that nobody used for so long is closed; without that gRPC knocks at a dead peer's door once a second
for half an hour, and the dead of a long run are many."""

UNUSED_S: Final = 300.0
"""After so long without a call, or twice that, an address is forgotten: whoever comes back has another port, as a rule,
and what gRPC keeps of an address, connected or not, is 60 kB."""

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]
_REPLY_KEY = "diloco-reply"
_MAX_DETAIL = 1000
_REPORT_S = 0.02
"""Least time between two progress reports of a stream's receiver."""
_CONTROL, _BULK = 0, 1
"""Connections to one address: control messages, and from here on bulk."""
_FIRST_MESSAGE_BYTES = 1 << 19
"""Bound on a stream's first message: the line may have become slow since the last one. At 1 Mb/s one takes 4 s."""
_FETCH_MESSAGE_BYTES = 1 << 18
"""Messages of an answer; nobody tells how fast they are taken. At 1 Mb/s one takes 2 s."""

T = TypeVar("T")
M = TypeVar("M")
Context = grpc.aio.ServicerContext[Any, Any]
PartsCall = grpc.aio.StreamStreamCall[parts_pb2.SendPartsRequest, parts_pb2.SendPartsReply]


# ---------------------------------------------------------------- asking


class GrpcLink(Link):
    """Asks other peers over two connections per address or more, opened at the first call and mended when they break.

    Args:
        rpc_s: deadline of `deliver`. A connection whose other end answers nothing is given up after 4 times that.
        keys: of the run; the other end must show the same.
        send_bps: most bits per second of `send_parts`, all calls together; 0: no limit. What TLS, TCP and IP put
            around them (about 5 %) is not counted.
        streams: connections over which the parts of one `send_parts` go at once. TCP fills a long link with losses
            the better the more there are.
    """

    def __init__(self, rpc_s: float, keys: Keys, send_bps: float = 0.0, streams: int = 1) -> None:
        _keep_freed_memory()
        self._rpc_s = rpc_s
        self._credentials = channel_credentials(keys)
        self._lines: dict[str, _Line] = {}
        """By address."""
        self._swept_s = monotonic_s()
        """When those were forgotten last that nobody used."""
        self._limit = RateLimit(send_bps)
        self._uplink = Uplink(send_bps)
        self._bulk = range(_BULK, _BULK + streams)

    @property
    def send_bps(self) -> int:
        return self._uplink.bps

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        request = convert.seal(envelope)
        async with self._line(address) as line:
            answer = _there(await line.peer().Deliver(request, timeout=self._rpc_s))
        return _reply(answer)

    async def send_parts(
        self, address: str, header: StreamHeader, parts: AsyncGenerator[Part], stall_s: float
    ) -> Reply:
        first = parts_pb2.SendPartsRequest(header=convert.header_to_wire(header))
        self._uplink.begin(header.version)
        async with self._line(address) as line:
            outbox = Outbox(parts)
            streams = [self._sending(line, connection, stall_s) for connection in self._bulk]
            try:
                return await _all_ok([stream.run(first, outbox) for stream in streams])
            except LinkSlow:
                line.paces.clear()
                raise
            finally:
                outbox.close()

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        request = peer_pb2.HelloRequest(wire_version=convert.WIRE_VERSION)
        async with self._line(address) as line:
            answer = _there(await line.peer().Hello(request, timeout=timeout_s))
        return _parsed(convert.welcome_from_wire, answer)

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        async with self._line(address) as line:
            answer = _there(await line.peer().Lanes(peer_pb2.LanesRequest(), timeout=timeout_s))
        return _parsed(convert.lanes_from_wire, answer)

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        request = parts_pb2.FetchCommitsRequest(since=since)
        found: list[Closed] = []
        async with (
            self._line(address) as line,
            aclosing(_replies(line.peer(_BULK).FetchCommits(request), stall_s)) as replies,
        ):
            async for reply in replies:
                if reply.WhichOneof("content") != "header" or len(found) == MAX_COMMITS:
                    raise LinkRefused(Reply.MALFORMED, f"no header of a commit after {len(found)} commits")
                commit = _parsed(convert.commit_from_wire, reply.header.commit)
                mean = await _read_mean(replies, reply.header.parts, limits)
                limits = replace(limits, total_bytes=limits.total_bytes - sum(map(len, mean)))
                found.append(Closed(commit, mean))
        return found

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        request = parts_pb2.FetchMeanRequest(mean_digest=mean_digest)
        async with (
            self._line(address) as line,
            aclosing(_replies(line.peer(_BULK).FetchMean(request), stall_s)) as replies,
        ):
            first = await anext(replies, None)
            if first is None or first.WhichOneof("content") != "parts":
                raise LinkRefused(Reply.MALFORMED, "a mean begins with the number of its parts")
            return await _read_mean(replies, first.parts, limits)

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        async with self._line(address) as line:
            request = peer_pb2.FetchStateOfferRequest(have=have)
            answer = _there(await line.peer().FetchStateOffer(request, timeout=timeout_s))
        return _parsed(convert.state_offer_from_wire, answer)

    async def fetch_state(
        self, address: str, digest: str, chunks: Sequence[int], max_chunk_bytes: int, stall_s: float
    ) -> AsyncIterator[tuple[int, bytes]]:
        request = parts_pb2.FetchStateRequest(digest=digest, chunks=chunks)
        joiner = Joiner(max_chunk_bytes)
        wanted = iter(chunks)
        async with (
            self._line(address) as line,
            aclosing(_replies(line.peer(_BULK).FetchState(request), stall_s)) as replies,
        ):
            async for reply in replies:
                for part in _parsed(joiner.join, reply.chunks):
                    if part.index != next(wanted, None):
                        raise LinkRefused(Reply.MALFORMED, f"chunk {part.index} of the state is not the next one")
                    yield part.index, part.payload
        if next(wanted, None) is not None:
            raise LinkRefused(Reply.MALFORMED, "the stream ended before the last chunk of the state")

    async def status(self, address: str, timeout_s: float) -> str:
        async with self._line(address) as line:
            answer = _there(await line.peer().Status(peer_pb2.StatusRequest(), timeout=timeout_s))
        return answer.json

    async def close(self) -> None:
        """Close all connections; calls that are under way are cancelled."""
        lines = list(self._lines.values())
        self._lines.clear()
        for line in lines:
            await line.close()

    def _sending(self, line: _Line, connection: int, stall_s: float) -> _Sending:
        call = line.peer(connection).SendParts()  # type: ignore[call-arg]  # may be left out
        pace = line.paces[connection]
        pace.message_bytes = min(pace.message_bytes, _FIRST_MESSAGE_BYTES)
        return _Sending(call, stall_s, self._limit, self._uplink, pace)

    @asynccontextmanager
    async def _line(self, address: str) -> AsyncIterator[_Line]:
        """For one call: it is not forgotten meanwhile. gRPC's errors are raised as the link's."""
        line = self._lines.setdefault(address, _Line(partial(self._open, address)))
        line.calls += 1
        try:
            await self._forget_unused()
            with _link_error(address):
                yield line
        finally:
            line.calls -= 1
            line.used_s = monotonic_s()

    async def _forget_unused(self) -> None:
        now_s = monotonic_s()
        if now_s - self._swept_s < UNUSED_S:
            return
        self._swept_s = now_s
        unused = [
            address for address, line in self._lines.items() if not line.calls and now_s - line.used_s >= UNUSED_S
        ]
        for line in [self._lines.pop(address) for address in unused]:
            await line.close()

    def _open(self, address: str) -> grpc.aio.Channel:
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


class _Line:
    """The connections to one address, each opened at its first call."""

    def __init__(self, open_: Callable[[], grpc.aio.Channel]) -> None:
        self._open = open_
        self._channels: dict[int, tuple[grpc.aio.Channel, PeerAsyncStub]] = {}
        self.paces: defaultdict[int, Pace] = defaultdict(Pace)
        """By connection, as its last streams left them: a new stream need not find out again how fast it is."""
        self.calls = 0
        """Calls that are under way."""
        self.used_s = monotonic_s()
        """When the latest call ended."""

    def peer(self, connection: int = _CONTROL) -> PeerAsyncStub:
        """Bulk has connections of its own: at 4 Mb/s, heartbeats behind it in the same buffers took 3 s."""
        if connection not in self._channels:
            channel = self._open()
            self._channels[connection] = channel, PeerStub(channel)
        return self._channels[connection][1]

    async def close(self) -> None:
        """Close them; calls that are under way are cancelled."""
        for channel, _ in self._channels.values():
            await channel.close(grace=None)


def channel_credentials(keys: Keys) -> grpc.ChannelCredentials:
    """Those of a client that only talks to who has the same keys."""
    return grpc.ssl_channel_credentials(keys.certificate, keys.private_key, keys.certificate)


class _Sending:
    """One stream of parts on its way.

    Progress is a message that gRPC took from us, or word from the receiver that it took some: with buffers between
    the two, either alone may pause for longer than `stall_s` on a slow link. Waiting for parts, or for the turn that
    `limit` gives, is our own business. What the receiver takes while more is there for it goes to `uplink`.
    """

    def __init__(self, call: PartsCall, stall_s: float, limit: RateLimit, uplink: Uplink, pace: Pace) -> None:
        self._call = call
        self._stall_s = stall_s
        self._limit = limit
        self._uplink = uplink
        self._moved_at_s = monotonic_s()
        self._pausing = False
        self._fed_since_s = math.inf
        """Since then there was always something to send."""
        self._sent_bytes = 0
        self._pace = pace

    async def run(self, first: parts_pb2.SendPartsRequest, outbox: Outbox) -> Reply:
        """Send what this stream gets of the outbox, which others may take from. Returns what the receiver answers."""
        writing = asyncio.create_task(self._write_all(first, outbox))
        answering = asyncio.create_task(self._answer())
        try:
            unfinished: set[asyncio.Task[Any]] = {writing, answering}
            while not answering.done():
                await asyncio.wait(unfinished, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
                if writing.done() and writing in unfinished:
                    unfinished.remove(writing)
                    writing.result()  # raises what `parts` raised
            return _reply(answering.result())
        finally:
            writing.cancel()
            answering.cancel()
            self._call.cancel()

    async def _write_all(self, first: parts_pb2.SendPartsRequest, outbox: Outbox) -> None:
        """Write until the end, or until the other side has ended the call: the answer says why."""
        try:
            await self._write(first)
            while parts := await self._take(outbox):
                for message in cut(parts, parts_pb2.SendPartsRequest, self._pace):
                    await self._turn(message.ByteSize())
                    await self._write(message)
            await self._call.done_writing()
        except _Ended:
            return

    async def _take(self, outbox: Outbox) -> list[Part]:
        if outbox.starved:
            self._fed_since_s = math.inf
        with self._pause():
            parts = await outbox.take(self._pace.message_bytes)
        self._fed_since_s = min(self._fed_since_s, monotonic_s())
        self._sent_bytes += sum(len(part.payload) for part in parts)
        return parts

    async def _turn(self, size_bytes: int) -> None:
        delay_s = self._limit.delay_s(size_bytes, monotonic_s())
        if delay_s > 0:
            with self._pause():
                await asyncio.sleep(delay_s)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """It is not the other side that we wait for."""
        self._pausing = True
        yield
        self._pausing = False
        self._moved_at_s = monotonic_s()

    async def _write(self, message: parts_pb2.SendPartsRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # it ended now, or before
            raise _Ended from error
        self._moved_at_s = monotonic_s()

    async def _answer(self) -> control_pb2.DeliverReply:
        taken_bytes, reported_at_s, full = 0, monotonic_s(), False
        async for reply in self._call:
            if _there(reply).HasField("reply"):
                return reply.reply
            if not taken_bytes < reply.taken_bytes <= self._sent_bytes:
                continue  # no progress, whatever it says
            now_s = self._moved_at_s = monotonic_s()
            fed = full and self._fed_since_s <= reported_at_s
            self._pace.measured(reply.taken_bytes - taken_bytes, now_s - reported_at_s, fed)
            if fed:
                self._uplink.took(reply.taken_bytes - taken_bytes, reported_at_s, now_s)
            taken_bytes, reported_at_s = reply.taken_bytes, now_s
            full = self._sent_bytes - taken_bytes >= MESSAGE_BYTES  # with less, it is not the link that we wait for
        raise LinkRefused(Reply.MALFORMED, "a stream of parts was not answered")

    def _patience_s(self) -> float:
        """Seconds left to wait for progress. Raises LinkSlow when it is overdue."""
        left_s = self._stall_s if self._pausing else self._moved_at_s + self._stall_s - monotonic_s()
        if left_s <= 0:
            raise LinkSlow(f"no progress for {self._stall_s:g} s")
        return left_s


class _Ended(Exception):
    """The other side ended the call before we did."""


async def _all_ok(streams: Sequence[Coroutine[Any, Any, Reply]]) -> Reply:
    """Run them all; what one raises or answers other than OK ends the others."""
    tasks = [asyncio.create_task(stream) for stream in streams]
    try:
        for task in asyncio.as_completed(tasks):
            if (reply := await task) is not Reply.OK:
                return reply
        return Reply.OK
    finally:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _replies(call: grpc.aio.UnaryStreamCall[Any, M], stall_s: float) -> AsyncGenerator[M, None]:
    stream = aiter(call)
    try:
        while True:
            async with _progress(stall_s):
                reply = await anext(stream, None)
            if reply is None:
                return
            yield reply
    finally:
        call.cancel()


async def _read_mean(replies: AsyncIterator[Any], count: int, limits: Limits) -> list[bytes]:
    if count > limits.parts:
        raise LinkRefused(Reply.MALFORMED, f"a mean of {count} parts, at most {limits.parts} may be")
    joiner = Joiner(limits.part_bytes)
    payloads: list[bytes] = []
    while len(payloads) < count:
        reply = await anext(replies, None)
        if reply is None or reply.WhichOneof("content") != "chunks":
            raise LinkRefused(Reply.MALFORMED, f"a mean ends after {len(payloads)} of {count} parts")
        for part in _parsed(joiner.join, reply.chunks):
            if part.index != len(payloads):
                raise LinkRefused(Reply.MALFORMED, f"part {part.index} of a mean where {len(payloads)} should be")
            payloads.append(part.payload)
        if joiner.taken_bytes > limits.total_bytes:
            raise LinkRefused(Reply.MALFORMED, "more bytes of means than anybody keeps")
    return payloads


def _there(answer: M | None) -> M:
    """gRPC gives None for an answer whose bytes were damaged so that it has status but no message."""
    if answer is None:
        raise LinkDown("an answer without a message")
    return answer


def _reply(answer: control_pb2.DeliverReply) -> Reply:
    reply, detail = _parsed(convert.reply_from_wire, answer)
    if detail:
        raise LinkRefused(reply, detail)
    return reply


@contextmanager
def _link_error(address: str) -> Iterator[None]:
    """gRPC's errors as the link's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _as_link_error(address, error) from None
    except DecodeError as error:
        raise LinkRefused(Reply.MALFORMED, f"{address} sent what is no message") from error


def _as_link_error(address: str, error: grpc.aio.AioRpcError) -> LinkDown | LinkSlow | LinkRefused:
    detail = f"{address}: {_plain(error.details() or '')}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return LinkDown(detail)
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return LinkDown(detail)  # broke during a write, or does not speak HTTP/2; or TLS found damaged bytes
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return LinkSlow(detail)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return LinkRefused(_refusal(error), detail)
        case code:
            return LinkRefused(Reply.MALFORMED, f"{detail} ({code.name})")


def _plain(details: str) -> str:
    """Advice that a person can act on, where gRPC reports BoringSSL's words."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"it has another {VARIABLE}"
    if "Tls handshake failed" in details:
        return "it does not speak TLS, or its bytes were damaged"
    return details


def _refusal(error: grpc.aio.AioRpcError) -> Reply:
    metadata: Any = error.trailing_metadata() or ()
    name = dict(metadata).get(_REPLY_KEY, "")
    return Reply.__members__.get(str(name), Reply.MALFORMED)


# ---------------------------------------------------------------- answering


class Server:
    """A listening service."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        """`host:port` that it listens on, with the real port."""

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and cancel those that are not done after `grace_s`."""
        await self._server.stop(grace_s)


async def serve(service: Service, listen: str, keys: Keys, idle_s: float = 60.0) -> Server:
    """Answer other peers that show the same `keys` at `listen` (`host:port`; port 0 takes a free one).

    A stream whose other end neither sends nor takes anything for `idle_s` is ended: longer than any honest pause, as
    that of a peer that waits for contributions before it has a mean to send.

    Raises ResourceError when the port is taken, UsageError when `listen` is no address.
    """
    _keep_freed_memory()
    host, port = split_address(listen)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # or a second peer on the same port would silently get half of the calls
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),  # the pings of GrpcLink are no abuse
        ]
    )
    add_PeerServicer_to_server(_Peer(service, idle_s), server)
    try:
        bound = server.add_secure_port(join_address(host, port), server_credentials(keys))
    except RuntimeError as error:
        raise ResourceError(
            f"cannot listen on {listen}: the port is taken, or the address is not this machine's",
            "stop what listens there (`ss -ltnp` shows it), or set network.listen to another port or to port 0",
        ) from error
    await server.start()
    return Server(server, join_address(host, bound))


def server_credentials(keys: Keys) -> grpc.ServerCredentials:
    """Those of a server that only talks to who has the same keys."""
    pair = keys.private_key, keys.certificate
    return grpc.ssl_server_credentials([pair], root_certificates=keys.certificate, require_client_auth=True)


class _Peer(PeerServicer):
    """Turns messages into calls of the service."""

    def __init__(self, service: Service, idle_s: float) -> None:
        self._service = service
        self._idle_s = idle_s

    async def Hello(self, request: peer_pb2.HelloRequest, context: Context) -> peer_pb2.Welcome:
        async with _refusing(context):
            _parsed(convert.check_version, request.wire_version)
            return convert.welcome_to_wire(self._service.on_hello())

    async def Deliver(self, request: control_pb2.Sealed, context: Context) -> control_pb2.DeliverReply:
        return await _replying(self._deliver(request))

    async def SendParts(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context):
            reply = await _replying(self._receive(context))
            await self._write(context, parts_pb2.SendPartsReply(reply=reply))

    async def FetchCommits(self, request: parts_pb2.FetchCommitsRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context):
            for closed in await self._service.on_fetch_commits(request.since):
                header = parts_pb2.CommitHeader(commit=convert.commit_to_wire(closed.commit), parts=len(closed.parts))
                await self._write(context, parts_pb2.FetchCommitsReply(header=header))
                await self._write_parts(context, _numbered(closed.parts), parts_pb2.FetchCommitsReply)

    async def FetchMean(self, request: parts_pb2.FetchMeanRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context):
            payloads = await self._service.on_fetch_mean(request.mean_digest)
            if payloads is None:
                raise LinkRefused(Reply.STALE, "that mean is not here")
            await self._write(context, parts_pb2.FetchMeanReply(parts=len(payloads)))
            await self._write_parts(context, _numbered(payloads), parts_pb2.FetchMeanReply)

    async def FetchStateOffer(self, request: peer_pb2.FetchStateOfferRequest, context: Context) -> peer_pb2.StateOffer:
        async with _refusing(context):
            return convert.state_offer_to_wire(await self._service.on_state_offer(request.have))

    async def FetchState(self, request: parts_pb2.FetchStateRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context):
            for index in request.chunks:
                payload = await self._service.on_state_chunk(request.digest, index)
                if payload is None:
                    raise LinkRefused(Reply.STALE, f"chunk {index} of that state is not here")
                for reply in cut([Part(index, payload)], parts_pb2.FetchStateReply, Pace(_FETCH_MESSAGE_BYTES)):
                    await self._service.on_state_bytes(sum(len(chunk.payload) for chunk in reply.chunks.chunks))
                    await self._write(context, reply)

    async def Lanes(self, request: peer_pb2.LanesRequest, context: Context) -> peer_pb2.LanesReply:
        return peer_pb2.LanesReply(addresses=self._service.on_lanes())

    async def Status(self, request: peer_pb2.StatusRequest, context: Context) -> peer_pb2.StatusReply:
        return peer_pb2.StatusReply(json=self._service.on_status())

    async def _deliver(self, request: control_pb2.Sealed) -> Reply:
        return await self._service.on_envelope(_parsed(convert.unseal, request))

    async def _receive(self, context: Context) -> Reply:
        first = await self._read(context)
        if first is None or first.WhichOneof("content") != "header":
            raise LinkRefused(Reply.MALFORMED, "a stream of parts begins with its header")
        header = _parsed(convert.header_from_wire, first.header)
        async with aclosing(self._parts(context, header)) as parts:
            return await self._service.on_parts(header, parts)

    async def _parts(self, context: Context, header: StreamHeader) -> AsyncGenerator[Part, None]:
        joiner = Joiner(self._service.max_part_bytes)
        reported_at_s = 0.0
        while (request := await self._read(context)) is not None:
            if request.WhichOneof("content") != "chunks":
                raise LinkRefused(Reply.MALFORMED, "a stream of parts has one header")
            joined = _parsed(joiner.join, request.chunks)
            self._service.on_bytes(header)
            for part in joined:
                yield part
            if monotonic_s() - reported_at_s >= _REPORT_S:
                await self._write(context, parts_pb2.SendPartsReply(taken_bytes=joiner.taken_bytes))
                reported_at_s = monotonic_s()
        _parsed(Joiner.finish, joiner)

    async def _read(self, context: Context) -> Any | None:
        """The next message of a stream; None at its end."""
        try:
            async with _progress(self._idle_s):
                request = await context.read()
        except DecodeError as error:
            raise LinkRefused(Reply.DAMAGED, "no message") from error
        return None if request is _EOF else request

    async def _write(self, context: Context, message: Message) -> None:
        async with _progress(self._idle_s):
            await context.write(message)

    async def _write_parts(self, context: Context, parts: Iterable[Part], message: type[Any]) -> None:
        for reply in cut(parts, message, Pace(_FETCH_MESSAGE_BYTES)):
            await self._write(context, reply)


def _numbered(payloads: Sequence[bytes]) -> Iterator[Part]:
    return (Part(index, payload) for index, payload in enumerate(payloads))


async def _replying(work: Awaitable[Reply]) -> control_pb2.DeliverReply:
    try:
        return convert.reply_to_wire(await work)
    except LinkRefused as error:
        return convert.reply_to_wire(error.reply, _detail(error))


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    """A refusal goes back as a gRPC status with its reply beside it."""
    try:
        yield
    except LinkRefused as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _detail(error), ((_REPLY_KEY, error.reply.name),))
    except LinkSlow as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))


def _detail(error: LinkRefused) -> str:
    return str(error).removeprefix(f"{error.reply.name.lower()}: ")[:_MAX_DETAIL]


# ---------------------------------------------------------------- both


@asynccontextmanager
async def _progress(within_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise LinkSlow(f"no progress for {within_s:g} s") from None


def _parsed(convert_: Callable[[M], T], message: M) -> T:
    try:
        return convert_(message)
    except Damaged as error:
        raise LinkRefused(Reply.DAMAGED, str(error)) from error
    except ValueError as error:
        raise LinkRefused(Reply.MALFORMED, str(error)) from error


def _keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 16 MiB instead of giving their pages back to the kernel.

    It raises its thresholds (mallopt(3), M_MMAP_THRESHOLD) to the largest block ever freed. Before that, the pages of
    every message are faulted in anew: 1.5 instead of 0.6 CPU-s per GB sent.
    """
    bytes(16 << 20)
