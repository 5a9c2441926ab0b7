"""The simulated operator of a run: evicts the dead, and begins again when all have died.

It knows what peers that answer say in `diloco status`, and what a person sees on the machines: which processes run, and
the files on the disks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diloco.base.errors import StateError, TicketError, UnreachableError, UsageError
from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.run.operate import evict
from diloco.run.past import checkpoint_at
from diloco.simulate.virtual.network import SimulatedLink
from diloco.simulate.virtual.plans.setup import RPC_S
from diloco.simulate.virtual.timeline import ProcessLoop
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

Status = dict[str, Any]


class SimulatedOperator:
    """A person at a terminal, with the commands of `diloco`."""

    name = "operator"
    send_bps = 0

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.loop = ProcessLoop.on(world.timeline)
        self._lineages: list[str] = []
        """Lineages that it founded anew, the latest last."""
        self._began: SimulatedProcess | None = None
        """The process with which it last founded the run anew."""

    def look(self) -> None:
        """Ask all peers that run for their status, and do what is needed."""
        self._spawn(self._help)

    def evict(self, peer: str) -> None:
        """Declare a peer dead, if none of its processes is what the members take it for."""
        self._spawn(lambda: self._evict_early(peer))

    def evict_former(self, peer: str) -> None:
        """Declare the life of a peer dead that was there before the present one, to all: the word of it comes late."""
        host = self.world.hosts.get(peer)
        former = self.world.machines.former_life(host) if host is not None and host.alive else None
        if former is not None:
            self._spawn(lambda: self._report_dead(peer, former))

    def resume(self) -> None:
        """`diloco peer --resume`: the peer with the latest checkpoint founds the run anew, the others join it."""
        world = self.world
        for host in (*world.hosts.values(), *world.ghosts):
            host.die("the operator begins again")
        world.liars.clear()
        kept = self._checkpoints()
        first = max(kept, key=lambda name: kept[name], default="p0")
        world.goal = min(world.goal, kept.get(first, 0) + 2)
        world.log(first, f"begins again from {'its checkpoint' if first in kept else 'nothing'}")
        self._began = world.start(first, founder=True, resumes=True)
        self._start_all()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop.call_soon(lambda: self.loop.create_task(work()).add_done_callback(_raise))

    # ------------------------------------------------------------ what it sees

    def _running(self) -> list[SimulatedProcess]:
        return [host for host in self.world.hosts.values() if host.alive]

    async def _statuses(self) -> dict[str, Status]:
        """Answers of the peers that run, by name."""
        link = self._link()

        async def ask(host: SimulatedProcess) -> Status | None:
            try:
                tree: Status = json.loads(await link.status(host.address, RPC_S))
                return tree
            except (LinkDown, LinkSlow, LinkRefused):
                return None

        running = self._running()
        answers = await asyncio.gather(*map(ask, running))
        return {host.name: answer for host, answer in zip(running, answers, strict=True) if answer is not None}

    def _link(self) -> SimulatedLink:
        return SimulatedLink(self.world.network, self, RPC_S)  # type: ignore[arg-type]

    def _checkpoints(self) -> dict[str, int]:
        """Version of the checkpoint from which each simulated peer of the beginning would resume."""
        found = dict[str, int]()
        for name, disk in self.world.disks.items():
            with suppress(StateError):
                if name.startswith("p"):
                    found[name] = checkpoint_at(disk.folder).version
        return found

    # ------------------------------------------------------------ what it does

    async def _help(self) -> None:
        if all(host.witness for host in self._running()):
            self.resume()
            return
        statuses = await self._statuses()
        if statuses and all(status["lineage"] in self.world.finished for status in statuses.values()):
            self._stop_left_behind()
            return
        founded = {name: status for name, status in statuses.items() if status["founded"] and _own(status)["in_view"]}
        if not founded:
            waits = any(host.founder and host.founds for host in self._running())
            self._start_all() if waits else self.resume()
            return
        lineage = self._lineage(founded)
        mine = {name: status for name, status in founded.items() if status["lineage"] == lineage}
        if self._restart_strays(statuses, lineage):
            return
        if self._stop_barred(statuses):
            return
        newest = max(status["version"] for status in mine.values())
        if all(status["state_version"] < newest for status in mine.values()):
            self.resume()  # nobody that runs has what was agreed on last
            return
        await self._evict_missing(statuses, mine, newest)

    def _lineage(self, founded: dict[str, Status]) -> str:
        """The lineage that it founded last, or else the one with the most tokens."""
        if self._began is not None and (status := founded.get(self._began.name)):
            return str(status["lineage"])
        return str(max(founded.values(), key=lambda status: (status["tokens"], status["lineage"]))["lineage"])

    def _restart_strays(self, statuses: dict[str, Status], lineage: str) -> bool:
        """Start peers again whose run was founded anew meanwhile: until then they are refused."""
        heals = self.world.plan.without_majority == "continue"
        strays = [name for name, status in statuses.items() if status["lineage"] != lineage]
        strays = [name for name in strays if not (heals and statuses[name]["founded"])]
        for name in strays:
            self.world.hosts[name].die("the operator starts it again")
            self.world.join(name, with_disk=True)
        return bool(strays)

    def _stop_left_behind(self) -> None:
        """Stop peers without which their lineage has ended, as the others' exit codes say: its end is on a disk."""
        for host in self._running():
            host.die("the operator stops it: the run is done")

    def _stop_barred(self, statuses: dict[str, Status]) -> bool:
        """Stop peers whose contributions others refuse for good."""
        barred = {peer for status in statuses.values() for peer in status["barred"]}
        running = [self.world.hosts[peer] for peer in sorted(barred) if self.world.hosts[peer].alive]
        for host in running:
            host.die("the operator stops it: it is barred")
        return bool(running)

    async def _evict_missing(self, statuses: dict[str, Status], mine: dict[str, Status], newest: int) -> None:
        """Evict dead peers where status names their votes, or a mean that only they have; resume if they were ahead."""
        waits = self.world.plan.without_majority == "wait"
        asked: dict[str, list[str]] = {}
        """By member to be asked, names of the dead."""
        for name, status in mine.items():
            decides = status["votes"] >= status["votes_needed"] and status["seats"]
            missing = status["votes_missing"] if waits and not decides else []
            dead = list(dict.fromkeys((*missing, *status["mean_lost_with"])))
            asked[name] = [peer for peer in dead if self._is_over(peer, status, statuses)]
        lost = {peer for dead in asked.values() for peer in dead}
        if lost and any(version > newest for version in self._checkpoints().values()):
            self.resume()
            return
        for peer in sorted(lost):
            await self._evict(peer, next(name for name in asked if peer in asked[name]), statuses)

    def _is_over(self, peer: str, status: Status, statuses: dict[str, Status]) -> bool:
        """Whether the life of a peer that a member's view names is over: no process runs it, or another life does."""
        host = self.world.hosts.get(peer)
        if host is None or not host.alive:
            return True
        named = next((entry["incarnation"] for entry in status["peers"] if entry["peer"] == peer), None)
        return peer in statuses and _own(statuses[peer])["incarnation"] != named

    async def _evict_early(self, peer: str) -> None:
        statuses = await self._statuses()
        knowing = [name for name, status in statuses.items() if _named(status, peer) and name != peer]
        knowing.sort(key=lambda name: statuses[name]["version"])
        if knowing and self._is_over(peer, statuses[knowing[-1]], statuses):
            await self._evict(peer, knowing[-1], statuses)

    async def _evict(self, peer: str, member: str, statuses: dict[str, Status]) -> None:
        entry = _named(statuses[member], peer)
        if entry is None:
            return
        self.world.log("", f"the operator EVICTS {peer}")
        try:
            await evict(self._link(), self.world.hosts[member].address, peer, entry["incarnation"])
        except (UnreachableError, TicketError, UsageError) as error:
            self.world.log("", f"the eviction of {peer} is not heard: {error}")

    async def _report_dead(self, peer: str, incarnation: int) -> None:
        link, operator = self._link(), Member(self.name, 0, "")
        for host in self._running():
            if not host.up or host.name == peer or host.machine.commit is None:
                continue
            rules, lineage = host.machine.rules, host.machine.lineage
            body = m.Evict(peer, incarnation)
            envelope = m.Envelope(rules.run, rules.contract, lineage, operator, 0, 0, 0, "", 0, body)
            self.world.log("", f"the operator tells {host.name} late that a former life of {peer} is over")
            with suppress(LinkDown, LinkSlow, LinkRefused):
                await link.deliver(host.address, envelope)

    def _start_all(self) -> None:
        """Start all simulated peers whom the founder waits for and who are not there."""
        for index in range(self.world.plan.peers):
            self.world.after(0.05, self.world.join, f"p{index}", True)


def _own(status: Status) -> Status:
    """A peer's answer about itself."""
    entry: Status = next(entry for entry in status["peers"] if entry["peer"] == status["answering"])
    return entry


def _named(status: Status, peer: str) -> Status | None:
    """A member's answer about a peer of its view."""
    found: Sequence[Status] = [entry for entry in status["peers"] if entry["peer"] == peer and entry["in_view"]]
    return found[0] if found else None


def _raise(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
