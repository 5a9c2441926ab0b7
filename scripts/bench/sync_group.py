"""The peers of one system under `scripts/bench-sync`: their processes, their barrier, and what a sync cost them."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco.transport.sockets import SocketCounter
from scripts.bench.netns import INTERFACE, Star
from scripts.bench.sync_task import Task
from scripts.environment import our_code

PROGRAM = "scripts.bench.sync_peer"
HEAD_START_S = 0.1
"""From the word to begin to the beginning, so that all peers have read it."""
START_S = 180.0
"""Seconds that processes may take to import everything and find each other."""
END_S = 10.0

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Failed(Exception):
    """The system did not do what it should."""


@dataclass(frozen=True)
class Round:
    """One sync of all peers."""

    seconds: float
    """Until the last peer was done."""
    sent_bytes: float
    """Per peer, on average."""
    cpu_s: float
    """CPU seconds of all processes of all peers."""
    peak_rss_mb: float
    """Peak memory of the largest process, from the beginning to the end of the sync."""
    mean_error: float
    """Relative error (L2) of the mean: the worst peer's."""
    identical: bool
    """Whether all peers hold the same bits afterwards."""
    log_bytes: int
    """Written to log and votes by the peer that wrote most."""
    longest_sync_s: float
    """The longest wait of a peer until it was on the disk."""


class Group:
    """So many peers of one system, ready to sync; use it as a context manager.

    Args:
        python: which runs them.
        task: of the first peer; the others' differ in rank and addresses.
        star: their network; None: loopback.
    """

    def __init__(self, python: Path, task: Task, star: Star | None, scratch: Path) -> None:
        self.payload_bytes = 0
        self._python, self._star = python, star
        self._peers: list[Peer] = []
        adopt_orphans()
        self._secret = secrets.token_hex(16)
        self._tasks = [replace(task, rank=rank, scratch=str(scratch / f"p{rank}")) for rank in range(task.peers)]
        if star is not None:
            addresses = [star.address(rank) for rank in range(task.peers)]
            self._tasks = [replace(t, host=addresses[t.rank], interface=INTERFACE) for t in self._tasks]

    def __enter__(self) -> Self:
        try:
            for task in self._tasks:
                self._start(task)
            first, *others = self._peers
            meet = first.answer(time.monotonic() + START_S)["meet"]
            for peer in others:
                peer.tell(meet)
            self.payload_bytes = round(mean([answer["payload_bytes"] for answer in self._ask("", START_S)]))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def round(self, max_s: float, tolerance: float) -> Round:
        """One sync. Raises Failed: not within `max_s`, or the mean is off by more than `tolerance` (relative L2)."""
        self._ask("prepare", START_S)
        trees = [tree for peer in self._peers for tree in process_tree(peer.pid)]
        for pid in trees:
            forget_peak(pid)
        sent_bytes, cpu_s = self._sent_bytes(), sum(map(cpu_seconds, trees))
        begin_s = time.monotonic() + HEAD_START_S
        answers = self._ask(f"sync {begin_s}", max_s + HEAD_START_S)
        cpu_s, sent_bytes = sum(map(cpu_seconds, trees)) - cpu_s, self._sent_bytes() - sent_bytes
        peak_mb = max(map(peak_rss_mb, trees))
        checked = self._ask("check", START_S)
        error = max(answer["error"] for answer in checked)
        if not error <= tolerance:  # also when it is nan
            raise Failed(f"the mean is wrong: off by {error:.2%}")
        return Round(
            max(answer["ended_s"] for answer in answers) - begin_s,
            sent_bytes / len(self._peers),
            cpu_s,
            peak_mb,
            error,
            len({answer["digest"] for answer in checked}) == 1,
            max(answer["log_bytes"] for answer in answers),
            max(answer["longest_sync_s"] for answer in answers),
        )

    def _start(self, task: Task) -> None:
        inside = self._star.inside(task.rank) if self._star else []
        Path(task.scratch).mkdir()
        command = [*inside, str(self._python), "-m", PROGRAM, json.dumps(asdict(task))]
        self._peers.append(Peer(command, Path(task.scratch) / "log.txt", {"DILOCO_SECRET": self._secret, **our_code()}))

    def _ask(self, command: str, max_s: float) -> list[dict[str, Any]]:
        """Tell all peers, and wait for all answers; an empty command waits only."""
        for peer in self._peers if command else ():
            peer.tell(command)
        deadline_s = time.monotonic() + max_s
        return [peer.answer(deadline_s) for peer in self._peers]

    def _sent_bytes(self) -> int:
        """Bytes that all peers together have sent so far."""
        if self._star is not None:
            return sum(self._star.sent_bytes())
        return sum(peer.sent_bytes() for peer in self._peers)

    def _end(self) -> None:
        theirs = [pid for peer in self._peers for pid in process_tree(peer.pid)]
        for peer in self._peers:
            peer.dismiss()
        deadline_s = time.monotonic() + END_S
        for peer in self._peers:
            peer.end(deadline_s)
        left = set(theirs).intersection(process_tree(os.getpid()))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in filter(left.__contains__, theirs):  # parents first: then their children are ours
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


class Peer:
    """A process that runs sync_peer.py."""

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is the bench's
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            )
        self.pid = self._process.pid
        self._counter = SocketCounter(self.pid)
        self._received = b""

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: the missing answer says so
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Its next line. Raises Failed."""
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                    raise self._failure("does not answer")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failure("ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sent_bytes(self) -> int:
        """Bytes that it and its children have sent over TCP so far."""
        sample = self._counter.sample()
        if sample is None:
            raise Failed("this system does not count bytes on sockets")
        return sample.sent

    def dismiss(self) -> None:
        """It may go."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, deadline_s: float) -> None:
        """It must have gone."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline_s - time.monotonic(), 0.0))
        self._process.kill()
        self._process.wait()

    def _failure(self, what: str) -> Failed:
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        return Failed("\n".join([f"a peer {what}: {lines[-1] if lines else 'it says nothing'}", *lines]))


def adopt_orphans() -> None:
    """Grandchildren whose parent was killed become this process's children: whoever looks for them finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def process_tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (thread / "children").read_text().split():
                    yield from process_tree(int(child))


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all its threads so far, to 10 ms; 0 when it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def forget_peak(pid: int) -> None:
    """The peak of its memory counts from now on (proc(5), clear_refs)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss_mb(pid: int) -> float:
    """Most resident memory, MB; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
