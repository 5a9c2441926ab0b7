"""Keeps this peer's record in the directory fresh, and looks for members there when it knows too few."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from diloco.exchange.dht import ANNOUNCE_EVERY_S, Directory
from diloco.types import Member

LOOK_AGAIN_S = 10.0
"""How often a peer looks for members when it is outside the view, or most of the view cannot be reached."""


class Present(Protocol):
    """Who is announced: an exchange."""

    directory: tuple[str, ...]
    """Addresses of our directory node: what it tells others."""

    @property
    def me(self) -> Member: ...

    @property
    def version(self) -> int: ...

    @property
    def alone(self) -> bool:
        """Whether it knows too few others."""
        ...

    def meet(self, members: Sequence[Member]) -> None: ...


class Presence:
    """A daemon thread, since the directory's calls block."""

    def __init__(self, directory: Directory, exchange: Present) -> None:
        self._directory = directory
        self._exchange = exchange
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._directory.announce(self._exchange.me, max(self._exchange.version, 0))
            self._exchange.directory = self._directory.addresses  # it may have started only now
            looking = self._exchange.alone
            if looking:
                self._exchange.meet(list(self._directory.lookup().values()))
            if self._ended.wait(LOOK_AGAIN_S if looking else ANNOUNCE_EVERY_S):
                return

    def stop(self) -> None:
        """Say nothing more. What was said stays until it expires, as when the peer had died."""
        self._ended.set()

    def end(self) -> None:
        """Take the record back."""
        self.stop()
        self._thread.join(5.0)
        self._directory.withdraw(self._exchange.me.peer)
