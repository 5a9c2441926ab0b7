"""The command line on a disk that holds what was synced and no more: as after a power cut.

What is written to a file stays in memory until the file is synced.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from diloco.base.files import Disk, on_disk
from tests.warm_spares import run_diloco


class SyncedOnly(Disk):
    def __init__(self) -> None:
        self._lock = Lock()
        self._late: dict[Path, bytes] = {}

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        with self._lock:
            self._late[path] = self._late.get(path, b"") + data

    def sync(self, descriptor: int, path: Path) -> None:
        with self._lock:
            late = self._late.pop(path, b"")
        super().write(descriptor, path, late)
        super().sync(descriptor, path)


def run(arguments: list[str]) -> None:
    """`diloco` with these arguments."""
    with on_disk(SyncedOnly()):
        run_diloco(arguments)
