"""Islands of one, two and four ranks in one run, through the command line; a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.peers import PeerProcess, ending, ranks_of, tiny_contract, until
from tests.test_run import agree

pytestmark = pytest.mark.slow

SHAPES = {
    "a": (),
    "b": ("device.ranks=2", "mesh.tp=2"),
    "c": ("device.ranks=4", "mesh.shard=parameters", "mesh.pp=2", "mesh.micro_batches=2"),
}
VERSIONS = 3
FOUNDER = ("--set", "eval.every_versions=1", "--set", "model.layers=2", "--set", "device.step_s=0.05")
"""Not as fast as it could: what the others need to start again is not spent on hundreds of versions meanwhile."""


def three(directory: Path, peers: list[PeerProcess], shapes: dict[str, tuple[str, ...]]) -> None:
    """Found a run with a, and let b and c join."""
    directory.mkdir()
    contract = str(tiny_contract(directory, peers=3))
    peers.append(PeerProcess("a", directory, contract, *FOUNDER))
    ticket = peers[0].ticket()
    for name in "bc":
        settings = [text for setting in shapes[name] for text in ("--set", setting)]
        peers.append(PeerProcess(name, directory, "--join", ticket, *settings))


def loss_at(version: int, peers: list[PeerProcess]) -> float:
    def found() -> float | None:
        evaluated = [e["val_loss"] for peer in peers for e in peer.events("eval") if e["version"] == version]
        return evaluated[0] if evaluated else None

    return float(until(found, f"somebody evaluates version {version}", 120.0))


def test_islands_of_any_shape_train_one_model_and_one_comes_back(tmp_path: Path) -> None:
    """The loss is that of three peers of one rank; a rank that is killed costs the others nothing."""
    with ending([]) as peers:
        three(tmp_path / "alone", peers, dict.fromkeys("bc", ()))
        expected = loss_at(VERSIONS, peers)
    with ending([]) as peers:
        three(tmp_path / "islands", peers, SHAPES)
        a, b, c = peers
        assert loss_at(VERSIONS, peers) == pytest.approx(expected, rel=0.01)
        assert all(set(e["counted"]) == {"a", "b", "c"} for e in a.events("version")[:VERSIONS])

        told = c.events("usage")[-1]
        assert [rank["host_peak_bytes"] > 10**8 for rank in told["memory"]] == [True] * 4
        assert told["phases"].keys() == {"data", "pipeline", "optimizer", "wait"}
        assert told["flops_per_s"] > told["flops_per_s_wall"] > 0
        assert told["mfu"] is None
        assert (c.events("start")[-1]["ranks"], c.events("start")[-1]["mesh"]) == (4, {"pp": 2, "dp_shard": 2})
        until(lambda: any(e["version"] >= VERSIONS - 1 for e in b.events("checkpoint")), "b has a checkpoint")
        os.kill(ranks_of(b)[1], signal.SIGKILL)
        without = a.reaches(VERSIONS + 1, ["a", "c"])["version"]
        a.reaches(without + 1, ["a", "b", "c"], deadline_s=120.0)
        assert b.events("start")[-1]["resumed_version"] >= VERSIONS - 1
        assert not a.events("skip")

        c.interrupt()
        assert c.wait() == 0, c.log.read_text()
        assert "left at version" in c.log.read_text()
        for peer in (a, b):
            peer.interrupt()
        assert (a.wait(), b.wait()) == (0, 0)
        assert agree(peers) >= VERSIONS
