"""From the paths of a contract to files: inside the site's data folder only, and in one order everywhere.

Contracts come from other people. A path that leads out of the data folder, by `..` or by a symbolic link, or that
goes through a hidden name (`.ssh`) is refused: what a peer trains on ends up in weights that others see.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from diloco.base.errors import ConfigError, DataError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl")
"""Files read from a folder as text; a file that is named, or matches a glob, may be called anything."""


_CHECK = "check data.paths, and data.root in the site file"


def find(paths: Sequence[str], root: Path, suffixes: Collection[str]) -> list[Path]:
    """Files at `paths` (files, folders or globs below `root`), each once, sorted by path.

    Of a folder, the files below it that end in one of `suffixes`. Raises DataError when a path gives no file and
    ConfigError when it leads out of `root`.
    """
    if not paths:
        raise ConfigError("data.paths is empty", "name files, folders or globs, relative to the site's data.root")
    found = {file for path in paths for match in _matches(path, root) for file in expand(match, suffixes)}
    for file in found:
        _check_inside(file, root)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def inside(path: str, root: Path) -> Path:
    """`root / path`, refused with ConfigError when it leads out of `root` or through a hidden name."""
    if "\0" in path:
        raise ConfigError(f"data path {path!r} holds a zero byte, which no file's name does", _FIX)
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") for part in parts):
        raise ConfigError(f"data path {path!r} goes through {'..' if '..' in parts else 'a hidden name'}", _FIX)
    _check_inside(root / path, root)
    return root / path


def expand(path: Path, suffixes: Collection[str], fix: str = _CHECK) -> list[Path]:
    """`path` itself when it is a file, else the files below it that end in one of `suffixes`. Raises DataError, with
    `fix` where there is no such path."""
    # os.path's tests say no where pathlib's would raise: in a folder that may not be entered.
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise DataError(f"no such file or folder: {path.absolute()}", fix)
    files = walk(path, suffixes)
    if not files:
        looked_for = ", ".join(f"*{suffix}" for suffix in suffixes)
        raise DataError(
            f"{path.absolute()} holds no data (looked for {looked_for})", "add files, or name them by a glob"
        )
    return files


def walk(folder: Path, suffixes: Collection[str], skip: Collection[str] = ()) -> list[Path]:
    """Files below `folder` that end in one of `suffixes`, sorted by path; not hidden ones, nor in folders in `skip`.

    Symbolic links to folders are not followed.
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        wanted = (name for name in names if name.endswith(tuple(suffixes)) and not name.startswith("."))
        found.extend(Path(parent, name) for name in wanted)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> DataError:
    """The error for a file that cannot be read."""
    return DataError(
        f"cannot read {Path(path).absolute()}: {error.strerror}", "check that the file exists and may be read"
    )


_FIX = "set the site's data.root to a folder that holds the data, and name it relative to that"


def _matches(path: str, root: Path) -> list[Path]:
    named = inside(path, root)
    if not glob.has_magic(path) or named.exists():
        return [named]
    matches = glob.glob(path, root_dir=root, recursive=True)
    if not matches:
        raise DataError(
            f"nothing matches {path!r} in {root.absolute()}", "check data.paths, and data.root in the site file"
        )
    return [root / match for match in matches]


def _check_inside(path: Path, root: Path) -> None:
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"data path {path} leads out of the data folder {root.absolute()}", _FIX)


def _unreadable(error: OSError) -> None:
    raise unreadable(error.filename, error)
