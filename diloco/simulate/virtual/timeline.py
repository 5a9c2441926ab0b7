"""Virtual time: one queue of everything that is to happen, and an event loop for each simulated process.

A process has a clock of its own, which can jump. While it is stopped, nothing of it happens; once it is dead, nothing
ever does: no `finally` reaches the network or the disk, as after `kill -9`.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

from diloco.base.threads import InPlace

T = TypeVar("T")

WORK_S = 0.004
"""Work of another thread, as averaging or hashing a part, takes about so long."""
MAX_AT_ONCE = 100_000
"""Callbacks at one moment: more are no progress."""


class Timeline:
    """The order of everything that happens in a simulation, on this thread."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self.failure: BaseException | None = None
        """An error that nothing caught."""
        self.running: ProcessLoop | None = None
        """The process to which something happens now."""
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._order = count()
        self._outside = ProcessLoop.on(self)
        """The loop of events that happen to no process."""

    def clock_s(self) -> float:
        """The clock of the process to which something happens now."""
        return self.running.time() if self.running is not None else self.now_s

    def after(self, delay_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the simulation later in virtual time."""
        self.put_at(self.now_s + delay_s, asyncio.Handle(function, arguments, self._outside))

    def put(self, handle: asyncio.Handle) -> None:
        """Have a callback happen now, after all others that are to happen now."""
        self._ready.append(handle)

    def put_at(self, when_s: float, handle: asyncio.Handle) -> None:
        """Have a callback happen at a virtual time."""
        heapq.heappush(self._timers, (when_s, next(self._order), handle))

    def advance(self, loop: ProcessLoop, seconds: float) -> None:
        """The clock of a process jumps forward: what it waits for comes so much earlier."""

        def sooner(entry: tuple[float, int, asyncio.Handle]) -> tuple[float, int, asyncio.Handle]:
            when_s, order, handle = entry
            mine = handle._loop is loop  # type: ignore[attr-defined]
            return (max(when_s - seconds, self.now_s), order, handle) if mine else entry

        self._timers = list(map(sooner, self._timers))
        heapq.heapify(self._timers)

    def until(self, end_s: float, well: Callable[[], bool], every_s: float) -> bool:
        """Let everything happen until this virtual time. True as soon as all is well, which is looked at regularly."""
        look_s, at_once = self.now_s, 0
        while True:
            while self._ready:
                self._happen(self._ready.popleft())
                at_once += 1
                if at_once > MAX_AT_ONCE:
                    raise RuntimeError("the same moment goes on and on")
            if not self._timers or self._timers[0][0] > end_s:
                self.now_s = max(self.now_s, end_s)
                return well()
            when_s, _, handle = heapq.heappop(self._timers)
            if when_s > self.now_s:
                self.now_s, at_once = when_s, 0
                if when_s >= look_s:
                    look_s = when_s + every_s
                    if well():
                        heapq.heappush(self._timers, (when_s, -1, handle))
                        return True
            self._ready.append(handle)

    def _happen(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        loop: ProcessLoop = handle._loop  # type: ignore[attr-defined]
        if loop.stopped:
            loop.waiting.append(handle)
        elif not loop.dead:
            self.events += 1
            self.running = None if loop is self._outside else loop
            events._set_running_loop(loop)
            try:
                handle._run()
            except Died:
                pass
            finally:
                events._set_running_loop(None)
                self.running = None
            if self.failure is not None:
                raise self.failure

    def alone(self, loop: ProcessLoop, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function as if it happened to a process."""
        before, self.running = self.running, loop
        events._set_running_loop(loop)
        try:
            return function(*arguments)
        finally:
            self.running = before
            events._set_running_loop(before)


class Died(SystemExit):
    """Ends what a simulated process was just doing when it died."""


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self.name = timeline, name
        self.offset_s = 0.0
        """Seconds by which this process's clock is ahead of virtual time."""
        self.stopped = self.dead = False
        self.waiting: list[asyncio.Handle] = []
        """Callbacks for when it goes on."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    def on(cls, timeline: Timeline, name: str = "") -> ProcessLoop:
        """The event loop of a new process of that name. It has no sockets and signals: nobody asks for any."""
        return cls(timeline, name)

    def die(self) -> None:
        """The process is dead. What it was doing is let go of later, in good order: nothing of it is heard any more."""
        self.dead, self.stopped, self.waiting = True, False, []
        self._timeline.after(0.0, self._timeline.alone, self, self.bury)

    def bury(self) -> None:
        """Let go of all that a dead process was doing."""
        self.dead = True
        for task in list(self._tasks):
            with suppress(BaseException):
                task.get_coro().close()
        self._tasks.clear()

    def go_on(self) -> None:
        """End a stop of the process."""
        self.stopped = False
        for handle in self.waiting:
            self._timeline.put(handle)
        self.waiting = []

    def jump(self, seconds: float) -> None:
        """The clock of the process jumps forward."""
        self._timeline.advance(self, seconds)
        self.offset_s += seconds

    # ------------------------------------------------------------ what asyncio asks of a loop

    def time(self) -> float:
        """The process's own clock, in seconds."""
        return self._timeline.now_s + self.offset_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Have a callback happen to the process, after those that are to happen now."""
        handle = asyncio.Handle(callback, args, self, context)
        self._timeline.put(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Have a callback happen to the process so many seconds later."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Have a callback happen to the process at a time of its clock."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timeline.put_at(max(when - self.offset_s, self._timeline.now_s), handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """A future of the process."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **named: Any) -> asyncio.Task[T]:  # type: ignore[override]
        """A task of the process."""
        task = asyncio.Task(coro, loop=self, **named)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do work of another thread of the process: at once, but its result takes its time."""
        done, later = InPlace().submit(func, *args), self.create_future()
        self.call_later(WORK_S, _settle, later, done)
        return later

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that nothing in a callback of the process caught ends the simulation."""
        if "handle" in context and not self.dead:
            self._timeline.failure = self._timeline.failure or context["exception"]

    def get_debug(self) -> bool:
        """No: it would take time."""
        return False

    def is_running(self) -> bool:
        """Whether the process lives."""
        return not self.dead

    def is_closed(self) -> bool:
        """Whether the process is dead."""
        return self.dead

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a callback that was cancelled is passed over in its turn."""


def _settle(later: asyncio.Future[T], done: Any) -> None:
    if later.done():
        return
    error = done.exception()
    if error is None:
        later.set_result(done.result())
    else:
        later.set_exception(error)
