"""The search over the rules of agreement: they hold in small cases, and a clause left out forks or stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from diloco.base.types import Commit
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.view import Timing
from diloco.protocol.vote import Restored, VoteRecord
from scripts.models.agreement import Agreement
from scripts.models.cases import CASES, Case
from scripts.models.main import main
from tests.test_machine import RULES, A, B, OnPaper, following, sends, standing

slow = pytest.mark.slow(queued=False)
LONG = {
    "two",
    "lead-unsynced",
    "hand-over",
    "all-leave",
    "half-any-death",
    "witness-early",
    "mean-unlogged",
    "disk-lost",
}
"""Cases that take seconds."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=slow if one.name in LONG else ()) for one in CASES if one.quick],
    ids=lambda one: one.name,
)
def test_a_case_finds_what_it_should(case: Case) -> None:
    found = case.search()
    assert case.verdict(found) == case.expected, found


def test_a_case_that_holds_over_few_states_proves_nothing() -> None:
    case = next(one for one in CASES if one.name == "grows-all")
    found = case.search()
    assert (case.verdict(found), replace(case, least=1000).verdict(found)) == ("holds", "vacuous")


def test_the_command_prints_rows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "second-*", "--only", "both-leave", "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert "BROKEN     second-dies: the second voter dies without proof (by design)" in printed
    assert "2 cases; all as expected" in printed
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["found"] for row in rows] == ["holds", "BROKEN"]
    assert rows[1]["story"].endswith("is killed")
    assert main(["--only", "nothing"]) == 2


class OfTheModel:
    """The machine of a in the place of a voter of the model that leads nothing, with b and c as the seats."""

    def __init__(self) -> None:
        self.machine = standing(7, seat=B)
        head = self.machine.commit
        assert head is not None
        self.head, self.saved = head, fx.Save(1, A.incarnation, VoteRecord(head.digest), None, head)

    def restart(self) -> None:
        """Go on with what the disk has."""
        one = self.saved
        restored = Restored(one.life, one.number, one.record, one.accepted, self.head)
        self.machine = OnPaper(A, RULES, Timing(0.5, 4.0, 4.0), restored)
        self.machine.handle(m.StateHeld(7, "state", self.head), 0.0)

    def commit(self, value: str) -> Commit | None:
        """The commit in place of a value of the model."""
        return following(self.head, value) if value else None

    def hear(self, body: m.Gather | m.Propose) -> list[m.Body]:
        """Promises and votes in answer to the seat of an attempt."""
        seat = self.machine._acceptor.seat(body.attempt)
        effects = self.machine.hear(seat, body, 0.1)
        self.saved = next((one for one in reversed(effects) if isinstance(one, fx.Save)), self.saved)
        return [said for kind in (m.Ready, m.Accept) for to, said in sends(effects, kind) if to == seat]

    def proposed(self, attempt: int, value: str) -> list[m.Body]:
        """The same, with the mean here."""
        commit = following(self.head, value)
        self.machine.handle(m.MeanHeld(value), 0.1)
        return self.hear(m.Propose(7, attempt, commit))


@pytest.mark.parametrize("seed", range(100))
def test_a_peer_says_step_by_step_what_the_voter_of_the_model_says(seed: int) -> None:
    """Random stories of three voters. The third is a peer's machine: it promises, votes, refuses, dies and restarts."""
    model, dice, peer = Agreement(attempts=8, crashes=4, mortal=(2,)).model(), Random(seed), OfTheModel()
    world, left_out = model.start, ("p2 gathers", "p2 proposes", "p0 decides", "p1 decides")
    while steps := [step for step in model.steps(world) if not step[0].startswith(left_out)]:
        verb = dice.choice(sorted({what.split()[1] for what, _, _ in steps}))
        what, after, _ = dice.choice([step for step in steps if step[0].split()[1] == verb])
        old, new = world.peers[2].record, after.peers[2].record
        if what == "p2 restarts":
            peer.restart()
        elif "gathers" in what and "p2" in what:
            ready = m.Ready(7, new.promised, None, "state", old.attempt, peer.commit(old.value))
            assert peer.hear(m.Gather(7, new.promised, "again")) == [ready], what
        elif what.startswith("p2 votes"):
            accept = m.Accept(7, new.attempt, following(peer.head, new.value).digest)
            assert peer.proposed(new.attempt, new.value) == [accept], what
        record = peer.saved.record
        assert (record.promised, record.attempt) == (new.promised, new.attempt), what
        for late in after.proposals if after.peers[2].up else ():
            if new.accept(late.attempt, late.value) is None:
                assert peer.proposed(late.attempt, late.value) == [], late
        world = after
