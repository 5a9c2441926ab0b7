"""Voters grow by learners (rule 8): who has never voted is killed for good, at any moment. Does what is left go on?

Peer 0 founds, the only voter, or a few old ones begin. A voter is proven once it stood on a version that it voted on. A
learner is ripe once it was in the view of the version before. A version commit is accepted by all live voters, or by
the proven ones alone where they are enough. It may drop dead voters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from diloco.protocol import vote
from scripts.models.search import Model

Peers = frozenset[int]


class Grown(NamedTuple):
    """A state of the model."""

    voters: Peers
    proven: Peers
    ripe: Peers
    green: Peers
    """Learners that came after the version before was made."""
    unborn: int
    """Joiners that are still to come."""
    dead: Peers = frozenset()


@dataclass(frozen=True)
class Growth:
    """A case to search. The fields below `mortal_second` leave rules out."""

    joiners: int = 4
    old: int = 1
    drops: bool = True
    """A commit may drop dead voters."""
    mortal_second: bool = False
    """The second voter may be killed before it is proven, which stops the first by design."""
    proven_majority: bool = True
    """No more are named than leave the proven ones the majority."""
    views_name: bool = False
    """View commits name voters, too."""
    all_vote: bool = False
    """A good end is that every live joiner votes; else that is not asked."""

    def model(self) -> Model[Grown]:
        """The model to search."""
        old, none = frozenset(range(self.old)), frozenset[int]()
        start = Grown(old, old, none, none, self.joiners)
        return Model(start, self.steps, self.stopped, self.all_in if self.all_vote else None)

    def steps(self, world: Grown) -> Iterator[tuple[str, Grown, bool]]:
        """Steps that may happen in a state."""
        live = world.voters - world.dead
        if _enough(world, live):
            if world.unborn:
                joiner = self.old + self.joiners - world.unborn
                yield f"p{joiner} joins", world._replace(green=world.green | {joiner}, unborn=world.unborn - 1), False
            for accepted in {live, live & world.proven}:
                if _enough(world, accepted):
                    yield from self._versions(world, accepted)
            for new in sorted((world.ripe | world.green) - world.dead) if self.views_name else ():
                named = world._replace(voters=world.voters | {new}, ripe=world.ripe - {new}, green=world.green - {new})
                yield f"a view commit names p{new}", named, False
        for peer in sorted((world.voters | world.ripe | world.green) - world.dead - world.proven):
            if self.mortal_second or peer not in world.voters or len(world.voters) != 2:
                yield f"p{peer} is killed", world._replace(dead=world.dead | {peer}), True

    def _versions(self, world: Grown, accepted: Peers) -> Iterator[tuple[str, Grown, bool]]:
        live = world.voters - world.dead
        for kept in {world.voters, live} if self.drops else {world.voters}:
            proven = live & world.proven & kept
            most = vote.most_named(len(kept), len(proven)) if self.proven_majority else max(1, len(kept) // 2)
            for count in range(most + 1):
                for new in combinations(sorted(world.ripe - world.dead), count):
                    ripe = (world.ripe | world.green) - set(new)
                    after = Grown(kept | set(new), (world.proven | accepted) & kept, ripe, frozenset(), world.unborn)
                    what = f"a version by {_named(accepted)} names {_named(new)}"
                    yield what, after._replace(dead=world.dead), False

    def stopped(self, world: Grown) -> str:
        """The live voters are no majority."""
        live = world.voters - world.dead
        return "" if _enough(world, live) else f"STOPPED with {len(live)} of {len(world.voters)} voters"

    def all_in(self, world: Grown) -> bool:
        """Whether every joiner that lives votes."""
        return not world.unborn and not (world.ripe | world.green) - world.dead


def _enough(world: Grown, peers: Peers) -> bool:
    return 2 * len(peers) > len(world.voters)


def _named(peers: Peers | tuple[int, ...]) -> str:
    return ", ".join(f"p{peer}" for peer in sorted(peers)) or "nobody"
