"""Checkpoints on disk: at every moment complete or not there, and verified before use.

    <directory>/v00000012/manifest.json        format, version, meta; size and SHA-256 of each file; a digest of it all
                          outer.safetensors    one file for each group of tensors: outer, inner, local, random
                          inner.3.safetensors  what rank 3 of an island wrote of a group

A tensor may be in several files, as slices that make it whole. A slice's key in its file is anything; `slices` in the
file's metadata, which its hash covers, says `{key: [name, shape of the whole, offsets]}`. What is not there is whole,
and its key is its name: an island of one rank writes plain files.

A checkpoint is written beside its place as `.v00000012.<pid>.tmp`, synced to the disk and renamed. One that is
already there steps aside as `.v00000012.<pid>.old`, where `load` finds it, until the new one has its name. Each rank
writes, syncs and hashes its own files; rank 0, which heard of all of them, writes the manifest last and renames.

Checkpoints may come from other people: nothing is unpickled, the hashes are compared before safetensors, which
accepts a flipped bit, parses a byte, no path is made of a tensor's name, and nothing is allocated for a tensor whose
slices are not all there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.base import failpoints
from diloco.base.errors import ConfigError, IncompatibleError, ResourceError, StateError
from diloco.base.files import sync_path
from diloco.base.memory import floats
from diloco.base.ranks import Alone, Ranks
from diloco.base.types import Commit, with_height
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.config.section import PEER_NAME
from diloco.island.slices import Pieces, Slice, Slices
from diloco.outer.fragments import Fragment, Layout, NamedShapes
from diloco.outer.optimizers import open_outer
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState
from diloco.storage import disk

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of a peer's checkpoints in its own."""
FORMAT = 2
MANIFEST = "manifest.json"

T = TypeVar("T")

_CHECKPOINT = re.compile(r"v(\d{8,18})|\.v(\d{8,18})\.\d{1,9}\.old")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ONE_FILE_SYSTEM = "the ranks of an island need one file system: set storage.directory to a folder that all nodes have"
HASHING = 4
"""Files that are hashed at a time, each on a core of its own."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint on the disk, verified by `load`."""

    version: int
    groups: Mapping[str, Pieces]
    """Tensors by group, then by name: host tensors, mapped from the files. A group saved empty is absent."""
    meta: Mapping[str, Any]
    path: Path
    digest: str = ""
    """Digest of the manifest, and so of all files."""

    def value(self, name: str, kind: type[T]) -> T:
        """Field `name` of the checkpoint's `meta`. Raises StateError unless it is there and of this JSON type."""
        found = self.meta.get(name)
        if not isinstance(found, kind):
            raise self.malformed(f"its {name} should be of type {kind.__name__}, but is {found!r}")
        return found

    def malformed(self, what: str) -> StateError:
        """Error for a checkpoint that no peer writes so, though its hashes are right."""
        return StateError(f"checkpoint {self.path}: {what}"[:300], "use a checkpoint that `diloco peer` wrote")

    @property
    def peer(self) -> str:
        """Name of the peer that wrote the checkpoint; paths are made of it. Raises StateError for what is no name."""
        name = self.value("peer", str)
        if not re.fullmatch(PEER_NAME, name):
            raise self.malformed(f"{name!r} is no name of a peer")
        return name

    @property
    def commit(self) -> Commit | None:
        """The commit that made the checkpoint's version; None before the run was founded. Raises StateError."""
        if self.meta.get("commit") is None:
            return None
        try:
            return Commit.from_bytes(with_height(self.value("commit", str)).encode())
        except ValueError as error:
            raise self.malformed(f"its commit is malformed: {error}") from error

    @property
    def contract(self) -> Contract:
        """Contract in the checkpoint. Raises StateError where it is malformed, or another release's."""
        try:
            return contract_from_json(self.value("contract", str), f"checkpoint {self.path}: its contract")
        except (ConfigError, IncompatibleError) as error:
            raise StateError(error.cause[:300], "use a checkpoint that `diloco peer` of this release wrote") from error


_ALONE = Alone()


def save(
    directory: Path, version: int, groups: Slices, meta: Mapping[str, disk.JsonValue], keep: int, ranks: Ranks = _ALONE
) -> Path:
    """Write the checkpoint of `version` and keep the newest `keep` up to it. Returns its folder.

    The other `ranks` call `save_part` meanwhile. Group names are lower-case letters; tensors are strided, of any dtype
    and device, and nobody may write to them meanwhile. One directory has one writer. Memory: host tensors are written
    from where they are (safetensors 0.8: 512 MiB raised the peak by nothing; releases that copy do so one group at a
    time). Time: the disk's, and SHA-256 over what was written, read back from the page cache (1.1 GB/s on one core).

    Raises ResourceError when the disk is full or cannot be written, by whichever rank. The older checkpoints are then
    still there, and nothing is left of the new one.
    """
    target = directory / f"v{version:08d}"
    begun = False
    try:
        with disk.writing("checkpoint", target):
            disk.sweep(directory)
        with disk.replacing(target, "checkpoint") as beside:
            begun = True
            ranks.share(str(beside.resolve()))
            files = _files(target, beside, ranks.gather(_report(beside, groups, ranks.rank)))
            # JSON turns keys into text and tuples into lists; only after that is the encoding a fixed point.
            fields = {"format": FORMAT, "version": version, "files": files, "meta": json.loads(json.dumps(meta))}
            encoded = _encode(fields)
            # In front of the other keys, in whose order it is the first: the text is not made a second time.
            digest = f'{{\n "digest": "{hashlib.sha256(encoded).hexdigest()}",'.encode()
            (beside / MANIFEST).write_bytes(digest + encoded.removeprefix(b"{"))
    finally:
        if not begun:
            ranks.share("")  # the other ranks wait for a folder in `save_part`: there is none
    _retain(directory, version, keep)
    return target


def save_part(groups: Slices, ranks: Ranks) -> None:
    """Write this rank's files of a checkpoint, while rank 0 calls `save`. Rank 0 raises what goes wrong here."""
    folder = ranks.share()
    if folder:
        ranks.gather(_report(Path(folder), groups, ranks.rank))


def _report(folder: Path, groups: Slices, rank: int) -> str:
    """Write a rank's files of a checkpoint. Returns their sizes and hashes by name, or why it cannot, as JSON."""
    try:
        # Listing asks a network's file system anew, where looking up a name may remember that it was not there.
        if rank and not (folder.parent.is_dir() and folder.name in os.listdir(folder.parent)):
            return json.dumps({"refused": f"{folder} of rank 0 is not here", "fix": _ONE_FILE_SYSTEM})
        return json.dumps({"files": _write_groups(folder, groups, rank)})
    except Exception as error:  # the other ranks wait for this report
        logger.debug("cannot write %s", folder, exc_info=True)
        return json.dumps({"refused": disk.reason(error), "fix": disk.FREE_SPACE})


def _write_groups(folder: Path, groups: Slices, rank: int) -> dict[str, disk.JsonValue]:
    """Write a checkpoint's file for each group that is not empty. Returns their entries for the manifest."""
    files: dict[str, disk.JsonValue] = {}
    for group, slices in groups.items():
        if slices:
            file = folder / (f"{group}.{rank}.safetensors" if rank else f"{group}.safetensors")
            assert disk.FILE.fullmatch(file.name), f"group {group!r} is not in lower-case letters"
            disk.write_slices(file, slices)
            failpoints.hit("mid-checkpoint")
            sync_path(file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": disk.sha256(file)}
    return files


def _files(target: Path, beside: Path, reports: Sequence[str]) -> dict[str, Any]:
    """Entries for a checkpoint's manifest, from all ranks' reports. Raises ResourceError unless all files are here."""
    files: dict[str, Any] = {}
    for rank, report in enumerate(map(json.loads, reports)):
        failed = f"cannot write checkpoint {target}: " + (f"rank {rank}: " if rank else "")
        if "refused" in report:
            raise ResourceError(failed + report["refused"], report["fix"])
        for name, entry in report["files"].items():
            file = beside / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise ResourceError(f"{failed}{name} was written, and is not here", _ONE_FILE_SYSTEM)
        files |= report["files"]
    return files


def _retain(directory: Path, version: int, keep: int) -> None:
    """Delete all checkpoints up to `version` but the newest `keep`. Later ones belong to a history that this run left:
    they stay. A checkpoint that cannot be deleted is a warning: the new one is complete."""
    try:
        found = [(number, path) for number, path in _checkpoints(directory) if not path.name.startswith(".")]
    except OSError as error:
        logger.warning("cannot tell which checkpoints in %s are old: %s", directory, disk.reason(error))
        return
    later = [path.name for number, path in found if number > version]
    if later:
        logger.warning("%s holds %s, later than the version %d just saved", directory, ", ".join(later), version)
    for _, path in [(number, path) for number, path in found if number <= version][keep:]:
        try:
            leftover = path.rename(disk.path_beside(path, "tmp"))  # half deleted, it must not look like a checkpoint
        except OSError as error:
            logger.warning("cannot delete %s: %s", path, disk.reason(error))
        else:
            disk.remove(leftover)


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path` or, where `path` is a directory of several, the newest valid one.

    Manifest, sizes and hashes are verified before any tensor is looked at. Tensors are mapped copy-on-write: they
    take memory only as they are read or written, and a file deleted meanwhile stays until the last of them is gone.

    A damaged one in a directory of several is passed over with a warning. Raises StateError when none is valid.
    """
    found = _read(path) if (path / MANIFEST).exists() else newest(path, lambda checkpoint: True)
    assert found is not None  # all are wanted
    return found


def newest(directory: Path, wanted: Callable[[Checkpoint], bool]) -> Checkpoint | None:
    """The newest valid checkpoint in `directory` that is wanted; None where none of the valid ones is.

    A damaged one is passed over with a warning. Raises StateError when none is valid.
    """
    candidates = _checkpoints(directory)
    if not candidates:
        cause = f"no checkpoint at {directory.absolute()}: neither {MANIFEST} nor a folder like v00000001 is there"
        raise StateError(cause, "give a checkpoint, or the folder of a peer that saved one")
    causes = []
    for _, candidate in candidates:
        try:
            found = _read(candidate)
        except StateError as error:
            logger.warning("passed over: %s", error.cause)
            causes.append(error.cause)
        else:
            if wanted(found):
                return found
    if len(causes) < len(candidates):
        return None
    raise StateError(f"no valid checkpoint in {directory.absolute()}: {'; '.join(causes)}", disk.COPY_AGAIN)


def latest(directory: Path) -> Path | None:
    """The newest checkpoint in `directory`, not verified."""
    return next((path for _, path in _checkpoints(directory)), None)


def oldest_kept(directory: Path, version: int, keep: int) -> int:
    """Version of the oldest of the `keep` newest checkpoints up to this version; -1 when there is none."""
    versions = sorted({found for found, _ in _checkpoints(directory) if found <= version})
    return versions[-keep:][0] if versions else -1


def latest_version(directory: Path) -> int:
    """Version of the newest checkpoint in `directory`, not verified; 0: there is none."""
    return next((version for version, _ in _checkpoints(directory)), 0)


def outer_state(checkpoint: Checkpoint, layout: Layout, optimizer: OuterOptimizer) -> OuterState:
    """Part of the outer state in a peer's checkpoint that `layout` holds, from group `outer` and `meta["steps"]`.

    Raises StateError when it does not fit. The caller compares `OuterState.digest` with the run's.
    """
    buffers = ("anchor", *optimizer.slot_names)
    flats = flat_buffers(checkpoint, "outer", layout, buffers)
    steps = checkpoint.value("steps", list)
    counts = all(type(count) is int and count >= 0 for count in steps) and len(steps) == len(layout.fragments)
    if not counts or len(flats) < len(steps) * len(buffers):
        raise _unfit(checkpoint, "outer")
    fragments = []
    for fragment, count in zip(layout.fragments, steps, strict=True):
        anchor, *slots = (flats[f"{fragment.index}/{name}"] for name in buffers)
        fragments.append(FragmentState(anchor, dict(zip(optimizer.slot_names, slots, strict=True)), count, fragment))
    return OuterState(checkpoint.version, tuple(fragments))


def saved_state(checkpoint: Checkpoint) -> OuterState:
    """Whole outer state in a peer's checkpoint, in the layout of its own contract. Raises StateError."""
    try:
        layout = Layout.agreed(noted_shapes(checkpoint), checkpoint.contract)
    except ConfigError as error:
        raise checkpoint.malformed(f"its contract does not fit its model: {error.cause}") from error
    return outer_state(checkpoint, layout, open_outer(checkpoint.contract.outer))


def flat_buffers(
    checkpoint: Checkpoint, group: str, layout: Layout, buffers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Part of a checkpoint group's flat buffers that `layout` holds, fp32, named INDEX/BUFFER; `buffers` None: INDEX.

    Raises StateError when one does not fit.
    """
    pieces = checkpoint.groups.get(group, Pieces(()))
    ends = [""] if buffers is None else [f"/{name}" for name in buffers]
    homes = {f"{fragment.index}{end}": fragment for fragment in layout.fragments for end in ends}
    if not all(name in homes and pieces.shape(name) == (homes[name].total,) for name in pieces):
        raise _unfit(checkpoint, group)
    flats: dict[str, Tensor] = {}
    for name in pieces:
        fragment = homes[name]
        if pieces.dtype(name) != torch.float32:
            cause = f"{name} in the checkpoint does not fit the model: it is not in fp32"
            raise StateError(cause, "use a checkpoint that `diloco peer` wrote")
        if fragment.lanes == 1 and fragment.cuts:
            flats[name] = pieces[name]  # saved as a whole, it is not copied
            continue
        flats[name] = floats(fragment.elements)
        for one in flat_slices(name, fragment, flats[name]):
            pieces.read(one)
    return flats


def _unfit(checkpoint: Checkpoint, group: str) -> StateError:
    cause = f"the {group} state in checkpoint {checkpoint.path} does not fit the model"
    return StateError(cause, "use the contract, and the Hugging Face config if any, that it was written with")


def read_together(ranks: Ranks, read: Callable[[], T]) -> T:
    """Result of reading a checkpoint on this rank. Raises StateError on all ranks when it does on one."""
    try:
        found, refused = [read()], ""
    except StateError as error:
        found, refused = [], json.dumps([error.cause, error.fix])
    if refusals := [answer for answer in ranks.gather(refused) if answer]:
        raise StateError(*json.loads(refusals[0]))
    return found[0]


def flat_slices(name: str, fragment: Fragment, flat: Tensor) -> list[Slice]:
    """Slices of a fragment's flat buffer for a checkpoint: by part, where other ranks hold other parts."""
    if fragment.lanes == 1:
        return [Slice.whole(name, flat)] if fragment.cuts else []
    cuts = fragment.cuts.items()
    return [
        Slice.of(name, [fragment.total], [fragment.place_of(part)[0]], flat[start:stop]) for part, (start, stop) in cuts
    ]


def noted_shapes(checkpoint: Checkpoint) -> NamedShapes:
    """Name and shape of each parameter in model order, as a peer's checkpoint has them. Raises StateError."""
    try:
        shapes = [(str(name), tuple(map(int, shape))) for name, shape in checkpoint.value("parameters", list)]
        if len(dict(shapes)) < len(shapes) or any(size < 0 for _, shape in shapes for size in shape):
            raise ValueError("a name is there twice, or a size is negative")
        return shapes
    except (TypeError, ValueError, OverflowError) as error:
        cause = f"checkpoint {checkpoint.path}: its list of parameters is malformed: {error}"
        raise StateError(cause, "use a checkpoint that diloco wrote") from error


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(version, folder) of all checkpoints, newest first; one that was put aside comes after the one in its place."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [(int(match[1] or match[2]), path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
    return sorted(found, key=lambda pair: (pair[0], pair[1].name), reverse=True)  # "v" sorts after "."


def _read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, with all hashes verified and all files mapped. Raises StateError."""
    try:
        manifest = _parse((path / MANIFEST).read_bytes())
        files = [disk.TensorFile(path / name, entry) for name, entry in manifest["files"].items()]
        with ThreadPoolExecutor(HASHING) as pool:
            list(pool.map(disk.TensorFile.verify, files))
        groups = disk.groups_of(files)
        for file in files:
            file.map()  # now, so that the files may be deleted while their tensors are in use
    except (ValueError, *disk.UNREADABLE) as error:
        raise StateError(f"checkpoint {path} is damaged: {disk.reason(error)}", disk.COPY_AGAIN) from error
    return Checkpoint(manifest["version"], groups, manifest["meta"], path, manifest["digest"])


def reopen(path: Path, digest: str) -> Checkpoint:
    """The checkpoint that rank 0 has loaded and verified, for another rank of its island.

    A file is verified once more, and mapped, when the first tensor is read from it. Raises StateError, then, too.
    """
    try:
        manifest = _parse((path / MANIFEST).read_bytes())
        if manifest["digest"] != digest:
            raise ValueError("it is not the one that rank 0 has")
        groups = disk.groups_of([disk.TensorFile(path / name, entry) for name, entry in manifest["files"].items()])
    except (ValueError, *disk.UNREADABLE) as error:
        raise StateError(f"this rank cannot read checkpoint {path}: {disk.reason(error)}", _ONE_FILE_SYSTEM) from error
    return Checkpoint(manifest["version"], groups, manifest["meta"], path, digest)


def _parse(data: bytes) -> dict[str, Any]:
    """Fields of a checkpoint's manifest. Raises ValueError and RecursionError unless `save` wrote each byte of it."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is not JSON") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}, which this diloco reads")
    fields = {name: value for name, value in tree.items() if name != "digest"}
    if tree.get("digest") != _digest(fields) or _encode(tree) != data:
        raise ValueError(f"{MANIFEST} was changed: its digest does not fit")
    version, files, meta = (fields.get(name) for name in ("version", "files", "meta"))
    if (
        fields.keys() != {"format", "version", "files", "meta"}
        or not (type(version) is int and version >= 0 and isinstance(meta, dict) and isinstance(files, dict))
        or not all(disk.FILE.fullmatch(name) and _is_entry(entry) for name, entry in files.items())
    ):
        raise ValueError(f"{MANIFEST} does not have the fields it should")
    return tree


def _is_entry(entry: Any) -> bool:
    """Whether a checkpoint manifest's entry of a file has a size and a SHA-256."""
    match entry:
        case {"bytes": int(size), "sha256": str(sha256), **rest}:
            return type(size) is int and not rest and _SHA256.fullmatch(sha256) is not None
    return False


def _encode(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, sort_keys=True, indent=1) + "\n").encode()


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_encode(fields)).hexdigest()
