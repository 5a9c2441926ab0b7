"""The exchange with real bytes over the in-process link: what happens to state when peers misbehave or fall behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from diloco.compress import open_codec
from diloco.config import CodecSection, OuterSection
from diloco.exchange.engine import Exchange, Terms
from diloco.exchange.machine import Rules, Timing
from diloco.exchange.memory_link import MemoryNetwork
from diloco.fragments import Layout
from diloco.outer import OuterState, open_outer
from diloco.round import Diverged, Line, adopt_state, run_round, step_outer
from diloco.types import Closed, Member, Skip

ELEMENTS = 5000
BLOCKS = 2


class LocalPeer:
    """A peer without processes and sockets: a vector of weights that inner steps push towards a target."""

    def __init__(self, name: str, world: LocalWorld, founder: bool) -> None:
        self.name = name
        self.weights = {"w": torch.zeros(ELEMENTS)}
        layout = Layout.of([("w", (ELEMENTS,))], part_elements=1024)
        optimizer = open_outer(OuterSection())
        state = OuterState(0, (optimizer.start(torch.zeros(ELEMENTS)),))
        self.line = Line(name, self.weights, layout, open_codec(CodecSection()), optimizer, False, state)
        rules = Rules("local", "c0", (layout.fragments[0].parts,), world.count, 8 * BLOCKS, 10.0)
        timing = Timing(heartbeat_s=0.2, suspect_s=2.0, stall_s=1.0)
        terms = Terms(b"{}", rules, timing, layout, self.line.codec, optimizer, world.backlog, 10**9)
        me = Member(name, 1, "")
        self.exchange = Exchange(me, terms, world.network.link(1.0), "L", founder, world.loop)
        self.copied = 0

    def enter(self, world: LocalWorld, through: LocalPeer | None) -> None:
        world.call(lambda: world.network.attach(self.name, self.exchange))
        self.exchange.start(self.name, ())
        if through is not None:
            self.exchange.meet([through.exchange.machine.me])
            self.copy([through.name])
        else:
            self.exchange.hold(self.line.state, None, copied=True)

    def copy(self, sources: list[str]) -> None:
        state, offer = self.exchange.copy_state(sources, self.line.state, 20.0, lambda done, total: None)
        adopt_state(self.line, state, offer.commit)
        self.exchange.hold(state, offer.commit, copied=True)
        self.copied += 1

    def wait_for_view(self) -> None:
        while not (self.exchange.in_view and self.line.commit is not None):
            for closed in self.exchange.closed(0.1):
                self.apply(closed, {})

    def apply(self, closed: Closed, seconds: dict[str, float]) -> None:
        before = self.line.commit
        if before is None or closed.commit.version > before.version:
            step_outer(self.line, closed, seconds)
            self.exchange.hold(self.line.state, closed.commit)

    def inner_steps(self) -> None:
        pull = torch.linspace(1, 2, ELEMENTS) * (1 + len(self.name) % 3)
        self.weights["w"].add_((pull - self.weights["w"]) * 0.1)
        self.line.trained.add(10, BLOCKS)

    def round(self, others: list[str]) -> object:
        try:
            if self.exchange.behind:
                self.copy(others)
            return run_round(
                self.line, self.inner_steps, self.exchange, self.apply, lambda: True, lambda: False, {}
            )
        except Diverged:
            self.copy(others)
            return Skip("diverged")


class LocalWorld:
    """An event loop on a thread, a network in memory, and peers that train on threads of their own."""

    def __init__(self, count: int, backlog: int = 4) -> None:
        self.count, self.backlog = count, backlog
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.network = MemoryNetwork()
        self.peers: list[LocalPeer] = []
        self.pool = ThreadPoolExecutor(8)

    def call(self, function: Callable[[], None]) -> None:
        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(5.0)

    def begin(self) -> list[LocalPeer]:
        for index in range(self.count):
            self.add(f"p{index}")
        list(self.pool.map(LocalPeer.wait_for_view, self.peers))
        return self.peers

    def add(self, name: str) -> LocalPeer:
        peer = LocalPeer(name, self, founder=not self.peers)
        peer.enter(self, self.peers[0] if self.peers else None)
        self.peers.append(peer)
        return peer

    def rounds(self, peers: list[LocalPeer], count: int) -> list[list[object]]:
        """Every peer does `count` rounds, each on its own thread."""

        def train(peer: LocalPeer) -> list[object]:
            others = [other.name for other in peers if other is not peer]
            return [peer.round(others) for _ in range(count)]

        return list(self.pool.map(train, peers))

    def close(self) -> None:
        for peer in self.peers:
            peer.exchange.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.pool.shutdown(wait=False)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    made = LocalWorld(*getattr(request, "param", (3,)))
    yield made
    made.close()


def digests(peers: list[LocalPeer]) -> set[tuple[int, str]]:
    return {(peer.line.state.version, peer.line.state.digest) for peer in peers}


def test_peers_hold_the_same_bits_after_every_version(world: LocalWorld) -> None:
    peers = world.begin()
    outcomes = world.rounds(peers, 5)
    assert not any(isinstance(outcome, Skip) for each in outcomes for outcome in each)
    assert digests(peers) == {(5, peers[0].line.state.digest)}
    assert all(torch.equal(peer.weights["w"], peers[0].line.state.fragments[0].anchor) for peer in peers)
    assert all(peer.line.trained.tokens == 0 for peer in peers)


def test_an_altered_state_is_noticed_and_copied_anew(world: LocalWorld) -> None:
    """One flipped bit in an anchor: that peer is left out of the version, and has the others' state afterwards."""
    peers = world.begin()
    world.rounds(peers, 2)
    victim = peers[2]
    fragment = victim.line.state.fragments[0]
    anchor = fragment.anchor.clone()
    anchor[7] = -anchor[7]
    altered = OuterState(victim.line.state.version, (replace(fragment, anchor=anchor),))
    victim.line.state = altered
    victim.exchange.hold(altered, victim.line.commit)
    copied = victim.copied
    world.rounds(peers, 3)
    assert victim.copied == copied + 1
    assert len({digest for _, digest in digests(peers)}) == 1
    counted = [[counted.peer for counted in closed.commit.counted] for closed in peers[0].exchange._backlog]
    assert ["p0", "p1"] in counted


@pytest.mark.parametrize("world", [(3, 2)], indirect=True)
def test_a_peer_that_missed_too_many_versions_copies_the_state(world: LocalWorld) -> None:
    """It keeps its progress, and contributes again."""
    peers = world.begin()
    world.rounds(peers, 1)
    sleeper = peers[2]
    world.call(lambda: world.network.freeze(sleeper.name))
    sleeper.exchange.machine.timing = replace(sleeper.exchange.machine.timing, heartbeat_s=1e9)
    world.rounds(peers[:2], 5)
    sleeper.inner_steps()
    progress = sleeper.weights["w"] - sleeper.line.state.fragments[0].anchor
    sleeper.exchange.machine.timing = replace(sleeper.exchange.machine.timing, heartbeat_s=0.2)
    world.call(lambda: world.network.thaw(sleeper.name))
    for _ in range(60):
        world.rounds(peers[:2], 1)
        list(sleeper.exchange.closed(0.2))
        if sleeper.exchange.behind:
            break
    assert sleeper.exchange.behind
    sleeper.copy(["p0", "p1"])
    kept = sleeper.weights["w"] - sleeper.line.state.fragments[0].anchor
    torch.testing.assert_close(kept, progress, atol=1e-5, rtol=1e-4)


def test_a_hostile_contribution_is_left_out(world: LocalWorld) -> None:
    """Bytes that do not decode: the round closes without their sender, whose presence changes nothing else."""
    peers = world.begin()
    world.rounds(peers, 1)
    bad = peers[2]
    honest = bad.line.codec

    class Hostile:
        name = "hostile"

        def encode(self, values: torch.Tensor) -> bytes:
            return b"\xff" * len(honest.encode(values))

        def decode(self, payload: bytes, elements: int) -> torch.Tensor:
            return honest.decode(payload, elements)

        def max_bytes(self, elements: int) -> int:
            return honest.max_bytes(elements)

    bad.line.codec = Hostile()
    world.rounds(peers, 1)
    assert [counted.peer for counted in peers[0].line.commit.counted] == ["p0", "p1"]
    bad.line.codec = honest
    assert len({digest for _, digest in digests(peers[:2])}) == 1


def test_a_joiner_gets_the_state_and_is_counted(world: LocalWorld) -> None:
    peers = world.begin()
    world.rounds(peers, 3)
    late = world.add("late")
    assert late.line.state.digest == peers[0].line.state.digest
    waiting = world.pool.submit(late.wait_for_view)
    while not waiting.done():
        world.rounds(peers[:3], 1)
    world.rounds(world.peers, 2)
    assert "late" in [counted.peer for counted in peers[0].line.commit.counted]
    assert len({digest for _, digest in digests(world.peers)}) == 1
