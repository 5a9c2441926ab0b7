"""Records of what binds a voter, on its disk: promises, votes, attempts that it led, and the commits on which it stood.

    <directory>/votes    lines of JSON with a checksum, each synced before anything is said that follows from it

A line has the vote's record as it is from now on, with the accepted commit; and where the peer goes on to another head,
that commit. The last line counts. What was torn at the end was never synced, so that nothing follows from it: half a
line, and zeros or noise behind it. Damage before that, or in a file that ends with a line, a loss of power does not do.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from diloco.base import failpoints
from diloco.base.files import make_folders, open_to_write, replacing_file, sync_path
from diloco.base.sealed import sealed_line, unsealed
from diloco.base.threads import one_thread
from diloco.base.types import Commit
from diloco.exchange.log import DiskUse
from diloco.protocol.effects import Save
from diloco.protocol.vote import Restored, VoteRecord

VOTES = "votes"
_TYPES = [int, int, *map(type, astuple(VoteRecord("")))]
"""Types of life, number and record in a line."""
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)
"""Errors of lines whose checksums are right and which nobody wrote here."""


class Votes:
    """Records of a voter that has no disk: its next life is a learner."""

    use: DiskUse | None = None
    """Cost of this voter's log and votes; None: it has no disk."""

    async def save(self, save: Save) -> bool:
        """Save what binds the voter. Returns whether it is there for good; False: the disk refuses it."""
        return True

    def forget(self, version: int) -> None:
        """Forget the commits before this version: checkpoints have what they led to."""

    def stop(self) -> None:
        """Write no more votes."""


class DiskVotes(Votes):
    """Records of a voter in a file of its peer's folder. A thread of its own syncs: no disk holds up an event loop."""

    def __init__(self, directory: Path, warn: Callable[[str], None], use: DiskUse) -> None:
        """`use` counts what is written."""
        self._path, self._warn = directory / VOTES, warn
        self.use = self._use = use
        self._thread = one_thread("votes")
        self._descriptor = -1
        self._bytes = 0
        """Length of the whole lines in the file."""
        self._most_bytes = -1
        """Length that the file may have with the rest of a line that the disk refused; -1: it was not read yet."""
        self._refused = self._stopped = False

    async def save(self, save: Save) -> bool:
        if self._stopped:
            return False
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._write, save)

    def forget(self, version: int) -> None:
        if not self._stopped:
            self._thread.submit(self._compact, version)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)

    def _write(self, save: Save) -> bool:
        accepted, head = _text(save.accepted), _text(save.head)
        tree = {"number": save.number, "life": save.life, "record": asdict(save.record), "accepted": accepted}
        line = sealed_line(tree if head is None else {**tree, "head": head})
        try:
            self._open()
            os.ftruncate(self._descriptor, self._bytes)  # half a line must not stay: the next would stand behind it
            self._most_bytes = self._bytes + len(line)
            self._use.write(self._descriptor, self._path, line)
            failpoints.hit("before-vote-sync")
            self._use.sync(self._descriptor, self._path)
            self._bytes = self._most_bytes
        except OSError as error:
            if not self._refused:
                self._warn(f"no vote in {self._path}: {error.strerror}; this peer abstains until its disk takes one")
            self._refused = True
            return False
        self._refused = False
        return True

    def _compact(self, version: int) -> None:
        """Write the lines anew that still count, in another file that then takes the place of this one."""
        with suppress(OSError, *_MALFORMED):  # it stays as long as it is
            self._open()
            found = _lines(self._path.read_bytes()[: self._bytes])
            if found is None:
                return
            kept = [line for line, tree in found[:-1] if _stands_from(tree, version)]
            kept += [line for line, _ in found[-1:]]
            with replacing_file(self._path) as file:
                file.writelines(kept)
                file.flush()
                self._use.sync(file.fileno(), Path(file.name))
                self._close()  # a descriptor of the old file would write where nobody reads
                self._bytes = self._most_bytes = sum(map(len, kept))
            sync_path(self._path.parent)

    def _open(self) -> None:
        """Have the file open. Raises OSError, also where it is not as this process left it: to write on would cut off
        what another one has promised there."""
        if self._descriptor < 0:
            make_folders(self._path.parent)
            self._descriptor = open_to_write(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                if self._most_bytes < 0:
                    data = self._path.read_bytes()
                    self._bytes = sum(len(line) for line, _ in _lines(data) or ())  # damaged: that life is over
                    self._most_bytes = len(data)
                sync_path(self._path.parent)
            except OSError:
                self._close()  # the next save begins with this again
                raise
        status = os.fstat(self._descriptor)
        ours = os.path.samestat(status, self._path.stat()) and self._bytes <= status.st_size <= self._most_bytes
        if not ours:
            raise OSError(errno.EBUSY, "another process has written there: stop it, and start this one again")

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):
            if descriptor >= 0:
                os.close(descriptor)


# ---------------------------------------------------------------- what a restart reads


@dataclass(frozen=True)
class PastVotes:
    """Contents of a voter's disk: its life, and the commits on which it stood since its oldest checkpoint, in order."""

    restored: Restored
    commits: Mapping[str, Commit]
    """By digest."""

    @property
    def goes_on(self) -> bool:
        """Whether the life is in the last commit on which it stood. Else it had left, or was left out."""
        return any(member.incarnation == self.restored.life for member in self.restored.head.view)

    def since(self, commit: Commit | None) -> Sequence[Commit]:
        """The commits that follow this one, in order: those that lead to where it stood last, or else as far as they
        go, as where a state of another lineage was copied. None after no commit."""
        follows = {one.previous: one for one in self.commits.values()}
        digest = self.restored.head.digest
        while digest in self.commits:
            follows[self.commits[digest].previous] = self.commits[digest]
            digest = self.commits[digest].previous
        found = list[Commit]()
        while commit is not None and commit.digest in follows:
            commit = follows[commit.digest]
            found.append(commit)
        return found


def past_votes(directory: Path) -> PastVotes | None:
    """Records of the voter whose folder this is. None: nothing binds it, or what is there was damaged, so that nobody
    knows what this life has said: it is over."""
    try:
        found = _lines((directory / VOTES).read_bytes())
    except OSError:
        return None
    if not found:
        return None
    last = found[-1][1]
    try:  # the checksums may be a stranger's, in a folder that was handed over
        heads = [Commit.from_bytes(tree["head"].encode()) for _, tree in found if "head" in tree]
        commits = {head.digest: head for head in heads}
        accepted = Commit.from_bytes(last["accepted"].encode()) if last["accepted"] is not None else None
        record = VoteRecord(**last["record"])
        fields = (last["life"], last["number"], *astuple(record))
        if [*map(type, fields)] != _TYPES or not all(-1 <= one < 2**63 for one in fields if type(one) is int):
            raise ValueError("a vote with a field of another type or size")
        return PastVotes(Restored(last["life"], last["number"], record, accepted, commits[record.head]), commits)
    except _MALFORMED:
        return None


def _lines(data: bytes) -> list[tuple[bytes, dict[str, Any]]] | None:
    """Lines of a file of votes up to a torn tail, and what they say. None: the file was damaged.

    Each line is synced before the next is written: a torn one has at most its own bytes, and its end comes last.
    """
    *lines, tail = data.split(b"\n")
    found = [(line + b"\n", unsealed(line)) for line in lines]
    whole = [(line, tree) for line, tree in found if tree is not None]
    damaged = [number for number, (_, tree) in enumerate(found) if tree is None]
    return whole if not damaged or (tail and damaged[0] == len(whole)) else None


def _stands_from(tree: Mapping[str, Any], version: int) -> bool:
    """Whether a line has a commit of this version or a later one, on which the voter stood."""
    return "head" in tree and Commit.from_bytes(tree["head"].encode()).version >= version


def _text(commit: Commit | None) -> str | None:
    return commit.to_bytes().decode() if commit is not None else None
