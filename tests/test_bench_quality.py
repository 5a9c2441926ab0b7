"""scripts/bench-quality and bench-async: their runs against each other, and the scripts, with runs of a second."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data.reader import BlockReader
from diloco.gossip.pairing import spread
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.observe.report import Table
from diloco.protocol import leases
from scripts.bench import quality
from scripts.bench.quality_bench import table
from scripts.bench.quality_rows import QUICK, Row, async_rows, contract_of, rows
from scripts.bench.quality_run import CPU, Fleet, Outcome, train
from tests.peers import DEADLINE_S

SCRIPTS = Path(__file__).parent.parent / "scripts"
BENCH = SCRIPTS / "bench-quality"
TOKENS = 3 * 4 * 2 * 4 * 32  # rounds, steps, peers, sequences, tokens of the quick scale


def contract(**sections: dict[str, Any]) -> Contract:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "quality", "total_tokens": 6 * 2 * 2 * 16},
        "data": {"sequence_length": 16},
        "model": {"layers": 2, "dim": 16, "heads": 2},
        "inner": {"steps": 1, "batch_size": 2, "optimizer": "sgd", "lr": 0.5, "clip": 0.0},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "codec": {"name": "fp32"},
        "eval": {"sequences": 8},
    }
    return Contract.model_validate({name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections})


def test_averaging_after_every_step_of_sgd_is_data_parallel() -> None:
    """So both read the same blocks, at the same learning rates."""
    apart, together = (train(contract(), peers=2, together=together) for together in (False, True))
    assert apart.loss == pytest.approx(together.loss, abs=1e-5)
    assert apart.tokens == together.tokens == 6 * 2 * 2 * 16
    assert train(contract(), peers=1, together=True).loss != pytest.approx(together.loss, abs=1e-5)


def test_sparse_contributions_with_error_feedback_are_those_of_a_plain_loop() -> None:
    """The largest eighth of every 4096 values, the mean over who sent a value, and the rest added to the next ones."""
    names, decay = ["p0", "p1"], 0.95
    sparse = contract(codec={"name": "topk", "density": 0.125, "values": "fp16", "error_feedback": decay})
    run = Fleet(sparse, names, [1.0, 1.0])
    peers = {name: RankModel(sparse, Site(), Island(0, 1, CPU)) for name in names}
    readers = {name: BlockReader(peer.dataset, sparse.run.seed) for name, peer in peers.items() if peer.dataset}
    held, anchor = leases.found(names, sparse.lease_blocks), flat(peers["p0"].model)
    residuals = [torch.zeros_like(anchor) for _ in names]
    run.train()
    for step in range(1, 7):
        total, senders = torch.zeros_like(anchor), torch.zeros_like(anchor)
        for place, (name, peer) in enumerate(peers.items()):
            torch.nn.utils.vector_to_parameters(anchor.clone(), peer.model.parameters())
            readers[name].lease(held.held[name], 2 * (step > 1))
            peer.inner.step(readers[name].next(2), step * 2 * 2 * 16)
            target = anchor - flat(peer.model) + decay * residuals[place]
            sent = torch.cat([largest(chunk, round(len(chunk) / 8)) for chunk in target.split(4096)])
            residuals[place] = target - sent
            total, senders = total + sent, senders + (sent != 0)
        anchor = anchor - total / senders.clamp(min=1)
        held = leases.advance(held, dict.fromkeys(names, 2), names, sparse.lease_blocks)
    assert torch.allclose(run.peers[0].line.state.fragments[0].anchor, anchor, atol=1e-6)
    assert residuals[0].count_nonzero() > len(anchor) / 2


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The largest ones in fp16, zero elsewhere."""
    places = values.abs().topk(count).indices
    return torch.zeros_like(values).index_put((places,), values[places].half().float())


@pytest.mark.parametrize("overlap", [1, 2])
def test_with_overlap_all_that_was_trained_is_committed_in_the_end(overlap: int) -> None:
    run = Fleet(contract(inner={"steps": 4}, sync={"fragments": 2, "overlap": overlap}), ["p0", "p1"], [1.0, 1.0])
    outcome = run.train()
    assert all(peer.line.trained.tokens == 0 for peer in run.peers)
    assert len({peer.line.state.digest for peer in run.peers}) == 1
    assert 0 <= outcome.tokens - 6 * 2 * 2 * 16 <= overlap * 2 * 2 * 16


def test_every_row_is_a_contract_and_the_tokens_are_equal() -> None:
    for row in (*rows(QUICK.steps).values(), *async_rows(QUICK.steps).values()):
        assert contract_of(row, QUICK, seed=1).run.total_tokens == TOKENS


SLOW = {"membership": {"policy": "async", "sync_versions": 2}, "inner": {"steps": 4}}


TWELVE = {"name": "quality", "total_tokens": 12 * 4 * 2 * 16}
"""12 rounds of 4 steps."""


def counts(run: Fleet) -> list[str]:
    """By version, whom it counts."""
    return [" ".join(one.peer for one in commit.counted) for commit in run.commits]


def test_under_async_each_goes_at_its_own_pace() -> None:
    """Of speeds 1 and 0.24, after two versions together: the slow peer makes its third contribution while four others
    close, and its last when the run has its tokens, and all wait for it."""
    run = Fleet(contract(run=TWELVE, **SLOW), ["p0", "p1"], [1.0, 0.24])
    outcome = run.train()
    assert counts(run) == ["p0 p1"] * 2 + ["p0"] * 4 + ["p1"] + ["p0"] * 3 + ["p0 p1"]
    assert len({peer.line.state.digest for peer in run.peers}) == 1
    assert [peer.run.steps for peer in run.peers] == [4 * (2 + 4 + 3), 4 * 4]
    assert outcome.time == pytest.approx(2 * 4 / 0.24 + 7 * 4, rel=0.01)
    assert outcome.staleness == (4 + 1 + 3) / 13


def test_a_version_counts_who_offers_while_another_has_steps_to_do() -> None:
    """Speeds 1 and 9/10, rounds of 4 steps of which the last overlaps: from the third version on, when their pace is
    known, they meet while one falls behind the other by less than that step."""
    sections = {"membership": {"policy": "async"}, "inner": {"steps": 4}, "sync": {"overlap": 1}}
    run = Fleet(contract(run=TWELVE, **sections), ["p0", "p1"], [1.0, 0.9])
    run.train()
    assert counts(run)[:10] == ["p0", "p1", "p0 p1", *["p0", "p1"] * 3, "p0"]
    assert len({peer.line.state.digest for peer in run.peers}) == 1


def test_sized_by_speed_all_are_ready_at_once() -> None:
    """Once each has heard how fast the other is. At a rate at which nobody's contribution is absurdly large."""
    sections = {"inner": {"sized_by": "speed", "steps": 4, "lr": 0.05}, "outer": {"weighting": "tokens"}}
    run = Fleet(contract(run=TWELVE, **sections), ["p0", "p1"], [1.0, 0.25])
    outcome = run.train()
    tokens = [tuple(one.tokens // 32 for one in commit.counted) for commit in run.commits]
    assert tokens == [(4, 4)] * 2 + [(4, 1)] * 7
    assert outcome.time == pytest.approx(2 * 16 + 7 * 4, rel=0.012)


def test_gossiping_peers_meet_when_they_are_due_and_end_alike() -> None:
    run = Fleet(
        contract(
            run={"name": "quality", "total_tokens": 30 * 4 * 2 * 16},
            membership={"policy": "gossip"},
            inner={"steps": 4, "lr": 0.1},
            outer={"optimizer": "nesterov", "momentum": 0.5},
        ),
        ["p0", "p1", "p2"],
        [1.0, 1.0, 0.5],
    )
    outcome = run.train()
    fast, _, slow = (peer.run.steps for peer in run.peers)
    assert fast == pytest.approx(48, abs=5)  # a peer hears of the others' steps a little later
    assert slow == pytest.approx(fast / 2, abs=1)
    assert outcome.tokens >= 30 * 4 * 2 * 16
    assert outcome.time == pytest.approx(fast, abs=2)
    local = [flat(peer.model.model) for peer in run.peers]
    assert max(spread(one, local[0]) for one in local) <= 0.005
    assert outcome.loss < 1.1 * math.log(256)


BITS = {"ddp": (32, 32), "fp32": (24, 32), "int4": (3, 4.3), "topk12-ef": (1.7, 1.82), "stream4-int4": (3, 4.3)}
"""At least and at most; zstd may save some."""


@pytest.mark.slow(queued=False)
def test_quick(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    done = start("--rows", ",".join(BITS), "--seeds", "1", "--json", str(path))
    output, errors = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, errors
    runs = {run["row"]: run for run in json.loads(path.read_text())["runs"]}
    assert list(runs) == list(BITS)
    for name, (least, most) in BITS.items():
        run = runs[name]
        assert f"`{name}`" in output
        assert f"{name}, seed 1: {run['loss']:.3f}" in errors
        assert 0 < run["loss"] < 1.1 * math.log(256)
        assert least <= run["bits"] <= most
        assert TOKENS <= run["tokens"] <= TOKENS + 2 * 4 * 32
    assert runs["ddp"]["bytes_per_token"] > 10 * runs["int4"]["bytes_per_token"]


@pytest.mark.slow(queued=False)
def test_quick_async(tmp_path: Path) -> None:
    path = tmp_path / "async.json"
    chosen = "sync*,*-scratch,gossip"
    done = start("--rows", chosen, "--seeds", "1", "--json", str(path), script=SCRIPTS / "bench-async")
    output, errors = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, errors
    runs = {run["row"]: run for run in json.loads(path.read_text())["runs"]}
    assert list(runs) == [
        "sync", "sync-sized", "plain-scratch", "delayed4-scratch", "share-scratch", "window-sized-scratch",
        "gossip",
    ]  # fmt: skip
    assert [row[0] for row in Table.read(path).rows] == list(runs)
    some_steps = 2 * 4 * 32  # swaps end with the time, and one step of each peer may be under way
    assert all(f"`{name}`" in output and run["tokens"] >= TOKENS - some_steps for name, run in runs.items())
    assert runs["plain-scratch"]["time"] < runs["sync"]["time"]
    assert runs["plain-scratch"]["versions"] > runs["sync"]["versions"]
    assert runs["gossip"]["time"] < runs["sync"]["time"]
    assert 0 < runs["gossip"]["loss"] < 1.1 * math.log(256)


@pytest.mark.slow(queued=False)
def test_an_interrupted_run_tells_what_it_has(tmp_path: Path) -> None:
    done = start("--rows", "fp32,int8", "--seeds", "1000", "--jobs", "2")
    assert done.stderr is not None
    assert "seed 1" in done.stderr.readline()
    done.send_signal(signal.SIGINT)
    output, _ = done.communicate(timeout=DEADLINE_S)  # its workers have ended, too: they hold the pipe
    assert done.returncode == 130
    assert "`fp32`" in output or "`int8`" in output


def start(*arguments: str, script: Path = BENCH) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), "--quick", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_table() -> None:
    def outcome(loss: float) -> Outcome:
        return Outcome(loss, bits=4.25, bytes_per_token=1234.5, tokens=1, cpu_s=1.0)

    chosen = {name: Row(name.upper()) for name in ("fp32", "int4", "sign-ef")}
    results = {"fp32": {1: outcome(2.0), 2: outcome(4.0)}, "int4": {2: outcome(3.0)}, "sign-ef": {}}
    head, rule, fp32, int4 = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table(chosen, results, quality.HEADER, quality.cells).splitlines()
    )
    assert head == ["row", "loss", "spread", "to fp32", "bits", "bytes/token", ""]
    assert set("".join(rule)) == {"-"}
    assert fp32 == ["`fp32`", "3.000", "2.000 .. 4.000", "", "4.25", "1,234.5", "FP32"]
    assert int4 == ["`int4`", "3.000", "", "-25.0%", "4.25", "1,234.5", "INT4"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [("--rows fp32,fp31", "no row fp31"), ("--steps 6", "multiple of 4"), ("--seeds 0", "must be 1 or more")],
)
def test_mistakes_are_named(
    arguments: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench-quality", *arguments.split()])
    with pytest.raises(SystemExit):
        quality.main()
    assert complaint in capsys.readouterr().err
