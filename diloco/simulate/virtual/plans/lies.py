"""Bytes of a lying simulated peer: its offers, and the parts that it sends as an owner. Only peers of one rank lie."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from diloco.base.types import Contribution
from diloco.compress import Codec
from diloco.exchange.work import LanePayloads
from diloco.protocol.streams import Kind, Part, StreamHeader
from diloco.simulate.virtual.plans.plan import MEDDLES, OMITS

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess


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


def offered_by(process: SimulatedProcess, contribution: Contribution) -> Contribution:
    """The contribution as a simulated peer offers it that may lie."""
    if not process.lie:
        return contribution
    line = process.line
    fragment = line.layout.fragments[contribution.fragment]
    codecs = [line.codecs[fragment.group_of(part)] for part in range(fragment.parts)]
    sizes = [fragment.size_of(part) for part in range(fragment.parts)]
    return replace(contribution, parts=falsified(process.lie, list(contribution.parts), codecs, sizes))


def sent_by(
    process: SimulatedProcess, header: StreamHeader, address: str, parts: AsyncGenerator[Part]
) -> AsyncGenerator[Part]:
    """Parts on their way to one receiver, as a simulated owner sends them that may lie."""
    if not process.lie or header.kind is not Kind.MEAN:
        return parts
    work = process.exchange.lane.work
    return _lying(process, work, address, parts) if work is not None else parts


async def _lying(
    process: SimulatedProcess, work: LanePayloads, address: str, parts: AsyncGenerator[Part]
) -> AsyncGenerator[Part]:
    lie, name = process.lie, process.name
    others = [member.address for member in work.begin.receivers if member.peer != name]
    async for part in parts:
        if lie == "two-faced" and address == others[0]:
            yield replace(part, payload=other_mean(part.payload))
        elif lie == OMITS:
            names = [entry.peer for entry in work.begin.contributors]
            omitted = omitting([names[place] for place in part.omitted], names, name)
            yield replace(part, omitted=tuple(map(names.index, omitted)))
        else:
            yield part
        if lie == MEDDLES:
            for index in others_parts(work, part.index, name):
                yield replace(part, index=index, payload=other_mean(part.payload))
