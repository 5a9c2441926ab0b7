"""Plain values of the protocol: messages, events and effects.

*Messages* travel between peers inside an `Envelope`; those of the policy `gossip` are in `greetings`. *Events*
are all that can happen to the state machine of `diloco.protocol.machine`; *effects* are all that it can ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from diloco.base.types import Commit, Counted, LineageName, MaxLength, Member, MinValue, Progress, StateVersion
from diloco.protocol.greetings import Greeting, Invite

MAX_REASON: Final = 4096
Reason = Annotated[str, MaxLength(MAX_REASON, cut=True)]
"""A sentence for people; `MAX_REASON` characters of it travel."""
Attempt = Annotated[int, MinValue(-1)]
"""Number of an attempt; -1: none."""
MAX_ATTEMPTS_AHEAD: Final = 1 << 20
"""Attempts by which a message may be ahead of its receiver. They come one by one, a few a minute, and each peer repeats
the latest: one lie with the last number there is would leave no attempt for anybody."""


@dataclass(frozen=True, slots=True)
class OfAttempt:
    """Base of the protocol's messages, events and effects of one attempt to decide the successor of a head, and of the
    reduction that began in it."""

    height: int
    """Height of the head: of the commit on which the sender stood when the attempt began."""
    attempt: int

    @property
    def key(self) -> tuple[int, int]:
        """(height, attempt): names the protocol's attempt in the whole lineage, and the reduction that began in it."""
        return self.height, self.attempt


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Fork:
    """A lineage of the run that was left, and its committed tokens at that moment."""

    lineage: LineageName
    tokens: int


MAX_FORKS: Final = 16
"""Lineages that a peer remembers and names to others in each heartbeat: the latest."""
Forks = Annotated[tuple[Fork, ...], MaxLength(MAX_FORKS)]
"""Lineages that led to a peer's own, oldest first."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A peer's regular sign of life, with its position in the run."""

    version: StateVersion
    """Version of the state that the sender holds; -1: none yet."""
    height: Annotated[int, MinValue(-1)]
    """Height of the commit on which the sender stands, whose digest is in the envelope; -1: on none yet."""
    joining: bool
    """The sender is not in the view and asks to join."""
    progress: Progress
    committed_tokens: int = 0
    """Tokens of the sender's chain of commits: where two lineages meet, the one with more goes on."""
    forks: Forks = ()
    """The lineages that led to the sender's, oldest first."""
    deaf: bool = False
    """The sender has heard nobody for its `suspect_s`: nobody shall wait for it."""
    moved_bytes: int = 0
    """Bytes that the sender has received, and others have taken from it, in the rounds of this life."""
    leaving: bool = False
    """The sender wants to be left out of the view; until then it votes and serves."""
    reaches: tuple[str, ...] = ()
    """Learners of the view that answered the sender lately: who is to vote must be reached by most voters."""
    stands: Annotated[int, MinValue(-1)] = -1
    """Height of the latest commit that is on the sender's disk: it will know of that one also after a restart."""
    abstains: bool = False
    """The sender's disk takes no votes, or not the mean for which it would vote: another is to coordinate."""

    @property
    def founded(self) -> bool:
        """Whether the sender knows the commit of its version, and not only its state."""
        return self.height >= 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's announcement that it has a contribution; the bytes themselves move in the reduction."""

    boot: int
    """The sender's, see `Counted`."""
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
    state_digest: str
    """Digest of the state on which the contributors measured."""
    leaving: tuple[str, ...] = ()
    """Contributors whose last it is."""


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
    reduction_height: Annotated[int, MinValue(-1)] = -1
    """With `reduction_attempt`: the reduction that made the mean, where the sender took part in it; -1: not known."""
    reduction_attempt: Attempt = -1


@dataclass(frozen=True, slots=True)
class Accept(OfAttempt):
    """To the coordinator: a vote. The sender holds the commit's whole mean, if it has one, and will report it to later
    coordinators."""

    commit_digest: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit that enough voters of the one before accepted."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender goes now, and says nothing more."""


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
    lineage: LineageName
    sender: Member
    boot: int
    """The sender's process (`Counted`): of those of one life only the latest is heard."""
    before: int
    """Times that the disk of its life had been written to when this process began: less than others know of is an old
    copy of it."""
    saved: int
    """Times that it has been written to by now."""
    head: str
    """Digest of the commit on which the sender stands, which has its view. Empty before its first."""
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
    OTHER_HEAD = 8  # I know another commit of the height you stand at: one of us must copy the state
    REPLAYED = 9  # I have had this very message, or one so much later that I cannot tell
    BARRED = 10  # you sent what no honest peer sends, too often
    DAMAGED = 11  # your bytes were damaged on the way: say it again
    BUSY = 12  # I swap weights with somebody else now
    OLD_COPY = 14  # your disk lacks what your life has said: it is an old copy, or a later process has one
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
    boot: int | None = None
    """The process of that life that is over for certain; None: it may be merely cut off."""


@dataclass(frozen=True, slots=True)
class Reached:
    """This peer answered a message of ours: it can be reached, whatever it says."""

    member: Member


@dataclass(frozen=True, slots=True)
class Outdated:
    """A member says that our disk is an old copy (`Reply.OLD_COPY`): this process goes on as another life."""


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
    height: int = -1
    """With `attempt`: the reduction that it is of; -1: it was fetched."""
    attempt: int = -1
    logged: bool = True
    """The log has it, too, or there is none; False: the disk refused it."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A commit that closed without this peer is here, fetched with its mean from `source`."""

    commit: Commit
    source: Member


@dataclass(frozen=True, slots=True)
class Saved:
    """All that was to be saved, up to this `Save`, is on the disk; or the disk `refused` it."""

    number: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """This peer is to leave the run: as soon as most voters that stay can do without it, or `now`."""

    now: bool = False


Event = (
    Tick | Unreachable | Reached | Outdated | StateHeld | Offered | Withdrawn | ContributionArrived
    | ContributionRefused
    | PartFolded | MeanArrived | MeanHeld | Learned | Saved | LeaveWanted
)  # fmt: skip
