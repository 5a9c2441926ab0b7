"""Muon inside: whose parameter is whose, steps as torch's two optimizers take them, schedule, resume, refusal."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from diloco.base.errors import StateError
from diloco.config.contract import InnerSection, ModelSection
from diloco.inner.loop import InnerLoop, learning_rate, next_token_loss
from diloco.inner.muon import muon_parameters
from diloco.models import build_model
from tests.test_inner import give, state_of

CPU = torch.device("cpu")
SECTION = InnerSection(optimizer="muon", batch_size=4, lr=3e-3, schedule="constant", warmup=0.0)
TOTAL = 1_000_000
TEXT = b"the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "


def tiny(tied: bool = True) -> nn.Module:
    return build_model(ModelSection(layers=2, dim=32, heads=2, tied=tied), 128, seed=0)


def text_block(step: int, rows: int = 4, length: int = 32) -> torch.Tensor:
    """int64 (rows, length + 1) of a short text that repeats; another piece of it at each step."""
    stream = torch.tensor(list(TEXT * 200), dtype=torch.int64)
    starts = [17 * (step * rows + row) for row in range(rows)]
    return torch.stack([stream[start : start + length + 1] for start in starts])


def loop(**changes: object) -> InnerLoop:
    return InnerLoop(tiny(), SECTION.model_copy(update=changes), TOTAL, CPU)


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# ---------------------------------------------------------------- whose is what


def names_of_muon(model: nn.Module) -> set[str]:
    mine = {id(parameter) for parameter in muon_parameters(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in mine}


@pytest.mark.parametrize("tied", [True, False])
def test_the_matrices_of_blocks_are_muon_s(tied: bool) -> None:
    matrices = ("attn.q", "attn.k", "attn.v", "attn.out", "ffn.gate", "ffn.up", "ffn.down")
    assert names_of_muon(tiny(tied)) == {f"blocks.{block}.{name}.weight" for block in (0, 1) for name in matrices}


def test_embeddings_heads_and_what_is_no_matrix_are_not() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias_table = nn.Embedding(8, 4)  # an embedding inside a layer, as T5's relative positions
            self.convolution = nn.Conv1d(4, 4, 3)
            self.linear = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

    model = nn.Module()
    model.tokens = nn.Embedding(16, 4)
    model.layers = nn.ModuleList([Block(), nn.Linear(4, 16, bias=False)])
    model.layers[1].weight = model.tokens.weight  # tied to an embedding, and inside a module list
    model.norm, model.head = nn.LayerNorm(4), nn.Linear(4, 16)
    assert names_of_muon(model) == {"layers.0.linear.weight"}


def test_every_parameter_is_in_one_group() -> None:
    model = tiny(tied=False)
    inner = InnerLoop(model, SECTION, TOTAL, CPU)
    grouped = [id(parameter) for group in inner.optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    decays = [(len(group["params"]), group["weight_decay"]) for group in inner.optimizer.param_groups]
    norms = sum(parameter.ndim < 2 for parameter in model.parameters())
    assert decays == [(14, 0.1), (2, 0.1), (norms, 0.0)]  # Muon's, embedding and head, norms


# ---------------------------------------------------------------- steps


@pytest.mark.slow(queued=False)
def test_steps_are_those_of_torch_s_two_optimizers() -> None:
    inner = loop(schedule="cosine", warmup=0.1, weight_decay=0.2, clip=0.5, muon_lr=0.03, muon_momentum=0.9)
    plain = tiny()
    matrices, embedding = muon_parameters(plain), plain.embed.weight
    norms = [parameter for parameter in plain.parameters() if parameter.ndim < 2]
    muon = torch.optim.Muon(matrices, weight_decay=0.2, momentum=0.9)
    groups = [{"params": [embedding], "weight_decay": 0.2}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    for step in range(1, 6):
        scheduled = learning_rate(inner.section, TOTAL, step * TOTAL // 5)
        muon.param_groups[0]["lr"] = scheduled * (0.03 / 3e-3)
        for group in adamw.param_groups:
            group["lr"] = scheduled
        plain.zero_grad()
        next_token_loss(plain, text_block(step)).backward()
        nn.utils.clip_grad_norm_([*matrices, embedding, *norms], 0.5)
        muon.step()
        adamw.step()
        inner.step(text_block(step), step * TOTAL // 5)
    assert torch.equal(weights(inner.model), weights(plain))
    assert (weights(inner.model) - weights(tiny())).abs().max() > 0.01


def test_a_step_of_muon_moves_all_directions_alike() -> None:
    """Singular values of the step over its learning rate: all near 1, where those of the gradient span decades."""
    inner = loop(weight_decay=0.0, muon_lr=0.5)
    before = inner.model.blocks[0].attn.out.weight.detach().clone()
    gradients: list[torch.Tensor] = []
    inner.step(text_block(0), 1, reduce=lambda _: gradients.append(inner.model.blocks[0].attn.out.weight.grad.clone()))
    moved = torch.linalg.svdvals((before - inner.model.blocks[0].attn.out.weight.detach()) / 0.5)
    assert moved.max() < 1.4
    assert moved.median() > 0.6
    gradient = torch.linalg.svdvals(gradients[0])
    assert gradient.median() < 0.2 * gradient.max()


@pytest.mark.slow(queued=False)
def test_loss_falls_on_a_text_that_repeats() -> None:
    inner = loop()
    losses = [inner.step(text_block(step), step) for step in range(1, 41)]
    assert losses[0] == pytest.approx(math.log(128), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    inner = loop()
    before = weights(inner.model)
    inner.step(text_block(0), 1, reduce=lambda parameters: parameters[0].grad.fill_(float("nan")))
    assert inner.nonfinite_steps == 1
    assert torch.equal(weights(inner.model), before)


# ---------------------------------------------------------------- state


def test_resume_continues_bit_for_bit() -> None:
    first = loop(schedule="cosine", warmup=0.1)
    for step in range(1, 4):
        first.step(text_block(step), step * 100_000)
    second = InnerLoop(copy.deepcopy(first.model), first.section, TOTAL, CPU)
    give(second, state_of(first))
    for step in range(4, 7):
        assert first.step(text_block(step), step * 100_000) == second.step(text_block(step), step * 100_000)
    assert torch.equal(weights(first.model), weights(second.model))


def test_torch_s_own_state_dict_continues_bit_for_bit() -> None:
    """The optimizer is one of torch's: its `state_dict` must do too, groups and all."""
    first = loop()
    first.step(text_block(1), 1)
    second = InnerLoop(copy.deepcopy(first.model), first.section, TOTAL, CPU)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for inner in (first, second):
        inner.step(text_block(2), 2)
        inner.step(text_block(3), 500_000)
    assert torch.equal(weights(first.model), weights(second.model))


def test_state_holds_one_momentum_of_a_matrix_and_two_moments_of_the_rest() -> None:
    inner = loop()
    inner.step(text_block(0), 1)
    keys: dict[str, set[str]] = {}
    for entry in state_of(inner):
        name, slash, key = entry.rpartition("/")
        if slash:
            keys.setdefault(name, set()).add(key)
    assert keys["blocks.1.ffn.down.weight"] == {"momentum_buffer"}
    assert keys["embed.weight"] == keys["blocks.0.attn_norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert keys.keys() == dict(inner.model.named_parameters()).keys()


def test_state_of_another_optimizer_is_refused() -> None:
    muon, adamw = loop(), loop(optimizer="adamw")
    for inner in (muon, adamw):
        inner.step(text_block(0), 1)
    with pytest.raises(StateError, match="this optimizer needs"):
        give(muon, state_of(adamw))
    with pytest.raises(StateError, match="this optimizer needs"):
        give(adamw, state_of(muon))
