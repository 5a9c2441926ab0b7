"""One life of a simulated peer, the exchange's half: does with effects what `diloco.exchange.engine` does.

Threads and tasks of the engine are events in virtual time here; the machine and the bytes (`LanePayloads`, codecs,
digests) are the production ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from diloco.base.types import Closed, Commit, Contribution, Member, Skip
from diloco.compress import PayloadError
from diloco.exchange.archive import Backlog, Snapshots, make_offer
from diloco.exchange.work import BadContribution, LanePayloads
from diloco.outer.average import is_mean_of, mean_digest
from diloco.outer.state import OuterState, state_bytes
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Kind, StateOffer
from diloco.simulate.virtual.lies import omitting, other_mean
from diloco.simulate.virtual.network import Stream
from diloco.simulate.virtual.plan import OMITS
from diloco.simulate.virtual.training import SimulatedTraining

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import SimulatedWorld

TICK_S = 0.25
LOOK_AGAIN_S = 10.0
WORK_S = 0.004
"""Averaging or hashing takes about so long."""
NO_CLOCK_US = 400
"""Time between the starts of lives on a machine whose clock begins anew each time: all of them before the first life
of any peer but the founder, which is 10 ms old, and by more than `diloco audit` takes for one process."""


class SimulatedHost:
    """The process of a simulated peer: it runs, is stopped, or is dead. A restart makes another of the same name."""

    def __init__(self, world: SimulatedWorld, name: str, life: int, address: str, lineage: str, founder: bool) -> None:
        setup = world.setup
        self.world = world
        self.name = name
        self.life = life
        self.alive, self.stopped = True, False
        self.thawed_s = 0.0
        self.clock_offset_s = 0.0
        self.fuse: FaultFuse | None = None
        self.lie = ""
        me = Member(name, new_incarnation(world, name), address, witness=name.startswith("w"))
        self.machine = Machine(me, setup.rules, setup.timing, lineage, founder, self.now)
        self.address, self.witness = me.address, me.witness
        self.behind = False
        self._reply: m.Reply = m.Reply.OK
        self._reply_since_s = 0.0
        self.training = SimulatedTraining(self)
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._work: LanePayloads | None = None
        self._outlets: dict[int, list[Stream]] = {}
        self._resync_from: list[Member] = []
        self._door: list[tuple[Stream, float]] = []
        self._contribution: Contribution | None = None
        self._waiting = False
        self._means: OrderedDict[str, Sequence[bytes]] = OrderedDict()
        self._backlog = Backlog(setup.rules.backlog_versions, state_bytes(setup.layout, setup.optimizer))
        self._closed: deque[Closed] = deque()
        self.snapshots = Snapshots(self._backlog)
        self.state: OuterState | None = None
        self.state_commit: Commit | None = None
        world.after(world.dice.random() * TICK_S, self._tick)
        self._look_up()

    # ------------------------------------------------------------ life

    @property
    def now(self) -> float:
        """The simulated machine's own clock: virtual time and an offset."""
        return self.world.now + self.clock_offset_s

    @property
    def send_bps(self) -> int:
        """The uplink that this simulated peer reports, bits per second."""
        return round(self.world.plan.uplink_mbit(int(self.name[1:])) * 10**6)

    @property
    def working(self) -> bool:
        return self.alive and not self.stopped

    def due(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Let something happen to this simulated process, now or when it thaws."""
        if self.stopped:
            self._inbox.append((function, arguments))
        elif self.alive:
            function(*arguments)

    def later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.world.after(delay_s, self.due, function, arguments)

    def die(self, why: str) -> None:
        if self.alive:
            self.alive = self.stopped = False
            self.world.log(self.name, f"DIES ({why})")

    def thaw(self) -> None:
        if not self.alive:
            return
        self.stopped = False
        self.thawed_s = self.world.now
        self.world.log(self.name, "thaws")
        waiting, self._inbox = self._inbox, []
        for function, arguments in waiting:
            self.due(function, arguments)

    def _tick(self) -> None:
        if not self.alive:
            return
        self.world.after(TICK_S, self._tick)
        if not self.stopped:
            self.feed(m.Tick())

    def _look_up(self) -> None:
        """Outside the view, or alone: look into the simulated directory, as `diloco.transport.dht` does."""
        if not self.alive:
            return
        self.world.after(LOOK_AGAIN_S, self._look_up)
        if (not self.machine.in_view or self.machine.alone) and not self.stopped:
            self.machine.roster.meet(self.world.directory(self), self.now)

    # ------------------------------------------------------------ for the training side

    def offer(self, contribution: Contribution, leaving: bool) -> None:
        """Offer the simulated peer's contribution; `training.outcome` gets what becomes of it."""
        self._waiting = True
        if self._closed:
            self._answer(self.take_closed())
            return
        self._contribution = contribution
        c, slack_s = contribution, self.training.slack_s
        self.feed(m.Offered(m.Offer(c.base_version, c.weight, c.tokens, c.blocks, leaving, self.send_bps, slack_s)))

    def take_closed(self) -> Sequence[Closed]:
        taken = tuple(self._closed)
        self._closed.clear()
        return taken

    def hold(self, state: OuterState, commit: Commit | None, copied: bool = False) -> None:
        self.state, self.state_commit = state, commit
        if copied:
            later = self._backlog.after(state.version)
            self._closed = deque(later)
            self.behind = bool(later) and later[0].commit.version != state.version + 1
        self.snapshots.forget(state.version, self.now)
        self.feed(m.StateHeld(state.version, state.digest, commit if copied else None))

    # ------------------------------------------------------------ events and effects

    def feed(self, event: m.Event) -> None:
        if self.alive:
            self._perform_all(self.machine.handle(event, self.now))

    def receive(self, envelope: m.Envelope, sender: SimulatedHost | None) -> None:
        gate = self.world.invariants.gate
        heeded = gate.heeds(self, envelope)
        reply, effects = self.machine.receive(envelope, self.now)
        self.world.log_reply(envelope, self, reply)
        gate.on_message(self, envelope, reply, heeded)
        if sender is not None and not self.world.network.blocked(self.name, sender.name):
            sender.due(sender.note_reply, (reply,))
        if effects:
            self._perform_all(effects)
        else:
            self.world.invariants.ballots.on_machine(self)

    def note_reply(self, reply: m.Reply) -> None:
        if reply in (m.Reply.STALE, m.Reply.REPLAYED):
            return
        if reply is not self._reply:
            self._reply, self._reply_since_s = reply, self.now

    @property
    def fenced_for_s(self) -> float:
        """Seconds for which others have taken this simulated peer for another life of its name."""
        return self.now - self._reply_since_s if self._reply is m.Reply.FENCED else 0.0

    def unreachable(self, member: Member, proven: bool) -> None:
        self.due(self.feed, (m.Unreachable(member, proven),))

    def _perform_all(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            if self.fuse is not None and self.fuse.burns(effect, "before"):
                self._burn()
            if not self.alive:
                return
            self._perform(effect)
            if self.fuse is not None and self.fuse.burns(effect, "after"):
                self._burn()
        self.world.invariants.on_machine(self)

    def _burn(self) -> None:
        fuse, self.fuse = self.fuse, None
        assert fuse is not None
        fuse.happens()

    def _perform(self, effect: m.Effect) -> None:
        self.world.performed(self, effect)
        self.world.invariants.on_effect(self, effect)
        match effect:
            case m.Send(to, envelope):
                self.world.network.send(self, to, envelope)
            case m.BeginReduction(begin):
                self._begin(begin)
            case m.RepairReduction(repair):
                self._repair(repair)
            case m.SendContribution():
                self._send_contribution(effect)
            case m.FoldPart(version, attempt, part, omitted):
                self.later(0.0, self._fold, (version, attempt), part, omitted)
            case m.SendMean(version, attempt, part, omitted):
                self._put_in_outlets((version, attempt), part, omitted)
            case m.SealMean(version, attempt):
                self.later(0.0, self._seal, (version, attempt))
            case m.FetchMean(commit, sources):
                self._fetch_mean(commit, list(sources))
            case m.CatchUp(source, _):
                self._catch_up(source)
            case m.Close(commit):
                self._close(commit)
            case m.GiveUp(reason, exposed):
                self._answer(Skip(reason, exposed))
            case m.Resync(source, discarded_tokens):
                self._leave_lineage(source, discarded_tokens)

    # ------------------------------------------------------------ reducing

    def _begin(self, begin: m.Begin) -> None:
        setup = self.world.setup
        fragment = setup.layout.fragments[self.machine.fragment]
        work = self._work = LanePayloads(begin, self.name, fragment, setup.codecs, setup.max_norm_ratio, setup.radial)
        if self._contribution is not None:
            work.take_own(self._contribution)
        self._outlets = {}
        self._open_outlets(work, work.owned())
        self._open_door()

    def _repair(self, repair: m.Repair) -> None:
        work = self._work
        if work is not None and work.key == (repair.version, repair.attempt):
            self._open_outlets(work, work.repair(repair.generation, repair.spans))
            self._open_door()

    def _open_outlets(self, work: LanePayloads, parts: Sequence[int]) -> None:
        """A simulated stream to every receiver for these parts of mine, which are yet to be averaged."""
        receivers = [member for member in work.begin.receivers if member.peer != self.name]
        streams = [Stream(self, member, Kind.MEAN, work.key, work.generation) for member in receivers]
        self._outlets |= dict.fromkeys(parts, streams)

    def _send_contribution(self, effect: m.SendContribution) -> None:
        contribution = self._contribution
        if contribution is None:
            return
        stream = Stream(self, effect.to, Kind.CONTRIBUTION, (effect.version, effect.attempt), effect.generation)
        for part in range(effect.span.start, effect.span.stop):
            self.world.network.put(stream, part, contribution.parts[part])

    def _put_in_outlets(self, key: tuple[int, int], part: int, omitted: tuple[str, ...]) -> None:
        work = self._work
        if work is None or work.key != key:
            return
        payload = work.mean[part]
        assert payload is not None
        if self.lie == OMITS:
            omitted = omitting(omitted, [entry.peer for entry in work.begin.contributors], self.name)
        for index, stream in enumerate(self._outlets.pop(part, ())):
            sent = other_mean(payload) if self.lie == "two-faced" and index == 0 else payload
            self.world.network.put(stream, part, sent, omitted)

    def _fold(self, key: tuple[int, int], part: int, omitted: tuple[str, ...]) -> None:
        work = self._work
        if work is None or work.key != key:
            return
        try:
            mean, _ = work.fold(part, omitted)
        except BadContribution as error:
            self.later(WORK_S, self.feed, m.ContributionRefused(*key, error.sender, str(error)))
        else:
            self.later(WORK_S, self._folded, work, part, mean)

    def _folded(self, work: LanePayloads, part: int, mean: bytes) -> None:
        if work.keep(part, mean):
            self.feed(m.PartFolded(*work.key, part))

    def _seal(self, key: tuple[int, int]) -> None:
        work = self._work
        parts = work.whole() if work is not None and work.key == key else None
        if parts is not None:
            self.later(WORK_S, self._sealed, key, parts)

    def _sealed(self, key: tuple[int, int], parts: Sequence[bytes]) -> None:
        digest = mean_digest(parts)
        self._keep_mean(digest, parts)
        self.feed(m.MeanHeld(digest, *key))

    def _keep_mean(self, digest: str, parts: Sequence[bytes]) -> None:
        self._means[digest] = parts
        self._means.move_to_end(digest)
        while len(self._means) > self.world.setup.rules.means_kept:
            self._means.popitem(last=False)

    # ------------------------------------------------------------ parts that arrive

    def arrive(self, stream: Stream, entry: tuple[int, bytes, tuple[str, ...]]) -> None:
        """A part reaches the simulated peer; before its `Begin` or `Repair` of that attempt, it waits at the door."""
        if not stream.let_in:
            machine, rules = self.machine, self.world.setup.rules
            reply = machine.admits(rules.run, rules.contract, stream.lineage, stream.member, self.now)
            stream.let_in = reply is m.Reply.OK
            stream.broken = not stream.let_in
            if stream.broken:
                return
        stream.waiting.append(entry)
        self._door.append((stream, self.now + self.world.setup.timing.stall_s))
        self._open_door()

    def _open_door(self) -> None:
        door, self._door = self._door, []
        for stream, deadline_s in door:
            if not self._enter(stream) and self.now < deadline_s and not stream.broken:
                self._door.append((stream, deadline_s))

    def _enter(self, stream: Stream) -> bool:
        """Take the parts that wait in a simulated stream, or break it off; False: too early for it."""
        work = self._work
        early = work is None or (*work.key, work.generation) < (*stream.key, stream.generation)
        if early and self.machine.making <= stream.key[0]:
            return False
        if work is None or work.key != stream.key:
            stream.broken = True
            return True
        waiting, stream.waiting = stream.waiting, []
        for part, payload, omitted in waiting:
            if self._work is not work or not self._take(work, stream, part, payload, omitted):
                stream.broken = True
                break
        return True

    def _take(self, work: LanePayloads, stream: Stream, part: int, payload: bytes, omitted: tuple[str, ...]) -> bool:
        sender = stream.sender.name
        if not work.expects(stream.kind, sender, part) or len(payload) > work.max_bytes(stream.kind, part):
            return False
        if stream.kind is Kind.CONTRIBUTION:
            work.put_contribution(sender, part, payload)
            self.feed(m.ContributionArrived(*work.key, sender, part))
            return True
        try:
            work.check_mean(part, payload)
        except PayloadError as error:
            self.feed(m.ContributionRefused(*work.key, sender, f"sent a mean that does not decode: {error}"))
            return False
        work.put_mean(part, payload)
        self.feed(m.MeanArrived(*work.key, sender, part, omitted))
        return True

    # ------------------------------------------------------------ closing versions

    def _close(self, commit: Commit) -> None:
        parts = self._means[commit.mean_digest] if commit.mean_digest and not self.witness else ()
        closed = Closed(commit, parts)
        self.world.invariants.on_closed(self, closed)
        self._backlog.add(closed, self.snapshots.oldest_version())
        self._work = None
        self._contribution = None
        if not self.witness:
            self._closed.append(closed)
        if self._waiting:
            self._answer(self.take_closed())
        self._open_door()

    def _answer(self, outcome: Sequence[Closed] | Skip) -> None:
        if self._waiting:
            self._waiting = False
            self.later(0.0, self.training.outcome, outcome)

    def _fetch_mean(self, commit: Commit, sources: list[Member]) -> None:
        if not sources:
            return
        source = sources.pop(0)

        def take(parts: Sequence[bytes] | None) -> None:
            if parts is None or not is_mean_of(parts, commit, self.world.setup.layout):
                self._fetch_mean(commit, sources)
                return
            self._keep_mean(commit.mean_digest, parts)
            self.feed(m.MeanHeld(commit.mean_digest))

        ask = self.world.network.ask
        ask(self, source, lambda other: other.mean(commit.mean_digest), take, lambda: self._fetch_mean(commit, sources))

    def _catch_up(self, source: Member) -> None:
        since = self._since()
        ask = self.world.network.ask
        ask(
            self,
            source,
            lambda other: other.commits_since(since),
            lambda missed: self._learn(since, missed),
            lambda: None,
        )

    def _since(self) -> int:
        return self.machine.version if self.machine.commit is not None else self.machine.version - 1

    def _learn(self, since: int, missed: Sequence[Closed]) -> None:
        if not missed and since == self._since():
            self.behind = True
            self.feed(m.Withdrawn(m.TOO_FAR))
        for closed in missed:
            if not is_mean_of(closed.parts, closed.commit, self.world.setup.layout):
                return
            self._keep_mean(closed.commit.mean_digest, closed.parts)
            self.feed(m.Learned(closed.commit))

    def _leave_lineage(self, source: Member, discarded_tokens: int) -> None:
        self.world.invariants.on_resync(self, source, discarded_tokens)
        self._backlog.clear()
        self._work = None
        self._contribution = None
        self._closed.clear()
        self._resync_from = [source]
        self.behind = True

    def copied(self) -> None:
        """Note that the simulated peer's copy of the state is complete."""
        self.behind = False
        self._resync_from = []

    def sources(self) -> list[Member]:
        """Simulated peers that can give the state: of the view, or before there is one, those heard of."""
        machine = self.machine
        others = [member for member in machine.alive() if member != machine.me and not member.witness]
        heard = [entry for entry in machine.roster if entry.heartbeat is not None and entry.heartbeat.founded]
        known = [entry.member for entry in heard if not entry.left and not entry.member.witness]
        return others or [*self._resync_from, *known]

    def held(self) -> dict[str, int]:
        """Sizes of all that this simulated peer has in memory: what a long run must not let grow."""
        return {
            "means": len(self._means),
            "backlog": len(self._backlog.after(-1)),
            "at the door": len(self._door),
            "to do": len(self._inbox),
            "roster": sum(1 for _ in self.machine.roster),
            "names": self.machine.names,
        }

    # ------------------------------------------------------------ what others ask

    def state_offer(self) -> StateOffer | None:
        """The simulated peer's offer of its state; without the old view's commit until a resumed run is founded."""
        if self.state is None:
            return None
        commit = self.state_commit if self.machine.commit is not None else None
        return self.snapshots.offer(self.state, make_offer(self.state, commit), self.now)

    def holds(self, commit: Commit) -> bool:
        """Whether this simulated peer is at a version, or can close it with what it has."""
        return self.machine.version >= commit.version or commit.mean_digest in self._means

    def holds_mean(self, digest: str) -> bool:
        return digest in self._means

    def mean(self, digest: str) -> Sequence[bytes] | None:
        return self._means.get(digest)

    def commits_since(self, version: int) -> Sequence[Closed]:
        return self._backlog.since(version)


def new_incarnation(world: SimulatedWorld, name: str) -> int:
    """The incarnation of a simulated peer, larger at each start, as `diloco.base.clock.new_incarnation`; without a
    clock, since that is lost."""
    if name in world.clockless:
        world.clockless[name] += 1
        return world.clockless[name] * NO_CLOCK_US
    return round(world.now * 1_000_000) + 1


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
