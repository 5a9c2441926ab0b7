"""scripts/bench-overlap, run as it is: two real peers for each row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench-overlap"
ROUNDS, STEPS, STEP_S, BATCH_TOKENS = 3, 8, 0.05, 64
"""One round alone may meet whatever else the machine does."""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def rows_of(path: Path, network: str, *names: str) -> dict[str, dict[str, Any]]:
    arguments = ["--rounds", str(ROUNDS), "--steps", str(STEPS), "--step-s", str(STEP_S), "--json", str(path)]
    done = bench(*arguments, "--network", network, "--rows", ",".join(names))
    if "no network namespaces" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == list(names)
    assert all(name in done.stdout for name in names)
    return {row["name"]: row for row in rows}


@pytest.mark.slow
def test_a_plain_sync_keeps_training_waiting_for_the_link(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", "relay", "plain")
    assert 0 < rows["plain"]["tokens_per_s"] <= 2 * BATCH_TOKENS / STEP_S
    on_the_link_s = STEPS * STEP_S * 0.3 / 0.7
    assert rows["plain"]["waiting_s_per_round"] > 0.9 * on_the_link_s


@pytest.mark.slow
def test_between_namespaces(tmp_path: Path) -> None:
    row = rows_of(tmp_path / "rows.json", "namespaces", "stream2")["stream2"]
    assert row["sync"] == {"fragments": 2, "overlap": 3, "merge": "mix"}  # 1.7 steps on the link, and one
    assert row["waiting_s_per_round"] > 0  # whether it is less, the bench says
    assert row["tokens_per_s"] > 0
    assert row["share"] is None  # nothing to compare it with


@pytest.mark.slow(queued=False)
def test_a_mistake_is_named() -> None:
    done = bench("--rows", "none,warp")
    assert done.returncode == 2
    assert "no row warp" in done.stderr
