"""scripts/gpu-check, run as it is on a CPU: real peers, and an island that torchrun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent.parent / "scripts" / "gpu-check"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_island_and_a_peer_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(CHECK), "--device", "cpu", "--only", "peers", "--rows", "island"]
    command += ["--preset", "0.3m", "--sequence", "32", "--batch", "4", "--steps", "4", "--rounds", "3"]
    done = subprocess.run([*command, "--json", str(tmp_path / "rows.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["tokens_per_s"] > 0
    assert 0 < row["inner_share"] < 1
    assert row["loss"][1] < row["loss"][0]
    assert row["mfu"] is row["gpu_bytes"] is None
