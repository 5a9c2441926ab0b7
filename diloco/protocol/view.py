"""Pure decisions of the protocol, and the settings that they take: votes, owners of parts, the group of a
version, and the lineage that goes on.

Every function takes all that it needs as arguments and, where it decides, returns the reason with the decision. Only
`Electorate` has a state: which votes were lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from types import MappingProxyType

from diloco.base.types import Commit, Member
from diloco.protocol.claims import Bounds
from diloco.protocol.messages import Fork, Span
from diloco.protocol.vote import Voters

# ---------------------------------------------------------------- settings

EARLY_DEADLINES = 4
"""Match deadlines after which fewer than half close a version under `sync`, for the others may live and hang."""
SLOWER = 3.0
"""Times as long as others took, after which a peer that still owes bytes is left out of a version."""
MAX_DOUBLED = 4
"""Doublings of the time that the bytes of a version may take where there is nothing to compare with, at most."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the contract for when the coordinator closes a version."""

    quorum_peers: int | None
    """None: `sync`, all live members. K: `quorum`, K of them and those that come within `grace_s` of the K-th."""
    grace_s: float
    match_deadline_s: float
    """Seconds that half of the live members, when they are ready, wait for the others under `sync`."""
    max_peers: int | None = None
    """Most contributors of one version: more of them take turns. None: no limit."""
    uses_slack: bool = False
    """The grace of a quorum lasts for as long as none of it would have to wait: `async`."""
    sync_versions: int = 0
    """The first so many versions close as under `sync`."""

    def bytes_grace(self, sync_s: float, attempt: int) -> tuple[float, float]:
        """Seconds that a contributor's bytes may come later than others'; and that they may take where there are none
        to compare with: some times as long as versions take of late (`sync_s`; 0: unknown), within bounds. Each attempt
        waits twice as long as the one before."""
        grace_s = self.match_deadline_s if self.quorum_peers is None else self.grace_s
        first_s = EARLY_DEADLINES * self.match_deadline_s
        most_s = first_s * 2**MAX_DOUBLED
        alone_s = min(max(EARLY_DEADLINES * grace_s, SLOWER * sync_s), most_s) if sync_s else first_s
        return grace_s, min(alone_s * 2 ** min(attempt, MAX_DOUBLED), most_s)

    def at(self, version: int, ending: bool) -> Policy:
        """The policy by which a coordinator closes one version. The last ones, for which nobody trains any more, close
        as under `sync`, so that nobody's progress is left over."""
        return replace(self, quorum_peers=None) if ending or version <= self.sync_versions else self


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the contract for the protocol's rounds: the same for all peers."""

    run: str
    contract: str
    """Digest of the contract."""
    parts: tuple[int, ...]
    """Parts of each fragment."""
    start_peers: int
    bounds: Bounds
    policy: Policy
    backlog_versions: int
    """Commits that members keep for peers that are behind."""
    continue_after_s: float | None = None
    """Without a majority for this long, go on as a lineage of our own; None: wait."""
    offences_allowed: int = 3
    """After so many contributions that no honest peer sends, a peer is put out of the run."""

    @property
    def means_kept(self) -> int:
        """Encoded means that a peer must hold: those of the backlog, and of attempts that may be proposed again."""
        return self.backlog_versions + 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Settings of the site for waiting in the protocol: each peer has its own."""

    heartbeat_s: float
    """Also the pause before an unanswered message is sent again."""
    suspect_s: float
    stall_s: float


# ---------------------------------------------------------------- votes


MAX_EVICTED = 1024
"""Most lives of peers that an operator evicted and that are remembered, in the view or not."""


class Electorate:
    """The voters on the next commit, and the number of votes that decides.

    The latest commit names them, and no vote moves. A majority decides, or half of an even number where the others are
    dead for certain (`died`). An operator takes votes away (`evict`), of one life of a peer each.
    """

    def __init__(self) -> None:
        self._named: tuple[Member, ...] = ()
        self._voters = Voters({})
        self._dead: set[tuple[str, int, int]] = set()
        """Peer, incarnation and process."""
        # A dict for its order: the oldest goes first.
        self._evicted: dict[tuple[str, int], None] = {}

    def stand(self, commit: Commit | None) -> None:
        """The voters that a commit names vote from now on; None: nobody does."""
        self._named = commit.voting if commit is not None else ()
        self._voters = Voters({voter.peer: voter.boot for voter in commit.voters} if commit is not None else {})
        lives = {(member.peer, member.incarnation) for member in self._named}
        self._dead = {dead for dead in self._dead if dead[:2] in lives}

    def died(self, member: Member, boot: int) -> None:
        """This process of a life is over for certain."""
        self._dead.add((member.peer, member.incarnation, boot))

    def evict(self, peer: str, incarnation: int) -> None:
        """An operator takes the vote of this life of a peer away. It may be of a view not known here yet."""
        self._evicted[peer, incarnation] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def has_evicted(self, member: Member) -> bool:
        """Whether an operator took the vote of this life of a peer away."""
        return (member.peer, member.incarnation) in self._evicted

    @property
    def evicted(self) -> set[str]:
        """Voters whose vote an operator took away."""
        if not self._evicted:
            return set()
        return {member.peer for member in self._named if (member.peer, member.incarnation) in self._evicted}

    @property
    def dead(self) -> set[tuple[str, int]]:
        """Voters, each with a process of it that is over for certain."""
        if not self._dead:
            return set()
        lives = {(member.peer, member.incarnation) for member in self._named}
        return {(peer, boot) for peer, incarnation, boot in self._dead if (peer, incarnation) in lives}

    @property
    def named(self) -> Voters:
        """All voters that the latest commit names."""
        return self._voters

    def names(self) -> set[str]:
        """Names of all voters that the latest commit names."""
        return {*self._voters.boots}

    def voters(self) -> set[str]:
        """Voters that no operator evicted."""
        return self.names() - self.evicted

    def suffice(self, votes: Mapping[str, int]) -> bool:
        """Whether these votes, each of a process of its voter, decide."""
        evicted = self.evicted
        return self._voters.suffice({peer: boot for peer, boot in votes.items() if peer not in evicted}, self.dead)

    def needed(self, boots: Mapping[str, int]) -> int:
        """Number of votes that decide: half of an even number where the others are dead for certain, and each of these
        is the process that the commit names. `boots`: the latest process of each voter that was heard."""
        voters = self._voters.boots
        gone = {peer for peer, boot in self.dead if peer in voters and boot >= voters[peer]}
        named = all(boots.get(peer, boot) == boot for peer, boot in voters.items() if peer not in gone)
        half = len(voters) % 2 == 0 and 0 < len(voters) <= 2 * len(gone) and named
        return len(voters) // 2 if half else len(voters) // 2 + 1

    def is_lost(self, boots: Mapping[str, int]) -> bool:
        """Whether an operator evicted so many that the others can decide nothing, or none of them trains: they found a
        lineage of their own. `boots` as in `needed`."""
        return bool(self.evicted) and (len(self.voters()) < self.needed(boots) or not self.seats(self.names()))

    def reachable(self, alive: Collection[str]) -> int:
        """Number of votes of live voters."""
        return sum(peer in alive for peer in self.voters())

    def seats(self, alive: Collection[str]) -> int:
        """Number of live voters that train: only they coordinate."""
        there = self.voters().intersection(alive)
        return sum(member.peer in there and not member.witness for member in self._named)

    def missing(self, alive: Collection[str]) -> list[str]:
        """Voters that do not live and that no operator evicted."""
        return [member.peer for member in self._named if member.peer not in alive and member.peer not in self.evicted]


# ---------------------------------------------------------------- owners of parts

SAME_RATES = 1.33
"""Rates of upload whose largest is not so many times the smallest count as equal."""
FAST_BPS = 10**9
"""Above it the cores hold up the bytes and not the link: one stream over loopback was measured at 1.4 to 4 Gb/s."""
BISECTIONS = 50
"""Steps of the bisection in `upload_shares`: more digits than any rate has."""


def spans(parts: int, owners: Sequence[str], send_bps: Sequence[int] = ()) -> tuple[Span, ...]:
    """Cut the parts of a fragment into consecutive spans for the reduction, at most one per owner.

    They are of nearly equal length, or have `upload_shares` by `send_bps` (of each owner, 0: unknown).
    """
    bounds = [parts * i // len(owners) for i in range(len(owners) + 1)]
    shares = upload_shares(send_bps)
    if shares:
        exact = [parts * share for share in shares]
        lengths = [int(length) for length in exact]
        # Largest remainders get the parts that are left over; at a tie, the owner that comes first.
        first_by_rest = sorted(range(len(shares)), key=lambda owner: lengths[owner] - exact[owner])
        for owner in first_by_rest[: parts - sum(lengths)]:
            lengths[owner] += 1
        bounds = [*accumulate(lengths, initial=0)]
    pieces = zip(owners, bounds, bounds[1:], strict=False)
    return tuple(Span(owner, start, stop) for owner, start, stop in pieces if stop > start)


def upload_shares(send_bps: Sequence[int]) -> list[float]:
    """Share of a reduction's parts that each owner gets, so that the slowest upload ends earliest; empty: all the same.

    Of a fragment of V bits, peer i of n owns the share f_i. It uploads (1 - f_i) V of its contribution and its means,
    f_i V, to n - 1 others: V (1 + (n - 2) f_i) in all. So the largest of (1 + (n - 2) f_i) / bps_i is made as small as
    can be, over f_i >= 0 that sum to 1: f_i is what peer i can own and be done by t, for the least t with enough of
    all. Two always upload V each, whatever they own. An unknown rate counts as the median of the known; rates that
    hardly differ, or are above `FAST_BPS`, as equal, for they are measurements. f_i counts as 1 at most, so that a
    claim brings nobody more than an equal part of what the others leave.
    """
    known = [bps for bps in send_bps if bps]
    rates = [min(bps or median(known), FAST_BPS) for bps in send_bps] if known else []
    others = len(send_bps) - 2
    if others < 1 or not rates or max(rates) < SAME_RATES * min(rates):
        return []

    def by(time: float) -> list[float]:
        return [min(max((time * bps - 1) / others, 0.0), 1.0) for bps in rates]

    early, late = 1 / min(rates), (1 + others) / min(rates)  # nobody is done before early; by late all can own all
    for _ in range(BISECTIONS):
        middle = (early + late) / 2
        early, late = (early, middle) if sum(by(middle)) >= 1 else (middle, late)
    shares = by(late)
    return [share / sum(shares) for share in shares]


def respan(
    current: Sequence[Span],
    wanted: Collection[int],
    gone: Collection[str],
    owners: Sequence[str],
    send_bps: Sequence[int] = (),
) -> list[Span]:
    """The spans of a repair: parts of `gone` that are still `wanted` go to `owners`, as in `spans`; all others stay."""
    owner = owner_of_parts(current)
    lost = [part for part, peer in owner.items() if peer in gone and part in wanted]
    for piece in spans(len(lost), owners, send_bps):
        owner |= dict.fromkeys(lost[piece.start : piece.stop], piece.owner)
    return as_spans(owner)


def owner_of_parts(spans: Iterable[Span]) -> dict[int, str]:
    """The owner of each part that the spans cover. `as_spans` is the way back."""
    return {part: span.owner for span in spans for part in range(span.start, span.stop)}


def as_spans(owner: Mapping[int, str]) -> list[Span]:
    """The spans of a reduction: runs of consecutive parts with one owner."""
    found: list[Span] = []
    for part in sorted(owner):
        if found and found[-1].stop == part and found[-1].owner == owner[part]:
            found[-1] = Span(owner[part], found[-1].start, part + 1)
        else:
            found.append(Span(owner[part], part, part + 1))
    return found


# ---------------------------------------------------------------- the group of a version


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The contributors of an attempt, or None to wait; and why."""

    group: tuple[str, ...] | None
    reason: str
    routine: bool = False
    """The reason appears in every round in which all goes well: nobody needs to read it."""


def decide(
    policy: Policy,
    now: float,
    view: Sequence[str],
    expected: Sequence[str],
    offered_at: Mapping[str, float],
    state_digests: Mapping[str, str],
    waits_from: Mapping[str, float] = MappingProxyType({}),
) -> GroupDecision:
    """The coordinator's decision: contributors of an attempt as soon as it may begin, else None; with the reason.

    `view` has its trainers in order, `expected` those of them that live and whose contribution did not fail before,
    `offered_at` the time of each offer. `waits_from`: when an attempt must begin, lest that peer run out of inner steps
    before it is over.
    """
    # Peers that hold another state than most are left out: their pseudo-gradient is measured against another anchor.
    same_state: dict[str, list[str]] = {}
    for peer in expected:
        if peer in offered_at:
            same_state.setdefault(state_digests[peer], []).append(peer)
    agreed = max(same_state.values(), key=len, default=[])
    if not agreed:
        return GroupDecision(None, "nobody has a contribution yet")
    late = [peer for peer in expected if peer not in offered_at]
    if not late:
        missing = [peer for peer in view if peer not in agreed]
        without = f"; without {', '.join(missing)}" if missing else ""
        return GroupDecision(tuple(agreed), f"all {len(agreed)} live members are ready{without}", routine=not missing)
    return _close_or_wait(policy, now, {peer: offered_at[peer] for peer in agreed}, late, waits_from)


def _close_or_wait(
    policy: Policy, now: float, ready_at: Mapping[str, float], late: Sequence[str], waits_from: Mapping[str, float]
) -> GroupDecision:
    """The coordinator's choice to begin with the contributors of `ready_at`, or to wait for the late ones."""
    group, missing, times = tuple(ready_at), ", ".join(late), sorted(ready_at.values())
    quorum = policy.quorum_peers
    if quorum is None:
        # The deadline runs since half of all were ready: a peer that is early for once must not make a version alone.
        # Such a version has one peer's progress, and its outer step the momentum of a whole one; and the progress that
        # all others make meanwhile comes on top of it.
        half = math.ceil((len(group) + len(late)) / 2)
        deadline_s = policy.match_deadline_s
        close_s = times[half - 1] + deadline_s if len(times) >= half else times[0] + EARLY_DEADLINES * deadline_s
        if now >= close_s:
            return GroupDecision(group, f"closing without {missing} after {now - times[0]:.0f} s")
        return GroupDecision(None, f"waiting for {missing}", routine=True)
    if len(group) < quorum:
        return GroupDecision(None, f"{len(group)} of a quorum of {quorum} are ready", routine=True)
    quorum_s, grace = times[quorum - 1], f"{policy.grace_s:g} s of grace"
    close_s = quorum_s + policy.grace_s
    if policy.uses_slack:
        first_s = min(waits_from.get(peer, quorum_s) for peer in group)
        close_s, grace = max(close_s, min(first_s, quorum_s + policy.match_deadline_s)), f"{grace} or more"
    if now >= close_s:
        return GroupDecision(group, f"a quorum of {quorum} and {grace}; without {missing}", routine=True)
    return GroupDecision(None, f"a quorum is ready; {grace} for {missing}", routine=True)


def in_turn(group: Sequence[str], most: int | None, turn: int) -> tuple[str, ...]:
    """At most `most` contributors of a coordinator's group, in its order; the next turn begins where this one ends.

    `turn` counts the versions of a fragment: if it counted all versions, each fragment might always get the same peers.
    """
    if most is None or len(group) <= most:
        return tuple(group)
    start = turn * most % len(group)
    chosen = {*group[start : start + most], *group[: max(start + most - len(group), 0)]}
    return tuple(peer for peer in group if peer in chosen)


# ---------------------------------------------------------------- lineages


def goes_on(mine: Sequence[Fork], other: Sequence[Fork]) -> bool:
    """Whether the first of two histories of lineages (see `parted_at`) goes on: both sides get the same answer.

    More committed tokens win; at a tie the later founded one, for the members that it left behind could not go on.
    """
    return (mine[-1].tokens, len(mine), mine[-1].lineage) > (other[-1].tokens, len(other), other[-1].lineage)


def parted_at(mine: Sequence[Fork], other: Sequence[Fork]) -> int:
    """Committed tokens at which two histories of lineages parted.

    A history lists the latest lineages that led to a peer's own, each with the tokens at which it was left; the last
    entry is the peer's own, with its tokens now. Histories that share nothing parted at 0.
    """
    left_at = {theirs.lineage: theirs.tokens for theirs in other}
    return next((min(own.tokens, left_at[own.lineage]) for own in reversed(mine) if own.lineage in left_at), 0)
