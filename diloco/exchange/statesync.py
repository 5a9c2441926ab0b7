"""Copying the state: anchor and outer state from several members at once, every chunk verified before it is kept.

The chunks of one snapshot are striped over all members that hold it; a member that dies, stalls or sends a bad
chunk is left out and its chunks are fetched from the others. Memory: the state once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from diloco.errors import StateError
from diloco.exchange.link import Link, LinkDown, LinkRefused, LinkSlow, StateOffer
from diloco.fragments import Layout
from diloco.outer import (
    STATE_CHUNK_BYTES,
    OuterOptimizer,
    OuterState,
    StateChunk,
    buffer_bytes,
    chunk_bounds,
    manifest_digest,
)

logger = logging.getLogger(__name__)

STRIPE_CHUNKS = 4
"""Chunks asked for in one call."""


async def download(
    link: Link,
    sources: Sequence[str],
    local: OuterState,
    layout: Layout,
    optimizer: OuterOptimizer,
    stall_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[OuterState, StateOffer]:
    """The state that most of `sources` (addresses) offer. Raises StateError when none can be copied whole.

    Nothing is copied when `local` is that state already: peers that start a run together, from one seed and on like
    machines, have it. `progress` is told (bytes here, bytes in all).
    """
    offers = await _offers(link, sources, stall_s)
    if not offers:
        raise StateError(f"none of {len(sources)} members offers its state", "try another address, or again later")
    counts = Counter(offer.digest for offer in offers.values())
    newest = max(offers.values(), key=lambda offer: (counts[offer.digest], offer.version))
    holders = [address for address, offer in offers.items() if offer.digest == newest.digest]
    if newest.digest == local.digest:
        return OuterState(newest.version, local.fragments), newest
    manifest = _manifest(newest, layout, optimizer)
    buffers = await _Download(link, newest, manifest, stall_s, progress).run(holders)
    state = OuterState.assemble(newest.version, newest.steps, buffers, layout, optimizer)
    return state, newest


async def _offers(link: Link, sources: Sequence[str], timeout_s: float) -> dict[str, StateOffer]:
    async def ask(address: str) -> StateOffer | None:
        try:
            return await link.fetch_state_offer(address, timeout_s)
        except (LinkDown, LinkSlow, LinkRefused) as error:
            logger.info("no state from %s: %s", address, error)
            return None

    answers = await asyncio.gather(*(ask(address) for address in sources))
    return {address: offer for address, offer in zip(sources, answers, strict=True) if offer is not None}


def _manifest(offer: StateOffer, layout: Layout, optimizer: OuterOptimizer) -> list[StateChunk]:
    """The manifest that our own layout calls for, with the hashes offered. Raises StateError when they don't fit."""
    places = [
        (name, start, stop)
        for name, size in buffer_bytes(layout, optimizer).items()
        for start, stop in chunk_bounds(size)
    ]
    if len(places) != len(offer.chunk_hashes) or len(offer.steps) != len(layout.fragments):
        raise StateError("the state offered does not fit the model", "is it from a run of this contract?")
    manifest = [StateChunk(*place, sha) for place, sha in zip(places, offer.chunk_hashes, strict=True)]
    if manifest_digest(manifest, offer.steps) != offer.digest:
        raise StateError("the manifest of the state offered does not match its digest", "join through another member")
    return manifest


class _Download:
    def __init__(
        self,
        link: Link,
        offer: StateOffer,
        manifest: Sequence[StateChunk],
        stall_s: float,
        progress: Callable[[int, int], None],
    ) -> None:
        self.link = link
        self.offer = offer
        self.manifest = manifest
        self.stall_s = stall_s
        self.progress = progress
        self.wanted = list(reversed(range(len(manifest))))
        self.total_bytes = sum(chunk.stop_byte - chunk.start_byte for chunk in manifest)
        self.done_bytes = 0
        sizes: dict[str, int] = {}
        for chunk in manifest:
            sizes[chunk.buffer] = chunk.stop_byte
        self.buffers = {name: bytearray(size) for name, size in sizes.items()}

    async def run(self, holders: Sequence[str]) -> dict[str, bytearray]:
        await asyncio.gather(*(self._pull(address) for address in holders))
        if self.done_bytes < self.total_bytes:
            cause = (
                f"{self.done_bytes} of {self.total_bytes} bytes of the state arrived, then no member was left to ask"
            )
            raise StateError(cause, "try again: the run goes on without you")
        return self.buffers

    async def _pull(self, address: str) -> None:
        """Take chunks from one member for as long as it delivers."""
        while self.wanted:
            batch = [self.wanted.pop() for _ in range(min(STRIPE_CHUNKS, len(self.wanted)))]
            missing = set(batch)
            try:
                stream = self.link.fetch_state(address, self.offer.digest, batch, STATE_CHUNK_BYTES, self.stall_s)
                async for index, data in stream:
                    if index in missing and self._keep(index, data):
                        missing.remove(index)
            except (LinkDown, LinkSlow, LinkRefused) as error:
                logger.info("state from %s: %s", address, error)
            if missing:
                self.wanted += sorted(missing, reverse=True)
                return

    def _keep(self, index: int, data: bytes) -> bool:
        chunk = self.manifest[index]
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            logger.warning("a chunk of the state does not match its hash")
            return False
        self.buffers[chunk.buffer][chunk.start_byte : chunk.stop_byte] = data
        self.done_bytes += len(data)
        self.progress(self.done_bytes, self.total_bytes)
        return True
