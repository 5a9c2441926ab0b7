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

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RESTARTS = 10
"""How often an island may lose a rank before it gives up."""
GRACE_S = 15
"""Beyond `timeouts.leave_s`: for the last evaluation and the last checkpoint."""


def run_ranks(ranks: int, arguments: Sequence[str], leave_s: float) -> int:
    """Run `diloco` with these arguments in so many processes until all have ended. Returns the exit code.

    When one dies the others are ended, and all are started again. A signal is passed on, and they have `leave_s` and a
    grace to leave in good order. They are in sessions of their own: a terminal's Ctrl-C reaches them only so, once.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
        monitor_interval=0.5,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        shutdown_timeout=int(leave_s) + GRACE_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "diloco", *arguments)
    except SignalException:
        return 0  # they have left
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def restarted() -> bool:
    """Whether this rank stands in for one that died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def end_with_launcher() -> None:
    """A rank that the launcher started dies when that is killed, which leaves it no time to say so. Only Linux."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
