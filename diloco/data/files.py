"""From the paths of a contract to data files: inside the site's data folder only, and in one order everywhere; and the
errors where that fails.

Contracts come from other people. A path that leads out of the data folder, by `..` or by a symbolic link, or that
goes through a hidden name (`.ssh`) is refused: what a peer trains on ends up in weights that others see.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from diloco.base.errors import ConfigError, DataError
from diloco.base.paths import check_inside, inside

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl")
"""Files read from a folder as text; a file that is named, or matches a glob, may be called anything."""

_CHECK_PATHS = "check data.paths, and data.root in the site file"


def find(paths: Sequence[str], root: Path, suffixes: Collection[str]) -> list[Path]:
    """Data files at `paths` (files, folders or globs below `root`), each once, sorted by path.

    Of a folder, the files below it that end in one of `suffixes`. Raises DataError when a path gives no file and
    ConfigError when it leads out of `root`.
    """
    if not paths:
        raise ConfigError("data.paths is empty", "name files, folders or globs, relative to the site's data.root")
    found: set[Path] = set()
    for path in paths:
        matches = [inside(path, root)]
        if glob.has_magic(path) and not matches[0].exists():  # else it is a name with a bracket in it
            matches = [root / match for match in glob.glob(path, root_dir=root, recursive=True)]
            if not matches:
                raise DataError(f"nothing matches {path!r} in {root.absolute()}", _CHECK_PATHS)
        found.update(file for match in matches for file in expand(match, suffixes))
    for file in found:
        check_inside(file, root)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def expand(path: Path, suffixes: Collection[str], fix: str = _CHECK_PATHS) -> list[Path]:
    """`path` itself when it is a data file, else the data files below it that end in one of `suffixes`. Raises
    DataError, with `fix` where there is no such path."""
    # os.path's tests say no where pathlib's would raise: in a folder that may not be entered.
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise DataError(f"no such file or folder: {path.absolute()}", fix)
    files = walk(path, suffixes)
    if not files:
        looked_for = ", ".join(f"*{suffix}" for suffix in suffixes)
        cause = f"{path.absolute()} holds no data (looked for {looked_for})"
        raise DataError(cause, "add files, or name them by a glob")
    return files


def walk(folder: Path, suffixes: Collection[str], skip: Collection[str] = ()) -> list[Path]:
    """Data files below `folder` that end in one of `suffixes`, sorted by path; not hidden ones, nor in folders in
    `skip`. Symbolic links to folders are not followed. Raises DataError."""

    def refuse(error: OSError) -> None:  # by itself os.walk leaves out a folder that it may not list
        raise unreadable(error.filename, error)

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        wanted = (name for name in names if name.endswith(tuple(suffixes)) and not name.startswith("."))
        found.extend(Path(parent, name) for name in wanted)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def read_bytes(path: Path) -> bytes:
    """The whole data file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> DataError:
    """The error for a data file that cannot be read."""
    cause = f"cannot read {Path(path).absolute()}: {error.strerror}"
    return DataError(cause, "check that the file exists and may be read")


def missing_extra(missing: ImportError) -> ConfigError:
    """The error for data that needs a Hugging Face package which is not installed."""
    cause = f"data.source 'hf' and Hugging Face tokenizers need a package that is missing: {missing.name}"
    return ConfigError(cause, "pip install 'diloco[hf]'")
