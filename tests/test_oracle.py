"""Our functions retrace the trajectories that another implementation (torchft) left behind.

Once with the outer state in fp32, as in production, and once all in float64, where only an algorithm that is the
same to the letter agrees to 1e-12.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.compress import Codec, open_codec
from diloco.config.codec import CodecSection
from diloco.config.contract import OuterSection
from diloco.outer.average import fold
from diloco.outer.fragments import Fragment, Layout, named_parameters, read_fragment, write_fragment
from diloco.outer.merge import carry
from diloco.outer.optimizers import open_outer
from diloco.outer.pseudograd import pseudo_gradient
from diloco.outer.state import FragmentState

ORACLE = Path(__file__).parent / "oracle"


@dataclass
class Replica:
    """One peer's model and inner optimizer, float64."""

    rank: int
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        with torch.no_grad():
            start = 0
            for parameter in self.model.parameters():
                indices = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
                parameter.copy_((0.3 * torch.sin(1 + indices)).view_as(parameter))
                start += parameter.numel()

    def prepare(self, name: str, lr: float) -> None:
        assert name == "adamw"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)

    def train(self, steps: int) -> float:
        """Loss of the last step."""
        for _ in range(steps):
            inputs, targets = self._batch()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
        return loss.item()

    def _batch(self) -> tuple[Tensor, Tensor]:
        r, k = self.rank, self.steps
        inputs = [[math.sin(0.5 + 1.3 * r + 0.37 * k + 0.11 * b + 0.7 * j) for j in range(3)] for b in range(4)]
        targets = [[math.cos(0.2 * r + 0.05 * k + 0.3 * b)] for b in range(4)]
        return torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)

    def scalars(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class Float64Codec(Codec):
    """The seam's lossless codec for a float64 outer state."""

    name = "fp64"

    def encode(self, values: Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, payload: bytes, elements: int) -> Tensor:
        assert len(payload) == self.max_bytes(elements)
        return torch.frombuffer(bytearray(payload), dtype=torch.float64)

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        out.copy_(self.decode(payload, out.numel()))

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        total.data = total.to(torch.float64)  # the fold itself begins with fp32
        return super().fold(payload, weight, total)

    def max_bytes(self, elements: int) -> int:
        return elements * 8


def read_float64(parameters: dict[str, Tensor], fragment: Fragment) -> Tensor:
    return torch.cat([parameters[entry.name].detach().flatten() for entry in fragment.entries])


Read = Callable[[dict[str, Tensor], Fragment], Tensor]
PRECISIONS = {
    "fp32": (read_fragment, open_codec(CodecSection(name="fp32", zstd=True)), 1e-6),
    "float64": (read_float64, Float64Codec(), 1e-12),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["textbook_r2", "streaming_r2"])
def test_trajectory_of_torchft(name: str, precision: str) -> None:
    read, codec, tolerance = PRECISIONS[precision]
    record = json.loads((ORACLE / f"{name}.json").read_text())
    assert (record["case"]["tau"], record["case"]["alpha"]) == (0, 0.0)

    trajectory = replay(record["case"], read, codec)

    for t, (anchors, replicas) in enumerate(trajectory):
        for (steps, loss, scalars), recorded in zip(replicas, [r[t] for r in record["replicas"]], strict=True):
            assert steps == recorded["inner_steps"]
            assert loss == pytest.approx(recorded["loss"], abs=tolerance)
            assert_close(anchors, recorded["global"], tolerance)
            assert_close(scalars, recorded["local"], tolerance)
    assert len(trajectory) == record["case"]["T"]


def replay(case: dict[str, Any], read: Read, codec: Codec) -> list[tuple[Tensor, list[tuple[int, float, Tensor]]]]:
    """Per outer step: all anchors, and (inner steps, loss, weights) of each replica."""
    replicas = [Replica(rank) for rank in range(case["R"])]
    for replica in replicas:
        replica.prepare(*case["inner"])
    parameters = [named_parameters(replica.model) for replica in replicas]
    layout = Layout.of([(name, tuple(p.shape)) for name, p in parameters[0].items()], case["frag"])
    lr, momentum, nesterov = case["outer"]
    assert nesterov
    optimizer = open_outer(OuterSection(optimizer="nesterov", lr=lr, momentum=momentum))
    states = [optimizer.start(read(parameters[0], fragment)) for fragment in layout.fragments]
    trajectory = []
    for t in range(case["T"]):
        losses = [replica.train(case["H"] // case["frag"]) for replica in replicas]
        fragment = layout.fragments[t % case["frag"]]
        sent = [read(own, fragment) for own in parameters]
        mean = average(states[fragment.index], sent, codec)
        states[fragment.index] = optimizer.step(states[fragment.index], mean)
        for own, base in zip(parameters, sent, strict=True):
            write_fragment(own, fragment, carry(read(own, fragment), base, states[fragment.index].anchor))
        anchors = torch.cat([state.anchor for state in states])
        seen = [(r.steps, loss, r.scalars()) for r, loss in zip(replicas, losses, strict=True)]
        trajectory.append((anchors, seen))
    return trajectory


def average(state: FragmentState, sent: list[Tensor], codec: Codec) -> Tensor:
    payloads = [(1, codec.encode(pseudo_gradient(state.anchor, local))) for local in sent]
    elements = state.anchor.numel()
    return codec.decode(fold(payloads, elements, codec), elements)


def assert_close(values: Tensor, recorded: list[float], tolerance: float) -> None:
    expected = torch.tensor(recorded, dtype=torch.float64)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)
