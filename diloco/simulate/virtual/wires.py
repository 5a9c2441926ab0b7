"""What a simulated network does to bytes: it is cut, has uplinks that all streams of a peer share, and flips bits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from diloco.base.types import Closed
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Part
from diloco.transport.grpc_server import parsed
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service
from diloco.wire import convert
from diloco.wire.v1 import control_pb2

if TYPE_CHECKING:
    from diloco.simulate.virtual.network import SimulatedNetwork
    from diloco.simulate.virtual.plan import FaultPlan

RETRANSMIT_S = 0.4
"""What a stream sends over a path that is cut is sent again this often, as TCP does, until its deadline."""
INSTANT_S = 1e-6
"""Shorter waits may be none to a clock that has jumped far."""
BUFFER_S = 0.2
"""A message waits no longer behind a peer's streams: it has a connection of its own, which gets its share."""


@dataclass(frozen=True)
class SimulatedCut:
    """A fault of the simulated network: nothing passes between a group and the rest, or in one direction only."""

    group: frozenset[str]
    direction: str
    """both, in (nothing reaches the group) or out."""
    reset: bool
    """Senders are told at once that there is no way, instead of hearing nothing."""
    others: frozenset[str] = frozenset()
    """Only these are cut off from the group, and everybody else reaches both; empty: all the rest are."""

    def blocks(self, source: str, target: str) -> bool:
        """Whether this cut of the simulated network lets nothing pass from `source` to `target`."""
        leaves, enters = self._leads_out(source, target), self._leads_out(target, source)
        return (leaves and self.direction != "in") or (enters and self.direction != "out")

    def _leads_out(self, source: str, target: str) -> bool:
        return source in self.group and (target in self.others if self.others else target not in self.group)


class SimulatedUplinks:
    """The uplinks of all simulated peers. Bytes leave one behind the other; whoever comes first is served first."""

    def __init__(self, plan: FaultPlan) -> None:
        self._bytes_per_s = [float(text or 0) * 1e6 / 8 for text in plan.bandwidth.split("+")] if plan.bandwidth else []
        self._free_s: dict[str, float] = {}

    @property
    def limited(self) -> bool:
        """Whether the simulated uplinks have a limit at all."""
        return bool(self._bytes_per_s)

    def takes_s(self, peer: str, size_bytes: int, now_s: float) -> float:
        """Seconds until so many bytes have left a simulated peer, behind all that it sends already."""
        rate = self._bytes_per_s[int(peer[1:]) % len(self._bytes_per_s)] if self._bytes_per_s else 0.0
        if not rate:
            return 0.0
        free_s = self._free_s[peer] = max(self._free_s.get(peer, 0.0), now_s) + size_bytes / rate
        return free_s - now_s

    def message_s(self, peer: str, now_s: float) -> float:
        """Seconds that a message of a simulated peer waits behind its streams."""
        return min(max(self._free_s.get(peer, 0.0) - now_s, 0.0), BUFFER_S) if self._bytes_per_s else 0.0


def bytes_in(batch: Sequence[Part]) -> int:
    """Bytes of parts on their way in the simulated network."""
    return sum(len(part.payload) for part in batch)


def bytes_of(answer: Any) -> int:
    """Bytes of an answer with parts, a mean or a state in it, on its way in the simulated network."""
    if isinstance(answer, bytes):
        return len(answer)
    if isinstance(answer, Closed):
        return bytes_of(answer.parts)
    return sum(map(bytes_of, answer)) if isinstance(answer, list | tuple) else 0


def flipped(envelope: Envelope, dice: Random) -> Envelope:
    """An envelope of which a bit was flipped before TLS had it or after, as production code reads it.

    Raises LinkRefused where the receiver finds that, and LinkDown where its gRPC does.
    """
    data = bytearray(convert.seal(envelope).SerializeToString())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    try:
        message = control_pb2.Sealed.FromString(bytes(data))
    except DecodeError:
        raise LinkDown("its gRPC could not read a message") from None
    return parsed(convert.unseal, message)


def taking(envelope: Envelope) -> Callable[[Service], Awaitable[Reply]]:
    """The answer of a simulated peer to a message."""
    return lambda service: service.on_envelope(envelope)


def refusing(error: LinkRefused) -> Callable[[Service], Awaitable[Reply]]:
    """The answer of a simulated peer to what it cannot read."""

    async def answer(service: Service) -> Reply:
        raise error

    return answer


async def arrives(network: SimulatedNetwork, asker: str, address: str, answer: object, stall_s: float) -> None:
    """Wait for the bytes of an answer, which share the uplink of whoever gives it. Raises LinkSlow, LinkDown."""
    source, world = name_at(address), network.world
    if not network.uplinks.limited:
        return
    end_s, still_s = world.now + network.uplinks.takes_s(source, bytes_of(answer), world.now), 0.0
    while still_s or end_s - world.now > INSTANT_S:
        await asyncio.sleep(RETRANSMIT_S if still_s else min(end_s - world.now, RETRANSMIT_S))
        if network.at(address) is None and source not in network.dark:
            raise LinkDown(f"{address}: gone")
        still_s = 0.0 if network.connected(asker, source) and network.moves(address) else still_s + RETRANSMIT_S
        if still_s > stall_s:
            raise LinkSlow(f"{address}: no progress for {stall_s:g} s")


def name_at(address: str) -> str:
    """Name of the simulated peer that is, or was, at an address."""
    return address.partition(":")[0]
