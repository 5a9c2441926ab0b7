"""Bytes of a lying simulated peer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diloco.compress import Codec
from diloco.exchange.work import LanePayloads


def falsified(lie: str, parts: Sequence[bytes], codecs: Sequence[Codec], sizes: Sequence[int]) -> Sequence[bytes]:
    """A lying simulated peer's version of its encoded contribution; `codecs` and `sizes` in elements: of each part."""
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
            return [codec.encode(torch.full((size,), 6e4)) for codec, size in zip(codecs, sizes, strict=True)]
    return parts


def omitting(omitted: Sequence[str], contributors: Sequence[str], me: str) -> tuple[str, ...]:
    """Contributors that a lying simulated owner claims to leave out of a part: one that it counts is among them."""
    counted = [peer for peer in contributors if peer not in (me, *omitted)]
    return (*omitted, *counted[:1])


def others_parts(work: LanePayloads, part: int, me: str) -> list[int]:
    """A part as large as `part` that belongs to another owner, for which a lying simulated peer makes a mean."""
    size = work.fragment.size_of(part)
    return [one for one, owner in work.owners.items() if owner != me and work.fragment.size_of(one) == size][:1]


def other_mean(payload: bytes) -> bytes:
    """Mean that a lying simulated owner sends to one receiver."""
    return payload[:-1] + bytes([payload[-1] ^ 1])
