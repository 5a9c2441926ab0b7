"""The disk of a simulated peer: the checkpoints that a later life finds."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.base.types import Commit
from diloco.outer.state import OuterState

if TYPE_CHECKING:
    from diloco.simulate.virtual.invariants import Pieces


@dataclass(frozen=True)
class SimulatedCheckpoint:
    """A simulated peer's checkpoint, in memory: the fields that `Peer.save` writes, and the progress of the local
    weights beyond the anchor."""

    state: OuterState
    commit: Commit | None
    local: Mapping[str, Tensor]
    """Empty when no tokens are uncommitted."""
    tokens: int
    blocks: int
    pieces: Pieces | None


class SimulatedLedger:
    """The ledger of one life of a simulated peer (`diloco.accounts.ledger.LogFile`), in memory."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self._data = bytearray()

    def read(self) -> bytes:
        return bytes(self._data)

    def append(self, data: bytes) -> None:
        if self.disk.full:
            self._data += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._data += data

    def sync(self) -> None:
        """Does nothing: a simulated ledger is in memory."""

    def truncate(self, size: int) -> None:
        del self._data[size:]

    def close(self) -> None:
        """Does nothing: a simulated ledger has no open file."""


@dataclass
class SimulatedDisk:
    """A simulated peer's disk of whole checkpoints: a new one replaces nothing before it is complete."""

    full: bool = False
    _kept: list[SimulatedCheckpoint] = field(default_factory=list)
    _first: SimulatedCheckpoint | None = None

    def save(self, snapshot: SimulatedCheckpoint) -> bool:
        """Keep a checkpoint on the simulated disk. False when there is no room."""
        if not self.full:
            self._kept = [*self._kept[-1:], snapshot]
            self._first = self._first or snapshot
        return not self.full

    def load(self) -> SimulatedCheckpoint | None:
        """The latest checkpoint on the simulated disk."""
        return self._kept[-1] if self._kept else None

    def forget(self) -> None:
        """A simulated loss of power: the latest checkpoint had not reached the platter."""
        self._kept = self._kept[:-1]

    def go_back(self) -> None:
        """Simulate that somebody brings back an old copy of the disk, with the first checkpoint on it."""
        self._kept = [self._first] if self._first is not None else []
