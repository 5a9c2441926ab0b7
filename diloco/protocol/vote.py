"""The vote on the successor of one head, as pure functions on what a voter keeps on its disk.

A *head* is a commit on which peers stand, named by its digest. Its successor is decided by single-decree Paxos among
the voters that it names: the attempt is the ballot, and its seat the only one that may propose in it. Attempts,
promises and accepted values begin anew with each head, and what was accepted under another has no force (rules 1, 3,
4, 6 and 7 of `docs/how/protocol.md`). The peers' roles and the search of `scripts/model-check` call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from diloco.base.types import Commit


@dataclass(frozen=True, slots=True)
class VoteRecord:
    """Record of what binds a voter in the vote on the successor of `head`. It is on the voter's disk before anything
    is said that follows from it, and before the voter's own vote counts."""

    head: str
    """Digest of the commit."""
    promised: int = 0
    """Nothing of an earlier attempt is accepted any more."""
    attempt: int = -1
    """The latest attempt in which a value was accepted; -1: none was."""
    value: str = ""
    """Digest of the commit accepted then."""
    led: int = -1
    """The latest attempt that this voter led: after a restart it leads only later ones, for it may have proposed."""

    def promise(self, attempt: int) -> VoteRecord | None:
        """The record with a promise to accept nothing of an earlier attempt. None: it is bound to a later one."""
        return replace(self, promised=attempt) if attempt >= self.promised else None

    def lead(self, attempt: int) -> VoteRecord | None:
        """The record of who leads this attempt. None: it led it before, or a later one, or promised a later one."""
        return replace(self, led=attempt) if attempt > self.led and attempt >= self.promised else None

    def accept(self, attempt: int, value: str) -> VoteRecord | None:
        """The record with a vote. None: a later attempt was promised, or the attempt has another value here."""
        if attempt < self.promised or (attempt == self.attempt and value != self.value):
            return None
        return replace(self, promised=attempt, attempt=attempt, value=value)

    def stand(self, head: str) -> VoteRecord:
        """The record of a voter that stands on another head: nothing of this one binds it."""
        return self if head == self.head else VoteRecord(head)


@dataclass(frozen=True, slots=True)
class Restored:
    """Record of a voter's life on its disk, when a process goes on with it."""

    life: int
    """Incarnation of the life."""
    saved: int
    """Number of the last `Save`."""
    record: VoteRecord
    accepted: Commit | None
    head: Commit
    """The commit on which it stood, whose successor the record is about."""


@dataclass(frozen=True, slots=True)
class Promised:
    """A voter's promise as the seat of an attempt got it: with what was accepted before."""

    boot: int
    """Boot of the voter's life that gave it."""
    attempt: int = -1
    value: str = ""


@dataclass(frozen=True, slots=True)
class Voters:
    """The voters that a head names, each with the boot of its life that the drafter of the head knew."""

    boots: Mapping[str, int]

    def suffice(self, votes: Mapping[str, int], dead: Collection[tuple[str, int]]) -> bool:
        """Whether these votes, by name with their boots, are enough to decide.

        More than half of the voters; or half of an even number where each of the others is `dead` by proof, in the boot
        that the head names or a later one, and each vote is of the very boot that the head names. A later boot may have
        promised what the proof knows nothing of, and the voters of the other half may come back: weaker forms fork.
        """
        voters = self.boots
        votes = {peer: boot for peer, boot in votes.items() if peer in voters}
        if 2 * len(votes) > len(voters):
            return True
        others = voters.keys() - votes.keys()
        gone = {peer for peer, boot in dead if boot >= voters.get(peer, boot + 1)}
        return 2 * len(votes) == len(voters) and others <= gone and all(voters[one] == votes[one] for one in votes)


def choices(promises: Mapping[str, Promised], voters: Voters, dead: Collection[tuple[str, int]] = ()) -> list[str]:
    """Values that the seat of an attempt above 0 may propose, one for each majority among its promises: what was
    accepted latest there; empty: that majority accepted nothing, and any value will do. There are none while the
    promises are no majority.

    A seat may choose among majorities: a value that was decided in an earlier attempt is the latest in each.
    """
    found: list[str] = []
    for attempt in sorted({promise.attempt for promise in promises.values()}):
        within = {peer: promise for peer, promise in promises.items() if promise.attempt <= attempt}
        if voters.suffice({peer: promise.boot for peer, promise in within.items()}, dead):
            found.append(next(promise.value for promise in within.values() if promise.attempt == attempt))
    return found


def choose(options: list[str], here: Callable[[str], bool]) -> str | None:
    """The value to propose of those in `choices`: none forced (empty), else one whose mean is `here` or can be had,
    else the first. None: there is no majority of promises."""
    return next((value for value in options if not value or here(value)), options[0] if options else None)


V = TypeVar("V")


def seat(voters: Sequence[V], attempt: int, drafter: V | None, digest: str) -> V:
    """The voter that may propose in this attempt, of those that train: each attempt has another one. Attempts count on
    from the `drafter` of a view commit, which knows of the reduction under way; else from one by hash of the head's
    `digest`."""
    first = voters.index(drafter) if drafter is not None and drafter in voters else int(digest[:16], 16)
    return voters[(first + attempt) % len(voters)]


def may_go(stand: Collection[str], voters: Collection[str]) -> bool:
    """Whether a leaver may go: more than half of the voters that the commit without it names `stand` on that commit, or
    have left.

    That it was decided is not enough: the vote that decided may have been the leaver's own, and die with it. Who has
    left votes no more: where those that stand die too, most are gone, and the leaver's vote would help nobody.
    """
    return 2 * len(set(stand) & set(voters)) > len(voters)


def most_named(old: int, proven: int) -> int:
    """The most learners that a version commit may name as voters beside `old` ones that it keeps, of which so many are
    `proven`: voters for the version before that say that they stand on it.

    The proven stay the majority, so that the others may all die before they have ever voted. The one exception is the
    second voter: from then on the death of either without proof stops the other.
    """
    most = max(1, old // 2)
    return next((new for new in range(most, 0, -1) if 2 * proven > old + new or old == new == 1), 0)
