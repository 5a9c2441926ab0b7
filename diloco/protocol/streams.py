"""Data that travels beside control messages: streams of parts, offers of a state, a stranger's welcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from diloco.base.types import Commit, HexDigest, MaxLength, Member, MinLength, StateVersion
from diloco.protocol.gossip_messages import Acquaintance
from diloco.protocol.messages import Fork

CHUNK_BYTES = 1 << 20
"""Most payload bytes in one message; gRPC's default limit of 4 MiB per message stays in force."""
MAX_CONTRACT_BYTES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 16
"""Chunks of one state; 65,536 hashes fill half of gRPC's 4 MiB."""


class Kind(IntEnum):
    """Content of a stream's parts."""

    CONTRIBUTION = 1
    MEAN = 2
    WEIGHTS = 3
    """Weights sent by the peer that leads a swap (policy `gossip`)."""
    ANSWER = 4
    """And of the other."""


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """Opens a stream of parts, and says to which attempt they belong."""

    run: str
    contract: str
    lineage: str
    sender: Member
    kind: Kind
    version: int
    """The version being made; of a swap, its number."""
    attempt: int
    generation: int
    """Repairs that the receiver must know of before it takes these parts."""
    known: tuple[Acquaintance, ...] = ()
    """In a swap: the peers that the sender knows, itself first."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part's encoded bytes, complete and with its checksum verified."""

    index: int
    payload: bytes
    omitted: tuple[int, ...] = ()
    """In a part of a mean: contributors that it does not count, by their place in `Begin.contributors`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Reply to a stranger: all that it needs to join."""

    contract: Annotated[bytes, MaxLength(MAX_CONTRACT_BYTES)]
    """Canonical JSON of the contract."""
    lineage: str
    version: StateVersion
    """Version of the state that can be downloaded."""
    founded: bool
    members: Annotated[tuple[Member, ...], MinLength(1)]
    """Members of the run; the one that answers comes first."""
    directory: tuple[str, ...]
    """Multiaddresses of the peer directory (DHT)."""
    layout: str
    """Digest of the canonical layout: a joiner's model must have the same."""
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    forks: tuple[Fork, ...] = ()
    """The lineages that led to this one, oldest first."""


@dataclass(frozen=True, slots=True)
class StateOffer:
    """A snapshot of anchor and outer state, cut in chunks."""

    version: int
    commit: Commit | None
    digest: str
    steps: tuple[int, ...]
    """Outer steps taken by each fragment."""
    chunk_hashes: Annotated[tuple[Annotated[str, HexDigest(32)], ...], MaxLength(MAX_CHUNKS)]
    """`StateChunk.digest` of each chunk in the order of `OuterState.manifest`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on encoded means that are fetched: the most that honest peers send. What goes beyond is MALFORMED."""

    parts: int
    """Parts of one mean."""
    part_bytes: int
    """Bytes of one part."""
    total_bytes: int
    """Bytes of one whole answer."""
