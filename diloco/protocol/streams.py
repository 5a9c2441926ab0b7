"""What travels beside control messages: streams of parts, offers of a state, a stranger's welcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from diloco.base.types import Commit, Member
from diloco.protocol.messages import Acquaintance, Fork

CHUNK_BYTES = 1 << 20
"""Most payload bytes in one message; gRPC's default limit of 4 MiB per message stays in force."""


class Kind(IntEnum):
    """What the parts of a stream are."""

    CONTRIBUTION = 1
    MEAN = 2
    WEIGHTS = 3
    """Of whoever leads a swap (policy `gossip`)."""
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
    """Of a swap: whom the sender knows, itself first."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part's encoded bytes, complete and with its checksum verified."""

    index: int
    payload: bytes
    omitted: tuple[int, ...] = ()
    """Of a mean's part: contributors that it does not count, by their place in `Begin.contributors`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a stranger gets to know: enough to join."""

    contract: bytes
    """Canonical JSON of the contract."""
    lineage: str
    version: int
    """Version of the state that can be downloaded."""
    founded: bool
    members: tuple[Member, ...]
    """Who answers, first, and the other members."""
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
    chunk_hashes: tuple[str, ...]
    """`StateChunk.digest` of each chunk in the order of `OuterState.manifest`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of encoded means that are fetched: as much as honest peers give at the most. What goes beyond is MALFORMED."""

    parts: int
    """Of one mean."""
    part_bytes: int
    """Of one part."""
    total_bytes: int
    """Of all that one answer has."""
