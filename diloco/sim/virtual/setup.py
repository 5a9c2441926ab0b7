"""The production parts that a plan asks for: rules, codec, layout, outer optimizer, and a model of 22 numbers."""

from __future__ import annotations

from functools import cache
from random import Random

import torch
from torch import Tensor

from diloco.compress import Codec, open_codec
from diloco.config import CodecSection, OuterSection
from diloco.exchange.rules import Rules, Timing
from diloco.exchange.view import Policy
from diloco.fragments import Fragment, Layout, read_fragment
from diloco.outer import OuterState, open_outer
from diloco.sim.virtual.plan import Plan

SHAPES = (("blocks.0.weight", (11,)), ("blocks.1.weight", (11,)))
PART_ELEMENTS = 4
NOISES = 64


class Setup:
    """Everything that all peers of one simulation share."""

    def __init__(self, plan: Plan) -> None:
        self.layout = Layout.of(SHAPES, plan.fragments, "strided", PART_ELEMENTS)
        name, _, zstd = plan.codec.partition("+")
        self.codec: Codec = Remembering(
            open_codec(CodecSection.model_validate({"name": name, "block": 4, "zstd": bool(zstd)}))
        )
        self.optimizer = open_outer(OuterSection.model_validate({"optimizer": plan.optimizer, "lr": 0.7}))
        self.by_tokens = plan.weighting == "tokens"
        self.tokens, self.blocks = 10, 2
        self.round_s = plan.round_s
        self.patience_s = 6.0
        self.max_norm_ratio = 100.0
        trainers = plan.peers
        self.rules = Rules(
            run="virtual",
            contract="contract",
            parts=tuple(fragment.parts for fragment in self.layout.fragments),
            start_peers=trainers,
            lease_blocks=3 * self.blocks,
            policy=Policy(max(1, trainers // 2) if plan.policy == "quorum" else None, 0.3, 3.0),
            backlog_versions=4,
            continue_after_s=2.5 if plan.without_majority == "continue" else None,
            offences_allowed=3,
        )
        self.timing = Timing(heartbeat_s=0.5, suspect_s=2.0, stall_s=2.0)
        anchor = [read_fragment(self.parameters(), fragment) for fragment in self.layout.fragments]
        self.start = OuterState(0, tuple(map(self.optimizer.start, anchor)))

    @staticmethod
    def parameters() -> dict[str, Tensor]:
        """The weights that every peer begins with."""
        return {name: torch.full(shape, 0.5) for name, shape in SHAPES}


class Remembering(Codec):
    """A codec whose decoded values are kept: several peers decode the same bytes, and 4 numbers take 5 to 40 us."""

    def __init__(self, codec: Codec) -> None:
        self.inner = codec
        self.gathered = codec.gathered
        self._max_bytes = cache(codec.max_bytes)
        self._known: dict[tuple[bytes, int], Tensor] = {}

    @property
    def name(self) -> str:
        return self.inner.name

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


@cache
def noises() -> tuple[dict[str, Tensor], ...]:
    """What inner steps do to the weights: drawn once, used in turn, the same in every plan and on every machine."""
    dice = Random("noises")
    return tuple(
        {name: torch.tensor([dice.uniform(-0.2, 0.2) for _ in range(*shape)]) for name, shape in SHAPES}
        for _ in range(NOISES)
    )


@cache
def flat_noise(piece: int, fragment: Fragment) -> Tensor:
    """A piece of noise as a fragment's flat buffer."""
    return read_fragment(noises()[piece], fragment)
