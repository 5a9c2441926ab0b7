"""Files that bb50371 wrote are read, and its numbers are computed still: tests/data/bb50371, `scripts/references`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.peers import PeerProcess, ending, run_cli
from tests.references import RECORDED, differing_logs, other_machine, simulated

pytestmark = [
    pytest.mark.handmade_events,  # the recorded files are of an earlier schema
    pytest.mark.no_cover,  # which makes a simulation nearly twice as slow
]

DATA = Path(__file__).parent / "data" / "bb50371"
RUN = json.loads((DATA / "run.json").read_text())
"""Output of the commands of bb50371 about tests/data/bb50371/run."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy of the folder; two peers' run in it, `run`: p1 left at version 7 and p0 was killed after version 11."""
    return Path(shutil.copytree(DATA, tmp_path / "recorded"))


def answer(folder: Path, *arguments: str) -> Any:
    done = run_cli(*arguments, "--json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", [("audit", "run"), ("replay", "run", "--data-root", ".")])
def test_ledgers_of_an_earlier_format_are_refused_by_name(recorded: Path, command: tuple[str, ...]) -> None:
    done = run_cli(*command, cwd=recorded)
    assert done.returncode == 13
    assert "line 1 is of format 1, and this diloco reads 2" in done.stderr
    assert "with the release that wrote it" in done.stderr


def test_a_checkpoint_of_an_earlier_version_is_evaluated_and_exported(recorded: Path) -> None:
    evaluated = answer(recorded, "eval", "run/p0", "--data-root", ".")
    found = {key: evaluated[key] for key in RUN["eval"]}
    assert found == (pytest.approx(RUN["eval"], rel=1e-4) if other_machine() else RUN["eval"])
    answer(recorded, "export", "run/p0", "exported", "--data-root", ".")
    tensors = load_file(recorded / "exported" / "model.safetensors")
    digest = hashlib.sha256(b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors)))
    assert digest.hexdigest() == RUN["exported"]


@pytest.mark.parametrize("folder", ["run", "run/p0"])
def test_events_of_an_earlier_version_are_reported_on(recorded: Path, folder: str) -> None:
    report = recorded / answer(recorded, "report", folder)["report"]
    page = report.read_text()
    assert "recorded" in page  # the run's name
    assert "11" in page


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(recorded: Path) -> None:
    root = ("--set", f"data.root={recorded}")
    refused = run_cli("peer", "--resume", str(recorded / "run" / "p0"), *root)
    assert refused.returncode
    assert "to go on from a checkpoint, move the ledger away" in refused.stderr
    for name in ("p0", "p1"):
        (recorded / "run" / name / "ledger.jsonl").unlink()
    with ending([]) as peers:
        a = PeerProcess("p0", recorded / "run", "--resume", str(recorded / "run" / "p0"), *root)
        peers.append(a)
        b = PeerProcess("p2", recorded / "run", "--join", a.ticket(), *root)
        peers.append(b)
        at = a.reaches(13, ["p0", "p2"])
        assert a.events("start")[-1]["resumed_version"] == RUN["eval"]["version"]
        assert at["tokens"] > RUN["eval"]["tokens"]
        for peer in (b, a):
            peer.interrupt()
            assert peer.wait() == 0, peer.log.read_text()
    assert answer(recorded, "audit", "run")["clean"]


@pytest.mark.slow(queued=False)
def test_seeds_in_virtual_time_have_the_log_that_was_recorded() -> None:
    assert not differing_logs(range(6))


@pytest.mark.slow(queued=False)
@pytest.mark.skipif(bool(other_machine()), reason=other_machine() or "never")
def test_a_simulation_ends_with_the_digest_that_was_recorded() -> None:
    assert simulated("quick") == RECORDED["quick"]
