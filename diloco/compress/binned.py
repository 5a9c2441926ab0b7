"""Bins of equal width over mean +- k standard deviations; a value is sent as its bin's number, and is decoded as the
mean of the values that were in it, from a codebook in bf16 (INTELLECT-1, arXiv 2412.01152: 256 bins over 6 sigma).

Unlike a grid it sends sums over bins unchanged, which matters where bins are few: 2 bits on a grid lose more
(MuLoCo, arXiv 2505.23725). Fewer bins want a narrower range, and what lies outside goes to the outermost bin: on
gaussian values 4 bins err 59 % over 6 sigma, 40 % over 3 and 34 % over 2 (34.3 % is the best that 4 levels can do for
the distribution as a whole; a block's own codebook does a little better), 16 bins 21 % over 6 and 10 % over 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diloco.compress.blocks import FIXED_POINT, BlockCodec, fixed_point, magnitudes

SIGMAS = {8: 6.0, 4: 2.5, 2: 2.0}
"""Bits -> k."""
WHOLE_PART = 2**40
"""As a block: one codebook for each part, however large."""
DEFAULT_BLOCKS = {8: WHOLE_PART, 4: 1024, 2: 256}
"""Codebooks cost 0.004 (parts of 2^20), 0.25 and 0.25 bits a value."""


@dataclass(frozen=True)
class BinnedCodec(BlockCodec):
    """2^bits bins. Statistics are taken of fixed-point numbers: integers add up to the same sum in any order."""

    block: int
    bits: int

    @property
    def name(self) -> str:
        return "two_bit" if self.bits == 2 else f"int{self.bits}-statistical"

    @property
    def kernel(self) -> str:  # type: ignore[override]
        """Name of the compiled kernel."""
        return f"binned{self.bits}"

    @property
    def header_numbers(self) -> int:
        return 1 << self.bits

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = magnitudes(values)
        numbers = fixed_point(values, largest)
        codes = self._codes(numbers)
        integers = numbers.long()
        empty = torch.zeros(len(values), self.header_numbers, dtype=torch.int64, device=values.device)
        sums, counts = empty.scatter_add(1, codes, integers), empty.scatter_add(1, codes, torch.ones_like(integers))
        means = sums.double() / counts.clamp(min=1) * (largest.double() / FIXED_POINT)
        return means.float().bfloat16(), codes.to(torch.uint8)

    def _codes(self, numbers: Tensor) -> Tensor:
        """The bin of each fixed-point number, int64."""
        integers = numbers.long()
        columns = numbers.shape[1]
        mean = integers.sum(dim=1, keepdim=True).double() / columns
        variance = integers.square().sum(dim=1, keepdim=True).double() / columns - mean * mean
        sigma = torch.from_numpy(np.sqrt(variance.clamp(min=0).cpu().numpy())).to(mean)
        bins = self.header_numbers
        slope = (bins / 2) / (SIGMAS[self.bits] * sigma.masked_fill(sigma == 0, torch.inf))
        offset = bins / 2 - mean * slope
        return (numbers * slope.float()).add_(offset.float()).floor_().clamp_(0, bins - 1).long()

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        torch.gather(headers, 1, codes.long(), out=out)
