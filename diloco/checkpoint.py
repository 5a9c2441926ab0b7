"""Checkpoints on disk: at every moment complete or not there, and verified before use.

    <directory>/v00000012/manifest.json        format, version, meta; size and SHA-256 of each file; a digest of it all
                          outer.safetensors    one file for each group of tensors: outer, inner, local, random

A checkpoint is written beside its place as `.v00000012.<pid>.tmp`, synced to the disk and renamed. One that is
already there steps aside as `.v00000012.<pid>.old`, where `load` finds it, until the new one has its name.

Checkpoints may come from other people: nothing is unpickled, the hashes are compared before safetensors, which
accepts a flipped bit, parses a byte, and no path is made of a tensor's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diloco import failpoints
from diloco.errors import ResourceError, StateError
from diloco.fragments import Layout, NamedShapes
from diloco.ledger import sync_path
from diloco.outer import FragmentState, OuterOptimizer, OuterState, buffer_bytes

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
T = TypeVar("T")

_CHECKPOINT = re.compile(r"v(\d{8,18})|\.v(\d{8,18})\.\d{1,9}\.old")
_LEFTOVER = re.compile(r"\.(v\d{8,18})\.(\d{1,9})\.(tmp|old)")
_FILE = re.compile(r"[a-z]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""What reading tensors may raise; the last from torch, of a file that was deleted after its hash was verified."""
_FIX = "copy it again from where it is whole, or start without it and join the run"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What `load` found, as it was saved."""

    version: int
    groups: Mapping[str, Mapping[str, Tensor]]
    """By group, then by name; host tensors, mapped from the files. A group saved empty is absent."""
    meta: Mapping[str, Any]
    path: Path

    def value(self, name: str, kind: type[T]) -> T:
        """`meta[name]`. Raises StateError unless it is there and of this JSON type."""
        found = self.meta.get(name)
        if not isinstance(found, kind):
            cause = f"checkpoint {self.path}: its {name} should be of type {kind.__name__}, but is {found!r}"
            raise StateError(cause[:300], "use a checkpoint that `diloco peer` wrote")
        return found


# ---------------------------------------------------------------- save


def save(
    directory: Path,
    version: int,
    groups: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, JsonValue],
    keep: int,
) -> Path:
    """Write the checkpoint of `version` and keep the newest `keep` up to it. Returns its folder.

    Group names are lower-case letters; tensors are strided, of any dtype and device, and nobody may write to them
    meanwhile. One directory has one writer. Memory: host tensors are written from where they are (safetensors 0.8:
    512 MiB raised the peak by nothing; releases that copy do so one group at a time). Time: the disk's, and SHA-256
    over what was written, read back from the page cache (1.1 GB/s on one core).

    Raises ResourceError when the disk is full or cannot be written. The older checkpoints are then still there, and
    nothing is left of the new one.
    """
    target = directory / f"v{version:08d}"
    with _writing("checkpoint", target):
        _sweep(directory)
    with replacing(target, "checkpoint") as beside:
        files = {}
        for group, tensors in groups.items():
            if tensors:
                file = beside / f"{group}.safetensors"
                assert _FILE.fullmatch(file.name), f"group {group!r} is not in lower-case letters"
                write_tensors(file, tensors)
                failpoints.hit("mid-checkpoint")
                files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        # JSON turns keys into text and tuples into lists; only after that is the encoding a fixed point.
        fields = {"format": FORMAT, "version": version, "files": files, "meta": json.loads(json.dumps(meta))}
        (beside / MANIFEST).write_bytes(_encode({**fields, "digest": _digest(fields)}))
    _retain(directory, version, keep)
    return target


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A new safetensors file at `path`. Raises SafetensorError, whatever the disk's reason."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(mode)  # safetensors renames a private file of mode 0600 over it; others may read checkpoints and models


@contextmanager
def replacing(target: Path, what: str) -> Iterator[Path]:
    """A new folder beside `target` to write files into. When the block ends well, it takes the place of `target`.

    A reader finds the old folder or the new one, complete, at `target` or, between two renames, beside it. `what`
    names it in errors. Raises ResourceError when the disk does not do as told; `target` then stays as it was.
    """
    beside = _beside(target, "tmp")
    try:
        with _writing(what, target):
            _remove(beside)
            beside.mkdir(parents=True)
            yield beside
            for path in (*beside.iterdir(), beside):
                sync_path(path)
            _move(beside, target)
    finally:
        _remove(beside)


def _move(beside: Path, target: Path) -> None:
    """Rename `beside` to `target`, for which a former `target` makes room."""
    aside = _beside(target, "old")
    if target.exists():
        _remove(aside)
        target.rename(aside)
    beside.rename(target)
    sync_path(target.parent)
    _remove(aside)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{kind}")


@contextmanager
def _writing(what: str, path: Path) -> Iterator[None]:
    """Turn the disk's refusals into ResourceError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        fix = "free space there, or choose a folder that can be written"
        raise ResourceError(f"cannot write {what} {path}: {_reason(error)}", fix) from error


def _remove(path: Path) -> None:
    """Delete a folder, if it is there and can be deleted."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, _reason(error))


def _sweep(directory: Path) -> None:
    """Delete what dead writers left; what one had put aside without a successor gets its name back."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or _lives(int(match[2])):
            continue
        if match[3] == "old" and not path.with_name(match[1]).exists():
            path.rename(path.with_name(match[1]))
        else:
            _remove(path)


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


def _retain(directory: Path, version: int, keep: int) -> None:
    """Delete all but the newest `keep` up to `version`. Later ones belong to a history that was left: not ours."""
    found = [(number, path) for number, path in _checkpoints(directory) if not path.name.startswith(".")]
    later = [path.name for number, path in found if number > version]
    if later:
        logger.warning("%s holds %s, later than the version %d just saved", directory, ", ".join(later), version)
    for _, path in [(number, path) for number, path in found if number <= version][keep:]:
        leftover = _beside(path, "tmp")
        path.rename(leftover)  # half deleted, it must not look like a checkpoint
        _remove(leftover)


# ---------------------------------------------------------------- load


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path` or, where `path` is a directory of several, the newest valid one.

    Manifest, sizes and hashes are verified before any tensor is looked at. Tensors are mapped copy-on-write: they
    take memory only as they are read or written, and a file deleted meanwhile stays until the last of them is gone.

    A damaged one in a directory of several is passed over with a warning. Raises StateError when none is valid.
    """
    if (path / MANIFEST).exists():
        return _read(path)
    candidates = _checkpoints(path)
    if not candidates:
        cause = f"no checkpoint at {path}: neither {MANIFEST} nor a folder like v00000001 is there"
        raise StateError(cause, "give the folder that `diloco peer` saves to, or start without a checkpoint")
    causes = []
    for _, candidate in candidates:
        try:
            return _read(candidate)
        except StateError as error:
            logger.warning("passed over: %s", error.cause)
            causes.append(error.cause)
    raise StateError(f"no valid checkpoint in {path}: {'; '.join(causes)}", _FIX)


def latest(directory: Path) -> Path | None:
    """The newest checkpoint in `directory`, not verified."""
    return next((path for _, path in _checkpoints(directory)), None)


def outer_state(checkpoint: Checkpoint, layout: Layout, optimizer: OuterOptimizer) -> OuterState:
    """The outer state of a peer's checkpoint, from group `outer` and `meta["steps"]`. Its buffers are not copied.

    Raises StateError when it does not fit; whether it is the run's, `OuterState.digest` tells.
    """
    buffers = checkpoint.groups.get("outer", {})
    steps = checkpoint.value("steps", list)
    sizes = {name: buffer.nbytes for name, buffer in buffers.items()}
    plain = all(buffer.dtype == torch.float32 and buffer.ndim == 1 for buffer in buffers.values())
    counts = all(type(count) is int and count >= 0 for count in steps) and len(steps) == len(layout.fragments)
    if not (plain and counts and sizes == buffer_bytes(layout, optimizer)):
        cause = f"the outer state in checkpoint {checkpoint.path} does not fit the model"
        raise StateError(cause, "use the contract, and the Hugging Face config if any, that it was written with")
    fragments = (
        FragmentState(
            buffers[f"{fragment.index}/anchor"],
            {name: buffers[f"{fragment.index}/{name}"] for name in optimizer.slot_names},
            count,
            fragment,
        )
        for fragment, count in zip(layout.fragments, steps, strict=True)
    )
    return OuterState(checkpoint.version, tuple(fragments))


def noted_shapes(checkpoint: Checkpoint) -> NamedShapes:
    """Name and shape of each parameter in model order, as a peer's checkpoint has them. Raises StateError."""
    try:
        return [(str(name), tuple(map(int, shape))) for name, shape in checkpoint.value("parameters", list)]
    except (TypeError, ValueError) as error:
        cause = f"checkpoint {checkpoint.path}: its list of parameters is malformed: {error}"
        raise StateError(cause, "use a checkpoint that diloco wrote") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped copy-on-write. Raises StateError."""
    try:
        return load_file(path)
    except _UNREADABLE as error:
        raise StateError(f"{path} cannot be read: {_reason(error)}", _FIX) from error


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(version, folder) of all checkpoints, newest first; one that was put aside after the one in its place."""
    if not directory.is_dir():
        return []
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in directory.iterdir())
    found = [(int(match[1] or match[2]), path) for match, path in matches if match]
    return sorted(found, key=lambda pair: (pair[0], pair[1].name), reverse=True)  # "v" sorts after "."


def _read(path: Path) -> Checkpoint:
    try:
        manifest = _parse((path / MANIFEST).read_bytes())
        for name, entry in manifest["files"].items():
            _verify(path / name, entry)
        groups = {Path(name).stem: load_file(path / name) for name in manifest["files"]}
    except (ValueError, *_UNREADABLE) as error:
        raise StateError(f"checkpoint {path} is damaged: {_reason(error)}", _FIX) from error
    return Checkpoint(manifest["version"], groups, manifest["meta"], path)


def _parse(data: bytes) -> dict[str, Any]:
    """The manifest, if it is one, to the last byte as `save` wrote it. Raises ValueError, RecursionError."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is not JSON") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}, which this diloco reads")
    fields = {name: value for name, value in tree.items() if name != "digest"}
    if tree.get("digest") != _digest(fields) or _encode(tree) != data:
        raise ValueError(f"{MANIFEST} was changed: its digest does not fit")
    if fields.keys() != {"format", "version", "files", "meta"} or not _well_formed(fields):
        raise ValueError(f"{MANIFEST} does not have the fields it should")
    return tree


def _well_formed(fields: Mapping[str, Any]) -> bool:
    version, files, meta = fields["version"], fields["files"], fields["meta"]
    return (
        (type(version) is int and version >= 0 and isinstance(meta, dict) and isinstance(files, dict))
        and all(_FILE.fullmatch(name) and isinstance(entry, dict) for name, entry in files.items())
        and all(entry.keys() == {"bytes", "sha256"} and type(entry["bytes"]) is int for entry in files.values())
        and all(isinstance(entry["sha256"], str) and _SHA256.fullmatch(entry["sha256"]) for entry in files.values())
    )


def _verify(file: Path, entry: Mapping[str, Any]) -> None:
    """Raises ValueError or OSError unless the file is there with the size and the hash of the manifest's entry."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{file.name} has {size} bytes, not {entry['bytes']}")
    if _sha256(file) != entry["sha256"]:
        raise ValueError(f"{file.name} was changed: its SHA-256 does not fit")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, sort_keys=True, indent=1) + "\n").encode()


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_encode(fields)).hexdigest()


def _reason(error: Exception) -> str:
    """In one line: what the operating system said, or the error's own words."""
    if isinstance(error, OSError) and error.strerror:
        named = Path(error.filename).name if error.filename is not None else ""
        return f"{named}: {error.strerror}" if named else error.strerror
    return str(error).rpartition("I/O error: ")[2].partition("\n")[0]
