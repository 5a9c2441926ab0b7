"""Processes that begin where all imports are done: those are half of what most of them would take.

Each is forked from a server that did nothing but import (`multiprocessing`'s fork server). A command has a session, a
folder, an environment and outputs of its own, and forks ahead what it will start (`tests.warm_spares`). What
`python -m diloco` does beyond that, tests of the launcher and of simulations see.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.multiprocessing as mp

from diloco.simulate.local.processes import die_with_parent
from tests.warm_spares import Started, run_diloco

_start_afresh = subprocess.Popen
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.warm_imports"])


class Program(Started):
    """A function in such a process."""

    def __init__(
        self,
        work: Callable[[list[str]], None],
        arguments: Sequence[str],
        output: Path,
        errors: Path | None = None,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Appends to the files; without `errors` those go to `output`, too. `variables`: of its environment, more."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        self._errors = errors or output
        places = (str(output), str(self._errors), str(cwd or Path.cwd()))
        self._process = _SERVER.Process(target=_live, args=(work, list(arguments), *places, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self.show_stacks()
            error = subprocess.TimeoutExpired("diloco", timeout or 0.0)
            error.add_note(self._errors.read_text(errors="replace")[-6000:])
            raise error
        return code

    def show_stacks(self) -> None:
        """Have it write where each of its threads is, to the file of its errors."""
        self.send_signal(signal.SIGUSR2)
        self._process.join(1.0)  # time to write


class Command(Program):
    """`diloco` with these arguments."""

    def __init__(
        self, arguments: Sequence[str], output: Path, errors: Path | None = None, cwd: Path | None = None
    ) -> None:
        super().__init__(run_diloco, arguments, output, errors, cwd)


def popen(command: Any, *more: Any, **told: Any) -> Any:
    """In place of `subprocess.Popen`: `python -m diloco` begins so, any other command as ever."""
    if list(command[:3]) != [sys.executable, "-m", "diloco"]:
        return _start_afresh(command, *more, **told)
    return Program(run_diloco, command[3:], Path(told["stdout"].name), variables=told["env"])


def run_ranks(work: Callable[..., None], ranks: int, *arguments: object) -> None:
    """`work(rank, *arguments)` in so many processes, which reach each other on loopback. Raises what one raises."""
    mp.start_processes(_rank, (work, arguments), nprocs=ranks, start_method="forkserver")


def _rank(place: int, work: Callable[..., None], arguments: Sequence[object]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    work(place, *arguments)


def _live(
    work: Callable[[list[str]], None],
    arguments: list[str],
    output: str,
    errors: str,
    cwd: str,
    environment: Mapping[str, str],
) -> NoReturn:
    die_with_parent(signal.SIGKILL)  # the server, which ends with pytest, however that ends
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, _APPEND), (2, errors, _APPEND)):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, sys.stderr)
    work(arguments)
    raise SystemExit


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
