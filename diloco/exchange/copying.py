"""Copies of the state from other peers, into the lanes of all ranks of an island."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from diloco.base.types import Commit, Member
from diloco.exchange.archive import Archive
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import Lanes
from diloco.exchange.statesync import download, why_useless
from diloco.exchange.terms import LaneTerms
from diloco.outer.state import OuterState
from diloco.protocol.claims import why_malformed
from diloco.protocol.machine import Machine
from diloco.protocol.messages import Fork
from diloco.protocol.streams import StateOffer
from diloco.transport.link import Link


class StateCopier:
    """Copies of the state for rank 0 of a peer, one at a time. Its methods are for the loop's thread."""

    def __init__(self, link: Link, terms: LaneTerms, machine: Machine, archive: Archive, lanes: Lanes) -> None:
        self._link, self._terms, self._machine, self._archive, self._lanes = link, terms, machine, archive, lanes
        self._one = asyncio.Lock()
        self.resync_from: list[Member] = []
        """Members that go on in the lineage for which this peer left its own."""

    def givers(self) -> list[Member]:
        """Trainers to copy the state from: of the view, or else those that the peer heard."""
        heard = [entry for entry in self._machine.roster if entry.located and not entry.left]
        founded = [entry.member for entry in heard if entry.heartbeat is not None and entry.heartbeat.founded]
        known = [*self.resync_from, *founded]
        return [one for one in self._machine.others() if not one.witness] or [one for one in known if not one.witness]

    async def copy(
        self, sources: Sequence[str], local: OuterState, commit: Commit | None, progress: Callable[[int, int], None]
    ) -> tuple[OuterState, StateOffer, tuple[Fork, ...]]:
        """See `Exchange.copy_state`."""
        terms, lanes, machine = self._terms, self._lanes, self._machine
        filling = True

        def elsewhere(buffer: str, part: int, data: bytes) -> None:
            if filling:
                lanes.at(part, Lane.fill, buffer, part, data)

        def asked() -> list[str]:
            return [*dict.fromkeys((*sources, *(member.address for member in self.givers())))]

        async with self._one:  # one that was given up takes a moment to end: what it then drops is not ours
            lanes.each_other(Lane.begin_copy)
            known, patient = self._archive.backlog, self._archive.state is None  # patient: nobody trains on meanwhile
            oldest = known.copying_from = known.leads_from

            def useless(offer: StateOffer) -> str:
                lie = why_malformed(offer.commit, machine.rules.bounds) if offer.commit is not None else ""
                return lie or why_useless(offer, machine.lineage, commit, oldest, known.state_of(offer.version))

            try:
                state, offer = await download(
                    self._link, asked, local, terms.layout, terms.optimizer, terms.stall_s,
                    useless=useless, patient=patient, progress=progress, elsewhere=elsewhere,
                )  # fmt: skip
            except BaseException:  # it may have been cancelled
                filling = False
                lanes.each_other(Lane.drop_copy)
                raise
            lanes.each_other(Lane.end_copy, offer.version, offer.steps)
            self.resync_from = []
            return state, offer, machine.forks
