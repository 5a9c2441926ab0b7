"""Checks of the copies of a state that a simulated peer makes: they are whole, and are not given up too early.

A copy that fails ends the process, which a person starts again here: no harm is seen, and so it is looked at.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from diloco.base.errors import StateError
from diloco.base.types import Commit
from diloco.protocol.messages import Fork, Reply
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, untold

if TYPE_CHECKING:
    from diloco.exchange.engine import Exchange
    from diloco.outer.state import OuterState
    from diloco.protocol.streams import StateOffer
    from diloco.simulate.virtual.process import SimulatedProcess

FRUITLESS_S = 2.5
"""A copy that may yet come to its end goes on for so long without any bytes."""
SLACK_S = 0.05
MAX_COPIED_TIMES = 4
"""Sizes of the state that one copy fetches at most."""


def founded_here(exchange: Exchange) -> bool:
    """Whether the latest commit of a simulated peer founds a lineage on the state that it has: it needs no copy."""
    commit = exchange.archive.commit
    return commit is not None and commit.fragment < 0


class SimulatedCopies:
    """Copies of a state that one life of a simulated trainer makes, one after the other."""

    def __init__(self, process: SimulatedProcess, exchange: Exchange) -> None:
        """Look at each copy, and at the calls that it makes."""
        self._process, self._exchange = process, exchange
        self._came_s = -math.inf
        """When the copy began, or its latest chunk came, by the peer's own clock."""
        self._chunks = 0
        """So many were kept."""
        self._telling = False
        """Bytes came, and no chunk was kept."""
        self._here_bytes, self._fetched, self._total = math.inf, 0.0, 0
        """Bytes of the copy that are here, came in all, and are to come."""
        self._asking = 0
        """Members that have not answered yet with an offer."""
        self._goes_on = False
        """In its latest pass a member was silent or early, or gave chunks: the next one may bring more."""
        self._coming = False
        """In its latest pass a member was early, and none has a state to copy."""
        self._left_out: set[str] = set()
        """Members that failed in this pass."""
        self._look_at_copies()
        self._look_at_foundings()
        self._look_at_calls()

    def _look_at_copies(self) -> None:
        process, copying = self._process, self._exchange.copying
        copy = copying.copy

        async def on_copy(
            sources: Sequence[str], local: OuterState, commit: Commit | None, progress: Callable[[int, int], None]
        ) -> tuple[OuterState, StateOffer, tuple[Fork, ...]]:
            def on_progress(here: int, total: int) -> None:
                progress(here, total)
                if self._telling:
                    return
                self._came_s = process.now
                self._chunks += 1
                self._fetched += max(here - self._here_bytes, 0.0)
                self._here_bytes, self._total = here, total

            began_s, self._came_s, self._goes_on = process.world.now, process.now, False
            self._here_bytes, self._fetched = math.inf, 0.0
            try:
                state, offer, forks = await copy(sources, local, commit, on_progress)
            except StateError:
                self._fails()
                raise
            whole = process.ranks is None and not self._drifts(began_s)  # else rank 0 has some parts of it
            if whole and state.digest != offer.digest:
                raise Violation("I1", f"{process.name} copies another state than was offered")
            copied, lineage = offer.commit.lineage if offer.commit else "", self._exchange.machine.lineage
            if copied not in ("", lineage):
                raise Violation("I8", f"{process.name} copies a state of {copied}, and is in {lineage}")
            return state, offer, forks

        copying.copy = on_copy  # type: ignore[method-assign]

    def _look_at_foundings(self) -> None:
        exchange, close = self._exchange, self._exchange._close

        def on_close(commit: Commit) -> None:
            """I7: who founds a lineage on its own state needs no copy of it."""
            close(commit)
            if commit.fragment < 0 and exchange.archive.commit == commit and exchange.behind:
                raise Violation("I7", f"{self._process.name} founds a lineage, and waits for a copy of its own state")

        exchange._close = on_close  # type: ignore[method-assign]

    def _look_at_calls(self) -> None:
        link = self._process.link
        fetch_state_offer, fetch_state = link.fetch_state_offer, link.fetch_state

        async def on_offer(address: str, timeout_s: float, have: str = "") -> StateOffer:
            if not self._asking:  # the next pass begins
                self._goes_on = self._coming = False
                self._left_out.clear()
            self._asking += 1
            try:
                return await fetch_state_offer(address, timeout_s, have)
            except (LinkDown, LinkSlow):
                self._goes_on = True
                raise
            except LinkRefused as error:
                self._coming |= error.reply is Reply.TOO_EARLY
                self._goes_on |= self._coming
                raise
            finally:
                self._asking -= 1

        async def on_chunks(
            address: str,
            digest: str,
            chunks: Sequence[int],
            max_chunk_bytes: int,
            stall_s: float,
            came: Callable[[int], None] = untold,
        ) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
            if address in self._left_out:
                raise Violation("I7", f"{self._process.name} asks {address} for more of a state, which failed")
            self._goes_on, self._coming = True, False
            self._left_out.add(address)
            whole = True

            def counted(size_bytes: int) -> None:
                self._telling = True
                came(size_bytes)
                self._telling = False

            async for index, pieces in fetch_state(address, digest, chunks, max_chunk_bytes, stall_s, counted):
                before = self._chunks
                yield index, pieces
                whole = whole and self._chunks > before
            if whole:
                self._left_out.discard(address)

        link.fetch_state_offer, link.fetch_state = on_offer, on_chunks  # type: ignore[method-assign]

    def _drifts(self, since_s: float) -> bool:
        """Whether bytes of the peer's memory have changed since then: some may be copied already."""
        world, name = self._process.world, self._process.name
        mine = [fault.at_s for fault in world.plan.faults if fault.kind == "drift" and fault.peer == name]
        return any(since_s <= at_s <= world.now for at_s in mine)

    def _fails(self) -> None:
        """I7: a copy fails when nothing came for long, as nobody's state fits, or all was out of date several times;
        not as one member is slow. Who has no state at all waits for one that is on its way."""
        if self._coming and self._exchange.archive.state is None:
            raise Violation("I7", f"{self._process.name} waits no longer for a state that is on its way")
        if self._fetched > (MAX_COPIED_TIMES - 1) * self._total > 0:  # the first chunk of each pass is not in it
            return
        still_s = self._process.now - self._came_s
        if self._goes_on and still_s < FRUITLESS_S - SLACK_S and not founded_here(self._exchange):
            raise Violation("I7", f"{self._process.name} gives a copy up that brought nothing for {still_s:.1f} s")
