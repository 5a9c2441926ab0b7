"""scripts/bench-loop, run as it is, with a small state: a peer copies it, and catches up over four commits.

Small in all, and not in parts: chunks and payloads have the size of those of 256M parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench-loop"

pytestmark = pytest.mark.slow


def test_no_callback_is_long_while_a_peer_catches_up(tmp_path: Path) -> None:
    found = tmp_path / "loop.json"
    command = [sys.executable, str(BENCH), "--parameters", "8388608", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = json.loads(found.read_text())
    assert "catching up over 4 commits" in phases
    assert all(phase["held"] for phase in phases.values())
