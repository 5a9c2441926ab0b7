"""scripts/bench-lanes, run as it is: two islands of two ranks, each rank behind a link of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench-lanes"

pytestmark = pytest.mark.slow


def test_two_links_take_less_time_than_one(tmp_path: Path) -> None:
    found = tmp_path / "lanes.json"
    small = ["--ranks", "2", "--lanes", "1,2", "--link-mbit", "0.5", "--layers", "1", "--dim", "64", "--versions", "1"]
    command = [sys.executable, str(BENCH), *small, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if "no network namespaces can be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(found.read_text())
    assert (one["lanes"], two["lanes"], one["ranks"], two["ranks"]) == (1, 2, 2, 2)
    assert one["seconds"] > one["limit_seconds"] > two["limit_seconds"] == pytest.approx(one["limit_seconds"] / 2)
    assert two["outer_bytes"] <= one["outer_bytes"] / 2 + 8
    assert two["ratio"] == two["seconds"] / one["seconds"]
    assert done.stdout.split()[0] == "lanes"
