"""One link in simulated time: how much of it computing waits.

After the simulation in Streaming DiLoCo (arXiv 2501.18512). An inner step is a third forward pass and two thirds
backward pass. What is due after a step becomes ready bit by bit during its backward pass, in `BUCKETS` equal buckets,
and goes over one link, first in, first out. It must be there at the end of the step `overlap` steps later, or computing
waits. Reductions cost nothing beside their bytes, and computing takes as long as ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.config.codec import CodecChoice
from diloco.config.contract import GATHERED_CODECS, Contract

BUCKETS = 128
FORWARD = 1 / 3
SIMULATED_STEPS = 2000
SIMULATED_SYNCS = 20
"""At least so many syncs of each parameter."""


def utilisation(
    sync: Sync, parameters: float, peers: int, step_s: float, link_bps: float, latency_s: float = 0.0
) -> float:
    """Share of the time that goes into computing, 0 to 1: compute / (compute + waits).

    `link_bps`: bits per second that a peer can send (and receive as well); `latency_s`: one way, of which each exchange
    takes two: to a part's owner and back, or to the other of a pair.
    """
    steps = max(SIMULATED_STEPS, SIMULATED_SYNCS * sync.inner_steps)
    sending_s = sync.sent_bits(parameters, peers) / sync.fragments / link_bps
    trips_s = 2 * latency_s if peers > 1 else 0.0
    waited_s = 0.0
    free_at = 0.0
    under_way: deque[tuple[int, float]] = deque()  # (step at whose end it must be there, when it is)
    for step in _due_steps(sync, steps):
        while under_way and under_way[0][0] < step:
            waited_s += _wait(*under_way.popleft(), step_s, waited_s)
        start = (step - 1) * step_s + waited_s
        free_at = _sent_by(start, step_s, sending_s, free_at)
        under_way.append((step + sync.overlap, free_at + trips_s))
    for deadline, arrival in under_way:
        waited_s += _wait(deadline, arrival, step_s, waited_s) if deadline <= steps else 0.0
    return steps * step_s / (steps * step_s + waited_s)


def _wait(deadline: int, arrival: float, step_s: float, waited_s: float) -> float:
    return max(0.0, arrival - (deadline * step_s + waited_s))


def _sent_by(start: float, step_s: float, sending_s: float, free_at: float) -> float:
    """When the last of the step's buckets is over the link: exactly what going through them one by one gives.

    All buckets are equal and become ready at equal distances, so that either the link is never idle after it was
    free, or not since the first bucket, or the last one goes out as soon as it is ready.
    """
    first_ready = start + step_s * (FORWARD + (1 - FORWARD) / BUCKETS)
    last_ready = start + step_s
    return max(free_at + sending_s, first_ready + sending_s, last_ready + sending_s / BUCKETS)


def _due_steps(sync: Sync, steps: int) -> Iterator[int]:
    """Steps, counted from 1, after which a fragment is due, once for each fragment: p H / P, and every H after it."""
    offsets = [fragment * sync.inner_steps // sync.fragments for fragment in range(1, sync.fragments + 1)]
    for begin in range(0, steps, sync.inner_steps):
        yield from (begin + offset for offset in offsets if begin + offset <= steps)


# ---------------------------------------------------------------- the other way round


def bandwidth_for(
    wanted: float, sync: Sync, parameters: float, peers: int, step_s: float, latency_s: float = 0.0
) -> float | None:
    """The least bits per second for a utilisation, to 1 %; None where the latency alone is too much."""
    low, high = 0.0, 15.0  # as powers of ten
    if utilisation(sync, parameters, peers, step_s, 10**high, latency_s) < wanted:
        return None
    while high - low > math.log10(1.01):
        middle = (low + high) / 2
        if utilisation(sync, parameters, peers, step_s, 10**middle, latency_s) >= wanted:
            high = middle
        else:
            low = middle
    return 10**high


def nearest_bandwidth(
    wanted: float, sync: Sync, parameters: float, peers: int, step_s: float, grid_bps: Sequence[float]
) -> int:
    """Index of that bandwidth of a rising grid whose utilisation is nearest to the wanted one."""

    def reached(link_bps: float) -> float:
        return utilisation(sync, parameters, peers, step_s, link_bps)

    above = bisect_left(grid_bps, wanted, 1, len(grid_bps) - 1, key=reached)
    return min(above - 1, above, key=lambda index: abs(reached(grid_bps[index]) - wanted))


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
