"""zstandard level 1 around another codec; levels 3 and 9 gain nothing on such bytes.

Floats are split into byte planes first (all lowest bytes, ..., all highest bytes): only exponents repeat, and side
by side they compress.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size

LEVEL = 1
SMALLEST_WINDOW_BYTES = 1024


@dataclass(frozen=True)
class ZstdCodec(Codec):
    """`inner`, whose payload size is fixed (`inner.max_bytes`), in one zstandard frame.

    `planes`: bytes of one number, 1 for no split. The compressor is made anew for each call, because zstandard's
    objects must not be shared between threads: 20 us of the 4 ms that a 1 Mi-element fp32 part takes.
    """

    inner: Codec
    planes: int

    @property
    def name(self) -> str:
        return f"{self.inner.name}+zstd"

    def encode(self, values: Tensor) -> bytes:
        raw = self.inner.encode(values)
        return zstandard.ZstdCompressor(level=LEVEL).compress(_split(raw, self.planes))

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        self.inner.decode_into(self._unpacked(payload, out.numel()), out)

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        return self.inner.fold(self._unpacked(payload, total.numel()), weight, total)

    def _unpacked(self, payload: bytes, elements: int) -> bytes:
        if len(payload) > self.max_bytes(elements):
            raise PayloadError(f"payload of {len(payload)} bytes, expected at most {self.max_bytes(elements)}")
        return _join(_decompress(payload, self.inner.max_bytes(elements)), self.planes)

    def max_bytes(self, elements: int) -> int:
        """ZSTD_compressBound: what incompressible bytes grow to."""
        raw_bytes = self.inner.max_bytes(elements)
        return raw_bytes + raw_bytes // 256 + 64


def _decompress(payload: bytes, raw_bytes: int) -> bytes:
    """The content of one frame, which must state that it holds `raw_bytes`.

    The library allocates whatever a frame states, its `max_output_size` notwithstanding (33 kB became 1 GiB), and
    a window as large as stated: so the header is read first.
    """
    try:
        header = zstandard.get_frame_parameters(payload)
        if header.content_size != raw_bytes or header.window_size > max(raw_bytes, SMALLEST_WINDOW_BYTES):
            raise PayloadError(f"zstd frame of {header.content_size} bytes, expected {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"not a zstd frame of ours: {error}") from error
    check_size(raw, raw_bytes)
    return raw


def _split(raw: bytes, planes: int) -> bytes:
    """Numbers of `planes` bytes each -> first bytes of all, second bytes of all, ..."""
    if planes == 1:
        return raw
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, planes).T.tobytes()


def _join(raw: bytes, planes: int) -> bytes:
    """The inverse of `_split`. Plane by plane: three times faster than one transposed copy."""
    if planes == 1:
        return raw
    split = np.frombuffer(raw, dtype=np.uint8).reshape(planes, -1)
    joined = np.empty((split.shape[1], planes), dtype=np.uint8)
    for plane in range(planes):
        joined[:, plane] = split[plane]
    return joined.tobytes()
