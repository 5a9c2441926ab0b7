"""The codecs with blocks: int8, int4, e3m0, and those with bins; their base, and the arithmetic that they share.

A *block* is a run of consecutive values with one *header* (a scale, or a codebook) of its own. A payload is all
headers, then all codes; only the last block may be short. Encoding is the same bits on any CPU, so that `diloco replay`
can make a mean again elsewhere: element by element, and where values are summed, they are integers first. Errors here
are relative L2 errors on gaussian values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from diloco.compress import kernels
from diloco.compress.codec import Codec, PayloadError, check_size, from_bytes, saturated, to_bytes

MAX_HEADER = 2.0**120
"""Keeps 128 scales finite, so that no code, not even a hostile one, decodes to infinity."""
MIN_MAGNITUDE = 2.0**-100
"""A block whose largest absolute value is below is sent as zero: what is computed from it stays clear of subnormal
numbers, which a CPU may be set to flush to zero."""
TILE_ELEMENTS = 2**17
"""512 KiB of fp32: what is worked on stays in a core's cache (int8, 64 MiB: 3.0 GB/s against 1.1 in one go)."""


class BlockCodec(Codec):
    """Codec of blocks: codes of `bits` bits, and a header for each `block` values. A subclass gives both a meaning."""

    block: int
    bits: int
    kernel: str
    """The compiled twin (`diloco.compress.kernels`)."""
    header_dtype = torch.bfloat16
    max_value = MAX_HEADER
    """Values saturate there."""
    stochastic: bool = False
    """Round up or down by chance, so that the expected value is the value; else to nearest. The chance is a hash of
    the block's own values: the same values give the same bytes."""

    @property
    def name(self) -> str:
        return self.kernel + "-stochastic" * self.stochastic

    @property
    def header_numbers(self) -> int:
        """Numbers in the header of a codec's block. 1: a scale, never negative; more: a codebook."""
        return 1

    @abstractmethod
    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        """A codec's headers (rows, header_numbers) of `header_dtype` and codes (rows, columns) uint8; a block is a row.

        `values`: fp32 up to `max_value`. `dither`: numbers in [0, 1) of the same shape, if `stochastic`.
        """

    @abstractmethod
    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        """Fill `out` (rows, columns) from the codec's headers, in fp32, and codes. Any code gives a finite value."""

    def encode(self, values: Tensor) -> bytes:
        compiled = kernels.encode(self.kernel, values, self.block, self.stochastic, self.max_bytes(values.numel()))
        if compiled is not None:
            return compiled
        values = saturated(values, self.max_value)
        raw = torch.empty(self.max_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        headers, codes = self._split(raw, values.numel())
        first_block = 0
        for value_rows, header_rows, code_rows in self._tiles(values, headers, codes):
            dither = _dither(value_rows, first_block) if self.stochastic else None
            header, code = self.quantise(value_rows, dither)
            header_rows.copy_(header)
            code_rows.copy_(packed(code, self.bits))
            first_block += value_rows.shape[0]
        return to_bytes(raw.cpu())

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        headers = self._checked_headers(payload, out.numel())
        if kernels.decode(self.kernel, payload, self.block, out):
            return
        codes = self._split(from_bytes(payload), out.numel())[1]
        for value_rows, header_rows, code_rows in self._tiles(out, headers, codes):
            self.dequantise(header_rows, unpacked(code_rows, self.bits, value_rows.shape[1]), value_rows)

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        self._checked_headers(payload, total.numel())
        squares = kernels.fold(self.kernel, payload, self.block, weight, total)
        return super().fold(payload, weight, total) if squares is None else squares

    def max_bytes(self, elements: int) -> int:
        """Size of every payload that this codec makes of so many values."""
        return self._header_bytes(elements) + self._code_bytes(elements)

    def _checked_headers(self, payload: bytes, elements: int) -> Tensor:
        """Headers of all blocks of a codec's payload in fp32, flat. Raises PayloadError."""
        check_size(payload, self.max_bytes(elements))
        headers = from_bytes(payload[: self._header_bytes(elements)]).view(self.header_dtype).float()
        low, high = (extreme.item() for extreme in torch.aminmax(headers))
        lowest = 0.0 if self.header_numbers == 1 else -MAX_HEADER
        if not (low >= lowest and high <= MAX_HEADER):  # also when one is nan
            raise PayloadError(f"{self.name} payload with a scale that is negative, too large or not a number")
        return headers

    def _header_bytes(self, elements: int) -> int:
        return math.ceil(elements / self.block) * self.header_numbers * self.header_dtype.itemsize

    def _code_bytes(self, elements: int) -> int:
        """Bytes of the codes in a codec's payload. Each block begins on a byte."""
        whole, rest = divmod(elements, self.block)
        return whole * _packed_bytes(self.block, self.bits) + _packed_bytes(rest, self.bits)

    def _split(self, raw: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Views of a codec's payload: headers of its blocks and packed codes, both flat."""
        cut = self._header_bytes(elements)
        return raw[:cut].view(self.header_dtype), raw[cut:]

    def _tiles(self, values: Tensor, headers: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views with one of the codec's blocks per row, tile by tile; a short last block is a tile of its own."""
        elements = values.numel()
        whole = elements - elements % self.block
        tile = max(TILE_ELEMENTS // self.block, 1) * self.block
        for start, stop in pairwise(sorted({*range(0, whole, tile), whole, elements})):
            first, last = start // self.block, math.ceil(stop / self.block)
            shape = (last - first, -1)
            header = headers[first * self.header_numbers : last * self.header_numbers]
            code = codes[self._code_bytes(start) : self._code_bytes(stop)]
            yield values[start:stop].view(shape), header.view(shape), code.view(shape)


# ---------------------------------------------------------------- packing


def _packed_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def packed(codes: Tensor, bits: int) -> Tensor:
    """A codec's codes (rows, columns) below 2^bits -> bytes (rows, ceil(columns * bits / 8)).

    A byte holds codes that are a whole row of bytes apart, the first in its lowest bits: so rows are shifted and joined
    as they lie, with nothing to interleave. Missing codes are 0.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    rows, columns = codes.shape
    width = _packed_bytes(columns, bits)
    planes = torch.nn.functional.pad(codes, (0, width * per_byte - columns)).view(rows, per_byte, width)
    joined = planes[:, 0].clone()
    for index in range(1, per_byte):
        joined |= planes[:, index] << index * bits
    return joined


def unpacked(packed_rows: Tensor, bits: int, columns: int) -> Tensor:
    """Bytes of a codec's block -> codes, the inverse of `packed`. Bits behind the last code are ignored."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed_rows
    planes = [(packed_rows >> index * bits) & (2**bits - 1) for index in range(per_byte)]
    return torch.cat(planes, dim=1)[:, :columns]


# ---------------------------------------------------------------- scales


def magnitudes(values: Tensor) -> Tensor:
    """Largest absolute value of each row, (rows, 1), as a codec's scales need it; 0 for a row that is sent as zero.

    abs then amax: six times faster in eager torch than `vector_norm(inf)`.
    """
    largest = values.abs().amax(dim=1, keepdim=True)
    return largest.masked_fill_(largest < MIN_MAGNITUDE, 0.0)


def rounded_up(scales: Tensor) -> Tensor:
    """Scales of a codec's blocks (fp32, >= 0, finite) in bf16, never below: quotients by it stay in a code's range."""
    return ((scales.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def quotients(values: Tensor, scales: Tensor) -> Tensor:
    """values / scales of a codec's blocks, a new tensor; 0 where the scale is 0."""
    return values / scales.float().masked_fill(scales == 0, torch.inf)


# ---------------------------------------------------------------- dither


def _dither(values: Tensor, first_block: int) -> Tensor:
    """Uniform numbers in [0, 1) for a codec's random rounding, from all values of the row, its number, the column."""
    rows, columns = values.shape
    blocks = torch.arange(first_block, first_block + rows, dtype=torch.int64, device=values.device)
    seeds = _mixed(values.view(torch.int32).sum(dim=1) + blocks * 0x9E3779B9)
    counters = torch.arange(columns, dtype=torch.int64, device=values.device) * 0x9E3779B9
    return (_mixed(seeds[:, None] + counters) >> 8).float() * 2.0**-24


def _mixed(numbers: Tensor) -> Tensor:
    """Hash from 32 to 32 bits in int64 for a codec's dither: no product overflows (two rounds, multiply and shift)."""
    for _ in range(2):
        numbers = numbers & 0xFFFFFFFF
        numbers = (numbers ^ (numbers >> 16)) * 0x45D9F3B
    numbers = numbers & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


# ---------------------------------------------------------------- grids


def _to_grid(values: Tensor, scales: Tensor, largest_code: int, dither: Tensor | None) -> Tensor:
    """A codec's codes as fp32: whole numbers of scales, of magnitude <= `largest_code`, nearest or up or down by
    chance."""
    steps = quotients(values, scales)
    return steps.round_() if dither is None else steps.add_(dither).floor_().clamp_(-largest_code, largest_code)


MAX_INT8 = 127
MIN_SCALE = 2.0**-126
"""Smallest normal fp32. A block that needs less (values below 1.5e-36) is sent as zero: below it the quotient
value / scale may leave the range of a code, and CPUs may be set to flush to zero."""


@dataclass(frozen=True)
class Int8Codec(BlockCodec):
    """Codec int8 with an fp32 scale per block: scale = absmax / 127, code = round(value / scale) in two's complement.

    8.125 bits a value with blocks of 256; the error is at most half a scale, 0.7 %. Values saturate at 1.7e38.
    """

    block: int = 256
    stochastic: bool = False
    bits = 8
    kernel = "int8"
    header_dtype = torch.float32
    max_value = MAX_INT8 * MAX_HEADER

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = values.abs().amax(dim=1, keepdim=True) / MAX_INT8
        scales.masked_fill_(scales < MIN_SCALE, 0.0)
        return scales, _to_grid(values, scales, MAX_INT8, dither).to(torch.int8).view(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8)).mul_(headers)


MAX_INT4 = 7
ZERO = 8
"""Offset that is added to a code, so that it is stored without a sign."""


@dataclass(frozen=True)
class Int4Codec(BlockCodec):
    """Codec int4 with a bf16 scale per block: scale = absmax / 7, code = round(value / scale), two codes in a byte.

    4.25 bits a value with blocks of 64; 10.8 % error. Codes from -7 to 7 are stored as 1 to 15; a 0, which only others
    send, decodes to -8 scales.
    """

    block: int = 64
    stochastic: bool = False
    bits = 4
    kernel = "int4"
    max_value = MAX_INT4 * MAX_HEADER

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = rounded_up(magnitudes(values) / MAX_INT4)
        return scales, _to_grid(values, scales, MAX_INT4, dither).add_(ZERO).to(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes).sub_(ZERO).mul_(headers)


SIGN = 8
FINEST = 2.0**-6
"""Magnitudes are 0, then FINEST scales, doubled from code to code, to 1 scale at code 7."""
LEVELS = (0.0, *(FINEST * 2**exponent for exponent in range(7)))


@dataclass(frozen=True)
class E3M0Codec(BlockCodec):
    """Codec E3M0, a float of 4 bits: sign, 3 bits of exponent, no mantissa; and a bf16 scale per block, the absmax.

    The code for pseudo-gradients of Streaming DiLoCo (arXiv 2501.18512, section 2.3), which names no scale: ours is
    that of a block. 4.25 bits a value with blocks of 64. Coarse for large values and fine for small ones: 19 % error,
    where int4 has 10.8 %, but less where a block holds values of several sizes. Half-way between two levels the smaller
    one is sent.
    """

    block: int = 64
    stochastic: bool = False
    bits = 4
    kernel = "e3m0"

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        scales = rounded_up(magnitudes(values))
        ratios = quotients(values, scales)
        sizes = ratios.abs()
        # The highest level that is not above a size is read from the exponent in its bits: that of 2^-6 is 121.
        lower = ((sizes.view(torch.int32) >> 23) - 120).clamp_(min=0)
        steps = (lower.clamp(min=1) + 120 << 23).view(torch.float32)
        # Share of the way to the next level. Steps are powers of two, so nothing is rounded.
        share = (sizes - torch.where(lower > 0, steps, 0.0)) / steps
        codes = lower + (share > (0.5 if dither is None else dither))
        negative = (ratios < 0) & (codes > 0)  # there is one zero
        return scales, torch.where(negative, codes + SIGN, codes).to(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float32, device="cpu")
        out.copy_(levels.index_select(0, codes.flatten().int()).view(codes.shape)).mul_(headers)


# ---------------------------------------------------------------- bins


FIXED_POINT = 2**20
"""Integers per largest absolute value where sums are taken: a thousandth of the steps of any code here, and the squares
of 2^22 values, the largest part, add up to 2^62."""
SIGMAS = {8: 6.0, 4: 2.5, 2: 2.0}
"""Bits of a code -> standard deviations beside the mean over which the bins lie."""
WHOLE_PART = 2**40
"""As a block: one codebook for each part, however large."""
DEFAULT_BLOCKS = {8: WHOLE_PART, 4: 1024, 2: 256}
"""Codebooks cost 0.004 (parts of 2^20), 0.25 and 0.25 bits a value."""


def fixed_point(values: Tensor, largest: Tensor) -> Tensor:
    """A codec's values as integers (in fp32) up to FIXED_POINT, in proportion; `largest`: `magnitudes` of the rows.

    Integers add up to the same sum in any order.
    """
    factors = FIXED_POINT / largest.masked_fill(largest == 0, torch.inf)
    return (values * factors).round_()


@dataclass(frozen=True)
class BinnedCodec(BlockCodec):
    """Codec with 2^bits bins of equal width over mean +- k standard deviations. A value is sent as its bin's number,
    and decoded as the mean of the values that were in it, from a codebook in bf16 (INTELLECT-1, arXiv 2412.01152: 256
    bins over 6 sigma).

    Unlike a grid it sends sums over bins unchanged, which matters where bins are few: 2 bits on a grid lose more
    (MuLoCo, arXiv 2505.23725). Fewer bins want a narrower range, and what lies outside goes to the outermost bin: 4
    bins err 59 % over 6 sigma, 40 % over 3 and 34 % over 2 (34.3 % is the best that 4 levels can do for the
    distribution as a whole; a block's own codebook does a little better), 16 bins 21 % over 6 and 10 % over 2.5.
    """

    block: int
    bits: int

    @property
    def name(self) -> str:
        return "two_bit" if self.bits == 2 else f"int{self.bits}-statistical"

    @property
    def kernel(self) -> str:  # type: ignore[override]
        """Name of this codec's compiled kernel."""
        return f"binned{self.bits}"

    @property
    def header_numbers(self) -> int:
        return 1 << self.bits

    def quantise(self, values: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = magnitudes(values)
        numbers = fixed_point(values, largest)
        integers = numbers.long()
        columns = numbers.shape[1]
        mean = integers.sum(dim=1, keepdim=True).double() / columns
        variance = integers.square().sum(dim=1, keepdim=True).double() / columns - mean * mean
        # Not torch.sqrt: MKL's, where torch has MKL, is one bit off in 0.7 % of elements.
        sigma = torch.from_numpy(np.sqrt(variance.clamp(min=0).cpu().numpy())).to(mean)
        bins = self.header_numbers
        slope = (bins / 2) / (SIGMAS[self.bits] * sigma.masked_fill(sigma == 0, torch.inf))
        offset = bins / 2 - mean * slope
        codes = (numbers * slope.float()).add_(offset.float()).floor_().clamp_(0, bins - 1).long()
        empty = torch.zeros(len(values), bins, dtype=torch.int64, device=values.device)
        sums, counts = empty.scatter_add(1, codes, integers), empty.scatter_add(1, codes, torch.ones_like(integers))
        means = sums.double() / counts.clamp(min=1) * (largest.double() / FIXED_POINT)
        return means.float().bfloat16(), codes.to(torch.uint8)

    def dequantise(self, headers: Tensor, codes: Tensor, out: Tensor) -> None:
        torch.gather(headers, 1, codes.long(), out=out)
