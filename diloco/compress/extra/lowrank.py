"""The low-rank codec: a part is a matrix, and is sent as two thin ones, whose product is near it (PowerSGD, arXiv
1905.13727).

    M ~ P Q^T,  M rows x columns,  P rows x rank with orthonormal columns,  Q = M^T P columns x rank

P comes of a seeded start and two power iterations. A payload is, for each of the rank terms, an fp32 scale, then P and
Q / scale in fp16: 16 rank (rows + columns) bits for each part, .25 bits a value with rank 8 and 1024 x 1024.

Gathered, though factors could be summed: P means something only beside the P of the others. Summing them takes two
agreed phases in each round (first the mean of M Q for a Q that all share, then that of M^T P), or a P that is agreed
beforehand and is then part of the outer state. A reduction here has one phase; so every member gets all factors, which
grow with the contributors, and takes the mean of the products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size, from_bytes, magnitude, saturated, to_bytes
from diloco.config.codec import CodecChoice

POWER_ITERATIONS = 2
MAX_VALUE = 2.0**60
MAX_SCALE = 2.0**80
"""2^16 terms of two fp16 numbers, each below 2^16, and such a scale add up to something finite."""
MAX_RANK = 2**12


@dataclass(frozen=True)
class LowRankCodec(Codec):
    """Low-rank codec: `rank` <= 4096 terms, or as many as the matrix has; values saturate at 2^60."""

    rank: int
    columns: int

    @classmethod
    def opened(cls, section: CodecChoice) -> LowRankCodec:
        """The low-rank codec that a contract asks for."""
        return cls(section.rank, section.columns)

    name = "lowrank"
    gathered = True

    def encode(self, values: Tensor) -> bytes:
        values = saturated(values, MAX_VALUE)
        rows, columns, rank = self._shape(values.numel())
        matrix = _zeros(rows, columns)
        matrix.view(-1)[: values.numel()] = values
        largest = magnitude(matrix) or 1.0
        unit = matrix / largest  # squares of tiny numbers would be zero
        start = torch.Generator(device="cpu").manual_seed(0)
        right = torch.randn(columns, rank, generator=start, dtype=torch.float32, device="cpu")
        for _ in range(POWER_ITERATIONS):
            left, _ = torch.linalg.qr(unit @ right)
            right = unit.T @ left
        right.mul_(largest)
        scales = right.abs().amax(dim=0)
        right /= scales.masked_fill(scales == 0, torch.inf)
        return to_bytes(scales) + to_bytes(left.T.contiguous().half()) + to_bytes(right.T.contiguous().half())

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        check_size(payload, self.max_bytes(out.numel()))
        rows, columns, rank = self._shape(out.numel())
        raw = from_bytes(payload)
        cut = rank * torch.float32.itemsize
        scales, factors = raw[:cut].view(torch.float32), raw[cut:].view(torch.float16).float()
        low, high = (bound.item() for bound in torch.aminmax(scales))
        if not (low >= 0 and high <= MAX_SCALE and math.isfinite(magnitude(factors))):
            raise PayloadError("lowrank payload with factors that are not finite, or scales that are none")
        left = factors[: rank * rows].view(rank, rows, 1)
        right = factors[rank * rows :].view(rank, 1, columns).mul_(scales.view(rank, 1, 1))
        matrix = _zeros(rows, columns)
        product = torch.empty_like(matrix)
        for term in range(rank):
            matrix.add_(torch.mul(left[term], right[term], out=product))
        out.copy_(matrix.view(-1)[: out.numel()])

    def max_bytes(self, elements: int) -> int:
        rows, columns, rank = self._shape(elements)
        return rank * (torch.float32.itemsize + (rows + columns) * torch.float16.itemsize)

    def _shape(self, elements: int) -> tuple[int, int, int]:
        """Rows, columns and terms that the codec makes of a part: no wider than a square, zeros at the end."""
        columns = min(self.columns, math.isqrt(elements - 1) + 1)
        rows = math.ceil(elements / columns)
        return rows, columns, min(self.rank, rows, columns, MAX_RANK)


def _zeros(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float32, device="cpu")
