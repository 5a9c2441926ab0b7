"""The one seam between the exchange and the network.

`Link` has the calls that a peer makes to another by address, `Service` the answers. `grpc_link` carries them over gRPC,
`simulate.memory_link` inside one process. Sizes are known before anything is allocated: a service has a largest part
that it takes, and a caller that fetches passes how much it expects.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from diloco.base.types import Closed
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Limits, Part, StateOffer, StreamHeader, Welcome


class LinkDown(Exception):
    """A connection was refused or reset: no peer is at that address now."""


class LinkSlow(Exception):
    """A peer did not answer, or no bytes moved, within the deadline of a call."""


class LinkRefused(Exception):
    """A peer answered a call with a refusal."""

    def __init__(self, reply: Reply, detail: str = "") -> None:
        super().__init__(f"{reply.name.lower()}{': ' + detail if detail else ''}")
        self.reply = reply
        self.detail = detail or reply.name.lower()
        """The reason as it travels; without one the name of the reply."""


class Link(Protocol):
    """Calls that a peer can make to another. Every call has a deadline; raises LinkDown, LinkSlow or LinkRefused."""

    @property
    def send_bps(self) -> int:
        """Rate at which others take this peer's data in rounds, in bits per second over all streams; 0: unknown."""

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        """Deliver one message; returns the receiver's reply code."""

    async def send_parts(
        self, address: str, header: StreamHeader, parts: AsyncGenerator[Part], stall_s: float
    ) -> Reply:
        """Send the parts of one stream; returns the receiver's reply code. `parts` is closed when no more are taken."""

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        """The peer's welcome for a joiner."""

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        """Addresses of the peer's lanes: part p of a round goes to lane p mod their number. Empty: all to `address`."""

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        """Commits after version `since`, with their means, as far as the peer keeps them."""

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        """Encoded parts of the mean with this digest. Raises LinkRefused when the peer does not have it."""

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        """The state that the peer offers to copy. `have`: digest of the state that we hold, and need no chunk of."""

    def fetch_state(
        self, address: str, digest: str, chunks: Sequence[int], max_chunk_bytes: int, stall_s: float
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Chunks of the state with this digest, as (number, bytes), in any order."""

    async def status(self, address: str, timeout_s: float) -> str:
        """The peer's status as JSON."""

    async def close(self) -> None:
        """End the link, and its calls."""


class Service(Protocol):
    """Handlers for the calls of other peers. They run on the link's event loop and must not block it."""

    max_part_bytes: int

    async def on_envelope(self, envelope: Envelope) -> Reply:
        """Take one message; returns a reply code."""

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> Reply:
        """Consume `parts` as they arrive; not reading slows the sender down."""

    def on_bytes(self, header: StreamHeader) -> None:
        """Called when more bytes of that stream have arrived, whether or not they complete a part."""

    def on_hello(self) -> Welcome:
        """This peer's welcome for a joiner. Raises LinkRefused (TOO_EARLY) before this peer has one."""

    def on_lanes(self) -> tuple[str, ...]:
        """Addresses of this peer's lanes, its own first; empty: there is none beside it."""

    async def on_fetch_commits(self, since: int) -> list[Closed]:
        """The commits after version `since` that are still here, without gaps; empty if the next is gone."""

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        """Encoded parts of the mean with this digest; None when it is not here."""

    async def on_state_offer(self, have: str) -> StateOffer:
        """The state that this peer offers to copy. `have`: digest of the caller's; if equal it needs no chunk."""

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        """One chunk of the snapshot with that digest; None when it is gone."""

    async def on_state_bytes(self, size_bytes: int) -> None:
        """Wait until so many bytes of a state may be sent: trainers go first."""

    def on_status(self) -> str:
        """This peer's status as JSON."""
