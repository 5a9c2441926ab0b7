"""Files and folders of checkpoints and exports: safetensors files, and folders that are replaced as a whole.

A safetensors file of a checkpoint has the slices of tensors that one rank wrote of a group (`inner.3.safetensors`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.base.errors import ResourceError, StateError
from diloco.base.files import make_folders, sync_path
from diloco.island.slices import Box, Pieces, Slice

logger = logging.getLogger(__name__)

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""Errors of reading tensors; the last from torch, for a file that was deleted after its hash was verified."""
COPY_AGAIN = "copy it again from where it is whole, or start without it and join the run"
"""Advice of an error about a damaged file."""
FREE_SPACE = "free space there, or choose a folder that can be written"
"""Advice of an error about a disk that refuses."""


def reason(error: Exception) -> str:
    """Error of a checkpoint's or export's file in one line: the operating system's words, or the error's own."""
    if isinstance(error, OSError) and error.strerror:
        named = Path(error.filename).name if error.filename is not None else ""
        return f"{named}: {error.strerror}" if named else error.strerror
    return (str(error) or repr(error)).rpartition("I/O error: ")[2].partition("\n")[0]


# ---------------------------------------------------------------- folders that are replaced as a whole


@contextmanager
def replacing(target: Path, what: str) -> Iterator[Path]:
    """A new checkpoint or export folder beside `target`, to fill. When the block ends well, it takes `target`'s place.

    A reader finds the old folder or the new one, complete, at `target` or, between two renames, beside it. `what`
    names it in errors. Raises ResourceError when the disk refuses; `target` then stays as it was.
    """
    beside, aside = path_beside(target, "tmp"), path_beside(target, "old")
    try:
        with writing(what, target):
            remove(beside)
            make_folders(beside.parent)
            beside.mkdir()
            yield beside
            for path in (*beside.iterdir(), beside):
                sync_path(path)
            if target.exists():
                remove(aside)
                target.rename(aside)
            beside.rename(target)
            sync_path(target.parent)
            remove(aside)
    finally:
        remove(beside)


def path_beside(target: Path, kind: str) -> Path:
    """Path beside a checkpoint or export `target`: this process's folder to replace it (`tmp`), or replaced (`old`)."""
    return target.with_name(f".{target.name}.{os.getpid()}.{kind}")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn the disk's refusals to write a checkpoint or export into ResourceError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"cannot write {what} {path}: {reason(error)}", FREE_SPACE) from error


def remove(path: Path) -> None:
    """Delete the folder of a checkpoint or export, if it is there and can be deleted."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, reason(error))


_LEFTOVER = re.compile(r"\.(v\d{8,18})\.(\d{1,9})\.(tmp|old)")


def sweep(directory: Path) -> None:
    """Delete the folders that killed processes left beside checkpoints. A checkpoint that was put aside and has no
    successor gets its name back."""
    make_folders(directory)
    for path in directory.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or _is_running(int(match[2])):
            continue
        if match[3] == "old" and not path.with_name(match[1]).exists():
            path.rename(path.with_name(match[1]))
        else:
            remove(path)


def _is_running(pid: int) -> bool:
    """Whether the process that began a checkpoint's folder runs. Our own id is a dead one's: in a container all lives
    have the same."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


# ---------------------------------------------------------------- safetensors files


def write_slices(path: Path, slices: Sequence[Slice]) -> None:
    """Write slices of tensors, and their places in these, to a checkpoint's new file. Raises SafetensorError."""
    tensors = {one.box.key: one.local for one in slices}
    assert len(tensors) == len(slices), f"{path.name}: two slices are one"
    parts = {one.box.key: [one.box.name, one.box.shape, one.box.offsets] for one in slices if not one.box.whole}
    write_tensors(path, tensors, {"slices": json.dumps(parts)} if parts else None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a new file of a checkpoint or export. Raises SafetensorError, whatever the disk's reason."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata)
    path.chmod(mode)  # safetensors renames a private file of mode 0600 over it; others may read checkpoints and models


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint or export file in safetensors' format, mapped copy-on-write. Raises StateError."""
    try:
        return load_file(path)
    except UNREADABLE as error:
        raise StateError(f"{path} cannot be read: {reason(error)}", COPY_AGAIN) from error


def sha256(path: Path) -> str:
    """SHA-256 of a checkpoint's file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FILE = re.compile(r"([a-z]+)(\.[1-9]\d{0,5})?\.safetensors")
"""Name of a checkpoint's file: the group, and the rank that wrote it, but for rank 0."""


class TensorFile:
    """A checkpoint's file of tensors, and its entry in the manifest: size and hash."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self.path, self._entry = path, entry
        self._verified = False
        self._tensors: Mapping[str, Tensor] | None = None

    def verify(self) -> None:
        """Raises ValueError or OSError unless the checkpoint's file has the size and the hash of its entry."""
        if self._verified:
            return
        name = self.path.name
        if not self.path.is_file():
            raise ValueError(f"{name} is missing")
        size = self.path.stat().st_size
        if size != self._entry["bytes"]:
            raise ValueError(f"{name} has {size} bytes, not {self._entry['bytes']}")
        if sha256(self.path) != self._entry["sha256"]:
            raise ValueError(f"{name} was changed: its SHA-256 does not fit")
        self._verified = True

    def boxes(self) -> Iterator[tuple[str, Box, str]]:
        """Key, place and dtype of each slice, from the checkpoint file's header. Raises ValueError, SafetensorError."""
        with safe_open(self.path, "pt") as file:
            parts = json.loads((file.metadata() or {}).get("slices", "{}"))
            if not isinstance(parts, dict) or not all(map(_names_slice, parts.values())):
                raise ValueError("what it tells of its slices is malformed")
            keys = file.keys()
            if not parts.keys() <= set(keys):
                raise ValueError(f"{self.path.name} does not have the slices that it tells of")
            for key in keys:
                header = file.get_slice(key)
                extent = tuple(header.get_shape())
                name, shape, offsets = parts.get(key, (key, extent, (0,) * len(extent)))
                yield key, Box(name, tuple(shape), tuple(offsets), extent), header.get_dtype()

    def map(self) -> Mapping[str, Tensor]:
        """Tensors of a checkpoint file by key, verified once, mapped copy-on-write. Raises ValueError and
        UNREADABLE."""
        if self._tensors is None:
            self.verify()
            self._tensors = load_file(self.path)
        return self._tensors

    def tensor(self, key: str) -> Tensor:
        """One tensor of the checkpoint's file. Raises StateError."""
        try:
            return self.map()[key]
        except (ValueError, *UNREADABLE) as error:
            raise StateError(f"checkpoint {self.path.parent} is damaged: {reason(error)}", COPY_AGAIN) from error


def _names_slice(entry: object) -> bool:
    """Whether an entry in the metadata of a checkpoint's file is [name, shape of the whole, offsets]."""
    match entry:
        case [str(), [*shape], [*offsets]]:
            return all(type(n) is int and n >= 0 for n in (*shape, *offsets))
    return False


def groups_of(files: Sequence[TensorFile]) -> dict[str, Pieces]:
    """Tensors of a checkpoint by group, from its files. Raises ValueError where slices do not make them whole."""
    slices: dict[str, list[tuple[Box, Callable[[], Tensor]]]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for file in files:
        match = FILE.fullmatch(file.path.name)
        assert match is not None
        group = slices.setdefault(match[1], [])
        for key, box, dtype in file.boxes():
            group.append((box, partial(file.tensor, key)))
            if dtypes.setdefault((match[1], box.name), dtype) != dtype:
                raise ValueError(f"slices of {box.name[:100]!r} are of different types")
    return {name: Pieces(found) for name, found in slices.items()}
