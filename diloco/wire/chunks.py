"""Parts as chunks of messages, and chunks as parts again: sizes, order and checksums.

A message carries one chunk of a large part or many small parts whole, for thousands of 16 KB parts must not cost a
message each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from diloco.protocol.streams import CHUNK_BYTES, Part
from diloco.wire.v1 import parts_pb2 as pb

MESSAGE_BYTES = CHUNK_BYTES // 16
"""Payload of a message, to begin with and on a slow link: progress is seen message by message, and at 1 Mb/s one of
64 KiB takes 0.5 s."""

MAX_MESSAGE_BYTES = CHUNK_BYTES + CHUNK_BYTES // 8
"""On a fast link: four parts of 2^18 values in int8 and their scales. Costs a quarter less CPU than half of it."""

MESSAGE_S = 0.05
"""One message holds at most the bytes that the receiver takes in this time."""

MESSAGE_CHUNKS = 1024
"""Chunks per message, so that even tiny ones are handled in about a millisecond."""

MIN_CHUNK_BYTES = 4096
"""A chunk that does not complete its part is at least this long, so that no part comes in a million crumbs."""

MAX_PARTS = 1 << 20
"""Parts of one stream; 2^20 parts of 1024 elements are a fragment of 10^9 elements."""

MAX_OMITTED = 4096
"""Contributors that one part of a mean does not count."""


class Damaged(ValueError):
    """Bytes of a protobuf message are not those that were sent: the network's fault and not the sender's."""


_Pieces = tuple[int, list[bytes], tuple[int, ...]]
"""A part in pieces: its number, its bytes, and whom it omits."""

M = TypeVar("M", pb.SendPartsRequest, pb.FetchCommitsReply, pb.FetchMeanReply, pb.FetchStateReply)
"""A message with room for chunks."""


def checksum(payload: bytes, part: int, part_bytes: int, offset: int, omitted: Sequence[int] = ()) -> int:
    """XXH3-64 checksum of a chunk and its fields. Where it fits, fields that make no sense are the sender's fault."""
    about = struct.pack(f"<QQQ{len(omitted)}Q", part, part_bytes, offset, *omitted)
    return xxh3_64_intdigest(payload, seed=xxh3_64_intdigest(about))


@dataclass
class MessageSize:
    """Size of the next protobuf message, from the rate at which earlier ones were taken."""

    message_bytes: int = MESSAGE_BYTES

    def measured(self, taken_bytes: int, seconds: float, fed: bool = True) -> None:
        """Fit the next message of chunks: so many bytes were taken in that time; more, had it been `fed` all along."""
        fitting = min(max(int(taken_bytes / max(seconds, 1e-6) * MESSAGE_S), MESSAGE_BYTES), MAX_MESSAGE_BYTES)
        self.message_bytes = fitting if fed else max(fitting, self.message_bytes)


def cut(parts: Iterable[Part], message: type[M], size: MessageSize) -> Iterator[M]:
    """Cut `parts` into chunks: protobuf messages in order, each of the `size` that holds when it begins."""
    current, used = message(), 0
    for part in parts:
        offset = 0
        while offset < len(part.payload) or offset == 0:  # an empty payload is one chunk, too
            payload = part.payload[offset : offset + min(size.message_bytes, CHUNK_BYTES)]
            count = len(current.chunks.chunks)
            if count == MESSAGE_CHUNKS or (count and used + len(payload) > size.message_bytes):
                yield current
                current, used = message(), 0
            # Added in place: a chunk made first and then put in a list is copied twice more (1.2 CPU-s per GB).
            current.chunks.chunks.add(
                part=part.index,
                part_bytes=len(part.payload),
                offset=offset,
                payload=payload,
                checksum=checksum(payload, part.index, len(part.payload), offset, part.omitted),
                omitted=part.omitted,
            )
            used += len(payload)
            offset += max(len(payload), 1)
    if current.chunks.chunks:
        yield current


class PartAssembler:
    """Makes parts of the chunks of one stream again, checksums compared. Holds one unfinished part at most."""

    def __init__(self, max_part_bytes: int) -> None:
        self.taken_bytes = 0
        """Payload of all chunks so far."""
        self._max_part_bytes = max_part_bytes
        self._pieces: list[bytes] = []
        self._have = 0
        self._index = 0
        self._part_bytes = 0
        self._joined = 0
        self._omitted: tuple[int, ...] = ()

    def join(self, message: pb.Chunks) -> list[Part]:
        """Parts that these chunks of a message complete. Raises ValueError on damaged bytes and a wrong order."""
        return [Part(index, b"".join(pieces), omitted) for index, pieces, omitted in self._completed(message)]

    def pieces(self, message: pb.Chunks) -> list[tuple[int, list[bytes]]]:
        """Number and bytes, in pieces, of each part that these chunks complete, for who copies them elsewhere anyway.
        Raises as `join`."""
        return [(index, pieces) for index, pieces, _ in self._completed(message)]

    def _completed(self, message: pb.Chunks) -> list[_Pieces]:
        if len(message.chunks) > MESSAGE_CHUNKS:
            raise ValueError(f"more than {MESSAGE_CHUNKS} chunks in one message")
        return [part for chunk in message.chunks if (part := self._take(chunk)) is not None]

    def finish(self) -> None:
        """Called at the end of a stream of chunks. Raises Damaged when it ended within a part: a connection that breaks
        can look like that, and no honest sender is to be blamed for it."""
        if self._pieces:
            raise Damaged(f"part {self._index} ends after {self._have} of {self._part_bytes} bytes")

    def _take(self, chunk: pb.Chunk) -> _Pieces | None:
        """Part that this chunk completes, if its checksum is right; None where more is missing. Raises as `join`."""
        payload = chunk.payload
        if checksum(payload, chunk.part, chunk.part_bytes, chunk.offset, chunk.omitted) != chunk.checksum:
            raise Damaged(f"part {chunk.part}: wrong checksum at byte {chunk.offset}")
        if not self._pieces:
            # Sizes are checked before anything is kept of the part.
            if chunk.part_bytes > self._max_part_bytes:
                most = self._max_part_bytes
                raise ValueError(f"part {chunk.part} has {chunk.part_bytes} bytes, at most {most} may be")
            if chunk.part >= MAX_PARTS or self._joined >= MAX_PARTS:
                raise ValueError(f"more than {MAX_PARTS} parts")
            if len(chunk.omitted) > MAX_OMITTED:
                raise ValueError(f"part {chunk.part} omits {len(chunk.omitted)} contributors")
            self._index, self._part_bytes, self._have = chunk.part, chunk.part_bytes, 0
            self._omitted = tuple(chunk.omitted)
        elif (chunk.part, chunk.part_bytes) != (self._index, self._part_bytes):
            raise ValueError(f"part {chunk.part} begins within part {self._index}")
        if chunk.offset != self._have:
            raise ValueError(f"part {chunk.part} goes on at byte {chunk.offset} instead of {self._have}")
        missing = self._part_bytes - self._have
        if not min(missing, MIN_CHUNK_BYTES) <= len(payload) <= min(missing, CHUNK_BYTES):
            raise ValueError(f"part {chunk.part}: {len(payload)} bytes at {chunk.offset} of {self._part_bytes}")
        self._pieces.append(payload)
        self._have += len(payload)
        self.taken_bytes += len(payload)
        if self._have < self._part_bytes:
            return None
        pieces, self._pieces = self._pieces, []
        self._joined += 1
        return self._index, pieces, self._omitted
