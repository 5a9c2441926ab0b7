"""DiLoCo is plain training at its corners: one peer, one inner step, any order of arrival. Real functions, in process.

One peer with outer SGD at rate 1 is plain training to rounding, not bit for bit: anchor - (anchor - local) rounds
where anchor and local differ by more than a factor of two.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from diloco.compress import Codec, open_codec
from diloco.config.codec import CodecSection
from diloco.config.contract import OuterSection
from diloco.outer.average import fold, mean_digest, unpack
from diloco.outer.fragments import Layout, named_parameters, read_fragment, write_fragment
from diloco.outer.merge import carry
from diloco.outer.optimizers import open_outer
from diloco.outer.pseudograd import pseudo_gradient
from diloco.outer.state import OuterState

FP32 = open_codec(CodecSection(name="fp32"))
INT8 = open_codec(CodecSection(name="int8", block=64))
RATE_1 = OuterSection(optimizer="sgd", lr=1.0)
ROUNDS = 12

Inner = Callable[[nn.Module], torch.optim.Optimizer]


def batch(step: int, peer: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * peer + step)
    inputs = torch.randn(8, 5, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One inner step on the mean of the batches' losses."""
    optimizer.zero_grad()
    for inputs, targets in batches:
        (nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()
    optimizer.step()


def fresh_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass
class Peers:
    """Peers of one run, and the outer state that each of them would hold."""

    models: list[nn.Module]
    codec: Codec
    outer: OuterSection
    fragments: int = 1

    def __post_init__(self) -> None:
        self.parameters = [named_parameters(model) for model in self.models]
        shapes = [(name, tuple(p.shape)) for name, p in self.parameters[0].items()]
        self.layout = Layout.of(shapes, self.fragments, part_elements=32)
        self.optimizer = open_outer(self.outer)
        starts = [self.optimizer.start(read_fragment(self.parameters[0], f), f) for f in self.layout.fragments]
        self.state = OuterState(0, tuple(starts))

    def sync(self, arrival: Sequence[int]) -> str:
        """One version, contributions arriving in that order. Returns the mean's digest."""
        fragment = self.layout.fragments[self.state.version % self.fragments]
        before = self.state.fragments[fragment.index]
        sent = {peer: read_fragment(self.parameters[peer], fragment) for peer in arrival}
        gradients = {peer: pseudo_gradient(before.anchor, local) for peer, local in sent.items()}
        parts = []
        for part in range(fragment.parts):
            start, stop = fragment.part_bounds(part)
            arrived = {peer: self.codec.encode(gradients[peer][start:stop]) for peer in arrival}
            in_order = [(1 + peer, arrived[peer]) for peer in sorted(arrived)]
            parts.append(fold(in_order, stop - start, self.codec))
        after = self.optimizer.step(before, unpack(parts, fragment, [self.codec]))
        for peer, base in sent.items():
            own = self.parameters[peer]
            write_fragment(own, fragment, carry(read_fragment(own, fragment), base, after.anchor))
        self.state = self.state.replace(fragment.index, after, self.state.version + 1)
        return mean_digest(parts)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("inner", [sgd, adamw])
@pytest.mark.parametrize("fragments", [1, 2])
def test_one_peer_with_outer_sgd_at_rate_1_is_plain_training(inner: Inner, fragments: int) -> None:
    model = fresh_model()
    plain = copy.deepcopy(model)
    peers = Peers([model], FP32, RATE_1, fragments)
    optimizers = inner(model), inner(plain)
    for step in range(5 * ROUNDS):
        train(model, optimizers[0], [batch(step, 0)])
        train(plain, optimizers[1], [batch(step, 0)])
        if step % 5 == 4:
            peers.sync([0])
    assert (weights(plain) - weights(fresh_model())).abs().max() > 0.1
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=2e-6)


def test_one_step_rounds_of_sgd_are_data_parallel_sgd() -> None:
    """H = 1, inner SGD, outer SGD at rate 1, N peers: SGD on the (weighted) mean of the gradients."""
    peers = Peers([fresh_model() for _ in range(3)], FP32, RATE_1)
    parallel = fresh_model()
    optimizers = [sgd(model) for model in peers.models]
    reference = sgd(parallel)
    for step in range(ROUNDS):
        for peer, (model, optimizer) in enumerate(zip(peers.models, optimizers, strict=True)):
            train(model, optimizer, [batch(step, peer)])
        peers.sync([0, 1, 2])
        train(parallel, reference, [batch(step, peer) for peer in (0, 1, 1, 2, 2, 2)])
    assert all(torch.equal(weights(model), weights(peers.models[0])) for model in peers.models)
    torch.testing.assert_close(weights(peers.models[0]), weights(parallel), rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", [FP32, INT8], ids=lambda codec: codec.name)
def test_order_of_arrival_changes_no_bit(codec: Codec) -> None:
    outcomes = set()
    for arrival in itertools.permutations(range(3)):
        peers = Peers([fresh_model() for _ in range(3)], codec, OuterSection(), fragments=2)
        optimizers = [adamw(model) for model in peers.models]
        digests = []
        for step in range(6):
            for peer, (model, optimizer) in enumerate(zip(peers.models, optimizers, strict=True)):
                train(model, optimizer, [batch(step, peer)])
            digests.append(peers.sync(arrival))
        outcomes.add((*digests, peers.state.digest))
    assert len(outcomes) == 1


def test_a_skipped_round_loses_nothing() -> None:
    """Outer SGD at rate 1: what was not counted at one version counts at the next."""
    often, seldom = Peers([fresh_model()], FP32, RATE_1), Peers([fresh_model()], FP32, RATE_1)
    for peers, every in ((often, 1), (seldom, 3)):
        optimizer = sgd(peers.models[0])
        for step in range(ROUNDS):
            train(peers.models[0], optimizer, [batch(step, 0)])
            if step % every == every - 1:
                peers.sync([0])
    torch.testing.assert_close(often.state.fragments[0].anchor, seldom.state.fragments[0].anchor, rtol=0, atol=1e-6)
