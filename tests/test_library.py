"""The library around somebody else's loop: the example program, run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import diloco
from diloco.config import Contract, Site
from diloco.errors import ConfigError, IncompatibleError, TicketError, UnreachableError
from tests.peers import until

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_loop.py"


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-u", str(EXAMPLE), *arguments], stdout=output, stderr=output)


@pytest.mark.slow
def test_the_example_trains_one_model_in_two_processes(tmp_path: Path) -> None:
    logs = [tmp_path / "founder.txt", tmp_path / "joiner.txt"]
    founder = start(logs[0])
    processes = [founder]
    try:
        line = until(lambda: re.search(r"own_loop.py (127\S+)", logs[0].read_text()), "the founder prints its address")
        processes.append(start(logs[1], line.group(1)))
        assert [process.wait(90) for process in processes] == [0, 0], [log.read_text() for log in logs]
        ends = [re.search(r"version (\d+), loss (\S+), state (\S+)", log.read_text()) for log in logs]
        assert all(ends)
        assert ends[0].group(1, 3) == ends[1].group(1, 3)
        assert all(float(end.group(2)) < 0.02 for end in ends)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_alone_and_left_in_good_order() -> None:
    """One peer, outer SGD at rate 1, fp32: plain training, to rounding."""
    tree = {
        "run": {"name": "alone", "total_tokens": 10**6},
        "model": {"kind": "external"},
        "inner": {"steps": 5},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "codec": {"name": "fp32"},
    }
    torch.manual_seed(0)
    model, twin = (torch.nn.Linear(8, 8) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batches = torch.randn(12, 16, 8)
    with diloco.found(Contract.model_validate(tree), model) as run:
        assert run.peers == (run.name,)
        outcomes = []
        for batch in batches:
            for each in (model, twin):
                each.zero_grad()
                (each(batch) - 1.0).square().mean().backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.sub_(parameter.grad * 0.1)
            outcomes.append(run.step(tokens=16))
        assert [index for index, outcome in enumerate(outcomes) if outcome] == [4, 9]
        assert run.version == 2
        assert run.tokens == 160
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, plain)
    assert run.version == 3  # what was trained since the last sync was contributed on leaving


@pytest.mark.slow
def test_a_loop_beside_a_faster_peer_syncs_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "run": {"name": "sized", "total_tokens": 10**6},
        "model": {"kind": "external"},
        "inner": {"steps": 32, "sized_by": "speed"},
    }
    with diloco.found(Contract.model_validate(tree), torch.nn.Linear(8, 8)) as run:
        monkeypatch.setattr(run._peer.exchange, "speeds", lambda: (1e12, 0.0))  # another peer's pace, tokens per second
        closed = [step for step in range(1, 41) if run.step(tokens=16)]
        assert run._peer.progress.pace > 0
    assert closed == [32, 34, 36, 38, 40]  # a whole round before anything is known, then H / 16


@pytest.mark.slow
def test_two_loops_gossip_and_end_alike() -> None:
    tree = {
        "run": {"name": "pairs", "total_tokens": 2000},
        "membership": {"policy": "gossip", "start_peers": 2},
        "model": {"kind": "external"},
        "inner": {"steps": 3},
        "outer": {"momentum": 0.5},
        "codec": {"name": "fp32"},
    }

    def train(run: diloco.Run, model: torch.nn.Linear, target: float) -> None:
        with run:
            while not run.done:
                with torch.no_grad():
                    model.weight.add_((target - model.weight) * 0.2)
                assert run.step(tokens=10) is None
                time.sleep(0.002)
            assert len(run.peers) == 2

    models = [torch.nn.Linear(8, 8) for _ in range(2)]
    founder = diloco.found(Contract.model_validate(tree), models[0])
    joiner = diloco.join(founder.address, models[1])
    threads = [
        threading.Thread(target=train, args=(run, model, target))
        for run, model, target in zip((founder, joiner), models, (1.0, 3.0), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert min(founder.version, joiner.version) >= 3
    assert founder.tokens >= 2000
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0.01, atol=0.01)
    assert 1.2 < models[0].weight.mean().item() < 2.8  # between what the two pull to


@pytest.mark.slow
def test_mistakes_are_named() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="contract not found"):
        diloco.found("no/such.toml", model)
    with pytest.raises(UnreachableError, match="nobody answers"):
        diloco.join("127.0.0.1:1", model)
    tree = {"run": {"name": "shapes", "total_tokens": 1000}, "model": {"kind": "external"}}
    founder = diloco.found(Contract.model_validate(tree), model, Site())
    try:
        with pytest.raises(TicketError, match="the address given names 000000"):
            diloco.join(f"127.0.0.1:1,{founder.address.partition('/')[0]}/000000", model)
        with pytest.raises(IncompatibleError, match="parameters"):  # through the second address: nobody is at the first
            diloco.join(f"127.0.0.1:1, {founder.address}", torch.nn.Linear(4, 5))
    finally:
        founder.close()
