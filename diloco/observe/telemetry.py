"""What a run tells about itself: events as JSON lines, seconds per step, and numbers as people read them.

Every peer appends to its own `events.jsonl`, one event per line:

    {"t": seconds since this process's Events began (monotonic), "time": unix seconds, "peer": name, "kind": ..., ...}

README.md ("What a peer tells of its hardware") has the fields of "usage" events.

Nothing about correctness rests on these files. They may end in half a line after a `kill -9`, and a full disk ends
the writing, not the training. `time` orders the files of one machine for a report; no decision ever reads it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.base.errors import ResourceError

log = logging.getLogger(__name__)

Event = dict[str, Any]

STEPS = ("inner", "pseudo_gradient", "compress", "exchange", "average", "outer", "merge", "other")
"""Keys of a version's `seconds`: the seven steps of the line in order, and what is left of the round."""
TAIL_BYTES = 2**16
FLIGHT = "flight"
"""Beside these while a version is applied, then an event's `flight_s`: since the contribution was measured that it
counts."""


# ---------------------------------------------------------------- events


class Events:
    """One peer's event log: a file (or none) and listeners in this process."""

    def __init__(self, path: Path | None, peer: str, listeners: Sequence[Callable[[Event], None]] = ()) -> None:
        """Continues an existing file. Raises ResourceError where it cannot be opened.

        `listeners` get every event in order, one at a time; they must not emit.
        """
        self._peer = peer
        self._listeners = tuple(listeners)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._path = path
        self._descriptor = None if path is None else _open_to_append(path)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Write one event (values: plain JSON; floats that are not finite become null). From any thread."""
        with self._lock:
            stamp = {"t": round(time.monotonic() - self._began, 6), "time": round(time.time(), 6)}
            event: Event = _finite({**stamp, "peer": self._peer, "kind": kind, **fields})
            self._write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
            for listener in self._listeners:
                listener(event)

    def close(self) -> None:
        """Close the file. Later events reach the listeners only."""
        with self._lock:
            self._close()

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            written = os.write(self._descriptor, line)  # one call per line: no buffer to lose, no line torn by a crash
            cause = "" if written == len(line) else "the disk took half a line"
        except OSError as error:
            cause = str(error)
        if cause:
            log.warning("no more events to %s: %s; training goes on", self._path, cause)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_events(path: Path, thinned: str = "") -> Iterator[Event]:
    """All whole events of a file, in order, each as it is asked for; none for a file that is not there.

    Where many of kind `thinned` follow each other, only the first and the last, which costs neither time nor memory.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines = _thinned(file, f'"kind":"{thinned}"'.encode()) if thinned else file
        yield from (event for line in lines if (event := _parse(line)) is not None)


def _thinned(lines: Iterable[bytes], mark: bytes) -> Iterator[bytes]:
    """Without those that have the mark, and stand between two others that have it."""
    last, many = b"", False
    for line in lines:
        if mark in line:
            if not many:
                yield line
            last, many = (line, True) if many else (b"", True)
            continue
        if last:
            yield last
        last, many = b"", False
        yield line
    if last:
        yield last


GOODBYES = frozenset({"left", "leaving", "goodbye", "done"})
"""Reasons of a "view" event for a peer that left of its own will; any other reason is a death."""


def departures(event: Event) -> list[tuple[str, str]]:
    """(peer, reason) for everyone a "view" event says has left.

    `left` lists names, or `{"peer": name, "reason": text}`; a reason of the event itself holds for bare names.
    """
    common = {"reason": event.get("reason") or ""}
    entries = [{**common, **(one if isinstance(one, dict) else {"peer": one})} for one in event.get("left") or ()]
    return [(str(entry.get("peer")), str(entry["reason"])) for entry in entries]


def _open_to_append(path: Path) -> int:
    """Raises ResourceError, also where somebody else has it open: a peer's folder has one writer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _claim(descriptor)
        if path.is_file():  # after a kill -9: a line begun would swallow the next one
            os.ftruncate(descriptor, _whole_bytes(descriptor))
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            cause = f"another process, or another run in this one, writes to {path.parent}"
            raise ResourceError(cause, "wait until that peer has ended, or choose another --dir") from error
        raise _unwritable(path, error) from error
    return descriptor


def _unwritable(path: Path, error: OSError) -> ResourceError:
    fix = "free the disk or choose another storage.directory"
    return ResourceError(f"cannot write events to {path}: {error.strerror}", fix)


def _claim(descriptor: int) -> None:
    """Until the descriptor is closed, or the process has ended, however that happens. Raises OSError where another one
    has it. Not where the file system has no locks.

    `lockf` would end where this process reads the file elsewhere and closes it. Linux keeps `flock` on NFS, too, among
    all machines: there it is a lock of all bytes, for which the file must be open for writing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise


def _whole_bytes(descriptor: int) -> int:
    """Where the last whole line ends."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(end - TAIL_BYTES, 0)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


# ---------------------------------------------------------------- seconds


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the monotonic seconds spent inside to `seconds[name]`, also when the body raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began


# ---------------------------------------------------------------- numbers for people

NOTHING = "–"
"""Where a number would stand and there is none."""


def readable_bytes(count: float | None) -> str:
    """Decimal units with three digits: 1.93 MB."""
    return NOTHING if count is None else _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def readable_count(count: float | None) -> str:
    """Three digits and a letter: 10.2k."""
    return NOTHING if count is None else _scaled(count, ("", "k", "M", "G", "T")).replace(" ", "")


def readable_duration(seconds: float | None) -> str:
    """0.31 s, 44.0 s, 12:03 (minutes), 3:12:03 (hours)."""
    if seconds is None:
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def readable_times(factor: float | None) -> str:
    """212×, 3.9×."""
    return NOTHING if factor is None else f"{_three_digits(factor)}×"


def readable_loss(loss: float | None) -> str:
    """2.312 (nats per token)."""
    return NOTHING if loss is None else f"{loss:.3f}"


def readable_percent(share: float | None) -> str:
    """A signed difference: +1.2 %, −0.4 %."""
    return NOTHING if share is None else f"{100 * share:+.1f} %".replace("-", "−")


def readable_share(share: float | None) -> str:
    """A part of a whole, with two digits: 12 %, 0.43 %."""
    return NOTHING if share is None else f"{100 * share:.2g} %"


def readable_flops(flops_per_s: float | None) -> str:
    """1.93 TFLOP/s."""
    if flops_per_s is None:
        return NOTHING
    return _scaled(flops_per_s, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"))


def readable_text(text: object, width: int = 32) -> str:
    """What another machine sent, safe to show on one line: all but plain ASCII is spelled out, and cut at `width`."""
    plain = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in str(text)[:width])
    return plain if len(plain) <= width and len(str(text)) <= width else plain[: width - 1] + "…"


def printable(text: str) -> str:
    """The same, in full: only what moves a terminal's cursor, or turns the direction of text, is spelled out."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _scaled(count: float, units: Sequence[str]) -> str:
    scale = 0
    while abs(count) >= 999.5 and scale < len(units) - 1:
        count, scale = count / 1000, scale + 1
    number = f"{count:.0f}" if scale == 0 else _three_digits(count)
    return f"{number} {units[scale]}".rstrip()


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
