"""Effects: all that the state machine of `diloco.protocol.machine` can ask for, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.base.types import Commit, Member
from diloco.protocol.messages import Begin, Envelope, OfAttempt, Repair, Span
from diloco.protocol.vote import VoteRecord


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver a message; report Unreachable if that is refused."""

    to: Member
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Save:
    """Write to the disk what binds this voter; report `Saved` when it is there. Before, nothing that follows from it is
    said, nor is its own vote counted."""

    number: int
    """Counts these effects, from 1, over all processes that go on with one disk."""
    life: int
    """Incarnation of the life that is bound."""
    record: VoteRecord
    accepted: Commit | None
    """The commit that the record names as accepted."""
    head: Commit | None = None
    """The commit on which this peer stands from now on; None: it stands as before."""


@dataclass(frozen=True, slots=True)
class BeginReduction:
    """Make room for an attempt: its spans and contributors are known now."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class RepairReduction:
    """Owners of parts changed: drop the parts that moved, make room for those that this peer owns now."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class SendContribution(OfAttempt):
    """Stream this peer's encoded parts of a span to the owner."""

    generation: int
    """Repairs that the owner must know of before it takes these parts."""
    span: Span
    to: Member


@dataclass(frozen=True, slots=True)
class FoldPart(OfAttempt):
    """Average one part that this peer owns: all contributions that it waited for are here."""

    part: int
    omitted: tuple[str, ...]
    """Contributors that the part does not count."""


@dataclass(frozen=True, slots=True)
class SendMean(OfAttempt):
    """Stream one averaged part to all receivers of the mean."""

    part: int
    omitted: tuple[str, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class SealMean(OfAttempt):
    """All parts of the mean are here: compute its digest, keep it, report MeanHeld."""


@dataclass(frozen=True, slots=True)
class LogMean:
    """The log has refused a mean of the version being made, which is here: log it once more, report MeanHeld."""

    mean_digest: str


@dataclass(frozen=True, slots=True)
class FetchMean:
    """Get the mean of a proposed commit from somebody who accepted it, report MeanHeld."""

    commit: Commit
    sources: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Versions closed without this peer: fetch their commits, report Learned for each in turn."""

    source: Member


@dataclass(frozen=True, slots=True)
class Close:
    """A version closed and its mean is here: hand it to the training side."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The round is skipped: the offer will not be counted now, and training goes on."""

    reason: str
    exposed: bool
    """Others have bytes of the offer and may still count it: only the same offer may follow."""


@dataclass(frozen=True, slots=True)
class Resync:
    """Another lineage of the run has more tokens and goes on: copy its state. This lineage ends."""

    source: Member
    discarded_tokens: int
    """Tokens committed on this lineage since the two parted; they are void."""


@dataclass(frozen=True, slots=True)
class Note:
    """The reason of the latest decision, for logs and `diloco status`. It comes when it changed."""

    reason: str
    routine: bool
    """The reason appears in every round in which all goes well."""


Effect = (
    Send | Save | BeginReduction | RepairReduction | SendContribution | FoldPart | SendMean | SealMean | LogMean
    | FetchMean | CatchUp | Close | GiveUp | Resync | Note
)  # fmt: skip
