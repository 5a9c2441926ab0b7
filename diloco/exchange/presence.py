"""Keeps this peer's record in the directory fresh, and looks for members there when it knows too few."""

from __future__ import annotations

import threading

from diloco.exchange.dht import ANNOUNCE_EVERY_S, Directory
from diloco.exchange.engine import Exchange

LOOK_AGAIN_S = 10.0
"""How often a peer looks for members when it is outside the view, or most of the view cannot be reached."""


class Presence:
    """A daemon thread, since the directory's calls block."""

    def __init__(self, directory: Directory, exchange: Exchange) -> None:
        self._directory = directory
        self._exchange = exchange
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            me = self._exchange.machine.me
            self._directory.announce(me, max(self._exchange.machine.version, 0))
            looking = not self._exchange.in_view or self._exchange.machine.alone
            if looking:
                self._exchange.meet(list(self._directory.lookup().values()))
            if self._ended.wait(LOOK_AGAIN_S if looking else ANNOUNCE_EVERY_S):
                return

    def end(self) -> None:
        """Take the record back."""
        self._ended.set()
        self._thread.join(5.0)
        self._directory.withdraw(self._exchange.machine.me.peer)
