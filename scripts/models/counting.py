"""Exactly once (rule 9): the offers of one peer in two parts, reductions under way, and a view commit in the middle.

Peer 1 contributes to several versions; of two parts the first is averaged by peer 0, the second by peer 1. What it
trained is a set of batches, for each part those still to be counted. An offer is that set as it was when it was made. A
reduction is whole when both parts are averaged, and a version closes with any whole one; then peer 1 takes out what was
counted. A view commit may come at any time, and after it the seat may begin again. Peer 1 may restart: its progress is
lost, which it reports, and its new boot trains another batch. There are no votes here: those are in `agreement`.

Simpler than production: there are no other contributors, no repairs and no omitted ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from scripts.models.search import Model

Batches = frozenset[int]
Offer = tuple[int, ...]
"""Name of an offer: boot and number; nothing where offers are named by their peer alone."""
Key = tuple[int, int]
"""Name of a reduction: its version, and a number of its own or its attempt."""
NOBODY: Offer = (-1,)
PARTS = 2
MAX_BATCHES = 3


class Part(NamedTuple):
    """A part of a contribution for a reduction, or of its mean."""

    key: Key
    part: int
    offer: Offer
    batches: Batches


class Counting(NamedTuple):
    """A state of the model."""

    version: int
    begins: frozenset[tuple[Key, Offer]]
    begun: int
    """Reductions that were begun for this version."""
    attempt: int
    sent: frozenset[Part]
    means: frozenset[Part]
    closed: frozenset[Part]
    todo: tuple[Batches, ...]
    """Batches of each part that no version counts, as peer 1 knows."""
    offer: tuple[Batches, ...] | None
    number: int
    boot: int
    trained: int
    lost: Batches
    views: int
    """View commits that may still come."""
    crashes: int


@dataclass(frozen=True)
class ExactlyOnce:
    """A case to search. The last three fields leave rules out."""

    versions: int = 2
    begins: int = 2
    """Reductions that may be begun for a version."""
    views: int = 1
    crashes: int = 0
    named_reductions: bool = True
    """A reduction has a name of its own; else it goes by version and attempt, which begins at 0 after a view commit."""
    named_offers: bool = True
    """`Begin` and parts name the very offer; else its peer."""
    kept_offers: bool = True
    """An offer that was sent is made again until the version closes; else until any commit."""

    def model(self) -> Model[Counting]:
        """The model to search."""
        none = frozenset[int]()
        start = Counting(
            0, frozenset(), 0, 0, frozenset(), frozenset(), frozenset(), (frozenset({0}),) * PARTS, None, 0, 0, 1, none,
            self.views, self.crashes,
        )  # fmt: skip
        return Model(start, self.steps, self.miscounted)

    def steps(self, world: Counting) -> Iterator[tuple[str, Counting, bool]]:
        """Steps that may happen in a state."""
        if world.version == self.versions:
            return
        offer = self._name(world)
        if world.offer is None:
            yield f"offer {world.number + 1}", world._replace(offer=world.todo, number=world.number + 1), False
        elif world.begun < self.begins:
            key = (world.version, world.begun if self.named_reductions else world.attempt)
            for who in (NOBODY, offer):
                if (key, who) not in world.begins:
                    begins = world.begins | {(key, who)}
                    begun = world._replace(begins=begins, begun=world.begun + 1, attempt=world.attempt + 1)
                    yield f"reduction {key} begins with {'p1' if who == offer else 'nobody'}", begun, False
        for key, who in world.begins:
            if key[0] == world.version:
                yield from self._reduces(world, key, who, offer)
        if world.views:
            kept = world.offer if self.kept_offers else None
            yield "a view commit", world._replace(views=world.views - 1, attempt=0, offer=kept), False
        if world.trained < MAX_BATCHES:
            todo = tuple(batches | {world.trained} for batches in world.todo)
            yield f"batch {world.trained} is trained", world._replace(todo=todo, trained=world.trained + 1), False
        if world.crashes:
            none, lost = frozenset[int](), frozenset[int]().union(*world.todo)
            back = world._replace(crashes=0, boot=1, number=0, todo=(none,) * PARTS, offer=None, lost=lost)
            yield "p1 restarts", back, True

    def _name(self, world: Counting) -> Offer:
        return (world.boot, world.number) if self.named_offers else ()

    def _reduces(self, world: Counting, key: Key, who: Offer, offer: Offer) -> Iterator[tuple[str, Counting, bool]]:
        for part in range(PARTS):
            mine = Part(key, part, offer, world.offer[part]) if world.offer and who == offer else None
            if mine and mine not in world.sent:
                yield f"p1 sends part {part} for {key}", world._replace(sent=world.sent | {mine}), False
            if any(mean[:2] == (key, part) for mean in world.means):
                continue  # a part is averaged once
            there = {Part(key, part, NOBODY, frozenset())} if who == NOBODY else set(world.sent)
            for one in there:
                if one[:3] == (key, part, who):
                    yield f"part {part} of {key} is averaged", world._replace(means=world.means | {one}), False
        means = sorted((mean for mean in world.means if mean.key == key), key=lambda mean: mean.part)
        if len(means) == PARTS:
            yield f"version {world.version + 1} closes with {key}", self._close(world, means), False

    def _close(self, world: Counting, means: list[Part]) -> Counting:
        none = frozenset[int]()
        out = [mean.batches for mean in means]
        if not self.named_offers:  # it takes out what it offers now
            offered = world.offer or (none,) * PARTS
            out = [none if mean.offer == NOBODY else one for mean, one in zip(means, offered, strict=True)]
        elif means[0].offer[0] != world.boot:
            out = [none] * PARTS  # another boot's offer is not in this one's progress
        todo = tuple(batches - gone for batches, gone in zip(world.todo, out, strict=True))
        closed = world.closed | set(means)
        begun = world._replace(version=world.version + 1, closed=closed, todo=todo, offer=None, begun=0, attempt=0)
        return begun._replace(begins=frozenset(), sent=frozenset(), means=frozenset())

    def miscounted(self, world: Counting) -> str:
        """A batch that is counted twice, counted and still to come, or gone; or a mean of two offers."""
        for part in range(PARTS):
            counted = [batch for mean in world.closed if mean.part == part for batch in mean.batches]
            if len(counted) > len(set(counted)):
                return f"TWICE in part {part}"
            if world.todo[part] & set(counted):
                return f"COUNTED AND STILL TO COME in part {part}"
            if set(range(world.trained)) - set(counted) - world.todo[part] - world.lost:
                return f"TAKEN OUT AND NEVER COUNTED in part {part}"
        for version in range(world.version):
            if len({mean.batches for mean in world.closed if mean.key[0] == version}) > 1:
                return f"PARTS OF TWO OFFERS in version {version + 1}"
        return ""
