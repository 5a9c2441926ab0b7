"""Links on which control messages wait behind parts: real peers in namespaces, behind shapers that hold back seconds.

The shaper is the kernel's: `network.send_bps` would hold back parts, and no other message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench import netns
from tests.peers import PeerProcess, ending, run_cli, tiny_contract

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]
LINK_MBIT = 2.0
MODEL = "dim = 160"
"""0.5M parameters, 2 MB in fp32: 8 s on such a link, of which each peer sends two thirds, twice."""
QUEUE_S = 6.0
"""Seconds of traffic that an old modem holds back."""
SITE = ["timeouts.suspect_s=2", "timeouts.rpc_s=2"]


@pytest.fixture
def star(monkeypatch: pytest.MonkeyPatch) -> Iterator[netns.Star]:
    monkeypatch.setattr(netns, "QUEUE_S", QUEUE_S)
    try:
        with netns.Star(len(NAMES), LINK_MBIT, 0.0, "cubic") as star:
            yield star
    except netns.NotPermitted as error:
        pytest.skip(f"no network namespaces here: {error}")


def test_who_sends_parts_is_heard_though_its_messages_wait_behind_them(
    tmp_path: Path, star: netns.Star, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_SECRET", "a secret of all three peers")
    contract = tiny_contract(tmp_path, peers=len(NAMES), steps=1)
    text = contract.read_text().replace("dim = 32", MODEL).replace("round_deadline_s = 30.0", "")
    contract.write_text(text + '[codec]\nname = "fp32"\n[sync]\nfragments = 1\npart_elements = 262144\n')
    with ending([]) as peers:
        for index, name in enumerate(NAMES):
            how = [str(contract)] if not peers else ["--join", peers[0].ticket()]
            site = [*SITE, f"network.listen={star.address(index)}:4000"]
            settings = [word for setting in site for word in ("--set", setting)]
            peers.append(
                PeerProcess(name, tmp_path, *how, *settings, launcher=[*star.inside(index), sys.executable, "-m"])
            )
        for peer in peers:
            peer.reaches(2, NAMES, 120.0)
        for peer in peers:
            assert all(event["attempts"] == 1 for event in peer.events("version")), peer.lately()
            peer.interrupt()
        assert [peer.wait() for peer in peers] == [0, 0, 0]
    audit = run_cli("audit", *(str(peer.directory) for peer in peers))
    assert audit.returncode == 0, audit.stdout
