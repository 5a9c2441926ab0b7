"""Whole runs with real processes, real gRPC and the real directory: found, join, leave, die, resume."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.accounts.ledger import read_ledger
from diloco.accounts.left_off import left_off
from diloco.config.load import load_contract
from diloco.observe.events import Ended
from diloco.observe.run_folder import read_state
from diloco.simulate.chaos.fleet import free_port
from diloco.simulate.local.simulation import states_agree
from diloco.storage.checkpoint import load
from scripts.bench.quality_run import Fleet
from tests.peers import PeerProcess, ending, run_cli, tiny_contract, until
from tests.programs import synced_only

RETURNED_S = 10.0
"""Within which a version closes once all are back."""


def status(ticket: str) -> dict:
    answer = run_cli("status", ticket, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def agree(peers: list[PeerProcess]) -> int:
    """All digests that several peers reported of one version are the same. Returns how many were compared.

    A version belongs to its lineage: what was committed, but in nobody's checkpoint when all died, is made anew.
    """
    digests: dict[tuple[str, int], set[str]] = {}
    reports: dict[tuple[str, int], int] = {}
    for peer in peers:
        for event in peer.events("version"):
            version = event["lineage"], event["version"]
            digests.setdefault(version, set()).add(event["state_digest"])
            reports[version] = reports.get(version, 0) + 1
    assert all(len(known) == 1 for known in digests.values()), digests
    return sum(count > 1 for count in reports.values())


@pytest.mark.slow
def test_found_join_leave_join_late_kill(tmp_path: Path) -> None:
    """The scene of the four terminals."""
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)))
        peers.append(a)
        ticket = a.ticket()
        a.reaches(2)
        b, c = (PeerProcess(name, tmp_path, "--join", ticket) for name in "bc")
        peers += [b, c]
        together = a.reaches(1, ["a", "b", "c"])["version"]

        b.interrupt()
        assert b.wait() == 0
        a.reaches(together, ["a", "c"])
        assert "left at version" in b.log.read_text()

        d = PeerProcess("d", tmp_path, "--join", c.ticket())  # any member will do
        peers.append(d)
        at = a.reaches(together, ["a", "c", "d"])["version"]
        seen = status(a.ticket())
        row = {entry["peer"]: entry for entry in seen["peers"]}
        assert {name for name, entry in row.items() if entry["in_view"]} == {"a", "c", "d"}
        until(
            lambda: {e["peer"]: e for e in status(a.ticket())["peers"]}["d"]["first_counted_version"] == at,
            "status shows d's first counted version",
        )

        c.kill()
        after = a.reaches(at + 1, ["a", "d"])["version"]
        a.reaches(after + 2)
        lines = a.log.read_text()
        assert "view changed: b left" in lines
        assert "view changed: c lost" in lines
        for peer in (a, d):
            peer.interrupt()
        assert a.wait() == 0
        assert d.wait() == 0
        assert agree(peers) > 5


def first_of_another_lineage(peer: PeerProcess, lineage: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        return next((event for event in peer.events("version") if event["lineage"] != lineage), None)

    event: dict[str, Any] = until(found, f"{peer.name} goes on")
    return event


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "killed", "amid"),
    [
        (2, 1, ""),
        (3, 2, "before-vote-sync=sleep:0.2@9"),
        (4, 4, "mid-contribution=sleep:0.5@9"),
        (4, 4, "before-log-sync=sleep:0.5@5"),
    ],
)
def test_who_is_killed_goes_on_with_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: int, killed: int, amid: str
) -> None:
    """Nobody has to be asked: promises, votes and means are on the disks. No version is lost, and the lineage goes on.
    All listen again where they did. What was not synced is gone; what happens `amid` takes most of the time."""
    monkeypatch.setenv("DILOCO_FAILPOINTS", amid)
    names, contract = "abcd"[:members], tiny_contract(tmp_path, peers=members)
    listen = {name: ("--set", f"network.listen=127.0.0.1:{free_port()}") for name in names}
    with ending([]) as peers:
        peers.append(PeerProcess("a", tmp_path, str(contract), *listen["a"], work=synced_only.run))
        for name in names[1:]:
            peers.append(PeerProcess(name, tmp_path, "--join", peers[0].ticket(), *listen[name], work=synced_only.run))
        for peer in peers:
            peer.reaches(6, list(names))
        lineage = peers[0].events("version")[-1]["lineage"]
        for peer in peers[:killed]:
            peer.kill()
        commits = [left_off(read_ledger(peer.directory / "ledger.jsonl").records).commit for peer in peers]
        last = max(commit.version for commit in commits if commit is not None)
        for place, name in enumerate(names[:killed]):
            resumed = ("--resume", str(tmp_path / name), *listen[name])
            peers[place] = PeerProcess(name, tmp_path, *resumed, work=synced_only.run)
        events = [peer.reaches(last + 2, list(names)) for peer in peers]
        returned = max(peer.events("start")[-1]["time"] for peer in peers[:killed])
        new = [event for peer in peers for event in peer.events("version") if event["version"] > last]
        next_s = min(event["time"] for event in new if event["time"] >= returned)
        assert next_s - returned < RETURNED_S + peers[0].seconds_of_a_version()
        assert {event["lineage"] for event in events} == {lineage}
        assert agree(peers) >= 5
        for peer in peers:
            peer.interrupt()
        assert [peer.wait() for peer in peers] == [0] * members
    audit = run_cli("audit", *(str(tmp_path / name) for name in names))
    assert audit.returncode == 0, audit.stdout


@pytest.mark.slow
def test_who_has_no_votes_takes_no_version_back_after_the_death_of_all(tmp_path: Path) -> None:
    """It is back first, nobody answers, and it founds the run from its checkpoint. The others have later versions."""
    contract, listen = tiny_contract(tmp_path, peers=3), {}
    for name in "abc":
        listen[name] = ("--set", f"network.listen=127.0.0.1:{free_port()}")
    listen["a"] += ("--set", "storage.log=false", "--set", "storage.checkpoint_every=4")
    with ending([]) as peers:
        peers.append(PeerProcess("a", tmp_path, str(contract), *listen["a"]))
        peers += [PeerProcess(name, tmp_path, "--join", peers[0].ticket(), *listen[name]) for name in "bc"]
        (lineage,) = {peer.reaches(6, ["a", "b", "c"])["lineage"] for peer in peers}
        for peer in peers:
            peer.kill()
        last = max(peer.version() for peer in peers[1:])
        for place, name in enumerate("abc"):
            peers[place] = PeerProcess(name, tmp_path, "--resume", str(tmp_path / name), *listen[name])
            peers[place].ticket()
        for peer in peers[1:]:
            assert peer.reaches(last + 2, ["b", "c"])["lineage"] == lineage
        # c may come back through b, where a is slow to answer.
        assert re.search(r"went on without version \d+, which is here", peers[1].log.read_text())
        until(lambda: "of the lineage from which ours was founded" in peers[0].log.read_text(), "a hears of it")
        peers[0].kill()
        listen["a"] += ("--join", peers[1].ticket())
        peers[0] = PeerProcess("a", tmp_path, "--resume", str(tmp_path / "a"), *listen["a"])
        assert peers[0].reaches(last + 4, ["a", "b", "c"])["lineage"] == lineage


@pytest.mark.slow
def test_kill_everything_and_resume(tmp_path: Path) -> None:
    """No version is lost, same digest, no block trained twice, the curve goes on."""
    contract = tiny_contract(tmp_path, peers=2)
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(contract))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        a.reaches(4, ["a", "b"])
        until(lambda: len(a.events("checkpoint")) > 3, "checkpoints")
        for peer in (a, b):
            peer.kill()
        commit = left_off(read_ledger(tmp_path / "a" / "ledger.jsonl").records).commit
        assert commit is not None
        last = commit.version

        a = PeerProcess("a", tmp_path, "--resume", str(tmp_path / "a"))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--resume", str(tmp_path / "b"), "--join", a.ticket())
        peers.append(b)
        # The checkpoint may lag behind: the log leads on from it.
        first = a.reaches(last + 1, ["a", "b"])
        assert first["lineage"] == commit.lineage
        assert a.events("start")[-1]["resumed_version"] == last
        assert first["tokens"] > commit.tokens
        losses = [event["loss"] for event in a.events("version")]
        assert losses[-1] < losses[0]
        until(lambda: b.version() >= last + 3 and b.events("version")[-1]["lineage"] == first["lineage"], "b")
        assert agree([a, b]) >= 5
        told = [event for peer in (a, b) for event in peer.events("version")]
        runs = sorted(tuple(run) for event in told for run in event["blocks"])
        assert len(runs) >= 2 * (last + 3) - 2  # of each, the kill may have taken the last event
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs)), "a block was trained twice"
        for peer in (a, b):
            peer.interrupt()
        assert (a.wait(), b.wait()) == (0, 0)


@pytest.mark.slow
def test_a_run_ends_when_it_has_its_tokens(tmp_path: Path) -> None:
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2, tokens=12_288)))
        peers.append(a)
        peers.append(PeerProcess("b", tmp_path, "--join", a.ticket()))
        assert [peer.wait() for peer in peers] == [0, 0]
        ends = [peer.events("end")[-1] for peer in peers]
        assert {end["reason"] for end in ends} == {"done"}
        assert len({(end["version"], end["state_digest"], end["chain_digest"]) for end in ends}) == 1
        assert ends[0]["tokens"] == 12_288

        exported = run_cli("export", str(tmp_path / "a"), str(tmp_path / "exported"), "--json")
        assert exported.returncode == 0, exported.stderr
        assert (tmp_path / "exported" / "model.safetensors").is_file()
        evaluated = run_cli("eval", str(tmp_path / "a"), "--json")
        assert json.loads(evaluated.stdout)["val_loss"] == pytest.approx(ends[0]["val_loss"], rel=1e-4)
        reported = run_cli("report", str(tmp_path / "a"), "--json")
        assert Path(json.loads(reported.stdout)["report"]).is_file()


@pytest.mark.slow
def test_one_of_two_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    """On one machine a process that is gone proves the death, so that nobody has to be asked."""
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        at = a.reaches(2, ["a", "b"])["version"]
        b.kill()
        a.reaches(at + 1, ["a"])


@pytest.mark.slow
def test_majority_silent_trains_on_until_evicted(tmp_path: Path) -> None:
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        a.reaches(2, ["a", "b"])
        b.process.send_signal(signal.SIGSTOP)  # it may only be cut off: nobody must go on without asking
        skip = until(lambda: a.events("skip"), "a round is skipped")[0]
        assert "voters can be reached" in skip["reason"]
        until(lambda: len(a.events("skip")) > 1, "training goes on")
        stuck = a.version()
        told = run_cli("evict", a.ticket(), "b")
        assert told.returncode == 0, told.stderr
        a.reaches(stuck + 2, ["a"])
        assert a.events("view")[-1]["left"] == [{"peer": "b", "reason": "lost"}]


@pytest.mark.slow
def test_under_torchrun_an_island_is_one_peer(tmp_path: Path) -> None:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous, "-m"]
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2, tokens=12_288)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket(), launcher=torchrun)
        peers.append(b)
        assert [peer.wait() for peer in peers] == [0, 0], b.log.read_text()
        ends = [peer.events("end")[-1] for peer in peers]
        assert len({end["state_digest"] for end in ends}) == 1
        assert all(set(event["counted"]) == {"a", "b"} for event in a.events("version"))


@pytest.mark.parametrize(
    ("reason", "states", "agree"),
    [
        ("done", [(4, "a"), (4, "a")], True),
        ("done", [(4, "a"), (4, "b")], False),
        ("done", [(4, "a"), (5, "b")], False),  # the last version belongs to all
        ("left", [(4, "a"), (5, "b")], None),
        ("left", [(4, "a"), (5, "b"), (5, "b")], True),
        ("left", [(4, "a"), (5, "b"), (5, "c")], False),
    ],
)
def test_peers_agree_where_they_can_be_compared(reason: str, states: list[tuple[int, str]], agree: bool | None) -> None:
    ends = [Ended(reason, version, state_digest=digest) for version, digest in states]
    assert states_agree(ends, len(ends)) is agree


def test_a_small_simulation(tmp_path: Path) -> None:
    """The one whole run of the quick tests: two processes find each other, train, agree and end."""
    out = tmp_path / "sim"
    contract = tiny_contract(tmp_path, tokens=6_144)
    done = run_cli("simulate", str(contract), "--peers", "2", "--out", str(out), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["peers"], summary["versions"], summary["tokens"]) == (2, 3, 6_144)
    assert summary["digests_agree"] is True
    assert load(out / "p0" / "checkpoints").version == load(out / "p1" / "checkpoints").version == 3
    state = read_state(sorted(out.glob("p*/events.jsonl")))
    assert state == read_state([out / "events.jsonl"])
    assert (list(state.versions), state.tokens, state.name) == ([1, 2, 3], 6_144, summary["run"])
    assert {end.state_digest for end in state.ends} == {summary["digest"]}
    assert all(peer.phase == "done" and peer.used and peer.checkpoint for peer in state.peers.values())
    assert (state.notices, state.view, len(state.stays())) == ([], {}, 2)
    on_one_thread = Fleet(load_contract(contract).value, ["p0", "p1"], [1.0, 0.5])
    on_one_thread.train()
    assert {peer.run.digest for peer in on_one_thread.peers} == {summary["digest"]}  # virtual time has the same bits


@pytest.mark.slow(queued=False)
def test_simulate_writes_a_summary_and_beats_ddp_in_bytes(tmp_path: Path) -> None:
    out = tmp_path / "sim"
    contract = tiny_contract(tmp_path, tokens=12_288)
    done = run_cli("simulate", str(contract), "--peers", "2", "--compare", "ddp", "--out", str(out), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["peers"] == 2
    assert summary["versions"] == 6
    assert summary["digests_agree"] is True
    assert len(summary["digest"]) == 64
    assert summary["tokens"] == 12_288
    assert summary["baseline"]["name"] == "ddp"
    assert summary["baseline"]["wire_bytes_sent_per_peer"] > 8 * summary["wire_bytes_sent_per_peer"] / 4
    assert {"val_loss", "wall_s", "wire_bytes_sent_per_peer"} <= summary["baseline"].keys()
    assert (out / "events.jsonl").is_file()
    assert (out / "plot.png").is_file()
    assert (out / "report.html").is_file()
    assert "All peers hold the same state" in done.stdout


@pytest.mark.slow
def test_a_slower_peer_does_as_many_steps_as_fit(tmp_path: Path) -> None:
    """DyLU among real peers: one of a quarter of the speed does a quarter of the steps, and nobody waits for it."""
    out = tmp_path / "sim"
    contract = tiny_contract(tmp_path, tokens=24_576)
    sized = ["inner.sized_by=speed", "outer.weighting=tokens", "device.step_s=0.05"]
    options = [text for setting in sized for text in ("--set", setting)]
    done = run_cli("simulate", str(contract), "--speeds", "1,0.25", "--out", str(out), *options, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    tokens = {
        name: [e["inner_tokens"] for e in events if e["kind"] == "version" and e["peer"] == name]
        for name in ("p0", "p1")
    }
    assert tokens["p0"][0] == tokens["p1"][0]  # at first neither knows the other's pace
    later = sum(tokens["p1"][4:]) / sum(tokens["p0"][4:])
    assert 0.1 < later < 0.5


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Two peers, one stopped: leaving in good order would wait for it."""
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        a.reaches(1, ["a", "b"])
        b.process.send_signal(signal.SIGSTOP)
        a.process.send_signal(signal.SIGTERM)
        until(lambda: "once more to end at once" in a.log.read_text(), "the first signal is answered")
        a.process.send_signal(signal.SIGTERM)
        assert a.wait(10.0) == 143
