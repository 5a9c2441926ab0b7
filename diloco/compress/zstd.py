"""The codec that compresses another codec's payloads: zstandard level 1; levels 3 and 9 gain nothing on such bytes.

Floats are split into byte planes first (all lowest bytes, ..., all highest bytes): only exponents repeat, and side
by side they compress. Some payloads do not (one bit a value, packed indices): they go as they are, so that nobody
spends time on decompressing them. The first byte of a payload marks a frame or raw bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size

LEVEL = 1
MIN_WINDOW_BYTES = 1024
WORTHWHILE = 0.98
"""Share of the size that a frame must stay below: 2 % of the bytes are sent in the time that zstd takes for them at
about 20 Gb/s."""
_RAW, _FRAME = b"\0", b"\1"


@dataclass(frozen=True)
class ZstdCodec(Codec):
    """Codec that compresses payloads of `inner` (fixed size `inner.max_bytes`) to one zstandard frame where that pays.

    `planes`: bytes of one number, 1 for no split. The compressor is made anew for each call, because zstandard's
    objects must not be shared between threads: 20 us of the 4 ms that a 1 Mi-element fp32 part takes.
    """

    inner: Codec
    planes: int

    @property
    def name(self) -> str:
        return f"{self.inner.name}+zstd"

    @property
    def gathered(self) -> bool:
        return self.inner.gathered

    def encode(self, values: Tensor) -> bytes:
        raw = self.inner.encode(values)
        # Numbers of `planes` bytes each: first bytes of all, second bytes of all, ...
        split = np.frombuffer(raw, dtype=np.uint8).reshape(-1, self.planes).T.tobytes() if self.planes > 1 else raw
        frame = zstandard.ZstdCompressor(level=LEVEL).compress(split)
        return _FRAME + frame if len(frame) <= WORTHWHILE * len(raw) else _RAW + raw

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        self.inner.decode_into(self._unpacked(payload, out.numel()), out)

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        return self.inner.fold(self._unpacked(payload, total.numel()), weight, total)

    def squares(self, payload: bytes, elements: int) -> float:
        return self.inner.squares(self._unpacked(payload, elements), elements)

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        self.inner.mean_into([(weight, self._unpacked(payload, out.numel())) for weight, payload in terms], out)

    def _unpacked(self, payload: bytes, elements: int) -> bytes:
        """The inner codec's payload, decompressed. Raises PayloadError."""
        raw_bytes = self.inner.max_bytes(elements)
        if len(payload) > self.max_bytes(elements):
            raise PayloadError(f"payload of {len(payload)} bytes, expected at most {self.max_bytes(elements)}")
        tag, rest = payload[:1], payload[1:]
        if tag == _RAW:
            return rest
        if tag != _FRAME:
            raise PayloadError(f"payload that is neither raw nor a zstd frame: first byte {tag.hex() or 'missing'}")
        # The library allocates whatever a frame states, its `max_output_size` notwithstanding (33 kB became 1 GiB), and
        # a window as large as stated: so the header is read first.
        try:
            header = zstandard.get_frame_parameters(rest)
            if header.content_size != raw_bytes or header.window_size > max(raw_bytes, MIN_WINDOW_BYTES):
                raise PayloadError(f"zstd frame of {header.content_size} bytes, expected {raw_bytes}")
            raw = zstandard.ZstdDecompressor().decompress(rest, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PayloadError(f"not a zstd frame of ours: {error}") from error
        check_size(raw, raw_bytes)
        return _join(raw, self.planes)

    def max_bytes(self, elements: int) -> int:
        """Most bytes of a compressed payload: one more than the inner codec's, as some do not compress."""
        return 1 + self.inner.max_bytes(elements)


def _join(raw: bytes, planes: int) -> bytes:
    """Byte planes of a decompressed payload -> numbers. Plane by plane: three times faster than one transposed copy."""
    if planes == 1:
        return raw
    split = np.frombuffer(raw, dtype=np.uint8).reshape(planes, -1)
    joined = np.empty((split.shape[1], planes), dtype=np.uint8)
    for plane in range(planes):
        joined[:, plane] = split[plane]
    return joined.tobytes()
