"""Wrong behaviour to plant in production code, each of which some invariant of the simulator must notice.

Here, and only here, these tests know names inside of production's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from diloco.accounts import audit, ledger
from diloco.accounts.books import Book, ChainRecord
from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Ledger
from diloco.base.types import Commit, Counted
from diloco.exchange import service
from diloco.exchange.lives import Lives
from diloco.exchange.work import LanePayloads
from diloco.outer import line
from diloco.protocol import messages as m
from diloco.protocol import view
from diloco.protocol.machine import Machine
from diloco.protocol.reduction import Tally
from diloco.protocol.roster import Admission, Roster
from diloco.protocol.view import Electorate
from diloco.run.past import PastRun
from diloco.storage.saving import CheckpointSchedule

Instead = Sequence[tuple[object, str, Any]]
"""Owner, name, and what is there meanwhile."""


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Have production behave wrongly meanwhile."""
    with ExitStack() as undo:
        for owner, name, wrong in BUGS[bug]():
            before = vars(owner)[name]
            undo.callback(setattr, owner, name, before)
            setattr(owner, name, wrong)
        yield


def _no_heirs() -> Instead:
    return [(Electorate, "bequeath", lambda electorate, leavers, heir: None)]


def _no_proofs() -> Instead:
    return [(Electorate, "died", lambda electorate, member: None)]


def _oldest_accepted() -> Instead:
    def oldest(tally: Tally) -> Commit | None:
        accepting = [ready for ready in tally.ready.values() if ready.accepted is not None]
        first = min(accepting, key=lambda ready: ready.accepted_attempt, default=None)
        return first.accepted if first is not None else None

    return [(Tally, "accepted", oldest)]


def _proposes_anew() -> Instead:
    return [(Tally, "accepted", lambda tally: None)]


def _forgets_promise() -> Instead:
    receive = Machine.receive

    def forgetting(machine: Any, envelope: m.Envelope, now: float) -> Any:
        body, promised = envelope.body, machine.attempt
        if not (isinstance(body, m.Propose) and body.attempt < promised and body.version == machine.making):
            return receive(machine, envelope, now)
        machine._acceptor.attempt = body.attempt
        try:
            return receive(machine, envelope, now)
        finally:
            if machine.making == body.version:
                machine._acceptor.attempt = max(promised, machine.attempt)

    return [(Machine, "receive", forgetting)]


def _believes_suspicion() -> Instead:
    return [(Lives, "proven", lambda lives, member: True)]


def _half_is_enough() -> Instead:
    return [(view, "votes_needed", lambda members, gone: max(members // 2, 1))]


def _accepts_unseen() -> Instead:
    receive = Machine.receive

    def believing(machine: Any, envelope: m.Envelope, now: float) -> Any:
        if isinstance(envelope.body, m.Propose):
            machine._contributor._held.append(envelope.body.commit.mean_digest)
        return receive(machine, envelope, now)

    return [(Machine, "receive", believing)]


def _books_twice() -> Instead:
    committed = Journal.committed

    def twice(journal: Journal, commit: Commit, mine: Counted | None) -> None:
        committed(journal, commit, replace(mine, tokens=2 * mine.tokens) if mine else None)

    return [(Journal, "committed", twice)]


def _books_nothing_copied() -> Instead:
    return [(Journal, "adopted", lambda journal, mine, discarded: None)]


def _writes_no_copies() -> Instead:
    return [(Ledger, "adopted", lambda ledger, position, counted, discarded, totals: None)]


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
    return [(m.Resync, "__init__", _void_init)]


def _void_init(effect: m.Resync, source: Any, discarded_tokens: int) -> None:
    object.__setattr__(effect, "source", source)
    object.__setattr__(effect, "discarded_tokens", 0)


def _hears_twice() -> Instead:
    return [(Admission, "replayed", lambda admission, envelope: False)]


def _forgives() -> Instead:
    return [(Roster, "offended", lambda roster, peer: None)]


def _leaves_out_uncounted() -> Instead:
    fold = LanePayloads.fold

    def of_fewer(work: LanePayloads, part: int, omitted: Sequence[str]) -> tuple[bytes, bytes]:
        others = [entry.peer for entry in work.begin.contributors if entry.peer not in omitted]
        return fold(work, part, (*omitted, *others[1:]))

    return [(LanePayloads, "fold", of_fewer)]


def _forgets_residual() -> Instead:
    left_over = line.left_over

    def nothing(*given: Any) -> torch.Tensor:
        return left_over(*given).zero_()

    return [(line, "left_over", nothing)]


def _tells_no_votes() -> Instead:
    status_json = service.status_json

    def silent(*given: Any) -> str:
        return status_json(*given).replace('"votes_missing": [', '"votes_missing": [], "was": [')

    return [(service, "status_json", silent)]


BUGS: Mapping[str, Callable[[], Instead]] = {
    name.lstrip("_").replace("_", "-"): bug
    for name, bug in list(globals().items())
    if callable(bug) and getattr(bug, "__annotations__", {}).get("return") == "Instead"
}
