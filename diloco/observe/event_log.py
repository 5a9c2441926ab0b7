"""One peer's event log: a file of JSON lines.

Every peer appends to its own `events.jsonl`, one event per line:

    {"t": seconds since this process's Events began (monotonic), "time": unix seconds, "peer": name, "kind": ..., ...}

`diloco.observe.events` has the kinds and their fields.

Nothing about correctness rests on these files. They may end in half a line after a `kill -9`, and a full disk ends
the writing, not the training. `time` orders the files of one machine for a report; no decision ever reads it.

Beside it is `.events.lock`, an empty file: who has it locked is the one process that writes to the peer's folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from diloco.base.clock import monotonic_s, unix_s
from diloco.base.errors import ResourceError
from diloco.base.files import open_to_write
from diloco.observe.events import Event, Stamped, from_json, to_json

log = logging.getLogger(__name__)

EventLine = dict[str, Any]
"""A line of an event file as plain JSON."""
TAIL_BYTES = 2**16


class Events:
    """One peer's event log: a file (or none), and listeners in this process."""

    def __init__(self, path: Path | None, peer: str, listeners: Sequence[Callable[[Stamped], None]] = ()) -> None:
        """Continues an existing file. Raises ResourceError where it cannot be opened, StateError for a symbolic link.

        `listeners` get every event in order, one at a time; they must not emit.
        """
        self._peer = peer
        self._listeners = tuple(listeners)
        self._began = monotonic_s()
        self._lock = threading.Lock()
        self._path = path
        self._descriptor: int | None = None
        self._folder_lock: int | None = None
        if path is not None:
            self._descriptor, self._folder_lock = _open_to_append(path)

    def emit(self, event: Event) -> None:
        """Write one event to the log, and give it to the listeners. From any thread. A log that fails is closed."""
        with self._lock:
            stamped = Stamped(round(monotonic_s() - self._began, 6), round(unix_s(), 6), self._peer, event)
            if self._descriptor is not None:
                line = json.dumps(to_json(stamped), separators=(",", ":")).encode() + b"\n"
                try:
                    # One call per line: no buffer to lose, no line torn by a crash.
                    written = os.write(self._descriptor, line)
                    cause = "" if written == len(line) else "the disk took half a line"
                except OSError as error:
                    cause = str(error)
                if cause:
                    log.warning("no more events to %s: %s; training goes on", self._path, cause)
                    os.close(self._descriptor)
                    self._descriptor = None
            for listener in self._listeners:
                listener(stamped)

    def close(self) -> None:
        """Close the event log, and give up its folder. Later events reach the listeners only."""
        with self._lock:
            for descriptor in (self._descriptor, self._folder_lock):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptor = self._folder_lock = None


def read_events(path: Path, thinned: type[Event] | None = None) -> Iterator[Stamped]:
    """All whole events of an event log, in order, each as it is asked for; none where there is no file.

    Where many of kind `thinned` follow each other, only the first and the last, which costs neither time nor memory.
    """
    return (event for line in read_lines(path, thinned.kind if thinned else "") if (event := from_json(line)))


def read_lines(path: Path, thinned: str = "") -> Iterator[EventLine]:
    """All whole events of an event log as plain JSON, of any kind; `thinned` as for `read_events`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines = _thinned(file, f'"kind":"{thinned}"'.encode()) if thinned else file
        yield from (event for line in lines if (event := _parse(line)) is not None)


def read_on(path: Path, offset: int) -> tuple[list[EventLine], int]:
    """The whole lines of a growing event log from `offset` on, and where they end; none where there is no file."""
    if not path.is_file():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [event for line in data[:end].splitlines() if (event := _parse(line)) is not None], offset + end


def _thinned(lines: Iterable[bytes], mark: bytes) -> Iterator[bytes]:
    """The lines of an event log, without those that have the mark and are between two others that have it."""
    for marked, group in groupby(lines, lambda line: mark in line):
        neighbours = iter(group)
        if marked:
            yield next(neighbours)
        yield from deque(neighbours, maxlen=1) if marked else neighbours


def _open_to_append(path: Path) -> tuple[int, int]:
    """Descriptors of an event log and of the lock beside it: a peer's folder has one writer. Raises ResourceError, also
    where it is locked, and StateError for a symbolic link.

    The lock is on a file of its own, which is empty and stays: a log may be moved away, or its disk be full, while the
    peer writes its votes and its ledger. It lasts until the descriptor is closed, or the process has ended, however
    that happens.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as on_error:
            lock = open_to_write(path.with_name(f".{path.stem}.lock"), os.O_RDWR | os.O_CREAT)
            on_error.callback(os.close, lock)
            try:
                # `lockf` would end where this process opens the file elsewhere and closes it. Linux keeps `flock` on
                # NFS, too, among all machines: there it is a lock of all bytes, for which the file must be open for
                # writing.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # any other error: the file system has no locks, and the log is written without
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    cause = f"another process, or another run in this one, writes to {path.parent}"
                    fix = "wait until that peer has ended, or choose another folder (--dir)"
                    raise ResourceError(cause, fix) from error
            descriptor = open_to_write(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            on_error.callback(os.close, descriptor)
            if path.is_file():  # after a kill -9: a line begun would swallow the next one
                os.ftruncate(descriptor, _whole_bytes(descriptor))
            on_error.pop_all()
    except OSError as error:
        fix = "free the disk or choose another storage.directory"
        raise ResourceError(f"cannot write events to {path}: {error.strerror}", fix) from error
    return descriptor, lock


def _whole_bytes(descriptor: int) -> int:
    """The end of the last whole line of an event log, in bytes."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(end - TAIL_BYTES, 0)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _parse(line: bytes) -> EventLine | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "kind" in event else None
