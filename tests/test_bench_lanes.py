"""scripts/bench-lanes, run as it is: two islands of two ranks, each rank behind a link of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench-lanes"

pytestmark = pytest.mark.slow(queued=False)


def test_two_lanes(tmp_path: Path) -> None:
    found = tmp_path / "lanes.json"
    small = ["--ranks", "2", "--lanes", "2", "--link-mbit", "1", "--layers", "1", "--dim", "128", "--versions", "1"]
    command = [sys.executable, str(BENCH), *small, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if "no network namespaces can be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (two,) = json.loads(found.read_text())
    assert (two["lanes"], two["ranks"], two["ratio"]) == (2, 2, 1.0)
    assert two["limit_seconds"] == pytest.approx(two["params"] * 8 / 2e6)
    assert two["seconds"] > 0.5 * two["limit_seconds"]  # a shaper lets through what it has saved up
    assert two["outer_bytes"] == pytest.approx(4 * two["params"], abs=8)
    assert done.stdout.split()[0] == "lanes"
