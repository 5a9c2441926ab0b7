"""A probe of the event loop for tests and measurements: CPU time of each of its callbacks. Off by default.

    DILOCO_LOOP_PROBE=/tmp/probe        /tmp/probe/4711.jsonl: a line for each callback of 2 ms or more of process 4711

CPU time of the loop's thread, and not the time that passes: other threads and other processes do not count. Passes of
the garbage collector, which may meet any callback, are counted beside it (`gc_s`). What the host of a virtual machine
took meanwhile from the CPU of this thread, by its own count (`stolen_s`), is left out of both: Linux charges it to the
thread that ran, 86 ms to a callback of 0.4 ms in one measurement. A host that stops a CPU to find it memory does not
even report that: no timer interrupt reaches the CPU meanwhile, so a callback has taken no more than the interrupts
allow (`charged_s` is what Linux said). With `nohz_full` they tell nothing, and no callback is forgiven by them.
Page faults of the thread stand beside (`faults`, `faults_on_disk`). Where there are none, its memory was there.
How slow this CPU is at the moment, beside one of usual speed, is measured right after the callback (`slowness`, 1 to
4): one whose other hyperthread is busy takes 1.6 times as long for the same work.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from diloco.base.errors import UsageError

VARIABLE: Final = "DILOCO_LOOP_PROBE"

CATCH_UP_LIMIT_S: Final = 0.05
LIMIT_S: Final = 0.01
"""Most CPU time of a callback while somebody catches up with the run, and at any other time."""

MIN_S: Final = 0.002
"""Shorter callbacks leave no line."""

_READING_AGE_S: Final = 0.001
"""The host's counters are read anew when a callback begins and the last reading is older; one costs 60 microseconds."""

_USUAL_S: Final = 30e-9
"""Time that a CPU of usual speed takes for one of the additions of `slowness`."""

_ADDITIONS: Final = 2_000
_SAMPLES: Final = 3
MAX_SLOWNESS: Final = 4.0
"""A limit is never more than so many times as long."""

_STAT: Final = Path("/proc/stat")
_INTERRUPTS: Final = Path("/proc/interrupts")
_NOHZ_FULL: Final = Path("/sys/devices/system/cpu/nohz_full")
_get_cpu: Callable[[], int] | None = (
    getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
)
"""The number of this thread's CPU, where the C library knows it."""
_CLOCK_MONOTONIC_COARSE: Final = 6
_TICK_S: Final = time.clock_getres(_CLOCK_MONOTONIC_COARSE) if sys.platform == "linux" else 0.0
"""Time between two timer interrupts of a busy CPU: that clock goes by them."""

_THREAD: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

_run = asyncio.Handle._run


class _Counters(NamedTuple):
    """Counters that Linux keeps for each CPU. None are there where it keeps none."""

    read_s: float
    cpu: str
    """The CPU of this thread; empty: unknown."""
    stolen: Mapping[str, int]
    """Hundredths of seconds that the host took from each CPU, as far as it says so."""
    interrupts: Mapping[str, int]
    """Timer interrupts of each CPU."""


class _ThisThread(threading.local):
    """State of the probe on one thread."""

    path: Path | None = None
    """The file for lines; None: this thread's callbacks are not measured."""
    gc_s = 0.0
    """CPU time of garbage collection so far."""
    gc_began_s = 0.0
    """CPU time when the latest pass of it began."""
    before: _Counters | None = None
    """The host's counters when they were last read."""


_here = _ThisThread()


def folder_from_environment() -> Path | None:
    """The folder that the environment variable names for the probe's files, made if it is not there; None: no probe.

    Raises UsageError when it cannot be made.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "name a folder that can be made and written to, or unset it"
        raise UsageError(f"{VARIABLE}: {folder}: {error.strerror}", fix) from None
    return folder


def probe(folder: Path | None) -> None:
    """Measure the callbacks of event loops on this thread from now on, with lines in that folder; None: do not."""
    if folder is not None:
        _here.path = folder / f"{os.getpid()}.jsonl"
        _install()


@cache
def _install() -> None:
    asyncio.Handle._run = _run_measured  # type: ignore[method-assign, assignment]
    gc.callbacks.append(_on_gc)


def _run_measured(handle: Any) -> None:
    if _here.path is None:
        _run(handle)
        return
    called = handle._callback, handle._args  # a handle that is cancelled forgets them
    before = _here.before
    if before is None or time.monotonic() - before.read_s > _READING_AGE_S:
        before = _here.before = _counters()
    faults = resource.getrusage(_THREAD)
    began_s, gc_before_s = time.thread_time(), _here.gc_s
    _run(handle)
    gc_s = _here.gc_s - gc_before_s
    cpu_s = time.thread_time() - began_s - gc_s
    if max(cpu_s, gc_s) >= MIN_S:
        now = _counters()
        charged_s, stolen_s, most_s = cpu_s, _stolen_s(before, now), _most_s(before, now)
        gc_s = max(0.0, gc_s - max(0.0, stolen_s - cpu_s))
        cpu_s = min(max(0.0, cpu_s - stolen_s), most_s)
        line = {"time": round(time.time(), 3), "process": " ".join(sys.argv), "callback": _name(*called)}
        with _here.path.open("a") as file:
            times = {"cpu_s": round(cpu_s, 5), "gc_s": round(min(gc_s, most_s), 5)}
            beside = {"charged_s": round(charged_s, 5), "stolen_s": stolen_s, "slowness": slowness()}
            file.write(json.dumps({**line, **times, **beside, **_faults_since(faults)}) + "\n")


def _faults_since(before: resource.struct_rusage) -> dict[str, int]:
    now = resource.getrusage(_THREAD)
    return {"faults": now.ru_minflt - before.ru_minflt, "faults_on_disk": now.ru_majflt - before.ru_majflt}


def busy_s(line: Mapping[str, Any], *, with_gc: bool) -> float:
    """CPU time in seconds of the callback of a line, as a CPU of usual speed would have taken it."""
    return float(line["cpu_s"] + (line["gc_s"] if with_gc else 0.0)) / float(line["slowness"])


def slowness() -> float:
    """Time that this CPU takes for some work now, by what one of usual speed takes: 1 to `MAX_SLOWNESS`."""
    quickest_s = min(_additions_s() for _ in range(_SAMPLES))  # in the others the host may have taken some
    return round(min(max(1.0, quickest_s / (_ADDITIONS * _USUAL_S)), MAX_SLOWNESS), 2)


def _additions_s() -> float:
    began_s, total = time.thread_time(), 0
    for number in range(_ADDITIONS):
        total += number
    return time.thread_time() - began_s


def _stolen_s(before: _Counters, now: _Counters) -> float:
    """Seconds that the host took from this thread's CPU by its own word: the one where it began, or where it ended."""
    return max(_counted(before.stolen, now.stolen, before, now), default=0) / os.sysconf("SC_CLK_TCK")


def _most_s(before: _Counters, now: _Counters) -> float:
    """Most that this thread can have computed, by the timer interrupts of its CPUs."""
    ticks = _counted(before.interrupts, now.interrupts, before, now)
    return (sum(ticks) + 1) * _TICK_S if ticks and not _interrupts_missing() else math.inf


def _counted(then: Mapping[str, int], after: Mapping[str, int], before: _Counters, now: _Counters) -> list[int]:
    """Growth of a counter, for each CPU of this thread."""
    return [after[cpu] - then[cpu] for cpu in {before.cpu, now.cpu} & then.keys() & after.keys()]


def _interrupts_missing() -> bool:
    """Whether Linux leaves out timer interrupts of a CPU that computes (`nohz_full`)."""
    return any(character.isdigit() for line in _lines(_NOHZ_FULL) for character in line)


def _counters() -> _Counters:
    """The counters of Linux as they stand now."""
    cpu = f"cpu{_get_cpu()}" if _get_cpu is not None else ""
    stat = [line.split() for line in _lines(_STAT) if line.startswith("cpu")]
    lines = _lines(_INTERRUPTS)
    timer = next((line.split()[1:] for line in lines if line.lstrip().startswith("LOC:")), [])
    interrupts = zip(lines[0].lower().split(), timer, strict=False) if timer else ()
    stolen = {fields[0]: int(fields[8]) for fields in stat}
    return _Counters(time.monotonic(), cpu, stolen, {name: int(count) for name, count in interrupts})


def _lines(path: Path) -> Sequence[str]:
    return path.read_text().splitlines() if path.exists() else ()


def _on_gc(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        _here.gc_began_s = time.thread_time()
    else:
        _here.gc_s += time.thread_time() - _here.gc_began_s


def _name(callback: Callable[..., Any] | None, arguments: Sequence[Any] = ()) -> str:
    """Name of a callback: of its coroutine where it is a step of a task; with the function that it is given to call."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    if isinstance(callback, partial):
        return _name(callback.func, callback.args)
    name = str(getattr(callback, "__qualname__", type(callback).__name__))
    called = next((argument for argument in arguments if callable(argument)), None)
    return f"{name} {_name(called)}" if called is not None else name
