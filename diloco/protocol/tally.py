"""Messages that the coordinator of one attempt has received."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco.base.types import Commit, Counted, Member
from diloco.protocol.messages import Begin, Offer, Ready, Repair


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
