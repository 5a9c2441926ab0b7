"""Copying the state: anchor and outer state from several members at once, every chunk verified before it is kept.

The chunks of one snapshot are striped over all members that hold it; a member that dies, stalls or sends a bad
chunk is left out and its chunks are fetched from the others. When nobody holds the snapshot any more, the next pass
goes for what is offered then, and fetches only the chunks that differ. Versions that close meanwhile are applied from
the commits, which members keep for as long as the copy goes on. Memory: a joiner holds the state once, beside the one
it began with; a member holds `archive.MAX_SNAPSHOTS` states at most beside its own, and shares what did not change,
and commits of one state's size.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from diloco.base.errors import StateError
from diloco.base.hashing import content_hash
from diloco.base.types import Commit
from diloco.outer.fragments import Layout
from diloco.outer.state import (
    ELEMENT_BYTES,
    OuterOptimizer,
    OuterState,
    StateChunk,
    copied_bytes,
    manifest_digest,
    part_bytes,
    places,
)
from diloco.protocol.messages import Reply
from diloco.protocol.streams import StateOffer
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

logger = logging.getLogger(__name__)

STRIPE_BYTES = 16 * 2**20
"""Asked for in one call, about: less towards the end, so that all members end together."""
MAX_COPIED_TIMES = 4
"""Sizes of the state that one copy fetches at most: whoever needs more is never done, for versions close faster."""
MAX_FRUITLESS_PASSES = 6
"""Passes over all members, in a row, that bring nothing: then the copy has failed."""
PAUSE_S = 0.5
"""Between such passes."""

Elsewhere = Callable[[str, int, bytes], None]
"""Takes a part of a buffer that another rank holds."""


async def download(
    link: Link,
    sources: Callable[[], Sequence[str]],
    local: OuterState,
    layout: Layout,
    optimizer: OuterOptimizer,
    stall_s: float,
    *,
    useless: Callable[[StateOffer], str] = lambda offer: "",
    patient: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    elsewhere: Elsewhere | None = None,
) -> tuple[OuterState, StateOffer]:
    """A copy of the state that most of `sources` (addresses) offer. Raises StateError when none can be copied whole.

    `useless`: the reason why an offered state is of no use here, or nothing; asked again when the copy is whole.
    `patient`: there is nothing else to do, so members whose state is on its way are asked again for as long as it
    takes, and those whose state is useless as often as silent ones. Each pass goes by the sources of its time.

    Chunks that `local` holds already are not copied; peers that start a run together, from one seed and on like
    machines, have them all. `progress` is called with (bytes of whole chunks here, bytes in all) whenever bytes come.
    Ends by itself when nothing arrives; a copy that crawls is for the caller to cancel. `elsewhere` is given the parts
    that `layout` does not hold here.
    """
    local_digest = await asyncio.to_thread(lambda: local.digest)
    copy: _StateCopy | None = None
    fruitless = 0
    while True:
        asked = sources()
        best, coming = await _best_offer(link, asked, local, layout, optimizer, stall_s, useless, patient)
        if best is None:
            fruitless += not (patient and coming)
            if fruitless == MAX_FRUITLESS_PASSES:
                raise _nothing_fits(len(asked))
            await asyncio.sleep(PAUSE_S)
            continue
        offer, manifest, holders = best
        if offer.digest == local_digest:
            return OuterState(offer.version, local.fragments), offer
        if copy is None:
            copy = await asyncio.to_thread(_StateCopy, link, local, layout, stall_s, progress, elsewhere)
        fetched_bytes = copy.fetched_bytes
        if await copy.fetch(offer.digest, manifest, holders) and not useless(offer):
            return OuterState.assemble(offer.version, offer.steps, copy.buffers, layout, optimizer), offer
        if copy.fetched_bytes > MAX_COPIED_TIMES * copy.total_bytes:
            cause = f"{copy.fetched_bytes} bytes of states came, each out of date before {copy.total_bytes} were here"
            raise StateError(cause, "raise membership.backlog_versions, or join over a faster link")
        fruitless = fruitless + 1 if copy.fetched_bytes == fetched_bytes else 0
        if fruitless == MAX_FRUITLESS_PASSES:
            cause = f"{copy.here_bytes} of {copy.total_bytes} bytes of the state arrived, then no more came"
            raise StateError(cause, "try again: the run goes on without you")
        logger.info("%d of %d bytes of the state are here: asking all members again", copy.here_bytes, copy.total_bytes)
        await asyncio.sleep(PAUSE_S if fruitless else 0)


async def _best_offer(
    link: Link,
    sources: Sequence[str],
    local: OuterState,
    layout: Layout,
    optimizer: OuterOptimizer,
    timeout_s: float,
    useless: Callable[[StateOffer], str],
    patient: bool,
) -> tuple[tuple[StateOffer, list[StateChunk], list[str]] | None, bool]:
    """The state that most members offer for copies (of several, the latest), its manifest and holders; None: no answer,
    or not yet. And whether one will have a state, and has none now. Raises StateError when nobody's state fits.

    `local`, which others that are behind offer, too, is not taken where a later state can be had: each would be content
    with it again and again. Who joins takes it: commits may lead on from there.
    """
    lost, coming = 0, False

    async def ask(address: str) -> tuple[StateOffer, list[StateChunk]] | None:
        nonlocal lost, coming
        try:
            offer = await link.fetch_state_offer(address, timeout_s, local.digest)
            if why := useless(offer):
                lost += patient
                raise StateError(why)
            return offer, _manifest(offer, layout, optimizer)
        except (LinkDown, LinkSlow, LinkRefused, StateError) as error:
            early = isinstance(error, LinkRefused) and error.reply is Reply.TOO_EARLY
            coming = coming or early
            lost += early or isinstance(error, LinkDown | LinkSlow)
            logger.info("no state from %s: %s", address, error)
            return None

    answers = await asyncio.gather(*(ask(address) for address in sources))
    heard = {address: answer for address, answer in zip(sources, answers, strict=True) if answer is not None}
    found = {address: answer for address, answer in heard.items() if not useless(answer[0])}  # the last took its time
    if not found and (lost or heard):
        return None, coming
    if not found:
        raise _nothing_fits(len(sources))
    later = {address for address, (offer, _) in found.items() if offer.version > local.version}
    if later and not patient:
        found = {one: answer for one, answer in found.items() if one in later or answer[0].digest != local.digest}
    counts = Counter(offer.digest for offer, _ in found.values())
    offer, manifest = max(found.values(), key=lambda answer: (counts[answer[0].digest], answer[0].version))
    holders = [address for address, answer in found.items() if answer[0].digest == offer.digest]
    return (offer, manifest, holders), coming


def why_useless(offer: StateOffer, lineage: str, commit: Commit | None, oldest: int = 0, digest: str = "") -> str:
    """Reason why a peer at `commit`, bound for `lineage` (if named), cannot copy an offered state; empty: it can.

    Before the version of its commit nobody may go back who stands in that lineage: its contributions since are
    distinguished from earlier ones by the version alone. `oldest`: from earlier versions than that, no commits are kept
    here that lead on; who is as far behind as we are may offer one. `digest`: of the run's state of that version, if it
    is known: another one is of no use.
    """
    if digest and offer.digest != digest:
        return f"its state of version {offer.version} is not the one that the run went on from"
    if offer.commit is None:
        return ""
    if lineage and offer.commit.lineage != lineage:
        return "its state belongs to a lineage that ended"
    if commit is not None and commit.lineage == offer.commit.lineage and offer.version < commit.version:
        return f"its state is of version {offer.version}, and ours of version {commit.version}"
    if offer.version < oldest:
        return f"its state is of version {offer.version}, and commits are here from version {oldest} on"
    return ""


def _nothing_fits(count: int) -> StateError:
    cause = f"none of {count} members offers a state that fits this run"
    return StateError(cause, "try another address, or again later")


def _manifest(offer: StateOffer, layout: Layout, optimizer: OuterOptimizer) -> list[StateChunk]:
    """Chunks of an offered state to copy: our layout, hashes of the offer. Raises StateError if they don't fit."""
    called_for = places(layout, optimizer)
    if len(called_for) != len(offer.chunk_hashes) or len(offer.steps) != len(layout.fragments):
        raise StateError("the state offered does not fit the model", "is it from a run of this contract?")
    manifest = [StateChunk(*place, sha) for place, sha in zip(called_for, offer.chunk_hashes, strict=True)]
    if manifest_digest(manifest, offer.steps) != offer.digest:
        raise StateError("the manifest of the state offered does not match its digest", "join through another member")
    return manifest


class RankCopy:
    """The copy of a state on a rank that does not lead: rank 0 copies it and passes the parts of this rank."""

    def __init__(self, layout: Layout, optimizer: OuterOptimizer) -> None:
        self._layout, self._optimizer = layout, optimizer
        self._buffers: dict[str, bytearray] = {}
        self.begun = 0
        """Copies that began so far."""
        self.filled = 0
        """Parts that came so far, of all copies."""

    def begin(self, local: OuterState) -> None:
        """Begin with a copy of `local`."""
        self._buffers |= {name: copied_bytes(buffer) for name, buffer in local.buffers()}

    def fill(self, buffer: str, part: int, data: bytes) -> None:
        """Put the bytes of one part of a buffer into the copy of this rank."""
        start, stop = self._layout.fragments[int(buffer.partition("/")[0])].part_bounds(part)
        self._buffers[buffer][start * ELEMENT_BYTES : stop * ELEMENT_BYTES] = data
        self.filled += 1

    def end(self, version: int, steps: Sequence[int]) -> OuterState:
        """The state of this rank, of which all parts have come."""
        state = OuterState.assemble(version, steps, self._buffers, self._layout, self._optimizer)
        self.drop()
        return state

    def drop(self) -> None:
        """Give up the copy of this rank."""
        self._buffers.clear()


class _StateCopy:
    """The copy of a state as its buffers fill, whatever snapshot their chunks came from."""

    def __init__(
        self,
        link: Link,
        local: OuterState,
        layout: Layout,
        stall_s: float,
        progress: Callable[[int, int], None],
        elsewhere: Elsewhere | None,
    ) -> None:
        """Begin with a copy of `local`."""
        self._link = link
        self._elsewhere = elsewhere
        self._layout = layout
        self._stall_s = stall_s
        self._progress = progress
        self._digest = local.digest
        self._manifest: Sequence[StateChunk] = local.manifest()
        self._hashes = [chunk.digest for chunk in self._manifest]
        """Hash of the present content of each place."""
        self._wanted: list[int] = []
        self.buffers = {name: copied_bytes(buffer) for name, buffer in local.buffers()}
        self.total_bytes = sum(map(self._size, self._manifest))
        self.here_bytes = self.total_bytes
        self.fetched_bytes = 0

    async def fetch(self, digest: str, manifest: Sequence[StateChunk], holders: Sequence[str]) -> bool:
        """Copy all chunks of the state that are not here yet from their holders. False: some is missing still."""
        self._digest, self._manifest = digest, manifest
        missing = [index for index, chunk in enumerate(manifest) if self._hashes[index] != chunk.digest]
        self._wanted = missing[::-1]
        self.here_bytes = self.total_bytes - sum(self._size(manifest[index]) for index in missing)
        await asyncio.gather(*(self._pull(address, len(holders)) for address in holders))
        return self.here_bytes == self.total_bytes

    async def _pull(self, address: str, holders: int) -> None:
        """Copy chunks of the state from one of so many members for as long as it delivers."""
        while self._wanted:
            batch = self._stripe(holders)
            missing = set(batch)
            try:
                most = max(self._size(self._manifest[index]) for index in batch)
                stream = self._link.fetch_state(address, self._digest, batch, most, self._stall_s, self._came)
                async for index, pieces in stream:
                    if index in missing and await self._keep(index, pieces):
                        missing.remove(index)
            except (LinkDown, LinkSlow, LinkRefused) as error:
                logger.info("state from %s: %s", address, error)
            if missing:
                self._wanted += sorted(missing, reverse=True)
                return

    def _came(self, _: int) -> None:
        """Bytes of a chunk of the state came: a whole one takes long where many members share one link."""
        self._progress(self.here_bytes, self.total_bytes)

    def _stripe(self, holders: int) -> list[int]:
        """Chunks of the state to copy next from one of so many members."""
        batch, size = [self._wanted.pop()], 0
        share = len(self._wanted) // (2 * holders)
        while len(batch) < share and (size := size + self._size(self._manifest[batch[-1]])) < STRIPE_BYTES:
            batch.append(self._wanted.pop())
        return batch

    async def _keep(self, index: int, pieces: Sequence[bytes]) -> bool:
        chunk = self._manifest[index]
        take = partial(self._take, chunk, pieces)
        # To hash and copy 16 MB takes 65 ms where memory is new and CPUs are busy; what one message holds, 1 or 2.
        data = take() if len(pieces) == 1 else await asyncio.to_thread(take)
        if data is None:
            logger.warning("a chunk of the state does not match its hash")
            return False
        if data and self._elsewhere is not None:
            self._elsewhere(chunk.buffer, chunk.part, data)
        self._hashes[index] = chunk.digest
        self.here_bytes += self._size(chunk)
        self.fetched_bytes += self._size(chunk)
        self._progress(self.here_bytes, self.total_bytes)
        return True

    def _take(self, chunk: StateChunk, pieces: Sequence[bytes]) -> bytes | None:
        """Copy a chunk to its place, on any thread. Returns its bytes where it is for another rank; else none. None: it
        is not the chunk of the manifest."""
        if sum(map(len, pieces)) != self._size(chunk) or content_hash(*pieces).hex() != chunk.digest:
            return None
        fragment = self._layout.fragments[int(chunk.buffer.partition("/")[0])]
        if chunk.part not in fragment.cuts:
            return b"".join(pieces)
        at = fragment.part_bounds(chunk.part)[0] * ELEMENT_BYTES
        for piece in pieces:
            self.buffers[chunk.buffer][at : at + len(piece)] = piece
            at += len(piece)
        return b""

    def _size(self, chunk: StateChunk) -> int:
        return part_bytes(self._layout, chunk.buffer, chunk.part)
