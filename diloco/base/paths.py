"""Paths in a contract, which comes from others: they stay in the data folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from diloco.base.errors import ConfigError

_STAY_INSIDE = "set the site's data.root to a folder that holds it, and name it relative to that"


def inside(path: str, root: Path) -> Path:
    """`root / path`, for a path in a contract. Refused with ConfigError where it leads out of the data folder `root` or
    through a hidden name."""
    if "\0" in path:
        raise ConfigError(f"path {path!r} holds a zero byte, which no file's name does", _STAY_INSIDE)
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") for part in parts):
        through = ".." if ".." in parts else "a hidden name"
        raise ConfigError(f"path {path!r} goes through {through}", _STAY_INSIDE)
    check_inside(root / path, root)
    return root / path


def check_inside(path: Path, root: Path) -> None:
    """Raises ConfigError where a path leads out of the data folder `root`, by a symbolic link for instance."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"path {path} leads out of the data folder {root.absolute()}", _STAY_INSIDE)
