"""The threads that write a simulated peer's checkpoints and logs: one of each for each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco.base.errors import DilocoError
from diloco.base.life import Life
from diloco.simulate.virtual.ranks.threads import Died
from diloco.storage.saving import Saver

if TYPE_CHECKING:
    from diloco.exchange.lane import Lane
    from diloco.simulate.virtual.process import SimulatedProcess

WRITING_SHARE = 0.4
"""Time after which a checkpoint is written, as a share of a round: inner steps come before it."""


class SimulatedSaving:
    """Writes a simulated peer's checkpoints later than it is asked; death can come before or in the middle of one."""

    def __init__(self, process: SimulatedProcess, saver: Saver, *, leads: bool = True) -> None:
        """`leads`: it is rank 0's, for whose folder those of other ranks wait."""
        self._process, self._saver, self._leads = process, saver, leads
        self._work: Callable[[], object] | None = None
        self._done: Callable[[], None] | None = None
        """Tells that it is written, once syncs that are late have ended."""
        saver._begin, saver.finish = self._begin, self._finish  # type: ignore[method-assign]

    def _begin(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._saver._writing = future
        process, records = self._process, self._process.records
        if self._leads:
            records.begins()

        def write() -> None:
            try:
                self._done = partial(future.set_result, work())
                if self._leads:
                    records.complete()
            except DilocoError as error:
                self._done = partial(future.set_exception, error)
            process.loop.call_later(process.disk.owed(), self._end)

        self._work = write
        process.loop.call_later(WRITING_SHARE * process.world.plan.round_s if self._leads else 0.0, self._begins)
        return future

    def _begins(self) -> None:
        """Write it now: where the ranks wait for each other, on a thread of its own."""
        if self._process.ranks is None:
            self._write()
        elif self._work is not None:
            self._process.ranks.start(self._life(), self._over)

    def _life(self) -> Life[None]:
        self._write()
        yield from ()

    def _over(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def _write(self) -> None:
        work, self._work = self._work, None
        process, disk = self._process, self._process.disk
        if work is None or not process.alive:  # what the dead let go of reaches no disk
            return
        if self._leads:
            disk.last_syncs = process.syncs_to_death
        try:
            work()
        except Died:
            thread = process.world.timeline.thread
            if thread is not None and thread.ends:  # the process died while this thread waited for another rank's
                raise
            process.loop.bury_threads()  # what they tidy up is undone
            disk.as_it_died()
            process.die("in the middle of a checkpoint")
        if self._leads and process.syncs_to_death >= 0:
            disk.last_syncs = -1
            process.die("when a checkpoint was complete")

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()

    def _finish(self, timeout_s: float | None = None) -> None:
        """Whoever waits for the thread, on the training side, waits for all of it."""
        if self._process.ranks is None:
            self._write()
            self._end()
        elif (writing := self._saver._writing) is not None:
            self._begins()
            self._process.ranks.wait_for(writing)


class SimulatedLog:
    """Writes the log of a simulated lane: at once, but a sync that is late ends later, and holds up nothing else."""

    def __init__(self, process: SimulatedProcess, lane: Lane) -> None:
        self._process, self._busy_until_s = process, 0.0
        lane._log._thread = self  # type: ignore[attr-defined]

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Do this after all that was submitted before."""
        process, done = self._process, Future[object]()
        with process.disk.beside() as late:
            result = work()
        now_s = process.world.now
        self._busy_until_s = max(self._busy_until_s, now_s) + late.pop()
        if self._busy_until_s > now_s:
            process.loop.call_later(self._busy_until_s - now_s, done.set_result, result)
        else:
            done.set_result(result)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """Nothing is left to end."""
