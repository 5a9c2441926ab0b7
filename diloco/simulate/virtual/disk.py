"""The disk of a simulated peer: real files in a folder of its own, and a disk beneath them that can fail."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from diloco.base.files import Disk

FIRST = "first"
"""Folder beside that of the disk: a copy of it with its first checkpoint."""


class SimulatedDisk:
    """A simulated peer's disk, on which each of its lives finds what those before it wrote."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.root, self.folder = name, root, root / name
        self.full = False
        self.loses = False
        """Something that was written to it was not kept."""
        self.put_away: list[Path] = []
        """Folders of disks that were taken out."""
        self._copy = root / f"{name}.{FIRST}"
        self._synced: dict[int, int] = {}
        """Bytes of each file, by its inode, that are on the disk for certain."""

    def append(self, descriptor: int, path: Path, data: bytes) -> None:
        """Write to a file of the disk. Half of the data is there, and OSError is raised, when it is full."""
        if self.full:
            self.loses = True
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.write(descriptor, data)

    def sync(self, descriptor: int, path: Path) -> None:
        """Keep the present content of a file also after a loss of power. Raises OSError when the disk is full."""
        if self.full:
            self.loses = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        status = os.fstat(descriptor)
        self._synced[status.st_ino] = status.st_size
        if path.name == "checkpoints" and not self._copy.exists():
            shutil.copytree(self.folder, self._copy)

    def lose_power(self, dice: Random) -> None:
        """Cut files off somewhere behind what was synced, as a loss of power does."""
        self.loses = True
        for path in sorted(self.folder.rglob("*")) if self.folder.exists() else ():
            if path.is_file() and path.name != "events.jsonl":
                there = path.stat().st_size
                certain = min(self._synced.get(path.stat().st_ino, 0), there)
                if there > certain:
                    os.truncate(path, dice.randint(certain, there))

    def go_back(self) -> None:
        """Somebody brings back an old copy of the disk, with the first checkpoint on it."""
        self.loses = True
        if self._copy.exists():
            shutil.rmtree(self.folder)
            shutil.copytree(self._copy, self.folder)

    def replaced(self) -> SimulatedDisk:
        """An empty disk in the place of this one."""
        return self._successor()

    def cloned(self) -> SimulatedDisk:
        """A copy of this disk in another machine."""
        other = self._successor()
        if self.folder.exists():
            shutil.copytree(self.folder, other.folder)
        return other

    def _successor(self) -> SimulatedDisk:
        other = SimulatedDisk(self.root, f"{self.name}+")
        other.put_away = [*self.put_away, self.folder]
        return other


class DiskOfTheMoment(Disk):
    """The disk of the simulated process to which something happens now."""

    def __init__(self, now: Callable[[], SimulatedDisk | None]) -> None:
        """`now`: returns that disk; None where the process is dead."""
        self._now = now

    def append(self, descriptor: int, path: Path, data: bytes) -> None:
        if (disk := self._now()) is not None:
            disk.append(descriptor, path, data)

    def sync(self, descriptor: int, path: Path) -> None:
        if (disk := self._now()) is not None:
            disk.sync(descriptor, path)
