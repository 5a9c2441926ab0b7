"""Wrong behaviour to plant in production code, each of which some invariant of the simulator must notice.

More than the bugs of `diloco.simulate.virtual.planted`, which seeds find: these need a plan that shows them.

Here, and only here, these tests know names inside of production's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from diloco.accounts import audit, ledger
from diloco.accounts.books import Book, ChainRecord
from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Ledger
from diloco.base.errors import EvictedError, StateError
from diloco.base.life import Life
from diloco.base.types import Commit, Counted
from diloco.exchange import service
from diloco.exchange.lives import Lives
from diloco.exchange.work import LanePayloads
from diloco.peer.peer import Peer
from diloco.peer.waits import Refusal
from diloco.protocol import coordinator, vote
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.membership import Membership
from diloco.protocol.view import Electorate
from diloco.protocol.vote import Promised, Voters
from diloco.run.past import PastRun
from diloco.simulate.virtual.planted import plant
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.saving import CheckpointSchedule

Instead = Sequence[tuple[object, str, Any]]
"""Owner, name, and what is there meanwhile."""


@contextmanager
def behaving_wrongly(bug: str) -> Iterator[None]:
    """Have production behave wrongly meanwhile: by one of these bugs, or of the simulator's own."""
    with ExitStack() as undo:
        if bug not in BUGS:
            undo.enter_context(plant(bug))
            yield
            return
        for owner, name, wrong in BUGS[bug]():
            before = vars(owner)[name]
            undo.callback(setattr, owner, name, before)
            setattr(owner, name, wrong)
        yield


def _no_proofs() -> Instead:
    return [(Electorate, "died", lambda electorate, member, boot: None)]


def _oldest_accepted() -> Instead:
    def oldest(promises: Mapping[str, Promised], voters: Voters, dead: Collection[tuple[str, int]]) -> list[str]:
        accepting = [promise for promise in promises.values() if promise.value]
        first = min(accepting, key=lambda promise: promise.attempt, default=None)
        found = choices(promises, voters, dead)
        return [first.value for _ in found] if first is not None else found

    choices = vote.choices
    return [(coordinator, "choices", oldest)]


def _believes_suspicion() -> Instead:
    return [(Lives, "proven", lambda lives, member: 2**62)]


def _half_is_enough() -> Instead:
    return [(Voters, "suffice", lambda voters, votes, dead: 2 * len(votes) >= len(voters.boots))]


def _books_twice() -> Instead:
    committed = Journal.committed

    def twice(journal: Journal, commit: Commit, mine: Counted | None, state_digest: str = "") -> None:
        committed(journal, commit, replace(mine, tokens=2 * mine.tokens) if mine else None, state_digest)

    return [(Journal, "committed", twice)]


def _books_nothing_copied() -> Instead:
    return [(Journal, "adopted", lambda journal, *booked: None)]


def _writes_no_copies() -> Instead:
    return [(Ledger, "adopted", lambda ledger, *booked: None)]


def _opens_no_life() -> Instead:
    return [(Ledger, "opened", lambda ledger, opening, contract, position, totals: None)]


def _refuses_good_records() -> Instead:
    def refusing(record: ledger.Record) -> None:
        raise ValueError("it is refused")

    return [(ledger, "check_record", refusing)]


def _accuses_for_the_absent() -> Instead:
    def accusing(books: Sequence[Book], chain: ChainRecord) -> Iterator[audit.Finding]:
        founded = {life.opening["lineage"] for book in books for life in book.lives if life.opening["founds"]}
        for commit in chain.commits.values():
            if commit.lineage not in founded:
                yield audit.Finding("I8", "", commit.version, 0, f"nobody here founded {commit.lineage}")

    return [(audit, "_lineage_findings", accusing)]


def _knows_one_beginning() -> Instead:
    roots = ChainRecord.roots
    return [(ChainRecord, "roots", lambda chain: roots(chain)[:1])]


def _drops_unbooked() -> Instead:
    return [(Journal, "discarded", lambda journal, tokens, reason: None)]


def _saves_nothing() -> Instead:
    return [(CheckpointSchedule, "due", lambda schedule, version: None)]


def _resumes_from_nothing() -> Instead:
    return [(PastRun, "checkpoint", lambda past: None)]


def _voids_nothing() -> Instead:
    return [(fx.Resync, "__init__", _void_init)]


def _void_init(effect: fx.Resync, source: Any, discarded_tokens: int) -> None:
    object.__setattr__(effect, "source", source)
    object.__setattr__(effect, "discarded_tokens", 0)


def _leaves_out_uncounted() -> Instead:
    fold = LanePayloads.fold

    def of_fewer(work: LanePayloads, part: int, omitted: Sequence[str]) -> tuple[bytes, bytes]:
        others = [entry.peer for entry in work.begin.contributors if entry.peer not in omitted]
        return fold(work, part, (*omitted, *others[1:]))

    return [(LanePayloads, "fold", of_fewer)]


def _tells_no_votes() -> Instead:
    status_json = service.status_json

    def silent(*given: Any) -> str:
        return status_json(*given).replace('"votes_missing": [', '"votes_missing": [], "was": [')

    return [(service, "status_json", silent)]


def _cuts_ledger_short() -> Instead:
    scan = ledger.scan

    def shorter(data: bytes) -> Any:
        lines = data.splitlines(keepends=True)
        return scan(b"".join(lines[:2])) if len(lines) > 2 else scan(data)

    def opening(self: Ledger, file: Any, warn: Any) -> None:
        ledger.scan = shorter
        try:
            begin(self, file, warn)
            file.truncate(self._bytes)
        finally:
            ledger.scan = scan

    begin = Ledger.__init__
    return [(Ledger, "__init__", opening)]


def _founds_with_majority() -> Instead:
    def lonely(membership: Membership) -> str:
        return "somebody is missing"

    return [(Membership, "no_majority", lonely)]


def _ends_when_refused() -> Instead:
    def hasty(refusal: Refusal) -> None:
        if any(reply is m.Reply.FENCED for reply, _ in refusal._exchange.lives._replies.values()):
            raise EvictedError("the run has a live peer named as this one", "")

    return [(Refusal, "check", hasty)]


def _copies_once_in_vain() -> Instead:
    copy_state, failures = Peer.copy_state, iter([StateError("none of 2 members offers a state that fits")])

    def failing(peer: Peer, *given: Any) -> Life[None]:
        for failure in failures:
            raise failure
        yield from copy_state(peer, *given)

    return [(Peer, "copy_state", failing)]


def _reads_no_checkpoint() -> Instead:
    checkpoint, failures = PastRun.checkpoint, iter([StateError("no valid checkpoint in the folder")])

    def failing(past: PastRun) -> Checkpoint | None:
        for failure in failures:
            raise failure
        return checkpoint(past)

    return [(PastRun, "checkpoint", failing)]


BUGS: Mapping[str, Callable[[], Instead]] = {
    name.lstrip("_").replace("_", "-"): bug
    for name, bug in list(globals().items())
    if callable(bug) and getattr(bug, "__annotations__", {}).get("return") == "Instead"
}
