"""Gossip with real processes, through the command line: to the final average, through a death, a join and a return."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.peers import PeerProcess, ending, run_cli, until

pytestmark = pytest.mark.slow

TINY = """
[run]
name = "tiny"
total_tokens = {tokens}
[membership]
policy = "gossip"
[data]
sequence_length = 32
[model]
layers = 1
dim = 32
heads = 2
[inner]
steps = 8
batch_size = 4
lr = 2e-3
warmup = 0.0
[outer]
momentum = 0.5
[codec]
name = "fp16"
[eval]
every_versions = 5
sequences = 32
"""


def write_contract(directory: Path, tokens: int) -> Path:
    path = directory / "tiny.toml"
    path.write_text(TINY.format(tokens=tokens))
    return path


@pytest.mark.slow(queued=False)  # nearest first: this one counts
def test_a_simulation_ends_with_a_final_average(tmp_path: Path) -> None:
    out, tokens = tmp_path / "sim", 24_576
    contract = str(write_contract(tmp_path, tokens))
    done = run_cli("simulate", contract, "--peers", "3", "--out", str(out), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Peers averaged in pairs" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["spread"] <= 0.005
    assert summary["digests_agree"] is None
    assert tokens <= summary["tokens"] < 2 * tokens
    assert summary["val_loss"] < math.log(256) - 1.0
    assert "Spread between peers" in (out / "report.html").read_text()
    ends = [PeerEvents(out / name).last("end") for name in ("p0", "p1", "p2")]
    assert all(end["reason"] == "done" and end["discarded_tokens"] == 0 for end in ends)
    losses = [end["val_loss"] for end in ends]
    assert max(losses) - min(losses) < 0.05
    exported = run_cli("export", str(out / "p1"), str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    judged = json.loads(run_cli("eval", str(tmp_path / "model"), "--json").stdout)
    assert judged["val_loss"] == pytest.approx(losses[1], abs=1e-4)
    assert judged["tokens"] == ends[1]["tokens"]


class PeerEvents:
    def __init__(self, directory: Path) -> None:
        self.events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]

    def last(self, kind: str) -> dict:
        return [event for event in self.events if event["kind"] == kind][-1]


def partners(peer: PeerProcess) -> set[str]:
    return {event["partner"] for event in peer.events("swap")}


def test_a_death_a_join_and_a_return(tmp_path: Path) -> None:
    slow = ("--set", "device.step_s=0.02")
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(write_contract(tmp_path, 10**9)), *slow)
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket(), *slow)
        peers.append(b)
        until(lambda: "b" in partners(a) and "a" in partners(b), "a and b swap")
        until(lambda: b.events("checkpoint"), "b has a checkpoint")
        b.kill()
        swaps = len(b.events("swap"))
        trained = a.events("progress")[-1]["tokens"]
        c = PeerProcess("c", tmp_path, "--join", a.ticket(), *slow)
        peers.append(c)
        until(lambda: "a" in partners(c), "c and a swap")
        assert a.events("progress")[-1]["tokens"] > trained
        again = PeerProcess("b", tmp_path, "--resume", str(b.directory), "--join", c.ticket(), *slow)
        peers.append(again)
        until(lambda: len(again.events("swap")) > swaps, "b swaps again")
        assert again.events("start")[-1]["resumed_version"] > 0
        answer = run_cli("status", c.ticket(), "--json")
        status = json.loads(answer.stdout)
        assert {entry["peer"] for entry in status["peers"]} == {"a", "b", "c"}
        assert status["spread"] is not None
        refused = run_cli("witness", "--join", a.ticket(), "--dir", str(tmp_path / "w"))
        assert refused.returncode == 2
        assert "gossips" in refused.stderr
        a.interrupt()
        assert a.wait() == 0, a.log.read_text()
        assert "left at version" in a.log.read_text()
