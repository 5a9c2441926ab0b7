"""The ranks of an island on this machine, started and watched by torch's own launcher (the one behind torchrun)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diloco.clock import new_incarnation
from diloco.errors import (
    ConfigError,
    EvictedError,
    IncompatibleError,
    StateError,
    TicketError,
    UnreachableError,
    UsageError,
)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIFE = "DILOCO_LIFE"
"""In the environment of the ranks: how often they were started before."""
LAUNCHER = "DILOCO_LAUNCHER"
"""The same: its process id."""
SINCE = "DILOCO_SINCE"
"""The same: when it began, as `new_incarnation` counts."""
SET_BACK_US = 60 * 10**6
"""By so much a clock may be set back while an island lives: at the start of a machine it is."""
RESTARTS = 10
"""How often an island may lose a rank before it gives up."""
GRACE_S = 15
"""Beyond `timeouts.leave_s`: for the last evaluation and the last checkpoint."""
FINAL = {
    error.exit_code for error in (UsageError, ConfigError, TicketError, StateError, EvictedError, IncompatibleError)
}
"""Exit codes that starting again does not change."""


def run_ranks(ranks: int, arguments: Sequence[str], leave_s: float) -> int:
    """Run `diloco` with these arguments in so many processes until all have ended. Returns the exit code.

    When one dies the others are ended, and all are started again. A signal is passed on, and they have `leave_s` and a
    grace to leave in good order. They are in sessions of their own: a terminal's Ctrl-C reaches them only so, once.
    """
    code = 0
    os.environ[SINCE] = str(new_incarnation())
    for life in range(RESTARTS + 1):
        os.environ[LIFE] = str(life)
        code = run_once(ranks, "diloco", arguments, int(leave_s) + GRACE_S)
        if code == 0 or code in FINAL or (life == 0 and code == UnreachableError.exit_code):
            break
    return code


def run_once(ranks: int, module: str, arguments: Sequence[str], leave_s: int) -> int:
    """One life of all ranks, each `python -m module arguments`. Returns the exit code; 0 also after a signal.

    The launcher could start them again itself, but whatever it was that ended them.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        shutdown_timeout=leave_s,
    )
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException:
        return 0  # they have left
    except ChildFailedError as error:
        codes = [error.failures[rank].exitcode for rank in sorted(error.failures)]  # rank 0 knows best
        return next((code for code in codes if code > 0), 1)
    return 0


def restarted() -> bool:
    """Whether this rank stands in for one that died."""
    return any(int(os.environ.get(name, 0)) > 0 for name in (LIFE, "TORCHELASTIC_RESTART_COUNT"))


def of_this_launch(began_us: int) -> bool:
    """Whether a life that began then is one of ours, as far as this rank's launcher told; another's is for torch's."""
    return began_us >= int(os.environ.get(SINCE, 0)) - SET_BACK_US


def end_with_launcher() -> None:
    """A rank that the launcher started dies when that is killed, which leaves it no time to say so. Only Linux."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            os._exit(1)  # it was killed while we started
