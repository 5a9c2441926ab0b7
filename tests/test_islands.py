"""Islands of one, two and four ranks in one run, through the command line; a rank that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.base.errors import ResourceError
from diloco.island import Island
from diloco.island.mesh import Mesh
from tests.peers import DEADLINE_S, PeerProcess, ending, ranks_of, tiny_contract, until
from tests.test_run import agree
from tests.warm import run_ranks

pytestmark = pytest.mark.slow

SHAPES = {
    "a": (),
    "b": ("device.ranks=2", "mesh.shard=parameters"),
    "c": ("device.ranks=4", "mesh.shard=parameters", "mesh.tp=2"),
}
LATER = ("device.ranks=4", "mesh.shard=parameters", "mesh.pp=2", "mesh.micro_batches=2")
VERSIONS = 3
SETTINGS = (
    "eval.every_versions=1",
    "model.layers=2",
    "device.step_s=0.05",
    "membership.match_deadline_s=100",
    "membership.round_deadline_s=120",
)
PATIENT = ("timeouts.suspect_s=30", "timeouts.stall_s=30")
FOUNDER = [text for setting in (*SETTINGS, *PATIENT) for text in ("--set", setting)]
"""Not as fast as it could: what the others need to start again is not spent on hundreds of versions meanwhile. And
nobody is left out for being slow: up to ten ranks share two cores, of which somebody else may use one."""


def three(directory: Path, peers: list[PeerProcess], shapes: dict[str, tuple[str, ...]]) -> None:
    """Found a run with a, and let b and c join."""
    directory.mkdir()
    contract = str(tiny_contract(directory, peers=3))
    peers.append(PeerProcess("a", directory, contract, *FOUNDER))
    peers.extend(joiner(name, peers[0], shapes[name]) for name in "bc")


def joiner(name: str, founder: PeerProcess, shape: tuple[str, ...]) -> PeerProcess:
    settings = [text for setting in (*shape, *PATIENT) for text in ("--set", setting)]
    return PeerProcess(name, founder.directory.parent, "--join", founder.ticket(), *settings)


def loss_at(version: int, peers: list[PeerProcess]) -> float:
    def found() -> float | None:
        evaluated = [e["val_loss"] for peer in peers for e in peer.events("eval") if e["version"] == version]
        return evaluated[0] if evaluated else None

    return float(until(found, f"somebody evaluates version {version}"))


@pytest.mark.timeout(600)
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

        d = joiner("d", a, LATER)
        peers.append(d)
        together = a.reaches(VERSIONS, ["a", "b", "c", "d"], deadline_s=150.0)["version"]

        told = until(lambda: next((e for e in d.events("usage") if e["phases"]), None), "d tells what it uses")
        assert [rank["host_peak_bytes"] > 10**8 for rank in told["memory"]] == [True] * 4
        assert told["phases"].keys() == {"data", "pipeline", "optimizer", "wait"}
        assert told["flops_per_s"] > told["flops_per_s_wall"] > 0
        assert told["mfu"] is None
        assert (d.events("start")[-1]["ranks"], d.events("start")[-1]["mesh"]) == (4, {"pp": 2, "dp_shard": 2})
        until(lambda: any(e["version"] >= VERSIONS - 1 for e in b.events("checkpoint")), "b has a checkpoint")
        os.kill(ranks_of(b)[1], signal.SIGKILL)
        without = a.reaches(together + 1, ["a", "c", "d"])["version"]
        a.reaches(without + 1, ["a", "b", "c", "d"], deadline_s=150.0)
        assert b.events("start")[-1]["resumed_version"] >= VERSIONS - 1
        assert not a.events("skip")

        for peer in (d, c):
            peer.interrupt()
            assert peer.wait() == 0, peer.log.read_text()
            assert "left at version" in peer.log.read_text()
        for peer in (a, b):
            peer.interrupt()
        assert (a.wait(), b.wait()) == (0, 0)
        assert agree(peers) >= VERSIONS


# ---------------------------------------------------------------- ranks that hang


def silent(place: int, root: Path) -> None:
    """The last of four ranks takes part in nothing: each other one waits for it in a group of another kind."""
    (root / f"here-{place}").touch()
    until(lambda: len(list(root.glob("here-*"))) == 4, "all have started")  # which the 4 s are not for
    island = Island.at(place, 4, torch.device("cpu"), rendezvous=f"file://{root / 'meeting'}", timeout_s=4.0)
    sizes = {"dp_replicate": 1, "pp": 2, "dp_shard": 2, "cp": 1, "ep": 1, "tp": 1}
    mesh = Mesh.of(sizes, place, "cpu", island.timeout_s)
    stage = mesh.of_one_stage()
    if place == 3:
        until(lambda: len(list(root.glob("told-*"))) == 3, "the others give up")
        os._exit(0)
    groups = {1: [mesh.along("pp").get_group()], 2: [mesh.along("dp_shard").get_group(), stage]}.get(place, [])
    told = [waited(island, partial(dist.all_reduce, torch.ones(1), group=group)) for group in groups]
    if place == 0:
        told.append(waited(island, partial(island.all, True)))
    (root / f"told-{place}").write_text("\n".join(told))
    until(lambda: len(list(root.glob("told-*"))) == 3, "all three give up")  # who ends, resets its connections
    os._exit(0)


def share_texts(place: int, root: Path) -> None:
    """Texts of rank 0 reach all ranks in order, however long; a rank 0 that is silent or gone is not waited for."""
    island = Island.at(place, 3, torch.device("cpu"), rendezvous=f"file://{root / 'meeting'}", timeout_s=DEADLINE_S)
    texts = ["", "x", "é" * 20_000, "u" * 70_000, "after"]
    assert [island.share(text if place == 0 else "") for text in texts] == texts
    assert island.all(True)
    if place == 1:
        island.timeout_s = 0.1
        with pytest.raises(ResourceError, match=r"rank 0 of this island has not answered for 0\.1 s"):
            island.share()
    if place == 2:
        with pytest.raises(ResourceError, match="rank 0 of this island is gone"):
            island.share()
    if place == 0:
        until((root / "heard 1").is_file, "rank 1 gives up")
        for connection in island._connections:
            connection.close()
        until((root / "heard 2").is_file, "rank 2 gives up")
    (root / f"heard {place}").touch()


def test_ranks_hear_texts_of_any_length(tmp_path: Path) -> None:
    run_ranks(share_texts, 3, tmp_path)
    assert len(list(tmp_path.glob("heard *"))) == 3


def waited(island: Island, collective: Callable[[], object]) -> str:
    with pytest.raises(ResourceError) as raised, island.watched():
        collective()
    return raised.value.cause


def test_a_rank_that_hangs_is_found_in_every_group(tmp_path: Path) -> None:
    run_ranks(silent, 4, tmp_path)
    told = [line for path in tmp_path.glob("told-*") for line in path.read_text().splitlines()]
    assert len(told) == 4
    assert all("has not answered for 4 s" in line for line in told), told
