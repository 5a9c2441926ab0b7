"""Links that are slow and never still: real peers over real gRPC, each of which sends no faster than it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers import PeerProcess, ending, run_cli, tiny_contract

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c"]
SENT_BPS = 3e6
MODEL = "dim = 160"
"""0.5M parameters, 2 MB in fp32, in two parts. Alone one takes 2.8 s; beside it three other streams are under way."""
SITE = [f"network.send_bps={SENT_BPS:g}", "timeouts.stall_s=2", "timeouts.suspect_s=4"]


def test_a_part_takes_longer_than_stall_s_and_all_versions_count_all(tmp_path: Path) -> None:
    contract = tiny_contract(tmp_path, peers=len(NAMES), steps=1)
    text = contract.read_text().replace("dim = 32", MODEL).replace("round_deadline_s = 30.0", "")
    contract.write_text(text + '[codec]\nname = "fp32"\n[sync]\nfragments = 1\npart_elements = 262144\n')
    site = [word for setting in SITE for word in ("--set", setting)]
    with ending([PeerProcess(NAMES[0], tmp_path, str(contract), *site)]) as peers:
        ticket = peers[0].ticket()
        peers += [PeerProcess(name, tmp_path, "--join", ticket, *site) for name in NAMES[1:]]
        for peer in peers:
            peer.reaches(3, NAMES)
        for peer in peers:
            assert all(set(event["counted"]) == set(NAMES) for event in peer.events("version")), peer.lately()
            assert all(event["attempts"] == 1 for event in peer.events("version")), peer.lately()
            peer.interrupt()
        assert [peer.wait() for peer in peers] == [0, 0, 0]
        audit = run_cli("audit", *(str(peer.directory) for peer in peers))
        assert audit.returncode == 0, audit.stdout
