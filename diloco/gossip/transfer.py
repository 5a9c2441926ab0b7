"""Terms of swapping, weights on their way between two peers, and the news of them for the training thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.base.memory import floats
from diloco.compress import Codec, PayloadError
from diloco.gossip.swaps import Swap
from diloco.outer.fragments import Fragment, Layout
from diloco.outer.state import OuterOptimizer
from diloco.protocol.streams import Part
from diloco.protocol.view import Timing


@dataclass(frozen=True)
class GossipTerms:
    """Settings of the run that swapping needs."""

    contract_json: bytes
    run: str
    contract: str
    """Its digest."""
    timing: Timing
    layout: Layout
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    total_tokens: int
    tokens_per_step: int
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    offences_allowed: int
    serve_bps: float
    """Limit for serving the state to joiners, bits per second; 0: none."""


@dataclass(frozen=True)
class Agreed:
    """For the training thread: hand over the weights for this swap, which we lead."""

    swap: Swap


@dataclass(frozen=True)
class Here:
    """For the training thread: the other's weights, flat fp32. Apply the swap; who follows then hands over its own."""

    swap: Swap
    weights: Tensor
    phase: str
    """The other's, as it said."""


@dataclass(frozen=True)
class Failed:
    """For the training thread: this swap comes to nothing on our side."""

    swap: Swap
    reason: str


class Arriving:
    """The other's weights as they come: over several streams, and again after one broke."""

    def __init__(self, swap: Swap, fragment: Fragment, codecs: Sequence[Codec]) -> None:
        self.swap = swap
        self.values = floats(fragment.elements)
        self.missing = set(range(fragment.parts))
        self._fragment, self._codecs = fragment, codecs

    def take(self, part: Part) -> None:
        """Decode one part to its place, the first time that it comes. Raises PayloadError."""
        if part.index >= self._fragment.parts:
            raise PayloadError(f"part {part.index} of weights in {self._fragment.parts} parts")
        if part.index not in self.missing:
            return  # sent again; with all others here, somebody reads the values by now
        start, stop = self._fragment.part_bounds(part.index)
        codec = self._codecs[self._fragment.group_of(part.index)]
        if len(part.payload) > codec.max_bytes(stop - start):
            raise PayloadError(f"part {part.index} has {len(part.payload)} bytes")
        codec.decode_into(part.payload, self.values[start:stop])
        self.missing.discard(part.index)


class Outgoing:
    """Our weights, encoded part by part as the network takes them, once."""

    def __init__(self, swap: Swap, weights: Tensor, fragment: Fragment, codecs: Sequence[Codec]) -> None:
        self.swap = swap
        self._weights, self._fragment, self._codecs = weights, fragment, codecs
        self._encoded: list[bytes] = []

    async def parts(self) -> AsyncGenerator[Part]:
        """All of them, from the first. Several may read at once."""
        for index in range(self._fragment.parts):
            while index >= len(self._encoded):
                payload = await asyncio.to_thread(self._encode, index)
                if index == len(self._encoded):
                    self._encoded.append(payload)
            if len(self._encoded) == self._fragment.parts:
                self._weights = self._weights[:0].clone()  # what is encoded is enough from now on
            yield Part(index, self._encoded[index])

    def _encode(self, index: int) -> bytes:
        start, stop = self._fragment.part_bounds(index)
        return self._codecs[self._fragment.group_of(index)].encode(self._weights[start:stop])
