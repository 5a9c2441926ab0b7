"""Attacks by an outsider, who knows a peer's address and nothing else."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from scripts.attacks.victims import CALM_S, Attack, Victims

IDLE = 1_100


def idle_connections(victims: Victims) -> str:
    """More TCP connections than a peer may have files, that say nothing."""
    host, port = victims.address("p0").rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5.0))
        assert victims.row is not None
        victims.row.versions_during = victims.versions_in(CALM_S)
    return ""


ATTACKS = (Attack("idle-connections", "outsider", idle_connections, peers=2),)
