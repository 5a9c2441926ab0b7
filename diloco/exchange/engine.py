"""The exchange: drives the protocol's state machine with real bytes, a real link and the local clock.

It runs on a thread and event loop of its own, so that neither network nor averaging holds up the inner steps. Calls of
the training side (`offer`, `hold`, `report`) return at once; answers are futures. Everything else happens in reaction
to other peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.life import POLL_S, done
from diloco.base.threads import one_thread
from diloco.base.types import Closed, Commit, Contribution, Member, Progress, Skip
from diloco.exchange.archive import Archive, Untaken
from diloco.exchange.background import ExchangeTasks, settle
from diloco.exchange.copying import StateCopier
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import Lanes, LaneWire, RemoteLane
from diloco.exchange.lives import Lives, Meetings
from diloco.exchange.log import LaneLog
from diloco.exchange.missed import Fetcher
from diloco.exchange.terms import Terms
from diloco.exchange.votes import Votes
from diloco.exchange.work import MeanContents
from diloco.outer.state import OuterState, state_bytes
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Kind, StateOffer, StreamHeader
from diloco.protocol.vote import Restored
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

logger = logging.getLogger(__name__)

TICKS_PER_HEARTBEAT = 10
_FAILPOINTS = {m.Accept: "accept", m.Propose: "propose", m.Committed: "commit"}
"""Messages before and after which a drill can place a death."""


class Exchange(ExchangeTasks):
    """The exchange of one peer: its protocol with real bytes, on rank 0. `ExchangeService` answers other peers."""

    def __init__(
        self,
        me: Member,
        terms: Terms,
        link: Link,
        lineage: str,
        founder: bool,
        loop: asyncio.AbstractEventLoop,
        on_reason: Callable[[str, bool], None] = lambda reason, routine: None,
        forks: tuple[m.Fork, ...] = (),
        log: LaneLog | None = None,
        votes: Votes | None = None,
        boot: int = 0,
        restored: Restored | None = None,
    ) -> None:
        """`lineage` and the `forks` that led to it: the founder's own, or those of the member that welcomed us."""
        super().__init__(loop)
        self.terms = terms
        self.link = link
        self.machine = Machine(me, terms.rules, terms.timing, lineage, founder, monotonic_s(), forks, boot, restored)
        self.votes = votes or Votes()
        self.directory: tuple[str, ...] = ()
        self.overlap_tokens = 0
        """Tokens of the inner steps that go on while a contribution is on its way."""
        self.behind = False
        """Only a copy of the state helps: others keep no commits from ours on, or made the next on another state."""
        self._on_reason = on_reason
        self.lane = Lane(terms.lane, link, loop, log)
        self.lane.head = self
        self.lanes = Lanes(self.lane)
        rules, state = terms.rules, state_bytes(terms.lane.layout, terms.lane.optimizer)
        self.archive = Archive(self.lanes, rules.means_kept, rules.backlog_versions, state, terms.timing.stall_s)
        self.hasher = one_thread("hash")  # of states that joiners ask for
        self._fetcher = Fetcher(terms, link, self.machine, self.archive, self._feed)
        self.lives = Lives(link, terms.timing)
        self._meetings = Meetings(terms.contract_json, self.lives, self.machine, self._feed)
        self._contents = MeanContents()
        self.moved = asyncio.Condition()
        """Notified when an attempt, a version or the state has changed."""
        self.copying = StateCopier(link, terms.lane, self.machine, self.archive, self.lanes)
        self._waiting: Future[Skip | None] | None = None
        """Outcome of the latest offer, as long as it stands. None: versions closed."""
        self.untaken = Untaken(me.peer, self.archive.backlog, me.witness)
        self._next_tick: asyncio.Handle | None = None
        self._goodbyes: list[asyncio.Task[None]] = []
        self._moved_bytes = 0
        self.void_tokens = 0
        """Tokens committed on lineages that ended, as far as this peer followed them."""
        self.lane_addresses: tuple[str, ...] = ()
        """Where the lanes of other ranks listen."""

    # ------------------------------------------------------------ for the training side (any thread)

    @property
    def me(self) -> Member:
        """Member (this life of its peer) for which the exchange speaks."""
        return self.machine.me

    @property
    def version(self) -> int:
        """Version of the latest commit that the exchange has."""
        return self.machine.version

    @property
    def alone(self) -> bool:
        """Whether this exchange's peer is outside the view, or most of the view cannot be reached."""
        return not self.in_view or self.machine.alone

    @property
    def others(self) -> Sequence[Member]:
        """Live members of the view with which this exchange goes on: all but its own peer."""
        return self.machine.others()

    @property
    def in_view(self) -> bool:
        """Whether this exchange's peer is a member of the run now."""
        return self.machine.in_view

    def offer(self, contribution: Contribution, leaving: bool) -> Future[Skip | None]:
        """Contribute to the version that the exchange makes; meanwhile training may go on.

        Returns why the round is skipped, or None once versions closed, which `closed` returns then. They may or may not
        count this contribution.
        """
        outcome: Future[Skip | None] = self._promised()
        self._call(self._offer, contribution, leaving, outcome)
        return outcome

    def withdraw(self) -> None:
        """Have the exchange wait for no version: the offer comes to a skip, unless a version is about to close."""
        self._call(self._feed, m.Withdrawn())

    def whole(self, contribution: Contribution) -> Future[Contribution]:
        """The contribution with the encoded parts from the lanes of all ranks of this island."""
        return self._start_task(self.lanes.whole(contribution)) if self.lanes.others else done(contribution)

    def closed(self) -> Sequence[Closed]:
        """Versions that the exchange closed since the last call, in order. Raises the error that ended the exchange."""
        self.raise_failure()
        return self.untaken.take()

    def closes(self) -> Future[None]:
        """A future, done when the exchange's `closed` has something to return."""
        return self.untaken.news(self._promised)

    def hold(self, state: OuterState, commit: Commit | None, copied: bool = False) -> None:
        """Hand the exchange the `state` at which training is now. `copied`: it came from others and not by a commit."""
        event = m.StateHeld(state.version, state.digest, commit if copied else None)
        self.lane.hold(state)
        number = self.lane.held

        def held() -> None:
            if copied:  # the state may be older than what closed here: the versions in between are to be applied
                later, self.behind = self.untaken.restart(state.version, commit)
                self.lanes.each_other(Lane.pass_over, 0, later)
            self.archive.hold(state, commit, number)
            self._spawn(self._notify_moved())
            self._feed(event)

        self._call(held)

    def hold_mean(self, closed: Closed) -> None:
        """Hand the exchange a mean from this peer's log, which it accepted before it was restarted."""

        async def held() -> None:
            await self.archive.take_mean(closed)  # the log of the process before has it in any case
            self._feed(m.MeanHeld(closed.commit.mean_digest))

        self._call(lambda: self._spawn(held()))

    def state_unused(self) -> Future[bool]:
        """Whether no peer copies the held state. Then it may be overwritten: joiners wait for the next `hold`."""
        return self._ask(self.archive.reuse)

    def report(self, progress: Progress) -> None:
        """Set the progress that the exchange's heartbeats carry."""
        self.machine.report(progress)

    def copy_state(
        self, sources: Sequence[str], local: OuterState, commit: Commit | None, progress: Callable[[int, int], None]
    ) -> Future[tuple[OuterState, StateOffer, tuple[m.Fork, ...]]]:
        """A copy of the state that members hold, those at these addresses and those that the exchange knows; `local`,
        which is `commit`'s, if it is that. And the forks that led to its lineage. Cancelled, it is given up. Raises
        StateError where nobody gives it."""

        async def copied() -> tuple[OuterState, StateOffer, tuple[m.Fork, ...]]:
            copy = await self.copying.copy(sources, local, commit, progress)
            self.behind = False
            return copy

        return self._start_task(copied())

    def alive(self) -> Future[list[Member]]:
        """Members of the view that the exchange does not suspect."""
        return self._ask(self.machine.alive)

    def awaited(self) -> Future[bool]:
        """Whether the exchange sees most others done with their inner steps, waiting for those that are not."""
        return self._ask(self.machine.awaited)

    def speeds(self) -> Future[tuple[float, float]]:
        """The fastest pace that the exchange hears of from another live trainer, tokens per second, 0 while unknown;
        and the seconds that the last exchange took, 0 before the first."""
        return self._ask(lambda: (self.machine.fastest(), self.machine.sync_s))

    def said_goodbye(self) -> Future[set[str]]:
        """Peers whose goodbye reached this exchange."""
        return self._ask(lambda: {entry.member.peer for entry in self.machine.roster if entry.left})

    def settled(self) -> Future[bool]:
        """Whether the others' exchanges have the latest version too, so that it does not die with us."""
        return self._ask(self.machine.settled)

    def leave(self) -> Future[None]:
        """Ask the others to leave this peer out of the view. Done when it may go, and they have heard that it does."""

        async def go_when_free() -> None:
            self._feed(m.LeaveWanted())
            while not self.machine.gone:
                await asyncio.sleep(POLL_S)
            await asyncio.gather(*self._goodbyes)

        return self._start_task(go_when_free())

    def go(self) -> None:
        """Go now: the others may wait for a vote of this peer."""
        self._call(self._feed, m.LeaveWanted(now=True))

    def stop(self) -> None:
        """End the tasks of the exchange and its lanes. The link and the server are the caller's."""
        for lane in self.lanes.others:
            lane.end()
        self.lane.stop()
        self._end_tasks()
        self.votes.stop()
        for thread in (self.hasher, self._fetcher.hasher):
            thread.shutdown(wait=False, cancel_futures=True)

    def meet(self, members: Sequence[Member]) -> None:
        """Give the exchange peers to talk to, from a welcome."""
        self._call(lambda: self.machine.roster.meet(members, monotonic_s()))

    def remember(self, members: Sequence[Member]) -> None:
        """Have the exchange call members of before, also those that are silent: they may go on in a lineage apart."""
        self._call(lambda: self.machine.remember(members, monotonic_s()))

    def seek(self, listed: Sequence[Member]) -> None:
        """Have the exchange ask peers that the directory lists, where it knows no more than that of their addresses."""
        self._call(lambda: self._spawn(self._meetings.seek(listed)))

    def start(self, address: str, directory: tuple[str, ...], lanes: tuple[str, ...] = ()) -> None:
        """Begin the exchange's ticks. `address`: where the server listens; `directory`: addresses of our directory
        node; `lanes`: where other ranks of ours listen (`assign`)."""
        self.directory, self.lane_addresses = directory, lanes

        def begin() -> None:
            self.machine.listen_at(address)
            self._tick()

        self._call(begin)

    def assign(self, ranks: Mapping[int, LaneWire]) -> None:
        """Add the lanes of other ranks, which divide the outer state with us: wires, by rank. Before `start`."""
        located = self.machine.roster.is_located
        self.lanes.others += [RemoteLane(ranks[rank], self._loop, self, rank, located) for rank in sorted(ranks)]

    # ------------------------------------------------------------ the loop's thread from here on

    def _offer(self, contribution: Contribution, leaving: bool, future: Future[Skip | None]) -> None:
        if self.untaken:
            settle(future, None)
            return
        self.lanes.each_other(Lane.take_measured)
        self.lane.take(contribution)
        self._waiting = future
        c, pace = contribution, self.machine.progress.pace
        slack_s = self.overlap_tokens / pace if pace > 0 and not leaving else 0.0
        offer = m.Offer(c.boot, c.base_version, c.weight, c.tokens, c.blocks, leaving, self.lanes.send_bps, slack_s)
        self._feed(m.Offered(offer))

    def _tick(self) -> None:
        self._guarded(self._feed, m.Tick(self._moved_bytes))
        self._next_tick = self._loop.call_later(self.terms.timing.heartbeat_s / TICKS_PER_HEARTBEAT, self._tick)

    def _cancel_tasks(self) -> None:
        if self._next_tick is not None:
            self._next_tick.cancel()
        super()._cancel_tasks()

    def _feed(self, event: m.Event) -> None:
        if self._failure is None:  # else others are to hear nothing: it could not keep what it promises
            self._perform(self.machine.handle(event, monotonic_s()))

    def receive(self, envelope: m.Envelope) -> m.Reply:
        """Pass another peer's message to the exchange's state machine, perform the effects, and return the reply."""
        if self._failure is not None:
            return m.Reply.TOO_EARLY  # for the life that follows
        try:
            reply, effects = self.machine.receive(envelope, monotonic_s())
            self._perform(effects)
        except Exception as error:  # it has done half of what it decided: to go on would break what it says next
            self.failed(error)
            raise
        new = reply is m.Reply.OK and not self.lives.met(envelope.sender, envelope.boot)
        if new or self.machine.roster.awaits(envelope.sender):
            self._spawn(self._meetings.meet(envelope.sender, envelope.boot))
        return reply

    def _perform(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(_, m.Envelope(body=body)):
                    sending = self._spawn(self._send(effect))
                    if isinstance(body, m.Goodbye):
                        self._goodbyes.append(sending)
                case fx.Save():
                    self._spawn(self._save(effect))
                case fx.BeginReduction(begin):
                    self._begin(begin)
                case fx.SendContribution():
                    self.lanes.each(Lane.send_contribution, effect)
                case fx.RepairReduction(repair):
                    self._repair(repair)
                case fx.FoldPart(height, attempt, part, omitted):
                    self.lanes.at(part, Lane.fold, (height, attempt), part, omitted)
                case fx.SendMean(height, attempt, part, omitted):
                    self.lanes.at(part, Lane.send_mean, (height, attempt), part, omitted)
                case fx.SealMean(height, attempt):
                    self._call(self._seal, (height, attempt))
                case fx.LogMean(digest):
                    self.archive.log_again(self.machine.making, self.machine.fragment, digest)
                    self._spawn(self._report_held((-1, -1), digest, self._contents))
                case fx.FetchMean(commit, sources):
                    self._spawn(self._fetcher.mean(commit, sources))
                case fx.CatchUp(source):
                    self._spawn(self._catch_up(source))
                case fx.Close(commit):
                    self._close(commit)
                case fx.GiveUp(reason, exposed):
                    waiting, self._waiting = self._waiting, None
                    settle(waiting, Skip(reason, exposed))
                case fx.Resync(source, discarded_tokens):
                    self._leave_lineage(source, discarded_tokens)
                case fx.Note(reason, routine):
                    self._on_reason(reason, routine)

    # ------------------------------------------------------------ sending

    async def _send(self, effect: fx.Send) -> None:
        if step := _FAILPOINTS.get(type(effect.envelope.body)):
            failpoints.hit(f"before-{step}")
        reply, to, since_s = None, effect.to, monotonic_s()
        try:
            reply = await self.link.deliver(to.address, effect.envelope)
        except LinkDown:
            await self._meetings.miss(to)
        except LinkSlow:
            logger.debug("%s did not answer %s", to.peer, type(effect.envelope.body).__name__)
            if not self.lives.answered_since(to, since_s):
                self._feed(m.Unreachable(to, self.lives.proven(to)))
        except LinkRefused as error:
            reply = error.reply
        if reply is m.Reply.OLD_COPY:
            self._feed(m.Outdated())
        if reply is not None and self.machine.roster.is_earlier(to, monotonic_s()):
            await self._meetings.miss(to)  # its next life may have its address, too
        elif reply is not None:
            self.lives.replied(to.peer, reply)
            await self._meetings.meet(to, self.machine.boot_of(to))
        if step:
            failpoints.hit(f"after-{step}")

    async def _save(self, save: fx.Save) -> None:
        self._feed(m.Saved(save.number, refused=not await self.votes.save(save)))

    # ------------------------------------------------------------ reducing

    def _begin(self, begin: m.Begin) -> None:
        self._contents = MeanContents()
        machine, rules = self.machine, self.terms.rules
        header = StreamHeader(rules.run, rules.contract, machine.lineage, machine.me, Kind.CONTRIBUTION, *begin.key, 0)
        number = self.archive.number_at(machine.version)
        self.lanes.each(Lane.begin, begin, machine.making, machine.fragment, header, number)
        self._spawn(self._notify_moved())

    def _repair(self, repair: m.Repair) -> None:
        failpoints.hit("in-repair")
        before = self.lane.owners()
        self.lanes.each(Lane.repair, repair)
        after = self.lane.owners()
        self._contents.take_out([part for part in self._contents if after.get(part) != before.get(part)])
        self._spawn(self._notify_moved())

    # ------------------------------------------------------------ events of the lanes (LaneEvents)

    def on_event(self, event: m.Event, content: bytes = b"") -> None:
        """Take an event of a lane into the exchange. A part of a mean counts only while its sender owns it."""
        if isinstance(event, m.PartFolded | m.MeanArrived):
            key, owners = event.key, self.lane.owners()
            owner = event.sender if isinstance(event, m.MeanArrived) else self.me.peer
            if self.lane.key != key or owners.get(event.part) != owner:
                return
            self._contents[event.part] = content
        self._guarded(self._feed, event)  # a lane calls it within a call of gRPC, which would keep an error to itself

    def on_moved(self, size_bytes: int) -> None:
        """Bytes moved in a lane: the next tick says so."""
        self._moved_bytes += size_bytes

    def on_lost(self, member: Member) -> None:
        """A lane's stream to this member broke."""
        self._spawn(self._meetings.miss(member))

    async def admit(self, header: StreamHeader) -> m.Reply:
        """Reply to a stream that reaches a lane: OK to read it. Waits until its reduction has begun here."""
        reply = self.machine.admits(header.run, header.contract, header.lineage, header.sender, monotonic_s())
        if reply is not m.Reply.OK:
            return reply
        if header.kind not in (Kind.CONTRIBUTION, Kind.MEAN):
            return m.Reply.MALFORMED  # it is of another policy
        key, moment = header.key, (*header.key, header.generation)

        def reached() -> bool:
            """Whether the lane has come to this repair of this attempt, or the version is over."""
            work = self.lane.work
            here = work is not None and (*work.key, work.generation) >= moment
            return here or self.machine.since_height > header.height

        with suppress(TimeoutError):  # bytes may overtake `Begin` or `Repair`: not reading them holds the sender back
            async with self.moved, asyncio.timeout(self.terms.timing.stall_s):
                await self.moved.wait_for(reached)
        if self.lane.key == key and reached():
            return m.Reply.OK
        now_at = self.machine.reducing or (self.machine.since_height, -1, 0)
        return m.Reply.STALE if now_at > moment else m.Reply.TOO_EARLY

    def _seal(self, key: tuple[int, int]) -> None:
        parts = self.terms.rules.parts[self.machine.fragment]
        if self.lane.key != key or len(self._contents) < parts:
            return  # a repair took parts away: they come once more
        failpoints.hit("after-mean")
        digest = self._contents.seal(parts)
        self.lanes.each(Lane.seal, key, digest)
        self.archive.keep_mean(digest)
        self._spawn(self._report_held(key, digest, self._contents))

    async def _report_held(self, key: tuple[int, int], digest: str, contents: MeanContents) -> None:
        making, logged = self.machine.making, await self.lanes.logged(digest)
        if making == self.machine.making:  # a repair may have taken parts away meanwhile
            height, attempt = key if contents.sealed == digest else (-1, -1)
            self._feed(m.MeanHeld(digest, height, attempt, logged))

    async def _notify_moved(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    # ------------------------------------------------------------ closing versions

    def _close(self, commit: Commit) -> None:
        if commit.drafter:  # the version is still being made
            closed = Closed(commit, ())
        else:
            number = self.archive.number_of(commit.state_digest)
            closed = self.lane.close(commit, number)
            self.lanes.each_other(Lane.close_for_follower, commit, number)
        if not self.machine.me.witness and self.archive.close(Closed(commit, closed.parts)):
            self.behind = False  # there is nothing to copy
        passed, closes = self.untaken.add(closed, self.behind)
        if passed is not None:
            self.behind = True
            self.lanes.each_other(Lane.pass_over, passed.version, ())
        settle(closes, None)
        if not commit.drafter:
            outcome, self._waiting = self._waiting, None
            settle(outcome, None)
        self._spawn(self._notify_moved())

    def _leave_lineage(self, source: Member, discarded_tokens: int) -> None:
        """Another lineage goes on: drop the exchange's backlog and lane work, pass over versions not applied yet."""
        self.void_tokens += discarded_tokens
        self.archive.backlog.clear()
        self.lanes.each(Lane.drop)
        self.lanes.each(Lane.take, None)
        self.untaken.pass_over()
        self.copying.resync_from = [source]
        self.behind = True

    async def _catch_up(self, source: Member) -> None:
        if not await self._fetcher.commits(source):
            self.behind = True
            self._feed(m.Withdrawn(m.TOO_FAR))
