"""The cost of one peer's end for the others, diloco and torchft's DiLoCo side by side: real peers on loopback.

    scripts/bench-faults                                        diloco, and torchft if this Python has it
    scripts/bench-faults --torchft-python DIR/bin/python        torchft from an environment of its own
    scripts/bench-faults --systems diloco --faults between mid-mean

An environment for torchft: `python3 -m venv DIR && DIR/bin/pip install -e '.[bench]'`.

Three peers stay; one victim after the other joins them and is killed, or stopped for a minute, at a given place. Both
systems train the same model with the same H, each inner step filled up to the same length by sleeping, so that the
two can run at once on a small machine. All timeouts are the systems' own defaults, but torchft's for the quorum, for
which it advises an hour with DiLoCo: with its default of a minute the survivors may end, too. For each fault:

    delay     how much longer than usual the survivors' longest round around it took (a stop: until two rounds after)
    lost      inner steps that a survivor trained and that no version will count, the worst survivor's
    survived  all survivors live and commit versions again, within two minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from scripts.environment import PYTHON, our_code

STEPS = 20
STEP_S = 0.1
BATCH, SEQUENCE = 4, 32
HITS = 3
"""A victim ends when it comes by for the third time: it takes part by then."""
POLL_S = 0.05
DEADLINE_S = 120.0

CONTRACT = f"""
[run]
name = "bench-faults"
total_tokens = 1_000_000_000
[membership]
start_peers = {{survivors}}
[data]
sequence_length = {SEQUENCE}
[model]            # 0.1M parameters
layers = 2
dim = 64
heads = 2
[inner]
steps = {STEPS}
batch_size = {BATCH}
lr = 1e-3
[sync]
part_elements = 4096  # every peer owns several parts, so that a mean has a middle
[eval]
every_versions = 0
"""


class Fault(NamedTuple):
    """An end of a victim."""

    place: str
    """A failpoint of diloco's, its like in scripts/torchft_peer.py, or `between`: half-way between two syncs."""
    action: str
    means: str

    @property
    def name(self) -> str:
        return self.place if self.action == "kill" else f"{self.place}-stop"


FAULTS = {
    "diloco": [
        Fault("between", "kill", "killed between two syncs"),
        Fault("after-inner-steps", "kill", "killed as the sync begins"),
        Fault("mid-contribution", "kill", "killed in the sync, half of its part is sent"),
        Fault("mid-mean", "kill", "killed in the sync, half of its means are sent"),
        Fault("before-accept", "kill", "killed in the sync, before it votes"),
        Fault("mid-mean", "stop", "stopped in the sync"),
    ],
    "torchft": [
        Fault("between", "kill", "killed between two syncs"),
        Fault("after-inner-steps", "kill", "killed as the sync begins"),
        Fault("mid-all-reduce", "kill", "killed in the sync, its all-reduce under way"),
        Fault("mid-all-reduce", "stop", "stopped in the sync"),
    ],
}


@dataclass(frozen=True)
class Row:
    """The measured cost of one fault."""

    system: str
    fault: str
    delay_s: float | None
    """None: the survivors did not go on."""
    steps_lost: float | None
    survived: bool
    next_sync_s: float | None
    """From the fault to the moment when the last survivor had committed a version."""
    round_s: float
    """Seconds of a round without a fault."""
    means: str


def main() -> int:
    options = parse()
    systems = options.systems or (["diloco", "torchft"] if lighthouse(options.torchft_python) else ["diloco"])
    if "torchft" not in systems:
        print(f"diloco alone: {MISSING}" if not options.systems else "torchft was left out")
    elif not lighthouse(options.torchft_python):
        sys.exit(f"error: {MISSING}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: all peers are ended
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = asyncio.run(side_by_side(Path(scratch), systems, options))
        except* (TimeoutError, ChildProcessError) as errors:
            sys.exit(f"error: {errors.exceptions[0]}")
        except* KeyboardInterrupt:
            sys.exit(130)
    print(f"\n{table(rows)}")
    if options.json:
        result = {"inner_steps": STEPS, "step_s": STEP_S, "stop_s": options.stop_s, "rows": [*map(asdict, rows)]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


MISSING = (
    "torchft is not installed: pip install -e '.[bench]' in some environment, then --torchft-python DIR/bin/python"
)


def parse() -> argparse.Namespace:
    names = list(dict.fromkeys(fault.name for faults in FAULTS.values() for fault in faults))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(FAULTS), help="all that are installed, if left out")
    parser.add_argument("--faults", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", type=int, default=4, help="processes of each system, with the victim (4)")
    parser.add_argument("--stop-s", type=float, default=60.0, help="how long a stopped peer stays stopped (60)")
    parser.add_argument("--torchft-python", type=Path, default=PYTHON, metavar="FILE", help="a Python that has torchft")
    parser.add_argument("--torchft-timeout-s", type=float, default=60.0, help="of its collectives (60, its default)")
    parser.add_argument("--torchft-bucket", action="store_true", help="one all-reduce per sync, not one per tensor")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    return parser.parse_args()


def lighthouse(python: Path) -> Path | None:
    """torchft's server, which it installs beside its Python."""
    program = python.with_name("torchft_lighthouse")
    return program if program.exists() else None


# ---------------------------------------------------------------- the systems


@dataclass
class Peer:
    """A process that writes `events.jsonl`."""

    name: str
    directory: Path
    process: subprocess.Popen[bytes]
    versions: list[dict[str, Any]] = field(default_factory=list)
    """Its `version` events so far."""
    _offset: int = 0

    def read(self) -> None:
        """Take in what it wrote since the last time."""
        path = self.directory / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.versions += [event for event in map(json.loads, whole.splitlines()) if event["kind"] == "version"]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def stopped(self) -> bool:
        """State T of proc(5), stat: behind the name in parentheses."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def committed_s(self) -> list[float]:
        """When it had committed each version."""
        return [float(event["time"]) for event in self.versions]

    def failure(self) -> ChildProcessError:
        """It did not do what it should, and why not."""
        log = (self.directory / "log.txt").read_text(errors="replace").splitlines()
        return ChildProcessError("\n".join([f"{self.name}: exit code {self.process.poll()}", *log[-12:]]))

    def end(self) -> None:
        if not self.ended:
            self.process.kill()
        self.process.wait()


class System(ABC):
    """Peers of one kind. What differs: how one is started, how many a version counts, what was lost."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        self.scratch = scratch
        self.names = [f"p{number}" for number in range(options.peers - 1)]
        self.contract = scratch / "contract.toml"
        self.contract.write_text(CONTRACT.format(survivors=len(self.names)))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.survivors: list[Peer] = []

    @abstractmethod
    async def start(self, name: str, armed: str = "") -> Peer:
        """Start a peer, which joins if another runs, and dies at the failpoint `armed`."""

    @abstractmethod
    def peers_of(self, version: dict[str, Any]) -> int:
        """Number of peers that a version counts."""

    @abstractmethod
    def lost_steps(self, peer: Peer) -> float:
        """Inner steps of its that are neither in a version nor still in its weights."""

    async def begin(self) -> None:
        """The survivors, until they have committed a few versions together."""
        for name in self.names:
            self.survivors.append(await self.start(name))
        await self.until(lambda: self.together(len(self.names), 4), "versions of all survivors")

    def together(self, peers: int, times: int = 1) -> bool:
        """Whether the latest versions count this many peers."""
        latest = [peer.versions[-times:] for peer in self.survivors]
        return all(len(versions) == times and self.peers_of(versions[0]) == peers for versions in latest)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll. Raises TimeoutError after two minutes, ChildProcessError when a survivor ends."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
            await asyncio.sleep(POLL_S)
            for peer in self.survivors:
                peer.read()
                if peer.ended:
                    raise peer.failure()

    def run(self, name: str, command: Sequence[object], variables: dict[str, str]) -> Peer:
        directory = self.scratch / name
        directory.mkdir()
        with (directory / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
            )
        self.processes.append(process)
        return Peer(name, directory, process)

    def end(self) -> None:
        """No process stays behind, a stopped one neither."""
        for process in self.processes:
            process.kill()
            process.wait()


class Diloco(System):
    async def start(self, name: str, armed: str = "") -> Peer:
        how = ["--join", self.ticket()] if self.survivors else [self.contract]
        site = ["device.threads=1", f"device.step_s={STEP_S}"]
        settings = [option for setting in site for option in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "diloco",
            "peer",
            *how,
            "--name",
            name,
            "--dir",
            self.scratch / name,
            *settings,
        ]
        peer = self.run(name, command, {"DILOCO_FAILPOINTS": armed})
        if not self.survivors:
            await self.until(lambda: (peer.directory / "peer.json").exists(), "the founder listens")
        return peer

    def ticket(self) -> str:
        return str(json.loads((self.survivors[0].directory / "peer.json").read_text())["ticket"])

    def peers_of(self, version: dict[str, Any]) -> int:
        return len(version["counted"])

    def lost_steps(self, peer: Peer) -> float:
        from diloco.accounts.ledger import LEDGER, read_ledger

        totals = read_ledger(peer.directory / LEDGER).records[-1].totals
        return (totals.trained - totals.committed - totals.uncommitted) / (BATCH * SEQUENCE)


class Torchft(System):
    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        from diloco.simulate.chaos.fleet import free_port

        super().__init__(scratch, options)
        self.python, self.settings = options.torchft_python, ["--timeout-s", options.torchft_timeout_s]
        self.settings += ["--bucket"] if options.torchft_bucket else []
        self.port = free_port()
        program = [lighthouse(self.python), "--min_replicas", 2, "--bind", f"[::]:{self.port}"]
        self.run("lighthouse", program, {})

    async def start(self, name: str, armed: str = "") -> Peer:
        how = ["--name", name, "--lighthouse", f"http://127.0.0.1:{self.port}", *self.settings]
        what = ["--events", self.scratch / name / "events.jsonl", "--step-s", STEP_S, "--armed", armed]
        return self.run(name, [self.python, "-m", "scripts.bench.torchft_peer", self.contract, *how, *what], our_code())

    def peers_of(self, version: dict[str, Any]) -> int:
        return int(version["peers"])

    def lost_steps(self, peer: Peer) -> float:
        return float(peer.versions[-1]["lost_steps"])


# ---------------------------------------------------------------- the faults


async def side_by_side(scratch: Path, names: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """The rows of all systems, which run at the same time."""
    async with asyncio.TaskGroup() as group:  # if one fails the other is ended
        tasks = [group.create_task(drill(name, scratch / name, options)) for name in names]
    return [row for task in tasks for row in task.result()]


async def drill(name: str, scratch: Path, options: argparse.Namespace) -> list[Row]:
    """All faults of one system, until one that its survivors do not survive."""
    scratch.mkdir()
    system = Diloco(scratch, options) if name == "diloco" else Torchft(scratch, options)
    rows: list[Row] = []
    try:
        await system.begin()
        for number, fault in enumerate(fault for fault in FAULTS[name] if fault.name in options.faults):
            rows.append(await strike(name, system, fault, f"v{number}", options.stop_s))
            print(line(rows[-1]), flush=True)
            if not rows[-1].survived:
                break
    finally:
        system.end()
    return rows


async def strike(name: str, system: System, fault: Fault, victim_name: str, stop_s: float) -> Row:
    """One victim, from its first line to two versions after its end (or after it was waked)."""
    lost_before = [system.lost_steps(peer) for peer in system.survivors]
    armed = "" if fault.place == "between" else f"{fault.place}={fault.action}@{HITS}"
    victim = await system.start(victim_name, armed)
    at_s = await (end_of(system, victim) if armed else kill_between(system, victim))
    round_s = usual_s(system.survivors[0].committed_s(), at_s)
    try:
        if fault.action == "stop":
            await system.until(lambda: time.time() >= at_s + stop_s, "the stop is over")
            victim.process.send_signal(signal.SIGCONT)
        over_s = time.time()
        await system.until(
            lambda: all(after(peer.committed_s(), over_s) >= 2 for peer in system.survivors), "two versions afterwards"
        )
    except (TimeoutError, ChildProcessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return Row(name, fault.name, None, None, False, None, round(round_s, 2), fault.means)
    finally:
        victim.end()
    told = [peer.committed_s() for peer in system.survivors]
    lost = [system.lost_steps(peer) - before for peer, before in zip(system.survivors, lost_before, strict=True)]
    return Row(
        name,
        fault.name,
        delay_s=round(max(longest_s(times, at_s) for times in told) - round_s, 2),
        steps_lost=round(max(lost), 2),
        survived=True,
        next_sync_s=round(max(next(at for at in times if at > at_s) for times in told) - at_s, 2),
        round_s=round(round_s, 2),
        means=fault.means,
    )


async def end_of(system: System, victim: Peer) -> float:
    """Wait until it has killed or stopped itself; the last moment at which it was seen alive."""
    seen_s = time.time()

    def over() -> bool:
        nonlocal seen_s
        if victim.ended or victim.stopped:
            return True
        seen_s = time.time()
        return False

    await system.until(over, f"{victim.name} ends by itself")
    if victim.process.poll() not in (None, -signal.SIGKILL):
        raise victim.failure()
    return seen_s


async def kill_between(system: System, victim: Peer) -> float:
    """Wait until it takes part, and kill it half-way to the next sync; when that was."""
    await system.until(lambda: system.together(len(system.names) + 1), f"{victim.name} takes part")
    versions = len(system.survivors[0].versions)
    await system.until(lambda: len(system.survivors[0].versions) > versions, "a version")
    await asyncio.sleep(STEPS * STEP_S / 2)
    at_s = time.time()
    victim.process.kill()
    return at_s


def usual_s(times: list[float], at_s: float) -> float:
    """Median seconds of a round before `at_s`."""
    return median(end - start for start, end in pairwise([at for at in times if at < at_s][-8:]))


def after(times: list[float], at_s: float) -> int:
    return sum(at > at_s for at in times)


def longest_s(times: list[float], at_s: float) -> float:
    """The longest time between two versions, of those that a fault may have touched."""
    before = sum(at <= at_s for at in times)
    return max(end - start for start, end in pairwise(times[before - 1 :]))


def table(rows: Sequence[Row]) -> str:
    title = f"{'system':<9}{'fault':<48}{'delay':>9}{'lost':>7}{'round':>8}  survived"
    return "\n".join([f"H = {STEPS} inner steps of {STEP_S:g} s", title, *map(line, rows)])


def line(row: Row) -> str:
    delay = "-" if row.delay_s is None else f"{row.delay_s:.1f} s"
    lost = "-" if row.steps_lost is None else f"{row.steps_lost:g}"
    return f"{row.system:<9}{row.means:<48}{delay:>9}{lost:>7}{row.round_s:>6.1f} s  {'yes' if row.survived else 'NO'}"
