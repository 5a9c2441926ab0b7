"""Compares what this version computes with what was recorded.

quick, demo: the state digest and the loss at the end of a simulation of `configs/`, as bb50371 had them
(tests/data/bb50371/digests.json). Torch and the processor's instructions decide how inner steps round, and the text
trained on is Python's own library: on a machine of another kind these are not compared, and say why.

logs: the log of each of the first seeds in virtual time, by its hash (tests/data/virtual_logs.json). A change of the
protocol or of the simulator changes logs; `record` writes down the present ones.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from diloco.simulate.virtual.plans.draw import draw
from diloco.simulate.virtual.search import narrate

ROOT = Path(__file__).resolve().parent.parent
RECORDED: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "bb50371" / "digests.json").read_text())
LOGS = ROOT / "tests" / "data" / "virtual_logs.json"
SEEDS = 50


def machine() -> dict[str, str]:
    """All that decides how an inner step on a CPU rounds, and what the source `stdlib` holds."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def other_machine() -> str:
    """The differences between this machine and the one of the record; empty where digests can be compared."""
    recorded = RECORDED["machine"]
    pairs = ((name, here, recorded[name]) for name, here in machine().items())
    return ", ".join(f"{name} {here}, recorded with {there}" for name, here, there in pairs if here != there)


def simulated(name: str) -> dict[str, Any]:
    """The end of a simulation as recorded: digest, loss, versions and tokens."""
    recorded = RECORDED[name]
    with TemporaryDirectory() as folder:
        contract = ROOT / "configs" / f"{name}.toml"
        peers = ["--peers", str(recorded["peers"])]
        command = [sys.executable, "-m", "diloco", "simulate", str(contract), *peers, "--out", f"{folder}/out"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads(Path(folder, "out", "summary.json").read_text())
    return {key: summary[key] for key in recorded}


def hash_of_log(seed: int) -> str:
    """Hash of the log of one seed in virtual time."""
    return hashlib.sha256("\n".join(narrate(draw(seed)).lines).encode()).hexdigest()[:16]


def differing_logs(seeds: Iterable[int]) -> list[int]:
    """The seeds whose log is not the recorded one."""
    recorded = json.loads(LOGS.read_text())
    return [seed for seed in seeds if hash_of_log(seed) != recorded[seed]]


def _logs() -> str:
    differing = differing_logs(range(SEEDS))
    return f"the logs of seeds {differing} differ" if differing else ""


def _run(name: str) -> str:
    now, recorded = simulated(name), RECORDED[name]
    return ", ".join(f"{key} {now[key]}, recorded {recorded[key]}" for key in recorded if now[key] != recorded[key])


CHECKS: dict[str, Callable[[], str]] = {
    "quick": lambda: _run("quick"),
    "demo": lambda: _run("demo"),
    "logs": _logs,
}
"""Each returns what differs from the record."""


def main(chosen: list[str]) -> int:
    """The command; its exit code."""
    torch.set_num_threads(1)
    if chosen == ["record"]:
        LOGS.write_text(json.dumps([hash_of_log(seed) for seed in range(SEEDS)], indent=0) + "\n")
        return 0
    unknown = set(chosen) - CHECKS.keys()
    if unknown:
        print(f"references: no {', '.join(sorted(unknown))}; known: record, {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    failed = False
    for name in chosen or CHECKS:
        elsewhere = other_machine() if name in ("quick", "demo") else ""
        differs = "" if elsewhere else CHECKS[name]()
        failed |= bool(differs)
        print(f"{name}: {f'not compared: {elsewhere}' if elsewhere else differs or 'as recorded'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
