"""One life of a simulated peer: a process that runs the production code, on a loop, a link and a disk of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from diloco.base.errors import DilocoError
from diloco.base.life import Life, Wait
from diloco.base.types import Closed, Commit, Contribution, Skip
from diloco.exchange.engine import Exchange
from diloco.exchange.service import ExchangeService
from diloco.island import Island
from diloco.observe.event_log import Events
from diloco.observe.events import Stamped
from diloco.outer.average import mean_digest
from diloco.outer.line import Line
from diloco.peer.life import PeerLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank
from diloco.peer.waits import COUNTED_SHARE
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Welcome
from diloco.run.door import Entrance, Parts, lead
from diloco.run.past import past_of
from diloco.run.run import Leading, Run
from diloco.run.witness import witnessed
from diloco.simulate.virtual.checkpoints import SimulatedLog, SimulatedSaving
from diloco.simulate.virtual.endpoint import NoSockets, SimulatedEndpoint, asked, welcomed
from diloco.simulate.virtual.follower import SimulatedFollower
from diloco.simulate.virtual.network import SimulatedLink
from diloco.simulate.virtual.oracle.applied import SimulatedSteps
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.oracle.journal import observe_journal
from diloco.simulate.virtual.oracle.progress import SimulatedProgress
from diloco.simulate.virtual.oracle.records import SimulatedRecords
from diloco.simulate.virtual.plans.lies import offered_by
from diloco.simulate.virtual.plans.setup import RPC_S
from diloco.simulate.virtual.ranks.island import SimulatedIsland, SimulatedRanks
from diloco.simulate.virtual.ranks.threads import Died
from diloco.simulate.virtual.ranks.whole import WholeLine, interleaved
from diloco.simulate.virtual.timeline import ProcessLoop
from diloco.simulate.virtual.training import SimulatedTraining
from diloco.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from diloco.exchange.lane import Lane
    from diloco.simulate.virtual.faults import FaultFuse
    from diloco.simulate.virtual.world import SimulatedWorld


class SimulatedProcess:
    """The process of a simulated peer: it runs, is stopped, or is dead. A restart makes another of the same name."""

    listeners: Sequence[Callable[[Stamped], None]] = ()
    """They hear the events of the peer."""

    def __init__(self, world: SimulatedWorld, name: str, life: int, address: str, founder: bool, resumes: bool) -> None:
        """`resumes`: it goes on from what its folder holds."""
        self.world, self.name, self.life, self.address = world, name, life, address
        self.founder, self.resumes, self.by_itself = founder, resumes, False
        self.witness = name.startswith("w")
        size = 1 if self.witness else world.plan.ranks_of(name)
        self.loop = ProcessLoop.on(world.timeline, name)
        self.link = SimulatedLink(world.network, self, RPC_S)
        self.disk = world.disks[name]
        self.ranks = SimulatedRanks(self, size) if size > 1 else None
        """The ranks of its island, where it has several."""
        self.followers = [SimulatedFollower(self, rank) for rank in range(1, size)]
        self.saving: SimulatedSaving | None = None
        self.records = SimulatedRecords(self)
        self.steps: SimulatedSteps
        self.first: SimulatedProcess | None = None
        """Another process in the same folder, which was started before this one."""
        self.thawed_s = 0.0
        self.fuse: FaultFuse | None = None
        self.loses_power = False
        """Its death is that of its machine: what no disk has is lost, and nobody is told."""
        self.syncs_to_death = -1
        """It dies after so many syncs of its next checkpoint; below 0: it does not."""
        self.lie = ""
        self.incarnations: set[int] = set()
        """Lives, as views name them, that this process has been."""
        self.leaving = self.gone = self.drifted = False
        """It was asked to leave; it said goodbye; its outer state is not what its hash says, or not that of others."""
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
        self._measured: Contribution | None = None
        """The contribution that it measured last."""
        self._offered: Contribution | None = None
        """The same, as others get it: a liar's has other bytes."""

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
    def lines(self) -> list[Line]:
        """The lines of the ranks of a simulated trainer, by rank."""
        assert self._rank is not None
        return [self._rank.line, *(other.line for other in self.followers if other.line is not None)]

    @property
    def line(self) -> Line:
        """The line of a simulated trainer, with all parts."""
        if self.ranks is None:
            return self.lines[0]
        return WholeLine(lambda: self.lines, self.world.setup.layout, self.name)  # type: ignore[return-value]

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of the ranks of a simulated trainer, by rank."""
        return [self.exchange.lane, *(other.lane for other in self.followers if other.lane is not None)]

    @property
    def send_bps(self) -> int:
        """The uplink that each rank of this simulated peer reports, bits per second."""
        return round(self.world.plan.uplink_mbit(int(self.name[1:])) * 10**6 / (1 + len(self.followers)))

    @property
    def has_folder(self) -> bool:
        """Whether the simulated process writes to its folder."""
        return self.alive and self._leading is not None

    @property
    def entered(self) -> bool:
        """Whether the simulated peer has taken its first inner step."""
        return self.training is not None and self.training.steps > 0

    def begin(self) -> None:
        """Start the simulated process."""
        life = self._behind_disk(self._life()) if self.world.slow_disks else self._life()
        if self.ranks is None:
            self.loop.call_soon(self.loop.live, life, self._over)
            return
        self.ranks.start(life, self._over)
        for other in self.followers:
            self.ranks.start(other.life(), self._fails)

    def _fails(self, error: Exception | None) -> None:
        if error is not None:  # of another rank: it takes all of them along
            self._over(error)

    def _over(self, error: Exception | None) -> None:
        if error is None:
            if not (self.leaving or self.witness or (self.run is not None and self.run.done)):
                raise Violation("I7", f"{self.name} leaves, and nobody asked it to")
            self.die(self.ended or "its life is over")
        elif isinstance(error, DilocoError):  # the process ends with an error for a person, who starts it again
            self.world.started_again(self, with_disk=self.world.endings.ends(self, error))
            self.die(f"{type(error).__name__}: {error.cause}".replace(f"{self.disk.root}/", ""))
        else:
            raise error

    def die(self, why: str) -> None:
        """End the simulated process at once."""
        if not self.alive:
            return
        self.loop.die()
        self.disk.tears = None
        self.close_files()
        self.world.log(self.name, f"DIES ({why})")
        self.world.network.died(self)
        if self.loses_power:
            self.disk.lose_power(self.world.dice)
        if self.world.timeline.running is self.loop:
            raise Died

    def close_files(self) -> None:
        """Close the files of a dead process, as its system does."""
        if self._leading is not None:
            peer = self._leading.life.peer
            assert isinstance(peer, Peer)
            peer.events.close()
            peer.journal.close()

    def stop(self) -> None:
        """Stop the simulated process: nothing of it happens until `thaw`."""
        self.loop.stopped = True

    def thaw(self) -> None:
        """Let a simulated process go on that was stopped."""
        if self.alive:
            self.thawed_s = max(self.thawed_s, self.world.now)
            self.world.log(self.name, "thaws")
            self.loop.go_on()

    def leave(self) -> None:
        """Ask the simulated peer to leave, as by a signal."""
        self.leaving = True

    def leave_now(self) -> None:
        """Have the simulated peer leave whatever is under way, as when nobody counted it in its time for that."""
        self.leaving = True
        if self._leading is not None:
            life = self._leading.life
            life._leave_by_s = self.now + (1.0 - COUNTED_SHARE) * life.site.timeouts.leave_s  # type: ignore[union-attr]

    # ------------------------------------------------------------ what the process does

    def _life(self) -> Life[None]:
        if self.witness:
            yield from self._witness()
            return
        past = past_of(self.disk.folder) if self.resumes else None
        checkpoint = self.records.found(past.checkpoint() if past is not None else None) if self.resumes else None
        self.by_itself = self.name in self.world.by_themselves and past is not None and checkpoint is not None
        welcome: Welcome | None = None
        if past is not None and self.by_itself:
            welcome = yield from asked(self, past)
        elif not self.founder:
            welcome = yield from welcomed(self)
        endpoint = SimulatedEndpoint(self, welcome)
        run = self.run = yield from self._open(endpoint, checkpoint)
        yield from run.waiting(float("inf"))
        assert self.training is not None
        while not (run.done or run.leaving):
            yield Wait(None, self.training.step_s())
            fresh = self.training.step()
            yield from run.stepping(1, None, fresh)
        self.ended = "the run is done" if run.done else "left"
        yield from run.leaves()
        if run.done:
            self.world.ends(self, run)

    def _behind_disk(self, life: Life[None]) -> Life[None]:
        """A life whose training side waits for syncs that take their time; its exchange goes on meanwhile."""
        for wanted in life:
            if owed_s := self.disk.owed():
                self.thawed_s = self.world.now + owed_s  # what it waits for until then is its disk
                yield Wait(None, owed_s)
            yield wanted

    def _open(self, endpoint: SimulatedEndpoint, checkpoint: Checkpoint | None) -> Life[Run]:
        """Enter the run as `diloco.run.door.open_run` does, with an observer at each seam."""
        setup = self.world.setup
        island = Island(0, 1, torch.device("cpu")) if self.ranks is None else SimulatedIsland(self.ranks, 0)
        about = {"contract": setup.contract.to_json(), "name": self.name, "directory": "", "steps": 0}
        for text in ("", json.dumps(about)):  # no error, and what `open_run` tells the other ranks
            island.share(text)
        training = self.training = self._training(island)
        rank = PeerRank(setup.contract, setup.site, island, training.weights, training)
        self._rank, self.saving = rank, SimulatedSaving(self, rank.saver)
        rank.counter = NoSockets()
        folder = self.disk.folder if self.world.keeps_disks else None
        entrance = Entrance(
            setup.contract,
            endpoint,  # type: ignore[arg-type]
            self.name,
            folder,
            checkpoint,
            self.listeners,
            lambda: self.leaving,
            joins=not self.by_itself,
        )
        parts = Parts(training.weights, training, "", lambda rank, entrance: training.reader(rank.line, checkpoint))
        with ExitStack() as closing:
            closing.callback(rank.close)
            if self.first is not None and not self.first.has_folder:
                self.die("the first process has ended meanwhile")
            leading = self._leading = lead(entrance, rank, parts, closing)
            if self.first is not None:
                raise Violation("I5", f"two processes of {self.name} write to the same folder")
            self._observe(leading)
            run = Run(rank, self.name, folder, 0, leading)
            yield from run.begin()
            closing.pop_all()
        return run

    def _training(self, island: Island) -> SimulatedTraining:
        return SimulatedTraining(self, island)

    def _witness(self) -> Life[None]:
        welcome = yield from welcomed(self)
        endpoint = SimulatedEndpoint(self, welcome)
        events = Events(None, self.name, ())
        yield from witnessed(self.name, self.world.setup.contract, endpoint, events, lambda: self.leaving)  # type: ignore[arg-type]
        self.ended = "left"

    # ------------------------------------------------------------ what is observed

    def serve(self, service: ExchangeService) -> None:
        """The simulated process listens from now on; its state machine is observed."""
        self.service = service
        self.world.machines.listens(self)
        exchange, machine = self.exchange, self.machine = service.exchange, service.exchange.machine
        handle, receive, perform = machine.handle, machine.receive, exchange._perform
        invariants, gate = self.world.invariants, self.world.invariants.gate

        def handled(event: m.Event, now: float) -> list[fx.Effect]:
            if isinstance(event, m.Saved):
                invariants.ballots.on_saved(self, event)
            effects = handle(event, now)
            self._seen(effects)
            invariants.conduct.on_event(self, event)
            invariants.departures.look(self, event)
            if isinstance(event, m.MeanArrived):
                self.world.mean_arrived(self, event)
            return effects

        def received(envelope: m.Envelope, now: float) -> tuple[m.Reply, list[fx.Effect]]:
            heeded, before = gate.heeds(self, envelope), invariants.conduct.before(self)
            reply, effects = receive(envelope, now)
            self.world.log_reply(envelope, self, reply)
            gate.on_message(self, envelope, reply, heeded)
            self.world.promise.on_message(self, envelope, reply)
            invariants.departures.on_message(self, envelope, reply)
            self._seen(effects)
            invariants.conduct.on_message(self, envelope, reply, effects, before)
            invariants.departures.look(self)
            return reply, effects

        def performed(effects: Sequence[fx.Effect]) -> None:
            if self.fuse is None:
                perform(effects)
            else:
                for effect in effects:
                    self._burn(effect, "before")
                    perform([effect])
                    self._burn(effect, "after")

        report = self.loop.report_errors
        machine.handle, machine.receive = report(handled, Violation), report(received, Violation)  # type: ignore[method-assign]
        exchange._perform = performed  # type: ignore[method-assign]
        self.world.network.listen(self)
        invariants.ballots.resumes(self)
        if self.progress is not None:
            invariants.on_start(self)

    def _seen(self, effects: Sequence[fx.Effect]) -> None:
        """The state machine of the simulated peer is about to have these effects carried out."""
        invariants = self.world.invariants
        self.incarnations.add(self.machine.me.incarnation)
        for effect in effects:
            self.world.performed(self, effect)
            invariants.on_effect(self, effect)
            match effect:
                case fx.Close(commit):
                    parts = () if self.witness else self.mean(commit.mean_digest) or ()
                    invariants.on_closed(self, Closed(commit, parts))
                case fx.Send(_, m.Envelope(body=m.Goodbye())):
                    self.gone = True
                case fx.Resync(source, discarded_tokens):
                    invariants.on_resync(self, source, discarded_tokens)
        invariants.on_machine(self)
        invariants.reductions.on_effects(self, effects)
        invariants.conduct.on_effects(self, effects)

    def _burn(self, effect: fx.Effect, when: str) -> None:
        """Let a fault strike that waited for this effect: before it, or once it is on its way."""
        if self.fuse is not None and self.fuse.burns(effect, when):
            fuse, self.fuse = self.fuse, None
            if when == "before":
                fuse.happens()
            else:
                self.loop.call_soon(fuse.happens)

    def _observe(self, leading: Leading) -> None:
        """Observe the accounts and the offers of a simulated peer."""
        life = leading.life
        assert isinstance(life, PeerLife)
        peer = life.peer
        progress = self.progress = SimulatedProgress(self, self.line, peer.journal)
        self.steps, self._log = SimulatedSteps(self, peer), SimulatedLog(self, peer.exchange.lane)
        observe_journal(self, peer)
        offer, exchanged = peer.exchange.offer, life.exchanged

        def on_offer(contribution: Contribution, leaving: bool) -> Future[Skip | None]:
            if contribution is not self._measured:
                self._measured, self._offered = contribution, offered_by(self, contribution)
                sent = self.line.sent
                assert sent is not None
                lies = self._offered is not contribution
                progress.measured(replace(sent, contribution=self._offered) if lies else sent)
            assert self._offered is not None
            return offer(self._offered, leaving)

        def on_exchanged() -> Life[Sequence[Closed] | Skip]:
            self.waiting_since_s = self.world.now
            progress.begins_round()
            try:
                outcome = yield from exchanged()
            finally:
                self.waited_s, self.waiting_since_s = self.waited(self.world.now), None
            progress.given(outcome)
            return outcome

        peer.exchange.offer, life.exchanged = on_offer, on_exchanged  # type: ignore[method-assign]

    def waited(self, now: float) -> float:
        """Virtual seconds in which this simulated life waited for a round."""
        return self.waited_s + (now - self.waiting_since_s if self.waiting_since_s is not None else 0.0)

    # ------------------------------------------------------------ what others ask

    def holds(self, commit: Commit) -> bool:
        """Whether this simulated peer is at a version, or can close it with what it has."""
        return self.up and (self.machine.version >= commit.version or self.holds_mean(commit.mean_digest))

    def mean(self, digest: str) -> Sequence[bytes] | None:
        """The parts of a mean that all ranks with a part of it keep, or are about to; None while one does not."""
        own, *others = self.lanes
        if self.ranks is None or (parts := own.mean(digest)) is None:
            return own.mean(digest)
        by_lane = [parts, *(self.ranks.kept(1 + i, lane, digest) for i, lane in enumerate(others[: len(parts) - 1]))]
        there = [parts for parts in by_lane if parts is not None]
        return interleaved(there) if len(there) == len(by_lane) else None

    def holds_mean(self, digest: str) -> bool:
        parts = self.mean(digest)
        return parts is not None and mean_digest(parts) == digest

    def held(self) -> dict[str, int]:
        """Sizes of all that this simulated peer has in memory: what a long run must not let grow."""
        archive = self.exchange.archive
        return {
            "means": len(archive.means),
            "backlog": sum(closed.commit.moves for closed in archive.backlog.after(-1)),
            "tasks": len(self.exchange._tasks),
            "to do": len(self.loop.waiting),
            "roster": sum(1 for _ in self.machine.roster),
            "names": self.machine.names,
        }
