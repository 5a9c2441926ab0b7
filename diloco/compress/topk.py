"""The codec top-k: it sends the k largest values by magnitude of every 4096 consecutive ones; the others are zero.

A payload is the indices in their chunks, rising, 12 bits each, then the kept values in another codec's encoding, of
which a block is what is kept of one chunk. With k of 4096 that makes, in bits for each value of the part:

    k = 128   fp16 .875   int8 .6328 (scales .0078)   two_bit .4531 (codes .4375, codebooks .0156)
    k = 512   fp16 3.5    int8 2.5078                 two_bit 1.7656 (codes 1.75)

Of values that are just as large the first ones are sent, so that all peers make the same bytes of the same values.

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

from diloco.compress import kernels
from diloco.compress.blocks import BinnedCodec, Int8Codec
from diloco.compress.codec import Codec, FloatCodec, PayloadError, check_size
from diloco.config.codec import CodecChoice

CHUNK = 4096
INDEX_BITS = 12
MIN_BLOCK = 128
"""Kept values that share a scale or a codebook, at least: a codebook of 64 bits costs half a bit for each of them."""

DivideBy = Literal["senders", "all"]
"""Weights that a mean is divided by: of those who sent the value (not zero once decoded), or of all."""


def kept_of(chunk: int, density: float) -> int:
    """Number of values that the codec top-k sends of a chunk."""
    return max(1, round(density * chunk))


@dataclass(frozen=True)
class TopKCodec(Codec):
    """Codec top-k. `density`: share of the values that are sent, 0 < density <= 1. `kept`: their codec, fixed size."""

    density: float
    kept: Codec
    divide_by: DivideBy = "senders"
    chunk: int = CHUNK

    @classmethod
    def opened(cls, section: CodecChoice) -> TopKCodec:
        """The top-k codec that a contract asks for."""
        block = max(4 * math.ceil(kept_of(CHUNK, section.density) / 4), MIN_BLOCK)  # 2-bit codes fill their bytes
        kept: dict[str, Codec] = {
            "fp16": FloatCodec("fp16", torch.float16),
            "int8": Int8Codec(block),
            "two_bit": BinnedCodec(block, bits=2),
        }
        return cls(section.density, kept[section.values], section.mean)

    name = "topk"
    gathered = True

    def encode(self, values: Tensor) -> bytes:
        values = self._coordinates(values)
        cut = self._cut(values.numel())
        if kernels.has_topk(cut):
            packed, largest = kernels.topk_select(values, cut)
            return packed + self.kept.encode(largest)
        whole = values.numel() - values.numel() % self.chunk
        indices, places = [], []
        # All whole chunks, one per row, and the short one behind them.
        for start, rows in ((0, values[:whole].view(-1, self.chunk)), (whole, values[whole:].view(1, -1))):
            if rows.numel():
                found = _largest_of_rows(rows, kept_of(rows.shape[1], self.density)).flatten().nonzero().flatten()
                indices.append(found % self.chunk)
                places.append(found.add_(start))
        return _pack(torch.cat(indices).numpy()) + self.kept.encode(values[torch.cat(places)])

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        places, sent = self._read(payload, out.numel())
        if places is None:
            kernels.topk_decode(payload, sent, self._cut(out.numel()), out)
        else:
            out.zero_()
            out[places] = sent
        self._restore(out)

    def max_bytes(self, elements: int) -> int:
        cut = self._cut(elements)
        return cut.packed_bytes + self.kept.max_bytes(cut.sent)

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        places, sent = self._read(payload, total.numel())
        if places is None:
            kernels.topk_fold(payload, sent, self._cut(total.numel()), weight, total)
        else:
            total[places] += sent * weight  # each place is there once: no order to agree on
        return float(torch.dot(sent, sent))

    def squares(self, payload: bytes, elements: int) -> float:
        _, sent = self._read(payload, elements)
        return float(torch.dot(sent, sent))

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        total = None if self.divide_by == "senders" else float(sum(weight for weight, _ in terms))
        cut = self._cut(out.numel())
        if kernels.has_topk(cut):
            read = [(float(weight), payload, self._read(payload, out.numel())[1]) for weight, payload in terms]
            kernels.topk_mean(read, total, cut, out)
        else:
            out.zero_()
            divisor = torch.zeros_like(out) if total is None else total
            for weight, payload in terms:
                places, sent = self._read(payload, out.numel())
                if isinstance(divisor, Tensor):
                    divisor[places] += sent.ne(0).float().mul_(float(weight))
                out[places] += sent.mul_(float(weight))  # each place is there once: no order to agree on
            out.div_(divisor).nan_to_num_()  # 0 / 0 where nobody sent anything
        self._restore(out)

    def _coordinates(self, values: Tensor) -> Tensor:
        """Numbers of which the codec sends the largest, made of a part's values: (elements,) fp32."""
        return values

    def _restore(self, coordinates: Tensor) -> None:
        """Turn the numbers that the codec sent into a part's values again, in place, finite if they are."""

    def _cut(self, elements: int) -> kernels.TopkShape:
        rest = elements % self.chunk
        kept_of_rest = kept_of(rest, self.density) if rest else 0
        return kernels.TopkShape(elements, self.chunk, kept_of(self.chunk, self.density), kept_of_rest)

    def _read(self, payload: bytes, elements: int) -> tuple[Tensor | None, Tensor]:
        """Places in the part, int64, and values there, fp32, in a top-k payload. Raises PayloadError.

        None: kernels found the places good, and will find them again.
        """
        check_size(payload, self.max_bytes(elements))
        cut = self._cut(elements)
        compiled = kernels.has_topk(cut)
        places = None if compiled else _places(_unpack(payload[: cut.packed_bytes], cut.sent), cut)
        good = kernels.topk_good(payload, cut) if compiled else places is not None
        if not good:
            raise PayloadError(f"{self.name} payload with an index twice, out of order or beyond its chunk")
        return places, self.kept.decode(payload[cut.packed_bytes :], cut.sent)


def _places(indices: np.ndarray, cut: kernels.TopkShape) -> Tensor | None:
    """Indices in the chunks of a top-k payload -> places in the part. None: they do not rise, or leave their chunks."""
    whole, rest = divmod(cut.elements, cut.chunk)
    rows, last = indices[: whole * cut.kept].reshape(whole, cut.kept), indices[whole * cut.kept :]
    for found, width in ((rows, cut.chunk), (last[None, :], rest)):
        if found.size and not ((found[:, 1:] > found[:, :-1]).all() and found[:, -1].max() < width):
            return None
    starts = np.arange(whole + 1, dtype=np.int64) * cut.chunk
    return torch.from_numpy(np.concatenate([(rows + starts[:whole, None]).reshape(-1), last + starts[whole]]))


def _largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    """Mask of the values that the codec top-k sends, (rows, columns) bool: `kept` of each row, the first of equals.

    Sizes are compared as integers, whose order is that of the numbers, with nan above all.
    """
    sizes = rows.view(torch.int32) & 0x7FFFFFFF
    smallest = sizes.topk(kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen = sizes >= smallest
    if int(chosen.count_nonzero()) > kept * len(rows):
        missing = kept - (sizes > smallest).sum(dim=1, keepdim=True)
        same = sizes == smallest
        chosen.logical_and_(same.logical_not().logical_or_(same.cumsum(dim=1) <= missing))
    return chosen


def _pack(indices: np.ndarray) -> bytes:
    """Indices of a top-k payload as bytes: two 12-bit numbers in three, little-endian; a zero after an odd last one."""
    pairs = np.zeros((math.ceil(len(indices) / 2), 2), dtype=np.uint16)
    pairs.reshape(-1)[: len(indices)] = indices
    low, high = pairs.T
    packed = np.empty((len(pairs), 3), dtype=np.uint8)
    packed[:, 0] = low & 0xFF
    packed[:, 1] = low >> 8 | (high & 0xF) << 4
    packed[:, 2] = high >> 4
    return packed.tobytes()


def _unpack(payload: bytes, count: int) -> np.ndarray:
    """Indices of a top-k payload from its bytes, as int64: the inverse of `_pack`."""
    numbers = np.zeros((len(payload) // 3, 4), dtype=np.uint8)
    numbers[:, :3] = np.frombuffer(payload, dtype=np.uint8).reshape(-1, 3)
    pairs = numbers.view(np.uint32).astype(np.int64)
    return np.concatenate([pairs & (1 << INDEX_BITS) - 1, pairs >> INDEX_BITS], axis=1).reshape(-1)[:count]
