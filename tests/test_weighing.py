"""Weights of contributions and sizes of steps, on paper; and Nesterov by shares of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.base.types import Counted, Member
from diloco.config.contract import FINE, Contract, OuterSection
from diloco.outer.line import Weighing
from diloco.outer.optimizers import open_outer
from diloco.simulate.virtual.plans.plan import FaultPlan
from diloco.simulate.virtual.world import SimulatedWorld


def weighing(policy: str = "async", **outer: object) -> Weighing:
    """Weighing for rounds of 2 x 3 x 10 = 60 tokens."""
    sections = {
        "run": {"name": "w", "total_tokens": 1000},
        "data": {"sequence_length": 10},
        "inner": {"steps": 2, "batch_size": 3},
        "membership": {"policy": policy},
        "outer": outer,
    }
    return Weighing.of(Contract.model_validate(sections))


def view(*peers: str, witness: str = "") -> list[Member]:
    return [Member(peer, 1, f"{peer}:1", peer == witness) for peer in peers]


def counted(**weights: int) -> list[Counted]:
    return [Counted(peer, 0, 7, weight, 60, 6) for peer, weight in weights.items()]


# ---------------------------------------------------------------- weights


def test_all_weigh_the_same_or_as_their_tokens() -> None:
    assert weighing().weight(60, 0.0) == weighing().weight(15, 9.0) == 1
    by_tokens = weighing(weighting="tokens")
    assert [by_tokens.weight(tokens, 9.0) for tokens in (60, 15, 0)] == [60, 15, 1]


def test_who_is_no_later_than_a_round_of_all_weighs_as_ever() -> None:
    late = weighing(staleness_power=0.5)
    assert [late.weight(60, staleness) for staleness in (0.0, 0.7, 1.0)] == [FINE] * 3


def test_the_late_weigh_less() -> None:
    late = weighing(staleness_power=0.5)
    assert [late.weight(60, staleness) for staleness in (4.0, 16.0)] == [FINE // 2, FINE // 4]
    assert weighing(staleness_power=1.0, weighting="tokens").weight(60, 3.0) == 20
    assert late.weight(60, 1e12) == 1  # never nothing: a contribution without weight is no contribution


# ---------------------------------------------------------------- shares


def test_a_version_of_some_is_so_much_of_a_step() -> None:
    assert weighing().share(counted(a=1), view("a", "b", "c", "d")) == 0.25
    assert weighing().share(counted(a=1, c=1, d=1), view("a", "b", "c", "d")) == 0.75
    assert weighing().share(counted(a=1, b=1), view("a", "b")) == 1.0


def test_a_witness_trains_nothing_and_who_has_left_has_trained() -> None:
    assert weighing().share(counted(a=1), view("a", "b", "w", witness="w")) == 0.5
    assert weighing().share(counted(a=1, b=1), view("a")) == 1.0
    assert weighing().share(counted(b=1), view("a")) == 0.5


def test_by_tokens_a_step_is_a_round_of_all() -> None:
    by_tokens = weighing(weighting="tokens")
    assert by_tokens.share(counted(a=60, b=15), view("a", "b")) == 75 / 120
    assert by_tokens.share(counted(a=240), view("a", "b", "c", "d")) == 0.25  # a round stretched to four times as many
    assert by_tokens.share(counted(a=600, b=15), view("a", "b", "c")) == 2 / 3


@pytest.mark.parametrize("plan", [FaultPlan(policy="async"), FaultPlan(policy="quorum", speeds="1+0.4")])
def test_the_final_sync_moves_by_all_that_is_left_in_a_fragment(plan: FaultPlan) -> None:
    """Its tokens were committed with other fragments: they say nothing of it."""
    world = SimulatedWorld(replace(plan, peers=2, fragments=2, weighting="tokens", total_tokens=60))
    assert not world.run().violation
    commits = world.invariants.commits
    final = [one for one in commits.values() if one.moves and commits[one.previous].tokens >= 60]
    assert sorted(one.fragment for one in final) == [0, 1]
    for commit in final:
        assert len(commit.counted) == 2
        assert len({entry.weight for entry in commit.counted}) == 1
        assert world.setup.weighing.share(commit.counted, commit.view) == 1.0


def test_elsewhere_every_version_is_a_whole_step() -> None:
    for other in (weighing("sync"), weighing("quorum"), weighing(partial="whole"), weighing(optimizer="adam")):
        assert other.share(counted(a=1), view("a", "b", "c", "d")) == 1.0
    assert weighing("quorum", partial="share").share(counted(a=1), view("a", "b")) == 0.5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"outer": {"optimizer": "adam", "partial": "share"}}, "outer.partial 'share' is for .* not for adam"),
        ({"outer": {"optimizer": "delayed_nesterov", "partial": "share"}}, "not for delayed_nesterov"),
        ({"membership": {"policy": "async"}, "sync": {"overlap": 1, "merge": "eager"}}, "sync.merge 'eager'"),
        ({"outer": {"optimizer": "sgd", "alignment": "momentum"}}, "needs a momentum, which sgd has not"),
    ],
)
def test_what_does_not_go_together(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contract.model_validate({"run": {"name": "w", "total_tokens": 1000}, **sections})


# ---------------------------------------------------------------- steps by share


def test_a_share_of_a_nesterov_step_on_paper() -> None:
    """b = (1 - 1/4 (1 - 0.6)) 2 + 1/4 x 4 = 2.8;  10 - 1/4 x 0.5 (4 + 0.6 x 2.8) = 9.29."""
    optimizer = open_outer(OuterSection(lr=0.5, momentum=0.6))
    state = optimizer.start(torch.tensor([10.0]))
    state.slots["momentum"].fill_(2.0)
    after = optimizer.step(state, torch.tensor([4.0]), share=0.25)
    assert after.slots["momentum"].item() == pytest.approx(2.8)
    assert after.anchor.item() == pytest.approx(9.29)


@pytest.mark.slow(queued=False)
@given(st.floats(0.0, 0.99), st.integers(2, 64))
def test_in_the_end_a_gradient_goes_as_far_in_small_steps_as_in_whole_ones(momentum: float, peers: int) -> None:
    """One contribution of `peers`, and nothing more for a long time: lr g / (peers (1 - momentum))."""
    optimizer = open_outer(OuterSection(lr=0.5, momentum=momentum))
    state = optimizer.step(optimizer.start(torch.zeros(1)), torch.ones(1), share=1 / peers)
    for _ in range(min(int(20 * peers / (1 - momentum)) + 1, 20_000)):
        state = optimizer.step(state, torch.zeros(1), share=1 / peers)
    if 20 * peers / (1 - momentum) < 20_000:
        assert -state.anchor.item() == pytest.approx(0.5 / (peers * (1 - momentum)), rel=1e-3)


@pytest.mark.parametrize("momentum", [0.3, 0.7, 0.9])
def test_a_whole_step_is_the_usual_one_to_the_bit(momentum: float) -> None:
    optimizer = open_outer(OuterSection(lr=0.7, momentum=momentum))
    before = optimizer.start(torch.zeros(1000))
    buffer = before.slots["momentum"].normal_(generator=torch.Generator().manual_seed(0))
    after = optimizer.step(before, torch.ones(1000))
    expected = buffer * momentum + 1
    assert torch.equal(after.slots["momentum"], expected)
    assert torch.equal(after.anchor, before.anchor - (expected * momentum + 1) * 0.7)


def test_shares_while_warming_up() -> None:
    optimizer = open_outer(OuterSection(lr=0.5, momentum=0.9, warmup_steps=2))
    state = optimizer.step(optimizer.start(torch.zeros(1)), torch.ones(1), share=0.25)
    assert (state.anchor.item(), state.slots["momentum"].item()) == (-0.25, 0.0)
