"""int4 with one bf16 scale per block: scale = absmax / 7, code = round(value / scale), two codes in a byte.

4.25 bits a value with blocks of 64; 10.8 % relative L2 error on gaussian values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.compress.blocks import MAX_HEADER, BlockCodec, magnitudes, quotients, rounded_up

MAX_CODE = 7
ZERO = 8
"""Offset that is added to a code, so that it is stored without a sign."""


@dataclass(frozen=True)
class Int4Codec(BlockCodec):
    """Codes from -7 to 7, stored as 1 to 15; a 0, which only others send, decodes to -8 scales."""

    block: int = 64
    stochastic: bool = False
    bits = 4
    kernel = "int4"
    max_value = MAX_CODE * MAX_HEADER

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = rounded_up(magnitudes(values) / MAX_CODE)
        codes = quotients(values, scales)
        codes = codes.round_() if dither is None else codes.add_(dither).floor_().clamp_(-MAX_CODE, MAX_CODE)
        return scales, codes.add_(ZERO).to(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes).sub_(ZERO).mul_(headers)
