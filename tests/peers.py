"""Real peers as processes, for tests: started through the command line, watched through what they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio

from diloco.identity.keys import SERVER_NAME, keys_of
from diloco.observe.event_log import read_lines
from diloco.transport.grpc_link import channel_credentials
from tests.warm import Command, Program
from tests.warm_spares import run_diloco

DEADLINE_S = 150.0
"""For what takes seconds on an idle machine: a wait that ends only where something is wrong. No less anywhere else."""
KEYS = keys_of("")
"""Those of a run without a secret."""
TELLING = {"start", "version", "view", "skip", "reason", "warning", "end"}
TOLD = 8
"""Events of each peer that tell why what a test waits for did not come."""

TINY = """
[run]
name = "tiny"
total_tokens = {tokens}
[membership]
start_peers = {peers}
match_deadline_s = 20.0
round_deadline_s = 30.0
[data]
sequence_length = 32
[model]
layers = 1
dim = 32
heads = 2
[inner]
steps = {steps}
batch_size = 4
lr = 2e-3
warmup = 0.0
[eval]
every_versions = 0
sequences = 32
"""


def tiny_contract(directory: Path, peers: int = 1, tokens: int = 10**9, steps: int = 8, membership: str = "") -> Path:
    """`membership`: more lines of that section."""
    path = directory / "tiny.toml"
    text = TINY.format(peers=peers, tokens=tokens, steps=steps)
    path.write_text(text.replace("[membership]", f"[membership]\n{membership}"))
    return path


def secure_channel(address: str, *options: tuple[str, Any]) -> grpc.aio.Channel:
    """For bytes that no `GrpcLink` would send."""
    named = ("grpc.ssl_target_name_override", SERVER_NAME)
    return grpc.aio.secure_channel(address, channel_credentials(KEYS), options=[named, *options])


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for a condition; its value when it is true."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s} s: {what}")


class PeerProcess:
    """One `diloco peer`, or another command that takes part."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *how: str,
        launcher: Sequence[str] = (),
        command: str = "peer",
        work: Callable[[list[str]], None] = run_diloco,
    ) -> None:
        """`launcher`: words before `diloco`, which then starts afresh; else `work` runs the command's arguments."""
        self.name = name
        self.directory = directory / name
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "peer.json").unlink(missing_ok=True)
        self.log = self.directory / "log.txt"
        arguments = [command, *how, "--dir", str(self.directory), "--set", "device.threads=1"]
        if "--resume" not in how:
            arguments += ["--name", name]
        self.process = (
            _launched([*launcher, "diloco", *arguments], self.log) if launcher else Program(work, arguments, self.log)
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.directory / "events.jsonl") if event["kind"] == kind]

    def ticket(self) -> str:
        card = self.directory / "peer.json"
        until(lambda: card.exists() or self.process.poll() is not None, f"{self.name} listens")
        assert card.exists(), self.log.read_text()
        return str(json.loads(card.read_text())["ticket"])

    def reaches(
        self, version: int, counted: Sequence[str] = (), deadline_s: float = DEADLINE_S, without: str = ""
    ) -> dict[str, Any]:
        """Wait for a version of at least `version` that counts exactly these peers (any, when none are named), and
        not the one named by `without`."""

        def found() -> dict[str, Any] | None:
            assert self.process.poll() in (None, 0), self.log.read_text()
            fitting = (e for e in self.events("version") if e["version"] >= version and without not in e["counted"])
            return next((e for e in fitting if not counted or set(e["counted"]) == set(counted)), None)

        what = f"{self.name} at version {version} with {counted or 'anybody'}" + (f" but {without}" if without else "")
        try:
            event: dict[str, Any] = until(found, what, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.lately()}") from None
        return event

    def lately(self) -> str:
        """Last lines of this peer and of those beside it."""
        lines = [f"at {time.time():.1f}"]
        for path in sorted(self.directory.parent.glob("*/events.jsonl")):
            told = [e for e in read_lines(path) if e["kind"] in TELLING][-TOLD:]
            lines += [f"{path.parent.name} {e['time']:.1f} {e['kind']} " + _brief(e) for e in told]
        return "\n".join(lines)

    def version(self) -> int:
        versions = self.events("version")
        return int(versions[-1]["version"]) if versions else 0

    def seconds_of_a_version(self) -> float:
        """The median, by which a limit grows where the machine is slow or busy."""
        times = [event["time"] for event in self.events("version")]
        return median(after - before for before, after in pairwise(times))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        return self.process.wait(deadline_s)


def _brief(event: dict[str, Any]) -> str:
    about = {key: value for key, value in event.items() if key in {"version", "counted", "text", "reason", "left"}}
    return json.dumps(about)


def _launched(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def ranks_of(launcher: PeerProcess) -> dict[int, int]:
    """Process id by rank."""
    pid = launcher.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    return {int(name.removeprefix("rank ")): child for child, name in names.items() if name.startswith("rank ")}


@contextmanager
def ending(processes: list[PeerProcess]) -> Iterator[list[PeerProcess]]:
    """Whatever happens, no process stays behind."""
    try:
        yield processes
    finally:
        for peer in processes:
            if peer.process.poll() is None:
                peer.process.kill()
                peer.process.wait()


def run_cli(
    *arguments: str, cwd: Path | None = None, timeout_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        command = Command(arguments, output, errors, cwd)
        try:
            code = command.wait(timeout_s)
        finally:
            command.kill()
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())
