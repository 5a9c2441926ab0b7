"""The in-memory network: the exchange's seam inside one process, the twin of `transport/` for tests and simulations.

`MemoryNetwork` makes links with the calls, errors and deadlines of `GrpcLink`. Values are handed over as they are: no
bytes are made, so checksums and limits of messages do not exist here; the sizes of parts are checked alike.
`MemoryRuntime` and `MemoryEndpoint` stand for those of `diloco.transport.endpoint`, without a directory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from diloco.base.clock import monotonic_s
from diloco.base.types import Closed
from diloco.config.site import Site
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import CHUNK_BYTES, Kind, Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow, Service, untold
from diloco.transport.pace import Outbox, RateLimit

T = TypeVar("T")


class MemoryNetwork:
    """The in-memory network: all addresses of one process. Everything on it runs on one asyncio loop."""

    def __init__(self) -> None:
        self._hosts: dict[str, _MemoryProcess] = {}
        self.sent_bytes: Counter[Kind] = Counter()
        """Bytes of parts, by the kind of stream."""

    def attach(self, address: str, service: Service) -> None:
        """Let `service` answer at `address` of the in-memory network from now on."""
        assert address not in self._hosts, f"{address} is taken"
        self._hosts[address] = _MemoryProcess(service)

    def host(self, address: str) -> _MemoryProcess:
        """The simulated process at `address` of the in-memory network. Raises LinkDown where there is none."""
        if address not in self._hosts:
            raise LinkDown(f"{address}: nobody is there")
        return self._hosts[address]

    def detach(self, address: str) -> None:
        """Simulate the death of the process at `address`: calls to it end in LinkDown, those under way too."""
        for task in self._hosts.pop(address).calls:
            task.cancel()

    def freeze(self, address: str) -> None:
        """Simulate that the process at `address` stops: calls to it end in LinkSlow."""
        self._hosts[address].awake.clear()

    def thaw(self, address: str) -> None:
        """End the simulated stop of the process at `address`."""
        self._hosts[address].awake.set()

    def link(self, rpc_s: float = 5.0, send_bps: float = 0.0) -> Link:
        """An in-memory link to all addresses; `rpc_s`: deadline of `deliver`, `send_bps` limits `send_parts` (0: none).

        Nothing is measured here, so that the limit is all that its `send_bps` knows.
        """
        return _MemoryLink(self, rpc_s, send_bps)


class _MemoryProcess:
    """The simulated process at one address of the in-memory network: a service, and the calls it is answering."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.awake = asyncio.Event()
        self.awake.set()
        self.calls: set[asyncio.Task[Any]] = set()

    def call(self, ask: Callable[[Service], Awaitable[T]]) -> asyncio.Task[T]:
        task = asyncio.create_task(self._answer(ask))
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        return task

    async def _answer(self, ask: Callable[[Service], Awaitable[T]]) -> T:
        await self.awake.wait()
        return await ask(self.service)


class _MemoryLink(Link):
    """Calls to the other addresses of the in-memory network."""

    def __init__(self, network: MemoryNetwork, rpc_s: float, send_bps: float) -> None:
        self._network = network
        self._rpc_s = rpc_s
        self._send_bps = int(send_bps)
        self._limit = RateLimit(send_bps)

    @property
    def send_bps(self) -> int:
        return self._send_bps

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        return await self._ask(address, self._rpc_s, lambda service: service.on_envelope(envelope))

    async def send_parts(
        self,
        address: str,
        header: StreamHeader,
        parts: AsyncGenerator[Part],
        stall_s: float,
        taken: Callable[[int], None] = untold,
    ) -> Reply:
        host = self._network.host(address)
        batches: asyncio.Queue[list[Part]] = asyncio.Queue(1)
        answer = host.call(lambda service: service.on_parts(header, _arriving(batches, header, host)))
        outbox = Outbox(parts)
        answer.add_done_callback(lambda _: outbox.close())
        try:
            while batch := await outbox.take(CHUNK_BYTES):
                size_bytes = sum(len(part.payload) for part in batch)
                self._network.sent_bytes[header.kind] += size_bytes
                await asyncio.sleep(self._limit.delay_s(size_bytes, monotonic_s()))
                await _put(batches, batch, answer, stall_s)
                taken(size_bytes)
            await _put(batches, [], answer, stall_s)
            return await _outcome(address, answer, stall_s)
        finally:
            outbox.close()
            answer.cancel()

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        return await self._ask(address, timeout_s, _asynchronously(lambda service: service.on_hello()))

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        return await self._ask(address, timeout_s, _asynchronously(lambda service: service.on_lanes()))

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        found = await self._ask(address, stall_s, lambda service: whole(service.on_fetch_commits(since)))
        _check_means([closed.parts for closed in found], limits)
        return found

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        payloads = await self._ask(address, stall_s, lambda service: service.on_fetch_mean(mean_digest))
        if payloads is None:
            raise LinkRefused(Reply.STALE, f"{address}: that mean is not here")
        _check_means([payloads], limits)
        return list(payloads)

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        return await self._ask(address, timeout_s, lambda service: service.on_state_offer(have))

    async def fetch_state(
        self,
        address: str,
        digest: str,
        chunks: Sequence[int],
        max_chunk_bytes: int,
        stall_s: float,
        came: Callable[[int], None] = untold,
    ) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
        for index in chunks:
            payload = await self._ask(address, stall_s, _state_chunk(digest, index))
            if payload is None:
                raise LinkRefused(Reply.STALE, f"{address}: chunk {index} of that state is not here")
            _check_sizes([payload], max_chunk_bytes)
            await self._ask(address, stall_s, _state_bytes(digest, len(payload)))
            came(len(payload))
            yield index, [payload]

    async def status(self, address: str, timeout_s: float) -> str:
        return await self._ask(address, timeout_s, _asynchronously(lambda service: service.on_status()))

    async def close(self) -> None:
        """Close the in-memory link: there is nothing to close."""

    async def _ask(self, address: str, within_s: float, ask: Callable[[Service], Awaitable[T]]) -> T:
        answer = self._network.host(address).call(ask)
        try:
            return await _outcome(address, answer, within_s)
        finally:
            answer.cancel()


async def whole(answer: AsyncIterator[T]) -> list[T]:
    """All of an answer that a service gives piece by piece."""
    return [piece async for piece in answer]


async def _outcome(address: str, answer: asyncio.Task[T], within_s: float) -> T:
    await asyncio.wait({answer}, timeout=within_s)
    if not answer.done():
        raise LinkSlow(f"{address}: no progress for {within_s:g} s")
    if answer.cancelled():
        raise LinkDown(f"{address}: gone")
    return answer.result()


async def _put(
    batches: asyncio.Queue[list[Part]], batch: list[Part], answer: asyncio.Task[Any], stall_s: float
) -> None:
    """Hand a batch of parts over the in-memory link; at once if the answer came early."""
    putting = asyncio.create_task(batches.put(batch))
    done, _ = await asyncio.wait({putting, answer}, timeout=stall_s, return_when=asyncio.FIRST_COMPLETED)
    putting.cancel()
    if not done:
        raise LinkSlow(f"no progress for {stall_s:g} s")


async def _arriving(
    batches: asyncio.Queue[list[Part]], header: StreamHeader, host: _MemoryProcess
) -> AsyncIterator[Part]:
    while batch := await batches.get():
        host.service.on_bytes(header, sum(len(part.payload) for part in batch))
        for part in batch:
            await host.awake.wait()
            _check_sizes([part.payload], host.service.max_part_bytes)
            yield part


def _asynchronously(ask: Callable[[Service], T]) -> Callable[[Service], Awaitable[T]]:
    async def answer(service: Service) -> T:
        return ask(service)

    return answer


def _state_chunk(digest: str, index: int) -> Callable[[Service], Awaitable[bytes | None]]:
    return lambda service: service.on_state_chunk(digest, index)


def _state_bytes(digest: str, size_bytes: int) -> Callable[[Service], Awaitable[None]]:
    return lambda service: service.on_state_bytes(digest, size_bytes)


def _check_means(means: Sequence[Sequence[bytes]], limits: Limits) -> None:
    for mean in means:
        _check_sizes(mean, limits.part_bytes)
        if len(mean) > limits.parts:
            raise LinkRefused(Reply.MALFORMED, f"a mean of {len(mean)} parts, at most {limits.parts} may be")
    if sum(len(part) for mean in means for part in mean) > limits.total_bytes:
        raise LinkRefused(Reply.MALFORMED, "more bytes of means than anybody keeps")


def _check_sizes(payloads: Sequence[bytes], max_bytes: int) -> None:
    longest = max(map(len, payloads), default=0)
    if longest > max_bytes:
        raise LinkRefused(Reply.MALFORMED, f"a part has {longest} bytes, at most {max_bytes} may be")


class MemoryRuntime:
    """`diloco.transport.endpoint.Runtime` for one address of the in-memory network."""

    def __init__(self, network: MemoryNetwork, loop: asyncio.AbstractEventLoop, address: str, rpc_s: float) -> None:
        self.loop, self.link = loop, network.link(rpc_s)
        self._network, self._address = network, address

    def serve(self, service: Service, listen: str) -> str:
        """Let `service` answer at this address of the in-memory network from now on."""
        self._network.attach(self._address, service)
        return self._address

    def answer_of(self, address: str) -> Welcome | None:
        """None: no member on the in-memory network has a directory to ask for."""


class MemoryEndpoint:
    """`diloco.transport.endpoint.Endpoint` on the in-memory network, and in place of its directory an empty one.

    `runtime`: a `MemoryRuntime`, or what has its methods. `welcome` is that of the member to join through; None: the
    peer founds the run.
    """

    def __init__(self, site: Site, runtime: Any, welcome: Welcome | None) -> None:
        self.site, self.runtime, self.welcome = site, runtime, welcome
        self.directory = self

    # ------------------------------------------------------------ the empty directory

    addresses = ()

    private = False
    """The in-memory network has no secret."""

    def lookup(self) -> dict[str, None]:
        """No members: on the in-memory network a peer has them from its welcome, and from other members."""
        return {}

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """Does nothing: the in-memory network has no directory, and no correctness rests on one."""

    def appear(self, exchange: object) -> MemoryEndpoint:
        """The presence of a peer in the in-memory network's empty directory."""
        return self

    def stop(self) -> None:
        """Announce nothing more in the in-memory network's empty directory: does nothing."""

    def end(self) -> None:
        """Withdraw announcements from the in-memory network's empty directory: does nothing."""

    def close(self) -> None:
        """Does nothing: the in-memory network goes on without this peer."""
