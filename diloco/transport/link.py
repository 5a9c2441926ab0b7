"""The one seam between the exchange and the network.

`Link` has the calls that a peer makes to another by address, `Service` the answers. `grpc_link` carries them over gRPC,
`simulate.memory_link` inside one process. Sizes are known before anything is allocated: a service has a largest part
that it takes, and a caller that fetches passes how much it expects.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from diloco.base.types import Closed
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Limits, Part, ProcessId, StateOffer, StreamHeader, Welcome
from diloco.transport.process import process_lives


class LinkDown(Exception):
    """A connection to a network address was refused or reset: no peer is there now."""


class LinkSlow(Exception):
    """A peer did not answer a call over a link, or no bytes moved, within the deadline."""


class LinkRefused(Exception):
    """A peer answered a call over a link with a refusal."""

    def __init__(self, reply: Reply, detail: str = "") -> None:
        super().__init__(f"{reply.name.lower()}{': ' + detail if detail else ''}")
        self.reply = reply
        self.detail = detail or reply.name.lower()
        """The reason as it travels; without one the name of the reply."""


def untold(size_bytes: int) -> None:
    """Takes the number of bytes that moved in a stream, where nobody asks."""


class Link(Protocol):
    """A peer's calls to others by network address. All have deadlines and raise LinkDown, LinkSlow or LinkRefused."""

    @property
    def send_bps(self) -> int:
        """Rate at which connections take this peer's data in rounds, bits per second over all streams; 0: unknown."""

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        """Deliver one message to the peer at a network address; returns the receiver's reply code."""

    async def send_parts(
        self,
        address: str,
        header: StreamHeader,
        parts: AsyncGenerator[Part],
        stall_s: float,
        taken: Callable[[int], None] = untold,
    ) -> Reply:
        """Send parts to a network address in one stream; returns the receiver's reply code. Closes `parts` at last.

        `taken`: called with the number of bytes whenever the receiver has taken more.
        """

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        """Ask the peer at a network address for the welcome that a joiner needs."""

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        """Network addresses of a peer's lanes: part p of a round goes to lane p mod their number. Empty: all to one."""

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        """Fetch commits after height `since` (-1: since the founding), with their means, from a network address, as
        far as it has them: fewer where the link fails after the first, so that these need not come again."""

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        """Fetch a mean's encoded parts from the peer at a network address. Raises LinkRefused if it has it no more."""

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        """Ask the peer at a network address which state it offers. `have`: digest of ours: of that no chunk is
        needed."""

    def fetch_state(
        self,
        address: str,
        digest: str,
        chunks: Sequence[int],
        max_chunk_bytes: int,
        stall_s: float,
        came: Callable[[int], None] = untold,
    ) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
        """Fetch chunks of a state from the peer at a network address, as (number, bytes in pieces), in any order.

        `came`: called with the number of bytes whenever more have come, whether or not they complete a chunk.
        """

    async def status(self, address: str, timeout_s: float) -> str:
        """Fetch the status of the peer at a network address, as JSON."""

    def lives(self, process: ProcessId) -> bool | None:
        """Whether a process lives that a welcome named; None where nobody here can know, see `process_lives`."""
        return process_lives(process)

    async def close(self) -> None:
        """Close all connections of the link, and end its calls."""


class Service(Protocol):
    """Handlers that a link's server calls for other peers. They run on the link's event loop and must not block it."""

    max_part_bytes: int

    async def on_envelope(self, envelope: Envelope) -> Reply:
        """Answer a call of `Link.deliver`: take one message; returns a reply code."""

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> Reply:
        """Answer a call of `Link.send_parts`: consume `parts` as they arrive; not reading slows the connection down."""

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        """Called when more bytes of a `Link.send_parts` stream have arrived, whether or not they complete a part.

        Raises LinkRefused when they are of no use any more: `on_parts` meets it where it reads.
        """

    def on_hello(self) -> Welcome:
        """Answer a call of `Link.hello` with this peer's welcome. Raises LinkRefused (TOO_EARLY) before it has one."""

    def on_lanes(self) -> tuple[str, ...]:
        """Answer a call of `Link.lanes`: network addresses of this peer's lanes, its own first; empty: no other."""

    def on_fetch_commits(self, since: int) -> AsyncIterator[Closed]:
        """Answer a call of `Link.fetch_commits`: commits after height `since`, without gaps, each when it is asked
        for; none if the next is gone."""

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        """Answer a call of `Link.fetch_mean`: encoded parts of that mean; None when it is not here."""

    async def on_state_offer(self, have: str) -> StateOffer:
        """Answer a call of `Link.fetch_state_offer`. `have`: digest of the caller's state; if that is offered,
        it needs no chunk."""

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        """Answer a call of `Link.fetch_state` with one chunk of that snapshot; None when it is gone."""

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        """Pacing of a `Link.fetch_state` answer: wait until so many bytes of that snapshot may be sent; trainers go
        first."""

    def on_status(self) -> str:
        """Answer a call of `Link.status`: this peer's status as JSON."""
