"""The thread that writes a simulated peer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco.base.errors import DilocoError
from diloco.simulate.virtual.timeline import Died
from diloco.storage.saving import Saver

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess

WRITING_SHARE = 0.4
"""Time after which a checkpoint is written, as a share of a round: inner steps come before it."""


class SimulatedSaving:
    """Writes a simulated peer's checkpoints later than it is asked; death can come before or in the middle of one."""

    def __init__(self, process: SimulatedProcess, saver: Saver) -> None:
        self._process, self._saver = process, saver
        self._work: Callable[[], object] | None = None
        self._done: Callable[[], None] | None = None
        """Tells that it is written, once syncs that are late have ended."""
        saver._begin, saver.finish = self._begin, self._finish  # type: ignore[method-assign]

    def _begin(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._saver._writing = future
        records = self._process.records
        records.begins()

        def write() -> None:
            try:
                self._done = partial(future.set_result, work())
                records.complete()
            except DilocoError as error:
                self._done = partial(future.set_exception, error)
            self._process.loop.call_later(self._process.disk.owed(), self._end)

        self._work = write
        self._process.loop.call_later(WRITING_SHARE * self._process.world.plan.round_s, self._write)
        return future

    def _write(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        process, disk = self._process, self._process.disk
        disk.last_syncs = process.syncs_to_death
        try:
            work()
        except Died:
            disk.as_it_died()
            process.die("in the middle of a checkpoint")
        if process.syncs_to_death >= 0:
            disk.last_syncs = -1
            process.die("when a checkpoint was complete")

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()

    def _finish(self, timeout_s: float | None = None) -> None:
        """Whoever waits for the thread, on the training side, waits for all of it."""
        self._write()
        self._end()
