"""A probe of the event loop for tests and measurements: CPU time of each of its callbacks. Off by default.

    DILOCO_LOOP_PROBE=/tmp/probe        /tmp/probe/4711.jsonl: a line for each callback of 2 ms or more of process 4711

CPU time of the loop's thread, and not the time that passes: other threads and other processes do not count. Passes of
the garbage collector, which may meet any callback, are counted beside it (`gc_s`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "DILOCO_LOOP_PROBE"

CATCH_UP_LIMIT_S: Final = 0.05
LIMIT_S: Final = 0.01
"""Most CPU time of a callback while somebody catches up with the run, and at any other time."""

MIN_S: Final = 0.002
"""Shorter callbacks leave no line."""

_run = asyncio.Handle._run


class _ThisThread(threading.local):
    """State of the probe on one thread."""

    path: Path | None = None
    """The file for lines; None: this thread's callbacks are not measured."""
    gc_s = 0.0
    """CPU time of garbage collection so far."""
    gc_began_s = 0.0
    """CPU time when the latest pass of it began."""


_here = _ThisThread()


def probe_from_environment() -> None:
    """Measure the callbacks of event loops on this thread from now on, if the environment variable names a folder."""
    folder = os.environ.get(VARIABLE, "")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _here.path = Path(folder) / f"{os.getpid()}.jsonl"
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
    began_s, gc_before_s = time.thread_time(), _here.gc_s
    _run(handle)
    gc_s = _here.gc_s - gc_before_s
    cpu_s = time.thread_time() - began_s - gc_s
    if max(cpu_s, gc_s) >= MIN_S:
        line = {"time": round(time.time(), 3), "process": " ".join(sys.argv), "callback": _name(*called)}
        with _here.path.open("a") as file:
            file.write(json.dumps({**line, "cpu_s": round(cpu_s, 5), "gc_s": round(gc_s, 5)}) + "\n")


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
