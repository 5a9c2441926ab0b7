"""Data that travels beside control messages: streams of parts, offers of an outer state, the welcome of a joiner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from diloco.base.types import Commit, HexDigest, LineageName, MaxLength, Member, MinLength, MinValue, StateVersion
from diloco.protocol.greetings import Acquaintance
from diloco.protocol.messages import Forks

CHUNK_BYTES = 1 << 20
"""Most payload bytes in one message; gRPC's default limit of 4 MiB per message stays in force."""
MAX_CONTRACT_BYTES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 16
"""Most chunks of one outer state; 65,536 hashes fill half of gRPC's 4 MiB."""


class Kind(IntEnum):
    """Content of the parts of a stream."""

    CONTRIBUTION = 1
    MEAN = 2
    WEIGHTS = 3
    """Weights sent by the peer that leads a swap (policy `gossip`)."""
    ANSWER = 4
    """Weights sent back by the peer that follows in a swap."""


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """First message of a stream of parts: the sender, and the attempt or swap that the parts belong to."""

    run: str
    contract: str
    lineage: LineageName
    sender: Member
    kind: Kind
    height: int
    """With `attempt`: the reduction that the parts are of; in a swap, its number."""
    attempt: int
    generation: int
    """Repairs that the receiver must know of before it takes these parts."""
    known: tuple[Acquaintance, ...] = ()
    """In a swap: the peers that the sender knows, itself first."""

    @property
    def key(self) -> tuple[int, int]:
        """(height, attempt): the reduction that the parts are of."""
        return self.height, self.attempt


@dataclass(frozen=True, slots=True)
class Part:
    """Encoded bytes of one part of a fragment, complete and with their checksum verified."""

    index: int
    payload: bytes
    omitted: tuple[int, ...] = ()
    """In a part of a mean: contributors that it does not count, by their place in `Begin.contributors`."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, by what no other process on any machine has: evidence for its death, to those on the same machine."""

    boot: str
    """Random identity of the boot of its machine."""
    pid_namespace: str
    network_namespace: str
    pid: Annotated[int, MinValue(1)]
    started: int
    """When it started, clock ticks after boot: a pid is used again."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """A member's reply to a joiner: all that it needs to join the run."""

    contract: Annotated[bytes, MaxLength(MAX_CONTRACT_BYTES)]
    """Canonical JSON of the contract."""
    lineage: LineageName
    version: StateVersion
    """Version of the outer state that can be copied."""
    founded: bool
    members: Annotated[tuple[Member, ...], MinLength(1)]
    """Members of the run, or those that are known to have its state; the one that replies comes first."""
    directory: tuple[str, ...]
    """Multiaddresses of the peer directory (DHT)."""
    layout: str
    """Digest of the canonical layout: a joiner's model must have the same."""
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    forks: Forks = ()
    """The lineages that led to this one, oldest first."""
    process: ProcessId | None = None
    """The process at the far end of this connection, which set it. None: its death has no proof."""
    boot: int = 0
    """Start of the process that replies (`Counted`)."""


@dataclass(frozen=True, slots=True)
class StateOffer:
    """Description of a snapshot of anchor and outer state, cut in chunks, that a member serves to joiners."""

    version: int
    commit: Commit | None
    digest: str
    steps: tuple[int, ...]
    """Outer steps taken by each fragment."""
    chunk_hashes: Annotated[tuple[Annotated[str, HexDigest(32)], ...], MaxLength(MAX_CHUNKS)]
    """`StateChunk.digest` of each chunk in the order of `OuterState.manifest`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on encoded means that are fetched: the most that honest peers send. More is MALFORMED."""

    parts: int
    """Parts of one mean."""
    part_bytes: int
    """Bytes of one part."""
    total_bytes: int
    """Bytes of one whole answer."""
