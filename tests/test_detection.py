"""Time until a dead, a frozen and a thawed peer are noticed, with the default timeouts and real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.accounts.audit import audit
from diloco.accounts.ledger import LEDGER, read_ledger
from tests.peers import PeerProcess, ending, tiny_contract, until

pytestmark = pytest.mark.slow

KILLED_S = 1.0
FROZEN_S = 5.0
ROUND_TOKENS = 8 * 4 * 32
NAMES = ("a", "b", "c", "d")


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[PeerProcess]]:
    """Four peers that commit together: of three, a lost one would keep its vote and its place."""
    with ending([]) as peers:
        contract = tiny_contract(tmp_path, peers=4)
        peers.append(PeerProcess("a", tmp_path, str(contract)))
        ticket = peers[0].ticket()
        peers += [PeerProcess(name, tmp_path, "--join", ticket) for name in NAMES[1:]]
        for peer in peers:
            peer.reaches(3, NAMES)
        yield peers


def missed(peer: PeerProcess, lost: str, since: float) -> dict[str, Any]:
    """The event in which `peer` says that the view goes on without `lost`."""

    def found() -> dict[str, Any] | None:
        views = [event for event in peer.events("view") if event["time"] >= since]
        return next((event for event in views if {"peer": lost, "reason": "lost"} in event["left"]), None)

    event: dict[str, Any] = until(found, f"{peer.name} misses {lost}")
    return event


def limit_s(peer: PeerProcess) -> float:
    """Seconds within which a death shows, in the view of the next version. How long a version takes here is added."""
    return KILLED_S + peer.seconds_of_a_version()


def all_go_on_in_time(survivors: Sequence[PeerProcess], victims: Sequence[PeerProcess]) -> None:
    """Kill the victims at once; the survivors are to go on without them within a second of the first kill."""
    limits_s = {peer.name: limit_s(peer) for peer in survivors}
    killed = time.time()
    for victim in victims:
        victim.process.kill()
    for peer in survivors:
        took_s = max(missed(peer, victim.name, killed)["time"] for victim in victims) - killed
        assert took_s < limits_s[peer.name], f"{peer.name} took {took_s:.2f} s\n{peer.lately()}"
    for victim in victims:
        victim.process.wait()


def test_a_killed_peer_is_out_within_a_second(four: list[PeerProcess]) -> None:
    *others, victim = four
    all_go_on_in_time(others, [victim])


def test_half_of_the_peers_killed_at_once_are_proven_dead_within_a_second(four: list[PeerProcess]) -> None:
    """A version takes three of four votes, or two where the deaths of the others are proven. Then it takes both of two,
    or one."""
    a, b, c, d = four
    all_go_on_in_time([a, b], [c, d])
    now = [peer.reaches(peer.version() + 2, ["a", "b"]) for peer in (a, b)]
    assert not [event for peer in (a, b) for event in peer.events("skip")]
    all_go_on_in_time([a], [b])
    assert a.reaches(now[0]["version"] + 2, ["a"])


def test_one_of_two_goes_on_within_a_second_of_the_death_of_the_other(tmp_path: Path) -> None:
    """On one machine it is dead for certain, and its vote is not needed."""
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)))
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket())
        peers.append(b)
        for peer in peers:
            peer.reaches(3, ["a", "b"])
        all_go_on_in_time([a], [b])
        assert a.reaches(a.version() + 1, ["a"])


def test_a_frozen_peer_is_out_within_five_seconds_and_comes_back_by_itself(four: list[PeerProcess]) -> None:
    """Stopped wherever it happened to be, in a stream or in its inner steps. What it trained on is counted later."""
    *others, victim = four
    victim.process.send_signal(signal.SIGSTOP)
    stopped = time.time()
    out = [missed(peer, "d", stopped) for peer in others]
    assert max(event["time"] for event in out) - stopped < FROZEN_S
    others[0].reaches(out[0]["version"] + 2, ["a", "b", "c"])

    victim.process.send_signal(signal.SIGCONT)
    back = others[0].reaches(out[0]["version"] + 3, NAMES)
    victim.reaches(back["version"] + 1)
    said = [event["text"] for event in victim.events("reason") if event["time"] >= stopped]
    assert any("the view goes on without me" in text for text in said)
    for peer in four:
        peer.interrupt()
    assert [peer.wait() for peer in four] == [0, 0, 0, 0]
    records = read_ledger(victim.directory / LEDGER).records
    passed_over = sum(record.fields["counted"] for record in records if record.kind == "adopt")
    committed = sum(event["inner_tokens"] for event in victim.events("version") if event["own"]) + passed_over
    discarded = victim.events("end")[-1]["discarded_tokens"]
    assert committed + discarded == records[-1].totals.trained > 0
    assert audit([peer.directory for peer in four]).violations == []
    assert discarded <= 2 * ROUND_TOKENS, "what was under way when it was stopped, and when it left"
