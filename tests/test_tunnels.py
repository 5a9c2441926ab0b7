"""Peers whose addresses are those of forwarders: real processes, each in a network namespace with its own loopback."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.peers import PeerProcess, ending, run_cli, tiny_contract, until
from tests.programs import forwarder

pytestmark = pytest.mark.slow

PORTS = {"a": 4001, "b": 4002}
"""Nobody else listens in a namespace of one's own."""
SKIPS = 3
BACK_S = 60.0


class Namespace:
    """A network namespace, kept by a process that sleeps in it."""

    def __init__(self) -> None:
        held = "ip link set lo up && echo up && exec sleep infinity"
        unshare = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", held]
        try:
            self._keeper = subprocess.Popen(unshare, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"no network namespaces here: {error}")
        if self._keeper.stdout.readline() != "up\n":
            pytest.skip(f"no network namespaces here: {self._keeper.communicate()[1].strip()}")
        keeper = str(self._keeper.pid)
        self.inside = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", keeper, "--"]
        """Words before a command that is to run inside."""

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.kill()
        self._keeper.communicate()


class Tunnel:
    """Forwarders between two namespaces: the port of each peer leads to it from the other's loopback, too."""

    def __init__(self, folder: Path, a: Namespace, b: Namespace) -> None:
        self._folder = folder
        self._ends = [(a, "b", "a"), (b, "a", "b")]
        self._running: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        for namespace, there, here in self._ends:
            to = [str(PORTS[there]), f"to-{there}", str(PORTS[here]), f"to-{here}"]
            program = [*namespace.inside, sys.executable, forwarder.__file__, *to]
            (self._folder / f"to-{here}").unlink(missing_ok=True)
            self._running.append(subprocess.Popen(program, cwd=self._folder, stdout=subprocess.PIPE, text=True))
        for process in self._running:
            assert process.stdout is not None
            assert process.stdout.readline() == "forwarding\n"

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()
        self._running = []


@pytest.fixture
def tunnel(tmp_path: Path) -> Iterator[tuple[Tunnel, list[PeerProcess]]]:
    """Two peers that reach each other through it only."""
    with ExitStack() as stack:
        a, b = (stack.enter_context(Namespace()) for _ in PORTS)
        tunnel = Tunnel(tmp_path, a, b)
        stack.callback(tunnel.close)
        tunnel.open()
        peers = stack.enter_context(ending([]))

        def start(name: str, namespace: Namespace, *how: str) -> PeerProcess:
            listen = ("--set", f"network.listen=127.0.0.1:{PORTS[name]}")
            launcher = [*namespace.inside, sys.executable, "-m"]
            peers.append(PeerProcess(name, tmp_path, *how, *listen, launcher=launcher))
            return peers[-1]

        founder = start("a", a, str(tiny_contract(tmp_path, peers=2)))
        start("b", b, "--join", founder.ticket())
        yield tunnel, peers


def skipped(peer: PeerProcess, since: float) -> int:
    return sum(event["time"] >= since for event in peer.events("skip"))


def alone(peer: PeerProcess) -> bool:
    return any(len(event["counted"]) < len(PORTS) for event in peer.events("version"))


def test_peers_behind_a_dead_tunnel_are_no_dead_peers(tunnel: tuple[Tunnel, list[PeerProcess]]) -> None:
    """The other's address refuses connections, on loopback, and yet it lives: neither of two goes on alone."""
    forwarders, (a, b) = tunnel
    for peer in (a, b):
        peer.reaches(2, ["a", "b"])
    forwarders.close()
    closed_s = time.time()
    for peer in (a, b):
        skips = partial(skipped, peer, closed_s)
        until(lambda skips=skips, peer=peer: skips() >= SKIPS or alone(peer), f"{peer.name} skips rounds")
    assert not any(alone(peer) for peer in (a, b)), a.lately()
    forwarders.open()
    last = max(a.version(), b.version())
    for peer in (a, b):
        peer.reaches(last + 2, ["a", "b"], BACK_S)
    for peer in (a, b):
        peer.interrupt()
    assert [peer.wait() for peer in (a, b)] == [0, 0]
    audit = run_cli("audit", str(a.directory), str(b.directory))
    assert audit.returncode == 0, audit.stdout
