"""Ledgers of a run on paper, and damage planted in them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.accounts.audit import Audit, audit, audit_text
from diloco.accounts.ledger import LEDGER, Record, encode, read_ledger
from diloco.accounts.left_off import left_off
from diloco.accounts.replay import replay
from diloco.base.errors import DilocoError, StateError, UsageError
from diloco.base.sealed import sealed_line
from diloco.base.types import Blocks, Commit, Omitted, Voter
from diloco.outer.line import Diverged
from diloco.peer.peer import Peer
from diloco.protocol.claims import Bounds
from diloco.protocol.leases import advance
from diloco.storage.checkpoint import _digest, _encode, load
from tests.lines import restored, step_outer, take_back
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


def test_a_folder_that_saw_two_names_is_clean(run: PaperRun) -> None:
    """As where a peer without a name of its own is started twice with one folder."""
    run.peers["a"].journal.closed("left")
    (run.root / "d").symlink_to(run.root / "a")
    late = run.peers["d"] = run.start("d", "lineage-2", founds=True)
    late.line.state, late.line.commit = run.peers["a"].line.state, run.peers["a"].line.commit
    del run.peers["a"]
    run.close_founding("lineage-2", [late, run.peers["b"], run.peers["c"]])
    run.round()
    run.end()
    (run.root / "d").unlink()
    result = audit([run.root])
    assert result.violations == []
    assert [(row["lives"], row["counted_elsewhere"]) for row in result.peers] == [(2, 0), (1, 0), (1, 0)]


def test_single_folders_in_any_number(run: PaperRun) -> None:
    alone = audit([run.root / "b"])
    assert alone.clean
    assert [note.text for note in alone.notes] == ["versions count peers whose ledgers are not among these: a, c"]
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
        height=before.height + 1,
        previous=before.digest,
        fragment=before.fragment,
        tokens=before.tokens + 3 * TOKENS,
        state_digest=peer.line.state.digest,
    )
    for one in run.peers.values():
        one.journal._ledger.committed(again, "f" * 64, False, one.journal.totals)  # type: ignore[union-attr]
    result = audit([run.root])
    assert rules(result) == {"I2", "I9"}  # nobody but one that lies counts it
    assert "its contribution on version 4 is already in version 5" in {v.text for v in result.violations}
    assert {v.peer for v in result.violations} >= {"a", "b", "c"}


def test_a_block_trained_twice_is_i2(run: PaperRun) -> None:
    peers = run.offer()
    closed = run.close(peers[0], peers)
    held = {**closed.commit.leases.held, "a": (Blocks(0, 4),)}
    run.apply(replace(closed, commit=replace(closed.commit, leases=replace(closed.commit.leases, held=held))), peers)
    assert rules(audit([run.root])) == {"I9"}  # a lease alone trains nothing
    run.round()
    (finding,) = [one for one in audit([run.root]).violations if one.rule != "I9"]
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


@pytest.mark.parametrize(
    ("change", "lie"),
    [
        ({"tokens": 10**15}, "are not the"),
        ({"height": 9}, "does not follow height"),
        ({"voters": []}, "it has no voters"),
        ({"fragment": 1}, "does not move fragment 1"),
    ],
)
def test_a_commit_that_no_honest_peer_drafts_is_i9(run: PaperRun, change: dict[str, Any], lie: str) -> None:
    for name in "abc":
        rewrite(run.root / name, lambda fields: fields["commit"].update(change))
    (finding,) = [one for one in audit([run.root]).violations if one.rule == "I9"]
    assert (finding.version, lie in finding.text) == (5, True)


def test_tokens_that_no_contribution_may_claim_are_given_up_and_the_progress_stays(run: PaperRun) -> None:
    """A peer that was alone for long does not offer what the others would refuse."""
    a = run.peers["a"]
    a.journal.trained(100_000, 0)
    bounds = Bounds.of(run.contract)
    before = {name: parameter.clone() for name, parameter in a.line.parameters.items()}
    rules = SimpleNamespace(rules=SimpleNamespace(bounds=bounds))
    peer = SimpleNamespace(line=a.line, journal=a.journal, exchange=SimpleNamespace(terms=rules))
    Peer.limit_claim(peer)  # type: ignore[arg-type]
    assert (a.line.trained.tokens, a.journal.discarded_tokens) == (bounds.max_tokens, 100_000 - bounds.max_tokens)
    assert all(torch.equal(parameter, before[name]) for name, parameter in a.line.parameters.items())
    assert audit([run.root]).clean


def test_tokens_that_vanish_without_a_reason_are_i2(run: PaperRun) -> None:
    rewrite(run.root / "c", lambda fields: fields["tokens"].update(committed=128, discarded=32))
    found = {finding.text for finding in audit([run.root]).violations}
    assert "32 tokens are booked as discarded, the records tell of 0" in found


def test_progress_that_is_counted_and_kept_is_i2(run: PaperRun) -> None:
    """b takes a contribution that others hold for withdrawn: it is in the version, and in b's weights."""
    peers = run.offer()
    closed = run.close(peers[0], peers)
    take_back(run.peers["b"].line)
    run.apply(closed, peers)
    (finding,) = audit([run.root]).violations
    assert (finding.rule, finding.peer, finding.version) == ("I2", "b", 6)
    assert finding.text == "it counts 32 tokens of this life, which says that it gave up 0"


def test_progress_that_is_counted_and_kept_over_a_copied_state_is_i2(run: PaperRun) -> None:
    a, b, c = run.offer()
    run.apply(run.close(a, [a, b, c]), [a, c])
    take_back(b.line)
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
    assert [(finding.rule, finding.peer, finding.line) for finding in result.violations] == [("I5", "b", 0)]
    assert "holds state" in result.violations[0].text


def test_a_checkpoint_of_an_unknown_commit_is_i5(run: PaperRun) -> None:
    run.peers["b"].line.commit = replace(run.commits[-1], tokens=1)
    run.peers["b"].save()
    assert "which is in no ledger" in audit([run.root]).violations[0].text


def test_a_checkpoint_of_a_version_that_found_no_room_in_the_ledger_is_a_note(run: PaperRun) -> None:
    path = run.root / "b" / LEDGER
    records = read_ledger(path).records
    gap = Record(len(records), "gap", {"dropped": 1, "tokens": records[-1].fields["tokens"]})
    path.write_bytes(path.read_bytes() + encode(gap))
    run.peers["b"].line.commit = replace(run.commits[-1], tokens=1)
    run.peers["b"].save()
    result = audit([run.root])
    assert result.clean, result.violations
    assert any("which is in no ledger" in note.text for note in result.notes)


def test_a_damaged_checkpoint_is_i5(run: PaperRun) -> None:
    path = run.peers["a"].directory / "checkpoints" / "v00000003" / "outer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert rules(audit([run.root])) == {"I5"}
    run.peers["a"].save()  # with a whole one beside it, whoever resumes passes it over
    result = audit([run.root])
    assert result.clean
    assert "is damaged" in result.notes[0].text


def test_half_a_checkpoint_under_its_temporary_name_is_passed_over(run: PaperRun) -> None:
    """Also where no whole one is beside it: a peer that is killed while it saves its first one leaves it."""
    saved = run.peers["b"].save()
    half = saved.rename(saved.with_name(f".{saved.name}.77.tmp"))
    (half / "outer.safetensors").write_bytes(b"")
    result = audit([run.root])
    assert (result.violations, result.notes, result.checkpoints) == ([], [], 1)


def test_checkpoints_that_may_not_be_listed_are_not_passed_over(run: PaperRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def looked(path: Any) -> Any:
            if Path(path).name == "checkpoints":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return look(path)

        return looked

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(PermissionError):
        audit([run.root])


def test_the_folder_of_a_peer_that_may_not_be_read_is_not_passed_over(
    run: PaperRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if path.parent == run.root / "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(PermissionError, match=LEDGER):
        audit([run.root])


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


def test_without_the_ledger_of_a_founder_that_left_nobody_is_accused(run: PaperRun) -> None:
    """All members of the later views have ledgers, and none of these tells of the founding."""
    _, b, c = run.peers.values()
    peers = run.offer([b, c])
    closed = run.close(b, peers)
    before, view = run.commits[-1], tuple(member for member in closed.commit.view if member.peer != "a")
    used, names = {one.peer: one.blocks for one in closed.commit.counted}, [member.peer for member in view]
    held = advance(before.leases, used, names, run.contract.lease_blocks)
    voters = (Voter("b", 0, closed.commit.version),)
    run.apply(replace(closed, commit=replace(closed.commit, view=view, voters=voters, leases=held)), peers)
    run.round(peers)
    assert audit([run.root]).clean
    assert audit([run.root / "b", run.root / "c"]).clean


def test_an_old_copy_of_a_founders_ledger_accuses_nobody(run: PaperRun) -> None:
    """It tells of the founder's later life in the lineage, and not of the one that founded it."""
    a, b, _ = run.peers.values()
    run.end()
    ledger = a.directory / LEDGER
    copy = ledger.read_bytes()
    again = run.start("a", "lineage-2", founds=True)
    again.line.state, again.line.commit = a.line.state, a.line.commit
    joined = run.start("b", "lineage-2")
    joined.line.state, joined.line.commit = b.line.state, b.line.commit
    run.close_founding("lineage-2", [again, joined])
    ledger.write_bytes(copy)
    run.copy(joined, run.start("a", "lineage-2"))
    assert audit([run.root]).violations == []


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
            step_outer(b.line, replace(closed, commit=replace(closed.commit, state_digest="another")))
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
    (finding,) = [one for one in audit([run.root]).violations if one.rule == "ledger"]
    assert finding.peer == "a"
    assert f"ledger {path}: line 4 was changed" in finding.text
    with pytest.raises(StateError, match="line 4"):
        audit([run.root / "a"])


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a kind of no type": ("is of no kind", lambda tree: tree.update(kind=["commit"])),
    "a field less": ("own is missing", lambda tree: tree.pop("own")),
    "a text for a number": ("tokens are malformed", lambda tree: tree["tokens"].update(trained="1")),
    "a number too large": ("tokens are malformed", lambda tree: tree["tokens"].update(committed=10**400)),
    "a total less": ("tokens are malformed", lambda tree: tree["tokens"].pop("trained")),
    "a list for a digest": ("digest is malformed", lambda tree: tree.update(digest=[])),
    "a field of another kind": ("discarded is malformed", lambda tree: tree.update(discarded="all")),
    "no commit": ("commit is malformed", lambda tree: tree.update(commit={})),
    "half a commit": ("is no record of a peer: not a commit", lambda tree: tree["commit"].pop("leases")),
    "a lease that ends before it begins": (
        "at least 9",
        lambda tree: tree["commit"]["leases"].update(returned=[{"start": 9, "stop": 2}]),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_line_is_told_and_the_others_are_audited(run: PaperRun, name: str) -> None:
    cause, change = FORGED[name]
    forge(run.root / "b", 5, change)
    result = audit([run.root])
    (finding,) = [one for one in result.violations if one.rule == "ledger"]
    assert (finding.peer, finding.line) == ("b", 0)  # its text names the line
    assert f"ledger {run.root / 'b' / LEDGER}: line 5" in finding.text
    assert cause in finding.text
    assert [row["peer"] for row in result.peers] == ["a", "c"]
    assert f"VIOLATION ledger: b: ledger {run.root / 'b' / LEDGER}"[:200] in audit_text(result)
    with pytest.raises(StateError, match="line 5"):
        replay([run.root], Path(), lambda done, all_: None)


def forge(directory: Path, line: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change anything in one line, and make its checksum right again."""
    path = directory / LEDGER
    lines = path.read_bytes().splitlines(keepends=True)
    tree = json.loads(lines[line - 1][17:])
    change(tree)
    lines[line - 1] = sealed_line(tree)
    path.write_bytes(b"".join(lines))


NONSENSE = [None, True, -1, 2**63, 10**400, 1e308, float("nan"), "", "\ud800", "x" * 300, [], [[]], {}, {"a": 1}]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of JSON, but what is in a contract: with other sizes it is well formed,
    and `replay` would build its model."""
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [place for key, value in pairs for place in ((tree, key), *(places(value) if key != "contract" else ()))]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> PaperRun:
    run = PaperRun(tmp_path_factory.mktemp("pristine"))
    run.round()
    a, b, c = run.peers.values()
    run.round(count=[a, b])
    run.apply(run.close(a, run.offer([a, b])), [a, b])
    run.copy(a, c)
    run.end()
    return run


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_sealed_line_holds_is_audited_or_refused(pristine: PaperRun, data: st.DataObject) -> None:
    """Not only what is of no type: also what is well formed, and says what cannot be."""
    path = pristine.root / data.draw(st.sampled_from("abc")) / LEDGER
    whole = path.read_bytes()
    line = data.draw(st.integers(1, whole.count(b"\n")))

    def change(tree: dict[str, Any]) -> None:
        container, key = data.draw(st.sampled_from(places(tree)))
        if data.draw(st.integers(0, 5)) == 0:
            del container[key]
        else:
            container[key] = data.draw(st.sampled_from(NONSENSE) | st.integers(0, 9) | st.just(container[key]))

    try:
        forge(path.parent, line, change)
        found = audit([pristine.root])
        audit_text(found)
        with suppress(StateError, ValueError):
            left_off(read_ledger(path).records)
        if "ledger" not in rules(found):
            with suppress(DilocoError):
                replay([pristine.root], Path(), lambda done, all_: None)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("text", ["{}", "", "{", "\ud800", 7])
def test_a_malformed_commit_in_a_checkpoint_is_told(run: PaperRun, tmp_path: Path, text: Any) -> None:
    saved = run.peers["b"].save()
    forge_meta(saved, lambda meta: meta.update(commit=text))
    checkpoint = load(saved)
    with pytest.raises(StateError, match=r"v00000005: its commit ") as raised:
        restored(run.start("b", "lineage-1").line, checkpoint)
    assert raised.value.fix == "use a checkpoint that `diloco peer` wrote"
    (finding,) = audit([run.root]).violations
    assert (finding.rule, finding.peer) == ("I5", "b")
    assert "v00000005: its commit " in finding.text


def forge_meta(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint tells beside its tensors, and make its digest right again."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    change(manifest["meta"])
    fields = {name: value for name, value in manifest.items() if name != "digest"}
    (checkpoint / "manifest.json").write_bytes(_encode({**fields, "digest": _digest(fields)}))


@pytest.mark.parametrize(
    ("contract", "cause"),
    [
        (7, "its contract should be of type str"),
        ("{", "its contract is not JSON"),
        ('{"run": {"contract_version": 99}}', "its contract: contract version 99"),
        ('{"run": {"name": 1}}', "its contract is not valid"),
        ({"codec": {"groups": [{"match": ["nothing"]}]}}, "its contract does not fit its model: group 1"),
    ],
)
def test_a_foreign_contract_in_a_checkpoint_is_told(run: PaperRun, contract: Any, cause: str) -> None:
    """The other checkpoints are looked at nevertheless."""
    if isinstance(contract, dict):
        contract = json.dumps({**json.loads(run.contract.to_json()), **contract})
    forge_meta(run.peers["b"].save(), lambda meta: meta.update(contract=contract))
    result = audit([run.root])
    (finding,) = result.violations
    assert (finding.rule, finding.peer, result.checkpoints) == ("I5", "b", 2)
    assert f"v00000005: {cause}" in finding.text


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_checkpoint_tells_is_audited(pristine: PaperRun, data: st.DataObject) -> None:
    manifest = pristine.peers["a"].save() / "manifest.json"
    whole = manifest.read_bytes()

    def change(meta: dict[str, Any]) -> None:
        meta["contract"] = json.loads(meta["contract"])
        container, key = data.draw(st.sampled_from([*places(meta), *places(meta["contract"])]))
        container[key] = data.draw(st.sampled_from(NONSENSE) | st.integers(0, 9))
        meta["contract"] = json.dumps(meta["contract"])

    try:
        forge_meta(manifest.parent, change)
        audit_text(audit([pristine.root]))
    finally:
        manifest.write_bytes(whole)


def test_folders_that_do_not_go_together(run: PaperRun, tmp_path: Path) -> None:
    other = PaperRun(tmp_path / "other", outer={"lr": 0.5})
    with pytest.raises(UsageError, match="different runs"):
        audit([run.root / "a", other.root / "a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StateError, match=r"no ledger\.jsonl"):
        audit([tmp_path / "empty"])


def test_empty_ledgers_are_passed_over_beside_others_and_a_mistake_alone(run: PaperRun, tmp_path: Path) -> None:
    """A peer that is killed before its first line leaves one."""
    for name in ("killed", "killed-too"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LEDGER).touch()
    assert [row["peer"] for row in audit([run.root, tmp_path / "killed"]).peers] == ["a", "b", "c"]
    with pytest.raises(UsageError, match="has no life in it"):
        audit([tmp_path / "killed", tmp_path / "killed-too"])


@pytest.mark.slow(queued=False)
def test_the_command(run: PaperRun) -> None:
    done = run_cli("audit", str(run.root), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clean"] is True
    rewrite(run.root / "b", lambda fields: fields.update(state="f" * 64))
    done = run_cli("audit", str(run.root))
    assert done.returncode == 1
    assert "VIOLATION I1: version 5" in done.stdout
