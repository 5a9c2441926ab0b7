"""scripts/bench-sync, run as it is: small models, real peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.peers import DEADLINE_S

BENCH = Path(__file__).parent.parent / "scripts" / "bench-sync"
NOT_PERMITTED = "no network namespaces here"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end. What it made is gone then."""
    command = [sys.executable, str(BENCH), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert not list(Path("/run/netns").glob(f"diloco-sync-{process.pid}-*"))
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def rows_of(done: subprocess.CompletedProcess[str], path: Path) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert len(done.stdout.splitlines()) == 1 + len(rows)  # plain lines: the output is no terminal
    return rows


@pytest.mark.slow(queued=False)
def test_loopback(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--links", "none", "--peers", "2", "--params", "0.5", "--rounds", "1", "--warm-up", "1"]
    done = bench(*arguments, "--systems", "diloco", "--codecs", "int8", "--logs", "on,off", "--json", str(path))
    ours, unlogged = rows_of(done, path)
    assert (ours["system"], ours["codec"]) == ("diloco", "int8")
    assert ours["payload_bytes"] == 2**19 * (256 + 4) // 256  # codes, and a scale for each 256 of them
    assert [row["log_bytes"] >= ours["payload_bytes"] for row in (ours, unlogged)] == [True, False]
    for row in (ours, unlogged):
        assert row["identical"]
        assert row["limit_seconds"] is None
        assert 0 < row["seconds"] < 30
        assert row["payload_bytes"] <= row["bytes_sent_per_peer"] < 1.2 * row["payload_bytes"]  # 2 (N-1)/N = 1
        assert row["peak_rss_mb"] > 10


@pytest.mark.slow
def test_a_link_with_a_rate_and_a_delay(tmp_path: Path) -> None:
    """So much is sent that the link, and not a core that others use, is what takes the time."""
    path = tmp_path / "rows.json"
    arguments = ["--links", "50", "--delay-ms", "5", "--peers", "2", "--params", "2"]
    done = bench(*arguments, "--rounds", "1", "--warm-up", "1", "--systems", "gloo", "--json", str(path))
    if NOT_PERMITTED in done.stderr:
        pytest.skip(done.stderr)
    for row in rows_of(done, path):  # one for each congestion control
        assert row["limit_seconds"] == pytest.approx(2**23 * 8 / 50e6, rel=1e-3)
        assert 0.4 < row["share"] < 0.98  # the link is that slow, and no slower
        assert row["bytes_sent_per_peer"] > row["payload_bytes"]


def test_mistakes_are_named() -> None:
    for arguments, complaint in [
        (["--systems", "nccl"], "no system named 'nccl' here; there are diloco"),
        (["--codecs", "int9"], "no codec named 'int9' here"),
        (["--congestion", "warp", "--links", "100"], "no congestion control"),
    ]:
        done = bench(*arguments)
        assert done.returncode == 1
        assert complaint in done.stderr
    done = bench("--logs", "maybe")
    assert done.returncode == 2
    assert "'maybe' is neither on nor off" in done.stderr
