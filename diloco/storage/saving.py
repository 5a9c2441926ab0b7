"""Saving while training goes on: the training thread takes a copy in host memory, and another thread writes it.

Every rank of an island has a `Saver` and writes what `writers_of` gives it. Rank 0 has a `Keeper`, which tells what
came of it.

    training thread    copies what inner steps will move (`live`), keeps references to what nobody writes to (`kept`)
    writing thread     waits for rank 0's folder; writes, syncs and hashes this rank's files; tells rank 0, which ends

Host memory: what this rank writes of `live`, once, used again by the next checkpoint; and of `kept` what is replaced
while it is being written.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError
from diloco.base.life import Life, answered
from diloco.island import Island
from diloco.island.slices import Slice, Slices, chosen, offered, writers_of
from diloco.observe.events import CheckpointWritten, Event, Remark, Warned
from diloco.storage.checkpoint import save, save_part
from diloco.storage.tensor_files import JsonValue

logger = logging.getLogger(__name__)

T = TypeVar("T")
Contents = tuple[dict[str, list[Slice]], dict[str, JsonValue]]
"""Groups of tensors that nobody writes to, and numbers."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete."""

    path: Path
    size_bytes: int
    at_s: float
    """By `monotonic_s`."""


class Saver:
    """One rank's part in saving. One checkpoint is written at a time; all ranks begin each together."""

    def __init__(self, island: Island) -> None:
        """All ranks make theirs together."""
        self._island, self._aside = island, island.aside()
        self._offer = ""
        """What this rank offered last."""
        self._writers: dict[str, int] = {}
        """What came of it."""
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[object] | None = None

    def save(
        self, directory: Path, version: int, kept: Slices, live: Slices, meta: Mapping[str, JsonValue], keep: int
    ) -> Future[Written]:
        """On rank 0: begin a checkpoint. `live` is copied, `kept` nobody may write to. It may come to ResourceError."""
        mine = self._taken(kept, live)

        def write() -> Written:
            path = save(directory, version, mine, meta, keep, self._aside)
            return Written(path, sum(file.stat().st_size for file in path.iterdir()), monotonic_s())

        return self._begin(write)

    def save_part(self, kept: Slices, live: Slices) -> None:
        """On the other ranks, with rank 0."""
        self._begin(partial(save_part, self._taken(kept, live), self._aside))

    def finish(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written any more, whatever comes of it."""
        if self._writing is not None:
            wait_for([self._writing], timeout_s)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        found: Future[T] = Future()
        self._writing = found  # type: ignore[assignment]
        # A daemon: a process that must end does not wait for a disk. What was begun is then swept away.
        threading.Thread(target=_run, args=(found, work), name="checkpoint", daemon=True).start()
        return found

    def _taken(self, kept: Slices, live: Slices) -> Slices:
        """What this rank writes, such that nobody writes to it."""
        self.finish()  # on other ranks than 0 the last one's thread may still have to end; its copies are used again
        groups = {name: [*kept.get(name, ()), *live.get(name, ())] for name in {**kept, **live}}
        moving = {id(one) for slices in live.values() for one in slices}
        mine = chosen(groups, self._agreed(offered(groups)), self._island.rank)
        taken = {
            group: [self._copy(group, one) if id(one) in moving else one for one in slices]
            for group, slices in mine.items()
        }
        if self._island.device.type == "cuda":
            torch.cuda.synchronize(self._island.device)
        return taken

    def _agreed(self, offer: dict[str, int]) -> dict[str, int]:
        """Who writes what. The ranks tell each other what they hold only when that has changed on one of them."""
        before, self._offer = self._offer, json.dumps(offer)
        if self._island.mean(float(self._offer != before)) > 0:
            self._writers = writers_of(list(map(json.loads, self._island.gather(self._offer))))
        return self._writers

    def _copy(self, group: str, one: Slice) -> Slice:
        """In memory that is used again by the next checkpoint: fresh pages cost more than the copy."""
        key = f"{group}/{one.box.key}"
        copy = self._copies.get(key)
        if copy is None or copy.shape != one.local.shape or copy.dtype != one.local.dtype:
            shape, dtype, pinned = one.local.shape, one.local.dtype, one.local.is_cuda
            copy = self._copies[key] = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        return Slice(one.box, copy.copy_(one.local.detach(), non_blocking=True))


def _run(found: Future[T], work: Callable[[], T]) -> None:
    try:
        found.set_result(work())
    except BaseException as error:
        found.set_exception(error)


@dataclass(frozen=True)
class _Begun:
    version: int
    since_s: float
    held_s: float
    """How long the training thread was held up."""
    written: Future[Written]


class Keeper:
    """A peer's checkpoints, on rank 0: when there is time for one, and what is told of it."""

    def __init__(
        self, publish: Callable[[Event], None], remark: Callable[[Event], None], begin: Callable[[], Future[Written]]
    ) -> None:
        """`publish`: an event of the run's; `remark`: one of this process's. `begin`: has all ranks begin one."""
        self._publish, self._remark, self._begin = publish, remark, begin
        self._begun: _Begun | None = None

    def due(self, version: int) -> None:
        """Begin a checkpoint, unless the last one is still being written: it then passes this version over.

        A full disk must not end a run: the next version tries again, and the last checkpoint is still there.
        """
        self.look()
        if self._begun is None:
            self._start(version)
        else:
            text = f"no checkpoint of version {version}: that of version {self._begun.version} is still being written"
            self._remark(Remark(text))

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._begun is not None and not self._begun.written.done()

    def look(self) -> None:
        """Say what came of the last one, if that is known by now."""
        if self._begun is not None and self._begun.written.done():
            begun, self._begun = self._begun, None
            error = begun.written.exception()
            if error is None:
                self._written(begun, begun.written.result())
            elif isinstance(error, ResourceError):
                logger.warning("%s; %s", error.cause, error.fix)
                self._remark(Warned(f"no checkpoint: {error.cause}"))
            else:
                raise error

    def last(self, version: int) -> Life[Path]:
        """Write one, after the one that is being written. Raises ResourceError."""
        if self._begun is not None:
            with suppress(ResourceError):
                yield from answered(self._begun.written)
            self.look()
        begun = self._start(version)
        written = yield from answered(begun.written)
        self._begun = None
        self._written(begun, written)
        return written.path

    def _start(self, version: int) -> _Begun:
        since_s = monotonic_s()
        written = self._begin()
        self._begun = _Begun(version, since_s, monotonic_s() - since_s, written)
        return self._begun

    def _written(self, begun: _Begun, written: Written) -> None:
        total_s = written.at_s - begun.since_s
        self._publish(CheckpointWritten(begun.version, total_s, begun.held_s, written.size_bytes))
