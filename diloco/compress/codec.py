"""Interface of every codec, and the error that a malformed payload raises.

Bytes come from peers and are hostile until decoded: sizes are compared with what the contract implies before
anything of that size is allocated, and no value that is not finite gets through. Fields are little-endian, as the
hosts are. No codec keeps state between calls, so threads may share one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diloco.base.memory import floats
from diloco.compress import kernels


class PayloadError(ValueError):
    """Bytes that no codec of this contract wrote, or values that no codec can encode. The sender is refused."""


class Codec(ABC):
    """A codec: encodes the values of one part as bytes, and decodes them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the codec for people and for telemetry."""

    @property
    def gathered(self) -> bool:
        """Whether members get a bundle of all payloads (the codec's sums do not stay small), not an encoded mean."""
        return False

    @abstractmethod
    def encode(self, values: Tensor) -> bytes:
        """Encode flat, contiguous fp32 values as bytes; those beyond the codec's range saturate.

        Raises PayloadError when one is not finite: a peer whose training diverged must not pass that on.
        """

    @abstractmethod
    def decode_into(self, payload: bytes, out: Tensor) -> None:
        """Decode a payload into `out`, flat contiguous fp32 on the host: finite values, the same bits on any CPU.

        Raises PayloadError; `out` may then hold anything.
        """

    @abstractmethod
    def max_bytes(self, elements: int) -> int:
        """Most bytes that this codec makes of that many values; a longer payload need not be received."""

    def decode(self, payload: bytes, elements: int) -> Tensor:
        """Decode a payload into a new tensor, as `decode_into` does."""
        values = floats(elements)
        self.decode_into(payload, values)
        return values

    def fold(self, payload: bytes, weight: float, total: Tensor) -> float:
        """Decode and add: total += weight * values, the product rounded first. Returns the sum of the values' squares.

        That sum is for screens: it is not the same bits everywhere. What a codec does not send may leave a -0.0 in
        `total`, which would be 0.0 after a sum. Raises PayloadError, with `total` unchanged.
        """
        values = self.decode(payload, total.numel())
        squares = float(torch.dot(values, values))
        total.add_(values.mul_(weight))
        return squares

    def squares(self, payload: bytes, elements: int) -> float:
        """Sum of squares of a payload's decoded values, as `fold` returns it, without folding. Raises PayloadError."""
        values = self.decode(payload, elements)
        return float(torch.dot(values, values))

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        """Decode and average: fill `out` with the mean of gathered payloads. One or more terms (weight >= 0, payload).

        Products and sums are rounded one by one, in the order given; what overflows saturates, and without any weight
        the mean is zero. Raises PayloadError; `out` may then hold anything.
        """
        out.fill_(-0.0)  # the one number that changes nothing: 0.0 + -0.0 is 0.0
        for weight, payload in terms:
            self.fold(payload, float(weight), out)
        out.div_(float(sum(weight for weight, _ in terms))).nan_to_num_()


def check_size(payload: bytes, expected_bytes: int) -> None:
    """Raises PayloadError unless a codec's payload has exactly that size."""
    if len(payload) != expected_bytes:
        raise PayloadError(f"payload of {len(payload)} bytes, expected {expected_bytes}")


def magnitude(values: Tensor) -> float:
    """Largest absolute value to encode; inf or nan when one is there. A maximum is the same bits in any order."""
    if not values.numel():
        return 0.0
    largest = kernels.magnitude(values)
    if largest is not None:
        return largest
    low, high = torch.aminmax(values)
    return max(abs(low.item()), abs(high.item()))


def saturated(values: Tensor, limit: float) -> Tensor:
    """Values clamped to a codec's range, if need be. Raises PayloadError when one is not finite."""
    largest = magnitude(values)
    if not math.isfinite(largest):
        raise PayloadError("cannot encode values that are not finite")
    return values.clamp(-limit, limit) if largest > limit else values


def to_bytes(raw: Tensor) -> bytes:
    """Bytes of a contiguous host tensor for a codec's payload."""
    return raw.view(torch.uint8).numpy().tobytes()


def from_bytes(payload: bytes) -> Tensor:
    """A codec's payload as a new flat uint8 tensor, writable and aligned, which `bytes` are not."""
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())


@dataclass(frozen=True)
class FloatCodec(Codec):
    """Codec that sends one number of type `dtype` per value, rounded to nearest even; fp16 saturates at 65,504."""

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
