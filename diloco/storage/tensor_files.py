"""Files of tensors in a checkpoint: safetensors, each with the slices that one rank wrote of a group."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco.base.errors import StateError
from diloco.island.slices import Box, Pieces, Slice

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
FILE = re.compile(r"([a-z]+)(\.[1-9]\d{0,5})?\.safetensors")
"""Its name: the group, and the rank that wrote it, but for rank 0."""
UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""Errors of reading tensors; the last from torch, for a file that was deleted after its hash was verified."""
COPY_AGAIN = "copy it again from where it is whole, or start without it and join the run"
"""Advice of an error."""


def write_slices(path: Path, slices: Sequence[Slice]) -> None:
    """A new safetensors file at `path`, with what its slices are slices of. Raises SafetensorError."""
    tensors = {one.box.key: one.local for one in slices}
    assert len(tensors) == len(slices), f"{path.name}: two slices are one"
    parts = {one.box.key: [one.box.name, one.box.shape, one.box.offsets] for one in slices if not one.box.whole}
    write_tensors(path, tensors, {"slices": json.dumps(parts)} if parts else None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A new safetensors file at `path`. Raises SafetensorError, whatever the disk's reason."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata)
    path.chmod(mode)  # safetensors renames a private file of mode 0600 over it; others may read checkpoints and models


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped copy-on-write. Raises StateError."""
    try:
        return load_file(path)
    except UNREADABLE as error:
        raise StateError(f"{path} cannot be read: {reason(error)}", COPY_AGAIN) from error


class TensorFile:
    """A file of tensors, and what the manifest says of it."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self.path, self._entry = path, entry
        self._verified = False

    def verify(self) -> None:
        """Raises ValueError or OSError unless the file is as the manifest has it."""
        if not self._verified:
            _verify(self.path, self._entry)
        self._verified = True

    def boxes(self) -> Iterator[tuple[str, Box, str]]:
        """Key, place and dtype of each slice, from the header. Raises ValueError, SafetensorError."""
        with safe_open(self.path, "pt") as file:
            parts = _slice_names(file.metadata() or {})
            keys = file.keys()
            if not parts.keys() <= set(keys):
                raise ValueError(f"{self.path.name} does not have the slices that it tells of")
            for key in keys:
                header = file.get_slice(key)
                extent = tuple(header.get_shape())
                name, shape, offsets = parts.get(key, (key, extent, (0,) * len(extent)))
                yield key, Box(name, tuple(shape), tuple(offsets), extent), header.get_dtype()

    def map(self) -> Mapping[str, Tensor]:
        """All tensors, by key."""
        return self._tensors

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        self.verify()
        return load_file(self.path)

    def tensor(self, key: str) -> Tensor:
        """Raises StateError."""
        try:
            return self._tensors[key]
        except (ValueError, *UNREADABLE) as error:
            raise StateError(f"checkpoint {self.path.parent} is damaged: {reason(error)}", COPY_AGAIN) from error


def _slice_names(metadata: Mapping[str, str]) -> Mapping[str, tuple[str, list[int], list[int]]]:
    """By key. Raises ValueError."""
    parts = json.loads(metadata.get("slices", "{}"))
    if not isinstance(parts, dict) or not all(_names_slice(entry) for entry in parts.values()):
        raise ValueError("what it tells of its slices is malformed")
    return parts


def _names_slice(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and isinstance(entry[0], str)
        and all(isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes) for sizes in entry[1:])
    )


def groups_of(files: Sequence[TensorFile]) -> dict[str, Pieces]:
    """By name. Raises ValueError where slices do not make their tensors whole."""
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


def _verify(file: Path, entry: Mapping[str, Any]) -> None:
    """Raises ValueError or OSError unless the file is there with the size and the hash of the manifest's entry."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{file.name} has {size} bytes, not {entry['bytes']}")
    if sha256(file) != entry["sha256"]:
        raise ValueError(f"{file.name} was changed: its SHA-256 does not fit")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason(error: Exception) -> str:
    """In one line: what the operating system said, or the error's own words."""
    if isinstance(error, OSError) and error.strerror:
        named = Path(error.filename).name if error.filename is not None else ""
        return f"{named}: {error.strerror}" if named else error.strerror
    return (str(error) or repr(error)).rpartition("I/O error: ")[2].partition("\n")[0]
