"""An island in virtual time: the ranks of one simulated peer, and all that passes between them.

Every rank runs the code of production on a thread of its own (`threads`), and has a model, a line and a lane. The ranks
share a process, for the death of one is the death of all, as under torchrun. What stands in for torch.distributed and
for the connections between ranks is here; each message takes a little time, and comes after those before it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.base.errors import ResourceError
from diloco.base.life import Life
from diloco.island import SEE, Island
from diloco.island.bridge import Bridge
from diloco.island.plain import packed, unpacked
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.ranks.threads import SimulatedCondition, SimulatedThread

if TYPE_CHECKING:
    from diloco.exchange.lane import Lane
    from diloco.exchange.lanes import LaneChannel
    from diloco.simulate.virtual.process import SimulatedProcess

PASS_S = 0.002
"""Longest time that something takes from one rank of an island to another."""
PORT = 1
MAIN = "island"
"""Name of the connections of the ranks' training sides."""


@dataclass(eq=False)
class Meeting:
    """A collective operation of a simulated island's ranks."""

    kind: str
    came: dict[int, Any] = field(default_factory=dict)
    """By rank: its own value."""
    left: int = 0


class SimulatedRanks:
    """The ranks of one life of a simulated peer, and all that passes between them."""

    def __init__(self, process: SimulatedProcess, size: int) -> None:
        self.process, self.size = process, size
        self.dice = Random(f"{process.world.plan.seed}/ranks {process.life}")
        self.late_s = 0.0
        """Longest time that a message of a lane takes more than others."""
        self.wires: list[SimulatedWire] = []
        self.news = SimulatedCondition(process.world.timeline)
        self._texts: dict[tuple[str, int], deque[str]] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._places: Counter[tuple[str, int]] = Counter()
        self._busy_until_s: dict[object, float] = {}
        self._unheard = 0
        """Texts of rank 0 that others have not taken yet."""
        self._hearing = 0
        """Ranks that wait for a word of rank 0."""

    def start(self, life: Life[None], over: Callable[[Exception | None], None]) -> None:
        """Begin the life of a simulated rank on a thread of its own."""
        thread = SimulatedThread(self.process.world.timeline, self.process.loop, lambda: thread.live(life), over)
        thread.start()

    def wait_for(self, future: Future[Any]) -> None:
        """Have the simulated rank that runs now wait for a future."""
        thread = self.process.world.timeline.thread
        assert thread is not None
        while not future.done():
            thread.wait(math.inf, future)

    def later(self, way: object, function: Callable[..., object], *arguments: Any, more_s: float = 0.0) -> None:
        """Call a function when something has passed from one rank to another, after all that took this way before."""
        loop = self.process.loop
        at_s = loop.time() + self.dice.uniform(0.0, PASS_S + more_s)
        at_s = self._busy_until_s[way] = max(at_s, self._busy_until_s.get(way, 0.0))
        loop.call_at(at_s, function, *arguments)

    def say(self, group: str, text: str) -> None:
        """Rank 0 says something to every other simulated rank."""
        for rank in range(1, self.size):
            self._unheard += 1
            self.later((group, rank), self._said, group, rank, text)

    def _said(self, group: str, rank: int, text: str) -> None:
        self._texts.setdefault((group, rank), deque()).append(text)
        self.news.notify_all()

    def hear(self, group: str, rank: int, timeout_s: float) -> str:
        """The next text of rank 0 for another simulated rank. Raises ResourceError."""
        texts = self._texts.setdefault((group, rank), deque())
        idle = group == MAIN
        self._hearing += idle
        heard = self.news.wait_for(lambda: bool(texts), timeout_s)
        self._hearing -= idle
        if not heard:
            raise ResourceError(f"rank 0 of this island has not answered for {timeout_s:g} s", SEE)
        self._unheard -= 1
        return texts.popleft()

    def come_together(self) -> None:
        """Have rank 0 wait until the other simulated ranks have done what it said, for an observer's sake."""
        thread = self.process.world.timeline.thread
        assert thread is not None
        while self._hearing < self.size - 1 or self._unheard:
            thread.wait(PASS_S)

    def meet(self, group: str, kind: str, rank: int, mine: Any) -> list[Any]:
        """Values of all simulated ranks for their next operation, which must be the same for all, by rank."""
        place = self._places[group, rank]
        self._places[group, rank] += 1
        meeting = self._meetings.setdefault((group, place), Meeting(kind))
        if meeting.kind != kind:
            self._part(f"rank {rank} of {self.process.name} wants to {kind}, where others {meeting.kind}")
        meeting.came[rank] = mine
        if len(meeting.came) == self.size:
            self.later(meeting, self.news.notify_all)
        self.news.wait_for(lambda: len(meeting.came) == self.size)
        self._busy_until_s.pop(meeting, None)
        meeting.left += 1
        if meeting.left == self.size:
            del self._meetings[group, place]
        return [meeting.came[one] for one in range(self.size)]

    def _part(self, how: str) -> None:
        """I7: the ranks would wait for each other for ever."""
        error = Violation("I7", how)
        self.process.loop.reports(error)
        raise error

    def kept(self, rank: int, lane: Lane, digest: str) -> Sequence[bytes] | None:
        """The parts of a mean that another simulated rank keeps, or will by what is on its way to it; None: it will
        not. Where its connection broke, which ends the peer, that is what it was about to keep."""
        broken = any(wire._broken for wire in self.wires if wire.rank == rank)
        under_way = [item[1:] for wire in self.wires if wire.rank == rank for item in wire.under_way]
        given = [arguments[1] for method, arguments in under_way if (method, arguments[:1]) == ("keep_mean", (digest,))]
        sealed = [arguments[0] for method, arguments in under_way if method == "seal" and arguments[1] == digest]
        if lane.work is not None and (broken or lane.work.key in sealed) and (parts := lane.work.whole()) is not None:
            given.append(parts)
        return next((parts for parts in (lane.mean(digest), *given) if parts is not None), None)

    def break_wires(self) -> None:
        """The connections between the lanes of a simulated island break."""
        for wire in self.wires:
            wire.breaks()


class SimulatedIsland(Island):
    """The place of one rank of a simulated peer among the others."""

    def __init__(self, ranks: SimulatedRanks, rank: int, group: str = MAIN) -> None:
        super().__init__(rank, ranks.size, torch.device("cpu"))
        self.ranks, self._name = ranks, group

    def aside(self) -> Island:
        return SimulatedIsland(self.ranks, self.rank, f"{self._name}, aside")

    def share(self, text: str = "") -> str:
        if not self.leads:
            return self.ranks.hear(self._name, self.rank, self.timeout_s)
        self.ranks.say(self._name, text)
        return text

    def share_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._meet("share", tensor.clone())[0])

    def total(self, sums: Tensor) -> Tensor:
        return sums.copy_(torch.stack(self._meet("sum", sums.clone())).sum(dim=0))

    def gather(self, text: str) -> list[str]:
        return self._meet("gather", text)

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of a simulated island, of one shape."""
        return self._meet("gather tensors", tensor.clone())

    def _meet(self, kind: str, mine: Any) -> list[Any]:
        return self.ranks.meet(self._name, kind, self.rank, mine)

    def listen(self, key: bytes) -> SimulatedListener:  # type: ignore[override]
        return SimulatedListener(self.ranks)

    def call(self, rank_0: tuple[str, int], key: bytes) -> SimulatedWire:  # type: ignore[override]
        here, there = SimulatedWire(self.ranks, self.rank), SimulatedWire(self.ranks, self.rank)
        here.other, there.other = there, here
        self.ranks.wires.append(there)
        self.ranks.news.notify_all()
        return here

    def hang_up(self) -> None:
        """Does nothing: there are no connections."""


class SimulatedListener:
    """`diloco.island.connections.RankListener` of a simulated island."""

    port = PORT

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks = ranks

    def wires(self, count: int, timeout_s: float) -> dict[int, SimulatedWire]:
        """Wires to ranks 1 to `count` of a simulated island, by rank. Raises ResourceError when one is late."""
        wires = self._ranks.wires
        if not self._ranks.news.wait_for(lambda: len(wires) >= count, timeout_s):
            raise ResourceError(f"a rank of this island did not call rank 0 within {timeout_s:g} s", SEE)
        return {wire.rank: wire for wire in wires}


class SimulatedWire:
    """One end of the connection between the lanes of rank 0 and of another rank (`diloco.island.connections.RankWire`).

    What is sent is encoded at once, and comes a little later, in order."""

    other: SimulatedWire
    """The far end."""

    def __init__(self, ranks: SimulatedRanks, rank: int) -> None:
        """`rank`: the other one, beside rank 0."""
        self.rank = rank
        self._ranks = ranks
        self._end: LaneChannel | None = None
        self.under_way: deque[tuple[Any, ...]] = deque()
        """Items that were sent and have not come."""
        self._early: list[bytes] = []
        """Items that came before anybody listened."""
        self._closed = self._broken = False

    def open(self, loop: asyncio.AbstractEventLoop, end: LaneChannel) -> None:
        """Hand what comes over the simulated wire to `end`."""
        self._end = end
        for data in self._early:
            loop.call_soon(self._comes, data)

    def put(self, item: tuple[Any, ...]) -> None:
        """Send an item over the simulated wire."""
        assert self._end is not None
        try:
            data = packed(item)
        except Exception as error:  # as where production writes
            self._ranks.process.loop.call_soon(self._end.unsaid, item, error)
            return
        if not self._closed:
            self.under_way.append(item)
            self._ranks.later(self, self.other._comes, data, more_s=self._ranks.late_s)

    def close(self) -> None:
        """Close the simulated wire after all that was sent: the far end reads to there, and closes it, too."""
        if not self._closed:
            self._closed = True
            self._ranks.later(self, self.other.breaks)

    def breaks(self) -> None:
        """Nothing more comes over the simulated wire."""
        if not self._broken:
            self._broken = True
            self.close()
            if self._end is not None:
                self._end.broken()

    def _comes(self, data: bytes) -> None:
        if self._end is None:
            self._early.append(data)
        elif not self._broken:
            self.other.under_way.popleft()
            self._end.arrived(*unpacked(data))


class SimulatedBridge(Bridge):
    """A model of which every rank of a simulated island has a copy. All ranks read and write together."""

    _island: SimulatedIsland

    def _from_rank_0(self, tensor: Tensor) -> None:
        self._island.share_tensor(tensor)

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        return self._island.gather_tensors(tensor)
