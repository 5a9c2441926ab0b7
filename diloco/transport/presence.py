"""Keeps this peer's record in the directory fresh and the directory whole, and looks there for members."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Protocol

from diloco.base.clock import monotonic_s
from diloco.base.errors import UnreachableError, UsageError
from diloco.base.types import Member
from diloco.protocol.streams import Welcome
from diloco.transport.dht import ANNOUNCE_EVERY_S, Directory
from diloco.transport.dht_node import MAX_MEMBERS

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 10.0
"""Seconds between lookups when a peer is outside the view, or most of the view cannot be reached."""
MAX_PAUSE_S = 600.0
"""The longest pause between two attempts to mend the directory: it begins with `LOOK_AGAIN_S` and doubles."""


class Present(Protocol):
    """The exchange that is announced."""

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

    @property
    def others(self) -> Sequence[Member]:
        """Members that live, as far as it knows."""
        ...

    def meet(self, members: Sequence[Member]) -> None: ...


class Presence:
    """A daemon thread, since the directory's calls block.

    It keeps the directory whole, too. A node whose p2pd dies is started again, as another. And where members that we
    know are not found in our directory, it is another than theirs: nobody answered there when we came, or ours is a new
    one, or the network was cut. Then one of them is asked where its directory is now.
    """

    def __init__(self, directory: Directory, exchange: Present, hello: Callable[[str], Welcome | None]) -> None:
        """`hello`: what the member at an address says, None where nobody answers."""
        self._directory = directory
        self._exchange = exchange
        self._hello = hello
        self._pause_s = LOOK_AGAIN_S
        self._due_s: float | None = None  # None: the directory is whole
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                wait_s = self._turn()
            except (RuntimeError, CancelledError):  # the exchange's loop was closed
                if not self._ended.is_set():
                    raise

    def _turn(self) -> float:
        """Returns in how many seconds the next one is due."""
        if self._directory.revive():
            self._warn("ended", "the peer directory ended, as it does when its p2pd is killed: starting it again")
            return self._pause()
        self._directory.announce(self._exchange.me, max(self._exchange.version, 0))
        self._exchange.directory = self._directory.addresses  # it may have started only now
        found = self._directory.lookup()
        looking = self._exchange.alone
        if looking:
            self._exchange.meet(list(found.values()))
        every_s = LOOK_AGAIN_S if looking else ANNOUNCE_EVERY_S
        missing = [member for member in self._exchange.others if member.peer not in found]
        if not missing or len(found) >= MAX_MEMBERS:
            self._pause_s, self._due_s = LOOK_AGAIN_S, None
            self._warned.clear()
            return every_s
        return min(every_s, self._seek(missing))

    def _seek(self, missing: Sequence[Member]) -> float:
        """Join the directory of one of them when it is time: who has just come may only have to announce itself.
        Returns in how many seconds to try again."""
        now_s = monotonic_s()
        if self._due_s is not None and now_s < self._due_s:
            return self._due_s - now_s
        if self._due_s is not None:
            self._join_that_of(random.choice(missing))
        pause_s = self._pause()
        self._due_s = now_s + pause_s
        return pause_s

    def _join_that_of(self, member: Member) -> None:
        try:
            welcome = self._hello(member.address)
            if welcome is None or not welcome.directory:
                raise UnreachableError(f"{member.peer} tells of no peer directory", "look at its log")
            self._directory.join(welcome.directory)
        except TimeoutError:  # our own exchange has ended, as we are about to
            return
        except (UnreachableError, UsageError) as error:
            text = f"{error.cause}: members are not found in our peer directory, trying again ever more rarely"
            self._warn("apart", text)

    def _pause(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return pause_s

    def _warn(self, trouble: str, text: str) -> None:
        """Once for each trouble, until all is well again."""
        if trouble not in self._warned:
            self._warned.add(trouble)
            logger.warning("%s", text)

    def stop(self) -> None:
        """Say nothing more. What was said stays until it expires, as when the peer had died."""
        self._ended.set()

    def end(self) -> None:
        """Take the record back."""
        self.stop()
        self._thread.join(5.0)
        self._directory.withdraw(self._exchange.me.peer)
