"""Contracts and sites: strict TOML schemas, a digest for the contract, and where every value came from.

A *contract* (`configs/*.toml`) says what is trained; it is the same for all peers, hashed, and fetched at join.
A *site* (`peers/*.toml`) says who shows up; it is local and never hashed. A key lives in one schema or the
other: in the wrong file it is an error that names the right one. Contracts come from other people, so they are
data, never code.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from diloco.base.errors import ConfigError, IncompatibleError
from diloco.config.presets import PRESETS

CONTRACT_VERSION = 1

GATHERED_CODECS = ("topk", "dct", "lowrank")
"""Those whose sums do not stay small: every member gets every contribution."""

FLOAT_CODECS = ("fp32", "fp16", "bf16")
"""Those that can carry weights, and not only differences of weights."""

LEASE_ROUNDS = 3
"""Rounds of data that every member holds: one to train on, and two more for rounds that are skipped."""

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MOST_S = 1e9
"""Thirty years stand for never: clocks do not wait much longer, and JSON, as which contracts travel, has no inf."""
Seconds = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MOST_S, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""Of Adam: at 1 a moment takes nothing in, and what corrects its bias would be divided by zero."""
Glob = Annotated[str, Field(min_length=1, max_length=100)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# ---------------------------------------------------------------- contract: what is trained


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    """Name of the run: lower-case letters, digits, dot, dash, underscore."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data."""
    total_tokens: PositiveInt
    """The run ends at the first version with at least this many committed tokens."""
    contract_version: int = CONTRACT_VERSION


class MembershipSection(Section):
    start_peers: PositiveInt = 1
    """The run starts when this many peers are there; under `gossip` after `timeouts.join_s` in any case."""
    policy: Literal["sync", "quorum", "async", "gossip"] = "sync"
    """When a version closes. `sync`: when all live members have contributed; `quorum`: when `quorum_peers` have, and
    whoever follows within `grace_s`; `async`: when one has, and whoever follows within `grace_s`, or for as long as
    those who have still do inner steps (`sync.overlap`). `gossip`: there are no versions that all agree on; peers swap
    weights in pairs, each has its own, and a final average ends the run (NoLoCo, for very many peers; `[gossip]`)."""
    sync_versions: Annotated[int, Field(ge=0)] = 0
    """For `quorum` and `async`: the first so many versions close as under `sync`. From random weights it matters."""
    quorum_peers: PositiveInt = 2
    """For `quorum`."""
    grace_s: Seconds = 5.0
    """For `quorum` and `async`."""
    without_majority: Literal["wait", "continue"] = "wait"
    """When most of the view is gone: commits `wait` (never a fork), or go on in a lineage apart (`continue`); where
    lineages meet, the one with more committed tokens goes on and the work of the other is void."""
    continue_after_s: PositiveSeconds = 60.0
    """For `continue`: how long to wait for the majority first."""
    offences_allowed: PositiveInt = 3
    """Contributions that no honest peer sends, before their sender is put out of the run."""
    max_norm_ratio: NonNegativeFloat = 100.0
    """A part so many times larger than that of the other contributors (root mean square, for the same tokens) is
    refused; 0: none is."""
    stragglers: Literal["wait", "cut"] = "wait"
    """`cut`: a peer for which most others wait ends its inner steps early and contributes what it has; a peer that was
    stopped for a while so keeps nobody waiting. Goes with `outer.weighting = "tokens"`."""
    match_deadline_s: PositiveSeconds = 120.0
    """How long half of the live members, when they are ready, wait for a slower one before the version closes without
    it; fewer than half wait four times as long."""
    round_deadline_s: PositiveSeconds = 300.0
    """After this long a round is skipped: the peer trains on and keeps its progress."""
    backlog_versions: Annotated[int, Field(ge=1)] = 4
    """How many committed means each member keeps for peers that fell behind; more, up to the size of one state, while
    somebody copies the state."""


class DataSection(Section):
    source: Literal["stdlib", "text", "shards", "hf"] = "stdlib"
    """`stdlib`: the Python standard library's source text; `text`: text or JSONL files; `shards`: packed tokens
    (`diloco data pack`); `hf`: a `datasets` source."""
    paths: tuple[str, ...] = ()
    """Files, folders or globs, relative to the site's `data.root`. Empty for `stdlib`."""
    text_field: str = "text"
    """The field of a JSONL or `datasets` record that holds the text."""
    tokenizer: str = "bytes"
    """`bytes` (256 tokens), or a local Hugging Face tokenizer folder (extra `hf`)."""
    sequence_length: PositiveInt = 128
    """Tokens in one block, which is one training sequence."""
    holdout: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """Share of the files (or of the tokens of one file) kept out of training for evaluation."""


FFN_MULTIPLE = 32
EXPERT_MULTIPLE = 8
"""Of an expert's width: grouped products want rows of 16 bytes."""


class ModelSection(Section):
    kind: Literal["transformer", "hf", "external"] = "transformer"
    """`transformer`: ours; `hf`: a causal LM from a local Hugging Face config; `external`: the library caller's."""
    preset: str | None = None
    """Start from the sizes of a preset (`diloco config presets` lists them); other keys override it."""
    hf_config: str | None = None
    """Folder with a Hugging Face `config.json`, relative to the site's `data.root` (kind `hf`)."""
    layers: PositiveInt = 4
    dim: PositiveInt = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt | None = None
    """Key/value heads for grouped-query attention; the same as `heads` when not given."""
    ffn_dim: PositiveInt | None = None
    """Width of the SwiGLU layer; 8/3 of `dim`, rounded up to a multiple of 32, when not given."""
    vocab_size: PositiveInt | None = None
    """Taken from the tokenizer when not given."""
    rope_theta: PositiveFloat = 10_000.0
    qk_norm: bool = True
    tied: bool = True
    """Whether the output head shares the embedding's weights."""
    experts: Annotated[int, Field(ge=0)] = 0
    """Experts in each block, of which a token takes some; 0: a dense model, and the keys below say nothing."""
    experts_per_token: PositiveInt = 2
    shared_experts: Annotated[int, Field(ge=0)] = 0
    """Experts beside those, that every token takes."""
    expert_dim: PositiveInt | None = None
    """Width of one expert, a multiple of 8; `ffn_dim` over the experts that a token takes, when not given."""
    balance: Literal["bias", "loss"] = "bias"
    """How experts are kept equally busy: a bias in the choice that moves by the sign of the load error, without an
    auxiliary loss (DeepSeek-V3), or the auxiliary loss of Switch."""
    balance_rate: NonNegativeFloat = 0.001
    """For `bias`: how far it moves in an inner step."""
    balance_loss: NonNegativeFloat = 0.01
    """For `loss`: what it is multiplied by."""

    @property
    def ffn_width(self) -> int:
        """Width of the SwiGLU layer: as given, or 8/3 of `dim` (three matrices then cost what two of 4 x dim do)."""
        return self.ffn_dim or math.ceil(8 * self.dim / 3 / FFN_MULTIPLE) * FFN_MULTIPLE

    @property
    def expert_width(self) -> int:
        """Width of one expert: as given, or such that a token costs what it does in the dense model."""
        used = self.experts_per_token + self.shared_experts
        return self.expert_dim or math.ceil(self.ffn_width / used / EXPERT_MULTIPLE) * EXPERT_MULTIPLE

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if not self.experts:
            return self
        if self.kind != "transformer":
            raise ValueError(f"experts is for kind 'transformer'; kind {self.kind!r} brings its own")
        if not self.experts_per_token <= self.experts or self.experts < 2:
            raise ValueError(
                f"experts ({self.experts}) must be at least 2 and experts_per_token ({self.experts_per_token})"
            )
        for name, width in (("dim", self.dim), ("expert_dim", self.expert_dim or 0)):
            if width % EXPERT_MULTIPLE:
                raise ValueError(f"{name} ({width}) must be a multiple of {EXPERT_MULTIPLE} in a mixture of experts")
        return self

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) must be a multiple of heads ({self.heads})")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim / heads ({self.dim // self.heads}) must be even for the rotary embedding")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.kind == "hf" and not self.hf_config:
            raise ValueError("kind 'hf' needs hf_config, the folder of a Hugging Face config.json")
        return self


class InnerSection(Section):
    steps: PositiveInt = 50
    """H: inner steps between two syncs of the same parameter."""
    sized_by: Literal["contract", "speed"] = "contract"
    """How many of them a peer does. `contract`: H; `speed`: the fastest peer H, any other as many as it can meanwhile
    (DyLU, arXiv 2401.09135), H / 16 at least. Goes with `outer.weighting = "tokens"`."""
    comm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a round that its exchange may take, beyond the steps that overlap with it (`sync.overlap`): where it
    takes more, peers do more steps than H, up to `most_steps`. 0: H, whatever it takes."""
    most_steps: PositiveInt | None = None
    """For `comm_share`; 4 H when not given."""
    batch_size: PositiveInt = 8
    """Sequences in one micro-batch of one peer."""
    accumulation: PositiveInt = 1
    """Micro-batches per inner step."""
    lr: PositiveFloat = 4e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """On matrices only; norms and biases are not decayed."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon`: matrices inside layers by Muon (needs torch 2.9), all else by AdamW."""
    muon_lr: PositiveFloat = 0.02
    """For `muon`: the learning rate of its matrices, scheduled as `lr` is, which AdamW takes for all else."""
    muon_momentum: Fraction = 0.95
    """For `muon`."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Over committed tokens: `cosine`, warm-up/stable/decay, or constant after the warm-up."""
    warmup: Fraction = 0.05
    """Share of `run.total_tokens` with a rising learning rate."""
    decay: Fraction = 0.2
    """Share of `run.total_tokens` with a falling learning rate (`wsd`)."""
    final_lr: Fraction = 0.1
    """Learning rate at the end, as a share of `lr`."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: autocast; weights and optimizer state stay fp32."""

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.accumulation


SHARED_OPTIMIZERS = ("nesterov", "sgd")
"""Those that can take a share of a step."""


class OuterSection(Section):
    optimizer: Literal["nesterov", "delayed_nesterov", "buffered_nesterov", "sgd", "adam"] = "nesterov"
    lr: PositiveFloat = 0.7
    momentum: Fraction = 0.9
    """For `nesterov`, `delayed_nesterov` and `buffered_nesterov`."""
    buffer: PositiveInt = 8
    """For `delayed_nesterov` and `buffered_nesterov`: versions of a fragment from one refreshing of the momentum to the
    next. For versions of few contributions: about twice as many as close while one peer makes its own."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """For `adam`."""
    eps: PositiveFloat = 0.1
    """For `adam`: large, as DiLoCo found it must be."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Outer steps of each fragment that only average, before the optimizer begins: helps runs from random weights."""
    weighting: Literal["uniform", "tokens"] = "uniform"
    """A contribution's weight in the mean. `tokens` is the quantity times rate of Decoupled DiLoCo as well: the rate,
    tokens of an inner step, is the contract's and so the same for all."""
    averaging: Literal["mean", "radial"] = "mean"
    """`radial`: lengths and directions of the contributions are averaged apart, so that the length of the mean does not
    fall as peers get more (Decoupled DiLoCo)."""
    partial: Literal["whole", "share"] | None = None
    """A version that counts some of the trainers only takes a `whole` outer step by their mean, or a `share` of one, by
    their weight beside all trainers' (`nesterov` and `sgd`). Not given: `share` where each may make versions of its
    own (`membership.policy` `async`), if the optimizer can; else `whole`."""
    staleness_power: Annotated[float, Field(ge=0, le=4)] = 0.0
    """A contribution during which s times as many versions closed as there are trainers, s > 1, weighs s to the power
    of minus this; 0: as much as any other. 0.5 is FedBuff's and FedAsync's."""
    alignment: Literal["none", "momentum"] = "none"
    """`momentum`: late contributions are turned towards the outer momentum, and what is against it is made less, the
    more the later they are (after HeLoCo, arXiv 2606.00271)."""


SPARSE_CODECS = ("topk", "dct")

READ_BY = {
    "density": SPARSE_CODECS, "values": SPARSE_CODECS, "mean": SPARSE_CODECS,
    "rank": ("lowrank",), "columns": ("lowrank",),
}  # fmt: skip
"""Codecs that read a key; any other takes its default only."""

CODE_BITS = {"int8": 8, "int4": 4, "e3m0": 4, "two_bit": 2, "sign": 1}
"""Of the codecs with blocks."""


class CodecChoice(Section):
    """One codec and its keys."""

    name: Literal["fp32", "fp16", "bf16", "int8", "int4", "e3m0", "two_bit", "sign", "topk", "dct", "lowrank"] = "int8"
    """Bits a value, in this order, before zstd: 32, 16, 16, 8.125, 4.25, 4.25, 2.25, 1.0625; then as their keys say."""
    block: PositiveInt | None = None
    """Elements that share one scale, or one codebook; a divisor of 1024. Chosen by the codec when not given: `int8`,
    `sign`, `two_bit` 256; `int4`, `e3m0` 64; `statistical` `int4` 1024, and for `int8` the whole part."""
    scale: Literal["absmax", "statistical"] = "absmax"
    """For `int8` and `int4`. `absmax`: a grid up to the largest value of a block; `statistical`: bins over 6 (`int8`)
    or 2.5 (`int4`) standard deviations, each decoded as the mean of what was in it (INTELLECT-1), as in `two_bit`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """For `int8`, `int4` and `e3m0`. `stochastic`: up or down by chance, so that the expected value is the value; at
    least twice the squared error."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.03125
    """Share of the values that are sent (`topk`, `dct`): the largest of every 4096."""
    values: Literal["fp16", "int8", "two_bit"] = "two_bit"
    """How these are sent."""
    mean: Literal["senders", "all"] = "senders"
    """Whose weights a value's mean is divided by (`topk`, `dct`): of those who sent it, or of all who contribute."""
    rank: PositiveInt = 8
    """For `lowrank`: a part is sent as the product of two matrices with so many columns and rows."""
    columns: PositiveInt = 1024
    """For `lowrank`: a part is seen as a matrix with so many columns, or as a square one if that has fewer."""
    zstd: bool = True
    """Compress the encoded bytes once more, losslessly, where that saves 2 %."""

    @model_validator(mode="after")
    def _quantised(self) -> Self:
        bits = CODE_BITS.get(self.name)
        if bits and self.block and (1024 % self.block or self.block * bits % 8):
            raise ValueError(f"codec.block ({self.block}) must divide 1024, and {bits} bits for each must fill bytes")
        if self.scale == "statistical" and self.name not in ("int8", "int4"):
            raise ValueError(f"codec.scale 'statistical' is for int8 and int4, not for {self.name}")
        if self.rounding == "stochastic" and (self.name not in ("int8", "int4", "e3m0") or self.scale != "absmax"):
            raise ValueError("codec.rounding 'stochastic' is for int8, int4 and e3m0 with codec.scale 'absmax'")
        return self

    @model_validator(mode="after")
    def _read(self) -> Self:
        for key, readers in READ_BY.items():
            if self.name not in readers and getattr(self, key) != CodecChoice.model_fields[key].default:
                raise ValueError(f"codec.{key} is for {' and '.join(readers)}, not for {self.name}")
        return self


class CodecGroup(CodecChoice):
    """Parameters with a codec of their own. A key that is not given has its default, not the value in `[codec]`."""

    match: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=16)]
    """Names of parameters, with `*`, `?` and `[...]` as in a shell: `["*norm*", "*.bias"]`. A parameter is in the first
    group that it fits. Globs and not regular expressions, which in a stranger's contract may take for ever."""


class CodecSection(CodecChoice):
    error_feedback: Annotated[float, Field(ge=0, le=1)] | None = None
    """What the codec dropped is added to the next pseudo-gradient, times this decay; not given: it is lost. It is
    remembered for 1 / (1 - decay) rounds, which must be few of the run's: SparseLoCo takes 0.95 for 160 rounds, without
    outer momentum; for 30, and beside momentum, 0.25 to 0.5 is better (`scripts/bench-quality`)."""
    residual_after_rejoin: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of it that a peer keeps when it had to copy the state, for it was measured on another anchor, or when a
    version counts what it sent in an earlier life, and the residual with that."""
    groups: Annotated[tuple[CodecGroup, ...], Field(max_length=64)] = ()
    """Each a `[[codec.groups]]` with `match` and the keys of a codec; `[codec]` is for what no group matches. No part
    has parameters of two groups."""

    @property
    def by_group(self) -> tuple[CodecChoice, ...]:
        """Of the parameters that are in no group, then of each group (`diloco.outer.fragments.Fragment.groups`)."""
        return (self, *self.groups)


class SyncSection(Section):
    fragments: PositiveInt = 1
    """P: the model is cut in this many fragments; one is synchronised every H / P inner steps."""
    fragment_order: Literal["strided", "sequential"] = "strided"
    """Layer i goes to fragment i mod P, or consecutive layers stay together."""
    part_elements: Annotated[int, Field(ge=1024, le=2**22)] | None = None
    """Elements of one part (the unit that has an owner and a checksum); chosen by fragment size when not given."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Tau: inner steps that go on while a contribution is on its way; at most H / P."""
    merge: Literal["carry", "mix", "eager"] = "carry"
    """What was trained meanwhile: all of it is carried to the new anchor (`carry`); local weights and anchor are mixed
    (`mix`, Streaming DiLoCo); `carry`, and our own share of the outer step is taken at once (`eager`)."""
    mix_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """For `mix`: the share of the local weights that stays."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if self.part_elements is not None and self.part_elements % 1024:
            raise ValueError(f"part_elements ({self.part_elements}) must be a multiple of 1024")
        return self


class GossipSection(Section):
    """The end of a run under `membership.policy = "gossip"`: peers average plainly until they are alike."""

    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.005
    """A peer is done when the last few it met were no further from it (root mean square of the difference of the
    weights over that of the weights). What `fp16` and `bf16` round away stays: 0.0002 and 0.002."""
    final_swaps: PositiveInt = 64
    """Most swaps of a peer in the final average; each halves the variance between two."""
    final_s: Annotated[float, Field(gt=0, le=300)] = 120.0
    """Longest time that a peer goes on averaging; then it ends with what spread there is, and says so."""


class EvalSection(Section):
    every_versions: Annotated[int, Field(ge=0)] = 5
    """Held-out loss every so many versions, by the first trainer of the view; 0: only at the end. Under `gossip` a
    peer's swaps are its versions, and the first by name of those it knows evaluates."""
    sequences: PositiveInt = 128
    """Held-out sequences per evaluation."""


class Contract(Section):
    """All that the peers of one run must share."""

    run: RunSection
    membership: MembershipSection = MembershipSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    codec: CodecSection = CodecSection()
    sync: SyncSection = SyncSection()
    gossip: GossipSection = GossipSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        gathered = [codec.name for codec in self.codec.by_group if codec.name in GATHERED_CODECS]
        if self.outer.averaging == "radial" and gathered:
            raise ValueError(f"outer.averaging 'radial' needs a codec whose mean is made once, not {gathered[0]!r}")
        if self.inner.steps % self.sync.fragments:
            raise ValueError(
                f"inner.steps ({self.inner.steps}) must be a multiple of sync.fragments ({self.sync.fragments})"
            )
        if self.model.kind == "transformer" and self.sync.fragments > self.model.layers:
            raise ValueError(
                f"sync.fragments ({self.sync.fragments}) must be at most model.layers ({self.model.layers}): "
                f"a fragment holds at least one layer"
            )
        if self.inner.most_steps is not None and self.inner.most_steps < self.inner.steps:
            raise ValueError(f"inner.most_steps ({self.inner.most_steps}) is less than inner.steps")
        if self.sync.overlap > self.steps_per_round:
            raise ValueError(
                f"sync.overlap ({self.sync.overlap}) must be at most inner.steps / sync.fragments "
                f"({self.steps_per_round}): a version is agreed on before the next one begins"
            )
        if self.sync.merge == "eager" and self.outer.optimizer == "adam":
            raise ValueError("sync.merge 'eager' needs an outer step that is linear: outer.optimizer sgd or a nesterov")
        if self.sync.merge != "carry" and not self.sync.overlap:
            raise ValueError(f"sync.merge {self.sync.merge!r} does nothing without sync.overlap")
        self._partial_consistent()
        if self.membership.policy == "gossip":
            self._check_gossip()
        return self

    def _partial_consistent(self) -> None:
        outer = self.outer
        if outer.partial == "share" and outer.optimizer not in SHARED_OPTIMIZERS:
            raise ValueError(
                f"outer.partial 'share' is for outer.optimizer {' and '.join(SHARED_OPTIMIZERS)}, not for "
                f"{outer.optimizer}: that one takes whole steps"
            )
        if self.partial == "share" and self.sync.merge == "eager":
            raise ValueError(
                "sync.merge 'eager' takes outer steps ahead as if all contributed: with membership.policy 'async' set "
                "sync.merge to 'carry', or outer.partial to 'whole'"
            )
        if outer.alignment == "momentum" and not outer.optimizer.endswith("nesterov"):
            raise ValueError(f"outer.alignment 'momentum' needs a momentum, which {outer.optimizer} has not")

    @property
    def partial(self) -> str:
        """`OuterSection.partial`, chosen."""
        shared = self.membership.policy == "async" and self.outer.optimizer in SHARED_OPTIMIZERS
        return self.outer.partial or ("share" if shared else "whole")

    def _check_gossip(self) -> None:
        """Gossip swaps whole weights between two peers, and has no versions that all agree on."""
        wanted: Mapping[str, tuple[bool, str]] = {
            "codec.name": (all(codec.name in FLOAT_CODECS for codec in self.codec.by_group), "fp32, fp16 or bf16"),
            "codec.error_feedback": (self.codec.error_feedback is None, "left out: weights are swapped, not progress"),
            "outer.optimizer": (self.outer.optimizer == "nesterov", "'nesterov', with NoLoCo's update in its place"),
            "outer.warmup_steps": (self.outer.warmup_steps == 0, "0"),
            "outer.weighting": (self.outer.weighting == "uniform", "'uniform'"),
            "outer.partial": (self.outer.partial is None, "left out: a swap is a whole step"),
            "outer.staleness_power": (self.outer.staleness_power == 0, "0"),
            "outer.alignment": (self.outer.alignment == "none", "'none'"),
            "outer.averaging": (self.outer.averaging == "mean", "'mean'"),
            "sync.fragments": (self.sync.fragments == 1, "1"),
            "sync.overlap": (self.sync.overlap == 0, "0: inner steps go on during a swap as it is"),
            "inner.comm_share": (self.inner.comm_share == 0, "0"),
            "inner.sized_by": (self.inner.sized_by == "contract", "'contract': nobody waits"),
            "membership.stragglers": (self.membership.stragglers == "wait", "'wait', which nobody does"),
            "membership.without_majority": (self.membership.without_majority == "wait", "'wait': nobody votes"),
            "membership.sync_versions": (self.membership.sync_versions == 0, "0"),
            "data.source": (self.data.source != "hf", "one that can be read in any order, which a stream cannot"),
        }
        for key, (fits, wish) in wanted.items():
            if not fits:
                raise ValueError(f"membership.policy 'gossip' wants {key} to be {wish}")
        largest = 2 * (1 - self.outer.momentum**2)
        if self.outer.lr >= largest:
            raise ValueError(
                f"under gossip outer.lr ({self.outer.lr}) must be below 2 (1 - outer.momentum^2) = {largest:.3g}, or "
                f"peers drift apart; NoLoCo has outer.lr 0.7 and outer.momentum 0.5"
            )

    @property
    def steps_per_round(self) -> int:
        """Inner steps between two rounds: H / P."""
        return self.inner.steps // self.sync.fragments

    @property
    def rounds_vary(self) -> bool:
        """Whether peers size their rounds by what they measure."""
        return self.inner.sized_by == "speed" or self.inner.comm_share > 0

    @property
    def most_steps_per_round(self) -> int:
        """The same, where the exchange is slow (`InnerSection.comm_share`)."""
        if not self.inner.comm_share:
            return self.steps_per_round
        return (self.inner.most_steps or 4 * self.inner.steps) // self.sync.fragments

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one peer."""
        return self.inner.sequences_per_step * self.data.sequence_length

    @property
    def blocks_per_round(self) -> int:
        """Data blocks one peer trains on between two rounds, at most."""
        return self.inner.sequences_per_step * self.most_steps_per_round

    @property
    def lease_blocks(self) -> int:
        """Data blocks that every member holds at least at the start of a round."""
        return LEASE_ROUNDS * self.blocks_per_round

    def to_json(self) -> str:
        """Canonical text: all effective values, keys sorted. This is what travels and what is hashed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json()`, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


# ---------------------------------------------------------------- site: who shows up


class PeerSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """This peer's name in the run; the host name and a random suffix when not given."""


class DeviceSection(Section):
    kind: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: PositiveInt = 1
    """Processes that `diloco peer` starts on this machine, for instance one per GPU; `[mesh]` says how they share the
    work. Under torchrun or srun it takes the ranks it is given."""
    threads: PositiveInt | None = None
    """CPU threads for torch; torch's own default when not given."""
    compile: bool = False
    """`torch.compile` the model, or its blocks where ranks share it (needs a compiler)."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass in place of keeping them. `full`: all of a block's but its input;
    `selective`: all but the results of matrix products and attention."""
    peak_tflops: PositiveFloat | None = None
    """What one rank's device can do at most in the contract's precision (dense, 10^12 operations per second), for MFU.
    For bf16 on a known GPU that of `diloco plan`; otherwise not known when not given, and there is no MFU."""
    profile_steps: Annotated[int, Field(ge=0)] = 0
    """Inner steps that each rank traces with torch's profiler, once, into `profile/rank-N.json.gz` of the peer's
    folder (`diloco peer --profile`); 0: none."""
    profile_after: Annotated[int, Field(ge=0)] = 10
    """Inner steps before that: the first ones are not like the others."""
    outer_step: Literal["auto", "ahead", "in_place"] = "auto"
    """`ahead`: average and outer step are made while the mean arrives, in RAM of their own: one fragment in fp32 for
    the anchor and one for each of the outer optimizer's slots. `in_place`: once the version closed, in the outer state
    itself, which takes nothing more, but training waits for it. `auto`: ahead for a single process, in place on an
    island of several ranks, which divide the time, too; with `sync.overlap`, and RAM to spare, ahead hides it there as
    well. (Gossip has outer steps of its own.)"""
    compile_codecs: Literal["auto", "on", "off"] = "auto"
    """Codecs and the Nesterov outer step in C, compiled once into the user's cache folder, with the same bits;
    `auto`: if there is a compiler. Of several peers in one process the first decides for all."""
    step_s: Seconds = 0.0
    """Shortest time of one inner step; 0: as fast as it goes. For drills: as slow as a large model, but at no cost."""
    speed: Annotated[float, Field(gt=0, le=1)] = 1.0
    """For drills: sleep after each inner step, so that all of them take 1 / `speed` times as long."""


MeshSize = Annotated[int, Field(ge=-1)]
"""Ranks along one dimension of the mesh; -1: all that the other dimensions leave."""


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]


class MeshSection(Section):
    """How the ranks of this island share the work: `dp_replicate` x `pp` x `dp_shard` x `cp` x `ep` x `tp` is
    their number. `cp` and `ep` divide what their ranks have in common as `dp_shard` does.

    What peers exchange does not depend on it, so islands of different meshes train one model together.
    """

    dp_replicate: MeshSize = 1
    """Copies of the model, each of which trains on rows of its own."""
    pp: MeshSize = 1
    """Pipeline parallel: ranks that have some layers each. They are far from each other, so in different nodes where
    there are several: little goes between them. A step has `inner.accumulation` x `micro_batches` micro-batches; with m
    of them, ranks wait for (pp - 1) / (m + pp - 1) of a step under `gpipe` and `1f1b`, so m should be 4 pp or more."""
    micro_batches: PositiveInt = 1
    """Pieces that a rank's share of each micro-batch of the contract is cut into; more keep a pipeline busy."""
    schedule: PipelineSchedule = "1f1b"
    """For `pp` > 1, in which order micro-batches go through. `gpipe`: all forwards, then all back (arXiv 1811.06965);
    `1f1b`: back as soon as possible, so that a rank keeps the activations of `pp` micro-batches at most (2104.04473);
    `interleaved-1f1b`: the same with several stages on each rank, so that waiting is shorter; `zero-bubble`: who would
    wait computes gradients of weights (ZB-1P, 2401.10241); `zbv`: the same with stages that go there and back."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved-1f1b` and `zero-bubble`; `zbv` has 2."""
    dp_shard: MeshSize = -1
    """Ranks that share one copy, as `shard` says, and train on rows of their own."""
    cp: MeshSize = 1
    """Context parallel: ranks that share each sequence, a piece each."""
    cp_method: Literal["heads", "ring"] = "heads"
    """How attention sees the whole. `heads`: in attention each rank has some heads of the whole sequences, so `cp` must
    divide them (Ulysses); `ring`: keys and values go round (for any number of heads; on GPUs with bf16)."""
    ep: MeshSize = 1
    """Expert parallel: ranks that share the experts of each block, and train on rows of their own."""
    tp: MeshSize = 1
    """Tensor parallel: ranks that share each matrix and train on the same rows. Consecutive, so inside one node."""
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """What is divided over `dp_shard`: nothing (DDP: then those ranks are copies, too); the optimizer's state and the
    master weights (ZeRO-1); gradients as well (ZeRO-2); parameters as well, gathered block by block when they are
    needed (ZeRO-3, FSDP). The further down, the less memory and the more traffic."""
    sequence_parallel: bool = True
    """For `tp` > 1: norms and residuals are divided along the sequence, too."""
    async_tp: bool = False
    """For `tp` > 1 with `device.compile`: what these ranks send overlaps with matrix products (GPUs with NVLink)."""
    offload: bool = False
    """With `shard`: each rank's share of weights, gradients and optimizer state is in host memory (GPUs only)."""

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        names = ("dp_replicate", "pp", "dp_shard", "cp", "ep", "tp")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        for name, size in sizes.items():
            if size == 0:
                raise ValueError(f"{name} is 0: give the number of ranks, or -1 for all that are left")
        left = [name for name, size in sizes.items() if size == -1]
        if len(left) > 1:
            raise ValueError(f"{' and '.join(left)} are both -1: at most one can be what the others leave")
        if self.offload and self.shard == "none":
            raise ValueError("offload moves shares to the host, and shard 'none' makes none: set shard to 'parameters'")
        if self.shard == "none" and self.dp_shard > 1:
            raise ValueError(
                f"dp_shard is {self.dp_shard}, but shard 'none' divides nothing: set shard to 'parameters', or "
                f"dp_replicate in place of dp_shard"
            )
        return self


class NetworkSection(Section):
    listen: Annotated[str, Field(pattern=r"^.+:\d{1,5}$")] = "127.0.0.1:0"
    """Host and port to listen on; port 0 takes a free one. Who joins a run on another machine, and does not say it,
    listens on a free port of all this machine's addresses."""
    advertise: Annotated[str, Field(pattern=r"^.+:\d{1,5}$")] | None = None
    """Host and port that others reach this peer at, when it differs from `listen`."""

    @field_validator("listen", "advertise")
    @classmethod
    def _port(cls, value: str | None) -> str | None:
        if value is not None and int(value.rpartition(":")[2]) > 65535:
            raise ValueError("the port must be a number from 0 to 65535")
        return value

    insecure: bool = False
    """Allow listening beyond loopback without `DILOCO_SECRET`: whoever reaches the port may join."""
    dht_port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the peer directory (hivemind DHT); 0 takes a free one."""
    serve_bps: NonNegativeFloat | None = None
    """Most bits per second that this peer sends to joiners that copy the state; 0: no limit. Without it, 80e6 for each
    processor core that the peer may use, which takes 5 % of them."""
    send_bps: NonNegativeFloat = 0.0
    """Most bits per second that this peer sends in rounds, contributions and means together; 0: no limit."""
    streams: Annotated[int, Field(ge=1, le=16)] = 1
    """Connections to each other peer that contributions and means go over at once: several fill a long, lossy link."""
    lanes: PositiveInt | None = None
    """Ranks of this island that divide the outer state, and exchange their parts over connections of their own; 1: rank
    0 alone. When not given, all of them, but 1 with `advertise`, which says that one port can be reached. Rank r
    listens on the port of `listen` + 100 + r, or on a free one."""


class StorageSection(Section):
    directory: str | None = None
    """Where checkpoints and events go; `runs/<run>/<peer>` when not given. All ranks of an island must see it."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 1
    """Versions between checkpoints; 0: only at the end. One that is due while the last is written is left out."""
    keep: PositiveInt = 2
    """Checkpoints kept."""
    record: bool = False
    """Keep the payloads of own contributions, for `diloco replay`."""
    record_versions: Annotated[int, Field(ge=0)] = 0
    """Versions whose payloads are kept; 0: all."""


class SiteDataSection(Section):
    root: str = "."
    """Folder that the contract's `data.paths` are relative to."""


class TimeoutsSection(Section):
    """Local, monotonic. The defaults suit a LAN; `peers/wan.toml` has slower ones."""

    heartbeat_s: PositiveSeconds = 0.5
    """How often a peer tells the others that it lives, and how far it is. One that was killed is missed by then."""
    suspect_s: PositiveSeconds = 4.0
    """No word from a peer for this long: it is out of the round. Eight heartbeats: a busy machine delays some."""
    stall_s: PositiveSeconds = 4.0
    """No progress of bytes in a round for this long: the attempt is given up, without those who stalled."""
    rpc_s: PositiveSeconds = 5.0
    """Deadline of one control message."""
    join_s: PositiveSeconds = 120.0
    """How long joining may take in all, waiting for the run to start not counted."""
    leave_s: PositiveSeconds = 20.0
    """After the first Ctrl-C, how long to wait for the version that counts this peer's work."""
    collective_s: PositiveSeconds = 600.0
    """How long a rank waits for another one of its island: one that hangs is found out by then, and the island starts
    again. Longer than any inner step, evaluation or checkpoint."""


class Site(Section):
    """What is local to one peer."""

    peer: PeerSection = PeerSection()
    device: DeviceSection = DeviceSection()
    mesh: MeshSection = MeshSection()
    network: NetworkSection = NetworkSection()
    storage: StorageSection = StorageSection()
    data: SiteDataSection = SiteDataSection()
    timeouts: TimeoutsSection = TimeoutsSection()


# ---------------------------------------------------------------- loading

S = TypeVar("S", Contract, Site)

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A validated schema and, for each dotted key, where its value came from."""

    value: S
    origin: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, effective value, origin) for every key."""
        for section, keys in self.value.model_dump().items():
            for key, value in keys.items():
                yield f"{section}.{key}", value, self.origin.get(f"{section}.{key}", "default")


def load_contract(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded[Contract]:
    """Read a contract, or make one of defaults alone. `overrides` are `section.key=value` texts that beat the file.

    Raises ConfigError (what, where, how to mend) and IncompatibleError (another contract version).
    """
    return _load(Contract, path, overrides)


def load_site(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded[Site]:
    """Read a site file, or take the defaults. Raises ConfigError."""
    return _load(Site, path, overrides)


def split_overrides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--set` texts of the site and of the contract, by section (both have a `data` section: only `root` is local)."""
    sections = set(Site.model_fields) - {"data"}
    local = [text for text in texts if text.split(".")[0] in sections or text.startswith("data.root")]
    return local, [text for text in texts if text not in local]


def contract_from_json(text: str | bytes, where: str = "the contract received") -> Contract:
    """The contract that another peer sent (`Contract.to_json`), or that is elsewhere, as `where` says.

    Raises ConfigError or IncompatibleError.
    """
    fix = "ask who runs the peer at that address; it should send what its own `diloco config show` prints"
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {_shown(str(error))}", fix) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} is not a table", fix)
    _check_contract_version(tree, where)
    try:
        return Contract.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where} is not valid: {_first_problem(error)[1]}", fix) from error


def _load(schema: type[S], path: str | Path | None, overrides: Sequence[str]) -> Loaded[S]:
    where = str(path) if path is not None else COMMAND_LINE
    tree = _read_toml(Path(path), schema) if path is not None else {}
    origin = {f"{section}.{key}": where for section, keys in tree.items() for key in _keys(keys)}
    for text in overrides:
        section, key, value = _parse_override(text)
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section][key] = value
            origin[f"{section}.{key}"] = "--set"
    if schema is Contract:
        _check_contract_version(tree, where)
    _check_keys(tree, schema, origin, where)
    if schema is Contract:
        _apply_preset(tree, origin, where)
    try:
        return Loaded(schema.model_validate_json(json.dumps(tree, default=str)), origin)  # str: TOML has dates, we none
    except ValidationError as error:
        name, cause = _first_problem(error)
        place = origin.get(name) or _all_places(where, origin)
        raise ConfigError(f"{place}: {cause}", _advice(name, place)) from error


def _all_places(where: str, origin: Mapping[str, str]) -> str:
    """Of what several keys say together."""
    return f"{where} with --set" if "--set" in origin.values() and where != COMMAND_LINE else where


def _advice(name: str, place: str) -> str:
    """For `name`, a key, a section, or empty. A contract that is wrong cannot be shown, so one that is not is named."""
    shown = "`diloco config show configs/quick.toml` shows every key"
    return f"correct {name} in {place}; {shown}" if "." in name else shown


def _keys(section: Any) -> Iterator[str]:
    yield from section if isinstance(section, dict) else ()


def _read_toml(path: Path, schema: type[Contract] | type[Site]) -> dict[str, Any]:
    what, folder = ("contract", "configs") if schema is Contract else ("site file", "peers")
    fix = f"give the path of a {what} (TOML)"
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        known = {near.stem: near for near in (*Path(folder).glob("*.toml"), *path.parent.glob("*.toml"))}
        close = difflib.get_close_matches(path.stem, known, n=1)
        raise ConfigError(f"{what} not found: {path}", f"did you mean {known[close[0]]}?" if close else fix) from error
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}", fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", fix) from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists too deep
        fix = 'mend that line: [section], then key = 1 or key = "text" or key = true'
        raise ConfigError(f"{path} is not valid TOML: {error}", fix) from error


def _parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(
            f"cannot read override {text!r}", "write --set section.key=value, for instance --set inner.lr=0.001"
        )
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return section, key, value


def _check_contract_version(tree: Mapping[str, Any], where: str) -> None:
    """Before anything else is judged: another version may have other keys."""
    run = tree.get("run")
    version = run.get("contract_version", CONTRACT_VERSION) if isinstance(run, dict) else CONTRACT_VERSION
    if version != CONTRACT_VERSION:
        raise IncompatibleError(
            f"{where}: contract version {_shown(version)}, this diloco reads version {CONTRACT_VERSION}",
            "use the diloco release that wrote it, or check its keys against CHANGELOG.md",
        )


def _apply_preset(tree: dict[str, Any], origin: dict[str, str], where: str) -> None:
    model = tree.get("model", {})
    name = model.get("preset")
    if not isinstance(name, str):  # absent, or for the schema to refuse
        return
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        place = origin.get("model.preset", where)
        raise ConfigError(f"{place}: model.preset {name!r} does not exist", f"{hint}known: {', '.join(PRESETS)}")
    for key, value in PRESETS[name].items():
        if key not in model:
            model[key] = value
            origin[f"model.{key}"] = f"preset {name}"


def _check_keys(
    tree: Mapping[str, Any], schema: type[Contract] | type[Site], origin: Mapping[str, str], where: str
) -> None:
    """Name the first unknown or misplaced key, with a suggestion."""
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            is_section = section in schema.model_fields
            fix = f"write [{section}] on its own line, keys below" if is_section else _suggest("", section, schema)
            raise ConfigError(f"{where}: {section!r} is not a section", fix)
        names = [f"{section}.{key}" for key in keys]
        if section not in schema.model_fields:
            place = origin[names[0]] if names else where
            raise ConfigError(f"{place}: unknown section [{section}]", _suggest_section(section, schema))
        for key, name in zip(keys, names, strict=True):
            if name not in _dotted(schema):
                raise ConfigError(f"{origin[name]}: unknown key {name}", _suggest(section, key, schema))


def _dotted(schema: type[Section]) -> list[str]:
    names = []
    for section, field in schema.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        names += [f"{section}.{key}" for key in kind.model_fields]
    return names


def _other(schema: type[Section]) -> tuple[type[Section], str]:
    """The other schema and where its keys are written."""
    return (Site, "the site file (peers/*.toml)") if schema is Contract else (Contract, "the contract (configs/*.toml)")


def _suggest_section(section: str, schema: type[Section]) -> str:
    other, other_file = _other(schema)
    if section in other.model_fields:
        return f"[{section}] belongs in {other_file}"
    near = difflib.get_close_matches(section, schema.model_fields, n=1)
    return f"did you mean [{near[0]}]?" if near else f"known: {', '.join(schema.model_fields)}"


def _suggest(section: str, key: str, schema: type[Section]) -> str:
    """The likeliest meaning of a key: the same name elsewhere, else a similar one, else what the section has."""
    known, (other, other_file) = _dotted(schema), _other(schema)
    name = f"{section}.{key}" if section else key
    if name in _dotted(other):
        return f"move it to {other_file}"
    if same := [full for full in known if full.split(".")[1] == key]:
        return f"did you mean {_closest(name, same)}?"
    if same := [full for full in _dotted(other) if full.split(".")[1] == key]:
        return f"did you mean {_closest(name, same)} in {other_file}?"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    keys = [full.removeprefix(f"{section}.") for full in known if full.startswith(f"{section}.")]
    return f"keys of [{section}]: {', '.join(keys)}" if keys else "write keys below a [section]"


def _closest(name: str, names: Sequence[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0)[0]


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The key of the first problem as `section.key`, and the problem in one line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    safe = name if name.isprintable() and len(name) <= 80 else _shown(name)
    key = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "missing":
        return key, f"{safe} is missing"
    message = first["msg"].removeprefix("Value error, ")
    got = "" if isinstance(first["input"], dict) else f", got {_shown(first['input'])}"
    return key, f"{safe}: {message}{got}" if name else message


def _shown(value: Any) -> str:
    """A value from outside in one short line, control characters escaped."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
