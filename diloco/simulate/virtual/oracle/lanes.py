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
        admit = exchange.admit

        async def on_admit(header: StreamHeader) -> m.Reply:
            self._check_work()
            return await admit(header)

        exchange.admit = on_admit  # type: ignore[method-assign]

    def _check_work(self) -> None:
        """I3: after effects were performed, the lane works at the reduction of the state machine, since its latest
        repair."""
        reducing, work = self._exchange.machine.reducing, self._exchange.lane.work
        here = (*work.key, work.generation) if work is not None else None
        if reducing is not None and here != reducing:
            raise Violation("I3", f"{self._name} is in reduction {reducing}, and its lane in {here}")
