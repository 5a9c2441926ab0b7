"""Processes that a command forks ahead, while it has one thread: directory, ranks and simulated peers import nothing.

A spare waits for an order, and then is what was to be started afresh: a child of the command like any other, with a
pid to wait for, to signal and to end with. When a command has used them up, it starts processes as it always would.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as torch_launcher

MAX_ORDER_BYTES = 1 << 17
_start_afresh = subprocess.Popen


@dataclass(frozen=True)
class Order:
    """Command, environment and files of the process that a spare is to be."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    numbers: tuple[int, ...]
    """Of the open files that come along."""
    session: bool
    before: Callable[[], None] | None


class Started(ABC):
    """A process that was forked. As much of `subprocess.Popen` as tests and launchers need."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Spare(Started):
    """A process that waits for its order: in place of what a directory, torch's launcher or a simulation starts."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line = pid, line
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def begin(self, command: tuple[str, ...], told: Mapping[str, Any]) -> None:
        """`told`: what `subprocess.Popen` takes."""
        outputs = {1: told.get("stdout"), 2: told.get("stderr")}
        if outputs[2] == subprocess.STDOUT:
            outputs[2] = outputs[1]
        files = {number: file.fileno() for number, file in outputs.items() if file is not None}
        files |= {number: number for number in told.get("pass_fds", ())}
        environment = dict(told.get("env") or os.environ)
        session, before = bool(told.get("start_new_session")), told.get("preexec_fn")
        order = pickle.dumps(Order(command, environment, tuple(files), session, before))
        socket.send_fds(self.line, [order], list(files.values()))
        self.line.close()

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired("a spare", timeout or 0.0)
            time.sleep(0.01)
        return code


def fork_ahead(count: int) -> None:
    """So many spares, while this process has one thread. Only Linux names processes, and has such sockets."""
    if sys.platform != "linux":
        return
    spares: list[Spare] = []
    while len(spares) < count:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for line in (here, *(spare.line for spare in spares)):
                line.close()
            _obey(there)
        there.close()
        spares.append(Spare(pid, here))

    def start(args: Any, *more: Any, **told: Any) -> Any:
        if not spares or more or not _is_ours(args):
            return _start_afresh(args, *more, **told)
        spare = spares.pop(0)
        spare.begin(tuple(args), told)
        return spare

    subprocess.Popen = torch_launcher.Popen = start  # type: ignore[misc, assignment]


def run_diloco(arguments: Sequence[str]) -> None:
    """`diloco` with these arguments. Ends as that does: by SystemExit."""
    fork_ahead(_needed(arguments))
    sys.argv = ["diloco", *arguments]
    from diloco.__main__ import main

    main()


def _needed(arguments: Sequence[str]) -> int:
    """Processes that a command may start: ranks may die once, and so may a directory."""
    if "RANK" in os.environ:
        return 2 if os.environ["RANK"] == "0" else 0
    told = [text for text in arguments if text.startswith("device.ranks=")]
    ranks = int(told[-1].partition("=")[2]) if told else 1
    if ranks > 1:
        return 2 * ranks
    return {"peer": 2, "witness": 2, "simulate": 4, "drill": 12}.get(arguments[0] if arguments else "", 0)


def _is_ours(command: Any) -> bool:
    """Whether that is `diloco`, or the process of a directory."""
    if isinstance(command, str) or not command or command[0] != sys.executable:
        return False
    return tuple(command[1:3]) == ("-m", "diloco") or (command[1] == "-c" and "run_node" in command[2])


def _obey(line: socket.socket) -> NoReturn:
    """Wait for the order, and be what it says. Without one the command has ended."""
    ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)
    packed, files, *_ = socket.recv_fds(line, MAX_ORDER_BYTES, 8)
    line.close()
    if not packed:
        os._exit(0)
    order: Order = pickle.loads(packed)  # by our own parent: nobody else has the other end
    signal.signal(signal.SIGINT, ctrl_c)
    if order.session:
        os.setsid()
    if order.before is not None:
        order.before()
    for number, file in zip(order.numbers, files, strict=True):
        if number != file:
            os.dup2(file, number)
            os.close(file)
    os.environ.clear()
    os.environ.update(order.environment)
    arguments = list(order.command[3:])
    Path("/proc/self/comm").write_text(name_of(order))
    if order.command[1] == "-c":
        from diloco.transport.dht_node import run_node

        sys.argv = ["-c", *arguments]
        run_node()
    else:
        run_diloco(arguments)
    raise SystemExit


def name_of(order: Order) -> str:
    """Name of a process in `/proc/PID/comm`."""
    if order.command[1] == "-c":
        return "directory"
    rank = order.environment.get("RANK")
    return f"rank {rank}" if rank else "diloco"
