"""Files that survive a power cut, or that are private. A simulation replaces the `Disk` beneath them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from diloco.base.errors import StateError

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


# ---------------------------------------------------------------- folders that somebody else may have filled


def open_to_write(path: Path, flags: int) -> int:
    """Open a file of a peer's folder to write in it; a new one is this user's only. Raises OSError, and StateError for
    a symbolic link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        _refuse_link(path)
        raise


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`, to fill. When the block ends well, it takes the place of what has that name: of a
    symbolic link, not of what the link leads to. Raises OSError; `path` then stays as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)  # of a killed process with this id, or a link
    try:
        with beside.open("xb") as file:
            yield file
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def remove_half_written(folder: Path, names: Iterable[str]) -> None:
    """Remove the files that killed processes left beside files of these names (patterns of `glob`). No other process
    may write to the folder now."""
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):  # `replacing_file` names them so
            with suppress(OSError):
                path.unlink()


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raises StateError where one of these entries of a folder, or anything below one, is a symbolic link: whoever
    handed over the folder chose what it leads to. The folder itself may be one, which its user named."""
    for path in (folder / name for name in names):
        _refuse_link(path)
        for below in path.rglob("*"):
            _refuse_link(below)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        fix = "delete it, or put what it leads to in its place; the whole folder of a peer may be a link"
        raise StateError(f"{path} is a symbolic link, and a peer would write to where it leads", fix)
