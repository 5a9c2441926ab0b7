"""scripts/bench-loop, run as it is, with a small state: a peer copies it, and catches up over four commits.

Small in all, and not in parts: chunks and payloads have the size of those of 256M parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import loops

BENCH = Path(__file__).parent.parent / "scripts" / "bench-loop"


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs, each of which takes 150 s beside two other workers on a slow machine
def test_no_callback_is_long_while_a_peer_catches_up(tmp_path: Path) -> None:
    found = tmp_path / "loop.json"
    command = [sys.executable, str(BENCH), "--parameters", "8388608", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(found.read_text())
    assert "catching up over 4 commits" in measured["phases"]
    assert measured["too_long"] == []


def test_limits_are_per_phase_and_longer_on_a_slow_cpu() -> None:
    line = {"callback": "Exchange._send", "cpu_s": 0.03, "gc_s": 0.0, "slowness": 2.0}
    phases = {
        "rounds": {"seconds": 1.0, "limit_s": 0.01, "slowest": {"p0": [line, {**line, "cpu_s": 0.019}], "p1": []}},
        "copying": {"seconds": 1.0, "limit_s": 0.05, "slowest": {"p0": [line]}},
    }
    assert loops.long(phases) == {("rounds", "p0", "Exchange._send")}
    text = loops.table(1_000_000, phases)
    assert "rounds: 1.0 s, limit 10 ms EXCEEDED" in text
    assert "copying: 1.0 s, limit 50 ms held" in text


@pytest.mark.parametrize(
    ("runs", "measured", "always"),
    [("", 1, ""), ("a|", 2, ""), ("ab|bc|b", 3, "b"), ("ab|b|a", 3, ""), ("a|b|a", 2, ""), ("a|a|a|a", 3, "a")],
)
def test_what_is_too_long_in_a_run_is_measured_again(runs: str, measured: int, always: str) -> None:
    """Only what is too long in each of three runs counts. A letter is a callback that was."""
    found = [
        {
            "rounds": {
                "limit_s": 0.01,
                "slowest": {"p0": [{"callback": one, "cpu_s": 0.02, "gc_s": 0.0, "slowness": 1.0} for one in run]},
            }
        }
        for run in runs.split("|")
    ]
    done: list[object] = []

    def measure() -> dict[str, object]:
        done.append(found[len(done)])
        return found[len(done) - 1]

    phases, too_long = loops.repeated(measure, 3)
    assert len(done) == measured
    assert phases is found[measured - 1]
    assert {callback for _, _, callback in too_long} == set(always)
