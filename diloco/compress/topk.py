"""Top-k: of every chunk of 4096 consecutive values the k largest by magnitude; the others are zero.

A payload is the indices in their chunks, rising, 12 bits each, then the kept values in another codec's encoding, of
which a block is what is kept of one chunk. With k of 4096 that makes, in bits for each value of the part:

    k = 128   fp16 .875   int8 .6328 (scales .0078)   two_bit .4531 (codes .4375, codebooks .0156)
    k = 512   fp16 3.5    int8 2.5078                 two_bit 1.7656 (codes 1.75)

`two_bit` is four bins and their means for each chunk: the values that are kept lie in two humps beside zero, and the
bins are the larger and the smaller ones of either sign.

Sums of such do not stay small, so contributions are gathered (`diloco.compress.bundle`). A value's mean is over those
who sent it: whoever kept something else there has not said that it is zero, and error feedback sends it later
(SparseLoCo, arXiv 2508.15706, as its code does; on a small model a mean over all loses 0.15 nats).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size

CHUNK = 4096
INDEX_BITS = 12

DivideBy = Literal["senders", "all"]
"""Whose weights a mean is divided by: of those who sent the value (not zero once decoded), or of all."""


def kept_of(chunk: int, density: float) -> int:
    """How many values of a chunk are sent."""
    return max(1, round(density * chunk))


@dataclass(frozen=True)
class TopKCodec(Codec):
    """`density`: share of the values that are sent, 0 < density <= 1. `kept`: their codec, of fixed size."""

    density: float
    kept: Codec
    divide_by: DivideBy = "senders"
    chunk: int = CHUNK

    @property
    def name(self) -> str:
        return "topk"

    @property
    def gathered(self) -> bool:
        return True

    def encode(self, values: Tensor) -> bytes:
        coordinates = self._coordinates(values)
        indices, places = [], []
        for start, rows in self._chunks(coordinates):
            width = rows.shape[1]
            found = rows.abs().topk(kept_of(width, self.density), dim=1, sorted=False).indices.sort(dim=1).values
            indices.append(found.flatten())
            places.append(found.add(torch.arange(len(rows)).mul_(width).add_(start).unsqueeze(1)).flatten())
        return _pack(torch.cat(indices).numpy()) + self.kept.encode(coordinates[torch.cat(places)])

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        places, values = self._read(payload, out.numel())
        out.zero_()
        out[places] = values
        self._restore(out)

    def max_bytes(self, elements: int) -> int:
        count = self._count(elements)
        return _packed_bytes(count) + self.kept.max_bytes(count)

    def squares(self, payload: bytes, elements: int) -> float:
        _, values = self._read(payload, elements)
        return float(torch.dot(values, values))

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        out.zero_()
        divisor = torch.zeros_like(out) if self.divide_by == "senders" else float(sum(weight for weight, _ in terms))
        for weight, payload in terms:
            places, values = self._read(payload, out.numel())
            if isinstance(divisor, Tensor):
                divisor[places] += values.ne(0).float().mul_(float(weight))
            out[places] += values.mul_(float(weight))  # each place is there once: no order to agree on
        out.div_(divisor).nan_to_num_()  # 0 / 0 where nobody sent anything
        self._restore(out)

    def _coordinates(self, values: Tensor) -> Tensor:
        """What the largest are sought among: (elements,) fp32."""
        return values

    def _restore(self, coordinates: Tensor) -> None:
        """Turn them into values again, in place, finite if they are."""

    def _count(self, elements: int) -> int:
        """Values sent of a part."""
        whole, rest = divmod(elements, self.chunk)
        return whole * kept_of(self.chunk, self.density) + (kept_of(rest, self.density) if rest else 0)

    def _chunks(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """All whole chunks, one per row, and the short one behind them: (first element, view)."""
        whole = flat.numel() - flat.numel() % self.chunk
        views = [(0, flat[:whole].view(-1, self.chunk)), (whole, flat[whole:].view(1, -1))]
        return [(start, rows) for start, rows in views if rows.numel()]

    def _read(self, payload: bytes, elements: int) -> tuple[Tensor, Tensor]:
        """Places in the part, int64, and what is there, fp32. Raises PayloadError."""
        check_size(payload, self.max_bytes(elements))
        count = self._count(elements)
        cut = _packed_bytes(count)
        places = self._places(_unpack(payload[:cut], count), elements)
        return torch.from_numpy(places), self.kept.decode(payload[cut:], count)

    def _places(self, indices: np.ndarray, elements: int) -> np.ndarray:
        """Indices in the chunks -> places in the part. Raises PayloadError unless they rise within every chunk."""
        whole, rest = divmod(elements, self.chunk)
        per_chunk = kept_of(self.chunk, self.density)
        cut = whole * per_chunk
        rows, last = indices[:cut].reshape(whole, per_chunk), indices[cut:]
        for found, width in ((rows, self.chunk), (last[None, :], rest)):
            if found.size and not ((found[:, 1:] > found[:, :-1]).all() and found[:, -1].max() < width):
                raise PayloadError(f"{self.name} payload with an index twice, out of order or beyond its chunk")
        starts = np.arange(whole + 1, dtype=np.int64) * self.chunk
        return np.concatenate([(rows + starts[:whole, None]).reshape(-1), last + starts[whole]])


def _packed_bytes(count: int) -> int:
    return 3 * math.ceil(count / 2)


def _pack(indices: np.ndarray) -> bytes:
    """Two 12-bit numbers in three bytes, little-endian; an odd one at the end has a zero beside it."""
    pairs = np.zeros((math.ceil(len(indices) / 2), 2), dtype=np.uint16)
    pairs.reshape(-1)[: len(indices)] = indices
    low, high = pairs.T
    packed = np.empty((len(pairs), 3), dtype=np.uint8)
    packed[:, 0] = low & 0xFF
    packed[:, 1] = low >> 8 | (high & 0xF) << 4
    packed[:, 2] = high >> 4
    return packed.tobytes()


def _unpack(payload: bytes, count: int) -> np.ndarray:
    """The inverse of `_pack`, as int64."""
    packed = np.frombuffer(payload, dtype=np.uint8).reshape(-1, 3).astype(np.int64)
    pairs = np.empty((len(packed), 2), dtype=np.int64)
    pairs[:, 0] = packed[:, 0] | (packed[:, 1] & 0xF) << 8
    pairs[:, 1] = packed[:, 1] >> 4 | packed[:, 2] << 4
    return pairs.reshape(-1)[:count]
