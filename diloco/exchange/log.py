"""The log of one rank of a peer: encoded means of versions since its last checkpoints. State = checkpoint + log.

    <directory>/log/v00000012.5f2c9a7e11-3.r0.mean    a mean of version 12: life, count and rank of who logged it
    <directory>/log/spare.v00000002.(...).mean        one that a checkpoint has: the next mean is written over it

    frames    number, size and seal of a part, and its payload, as the parts came; the latest of each counts
    end       a frame without a number: checksum and JSON on a line, with the digest of the mean and the parts before it

A part is written when it is here, for a disk is faster than the link that it came over; the sync at the end makes the
mean durable. A repair may take parts away and bring others: another end follows. A file without an end was never whole.
Measured on ext4 with 16 MB in 16 parts: 31 ms, of which 27 ms is one sync at the end. So parts are synced as they come.

To write over blocks that a file has costs half of what new ones do: a sync then waits for no journal, in which other
files stand, too. What was there before may follow what is new, or stand in its place after a loss of power: so the seal
of a frame is the xxh3-64 of its bytes with that of the file's name, which no other mean has had.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.files import disk, make_folders, open_to_write, sync_path
from diloco.base.sealed import checksum_of, sealed_line, unsealed
from diloco.base.threads import one_thread

logger = logging.getLogger(__name__)

LOG = "log"
SYNC_BYTES = 2**22
"""A mean is synced whenever so much of it was written, so that little is left for its end."""
MAX_REMEMBERED = 16
"""Means of which a lane knows whether they are on the disk."""
_FRAME = struct.Struct("<IQQ")
_END = 0xFFFFFFFF
_NAME = re.compile(r"v(\d{8,18})\.[0-9a-f]{1,16}-\d{1,9}\.r(\d{1,9})\.mean")
_SPARE = "spare."


class DiskUse:
    """Cost of a peer's log and votes: bytes written, and the longest sync. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._bytes, self._longest_s = 0, 0.0

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        """Write on in a file. Raises OSError."""
        disk().write(descriptor, path, data)
        with self._lock:
            self._bytes += len(data)

    def sync(self, descriptor: int, path: Path) -> None:
        """Have a file on the disk. Raises OSError."""
        began_s = monotonic_s()
        disk().sync(descriptor, path)
        with self._lock:
            self._longest_s = max(self._longest_s, monotonic_s() - began_s)

    def take(self) -> tuple[int, float]:
        """Bytes, and the longest sync in seconds, since the last call."""
        with self._lock:
            taken = self._bytes, self._longest_s
            self._bytes, self._longest_s = 0, 0.0
        return taken


# ---------------------------------------------------------------- on the log's thread


class MeanFile:
    """A mean that is being written to a rank's log. Every method but `drop` raises OSError."""

    def __init__(self, path: Path, use: DiskUse) -> None:
        """Nothing is there before the first part."""
        self.path, self._use = path, use
        self._descriptor = -1
        self._held: set[int] = set()
        self._unsynced_bytes = 0
        self._ended = False

    def put(self, part: int, payload: bytes) -> None:
        """Write a part of the mean to the log; one that was there before counts no longer."""
        self._write(part, payload)
        self._held.add(part)
        if self._unsynced_bytes > SYNC_BYTES:
            self._sync()

    def end(self, digest: str) -> None:
        """End the mean in the log: it is whole, and on the disk when this returns."""
        self._write(_END, sealed_line({"mean": digest, "held": sorted(self._held)}))
        failpoints.hit("before-log-sync")
        self._sync()
        self._ended = True

    def drop(self) -> None:
        """Write no more to the log's file. What never was whole goes."""
        descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):
            if descriptor >= 0:
                os.close(descriptor)
            if not self._ended:
                self.path.unlink(missing_ok=True)

    def _write(self, part: int, payload: bytes) -> None:
        if self._descriptor < 0:
            self._create()
        head = _FRAME.pack(part, len(payload), _seal(self.path, payload))
        for data in (head, payload):
            self._use.write(self._descriptor, self.path, data)
        self._unsynced_bytes += len(head) + len(payload)

    def _create(self) -> None:
        make_folders(self.path.parent)
        self._descriptor = self._take_spare()
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # on a file system without locks no spare is taken, either
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sync_path(self.path.parent)

    def _take_spare(self) -> int:
        """The descriptor of a spare of this rank, which has this file's name from now on; -1: there is none."""
        rank = self.path.name.split(".")[2]
        for spare in sorted(self.path.parent.glob(f"{_SPARE}*.{rank}.mean")):
            with suppress(OSError):  # it went meanwhile, or a mean that never became whole is still written to it
                descriptor = open_to_write(spare, os.O_WRONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    spare.rename(self.path)
                except OSError:
                    os.close(descriptor)
                    raise
                return descriptor
        return -1

    def _sync(self) -> None:
        self._use.sync(self._descriptor, self.path)
        self._unsynced_bytes = 0


# ---------------------------------------------------------------- on the loop's thread


class MeanDraft:
    """A mean that is being made in a lane without a log: it stays in memory."""

    def put(self, part: int, payload: bytes) -> None:
        """Log a part of the mean."""

    def end(self, digest: str) -> None:
        """Log that the mean is whole. `LaneLog.durable` tells when it is on the disk."""

    def drop(self) -> None:
        """Log no more of it: another attempt begins, or the version has closed."""


class LoggedDraft(MeanDraft):
    """A mean on its way into a lane's log. What is dropped is written no more, and takes no memory."""

    def __init__(self, log: DiskLog, file: MeanFile) -> None:
        self._log, self._file = log, file
        self._closed = self._refused = False
        self._payloads: deque[tuple[int, bytes]] = deque()
        """Parts that are still to be written, and belong to no mean that is whole."""

    def put(self, part: int, payload: bytes) -> None:
        if not self._closed:
            payloads = self._payloads
            payloads.append((part, payload))
            self._log.submit(lambda: self._write(payloads))

    def end(self, digest: str) -> None:
        if not self._closed:
            self._payloads = deque()
            self._log.remember(digest, self._log.submit(lambda: self._ended(digest)))

    def drop(self) -> None:
        self._payloads.clear()
        self.close()

    def close(self) -> None:
        """Log no more of it than it has."""
        if not self._closed:
            self._closed = True
            self._log.submit(self._file.drop)

    def _write(self, payloads: deque[tuple[int, bytes]]) -> None:
        with suppress(IndexError):  # it was dropped meanwhile
            part, payload = payloads.popleft()
            self._unless_refused(lambda: self._file.put(part, payload))

    def _ended(self, digest: str) -> bool:
        self._unless_refused(lambda: self._file.end(digest))
        if not self._refused:
            self._log.taken()
        return not self._refused

    def _unless_refused(self, write: Callable[[], None]) -> None:
        try:
            if not self._refused:
                write()
        except OSError as error:
            self._refused = True
            self._file.drop()  # what it has of the mean takes room that the next attempt to log it needs
            self._log.refused(error)


class LaneLog:
    """The log of a lane's means, where there is none: they stay in memory."""

    failed: Callable[[BaseException], None]
    """Told of an error that is not the disk's."""

    def begin(self, version: int) -> MeanDraft:
        """Begin to log a mean of this version."""
        return MeanDraft()

    def fetched(self, version: int, digest: str, parts: Sequence[bytes], held: Collection[int]) -> None:
        """Log the parts `held` here of a mean that was fetched whole."""

    def again(self, version: int, digest: str, parts: Sequence[bytes], held: Collection[int]) -> None:
        """Log a mean once more, if the disk has refused it."""

    async def durable(self, digest: str) -> bool:
        """Whether a mean that is whole here is on the disk. Waits until it is, or the disk has refused it."""
        return True

    def stop(self) -> None:
        """Write no more to the lane's log, once what was begun is there."""


class DiskLog(LaneLog):
    """The log of a lane's means on a disk, by a thread of its own: no disk holds up an event loop.

    A disk that refuses ends no training: there is a warning, and this peer votes for no mean that its log lacks. What
    others decide is left out, and a restart goes on from before it.
    """

    def __init__(self, directory: Path, rank: int, life: int, warn: Callable[[str], None]) -> None:
        """`directory`: the peer's folder, where all ranks of an island have their logs. `life`: no other life of this
        rank has the same."""
        self.use = DiskUse()
        self._folder, self._rank, self._life, self._warn = directory / LOG, rank, life, warn
        self._thread = one_thread("log")
        self._count = 0
        self._full = self._stopped = False
        self._whole: dict[str, Future[object]] = {}
        """Means that are whole, by digest: whether the disk has them."""

    def begin(self, version: int) -> LoggedDraft:
        self._count += 1
        name = f"v{version:08d}.{self._life:x}-{self._count}.r{self._rank}.mean"
        return LoggedDraft(self, MeanFile(self._folder / name, self.use))

    def fetched(self, version: int, digest: str, parts: Sequence[bytes], held: Collection[int]) -> None:
        draft = self.begin(version)
        for part in held:
            draft.put(part, parts[part])
        draft.end(digest)
        draft.close()

    def again(self, version: int, digest: str, parts: Sequence[bytes], held: Collection[int]) -> None:
        whole = self._whole.get(digest)
        if whole is not None and whole.done() and not whole.result():
            self.fetched(version, digest, parts, held)

    async def durable(self, digest: str) -> bool:
        whole = self._whole.get(digest)
        return whole is None or bool(await asyncio.shield(asyncio.wrap_future(whole)))

    def stop(self) -> None:
        self._stopped = True
        self._thread.shutdown(wait=False)

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Have the log's thread do this, after all that came before."""

        def done() -> object:
            try:
                return work()
            except BaseException as error:  # the thread's edge
                self.failed(error)
                return False

        if not self._stopped:
            return self._thread.submit(done)
        ended = Future[object]()
        ended.set_result(False)
        return ended

    def remember(self, digest: str, whole: Future[object]) -> None:
        """Know of a mean in the lane's log whether it is on the disk."""
        self._whole[digest] = whole
        for old in list(self._whole)[:-MAX_REMEMBERED]:
            del self._whole[old]

    def taken(self) -> None:
        """The disk has taken a mean of the lane. On the log's thread."""
        self._full = False

    def refused(self, error: OSError) -> None:
        """The disk refuses a mean of the lane: there is one warning until it takes one. On the log's thread."""
        if not self._full:
            self._warn(f"no mean in the log: {error.strerror}; this peer votes for none until its disk takes it")
        self._full = True


# ---------------------------------------------------------------- what a restart reads


def forget_means(directory: Path, version: int) -> None:
    """Take the means of this version and those before it out of the logs of all ranks: checkpoints have them.

    Their files are written over next; no more of them are kept than there were means in the log.
    """
    folder = directory / LOG
    with suppress(OSError):
        means = _files(folder)
        for path, _ in means:
            if _version_of(path) <= version:
                path.rename(folder / f"{_SPARE}{path.name}")
        for spare in sorted(folder.glob(f"{_SPARE}*"))[: -len(means) or None]:
            spare.unlink(missing_ok=True)


def logged_mean(
    directory: Path,
    rank: int,
    version: int,
    digest: str,
    parts: int,
    wanted: Collection[int],
) -> list[bytes] | None:
    """The `wanted` of so many parts of a mean, from the logs of all ranks, that of `rank` first; the others are empty.
    None: they are not all there as they were written, or the disk does not give them. Then a warning says why."""
    files: list[tuple[Path, int]] = []
    with _warned(directory / LOG):
        files = [(path, number) for path, number in _files(directory / LOG) if _version_of(path) == version]
    found: dict[int, bytes] = {}
    for path, _ in sorted(files, key=lambda file: file[1] != rank):
        missing = {part for part in wanted if part not in found}
        if not missing:
            break
        with _warned(path):  # another file may have the same mean
            found |= _read(path, digest, missing)
    if any(part not in found for part in wanted):
        return None
    return [found.get(part, b"") for part in range(parts)]


@contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Turn an error of the disk that has this part of a log into a warning: a damaged file ends no start."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be read: %s; going on without it", path, error.strerror)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Files of the logs of all ranks, each with its rank."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(path, int(match[2])) for path in paths if (match := _NAME.fullmatch(path.name))]


def _version_of(path: Path) -> int:
    return int(path.name[1:].partition(".")[0])


def _read(path: Path, digest: str, wanted: Collection[int]) -> Mapping[int, bytes]:
    """Those of the wanted parts that a file has of a mean; none where it has no such mean, whole and unchanged."""
    payloads: dict[int, bytes] = {}
    held = set[int]()
    for part, payload in _frames(path):
        if part != _END:
            held.add(part)
            if part in wanted:
                payloads[part] = payload
            continue
        end = unsealed(payload.removesuffix(b"\n"))
        if end is None:
            break
        if end.get("mean") == digest and end.get("held") == sorted(held):
            return payloads
    return {}


def _frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Frames of a file, up to the first that is not as it was written."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            part, size, seal = _FRAME.unpack(head)
            if size > size_bytes:
                return
            payload = file.read(size)
            if len(payload) < size or _seal(path, payload) != seal:
                return
            yield part, payload


def _seal(path: Path, payload: bytes) -> int:
    """Checksum of a frame of this file: no other file's frame has the same."""
    return checksum_of(payload) ^ checksum_of(path.name.encode())
