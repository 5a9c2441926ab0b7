"""The bytes of one attempt's reduction on one peer: contributions to the parts it owns, and the mean as it grows.

Bounded by sizes known beforehand: at most one encoded span per contributor, and one encoded fragment for the mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from diloco.average import fold
from diloco.compress import Codec, PayloadError
from diloco.exchange.link import Kind, Part
from diloco.exchange.messages import Begin
from diloco.fragments import Fragment
from diloco.types import Contribution, Member


class Work:
    """Made when an attempt begins, dropped when its version closes or another attempt begins."""

    def __init__(self, begin: Begin, me: Member, fragment: Fragment, codec: Codec) -> None:
        self.begin = begin
        self.fragment = fragment
        self.codec = codec
        self.mean: list[bytes | None] = [None] * fragment.parts
        self.owner = {part: span.owner for span in begin.spans for part in range(span.start, span.stop)}
        self.owned = [part for part, owner in self.owner.items() if owner == me.peer]
        self._weight = {counted.peer: counted.weight for counted in begin.contributors}
        self._payloads: dict[int, dict[str, bytes]] = {part: {} for part in self.owned}
        self.outlets: dict[str, asyncio.Queue[Part]] = {}
        self.streams: list[asyncio.Task[None]] = []
        """The outlets' tasks."""

    @property
    def key(self) -> tuple[int, int]:
        return self.begin.version, self.begin.attempt

    def max_bytes(self, part: int) -> int:
        start, stop = self.fragment.part_bounds(part)
        return self.codec.max_bytes(stop - start)

    def take_own(self, me: Member, contribution: Contribution) -> None:
        """My own contribution to the parts that I own does not travel."""
        if me.peer in self._weight:
            for part in self.owned:
                self._payloads[part][me.peer] = contribution.parts[part]

    def expects(self, kind: Kind, sender: str, part: int) -> bool:
        """Whether a part of that kind from that peer belongs to this reduction."""
        if kind is Kind.MEAN:
            return self.owner.get(part) == sender
        return part in self._payloads and sender in self._weight

    def put_contribution(self, sender: str, part: int, payload: bytes) -> None:
        self._payloads[part][sender] = payload

    def put_mean(self, part: int, payload: bytes) -> None:
        """Raises PayloadError when the owner's bytes do not decode: nobody must commit what nobody can apply."""
        start, stop = self.fragment.part_bounds(part)
        self.codec.decode(payload, stop - start)
        self.mean[part] = payload

    def fold(self, part: int) -> bytes:
        """The mean of one part that I own, in the order of the contributors; frees what it was made of.

        Raises BadContribution, which names the sender.
        """
        start, stop = self.fragment.part_bounds(part)
        payloads = self._payloads[part]
        terms = [(counted.weight, payloads[counted.peer]) for counted in self.begin.contributors]
        try:
            mean = fold(terms, stop - start, self.codec)
        except PayloadError as error:
            raise BadContribution(self._culprit(part), str(error)) from error
        self.mean[part] = mean
        payloads.clear()
        return mean

    def _culprit(self, part: int) -> str:
        start, stop = self.fragment.part_bounds(part)
        for sender, payload in self._payloads[part].items():
            try:
                self.codec.decode(payload, stop - start)
            except PayloadError:
                return sender
        return ""

    def sealed(self) -> list[bytes]:
        """The whole mean."""
        parts = [part for part in self.mean if part is not None]
        assert len(parts) == self.fragment.parts
        return parts

    def abandon(self) -> None:
        """End the outlets that would wait for ever: of an attempt that failed before all my parts were averaged."""
        if any(self.mean[part] is None for part in self.owned):
            for stream in self.streams:
                stream.cancel()

    async def outlet(self, peer: str) -> AsyncIterator[Part]:
        """My averaged parts for one receiver, as they get ready."""
        for _ in self.owned:
            yield await self.outlets[peer].get()


class BadContribution(Exception):
    """A contributor's bytes decode to nothing sensible."""

    def __init__(self, sender: str, reason: str) -> None:
        super().__init__(reason)
        self.sender = sender
