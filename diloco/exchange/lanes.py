"""All lanes of one peer: that of rank 0, and those of the other ranks, each over a connection to rank 0.

The connections belong to the island (`diloco.island.connections`). Payloads of parts cross them only where other peers
catch up or copy the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVarTuple

from diloco.base.errors import ResourceError
from diloco.base.types import Closed, Contribution, Member
from diloco.exchange.lane import Lane
from diloco.exchange.work import LaneEvents
from diloco.outer.state import StateChunk
from diloco.protocol import messages as m
from diloco.protocol.streams import Part, StateOffer, StreamHeader, Welcome
from diloco.transport.link import LinkRefused, Service
from diloco.transport.pace import StreamQuota

Ts = TypeVarTuple("Ts")

MAX_SYNC_STALLS, SHARE_OF_STALL = 8, 0.25
"""Times `stall_s` for which others wait while a mean is synced; and after which share of it they hear that it moves."""
NUMBER = "number"
"""A question's; its answer has the same."""
SEE = "its output says why"


class LaneWire(Protocol):
    """The way to the lane of another rank (`diloco.island.connections.RankWire`)."""

    def open(self, loop: asyncio.AbstractEventLoop, end: LaneChannel) -> None:
        """Begin to carry. `end` is called on the lane's loop."""

    def put(self, item: tuple[Any, ...]) -> None:
        """Send an item to the lane of the other rank, after all that was put before."""

    def close(self) -> None:
        """Close the way to the lane of the other rank after all that was put."""


class LaneChannel:
    """Calls between rank 0 and the lane of another rank, on the loop of each."""

    def __init__(
        self,
        wire: LaneWire,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[str, tuple[Any, ...]], Any],
        failed: Callable[[BaseException], None],
        gone: Callable[[ResourceError], None],
    ) -> None:
        """`handle`: of a method's name and arguments; what it returns answers a question, at once or when it is done.
        `failed`: told what handling raises; `gone`: that the other rank is."""
        self._wire, self._loop, self._handle = wire, loop, handle
        self.failed, self._gone = failed, gone
        self._end: ResourceError | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._asked = 0
        wire.open(loop, self)

    def post(self, method: str, *arguments: Any) -> None:
        """Have `method` called on the lane's other end, after all that was posted before."""
        self._wire.put((None, method, arguments))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Have `method` called on the lane's other end; return its result. Raises ResourceError when that is gone."""
        if self._end is not None:
            raise self._end
        self._asked += 1
        future = self._questions[self._asked] = self._loop.create_future()
        self._wire.put((self._asked, method, arguments))
        return await future

    def close(self) -> None:
        """Close the way to a remote lane after all that was posted."""
        self._wire.close()

    def unsaid(self, item: tuple[Any, ...], error: Exception) -> None:
        """A remote lane's message cannot be encoded: fail its question, if it was one, and the exchange."""
        number: int | None = item[0]
        question = self._questions.pop(number, None) if number is not None else None
        if question is not None and not question.done():
            question.set_exception(error)
        self.failed(error)

    def broken(self) -> None:
        """The remote lane is gone: nothing more comes."""
        self._end = ResourceError("another rank of this island is gone", SEE)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._end)
        self._gone(self._end)

    def arrived(self, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        """The remote lane calls a method, or answers."""
        if method == NUMBER:
            question = self._questions.pop(arguments[0])
            if not question.done():  # or who asked has ended
                question.set_result(arguments[1])
            return
        try:
            result = self._handle(method, arguments)
        except Exception as error:  # the thread's edge: raised where somebody looks
            self.failed(error)
            return
        if number is not None:
            task = self._loop.create_task(self._answer(number, result))
            self._answers.add(task)
            task.add_done_callback(self._answered)

    async def _answer(self, number: int, result: Any) -> None:
        self._wire.put((None, NUMBER, (number, await result if isinstance(result, Awaitable) else result)))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)


class RemoteLane:
    """The lane of another rank of this peer, as rank 0 sees it. Positional arguments only."""

    def __init__(
        self,
        wire: LaneWire,
        loop: asyncio.AbstractEventLoop,
        head: LaneEvents,
        rank: int,
        is_located: Callable[[Member], bool],
    ) -> None:
        """`is_located`: whether rank 0 has more than a sender's own word for its address."""
        self._head, self._rank, self._is_located = head, rank, is_located
        self.send_bps = 0
        self.wire_bytes = (0, 0)
        """Sent and received there."""
        self._closing = False
        self.channel = LaneChannel(wire, loop, self._handle, head.failed, self._gone)

    def _handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "rates":
            self.send_bps, *wire = arguments
            self.wire_bytes = (wire[0], wire[1])
            return None
        if method == "failed":
            self._head.failed(ResourceError(f"rank {self._rank} of this island failed: {arguments[0]}", SEE))
            return None
        if method == "is_located":
            return self._is_located(*arguments)
        assert method in ("on_event", "on_moved", "on_lost", "admit")
        return getattr(self._head, method)(*arguments)

    def _gone(self, error: ResourceError) -> None:
        if not self._closing:
            self._head.failed(error)

    def post(self, method: Callable[[Lane, *Ts], object], *arguments: *Ts) -> None:
        """Have the lane of that rank do this, after all that was posted before."""
        self.channel.post(method.__name__, *arguments)

    async def ask(self, method: Callable[[Lane, *Ts], object], *arguments: *Ts) -> Any:
        """Returns the result of the lane of that rank, once it is done. Raises ResourceError when the rank is gone."""
        return await self.channel.ask(method.__name__, *arguments)

    def end(self) -> None:
        """Close the connection to the lane of that rank: nothing more is posted."""
        self._closing = True
        self.channel.close()


class Lanes:
    """The lanes of one peer by number: rank 0's own first, then those of the other ranks. Lane n holds part p if p mod
    their count is n."""

    def __init__(self, own: Lane) -> None:
        self.own = own
        self.others: list[RemoteLane] = []

    def __len__(self) -> int:
        return 1 + len(self.others)

    def each(self, method: Callable[[Lane, *Ts], object], *arguments: *Ts) -> None:
        """Have every lane of this peer do this."""
        method(self.own, *arguments)
        self.each_other(method, *arguments)

    def each_other(self, method: Callable[[Lane, *Ts], object], *arguments: *Ts) -> None:
        """Have the lanes of the other ranks do this."""
        for lane in self.others:
            lane.post(method, *arguments)

    def at(self, part: int, method: Callable[[Lane, *Ts], object], *arguments: *Ts) -> None:
        """Have the lane that holds the part do this."""
        number = part % len(self)
        if number:
            self.others[number - 1].post(method, *arguments)
        else:
            method(self.own, *arguments)

    def take_mean(self, version: int, digest: str, parts: Sequence[bytes]) -> None:
        """Keep a mean that another peer gave whole: each lane keeps the parts that it holds."""
        lanes = len(self)
        held = [range(number, len(parts), lanes) for number in range(lanes)]
        some = [[part if p in own else b"" for p, part in enumerate(parts)] for own in held]
        self.own.take_mean(version, digest, some[0], held[0])
        for lane, mine, own in zip(self.others, some[1:], held[1:], strict=True):
            lane.post(Lane.take_mean, version, digest, mine, own)

    async def logged(self, digest: str) -> bool:
        """Whether a mean that is here whole is in the logs of all lanes. Waits until it is on the disk, or refused.

        Meanwhile it tells others that something moves here: a disk that is slow is no peer that hangs.
        """
        asked = (self.own.logged(digest), *(lane.ask(Lane.logged, digest) for lane in self.others))
        logging, stall_s = asyncio.gather(*asked), self.own.terms.stall_s
        for _ in range(round(MAX_SYNC_STALLS / SHARE_OF_STALL)):
            done, _ = await asyncio.wait({logging}, timeout=SHARE_OF_STALL * stall_s)
            if done:
                break
            self.own.moves()
        return all(await logging)

    async def mean(self, digest: str) -> Sequence[bytes] | None:
        """All encoded parts of a kept mean, gathered from the lanes; None when it is not kept."""
        by_lane = [self.own.mean(digest), *[await lane.ask(Lane.mean, digest) for lane in self.others]]
        return _interleaved([parts for parts in by_lane if parts is not None]) if None not in by_lane else None

    async def whole(self, contribution: Contribution) -> Contribution:
        """A contribution with the encoded parts of all lanes of this peer."""
        others = [await lane.ask(Lane.contributed) for lane in self.others]
        own = await asyncio.to_thread(list, contribution.parts)
        return replace(contribution, parts=_interleaved([own, *others]))

    async def chunk(self, number: int, entry: StateChunk) -> bytes | None:
        """A part of the lanes' state with that number, for another peer's copy; None when it is gone."""
        lane = entry.part % len(self)
        if lane:
            found: bytes | None = await self.others[lane - 1].ask(Lane.chunk, number, entry)
            return found
        return self.own.chunk(number, entry)

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes sent and received by the lanes of the other ranks, as far as they reported."""
        reported = [lane.wire_bytes for lane in self.others]
        return sum(sent for sent, _ in reported), sum(received for _, received in reported)

    @property
    def send_bps(self) -> int:
        """Upload rate of all lanes together, bits per second; 0, unknown, while that of any of them is."""
        rates = [self.own.sender.link.send_bps, *(lane.send_bps for lane in self.others)]
        return sum(rates) if all(rates) else 0


def _interleaved(by_lane: Sequence[Sequence[bytes]]) -> Sequence[bytes]:
    """All parts in order, each from the lane that holds it."""
    return [by_lane[part % len(by_lane)][part] for part in range(len(by_lane[0]))]


class RemoteExchange:
    """Rank 0's exchange as a lane on another rank sees it: the lane's events go there over a connection."""

    def __init__(self, wire: LaneWire, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
        """`wire`: to rank 0 (`Island.call`)."""
        self._lane = lane
        # When rank 0 is gone, so are torch's connections to it: they say so where this rank waits.
        self._channel = LaneChannel(wire, loop, self._handle, lane.failed, lambda _: None)
        lane.head = self

    def on_event(self, event: m.Event, content: bytes = b"") -> None:
        self._channel.post("on_event", event, content)

    def on_moved(self, size_bytes: int) -> None:
        self._channel.post("on_moved", size_bytes)

    def on_lost(self, member: Member) -> None:
        self._channel.post("on_lost", member)

    def admit(self, header: StreamHeader) -> Awaitable[m.Reply]:
        return self._channel.ask("admit", header)

    def is_located(self, sender: Member) -> Awaitable[bool]:
        """Ask rank 0 whether it has more than the own word of a peer for its address."""
        return self._channel.ask("is_located", sender)

    def failed(self, error: BaseException) -> None:
        self._channel.post("failed", f"{type(error).__name__}: {error}")

    def rates(self, send_bps: int, sent: int, received: int) -> None:
        """Reports to the exchange of rank 0 this lane's upload rate, and the bytes it has sent and received."""
        self._channel.post("rates", send_bps, sent, received)

    def close(self) -> None:
        self._channel.close()

    def _handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._lane, method)(*arguments)


class LaneService(Service):
    """Service of a lane on a rank other than 0: it takes parts from other peers, and nothing else."""

    def __init__(self, lane: Lane, first: RemoteExchange) -> None:
        self._lane, self._first = lane, first
        self._streams = StreamQuota()
        self.max_part_bytes = lane.terms.max_part_bytes

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        known = await self._first.is_located(header.sender)
        with self._streams.open(header.sender.peer if known else ""):
            return await self._lane.on_parts(header, parts)

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        self._lane.on_bytes(header, size_bytes)

    async def on_envelope(self, envelope: m.Envelope) -> m.Reply:
        raise _not_here()

    def on_hello(self) -> Welcome:
        raise _not_here()

    def on_lanes(self) -> tuple[str, ...]:
        raise _not_here()

    def on_fetch_commits(self, since: int) -> AsyncIterator[Closed]:
        raise _not_here()

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        raise _not_here()

    async def on_state_offer(self, have: str) -> StateOffer:
        raise _not_here()

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        raise _not_here()

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        raise _not_here()

    def on_status(self) -> str:
        raise _not_here()


def _not_here() -> LinkRefused:
    return LinkRefused(m.Reply.MALFORMED, "this is one of several ranks of a peer: ask at its first one's address")
