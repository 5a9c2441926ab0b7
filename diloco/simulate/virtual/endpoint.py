"""A simulated process's place on the network: `diloco.transport.endpoint` without sockets, and a full directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from diloco.base.life import POLL_S, Life, Wait
from diloco.protocol.streams import Welcome
from diloco.simulate.memory_link import MemoryEndpoint
from diloco.simulate.virtual.plans.setup import RPC_S
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service
from diloco.transport.sockets import SocketCounter

if TYPE_CHECKING:
    from diloco.run.past import PastRun
    from diloco.simulate.virtual.process import SimulatedProcess

LOOK_AGAIN_S = 10.0
"""Time between two looks into the directory."""
RETRY_S = 0.5
"""Pause of a process that nobody lets in."""


class SimulatedRuntime:
    """`diloco.transport.endpoint.Runtime` of a simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self.loop, self.link = process.loop, process.link

    def serve(self, service: Service, listen: str) -> str:
        """Let `service` answer at the address of the simulated process."""
        self._process.serve(service)  # type: ignore[arg-type]
        return self._process.address

    def answer_of(self, address: str) -> Welcome | None:
        """None: nobody is asked without a wait."""

    def close(self) -> None:
        """Does nothing: connections end with the process."""


def welcomed(process: SimulatedProcess) -> Life[Welcome]:
    """The welcome of a simulated member: of any that answers, of all whose addresses are known."""
    while True:
        for address in process.world.doors(process):
            asked: Future[Welcome] = Future()
            process.loop.create_task(_hello(process, address, asked))
            while not asked.done():
                yield Wait(asked, POLL_S)
            if asked.exception() is None:
                process.world.log(process.name, f"joins through {address.partition(':')[0]}")
                return asked.result()
        yield Wait(None, RETRY_S)


def asked(process: SimulatedProcess, past: PastRun) -> Life[Welcome | None]:
    """The welcome of a member of a simulated peer's last version, as `diloco.run.door.asked_members` has it: none where
    nobody answers, unless the run had gone on without this peer."""
    while True:
        for address in past.others:
            asking: Future[Welcome] = Future()
            process.loop.create_task(_hello(process, address, asking))
            while not asking.done():
                yield Wait(asking, POLL_S)
            if asking.exception() is None:
                return asking.result()
        if not past.was_left_out:
            return None
        yield Wait(None, RETRY_S)


async def _hello(process: SimulatedProcess, address: str, asked: Future[Welcome]) -> None:
    try:
        asked.set_result(await process.link.hello(address, RPC_S))
    except (LinkDown, LinkSlow, LinkRefused) as error:
        asked.set_exception(error)


class SimulatedEndpoint(MemoryEndpoint):
    """`diloco.transport.endpoint.Endpoint` of a simulated process, beside a directory that never fails."""

    def __init__(self, process: SimulatedProcess, welcome: Welcome | None) -> None:
        super().__init__(process.world.setup.site, SimulatedRuntime(process), welcome)
        self._process = process

    def appear(self, exchange: object) -> SimulatedPresence:  # type: ignore[override]
        """Look into the directory from now on."""
        presence = SimulatedPresence(self._process)
        self._process.loop.create_task(presence.look())
        return presence


class SimulatedPresence:
    """A simulated peer's looks into the directory, as `diloco.transport.dht.Presence` has them."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process, self._ended = process, False

    async def look(self) -> None:
        """Look into the directory when the simulated peer is outside the view, or alone."""
        exchange, world = self._process.exchange, self._process.world
        while not self._ended:
            if exchange.alone:
                exchange.seek(world.directory(self._process))
            await asyncio.sleep(LOOK_AGAIN_S)

    def stop(self) -> None:
        """Look no more."""
        self._ended = True

    end = stop


class NoSockets(SocketCounter):
    """No bytes are counted on sockets in a simulation."""

    def __init__(self) -> None:
        """Does nothing: there are no sockets."""

    def sample(self) -> None:
        """None: no socket is there to be counted."""
