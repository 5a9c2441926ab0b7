"""Targets: all that other peers, the ranks of an island and the directory send."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar, get_args

from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_64_intdigest

from diloco.base.errors import DilocoError
from diloco.base.turns import Turns
from diloco.base.types import Closed, Commit, Member
from diloco.config.load import contract_from_json, load_contract
from diloco.island import plain
from diloco.protocol import messages as m
from diloco.protocol.claims import Bounds, why_malformed, why_no_successor
from diloco.protocol.streams import Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.dht import _ADDRESS
from diloco.transport.dht_node import _DirectoryRecords, _parse_record
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.link import LinkDown, LinkRefused
from diloco.wire import chunks, convert
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from scripts.fuzzing.examples import example
from scripts.fuzzing.spoiling import MAX_BYTES, framed, spoiled_frames, spoiled_json, spoiled_message, unframed
from scripts.fuzzing.target import Target

T = TypeVar("T")
Call = Callable[["_Answers"], Coroutine[Any, Any, object]]
"""A call over a link, for which the answers are there."""

BOUNDS = Bounds("contract", Turns(2), lease_blocks=4)
LIMITS = Limits(parts=64, part_bytes=2**20, total_bytes=2**22)
REFUSALS = (LinkDown, LinkRefused, DecodeError)
"""Errors of a call over a link; gRPC makes the last one a refusal."""
PAYLOADS = (b"", b"abc", b"\1" * 5000)


def targets() -> Iterator[Target]:
    """A target for every message, stream and encoding."""
    for kind in get_args(m.Body):
        spoil = spoiled_message(control_pb2.Envelope)
        yield Target(f"message-{kind.__name__.lower()}", _unseal, partial(_envelopes, kind), (ValueError,), spoil)
    yield Target(
        "sealed", lambda data: convert.unseal(control_pb2.Sealed.FromString(data)), _sealed, (ValueError, DecodeError)
    )
    yield Target("header", _header, _headers, (ValueError, DecodeError), spoiled_message(parts_pb2.StreamHeader))
    yield Target("reply", _reply, _replies, (ValueError, DecodeError), spoiled_message(control_pb2.DeliverReply))
    yield Target("commit", _commit, lambda: [example_commit().to_bytes()], spoil=spoiled_json)
    parts = spoiled_frames(spoiled_message(parts_pb2.Chunks))
    yield Target("parts", partial(_parts, sealed=False), _chunks, (ValueError, DecodeError))
    yield Target("parts-sealed", partial(_parts, sealed=True), _chunks, (ValueError, DecodeError), parts)
    calls: tuple[tuple[str, Call, type[Message], Callable[[], list[bytes]]], ...] = (
        ("welcome", _hello, peer_pb2.Welcome, _welcomes),
        ("lanes", lambda link: link.lanes("", 1.0), peer_pb2.LanesReply, _lanes),
        ("state-offer", lambda link: link.fetch_state_offer("", 1.0), peer_pb2.StateOffer, _offers),
        ("fetch-mean", lambda link: link.fetch_mean("", "", LIMITS, 1.0), parts_pb2.FetchMeanReply, _means),
        ("fetch-commits", lambda link: link.fetch_commits("", 0, LIMITS, 1.0), parts_pb2.FetchCommitsReply, _commits),
        ("fetch-state", _fetched_state, parts_pb2.FetchStateReply, _states),
    )  # fmt: skip
    for name, call, answer, messages in calls:
        spoil, read = spoiled_frames(spoiled_message(answer)), partial(_called, call, answer)
        yield Target(f"link-{name}", read, partial(_one_stream, messages), REFUSALS, spoil)
    yield Target("island-plain", plain.unpacked, lambda: _plain(packed=True))
    yield Target("island-plain-json", _unpack_json, lambda: _plain(packed=False), spoil=spoiled_json)
    yield Target("directory-record", _record, _records, (ValueError,), spoiled_json)
    yield Target("directory-address", _directory_address, lambda: [ADDRESS.encode()], (ValueError,))


# ---------------------------------------------------------------- control messages


def example_commit() -> Commit:
    """A commit with every field set, as a member may send it."""
    return replace(example(Commit), fragment=0)


def _envelopes(kind: Any) -> list[bytes]:
    filled = replace(example(m.Envelope), body=example(kind))
    return [convert.envelope_to_wire(filled).SerializeToString()]


def _unseal(data: bytes) -> object:
    return convert.unseal(control_pb2.Sealed(envelope=data, checksum=xxh3_64_intdigest(data)))


def _sealed() -> list[bytes]:
    return [
        convert.seal(replace(example(m.Envelope), body=example(kind))).SerializeToString() for kind in get_args(m.Body)
    ]


def _headers() -> list[bytes]:
    return [convert.header_to_wire(example(StreamHeader)).SerializeToString()]


def _header(data: bytes) -> object:
    return convert.header_from_wire(parts_pb2.StreamHeader.FromString(data))


def _replies() -> list[bytes]:
    return [convert.reply_to_wire(reply, "why").SerializeToString() for reply in m.Reply]


def _reply(data: bytes) -> object:
    return convert.reply_from_wire(control_pb2.DeliverReply.FromString(data))


def _commit(data: bytes) -> None:
    """Read a commit, and judge it as the successor of another: whatever it says, in little time."""
    commit = convert.commit_from_wire(hashlib.sha256(data).digest() + data)
    why_malformed(commit, BOUNDS)
    why_no_successor(example_commit(), commit, BOUNDS)


# ---------------------------------------------------------------- streams


def _chunks() -> list[bytes]:
    parts = [Part(index, payload, (0, 2)) for index, payload in enumerate(PAYLOADS)]
    cut = chunks.cut(parts, parts_pb2.SendPartsRequest, chunks.MessageSize(4096))
    return [framed([message.chunks.SerializeToString() for message in cut])]


def _parts(data: bytes, sealed: bool) -> None:
    assembler = chunks.PartAssembler(LIMITS.part_bytes)
    for frame in unframed(data):
        message = parts_pb2.Chunks.FromString(frame)
        assembler.join(_with_checksums(message) if sealed else message)
    assembler.finish()


def _with_checksums(message: parts_pb2.Chunks) -> parts_pb2.Chunks:
    for one in message.chunks:
        one.checksum = chunks.checksum(one.payload, one.part, one.part_bytes, one.offset, one.omitted)
    return message


# ---------------------------------------------------------------- answers to calls over a link


class _Answers(GrpcLink):
    """A link to a peer that answers each call with these messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    async def _ask(self, address: str, ask: Any, once: bool = False) -> Any:
        if not self._messages:
            raise LinkDown("no answer")
        return self._messages[0]

    @asynccontextmanager
    async def _replies(self, address: str, ask: Any, stall_s: float) -> AsyncIterator[AsyncIterator[Any]]:
        async def replies() -> AsyncIterator[Message]:
            for message in self._messages:
                yield message

        yield replies()


def _called(call: Call, kind: type[Message], data: bytes) -> None:
    """Make a call that these messages answer, with right checksums and digests."""
    messages = []
    for frame in unframed(data):
        message: Any = kind.FromString(frame)
        if "chunks" in kind.DESCRIPTOR.fields_by_name and message.HasField("chunks"):
            _with_checksums(message.chunks)
        if isinstance(message, parts_pb2.FetchCommitsReply) and message.HasField("header"):
            message.header.commit = _digested(message.header.commit)
        if isinstance(message, peer_pb2.StateOffer) and message.commit:
            message.commit = _digested(message.commit)
        messages.append(message)
    _driven(call(_Answers(messages)))


def _digested(commit: bytes) -> bytes:
    return hashlib.sha256(commit[32:]).digest() + commit[32:]


def _driven(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits for more")


async def _hello(link: _Answers) -> None:
    welcome = await link.hello("", 1.0)
    try:
        contract_from_json(welcome.contract)
    except DilocoError as error:
        raise LinkRefused(m.Reply.MALFORMED) from error


async def _fetched_state(link: _Answers) -> None:
    async for _ in link.fetch_state("", "", list(range(len(PAYLOADS))), LIMITS.part_bytes, 1.0):
        pass


def _welcomes() -> list[bytes]:
    welcome = replace(example(Welcome), contract=load_contract("quick").value.to_json().encode())
    return [convert.welcome_to_wire(welcome).SerializeToString()]


def _offers() -> list[bytes]:
    return [convert.state_offer_to_wire(replace(example(StateOffer), commit=example_commit())).SerializeToString()]


def _one_stream(messages: Callable[[], list[bytes]]) -> list[bytes]:
    return [framed(messages())]


def _lanes() -> list[bytes]:
    return [peer_pb2.LanesReply(addresses=["a:1"]).SerializeToString()]


def _means() -> list[bytes]:
    return [parts_pb2.FetchMeanReply(parts=len(PAYLOADS)).SerializeToString(), *_cut(parts_pb2.FetchMeanReply)]


def _commits() -> list[bytes]:
    closed = Closed(example_commit(), PAYLOADS)
    header = parts_pb2.CommitHeader(commit=convert.commit_to_wire(closed.commit), parts=len(PAYLOADS))
    return [parts_pb2.FetchCommitsReply(header=header).SerializeToString(), *_cut(parts_pb2.FetchCommitsReply)]


def _states() -> list[bytes]:
    return _cut(parts_pb2.FetchStateReply)


def _cut(kind: Any) -> list[bytes]:
    parts = [Part(index, payload) for index, payload in enumerate(PAYLOADS)]
    return [message.SerializeToString() for message in chunks.cut(parts, kind, chunks.MessageSize(4096))]


# ---------------------------------------------------------------- an island's ranks, the directory


def _plain(packed: bool) -> list[bytes]:
    values: list[object] = [("a", 1, [b"bytes", range(3)], {1: {"b": None}}, {2.5})]
    values += [example(kind) for kind in plain.CLASSES.values() if not issubclass(kind, Enum) or len(kind)]
    found = [plain.packed(value) for value in values]
    return found if packed else [data[8 : 8 + struct.unpack_from(">Q", data)[0]] for data in found]


def _unpack_json(data: bytes) -> object:
    """Unpack values of this JSON, and bytes beside it as it counts them."""
    try:
        size = min(int(sum(json.loads(data)[1])), MAX_BYTES)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        size = 0
    return plain.unpacked(struct.pack(">Q", len(data)) + data + bytes(max(size, 0)))


def _records() -> list[bytes]:
    return [json.dumps({**asdict(Member("a", 1, "10.0.0.1:7700")), "version": 3}).encode()]


def _record(data: bytes) -> None:
    if _parse_record("a", data) is None:
        raise ValueError("no member")


ADDRESS = "/ip4/10.0.0.1/tcp/7700/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class _Nowhere:
    """A directory node that reaches nobody."""

    @property
    def p2p(self) -> _Nowhere:
        return self

    @property
    def _client(self) -> _Nowhere:
        return self

    async def connect(self, peer: object, addresses: object) -> None:
        raise OSError("nobody is there")


def _directory_address(data: bytes) -> None:
    """Join the directory at an address that a welcome names."""
    address = data.decode()
    if not _ADDRESS.fullmatch(address):
        raise ValueError("not an address")
    said = _driven(_DirectoryRecords(_Nowhere(), "run")._meet(address))
    if said != "nobody is there":
        raise ValueError(said)
