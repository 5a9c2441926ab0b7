"""Folders that are replaced as a whole: a reader finds the old one or the new one, at every moment."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from diloco.base.errors import ResourceError
from diloco.base.files import sync_path
from diloco.storage.tensor_files import reason

logger = logging.getLogger(__name__)

FREE_SPACE = "free space there, or choose a folder that can be written"
"""Advice of an error."""
_LEFTOVER = re.compile(r"\.(v\d{8,18})\.(\d{1,9})\.(tmp|old)")


@contextmanager
def replacing(target: Path, what: str) -> Iterator[Path]:
    """A new folder beside `target` to write files into. When the block ends well, it takes the place of `target`.

    A reader finds the old folder or the new one, complete, at `target` or, between two renames, beside it. `what`
    names it in errors. Raises ResourceError when the disk does not do as told; `target` then stays as it was.
    """
    beside = path_beside(target, "tmp")
    try:
        with writing(what, target):
            remove(beside)
            beside.mkdir(parents=True)
            yield beside
            for path in (*beside.iterdir(), beside):
                sync_path(path)
            _move(beside, target)
    finally:
        remove(beside)


def _move(beside: Path, target: Path) -> None:
    """Rename `beside` to `target`, for which a former `target` makes room."""
    aside = path_beside(target, "old")
    if target.exists():
        remove(aside)
        target.rename(aside)
    beside.rename(target)
    sync_path(target.parent)
    remove(aside)


def path_beside(target: Path, kind: str) -> Path:
    """Where this process keeps a folder (`tmp`, `old`) that is to be `target`, or was."""
    return target.with_name(f".{target.name}.{os.getpid()}.{kind}")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn the disk's refusals into ResourceError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"cannot write {what} {path}: {reason(error)}", FREE_SPACE) from error


def remove(path: Path) -> None:
    """Delete a folder, if it is there and can be deleted."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, reason(error))


def sweep(directory: Path) -> None:
    """Delete what dead writers left; what one had put aside without a successor gets its name back."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or _lives(int(match[2])):
            continue
        if match[3] == "old" and not path.with_name(match[1]).exists():
            path.rename(path.with_name(match[1]))
        else:
            remove(path)


def _lives(pid: int) -> bool:
    """Whether another process has this id. Our own is a dead writer's: in a container every life has the same."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
