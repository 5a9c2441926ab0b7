"""The mixture of experts: its router against a loop over tokens, its balance by hand and in training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.config.contract import DataSection, InnerSection, ModelSection
from diloco.data import open_dataset
from diloco.inner.loop import InnerLoop, evaluate, next_token_loss
from diloco.island.parallel import checkpoint_blocks
from diloco.models import build_model
from diloco.models.moe import MixtureOfExperts, run_experts
from diloco.models.transformer import SwiGLU

CPU = torch.device("cpu")
SECTION = ModelSection(layers=1, dim=16, heads=2, experts=5, experts_per_token=2, expert_dim=8)


def layer(**changes: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(SECTION.model_copy(update=changes))
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixture


def naive(mixture: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """One token and one expert at a time, in fp64."""
    router, experts = mixture.router, mixture.experts
    out = []
    for token in x.double():
        scores = [1 / (1 + torch.exp(-(row.double() @ token))) for row in router.weight]
        bias = router.bias.tolist() if router.bias is not None else [0.0] * len(scores)
        best = sorted(range(len(scores)), key=lambda e: -(scores[e].item() + bias[e]))[: router.experts_per_token]
        total = sum(scores[e] for e in best) if len(best) > 1 else 1.0
        mixed = torch.zeros(len(token)).double()
        for e in best:
            gate, up, down = (stack[e].double() for stack in (experts.gate, experts.up, experts.down))
            hidden = (gate @ token) * torch.sigmoid(gate @ token) * (up @ token)
            mixed += scores[e] / total * (down @ hidden)
        out.append(mixed)
    return torch.stack(out).float()


# ---------------------------------------------------------------- maths


@pytest.mark.parametrize(
    "changes", [{}, {"experts_per_token": 1}, {"experts_per_token": 5}, {"balance": "loss", "experts_per_token": 3}]
)
def test_the_mixture_is_the_naive_one(changes: dict[str, object]) -> None:
    mixture = layer(**changes)
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(mixture(x).flatten(0, 1), naive(mixture, x.flatten(0, 1)), atol=2e-5, rtol=1e-4)
    parameters = [parameter for name, parameter in mixture.named_parameters() if name != "router.bias"]
    probe = torch.randn(21, 16)
    got = torch.autograd.grad((mixture(x).flatten(0, 1) * probe).sum(), parameters)
    expected = torch.autograd.grad((naive(mixture, x.flatten(0, 1)) * probe).sum(), parameters)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_shared_experts_are_added_for_every_token() -> None:
    mixture = layer(shared_experts=2)
    assert isinstance(mixture.shared, SwiGLU)
    assert mixture.shared.down.weight.shape == (16, 16)
    x = torch.randn(2, 3, 16)
    routed = naive(mixture, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(mixture(x), routed + mixture.shared(x), atol=2e-5, rtol=1e-4)


def test_the_grouped_product_is_the_loop_over_experts() -> None:
    """bf16 takes the one, fp32 the other; also where experts get nothing."""
    experts = layer().experts
    rows = torch.randn(9, 16)
    loads = torch.tensor([4, 0, 0, 5, 0])
    exact = experts(rows, loads)
    rounded = run_experts(*(t.bfloat16() if t.is_floating_point() else t for t in (rows, loads, *experts.parameters())))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.05 * exact.abs().max().item(), rtol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts(rows, loads), rounded)
    assert experts(rows[:0], torch.zeros_like(loads)).shape == (0, 16)


def test_a_token_costs_by_default_what_it_does_in_the_dense_model() -> None:
    section = ModelSection(dim=128, ffn_dim=480, experts=8, experts_per_token=2, shared_experts=1)
    assert section.expert_width == 160
    assert section.model_copy(update={"expert_dim": 24}).expert_width == 24


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"experts": 4, "experts_per_token": 5}, r"experts \(4\) must be at least 2 and experts_per_token \(5\)"),
        ({"experts": 1, "experts_per_token": 1}, "must be at least 2"),
        ({"experts": 4, "expert_dim": 12}, r"expert_dim \(12\) must be a multiple of 8"),
        ({"experts": 4, "kind": "external"}, "experts is for kind 'transformer'"),
    ],
)
def test_experts_that_cannot_be_are_refused(keys: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        ModelSection(**keys)


# ---------------------------------------------------------------- balance


def test_the_bias_has_the_load_error_as_its_gradient_and_moves_against_its_sign() -> None:
    router = layer(experts=4).router
    router.bias.data = torch.tensor([3.0, 3.0, 0.0, 0.0])  # more than any score: all six tokens take experts 0 and 1
    router(torch.randn(6, 16))
    assert router.imbalance() == pytest.approx(1.0)
    loss = router.take_loss()
    assert loss.item() == 0
    assert router.take_loss() == 0.0
    loss.backward()
    assert router.bias.grad.tolist() == [12, 12, -12, -12]  # 4 experts x their load - 12 choices
    assert router.weight.grad is None
    router.rebalance()
    torch.testing.assert_close(router.bias, torch.tensor([2.999, 2.999, 0.001, 0.001]))


def test_the_auxiliary_loss_by_hand() -> None:
    router = layer(experts=4, balance="loss", balance_loss=0.5).router
    x = torch.randn(6, 16)
    _, chosen = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    share = (scores / scores.sum(1, keepdim=True)).mean(0)
    load = torch.tensor([(chosen == expert).float().sum() / 12 for expert in range(4)])
    torch.testing.assert_close(router.take_loss(), 0.5 * 4 * (load * share).sum())
    router.eval()
    router(x)
    assert router.take_loss() == 0.0  # a held-out loss has none


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize(("balance", "how"), [("bias", {"balance_rate": 0.01}), ("loss", {"balance_loss": 0.3})])
def test_experts_share_the_work_in_training(balance: str, how: dict[str, float]) -> None:
    """Without either of the two the busiest of six experts ends with three times its share: an imbalance of 1.9."""
    dataset = open_dataset(DataSection(sequence_length=32), Path())
    section = ModelSection(layers=1, dim=48, heads=2, experts=6, expert_dim=24, balance=balance, **how)
    settings = InnerSection(batch_size=16, lr=4e-3, schedule="constant", warmup=0.0)
    inner = InnerLoop(build_model(section, 256, seed=0), settings, 1, CPU)
    order = torch.randperm(dataset.blocks_per_epoch, generator=torch.Generator().manual_seed(0))
    for step in range(160):  # after 80 the balance still depends on the last bits of a machine
        inner.step(dataset.read(order[16 * step : 16 * step + 16].tolist()), 1)
    (imbalance,) = inner.expert_imbalance()
    assert 0 < imbalance < 1
    assert evaluate(inner.model, dataset.heldout(64), 16, CPU) < 2.9


@pytest.mark.slow(queued=False)
def test_a_router_learns_who_is_good_at_what() -> None:
    """Each token wants one of four maps, told by its first numbers; an expert is too narrow for two of them."""
    maps = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.35

    def error(router_learns: bool) -> float:
        mixture = layer(dim=12, experts=4, experts_per_token=1, balance_rate=0.01)
        for parameter in mixture.parameters():
            parameter.data *= 0.4
        mixture.router.weight.data *= router_learns
        mixture.router.bias.data.zero_()
        mixture.router.weight.requires_grad_(router_learns)
        optimizer = torch.optim.Adam([p for name, p in mixture.named_parameters() if name != "router.bias"], lr=0.02)
        generator = torch.Generator().manual_seed(2)
        for _ in range(400):
            kind = torch.randint(0, 4, (64,), generator=generator)
            x = torch.randn(64, 8, generator=generator)
            y = mixture(torch.cat((torch.eye(4)[kind], x), dim=1)[None])[0, :, 4:]
            loss = (y - torch.einsum("nij,nj->ni", maps[kind], x)).square().mean()
            (loss + mixture.router.take_loss()).backward()
            optimizer.step()
            mixture.router.rebalance()
            mixture.zero_grad()
        return loss.item()

    assert error(router_learns=True) < 0.2
    assert error(router_learns=False) > 0.3


# ---------------------------------------------------------------- activations computed again


class Counted(TorchDispatchMode):
    """Counts the runs of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(how: Any) -> tuple[Counter[str], list[torch.Tensor]]:
    """Operations of one forward and backward pass, and its gradients."""
    model = build_model(SECTION.model_copy(update={"shared_experts": 1}), 32, seed=0)
    checkpoint_blocks(model, how)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    with Counted() as counted:
        next_token_loss(model, tokens).backward()
    return counted.times, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_selective_checkpointing_routes_once_and_multiplies_once() -> None:
    plain, expected = operations("none")
    selective, gradients = operations("selective")
    full, _ = operations("full")
    for product in ("aten.mm.default", "aten.topk.default"):
        assert full[product] > plain[product] == selective[product] > 0
    assert selective["aten.silu.default"] == full["aten.silu.default"] == 2 * plain["aten.silu.default"]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
