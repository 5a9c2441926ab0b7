"""scripts/bench-membership, run as it is: one scene with short rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench-membership"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_two_of_three_leave_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = bench("--only", "leave-two", "--round-s", "5", "--json", str(path))
    if "no network namespaces" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["scene"], row["held"], row["said"]) == ("leave-two", True, "")
    assert row["seconds"].keys() == {"a_out_of_view", "a_ended", "b_out_of_view", "b_ended", "next_version"}


def test_an_unknown_scene_is_named() -> None:
    done = bench("--only", "leaves")
    assert done.returncode == 2
    assert "no scene 'leaves': one of join, leave," in done.stderr
