"""`serve` answers other peers over gRPC: the other end of `grpc_link.GrpcLink`, on the same loop and thread.

In front: what both ends need for a call. A deadline for the other side's progress, messages that are not trusted, and
the memory of messages.
"""
# ruff: noqa: N802  (the proto file names the methods)

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import starmap
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from diloco.base.errors import ResourceError
from diloco.identity.keys import Keys
from diloco.protocol.messages import Reply
from diloco.protocol.streams import MAX_CHUNKS, Part, StreamHeader
from diloco.transport.address import join_address, split_address
from diloco.transport.link import LinkRefused, LinkSlow, Service
from diloco.transport.process import raise_file_limit, this_process
from diloco.wire import convert
from diloco.wire.chunks import Damaged, MessageSize, PartAssembler, cut
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from diloco.wire.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server

REPLY_KEY: Final = "diloco-reply"
"""Metadata of a refusal: the name of the reply."""
MAX_DETAIL: Final = 1000
"""Characters of a refusal's reason that are sent."""
REPORT_S: Final = 0.02
"""Seconds between two progress reports of a stream's receiver, at least."""
FETCH_MESSAGE_BYTES: Final = 1 << 16
"""Payload of a message of an answer, of which the caller does not report how fast it takes them. At 0.2 Mb/s one takes
2.6 s, and whole it must be there within `stall_s`."""
MAX_FETCHES: Final = 128
"""Answers to fetches that are under way at once; one host has half of them at most. An answer holds a chunk of the
state, or a part of a mean, until the caller takes it."""

MAX_MEMBERS: Final = 256
"""Members whose connections a server has room for; the directory lists as many."""
MIN_CONNECTIONS: Final = 1024
"""Incoming connections for which there is room at least, where files allow it: other sites may have more streams than
ours. One that says nothing takes 60 kB."""
OWN_FILES: Final = 256
"""Files that a peer may open beside its connections to other peers: data, checkpoints, ranks, libraries."""
CALLS: Final = 4
"""Calls under way for each connection that may be open, over all: heartbeats of a busy peer wait for each other."""
CONNECTION_IDLE_S: Final = 120.0
"""A connection without a call for so long is closed. A peer closes its own after half of that."""

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
M = TypeVar("M")


@asynccontextmanager
async def progress(within_s: float) -> AsyncIterator[None]:
    """A deadline for one step of a gRPC call. Raises LinkSlow when the step takes longer."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise LinkSlow(f"no progress for {within_s:g} s") from None


def parsed(convert_: Callable[[M], T], message: M) -> T:
    """A gRPC message as `convert_` reads it. Raises LinkRefused: it was damaged on its way, or no peer may send it."""
    try:
        return convert_(message)
    except Damaged as error:
        raise LinkRefused(Reply.DAMAGED, str(error)) from error
    except ValueError as error:
        raise LinkRefused(Reply.MALFORMED, str(error)) from error


def keep_freed_memory() -> None:
    """Keep the memory of gRPC messages for the next ones. On the thread of the event loop, before it runs.

    glibc shall not return freed blocks of up to 16 MiB: it raises its thresholds (mallopt(3), M_MMAP_THRESHOLD) to the
    largest block ever freed. Before that, the pages of every message are faulted in anew: 1.5 instead of 0.6 CPU-s per
    GB sent. And as many bytes are touched here, once: in the first round a message took up to 15 ms of the loop.
    """
    bytes(16 << 20)
    bytearray(b"\1") * (16 << 20)


def max_connections(streams: int) -> int:
    """Incoming connections that a peer with `network.streams` lets be open, within the files that it may open."""
    files = raise_file_limit()
    room = max((files - OWN_FILES) // 2, files // 4)  # about as many go out as come in
    return min(room, max(MIN_CONNECTIONS, MAX_MEMBERS * (1 + streams)))


class Server:
    """A gRPC server that listens for other peers."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        """`host:port` that it listens on, with the real port."""

    async def stop(self, grace_s: float) -> None:
        """Stop the gRPC server: take no more calls, and cancel those that are not done after `grace_s`."""
        await self._server.stop(grace_s)


async def serve(
    service: Service, listen: str, keys: Keys, idle_s: float = 60.0, *, rpc_s: float = 5.0, streams: int = 1
) -> Server:
    """Start a gRPC server at `listen` (`host:port`; port 0 takes a free one) for peers that show the same `keys`.

    A stream whose other end neither sends nor takes anything for `idle_s` is ended: longer than any honest pause, as
    that of a peer that waits for contributions before it has a mean to send.

    Whoever reaches the port can connect, without any key. Connections beyond `max_connections` are closed at once. One
    that is not through with its handshake after 2 `rpc_s`, when a peer of such a site gives up, makes room for others.

    Raises ResourceError when the port is taken, UsageError when `listen` is no address.
    """
    host, port = split_address(listen)
    connections = max_connections(streams)
    server = grpc.aio.server(
        maximum_concurrent_rpcs=CALLS * connections,
        options=[
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", int(2000 * rpc_s)),  # from TCP's to the settings of HTTP/2
            ("grpc.max_connection_idle_ms", int(1000 * CONNECTION_IDLE_S)),
            ("grpc.so_reuseport", 0),  # or a second peer on the same port would silently get half of the calls
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),  # the pings of GrpcLink are no abuse
        ],
    )
    add_PeerServicer_to_server(_Handlers(service, idle_s), server)
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
    """TLS credentials of a gRPC server that accepts connections only from clients with the same keys."""
    pair = keys.private_key, keys.certificate
    return grpc.ssl_server_credentials([pair], root_certificates=keys.certificate, require_client_auth=True)


class _Handlers(PeerServicer):
    """Handlers of the gRPC server: turn other peers' messages into calls of the service."""

    def __init__(self, service: Service, idle_s: float) -> None:
        self._service = service
        self._idle_s = idle_s
        self._fetches: Counter[str] = Counter()
        """Answers to fetches that are under way, by the caller's host."""

    async def Hello(self, request: peer_pb2.HelloRequest, context: Context) -> peer_pb2.Welcome:
        async with _refusing(context):
            parsed(convert.check_version, request.wire_version)
            return convert.welcome_to_wire(replace(self._service.on_hello(), process=this_process()))

    async def Deliver(self, request: control_pb2.Sealed, context: Context) -> control_pb2.DeliverReply:
        return await _replying(self._deliver(request))

    async def SendParts(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context):
            reply = await _replying(self._receive(context))
            await self._write(context, parts_pb2.SendPartsReply(reply=reply))

    async def FetchCommits(self, request: parts_pb2.FetchCommitsRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context), self._fetching(context):
            async for closed in self._service.on_fetch_commits(request.since):
                header = parts_pb2.CommitHeader(commit=convert.commit_to_wire(closed.commit), parts=len(closed.parts))
                await self._write(context, parts_pb2.FetchCommitsReply(header=header))
                await self._write_parts(context, closed.parts, parts_pb2.FetchCommitsReply)

    async def FetchMean(self, request: parts_pb2.FetchMeanRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context), self._fetching(context):
            payloads = await self._service.on_fetch_mean(request.mean_digest)
            if payloads is None:
                raise LinkRefused(Reply.STALE, "that mean is not here")
            await self._write(context, parts_pb2.FetchMeanReply(parts=len(payloads)))
            await self._write_parts(context, payloads, parts_pb2.FetchMeanReply)

    async def FetchStateOffer(self, request: peer_pb2.FetchStateOfferRequest, context: Context) -> peer_pb2.StateOffer:
        async with _refusing(context), self._fetching(context):
            return convert.state_offer_to_wire(await self._service.on_state_offer(request.have))

    async def FetchState(self, request: parts_pb2.FetchStateRequest, context: Context) -> None:  # type: ignore[override]
        async with _refusing(context), self._fetching(context):
            if len(request.chunks) > MAX_CHUNKS or len(set(request.chunks)) < len(request.chunks):
                raise LinkRefused(Reply.MALFORMED, f"each chunk of a state once, {MAX_CHUNKS} at most")
            for index in request.chunks:
                payload = await self._service.on_state_chunk(request.digest, index)
                if payload is None:
                    raise LinkRefused(Reply.STALE, f"chunk {index} of that state is not here")
                for reply in cut([Part(index, payload)], parts_pb2.FetchStateReply, MessageSize(FETCH_MESSAGE_BYTES)):
                    size_bytes = sum(len(chunk.payload) for chunk in reply.chunks.chunks)
                    await self._service.on_state_bytes(request.digest, size_bytes)
                    await self._write(context, reply)

    async def Lanes(self, request: peer_pb2.LanesRequest, context: Context) -> peer_pb2.LanesReply:
        return peer_pb2.LanesReply(addresses=self._service.on_lanes())

    async def Status(self, request: peer_pb2.StatusRequest, context: Context) -> peer_pb2.StatusReply:
        return peer_pb2.StatusReply(json=self._service.on_status())

    @asynccontextmanager
    async def _fetching(self, context: Context) -> AsyncIterator[None]:
        """A fetch over gRPC while it is answered. Raises LinkRefused where too many are under way already."""
        host = context.peer().rpartition(":")[0]
        if self._fetches.total() >= MAX_FETCHES or 2 * self._fetches[host] >= MAX_FETCHES:
            raise LinkRefused(Reply.TOO_EARLY, "too many fetches are under way")
        self._fetches[host] += 1
        try:
            yield
        finally:
            self._fetches[host] -= 1
            self._fetches += Counter()  # without the hosts that have none

    async def _deliver(self, request: control_pb2.Sealed) -> Reply:
        return await self._service.on_envelope(parsed(convert.unseal, request))

    async def _receive(self, context: Context) -> Reply:
        """Hand a gRPC stream of parts to the service as it arrives; returns the service's reply."""
        first = await self._read(context)
        if first is None or first.WhichOneof("content") != "header":
            raise LinkRefused(Reply.MALFORMED, "a stream of parts begins with its header")
        header = parsed(convert.header_from_wire, first.header)
        async with aclosing(self._parts(context, header)) as parts:
            return await self._service.on_parts(header, parts)

    async def _parts(self, context: Context, header: StreamHeader) -> AsyncGenerator[Part, None]:
        """Parts that arrive in a gRPC stream. The sender gets reports of how many bytes were taken."""
        assembler = PartAssembler(self._service.max_part_bytes)
        async with self._reporting(context, assembler) as news:
            while (request := await self._read(context)) is not None:
                if request.WhichOneof("content") != "chunks":
                    raise LinkRefused(Reply.MALFORMED, "a stream of parts has one header")
                before_bytes = assembler.taken_bytes
                joined = parsed(assembler.join, request.chunks)
                news.set()
                self._service.on_bytes(header, assembler.taken_bytes - before_bytes)
                for part in joined:
                    yield part
        parsed(PartAssembler.finish, assembler)

    @asynccontextmanager
    async def _reporting(self, context: Context, assembler: PartAssembler) -> AsyncIterator[asyncio.Event]:
        """Report to the sender of a gRPC stream how many bytes were taken: soon after each `news`, and no more often
        than every `REPORT_S`. A sender waits for reports: the last must not wait for more bytes."""
        news, writing = asyncio.Event(), asyncio.Lock()

        async def report() -> None:
            while True:
                await news.wait()
                news.clear()
                async with writing:
                    await self._write(context, parts_pb2.SendPartsReply(taken_bytes=assembler.taken_bytes))
                await asyncio.sleep(REPORT_S)

        reporting = asyncio.create_task(report())
        try:
            yield news
        finally:
            try:
                await writing.acquire()  # gRPC takes no other message after a write that was cancelled
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)

    async def _read(self, context: Context) -> Any | None:
        """The next message of a gRPC stream from another peer; None at its end."""
        try:
            async with progress(self._idle_s):
                request = await context.read()
        except DecodeError as error:
            raise LinkRefused(Reply.DAMAGED, "no message") from error
        return None if request is grpc.aio.EOF else request  # type: ignore[attr-defined]

    async def _write(self, context: Context, message: Message) -> None:
        async with progress(self._idle_s):
            await context.write(message)

    async def _write_parts(self, context: Context, payloads: Sequence[bytes], message: type[Any]) -> None:
        """Write the parts of a mean to a gRPC stream, numbered in their order."""
        for reply in cut(starmap(Part, enumerate(payloads)), message, MessageSize(FETCH_MESSAGE_BYTES)):
            await self._write(context, reply)


async def _replying(work: Awaitable[Reply]) -> control_pb2.DeliverReply:
    """The gRPC answer to a call: the service's reply as a message; where it refuses, with the reason."""
    try:
        return convert.reply_to_wire(await work)
    except LinkRefused as error:
        return convert.reply_to_wire(error.reply, error.detail[:MAX_DETAIL])


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    """Send a refusal of the service back as a gRPC status, with its reply beside it."""
    try:
        yield
    except LinkRefused as error:
        reply = ((REPLY_KEY, error.reply.name),)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.detail[:MAX_DETAIL], reply)
    except LinkSlow as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
