"""Wires of a simulated network: they are cut, share a peer's uplink between its streams, and flip bits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from diloco.base.types import Closed
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Limits, Part
from diloco.simulate.virtual.plans.plan import FILTERED
from diloco.transport.grpc_server import parsed
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service
from diloco.wire import convert
from diloco.wire.v1 import control_pb2

if TYPE_CHECKING:
    from diloco.simulate.virtual.network import SimulatedCall, SimulatedNetwork
    from diloco.simulate.virtual.plans.plan import FaultPlan
    from diloco.simulate.virtual.timeline import ProcessLoop

T = TypeVar("T")

DAMAGED_ANSWERS_SHARE = 0.7
"""Share of its answers with bytes in them that are damaged."""
RETRANSMIT_S = 0.4
"""Bytes of a stream over a path that is cut are sent again this often, as TCP does, until its deadline."""
INSTANT_S = 1e-6
"""Shorter waits may be none to a clock that has jumped far."""
PIECE_S, MIN_PIECE_BYTES = 0.1, 256
"""Streams of a peer take turns on its uplink: a piece of a part goes out in so long, and is no shorter than that."""
BUFFER_S = 0.2
"""A message waits no longer behind a peer's streams: it has a connection of its own, which gets its share."""


@dataclass(frozen=True)
class SimulatedCut:
    """A fault of the simulated network: nothing passes between a group and the rest, or in one direction only."""

    group: frozenset[str]
    direction: str
    """both, in (nothing reaches the group), filtered (only answers to its own calls do) or out."""
    reset: bool
    """Senders are told at once that there is no way, instead of hearing nothing."""
    others: frozenset[str] = frozenset()
    """Only these are cut off from the group, and everybody else reaches both; empty: all the rest are."""

    def blocks(self, source: str, target: str, answers: bool = False) -> bool:
        """Whether this cut of the simulated network lets nothing pass from `source` to `target`, or no `answers`."""
        leaves, enters = self._leads_out(source, target), self._leads_out(target, source)
        inwards = self.direction in ("both", "in") or (self.direction == FILTERED and not answers)
        return (leaves and self.direction in ("both", "out")) or (enters and inwards)

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
        rate = self._rate(peer)
        if not rate:
            return 0.0
        free_s = self._free_s[peer] = max(self._free_s.get(peer, 0.0), now_s) + size_bytes / rate
        return free_s - now_s

    def pieces(self, peer: str, size_bytes: int) -> list[int]:
        """Sizes of the pieces in which so many bytes of one stream leave a simulated peer."""
        rate = self._rate(peer)
        piece = max(int(rate * PIECE_S), MIN_PIECE_BYTES) if rate else max(size_bytes, 1)
        whole, rest = divmod(size_bytes, piece)
        return [piece] * whole + ([rest] if rest or not whole else [])

    def message_s(self, peer: str, now_s: float) -> float:
        """Seconds that a message of a simulated peer waits behind its streams."""
        return min(max(self._free_s.get(peer, 0.0) - now_s, 0.0), BUFFER_S) if self._bytes_per_s else 0.0

    def _rate(self, peer: str) -> float:
        """Bytes per second of a peer's uplink; 0: no limit."""
        return self._bytes_per_s[int(peer[1:]) % len(self._bytes_per_s)] if self._bytes_per_s else 0.0


class SimulatedDeadlines:
    """The times by which calls of one process that all may take as long must have an answer."""

    def __init__(self, loop: ProcessLoop, within_s: float) -> None:
        self._loop, self._within_s = loop, within_s
        self._calls: deque[tuple[float, SimulatedCall]] = deque()

    def add(self, call: SimulatedCall) -> None:
        """A call begins. One look at the oldest of all is under way, and not one for each."""
        self._calls.append((self._loop.time() + self._within_s, call))
        if len(self._calls) == 1:
            self._loop.call_later(self._within_s, self._look)

    def _look(self) -> None:
        calls, now = self._calls, self._loop.time() + INSTANT_S
        while calls and (calls[0][1].answer.done() or calls[0][0] <= now):
            calls.popleft()[1].expire(self._within_s)
        if calls:
            self._loop.call_at(calls[0][0], self._look)


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


def taking(envelope: Envelope) -> Callable[[Service], Reply]:
    """The answer of a simulated peer to a message, which it takes at once."""

    def answer(service: Service) -> Reply:
        try:
            service.on_envelope(envelope).send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise RuntimeError("a message waits for something")

    return answer


def refusing(error: LinkRefused) -> Callable[[Service], Reply]:
    """The answer of a simulated peer to what it cannot read."""

    def answer(service: Service) -> Reply:
        raise error

    return answer


def state_chunk(digest: str, index: int) -> Callable[[Service], Awaitable[bytes | None]]:
    """The answer of a simulated peer that is asked for a chunk of a state."""

    async def answer(service: Service) -> bytes | None:
        payload = await service.on_state_chunk(digest, index)
        if payload is not None:
            await service.on_state_bytes(digest, len(payload))
        return payload

    return answer


async def arrives(network: SimulatedNetwork, asker: str, address: str, answer: T, stall_s: float) -> T:
    """Wait for the bytes of an answer, which share the uplink of whoever gives it. Returns it, damaged where that one's
    bytes are. Raises LinkSlow, LinkDown."""
    source, world, still_s = name_at(address), network.world, 0.0
    for size_bytes in network.uplinks.pieces(source, bytes_of(answer)) if network.uplinks.limited else ():
        end_s = world.now + network.uplinks.takes_s(source, size_bytes, world.now)
        while still_s or end_s - world.now > INSTANT_S:
            await asyncio.sleep(RETRANSMIT_S if still_s else min(end_s - world.now, RETRANSMIT_S))
            if network.at(address) is None and source not in network.dark:
                raise LinkDown(f"{address}: gone")
            still_s = 0.0 if network.connected(asker, source) and network.moves(address) else still_s + RETRANSMIT_S
            if still_s > stall_s:
                raise LinkSlow(f"{address}: no progress for {stall_s:g} s")
    return _damaged(network, source, answer)


def _damaged(network: SimulatedNetwork, source: str, answer: T) -> T:
    """An answer of which a bit was flipped before it was sent, in the memory of a peer that damages what it has."""
    if source not in network.damaging or network.dice.random() >= DAMAGED_ANSWERS_SHARE:
        return answer
    network.world.count("damaged answers")
    damaged: T = _flipped_in(answer)
    return damaged


def _flipped_in(answer: Any) -> Any:
    if isinstance(answer, bytes):
        return answer[:-1] + bytes([answer[-1] ^ 1]) if answer else answer
    if isinstance(answer, Closed):
        return replace(answer, parts=_flipped_in(answer.parts))
    return [*answer[:-1], _flipped_in(answer[-1])] if isinstance(answer, list | tuple) and answer else answer


def name_at(address: str) -> str:
    """Name of the simulated peer that is, or was, at an address."""
    return address.partition(":")[0]


def check_means(means: Sequence[Sequence[bytes]], limits: Limits) -> None:
    """Raises LinkRefused for means in an answer to a simulated peer that are longer than any may be."""
    for mean in means:
        check_sizes(mean, limits.part_bytes)
        if len(mean) > limits.parts:
            raise LinkRefused(Reply.MALFORMED, f"a mean of {len(mean)} parts, at most {limits.parts} may be")
    if sum(len(part) for mean in means for part in mean) > limits.total_bytes:
        raise LinkRefused(Reply.MALFORMED, "more bytes of means than anybody keeps")


def check_sizes(payloads: Sequence[bytes], max_bytes: int) -> None:
    """Raises LinkRefused for bytes in an answer to a simulated peer that are longer than they may be."""
    longest = max(map(len, payloads), default=0)
    if longest > max_bytes:
        raise LinkRefused(Reply.MALFORMED, f"a part has {longest} bytes, at most {max_bytes} may be")
