"""Checks that need a GPU: islands over NCCL, and what a sync costs the inner steps of a GPU.

    scripts/gpu-check                              everything: about 6 minutes on one GPU
    scripts/gpu-check --only meshes                the tests of islands, of 4 and 8 ranks, over NCCL
    scripts/gpu-check --only peers --rows alone,eager --preset scaling-335m --batch 8 --json FILE

`meshes` runs the tests of every mesh against one rank, with CUDA tensors. `peers` runs real `diloco peer` processes.
Peers and ranks go round the GPUs, and share one where there are fewer: so compare rows, not these numbers with others.

    alone     one peer, in a run of its own
    apart     two such peers at once; where they share a GPU, one has it alone while the other syncs
    plain     two peers in one run, a sync every H steps
    stream4   ... in four fragments, each on its way while steps go on
    eager     ... a whole round on its way
    island    ... of which one is two ranks: FSDP2 over NCCL

    tokens/s  of all peers, from the end of round 1 to the last
    of apart  share of the tokens/s of `apart`: what is missing, syncs cost
    inner     share of the time that inner steps took; the rest is waiting, encoding, outer step and merge
    MFU       model FLOPs of a rank over its GPU's peak, within inner steps
    GPU, host peak memory of a rank, GB
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.observe.event_log import read_lines
from diloco.simulate.chaos.fleet import free_port
from scripts.environment import ROOT, our_code

MESHES = ("tests/test_parallel.py", "tests/test_experts.py", "tests/test_pipeline.py")
START_S = 240.0
"""Until a peer's first version is there: imports, a model, `torch.compile`."""
ROUND_S = 120.0
HEADER = f"{'':<9}{'tokens/s':>10}{'of apart':>10}{'inner':>8}{'MFU':>8}{'GPU':>8}{'host':>8}"


class Failed(Exception):
    """A peer did not do what it should."""


@dataclass(frozen=True)
class Layout:
    """The processes of one row."""

    runs: int = 1
    joiner: bool = True
    """A second peer joins the run."""
    joiner_ranks: int = 1
    fragments: int = 1
    merge: str = "carry"
    """Anything but `carry`: all of H / fragments overlaps."""


ROWS = {
    "alone": Layout(joiner=False),
    "apart": Layout(runs=2, joiner=False),
    "plain": Layout(),
    "stream4": Layout(fragments=4, merge="mix"),
    "eager": Layout(merge="eager"),
    "island": Layout(joiner_ranks=2),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. Memory in bytes."""

    name: str
    tokens_per_s: float
    share: float | None
    inner_share: float
    mfu: float | None
    gpu_bytes: int | None
    host_bytes: int
    loss: tuple[float, float]
    """Loss of the first and of the last version."""


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} sees no GPU; install a CUDA build, or try the script: --device cpu")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: everything is cleaned up
    about = environment(options)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    try:
        if "meshes" in options.only and (code := run_meshes(options)):
            return code
        if "peers" in options.only:
            measure_rows(options, about)
    except Failed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        return 130
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="meshes,peers", metavar="LIST", help="of meshes,peers (both)")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="LIST", help=f"of {','.join(ROWS)} (all)")
    parser.add_argument("--preset", default="diloco-150m", help="model (diloco-150m)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens in a sequence (1024)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in an inner step (16)")
    parser.add_argument("--steps", type=int, default=48, help="H, a multiple of 4 (48)")
    parser.add_argument("--rounds", type=int, default=5, help="of each row; the first one warms up (5)")
    parser.add_argument("--codec", default="int8", help="of the exchange (int8)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to try the script (cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    for key, known in (("only", ("meshes", "peers")), ("rows", tuple(ROWS))):
        setattr(options, key, getattr(options, key).split(","))
        if unknown := set(getattr(options, key)) - set(known):
            parser.error(f"--{key} has no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.steps % 4 or options.rounds < 3:
        parser.error("--steps must be a multiple of 4, and --rounds 3 or more")
    return options


def environment(options: argparse.Namespace) -> dict[str, str]:
    if options.device == "cpu":
        return {"torch": torch.__version__, "device": "cpu"}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"torch": torch.__version__, "NCCL": nccl, "device": f"{len(names)} x {names[0]}"}


def run_meshes(options: argparse.Namespace) -> int:
    """pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadgroup", "--durations=5", *MESHES]
    variables = {"DILOCO_TEST_DEVICE": options.device, **local_network(options)}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode


def local_network(options: argparse.Namespace) -> dict[str, str]:
    """Variables of ranks that share a GPU: NCCL reaches what it takes for another host by TCP."""
    return {} if options.device == "cpu" else {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


# ---------------------------------------------------------------- peers


def measure_rows(options: argparse.Namespace, about: Mapping[str, str]) -> None:
    """Measure and print each row. Raises Failed."""
    print(f"{options.preset}, {options.batch} x {options.sequence} tokens, H = {options.steps}, {options.codec}")
    print(HEADER, flush=True)
    rows: list[Row] = []
    try:
        for name in options.rows:
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
                rows.append(measure(name, Path(folder), options, rows))
            print(line(rows[-1]), flush=True)
    finally:
        if options.json:
            told = {key: getattr(options, key) for key in ("preset", "sequence", "batch", "steps", "rounds", "codec")}
            lines = {**about, **told, "compile": options.compile, "rows": [*map(asdict, rows)]}
            options.json.write_text(json.dumps(lines, indent=1) + "\n")


def measure(name: str, folder: Path, options: argparse.Namespace, rows: Sequence[Row]) -> Row:
    """One row. Raises Failed."""
    layout = ROWS[name]
    group = Group(folder, options)
    try:
        for run in range(layout.runs):
            group.found(f"a{run}", contract_of(name, options))
        if layout.joiner:
            group.join("b", group.ticket("a0"), layout.joiner_ranks)
        group.wait()
    finally:
        group.kill()
    folders = sorted(path.parent for path in folder.glob("*/events.jsonl"))
    if layout.joiner:
        audit(folders)
    told = [events(each) for each in folders]
    losses = [event["loss"] for event in told[0] if event["kind"] == "version" and event["loss"] is not None]
    used = [[event for event in each if event["kind"] == "usage" and event["version"]][1:] for each in told]
    counted = [[event for event in each if event["kind"] == "version" and event["inner_tokens"]] for each in told]
    if any(len(each) < options.rounds - 1 for each in counted):
        raise Failed(f"{name}: versions that count a peer: {', '.join(str(len(each)) for each in counted)}")
    memory = [rank for each in used for event in each for rank in event["memory"]]
    mfu = [event["mfu"] for each in used for event in each if event["mfu"] is not None]
    rate = sum(sum_of(each, "inner_tokens") / sum_of(each, "wall_s") for each in used)
    apart = next((row.tokens_per_s for row in rows if row.name == "apart"), None)
    return Row(
        name,
        rate,
        rate / apart if apart else None,
        sum(sum_of(each, "inner_s") / sum_of(each, "wall_s") for each in used) / len(used),
        sum(mfu) / len(mfu) if mfu else None,
        max((rank["device_peak_bytes"] for rank in memory), default=0) or None,
        max(rank["host_peak_bytes"] for rank in memory),
        (losses[0], losses[-1]),
    )


def contract_of(name: str, options: argparse.Namespace) -> str:
    layout = ROWS[name]
    peers = 1 + layout.joiner
    overlap = options.steps // layout.fragments if layout.merge != "carry" else 0
    tokens = options.rounds * peers * options.steps * options.batch * options.sequence
    return f"""
[run]
name = "gpu-check-{name}"
total_tokens = {tokens}
[membership]
start_peers = {peers}
match_deadline_s = {ROUND_S}
round_deadline_s = {ROUND_S}
[data]
sequence_length = {options.sequence}
[model]
preset = "{options.preset}"
[inner]
steps = {options.steps}
batch_size = {options.batch}
lr = 4e-4
warmup = 0.05
precision = "{"bf16" if options.device == "cuda" else "fp32"}"
[codec]
name = "{options.codec}"
[sync]
fragments = {layout.fragments}
overlap = {overlap}
merge = "{layout.merge}"
[eval]
every_versions = 0
sequences = 16
"""


class Group:
    """The processes of one row."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._secret = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def found(self, name: str, contract: str) -> None:
        """Start a founder."""
        path = self._folder / f"{name}.toml"
        path.write_text(contract)
        self._start(name, name, [str(path)])

    def ticket(self, name: str) -> str:
        """Ticket of a founder's run, once it listens. Raises Failed."""
        card = self._folder / name / "peer.json"
        self._until(card.exists, f"{name} listens", START_S)
        return str(json.loads(card.read_text())["ticket"])

    def join(self, name: str, ticket: str, ranks: int) -> None:
        """Start a joiner. Its ranks are nodes of their own for torchrun and for NCCL, so that they can share a GPU."""
        how = ["--join", ticket]
        if ranks == 1:
            self._start(name, name, how)
            return
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc-per-node", "1"]
        for rank in range(ranks):
            nodes = ["--nnodes", str(ranks), "--node-rank", str(rank), *meeting]
            launcher = ["torch.distributed.run", *nodes, "-m"]
            self._start(f"{name}.{rank}", name, [*how, "--set", "mesh.shard=parameters"], launcher, f"{name}.{rank}")

    def _start(self, key: str, name: str, how: Sequence[str], launcher: Sequence[str] = (), host: str = "") -> None:
        settings = {
            "device.kind": self._options.device,
            "device.compile": str(self._options.compile).lower(),
            "storage.checkpoint_every": "0",
        }
        told = [part for setting, value in settings.items() for part in ("--set", f"{setting}={value}")]
        command = [sys.executable, "-m", *launcher, "diloco", "peer", *how, "--name", name]
        command += ["--dir", str(self._folder / name), *told]
        variables = {**os.environ, **our_code(), "DILOCO_SECRET": self._secret}
        if self._options.device == "cuda":
            gpu = len(self._processes) % torch.cuda.device_count()
            variables |= {"CUDA_VISIBLE_DEVICES": str(gpu), **local_network(self._options)}
            if host and torch.cuda.device_count() == 1:
                variables["NCCL_HOSTID"] = host
        with (self._folder / f"{key}.log").open("wb") as log:
            self._processes[key] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def wait(self) -> None:
        """Until all have ended well. Raises Failed."""
        done = lambda: all(process.poll() == 0 for process in self._processes.values())  # noqa: E731
        self._until(done, "the run ends", START_S + self._options.rounds * ROUND_S)

    def _until(self, condition: Any, what: str, deadline_s: float) -> None:
        ends_s = time.monotonic() + deadline_s
        while not condition():
            for key, process in self._processes.items():
                if process.poll():
                    raise Failed(f"{key} ended with {process.returncode}\n{self._log(key)}")
            if time.monotonic() > ends_s:
                logs = "\n".join(f"{key}:\n{self._log(key)}" for key in self._processes)
                raise Failed(f"not within {deadline_s:g} s: {what}\n{logs}")
            time.sleep(0.1)

    def _log(self, key: str) -> str:
        return "\n".join((self._folder / f"{key}.log").read_text(errors="replace").splitlines()[-25:])

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def audit(folders: Sequence[Path]) -> None:
    """Raises Failed."""
    command = [sys.executable, "-m", "diloco", "audit", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **our_code()})
    if done.returncode:
        raise Failed(f"diloco audit: {done.stdout}{done.stderr}")


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "events.jsonl"))


def sum_of(told: Sequence[Mapping[str, Any]], field: str) -> float:
    return float(sum(event[field] for event in told))


def line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.1%}"
    mfu = "" if row.mfu is None else f"{row.mfu:.1%}"
    gpu = "" if row.gpu_bytes is None else f"{row.gpu_bytes / 1e9:.1f}"
    memory = f"{gpu:>8}{row.host_bytes / 1e9:>8.1f}"
    loss = "{:.3f} to {:.3f}".format(*row.loss)
    return f"{row.name:<9}{row.tokens_per_s:>10,.0f}{share:>10}{row.inner_share:>8.1%}{mfu:>8}{memory}   loss {loss}"


if __name__ == "__main__":
    sys.exit(main())
