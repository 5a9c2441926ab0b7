"""Plain values of the protocol: messages, events and effects.

*Messages* travel between peers inside an `Envelope`; those of the policy `gossip` are in `greetings`. *Events*
are all that can happen to the state machine of `diloco.protocol.machine`; *effects* are all that it can ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from diloco.base.types import Commit, Counted, MaxLength, Member, MinValue, Progress, StateVersion
from diloco.protocol.greetings import Greeting, Invite

MAX_REASON: Final = 4096
Reason = Annotated[str, MaxLength(MAX_REASON, cut=True)]
"""A sentence for people; `MAX_REASON` characters of it travel."""
Attempt = Annotated[int, MinValue(-1)]
"""Number of an attempt; -1: none."""


@dataclass(frozen=True, slots=True)
class OfAttempt:
    """Base of the protocol's messages, events and effects of one attempt to make a version."""

    version: int
    """The version being made: one above the sender's."""
    attempt: int

    @property
    def key(self) -> tuple[int, int]:
        """(version, attempt): names the protocol's attempt in the whole lineage."""
        return self.version, self.attempt


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Fork:
    """A lineage of the run that was left, and its committed tokens at that moment."""

    lineage: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A peer's regular sign of life, with its position in the run."""

    version: StateVersion
    """Version of the state that the sender holds; -1: none yet."""
    founded: bool
    """The sender knows the commit of that version, and not only its state."""
    joining: bool
    """The sender is not in the view and asks to join."""
    progress: Progress
    committed_tokens: int = 0
    """Tokens of the sender's chain of commits: where two lineages meet, the one with more goes on."""
    forks: tuple[Fork, ...] = ()
    """The lineages that led to the sender's, oldest first."""
    deaf: bool = False
    """The sender has heard nobody for its `suspect_s`: nobody shall wait for it."""
    moved_bytes: int = 0
    """Bytes that the sender has received, and others have taken from it, in the rounds of this life."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's announcement that it has a contribution; the bytes themselves move in the reduction."""

    base_version: int
    weight: int
    tokens: int
    blocks: int
    leaving: bool = False
    """The sender's last contribution: the next view shall be without it."""
    send_bps: int = 0
    """Measured upload rate of the sender, in bits per second; 0: unknown."""
    slack_s: float = 0.0
    """Seconds for which the sender still has inner steps to do."""


@dataclass(frozen=True, slots=True)
class Ready(OfAttempt):
    """To an attempt's coordinator: the sender takes part, and promises to accept nothing of an earlier attempt."""

    offer: Offer | None
    """None: the sender only votes."""
    state_digest: str
    accepted_attempt: Attempt = -1
    accepted: Commit | None = None
    """The commit that the sender accepted in the latest earlier attempt: the coordinator must propose it again."""
    votes: tuple[str, ...] = ()
    """Peers that left and gave the sender their vote."""


@dataclass(frozen=True, slots=True)
class Gather(OfAttempt):
    """From the coordinator of a later attempt: asks for `Ready`."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive parts of a fragment, `start` to `stop` (exclusive), and the peer that averages them."""

    owner: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Begin(OfAttempt):
    """From the coordinator: the reduction starts."""

    contributors: tuple[Counted, ...]
    """Peers whose contributions count, in the order in which they are summed."""
    receivers: tuple[Member, ...]
    """Members that get the mean: all live members, and joiners that are about to be admitted."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Stalled(OfAttempt):
    """To the coordinator: no bytes from these peers for too long, or bytes that are no good."""

    missing: tuple[str, ...]
    reason: Reason
    offence: bool = False
    """The bytes came, and no honest peer sends such bytes."""
    still: bool = False
    """Nothing moves at the sender: peers that move elsewhere may come to it yet."""


@dataclass(frozen=True, slots=True)
class Repair(OfAttempt):
    """From the coordinator: the reduction goes on without `gone`, whose parts have new owners. Only the latest matters.

    A part averaged after their bytes came still counts them; its mean comes with those that it does not count."""

    generation: int
    """Counts repairs of an attempt, from 1."""
    gone: tuple[str, ...]
    spans: tuple[Span, ...]
    """All parts with their owners from now on."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Abort(OfAttempt):
    """From the coordinator: this attempt failed. The next one leaves out the contributions of `without`."""

    without: tuple[str, ...]
    reason: Reason
    offence: bool = False
    """The peers of `without` sent what no honest peer sends."""


@dataclass(frozen=True, slots=True)
class Propose(OfAttempt):
    """From the coordinator: asks for votes for this commit."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Accept(OfAttempt):
    """To the coordinator: a vote. The sender holds the commit's whole mean and will report it to later coordinators."""

    commit_digest: str
    votes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that a majority of the previous view accepted: it makes the version."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Goodbye(OfAttempt):
    """The sender leaves the run now and will never vote again."""

    heir: str
    """Member that votes for the sender from now on; empty: nobody."""
    votes: tuple[str, ...] = ()
    """Votes that leavers gave to the sender; they go to the same heir."""
    accepted_attempt: Attempt = -1
    accepted: Commit | None = None
    """The value that the sender accepted, which binds the heir."""


@dataclass(frozen=True, slots=True)
class Evict:
    """From an operator: this life of a peer is over and its vote counts no longer. Unsafe if it goes on elsewhere."""

    peer: str
    incarnation: int
    """The life that was in the view when the operator evicted it. The next may be there when the message arrives."""


Body = (
    Heartbeat | Ready | Gather | Begin | Stalled | Repair | Abort | Propose | Accept | Committed | Goodbye | Evict
    | Greeting | Invite
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Envelope:
    """One control message, with all that the receiver needs to refuse it."""

    run: str
    contract: str
    """Digest of the sender's contract."""
    lineage: str
    sender: Member
    view: str
    """Digest of the sender's latest commit, which has its view. Empty before its first."""
    sequence: int
    """Counts the messages of one life of the sender, from 1: none is taken twice."""
    body: Body


class Reply(IntEnum):
    """Answer of a peer to a message; the comments speak as the refusing peer."""

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
    UNREACHED = 13  # I hear you, and nothing that I send reaches you at the address that you gave: you cannot join


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Tick:
    """The driver's clock has advanced: deadlines and resends are due."""

    moved_bytes: int = 0
    """Bytes that this peer has received, and others have taken from it, in rounds so far."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The link failed to deliver to this peer: refused or reset, or no answer came to anything within the deadline."""

    member: Member
    proven: bool = False
    """That life of the peer is over for certain: it is not merely cut off."""


@dataclass(frozen=True, slots=True)
class Reached:
    """This peer answered a message of ours: it can be reached, whatever it says."""

    member: Member


@dataclass(frozen=True, slots=True)
class StateHeld:
    """The training side holds this outer state: copied from members, or made by applying a commit."""

    version: int
    digest: str
    commit: Commit | None = None
    """After a copy: the commit of that version, if the run was founded."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The training side finished its inner steps and offers a contribution."""

    offer: Offer


TOO_FAR = "too far behind to catch up by commits: the state must be copied"


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The training side waits no longer for the version that may count its offer."""

    reason: str = ""
    """Empty: the round's deadline is over."""


@dataclass(frozen=True, slots=True)
class ContributionArrived(OfAttempt):
    """A contributor's bytes of a part that this peer owns are here, and checked."""

    sender: str
    part: int


@dataclass(frozen=True, slots=True)
class ContributionRefused(OfAttempt):
    """Bytes of a contribution or a mean are no good: they decode to nothing, are absurd, or were damaged."""

    sender: str
    reason: str
    offence: bool = True
    """No honest peer sends this; else it is the network's fault."""


@dataclass(frozen=True, slots=True)
class PartFolded(OfAttempt):
    """A part that this peer owns is averaged."""

    part: int


@dataclass(frozen=True, slots=True)
class MeanArrived(OfAttempt):
    """One part of the mean is here, from its owner."""

    sender: str
    part: int
    omitted: tuple[str, ...] = ()
    """Contributors that the part does not count."""


@dataclass(frozen=True, slots=True)
class MeanHeld:
    """All parts of a mean are here and hashed: reduced in an attempt here, or fetched."""

    mean_digest: str
    version: int = -1
    """With `attempt`: where the mean was reduced; -1: it was fetched."""
    attempt: int = -1


@dataclass(frozen=True, slots=True)
class Learned:
    """A commit that closed without this peer is here, fetched with its mean."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """This peer is to leave the run now: it gives its vote away and says goodbye."""


Event = (
    Tick | Unreachable | Reached | StateHeld | Offered | Withdrawn | ContributionArrived | ContributionRefused
    | PartFolded | MeanArrived | MeanHeld | Learned | LeaveWanted
)  # fmt: skip

# ---------------------------------------------------------------- effects


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
class FetchMean:
    """Get the mean of a proposed commit from somebody who accepted it, report MeanHeld."""

    commit: Commit
    sources: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Versions closed without this peer: fetch their commits, report Learned for each in turn."""

    source: Member
    version: int
    """The source's version."""


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
    Send | BeginReduction | RepairReduction | SendContribution | FoldPart | SendMean | SealMean | FetchMean | CatchUp
    | Close | GiveUp | Resync | Note
)  # fmt: skip
