"""`diloco bench scaling`: what is compared with what, and a table of real islands of one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.base.errors import ConfigError, UsageError
from diloco.cli.bench import _contract_of
from diloco.cli.main import app
from diloco.config.contract import Contract
from diloco.config.load import load_site
from diloco.config.site import Site
from diloco.observe.report import Table
from diloco.run.scaling import jobs, limited
from tests.peers import run_cli, tiny_contract

PARTED = load_site(None, ["mesh.shard=parameters", "mesh.tp=2"]).value


def contract() -> Contract:
    model = {"layers": 1, "dim": 32, "heads": 2, "ffn_dim": 64}
    inner = {"batch_size": 2}
    return Contract.model_validate({"run": {"name": "s", "total_tokens": 1}, "model": model, "inner": inner})


def test_weak_scaling_adds_rows_and_strong_scaling_divides_them() -> None:
    made = [(kind, job.ranks, job.contract.inner.batch_size) for kind, job in jobs(contract(), PARTED, (1, 2, 4))]
    assert made == [("weak", 1, 2), ("weak", 2, 4), ("weak", 4, 8), ("strong", 2, 2), ("strong", 4, 2)]
    (_, one), (_, two), *_ = jobs(contract(), PARTED, (1, 2))
    assert one.site.mesh == Site().mesh  # one rank has nothing to divide
    assert two.site.mesh == PARTED.mesh
    assert [job.contract.inner.batch_size for _, job in jobs(contract(), PARTED, (2, 4))] == [2, 4, 2]


def test_islands_that_cannot_be_compared_are_refused_before_any_is_started() -> None:
    for wrong in ((), (2, 1), (1, 1), (2, 3)):
        with pytest.raises(UsageError, match="cannot compare islands"):
            jobs(contract(), PARTED, wrong)
    with pytest.raises(ConfigError, match="which does not divide the island's 3 ranks"):
        jobs(contract(), PARTED, (1, 3))
    with pytest.raises(ConfigError, match=r"inner.batch_size \(2\) does not divide by 4 data-parallel ranks"):
        jobs(contract(), Site(), (1, 4))


def test_a_rank_on_a_cpu_has_one_thread_unless_the_site_says_otherwise() -> None:
    assert limited(load_site(None, ["device.kind=cpu"]).value).device.threads == 1
    assert limited(load_site(None, ["device.kind=cpu", "device.threads=3"]).value).device.threads == 3


def test_a_preset_is_a_contract_of_defaults() -> None:
    made = _contract_of("1m", ["data.sequence_length=64"])
    assert (made.model.preset, made.model.dim, made.data.sequence_length) == ("1m", 160, 64)
    with pytest.raises(ConfigError, match="not found"):
        _contract_of("1mm", [])


@pytest.mark.parametrize("ranks", ["", "1,,2", "a", "0"])
def test_ranks_are_numbers(ranks: str) -> None:
    result = CliRunner().invoke(app, ["bench", "scaling", "1m", "--ranks", ranks])
    assert isinstance(result.exception, UsageError)


def test_under_torchrun_the_ranks_that_were_started_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "rows.json"
    options = ["--seconds", "0", "--set", "device.kind=cpu", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "scaling", str(tiny_contract(tmp_path)), *options])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["ranks"], row["sequences"], row["efficiency"]) == (1, 4, None)


@pytest.mark.slow(queued=False)
def test_one_and_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    shape = ("--set", "mesh.shard=parameters", "--set", "device.kind=cpu", "--set", "device.peak_tflops=0.01")
    command = ("bench", "scaling", str(tiny_contract(tmp_path)), "--ranks", "1,2", "--seconds", "0")
    done = run_cli(*command, *shape, "--json", str(file), timeout_s=200)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["scaling", "ranks", "mesh", "rows", "tokens/s", "efficiency", "memory", "FLOP/s", "MFU"]
    assert [line.split()[:2] for line in lines[:4]] == [["weak", "1"], ["weak", "2"], ["strong", "1"], ["strong", "2"]]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["sequences"], row["mesh"]) for row in rows] == [
        (4, {}), (8, {"dp_shard": 2}), (4, {}), (4, {"dp_shard": 2})
    ]  # fmt: skip
    base = rows[0]["tokens_per_s"]
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["tokens_per_s"] / row["ranks"] / base)
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / (row["ranks"] * 0.01e12))
        assert [rank["host_peak_bytes"] > 10**8 for rank in row["memory"]] == [True] * row["ranks"]
    assert len(Table.read(file).rows) == 4
