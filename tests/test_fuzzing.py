"""The short form of `scripts/fuzz`, and readers with planted holes, each of which it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from diloco.protocol.messages import Body
from scripts.fuzzing.target import Target
from scripts.fuzzing.worker import Run, fuzzed

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz"
ROW = ("target", "inputs", "by", "seconds", "refused", "accepted", "edges", "memory_mb", "finding")


@pytest.mark.slow(queued=False)
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--short", "--seed", "7", "--json", str(rows_file)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["target"]: row for row in json.loads(rows_file.read_text())}
    assert {f"message-{kind.__name__.lower()}" for kind in get_args(Body)} <= rows.keys()
    assert {"codec-two_bit+zstd", "bundle", "file-ledger-sealed", "contract-toml", "status"} <= rows.keys()
    assert all(tuple(row) == ROW for row in rows.values())
    assert sum(row["refused"] > 0 for row in rows.values()) > len(rows) / 2


# ---------------------------------------------------------------- readers with holes

kept: list[bytes] = []


def raises(data: bytes) -> None:
    raise KeyError("no refusal")


def goes_on(data: bytes) -> None:
    while True:
        pass


def ends(data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def takes(data: bytes) -> None:
    bytes(2**23)


def takes_all(data: bytes) -> None:
    bytearray(2**32)


def leaks(data: bytes) -> None:
    kept.append(b"\1" * 2**20)


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (raises, "KeyError: 'no refusal'"),
        (goes_on, "it goes on and on, broken off at goes_on"),
        (ends, "SIGKILL"),
        (takes, "8.4 MB of memory for"),
        (takes_all, "MemoryError"),
        (leaks, "memory grows"),
    ],
)
def test_holes_are_found(read: Callable[[bytes], None], what: str) -> None:
    target = Target("planted", lambda data: None if data == b"valid" else read(data), lambda: [b"valid"], cpu_s=0.1)
    run = run_of(target)
    assert what in run.finding
    assert run.found or read is leaks


def test_a_leak_is_found_though_it_takes_what_was_freed_before() -> None:
    """As tests that ran before in this process have freed much."""
    bytes(16 << 20)  # so that the blocks below come from the heap, which keeps them
    freed = [b"\1" * 2**20 for _ in range(128)]
    edge = [bytearray(2**10) for _ in range(10_000)]  # or the heap would end before them
    del freed
    assert "memory grows" in run_of(Target("planted", leaks, lambda: [b"valid"])).finding
    del edge


def test_a_valid_input_that_is_refused_is_a_finding() -> None:
    run = run_of(Target("planted", int, lambda: [b"12", b"valid"]))  # type: ignore[arg-type]
    assert run.finding.startswith("a valid input is refused")
    assert run.found == b"valid"


def test_a_seed_repeats_itself() -> None:
    target = Target("planted", int, lambda: [b"12"])  # type: ignore[arg-type]
    one, same, other = run_of(target), run_of(target), run_of(target, seed=1)
    assert (one.inputs, one.refused, one.finding) == (same.inputs, same.refused, "")
    assert other.refused != one.refused


def run_of(target: Target, seed: int = 0) -> Run:
    return fuzzed(target, 100, seed, None, lambda tried: None)
