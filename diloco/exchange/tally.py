"""What the coordinator of one attempt has heard."""

from __future__ import annotations

import math

from diloco.exchange.messages import Begin, Offer, Ready
from diloco.types import Commit, Counted, Member


class Tally:
    """Promises, offers and votes of one attempt."""

    def __init__(self, attempt: int, now: float) -> None:
        self.attempt = attempt
        self.ready: dict[str, Ready] = {}
        self.first_offer_at_s = now
        self.begin: Begin | None = None
        self.proposal: Commit | None = None
        self.audience: tuple[Member, ...] = ()
        self.accepts: dict[str, set[str]] = {}
        self.majority_at_s = math.inf

    def hear(self, peer: str, ready: Ready, now: float) -> None:
        if not any(known.offer for known in self.ready.values()):
            self.first_offer_at_s = now
        self.ready[peer] = ready

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

    def counted(self, peer: str) -> Counted:
        """The entry of `peer` among the contributors."""
        offer = self.ready[peer].offer
        assert offer is not None
        return self.as_counted(peer, offer)

    @staticmethod
    def as_counted(peer: str, offer: Offer) -> Counted:
        return Counted(peer, offer.base_version, offer.weight, offer.tokens, offer.blocks)
