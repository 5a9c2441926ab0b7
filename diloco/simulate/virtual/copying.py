"""A simulated peer's copy of the state from several members, as `diloco.exchange.statesync.download` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from diloco.base.hashing import content_hash
from diloco.base.types import Commit, Member
from diloco.exchange.statesync import why_useless
from diloco.outer.state import OuterState, StateChunk, places
from diloco.protocol.streams import StateOffer

if TYPE_CHECKING:
    from diloco.simulate.virtual.host import SimulatedHost

MAX_PASSES = 3
"""Passes over all members before the copy has failed."""
PAUSE_S = 0.2


class SimulatedStateCopy:
    """A simulated peer's copy of the state. Ends with `done`, or with `failed` when nobody gives it."""

    def __init__(
        self,
        host: SimulatedHost,
        sources: Sequence[Member],
        stands_at: Commit | None,
        done: Callable[[OuterState, Commit | None], None],
        failed: Callable[[], None],
    ) -> None:
        self.host = host
        self.sources = list(sources)
        self.stands_at = stands_at
        self.done = done
        self.failed = failed
        self._passes = 0
        self._offers: list[tuple[Member, StateOffer]] = []
        self._unanswered = 0
        self._holders: list[Member] = []
        self._wanted: list[tuple[int, StateChunk]] = []
        self._here: dict[str, bytes] = {}
        """Chunks by their hash: what did not change since the last pass need not come again."""

    def start(self) -> None:
        """Ask all simulated members for their offers of the state."""
        self._passes += 1
        if self._passes > MAX_PASSES or not self.sources:
            self.host.later(PAUSE_S, self.failed)
            return
        self._offers, self._unanswered = [], len(self.sources)
        for source in self.sources:
            then, failed = partial(self._offered, source), partial(self._offered, source, None)
            self.host.world.network.ask(self.host, source, _offer_of, then, failed)

    def _offered(self, source: Member, offer: StateOffer | None) -> None:
        if offer is not None and not why_useless(offer, self.host.machine.lineage, self.stands_at):
            self._offers.append((source, offer))
        self._unanswered -= 1
        if self._unanswered:
            return
        if not self._offers:
            self.host.later(PAUSE_S, self.start)
            return
        counts = Counter(offer.digest for _, offer in self._offers)
        self.newest = max((offer for _, offer in self._offers), key=lambda o: (counts[o.digest], o.version))
        self._holders = [member for member, offer in self._offers if offer.digest == self.newest.digest]
        self._wanted = [entry for entry in enumerate(self._manifest()) if entry[1].digest not in self._here]
        self._next_chunks()

    def _manifest(self) -> list[StateChunk]:
        setup = self.host.world.setup
        hashes = self.newest.chunk_hashes
        called_for = places(setup.layout, setup.optimizer)
        return [StateChunk(*place, digest) for place, digest in zip(called_for, hashes, strict=True)]

    def _next_chunks(self) -> None:
        """Ask one simulated holder for what is missing; so small a state comes in one call."""
        if not self._wanted:
            self._assemble()
        elif not self._holders:
            self.host.later(PAUSE_S, self.start)
        else:
            holder = self.host.world.dice.choice(self._holders)
            question = partial(_chunks_of, self.newest.digest, [index for index, _ in self._wanted])
            take, failed = partial(self._keep, holder), partial(self._keep, holder, ())
            self.host.world.network.ask(self.host, holder, question, take, failed)

    def _keep(self, holder: Member, chunks: Sequence[bytes | None]) -> None:
        good = 0
        for (_, entry), data in zip(self._wanted, chunks, strict=False):
            if data is not None and content_hash(data).hex() == entry.digest:
                self._here[entry.digest] = data
                good += 1
        self._wanted = [entry for entry in self._wanted if entry[1].digest not in self._here]
        if not good:
            self._holders.remove(holder)
        self._next_chunks()

    def _assemble(self) -> None:
        setup, newest = self.host.world.setup, self.newest
        buffers: dict[str, bytearray] = {}
        for entry in self._manifest():
            buffers.setdefault(entry.buffer, bytearray()).extend(self._here[entry.digest])
        state = OuterState.assemble(newest.version, newest.steps, buffers, setup.layout, setup.optimizer)
        self.host.copied()
        self.done(state, newest.commit)


def _offer_of(host: SimulatedHost) -> StateOffer | None:
    return host.state_offer()


def _chunks_of(digest: str, indices: Sequence[int], host: SimulatedHost) -> list[bytes | None]:
    return [host.snapshots.chunk(digest, index, host.now) for index in indices]
