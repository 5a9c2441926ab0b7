"""The turns of fragments: each moves as often as others, and whoever contributes, however seldom, moves all of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.base.turns import Turns
from diloco.config.contract import Contract
from diloco.simulate.virtual.plans.plan import FaultPlan
from diloco.simulate.virtual.world import SimulatedWorld


def turns(policy: str, fragments: int, sync_versions: int = 0) -> Turns:
    sections = {
        "run": {"name": "turns", "total_tokens": 100},
        "membership": {"policy": policy, "sync_versions": sync_versions},
        "inner": {"steps": 48},
        "model": {"layers": fragments},
        "sync": {"fragments": fragments},
    }
    return Turns.of(Contract.model_validate(sections))


def longest_wait(moved: Iterable[int], fragments: int) -> int:
    """Contributions of a peer from one to the next to the same fragment, at most. `moved`: the fragment of each."""
    last, longest, number = dict.fromkeys(range(fragments), 0), 0, 0
    for number, fragment in enumerate(moved, 1):
        longest, last[fragment] = max(longest, number - last[fragment]), number
    return max(longest, number + 1 - min(last.values()))


@pytest.mark.parametrize("fragments", [2, 3, 4, 8])
@pytest.mark.parametrize("every", [1, 1.5, 2, 2.5, 8 / 3, 3, 4, 6, 8, 16])
def test_who_contributes_to_every_nth_version_moves_all_fragments(fragments: int, every: float) -> None:
    """In order, two peers of one pace would each move one of two fragments, for ever."""
    versions = [int(number * every) for number in range(1000)]
    for policy in ("quorum", "async"):
        rule = turns(policy, fragments)
        assert longest_wait((rule.next(version, 0) for version in versions), fragments) <= 12 * fragments


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan(policy="async", jitter=0.05, peers=2, fragments=2, calm_s=30.0),
        FaultPlan(policy="quorum", peers=4, speeds="1+1+0.4+0.4", fragments=2, calm_s=30.0),
    ],
)
def test_nobody_is_locked_onto_a_fragment(plan: FaultPlan) -> None:
    """Its progress in the other one would never be counted, though its tokens are."""
    world = SimulatedWorld(plan)
    assert not world.run().violation
    commits = sorted(world.invariants.commits.values(), key=lambda commit: commit.height)
    for peer in world.plan_names:
        moved = [commit.fragment for commit in commits if any(entry.peer == peer for entry in commit.counted)]
        assert len(moved) > 12
        assert longest_wait(moved, 2) <= 8


@given(st.integers(1, 16), st.integers(0, 10**9), st.integers(0, 40))
def test_each_fragment_moves_once_in_a_turn(fragments: int, turn: int, sync_versions: int) -> None:
    rule = Turns(fragments, sync_versions, 100)
    moved = [rule.next(turn * fragments + place, 99) for place in range(fragments)]
    assert sorted(moved) == [*range(fragments)]


def test_under_sync_fragments_come_in_order() -> None:
    assert [turns("sync", 3).next(version, 0) for version in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert {turns("async", 1).next(version, 0) for version in range(50)} == {0}
    first = [turns("async", 8, 10).next(version, 0) for version in range(24)]
    assert first[:16] == [*range(8), *range(8)]
    assert first[16:] != [*range(8)]


@given(st.integers(1, 16), st.integers(0, 10**6))
def test_the_final_sync_moves_each_fragment_wherever_it_begins(fragments: int, version: int) -> None:
    rule = Turns(fragments, 0, 100)
    assert {rule.next(version + further, 100) for further in range(fragments)} == {*range(fragments)}
