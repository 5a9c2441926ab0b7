"""Real peers in one process: the in-process twin of the link instead of gRPC, no directory, nothing else replaced."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Train
from diloco.base.life import Life
from diloco.base.types import Closed, Commit, Counted, Member, Skip
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.service import ExchangeService
from diloco.island import Island
from diloco.observe.event_log import Events
from diloco.observe.events import to_json
from diloco.peer.life import PeerLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank
from diloco.protocol.streams import Welcome
from diloco.run.door import OwnLoop
from diloco.simulate.memory_link import MemoryNetwork
from diloco.transport.dht import AnnouncedPeer, Presence
from diloco.transport.loop_probe import folder_from_environment, probe
from tests.fronts import drive
from tests.peers import DEADLINE_S, until

ELEMENTS = 5000


def local_site(suspect_s: float, stall_s: float) -> Site:
    """Site of peers in one process, which may stand still for a second or two on a busy machine: that is no death."""
    timeouts = {"heartbeat_s": 0.2, "suspect_s": suspect_s, "stall_s": stall_s, "rpc_s": stall_s / 2}
    return Site.model_validate({"storage": {"record": True}, "timeouts": timeouts})


SITE = local_site(suspect_s=6.0, stall_s=4.0)


def contract(count: int, **sections: dict[str, Any]) -> Contract:
    tree: dict[str, Any] = {
        "run": {"name": "local", "total_tokens": 10**9},
        "membership": {"start_peers": count, "match_deadline_s": 10.0},
        "model": {"kind": "external"},
        "inner": {"steps": 1},
        "sync": {"part_elements": 1024},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Contract.model_validate(tree)


class NoDirectory:
    """Nothing about correctness rests on the directory."""

    addresses = ()

    def revive(self) -> bool:
        return False

    def lookup(self) -> dict[str, Member]:
        return {}

    def announce(self, member: Member, version: int) -> bool:
        return True

    def withdraw(self, peer: str) -> bool:
        return True


class LocalRuntime:
    """`diloco.transport.endpoint.Runtime` on a network in memory."""

    def __init__(self, world: LocalWorld, address: str) -> None:
        self.loop = world.loop
        self.link = world.network.link(1.0)
        self._world, self._address = world, address

    def serve(self, service: Any, listen: str) -> str:
        self._world.call(lambda: self._world.network.attach(self._address, service))
        return self._address

    def answer_of(self, address: str) -> Welcome | None:
        """Nobody has a directory to tell of."""


class LocalEndpoint:
    """`diloco.transport.endpoint.Endpoint` on a network in memory."""

    def __init__(self, world: LocalWorld, address: str, welcome: Welcome | None) -> None:
        self.site = world.site
        self.runtime = LocalRuntime(world, address)
        self.directory = NoDirectory()
        self.welcome = welcome

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """There is none."""

    def appear(self, exchange: AnnouncedPeer) -> Presence:
        return Presence(self.directory, exchange, self.runtime.answer_of)  # type: ignore[arg-type]

    def close(self) -> None:
        """Its world goes on."""


class LocalPeer:
    """A peer whose model is one vector, which inner steps pull towards a target of its own."""

    def __init__(self, name: str, world: LocalWorld, through: LocalPeer | None) -> None:
        self.name = name
        self.model = torch.nn.Linear(1, ELEMENTS, bias=False, dtype=world.dtype, device="cpu")
        torch.nn.init.zeros_(self.model.weight)
        self.world = world
        welcome = world.ask(ExchangeService(through.peer.exchange).on_hello) if through else None
        address = f"{name}:1"
        endpoint = LocalEndpoint(world, address, welcome)
        directory = world.directory / name if world.directory else None
        island = Island(0, 1, torch.device("cpu"))
        loop = OwnLoop(self.model, island, {})
        rank = PeerRank(world.contract, world.site, island, loop.weights, loop)
        self.told: list[dict[str, Any]] = []
        events = Events(None, name, [lambda stamped: self.told.append(to_json(stamped))])
        self.peer = Peer(name, rank, endpoint, events, self, directory=directory)  # type: ignore[arg-type]
        self.leaving = False
        self.blocks = 0
        """Leased blocks that it says it has read, in each inner step."""
        self.life = PeerLife(self.peer, lambda: self.leaving)
        self.address = address
        self.commits: list[Commit] = []
        self.states: dict[int, str] = {}
        self.copies = 0
        copy = self.peer.copy_state

        def counting(*arguments: Any) -> Life[None]:
            self.copies += 1
            yield from copy(*arguments)

        self.peer.copy_state = counting  # type: ignore[method-assign, assignment]
        drive(self.peer.open())

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None, seconds: dict[str, float]) -> None:
        self.commits.append(commit)
        self.states[commit.version] = self.peer.line.state.digest

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Nobody leases data."""

    def numbers(self) -> dict[str, Any]:
        return {}

    def inner_step(self) -> None:
        ramp = torch.linspace(1, 2, ELEMENTS, dtype=torch.float32, device="cpu")[:, None]
        target = ramp * (1 + int(self.name[1:], 36) % 3)
        with torch.no_grad():
            self.model.weight.add_((target - self.model.weight) * 0.1)
        self.life.trained(10, self.blocks, 0.001, None)

    def enter(self) -> None:
        assert drive(self.life.enter())

    def round(self, leaving: bool = False) -> Any:
        """One round; `leaving`: the last of this peer, after its inner steps."""

        def inner_step() -> None:
            self.inner_step()
            self.leaving = leaving

        return drive(self.life.round(), inner_step)

    def offer(self) -> Life[Any]:
        """The first half of a round, until somebody would wait for what comes of it. Returns the rest."""
        rest = self.life.round()
        for wanted in rest:
            if isinstance(wanted, Train):
                self.inner_step()
            elif wanted.future is self.life._outcome:
                break
        return rest

    def catch_up(self) -> None:
        drive(self.peer.catch_up())

    def leave(self) -> None:
        drive(self.peer.leave("left", monotonic_s() + self.peer.site.timeouts.leave_s))

    @property
    def version(self) -> int:
        return self.peer.line.state.version

    @property
    def digest(self) -> str:
        return self.peer.line.state.digest


class LocalWorld:
    """An event loop on a thread, a network in memory, and peers that train on threads of their own."""

    def __init__(
        self,
        count: int = 3,
        directory: Path | None = None,
        site: Site = SITE,
        dtype: torch.dtype = torch.float32,
        **sections: dict[str, Any],
    ) -> None:
        """`directory`: where every peer has a folder with its ledger and its recorded contributions, if anywhere;
        `dtype`: of the parameters."""
        self.directory, self.site, self.dtype = directory, site, dtype
        self.contract = contract(count, **sections)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self.network = MemoryNetwork()
        self.pool = ThreadPoolExecutor(8)
        self.peers: list[LocalPeer] = []
        for index in range(count):
            self.add(f"p{index}")
        list(self.pool.map(LocalPeer.enter, self.peers))

    def _live(self) -> None:
        probe(folder_from_environment())
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def ask(self, question: Callable[[], Any]) -> Any:
        async def answer() -> Any:
            return question()

        return self.run(answer())

    call = ask

    def add(self, name: str) -> LocalPeer:
        peer = LocalPeer(name, self, self.peers[0] if self.peers else None)
        self.peers.append(peer)
        return peer

    def rounds(self, peers: list[LocalPeer], count: int = 1) -> list[list[tuple[Closed, ...] | Skip]]:
        """Every peer does `count` rounds on a thread of its own."""
        return list(self.pool.map(lambda peer: [peer.round() for _ in range(count)], peers))

    def rounds_until_all_vote(self) -> int:
        """Rounds until every peer stands on a commit of whose voters it is one: then one may be cut off, and the others
        go on. The version that they have come to."""
        names = {peer.name for peer in self.peers}

        def all_vote() -> bool:
            commits = [peer.peer.exchange.machine.commit for peer in self.peers]
            return all(commit is not None and {one.peer for one in commit.voters} == names for commit in commits)

        def another_round() -> bool:
            self.rounds(self.peers)
            return self.ask(all_vote)

        until(another_round, "all vote")
        self.settle(self.peers)
        return self.peers[0].version

    def let_in(self, joiner: LocalPeer, members: list[LocalPeer]) -> None:
        """The joiner enters with a version that its members make: they have reached it by then."""
        services = [ExchangeService(member.peer.exchange) for member in members]

        def reached(service: ExchangeService) -> bool:
            peers = json.loads(self.ask(service.on_status))["peers"]
            return any(entry["peer"] == joiner.name and entry["reached"] for entry in peers)

        until(lambda: all(map(reached, services)), f"all reach {joiner.name}")
        self.rounds(members, 1)
        self.pool.submit(joiner.enter).result(DEADLINE_S)

    def settle(self, peers: list[LocalPeer]) -> set[str]:
        """Digests, once all have applied the latest version."""

        def level() -> bool:
            for peer in peers:
                peer.catch_up()
            return len({peer.version for peer in peers}) == 1

        until(level, "all stand at one version")
        return {peer.digest for peer in peers}

    def close(self) -> None:
        for peer in self.peers:
            peer.peer.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()
        self.pool.shutdown(wait=False)
