"""Bytes per GPU, and host memory of the outer state.

Weights, gradients and optimizer by ZeRO stage (arXiv 1910.02054, section 5); activations by the formulas of
Korthikanti et al. (arXiv 2205.05198, section 4), which count a layer with GELU, dropout and attention whose matrix is
stored. Torch's fused attention stores none: with it "none" costs what "selective" does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.config.contract import GATHERED_CODECS, Contract
from diloco.plan.layout import MeshLayout
from diloco.plan.step import Choice, Job, Precision, Recompute

GATHERED_LAYERS = 2
"""ZeRO-3 holds the layer that is computed, and the next one, which is on its way."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of what stays from step to step, on one GPU."""

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
    """Bytes on the fullest GPU."""

    state: State
    buffers: float
    """Layers that ZeRO-3 has gathered, and the gradient of one that is not yet divided (ZeRO-2 and -3)."""
    activations: float

    @property
    def total(self) -> float:
        return self.state.total + self.buffers + self.activations


def zero_state(parameters: float, precision: Precision, stage: int, ranks: int) -> State:
    """The state of so many parameters when a ZeRO stage (0 to 3) divides it by so many ranks."""
    return State(
        parameters * precision.parameter / (ranks if stage >= 3 else 1),
        parameters * precision.gradient / (ranks if stage >= 2 else 1),
        parameters * precision.optimizer / (ranks if stage >= 1 else 1),
    )


def layer_activations(job: Job, layout: MeshLayout, recompute: Recompute, micro_batch: int) -> float:
    """Bytes that one layer keeps for its backward pass, for one micro-batch on one GPU.

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


def head_activations(job: Job, layout: MeshLayout, micro_batch: int) -> float:
    """Bytes of the last norm, the head's input, and logits in fp32: 4 s b h (1 + v / h) / t."""
    positions = job.sequence_length * micro_batch / layout.cp / layout.tp
    return 4 * positions * (job.model.dim + job.model.vocabulary)


def memory_of(job: Job, choice: Choice) -> Memory:
    """Memory of the first or of the last stage of the pipeline, whichever needs more, or of the only one."""
    first = _stage_memory(job, choice, is_first=True)
    last = _stage_memory(job, choice, is_first=False)
    return max(first, last, key=lambda memory: memory.total)


def _stage_memory(job: Job, choice: Choice, is_first: bool) -> Memory:
    model, layout, precision = job.model, choice.layout, job.precision
    layers = math.ceil(model.layers / layout.pp)
    embeddings = model.embedding_parameters * (2 if layout.pp == 1 and not model.tied else 1)
    shared = (layers * model.shared_layer_parameters + embeddings) / layout.tp
    in_experts = layers * model.expert_layer_parameters / layout.tp / layout.ep
    state = zero_state(shared, precision, choice.stage, layout.shard_ranks)
    state += zero_state(in_experts, precision, choice.stage, layout.expert_shard_ranks)
    of_layer = layer_activations(job, layout, choice.recompute, choice.micro_batch)
    activations = layers * of_layer * (_in_flight(job, choice) if is_first else 1)
    if choice.recompute == "full":  # of the layer that is being computed again
        activations += layer_activations(job, layout, "selective", choice.micro_batch)
    if layout.pp == 1 or not is_first:
        activations += head_activations(job, layout, choice.micro_batch)
    layer = (model.shared_layer_parameters + model.expert_layer_parameters / layout.ep) / layout.tp
    return Memory(state, _buffers(layer, precision, choice.stage), activations)


def _in_flight(job: Job, choice: Choice) -> float:
    """Micro-batches whose activations the first stage keeps: as many as there are stages under 1F1B,
    1 + (p - 1) / (p v) times as many when interleaved."""
    stages, pieces = choice.layout.pp, job.pieces(choice.layout.pp)
    in_flight = min(stages, choice.micro_batches(job))
    return in_flight * (1 + (stages - 1) / (stages * pieces)) if pieces > 1 else in_flight


def _buffers(layer_parameters: float, precision: Precision, stage: int) -> float:
    gathered = GATHERED_LAYERS * layer_parameters * precision.compute if stage == 3 else 0.0
    return gathered + (layer_parameters * precision.gradient if stage >= 2 else 0.0)


# ---------------------------------------------------------------- host


OUTER_BUFFERS = {"sgd": 1, "nesterov": 2, "buffered_nesterov": 3, "delayed_nesterov": 3, "adam": 3}
"""fp32 values per parameter that `diloco.outer.optimizers` keeps: the anchor and each moment."""


def host_memory(contract: Contract, parameters: int, bits: float, peers: int = 1) -> dict[str, float]:
    """Bytes of host memory of one island by purpose, at most; `bits`: of an encoded value. A gathered codec's mean is
    the contributions of all `peers`.

    As docs/how/overview.md counts ("Costs"): a fragment's buffers are there while it is under way.
    """
    fragment = parameters / contract.sync.fragments
    outer = 4 * OUTER_BUFFERS[contract.outer.optimizer]
    feedback = contract.codec.error_feedback is not None
    encoded = fragment * bits / 8
    mean = encoded * (peers if contract.codec.name in GATHERED_CODECS else 1)
    return {
        "anchor and outer moments": outer * parameters,
        "the version that is made": outer * fragment,
        "a contribution under way": (8 if feedback else 4) * fragment + encoded + mean,
        "encoded means that are kept": (contract.membership.backlog_versions + 3) * mean,
        "residual of error feedback": 4.0 * parameters if feedback else 0.0,
        "what eager foresaw": 4.0 * parameters if contract.sync.merge == "eager" else 0.0,
    }
