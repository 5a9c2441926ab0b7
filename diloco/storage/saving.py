"""Saving and restoring a peer: the contents of its line's checkpoint, written while training goes on.

Every rank of an island has a `Saver` and writes the slices that `writers_of` gives it. Rank 0 has a
`CheckpointSchedule`, which begins checkpoints and publishes their events.

    training thread    copies what inner steps will move (`live`), keeps references to what nobody writes to (`kept`)
    writing thread     waits for rank 0's folder; writes, syncs and hashes this rank's files; reports to rank 0, which
                       ends the checkpoint

Host memory: what this rank writes of `live`, once, used again by the next checkpoint; and of `kept` what is replaced
while it is being written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError
from diloco.base.life import Life, answered
from diloco.base.threads import aside
from diloco.config.contract import Contract
from diloco.island import Island
from diloco.island.slices import Box, Slice, Slices, check_tiled
from diloco.observe.events import CheckpointWritten, Event, Remark, Warned
from diloco.outer.line import Line, UncommittedProgress, adopt
from diloco.outer.merge import Eager
from diloco.outer.state import OuterState
from diloco.storage.checkpoint import Checkpoint, flat_buffers, flat_slices, outer_state, read_together, save, save_part
from diloco.storage.disk import JsonValue

logger = logging.getLogger(__name__)

T = TypeVar("T")
Emit = Callable[[Event], None]
Contents = tuple[dict[str, list[Slice]], dict[str, JsonValue]]
"""Contents of a checkpoint: groups of tensors that nobody writes to, and numbers."""


@dataclass(frozen=True)
class Written:
    """A complete checkpoint on the disk."""

    path: Path
    size_bytes: int
    at_s: float
    """Time of its completion, by `monotonic_s`."""


class Saver:
    """Writer of one rank's files of a checkpoint. One is written at a time; all ranks begin each together."""

    def __init__(self, island: Island) -> None:
        """Make the saver of this rank, together with all other ranks."""
        self._island, self._aside = island, island.aside()
        self._offer = ""
        """Slices that this rank holds, as `offered` named them last."""
        self._writers: dict[str, int] = {}
        """The rank that writes each slice, agreed upon from the offers of all ranks."""
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[object] | None = None

    def save(
        self, directory: Path, version: int, kept: Slices, live: Slices, meta: Mapping[str, JsonValue], keep: int
    ) -> Future[Written]:
        """Begin a checkpoint on rank 0: `live` is copied, `kept` must not change. The future raises ResourceError."""
        mine = self._taken(kept, live)

        def write() -> Written:
            path = save(directory, version, mine, meta, keep, self._aside)
            try:
                size_bytes = sum(file.stat().st_size for file in path.iterdir())
            except OSError:  # it is complete, and somebody has moved it already
                size_bytes = 0
            return Written(path, size_bytes, monotonic_s())

        return self._begin(write)

    def save_part(self, kept: Slices, live: Slices) -> None:
        """Begin a checkpoint on another rank, together with rank 0."""
        self._begin(partial(save_part, self._taken(kept, live), self._aside))

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until no checkpoint is being written, whether or not it succeeds."""
        if self._writing is not None:
            wait([self._writing], timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait for a checkpoint that is being written, and close the connections over which ranks write one."""
        self.finish(timeout_s)
        if self._writing is None or self._writing.done():
            self._aside.hang_up()

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        # A process that must end does not wait for a disk. What was begun is then swept away.
        found = aside("checkpoint", work)
        self._writing = found  # type: ignore[assignment]
        return found

    def _taken(self, kept: Slices, live: Slices) -> Slices:
        """Slices that this rank writes to a checkpoint, none of which changes any more: `live` ones are copied."""
        self.finish()  # on other ranks than 0 the last one's thread may still have to end; its copies are used again
        groups = {name: [*kept.get(name, ()), *live.get(name, ())] for name in {**kept, **live}}
        before, self._offer = self._offer, json.dumps(offered(groups))
        if self._island.mean(float(self._offer != before)) > 0:  # some rank holds other slices than at the last one
            self._writers = writers_of(list(map(json.loads, self._island.gather(self._offer))))
        moving = {id(one) for slices in live.values() for one in slices}
        taken = {
            group: [self._copy(group, one) if id(one) in moving else one for one in slices]
            for group, slices in chosen(groups, self._writers, self._island.rank).items()
        }
        for device in {one.local.device for slices in live.values() for one in slices if one.local.is_cuda}:
            torch.cuda.synchronize(device)  # a model may be on several
        return taken

    def _copy(self, group: str, one: Slice) -> Slice:
        """Copy of a slice for a checkpoint, in memory that the next one uses again: fresh pages cost more than that."""
        key = f"{group}/{one.box.key}"
        copy = self._copies.get(key)
        if copy is None or copy.shape != one.local.shape or copy.dtype != one.local.dtype:
            shape, dtype, pinned = one.local.shape, one.local.dtype, one.local.is_cuda
            copy = self._copies[key] = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        return Slice(one.box, copy.copy_(one.local.detach(), non_blocking=True))


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that is being written."""

    version: int
    since_s: float
    held_s: float
    """Seconds for which the training thread was held up."""
    written: Future[Written]


class CheckpointSchedule:
    """Schedule of a peer's checkpoints on rank 0: begins each when the last is complete, and publishes its event."""

    def __init__(
        self,
        every: int,
        publish: Callable[[CheckpointWritten], None],
        remark: Emit,
        begin: Callable[[], Future[Written]],
    ) -> None:
        """`every`: versions between checkpoints; 0: none is due. `publish` takes the event of a checkpoint, `remark`
        that of a version without one. `begin`: all ranks begin one."""
        self._every, self._publish, self._remark, self._begin = every, publish, remark, begin
        self._begun: _Begun | None = None
        self._lacking = True
        """None was begun since this peer copied its state, or the last could not be written."""

    def copied(self) -> None:
        """The next version is due, whatever its number: the log leads on from checkpoints alone, and until one is there
        a voter that is restarted has lost its vote."""
        self._lacking = True

    def due(self, version: int) -> None:
        """Begin a checkpoint of this version, if one is due.

        A full disk must not end a run: the next version tries again, and the last checkpoint is still there.
        """
        if self._every and (self._lacking or version % self._every == 0):
            self._start(version)

    def _start(self, version: int) -> None:
        """Begin a checkpoint, unless the last one is still being written: it then passes this version over."""
        self.look()
        if self._begun is not None:
            text = f"no checkpoint of version {version}: that of version {self._begun.version} is still being written"
            self._remark(Remark(text))
            return
        since_s, self._lacking = monotonic_s(), False
        written = self._begin()
        self._begun = _Begun(version, since_s, monotonic_s() - since_s, written)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._begun is not None and not self._begun.written.done()

    def look(self) -> None:
        """Publish the event of the last checkpoint, or warn that it failed, if it is done by now."""
        begun = self._begun
        if begun is None or not begun.written.done():
            return
        self._begun = None
        error = begun.written.exception()
        if error is None:
            written = begun.written.result()
            total_s = written.at_s - begun.since_s
            self._publish(CheckpointWritten(begun.version, total_s, begun.held_s, written.size_bytes))
        elif isinstance(error, ResourceError):
            self._lacking = True
            logger.warning("%s; %s", error.cause, error.fix)
            self._remark(Warned(f"no checkpoint: {error.cause}"))
        else:
            raise error

    def last(self, version: int) -> Life[Path]:
        """Write a checkpoint, after the one that is being written. Returns its folder. Raises ResourceError."""
        if self._begun is not None:
            with suppress(ResourceError):
                yield from answered(self._begun.written)
        self._start(version)
        assert self._begun is not None  # nothing was being written any more
        written = yield from answered(self._begun.written)
        self.look()
        return written.path


# ---------------------------------------------------------------- a line's contents


def save_line(line: Line, contract: Contract) -> Contents:
    """Contents of a line's checkpoint: references to buffers that are not overwritten meanwhile.

    Group `local` is there, empty, when the line may have uncommitted progress: the caller adds the weights as the ranks
    hold them (under `diloco.outer.line.weights_to_keep`).
    """
    groups = line_slices(line)
    if line.trained.tokens or line.remainder:
        groups["local"] = []
    return groups, {
        "peer": line.peer,
        "contract": contract.to_json(),
        "commit": line.commit.to_bytes().decode() if line.commit else None,
        "steps": [fragment.steps for fragment in line.state.fragments],
        "tokens": line.trained.tokens,
        "blocks": line.trained.blocks,
        "parameters": [[name, list(shape)] for name, shape in line.weights.shapes],
    }


def line_slices(line: Line) -> dict[str, list[Slice]]:
    """Slices that a checkpoint holds of a line's outer state, residuals, own shares in `eager` steps, on this rank."""
    own_share = line.merge.own if isinstance(line.merge, Eager) else {}
    buffers = {  # by group; each name begins with its fragment's index
        "outer": [*line.state.buffers()],
        "residual": [(str(index), tensor) for index, tensor in line.residuals.items()],
        "own": [(f"{index}/{name}", slot) for index, state in own_share.items() for name, slot in state.slots.items()],
    }
    groups: dict[str, list[Slice]] = {group: [] for group in buffers}
    for group, named in buffers.items():
        for name, flat in named:
            groups[group] += flat_slices(name, line.layout.fragments[int(name.partition("/")[0])], flat)
    return groups


def restore_line(line: Line, opened: Callable[[], Checkpoint]) -> None:
    """Take a line's outer state, residuals and own shares in `eager` steps from a checkpoint. All ranks together.

    Sets the parameters to the anchor; the caller reads local weights. Raises StateError on all ranks when one cannot.
    """

    def read() -> tuple[OuterState, dict[str, Tensor], dict[str, Tensor]]:
        checkpoint, layout, slots = opened(), line.layout, line.optimizer.slot_names
        state = outer_state(checkpoint, layout, line.optimizer)
        return state, flat_buffers(checkpoint, "residual", layout), flat_buffers(checkpoint, "own", layout, slots)

    state, residuals, own_share = read_together(line.ranks, read)
    adopt(line, state)
    line.residuals.update((int(index), flat) for index, flat in residuals.items())
    if isinstance(line.merge, Eager):
        for name, flat in own_share.items():
            index, _, slot = name.partition("/")
            own = line.merge.own.setdefault(int(index), line.optimizer.start(torch.zeros_like(flat)))
            line.merge.own[int(index)] = replace(own, slots={**own.slots, slot: flat})


def book_restored(line: Line, checkpoint: Checkpoint) -> None:
    """Take a line's commit and the counts of its uncommitted progress from a checkpoint, after `restore_line`.

    Rank 0 only. Raises StateError."""
    line.commit = checkpoint.commit
    line.trained = UncommittedProgress(checkpoint.value("tokens", int), checkpoint.value("blocks", int))
    line.remainder = "local" in checkpoint.groups
    line.since = line.state.version


# ---------------------------------------------------------------- writers of a checkpoint's slices


def offered(groups: Slices) -> dict[str, int]:
    """Slices that a rank could write into a checkpoint: bytes by slice, whose label is the same on all ranks. Empty
    slices are left out."""
    boxes = ((group, one) for group, slices in groups.items() for one in slices)
    return {_label(group, one.box): one.local.nbytes for group, one in boxes if one.local.numel() or one.box.whole}


def chosen(groups: Slices, writers: Mapping[str, int], rank: int) -> dict[str, list[Slice]]:
    """The slices that this rank writes into a checkpoint, by group."""
    return {
        group: [one for one in slices if writers.get(_label(group, one.box)) == rank]
        for group, slices in groups.items()
    }


def writers_of(offers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The rank that writes each slice of a checkpoint: of those that hold it the one with the fewest bytes so far, so
    that all have as much to write as copies allow. The same on all ranks. `offers`: `offered` of each rank.

    Raises ValueError when the slices do not make their tensors whole: nobody could read such a checkpoint.
    """
    holders: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        for label in offer:
            holders.setdefault(label, []).append(rank)
    tensors: dict[tuple[str, str], list[Box]] = {}
    for group, name, shape, offsets, extent in map(json.loads, holders):
        tensors.setdefault((group, name), []).append(Box(name, tuple(shape), tuple(offsets), tuple(extent)))
    for (_, name), boxes in tensors.items():
        check_tiled(name, boxes)
    sizes = {label: size for offer in offers for label, size in offer.items()}
    loads = [0] * len(offers)
    writers = {}
    for label in sorted(holders, key=lambda label: (len(holders[label]) > 1, -sizes[label], label)):
        writers[label] = min(holders[label], key=loads.__getitem__)
        loads[writers[label]] += sizes[label]
    return writers


def _label(group: str, box: Box) -> str:
    """The slice's name among all ranks that write a checkpoint together, from which its box can be read."""
    return json.dumps([group, box.name, box.shape, box.offsets, box.extent])
