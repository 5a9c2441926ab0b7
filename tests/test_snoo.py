"""One peer alone: DiLoCo is SNOO (arXiv 2510.15830), Nesterov over the steps of another optimizer; with Muon, MuLoCo-1.

The whole line, from inner steps over bytes, commit and outer step to merge, against the formula in six lines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco.config.contract import InnerSection
from diloco.inner.loop import InnerLoop
from diloco.models import build_model
from diloco.outer.fragments import Weights, read_fragment
from tests.paper import BLOCKS, TOKENS, VOCAB, PaperRun, contract

INNER_STEPS, ROUNDS = 5, 6
LR, MOMENTUM = 0.4, 0.9


def inner_loop(optimizer: str) -> InnerLoop:
    section = InnerSection(optimizer=optimizer, batch_size=4, lr=3e-3, schedule="constant", warmup=0.0)
    return InnerLoop(build_model(contract().model, VOCAB, 0), section, 10**6, torch.device("cpu"))


def block(step: int) -> Tensor:
    """int64 (4, 17): numbers that go up by a step of their own, so that there is something to learn."""
    starts = torch.arange(4)[:, None] * (step + 1)
    return (starts + torch.arange(1, 5)[:, None] * torch.arange(17)) % VOCAB


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Snoo:
    """w is trained for K steps from where it is; then s = slow - w, b <- mu b + s, slow <- slow - eta (mu b + s)."""

    def __init__(self, inner: InnerLoop) -> None:
        self.inner, self.slow = inner, weights(inner.model)
        self.momentum = torch.zeros_like(self.slow)

    def outer_step(self) -> None:
        moved = self.slow - weights(self.inner.model)
        self.momentum = MOMENTUM * self.momentum + moved
        self.slow = self.slow - LR * (MOMENTUM * self.momentum + moved)
        nn.utils.vector_to_parameters(self.slow.clone(), self.inner.model.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_peer_is_snoo_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    """Inner moments persist over the rounds in both; fp32 payloads lose nothing; every operation is rounded alone."""
    run = PaperRun(
        tmp_path,
        "a",
        record=False,
        sync={"fragments": 1},
        codec={"name": "fp32"},
        outer={"lr": LR, "momentum": MOMENTUM},
    )
    peer = run.peers["a"]
    ours, reference = inner_loop(optimizer), Snoo(inner_loop(optimizer))
    peer.line.weights = Weights.of(ours.model)
    start = weights(ours.model)
    losses = []
    for round_ in range(ROUNDS):
        for step in range(round_ * INNER_STEPS, (round_ + 1) * INNER_STEPS):
            losses.append(ours.step(block(step), step + 1))
            assert losses[-1] == reference.inner.step(block(step), step + 1)
        peer.journal.trained(TOKENS, BLOCKS)
        peer.offer()
        run.apply(run.close(peer, [peer]), [peer])
        reference.outer_step()
        fragment = peer.line.layout.fragments[0]
        anchor = peer.line.state.fragments[0].anchor
        assert torch.equal(anchor, reference.slow)
        assert torch.equal(read_fragment(peer.line.parameters, fragment), anchor)  # nothing is left to carry
    assert losses[-1] < losses[0] - 0.5
    assert (weights(ours.model) - start).abs().max() > 0.01
    run.end()
