"""Files that survive a power cut, that are private, or that stay in a folder. A simulation replaces the `Disk`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from diloco.base.errors import ConfigError

_sync_data = getattr(os, "fdatasync", os.fsync)
"""A file's content and size. Its times may wait: they need the file system's journal, and so all that stands in it."""


class Disk:
    """The small set of calls by which bytes reach a disk for certain; a simulation has one that fails."""

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        """Write on in an open file; after an error any part of it may be there. Raises OSError."""
        while data:
            data = data[os.write(descriptor, data) :]

    def sync(self, descriptor: int, path: Path) -> None:
        """Return when the content of an open file or folder is on the disk. Raises OSError."""
        (os.fsync if path.is_dir() else _sync_data)(descriptor)


_disk = Disk()


def disk() -> Disk:
    """The disk of this process."""
    return _disk


@contextmanager
def on_disk(other: Disk) -> Iterator[None]:
    """Replace the disk by another one in this whole process meanwhile."""
    global _disk
    before, _disk = _disk, other
    try:
        yield
    finally:
        _disk = before


def keep_files_private() -> None:
    """From here on only this user can read the files and folders that this process makes: they hold the run's state."""
    os.umask(os.umask(0o077) | 0o077)


_STAY_INSIDE = "set the site's data.root to a folder that holds it, and name it relative to that"


def inside(path: str, root: Path) -> Path:
    """`root / path`, for a path in a contract. Refused with ConfigError where it leads out of the data folder `root` or
    through a hidden name."""
    if "\0" in path:
        raise ConfigError(f"data path {path!r} holds a zero byte, which no file's name does", _STAY_INSIDE)
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") for part in parts):
        through = ".." if ".." in parts else "a hidden name"
        raise ConfigError(f"data path {path!r} goes through {through}", _STAY_INSIDE)
    check_inside(root / path, root)
    return root / path


def check_inside(path: Path, root: Path) -> None:
    """Raises ConfigError where a path leads out of the data folder `root`, by a symbolic link for instance."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"data path {path} leads out of the data folder {root.absolute()}", _STAY_INSIDE)


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make a folder of this mode, and those above it, where they are missing, and keep their names for certain. Raises
    OSError."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        path.mkdir(mode, exist_ok=True)  # another process may have made it meanwhile
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    try:
        sync_path(path.parent)
    except OSError:
        with suppress(OSError):  # where another process has put a file there
            path.rmdir()  # or the next call would find it there, and sync nothing
        raise


def sync_path(path: Path) -> None:
    """A small tool for any file or folder: `fsync` it. A new name in a folder is on the disk when the folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _disk.sync(descriptor, path)
    finally:
        os.close(descriptor)
