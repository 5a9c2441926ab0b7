"""Top-k of cosine coefficients: what many neighbouring weights do together is a few large numbers there (DeMo, arXiv
2411.19870: DCT-II over tiles of 64 x 64, then top-k, then the inverse of what was sent).

A part is taken as rows of 64 values, and 64 rows as a tile; the rows left at the end are a lower tile, and values that
fill no row stay as they are. The transform is orthonormal, so the largest coefficients are the best ones to send, and
sizes are the same on both sides. Chunks, bytes and the mean are those of `diloco.compress.topk`; the mean is taken of
the coefficients, as in DeMo, and turned back once.

What peers must agree on, turning back, is 64 products and sums after one another in each dimension, over whole tiles:
no matrix product, whose order is the library's. For 2^20 values that takes one core of a server 40 ms (measured),
against 1 ms for plain top-k: per version and peer, once for each part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from diloco.compress.codec import Codec, saturated
from diloco.compress.topk import TopKCodec

MAX_VALUE = 2.0**120
"""Turning back 64 x 64 such coefficients stays finite: it makes them at most 128 times as large."""
TILES_AT_ONCE = 16
"""256 KiB of fp32: what is worked on stays in a core's cache."""


class DctCodec(TopKCodec):
    """Codec of cosine coefficients: as `TopKCodec`; a chunk is a square tile."""

    name = "dct"

    fold = Codec.fold
    """Folds values, not the coefficients that were sent."""

    @property
    def width(self) -> int:
        """Rows and columns of a tile that the cosine codec transforms."""
        return math.isqrt(self.chunk)

    def _coordinates(self, values: Tensor) -> Tensor:
        coordinates = saturated(values, MAX_VALUE / self.chunk).clone()
        for tiles in self._tiles(coordinates):
            rows, columns = _basis(tiles.shape[1]), _basis(self.width)
            tiles.copy_(rows @ tiles @ columns.T)
        return coordinates

    def _restore(self, coordinates: Tensor) -> None:
        coordinates.clamp_(-MAX_VALUE, MAX_VALUE)
        for tiles in self._tiles(coordinates):
            for some in torch.split(tiles, TILES_AT_ONCE):
                _turn_back(some)

    def _tiles(self, flat: Tensor) -> Iterator[Tensor]:
        """Views (tiles, rows, width) for the cosine codec: all whole tiles, and the lower one behind them."""
        whole = flat.numel() - flat.numel() % self.chunk
        end = flat.numel() - flat.numel() % self.width
        if whole:
            yield flat[:whole].view(-1, self.width, self.width)
        if end > whole:
            yield flat[whole:end].view(1, -1, self.width)


def _turn_back(tiles: Tensor) -> None:
    """The cosine codec's inverse DCT of (tiles, rows, columns), in place: DCT-III in separately rounded fp32."""
    _, rows, columns = tiles.shape
    by_row, by_column = _basis(rows), _basis(columns)
    product = torch.empty_like(tiles)
    half = torch.zeros_like(tiles)
    for index in range(rows):
        half.add_(torch.mul(tiles[:, index : index + 1, :], by_row[index].unsqueeze(1), out=product))
    tiles.zero_()
    for index in range(columns):
        tiles.add_(torch.mul(half[:, :, index : index + 1], by_column[index], out=product))


@lru_cache
def _basis(size: int) -> Tensor:
    """The cosine codec's orthonormal DCT-II: row k is s_k cos(pi k (2 j + 1) / (2 size)), fp32, same on any machine."""
    rows = []
    for k in range(size):
        scale = math.sqrt((1 if k == 0 else 2) / size)
        rows.append([scale * _cosine_of_quarters(k * (2 * j + 1), size) for j in range(size)])
    return torch.tensor(rows, dtype=torch.float64, device="cpu").float()


def _cosine_of_quarters(numerator: int, size: int) -> float:
    """cos(pi/2 * numerator / size) for the cosine codec, by its series: `math.cos` differs between C libraries."""
    turn = numerator % (4 * size)
    turn = min(turn, 4 * size - turn)  # cos(-x)
    sign = -1.0 if turn > size else 1.0
    turn = min(turn, 2 * size - turn)  # cos(pi - x)
    square = (math.pi / 2 * turn / size) ** 2
    term = total = 1.0
    for index in range(1, 30, 2):
        term *= -square / (index * (index + 1))
        total += term
    return sign * total
