"""`diloco peer --profile`: each rank of a real island writes a trace of the steps that were asked for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from diloco.inner.meter import Trace
from diloco.run.door import WRITTEN
from tests.peers import PeerProcess, ending, tiny_contract

STEPS = 2


@pytest.mark.slow
def test_each_rank_writes_a_trace_of_these_steps(tmp_path: Path) -> None:
    contract = str(tiny_contract(tmp_path, tokens=2048))
    with ending([]) as peers:
        shape = ("--set", "device.ranks=2", "--set", "mesh.shard=parameters", "--set", "device.profile_after=4")
        peers.append(PeerProcess("a", tmp_path, contract, "--profile", str(STEPS), *shape))
        (peer,) = peers
        assert peer.wait() == 0, peer.log.read_text()
    folder = peer.directory / "profile"
    assert {path.name for path in peer.directory.iterdir()} - {"log.txt"} <= {*WRITTEN}
    (told,) = peer.events("profile")
    assert told["path"] == str(folder / "rank-0.json.gz")
    assert f"{folder / 'rank-0.json.gz'}, and beside it one for each of 2 ranks" in peer.log.read_text()
    assert {path.name for path in folder.iterdir()} == {"rank-0.json.gz", "rank-1.json.gz"}
    for path in folder.iterdir():
        names = Counter(event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        assert names["forward"] == names["backward"] == names["optimizer"] == STEPS
        assert names["aten::mm"] > STEPS


def test_a_disk_that_refuses_a_trace_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    trace = Trace(tmp_path / "file" / "rank-0.json.gz", 2, torch.device("cpu"))
    assert [trace.step(), trace.step()] == [False, True]
    assert "no trace in" in caplog.text
