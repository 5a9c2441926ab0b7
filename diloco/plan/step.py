"""Seconds of one inner step of an island: compute, the pipeline's bubble, and each collective on its link.

Bytes of collectives are those that one rank sends: a ring all-reduce of S bytes over N ranks sends 2 (N - 1) / N S, an
all-gather or reduce-scatter half of it, an all-to-all (N - 1) / N S (NCCL-tests' PERFORMANCE.md). Latency is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.plan.hardware import Hardware
from diloco.plan.layout import MeshLayout, Path, path_of
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


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of traffic of a rank in one inner step."""

    name: str
    dimension: str
    link: str
    count: int
    """Calls per step."""
    sent_bytes: float
    """By one rank in one step."""
    seconds: float
    """On its link."""
    waited_s: float
    """The part of these seconds that computing cannot hide."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one inner step, by cause."""

    compute_s: float
    """6 N FLOPs per token, and attention's, by all ranks at the efficiency that was given."""
    recompute_s: float
    bubble_s: float
    imbalance_s: float
    """Stages with a layer less wait for those with one more."""
    collectives: tuple[Collective, ...]

    @property
    def losses(self) -> dict[str, float]:
        """Seconds beside computing, by cause."""
        causes = {"recomputation": self.recompute_s, "bubble": self.bubble_s, "stages": self.imbalance_s}
        for collective in self.collectives:
            causes[collective.dimension] = causes.get(collective.dimension, 0.0) + collective.waited_s
        return causes

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + sum(self.losses.values())


def bubble_share(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Share of a step in which a rank of a pipeline has nothing to do: (P - 1) / (v m + P - 1), with GPipe and 1F1B
    (v = 1), or v pieces of the model on each rank (arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def ring_share(ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce, as a multiple of the data: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


def step_of(job: Job, choice: Choice, hardware: Hardware) -> Step:
    """The times of one inner step."""
    speed = hardware.world * hardware.gpu.flops * hardware.efficiency
    compute_s = model_flops(job) / speed
    again_s = _recomputed_flops(job, choice) / speed
    stages = choice.layout.pp
    uneven = math.ceil(job.model.layers / stages) * stages / job.model.layers - 1
    busy_s = compute_s + again_s
    bubble = bubble_share(stages, choice.micro_batches(job), job.pieces(stages))
    bubble_s = busy_s * (1 + uneven) * bubble / (1 - bubble)
    collectives = tuple(_collectives(job, choice, hardware, busy_s))
    return Step(compute_s, again_s, bubble_s, busy_s * uneven, collectives)


def model_flops(job: Job) -> float:
    """FLOPs of one inner step."""
    return job.tokens * job.model.flops_per_token(job.sequence_length)


def _recomputed_flops(job: Job, choice: Choice) -> float:
    """A third of the model's when layers are computed again as a whole; attention's 4 L h s when only that is."""
    if choice.recompute == "full":
        return model_flops(job) / 3
    attention = 4 * job.model.layers * job.model.dim * job.sequence_length * job.tokens
    return attention if choice.recompute == "selective" else 0.0


def _collectives(job: Job, choice: Choice, hardware: Hardware, busy_s: float) -> Iterator[Collective]:
    """Those that this layout needs. Only data parallel ones overlap with computing here."""
    layout, model = choice.layout, job.model
    layers = model.layers / layout.pp
    micro_batches = choice.micro_batches(job)
    calls = round(micro_batches * layers)
    positions = choice.micro_batch * job.sequence_length / layout.cp
    activation = positions * model.dim * job.precision.compute  # bytes of one micro-batch between two layers
    if layout.tp > 1:
        # Twice forwards, twice backwards; sequence parallel norms split each all-reduce in two halves.
        path, sent = path_of(layout, ("tp",), hardware), 4 * calls * ring_share(layout.tp) * activation
        yield _ring("all-reduce (SP: all-gather, reduce-scatter)", "tp", path, 4 * calls, sent)
    if layout.cp > 1:
        # Keys and values go round in the forward pass; in the backward pass once more, and their gradients with them.
        keys = 2 * positions * model.kv_dim / layout.tp * job.precision.compute
        path, sent = path_of(layout, ("cp",), hardware), 3 * calls * (layout.cp - 1) * keys
        yield _ring("ring attention", "cp", path, 3 * calls * (layout.cp - 1), sent)
    if layout.ep > 1:
        # To the experts and back, forwards and backwards.
        path = path_of(layout, ("ep",), hardware)
        sent = 4 * calls * model.active * activation / layout.tp * (layout.ep - 1) / layout.ep
        yield _own("all-to-all", "ep", path, 4 * calls, sent)
    if layout.pp > 1:
        path, count = path_of(layout, ("pp",), hardware), 2 * micro_batches * job.pieces(layout.pp)
        yield _own("send and receive", "pp", path, count, count * activation / layout.tp)
    yield from _data_parallel(job, choice, hardware, busy_s)


def _data_parallel(job: Job, choice: Choice, hardware: Hardware, busy_s: float) -> Iterator[Collective]:
    """Gradients and weights, which travel while layers are computed: in the last micro-batch where a step has one
    reduction (DDP and ZeRO-1), in each where gradients or weights are divided (ZeRO-2 and -3)."""
    layout, model = choice.layout, job.model
    own = (model.parameters - model.expert_parameters) / layout.tp / layout.pp
    own += model.expert_parameters / layout.tp / layout.pp / layout.ep
    micro_batches = choice.micro_batches(job)
    weights, gradients = own * job.precision.compute, own * job.precision.gradient
    replicas, shards = layout.dp_replicate, layout.shard_ranks
    hidden_s = busy_s if choice.stage >= 2 else busy_s / micro_batches
    reductions = micro_batches if choice.stage >= 2 else 1
    gathers = 2 * micro_batches if choice.stage == 3 else 1
    shares = (shards - 1) / shards
    parts: list[tuple[str, Path, int, float]] = []
    inner = path_of(layout, ("ep", "cp", "dp_shard"), hardware)
    if shards > 1 and choice.stage == 0:
        parts.append(("all-reduce of gradients", inner, 1, ring_share(shards) * gradients))
    elif shards > 1:
        parts.append(("reduce-scatter of gradients", inner, reductions, reductions * shares * gradients))
        parts.append(("all-gather of weights", inner, gathers, gathers * shares * weights))
    if replicas > 1:
        held = gradients / (shards if choice.stage >= 1 else 1)
        path = path_of(layout, ("dp_replicate",), hardware)
        parts.append(("all-reduce of gradients", path, 1, ring_share(replicas) * held))
    for name, path, count, sent in parts:
        collective = _ring(name, "data parallel", path, count, sent, hidden_s)
        hidden_s = max(0.0, hidden_s - collective.seconds)
        yield collective


def _ring(name: str, dimension: str, path: Path, count: int, sent: float, hidden_s: float = 0.0) -> Collective:
    seconds = 8 * sent / path.ring_bps
    return Collective(name, dimension, path.link, count, sent, seconds, max(0.0, seconds - hidden_s))


def _own(name: str, dimension: str, path: Path, count: int, sent: float) -> Collective:
    seconds = 8 * sent / path.own_bps
    return Collective(name, dimension, path.link, count, sent, seconds, seconds)
