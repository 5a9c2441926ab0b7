"""The disk of a simulated peer: real files in a folder of its own, and a disk beneath them that can fail.

It can be full, refuse to sync (EIO), take seconds for a sync, or say that it has synced what it only remembers. A loss
of power takes names and tails of files that were not synced. A death can come between two syncs of a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from diloco.base.files import Disk
from diloco.protocol.vote import VoteRecord
from diloco.simulate.virtual.ranks.threads import Died

if TYPE_CHECKING:
    from diloco.simulate.virtual.oracle.records import SavedProgress

FIRST = "first"
"""Folder beside that of the disk: a copy of it with its first checkpoint."""
LOST_SHARE = 0.5
"""Share of the names that were not synced and are gone after a loss of power."""
TORN_SHARE = 0.5
"""Share of the files cut off by a loss of power whose end is not only short: zeros or noise follow."""
TORN_BYTES = 64
FIRST_SHARE = 0.3
"""Share of the files written over of which a loss of power takes away the first new bytes, and not the last."""
UNSYNCED = ("events.jsonl", ".events.lock")
"""Files on which nothing rests that a loss of power may take."""
SYNCS = 5
"""A death in the middle of a checkpoint comes before one of the first so many syncs."""


class SimulatedDisk:
    """A simulated peer's disk, on which each of its lives finds what those before it wrote."""

    NOWHERE = (-1, "")

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.root, self.folder = name, root, root / name
        self.full = self.tight = self.broken = self.lying = False
        """No room is left; none for means, which are large; syncs fail; syncs only say that they are done."""
        self.late_s = 0.0
        """Time that a sync takes."""
        self.last_syncs = -1
        """Syncs that are left before a death in the middle of a checkpoint; below 0: there is none."""
        self.tears: Callable[[], None] | None = None
        """Ends the process in the middle of the next record of its ledger."""
        self.damaged = False
        """It lacks what was synced: by a flipped bit, an old copy, or lies about syncs and a loss of power."""
        self.rollbacks = 0
        """Times that an old copy took its place."""
        self.refusals = 0
        """Writes and syncs that it refused, as it was full or broken."""
        self.saved: list[SavedProgress] = []
        """Contents of all checkpoints that were begun on it."""
        self.durable = -1
        """Version of the newest checkpoint that must be there, whatever happens to its machine."""
        self.void: set[str] = set()
        """Commits of checkpoints on it that did not lead to the state that was copied last."""
        self.reach = self.NOWHERE
        """Version and commit to which that checkpoint and the log must lead."""
        self.promised: dict[tuple[int, str], int] = {}
        """The latest attempt that a voter on it has promised, by its life and the commit that it stood on."""
        self.bound: dict[int, VoteRecord] = {}
        """By life: the last record of what binds it that the disk took."""
        self.put_away: list[Path] = []
        """Folders of disks that were taken out."""
        self._owed_s = 0.0
        self._copy = root / f"{name}.{FIRST}"
        self._synced: dict[int, int] = {}
        """Bytes of each file, by its inode, that are on the disk for certain."""
        self._before: dict[int, list[tuple[int, bytes]]] = {}
        """Bytes of each file, by its inode, that were written over since its last sync, and where they stood."""
        self._names: dict[int, dict[str, int]] = {}
        """Names in each folder, by its inode, that are on the disk for certain, and the inodes that they name."""

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        """Write to a file of the disk. Half of the data is there, and OSError is raised, when it is full;
        or the process dies."""
        self._remember(descriptor, path, len(data))
        if self.full or self.tears is not None or (self.tight and path.parent.name == "log"):
            os.write(descriptor, data[: len(data) // 2])
            if self.tears is not None:
                dies, self.tears = self.tears, None
                dies()
            self.refusals += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.write(descriptor, data)

    def _remember(self, descriptor: int, path: Path, size: int) -> None:
        """Remember what is written over next."""
        status = os.fstat(descriptor)
        if status.st_size == 0:  # another file had this inode before
            self._synced.pop(status.st_ino, None)
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        at = status.st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
        if at < self._synced.get(status.st_ino, 0):
            with path.open("rb") as file:
                file.seek(at)
                self._before.setdefault(status.st_ino, []).append((at, file.read(size)))

    def sync(self, descriptor: int, path: Path) -> None:
        """Keep the present content of a file or folder also after a loss of power. Raises OSError where it cannot.

        A full disk has room for names, and for what is there already.
        """
        self._count_down()
        status = os.fstat(descriptor)
        grown = path.is_file() and status.st_size > self._synced.get(status.st_ino, 0)
        if self.broken or (self.full and grown):
            self.refusals += 1
            number = errno.EIO if self.broken else errno.ENOSPC
            raise OSError(number, os.strerror(number), str(path))
        self._owed_s += self.late_s
        if not self.lying:
            self._note(path, status)
        if path.name == "checkpoints" and not self.copied:
            shutil.copytree(self.folder, self._copy)

    @property
    def copied(self) -> bool:
        """Whether there is a copy of it that somebody may bring back: as it was with the first checkpoint on it."""
        return self._copy.exists()

    @property
    def keeps(self) -> bool:
        """Whether what is written and synced now is kept for certain."""
        return not (self.full or self.tight or self.broken or self.lying)

    def certain(self, path: Path) -> bool:
        """Whether a file is there after a loss of power with all its bytes, or a folder with all its names."""
        if path.is_dir():
            known = self._names.get(path.stat().st_ino, {})
            return all(one.name in known for one in path.iterdir() if not one.name.startswith("."))
        return len(self.kept(path)) == path.stat().st_size

    def kept(self, path: Path) -> bytes:
        """The content of a file that is there after a loss of power: what was written since may follow it."""
        inode = path.stat().st_ino
        begins = min((at for at, _ in self._before.get(inode, ())), default=self._synced.get(inode, 0))
        return path.read_bytes()[:begins]

    def owed(self) -> float:
        """Seconds that syncs took since the last call: whoever asked for them has to wait so long."""
        owed_s, self._owed_s = self._owed_s, 0.0
        return owed_s

    @contextmanager
    def beside(self) -> Iterator[list[float]]:
        """Meanwhile all is done by another thread. In the end the list has the seconds that its syncs take."""
        before_s, late = self.owed(), list[float]()
        try:
            yield late
        finally:
            late.append(self.owed())
            self._owed_s = before_s

    def _note(self, path: Path, status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._synced[status.st_ino] = status.st_size
            self._before.pop(status.st_ino, None)

    def settle(self) -> None:
        """A disk that lied has written by now what it remembered."""
        for path in self.folder.rglob("*") if self.folder.exists() else ():
            self._note(path, path.stat())
        if self.folder.exists():
            self._note(self.folder, self.folder.stat())

    # ------------------------------------------------------------ deaths

    def _count_down(self) -> None:
        """Die in the middle of a checkpoint, when the time has come: what is done from then on reaches no disk."""
        if self.last_syncs < 0:
            return
        self.last_syncs -= 1
        if self.last_syncs < 0:
            shutil.copytree(self.folder, self._image, copy_function=os.link)
            for old in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
                new = self._image / old.relative_to(self.folder)
                self._names[new.stat().st_ino] = self._names.get(old.stat().st_ino, {})
            raise Died

    @property
    def _image(self) -> Path:
        return self.root / f"{self.name}.image"

    def as_it_died(self) -> None:
        """The disk as it was when a process died in the middle of a checkpoint."""
        shutil.rmtree(self.folder)
        self._image.rename(self.folder)

    def lose_power(self, dice: Random) -> None:
        """Lose names, and cut files off, that were not synced, as a loss of power does. Behind the cut there may be
        bytes that nobody wrote. Of what was written over some is there, and some is what stood there before."""
        if self.lying:
            self.damaged, self.durable, self.reach = True, -1, self.NOWHERE
        for folder in [self.folder, *sorted(self.folder.rglob("*"))] if self.folder.exists() else ():
            if folder.is_dir():
                self._lose_names(folder, dice)
        for path in sorted(self.folder.rglob("*")) if self.folder.exists() else ():
            if path.is_file() and path.name not in UNSYNCED:
                self._restore(path, dice)
                self._tear(path, dice)

    def _lose_names(self, folder: Path, dice: Random) -> None:
        known = self._names.get(folder.stat().st_ino, {})
        for path in sorted(folder.iterdir()):
            if path.name not in (*known, *UNSYNCED) and dice.random() < LOST_SHARE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _restore(self, path: Path, dice: Random) -> None:
        before = self._before.pop(path.stat().st_ino, None)
        if before is None:
            return
        cut, first = dice.randint(before[0][0], before[-1][0] + len(before[-1][1])), dice.random() < FIRST_SHARE
        with path.open("r+b") as file:
            for at, data in reversed(before):
                upto = min(max(cut - at, 0), len(data))  # any page may have reached the disk before another
                file.seek(at if first else at + upto)
                file.write(data[:upto] if first else data[upto:])

    def _tear(self, path: Path, dice: Random) -> None:
        status = path.stat()
        certain = min(self._synced.get(status.st_ino, 0), status.st_size)
        if status.st_size > certain:
            size = dice.randint(certain, status.st_size)
            os.truncate(path, size)
            if size < status.st_size and dice.random() < TORN_SHARE:
                torn = min(TORN_BYTES, status.st_size - size)
                with path.open("ab") as file:
                    file.write(dice.choice((bytes(torn), dice.randbytes(torn))))

    # ------------------------------------------------------------ other disks

    def flip(self, dice: Random) -> bool:
        """Flip a bit of the newest checkpoint. False: there is none."""
        folders = sorted((self.folder / "checkpoints").glob("v*"))
        files = sorted(path for path in folders[-1].iterdir() if path.stat().st_size) if folders else []
        if not files:
            return False
        path = dice.choice(files)
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        self.damaged, self.durable, self.reach = True, -1, self.NOWHERE
        return True

    def go_back(self) -> None:
        """Somebody brings back an old copy of the disk, with the first checkpoint on it."""
        self.damaged, self.durable, self.reach = True, -1, self.NOWHERE
        self.rollbacks += 1
        if self.copied:
            shutil.rmtree(self.folder)
            shutil.copytree(self._copy, self.folder)
            self.settle()

    def replaced(self) -> SimulatedDisk:
        """An empty disk in the place of this one."""
        return self._successor()

    def cloned(self) -> SimulatedDisk:
        """A copy of this disk in another machine."""
        other = self._successor()
        other.saved, other.damaged, other.promised = [*self.saved], self.damaged, {**self.promised}
        other.bound = {**self.bound}
        if self.folder.exists():
            shutil.copytree(self.folder, other.folder)
            other.settle()
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

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        if (disk := self._now()) is not None:
            disk.write(descriptor, path, data)

    def sync(self, descriptor: int, path: Path) -> None:
        if (disk := self._now()) is not None:
            disk.sync(descriptor, path)
