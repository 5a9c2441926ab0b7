"""Gossiping peers in one process, over real gRPC or the in-process twin of the link; nothing else is replaced.

There is no directory.

Nobody has a thread of its own: a test says who does an inner step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diloco.base.types import Member
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.lives import Answer
from diloco.gossip.peer import GossipLife, GossipPeer
from diloco.gossip.swapping import Swapping
from diloco.island import Island
from diloco.observe.event_log import EventLine, Events
from diloco.observe.events import to_json
from diloco.peer.rank import PeerRank
from diloco.protocol.streams import Welcome
from diloco.run.door import OwnLoop
from diloco.run.run import RunChronicle
from diloco.simulate.memory_link import MemoryNetwork
from diloco.storage.checkpoint import Checkpoint
from diloco.transport.dht import AnnouncedPeer, Presence
from diloco.transport.endpoint import Runtime
from diloco.transport.loop_probe import folder_from_environment, probe
from tests.fronts import drive
from tests.local import NoDirectory
from tests.peers import DEADLINE_S, until

ELEMENTS = 5000
TOKENS = 10
"""Tokens of an inner step."""
SITE = Site.model_validate(
    {
        "timeouts": {
            "heartbeat_s": 0.2,
            "suspect_s": 2.0,
            "stall_s": 1.0,
            "rpc_s": 1.0,
            "join_s": 5.0,
            "leave_s": 5.0,
        }
    }
)


def contract(**sections: dict[str, Any]) -> Contract:
    tree: dict[str, Any] = {
        "run": {"name": "gossip", "total_tokens": 10**9},
        "membership": {"policy": "gossip"},
        "model": {"kind": "external"},
        "inner": {"steps": 1},
        "outer": {"lr": 0.7, "momentum": 0.5},
        "codec": {"name": "fp32", "zstd": False},
        "sync": {"part_elements": 1024},
        "gossip": {"final_s": 20.0},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Contract.model_validate(tree)


def as_if_answered(exchange: Swapping, member: Member) -> None:
    """Have this life count as one that answered at its address."""
    exchange.lives._answers[member.peer, member.incarnation] = Answer(0, member.address, None, 0.0)


class MemoryRuntime:
    """`diloco.transport.endpoint.Runtime` on a network in memory."""

    def __init__(self, world: World, address: str) -> None:
        self.loop, self.link = world.loop, world.network.link(1.0)
        self._world, self._address = world, address

    def serve(self, service: Any, listen: str) -> str:
        self._world.ask(lambda: self._world.network.attach(self._address, service))
        return self._address

    def answer_of(self, address: str) -> Welcome | None:
        """Nobody has a directory to tell of."""

    def close(self) -> None:
        self._world.ask(lambda: self._world.network.detach(self._address))


class LocalEndpoint:
    """`diloco.transport.endpoint.Endpoint` without a directory."""

    def __init__(self, runtime: Any, welcome: Welcome | None) -> None:
        self.site, self.runtime, self.welcome = SITE, runtime, welcome
        self.directory = NoDirectory()

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """There is none."""

    def appear(self, exchange: AnnouncedPeer) -> Presence:
        return Presence(self.directory, exchange, self.runtime.answer_of)  # type: ignore[arg-type]


class Gossiper:
    """A peer whose model is one vector, which inner steps pull towards a target of its own."""

    def __init__(
        self,
        name: str,
        world: World,
        through: Gossiper | None,
        checkpoint: Checkpoint | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name, self.world = name, world
        self.model = torch.nn.Linear(1, world.elements, bias=False, dtype=world.dtype)
        torch.nn.init.constant_(self.model.weight, 1.0)
        self.target = torch.linspace(1, 2, world.elements)[:, None] * (1 + int(name[1:], 36) % 3)
        self.seen: list[EventLine] = []
        welcome = world.hello(through) if through is not None else None
        self.runtime = MemoryRuntime(world, f"{name}:1") if world.in_memory else Runtime([""], 1.0, world.send_bps)
        endpoint: Any = LocalEndpoint(self.runtime, welcome)
        events = Events(None, name, [lambda stamped: self.seen.append(to_json(stamped))])
        island = Island(0, 1, torch.device("cpu"))
        loop = OwnLoop(self.model, island, {})
        rank = PeerRank(world.contract, SITE, island, loop.weights, loop)
        self.chronicle = RunChronicle(rank, events.emit, None)
        self.peer = GossipPeer(name, rank, endpoint, events, self.chronicle, checkpoint, directory=directory)
        self.life = GossipLife(self.peer, lambda: False)
        self.chronicle.peer = self.peer
        self.dead = False
        drive(self.peer.open())

    def step(self) -> bool:
        """An inner step, and what follows it. Whether the weights have moved by a swap."""
        with torch.no_grad():
            self.model.weight.add_((self.target - self.model.weight) * 0.1)
        self.chronicle.trained(TOKENS, 1.0)
        self.peer.trained(TOKENS, 0.001)
        return self.peer.between_steps()

    def events(self, kind: str) -> list[EventLine]:
        return [event for event in list(self.seen) if event["kind"] == kind]

    @property
    def version(self) -> int:
        return self.peer.version

    @property
    def anchor(self) -> torch.Tensor:
        return self.peer.line.state.fragments[0].anchor

    @property
    def local(self) -> torch.Tensor:
        return self.model.weight.detach().flatten().to(torch.float32, copy=True)

    def die(self) -> None:
        """No goodbye: connections to it are refused from now on."""
        self.dead = True
        self.close()

    def close(self) -> None:
        self.peer.close()
        self.runtime.close()


class World:
    """Peers that know each other."""

    def __init__(
        self,
        in_memory: bool,
        count: int = 2,
        dtype: torch.dtype = torch.float32,
        elements: int = ELEMENTS,
        send_bps: float = 0.0,
        **sections: dict[str, Any],
    ) -> None:
        """`dtype` and number of the parameters. `send_bps`: over gRPC, bits per second of each peer; 0: no limit."""
        self.in_memory, self.dtype, self.elements, self.send_bps = in_memory, dtype, elements, send_bps
        self.contract = contract(**sections)
        self.network = MemoryNetwork()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self.peers: list[Gossiper] = []
        for index in range(count):
            self.add(f"p{index}")
        until(lambda: self.all_know(count - 1), "all know each other")
        for peer in self.peers:
            drive(peer.peer.enter())

    def _live(self) -> None:
        probe(folder_from_environment())
        self.loop.run_forever()

    def ask(self, question: Callable[[], Any]) -> Any:
        async def answer() -> Any:
            return question()

        return asyncio.run_coroutine_threadsafe(answer(), self.loop).result(DEADLINE_S)

    def hello(self, through: Gossiper) -> Welcome:
        return through.peer.exchange._ask(through.peer.exchange.on_hello).result(DEADLINE_S)

    def add(self, name: str, checkpoint: Checkpoint | None = None, directory: Path | None = None) -> Gossiper:
        alive = [peer for peer in self.peers if not peer.dead]
        peer = Gossiper(name, self, alive[0] if alive else None, checkpoint, directory)
        self.peers.append(peer)
        return peer

    def all_know(self, others: int) -> bool:
        for peer in self.peers[1:]:
            peer.peer.exchange.greet(self.peers[0].peer.exchange.me)
        return all(len(peer.peer.exchange.alive()) >= others for peer in self.peers)

    def until(self, condition: Callable[[], Any], what: str, *trainers: Gossiper) -> Any:
        """Let these do inner steps, and all others serve, until the condition holds."""

        def turn() -> Any:
            for peer in self.peers:
                if not peer.dead:
                    if peer in trainers:
                        peer.step()
                    else:
                        peer.peer.between_steps()
            return condition()

        return until(turn, what)

    def close(self) -> None:
        for peer in self.peers:
            if not peer.dead:
                peer.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()
