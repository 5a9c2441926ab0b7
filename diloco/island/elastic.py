"""The ranks of an island on this machine, started and watched by torch's own launcher (the one behind torchrun)."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diloco.base import errors
from diloco.base.clock import monotonic_s, new_incarnation

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIFE = "DILOCO_LIFE"
"""In the environment of the ranks: how often they were started before."""
LAUNCHER = "DILOCO_LAUNCHER"
"""The same: its process id."""
SINCE = "DILOCO_SINCE"
"""The same: when it began, as `new_incarnation` counts."""
SET_BACK_US = 60 * 10**6
"""By so much a clock may be set back while an island lives: at the start of a machine it is."""
MAX_RESTARTS = 10
"""Ranks that an island may lose in quick succession before it gives up."""
WELL_S = 3600.0
"""In quick succession: it lived for less than this between them. A life of an hour forgives all losses before."""
MAX_APART_S = 30.0
"""Two starts are 2 s apart after the first such loss, twice as long after each further one, and at most so long."""
GRACE_S = 15
"""Beyond `timeouts.leave_s`: for the last evaluation and the last checkpoint."""
FINAL = {
    error.exit_code
    for error in (
        errors.UsageError,
        errors.ConfigError,
        errors.TicketError,
        errors.StateError,
        errors.EvictedError,
        errors.IncompatibleError,
        errors.Interrupted,
    )
}
"""Exit codes that starting again does not change."""


def run_ranks(ranks: int, arguments: Sequence[str], leave_s: float) -> int:
    """Run `diloco` with these arguments in all ranks of an island, by torch's launcher. Returns the exit code.

    It ends with them. When one dies the others are ended, and all are started again, up to `MAX_RESTARTS` times in
    quick succession; not at once where they died at once. A signal is passed on, and they have `leave_s` and a grace to
    leave in good order. They are in sessions of their own: a terminal's Ctrl-C reaches them only so, once.
    """
    os.environ[SINCE] = str(new_incarnation())
    losses = 0
    for life in count():
        os.environ[LIFE] = str(life)
        began_s = monotonic_s()
        code = run_once(ranks, "diloco", arguments, int(leave_s) + GRACE_S)
        if code == 0 or code in FINAL or (life == 0 and code == errors.UnreachableError.exit_code):
            break
        lived_s = monotonic_s() - began_s
        losses = 1 if lived_s >= WELL_S else losses + 1
        if losses > MAX_RESTARTS:
            how = f"{losses} times, each within {WELL_S / 60:g} minutes of the one before"
            logger.error("the island lost a rank %s: it is not started again; see what its ranks said last", how)
            break
        try:
            time.sleep(max(0.0, min(2.0**losses, MAX_APART_S) - lived_s))
        except SignalException:  # by torch's handler, which it leaves behind
            break
    return code


def run_once(ranks: int, module: str, arguments: Sequence[str], leave_s: int) -> int:
    """Start all ranks of an island once by torch's launcher, each `python -m module arguments`. Returns the exit code.

    It is 0 also after a signal.

    The launcher could start them again itself, but whatever it was that ended them.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    with TemporaryDirectory() as own:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            # torch unpickles this state. Its other place is a port, to which anybody may write. The file grows with
            # each sign of life, which nobody waits for.
            rdzv_endpoint=f"{own}/rendezvous",
            rdzv_configs={"store_type": "file", "keep_alive_interval": 600},
            max_restarts=0,
            monitor_interval=0.5,
            signals_to_handle="SIGTERM,SIGINT,SIGHUP",
            shutdown_timeout=leave_s,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except SignalException:
            return 0  # they have left
        except ChildFailedError as error:
            codes = [error.failures[rank].exitcode for rank in sorted(error.failures)]  # rank 0 knows best
            return next((code for code in codes if code > 0), 1)
    return 0


def restarted() -> bool:
    """Whether the launcher started this rank of the island in the place of one that died."""
    return any(int(os.environ.get(name, 0)) > 0 for name in (LIFE, "TORCHELASTIC_RESTART_COUNT"))


def of_this_launch(began_us: int) -> bool:
    """Whether a life began since the launcher of this island's ranks did, ours or torch's. Under torch's elsewhere than
    on Linux that is not known, and any life did."""
    return began_us >= int(os.environ.get(SINCE) or _torch_began_us()) - SET_BACK_US


def _torch_began_us() -> int:
    """Start of torch's launcher (torchrun) of this rank, as `new_incarnation` counts; 0: there is none, or not known.

    It is the first process above us that is no rank: a script may stand between.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return 0
    pid = os.getpid()
    try:
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(_stat(pid)[1])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # not ours to read
        return 0
    return new_incarnation() - int(1e6 * age_s) if age_s >= 0 else 0


def _stat(pid: int) -> list[str]:
    """Linux's fields of a rank's or launcher's process behind its name (proc_pid_stat): state, parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def end_with_launcher() -> None:
    """Let Linux kill this rank of the island when its launcher is killed, which then has no time to end its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            os._exit(1)  # it was killed while we started
