"""`diloco bench collectives` between two real ranks, and NCCL-tests' definitions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco.base.errors import UsageError
from diloco.cli.bench import _parse_sizes
from diloco.island import Island
from diloco.island.collectives import BUS_FACTORS, Measured, measure

ROOT = Path(__file__).parent.parent


def test_bus_bandwidth_is_what_a_rank_must_send() -> None:
    """1 GB in a second among 4 ranks (NCCL-tests, doc/PERFORMANCE.md)."""
    bus = {name: Measured(name, "all", 4, 10**9, 1.0).bus_bps / 8e9 for name in BUS_FACTORS}
    assert bus == pytest.approx(
        {"all-reduce": 1.5, "all-gather": 0.75, "reduce-scatter": 0.75, "all-to-all": 0.75, "send and receive": 1.0}
    )


def test_sizes() -> None:
    assert _parse_sizes("64K, 1M,3") == [65_536, 1_048_576, 3]
    for wrong in ("", "0", "1T", "K", "1.5M"):
        with pytest.raises(UsageError, match="as a size"):
            _parse_sizes(wrong)


def test_one_rank_is_no_island_to_measure() -> None:
    with pytest.raises(UsageError, match="nobody to talk to"):
        list(measure(Island(0, 1, torch.device("cpu")), None, [1024], 0.1))


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [
        "--sizes",
        "4K,70001",
        "--layout",
        "dp_shard=2",
        "--seconds",
        "0",
        "--link",
        "8Mbit/s",
        "--json",
        str(file),
    ]
    command = [*torchrun, "-m", "diloco", "bench", "collectives", "--site", "peers/local.toml", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    rows = json.loads(file.read_text())
    assert [(row["collective"], row["size_bytes"]) for row in rows] == [
        (name, size)
        for name in BUS_FACTORS
        for size in (4096, 70_008)  # as many fp32 values for each rank
    ]
    assert len(done.stdout.splitlines()) == 1 + len(rows)
    for row in rows:
        assert (row["dimension"], row["ranks"]) == ("dp_shard", 2)
        assert row["algorithm_bps"] == pytest.approx(8 * row["size_bytes"] / row["seconds"])
        assert row["bus_bps"] == pytest.approx(row["algorithm_bps"] * BUS_FACTORS[row["collective"]](2))
        assert row["link_share"] == pytest.approx(row["bus_bps"] / 8e6)
