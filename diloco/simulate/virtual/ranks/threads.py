"""Threads of a simulated process that wait in the middle of what they do, as those of several ranks for each other.

Only one thread of a whole simulation runs at a time: the timeline stands still meanwhile, and goes on when it waits.
"""

from __future__ import annotations

import math
import signal
import threading
from asyncio import events
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from diloco.base.life import Life

if TYPE_CHECKING:
    from diloco.simulate.virtual.timeline import Happening, ProcessLoop, Timeline


INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM})


class Died(SystemExit):
    """Ends what a simulated process was just doing when it died."""


class SimulatedThread:
    """A thread of a simulated process."""

    def __init__(
        self,
        timeline: Timeline,
        loop: ProcessLoop,
        work: Callable[[], object],
        over: Callable[[Exception | None], None],
    ) -> None:
        """`over`: told that the work has ended, with its error or None."""
        self._timeline, self._loop, self._work, self._over = timeline, loop, work, over
        self._mine, self._others = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._others.acquire()
        self._thread = threading.Thread(target=self._run, name=f"simulated {loop.name}", daemon=True)
        self._next: Happening | None = None
        """When it goes on at the latest."""
        self._waits: object = None
        """Its present wait; None: it runs, or is to go on."""
        self.ends = self._ended = False
        """Its process is dead; it has come to its end."""
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin, once all has happened that is to happen before."""
        self._loop.threads.append(self)
        self._next = self._loop.call_soon(self._go_on)

    def bury(self) -> None:
        """Let go of what the thread of a dead process was doing."""
        self.ends = True
        if self._thread.ident is not None and not self._ended:
            self._switch()
            self._thread.join()

    # ------------------------------------------------------------ on the simulation's own thread

    def _go_on(self) -> None:
        self._next = self._waits = None
        self._switch()
        if not self._ended:
            return
        self._loop.threads.remove(self)
        if isinstance(self._error, Exception):
            self._over(self._error)
        elif self._error is not None:
            raise self._error
        else:
            self._over(None)

    def _switch(self) -> None:
        """Let the thread run until it waits, or has ended."""
        held = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)  # they come when it waits
        before, self._timeline.thread = self._timeline.thread, self
        try:
            if self._thread.ident is None:
                self._thread.start()
            self._mine.release()
            self._others.acquire()
        finally:
            self._timeline.thread = before
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    # ------------------------------------------------------------ on this thread

    def _run(self) -> None:
        self._mine.acquire()
        try:
            events._set_running_loop(self._loop)
            with torch.inference_mode():
                self._work()
        except BaseException as error:
            self._error = error
        self._ended = True
        self._others.release()

    def live(self, life: Life[None]) -> None:
        """Push a life on, as `diloco.run.blocking.block` does."""
        with closing(life):
            for wanted in life:
                self.wait(wanted.seconds, wanted.future)

    def wait(self, seconds: float, future: Future[Any] | None = None) -> None:
        """Wait until the future is done, or somebody wakes this thread, but no longer than so many seconds."""
        if self.ends:
            raise Died
        self._next = self._loop.call_later(seconds, self._go_on) if seconds < math.inf else None
        this = self._waits = object()
        if future is not None:
            future.add_done_callback(lambda _: self.wake() if self._waits is this else None)
        self._others.release()
        self._mine.acquire()
        if self.ends:
            raise Died

    def until(self, there: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait, as long as somebody must wake this thread, until something is there. False: it was not in time."""
        end_s = self._loop.time() + seconds
        while not there():
            left_s = end_s - self._loop.time()
            if left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def wake(self) -> None:
        """Let this thread go on, if it waits: once all has happened that is to happen before."""
        if self._waits is None:
            return
        self._waits = None
        if self._next is not None:
            self._next.cancel()
        self._next = self._loop.call_soon(self._go_on)


class SimulatedCondition(threading.Condition):
    """A condition on which the threads of one simulated process wait."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._waiting: list[SimulatedThread] = []

    def __enter__(self) -> bool:
        """There is nothing to lock: only one thread runs."""
        return True

    def __exit__(self, *error: object) -> None:
        """There is nothing to unlock."""

    def wait_for(  # type: ignore[override]
        self, predicate: Callable[[], Any], timeout: float | None = None
    ) -> bool:
        """Have the simulated thread that runs now wait until the predicate holds. False: it did not in time."""
        thread = self._timeline.thread
        assert thread is not None
        self._waiting.append(thread)
        try:
            return thread.until(predicate, math.inf if timeout is None else timeout)
        finally:
            self._waiting.remove(thread)

    def notify_all(self) -> None:
        """Wake the simulated threads that wait."""
        for thread in self._waiting:
            thread.wake()
