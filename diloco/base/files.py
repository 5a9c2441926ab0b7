"""Files that survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """A small tool for any file or folder: `fsync` it. A new name in a folder is on the disk when the folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
