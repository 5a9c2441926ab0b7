"""Recorded runs made again, bit for bit; and what happens when something is missing or was changed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.accounts.audit import audit, audit_text
from diloco.accounts.books import chain_of, read_books
from diloco.accounts.journal import RECORDED, Recorder, recordings
from diloco.accounts.replay import Replay, Replayer, Verdict, replay, replay_text, shelve
from diloco.base.errors import StateError, UsageError
from diloco.base.sealed import sealed_line
from diloco.base.types import Contribution, Omitted
from diloco.config.contract import FINE
from diloco.outer.state import OuterState
from diloco.storage.checkpoint import load
from tests.local import LocalWorld
from tests.paper import PaperRun
from tests.peers import PeerProcess, ending, run_cli, tiny_contract
from tests.test_audit import drop, rewrite

HERE = Path()


def quiet(done: int, total: int) -> None:
    assert done <= total


def again(*directories: Path) -> Replay:
    return replay(directories, HERE, quiet)


def verdicts(result: Replay) -> list[str]:
    return [one.verdict.name for one in sorted(result.versions, key=lambda one: one.version)]


@pytest.fixture
def run(tmp_path: Path) -> PaperRun:
    run = PaperRun(tmp_path)
    run.peers["a"].save()
    for _ in range(4):
        run.round()
    return run


# ---------------------------------------------------------------- bit for bit


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"codec": {"name": "fp32", "zstd": False}, "outer": {"weighting": "tokens"}},
        {"codec": {"name": "bf16"}, "outer": {"optimizer": "adam", "warmup_steps": 1}},
        {"sync": {"fragments": 1}, "outer": {"optimizer": "sgd"}},
        {"membership": {"policy": "async"}, "outer": {"staleness_power": 0.5, "alignment": "momentum"}},
    ],
    ids=["int8 nesterov", "fp32 by tokens", "bf16 warm-up adam", "sgd", "async"],
)
def test_every_version_is_reproduced(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = PaperRun(tmp_path, **sections)
    run.peers["c"].save()  # of version 0: tells the size of the vocabulary
    a, b, c = run.peers.values()
    run.round()
    run.round(count=[a, c])  # b keeps its progress, and weighs more the next time
    run.round()
    run.round(count=[b])
    result = again(tmp_path)
    assert verdicts(result) == ["REPRODUCED"] * 5, replay_text(result)
    assert result.exact


def test_parts_that_omit_somebody(run: PaperRun) -> None:
    """A version that counts b only in some parts; what it kept comes with its next contribution."""
    run.round(omitted=[Omitted("b", 0, 1)])
    run.round()
    run.round()
    assert verdicts(again(run.root)) == ["REPRODUCED"] * 8


def test_an_omission_that_was_not_made_does_not_come_out(run: PaperRun) -> None:
    """The test above can fail: the same commit without its omission has another mean."""
    closed = run.round(omitted=[Omitted("b", 0, 1)])
    for name in "abc":
        path = run.root / name / "ledger.jsonl"
        assert b'"omitted":[{' in path.read_bytes()
    peers = run.offer()
    wrong = replace(run.close(peers[0], peers, [Omitted("b", 0, 1)]).commit, omitted=())
    run.apply(replace(run.close(peers[0], peers), commit=wrong), peers)
    assert closed.commit.version == 5
    assert verdicts(again(run.root))[-1] == "MISMATCH"


def test_each_peer_alone_replays_nothing_and_all_replay_everything(run: PaperRun) -> None:
    alone = again(run.root / "a")
    assert verdicts(alone) == ["REPRODUCED", *["MISSING"] * 4]
    assert "versions 1 to 4: not recorded: no contribution of b, c" in replay_text(alone)
    assert alone.exact  # nothing came out otherwise
    assert verdicts(again(run.root / "a", run.root / "b", run.root / "c")) == ["REPRODUCED"] * 5


def test_a_checkpoint_takes_over_behind_what_is_missing(run: PaperRun) -> None:
    run.peers["b"].save()
    run.round()
    for path in (run.root / "c" / RECORDED).glob("v00000002.*"):
        path.unlink()
    assert verdicts(again(run.root)) == [*["REPRODUCED"] * 3, "MISSING", "MEAN", "REPRODUCED"]


def test_without_any_state_the_means_are_compared(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, model={"kind": "external"})
    run.round()
    run.round()
    assert verdicts(again(tmp_path)) == ["MISSING", "MEAN", "MEAN"]


def test_both_sides_of_a_fork(run: PaperRun) -> None:
    a, b, c = run.peers.values()
    run.round([a, b])
    run.close_founding("lineage-2", [c])
    run.round([c])
    assert verdicts(again(run.root)) == ["REPRODUCED"] * 8


def test_both_sides_of_a_version_that_is_in_no_ledger(run: PaperRun) -> None:
    """The chain begins twice: the second time there is no state to step from."""
    for name in "abc":
        drop(run.root / name, 2)
    assert verdicts(again(run.root)) == ["REPRODUCED", "REPRODUCED", "MEAN", "MEAN"]


def test_two_lives_recorded_a_contribution_to_one_version(run: PaperRun) -> None:
    """Counts are the same; only the digest tells which one was counted."""
    original = next((run.root / "b" / RECORDED).glob("v00000001.f1.*"))
    other = next((run.root / "c" / RECORDED).glob("v00000001.f1.*")).read_bytes().replace(b'"peer":"c"', b'"peer":"b"')
    header, _, payload = other.partition(b"\n")
    twin = original.with_name(original.name.replace(original.name[-16:-4], "0" * 12))
    twin.write_bytes(sealed_line(json.loads(header[17:])) + payload)
    assert sorted([twin, original])[0] == twin
    assert verdicts(again(run.root)) == ["REPRODUCED"] * 5


# ---------------------------------------------------------------- what is not as it was


def test_a_changed_payload_is_an_error_that_names_the_file(run: PaperRun) -> None:
    path = next((run.root / "b" / RECORDED).glob("v00000001.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"v00000001.*part \d+ was changed"):
        again(run.root)
    path.write_bytes(data[:-1])
    with pytest.raises(StateError, match="another size"):
        again(run.root)
    path.write_bytes(b"x" + data[1:])
    with pytest.raises(StateError, match="first line"):
        again(run.root)


def test_a_peer_that_recorded_something_else_is_a_mismatch(run: PaperRun) -> None:
    """Each file is whole, but it is not what was sent."""
    (one,) = (run.root / "b" / RECORDED).glob("v00000002.*")
    mine = json.loads(one.read_bytes().partition(b"\n")[0][17:])
    (other,) = (run.root / "c" / RECORDED).glob("v00000002.*")
    header, _, payload = other.read_bytes().partition(b"\n")
    one.write_bytes(sealed_line({**json.loads(header[17:]), "peer": "b", "boot": mine["boot"]}) + payload)
    result = again(run.root)
    assert not result.exact
    assert verdicts(result) == ["REPRODUCED", "REPRODUCED", "REPRODUCED", "MISMATCH", "MEAN"]


@pytest.mark.parametrize("index", [0, 7])
def test_a_fragment_that_is_not_the_models_is_a_mismatch(run: PaperRun, index: int) -> None:
    """Ledgers and recordings agree on it: of another size, or with a number that is too high."""
    for name in "abc":
        rewrite(run.root / name, lambda fields: fields["commit"].update(fragment=index))
        (path,) = (run.root / name / RECORDED).glob("v00000003.*")
        header, _, payload = path.read_bytes().partition(b"\n")
        path.write_bytes(sealed_line({**json.loads(header[17:]), "fragment": index}) + payload)
    last = next(one for one in again(run.root).versions if one.version == 4)
    assert (last.verdict, last.detail) == (Verdict.MISMATCH, f"fragment {index} is not the model's")


def test_another_seed_is_a_mismatch(run: PaperRun) -> None:
    text = (run.root / "a" / "ledger.jsonl").read_text()
    assert '"seed":0' in text
    for name in "abc":
        rewrite(run.root / name, lambda fields: fields["contract"]["run"].update(seed=1), kind="open")
    (run.root / "a" / "checkpoints" / "v00000000").rename(run.root / "kept")
    run.peers["a"].save()
    assert verdicts(again(run.root))[:2] == ["MISMATCH", "MEAN"]


def test_nothing_recorded(tmp_path: Path) -> None:
    PaperRun(tmp_path, record=False).round()
    with pytest.raises(UsageError, match="no contribution is recorded"):
        again(tmp_path)


# ---------------------------------------------------------------- the files


def test_a_contribution_is_whole_and_named_for_its_place(run: PaperRun) -> None:
    found = recordings(run.root / "a")
    assert [recording.counted.base_version for recording in found] == [0, 1, 2, 3]
    assert [recording.fragment.index for recording in found] == [0, 1, 0, 1]
    sent = [list(recording.payloads()) for recording in found]
    assert all(len(parts) == recording.fragment.parts for parts, recording in zip(sent, found, strict=True))
    assert not list((run.root / "a" / RECORDED).glob(".*"))


def test_old_versions_are_forgotten(run: PaperRun, tmp_path: Path) -> None:
    fragment = run.peers["a"].line.layout.fragments[0]
    recorder = Recorder(tmp_path / "some" / RECORDED, "a", 7, 2, pytest.fail)
    for version in range(5):
        recorder.keep(Contribution(0, 0, version, 1, 1, 1, [b"x"] * fragment.parts), fragment, "ab" * 32)
    assert [one.counted.base_version for one in recordings(tmp_path / "some")] == [3, 4]


def test_no_contribution_is_recorded_through_a_link(run: PaperRun, tmp_path: Path) -> None:
    fragment = run.peers["a"].line.layout.fragments[0]
    folder, mine = tmp_path / "given" / RECORDED, tmp_path / "mine"
    folder.mkdir(parents=True)
    mine.write_text("mine")
    name = "v00000000.f0.abababab.000000000007.bin"
    for link in (name, f".{name}.tmp", f".{name}.{os.getpid()}.tmp"):
        (folder / link).symlink_to(mine)
    recorder = Recorder(folder, "a", 7, 0, pytest.fail)
    recorder.keep(Contribution(0, 0, 0, 1, 1, 1, [b"x"] * fragment.parts), fragment, "ab" * 32)
    assert (len(recordings(tmp_path / "given")), mine.read_text()) == (1, "mine")
    assert not (folder / name).is_symlink()


def test_a_disk_that_refuses_costs_the_recording_only(run: PaperRun, tmp_path: Path) -> None:
    fragment = run.peers["a"].line.layout.fragments[0]
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    recorder = Recorder(tmp_path / "file" / RECORDED, "a", 7, 0, warnings.append)
    recorder.keep(Contribution(0, 0, 0, 1, 1, 1, [b"x"] * fragment.parts), fragment, "")
    assert warnings == ["a contribution is not recorded: Not a directory"]


# ---------------------------------------------------------------- real runs


def of_world(world: LocalWorld, start: OuterState) -> Replay:
    """A model that only the test can build: the state that it began with is ours to give."""
    assert world.directory is not None
    books = read_books([world.directory])
    shelf = shelve(recording for book in books for recording in recordings(book.directory))
    line = world.peers[0].peer.line
    return Replayer(chain_of(books), shelf, line.codecs, line.optimizer, line.weighing, lambda: start, {}).replay(quiet)


@pytest.mark.slow(queued=False)
def test_real_peers_that_join_and_fall_behind_and_die(tmp_path: Path) -> None:
    world = LocalWorld(3, tmp_path)
    try:
        line = world.peers[0].peer.line
        start = OuterState(
            0, (line.optimizer.start(torch.zeros(line.layout.fragments[0].elements), line.layout.fragments[0]),)
        )
        world.rounds(world.peers, 3)
        late = world.add("p3")
        world.let_in(late, world.peers[:3])
        victim = world.peers[2]
        broken = victim.peer.line.state.fragments[0]
        victim.peer.line.state = OuterState(victim.version, (replace(broken, anchor=broken.anchor * 2),))
        victim.peer.exchange.hold(victim.peer.line.state, victim.peer.line.commit)
        copies = victim.copies
        world.rounds(world.peers, 3)
        assert victim.copies > copies  # p2's state is copied anew
        world.peers[3].peer.close()  # no goodbye
        world.rounds(world.peers[:3], 2)
        world.settle(world.peers[:3])
        for peer in world.peers[:3]:
            peer.leave()
        result = audit([tmp_path])
        assert result.violations == []
        assert [row["without_goodbye"] for row in result.peers] == [0, 0, 0, 1]
        replayed = of_world(world, start)
        assert set(verdicts(replayed)) == {"REPRODUCED"}, replay_text(replayed)
        assert {one.version for one in replayed.versions} == {*range(result.versions + 1)}
    finally:
        world.close()


def test_each_at_its_own_pace_by_shares_of_a_step(tmp_path: Path) -> None:
    """p0 makes versions that count it alone; they move a third of what they would otherwise."""
    apart = {"policy": "async", "grace_s": 0.0, "backlog_versions": 20}
    world = LocalWorld(3, tmp_path, membership=apart, outer={"staleness_power": 0.5, "alignment": "momentum"})
    try:
        line = world.peers[0].peer.line
        start = OuterState(
            0, (line.optimizer.start(torch.zeros(line.layout.fragments[0].elements), line.layout.fragments[0]),)
        )
        world.rounds(world.peers[:1], 6)
        world.rounds(world.peers[1:], 1)
        world.rounds(world.peers, 2)
        assert len(world.settle(world.peers)) == 1
        commits = world.peers[0].commits
        assert any(entry.weight < FINE for commit in commits for entry in commit.counted)  # somebody was late
        assert any(len(commit.counted) == 1 and commit.counted[0].weight == FINE for commit in commits)
        for peer in world.peers:
            peer.leave()
        assert audit([tmp_path]).violations == []
        replayed = of_world(world, start)
        assert set(verdicts(replayed)) == {"REPRODUCED"}, replay_text(replayed)
    finally:
        world.close()


def test_the_command(run: PaperRun) -> None:
    done = run_cli("replay", str(run.root), "--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["exact"], tree["reproduced"], tree["mismatch"]) == (True, 5, 0)


@pytest.mark.slow(queued=False)
def test_a_simulation_is_audited_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    out = tmp_path / "sim"
    contract = tiny_contract(tmp_path, tokens=12_288)
    options = ("--peers", "3", "--out", str(out), "--set", "storage.record=true")
    done = run_cli("simulate", str(contract), *options, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    audited = run_cli("audit", str(out), "--json")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    told = json.loads(audited.stdout)
    assert (told["tokens"], len(told["peers"])) == (12_288, 3)
    assert {row["without_goodbye"] for row in told["peers"]} == {0}
    replayed = run_cli("replay", str(out), "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    versions = json.loads(replayed.stdout)["versions"]
    assert {one["verdict"] for one in versions} == {Verdict.REPRODUCED}
    assert {one["version"] for one in versions} == {*range(told["versions"] + 1)}  # of some there are several commits
    assert load(out / "p0" / "checkpoints").version == told["versions"]


@pytest.mark.slow(queued=False)
def test_killed_resumed_and_killed_again(tmp_path: Path) -> None:
    """b dies and comes back from its checkpoint; then all die, and go on with what is on their disks."""
    record = ("--set", "storage.record=true")
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)), *record)
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket(), *record)
        peers.append(b)
        at = a.reaches(3, ["a", "b"])["version"]
        b.kill()
        a.reaches(at + 2, ["a"])
        b = PeerProcess("b", tmp_path, "--resume", str(tmp_path / "b"), "--join", a.ticket(), *record)
        peers.append(b)
        at = a.reaches(at + 3, ["a", "b"])["version"]
        for peer in (a, b):
            peer.kill()
        a = PeerProcess("a", tmp_path, "--resume", str(tmp_path / "a"), *record)
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--resume", str(tmp_path / "b"), "--join", a.ticket(), *record)
        peers.append(b)
        a.reaches(at + 2, ["a", "b"])
        for peer in (a, b):
            peer.interrupt()
        assert (a.wait(), b.wait()) == (0, 0)
    result = audit([tmp_path / "a", tmp_path / "b"])
    assert result.violations == [], audit_text(result)
    assert [(row["lives"], row["without_goodbye"]) for row in result.peers] == [(2, 1), (3, 2)]
    assert result.lineages == 1
    replayed = again(tmp_path / "a", tmp_path / "b")
    assert set(verdicts(replayed)) == {"REPRODUCED"}, replay_text(replayed)
