"""The codec of one bit a value: its sign, with the mean absolute value of the block as scale, in bf16 (as in
EF-signSGD, arXiv 1901.09847, and 1-bit Adam, arXiv 2102.02888: both feed the error back).

1.0625 bits a value with blocks of 256; 60 % relative L2 error on gaussian values, as every code of one bit has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.compress.blocks import FIXED_POINT, BlockCodec, fixed_point, magnitudes
from diloco.config.codec import CodecChoice


@dataclass(frozen=True)
class SignCodec(BlockCodec):
    """Codec of one bit: code 1 for values >= 0. No value is zero after that, unless its whole block was."""

    block: int = 256
    bits = 1
    kernel = "sign"

    @classmethod
    def opened(cls, section: CodecChoice) -> SignCodec:
        """The sign codec that a contract asks for."""
        return cls(section.block or cls.block)

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = magnitudes(values)
        total = fixed_point(values, largest).abs_().sum(dim=1, keepdim=True, dtype=torch.float64)
        scales = (total / values.shape[1] * (largest.double() / FIXED_POINT)).float()
        return scales.bfloat16(), (values >= 0).to(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes).mul_(2).sub_(1).mul_(headers)
