"""Simulated peers of several ranks: islands hold, a run is the same twice, and what lanes do wrong is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco.exchange.lane import Lane
from diloco.simulate.virtual.plans.draw import RANKS, draw
from diloco.simulate.virtual.plans.plan import Fault, FaultPlan, parse
from diloco.simulate.virtual.search import kind_of, shrink, world_of
from diloco.simulate.virtual.world import Outcome

pytestmark = pytest.mark.no_cover  # which makes a simulation nearly twice as slow

FAULTS = (
    Fault(2.0, "ranks", "p0", 2.0, "late 0.3"),
    Fault(3.0, "ranks", "p2", 0.0, "broken"),
    Fault(4.5, "kill", "p0"),
    Fault(6.0, "restart", "p0", 0.0, "disk"),
)
ISLANDS = FaultPlan(ranks="2+1+3", fragments=2, calm_s=3.0, faults=FAULTS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def simulated(plan: FaultPlan) -> Outcome:
    return world_of(plan, record=True).run()


def test_islands_whose_lanes_are_late_and_break_make_versions_with_others_and_come_back() -> None:
    outcome = simulated(ISLANDS)
    assert not outcome.violation
    assert outcome.versions > 3
    assert outcome.faults["ranks"] == 2
    again = simulated(ISLANDS)
    assert (again.lines, again.events) == (outcome.lines, outcome.events)


def test_some_drawn_plans_have_islands_and_they_hold() -> None:
    drawn = [plan for plan in map(draw, range(60)) if plan.ranks]
    assert 2 <= len(drawn) <= 15
    assert {plan.ranks for plan in drawn} <= set(RANKS)
    assert not simulated(drawn[0]).violation


def test_the_ranks_of_a_plan_are_written_and_read_and_older_plans_have_one_each() -> None:
    assert parse(str(ISLANDS)) == ISLANDS
    assert [ISLANDS.ranks_of(name) for name in ("p0", "p1", "p2", "p3", "j7")] == [2, 1, 3, 2, 1]
    assert parse("peers 3").ranks_of("p0") == 1
    assert replace(ISLANDS, faults=(Fault(1.0, "lie", "p0", 1.0, "long"),)).ranks_of("p0") == 1


def test_a_copy_that_does_not_reach_all_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Lane.fill

    def lose(lane: Lane, buffer: str, part: int, data: bytes) -> None:
        if part != 1:
            fill(lane, buffer, part, data)

    monkeypatch.setattr(Lane, "fill", lose)
    faults = (Fault(3.0, "kill", "p1"), Fault(4.0, "restart", "p1", 0.0, "blank"))
    assert kind_of(FaultPlan(ranks="2", faults=faults)) in ("I1", "I7")


def test_a_lane_that_seals_another_mean_is_noticed_and_the_plan_stays_one_of_islands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_mean = Lane.keep_mean

    def lose(lane: Lane, digest: str, parts: list[bytes]) -> None:
        held = lane.terms.layout.fragments[0]
        keep_mean(lane, digest, [b"" for _ in parts] if held.lane else parts)

    monkeypatch.setattr(Lane, "keep_mean", lose)
    shortest = shrink(replace(ISLANDS, faults=FAULTS[:1]))
    assert shortest.ranks
    assert not shortest.faults
