"""Sizes of a decoder-only transformer, as far as memory, traffic and FLOPs depend on them."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.base.errors import ConfigError, UsageError
from diloco.base.limits import FP32_BYTES, check_parameters
from diloco.config.contract import Contract, ModelSection


def flops_per_token(contract: Contract, vocabulary: int) -> float | None:
    """FLOPs per token, by arithmetic, of training the contract's model with so many rows in its embedding; None where
    the contract does not state its sizes (kinds `hf` and `external`)."""
    if contract.model.kind != "transformer":
        return None
    model = model_of_section(contract.run.name, contract.model, contract.model.vocab_size or vocabulary)
    return model.flops_per_token(contract.data.sequence_length)


def check_size(contract: Contract, vocabulary: int, max_params: int | None) -> None:
    """Refuse a contract's model with so many rows in its embedding, before anything is allocated, where it has more
    than `max_params` parameters; None: more than this machine's memory holds in fp32. Raises ConfigError.

    A model of kind `hf` is counted where it is built (`diloco.models.hf`); an external one is the caller's own object.
    """
    if contract.model.kind != "transformer":
        return
    model = model_of_section(contract.run.name, contract.model, contract.model.vocab_size or vocabulary)
    check_parameters(f"the model of run {contract.run.name}", model.parameters, max_params)


def activation_bytes(contract: Contract, rows: int, pieces: int) -> float:
    """Bytes that training on one of `pieces` of a micro-batch takes for certain, beside weights and optimizer.

    B T (4 V + b L D) / pieces for B sequences of T tokens: logits over V = `rows`, in fp32 for the loss, and the input
    of each of L layers of width D, b = 4 bytes or 2 under bf16, which activation checkpointing keeps, too. Not so in
    all architectures of kind `hf`: there logits alone.
    """
    section = contract.model
    kept = section.layers * section.dim if section.kind == "transformer" else 0
    value_bytes = FP32_BYTES if contract.inner.precision == "fp32" else 2
    tokens = contract.inner.batch_size * contract.data.sequence_length
    return tokens / pieces * (FP32_BYTES * rows + value_bytes * kept)


BYTE_VOCABULARY = 256
USUAL_VOCABULARY = 32_768
"""Vocabulary of a model of which only the number of parameters is known; that of the published presets."""
WIDTH_PER_LAYER = 128
"""Width / layers of such a model. GPT-3 175B has 12,288 and 96 (arXiv 2005.14165)."""


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
    """Experts that a token goes through, shared ones left out."""
    ffn_load: float = 1.0
    """Width of all feed-forward layers that a token goes through in a block, of a dense one's."""

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters, by arithmetic, of one embedding; the head is another one if it is not tied."""
        return self.vocabulary * self.dim

    @property
    def shared_layer_parameters(self) -> float:
        """Number of parameters, by arithmetic, of one layer without its experts."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return (self.parameters - self.expert_parameters - embeddings) / self.layers

    @property
    def expert_layer_parameters(self) -> float:
        """Number of parameters, by arithmetic, of all experts of one layer."""
        return self.expert_parameters / self.layers

    @property
    def active_parameters(self) -> float:
        """Number of parameters, by arithmetic, that one token goes through: N of "6 N D"."""
        idle = 1 - self.active / self.experts if self.experts else 0.0
        return self.parameters - idle * self.expert_parameters

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of training on one token, by arithmetic, forwards and backwards: 6 N of the active parameters, and
        12 L h s of attention (arXiv 2204.02311, appendix B), whose causal half is counted in full, as is usual for
        MFU. Recomputation in the backward pass is not counted."""
        return 6 * self.active_parameters + 12 * self.layers * self.dim * sequence_length


def model_of_section(name: str, section: ModelSection, vocabulary: int) -> Model:
    """Sizes of a contract's transformer (`diloco.models`) for the plan, to the parameter.

    Raises ConfigError for a model whose sizes the contract does not tell (kinds `hf` and `external`).
    """
    if section.kind != "transformer":
        raise ConfigError(f"a model of kind {section.kind!r} has its sizes elsewhere", "say how large: --params 7B")
    dim, kv_heads, experts = section.dim, section.kv_heads or section.heads, section.experts
    head_dim, width = dim // section.heads, section.expert_width if experts else section.ffn_width
    norms = 2 * dim + (2 * head_dim if section.qk_norm else 0)
    attention = dim * (section.heads + 2 * kv_heads) * head_dim + dim * dim
    shared = section.shared_experts if experts else 1
    router = experts * (dim + (1 if section.balance == "bias" else 0))
    layer = norms + attention + 3 * dim * width * (experts + shared) + router
    embeddings = vocabulary * dim * (1 if section.tied else 2)
    active = section.experts_per_token if experts else 1
    return Model(
        name, section.layers * layer + embeddings + dim, section.layers * 3 * dim * width * experts, section.layers,
        dim, section.heads, kv_heads, width, vocabulary, section.tied, experts, active,
        (active + shared if experts else 1) * width / section.ffn_width,
    )  # fmt: skip


def model_of_size(parameters: int, experts: int = 0, active: int = 1) -> Model:
    """Sizes of a planned model of exactly so many parameters: 128 times as wide as deep, heads of 128 (below a width of
    2048 of 64), every expert as wide as a dense layer would be, head and embedding apart.

    Raises UsageError where the embeddings alone are more.
    """
    check_experts(experts, active)
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
        experts, active, active if experts else 1,
    )  # fmt: skip


def check_experts(experts: int, active: int) -> None:
    """Refuse options of the plan whose numbers of experts make no mixture. Raises UsageError."""
    if experts == 1 or active < 1 or active > max(experts, 1):
        cause = f"{experts} experts of which a token goes through {active}"
        raise UsageError(cause, "give --experts at least 2, and --active from 1 to as many")
