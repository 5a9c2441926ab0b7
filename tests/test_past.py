"""The run to resume from a peer's folder, which may hold checkpoints of a run that was left."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.accounts.left_off import booked
from diloco.base.errors import StateError
from diloco.peer.terms import forks_of
from diloco.protocol.messages import Fork
from diloco.run.export import ABOUT, export
from diloco.run.past import PastRun, checkpoint_at, past_of
from diloco.storage.checkpoint import load
from tests.lines import adopt_state
from tests.paper import PaperPeer, PaperRun, contract

FOLDER = Path("a")


def past(root: Path) -> PastRun:
    found = past_of(root / FOLDER)
    assert found is not None
    return found


def trained(root: Path, versions: int, saves: bool, **sections: dict[str, object]) -> None:
    """A run of one peer in the folder, of so many versions."""
    run = PaperRun(root, "a", record=False, **sections)
    for _ in range(versions):
        run.round()
    if saves:
        run.peers["a"].save()
    run.end()


@pytest.mark.parametrize("other", [{}, {"inner": {"steps": 8}}], ids=["the same contract", "another"])
def test_a_run_that_began_anew_in_the_folder_is_resumed_and_not_the_one_before(
    tmp_path: Path, other: dict[str, dict[str, object]]
) -> None:
    trained(tmp_path, 5, saves=True, **other)
    found = past(tmp_path).checkpoint()
    assert found is not None
    assert found.version == 5
    trained(tmp_path, 2, saves=False)
    assert past(tmp_path).checkpoint() is None
    for folder in (FOLDER, FOLDER / "checkpoints"):
        with pytest.raises(StateError, match=r"no checkpoint in .* is of the run that its ledger ends with"):
            checkpoint_at(tmp_path / folder)
    assert checkpoint_at(tmp_path / FOLDER / "checkpoints" / "v00000005").version == 5
    trained(tmp_path, 3, saves=True)
    found = past(tmp_path).checkpoint()
    assert found is not None
    assert (found.version, found.contract) == (3, contract())
    assert checkpoint_at(tmp_path / FOLDER).version == 3


def test_a_checkpoint_of_a_history_that_was_left_is_passed_over(tmp_path: Path) -> None:
    """Where a peer copied the state of a lineage with fewer versions and more tokens. `diloco export` does so, too."""
    run = PaperRun(tmp_path, "ab", record=False)
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    a.save()
    for _ in range(3):
        run.apply(run.close(a, run.offer([a])), [a])
    a.save()
    run.apply(run.close(b, run.offer([b])), [b])
    assert past(tmp_path).version == 4
    run.copy(b, a)
    found = past(tmp_path)
    assert found.version == 2
    checkpoint = found.checkpoint()
    assert checkpoint is not None
    assert checkpoint.version == 1
    run.end()
    about = export(a.directory, tmp_path / "exported") / ABOUT
    assert json.loads(about.read_text())["version"] == 1


def parted(root: Path) -> tuple[PaperRun, PaperPeer, PaperPeer]:
    """Two peers after a version that the first has saved. That is in a lineage apart from then on."""
    run = PaperRun(root, "ab", record=False)
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    a.save()
    assert a.line.commit is not None
    a.line.commit = replace(a.line.commit, lineage="apart")
    return run, a, b


def test_a_checkpoint_of_a_void_lineage_is_passed_over(tmp_path: Path) -> None:
    """Where a peer that was apart copied the state of the lineage that went on, which has more versions, too."""
    run, a, b = parted(tmp_path)
    run.apply(run.close(a, run.offer([a])), [a])
    a.save()
    for _ in range(2):
        run.apply(run.close(b, run.offer([b])), [b])
    run.copy(b, a)
    checkpoint = past(tmp_path).checkpoint()
    assert checkpoint is not None
    assert checkpoint.version == 1
    run.end()


def test_a_checkpoint_of_a_void_lineage_is_passed_over_in_a_copy_and_after_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was copied without its times has later checkpoints than its ledger, it seems; and where a full disk
    refused records, nobody knows all commits on which the peer stood. Those that are unknown must be of its lineage."""
    run, a, b = parted(tmp_path)
    for _ in range(3):
        run.apply(run.close(a, run.offer([a])), [a])
    a.save()
    run.apply(run.close(b, run.offer([b])), [b])
    assert b.line.commit is not None
    run.copy(b, a, [Fork("lineage-1", b.line.commit.tokens)])

    def resumed(copied: bool) -> int:
        os.utime(a.directory / "ledger.jsonl", (0, 0) if copied else None)
        checkpoint = past(tmp_path).checkpoint()
        assert checkpoint is not None
        return checkpoint.version

    assert [resumed(copied) for copied in (True, False)] == [1, 1]
    with monkeypatch.context() as disk:
        disk.setattr(a.journal._ledger, "_append", lambda data: os.write(-1, data))
        run.apply(run.close(b, run.offer([a, b])), [a, b])
    a.save()
    assert [resumed(copied) for copied in (True, False)] == [3, 1]
    run.apply(run.close(b, run.offer([a, b])), [a, b])
    assert b'"kind":"gap"' in (a.directory / "ledger.jsonl").read_bytes()
    assert [resumed(copied) for copied in (True, False)] == [3, 3]
    run.end()


@pytest.mark.parametrize("missing", [0, 1])
def test_what_led_to_a_run_that_was_founded_anew_stays(tmp_path: Path, missing: int) -> None:
    """Its founder went on from that version, or from one before."""
    run = PaperRun(tmp_path, "ab", record=False)
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    a.save()
    left = b.line.commit
    assert left is not None
    b.line.commit = replace(left, lineage="anew")
    run.apply(run.close(b, run.offer([b])), [b])
    run.copy(b, a, [Fork(left.lineage, left.tokens - missing)])
    checkpoint = past(tmp_path).checkpoint()
    assert (checkpoint is not None and checkpoint.version == 1) if not missing else checkpoint is None
    run.end()


def test_checkpoints_stay_where_a_run_that_waits_for_its_founding_gave_the_state(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "a", record=False)
    run.round()
    a = run.peers["a"]
    a.save()
    a.journal.adopted(*adopt_state(a.line, a.line.state, None), ())
    checkpoint = past(tmp_path).checkpoint()
    assert checkpoint is not None
    assert checkpoint.version == 1
    run.end()


def test_a_copy_of_the_version_that_is_here_brings_a_later_change_of_members(tmp_path: Path) -> None:
    """The next version is made on that commit. An offer with an earlier one takes nothing back."""
    run = PaperRun(tmp_path, "a", record=False)
    made, a = run.round().commit, run.peers["a"]
    changed = replace(
        made, height=made.height + 1, previous=made.digest, fragment=-1, drafter="b", counted=(), mean_digest=""
    )
    for offered in (changed, made):
        a.journal.adopted(*adopt_state(a.line, a.line.state, offered), ())
        assert a.line.commit == changed
    run.end()
    assert changed.digest in booked(tmp_path / FOLDER).stood


def test_lineages_in_a_checkpoint_are_read_and_those_of_earlier_releases_have_none(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "a", record=False)
    run.round()
    saved = load(run.peers["a"].save().parent)
    run.end()
    assert forks_of(saved) == ()
    led = replace(saved, meta={**saved.meta, "forks": [["before", 40], ["apart", 60]]})
    assert forks_of(led) == (Fork("before", 40), Fork("apart", 60))
    for nonsense in (None, 3, ["before"], [["before"]], [["before", "many"]]):
        with pytest.raises(StateError, match="forks are malformed"):
            forks_of(replace(saved, meta={**saved.meta, "forks": nonsense}))


def test_a_version_that_the_ledger_had_no_room_for_may_be_resumed(tmp_path: Path) -> None:
    """A disk that was full for a moment refused its record, and then took its checkpoint."""
    run = PaperRun(tmp_path, "a", record=False)
    a = run.peers["a"]
    run.round()
    written = (a.directory / "ledger.jsonl").read_bytes()
    run.round()
    saved = a.save()
    (a.directory / "ledger.jsonl").write_bytes(written)
    os.utime(a.directory / "ledger.jsonl", (0, saved.stat().st_mtime - 1))
    found = past(tmp_path).checkpoint()
    assert found is not None
    assert found.version == 2
    run.end()


def test_who_joined_and_died_before_it_had_a_state_keeps_its_checkpoints(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "a", record=False)
    run.round()
    run.round()
    run.peers["a"].save()
    run.end()
    run.start("a", "lineage-1").journal.close()
    checkpoint = past(tmp_path).checkpoint()
    assert checkpoint is not None
    assert checkpoint.version == 2
