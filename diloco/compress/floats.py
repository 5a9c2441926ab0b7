"""Floating-point codecs: fp32 (lossless), fp16 and bf16 (half the bytes)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.compress.codec import PayloadError, check_size, from_bytes, magnitude, saturated, to_bytes


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """One number of type `dtype` per value, rounded to nearest even; fp16 saturates at 65,504."""

    name: str
    dtype: torch.dtype

    def encode(self, values: Tensor) -> bytes:
        return to_bytes(saturated(values, torch.finfo(self.dtype).max).to(self.dtype))

    def decode(self, payload: bytes, elements: int) -> Tensor:
        check_size(payload, self.max_bytes(elements))
        values = from_bytes(payload).view(self.dtype).to(torch.float32)
        if not math.isfinite(magnitude(values)):
            raise PayloadError(f"{self.name} payload holds values that are not finite")
        return values

    def max_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize
