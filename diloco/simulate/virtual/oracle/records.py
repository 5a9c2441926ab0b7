"""Checks of what a simulated peer writes: it is on the disk when production says so, and it says what was so.

A checkpoint is read here by its format alone, when it is complete, and compared with the progress that was followed
apart. A life that resumes must have what the checkpoint's own life had.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diloco.accounts.ledger import LEDGER
from diloco.base.sealed import checksum_of
from diloco.base.types import Commit
from diloco.outer.fragments import read_fragment
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.oracle.progress import SimulatedProgress
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.storage.checkpoint import Checkpoint

CHECKPOINTS = "checkpoints"
LOG = "log"
FRAME = struct.Struct("<IQQ")
TOLERANCE = 1e-3


@dataclass(frozen=True)
class SavedProgress:
    """A simulated peer as it was when a checkpoint of it was begun."""

    version: int
    commit: str
    """Digest of its commit; empty: there is none."""
    state: str
    tokens: int
    blocks: int
    pieces: tuple[tuple[int, ...], ...]
    sums: tuple[Tensor, ...]
    residuals: tuple[Tensor, ...]

    @staticmethod
    def of(progress: SimulatedProgress) -> SavedProgress:
        """The progress of a simulated life now."""
        line = progress.line
        commit = line.commit.digest if line.commit is not None else ""
        return SavedProgress(
            line.state.version, commit, line.state.digest, progress.tokens, line.trained.blocks,
            tuple(map(tuple, progress.uncommitted)), tuple(one.clone() for one in progress.sums),
            tuple(one.clone() for one in progress.residuals),
        )  # fmt: skip


class SimulatedRecords:
    """Checkpoints and ledger of one life of a simulated peer."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._begun: SavedProgress | None = None
        self._opened = -1
        """Version of the checkpoint with which this life began: a later one may never have been complete."""
        self._before: set[int] = set()
        """Versions of the checkpoints that there are meanwhile, up to its own."""
        self.kept = 0
        """Records of this life's ledger, from the first on, that are on the disk whatever happens to its machine."""
        self._kept_commits: set[str] = set()
        self._copied_commits: set[str] = set()
        """Those that the old copy of the disk has, too."""
        self._rollbacks, self._refusals = process.disk.rollbacks, process.disk.refusals

    # ------------------------------------------------------------ checkpoints

    def begins(self) -> None:
        """A checkpoint is begun: it must have what the peer has now."""
        process = self._process
        if process.progress is not None:
            self._begun = SavedProgress.of(process.progress)
            self._before = self._until(self._begun.version)
            process.disk.saved.append(self._begun)
            if self._begun.version in self._before:
                process.disk.durable, process.disk.reach = -1, process.disk.NOWHERE  # the one in its place steps aside

    def _until(self, version: int) -> set[int]:
        here = {int(path.name[1:]) for path in (self._process.disk.folder / CHECKPOINTS).glob("v*")}
        return {one for one in here if one <= version}

    def complete(self) -> None:
        """I5: production says that the checkpoint begun last is complete."""
        begun, disk, name = self._begun, self._process.disk, self._process.name
        if begun is None:
            return
        folder = disk.folder / CHECKPOINTS
        path = folder / f"v{begun.version:08d}"
        here, keep = self._until(begun.version), self._process.world.setup.site.storage.keep
        if not path.is_dir() or len(here) != min(len(self._before | {begun.version}), keep):
            raise Violation("I5", f"{name} keeps checkpoints of {sorted(here)} after that of version {begun.version}")
        if not disk.lying:
            for one in (folder, path, *path.iterdir()):
                if not disk.certain(one):
                    raise Violation("I5", f"{name} does not sync {one.name} of its checkpoint {path.name}")
            disk.durable = max(disk.durable, begun.version)
            disk.reach = max(disk.reach, (begun.version, begun.commit))
        self._compare(path, begun)

    def copied(self, before: Commit | None) -> None:
        """A state was copied, in place of that of `before`: where its lineage was left, checkpoints of what did not
        lead to the copied state are void."""
        process = self._process
        commit, commits, disk = process.line.commit, process.world.invariants.commits, process.disk
        if before is None or commit is None or commit.lineage == before.lineage:
            return
        line = {commit.digest}
        while (earlier := commits.get(commit.previous)) is not None:
            commit = earlier
            line.add(commit.digest)
        disk.void = {one.commit for one in disk.saved} - line
        unsure = {one.version for one in disk.saved if one.commit in disk.void}
        disk.durable = max(self._until(disk.durable) - unsure, default=-1)
        disk.reach = max(
            ((one.version, one.commit) for one in disk.saved if one.version == disk.durable), default=disk.NOWHERE
        )

    def _compare(self, path: Path, begun: SavedProgress) -> None:
        """I5: a simulated peer's checkpoint has the numbers and values of the peer when it was begun."""
        meta = json.loads((path / "manifest.json").read_text())["meta"]
        name, where = self._process.name, f"checkpoint of version {begun.version}"
        if (meta["tokens"], meta["blocks"]) != (begun.tokens, begun.blocks):
            what = f"has {meta['tokens']} tokens and {meta['blocks']} blocks of progress"
            raise Violation("I5", f"{name}'s {where} {what}, there are {begun.tokens} and {begun.blocks}")
        progress = self._process.progress
        assert progress is not None
        layout = progress.line.layout
        residuals = _tensors(path, "residual")
        for fragment, true in zip(layout.fragments, begun.residuals, strict=True):
            found = residuals.get(str(fragment.index))
            self._alike(f"residual in its {where}", true, found if found is not None else torch.zeros_like(true))
        outer, local = _tensors(path, "outer"), _tensors(path, "local")
        left = any(map(any, begun.pieces))  # of other fragments, or of omitted parts, also when no tokens are left
        if bool(local) != left and not (local and len(layout.fragments) > 1):
            what = f"has {'' if local else 'no '}weights, and there is {'' if left else 'no '}progress"
            raise Violation("I5", f"{name}'s {where} {what}")
        if local and progress.exact:
            anchors = [outer[f"{fragment.index}/anchor"] for fragment in layout.fragments]
            for fragment, anchor, true in zip(layout.fragments, anchors, begun.sums, strict=True):
                self._alike(f"progress in its {where}", true, read_fragment(local, fragment) - anchor)

    def _alike(self, what: str, true: Tensor, found: Tensor) -> None:
        progress = self._process.progress
        assert progress is not None
        error = (found - true).abs().max().item()
        if progress.exact and not error <= TOLERANCE * (1 + true.abs().max().item()):
            raise Violation("I5", f"{self._process.name}: the {what} is off by {error:.2g}")

    def found(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """I5: a life that begins with its disk has found this checkpoint there. Returns it."""
        disk = self._process.disk
        if checkpoint is None and disk.durable >= 0:
            what = f"resumes from nothing, and its disk has a checkpoint of version {disk.durable}"
            raise Violation("I5", f"{self._process.name} {what}")
        if checkpoint is not None:
            self._opened = checkpoint.version
        return checkpoint

    def resumed(self) -> tuple[SavedProgress, list[Commit], bool]:
        """I5: a simulated life begins with what the newest checkpoint's own life had, and the versions that it applied
        since, as far as its log has them. Returns that, those versions, and whether the progress is gone: it may go
        where one of them counts this peer."""
        process = self._process
        assert process.progress is not None
        line, disk = process.line, process.disk
        if line.state.version < disk.reach[0]:
            what = f"resumes at version {line.state.version}, and its checkpoint and log lead to {disk.reach[0]}"
            raise Violation("I5", f"{process.name} {what}")
        commit = line.commit.digest if line.commit is not None else ""
        if commit in disk.void and not (disk.refusals or disk.damaged):  # else the ledger may lack what was copied
            raise Violation("I5", f"{process.name} resumes from version {line.state.version} of a lineage that is void")
        at, redone = line.commit, list[Commit]()
        begun = self._begun_at(line.state.version, at)
        while True:  # the newest may have been begun and never completed
            for saved, gone in self._fitting(begun, redone):
                return saved, redone[::-1], gone
            if at is None:
                break
            redone.append(at)
            at = process.world.invariants.commits.get(at.previous)
            begun = self._begun_at(at.version, at) if at is not None else []
        what = f"{line.trained.tokens} tokens and {line.trained.blocks} blocks of progress"
        raise Violation("I5", f"{process.name} resumes at version {line.state.version} with {what}, which none saved")

    def _begun_at(self, version: int, commit: Commit | None) -> list[SavedProgress]:
        """Checkpoints that were begun on a commit."""
        digest = commit.digest if commit is not None else ""
        return [one for one in self._process.disk.saved if (one.version, one.commit) == (version, digest)]

    def _fitting(self, begun: list[SavedProgress], redone: list[Commit]) -> Iterator[tuple[SavedProgress, bool]]:
        """Checkpoints from which the life may have begun, after it applied `redone` again; and whether the progress in
        it went, as that may be what they count."""
        process = self._process
        assert process.progress is not None
        line, pieces = process.line, tuple(map(tuple, process.progress.uncommitted))
        found = (line.trained.tokens, line.trained.blocks)
        counted = any(entry.peer == process.name for one in redone for entry in one.counted)
        gone = counted and found == (0, 0) and not line.remainder
        for one in reversed(begun):
            alike = one.pieces == pieces and (gone or (one.tokens, one.blocks) == found)
            if alike and one.version == self._opened and (redone or one.state == line.state.digest):
                yield one, gone

    # ------------------------------------------------------------ the ledger

    def booked(self, records: int, applied: Commit | None) -> None:
        """A record was written, the last of so many, or a gap is to tell of it: all are on the disk before the life
        goes on, where that keeps anything now. `applied`: the version that it is about."""
        disk = self._process.disk
        path = disk.folder / LEDGER
        if not disk.keeps:
            return
        if path.exists() and not disk.certain(path):
            raise Violation("I2", f"{self._process.name} goes on before the ledger's last record is on its disk")
        self.kept = records
        if applied is not None:
            self._kept_commits.add(applied.digest)
            if not disk.copied:
                self._copied_commits.add(applied.digest)
            self._reaches(applied)

    def _reaches(self, applied: Commit) -> None:
        """A version was applied: its mean is in the log, for certain, before its record is in the ledger."""
        disk, version = self._process.disk, applied.version
        if disk.refusals > self._refusals or disk.reach[1] != applied.previous:
            return
        if applied.moves and disk.durable < version and not self._logs(applied):
            raise Violation("I5", f"{self._process.name} applies version {version}, whose mean is not in its log")
        disk.reach = (version, applied.digest)

    def votes_for(self, commit: Commit) -> None:
        """Rule 5: whoever votes for a mean, and has a log, has it there for certain."""
        process = self._process
        logs = process.exchange.votes.use is not None and not process.disk.lying
        if logs and not self._logs(commit):
            raise Violation("I5", f"{process.name} votes for version {commit.version}, whose mean is not in its log")

    def _logs(self, commit: Commit) -> bool:
        """Whether the log has the whole mean of a version, for certain."""
        disk, parts = self._process.disk, self._process.line.layout.fragments[commit.fragment].parts
        files = (disk.folder / LOG).glob(f"v{commit.version:08d}.*")
        there = set[int]().union(*(logged_parts(path.name, disk.kept(path), commit.mean_digest) for path in files))
        return there == set(range(parts))

    @property
    def rolled_back(self) -> bool:
        """Whether an old copy of the disk took the place of what this life wrote."""
        return self._process.disk.rollbacks > self._rollbacks

    def keeps_commit(self, digest: str) -> bool:
        """Whether this life's ledger has a commit for certain."""
        return digest in self._kept_commits and not self.rolled_back

    def lost_commit(self, digest: str) -> bool:
        """Whether an old copy took the place of the disk on which this life had a commit, and is from before that."""
        return self.rolled_back and digest not in self._copied_commits


def _tensors(folder: Path, group: str) -> Mapping[str, Tensor]:
    """Tensors of a checkpoint's group, all of them fp32, by the format of safetensors; none where there is no file.
    Each rank has written a file, with slices of some."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{group}.*safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        slices = json.loads(header.pop("__metadata__", {}).get("slices", "{}"))
        for key, entry in header.items():
            first, last = entry["data_offsets"]
            values = torch.from_numpy(np.frombuffer(data[start + first : start + last], dtype="<f4").copy())
            name, shape, offsets = slices.get(key, (key, entry["shape"], [0] * len(entry["shape"])))
            whole = tensors.setdefault(name, torch.full(shape, torch.nan))
            whole[tuple(map(slice, offsets, map(sum, zip(offsets, entry["shape"], strict=True))))] = values.reshape(
                entry["shape"]
            )
    return tensors


def logged_parts(name: str, data: bytes, digest: str) -> set[int]:
    """Parts of a mean that a file of a log has, whole and as they were written; none, if it has no such mean."""
    at, held = 0, set[int]()
    while len(data) - at >= FRAME.size:
        part, size, seal = FRAME.unpack_from(data, at)
        payload = data[at + FRAME.size : at + FRAME.size + size]
        at += FRAME.size + size
        if seal != checksum_of(payload) ^ checksum_of(name.encode()):
            break  # of another mean, which it was written over
        if part == 2**32 - 1:
            end = json.loads(payload.partition(b" ")[2])
            if end["mean"] == digest and end["held"] == sorted(held):
                return held
        else:
            held.add(part)
    return set()
