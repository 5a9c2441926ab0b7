"""Streams of parts in a simulated network: in order, piece by piece over the uplink that a peer's streams share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from diloco.protocol.messages import Reply
from diloco.protocol.streams import Part, StreamHeader
from diloco.simulate.virtual.wires import RETRANSMIT_S, bytes_in, check_sizes, name_at
from diloco.transport.link import LinkRefused, LinkSlow, Service

if TYPE_CHECKING:
    from diloco.simulate.virtual.network import SimulatedNetwork
    from diloco.simulate.virtual.process import SimulatedProcess

DAMAGED_SHARE = 0.3
"""Share of damaged batches of parts, for a peer whose streams are damaged."""


class _Piece(NamedTuple):
    """Bytes that cross the simulated network at once."""

    batch: Sequence[Part]
    """Parts that it completes."""
    size_bytes: int
    last: bool
    """The stream ends here."""


class SimulatedStream:
    """Parts on their way from one simulated peer to another, in order; one batch at a time."""

    def __init__(
        self,
        network: SimulatedNetwork,
        caller: SimulatedProcess,
        address: str,
        header: StreamHeader,
        taken: Callable[[int], None],
    ) -> None:
        self._network, self._caller, self._address, self._header = network, caller, address, header
        self._on_taken = taken
        self._arrived: list[_Piece | LinkRefused] = []
        self._news: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None
        """Done when the receiver has taken what is under way."""
        self._ended = False
        """It was answered: nobody takes more."""

    async def carry(self, batch: Sequence[Part], stall_s: float) -> None:
        """Send a batch; returns when the receiver has taken it, or the stream is over. Raises LinkSlow."""
        network, sender = self._network, self._caller.name
        pieces = network.uplinks.pieces(sender, bytes_in(batch))
        delay_s = network.latency(sender, name_at(self._address))
        for size_bytes in pieces[:-1]:
            await self._pass((), size_bytes, delay_s, stall_s)
            delay_s = 0.0  # it is on its way already
        await self._pass(batch, pieces[-1], delay_s, stall_s, last=not batch)

    async def _pass(
        self, batch: Sequence[Part], size_bytes: int, delay_s: float, stall_s: float, last: bool = False
    ) -> None:
        """Send a piece of a batch that is incomplete before the last of them brings it. Raises LinkSlow."""
        if self._ended:
            return
        taken = self._taken = self._caller.loop.create_future()
        network = self._network
        turn_s = 0.0
        if network.uplinks.limited:
            turn_s = network.uplinks.takes_s(self._caller.name, size_bytes, network.world.now)
        network.world.after(delay_s + turn_s, self._cross, _Piece(batch, size_bytes, last), taken)
        stalled = LinkSlow(f"{self._address}: no progress for {stall_s:g} s")
        late = self._caller.loop.call_later(turn_s + stall_s, self.over, stalled)
        try:
            await taken
        finally:
            late.cancel()
        if not self._ended:
            self._on_taken(size_bytes)

    def over(self, error: LinkSlow | None = None) -> None:
        """The batch under way is taken, or will never be."""
        if self._taken is None or self._taken.done():
            return
        if error is None:
            self._taken.set_result(None)
        else:
            self._taken.set_exception(error)

    def end(self) -> None:
        """The receiver has answered."""
        self._ended = True
        self.over()

    def _cross(self, piece: _Piece, taken: asyncio.Future[None]) -> None:
        network, sender = self._network, self._caller
        if taken.done() or sender.loop.dead:
            return
        if network.cuts and not network.connected(sender.name, name_at(self._address)):
            network.world.after(RETRANSMIT_S, self._cross, piece, taken)
            return
        damaged = piece.batch and sender.name in network.damaging and network.dice.random() < DAMAGED_SHARE
        if damaged:
            network.world.count("damaged streams")
        self._arrived.append(LinkRefused(Reply.DAMAGED, "damaged on the way") if damaged else piece)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def arriving(self, receiver: Service) -> AsyncIterator[Part]:
        """The parts, in the process that receives them."""
        while True:
            while not self._arrived:
                self._news = asyncio.get_running_loop().create_future()
                await self._news
            piece = self._arrived.pop(0)
            if isinstance(piece, LinkRefused):
                raise piece
            receiver.on_bytes(self._header, piece.size_bytes)
            for part in piece.batch:
                check_sizes([part.payload], receiver.max_part_bytes)
                yield part
            self.over()
            if piece.last:
                return
