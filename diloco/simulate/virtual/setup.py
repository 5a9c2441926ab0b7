"""Production parts of a simulation, by its plan: rules, codec, layout, outer optimizer, a model of 22 numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from diloco.compress import Codec, open_codec
from diloco.compress.topk import TopKCodec
from diloco.config.codec import CodecSection
from diloco.config.contract import SHARED_OPTIMIZERS, OuterSection
from diloco.outer.fragments import Fragment, Layout, read_fragment
from diloco.outer.line import FINE, Weighing
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterState
from diloco.peer.schedule import Cadence
from diloco.protocol.view import Policy, Rules, Timing
from diloco.simulate.virtual.plan import FaultPlan

SHAPES = (("blocks.0.weight", (11,)), ("blocks.1.weight", (11,)))
GROUPS = (("blocks.0.*",), ("blocks.1.*",))
"""Groups of parameters in a plan with several codecs, `first/second/third`: the first is for the parameters in no
group."""
PART_ELEMENTS = 4
NOISES = 64
STEPS = 10
"""Inner steps of a round (H), with a token each."""
SMALL: Mapping[str, Mapping[str, Any]] = {
    "topk": {"density": 0.5},
    "dct": {"density": 0.5, "values": "int8"},
    "lowrank": {"rank": 1, "columns": 2},
    "sign": {"block": 8},
}
"""Settings of codecs without blocks, where a part is 4 numbers."""


class SimulationSetup:
    """Everything that all simulated peers share."""

    def __init__(self, plan: FaultPlan) -> None:
        names = plan.codec.split("/")
        self.layout = Layout.of(SHAPES, plan.fragments, "strided", PART_ELEMENTS, GROUPS[: len(names) - 1])
        self.codecs: Sequence[Codec] = [Remembering(open_small(name)) for name in names]
        """By group of parameters."""
        self.by_senders = [name.startswith("topk") and not name.endswith("-all") for name in names]
        """Means are divided by the weights of those who sent a value, and not of all."""
        outer = {"optimizer": plan.optimizer, "lr": 0.7, "buffer": 3}
        self.optimizer = open_outer(OuterSection.model_validate(outer))
        self.cadence = Cadence(STEPS, round(plan.overlap * STEPS))
        self.blocks = 2
        self.weighing = self._weighing(plan)
        self.patience_s = 6.0
        self.max_norm_ratio = 100.0
        self.radial = plan.radial
        trainers = plan.peers
        self.rules = Rules(
            run="virtual",
            contract="contract",
            parts=tuple(fragment.parts for fragment in self.layout.fragments),
            start_peers=trainers,
            lease_blocks=3 * self.blocks,
            policy=policy_of(plan),
            backlog_versions=4,
            continue_after_s=2.5 if plan.without_majority == "continue" else None,
            offences_allowed=3,
        )
        self.contract = {"membership": {"without_majority": plan.without_majority}}
        """As much of it as `diloco audit` reads."""
        self.timing = Timing(heartbeat_s=0.5, suspect_s=2.0, stall_s=2.0)
        anchor = [read_fragment(self.parameters(), fragment) for fragment in self.layout.fragments]
        self.start = OuterState(0, tuple(map(self.optimizer.start, anchor, self.layout.fragments)))

    def _weighing(self, plan: FaultPlan) -> Weighing:
        """Weighing of a simulation: under `async` with shares of a step and by staleness, where the optimizer can."""
        by_tokens, shares = plan.weighting == "tokens", plan.policy == "async" and plan.optimizer in SHARED_OPTIMIZERS
        whole = STEPS if by_tokens else FINE if shares else 1
        return Weighing(by_tokens, whole, 0.5 if shares else 0.0, shares)

    @staticmethod
    def parameters() -> dict[str, Tensor]:
        """The 22 weights that every simulated peer begins with."""
        return {name: torch.full(shape, 0.5) for name, shape in SHAPES}


def policy_of(plan: FaultPlan) -> Policy:
    """Policy of a simulation, from its plan of faults: `async` begins after two versions of `sync`."""
    quorum = {"sync": None, "quorum": max(1, plan.peers // 2), "async": 1}[plan.policy]
    is_async = plan.policy == "async"
    grace_s = 0.05 if is_async else 0.3
    return Policy(quorum, grace_s, 3.0, plan.most_peers or None, uses_slack=is_async, sync_versions=2 * is_async)


def open_small(text: str) -> Codec:
    """The simulated codec `name`, `name-mean` or `name+zstd`, with blocks and tiles for parts of 4 numbers."""
    text, _, zstd = text.partition("+")
    name, _, mean = text.partition("-")
    wanted = {"name": name, "zstd": bool(zstd), "mean": mean or "senders"}
    codec = open_codec(CodecSection.model_validate({**wanted, **SMALL.get(name, {"block": 4})}))
    return replace(codec, chunk=PART_ELEMENTS) if isinstance(codec, TopKCodec) and name == "dct" else codec


class Remembering(Codec):
    """The simulator's codec: keeps decoded values, as peers decode the same bytes, and 4 numbers take 5 to 40 us."""

    def __init__(self, codec: Codec) -> None:
        self.inner = codec
        self._means: dict[tuple[tuple[tuple[int, bytes], ...], int], Tensor] = {}
        self._max_bytes = cache(codec.max_bytes)
        self._known: dict[tuple[bytes, int], Tensor] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def gathered(self) -> bool:
        return self.inner.gathered

    def encode(self, values: Tensor) -> bytes:
        return self.inner.encode(values)

    def max_bytes(self, elements: int) -> int:
        return self._max_bytes(elements)

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        out.copy_(self.decode(payload, out.numel()))

    def decode(self, payload: bytes, elements: int) -> Tensor:
        known = self._known.get((payload, elements))
        if known is None:
            known = self._known[payload, elements] = self.inner.decode(payload, elements)
        return known.clone()

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        key = tuple(terms), out.numel()
        if key not in self._means:
            self.inner.mean_into(terms, out)
            self._means[key] = out.clone()
        out.copy_(self._means[key])


@cache
def noises() -> tuple[dict[str, Tensor], ...]:
    """Changes that simulated inner steps make to the weights: drawn once, used in turn, the same in every plan and on
    every machine."""
    dice = Random("noises")
    return tuple(
        {name: torch.tensor([dice.uniform(-0.2, 0.2) for _ in range(*shape)]) for name, shape in SHAPES}
        for _ in range(NOISES)
    )


@cache
def flat_noise(piece: int, fragment: Fragment) -> Tensor:
    """A piece of simulated training noise as a fragment's flat buffer."""
    return read_fragment(noises()[piece], fragment)
