"""Floating-point codecs: fp32 (lossless), fp16 and bf16 (half the bytes)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.compress.codec import Codec, PayloadError, check_size, from_bytes, magnitude, saturated, to_bytes


@dataclass(frozen=True)
class FloatCodec(Codec):
    """One number of type `dtype` per value, rounded to nearest even; fp16 saturates at 65,504."""

    label: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.label

    def encode(self, values: Tensor) -> bytes:
        return to_bytes(saturated(values, torch.finfo(self.dtype).max).to(self.dtype))

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        check_size(payload, self.max_bytes(out.numel()))
        out.copy_(from_bytes(payload).view(self.dtype))
        if not math.isfinite(magnitude(out)):
            raise PayloadError(f"{self.name} payload holds values that are not finite")

    def max_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize
