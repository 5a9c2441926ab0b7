"""A lying simulated peer: what it offers, and what it sends as an owner. Only peers of one rank lie."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Contribution
from diloco.exchange.work import LanePayloads
from diloco.protocol.streams import Kind, Part, StreamHeader
from diloco.simulate.virtual.plans.lies import falsified, omitting, other_mean, others_parts
from diloco.simulate.virtual.plans.plan import MEDDLES, OMITS

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess


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
