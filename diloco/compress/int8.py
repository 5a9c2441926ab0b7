"""int8 with one fp32 scale per block: scale = absmax / 127, code = round(value / scale).

A payload is all scales, then all codes: 8.125 bits a value with blocks of 256. The error is at most half a scale,
0.7 % relative L2 on gaussian values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size, from_bytes, magnitude, saturated, to_bytes

LARGEST_CODE = 127
LARGEST_SCALE = 2.0**120
"""Keeps 128 scales finite, so that no code, not even a hostile -128, decodes to infinity."""
SMALLEST_SCALE = 2.0**-126
"""Smallest normal fp32. A block that needs less (values below 1.5e-36) is sent as zero: below it the quotient
value / scale may leave the range of a code, and CPUs may be set to flush to zero."""
TILE_ELEMENTS = 2**17
"""512 KiB of fp32: what is worked on stays in a core's cache (encoding 64 MiB: 3.0 GB/s against 1.1 in one go)."""


@dataclass(frozen=True)
class Int8Codec(Codec):
    """Codes from -127 to 127, rounded to nearest even; values saturate at 1.7e38."""

    block: int

    @property
    def name(self) -> str:
        return "int8"

    def encode(self, values: Tensor) -> bytes:
        raw = torch.empty(self.max_bytes(values.numel()), dtype=torch.uint8)
        scales, codes = self._split(raw, values.numel())
        for value_rows, scale_rows, code_rows in self._tiles(values, scales, codes):
            _quantise(value_rows, scale_rows, code_rows)
        if not magnitude(scales) <= LARGEST_SCALE:  # also when it is nan
            return self.encode(saturated(values, LARGEST_CODE * LARGEST_SCALE))
        return to_bytes(raw)

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        check_size(payload, self.max_bytes(out.numel()))
        scales, codes = self._split(from_bytes(payload), out.numel())
        low, high = torch.aminmax(scales)
        if not (low >= 0 and high <= LARGEST_SCALE):
            raise PayloadError("int8 payload with a scale that is negative, too large or not a number")
        for value_rows, scale_rows, code_rows in self._tiles(out, scales, codes):
            value_rows.copy_(code_rows).mul_(scale_rows)

    def max_bytes(self, elements: int) -> int:
        return math.ceil(elements / self.block) * torch.float32.itemsize + elements

    def _split(self, raw: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Views of a payload: scales (blocks,) fp32 and codes (elements,) int8."""
        cut = raw.numel() - elements
        return raw[:cut].view(torch.float32), raw[cut:].view(torch.int8)

    def _tiles(self, values: Tensor, scales: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views with one block per row, tile by tile; a short last block is a tile of its own."""
        elements = values.numel()
        whole = elements - elements % self.block
        tile = max(TILE_ELEMENTS // self.block, 1) * self.block
        for start, stop in pairwise(sorted({*range(0, whole, tile), whole, elements})):
            blocks = slice(start // self.block, math.ceil(stop / self.block))
            shape = (blocks.stop - blocks.start, -1)
            yield values[start:stop].view(shape), scales[blocks].view(shape), codes[start:stop].view(shape)


def _quantise(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Fill `scales` (rows, 1) and `codes` (rows, columns) from `values` (rows, columns).

    abs then amax: six times faster in eager torch than `vector_norm(inf)`.
    """
    scratch = values.abs()
    torch.div(scratch.amax(dim=1, keepdim=True), LARGEST_CODE, out=scales)
    scales.masked_fill_(scales < SMALLEST_SCALE, 0.0)
    divisors = scales.masked_fill(scales == 0, torch.inf)  # a zero block has zero codes, not 0 / 0
    codes.copy_(torch.div(values, divisors, out=scratch).round_())
