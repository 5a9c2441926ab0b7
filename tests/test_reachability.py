"""A joiner that is heard, and that nobody reaches: it is not taken in, for the others would wait for it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diloco.observe.screen import status_text
from tests.peers import PeerProcess, ending, run_cli, tiny_contract, until

pytestmark = pytest.mark.slow
TOLD_S = 10.0


@pytest.fixture
def filtered() -> Iterator[str]:
    """An address at which the first packet of each connection is dropped, as by a filter: a full queue does so."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        host, port = listening.getsockname()
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), timeout=0.5)
        yield f"{host}:{port}"


@pytest.mark.parametrize("where", ["filtered", "filtered, patient timeouts", "at the address of another"])
def test_a_joiner_that_nobody_reaches_is_refused_and_the_run_goes_on(tmp_path: Path, where: str, filtered: str) -> None:
    timeouts = ("heartbeat_s=2.0", "suspect_s=15.0") if "patient" in where else ()  # those of peers/wan.toml
    site = [word for value in timeouts for word in ("--set", f"timeouts.{value}")]
    with ending([PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=1, steps=24)), *site)]) as peers:
        (a,) = peers
        a.reaches(2, ["a"])
        address = a.ticket().partition("/")[0] if "another" in where else filtered
        hidden = PeerProcess("hidden", tmp_path, "--join", a.ticket(), "--set", f"network.advertise={address}", *site)
        peers.append(hidden)
        hidden.ticket()
        since_s, before = time.monotonic(), a.version()

        def heard() -> dict[str, Any] | None:
            status: dict[str, Any] = json.loads(run_cli("status", a.ticket(), "--json").stdout)
            return status if len(status["peers"]) > 1 else None

        status = until(heard, "a has heard hidden")
        assert {one["peer"]: one["reached"] for one in status["peers"]} == {"a": True, "hidden": False}
        screen = status_text(status)
        assert f"nobody reaches {address}: hidden must let connections in there, or set network.advertise" in screen
        assert hidden.wait() == 11
        assert time.monotonic() - since_s < TOLD_S + 10  # the machine may be busy
        assert f"nobody reaches {address}" in hidden.log.read_text()
        assert "network.advertise" in hidden.log.read_text()
        assert a.reaches(before + 2, ["a"])
        assert any(f"nobody reaches {address}" in event["text"] for event in a.events("reason"))
