"""Bytes of a lying simulated peer, which no honest peer would send."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diloco.compress import Codec, PayloadError


def falsified(lie: str, parts: Sequence[bytes], codecs: Sequence[Codec]) -> Sequence[bytes]:
    """A lying simulated peer's version of its encoded contribution; `codecs`: of each part."""
    match lie:
        case "short":
            return [part[:-1] for part in parts]
        case "long":
            return [part + b"\0" for part in parts]
        case "garbled":
            return [part[:-1] + bytes([part[-1] ^ 0x55]) for part in parts]
        case "infinite":
            return [b"\xff" * len(part) for part in parts]
        case "absurd":
            return [_absurd(part, codec) for part, codec in zip(parts, codecs, strict=True)]
    return parts


def _absurd(part: bytes, codec: Codec) -> bytes:
    for elements in range(1, 5):
        try:
            values = codec.decode(part, elements)
        except PayloadError:
            continue
        return codec.encode(torch.full_like(values, 6e4))
    return part


def omitting(omitted: Sequence[str], contributors: Sequence[str], me: str) -> tuple[str, ...]:
    """Contributors that a lying simulated owner claims to leave out of a part: one that it counts is among them."""
    counted = [peer for peer in contributors if peer not in (me, *omitted)]
    return (*omitted, *counted[:1])


def other_mean(payload: bytes) -> bytes:
    """Mean that a lying simulated owner sends to one receiver."""
    return payload[:-1] + bytes([payload[-1] ^ 1])
