"""Cost of one way to train on an island: bytes on its fullest GPU, and seconds of an inner step by cause.

Weights, gradients and optimizer by ZeRO stage (arXiv 1910.02054, section 5); activations by the formulas of
Korthikanti et al. (arXiv 2205.05198, section 4), which count a layer with GELU, dropout and attention whose matrix is
stored. Torch's fused attention stores none: with it "none" costs what "selective" does.

Bytes of collectives are those that one rank sends: a ring all-reduce of S bytes over N ranks sends 2 (N - 1) / N S, an
all-gather or reduce-scatter half of it, an all-to-all (N - 1) / N S (NCCL-tests' PERFORMANCE.md). Latency is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.plan.hardware import Hardware, MeshLayout, Path, path_of
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
        """Estimated bytes of weights, gradients and optimizer per parameter."""
        return self.parameter + self.gradient + self.optimizer


PRECISIONS: Mapping[str, Precision] = {
    "mixed": Precision(2, 2, 12, 2),  # 16-bit weights and gradients; fp32 weights and two moments in the optimizer
    "autocast": Precision(4, 4, 8, 2),  # fp32 weights, gradients and moments, 16-bit matmuls: a contract's "bf16"
    "fp32": Precision(4, 4, 8, 4),
}


@dataclass(frozen=True, slots=True)
class Job:
    """An island's work in one inner step: the same for every layout."""

    model: Model
    precision: Precision
    sequence_length: int
    batch: int
    """Sequences of one inner step of the island."""
    virtual_stages: int = 1
    """Pieces of the model on each rank of a pipeline (interleaved 1F1B); 1: one consecutive stage."""

    def pieces(self, stages: int) -> int:
        """`virtual_stages` of a planned pipeline with so many stages, as far as there are layers."""
        return max(1, min(self.virtual_stages, self.model.layers // stages))

    @property
    def tokens(self) -> int:
        """Tokens of one planned inner step."""
        return self.batch * self.sequence_length


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train a job: the mesh layout, and what is divided, computed again and accumulated."""

    layout: MeshLayout
    stage: int
    """ZeRO stage; 0: DDP."""
    recompute: Recompute
    micro_batch: int
    """Sequences of one micro-batch of a data rank."""

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of one planned inner step of a data rank."""
        return job.batch // (self.layout.data_ranks * self.micro_batch)


# ---------------------------------------------------------------- bytes on a GPU

GATHERED_LAYERS = 2
"""ZeRO-3 holds the layer that is computed, and the next one, which is on its way."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes on one GPU of what stays from step to step."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: State) -> State:
        return State(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU of a layout, as estimated."""

    state: State
    buffers: float
    """Layers that ZeRO-3 has gathered, and the gradient of one that is not yet divided (ZeRO-2 and -3)."""
    activations: float

    @property
    def total(self) -> float:
        return self.state.total + self.buffers + self.activations


def zero_state(parameters: float, precision: Precision, stage: int, ranks: int) -> State:
    """Estimated bytes of so many parameters' state when a ZeRO stage (0 to 3) divides it by so many ranks."""
    return State(
        parameters * precision.parameter / (ranks if stage >= 3 else 1),
        parameters * precision.gradient / (ranks if stage >= 2 else 1),
        parameters * precision.optimizer / (ranks if stage >= 1 else 1),
    )


def layer_activations(job: Job, layout: MeshLayout, recompute: Recompute, micro_batch: int) -> float:
    """Estimated bytes that one layer keeps for its backward pass, for one micro-batch on one GPU.

    s b h (34 + 5 a s / h) / t with sequence parallelism, only the 34 when the attention matrix is computed again, and
    2 s b h / t, the input, when the whole layer is; the bytes are those of 16-bit activations. Of the 34, layer norms
    have 4, attention 11, and the feed-forward layer 19, or as many times that as a token's experts are as wide.
    """
    model = job.model
    held = job.sequence_length * micro_batch * model.dim / layout.cp / layout.tp * (job.precision.compute / 2)
    if recompute == "full":
        return 2 * held
    linear = 15 + 19 * model.ffn_load
    matrix = 5 * model.heads * job.sequence_length / model.dim if recompute == "none" else 0.0
    return held * (linear + matrix)


def memory_of(job: Job, choice: Choice) -> Memory:
    """Estimated memory of the pipeline's first or last stage, whichever needs more, or of the only one."""
    stages = (_stage_memory(job, choice, is_first) for is_first in (True, False))
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(job: Job, choice: Choice, is_first: bool) -> Memory:
    model, layout, precision = job.model, choice.layout, job.precision
    layers = math.ceil(model.layers / layout.pp)
    embeddings = model.embedding_parameters * (2 if layout.pp == 1 and not model.tied else 1)
    shared = (layers * model.shared_layer_parameters + embeddings) / layout.tp
    in_experts = layers * model.expert_layer_parameters / layout.tp / layout.ep
    state = zero_state(shared, precision, choice.stage, layout.shard_ranks)
    # An expert is on one rank of `ep` anyway, so only the others divide it.
    state += zero_state(in_experts, precision, choice.stage, layout.dp_shard * layout.cp)
    activations = layers * layer_activations(job, layout, choice.recompute, choice.micro_batch)
    if is_first:
        # Under 1F1B the first stage keeps as many micro-batches as there are stages, and 1 + (p - 1) / (p v) times as
        # many when v pieces of the model are interleaved.
        stages, pieces = layout.pp, job.pieces(layout.pp)
        in_flight: float = min(stages, choice.micro_batches(job))
        activations *= in_flight * (1 + (stages - 1) / (stages * pieces)) if pieces > 1 else in_flight
    if choice.recompute == "full":  # of the layer that is being computed again
        activations += layer_activations(job, layout, "selective", choice.micro_batch)
    if layout.pp == 1 or not is_first:
        # The last norm, the head's input, and logits in fp32: 4 s b h (1 + v / h) / t.
        positions = job.sequence_length * choice.micro_batch / layout.cp / layout.tp
        activations += 4 * positions * (model.dim + model.vocabulary)
    layer = (model.shared_layer_parameters + model.expert_layer_parameters / layout.ep) / layout.tp
    gathered = GATHERED_LAYERS * layer * precision.compute if choice.stage == 3 else 0.0
    return Memory(state, gathered + (layer * precision.gradient if choice.stage >= 2 else 0.0), activations)


# ---------------------------------------------------------------- seconds of an inner step


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of traffic between an island's ranks, in one inner step."""

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
class StepEstimate:
    """Seconds of one inner step, as estimated, by cause."""

    flops: float
    """The model's: recomputation is not counted."""
    compute_s: float
    """6 N FLOPs per token, and attention's, by all ranks at the efficiency that was given."""
    recompute_s: float
    bubble_s: float
    imbalance_s: float
    """Stages with a layer less wait for those with one more."""
    collectives: tuple[Collective, ...]

    @property
    def losses(self) -> dict[str, float]:
        """Estimated seconds beside computing, by cause."""
        causes = {"recomputation": self.recompute_s, "bubble": self.bubble_s, "stages": self.imbalance_s}
        for collective in self.collectives:
            causes[collective.dimension] = causes.get(collective.dimension, 0.0) + collective.waited_s
        return causes

    @property
    def total_s(self) -> float:
        """Estimated seconds of the whole inner step."""
        return self.compute_s + sum(self.losses.values())


def bubble_share(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Estimated share of a step in which a pipeline's rank is idle: (P - 1) / (v m + P - 1), with GPipe and 1F1B
    (v = 1), or v pieces of the model on each rank (arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def ring_share(ranks: int) -> float:
    """Estimated traffic: bytes that a rank sends in a ring all-reduce, as a multiple of the data: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


def model_flops(job: Job) -> float:
    """Estimated FLOPs of the model in one inner step of the island."""
    return job.tokens * job.model.flops_per_token(job.sequence_length)


def step_of(job: Job, choice: Choice, hardware: Hardware) -> StepEstimate:
    """Estimate the time of one inner step on an island's hardware, by cause."""
    model, stages, flops = job.model, choice.layout.pp, model_flops(job)
    speed = hardware.world * hardware.gpu.flops * hardware.efficiency
    # Layers computed again as a whole cost their forward pass, a third of the model's FLOPs; attention alone 4 L h s.
    attention = 4 * model.layers * model.dim * job.sequence_length * job.tokens
    again_s = {"none": 0.0, "selective": attention, "full": flops / 3}[choice.recompute] / speed
    busy_s = flops / speed + again_s
    uneven = math.ceil(model.layers / stages) * stages / model.layers - 1
    bubble = bubble_share(stages, choice.micro_batches(job), job.pieces(stages))
    bubble_s = busy_s * (1 + uneven) * bubble / (1 - bubble)
    collectives = (*_waited_collectives(job, choice, hardware), *_hidden_collectives(job, choice, hardware, busy_s))
    return StepEstimate(flops, flops / speed, again_s, bubble_s, busy_s * uneven, collectives)


def _waited_collectives(job: Job, choice: Choice, hardware: Hardware) -> Iterator[Collective]:
    """Estimated traffic inside the model, which computing waits for here: of `tp`, `cp`, `ep` and `pp`."""
    layout, model = choice.layout, job.model
    micro_batches = choice.micro_batches(job)
    calls = round(micro_batches * (model.layers / layout.pp))
    positions = choice.micro_batch * job.sequence_length / layout.cp
    activation = positions * model.dim * job.precision.compute  # bytes of one micro-batch between two layers
    keys = 2 * positions * (model.dim // model.heads * model.kv_heads) / layout.tp * job.precision.compute
    passed_on, around = 2 * micro_batches * job.pieces(layout.pp), 3 * calls * (layout.cp - 1)
    reduced = 4 * calls * ring_share(layout.tp) * activation
    to_experts = 4 * calls * model.active * activation / layout.tp * (layout.ep - 1) / layout.ep
    kinds = [
        # Twice forwards, twice backwards; sequence parallel norms split each all-reduce in two halves.
        ("tp", "all-reduce (SP: all-gather, reduce-scatter)", 4 * calls, reduced),
        # Keys and values go round in the forward pass; in the backward pass once more, and their gradients with them.
        ("cp", "ring attention", around, around * keys),
        # To the experts and back, forwards and backwards.
        ("ep", "all-to-all", 4 * calls, to_experts),
        ("pp", "send and receive", passed_on, passed_on * activation / layout.tp),
    ]
    for dimension, name, count, sent_bytes in kinds:
        if getattr(layout, dimension) > 1:
            path = path_of(layout, (dimension,), hardware)
            bps = path.ring_bps if dimension in ("tp", "cp") else path.own_bps
            seconds = 8 * sent_bytes / bps
            yield Collective(name, dimension, path.link, count, sent_bytes, seconds, waited_s=seconds)


def _hidden_collectives(job: Job, choice: Choice, hardware: Hardware, busy_s: float) -> Iterator[Collective]:
    """Estimated traffic of gradients and weights while layers are computed: in the last micro-batch where a step has
    one reduction (DDP and ZeRO-1), in each where gradients or weights are divided (ZeRO-2 and -3)."""
    layout, model = choice.layout, job.model
    own = (model.parameters - model.expert_parameters) / layout.tp / layout.pp
    own += model.expert_parameters / layout.tp / layout.pp / layout.ep
    micro_batches = choice.micro_batches(job)
    weights, gradients = own * job.precision.compute, own * job.precision.gradient
    replicas, shards = layout.dp_replicate, layout.shard_ranks
    hidden_s = busy_s if choice.stage >= 2 else busy_s / micro_batches
    reductions = micro_batches if choice.stage >= 2 else 1
    gathers = 2 * micro_batches if choice.stage == 3 else 1
    share = (shards - 1) / shards
    parts: list[tuple[str, Path, int, float]] = []
    inner = path_of(layout, ("ep", "cp", "dp_shard"), hardware)
    if shards > 1 and choice.stage == 0:
        parts.append(("all-reduce of gradients", inner, 1, ring_share(shards) * gradients))
    elif shards > 1:
        parts.append(("reduce-scatter of gradients", inner, reductions, reductions * share * gradients))
        parts.append(("all-gather of weights", inner, gathers, gathers * share * weights))
    if replicas > 1:
        outer = path_of(layout, ("dp_replicate",), hardware)
        held = gradients / (shards if choice.stage >= 1 else 1)
        parts.append(("all-reduce of gradients", outer, 1, ring_share(replicas) * held))
    for name, path, count, sent_bytes in parts:
        seconds = 8 * sent_bytes / path.ring_bps
        waited_s = max(0.0, seconds - hidden_s)
        yield Collective(name, "data parallel", path.link, count, sent_bytes, seconds, waited_s)
        hidden_s = max(0.0, hidden_s - seconds)
