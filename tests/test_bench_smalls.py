"""scripts/bench-smalls."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from diloco.wire.convert import commit_from_wire, commit_to_wire
from scripts.bench.smalls import commit_of

BENCH = Path(__file__).parent.parent / "scripts" / "bench-smalls"


def test_its_commit_is_one_that_members_take() -> None:
    commit = commit_of(9)
    assert commit_from_wire(commit_to_wire(commit)) == commit
    assert [counted.peer for counted in commit.counted] == [member.peer for member in commit.view]


@pytest.mark.slow
def test_two_ranks_and_nine_members(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = subprocess.run(
        [BENCH, "--ranks", "2", "--members", "9", "--json", told], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())
    assert (found["ranks"], found["members"]) == (2, 9)
    assert 0 < found["meeting_ms"] < 1000
    assert abs(found["meeting_alone_ms"]) < 1000
    assert f"{found['commit_ms']:.2f} ms" in done.stdout
