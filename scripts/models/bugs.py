"""Bugs to plant in the peers' own functions of the vote: each leaves a clause out of `diloco/protocol/vote.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from diloco.protocol import vote
from diloco.protocol.vote import Promised, VoteRecord, Voters

Deaths = Collection[tuple[str, int]]


class Bug(NamedTuple):
    """A function in place of one of the peers'."""

    owner: object
    """Class or module that has the function."""
    name: str
    planted: Callable[..., object]


def _leads_again(record: VoteRecord, attempt: int) -> VoteRecord | None:
    return replace(record, led=attempt) if attempt >= record.promised else None


def _accepts_another(record: VoteRecord, attempt: int, value: str) -> VoteRecord | None:
    return replace(record, promised=attempt, attempt=attempt, value=value) if attempt >= record.promised else None


def _breaks_promises(record: VoteRecord, attempt: int, value: str) -> VoteRecord | None:
    return replace(record, promised=max(attempt, record.promised), attempt=attempt, value=value)


def _forgets_its_vote(record: VoteRecord, attempt: int) -> VoteRecord | None:
    return VoteRecord(record.head, attempt, led=record.led) if attempt >= record.promised else None


def _keeps_the_record(record: VoteRecord, head: str) -> VoteRecord:
    return replace(record, head=head)


def _takes_any_half(voters: Voters, votes: Mapping[str, int], dead: Deaths) -> bool:
    return 2 * len(votes) >= len(voters.boots)


def _takes_any_boot(voters: Voters, votes: Mapping[str, int], dead: Deaths) -> bool:
    gone = {peer for peer, boot in dead if boot >= voters.boots.get(peer, boot + 1)}
    return _of_the_dead(voters, votes, gone)


def _takes_any_death(voters: Voters, votes: Mapping[str, int], dead: Deaths) -> bool:
    named = all(voters.boots[peer] == boot for peer, boot in votes.items())
    return _of_the_dead(voters, votes, {peer for peer, _ in dead} if named else set())


def _of_the_dead(voters: Voters, votes: Mapping[str, int], gone: Collection[str]) -> bool:
    double, others = 2 * len(votes), voters.boots.keys() - votes.keys()
    return double > len(voters.boots) or (double == len(voters.boots) and all(peer in gone for peer in others))


def _takes_the_oldest(promises: Mapping[str, Promised], voters: Voters, dead: Deaths = ()) -> list[str]:
    if not voters.suffice({peer: promise.boot for peer, promise in promises.items()}, dead):
        return []
    values = [(promise.attempt, promise.value) for promise in promises.values() if promise.value]
    return [min(values, default=(0, ""))[1]]


def _passes_over(options: Sequence[str], here: Callable[[str], bool]) -> str | None:
    return "" if options else None


LEADS_AGAIN = Bug(VoteRecord, "lead", _leads_again)
ACCEPTS_ANOTHER = Bug(VoteRecord, "accept", _accepts_another)
BREAKS_PROMISES = Bug(VoteRecord, "accept", _breaks_promises)
FORGETS_ITS_VOTE = Bug(VoteRecord, "promise", _forgets_its_vote)
KEEPS_THE_RECORD = Bug(VoteRecord, "stand", _keeps_the_record)
TAKES_ANY_HALF = Bug(Voters, "suffice", _takes_any_half)
TAKES_ANY_BOOT = Bug(Voters, "suffice", _takes_any_boot)
TAKES_ANY_DEATH = Bug(Voters, "suffice", _takes_any_death)
TAKES_THE_OLDEST = Bug(vote, "choices", _takes_the_oldest)
PASSES_OVER = Bug(vote, "choose", _passes_over)
GOES_AT_ONCE = Bug(vote, "may_go", lambda stand, voters: True)
NAMES_ALL = Bug(vote, "most_named", lambda old, proven: old)
