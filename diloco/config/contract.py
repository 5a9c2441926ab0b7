"""Schema of the contract: every section and key, with bounds, the rules between keys, and the digest.

A *contract* (`configs/*.toml`) says what is trained; it is the same for all peers, hashed, and fetched at join.
A *site* (`peers/*.toml`) says who shows up; it is local and never hashed. A key lives in one schema or the
other: in the wrong file it is an error that names the right one. Contracts come from other people, so they are
data, never code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from diloco.config.codec import SPARSE_CODECS, CodecSection
from diloco.config.section import (
    Beta,
    Fraction,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    Section,
    Tokens,
)

CONTRACT_VERSION = 1

GATHERED_CODECS = ("topk", "dct", "lowrank")
"""Those whose sums do not stay small: every member gets every contribution."""

FLOAT_CODECS = ("fp32", "fp16", "bf16")
"""Those that can carry weights, and not only differences of weights."""

FINE = 1000
"""Weight of a contribution where weights are not all the same: weights are whole numbers."""
LEASE_ROUNDS = 3
"""Rounds of data that every member holds: one to train on, and two more for rounds that are skipped."""


class RunSection(Section):
    """The run as a whole: its name, seed and length."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    """Name of the run: lower-case letters, digits, dot, dash, underscore."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data."""
    total_tokens: Tokens
    """The run ends at the first version with at least this many committed tokens; `"50M"` is 50 million."""
    contract_version: int = CONTRACT_VERSION


class MembershipSection(Section):
    """Joining, leaving, and the rule by which versions close."""

    start_peers: Annotated[int, Field(gt=0, le=65536)] = 1
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
    """Seconds that half of the live members, when they are ready, wait for a slower one before the version closes
    without it; fewer than half wait four times as long. The bytes of a slow link may come so much later than others'
    (under `quorum` and `async`: `grace_s`), or three times as late."""
    round_deadline_s: PositiveSeconds = 300.0
    """After this long a round is skipped: the peer trains on and keeps its progress."""
    backlog_versions: Annotated[int, Field(ge=1, le=1000)] = 4
    """Number of committed means that each member keeps for peers that fell behind; more, up to the size of one
    state, while somebody copies the state."""


class DataSection(Section):
    """Training data: source, files and blocks."""

    source: Literal["stdlib", "text", "shards", "hf"] = "stdlib"
    """`stdlib`: the Python standard library's source text; `text`: text or JSONL files; `shards`: packed tokens
    (`diloco data pack`); `hf`: a `datasets` source."""
    paths: Annotated[tuple[Name, ...], Field(max_length=10_000)] = ()
    """Files, folders or globs, relative to the site's `data.root`. Empty for `stdlib`."""
    text_field: Name = "text"
    """The field of a JSONL or `datasets` record that holds the text."""
    tokenizer: Name = "bytes"
    """`bytes` (256 tokens), or a local Hugging Face tokenizer folder (extra `hf`)."""
    sequence_length: Annotated[Tokens, Field(le=2**24)] = 128
    """Tokens in one block, which is one training sequence."""
    holdout: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    """Share of the files (or of the tokens of one file) kept out of training for evaluation."""


FFN_MULTIPLE = 32
EXPERT_MULTIPLE = 8
"""An expert's width is a multiple of this: grouped products want rows of 16 bytes."""
MAX_EXPERTS = 2**14
Width = Annotated[int, Field(gt=0, le=2**20)]
"""Width of a feed-forward layer."""
MAX_STEP_TOKENS = 2**28
"""Tokens of one inner step of a peer, or of an evaluation. They are read at once, 8 bytes each."""


class ModelSection(Section):
    """The model's kind and sizes."""

    kind: Literal["transformer", "hf", "external"] = "transformer"
    """`transformer`: ours; `hf`: a causal LM from a local Hugging Face config; `external`: the library caller's."""
    preset: Name | None = None
    """Start from the sizes of a preset (`diloco config presets` lists them); other keys override it."""
    hf_config: Name | None = None
    """Folder with a Hugging Face `config.json`, below the site's `data.root` (kind `hf`)."""
    layers: Annotated[int, Field(gt=0, le=4096)] = 4
    dim: Annotated[int, Field(gt=0, le=2**18)] = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt | None = None
    """Key/value heads for grouped-query attention; the same as `heads` when not given."""
    ffn_dim: Width | None = None
    """Width of the SwiGLU layer; 8/3 of `dim`, rounded up to a multiple of 32, when not given."""
    vocab_size: Annotated[int, Field(gt=0, le=2**24)] | None = None
    """Taken from the tokenizer when not given."""
    rope_theta: PositiveFloat = 10_000.0
    qk_norm: bool = True
    tied: bool = True
    """Whether the output head shares the embedding's weights."""
    experts: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Experts in each block, of which a token takes some; 0: a dense model, and the keys below say nothing."""
    experts_per_token: PositiveInt = 2
    shared_experts: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Experts beside those, that every token takes."""
    expert_dim: Width | None = None
    """Width of one expert, a multiple of 8; `ffn_dim` over the experts that a token takes, when not given."""
    balance: Literal["bias", "loss"] = "bias"
    """Method that keeps experts equally busy: a bias in the choice that moves by the sign of the load error, without
    an auxiliary loss (DeepSeek-V3), or the auxiliary loss of Switch."""
    balance_rate: NonNegativeFloat = 0.001
    """For `bias`: how far it moves in an inner step."""
    balance_loss: NonNegativeFloat = 0.01
    """For `loss`: what it is multiplied by."""

    @property
    def ffn_width(self) -> int:
        """The contract's SwiGLU width: as given, or 8/3 of `dim` (three matrices then cost what two of 4 x dim do)."""
        return self.ffn_dim or math.ceil(8 * self.dim / 3 / FFN_MULTIPLE) * FFN_MULTIPLE

    @property
    def expert_width(self) -> int:
        """The contract's expert width: as given, or such that a token costs what it does in the dense model."""
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


MAX_STEPS = 10**6


class InnerSection(Section):
    """Inner steps: their number per round, the optimizer and its schedule."""

    steps: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 50
    """H: inner steps between two syncs of the same parameter."""
    sized_by: Literal["contract", "speed"] = "contract"
    """Rule for a peer's number of inner steps per round. `contract`: H; `speed`: the fastest peer H, any other as
    many as it can meanwhile (DyLU, arXiv 2401.09135), H / 16 at least. Goes with `outer.weighting = "tokens"`."""
    comm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a round that its exchange may take, beyond the steps that overlap with it (`sync.overlap`): where it
    takes more, peers do more steps than H, up to `most_steps`. 0: H, whatever it takes."""
    most_steps: Annotated[int, Field(gt=0, le=MAX_STEPS)] | None = None
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
    """`muon`: matrices inside layers by Muon, all else by AdamW."""
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
        """Sequences of one inner step by the contract's keys."""
        return self.batch_size * self.accumulation


SHARED_OPTIMIZERS = ("nesterov", "sgd")
"""Those that can take a share of a step."""


class OuterSection(Section):
    """The outer step: optimizer, averaging and weights."""

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
    """A contribution's weight in the mean. `tokens`: those trained since a version counted the peer last (Decoupled
    DiLoCo's quantity times rate); in the final sync of several fragments all weigh the same."""
    averaging: Literal["mean", "radial"] = "mean"
    """`radial`: lengths and directions of the contributions are averaged apart, so that the length of the mean does not
    fall as peers get more (Decoupled DiLoCo)."""
    aggregation: Literal["mean", "clip", "centred", "trimmed", "median"] = "mean"
    """Defence against members that lie about their values, part by part. `clip`: contributions are cut to 1.5 times the
    median length; `centred`: centred clipping (arXiv 2012.10333); `trimmed`, `median`: for each value, without the
    quarter of the contributions at either end, or the middle one (arXiv 1803.01498). Of fewer than three
    contributions all are the mean."""
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


class SyncSection(Section):
    """Fragments, overlap and merge."""

    fragments: Annotated[int, Field(gt=0, le=4096)] = 1
    """P: the model is cut in this many fragments; one is synchronised every H / P inner steps."""
    fragment_order: Literal["strided", "sequential"] = "strided"
    """Layer i goes to fragment i mod P, or consecutive layers stay together."""
    part_elements: Annotated[int, Field(ge=1024, le=2**22)] | None = None
    """Elements of one part (the unit that has an owner and a checksum); chosen by fragment size when not given."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Tau: inner steps that go on while a contribution is on its way; at most H / P."""
    merge: Literal["carry", "mix", "eager"] = "carry"
    """Treatment of inner steps done while a sync was under way. `carry`: all of it is carried to the new anchor;
    `mix`: local weights and anchor are mixed (Streaming DiLoCo); `eager`: as `carry`, and our own share of the outer
    step is taken at once."""
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
    """Evaluation on the held-out part of the data."""

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
        inner, outer, sync = self.inner, self.outer, self.sync
        gathered = [codec.name for codec in self.codec.by_group if codec.name in GATHERED_CODECS]
        if outer.averaging == "radial" and gathered:
            raise ValueError(f"outer.averaging 'radial' needs a codec whose mean is made once, not {gathered[0]!r}")
        if outer.aggregation != "mean":
            self._check_aggregation()
        if inner.steps % sync.fragments:
            raise ValueError(f"inner.steps ({inner.steps}) must be a multiple of sync.fragments ({sync.fragments})")
        if self.model.kind == "transformer" and sync.fragments > self.model.layers:
            raise ValueError(
                f"sync.fragments ({sync.fragments}) must be at most model.layers ({self.model.layers}): "
                f"a fragment holds at least one layer"
            )
        for what, sequences in (("inner step", inner.sequences_per_step), ("evaluation", self.eval.sequences)):
            if (tokens := sequences * self.data.sequence_length) > MAX_STEP_TOKENS:
                raise ValueError(f"an {what} of {sequences} sequences has {tokens} tokens, at most {MAX_STEP_TOKENS}")
        if inner.most_steps is not None and inner.most_steps < inner.steps:
            raise ValueError(f"inner.most_steps ({inner.most_steps}) is less than inner.steps")
        if sync.overlap > self.steps_per_round:
            raise ValueError(
                f"sync.overlap ({sync.overlap}) must be at most inner.steps / sync.fragments "
                f"({self.steps_per_round}): a version is agreed on before the next one begins"
            )
        if sync.merge == "eager" and outer.optimizer == "adam":
            raise ValueError("sync.merge 'eager' needs an outer step that is linear: outer.optimizer sgd or a nesterov")
        if sync.merge != "carry" and not sync.overlap:
            raise ValueError(f"sync.merge {sync.merge!r} does nothing without sync.overlap")
        if outer.partial == "share" and outer.optimizer not in SHARED_OPTIMIZERS:
            raise ValueError(
                f"outer.partial 'share' is for outer.optimizer {' and '.join(SHARED_OPTIMIZERS)}, not for "
                f"{outer.optimizer}: that one takes whole steps"
            )
        if self.partial == "share" and sync.merge == "eager":
            raise ValueError(
                "sync.merge 'eager' takes outer steps ahead as if all contributed: with membership.policy 'async' set "
                "sync.merge to 'carry', or outer.partial to 'whole'"
            )
        if outer.alignment == "momentum" and not outer.optimizer.endswith("nesterov"):
            raise ValueError(f"outer.alignment 'momentum' needs a momentum, which {outer.optimizer} has not")
        if self.membership.policy == "gossip":
            self._check_gossip()
        return self

    @property
    def partial(self) -> str:
        """The contract's key `outer.partial`, or the default that the other keys give it."""
        shared = self.membership.policy == "async" and self.outer.optimizer in SHARED_OPTIMIZERS
        return self.outer.partial or ("share" if shared else "whole")

    def _check_aggregation(self) -> None:
        """Refuse contract keys that do not go with a robust mean."""
        rule, sparse = self.outer.aggregation, [codec for codec in self.codec.by_group if codec.name in SPARSE_CODECS]
        if self.outer.averaging != "mean":
            raise ValueError(f"outer.aggregation {rule!r} replaces the mean: leave out outer.averaging")
        if sparse and rule in ("trimmed", "median"):
            why = f"goes value by value, and few peers send a value of {sparse[0].name!r}"
            raise ValueError(f"outer.aggregation {rule!r} {why}: take 'clip' or 'centred'")
        if any(codec.mean != "all" for codec in sparse):
            raise ValueError(f"outer.aggregation {rule!r} divides by all contributions: set codec.mean to 'all'")

    def _check_gossip(self) -> None:
        """Refuse contract keys that do not go with gossip: it swaps whole weights in pairs, and has no versions."""
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
            "outer.aggregation": (self.outer.aggregation == "mean", "'mean': a swap is between two"),
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
        """Inner steps between two rounds by the contract's keys: H / P."""
        return self.inner.steps // self.sync.fragments

    @property
    def rounds_vary(self) -> bool:
        """Whether the contract lets peers size their rounds by what they measure."""
        return self.inner.sized_by == "speed" or self.inner.comm_share > 0

    @property
    def max_steps_per_round(self) -> int:
        """Inner steps between two rounds that the contract allows where the exchange is slow (`inner.comm_share`)."""
        if not self.inner.comm_share:
            return self.steps_per_round
        return (self.inner.most_steps or 4 * self.inner.steps) // self.sync.fragments

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one peer by the contract's keys."""
        return self.inner.sequences_per_step * self.data.sequence_length

    @property
    def blocks_per_round(self) -> int:
        """Data blocks that one peer trains on between two rounds at most, by the contract's keys."""
        return self.inner.sequences_per_step * self.max_steps_per_round

    @property
    def whole_weight(self) -> int:
        """Weight of a contribution with a round's inner steps that is not late."""
        by_tokens = self.steps_per_round * self.tokens_per_step
        return by_tokens if self.outer.weighting == "tokens" else FINE if self.outer.staleness_power else 1

    @property
    def lease_blocks(self) -> int:
        """Data blocks that every member holds at least at the start of a round, by the contract's keys."""
        return LEASE_ROUNDS * self.blocks_per_round

    def to_json(self) -> str:
        """The contract as canonical text: all effective values, keys sorted. It is what travels and what is hashed. A
        key that came later is left out at its default, so that runs of before go on under their digest."""
        tree = self.model_dump(mode="json")
        if self.outer.aggregation == "mean":
            del tree["outer"]["aggregation"]
        return json.dumps(tree, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Digest of the contract: SHA-256 of `to_json()`, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
