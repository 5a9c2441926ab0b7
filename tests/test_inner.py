"""The inner loop: schedules at points checked by hand, steps against plain torch, resume, evaluation."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diloco.base.errors import StateError
from diloco.config.contract import InnerSection, ModelSection
from diloco.inner.loop import (
    InnerLoop,
    evaluate,
    learning_rate,
    next_token_loss,
    parameter_groups,
    random_states,
    restore_random_states,
    seed_everything,
)
from diloco.island.parallel import DataParallelRanks, ModelRanks
from diloco.island.slices import Pieces, whole_slices
from diloco.models import build_model

CPU = torch.device("cpu")
SECTION = InnerSection(batch_size=4, lr=1e-2, schedule="constant", warmup=0.0)
TOTAL = 1_000_000
TEXT = b"the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "


def tiny() -> nn.Module:
    return build_model(ModelSection(layers=2, dim=32, heads=2, tied=True), 128, seed=0)


def text_block(rows: int, length: int = 32) -> torch.Tensor:
    """int64 (rows, length + 1) of a short text that repeats."""
    stream = torch.tensor(list(TEXT * 200), dtype=torch.int64)
    return torch.stack([stream[13 * row : 13 * row + length + 1] for row in range(rows)])


def loop(**changes: object) -> InnerLoop:
    return InnerLoop(tiny(), SECTION.model_copy(update=changes), TOTAL, CPU)


def state_of(inner: InnerLoop) -> dict[str, torch.Tensor | int]:
    """A copy of all that a checkpoint has of it."""
    return {**inner.numbers(), **{one.box.name: one.local.clone() for one in inner.state()}}


def give(inner: InnerLoop, state: dict[str, torch.Tensor | int]) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    inner.load_state(numbers, Pieces.of(whole_slices(tensors)))


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# ---------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("schedule", "tokens", "expected"),
    [
        ("cosine", 50, 0.5),  # half of the warm-up
        ("cosine", 100, 1.0),
        ("cosine", 550, 0.55),  # half-way: the mean of 1 and 0.1
        ("cosine", 1000, 0.1),
        ("cosine", 2000, 0.1),  # a run that overshoots stays at the end
        ("wsd", 50, 0.5),
        ("wsd", 500, 1.0),
        ("wsd", 800, 1.0),
        ("wsd", 900, 0.55),
        ("wsd", 1000, 0.1),
        ("constant", 50, 0.5),
        ("constant", 1000, 1.0),
    ],
)
def test_schedule_at_points_checked_by_hand(schedule: str, tokens: int, expected: float) -> None:
    section = InnerSection(lr=2.0, schedule=schedule, warmup=0.1, decay=0.2, final_lr=0.1)
    assert learning_rate(section, 1000, tokens) == pytest.approx(2.0 * expected)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedule_is_positive_from_the_first_step_and_has_no_jump(schedule: str) -> None:
    section = InnerSection(lr=1.0, schedule=schedule)
    rates = [learning_rate(section, 1000, tokens) for tokens in range(1, 1001)]
    assert min(rates) > 0
    assert max(abs(b - a) for a, b in itertools.pairwise(rates)) < 0.021  # the warm-up rises by 1/50
    assert learning_rate(section.model_copy(update={"warmup": 0.0}), 1000, 1) == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------- groups


def test_matrices_and_embeddings_decay_and_shared_parameters_appear_once() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    decayed, others = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(8, 4)]
    assert decayed["weight_decay"] == 0.1
    assert [p.shape for p in others["params"]] == [(4,), (4,), (8,)]
    assert others["weight_decay"] == 0.0


def test_weight_decay_shrinks_matrices_only() -> None:
    """With a gradient of zero AdamW only decays: w <- w (1 - lr x decay)."""
    inner = loop(weight_decay=0.5, lr=0.1)
    before = {name: p.detach().clone() for name, p in inner.model.named_parameters()}
    inner.step(text_block(4), tokens=1, reduce=lambda parameters: torch._foreach_zero_([p.grad for p in parameters]))
    for name, parameter in inner.model.named_parameters():
        factor = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


# ---------------------------------------------------------------- a step


def test_next_token_loss_is_the_mean_negative_log_probability() -> None:
    model, block = tiny(), text_block(3, length=5)
    shares = model(block[:, :-1]).softmax(-1)
    negative = [-math.log(shares[row, t, block[row, t + 1]].item()) for row in range(3) for t in range(5)]
    assert next_token_loss(model, block).item() == pytest.approx(sum(negative) / 15, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_equal_a_plain_torch_loop(optimizer: str) -> None:
    inner = loop(optimizer=optimizer, weight_decay=0.1, clip=0.5, schedule="cosine", warmup=0.1)
    plain = tiny()
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    kind = {"adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95)), "sgd": lambda: torch.optim.SGD(groups)}
    reference = kind[optimizer]()
    for step in range(1, 6):
        block, tokens = text_block(4).roll(step, 0), step * TOTAL // 5
        for group in reference.param_groups:
            group["lr"] = learning_rate(inner.section, TOTAL, tokens)
        expected = F.cross_entropy(plain(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
        reference.zero_grad()
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        assert inner.step(block, tokens) == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(weights(inner.model), weights(plain), atol=1e-5, rtol=1e-4)
    assert inner.steps == 5
    assert inner.lr == pytest.approx(1e-3)


def test_accumulation_equals_one_big_batch() -> None:
    """Plain SGD, so a wrong scale of the gradient would show."""
    big = loop(optimizer="sgd", lr=0.1, clip=0.0, batch_size=8)
    small = loop(optimizer="sgd", lr=0.1, clip=0.0, batch_size=2, accumulation=4)
    block = text_block(8)
    assert small.step(block, 1) == pytest.approx(big.step(block, 1), rel=1e-6)
    torch.testing.assert_close(weights(small.model), weights(big.model), atol=1e-6, rtol=0)


def test_clipping_bounds_the_step_and_zero_turns_it_off() -> None:
    start = weights(tiny())
    moved = {}
    for clip in (0.0, 1e-3, 1e9):
        inner = loop(optimizer="sgd", lr=1.0, clip=clip, weight_decay=0.0)
        inner.step(text_block(4), 1)
        moved[clip] = weights(inner.model) - start
    assert moved[1e-3].norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert moved[0.0].norm() > 0.1
    assert torch.equal(moved[0.0], moved[1e9])


def test_reduce_sees_the_whole_gradient_before_clipping() -> None:
    inner = loop(accumulation=2, batch_size=2, clip=1e-6)
    seen: list[float] = []
    inner.step(text_block(4), 1, reduce=lambda ps: seen.append(nn.utils.get_total_norm([p.grad for p in ps]).item()))
    plain = tiny()
    next_token_loss(plain, text_block(4)).backward()
    assert seen == [pytest.approx(nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item(), rel=1e-4)]


def test_ranks_synchronise_at_the_last_micro_batch_only() -> None:
    class Counting(ModelRanks):
        synchronised: ClassVar[list[bool]] = []

        def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
            self.synchronised.append(last)
            return super().micro_batch(last=last)

    model = tiny()
    ranks = Counting(model)
    InnerLoop(model, SECTION.model_copy(update={"batch_size": 2}), TOTAL, CPU, ranks=ranks).step(text_block(6), 1)
    assert ranks.synchronised == [False, False, True]


def test_distributed_data_parallel_steps_and_names_as_the_plain_model() -> None:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny()
        wrapped = InnerLoop(model, SECTION, TOTAL, CPU, ranks=DataParallelRanks(model, CPU))
        plain = loop()
        block = text_block(8)  # two micro-batches
        assert wrapped.step(block, 1) == plain.step(block, 1)
        assert torch.equal(weights(wrapped.model), weights(plain.model))
        assert state_of(wrapped).keys() == state_of(plain).keys()
        give(wrapped, state_of(plain))
    finally:
        dist.destroy_process_group()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    inner = loop()
    inner.step(text_block(4), 1)
    before, state = weights(inner.model), state_of(inner)
    with torch.no_grad():
        kept = inner.model.norm.weight[0].clone()
        inner.model.norm.weight[0] = float("nan")
    loss = inner.step(text_block(4), 2)
    with torch.no_grad():
        inner.model.norm.weight[0] = kept
    assert math.isnan(loss)
    assert inner.nonfinite_steps == 1
    assert inner.steps == 2
    assert torch.equal(weights(inner.model), before)
    after = state_of(inner)
    assert all(torch.equal(state[key], after[key]) for key in state if "/" in key)
    inner.step(text_block(4), 3)
    assert inner.nonfinite_steps == 1
    assert weights(inner.model).isfinite().all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_falls_on_a_text_that_repeats(precision: str) -> None:
    inner = loop(precision=precision)
    losses = [inner.step(text_block(4), step) for step in range(1, 41)]
    assert losses[0] == pytest.approx(math.log(128), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert {p.dtype for p in inner.model.parameters()} == {torch.float32}


# ---------------------------------------------------------------- state


def test_resume_continues_bit_for_bit() -> None:
    first = loop(schedule="cosine", warmup=0.1)
    for step in range(1, 4):
        first.step(text_block(4).roll(step, 0), step * 100_000)
    second = InnerLoop(copy.deepcopy(first.model), first.section, TOTAL, CPU)
    give(second, state_of(first))
    assert second.steps == 3
    for step in range(4, 7):
        block = text_block(4).roll(step, 0)
        assert first.step(block, step * 100_000) == second.step(block, step * 100_000)
    assert torch.equal(weights(first.model), weights(second.model))


def test_state_is_flat_copied_and_named_by_parameter() -> None:
    inner = loop()
    assert state_of(inner) == {"steps": 0, "nonfinite_steps": 0}
    inner.step(text_block(4), 1)
    state = state_of(inner)
    average = state["blocks.0.attn.q.weight/exp_avg"]
    assert average.shape == inner.model.blocks[0].attn.q.weight.shape
    assert len(state) == 2 + 3 * len(list(inner.model.parameters()))
    kept = average.clone()
    inner.step(text_block(4), 2)
    assert torch.equal(average, kept)
    give(inner, state)
    inner.step(text_block(4), 2)
    assert torch.equal(average, kept)


def test_loading_an_early_state_forgets_the_later_one() -> None:
    inner = loop()
    fresh = state_of(inner)
    inner.step(text_block(4), 1)
    give(inner, fresh)
    assert state_of(inner) == fresh


def test_state_of_something_else_is_refused_before_anything_changes() -> None:
    inner = loop()
    inner.step(text_block(4), 1)
    state = state_of(inner)
    name = "blocks.0.attn.q.weight/exp_avg"
    wrong = [
        {key: value for key, value in state.items() if key != "steps"},
        {key: value for key, value in state.items() if key != name},
        {**state, name: torch.zeros(3)},
        {**state, "blocks.9.attn.q.weight/exp_avg": torch.zeros(3)},
    ]
    for broken in wrong:
        with pytest.raises(StateError):
            give(inner, broken)
    with pytest.raises(StateError, match="this optimizer needs"):
        give(loop(optimizer="sgd"), state)
    after = state_of(inner)
    assert all(torch.equal(state[key], after[key]) for key in state if "/" in key)


def test_random_states_come_back() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    seed_everything(2**40)
    random.gauss(0, 1), np.random.randn()  # both now hold the second value of a pair
    states = random_states()
    first = draw()
    assert draw() != first
    restore_random_states(states)
    assert draw() == first
    assert all(isinstance(value, torch.Tensor | int | float) for value in states.values())
    seed_everything(2**40)
    random.gauss(0, 1), np.random.randn()
    assert draw() == first


# ---------------------------------------------------------------- evaluation


def test_evaluation_is_the_mean_loss_whatever_the_batch_size() -> None:
    model, blocks = tiny(), text_block(7)
    expected = next_token_loss(model, blocks).item()
    for batch_size in (1, 3, 7, 100):
        assert evaluate(model, blocks, batch_size, CPU) == pytest.approx(expected, rel=1e-6)


def test_evaluation_leaves_modes_and_gradients_alone() -> None:
    model = nn.Sequential(nn.Embedding(128, 8), nn.Dropout(0.5), nn.Linear(8, 128), nn.Dropout(0.5))
    model[3].eval()
    blocks = text_block(3)
    assert evaluate(model, blocks, 2, CPU) == evaluate(model, blocks, 2, CPU)
    assert [module.training for module in model.modules()] == [True, True, True, True, False]
    assert all(p.grad is None for p in model.parameters())
