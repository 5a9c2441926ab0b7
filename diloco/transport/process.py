"""Processes of this machine: this one, named so that others can recognise it, and whether another one still lives;
and the files that this one may open.

Names are of Linux only. Elsewhere no process has one, and no death has a proof.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from diloco.protocol.streams import ProcessId

_STATE, _THREADS, _STARTED = 0, 17, 19
"""Fields of /proc/PID/stat after the command's name, which are its 3rd, 20th and 22nd: see proc(5)."""


def raise_file_limit() -> int:
    """Raise the soft limit of this process's open files, sockets included, to the hard one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports no hard limit, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def this_process() -> ProcessId | None:
    """The process that runs this, by what no other process on any machine has. None where /proc does not say."""
    try:
        if int(os.readlink("/proc/self")) != os.getpid():  # it is the /proc of another pid namespace
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace, network_namespace = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")
        return ProcessId(boot, pid_namespace, network_namespace, os.getpid(), _started(os.getpid()))
    except (OSError, ValueError, IndexError):
        return None


def process_lives(process: ProcessId) -> bool | None:
    """Whether a process lives, running or stopped; a zombie does not. None where nobody here can know: it belongs to
    another boot, machine, pid namespace or network namespace, or /proc hides it."""
    here = this_process()
    if here is None or _place(here) != _place(process):
        return None
    try:
        return _started(process.pid) == process.started  # another start: the pid is used again
    except (FileNotFoundError, ProcessLookupError):
        return None if _exists(process.pid) else False
    except (OSError, ValueError, IndexError):
        return None


def _place(process: ProcessId) -> tuple[str, str, str]:
    return process.boot, process.pid_namespace, process.network_namespace


def _started(pid: int) -> int:
    """Start of a process, clock ticks after boot; -1 for a zombie. Raises OSError, ValueError or IndexError where /proc
    does not say."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    fields = stat.rpartition(b")")[2].split()  # the command's name may hold brackets and blanks
    ended = fields[_STATE] in (b"Z", b"X") and int(fields[_THREADS]) <= 1  # other threads may outlive the first
    return -1 if ended else int(fields[_STARTED])


def _exists(pid: int) -> bool:
    """Whether the kernel knows a process that /proc does not list: with the option `hidepid` it lists one's own."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True
