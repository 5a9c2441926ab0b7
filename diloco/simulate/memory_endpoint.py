"""A peer's way out of a process that it never leaves: `diloco.transport.endpoint.Endpoint` on a network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco.config.site import Site
from diloco.protocol.streams import Welcome
from diloco.simulate.memory_link import MemoryNetwork
from diloco.transport.link import Service


class MemoryRuntime:
    """`diloco.transport.runtime.Runtime` for one address of that network."""

    def __init__(self, network: MemoryNetwork, loop: asyncio.AbstractEventLoop, address: str, rpc_s: float) -> None:
        self.loop, self.link = loop, network.link(rpc_s)
        self._network, self._address = network, address

    def serve(self, service: Service, listen: str) -> str:
        """`service` answers at this address from now on."""
        self._network.attach(self._address, service)
        return self._address

    def answer_of(self, address: str) -> Welcome | None:
        """Nobody has another's directory to ask for."""


class MemoryEndpoint:
    """Whoever made it has asked a member for its `welcome`; None: the peer founds the run."""

    def __init__(self, site: Site, runtime: MemoryRuntime, welcome: Welcome | None) -> None:
        self.site, self.runtime, self.welcome = site, runtime, welcome
        self.directory = self

    # ------------------------------------------------------------ a directory that nobody keeps

    addresses = ()

    def lookup(self) -> dict[str, None]:
        """Members are known by the welcome, and by what others tell."""
        return {}

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """Nothing about correctness rests on it."""

    def appear(self, exchange: object) -> MemoryEndpoint:
        """The presence in it."""
        return self

    def stop(self) -> None:
        """Say nothing more."""

    def end(self) -> None:
        """Take back what was said."""

    def close(self) -> None:
        """The network goes on without this peer."""
