"""Bookkeeping of one attempt, without its bytes: the coordinator's tally of promises and votes (`Tally`), and on every
peer the parts of the reduction that are here and missing (`Reduction`), with its own sums and its times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

from diloco.base.types import Commit, Counted, Member, Omitted
from diloco.protocol.messages import Begin, Offer, Ready, Repair, Span
from diloco.protocol.view import SLOWER, as_spans, owner_of_parts


class Tally:
    """The coordinator's record of one attempt: promises, offers and votes, and its own messages to send again."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.ready: dict[str, Ready] = {}
        self.boots: dict[str, int] = {}
        """Processes that promised."""
        self.offered_at_s: dict[str, float] = {}
        self.begun = False
        """A reduction began in this attempt."""
        self.proposal: Commit | None = None
        self.reduction = (-1, -1)
        """The reduction that made the mean of the proposal, if this peer took part in it."""
        self.proposed_at_s = math.inf
        self.witnesses_asked = False
        self.audience: tuple[Member, ...] = ()
        """Members that got the proposal."""
        self.accepts: dict[str, int] = {}
        """Members that accepted the proposal, each with the process that did."""
        self.majority_at_s = math.inf

    def hear(self, peer: str, boot: int, ready: Ready, now: float) -> None:
        """Record a promise to the coordinator, perhaps with an offer. After `Begin` nothing changes: it may be old."""
        if self.begun:
            return
        self.ready[peer], self.boots[peer] = ready, boot
        if ready.offer is not None:
            self.offered_at_s.setdefault(peer, now)
        else:
            self.offered_at_s.pop(peer, None)

    @property
    def state_digests(self) -> dict[str, str]:
        """Digest of the outer state that each peer names in its promise to the coordinator."""
        return {peer: ready.state_digest for peer, ready in self.ready.items()}

    def promises(self) -> set[str]:
        """Members that promised the coordinator to accept nothing of an earlier attempt."""
        return set(self.ready)

    def leaving(self) -> set[str]:
        """Peers whose offer to the coordinator is their last."""
        return {peer for peer, ready in self.ready.items() if ready.offer is not None and ready.offer.leaving}

    def send_bps(self) -> dict[str, int]:
        """Upload rate of each peer as its offer to the coordinator states it, in bits per second; 0: unknown."""
        return {peer: ready.offer.send_bps for peer, ready in self.ready.items() if ready.offer is not None}

    def waits_from(self, sync_s: float = 0.0, reserve_s: float = 0.0) -> dict[str, float]:
        """By peer that offered: when an attempt of `sync_s` must begin, lest it run out of inner steps before the end.

        And `reserve_s` earlier, as far as that leaves as much again: a peer that freezes meanwhile is noticed so late.
        """
        offers = {peer: self.ready[peer].offer for peer in self.offered_at_s}
        return {
            peer: self.offered_at_s[peer] + offer.slack_s - sync_s - min(reserve_s, max(offer.slack_s - reserve_s, 0.0))
            for peer, offer in offers.items()
            if offer is not None
        }

    def counted(self, peer: str) -> Counted:
        """The entry of `peer` among the contributors that the coordinator lists."""
        offer = self.ready[peer].offer
        assert offer is not None
        return as_counted(peer, offer)


class Lead:
    """The leader's record of the reduction that it began: its own messages, to send again. It outlasts view commits."""

    def __init__(self, begin: Begin, send_bps: Mapping[str, int]) -> None:
        self.begin = begin
        self.repair: Repair | None = None
        self.send_bps = send_bps
        """Upload rate of each contributor, in bits per second; 0: unknown."""


def as_counted(peer: str, offer: Offer) -> Counted:
    """A peer's offer to the coordinator as the commit counts it."""
    return Counted(peer, offer.boot, offer.base_version, offer.weight, offer.tokens, offer.blocks)


class Sums:
    """The parts that this peer owns in a reduction: contributors whose bytes are missing, and what is averaged.

    A part may be averaged when the bytes of every contributor that is waited for are here; the sum is in the order of
    the contributors, never of arrival.
    """

    def __init__(self, contributors: Sequence[str], parts: Iterable[int]) -> None:
        self._contributors = contributors
        self._awaited = {part: set(contributors) for part in parts}
        """Contributors whose bytes are missing, for each part."""
        self._averaging: set[int] = set()

    def take(self, sender: str, part: int) -> Set[str] | None:
        """Note that `sender`'s `part` is here. Returns whose bytes to it are missing yet; None: not waited for."""
        awaited = self._awaited.get(part)
        if awaited is None or sender not in awaited or part in self._averaging:
            return None
        awaited.remove(sender)
        return awaited

    def average(self, part: int) -> tuple[str, ...]:
        """Begin a part's sum: later bytes do not count in it. Returns contributors that it omits."""
        self._averaging.add(part)
        return tuple(peer for peer in self._contributors if peer in self._awaited[part])

    def move(self, part: int, mine: bool) -> None:
        """Give a part another owner, which asks all contributors for it again: this peer, if it is `mine`."""
        self._awaited.pop(part, None)
        self._averaging.discard(part)
        if mine:
            self._awaited[part] = set(self._contributors)

    def ready(self, gone: Set[str]) -> list[int]:
        """Parts whose sum waits for nobody but the `gone`."""
        return [part for part, awaited in self.unfinished().items() if awaited <= gone]

    def unfinished(self) -> dict[int, set[str]]:
        """Contributors whose bytes are missing, for each part whose sum has not begun."""
        return {part: awaited for part, awaited in self._awaited.items() if part not in self._averaging}


class Times:
    """When a reduction began and bytes moved in it last, and how long it waits for the few that still owe something."""

    def __init__(self, now: float) -> None:
        self.began_at_s = self.moved_at_s = self._since_s = now
        self.until_s = math.inf
        """Time until which the reduction waits for peers that still owe something, however they move (`look`)."""
        self._few_at_s = math.inf
        """Time since which only a few owe something."""
        self._most_at_s = math.inf
        """Time since which others owed something, and do no more."""
        self._owed: set[str] = set()
        """Peers that owed something, since the reduction began or was repaired."""

    def repaired(self, now: float) -> None:
        """Measure from now on: parts moved, and what is waited for is another thing."""
        self.moved_at_s = self._since_s = now
        self.until_s = self._few_at_s = self._most_at_s = math.inf
        self._owed = set()

    def look(self, now: float, owed: Set[str], few: bool, direct: bool, grace_s: float, alone_s: float) -> None:
        """Set `until_s`: how long the reduction waits for those that owe something, if they are a `few`.

        That is `grace_s` longer than others took, or `SLOWER` times as long: no constant says how long bytes may take.
        Where nobody else owed anything, so that there is nothing to compare with, it is `alone_s`. `direct`: they owe
        contributions. An owner that owes means may itself wait for a contributor, and is the first to complain of that.
        """
        self._owed |= owed
        if not few:
            self.until_s = self._few_at_s = self._most_at_s = math.inf
            return
        self._few_at_s = min(self._few_at_s, now)
        if self._owed == owed:
            self.until_s = self._few_at_s + alone_s
            return
        self._most_at_s = min(self._most_at_s, now)
        wait_s = max(grace_s, SLOWER * (self._most_at_s - self._since_s))
        self.until_s = self._most_at_s + wait_s * (1 if direct else 2)


class Reduction:
    """One peer's bookkeeping of a reduction: which parts are here, which are missing and from whom. Its `leader` began
    it.

    The mean is complete when every part of the fragment is here.
    """

    def __init__(self, begin: Begin, leader: Member, me: str, now: float) -> None:
        self.begin, self.leader = begin, leader
        self.me = me
        self.times = Times(now)
        self.mean_digest = ""
        self.generation = 0
        self.gone: frozenset[str] = frozenset()
        self.contributors = [counted.peer for counted in begin.contributors]
        self.owner = owner_of_parts(begin.spans)
        self.absent = set(self.owner)
        """Parts of the mean that are not here."""
        self.omitted: dict[int, tuple[str, ...]] = dict.fromkeys(self.owner, ())
        """Contributors that a part of the mean does not count."""
        self._sums = Sums(self.contributors, self.parts_of(me))

    @property
    def key(self) -> tuple[int, int]:
        """Height and attempt in which the reduction began."""
        return self.begin.key

    @property
    def contributes(self) -> bool:
        """Whether this peer is one of the reduction's contributors."""
        return self.me in self.contributors

    @property
    def complete(self) -> bool:
        """True when all parts of the reduction's mean have been noted."""
        return not self.absent

    def owners_of_absent(self) -> set[str]:
        """Other owners that still owe parts of the reduction's mean."""
        return {self.owner[part] for part in self.absent} - {self.me}

    def parts_of(self, owner: str) -> set[int]:
        """Parts of the reduction that this peer owns."""
        return {part for part, peer in self.owner.items() if peer == owner}

    def contribution(self, sender: str, part: int, now: float) -> bool:
        """Note that `sender`'s `part` is here for the reduction. True when the part waits for nobody else."""
        awaited = self._sums.take(sender, part)
        if awaited is None:
            return False
        self.times.moved_at_s = now
        return awaited <= self.gone

    def average(self, part: int) -> tuple[str, ...]:
        """Begin a part's average in the reduction: later bytes do not count in it. Returns contributors it omits."""
        self.omitted[part] = self._sums.average(part)
        return self.omitted[part]

    def mean(self, part: int, sender: str, omitted: Sequence[str], now: float) -> bool:
        """Note that `part` of the reduction's mean came from its owner. True when that was the last one missing."""
        if self.owner.get(part) != sender or part not in self.absent:
            return False
        self.times.moved_at_s = now
        self.absent.remove(part)
        self.omitted[part] = tuple(omitted)
        return self.complete

    def repair(self, repair: Repair, now: float) -> tuple[list[Span], list[int]]:
        """Apply the coordinator's `Repair`: owners of parts changed, and some contributors are not waited for any more.

        Returns the spans that moved, and the parts of mine that can be averaged because of it.
        """
        self.generation = repair.generation
        self.gone |= frozenset(repair.gone)
        self.times.repaired(now)
        after = owner_of_parts(repair.spans)
        moved = {part: owner for part, owner in after.items() if self.owner[part] != owner}
        self.owner = after
        self.absent |= moved.keys()
        self.mean_digest = "" if moved else self.mean_digest
        for part, owner in moved.items():
            self._sums.move(part, mine=owner == self.me)
        return as_spans(moved), self._sums.ready(self.gone)

    def explains(self, omitted: Iterable[str]) -> bool:
        """Whether the repairs that are known here left out all of these contributors."""
        return self.gone.issuperset(omitted)

    def missing(self) -> tuple[str, ...]:
        """Peers that the reduction waits for: contributors to my parts first, then owners of parts of the mean."""
        return tuple(sorted(self._late_contributors() or self.owners_of_absent()))

    def _late_contributors(self) -> set[str]:
        """Contributors that the reduction still waits for, to parts of mine."""
        late = {peer for awaited in self._sums.unfinished().values() for peer in awaited}
        return late - self.gone - {self.me}

    def look(self, now: float, grace_s: float, alone_s: float, *groups: Set[str]) -> None:
        """Set how long the reduction waits for a few, when most peers owe nothing more (`Times.look`): a few in each of
        the `groups`, members that receive the mean and voters among them.

        For half of the voters, or more, that has no end: without their votes there is no commit.
        """
        owed = {*self.missing()}
        few = bool(owed) and all(2 * len(owed & group) < len(group) for group in groups)
        self.times.look(now, owed, few, bool(self._late_contributors()), grace_s, alone_s)

    def counted(self) -> tuple[tuple[Counted, ...], tuple[Omitted, ...]]:
        """Contributors that the commit of this reduction counts, and the parts in which one of them does not count."""
        parts = range(len(self.owner))
        without = {peer: [part for part in parts if peer in self.omitted[part]] for peer in self.contributors}
        counted = tuple(entry for entry in self.begin.contributors if len(without[entry.peer]) < len(parts))
        omitted = (
            Omitted(entry.peer, span.start, span.stop)
            for entry in sorted(counted, key=lambda entry: entry.peer)
            for span in as_spans(dict.fromkeys(without[entry.peer], entry.peer))
        )
        return counted, tuple(omitted)


def covers(spans: Sequence[Span], parts: int, owners: Sequence[str]) -> bool:
    """Whether spans cover all parts of a fragment once, in order, and each belongs to one of `owners`."""
    bounds = [0, *(span.stop for span in spans)]
    owned = all(span.owner in owners and span.start < span.stop for span in spans)
    return owned and [span.start for span in spans] == bounds[:-1] and bounds[-1] == parts


def well_formed(begin: Begin, parts: int, view: Sequence[str]) -> bool:
    """Whether a `Begin` makes sense: spans cover all parts, and contributors are receivers of the view, once each."""
    contributors = [counted.peer for counted in begin.contributors]
    once = len(set(contributors)) == len(contributors) > 0
    may = set(view) & {member.peer for member in begin.receivers}
    return once and may.issuperset(contributors) and covers(begin.spans, parts, contributors)
