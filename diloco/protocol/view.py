"""Pure decisions about who does what in a version: coordinator, majority, spans, and when a group is complete.

Every function takes all that it needs as arguments and, where it decides, returns the reason with the decision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from types import MappingProxyType

from diloco.base.types import Member
from diloco.protocol.messages import Span

SAME_RATES = 1.33
"""Rates of upload whose largest is not so many times the smallest count as equal."""
FAST_BPS = 10**9
"""Above it the cores hold up the bytes and not the link: one stream over loopback was measured at 1.4 to 4 Gb/s."""
EARLY_DEADLINES = 4
"""Match deadlines after which fewer than half close a version under `sync`, for the others may live and hang."""
BISECTIONS = 50
"""Steps of the bisection in `upload_shares`: more digits than any rate has."""


def coordinator(run: str, version: int, attempt: int, view: Sequence[Member]) -> Member:
    """Coordinator of an attempt: a different member each time, by hash; nobody is special for ever."""
    seed = hashlib.sha256(f"{run}/{version}".encode()).digest()
    first = int.from_bytes(seed[:8], "big")
    trainers = [member for member in view if not member.witness]
    return trainers[(first + attempt) % len(trainers)]


def votes_needed(members: int, gone: int) -> int:
    """Number of votes that decide in a view of `members`, when `gone` of them are dead for certain and vote no more.

    A majority of all, and where a half of an even view is dead for certain, the other half: its votes are then all
    that there are. Two coordinators may know of different deaths; whichever they know of, what one decided the other
    finds among its own votes. Two of two, one of two when the other is dead; three of five, also when two are dead.
    """
    halved = members % 2 == 0 and gone >= members // 2
    return members // 2 if halved else members // 2 + 1


def spans(parts: int, owners: Sequence[str], send_bps: Sequence[int] = ()) -> tuple[Span, ...]:
    """Cut `parts` parts into consecutive spans, at most one per owner.

    They are of nearly equal length, or have `upload_shares` by `send_bps` (of each owner, 0: unknown).
    """
    shares = upload_shares(send_bps)
    even = [parts * i // len(owners) for i in range(len(owners) + 1)]
    bounds = [*accumulate(_whole(parts, shares), initial=0)] if shares else even
    pieces = zip(owners, bounds, bounds[1:], strict=False)
    return tuple(Span(owner, start, stop) for owner, start, stop in pieces if stop > start)


def upload_shares(send_bps: Sequence[int]) -> list[float]:
    """Share of the parts that each owner gets, so that the slowest upload ends earliest; empty: all the same.

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


def _whole(parts: int, shares: Sequence[float]) -> list[int]:
    """So many parts in these shares, by the largest remainders; at a tie, who comes first."""
    exact = [parts * share for share in shares]
    lengths = [int(length) for length in exact]
    first_by_rest = sorted(range(len(shares)), key=lambda owner: lengths[owner] - exact[owner])
    for owner in first_by_rest[: parts - sum(lengths)]:
        lengths[owner] += 1
    return lengths


def respan(
    current: Sequence[Span],
    wanted: Collection[int],
    gone: Collection[str],
    owners: Sequence[str],
    send_bps: Sequence[int] = (),
) -> list[Span]:
    """The spans of a repair: parts of `gone` that are still `wanted` go to `owners`, as in `spans`; all others stay."""
    owner = {part: span.owner for span in current for part in range(span.start, span.stop)}
    lost = [part for part, peer in owner.items() if peer in gone and part in wanted]
    for piece in spans(len(lost), owners, send_bps):
        owner |= dict.fromkeys(lost[piece.start : piece.stop], piece.owner)
    return as_spans(owner)


def as_spans(owner: Mapping[int, str]) -> list[Span]:
    """Runs of consecutive parts with one owner."""
    found: list[Span] = []
    for part in sorted(owner):
        last = found[-1] if found else None
        if last is not None and last.stop == part and last.owner == owner[part]:
            found[-1] = Span(last.owner, last.start, part + 1)
        else:
            found.append(Span(owner[part], part, part + 1))
    return found


@dataclass(frozen=True, slots=True)
class Policy:
    """When a version closes."""

    quorum_peers: int | None
    """None: `sync`, all live members. K: `quorum`, K of them and whoever comes within `grace_s` of the K-th."""
    grace_s: float
    match_deadline_s: float
    """Seconds that half of the live members, when they are ready, wait for the others under `sync`."""
    max_peers: int | None = None
    """More do not contribute to one version: they take turns. None: no limit."""
    uses_slack: bool = False
    """The grace of a quorum lasts for as long as none of it would have to wait: `async`."""
    sync_versions: int = 0
    """The first so many versions close as under `sync`."""

    def at(self, version: int, ending: bool) -> Policy:
        """The one that holds for a version. The last ones, for which nobody trains any more, close as under `sync`, so
        that nobody's progress is left over."""
        return replace(self, quorum_peers=None) if ending or version <= self.sync_versions else self


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The contributors of an attempt, or None to wait; and why."""

    group: tuple[str, ...] | None
    reason: str
    routine: bool = False
    """Nothing that anybody needs to know."""


def decide(
    policy: Policy,
    now: float,
    view: Sequence[str],
    expected: Sequence[str],
    offered_at: Mapping[str, float],
    state_digests: Mapping[str, str],
    waits_from: Mapping[str, float] = MappingProxyType({}),
) -> GroupDecision:
    """Contributors of the attempt, as soon as it may begin; else None, with the reason.

    `view`: its trainers, in order; `expected`: those of them that live and whose contribution did not fail before.
    `offered_at` says when those who are ready offered, `state_digests` what they stand on: peers that stand on
    another state than most others are left out, for their pseudo-gradient is measured against another anchor.
    `waits_from`: when an attempt must begin, lest that peer run out of inner steps before it is over.
    """
    offering = [peer for peer in expected if peer in offered_at]
    agreed = _same_state(offering, state_digests)
    late = [peer for peer in expected if peer not in offering]
    if not agreed:
        return GroupDecision(None, "nobody has a contribution yet")
    if not late:
        missing = [peer for peer in view if peer not in agreed]
        without = f"; without {', '.join(missing)}" if missing else ""
        return GroupDecision(tuple(agreed), f"all {len(agreed)} live members are ready{without}", routine=not missing)
    times = sorted(offered_at[peer] for peer in agreed)
    if policy.quorum_peers is None:
        return _decide_sync(policy, now, times, agreed, late)
    return _decide_quorum(policy, policy.quorum_peers, now, times, agreed, late, waits_from)


def in_turn(group: Sequence[str], most: int | None, turn: int) -> tuple[str, ...]:
    """At most so many of a group, in its order; the next turn begins where this one ends.

    `turn` counts the versions of a fragment: if it counted all versions, each fragment might always get the same peers.
    """
    if most is None or len(group) <= most:
        return tuple(group)
    start = turn * most % len(group)
    chosen = {*group[start : start + most], *group[: max(start + most - len(group), 0)]}
    return tuple(peer for peer in group if peer in chosen)


def _decide_sync(
    policy: Policy, now: float, times: Sequence[float], agreed: Sequence[str], late: Sequence[str]
) -> GroupDecision:
    """The deadline runs since half of all were ready: who is early for once must not make a version alone.

    Such a version has one peer's progress, and its outer step the momentum of a whole one; and what all others train
    meanwhile comes on top of it.
    """
    half = math.ceil((len(agreed) + len(late)) / 2)
    deadline_s = policy.match_deadline_s
    close_s = times[half - 1] + deadline_s if len(times) >= half else times[0] + EARLY_DEADLINES * deadline_s
    if now >= close_s:
        return GroupDecision(tuple(agreed), f"closing without {', '.join(late)} after {now - times[0]:.0f} s")
    return GroupDecision(None, f"waiting for {', '.join(late)}", routine=True)


def _decide_quorum(
    policy: Policy,
    quorum: int,
    now: float,
    times: Sequence[float],
    agreed: Sequence[str],
    late: Sequence[str],
    waits_from: Mapping[str, float],
) -> GroupDecision:
    if len(agreed) < quorum:
        return GroupDecision(None, f"{len(agreed)} of a quorum of {quorum} are ready", routine=True)
    there_s, grace = times[quorum - 1], f"{policy.grace_s:g} s of grace"
    close_s = there_s + policy.grace_s
    if policy.uses_slack:
        first_s = min(waits_from.get(peer, there_s) for peer in agreed)
        close_s, grace = max(close_s, min(first_s, there_s + policy.match_deadline_s)), f"{grace} or more"
    if now >= close_s:
        return GroupDecision(
            tuple(agreed), f"a quorum of {quorum} and {grace}; without {', '.join(late)}", routine=True
        )
    return GroupDecision(None, f"a quorum is ready; {grace} for {', '.join(late)}", routine=True)


def _same_state(peers: Sequence[str], state_digests: Mapping[str, str]) -> list[str]:
    """The largest set of peers that hold the same anchor and outer state."""
    groups: dict[str, list[str]] = {}
    for peer in peers:
        groups.setdefault(state_digests[peer], []).append(peer)
    return max(groups.values(), key=len, default=[])


MAX_EVICTED = 1024
"""Lives that an operator declared over and that are remembered, in the view or not."""


class Electorate:
    """The votes of one view."""

    def __init__(self) -> None:
        self._view: tuple[Member, ...] = ()
        self._heirs: dict[str, str] = {}
        self._dead: set[tuple[str, int]] = set()
        self._evicted: dict[tuple[str, int], None] = {}

    def stand(self, view: Sequence[Member]) -> None:
        """A new view votes from now on. What was said of a member is not said of a later life under its name."""
        lives = {(member.peer, member.incarnation) for member in self._view}
        same = {member.peer for member in view if (member.peer, member.incarnation) in lives}
        self._heirs = {peer: heir for peer, heir in self._heirs.items() if {peer, heir} <= same}
        self._dead &= {(member.peer, member.incarnation) for member in view}
        self._view = tuple(view)

    def died(self, member: Member) -> None:
        """This life of a peer is over for certain."""
        self._dead.add((member.peer, member.incarnation))

    def evict(self, peer: str, incarnation: int) -> None:
        """An operator answers for it that this life of a peer is over; who is behind may not know it yet."""
        self._evicted[peer, incarnation] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    @property
    def evicted(self) -> set[str]:
        """Members that an operator declared dead."""
        return {member.peer for member in self._view if (member.peer, member.incarnation) in self._evicted}

    def bequeath(self, leavers: Iterable[str], heir: str) -> None:
        """Leavers give their votes to `heir`."""
        self._heirs |= dict.fromkeys(leavers, heir)

    def voters(self) -> set[str]:
        """Members that may still vote."""
        living = {member.peer for member in self._view if (member.peer, member.incarnation) not in self._dead}
        return living - self.evicted

    def needed(self) -> int:
        """Number of votes that decide."""
        living = len(self.voters())
        needed = votes_needed(len(self._view), len(self._view) - living)
        return min(needed, living) if self.evicted else needed  # an operator answers for what the dead had agreed to

    def reachable(self, alive: Collection[str]) -> int:
        """Votes of those that live, and of leavers whose heir lives."""
        return sum(peer in alive or self._heirs.get(peer) in alive for peer in self.voters())

    def held_by(self, peer: str) -> tuple[str, ...]:
        """Leavers whose vote `peer` has, besides its own."""
        return tuple(sorted(leaver for leaver, heir in self._heirs.items() if heir == peer))


@dataclass(frozen=True, slots=True)
class Rules:
    """The contract's settings for rounds."""

    run: str
    contract: str
    """Digest of the contract."""
    parts: tuple[int, ...]
    """Parts of each fragment."""
    start_peers: int
    lease_blocks: int
    """Data blocks that every trainer holds at least after a commit."""
    policy: Policy
    backlog_versions: int
    """Commits that members keep for those who are behind."""
    continue_after_s: float | None = None
    """Without a majority for this long, go on as a lineage of our own; None: wait."""
    offences_allowed: int = 3
    """After so many contributions that no honest peer sends, a peer is put out of the run."""
    total_tokens: int | None = None
    """When so many are committed, only what is under way is still to come. None: never."""

    @property
    def means_kept(self) -> int:
        """Encoded means that a peer holds: those of the backlog, and of attempts that may still be proposed again."""
        return self.backlog_versions + 2


@dataclass(frozen=True, slots=True)
class Timing:
    """The site's settings for waiting."""

    heartbeat_s: float
    suspect_s: float
    stall_s: float

    @property
    def resend_s(self) -> float:
        """Unanswered messages are said again this often."""
        return self.heartbeat_s
