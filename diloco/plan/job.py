"""An island's work in one inner step, and the choices left in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.plan.layout import MeshLayout
from diloco.plan.model import Model

Recompute = Literal["none", "selective", "full"]
"""Which activations are computed again in the backward pass: none, the attention matrix, or all inside a layer."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Name by stage: nothing is divided, then the optimizer's state, gradients too, weights too."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter of each kind, and per element of what is computed and sent between ranks."""

    parameter: int
    gradient: int
    optimizer: int
    compute: int

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and optimizer per parameter."""
        return self.parameter + self.gradient + self.optimizer


PRECISIONS: Mapping[str, Precision] = {
    "mixed": Precision(2, 2, 12, 2),  # 16-bit weights and gradients; fp32 weights and two moments in the optimizer
    "autocast": Precision(4, 4, 8, 2),  # fp32 weights, gradients and moments, 16-bit matmuls: a contract's "bf16"
    "fp32": Precision(4, 4, 8, 4),
}


@dataclass(frozen=True, slots=True)
class Job:
    """The same for every layout."""

    model: Model
    precision: Precision
    sequence_length: int
    batch: int
    """Sequences of one inner step of the island."""
    virtual_stages: int = 1
    """Pieces of the model on each rank of a pipeline (interleaved 1F1B); 1: one consecutive stage."""

    def pieces(self, stages: int) -> int:
        """`virtual_stages` of a pipeline with so many stages, as far as there are layers."""
        return max(1, min(self.virtual_stages, self.model.layers // stages))

    @property
    def tokens(self) -> int:
        """Tokens of one inner step."""
        return self.batch * self.sequence_length


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train it."""

    layout: MeshLayout
    stage: int
    """ZeRO stage; 0: DDP."""
    recompute: Recompute
    micro_batch: int
    """Sequences of one micro-batch of a data rank."""

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of one inner step of a data rank."""
        return job.batch // (self.layout.data_ranks * self.micro_batch)
