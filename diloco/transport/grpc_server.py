"""`serve` answers other peers over gRPC: the other end of `grpc_link.GrpcLink`, on the same loop and thread."""
# ruff: noqa: N802  (the proto file names the methods)

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError
from diloco.identity.keys import Keys
from diloco.protocol.messages import Reply
from diloco.protocol.streams import Part, StreamHeader
from diloco.transport.address import join_address, split_address
from diloco.transport.grpc_calls import REPLY_KEY, keep_freed_memory, parsed, progress
from diloco.transport.link import LinkRefused, LinkSlow, Service
from diloco.wire import convert
from diloco.wire.chunks import Joiner, Pace, cut
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from diloco.wire.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server

EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]
MAX_DETAIL: Final = 1000
REPORT_S: Final = 0.02
"""Least time between two progress reports of a stream's receiver."""
FETCH_MESSAGE_BYTES: Final = 1 << 18
"""Messages of an answer; nobody tells how fast they are taken. At 1 Mb/s one takes 2 s."""

Context = grpc.aio.ServicerContext[Any, Any]


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
    keep_freed_memory()
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
            parsed(convert.check_version, request.wire_version)
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
                for reply in cut([Part(index, payload)], parts_pb2.FetchStateReply, Pace(FETCH_MESSAGE_BYTES)):
                    await self._service.on_state_bytes(sum(len(chunk.payload) for chunk in reply.chunks.chunks))
                    await self._write(context, reply)

    async def Lanes(self, request: peer_pb2.LanesRequest, context: Context) -> peer_pb2.LanesReply:
        return peer_pb2.LanesReply(addresses=self._service.on_lanes())

    async def Status(self, request: peer_pb2.StatusRequest, context: Context) -> peer_pb2.StatusReply:
        return peer_pb2.StatusReply(json=self._service.on_status())

    async def _deliver(self, request: control_pb2.Sealed) -> Reply:
        return await self._service.on_envelope(parsed(convert.unseal, request))

    async def _receive(self, context: Context) -> Reply:
        first = await self._read(context)
        if first is None or first.WhichOneof("content") != "header":
            raise LinkRefused(Reply.MALFORMED, "a stream of parts begins with its header")
        header = parsed(convert.header_from_wire, first.header)
        async with aclosing(self._parts(context, header)) as parts:
            return await self._service.on_parts(header, parts)

    async def _parts(self, context: Context, header: StreamHeader) -> AsyncGenerator[Part, None]:
        joiner = Joiner(self._service.max_part_bytes)
        reported_at_s = 0.0
        while (request := await self._read(context)) is not None:
            if request.WhichOneof("content") != "chunks":
                raise LinkRefused(Reply.MALFORMED, "a stream of parts has one header")
            joined = parsed(joiner.join, request.chunks)
            self._service.on_bytes(header)
            for part in joined:
                yield part
            if monotonic_s() - reported_at_s >= REPORT_S:
                await self._write(context, parts_pb2.SendPartsReply(taken_bytes=joiner.taken_bytes))
                reported_at_s = monotonic_s()
        parsed(Joiner.finish, joiner)

    async def _read(self, context: Context) -> Any | None:
        """The next message of a stream; None at its end."""
        try:
            async with progress(self._idle_s):
                request = await context.read()
        except DecodeError as error:
            raise LinkRefused(Reply.DAMAGED, "no message") from error
        return None if request is EOF else request

    async def _write(self, context: Context, message: Message) -> None:
        async with progress(self._idle_s):
            await context.write(message)

    async def _write_parts(self, context: Context, parts: Iterable[Part], message: type[Any]) -> None:
        for reply in cut(parts, message, Pace(FETCH_MESSAGE_BYTES)):
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
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _detail(error), ((REPLY_KEY, error.reply.name),))
    except LinkSlow as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))


def _detail(error: LinkRefused) -> str:
    return str(error).removeprefix(f"{error.reply.name.lower()}: ")[:MAX_DETAIL]
