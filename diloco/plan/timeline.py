"""Ways to synchronise islands, the bandwidth that each needs, and the published table of it beside ours.

One link is simulated, after Streaming DiLoCo (arXiv 2501.18512). An inner step is a third forward pass and two thirds
backward pass. What is due after a step becomes ready bit by bit during its backward pass, in `BUCKETS` equal buckets,
and goes over one link, first in, first out. It must be there at the end of the step `overlap` steps later, or computing
waits. Reductions cost nothing beside their bytes, and computing takes as long as ever.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
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

Exchange = Literal["reduced", "gathered", "paired"]
"""Butterfly: every part is averaged by one owner; each member gets every contribution, by way of the part's owner, too;
weights of a pair."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One way to synchronise the islands over the WAN."""

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
        """Estimated bits that a peer sends when all parameters are synchronised once."""
        factor = {"reduced": 2 * (peers - 1) / peers, "gathered": peers - 1, "paired": 1}[self.exchange]
        return factor * self.bits * parameters


def methods(inner_steps: int = PUBLISHED_STEPS, fragments: int = 8) -> tuple[Sync, ...]:
    """The plan's ways to synchronise: in 16 bits, the last in 4; streaming ones overlap with one inner step."""
    return (
        Sync("data-parallel", 1, 1, 0, SENT_BITS),
        Sync("diloco", inner_steps, 1, 0, SENT_BITS),
        Sync("streaming", inner_steps, fragments, 0, SENT_BITS),
        Sync("streaming-overlap", inner_steps, fragments, 1, SENT_BITS),
        Sync("streaming-overlap-fp4", inner_steps, fragments, 1, FP4_BITS),
    )


def sync_of(contract: Contract) -> Sync:
    """The planned contract's way of synchronising; parameters with a codec of their own (`codec.groups`) are counted as
    the others."""
    exchange: Exchange = "gathered" if contract.codec.name in GATHERED_CODECS else "reduced"
    overlap = contract.sync.overlap
    if contract.membership.policy == "gossip":
        exchange, overlap = "paired", contract.inner.steps  # nobody waits for a swap, until the next one is due
    bits = codec_bits(contract.codec, contract.sync.part_elements or 2**20)
    return Sync("this contract", contract.inner.steps, contract.sync.fragments, overlap, bits, exchange)


# ---------------------------------------------------------------- codecs

CHUNK = 4096
INDEX_BITS = 12
MIN_BLOCK = 128
FLOAT_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0}
BLOCKS = {"int8": (8, 32, 256), "int4": (4, 16, 64), "e3m0": (4, 16, 64), "sign": (1, 16, 256), "two_bit": (2, 64, 256)}
"""Bits of a code and of a block's header, and values of a block."""


def codec_bits(codec: CodecChoice, part_elements: int = 2**20) -> float:
    """Estimated bits of a value as `diloco.compress` encodes it, before zstd; a test compares the two."""
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


# ---------------------------------------------------------------- the link

BUCKETS = 128
FORWARD = 1 / 3
SIMULATED_STEPS = 2000
SIMULATED_SYNCS = 20
"""At least so many syncs of each parameter."""


def utilisation(
    sync: Sync, parameters: float, peers: int, step_s: float, link_bps: float, latency_s: float = 0.0
) -> float:
    """Estimated share of the time that goes into computing, 0 to 1: compute / (compute + waits).

    `link_bps`: bits per second that a peer can send (and receive as well); `latency_s`: one way, of which each exchange
    takes two: to a part's owner and back, or to the other of a pair.
    """
    steps = max(SIMULATED_STEPS, SIMULATED_SYNCS * sync.inner_steps)
    sending_s = sync.sent_bits(parameters, peers) / sync.fragments / link_bps
    trips_s = 2 * latency_s if peers > 1 else 0.0
    waited_s = free_at = 0.0
    under_way: deque[tuple[int, float]] = deque()  # (step at whose end it must be there, when it is)
    # Fragment p of P is due after step p H / P, counted from 1, and every H steps after it. One step beyond the last is
    # there to wait for what must have arrived by then.
    offsets = [fragment * sync.inner_steps // sync.fragments for fragment in range(1, sync.fragments + 1)]
    due = (begin + offset for begin in range(0, steps, sync.inner_steps) for offset in offsets)
    for step in (*(step for step in due if step <= steps), steps + 1):
        while under_way and under_way[0][0] < step:
            deadline, arrival = under_way.popleft()
            waited_s += max(0.0, arrival - (deadline * step_s + waited_s))
        # When the last of the step's buckets is over the link, exactly as going through them one by one would give.
        # All are equal and become ready at equal distances, so that either the link is never idle after it was free,
        # or not since the first bucket, or the last one goes out as soon as it is ready.
        start = (step - 1) * step_s + waited_s
        first_ready, last_ready = start + step_s * (FORWARD + (1 - FORWARD) / BUCKETS), start + step_s
        free_at = max(free_at + sending_s, first_ready + sending_s, last_ready + sending_s / BUCKETS)
        under_way.append((step + sync.overlap, free_at + trips_s))
    return steps * step_s / (steps * step_s + waited_s)


def bandwidth_for(
    wanted: float, sync: Sync, parameters: float, peers: int, step_s: float, latency_s: float = 0.0
) -> float | None:
    """Estimated bits per second that a link needs for a utilisation, to 1 %; None where latency alone is too much."""
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


# ---------------------------------------------------------------- the published table

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_GBIT_S = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""All published cells lie on 50 bandwidths from 0.1 to 1000 Gbit/s in equal ratios of 1.207."""
PEERS = 2

MODELS: Mapping[str, tuple[float, float, int]] = {"1B": (1e9, 0.1, 8), "10B": (1e10, 0.8, 16), "100B": (1e11, 4.9, 36)}
"""Parameters, seconds of an inner step, and fragments of three layers."""

PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "data-parallel": {
        "1B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    "diloco": {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    "streaming": {
        "1B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    "streaming-overlap": {
        "1B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    "streaming-overlap-fp4": {
        "1B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s by method, model and utilisation (arXiv 2501.18512): `PEERS` peers, H = 100, 16 bits a value, and 4 in the
last row."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One bandwidth of the published table, beside ours."""

    method: str
    model: str
    utilisation: float
    gbit_s: float
    """Ours, on the grid: that whose simulated utilisation is nearest to the wanted one."""
    published_gbit_s: float
    grid_steps_apart: int
    """Ours minus the published one."""


def bandwidth_table() -> Iterator[Cell]:
    """All 75 cells of the plan's table of bandwidths, by method, model and utilisation."""
    grid_bps = [gbit_s * 1e9 for gbit_s in GRID_GBIT_S]
    for method, by_model in PUBLISHED.items():
        for model, row in by_model.items():
            parameters, step_s, fragments = MODELS[model]
            (sync,) = (one for one in methods(fragments=fragments) if one.method == method)
            reached = functools.partial(utilisation, sync, parameters, PEERS, step_s)
            for wanted, published in zip(UTILISATIONS, row, strict=True):
                # It rises with bandwidth, so the nearest one is the first to reach what is wanted, or the one before.
                above = bisect_left(grid_bps, wanted, 1, len(grid_bps) - 1, key=reached)
                index = min(above - 1, above, key=lambda index: abs(reached(grid_bps[index]) - wanted))
                yield Cell(method, model, wanted, GRID_GBIT_S[index], published, index - nearest_on_grid(published))


def nearest_on_grid(gbit_s: float) -> int:
    """Index of the table's nearest bandwidth by ratio: the published ones are rounded to a tenth."""
    return min(range(len(GRID_GBIT_S)), key=lambda index: abs(math.log(gbit_s / GRID_GBIT_S[index])))
