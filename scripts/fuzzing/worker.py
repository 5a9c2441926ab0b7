"""One target's inputs, in a process of its own: a crash, a hang or all memory taken ends no other."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import FrameType, ModuleType

from scripts.fuzzing.spoiling import MAX_BYTES
from scripts.fuzzing.target import Finding, Target

STUCK = 5
"""Times the CPU that one input may take, after which its reading is broken off."""
DEAD_S = 60.0
"""A process that counts no input for so long hangs outside of Python."""
MAX_GROWTH_MB = 32.0
"""Memory that may be gone between the first tenth of the inputs and the end. atheris 3.0.0 itself keeps the result of
each comparison in the readers: 0.6 kB where it is a tensor."""
MAX_MEMORY_BYTES = 2**30
"""Address space beside that of the process when it begins."""
MEASURED_EVERY = 64
"""Inputs of which one has its memory measured to the byte, which takes several times as long."""
FACTOR = 64
"""Memory that an input may take, in times of its size: a list in JSON takes 2 bytes, and 56 in memory."""
_HEAD = struct.Struct("<QQQ")
MB = 1e6


@dataclass(frozen=True)
class Run:
    """Results of one target's process."""

    inputs: int
    refused: int
    accepted: int
    memory_mb: float
    """Growth of its memory since the first tenth of its inputs."""
    edges: int
    """Branches of the code that inputs reached; -1 where nobody counted."""
    finding: str
    """Empty, or what a reader did, in one line."""
    found: bytes = b""
    """The input with which it did."""


class Shared:
    """Counts and the present input of a target's process, in memory that outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + 2 * MAX_BYTES)

    def begin(self, tried: int, refused: int, data: bytes) -> None:
        """Note the next input."""
        data = data[: 2 * MAX_BYTES]
        self._memory[: _HEAD.size] = _HEAD.pack(tried, refused, len(data))
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data

    @property
    def counts(self) -> tuple[int, int]:
        """Inputs so far, and those that were refused."""
        tried, refused, _ = _HEAD.unpack_from(self._memory)
        return tried, refused

    @property
    def data(self) -> bytes:
        """The input that was read last."""
        size = _HEAD.unpack_from(self._memory)[2]
        return self._memory[_HEAD.size : _HEAD.size + size]


def fuzzed(target: Target, inputs: int, seed: int, guide: ModuleType | None, progress: Callable[[int], None]) -> Run:
    """Fuzz a target in a process of its own. `guide`: atheris, under which the readers' modules were imported."""
    shared = Shared()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            work = Path(folder) / "work"
            work.mkdir()
            os.chdir(work)
            _Worker(target, inputs, seed, shared, Path(folder) / "result.json").run(guide)
        try:
            status = _awaited(child, shared, progress)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        log.seek(0)
        said = log.read()
        result = Path(folder) / "result.json"
        tree = json.loads(result.read_text()) if result.exists() else {}
    tried, refused = shared.counts
    finding = tree.get("finding", f"the process ended with {_ending(status)}: {said.strip()[-200:]!r}")
    edges = [int(word) for word in _words_after("cov:", said)]
    return Run(
        tried, refused, tried - refused, tree.get("memory_mb", 0.0), edges[-1] if edges else -1,
        finding, shared.data if finding else b"",
    )  # fmt: skip


def _awaited(child: int, shared: Shared, progress: Callable[[int], None]) -> int:
    """The exit status of a process, which is killed if it counts no input for `DEAD_S`."""
    counted, since_s = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        tried, now_s = shared.counts[0], time.monotonic()
        if tried != counted:
            counted, since_s = tried, now_s
        elif now_s - since_s > DEAD_S:
            os.kill(child, signal.SIGKILL)
        progress(tried)
        time.sleep(0.02)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _words_after(word: str, text: str) -> list[str]:
    words = text.split()
    return [after for before, after in pairwise(words) if before == word and after.isdigit()]


class _Worker:
    """The inputs of one target, within its process."""

    def __init__(self, target: Target, inputs: int, seed: int, shared: Shared, result: Path) -> None:
        self._target, self._inputs, self._shared, self._result = target, inputs, shared, result
        self._random = Random(f"{seed} {target.name}")
        self._seed = seed
        self._tried = self._refused = 0
        self._early_mb = 0.0

    def run(self, guide: ModuleType | None) -> None:
        """Read all inputs, write the result, and end the process."""
        try:
            _limit_memory()
            _return_freed_memory()
            signal.signal(signal.SIGVTALRM, _break_off)
            seeds = list(self._target.corpus())
            for data in seeds:
                self._take(data, valid=True)
            if guide is not None:
                self._guided(guide, seeds)
            while self._tried < self._inputs:
                self._take(self._target.spoil(self._random.choice(seeds), self._random))
            self._end("")
        except Finding as finding:
            self._end(str(finding))
        except BaseException as error:
            traceback.print_exc()
            self._end(f"the fuzzer itself: {type(error).__name__}: {error}")

    def _guided(self, guide: ModuleType, seeds: list[bytes]) -> None:
        """Have atheris choose the inputs: it keeps those that reach new branches, and goes on from them."""
        folder = Path("../corpus")
        folder.mkdir()
        for number, data in enumerate(seeds):
            (folder / str(number)).write_bytes(data)

        def one(data: bytes) -> None:
            if self._tried >= self._inputs:
                self._end("")
            try:
                self._take(data)
            except Finding as finding:
                self._end(str(finding))

        def spoil(data: bytes, most: int, seed: int) -> bytes:
            random = Random(seed)
            if random.random() < 0.5:
                return self._target.spoil(data, random)[:most]
            return bytes(guide.Mutate(data, most))

        options = [f"-max_len={MAX_BYTES}", f"-seed={self._seed + 1}", "-rss_limit_mb=0", "-timeout=1000000"]
        guide.Setup([sys.argv[0], *options, str(folder)], one, custom_mutator=spoil)
        guide.Fuzz()

    def _take(self, data: bytes, valid: bool = False) -> None:
        """Read one input. Raises Finding; `valid`: also where it is refused, and for the first it has all time."""
        self._shared.begin(self._tried, self._refused, data)
        measured = self._tried % MEASURED_EVERY == 0 and not valid
        before_mb, began_s = _peak_mb(), time.thread_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, STUCK * self._target.cpu_s * (60 if valid else 1))
        if measured:
            tracemalloc.start()
        try:
            self._target.read(data)
        except self._target.refusals as error:
            self._refused += 1
            if valid:
                raise Finding(f"a valid input is refused: {error!r}"[:300]) from error
        except Finding:
            raise
        except BaseException as error:
            raise Finding(f"{type(error).__name__}: {error} at {_place(error)}"[:400]) from error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            taken_bytes = tracemalloc.get_traced_memory()[1] if measured else 0
            tracemalloc.stop()
        self._tried += 1
        spent_s, most = time.thread_time() - began_s, self._target.room_bytes + FACTOR * len(data)
        if spent_s > self._target.cpu_s and not valid:
            raise Finding(f"{spent_s:.1f} s of CPU for {len(data)} bytes")
        if taken_bytes > most:
            raise Finding(f"{taken_bytes / MB:.1f} MB of memory for {len(data)} bytes")
        if not valid and _peak_mb() - before_mb > 2 * MAX_GROWTH_MB + most / MB:
            raise Finding(f"{_peak_mb() - before_mb:.0f} MB more memory for {len(data)} bytes")
        if self._tried == max(self._inputs // 10, 1):
            self._early_mb = _memory_mb()

    def _end(self, finding: str) -> None:
        """Write the result and end the process, without what a long end may do."""
        grown_mb = _memory_mb() - self._early_mb if self._early_mb else 0.0
        if not finding and grown_mb > MAX_GROWTH_MB:
            finding = f"memory grows: {grown_mb:.0f} MB between input {self._inputs // 10} and {self._tried}"
        if not finding:
            self._shared.begin(self._tried, self._refused, b"")
        self._result.write_text(json.dumps({"finding": finding, "memory_mb": round(grown_mb, 1)}))
        sys.stdout.flush()
        os._exit(0)


def _break_off(number: int, frame: FrameType | None) -> None:
    raise Finding(f"it goes on and on, broken off at {frame.f_code.co_qualname if frame else ''}")


def _place(error: BaseException) -> str:
    """Where an exception came from: the innermost place in this project."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "diloco" in Path(frame.filename).parts or "converters" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # no /proc: no limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _return_freed_memory() -> None:
    """Return to the kernel what the process that forked this one had freed: a leak in it would not be seen."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _memory_mb() -> float:
    """Memory of its own that this process holds now, without that of files, which the kernel takes back as it likes;
    the most it ever held where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return _peak_mb()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024 / MB


def _peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MB
