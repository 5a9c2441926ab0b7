"""Bookkeeping of one attempt's butterfly: which parts are here, which are missing and from whom. No bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco.base.types import Commit, Counted, Member, Omitted
from diloco.protocol.messages import Begin, Offer, Ready, Repair, Span
from diloco.protocol.view import as_spans


class Tally:
    """Promises, offers and votes of one attempt."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.ready: dict[str, Ready] = {}
        self.offered_at_s: dict[str, float] = {}
        self.begin: Begin | None = None
        self.repair: Repair | None = None
        self.proposal: Commit | None = None
        self.proposed_at_s = math.inf
        self.witnesses_asked = False
        self.lost: set[str] = set()
        """Digests of accepted commits whose mean died with evicted peers."""
        self.audience: tuple[Member, ...] = ()
        self.accepts: dict[str, set[str]] = {}
        self.majority_at_s = math.inf

    def hear(self, peer: str, ready: Ready, now: float) -> None:
        """A promise came, perhaps with an offer. What the attempt began with stays: an older word may come later."""
        if self.begin is not None:
            return
        self.ready[peer] = ready
        if ready.offer is not None:
            self.offered_at_s.setdefault(peer, now)
        else:
            self.offered_at_s.pop(peer, None)

    def give_up(self, proposal: Commit) -> None:
        """Nobody can have its mean. Who voted for it voted for nothing else, and is to be asked for the next."""
        self.lost.add(proposal.digest)
        self.proposal = None
        self.accepts = {}
        self.witnesses_asked = False

    @property
    def state_digests(self) -> dict[str, str]:
        """Digest of the state that each ready peer holds."""
        return {peer: ready.state_digest for peer, ready in self.ready.items()}

    def promises(self) -> set[str]:
        """Voters that promised to accept nothing of an earlier attempt."""
        return {vote for peer, ready in self.ready.items() for vote in (peer, *ready.votes)}

    def votes(self) -> set[str]:
        """Voters that accepted the proposal."""
        return {vote for votes in self.accepts.values() for vote in votes}

    def accepted(self) -> Commit | None:
        """The commit accepted in the latest earlier attempt that anybody reports."""
        latest = max(self.ready.values(), key=lambda ready: ready.accepted_attempt, default=None)
        return latest.accepted if latest is not None else None

    def leaving(self) -> set[str]:
        """Peers whose offer is their last."""
        return {peer for peer, ready in self.ready.items() if ready.offer is not None and ready.offer.leaving}

    def send_bps(self, peers: Sequence[str]) -> list[int]:
        """Upload rate of each peer as its offer states it, in bits per second; 0: unknown."""
        offers = [self.ready[peer].offer for peer in peers]
        return [offer.send_bps if offer is not None else 0 for offer in offers]

    def waits_from(self, sync_s: float = 0.0, reserve_s: float = 0.0) -> dict[str, float]:
        """When an attempt of `sync_s` must begin, lest who offered run out of inner steps before it is over.

        And `reserve_s` earlier, as far as it leaves as much again: whoever freezes in it is found out so late.
        """
        offers = {peer: self.ready[peer].offer for peer in self.offered_at_s}
        return {
            peer: self.offered_at_s[peer] + offer.slack_s - sync_s - min(reserve_s, max(offer.slack_s - reserve_s, 0.0))
            for peer, offer in offers.items()
            if offer is not None
        }

    def counted(self, peer: str) -> Counted:
        """The entry of `peer` among the contributors."""
        offer = self.ready[peer].offer
        assert offer is not None
        return as_counted(peer, offer)


def as_counted(peer: str, offer: Offer) -> Counted:
    """An offer as a commit counts it."""
    return Counted(peer, offer.base_version, offer.weight, offer.tokens, offer.blocks)


class Reduction:
    """One peer's share of one reduction.

    A part that I own may be averaged when the bytes of every contributor that is waited for are here; the sum is in
    the order of `begin.contributors`, never of arrival. The mean is complete when every part of the fragment is here.
    """

    def __init__(self, begin: Begin, me: str, now: float) -> None:
        self.begin = begin
        self.me = me
        self.began_at_s = self.progress_at_s = now
        self.mean_digest = ""
        self.generation = 0
        self.gone: frozenset[str] = frozenset()
        self._contributors = [counted.peer for counted in begin.contributors]
        self._owner = _owners(begin.spans)
        self._absent_mean = set(self._owner)
        self._absent = {part: set(self._contributors) for part, owner in self._owner.items() if owner == me}
        self._omitted: dict[int, tuple[str, ...]] = {}
        self._averaging: set[int] = set()

    @property
    def key(self) -> tuple[int, int]:
        return self.begin.version, self.begin.attempt

    @property
    def contributes(self) -> bool:
        """True when this peer's own contribution is in the reduction."""
        return self.me in self._contributors

    def awaits(self, peer: str) -> bool:
        """Whether anything of `peer` belongs in this reduction."""
        return peer in self._contributors

    @property
    def complete(self) -> bool:
        """True when all parts of the mean are here."""
        return not self._absent_mean

    @property
    def absent(self) -> set[int]:
        """Parts of the mean that are not here."""
        return self._absent_mean

    def owners_of_absent(self) -> set[str]:
        """Absent peers that still owe parts of the mean."""
        return {self._owner[part] for part in self._absent_mean} - {self.me}

    def spans(self) -> list[Span]:
        """Present owner of each span of parts."""
        return as_spans(self._owner)

    def own_parts(self) -> list[int]:
        """Parts that are mine to average and are not averaged yet."""
        return [part for part in self._absent if part not in self._averaging]

    def contribution(self, sender: str, part: int, now: float) -> bool:
        """`sender`'s bytes of `part` are here. True when nobody else is waited for."""
        absent = self._absent.get(part)
        if absent is None or sender not in absent or part in self._averaging:
            return False
        self.progress_at_s = now
        absent.remove(sender)
        return self._ready(part)

    def average(self, part: int) -> tuple[str, ...]:
        """Take a part that is ready: from now on it counts whom it counts. Returns whom it does not."""
        self._averaging.add(part)
        omitted = tuple(peer for peer in self._contributors if peer in self._absent[part])
        self._omitted[part] = omitted
        return omitted

    def mean(self, part: int, sender: str, omitted: Sequence[str], now: float) -> bool:
        """`part` of the mean is here, from its owner. True when that was the last one missing."""
        if self._owner.get(part) != sender or part not in self._absent_mean:
            return False
        self.progress_at_s = now
        self._absent_mean.remove(part)
        self._omitted[part] = tuple(omitted)
        return self.complete

    def omitted(self, part: int) -> tuple[str, ...]:
        """Contributors that a part of the mean does not count."""
        return self._omitted.get(part, ())

    def repair(self, repair: Repair, now: float) -> tuple[list[Span], list[int]]:
        """Owners changed, and some contributors are not waited for any more.

        Returns the spans that moved, and the parts of mine that can be averaged because of it.
        """
        self.generation = repair.generation
        self.gone |= frozenset(repair.gone)
        self.progress_at_s = now
        after = _owners(repair.spans)
        moved = {part: owner for part, owner in after.items() if self._owner[part] != owner}
        self._owner = after
        self._absent_mean |= moved.keys()
        self.mean_digest = "" if moved else self.mean_digest
        for part, owner in moved.items():
            self._absent.pop(part, None)
            self._averaging.discard(part)
            if owner == self.me:
                self._absent[part] = set(self._contributors)
        return as_spans(moved), [part for part in self.own_parts() if self._ready(part)]

    def missing(self) -> tuple[str, ...]:
        """Peers whose bytes are missing: contributors to my parts first, then owners of parts of the mean."""
        late = {peer for part in self.own_parts() for peer in self._absent[part]} - self.gone
        if not late:
            late = self.owners_of_absent()
        return tuple(sorted(late - {self.me}))

    def counted(self) -> tuple[tuple[Counted, ...], tuple[Omitted, ...]]:
        """Contributors that the complete mean counts, and the parts in which one of them does not count."""
        parts = len(self._owner)
        without = {peer: [part for part in range(parts) if peer in self.omitted(part)] for peer in self._contributors}
        counted = tuple(entry for entry in self.begin.contributors if len(without[entry.peer]) < parts)
        omitted = (
            Omitted(entry.peer, span.start, span.stop)
            for entry in sorted(counted, key=lambda entry: entry.peer)
            for span in as_spans(dict.fromkeys(without[entry.peer], entry.peer))
        )
        return counted, tuple(omitted)

    def _ready(self, part: int) -> bool:
        return self._absent[part] <= self.gone


def _owners(spans: Sequence[Span]) -> dict[int, str]:
    return {part: span.owner for span in spans for part in range(span.start, span.stop)}


def covers(spans: Sequence[Span], parts: int, owners: Sequence[str]) -> bool:
    """Whether spans cover all parts once, in order, and everybody who owns one may."""
    bounds = [0, *(span.stop for span in spans)]
    return (
        all(span.owner in owners and span.start < span.stop for span in spans)
        and [span.start for span in spans] == bounds[:-1]
        and bounds[-1] == parts
    )


def well_formed(begin: Begin, parts: int, view: Sequence[str]) -> bool:
    """Whether spans cover all parts once, in order, and everybody named may be."""
    contributors = [counted.peer for counted in begin.contributors]
    return (
        len(set(contributors)) == len(contributors) > 0
        and set(contributors) <= set(view) & {member.peer for member in begin.receivers}
        and covers(begin.spans, parts, contributors)
    )
