"""One life of a simulated peer: a process that runs the production code, on a loop, a link and a disk of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diloco.base.errors import DilocoError, StateError
from diloco.base.life import POLL_S, Life, Wait
from diloco.base.types import Closed, Commit, Contribution, Counted, Skip
from diloco.exchange.engine import Exchange
from diloco.exchange.service import ExchangeService
from diloco.exchange.work import LanePayloads
from diloco.island import Island
from diloco.observe.event_log import Events
from diloco.outer.line import Line
from diloco.peer.life import PeerLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Kind, Part, StreamHeader, Welcome
from diloco.run.door import Entrance, Parts, lead
from diloco.run.past import past_of
from diloco.run.run import Leading, Run
from diloco.run.witness import witnessed
from diloco.simulate.memory_link import MemoryEndpoint
from diloco.simulate.virtual.lies import falsified, omitting, other_mean
from diloco.simulate.virtual.network import SimulatedLink
from diloco.simulate.virtual.plan import OMITS
from diloco.simulate.virtual.progress import SimulatedProgress
from diloco.simulate.virtual.setup import RPC_S
from diloco.simulate.virtual.timeline import Died, ProcessLoop
from diloco.simulate.virtual.training import SimulatedTraining
from diloco.storage.checkpoint import Checkpoint
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service
from diloco.transport.sockets import SocketCounter

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import SimulatedWorld

LOOK_AGAIN_S = 10.0
"""Time between two looks into the directory."""
RETRY_S = 0.5
"""Pause of a process that nobody lets in."""


class SimulatedProcess:
    """The process of a simulated peer: it runs, is stopped, or is dead. A restart makes another of the same name."""

    def __init__(self, world: SimulatedWorld, name: str, life: int, address: str, founder: bool, resumes: bool) -> None:
        """`resumes`: it goes on from what its folder holds."""
        self.world, self.name, self.life, self.address = world, name, life, address
        self.founder, self.resumes = founder, resumes
        self.witness = name.startswith("w")
        self.loop = ProcessLoop.on(world.timeline)
        self.link = SimulatedLink(world.network, self, RPC_S)
        self.disk = world.disks[name]
        self.thawed_s = 0.0
        self.fuse: FaultFuse | None = None
        self.loses_power = False
        """Its death is that of its machine: what no disk has is lost, and nobody is told."""
        self.lie = ""
        self.leaving = self.gone = False
        """It was asked to leave; it said goodbye."""
        self.service: ExchangeService | None = None
        """Its answers to others, once it listens. From then on it has an exchange and a state machine, too."""
        self.exchange: Exchange
        self.machine: Machine
        self.calls: dict[Any, None] = {}
        """Calls of others that it is answering."""
        self.training: SimulatedTraining | None = None
        self.progress: SimulatedProgress | None = None
        self.run: Run | None = None
        self._rank: PeerRank | None = None
        self._leading: Leading | None = None
        self.ended = ""
        """Why its life came to its end by itself."""
        self.waiting_since_s: float | None = None
        self.waited_s = 0.0
        """In all rounds so far."""
        self._before: Commit | None = None
        """The commit at which its line stood before the last change."""
        self._offered: Contribution | None = None

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return not self.loop.dead

    @property
    def stopped(self) -> bool:
        return self.loop.stopped

    @property
    def working(self) -> bool:
        return self.alive and not self.stopped

    @property
    def now(self) -> float:
        """The simulated process's own clock."""
        return self.loop.time()

    @property
    def up(self) -> bool:
        """Whether the simulated process listens: from then on it has a state machine."""
        return self.service is not None

    @property
    def founds(self) -> bool:
        """Whether the simulated peer lives, and founds a lineage, or is about to."""
        return self.alive and self.founder and (not self.up or self.machine.founder)

    @property
    def _folder(self) -> Path | None:
        """The folder of a simulated peer, where peers have one."""
        return self.disk.folder if self.world.keeps_disks else None

    @property
    def line(self) -> Line:
        """The line of a simulated trainer."""
        assert self._rank is not None
        return self._rank.line

    @property
    def send_bps(self) -> int:
        """The uplink that this simulated peer reports, bits per second."""
        return round(self.world.plan.uplink_mbit(int(self.name[1:])) * 10**6)

    @property
    def entered(self) -> bool:
        """Whether the simulated peer has taken its first inner step."""
        return self.training is not None and self.training.steps > 0

    def begin(self) -> None:
        """Start the simulated process."""
        self.loop.call_soon(self.loop.live, self._life(), self._over)

    def _over(self, error: Exception | None) -> None:
        if error is None:
            self.die(self.ended or "its life is over")
        elif isinstance(error, DilocoError):  # the process ends with an error for a person, who starts it again
            self.die(f"{type(error).__name__}: {error}")
            self.world.started_again(self, with_disk=not isinstance(error, StateError))
        else:
            raise error

    def die(self, why: str) -> None:
        """End the simulated process at once."""
        if not self.alive:
            return
        self.loop.die()
        if self._leading is not None:  # as the system closes the files of a dead process
            peer = self._leading.life.peer
            assert isinstance(peer, Peer)
            peer.events.close()
            peer.journal.close()
        self.world.log(self.name, f"DIES ({why})")
        self.world.network.died(self)
        if self.loses_power:
            self.disk.lose_power(self.world.dice)
        if self.world.timeline.running is self.loop:
            raise Died

    def stop(self) -> None:
        """Stop the simulated process: nothing of it happens until `thaw`."""
        self.loop.stopped = True

    def thaw(self) -> None:
        """Let a simulated process go on that was stopped."""
        if self.alive:
            self.thawed_s = self.world.now
            self.world.log(self.name, "thaws")
            self.loop.go_on()

    def leave(self) -> None:
        """Ask the simulated peer to leave, as by a signal."""
        self.leaving = True

    def leave_now(self) -> None:
        """Have the simulated peer say goodbye whatever is under way, as when nobody counted it within `leave_s`."""
        self.leaving = True
        if self._leading is not None:
            self._leading.life._leave_by_s = self.now  # type: ignore[union-attr]

    def wants_to_leave(self) -> bool:
        return self.leaving

    # ------------------------------------------------------------ what the process does

    def _life(self) -> Life[None]:
        if self.witness:
            yield from self._witness()
            return
        checkpoint = self._checkpoint() if self.resumes else None
        welcome = None if self.founder else (yield from self._welcome())
        endpoint = SimulatedEndpoint(self, welcome)
        run = yield from self._open(endpoint, checkpoint)
        self.run = run
        yield from run.waiting(float("inf"))
        assert self.training is not None
        while not (run.done or run.leaving):
            yield Wait(None, self.training.step_s())
            fresh = self.training.step()
            yield from run.stepping(1, None, fresh)
        self.ended = "the run is done" if run.done else "left"
        yield from run.leaves()

    def _checkpoint(self) -> Checkpoint | None:
        past = past_of(self._folder) if self._folder is not None else None
        return past.checkpoint() if past is not None else None

    def _welcome(self) -> Life[Welcome]:
        """The welcome of a member: of any that answers, of all whose addresses are known."""
        known: Callable[[], Sequence[str]] = lambda: self.world.doors(self)  # noqa: E731
        while True:
            for address in known():
                asked: Future[Welcome] = Future()
                self.loop.create_task(self._hello(address, asked))
                while not asked.done():
                    yield Wait(asked, POLL_S)
                if asked.exception() is None:
                    self.world.log(self.name, f"joins through {address.partition(':')[0]}")
                    return asked.result()
            yield Wait(None, RETRY_S)

    async def _hello(self, address: str, asked: Future[Welcome]) -> None:
        try:
            asked.set_result(await self.link.hello(address, RPC_S))
        except (LinkDown, LinkSlow, LinkRefused) as error:
            asked.set_exception(error)

    def _open(self, endpoint: SimulatedEndpoint, checkpoint: Checkpoint | None) -> Life[Run]:
        """Enter the run as `diloco.run.door.open_run` does, with an observer at each seam."""
        setup = self.world.setup
        island = Island(0, 1, torch.device("cpu"))
        training = self.training = SimulatedTraining(self)
        rank = PeerRank(setup.contract, setup.site, island, training.weights, training)
        self._rank = rank
        rank.counter = NoSockets()
        entrance = Entrance(setup.contract, endpoint, self.name, self._folder, checkpoint, (), self.wants_to_leave)  # type: ignore[arg-type]
        parts = Parts(training.weights, training, "", lambda rank, entrance: training.reader(rank.line, checkpoint))
        with ExitStack() as closing:
            closing.callback(rank.close)
            leading = self._leading = lead(entrance, rank, parts, closing)
            self.progress = SimulatedProgress(self, rank.line)
            self._observe(leading)
            run = Run(rank, self.name, self._folder, 0, leading)
            yield from run.begin()
            closing.pop_all()
        return run

    def _witness(self) -> Life[None]:
        welcome = yield from self._welcome()
        endpoint = SimulatedEndpoint(self, welcome)
        events = Events(None, self.name, ())
        yield from witnessed(self.name, self.world.setup.contract, endpoint, events, self.wants_to_leave)  # type: ignore[arg-type]
        self.ended = "left"

    # ------------------------------------------------------------ what is observed

    def serve(self, service: ExchangeService) -> None:
        """The simulated process listens from now on; its state machine is observed."""
        self.service = service
        exchange, machine = self.exchange, self.machine = service.exchange, service.exchange.machine
        handle, receive, perform = machine.handle, machine.receive, exchange._perform
        invariants, gate = self.world.invariants, self.world.invariants.gate

        def handled(event: m.Event, now: float) -> list[m.Effect]:
            effects = handle(event, now)
            self._seen(effects)
            return effects

        def received(envelope: m.Envelope, now: float) -> tuple[m.Reply, list[m.Effect]]:
            heeded = gate.heeds(self, envelope)
            reply, effects = receive(envelope, now)
            self.world.log_reply(envelope, self, reply)
            gate.on_message(self, envelope, reply, heeded)
            self._seen(effects)
            return reply, effects

        def performed(effects: Sequence[m.Effect]) -> None:
            if self.fuse is None:
                perform(effects)
            else:
                for effect in effects:
                    self._burn(effect, "before")
                    perform([effect])
                    self._burn(effect, "after")

        machine.handle, machine.receive = handled, received  # type: ignore[method-assign]
        exchange._perform = performed  # type: ignore[method-assign]
        self.world.network.listen(self)
        if self.progress is not None:
            invariants.on_start(self)

    def _seen(self, effects: Sequence[m.Effect]) -> None:
        """The state machine of the simulated peer is about to have these effects carried out."""
        invariants = self.world.invariants
        for effect in effects:
            self.world.performed(self, effect)
            invariants.on_effect(self, effect)
            match effect:
                case m.Close(commit):
                    parts = () if self.witness else self.exchange.lane.mean(commit.mean_digest) or ()
                    invariants.on_closed(self, Closed(commit, parts))
                case m.Send(_, m.Envelope(body=m.Goodbye())):
                    self.gone = True
                case m.Resync(source, discarded_tokens):
                    invariants.on_resync(self, source, discarded_tokens)
        invariants.on_machine(self)

    def _burn(self, effect: m.Effect, when: str) -> None:
        fuse = self.fuse
        if fuse is not None and fuse.burns(effect, when):
            self.fuse = None
            fuse.happens()

    def _observe(self, leading: Leading) -> None:
        """Observe the accounts and the offers of a simulated peer."""
        life, progress = leading.life, self.progress
        assert progress is not None
        assert isinstance(life, PeerLife)
        peer = life.peer
        journal, exchange = peer.journal, peer.exchange
        opened, committed, adopted, discarded = journal.opened, journal.committed, journal.adopted, journal.discarded
        offer, exchanged, line = exchange.offer, life.exchanged, peer.line

        def on_opened(contract: Any) -> None:
            progress.opened()
            opened(contract)

        def on_committed(commit: Commit, mine: Counted | None) -> None:
            committed(commit, mine)
            progress.applied(commit, mine)
            self._stands()

        def on_adopted(mine: Counted | None, discarded: int) -> None:
            adopted(mine, discarded)
            progress.adopted(mine, discarded, self._before)
            self._stands()

        def on_discarded(tokens: int, reason: str) -> None:
            discarded(tokens, reason)
            progress.dropped(tokens)

        def on_offer(contribution: Contribution, leaving: bool) -> Future[Skip | None]:
            assert line.sent is not None
            if contribution is not self._offered:
                if self.lie:
                    line.sent = replace(line.sent, contribution=self._falsified(contribution))
                self._offered = line.sent.contribution
                progress.measured(line.sent)
            return offer(line.sent.contribution, leaving)

        def on_exchanged() -> Life[Sequence[Closed] | Skip]:
            self.waiting_since_s = self.world.now
            try:
                return (yield from exchanged())
            finally:
                self.waited_s, self.waiting_since_s = self.waited(self.world.now), None

        journal.opened, journal.committed = on_opened, on_committed  # type: ignore[method-assign]
        journal.adopted, journal.discarded = on_adopted, on_discarded  # type: ignore[method-assign]
        exchange.offer, life.exchanged = on_offer, on_exchanged  # type: ignore[method-assign]

    def _stands(self) -> None:
        """The line of the simulated peer stands at another version, or state."""
        self._before = self.line.commit
        self.world.invariants.on_state(self, self.line)

    def waited(self, now: float) -> float:
        """Virtual seconds in which this simulated life waited for a round."""
        return self.waited_s + (now - self.waiting_since_s if self.waiting_since_s is not None else 0.0)

    # ------------------------------------------------------------ lies

    def _falsified(self, contribution: Contribution) -> Contribution:
        fragment = self.line.layout.fragments[contribution.fragment]
        codecs = [self.line.codecs[fragment.group_of(part)] for part in range(fragment.parts)]
        sizes = [fragment.size_of(part) for part in range(fragment.parts)]
        return replace(contribution, parts=falsified(self.lie, list(contribution.parts), codecs, sizes))

    def lies(self, header: StreamHeader, address: str, parts: AsyncGenerator[Part]) -> AsyncGenerator[Part]:
        """Parts on their way to one receiver, as a simulated owner sends them that may lie."""
        work = self.exchange.lane.work
        lies = self.lie and header.kind is Kind.MEAN and work is not None
        return self._lying(work, address, parts) if lies and work is not None else parts

    async def _lying(self, work: LanePayloads, address: str, parts: AsyncGenerator[Part]) -> AsyncGenerator[Part]:
        others = [member.address for member in work.begin.receivers if member.peer != self.name]
        async for part in parts:
            if self.lie == "two-faced" and address == others[0]:
                yield replace(part, payload=other_mean(part.payload))
            elif self.lie == OMITS:
                names = [entry.peer for entry in work.begin.contributors]
                omitted = omitting([names[place] for place in part.omitted], names, self.name)
                yield replace(part, omitted=tuple(map(names.index, omitted)))
            else:
                yield part

    # ------------------------------------------------------------ what others ask

    def holds(self, commit: Commit) -> bool:
        """Whether this simulated peer is at a version, or can close it with what it has."""
        return self.up and (self.machine.version >= commit.version or self.holds_mean(commit.mean_digest))

    def holds_mean(self, digest: str) -> bool:
        return self.exchange.lane.mean(digest) is not None

    def held(self) -> dict[str, int]:
        """Sizes of all that this simulated peer has in memory: what a long run must not let grow."""
        archive = self.exchange.archive
        return {
            "means": len(archive.means),
            "backlog": len(archive.backlog.after(-1)),
            "tasks": len(self.exchange._tasks),
            "to do": len(self.loop.waiting),
            "roster": sum(1 for _ in self.machine.roster),
            "names": self.machine.names,
        }


class SimulatedRuntime:
    """`diloco.transport.endpoint.Runtime` of a simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self.loop, self.link = process.loop, process.link

    def serve(self, service: Service, listen: str) -> str:
        """Let `service` answer at the address of the simulated process."""
        assert isinstance(service, ExchangeService)
        self._process.serve(service)
        return self._process.address

    def answer_of(self, address: str) -> Welcome | None:
        """None: nobody is asked without a wait."""


class SimulatedEndpoint(MemoryEndpoint):
    """`diloco.transport.endpoint.Endpoint` of a simulated process, beside a directory that never fails."""

    def __init__(self, process: SimulatedProcess, welcome: Welcome | None) -> None:
        super().__init__(process.world.setup.site, SimulatedRuntime(process), welcome)
        self._process = process

    def appear(self, exchange: object) -> SimulatedPresence:  # type: ignore[override]
        """Look into the directory from now on."""
        presence = SimulatedPresence(self._process)
        self._process.loop.create_task(presence.look())
        return presence


class SimulatedPresence:
    """A simulated peer's looks into the directory, as `diloco.transport.dht.Presence` has them."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process, self._ended = process, False

    async def look(self) -> None:
        """Look into the directory when the simulated peer is outside the view, or alone."""
        exchange, world = self._process.exchange, self._process.world
        while not self._ended:
            if exchange.alone:
                exchange.meet(world.directory(self._process))
            await asyncio.sleep(LOOK_AGAIN_S)

    def stop(self) -> None:
        """Look no more."""
        self._ended = True

    end = stop


class NoSockets(SocketCounter):
    """No bytes are counted on sockets in a simulation."""

    def __init__(self) -> None:
        """Does nothing: there are no sockets."""

    def sample(self) -> None:
        """None: no socket is there to be counted."""


class FaultFuse:
    """A fault that strikes a simulated peer before or after the next effect of a kind."""

    def __init__(self, how: str, happens: Callable[[], None]) -> None:
        self.when, _, self.effect = how.partition(" ")
        self.happens = happens

    def burns(self, effect: m.Effect, when: str) -> bool:
        names = {type(effect).__name__}
        if isinstance(effect, m.Send):
            names.add(type(effect.envelope.body).__name__)
        return when == self.when and self.effect in names
