"""Copying the state: anchor and outer state from several members at once, every chunk verified before it is kept.

The chunks of one snapshot are striped over all members that hold it; a member that dies, stalls or sends a bad
chunk is left out and its chunks are fetched from the others. When nobody holds the snapshot any more, the next pass
goes for what is offered then, and fetches only the chunks that differ. Versions that close meanwhile are applied from
the commits, which members keep for as long as the copy goes on. Memory: a joiner holds the state once, beside the one
it began with; a member holds `MAX_SNAPSHOTS` states at most beside its own, and shares what did not change, and commits
of one state's size.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from diloco.base.errors import StateError
from diloco.base.hashing import content_hash
from diloco.base.types import Closed, Commit
from diloco.outer.fragments import Layout
from diloco.outer.state import (
    ELEMENT_BYTES,
    OuterOptimizer,
    OuterState,
    StateChunk,
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
MAX_FRUITLESS_PASSES = 6
"""Passes over all members, in a row, that bring nothing: then the copy has failed."""
PAUSE_S = 0.5
"""Between such passes."""
MAX_SNAPSHOTS = 2
"""States kept for those who are copying them, besides the latest."""
IDLE_S = 60.0
"""A snapshot that nobody read for so long is dropped: at 0.6 Mb/s one chunk takes that long."""


Elsewhere = Callable[[str, int, bytes], None]
"""Takes a part of a buffer that another rank holds."""

# ---------------------------------------------------------------- giving


def make_offer(state: OuterState, commit: Commit | None) -> StateOffer:
    """Offer of a state to a joiner. Hashes only what no version hashed before."""
    steps = tuple(fragment.steps for fragment in state.fragments)
    hashes = tuple(chunk.digest for chunk in state.manifest())
    return StateOffer(state.version, commit, state.digest, steps, hashes)


@dataclass
class _Snapshot:
    state: OuterState
    offer: StateOffer
    manifest: tuple[StateChunk, ...]
    read_at_s: float


class Backlog:
    """The latest commits with their means, for those who are behind.

    A copy over a slow link takes more versions than are kept otherwise, and would be too old whenever it is here. So
    all since the oldest snapshot stay, too, while their means fit in the memory of one state: 8 versions of int8, 16 of
    int4. A link that takes whole rounds for its part of the syncs brings a state in as many.

    Args:
        versions: kept in any case.
        max_bytes: of all means, when more than `versions` are kept.
    """

    def __init__(self, versions: int, max_bytes: int) -> None:
        self._versions = versions
        self._max_bytes = max_bytes
        self._closed: deque[Closed] = deque()
        self._bytes = 0

    def add(self, closed: Closed, read_version: int | None) -> None:
        """`read_version`: of the oldest snapshot that is being read; None: there is none."""
        self._closed.append(closed)
        self._bytes += _payload_bytes(closed)
        while len(self._closed) > self._versions and not self._is_read(self._closed[0], read_version):
            self._bytes -= _payload_bytes(self._closed.popleft())

    def _is_read(self, closed: Closed, read_version: int | None) -> bool:
        return read_version is not None and closed.commit.version > read_version and self._bytes <= self._max_bytes

    def after(self, version: int) -> list[Closed]:
        """Closed versions after `version` that are kept. The list may begin later than with the next."""
        return [closed for closed in self._closed if closed.commit.version > version]

    def since(self, version: int) -> list[Closed]:
        """All later versions; none, unless the next one is kept."""
        return self.after(version) if self.leads_on_from(version) else []

    def leads_on_from(self, version: int) -> bool:
        """Whether the next version is kept, and so all after it."""
        return any(closed.commit.version == version + 1 for closed in self._closed)

    def means(self) -> set[str]:
        """Digests of the means of all that are kept."""
        return {closed.commit.mean_digest for closed in self._closed}

    def clear(self) -> None:
        """Forget all versions."""
        self._closed.clear()
        self._bytes = 0


def _payload_bytes(closed: Closed) -> int:
    return sum(map(len, closed.parts))


class Snapshots:
    """States that others are copying. One that is being read stays, for as long as commits lead on from it."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._kept: dict[str, _Snapshot] = {}

    def oldest_version(self) -> int | None:
        """Oldest version whose state is kept. None: there is none."""
        return min((snapshot.offer.version for snapshot in self._kept.values()), default=None)

    def offer(self, state: OuterState, offer: StateOffer, now_s: float) -> StateOffer:
        """Offer `state`; or, when as many as are kept are being read, the latest of those: commits lead on from it."""
        self.forget(state.version, now_s)
        full = len(self._kept) >= MAX_SNAPSHOTS and offer.digest not in self._kept
        if not full:
            self._kept[offer.digest] = _Snapshot(state, offer, state.manifest(), now_s)
            return offer
        latest = max(self._kept.values(), key=lambda snapshot: snapshot.offer.version)
        latest.read_at_s = now_s
        return latest.offer

    def digests(self) -> set[str]:
        """Digests of the states that are kept."""
        return set(self._kept)

    def entry(self, digest: str, index: int, now_s: float) -> StateChunk | None:
        """Entry of one chunk in the manifest of the state with that digest, which is being read; None when it is not
        kept any more."""
        snapshot = self._kept.get(digest)
        if snapshot is None or not 0 <= index < len(snapshot.manifest):
            return None
        snapshot.read_at_s = now_s
        return snapshot.manifest[index]

    def chunk(self, digest: str, index: int, now_s: float) -> bytes | None:
        """One chunk of a state that is all here."""
        entry = self.entry(digest, index, now_s)
        return self._kept[digest].state.chunk(entry) if entry is not None else None

    def forget(self, version: int, now_s: float) -> None:
        """Drop what nobody reads, and that from which no commits lead on to `version`, where we stand."""

        def wanted(snapshot: _Snapshot) -> bool:
            at = snapshot.offer.version
            return now_s - snapshot.read_at_s <= IDLE_S and (at >= version or self._backlog.leads_on_from(at))

        self._kept = {digest: snapshot for digest, snapshot in self._kept.items() if wanted(snapshot)}


# ---------------------------------------------------------------- taking


async def download(
    link: Link,
    sources: Sequence[str],
    local: OuterState,
    layout: Layout,
    optimizer: OuterOptimizer,
    stall_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    lineage: str = "",
    commit: Commit | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[OuterState, StateOffer]:
    """The state that most of `sources` (addresses) offer, of that lineage if one is named. Raises StateError when none
    can be copied whole.

    `commit`: the one of `local`, before whose version nobody who stands there may go back: what it sent since is told
    from what it sent before by the version alone.

    Chunks that `local` holds already are not copied; peers that start a run together, from one seed and on like
    machines, have them all. `progress` is told (bytes here, bytes in all). Ends by itself when nothing arrives; a copy
    that crawls is for the caller to cancel. `elsewhere` is given the parts that `layout` does not hold here.
    """
    local_digest = await asyncio.to_thread(lambda: local.digest)
    useless = partial(why_useless, lineage=lineage, commit=commit)
    copy: _Copy | None = None
    fruitless = 0
    while True:
        best = await _best_offer(link, sources, layout, optimizer, stall_s, useless, local_digest)
        if best is None:
            fruitless += 1
            if fruitless == MAX_FRUITLESS_PASSES:
                raise _nothing_fits(len(sources))
            await asyncio.sleep(PAUSE_S)
            continue
        offer, manifest, holders = best
        if offer.digest == local_digest:
            return OuterState(offer.version, local.fragments), offer
        if copy is None:
            copy = await asyncio.to_thread(_Copy, link, local, layout, stall_s, progress, elsewhere)
        fetched_bytes = copy.fetched_bytes
        if await copy.fetch(offer.digest, manifest, holders):
            return OuterState.assemble(offer.version, offer.steps, copy.buffers, layout, optimizer), offer
        fruitless = fruitless + 1 if copy.fetched_bytes == fetched_bytes else 0
        if fruitless == MAX_FRUITLESS_PASSES:
            cause = f"{copy.here_bytes} of {copy.total_bytes} bytes of the state arrived, then no more came"
            raise StateError(cause, "try again: the run goes on without you")
        logger.info("%d of %d bytes of the state are here: asking all members again", copy.here_bytes, copy.total_bytes)
        await asyncio.sleep(PAUSE_S if fruitless else 0)


async def _best_offer(
    link: Link,
    sources: Sequence[str],
    layout: Layout,
    optimizer: OuterOptimizer,
    timeout_s: float,
    useless: Callable[[StateOffer], str],
    have: str,
) -> tuple[StateOffer, list[StateChunk], list[str]] | None:
    """The state that most members offer (of several, the latest), its manifest, and its holders. None: none could be
    asked.

    Raises StateError when nobody's state fits.
    """
    lost = 0

    async def ask(address: str) -> tuple[StateOffer, list[StateChunk]] | None:
        try:
            offer = await link.fetch_state_offer(address, timeout_s, have)
            if why := useless(offer):
                raise StateError(why)
            return offer, _manifest(offer, layout, optimizer)
        except (LinkDown, LinkSlow, LinkRefused, StateError) as error:
            nonlocal lost
            early = isinstance(error, LinkRefused) and error.reply is Reply.TOO_EARLY
            lost += early or isinstance(error, LinkDown | LinkSlow)
            logger.info("no state from %s: %s", address, error)
            return None

    answers = await asyncio.gather(*(ask(address) for address in sources))
    found = {address: answer for address, answer in zip(sources, answers, strict=True) if answer is not None}
    if not found and lost:
        return None
    if not found:
        raise _nothing_fits(len(sources))
    counts = Counter(offer.digest for offer, _ in found.values())
    offer, manifest = max(found.values(), key=lambda answer: (counts[answer[0].digest], answer[0].version))
    return offer, manifest, [address for address, answer in found.items() if answer[0].digest == offer.digest]


def why_useless(offer: StateOffer, lineage: str, commit: Commit | None) -> str:
    """Why a peer that stands at `commit` and is bound for `lineage` (if named) cannot use it; empty: it can."""
    if offer.commit is None:
        return ""
    if lineage and offer.commit.lineage != lineage:
        return "its state belongs to a lineage that ended"
    if commit is not None and commit.lineage == offer.commit.lineage and offer.version < commit.version:
        return f"its state is of version {offer.version}, and ours of version {commit.version}"
    return ""


def _nothing_fits(count: int) -> StateError:
    cause = f"none of {count} members offers a state that fits this run"
    return StateError(cause, "try another address, or again later")


def _manifest(offer: StateOffer, layout: Layout, optimizer: OuterOptimizer) -> list[StateChunk]:
    """The manifest that our own layout calls for, with the hashes offered. Raises StateError when they don't fit."""
    called_for = places(layout, optimizer)
    if len(called_for) != len(offer.chunk_hashes) or len(offer.steps) != len(layout.fragments):
        raise StateError("the state offered does not fit the model", "is it from a run of this contract?")
    manifest = [StateChunk(*place, sha) for place, sha in zip(called_for, offer.chunk_hashes, strict=True)]
    if manifest_digest(manifest, offer.steps) != offer.digest:
        raise StateError("the manifest of the state offered does not match its digest", "join through another member")
    return manifest


class _Copy:
    """The buffers of a state as they fill, whatever snapshot their chunks came from."""

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
        self.buffers = {name: bytearray(buffer.numpy().data) for name, buffer in local.buffers()}
        self.total_bytes = sum(map(self._size, self._manifest))
        self.here_bytes = self.total_bytes
        self.fetched_bytes = 0

    async def fetch(self, digest: str, manifest: Sequence[StateChunk], holders: Sequence[str]) -> bool:
        """Take all that is not here yet from those who hold it. False: some is missing still."""
        self._digest, self._manifest = digest, manifest
        missing = [index for index, chunk in enumerate(manifest) if self._hashes[index] != chunk.digest]
        self._wanted = missing[::-1]
        self.here_bytes = self.total_bytes - sum(self._size(manifest[index]) for index in missing)
        await asyncio.gather(*(self._pull(address, len(holders)) for address in holders))
        return self.here_bytes == self.total_bytes

    async def _pull(self, address: str, holders: int) -> None:
        """Take chunks from one of so many members for as long as it delivers."""
        while self._wanted:
            batch = self._stripe(holders)
            missing = set(batch)
            try:
                most = max(self._size(self._manifest[index]) for index in batch)
                stream = self._link.fetch_state(address, self._digest, batch, most, self._stall_s)
                async for index, data in stream:
                    if index in missing and self._keep(index, data):
                        missing.remove(index)
            except (LinkDown, LinkSlow, LinkRefused) as error:
                logger.info("state from %s: %s", address, error)
            if missing:
                self._wanted += sorted(missing, reverse=True)
                return

    def _stripe(self, holders: int) -> list[int]:
        """Chunks to ask one of so many members for next."""
        batch, size = [self._wanted.pop()], 0
        share = len(self._wanted) // (2 * holders)
        while len(batch) < share and (size := size + self._size(self._manifest[batch[-1]])) < STRIPE_BYTES:
            batch.append(self._wanted.pop())
        return batch

    def _keep(self, index: int, data: bytes) -> bool:
        chunk = self._manifest[index]
        if len(data) != self._size(chunk) or content_hash(data).hex() != chunk.digest:
            logger.warning("a chunk of the state does not match its hash")
            return False
        fragment = self._layout.fragments[int(chunk.buffer.partition("/")[0])]
        if chunk.part in fragment.cuts:
            start, stop = fragment.part_bounds(chunk.part)
            self.buffers[chunk.buffer][start * ELEMENT_BYTES : stop * ELEMENT_BYTES] = data
        elif self._elsewhere is not None:
            self._elsewhere(chunk.buffer, chunk.part, data)
        self._hashes[index] = chunk.digest
        self.here_bytes += len(data)
        self.fetched_bytes += len(data)
        self._progress(self.here_bytes, self.total_bytes)
        return True

    def _size(self, chunk: StateChunk) -> int:
        return part_bytes(self._layout, chunk.buffer, chunk.part)
