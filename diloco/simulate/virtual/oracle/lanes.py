"""Checks of a simulated peer's lane beside its state machine: both are in the same attempt, and come to it together.

A lane that is elsewhere loses bytes, or takes those of another attempt. That costs a repair or the next attempt, and
seldom more: so it is looked at whenever bytes come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.exchange.engine import Exchange
    from diloco.protocol.streams import StreamHeader
    from diloco.simulate.virtual.process import SimulatedProcess


class SimulatedLane:
    """The lane of one life of a simulated trainer."""

    def __init__(self, process: SimulatedProcess, exchange: Exchange) -> None:
        """Look at the lane whenever a stream reaches it, or something happens in it."""
        self._name, self._exchange = process.name, exchange
        admit, on_event, begins = exchange.admit, exchange.on_event, exchange._begin

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

        exchange.admit, exchange.on_event = on_admit, takes_event  # type: ignore[method-assign]
        exchange._begin = on_begin  # type: ignore[method-assign]

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
        machine, moment = self._exchange.machine, (header.version, header.attempt, header.generation)
        over = moment < (machine.reducing or (machine.making, -1, 0))
        if reply in (m.Reply.STALE, m.Reply.TOO_EARLY) and over != (reply is m.Reply.STALE):
            what = f"a stream of {moment} while at {machine.reducing or machine.making}"
            raise Violation("I7", f"{self._name} answers {reply.name} to {what}")

    def _check_contents(self, before: set[int]) -> None:
        """I3: hashes of which the digest of a mean is made are those of parts that the lane's work holds. Where it has
        no work, none were added to those of `before`."""
        work, there = self._exchange.lane.work, self._exchange._contents.keys()
        held = {part for part, mean in enumerate(work.mean) if mean is not None} if work is not None else before
        if not there <= held:
            raise Violation("I3", f"{self._name} has hashes of parts {sorted(there - held)} that it does not hold")
