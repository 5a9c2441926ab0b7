"""Ledgers of a run on paper, and damage planted in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.audit import Audit, audit, audit_text
from diloco.errors import StateError, UsageError
from diloco.ledger import LEDGER, Record, encode, read_ledger
from diloco.round import Diverged, step_outer, withdraw
from diloco.types import Blocks, Commit, Omitted
from tests.paper import TOKENS, PaperRun
from tests.peers import run_cli


def rules(result: Audit) -> set[str]:
    return {finding.rule for finding in result.violations}


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None], kind: str = "commit", at: int = -1) -> int:
    """Change one record of a ledger and seal it again, as a bug would have written it. Returns its line."""
    path = directory / LEDGER
    records = list(read_ledger(path).records)
    number = [record.number for record in records if record.kind == kind][at]
    fields = json.loads(json.dumps(records[number].fields))
    change(fields)
    if kind == "commit":
        commit = Commit.from_bytes(json.dumps(fields["commit"], sort_keys=True, separators=(",", ":")).encode())
        fields["digest"] = commit.digest
    records[number] = Record(number, kind, fields)
    path.write_bytes(b"".join(map(encode, records)))
    return number + 1


def drop(directory: Path, at: int) -> None:
    """Take one commit out, and number what is left anew."""
    path = directory / LEDGER
    records = list(read_ledger(path).records)
    gone = [record for record in records if record.kind == "commit"][at]
    records.remove(gone)
    path.write_bytes(b"".join(encode(replace(record, number=number)) for number, record in enumerate(records)))


@pytest.fixture
def run(tmp_path: Path) -> PaperRun:
    run = PaperRun(tmp_path, record=False)
    for _ in range(3):
        run.round()
    run.peers["a"].save()
    run.round(count=[run.peers["a"], run.peers["b"]], omitted=[Omitted("b", 0, 1)])
    run.round()
    return run


def test_a_good_run_is_clean(run: PaperRun) -> None:
    run.end()
    result = audit([run.root])
    assert result.violations == []
    assert (result.versions, result.tokens, result.checkpoints, result.lineages) == (5, 15 * TOKENS, 1, 1)
    assert [row["peer"] for row in result.peers] == ["a", "b", "c"]
    assert {row["committed"] for row in result.peers} == {5 * TOKENS}
    assert {row["without_goodbye"] for row in result.peers} == {0}
    assert "no violations" in audit_text(result)


def test_single_folders_in_any_number(run: PaperRun) -> None:
    assert audit([run.root / "b"]).clean
    assert len(audit([run.root / "b", run.root / "c", run.root / "b"]).peers) == 2


def test_uncounted_and_killed(run: PaperRun) -> None:
    run.round(count=[run.peers["a"]])  # nobody says goodbye: b and c trained in vain
    result = audit([run.root])
    assert result.clean
    assert [row["uncommitted"] for row in result.peers] == [0, TOKENS, TOKENS]
    assert {row["without_goodbye"] for row in result.peers} == {1}


def test_another_state_is_i1(run: PaperRun) -> None:
    rewrite(run.root / "b", lambda fields: fields.update(state="f" * 64))
    result = audit([run.root])
    assert rules(result) == {"I1"}
    assert "a, line" in result.violations[0].text
    assert "b, line" in result.violations[0].text
    assert result.violations[0].version == 5


def test_another_commit_of_one_version_is_i1_and_i8(run: PaperRun) -> None:
    rewrite(run.root / "b", lambda fields: fields["commit"].update(mean_digest="0" * 64))
    assert rules(audit([run.root])) == {"I1", "I8"}


def test_a_state_that_nobody_held_is_i1(run: PaperRun) -> None:
    for name in "abc":
        rewrite(run.root / name, lambda fields: fields["commit"].update(state_digest="0" * 64))
    assert "which nobody held" in audit([run.root]).violations[0].text


def test_a_contribution_counted_twice_is_i2(run: PaperRun) -> None:
    """The last version counts what the one before it did."""
    peer = run.peers["a"]
    before = peer.line.commit
    assert before is not None
    again = replace(
        before,
        version=6,
        previous=before.digest,
        fragment=before.fragment,
        tokens=before.tokens + 3 * TOKENS,
        state_digest=peer.line.state.digest,
    )
    for one in run.peers.values():
        one.journal._ledger.committed(again, "f" * 64, False, one.journal.totals)  # type: ignore[union-attr]
    result = audit([run.root])
    assert rules(result) == {"I2"}
    assert "its contribution on version 4 is already in version 5" in {v.text for v in result.violations}
    assert {v.peer for v in result.violations} >= {"a", "b", "c"}


def test_a_block_trained_twice_is_i2(run: PaperRun) -> None:
    peers = run.offer()
    closed = run.close(peers[0], peers)
    held = {**closed.commit.leases.held, "a": (Blocks(0, 4),)}
    run.apply(replace(closed, commit=replace(closed.commit, leases=replace(closed.commit.leases, held=held))), peers)
    assert audit([run.root]).clean  # a lease alone trains nothing
    run.round()
    (finding,) = audit([run.root]).violations
    assert (finding.rule, finding.peer, finding.version) == ("I2", "a", 7)
    assert finding.text == "block 0 was trained for version 1 by a already"


def test_tokens_that_do_not_add_up_are_i2(run: PaperRun) -> None:
    line = rewrite(run.root / "c", lambda fields: fields["tokens"].update(trained=1000))
    result = audit([run.root])
    assert rules(result) == {"I2"}
    assert (result.violations[0].peer, result.violations[0].line) == ("c", line)
    assert "1000 trained" in audit_text(result)


def test_credit_for_what_an_earlier_life_trained_is_i2(run: PaperRun) -> None:
    again = run.start("b", "lineage-1")
    again.line.trained.tokens -= TOKENS  # as `step_outer` would do if it took the name for the life
    again.journal.committed(run.commits[-1], None)
    result = audit([run.root])
    assert any("-32 uncommitted" in finding.text for finding in result.violations)


def test_tokens_that_vanish_without_a_reason_are_i2(run: PaperRun) -> None:
    rewrite(run.root / "c", lambda fields: fields["tokens"].update(committed=128, discarded=32))
    found = {finding.text for finding in audit([run.root]).violations}
    assert "32 tokens are booked as discarded, the records tell of 0" in found


def test_progress_that_is_counted_and_kept_is_i2(run: PaperRun) -> None:
    """b takes a contribution that others hold for withdrawn: it is in the version, and in b's weights."""
    peers = run.offer()
    closed = run.close(peers[0], peers)
    withdraw(run.peers["b"].line)
    run.apply(closed, peers)
    (finding,) = audit([run.root]).violations
    assert (finding.rule, finding.peer, finding.version) == ("I2", "b", 6)
    assert finding.text == "it counts 32 tokens of this life, which says that it gave up 0"


def test_progress_that_is_counted_and_kept_over_a_copied_state_is_i2(run: PaperRun) -> None:
    a, b, c = run.offer()
    run.apply(run.close(a, [a, b, c]), [a, c])
    withdraw(b.line)
    run.round([a, c])
    run.copy(a, b)
    (finding,) = audit([run.root]).violations
    assert (finding.rule, finding.peer, finding.version) == ("I2", "b", 6)


def test_a_missing_version_is_i5(run: PaperRun) -> None:
    for name in "abc":
        drop(run.root / name, 2)
    result = audit([run.root])
    assert rules(result) >= {"I5"}
    assert any("version 2, on which it was made, is in no ledger; 1 is" in v.text for v in result.violations)


def test_a_version_that_found_no_room_on_any_disk_is_a_note(run: PaperRun) -> None:
    for name in "abc":
        drop(run.root / name, 2)
        path = run.root / name / LEDGER
        records = read_ledger(path).records
        gap = Record(len(records), "gap", {"dropped": 1, "tokens": records[-1].fields["tokens"]})
        path.write_bytes(path.read_bytes() + encode(gap))
    result = audit([run.root])
    assert result.clean, result.violations
    assert any("is in no ledger" in note.text for note in result.notes)


def test_one_ledger_may_miss_what_another_has(run: PaperRun) -> None:
    drop(run.root / "b", 2)
    found = audit([run.root]).violations
    assert all(finding.peer == "b" and "booked as committed" in finding.text for finding in found), found


def test_a_checkpoint_of_another_state_is_i5(run: PaperRun) -> None:
    run.peers["b"].line.commit = run.commits[-2]
    run.peers["b"].save()
    result = audit([run.root])
    assert rules(result) == {"I5"}
    assert "holds state" in result.violations[0].text


def test_a_checkpoint_of_an_unknown_commit_is_i5(run: PaperRun) -> None:
    run.peers["b"].line.commit = replace(run.commits[-1], tokens=1)
    run.peers["b"].save()
    assert "which is in no ledger" in audit([run.root]).violations[0].text


def test_a_damaged_checkpoint_is_i5(run: PaperRun) -> None:
    path = run.peers["a"].directory / "checkpoints" / "v00000003" / "outer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert rules(audit([run.root])) == {"I5"}
    run.peers["a"].save()  # with a whole one beside it, whoever resumes passes it over
    result = audit([run.root])
    assert result.clean
    assert "is damaged" in result.notes[0].text


# ---------------------------------------------------------------- forks


def split(run: PaperRun) -> None:
    """c is cut off: it goes on alone in a lineage of its own, the others in theirs."""
    a, b, c = run.peers.values()
    run.round([a, b])
    run.close_founding("lineage-2", [c])
    run.round([c])


def test_a_fork_under_wait_is_i8(run: PaperRun) -> None:
    split(run)
    result = audit([run.root])
    assert rules(result) == {"I8"}
    assert "nobody founded it" in result.violations[0].text


def test_a_refounding_by_hand_is_none(run: PaperRun) -> None:
    a, b, c = run.peers.values()
    run.round([a, b])
    c.journal.close()
    again = run.start("c", "lineage-2", founds=True)
    again.line.state, again.line.commit = c.line.state, c.line.commit
    run.close_founding("lineage-2", [again])
    result = audit([run.root])
    assert result.clean
    assert result.forks[0].lineages == ("lineage-1", "lineage-2")


def test_a_fork_under_continue_is_reported_until_it_is_healed(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, record=False, membership={"without_majority": "continue"})
    run.round()
    split(run)
    a, _, c = run.peers.values()
    c.train()
    c.offer()
    c.journal.closed("left")
    result = audit([run.root])
    assert result.clean
    (fork,) = result.forks
    assert (fork.version, fork.lineages, fork.discarded_tokens, fork.healed) == (
        2,
        ("lineage-1", "lineage-2"),
        TOKENS,
        False,
    )
    assert "NOT HEALED" in audit_text(result)
    run.copy(a, c)
    c.journal.closed("left")
    assert audit([run.root]).forks[0].healed


def test_two_successors_in_one_lineage_are_i8(run: PaperRun) -> None:
    a, b, c = run.peers.values()
    run.round([a, b])
    run.round([c])
    assert rules(audit([run.root])) >= {"I1", "I8"}


# ---------------------------------------------------------------- copied states


def test_given_up_and_yet_counted(run: PaperRun) -> None:
    """b sends, is stopped, and copies a state past the one that counts it: discarded in its own books, and yet in a
    version."""
    a, b, c = run.offer()
    run.apply(run.close(a, [a, b, c]), [a, c])
    run.round([a, c])
    run.copy(a, b)
    run.round()
    result = audit([run.root])
    assert result.clean
    row = next(row for row in result.peers if row["peer"] == "b")
    assert (row["discarded"], row["counted_elsewhere"]) == (TOKENS, TOKENS)


@pytest.mark.parametrize("later", [0, 1])
def test_counted_by_a_version_that_was_passed_over(run: PaperRun, later: int) -> None:
    """The commit that came with the copied state says so; or one that b could not apply."""
    a, b, c = run.offer()
    closed = run.close(a, [a, b, c])
    run.apply(closed, [a, c])
    for _ in range(later):
        run.round([a, c])
        with pytest.raises(Diverged):
            step_outer(b.line, replace(closed, commit=replace(closed.commit, state_digest="another")), {})
    run.copy(a, b)
    run.round()
    result = audit([run.root])
    assert result.clean
    row = next(row for row in result.peers if row["peer"] == "b")
    assert (row["discarded"], row["counted_elsewhere"]) == (0, 0)


def test_credit_that_no_version_gives_is_i2(run: PaperRun) -> None:
    """b takes what it sent for counted by a version that it passed over, and which does not count it."""
    a, b, c = run.offer()
    run.apply(run.close(a, [a, c]), [a, c])
    run.copy(a, b)
    run.round()

    def claim(fields: dict[str, Any]) -> None:
        fields.update(counted=TOKENS, discarded=0)

    rewrite(run.root / "b", claim, "adopt")
    texts = {finding.text for finding in audit([run.root]).violations}
    assert f"it does not count the {TOKENS} tokens that this life took for counted" in texts


# ---------------------------------------------------------------- files and command line


def test_a_torn_tail_is_a_note_and_damage_an_error(run: PaperRun) -> None:
    path = run.root / "a" / LEDGER
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    result = audit([run.root])
    assert result.clean
    assert any("never finished" in note.text for note in result.notes)
    path.write_bytes(data.replace(b'"n":3', b'"n":4'))
    with pytest.raises(StateError, match="line 4"):
        audit([run.root])


def test_folders_that_do_not_go_together(run: PaperRun, tmp_path: Path) -> None:
    other = PaperRun(tmp_path / "other", outer={"lr": 0.5})
    with pytest.raises(UsageError, match="different runs"):
        audit([run.root / "a", other.root / "a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no ledger\.jsonl"):
        audit([tmp_path / "empty"])


@pytest.mark.slow(queued=False)
def test_the_command(run: PaperRun) -> None:
    done = run_cli("audit", str(run.root), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clean"] is True
    rewrite(run.root / "b", lambda fields: fields.update(state="f" * 64))
    done = run_cli("audit", str(run.root))
    assert done.returncode == 1
    assert "VIOLATION I1: version 5" in done.stdout
