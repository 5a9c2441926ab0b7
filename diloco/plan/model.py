"""Sizes of a decoder-only transformer, as far as memory, traffic and FLOPs depend on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.config import ModelSection
from diloco.errors import ConfigError, UsageError

FFN_MULTIPLE = 32
"""As in `diloco.models.transformer`, which needs torch; a test compares the two."""
BYTE_VOCABULARY = 256
USUAL_VOCABULARY = 32_768
"""Of a model of which only the number of parameters is known; that of the published presets."""
WIDTH_PER_LAYER = 128
"""Of such a model: width / layers. GPT-3 175B has 12,288 and 96 (arXiv 2005.14165)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer with SwiGLU feed-forward layers, in each of which `experts` may stand (0: a dense model)."""

    name: str
    parameters: int
    """All of them, each expert and the embedding included."""
    expert_parameters: int
    """Those inside experts, in all layers."""
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    """Width of one feed-forward layer, or of one expert."""
    vocabulary: int
    tied: bool
    experts: int = 0
    active: int = 1
    """Experts that a token goes through."""

    @property
    def embedding_parameters(self) -> int:
        """Of one embedding; the head is another one if it is not tied."""
        return self.vocabulary * self.dim

    @property
    def shared_layer_parameters(self) -> float:
        """Of one layer, without its experts."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return (self.parameters - self.expert_parameters - embeddings) / self.layers

    @property
    def expert_layer_parameters(self) -> float:
        """Of all experts of one layer."""
        return self.expert_parameters / self.layers

    @property
    def active_parameters(self) -> float:
        """Those that one token goes through: N of "6 N D"."""
        idle = 1 - self.active / self.experts if self.experts else 0.0
        return self.parameters - idle * self.expert_parameters

    @property
    def kv_dim(self) -> int:
        return self.dim // self.heads * self.kv_heads


def ffn_width(section: ModelSection) -> int:
    """Width of the SwiGLU layer: as given, or 8/3 of `dim`, rounded up."""
    return section.ffn_dim or math.ceil(8 * section.dim / 3 / FFN_MULTIPLE) * FFN_MULTIPLE


def model_of_section(name: str, section: ModelSection, vocabulary: int, experts: int = 0, active: int = 1) -> Model:
    """The transformer of a contract (`diloco.models.transformer`), to the parameter.

    With `experts`, each of its feed-forward layers becomes so many, and a router. Raises ConfigError for a model
    whose sizes the contract does not tell (kinds `hf` and `external`).
    """
    if section.kind != "transformer":
        raise ConfigError(f"a model of kind {section.kind!r} has its sizes elsewhere", "say how large: --params 7B")
    _check_experts(experts, active)
    dim, kv_heads, ffn_dim = section.dim, section.kv_heads or section.heads, ffn_width(section)
    head_dim = dim // section.heads
    norms = 2 * dim + (2 * head_dim if section.qk_norm else 0)
    attention = dim * (section.heads + 2 * kv_heads) * head_dim + dim * dim
    in_experts = 3 * dim * ffn_dim * experts
    feed_forward = in_experts + dim * experts if experts else 3 * dim * ffn_dim
    embeddings = vocabulary * dim * (1 if section.tied else 2)
    parameters = section.layers * (norms + attention + feed_forward) + embeddings + dim
    return Model(
        name, parameters, section.layers * in_experts, section.layers, dim, section.heads, kv_heads, ffn_dim,
        vocabulary, section.tied, experts, active,
    )  # fmt: skip


def model_of_size(parameters: int, experts: int = 0, active: int = 1) -> Model:
    """A model of exactly so many parameters, in a usual shape: 128 times as wide as deep, heads of 128 (below a width
    of 2048 of 64), every expert as wide as a dense layer would be, head and embedding apart.

    Raises UsageError where the embeddings alone are more.
    """
    _check_experts(experts, active)
    per_width_squared = 4 + 8 * max(experts, 1)  # parameters of a layer: attention 4, each SwiGLU of 8/3 of it 8
    width = (parameters * WIDTH_PER_LAYER / per_width_squared) ** (1 / 3)
    head_dim, multiple = (128, 8) if width >= 2048 else (64, 4)
    heads = max(multiple, round(width / head_dim / multiple) * multiple)
    dim = heads * head_dim
    tied = parameters < 10**9
    inside = parameters - USUAL_VOCABULARY * dim * (1 if tied else 2)
    if inside < per_width_squared * dim**2:
        cause = f"{parameters:,} parameters are too few for a vocabulary of {USUAL_VOCABULARY:,}"
        raise UsageError(cause, "name a preset (`diloco config presets`) or a contract")
    layers = round(inside / (per_width_squared * dim**2))
    layers = round(layers / 4) * 4 if layers >= 16 else layers  # so that pipelines can be cut evenly
    in_experts = round(inside * 8 * experts / per_width_squared)
    ffn_dim = round(8 * dim / 3 / 128) * 128
    return Model(
        f"{parameters / 1e9:g}B", parameters, in_experts, layers, dim, heads, heads, ffn_dim, USUAL_VOCABULARY, tied,
        experts, active,
    )  # fmt: skip


def _check_experts(experts: int, active: int) -> None:
    if experts == 1 or active < 1 or (experts and active > experts):
        cause = f"{experts} experts of which a token goes through {active}"
        raise UsageError(cause, "give --experts at least 2, and --active from 1 to as many")
