"""A joiner that is heard, and that nobody reaches: it is not taken in, for the others would wait for it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from diloco.observe.screen import status_text
from tests.peers import PeerProcess, ending, run_cli, tiny_contract

pytestmark = pytest.mark.slow
NOWHERE = "192.0.2.1:9"
"""An address of documentation (RFC 5737), where nobody is and which no route leads to: as behind a filter."""
TOLD_S = 10.0


@pytest.mark.parametrize("where", ["nowhere", "at the address of another"])
def test_a_joiner_that_nobody_reaches_is_refused_and_the_run_goes_on(tmp_path: Path, where: str) -> None:
    with ending([PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=1, steps=24)))]) as peers:
        (a,) = peers
        a.reaches(2, ["a"])
        address = NOWHERE if where == "nowhere" else a.ticket().partition("/")[0]
        hidden = PeerProcess("hidden", tmp_path, "--join", a.ticket(), "--set", f"network.advertise={address}")
        peers.append(hidden)
        hidden.ticket()
        since_s, before = time.monotonic(), a.version()
        status = json.loads(run_cli("status", a.ticket(), "--json").stdout)
        assert {one["peer"]: one["reached"] for one in status["peers"]} == {"a": True, "hidden": False}
        screen = status_text(status)
        assert f"nobody reaches {address}: hidden must let connections in there, or set network.advertise" in screen
        assert hidden.wait() == 11
        assert time.monotonic() - since_s < TOLD_S + 10  # the machine may be busy
        assert f"nobody reaches {address}" in hidden.log.read_text()
        assert "network.advertise" in hidden.log.read_text()
        assert a.reaches(before + 2, ["a"])
        assert any(f"nobody reaches {address}" in event["text"] for event in a.events("reason"))
