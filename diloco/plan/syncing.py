"""WAN traffic of data parallelism, DiLoCo and its variants, and its frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from diloco.config.codec import CodecChoice
from diloco.config.contract import GATHERED_CODECS, Contract

SENT_BITS = 16
"""Bits of a value where no codec is chosen: the published table assumes it, and gradients under mixed precision have
it."""
FP4_BITS = 4.0
PUBLISHED_STEPS = 100
"""H of the published table."""
LAYERS_PER_FRAGMENT = 3
"""Layers of a fragment of Streaming DiLoCo (arXiv 2501.18512)."""

Exchange = Literal["reduced", "gathered", "paired"]
"""Butterfly: every part is averaged by one owner; each member gets every contribution, by way of the part's owner, too;
weights of a pair."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One way to synchronise the islands."""

    method: str
    inner_steps: int
    """H: between two syncs of the same parameter."""
    fragments: int
    """P: of which one is synchronised every H / P inner steps."""
    overlap: int
    """Tau: inner steps until it must be there."""
    bits: float
    """Bits of a value that is sent."""
    exchange: Exchange = "reduced"

    def sent_bits(self, parameters: float, peers: int) -> float:
        """Bits that a peer sends when all parameters are synchronised once."""
        factor = {"reduced": 2 * (peers - 1) / peers, "gathered": peers - 1, "paired": 1}[self.exchange]
        return factor * self.bits * parameters


def methods(inner_steps: int = PUBLISHED_STEPS, fragments: int = 8) -> tuple[Sync, ...]:
    """Those of the published table: in 16 bits, the last in 4; streaming ones overlap with one inner step."""
    return (
        Sync("data-parallel", 1, 1, 0, SENT_BITS),
        Sync("diloco", inner_steps, 1, 0, SENT_BITS),
        Sync("streaming", inner_steps, fragments, 0, SENT_BITS),
        Sync("streaming-overlap", inner_steps, fragments, 1, SENT_BITS),
        Sync("streaming-overlap-fp4", inner_steps, fragments, 1, FP4_BITS),
    )


def usual_fragments(layers: int, inner_steps: int) -> int:
    """One for each three layers, and no more than inner steps."""
    return max(1, min(layers // LAYERS_PER_FRAGMENT, inner_steps))


def sync_of(contract: Contract) -> Sync:
    """The contract's way of synchronising; parameters with a codec of their own (`codec.groups`) are counted as the
    others."""
    exchange: Exchange = "gathered" if contract.codec.name in GATHERED_CODECS else "reduced"
    overlap = contract.sync.overlap
    if contract.membership.policy == "gossip":
        exchange, overlap = "paired", contract.inner.steps  # nobody waits for a swap, until the next one is due
    part = contract.sync.part_elements or 2**20
    bits = codec_bits(contract.codec, part)
    return Sync("this contract", contract.inner.steps, contract.sync.fragments, overlap, bits, exchange)


# ---------------------------------------------------------------- codecs

CHUNK = 4096
INDEX_BITS = 12
MIN_BLOCK = 128
FLOAT_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0}
BLOCKS = {"int8": (8, 32, 256), "int4": (4, 16, 64), "e3m0": (4, 16, 64), "sign": (1, 16, 256), "two_bit": (2, 64, 256)}
"""Bits of a code and of a block's header, and values of a block."""


def codec_bits(codec: CodecChoice, part_elements: int = 2**20) -> float:
    """Bits of a value as `diloco.compress` encodes it, before zstd; a test compares the two."""
    if codec.name in FLOAT_BITS:
        return FLOAT_BITS[codec.name]
    if codec.name == "lowrank":
        columns = min(codec.columns, math.isqrt(part_elements - 1) + 1)
        rows = math.ceil(part_elements / columns)
        return min(codec.rank, rows, columns) * (32 + 16 * (rows + columns)) / part_elements
    if codec.name in ("topk", "dct"):
        kept = max(1, round(codec.density * CHUNK))
        block = max(4 * math.ceil(kept / 4), MIN_BLOCK)
        of_value = {"fp16": 16.0, "int8": 8 + 32 / block, "two_bit": 2 + 64 / block}[codec.values]
        return kept / CHUNK * (INDEX_BITS + of_value)
    code, header, block = BLOCKS[codec.name]
    if codec.scale == "statistical":  # a codebook in bf16; int8's is the whole part's
        header, block = 16 * 2**code, 1024 if codec.name == "int4" else part_elements
    return code + header / (codec.block or block)
