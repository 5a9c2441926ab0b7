"""Checks of a simulated peer's lane beside its state machine: both are in the same attempt, and come to it together.

A lane that is elsewhere loses bytes, or takes those of another attempt. That costs a repair or the next attempt, and
seldom more: so it is looked at whenever bytes come. A stream that is cut off, or not sent again, costs the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.streams import Part, StreamHeader
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.transport.link import LinkRefused, untold

if TYPE_CHECKING:
    from diloco.base.types import Commit
    from diloco.exchange.engine import Exchange
    from diloco.exchange.outlets import Outlets
    from diloco.outer.state import OuterState
    from diloco.simulate.virtual.process import SimulatedProcess

AGAIN_S = 0.5
"""A stream that came too early is sent again within so long."""
MAX_TRIES = 3
"""Times that a stream is sent, the first one counted."""


class SimulatedLane:
    """The lane of one life of a simulated trainer."""

    def __init__(self, process: SimulatedProcess, exchange: Exchange) -> None:
        """Look at the lane whenever a stream reaches it, or something happens in it."""
        self._name, self._exchange, self._process = process.name, exchange, process
        self._early: dict[tuple[str, StreamHeader], tuple[float, object]] = {}
        """Streams that came too early, by address: when that was heard, and in which reduction."""
        self._tries: Counter[tuple[str, StreamHeader]] = Counter()
        admit, on_event, begins = exchange.admit, exchange.on_event, exchange._begin
        lane, drop, hold = exchange.lane, exchange.lane.drop, exchange.archive.hold

        async def on_admit(header: StreamHeader) -> m.Reply:
            self._check_work()
            reply = await admit(header)
            self._check_reply(header, reply)
            return reply

        def takes_event(event: m.Event, content: bytes = b"") -> None:
            before = set(exchange._contents)
            on_event(event, content)
            self._check_contents(before)

        def on_begin(begin: m.Begin) -> None:
            begins(begin)
            self._check_contents(set())

        def on_hold(state: OuterState, commit: Commit | None, number: int) -> None:
            hold(state, commit, number)
            if process.alive and len({lane.held for lane in process.lanes}) > 1:
                raise Violation("I5", f"{process.name} holds version {state.version} under other numbers in its lanes")

        def on_drop() -> None:
            whole = [outlets for outlets in lane._outlets if len(outlets._ready) == len(outlets.parts)]
            drop()
            self._check_streams(whole)

        exchange.admit, exchange.on_event = on_admit, takes_event  # type: ignore[method-assign]
        exchange._begin, lane.drop = on_begin, on_drop  # type: ignore[method-assign]
        exchange.archive.hold = on_hold  # type: ignore[method-assign]
        self._look_at_streams()

    def _look_at_streams(self) -> None:
        process, machine = self._process, self._exchange.machine
        send_parts, handle = process.link.send_parts, machine.handle

        async def on_send(
            address: str,
            header: StreamHeader,
            parts: AsyncGenerator[Part],
            stall_s: float,
            taken: Callable[[int], None] = untold,
        ) -> m.Reply:
            stream = address, header
            self._early.pop(stream, None)
            self._tries[stream] += 1
            reply = m.Reply.DAMAGED
            try:
                reply = await send_parts(address, header, parts, stall_s, taken)
            except LinkRefused as error:
                reply = error.reply
                raise
            finally:
                reducing = machine.reducing
                here = reducing is not None and reducing[:2] == header.key
                if reply is m.Reply.TOO_EARLY and here and self._tries[stream] < MAX_TRIES:
                    self._early[stream] = process.world.now, reducing
            return reply

        def on_handle(event: m.Event, now: float) -> list[fx.Effect]:
            effects = handle(event, now)
            if self._early:
                self._check_early()
            return effects

        process.link.send_parts = on_send  # type: ignore[method-assign]
        machine.handle = process.loop.report_errors(on_handle, Violation)  # type: ignore[method-assign]

    def _check_early(self) -> None:
        """I7: a stream that came before its receiver had begun is sent again, while its reduction goes on."""
        process = self._process
        for (address, header), (heard_s, reducing) in list(self._early.items()):
            if self._exchange.machine.reducing != reducing or not process.alive:
                del self._early[address, header]
            elif process.world.now - max(heard_s, process.thawed_s) > AGAIN_S:
                what = f"{header.kind.name.lower()} of {header.height}.{header.attempt} to {address}"
                raise Violation("I7", f"{self._name} does not send its {what} again, which came too early")

    def _check_work(self) -> None:
        """I3: after effects were performed, the lane works at the reduction of the state machine, since its latest
        repair."""
        reducing, work = self._exchange.machine.reducing, self._exchange.lane.work
        here = (*work.key, work.generation) if work is not None else None
        if reducing is not None and here != reducing:
            raise Violation("I3", f"{self._name} is in reduction {reducing}, and its lane in {here}")

    def _check_reply(self, header: StreamHeader, reply: m.Reply) -> None:
        """I7: a stream is refused for good only where its attempt and repair are over, else its sender is to send it
        again."""
        machine, moment = self._exchange.machine, (*header.key, header.generation)
        over = moment < (machine.reducing or (machine.since_height, -1, 0))
        if reply in (m.Reply.STALE, m.Reply.TOO_EARLY) and over != (reply is m.Reply.STALE):
            what = f"a stream of {moment} while at {machine.reducing or machine.height}"
            raise Violation("I7", f"{self._name} answers {reply.name} to {what}")

    def _check_streams(self, whole: Sequence[Outlets]) -> None:
        """I7: parts that are all averaged go on to those that still need them when the lane goes on to what is next."""
        if any(stream.cancelling() and not stream.done() for outlets in whole for stream in outlets.streams):
            raise Violation("I7", f"{self._name} cuts off streams of parts that are all averaged")

    def _check_contents(self, before: set[int]) -> None:
        """I3: hashes of which the digest of a mean is made are those of parts that the lane's work holds. Where it has
        no work, none were added to those of `before`."""
        work, there = self._exchange.lane.work, self._exchange._contents.keys()
        works = [lane.work for lane in self._process.lanes if work is not None]
        there_too = [one for one in works if one is not None and work is not None and one.key == work.key]
        held = {part for one in there_too for part, mean in enumerate(one.mean) if mean is not None}
        held = before if work is None else held
        if not there <= held:
            raise Violation("I3", f"{self._name} has hashes of parts {sorted(there - held)} that it does not hold")
