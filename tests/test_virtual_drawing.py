"""Plans of simulations as they are drawn from seeds: what is in them, how often, and when it comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco.base.errors import UsageError
from diloco.simulate.virtual.plans.draw import MIN_BEFORE_S, OTHER_CODECS, draw
from diloco.simulate.virtual.plans.plan import FLIPPED, IN_CHECKPOINT, IN_RECORD, NO_CLOCK, OMITS, Fault
from diloco.simulate.virtual.search import SeedOptions

HOW = (IN_CHECKPOINT, IN_RECORD, FLIPPED, "old")
"""Faults of a disk at a death or a start."""


def test_async_seeds_have_peers_of_different_speeds() -> None:
    plans = [draw(seed, "async") for seed in range(200)]
    speeds = [plan.speed(index) for plan in plans for index in range(plan.peers)]
    assert all(0.1 <= speed <= 1 for speed in speeds)
    assert min(speeds) < 0.11
    assert max(speeds) > 0.95
    assert {plan.sized_by for plan in plans} == {"contract", "speed"}
    assert {"delayed_nesterov", "buffered_nesterov"} <= {plan.optimizer for plan in plans}


def test_speeds_change_nothing_else_of_a_seed() -> None:
    pairs = [(draw(seed), draw(seed, speeds=(0.2, 0.5))) for seed in range(50)]
    pairs = [(one, other) for one, other in pairs if not one.speeds and one.policy != "gossip"]
    pairs = [(one, other) for one, other in pairs if one.round_s == other.round_s]  # situations
    assert len(pairs) > 25
    for plan, with_speeds in pairs:
        assert all(0.2 <= with_speeds.speed(index) <= 0.5 for index in range(plan.peers))
        assert replace(with_speeds, speeds="", sized_by="contract") == plan


def test_stragglers_are_cut_where_peers_differ_in_speed() -> None:
    plans = [draw(seed) for seed in range(200)]
    cut = [plan for plan in plans if plan.stragglers == "cut"]
    assert len(cut) > 10
    assert all(plan.speeds and plan.policy in ("sync", "quorum") for plan in cut)


def test_seeds_without_a_policy_have_all() -> None:
    policies = Counter(draw(seed).policy for seed in range(400))
    assert policies.keys() == {"sync", "quorum", "async", "gossip"}
    assert min(policies.values()) > 8


def test_every_fault_of_a_machine_is_in_some_plans_in_a_hundred() -> None:
    plans = [draw(seed) for seed in range(1000)]
    seen = Counter(what for plan in plans for what in {_what(fault) for fault in plan.faults})
    wanted = {"tunnel", "flip", "full", "second", "one way", "disk late", "disk broken", "disk lies", "power"}
    wanted |= {IN_CHECKPOINT, IN_RECORD, FLIPPED, "old"}
    assert {what: seen[what] for what in wanted if seen[what] < 30} == {}


def _what(fault: Fault) -> str:
    """A fault by the name that it has in the issue of what machines do."""
    how = fault.how.split()[0].strip(",") if fault.how else ""
    if fault.kind in ("cut", "link") and how in ("in", "out"):
        return "one way"
    return f"disk {how}" if fault.kind == "disk" else fault.how if fault.how in HOW else fault.kind


def test_a_situation_comes_late_and_the_run_is_well_before_it() -> None:
    """Whatever dies before it is started again."""
    for seed in range(300):
        plan = draw(seed)
        duel = next((fault.at_s for fault in plan.faults if fault.kind == "duel"), 0.0)
        before = [fault for fault in plan.faults if fault.at_s < duel]
        died = {fault.peer for fault in before if fault.kind in ("kill", "power")}
        assert died <= {fault.peer for fault in before if fault.kind == "restart"}
        assert not duel or duel > MIN_BEFORE_S


def test_what_is_rare_is_in_some_plans() -> None:
    plans = [draw(seed) for seed in range(400)]
    assert {fault.kind for plan in plans for fault in plan.faults} >= {"link", "late", "twin", "evict"}
    assert any(fault.how for plan in plans for fault in plan.faults if fault.kind == "leave")
    assert {plan.codec for plan in plans} >= set(OTHER_CODECS)
    assert {plan.fixed_addresses for plan in plans} == {True, False}
    assert max(plan.most_peers for plan in plans) > 2
    assert any(plan.radial for plan in plans)
    assert {plan.aggregation for plan in plans} == {"mean", "clip", "centred", "trimmed", "median"}
    assert any(fault.kind == "stranger" for plan in plans for fault in plan.faults)
    assert {fault.how for plan in plans for fault in plan.faults} >= {OMITS, NO_CLOCK}


def test_choice_restricts_what_is_drawn() -> None:
    plans = [draw(seed, "quorum", "continue") for seed in range(20)]
    assert {(plan.policy, plan.without_majority) for plan in plans} == {("quorum", "continue")}
    with pytest.raises(UsageError, match="--policy"):
        SeedOptions("majority").check()
    with pytest.raises(UsageError, match="--speeds"):
        SeedOptions(speeds="fast").check()
