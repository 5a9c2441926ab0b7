"""Vocabulary of the protocol: messages between peers, events that happen to a peer, effects it asks for. Plain values,
no I/O.

*Messages* travel between peers inside an `Envelope`. *Events* are all that can happen to the state machine of
`diloco.protocol.machine`; *effects* are all that it can ask for. `version` in a message is always the version that
is being made, one above the sender's; `(version, attempt)` names one try to make it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from diloco.base.types import Commit, Counted, MaxLength, Member, MinValue, Progress, StateVersion
from diloco.protocol.gossip_messages import Greeting, Invite

MAX_REASON: Final = 4096
Reason = Annotated[str, MaxLength(MAX_REASON, cut=True)]
"""A sentence for people."""
Attempt = Annotated[int, MinValue(-1)]
"""-1: none."""

# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Fork:
    """A lineage that was left, and the committed tokens at which that was."""

    lineage: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live, and this is how far I am."""

    version: StateVersion
    """Version of the state I hold; -1: none yet."""
    founded: bool
    """Whether I know the commit of that version, and not only its state."""
    joining: bool
    """I am not in the view and ask to be taken in."""
    progress: Progress
    committed_tokens: int = 0
    """Tokens of the chain I stand on: where two lineages meet, the one with more goes on."""
    forks: tuple[Fork, ...] = ()
    """The lineages that led to mine, oldest first."""
    deaf: bool = False
    """I hear nobody, for as long as I suspect others by: nobody is to wait for me."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's announcement that it has a contribution; the bytes themselves move in the reduction."""

    base_version: int
    weight: int
    tokens: int
    blocks: int
    leaving: bool = False
    """It is my last one: leave me out of the next view."""
    send_bps: int = 0
    """Measured upload rate of the sender, in bits per second; 0: unknown."""
    slack_s: float = 0.0
    """For how long I have inner steps to do meanwhile."""


@dataclass(frozen=True, slots=True)
class Ready:
    """To the coordinator of an attempt: I take part, and promise to accept nothing of an earlier attempt."""

    version: int
    attempt: int
    offer: Offer | None
    """None: I only vote."""
    state_digest: str
    accepted_attempt: Attempt = -1
    accepted: Commit | None = None
    """The commit I accepted in the latest earlier attempt: whoever coordinates now must propose it again."""
    votes: tuple[str, ...] = ()
    """Peers that left and gave me their vote."""


@dataclass(frozen=True, slots=True)
class Gather:
    """From the coordinator of a later attempt: answer with Ready."""

    version: int
    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Span:
    """Parts `start` to `stop` (exclusive) are averaged by `owner`."""

    owner: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Begin:
    """From the coordinator: reduce now."""

    version: int
    attempt: int
    contributors: tuple[Counted, ...]
    """Peers whose contributions count, in the order in which they are summed."""
    receivers: tuple[Member, ...]
    """Members that get the mean: all live members, and joiners that are about to be admitted."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """To the coordinator: no bytes from these peers for too long, or bytes that are no good."""

    version: int
    attempt: int
    missing: tuple[str, ...]
    reason: Reason
    offence: bool = False
    """The bytes came, and no honest peer sends such bytes."""


@dataclass(frozen=True, slots=True)
class Repair:
    """From the coordinator: go on without `gone`. What they owned has new owners, what they owe is not waited for.

    What had arrived of theirs before a part was averaged stays counted in it, and the part's result says so. Each
    repair tells all since `Begin`, so that only the latest matters.
    """

    version: int
    attempt: int
    generation: int
    """Counts repairs of an attempt, from 1."""
    gone: tuple[str, ...]
    spans: tuple[Span, ...]
    """All parts with their owners from now on."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Abort:
    """From the coordinator: this attempt failed; the next one does without the contributions of `without`."""

    version: int
    attempt: int
    without: tuple[str, ...]
    reason: Reason
    offence: bool = False
    """`without` sent what no honest peer sends."""


@dataclass(frozen=True, slots=True)
class Propose:
    """From the coordinator: make this the version."""

    version: int
    attempt: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Accept:
    """To the coordinator: I hold the whole mean of this commit, and will tell later coordinators of it."""

    version: int
    attempt: int
    commit_digest: str
    votes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """A majority of the previous view accepted: this is the version."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I leave now and will never vote again."""

    version: int
    """The version I would have helped to make."""
    attempt: int
    heir: str
    """Member that votes for the sender from now on; empty: nobody."""
    votes: tuple[str, ...] = ()
    """Votes that were given to me, and go to the same heir."""
    accepted_attempt: Attempt = -1
    accepted: Commit | None = None
    """The value that the sender accepted, which binds the heir."""


@dataclass(frozen=True, slots=True)
class Evict:
    """From an operator: this life of a peer is over, count its vote no longer. Unsafe if it goes on elsewhere."""

    peer: str
    incarnation: int
    """Incarnation of the life that the view had when the operator evicted it: by the time the message arrives there
    may be the next."""


Body = (
    Heartbeat | Ready | Gather | Begin | Stalled | Repair | Abort | Propose | Accept | Committed | Goodbye | Evict
    | Greeting | Invite
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Envelope:
    """One control message with what the receiver needs to refuse it."""

    run: str
    contract: str
    """Digest of the sender's contract."""
    lineage: str
    sender: Member
    view: str
    """Digest of the commit that the sender stands on: its view is in there. Empty before its first."""
    sequence: int
    """Counts the messages of one life of the sender, from 1: none is taken twice."""
    body: Body


class Reply(IntEnum):
    """Answer of a peer to a message; each comment says what the refusing peer means."""

    OK = 0
    OTHER_RUN = 1  # I train another run
    OTHER_CONTRACT = 2  # your contract's digest is not mine
    OTHER_LINEAGE = 3  # the run was founded anew since you joined, or went on in two parts and you are in the other
    STALE = 4  # that version or attempt is over here
    FENCED = 5  # I know a later life of yours, or an earlier one that still lives
    MALFORMED = 6  # I cannot make sense of these bytes
    TOO_EARLY = 7  # I did not reach that attempt within my patience
    OTHER_VIEW = 8  # of the version you stand on I know another commit: one of us must copy the state
    REPLAYED = 9  # I have had this very message, or one so much later that I cannot tell
    BARRED = 10  # you sent what no honest peer sends, too often
    DAMAGED = 11  # your bytes were damaged on the way: say it again
    BUSY = 12  # I swap weights with somebody else now


# ---------------------------------------------------------------- events: what happens to a peer


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The link failed to deliver to this peer: refused or reset, not merely slow."""

    member: Member
    proven: bool = False
    """The end of that life of the peer is certain: it is not merely cut off."""


@dataclass(frozen=True, slots=True)
class StateHeld:
    """The training side holds this state (downloaded, or after applying a commit)."""

    version: int
    digest: str
    commit: Commit | None = None
    """Given after a download: the commit of that version, if the run was founded."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The training side finished its inner steps."""

    offer: Offer


TOO_FAR = "too far behind to catch up by commits: the state must be copied"


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The training side waits no longer."""

    reason: str = ""
    """Empty: its patience is at an end."""


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """One part of a contribution, checked, for a part that I own."""

    version: int
    attempt: int
    sender: str
    part: int


@dataclass(frozen=True, slots=True)
class ContributionRefused:
    """A part, of a contribution or of the mean, that is no good: it decodes to nothing, is absurd, or was damaged."""

    version: int
    attempt: int
    sender: str
    reason: str
    offence: bool = True
    """No honest peer sends this; else it is the network's fault."""


@dataclass(frozen=True, slots=True)
class PartFolded:
    """I averaged a part that I own."""

    version: int
    attempt: int
    part: int


@dataclass(frozen=True, slots=True)
class MeanArrived:
    """One part of the mean, from its owner."""

    version: int
    attempt: int
    sender: str
    part: int
    omitted: tuple[str, ...] = ()
    """Contributors that it does not count."""


@dataclass(frozen=True, slots=True)
class MeanHeld:
    """All parts of a mean are here, and this is their digest."""

    mean_digest: str
    version: int = -1
    """The attempt it was reduced in, if it was reduced here."""
    attempt: int = -1


@dataclass(frozen=True, slots=True)
class Learned:
    """A commit that closed without me, fetched with its mean."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """Leave now: give the vote away, say goodbye."""


Event = (
    Tick | Unreachable | StateHeld | Offered | Withdrawn | ContributionArrived | ContributionRefused
    | PartFolded | MeanArrived | MeanHeld | Learned | LeaveWanted
)  # fmt: skip

# ---------------------------------------------------------------- effects: what a peer does


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver a message; report Unreachable if that is refused."""

    to: Member
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class BeginReduction:
    """Make room for an attempt: its spans and contributors are known now."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class RepairReduction:
    """Owners changed: forget the parts that moved, make room for those that I own now."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Stream my encoded parts of this span to its owner."""

    version: int
    attempt: int
    generation: int
    """Number of repairs that the owner must know of before it takes them."""
    span: Span
    to: Member


@dataclass(frozen=True, slots=True)
class FoldPart:
    """Average one part that I own: all contributions that are waited for are here."""

    version: int
    attempt: int
    part: int
    omitted: tuple[str, ...]
    """Contributors that it does not count."""


@dataclass(frozen=True, slots=True)
class SendMean:
    """Stream one averaged part to everybody."""

    version: int
    attempt: int
    part: int
    omitted: tuple[str, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class SealMean:
    """All parts of the mean are here: compute its digest, keep it, report MeanHeld."""

    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class FetchMean:
    """Get the mean of a proposed commit from somebody who accepted it, report MeanHeld."""

    commit: Commit
    sources: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Versions closed without me: fetch their commits, report Learned for each in turn."""

    source: Member
    version: int
    """The version that the source is at."""


@dataclass(frozen=True, slots=True)
class Close:
    """A version closed and its mean is here: hand it to the training side."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the waiting training side that this round is skipped."""

    reason: str
    exposed: bool
    """Bytes of the offer went out, so that it may still be counted: only the same offer may follow."""


@dataclass(frozen=True, slots=True)
class Resync:
    """Another lineage of the run has more tokens and goes on: copy its state; ours ends here."""

    source: Member
    discarded_tokens: int
    """Committed on our lineage since the two parted, and now void."""


@dataclass(frozen=True, slots=True)
class Note:
    """The reason of the latest decision, when it changed."""

    reason: str
    routine: bool
    """It says so in every round in which all goes well."""


Effect = (
    Send | BeginReduction | RepairReduction | SendContribution | FoldPart | SendMean | SealMean | FetchMean | CatchUp
    | Close | GiveUp | Resync | Note
)  # fmt: skip
