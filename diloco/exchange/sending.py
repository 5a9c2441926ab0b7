"""Sending of a lane's parts to other peers: to the lanes that hold them there, and again when a line breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial

from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.protocol.streams import Part, StreamHeader
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

logger = logging.getLogger(__name__)

MAX_STREAM_TRIES = 3
STREAM_PAUSE_S = 0.1
"""Tries to send a stream of parts on a line that breaks or damages it, and the pause between two of them."""

Key = tuple[int, int]
"""The version being made, and the attempt at it."""


class PartSender:
    """Streams of parts from one lane to other peers.

    Args:
        lost: called with a member whose line broke.
        moved: called with the bytes that receivers took.
        key: the attempt that the lane has under way; streams of another are not begun again.
    """

    def __init__(
        self,
        link: Link,
        stall_s: float,
        lost: Callable[[Member], None],
        moved: Callable[[int], None],
        key: Callable[[], Key | None],
    ) -> None:
        self.link = link
        self._stall_s, self._lost, self._moved, self._key = stall_s, lost, moved, key
        self._routes: dict[str, tuple[str, ...]] = {}
        """Addresses of the lanes of members of the attempt, as far as we sent them something, by the member's own: a
        life that goes on in another process has other ones."""

    def keep(self, members: Collection[Member]) -> None:
        """Forget where the lanes of all other members are."""
        addresses = {member.address for member in members}
        self._routes = {address: lanes for address, lanes in self._routes.items() if address in addresses}

    async def send(
        self,
        to: Member,
        header: StreamHeader,
        parts: Sequence[int],
        flow: Callable[[Sequence[int]], AsyncGenerator[Part]],
    ) -> None:
        """Send parts to the lanes that hold them there, from the start again when a line breaks: the receiver ignores
        what it has."""
        if not parts:
            return
        for _ in range(MAX_STREAM_TRIES):
            addresses = await self._lanes_of(to)
            if addresses is not None:
                break
            await asyncio.sleep(STREAM_PAUSE_S)
        else:
            return
        lanes = len(addresses)
        each = [(address, [part for part in parts if part % lanes == lane]) for lane, address in enumerate(addresses)]
        await asyncio.gather(*(self._send(to, address, header, partial(flow, some)) for address, some in each if some))

    async def _lanes_of(self, member: Member) -> tuple[str, ...] | None:
        """The addresses of a member's lanes; None: it does not answer."""
        if member.address not in self._routes:
            try:
                others = await self.link.lanes(member.address, self._stall_s)
            except (LinkDown, LinkSlow, LinkRefused):
                self._lost(member)
                return None
            self._routes[member.address] = others or (member.address,)
        return self._routes[member.address]

    async def _send(
        self, to: Member, address: str, header: StreamHeader, parts: Callable[[], AsyncGenerator[Part]]
    ) -> None:
        """Send parts to one lane, from the start again when the line breaks, damages them or is early."""
        key = header.key
        what = f"{header.kind.name.lower()} of {header.height}/{header.attempt} to {to.peer}"
        for _ in range(MAX_STREAM_TRIES):
            reply = m.Reply.DAMAGED
            try:
                reply = await self.link.send_parts(address, header, parts(), self._stall_s, self._moved)
            except LinkDown:
                self._routes.pop(to.address, None)
                self._lost(to)
            except LinkSlow as error:
                logger.info("%s: %s", what, error)
                return
            except LinkRefused as error:
                logger.info("%s: %s", what, error)
                reply = error.reply
            if reply is not m.Reply.OK:
                logger.debug("%s: %s", what, reply.name)
            if reply not in (m.Reply.DAMAGED, m.Reply.TOO_EARLY) or self._key() is None:
                return
            await asyncio.sleep(STREAM_PAUSE_S)
            if self._key() != key:
                return
