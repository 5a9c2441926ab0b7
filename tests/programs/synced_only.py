"""`synced_only.py diloco ...`: the command line on a disk that holds what was synced and no more: as after a power cut.

What is appended to a file stays in memory until the file is synced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Lock

from diloco.__main__ import main
from diloco.base.files import Disk, on_disk


class SyncedOnly(Disk):
    def __init__(self) -> None:
        self._lock = Lock()
        self._late: dict[Path, bytes] = {}

    def append(self, descriptor: int, path: Path, data: bytes) -> None:
        with self._lock:
            self._late[path] = self._late.get(path, b"") + data

    def sync(self, descriptor: int, path: Path) -> None:
        with self._lock:
            late = self._late.pop(path, b"")
        super().append(descriptor, path, late)
        super().sync(descriptor, path)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with on_disk(SyncedOnly()):
        main()
