"""The voters on the next version, the number of votes that decides, and proxies: members that vote for others.

Votes belong to the members of the latest commit's view. A vote is lost when its member is dead for certain (`died`)
or an operator says so (`evict`), and handed on when it leaves in good order (`bequeath`). Suspicion takes nothing away.
What is said is said of one life of a peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from diloco.base.types import Member
from diloco.protocol.view import votes_needed

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
