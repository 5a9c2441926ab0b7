"""The search over the rules of agreement: each holds in small cases, and a fork or a stop is found without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import vote
from diloco.protocol.vote import Promised, VoteRecord, Voters
from scripts.models.cases import CASES, Case
from scripts.models.main import main
from scripts.models.search import search

BY_NAME = {case.name: case for case in CASES}
slow = pytest.mark.slow(queued=False)
LONG = {"two", "hand-over", "all-leave", "half", "mean-unlogged", "seat-restarts", "three-attempts"}
"""Cases that take seconds."""


def by_length(case: str, *rest: object) -> Any:
    return pytest.param(*rest, marks=slow if case in LONG else ())


@pytest.mark.parametrize("case", [by_length(one.name, one) for one in CASES if one.quick], ids=lambda one: one.name)
def test_a_case_finds_what_it_should(case: Case) -> None:
    found = search(case.model)
    assert found.verdict == case.expected, found


def leads_again(record: VoteRecord, attempt: int) -> VoteRecord | None:
    return replace(record, led=attempt) if attempt >= record.promised else None


def breaks_promises(record: VoteRecord, attempt: int, value: str) -> VoteRecord | None:
    return replace(record, promised=max(attempt, record.promised), attempt=attempt, value=value)


def forgets_its_vote(record: VoteRecord, attempt: int) -> VoteRecord | None:
    return VoteRecord(record.head, attempt, led=record.led) if attempt >= record.promised else None


def takes_any_half(voters: Voters, votes: Mapping[str, int], dead: Collection[tuple[str, int]]) -> bool:
    return 2 * len(votes) >= len(voters.boots)


def takes_a_half_of_any_boots(voters: Voters, votes: Mapping[str, int], dead: Collection[tuple[str, int]]) -> bool:
    gone = {peer for peer, _ in dead}
    return 2 * len(votes) > len(voters.boots) or (
        2 * len(votes) == len(voters.boots) and voters.boots.keys() - votes.keys() <= gone
    )


def the_oldest(promises: Mapping[str, Promised], voters: Voters, dead: Collection[tuple[str, int]] = ()) -> list[str]:
    if not voters.suffice({peer: promise.boot for peer, promise in promises.items()}, dead):
        return []
    values = [(promise.attempt, promise.value) for promise in promises.values() if promise.value]
    return [min(values, default=(0, ""))[1]]


def passes_over(options: Sequence[str], here: Callable[[str], bool]) -> str | None:
    return "" if options else None


def keeps_the_record(record: VoteRecord, head: str) -> VoteRecord:
    return replace(record, head=head)


@pytest.mark.parametrize(
    ("where", "name", "bug", "case", "verdict"),
    [
        by_length("seat-restarts", VoteRecord, "lead", leads_again, "seat-restarts", "BROKEN"),
        by_length("three", VoteRecord, "accept", breaks_promises, "three", "BROKEN"),
        by_length("three-attempts", VoteRecord, "promise", forgets_its_vote, "three-attempts", "BROKEN"),
        by_length("views-first", VoteRecord, "stand", keeps_the_record, "views-first", "STUCK"),
        by_length("two", Voters, "suffice", takes_any_half, "two", "BROKEN"),
        by_length("half", Voters, "suffice", takes_a_half_of_any_boots, "half", "BROKEN"),
        by_length("three-attempts", vote, "choices", the_oldest, "three-attempts", "BROKEN"),
        by_length("three", vote, "choose", passes_over, "three", "BROKEN"),
        by_length("both-leave", vote, "may_go", lambda stand, voters: True, "both-leave", "STUCK"),
        by_length("grows-from-four", vote, "most_named", lambda old, proven: old, "grows-from-four", "BROKEN"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bug_in_the_peers_own_functions_is_found(
    where: object, name: str, bug: object, case: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    found = search(BY_NAME[case].model)
    assert found.verdict == verdict, found
    assert found.broken or found.stuck


def test_the_command_prints_rows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "second-*", "--only", "both-leave", "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert "BROKEN     second-dies: the second voter dies without proof (by design)" in printed
    assert "2 cases; all as expected" in printed
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["found"] for row in rows] == ["holds", "BROKEN"]
    assert rows[1]["story"].endswith("is killed")
    assert main(["--only", "nothing"]) == 2
