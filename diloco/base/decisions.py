"""Decisions of rank 0 for all ranks of an island: one small frozen class for each.

A meeting is a sequence of decisions that ends with `Train`. Rank 0 broadcasts each, and every rank does it to its own
part (`diloco.peer.rank`). They travel as JSON between processes of one island.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True)
class Decision:
    """A decision for all ranks: something to do, or, at the end of a meeting, `Train`. Every subclass is a frozen
    dataclass."""

    kinds: ClassVar[dict[str, type[Decision]]] = {}

    def __init_subclass__(cls) -> None:
        Decision.kinds[cls.__name__] = dataclass(frozen=True)(cls)

    def to_json(self) -> str:
        """A decision value of any kind as a JSON text."""
        return json.dumps([type(self).__name__, vars(self)])

    @staticmethod
    def from_json(text: str) -> Decision:
        """Parse a decision value of any kind that `to_json` wrote."""
        kind, fields = json.loads(text)
        # JSON knows lists only; all sequences of decisions are tuples.
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return Decision.kinds[kind](**values)


class Train(Decision):
    """Go on training, and meet again after so many inner steps. What a caller may ask of a run changes only here."""

    steps: int
    version: int = 0
    tokens: int = 0
    """Committed by all peers; under gossip trained, as far as is known."""
    uncommitted: int = 0
    """Trained here since a commit counted this peer last."""
    trainers: int = 1
    peers: tuple[str, ...] = ()
    first: bool = False
    """Whether the peer is the first of those that train."""
    digest: str = ""
    entered: bool = False
    """Whether the peer is in the view."""
    done: bool = False
    """Whether the run has all its tokens, and this peer its last version."""
    leaving: bool = False
    """Whether the peer was asked to leave: nothing more is to be trained."""
    spread: float | None = None


class Meet(Decision):
    """Open a lane, and connect it to rank 0 at HOST:PORT with this key. `toward`: a member's address. `folder`: where
    the rank logs its means; empty: nowhere. `private`: whether the run has a secret, which the rank finds itself."""

    host: str
    port: int
    key: str
    name: str
    toward: str | None
    folder: str
    private: bool


class Measure(Decision):
    """Pseudo-gradient of a fragment, and compress. `overlaps`: inner steps follow while it is on its way."""

    fragment: int
    staleness: float
    trainers: int
    overlaps: bool


class KeepLocal(Decision):
    """Inner steps follow while a contribution is on its way."""


class Withdraw(Decision):
    """The contribution comes to nothing: it is progress again."""


class Apply(Decision):
    """Average, outer step and merge of a version. `counted`: it counts this peer; `in_place`: into the state before."""

    commit: str
    counted: bool
    in_place: bool


class Adopt(Decision):
    """Stand at a state that was copied. `steps`: outer steps by fragment; `stays`: what was sent stays sent."""

    version: int
    steps: tuple[int, ...]
    stays: bool


class Rehash(Decision):
    """Hash the outer state anew, as it is in memory now."""


class Drop(Decision):
    """Back to the anchor."""


class Restore(Decision):
    """Go on from the checkpoint in this folder, with this digest."""

    path: str
    digest: str


class Redo(Decision):
    """Apply a version again, whose mean each rank has in a log below this folder. `drops`: without its progress, which
    may be what the version counts."""

    commit: str
    folder: str
    name: str
    drops: bool


class SaveCheckpoint(Decision):
    """Begin a checkpoint. `local`: with the local weights."""

    local: bool


class Publish(Decision):
    """Tell the subscribers of this event, a line of `events.jsonl`."""

    event: str


class Evaluate(Decision):
    """Held-out loss of the anchor, at the end of a life."""


class GatherWeights(Decision):
    """Give rank 0 your shares of a fragment's weights."""

    fragment: int


class TakeWeights(Decision):
    """Take your shares of a fragment's weights from rank 0."""

    fragment: int


class Idle(Decision):
    """Rank 0 waits for the world and lives."""


class Fail(Decision):
    """Rank 0 has failed."""

    why: str
