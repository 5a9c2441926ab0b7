"""Loss of peers under each policy, with real processes: a witness, `without_majority = "continue"`, a quorum."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from diloco.accounts.ledger import LEDGER, read_ledger
from tests.peers import PeerProcess, ending, run_cli, tiny_contract, until

pytestmark = pytest.mark.slow


def votes(ticket: str) -> set[str]:
    answer = run_cli("status", ticket, "--json")
    return {peer["peer"] for peer in json.loads(answer.stdout)["peers"] if peer["votes"]} if answer.stdout else set()


def test_with_a_witness_one_of_two_goes_on_alone(tmp_path: Path) -> None:
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2, steps=24)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        w = PeerProcess("w", tmp_path, "--join", a.ticket(), command="witness")
        peers += [b, w]
        ticket = a.ticket()
        until(lambda: votes(ticket) == {"a", "b", "w"}, "all vote")
        b.process.send_signal(signal.SIGSTOP)  # not proof of a death: without the witness, a would have to wait
        alone = a.reaches(a.version() + 1, ["a"])
        assert a.reaches(alone["version"] + 2, ["a"])
        b.process.send_signal(signal.SIGCONT)
        a.reaches(a.version() + 1, ["a", "b"])
        until(lambda: w.events("witnessed")[-1]["version"] >= alone["version"], "the witness follows")
        w.interrupt()
        assert w.wait() == 0, w.log.read_text()
        assert run_cli("audit", str(a.directory), str(b.directory)).returncode == 0


def test_under_continue_the_rest_goes_on_and_the_lost_peer_comes_back(tmp_path: Path) -> None:
    keys = 'without_majority = "continue"\ncontinue_after_s = 3.0'
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2, steps=24, membership=keys)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        a.reaches(2, ["a", "b"])
        b.process.send_signal(signal.SIGSTOP)
        alone = a.reaches(a.version() + 1, ["a"])
        a.reaches(alone["version"] + 2, ["a"])
        b.process.send_signal(signal.SIGCONT)
        together = a.reaches(a.version() + 1, ["a", "b"])
        b.reaches(together["version"], ["a", "b"])
        assert any("as lineage" in event["text"] for event in a.events("reason"))


def test_a_quorum_does_not_wait_for_a_slow_peer_but_counts_it(tmp_path: Path) -> None:
    keys = 'policy = "quorum"\nquorum_peers = 2\ngrace_s = 0.2'
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=3, membership=keys)))
        peers.append(a)
        for name, step_s in (("b", 0.02), ("slow", 0.4)):
            pace = ("--set", f"device.step_s={step_s}")
            peers.append(PeerProcess(name, tmp_path, "--join", a.ticket(), *pace))
        a.reaches(2, ["a", "b"])
        with_all = a.reaches(2, ["a", "b", "slow"])
        a.reaches(with_all["version"] + 1, ["a", "b"])


def test_async_waits_for_nobody_and_counts_everybody(tmp_path: Path) -> None:
    keys = 'policy = "async"\nsync_versions = 2\ngrace_s = 0.0'
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2, membership=keys)))
        peers.append(a)
        slow = PeerProcess("slow", tmp_path, "--join", a.ticket(), "--set", "device.step_s=0.3")
        peers.append(slow)
        a.reaches(1, ["a", "slow"])
        a.reaches(2, ["a", "slow"])  # sync until here
        alone = a.reaches(3, ["a"])
        late = a.reaches(alone["version"] + 1, ["slow"])
        a.reaches(late["version"] + 3, ["a"])
        slow.reaches(late["version"] + 3, ["a"])
        assert run_cli("audit", str(a.directory), str(slow.directory)).returncode == 0


def test_a_straggler_is_cut_short_and_counts_with_what_it_has(tmp_path: Path) -> None:
    with ending([]) as peers:
        contract = tiny_contract(tmp_path, peers=3, steps=20, membership='stragglers = "cut"')
        pace = ("--set", "device.step_s=0.05")
        a = PeerProcess("a", tmp_path, str(contract), *pace)
        peers.append(a)
        peers.append(PeerProcess("b", tmp_path, "--join", a.ticket(), *pace))
        peers.append(PeerProcess("slow", tmp_path, "--join", a.ticket(), "--set", "device.step_s=0.4"))
        a.reaches(3, ["a", "b", "slow"])
        records = [record for record in read_ledger(a.directory / LEDGER).records if record.kind == "commit"]
        last = {counted.peer: counted.tokens for counted in records[-1].commit.counted}
        assert last["a"] == 20 * 4 * 32
        assert 0 < last["slow"] < last["a"]
