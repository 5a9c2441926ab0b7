"""`diloco simulate` around its peers: what it may delete, what is in its way, and what a Ctrl-C leaves."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.base.errors import DilocoError, ResourceError, UsageError
from diloco.config.load import split_overrides
from diloco.simulate.local.simulation import SimulateOptions, _plan, _prepare, run_simulation
from tests.peers import tiny_contract


def options(directory: Path, *compare: str, tokens: int = 6_144) -> SimulateOptions:
    return SimulateOptions(tiny_contract(directory, tokens=tokens), 2, compare, directory / "sim")


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def test_only_what_a_simulation_wrote_is_deleted(tmp_path: Path) -> None:
    out = tmp_path / "sim"
    ours = [out / "contract.json", out / "summary.json", out / "p0" / "log.txt", out / "ddp" / "contract.json"]
    others = [out / "gpu-box" / "log.txt", out / "notes.txt", out / "p0-backup" / "log.txt"]
    touch(*ours, *others)
    _prepare(_plan(options(tmp_path)), ["ddp"])
    assert all(path.is_file() for path in others)
    assert not any(path.exists() for path in ours[1:])


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    out = tmp_path / "sim"
    touch(out / "contract.json", out / "p1" / "events.jsonl")  # of `diloco peer --name p1`
    with pytest.raises(UsageError, match="p1 is not from an earlier simulation"):
        _prepare(_plan(options(tmp_path)), [])
    touch(tmp_path / "file")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResourceError, match="cannot write to"):
            _prepare(replace(_plan(options(tmp_path)), directory=taken), [])


@pytest.mark.parametrize("text", ["membership.start_peers=5", "peer.name=oslo", "storage.directory=elsewhere"])
def test_a_key_that_a_simulation_sets_is_refused(text: str, tmp_path: Path) -> None:
    site, contract = split_overrides([text])
    with pytest.raises(UsageError, match=f"does not take {text.partition('=')[0]}: it is set by"):
        _plan(replace(options(tmp_path), site_overrides=site, contract_overrides=contract))


@pytest.mark.slow
def test_a_comparison_that_is_stopped_leaves_the_rest(tmp_path: Path) -> None:
    out, begun = io.StringIO(), tmp_path / "sim" / "ddp" / "log.txt"
    result = run_simulation(options(tmp_path, "ddp", "alone", tokens=2048), begun.exists, out, live=False)
    assert result.exit_code == 0
    summary = json.loads((tmp_path / "sim" / "summary.json").read_text())
    assert (summary["versions"], summary["comparisons"], summary["baseline"]) == (1, {}, None)
    assert "stopped: ddp was not trained to its end\nstopped: alone was not trained\n" in out.getvalue()
    assert (tmp_path / "sim" / "report.html").is_file()


@pytest.mark.slow
def test_a_simulation_that_is_stopped_at_once_says_so(tmp_path: Path) -> None:
    with pytest.raises(DilocoError, match="stopped before anything was trained") as caught:
        run_simulation(options(tmp_path), (tmp_path / "sim" / "p0" / "log.txt").exists, io.StringIO(), live=False)
    assert caught.value.exit_code == 130
