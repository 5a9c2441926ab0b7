"""Virtual time: one queue of everything that is to happen, and an event loop for each simulated process.

A process has a clock of its own, which can jump. While it is stopped, nothing of it happens; once it is dead, nothing
ever does: no `finally` reaches the network or the disk, as after `kill -9`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, ParamSpec, TypeVar

from diloco.base.life import Life
from diloco.base.threads import InPlace
from diloco.simulate.virtual.ranks.threads import Died, SimulatedThread

T = TypeVar("T")
P = ParamSpec("P")

WORK_S = 0.004
"""Work of another thread, as averaging or hashing a part, takes about so long."""
MAX_AT_ONCE = 100_000
"""Callbacks at one moment: more are no progress."""
MAX_ENDED = 64
"""Tasks that ended and that a process still knows, besides as many as it has."""


class Happening:
    """A callback that is to happen to a process: what `asyncio.Handle` is, without a context of its own."""

    __slots__ = ("arguments", "callback", "cancelled", "loop", "when_s")

    def __init__(
        self, loop: ProcessLoop, when_s: float, callback: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self.loop, self.when_s, self.callback, self.arguments = loop, when_s, callback, arguments
        self.cancelled = False

    def cancel(self) -> None:
        """It is not to happen any more."""
        self.cancelled = True
        self.arguments = ()  # which may be large

    def when(self) -> float:
        """When it is to happen, by the clock of its process."""
        return self.when_s


class Timeline:
    """The order of everything that happens in a simulation, on this thread."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self.running: ProcessLoop | None = None
        """The process to which something happens now."""
        self.thread: SimulatedThread | None = None
        """The thread in which it happens, where the process has several."""
        self._ready: deque[Happening] = deque()
        self._timers: list[tuple[float, int, Happening]] = []
        self._order = count()
        self._at_once = 0
        """Number of events at this moment."""
        self._outside = ProcessLoop.on(self)
        """The loop of events that happen to no process."""

    def clock_s(self) -> float:
        """The clock of the process to which something happens now."""
        running = self.running
        return self.now_s + running.offset_s if running is not None else self.now_s

    def after(self, delay_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the simulation later in virtual time."""
        when_s = self.now_s + delay_s
        heapq.heappush(self._timers, (when_s, next(self._order), Happening(self._outside, when_s, function, arguments)))

    def advance(self, loop: ProcessLoop, seconds: float) -> None:
        """The clock of a process jumps forward: what it waits for comes so much earlier."""

        def sooner(entry: tuple[float, int, Happening]) -> tuple[float, int, Happening]:
            when_s, order, happening = entry
            mine = happening.loop is loop
            return (max(when_s - seconds, self.now_s), order, happening) if mine else entry

        self._timers = list(map(sooner, self._timers))
        heapq.heapify(self._timers)

    def until(self, end_s: float, well: Callable[[], bool], every_s: float) -> bool:
        """Let everything happen until this virtual time. True as soon as all is well, which is looked at regularly."""
        look_s = self.now_s
        try:
            while True:
                self._happen()
                if not self._timers or self._timers[0][0] > end_s:
                    self.now_s = max(self.now_s, end_s)
                    return well()
                when_s, _, happening = heapq.heappop(self._timers)
                if when_s > self.now_s:
                    self.now_s, self._at_once = when_s, 0
                    if when_s >= look_s:
                        look_s = when_s + every_s
                        if well():
                            heapq.heappush(self._timers, (when_s, -1, happening))
                            return True
                self._ready.append(happening)
        finally:
            events._set_running_loop(None)
            self.running = None

    def _happen(self) -> None:
        """Let everything happen that is to happen now."""
        ready, outside, enter, before = self._ready, self._outside, events._set_running_loop, None
        while ready:
            happening = ready.popleft()
            loop = happening.loop
            if happening.cancelled or loop.dead:
                continue
            if loop.stopped:
                loop.waiting.append(happening)
                continue
            self.events += 1
            self._at_once += 1
            if loop is not before:
                before = loop
                self.running = None if loop is outside else loop
                enter(loop)
            try:
                happening.callback(*happening.arguments)
            except Died:
                pass
            except Exception:
                if not loop.dead:
                    raise
            if self._at_once > MAX_AT_ONCE:
                raise RuntimeError("the same moment goes on and on")

    def alone(self, loop: ProcessLoop, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function as if it happened to a process."""
        before, self.running = (self.running, events._get_running_loop()), loop
        events._set_running_loop(loop)
        try:
            return function(*arguments)
        finally:
            self.running, going = before
            events._set_running_loop(going)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self.name = timeline, name
        self.offset_s = 0.0
        """Seconds by which this process's clock is ahead of virtual time."""
        self.work_s = WORK_S
        """Time that work of another thread takes."""
        self._worked_until_s: dict[Any, float] = {}
        """Time of the latest result of each thread: it gives them in order."""
        self.stopped = self.dead = False
        self.died_s = math.inf
        """Virtual time of its death."""
        self.waiting: list[Happening] = []
        """Callbacks for when it goes on."""
        self._tasks: list[asyncio.Task[Any]] = []
        """In the order in which they began. Some have ended."""
        self._most_tasks = MAX_ENDED
        self.threads: list[SimulatedThread] = []
        """Those that have not ended, of a process that has several."""
        self._life: Life[None] | None = None
        self._next: Happening | None = None
        """When its life goes on at the latest."""

    @classmethod
    def on(cls, timeline: Timeline, name: str = "") -> ProcessLoop:
        """The event loop of a new process of that name. It has no sockets and signals: nobody asks for any."""
        return cls(timeline, name)

    def die(self) -> None:
        """The process is dead. What it was doing is let go of later, in good order: nothing of it is heard any more."""
        self.dead, self.stopped, self.waiting = True, False, []
        self.died_s = self._timeline.now_s
        self._timeline.after(0.0, self._timeline.alone, self, self.bury)

    def bury(self) -> None:
        """Let go of all that a dead process was doing."""
        self.dead = True
        tasks, self._tasks = self._tasks, []
        lives = [self._life] if self._life is not None else []
        self.bury_threads()
        for work in (*lives, *(task.get_coro() for task in tasks)):
            with suppress(BaseException):
                work.close()

    def bury_threads(self) -> None:
        """Let go of what the threads of a dead process were doing, but for the one that runs now."""
        for thread in self.threads[:]:
            if thread is not self._timeline.thread:
                self.threads.remove(thread)
                thread.bury()

    def go_on(self) -> None:
        """End a stop of the process."""
        self.stopped = False
        self._timeline._ready.extend(self.waiting)
        self.waiting = []

    def jump(self, seconds: float) -> None:
        """The clock of the process jumps forward."""
        self._timeline.advance(self, seconds)
        self.offset_s += seconds

    def live(self, life: Life[None], over: Callable[[Exception | None], None]) -> None:
        """Push a life on, as `diloco.run.blocking.block` does. In the end `over` gets its error, or None."""
        self._life = life

        def go_on() -> None:
            self._next = None
            try:
                wanted = next(life)
            except StopIteration:
                over(None)
            except Exception as error:
                over(error)
            else:
                latest = self._next = self.call_later(wanted.seconds, go_on)
                if wanted.future is not None:
                    wanted.future.add_done_callback(lambda _: go_on_now(latest))

        def go_on_now(latest: Happening) -> None:
            if latest is self._next:
                latest.cancel()
                self._next = self.call_soon(go_on)

        go_on()

    def reports(self, error: Exception) -> None:
        """An error ends the simulation even where the process would not look at it."""
        self._timeline.after(0.0, _raise, error)

    def report_errors(self, function: Callable[P, T], kind: type[Exception]) -> Callable[P, T]:
        """The function; an error of this kind ends the simulation even where the process would not look at it."""

        def reported(*arguments: P.args, **named: P.kwargs) -> T:
            try:
                return function(*arguments, **named)
            except kind as error:
                self.reports(error)
                raise

        return reported

    # ------------------------------------------------------------ what asyncio asks of a loop

    def time(self) -> float:
        """The process's own clock, in seconds."""
        return self._timeline.now_s + self.offset_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Happening:
        """Have a callback happen to the process, after those that are to happen now."""
        happening = Happening(self, 0.0, callback, args)
        self._timeline._ready.append(happening)
        return happening

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Happening:
        """Have a callback happen to the process so many seconds later."""
        return self.call_at(self._timeline.now_s + self.offset_s + delay, callback, *args)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Happening:
        """Have a callback happen to the process at a time of its clock."""
        happening = Happening(self, when, callback, args)
        timeline = self._timeline
        at_s = max(when - self.offset_s, timeline.now_s)
        heapq.heappush(timeline._timers, (at_s, next(timeline._order), happening))
        return happening

    def create_future(self) -> asyncio.Future[Any]:
        """A future of the process."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **named: Any) -> asyncio.Task[T]:  # type: ignore[override]
        """A task of the process."""
        task = asyncio.Task(coro, loop=self, **named)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._most_tasks = 2 * len(self._tasks) + MAX_ENDED
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do work of another thread of the process: at once, but its result takes its time."""
        done, later = InPlace().submit(func, *args), self.create_future()
        at_s = self.time() + self.work_s
        if executor is not None:  # else any of several threads does it
            at_s = self._worked_until_s[executor] = max(at_s, self._worked_until_s.get(executor, at_s))
        self.call_at(at_s, _settle, later, done)
        return later

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Does nothing: what nothing caught goes through the timeline."""

    get_debug = staticmethod(bool)
    """No, by a call that costs nothing: asyncio asks for every future."""

    def is_running(self) -> bool:
        """Whether the process lives."""
        return not self.dead

    def is_closed(self) -> bool:
        """Whether the process is dead."""
        return self.dead


def _raise(error: Exception) -> None:
    raise error


def _settle(later: asyncio.Future[T], done: Any) -> None:
    if later.done():
        return
    error = done.exception()
    if error is None:
        later.set_result(done.result())
    else:
        later.set_exception(error)
