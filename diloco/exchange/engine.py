"""The exchange: drives the protocol's state machine with real bytes, a real link and the local clock.

It runs on a thread and event loop of its own, so that neither network nor averaging holds up the inner steps. The
training side tells it things (`offer`, `hold`, `report`) and asks it others, to which the answers are futures; nothing
here blocks it. Everything else happens in reaction to other peers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.life import done
from diloco.base.threads import one_thread
from diloco.base.types import Closed, Commit, Contribution, Member, Progress, Skip
from diloco.exchange.background import Background, settle
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import RemoteLane
from diloco.exchange.statesync import Backlog, Snapshots, download, make_offer
from diloco.exchange.status import status_json
from diloco.exchange.work import LaneTerms
from diloco.outer.average import digest_of, is_mean_of
from diloco.outer.state import OuterState, state_bytes
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Kind, Limits, Part, StateOffer, StreamHeader, Welcome
from diloco.protocol.view import Rules, Timing
from diloco.transport.endpoint import nobody_listens
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow
from diloco.transport.pace import RateLimit

logger = logging.getLogger(__name__)

TICKS_PER_HEARTBEAT = 10
MAX_ASKED_AT_ONCE = 2
"""Members that we ask for commits that we missed, or for a mean. Over a slow link those take many stall times, and
after each one more was asked, so that no answer came to its end; with one alone, who gives them drop by drop could stop
us."""
_FAILPOINTS = {m.Accept: "accept", m.Propose: "propose", m.Committed: "commit"}
"""Messages before and after which a drill can place a death."""


@dataclass(frozen=True)
class Terms:
    """What the exchange needs to know of the run."""

    contract_json: bytes
    rules: Rules
    timing: Timing
    lane: LaneTerms
    """What the lane of each rank needs."""
    layout_digest: str
    """What a joiner's model must have, too."""
    total_tokens: int
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    serve_bps: float = 0.0
    """Limit for serving the state to joiners, bits per second; 0: none."""


class Exchange(Background):
    """One peer's side that faces the world. Also the `Service` that the link calls."""

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
    ) -> None:
        """`lineage` and the `forks` that led to it: the founder's own, or those of the member that welcomed us."""
        super().__init__(loop)
        self.terms = terms
        self.link = link
        self.machine = Machine(me, terms.rules, terms.timing, lineage, founder, monotonic_s())
        self.machine.forks = forks
        self.directory: tuple[str, ...] = ()
        self.max_part_bytes = terms.lane.max_part_bytes
        self.overlap_tokens = 0
        """Of the inner steps that go on while a contribution is on its way."""
        self.behind = False
        """Too far behind to fetch the missing commits: only a copy of the state helps."""
        self.refused: m.Reply = m.Reply.OK
        """The latest refusal of one of our messages."""
        self._on_reason = on_reason
        self.lane = Lane(terms.lane, link, loop)
        self.lane.head = self
        self.lanes: list[Lane | RemoteLane] = [self.lane]
        """By number: ours first, then those of the other ranks that divide the outer state."""
        self._contents: dict[int, bytes] = {}
        """Of the parts of the mean that is being made, what they hash to."""
        self._pool = one_thread("hash")
        self._moved = asyncio.Condition()
        self._copying = asyncio.Lock()
        self._asked: set[tuple[str, Member]] = set()
        """What is being fetched, and of whom."""
        self._waiting: Future[Skip | None] | None = None
        """What comes of the latest offer, as long as it stands. None: versions closed."""
        self._means: deque[str] = deque(maxlen=terms.rules.means_kept)
        """Digests of the latest that are here, whole."""
        self._backlog = Backlog(terms.rules.backlog_versions, state_bytes(terms.lane.layout, terms.lane.optimizer))
        self._closed: deque[Closed] = deque()
        """Versions that the training side has not taken yet; whoever takes them applies them, in order."""
        self._closes: Future[None] | None = None
        """Done when there are some."""
        self._closed_changed = threading.Lock()
        self._state: OuterState | None = None
        self._state_commit: Commit | None = None
        self._numbers: dict[str, int] = {}
        """Of the states that are held, by digest: what lanes call them."""
        self._snapshots = Snapshots(self._backlog)
        self._state_reused = False
        """The state is being overwritten by the next."""
        self._serving = RateLimit(terms.serve_bps)
        self.void_tokens = 0
        """Tokens committed on lineages that ended, as far as this peer followed them."""
        self._resync_from: list[str] = []
        self._lane_addresses: tuple[str, ...] = ()

    # ------------------------------------------------------------ for the training side (any thread)

    @property
    def name(self) -> str:
        """This peer's."""
        return self.machine.me.peer

    @property
    def me(self) -> Member:
        """This life of this peer."""
        return self.machine.me

    @property
    def version(self) -> int:
        """Of the commit that it knows."""
        return self.machine.version

    @property
    def alone(self) -> bool:
        """Whether it is outside the view, or most of the view cannot be reached."""
        return not self.in_view or self.machine.alone

    @property
    def others(self) -> Sequence[Member]:
        """Members of the view that are not suspected, without this peer."""
        return [member for member in self.machine.alive() if member != self.machine.me]

    @property
    def in_view(self) -> bool:
        """Whether this peer is a member of the run now."""
        return self.machine.in_view

    def offer(self, contribution: Contribution, leaving: bool) -> Future[Skip | None]:
        """Contribute to the version being made; meanwhile training may go on.

        The answer: why the round is skipped, or None once versions closed, which `closed` has then, if it has not told
        of them before. This peer's contribution may or may not be counted in them.
        """
        outcome: Future[Skip | None] = self._promised()
        self._call(self._offer, contribution, leaving, outcome)
        return outcome

    def withdraw(self) -> None:
        """Wait for no version any more: the offer will come to a skip, unless one is about to close."""
        self._call(self._feed, m.Withdrawn())

    def whole(self, contribution: Contribution) -> Future[Contribution]:
        """With the parts that other ranks of ours encode."""
        return self._start_task(self._whole(contribution)) if len(self.lanes) > 1 else done(contribution)

    async def _whole(self, contribution: Contribution) -> Contribution:
        others, lanes = await self._contributed(), len(self.lanes)
        own = await asyncio.to_thread(list, contribution.parts)
        parts = [others[part % lanes - 1][part] if part % lanes else own[part] for part in range(len(own))]
        return replace(contribution, parts=parts)

    async def _contributed(self) -> list[Sequence[bytes]]:
        return [await lane.contributed() for lane in self._others()]

    def closed(self) -> Sequence[Closed]:
        """Versions that closed since the last call, in order. Raises what has made the exchange fail."""
        self.raise_failure()
        with self._closed_changed:
            taken = tuple(self._closed)
            self._closed.clear()
            return taken

    def closes(self) -> Future[None]:
        """Done when `closed` has something to tell."""
        with self._closed_changed:
            if self._closed:
                return done(None)
            if self._closes is None or self._closes.done():
                self._closes = self._promised()
            return self._closes

    def hold(self, state: OuterState, commit: Commit | None, copied: bool = False) -> None:
        """The training side stands at `state` now. `copied`: it came from others and not by a commit."""
        event = m.StateHeld(state.version, state.digest, commit if copied else None)
        self.lane.hold(state)
        self._call(self._hold, state, commit, event, copied, self.lane.held)

    def state_unused(self) -> Future[bool]:
        """Whether nobody copies the state that we stand at. Then nobody is offered it any more, and it may be
        overwritten: who asks waits until `hold` tells of the next."""
        return self._ask(self._state_unused)

    def report(self, progress: Progress) -> None:
        """What the heartbeats tell of this peer."""
        self.machine.progress = progress

    def copy_state(
        self, sources: Sequence[str], local: OuterState, commit: Commit | None, progress: Callable[[int, int], None]
    ) -> Future[tuple[OuterState, StateOffer]]:
        """The state that the members at these addresses hold; `local` itself, which is `commit`'s, if it is that.

        Cancelled, it is given up. Raises StateError where nobody gives it.
        """
        return self._start_task(self._copy(sources, local, commit, progress))

    async def _copy(
        self, sources: Sequence[str], local: OuterState, commit: Commit | None, progress: Callable[[int, int], None]
    ) -> tuple[OuterState, StateOffer]:
        terms, others = self.terms.lane, self._others()
        filling = True

        def elsewhere(buffer: str, part: int, data: bytes) -> None:
            if filling:
                others[part % len(self.lanes) - 1].fill(buffer, part, data)

        async with self._copying:  # one that was given up takes a moment to end: what it then drops is not ours
            for lane in others:
                lane.begin_copy()
            fitting = (terms.layout, terms.optimizer, terms.stall_s, progress, self.machine.lineage, commit, elsewhere)
            try:
                state, offer = await download(self.link, sources, local, *fitting)
            except BaseException:  # it may have been cancelled
                filling = False
                for lane in others:
                    lane.drop_copy()
                raise
            for lane in others:
                lane.end_copy(offer.version, offer.steps)
            self.behind, self._resync_from = False, []
            return state, offer

    def alive(self) -> Future[list[Member]]:
        """Members of the view that are not suspected."""
        return self._ask(self.machine.alive)

    def sources(self) -> Future[list[str]]:
        """Addresses of those who can give us the state: of the view, or before we have one, of whom we heard."""
        return self._ask(self._sources)

    def _sources(self) -> list[str]:
        machine = self.machine
        others = [member.address for member in machine.alive() if member != machine.me and not member.witness]
        heard = [entry for entry in machine.roster if entry.heartbeat is not None and entry.heartbeat.founded]
        addresses = [entry.member.address for entry in heard if not entry.left and not entry.member.witness]
        return others or [*self._resync_from, *addresses]

    def awaited(self) -> Future[bool]:
        """Whether most others have done their inner steps and wait for those that have not."""
        return self._ask(self.machine.awaited)

    def speeds(self) -> Future[tuple[float, float]]:
        """The pace of the fastest other live trainer, tokens per second, 0 while nobody tells one; and the seconds
        that the last exchange took, 0 before the first."""
        return self._ask(lambda: (self.machine.fastest(), self.machine.sync_s))

    def said_goodbye(self) -> Future[set[str]]:
        """Peers that left in good order."""
        return self._ask(lambda: {entry.member.peer for entry in self.machine.roster if entry.left})

    def settled(self) -> Future[bool]:
        """Whether the others have the latest version too, so that it does not die with us."""
        return self._ask(self.machine.settled)

    def leave(self) -> Future[None]:
        """Say goodbye and give the vote away. Done when all have answered; who does not is told by silence."""
        return self._start_task(self._leave())

    def stop(self) -> None:
        """End the tasks. The link and the server are the caller's."""
        for lane in self._others():
            lane.end()
        self.lane.stop()
        self._end_tasks()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def meet(self, members: Sequence[Member]) -> None:
        """Peers to talk to, from a welcome or from the directory."""
        self._call(lambda: self.machine.roster.meet(members, monotonic_s()))

    def start(self, address: str, directory: tuple[str, ...], lanes: tuple[str, ...] = ()) -> None:
        """Begin to tick. `address`: where the server listens; `directory`: addresses of our directory node; `lanes`:
        where other ranks of ours listen (`assign`)."""
        self.directory, self._lane_addresses = directory, lanes
        self._call(lambda: self._start(address))

    def assign(self, ranks: Mapping[int, Connection[Any, Any]]) -> None:
        """Other ranks divide the outer state with us: their connections, by rank. Before `start`."""
        self.lanes += [RemoteLane(ranks[rank], self._loop, self, rank) for rank in sorted(ranks)]

    def elsewhere_bytes(self) -> tuple[int, int]:
        """Sent and received by other ranks of ours, as far as they told."""
        reported = [lane.wire_bytes for lane in self._others()]
        return sum(sent for sent, _ in reported), sum(received for _, received in reported)

    def _others(self) -> list[RemoteLane]:
        return [lane for lane in self.lanes if isinstance(lane, RemoteLane)]

    @property
    def _send_bps(self) -> int:
        """Of all lanes; 0, unknown, while that of any of them is."""
        rates = [self.link.send_bps, *(lane.send_bps for lane in self._others())]
        return sum(rates) if all(rates) else 0

    # ------------------------------------------------------------ the loop's thread from here on

    def _start(self, address: str) -> None:
        self.machine.me = self.machine.roster.me = replace(self.machine.me, address=address)
        self._spawn(self._tick_for_ever())

    async def _tick_for_ever(self) -> None:
        while True:
            self._feed(m.Tick())
            await asyncio.sleep(self.terms.timing.heartbeat_s / TICKS_PER_HEARTBEAT)

    async def _leave(self) -> None:
        effects = self.machine.handle(m.LeaveWanted(), monotonic_s())
        sends = [self._send(effect) for effect in effects if isinstance(effect, m.Send)]
        await asyncio.gather(*sends)

    def _offer(self, contribution: Contribution, leaving: bool, future: Future[Skip | None]) -> None:
        if self._closed:
            settle(future, None)
            return
        self.lane.take(contribution)
        self._waiting = future
        c, pace = contribution, self.machine.progress.pace
        slack_s = self.overlap_tokens / pace if pace > 0 and not leaving else 0.0
        offer = m.Offer(c.base_version, c.weight, c.tokens, c.blocks, leaving, self._send_bps, slack_s)
        self._feed(m.Offered(offer))

    def _hold(self, state: OuterState, commit: Commit | None, event: m.StateHeld, copied: bool, number: int) -> None:
        self._state, self._state_commit, self._state_reused = state, commit, False
        self._numbers[state.digest] = number
        if copied:
            self._close_again(state.version)
        self._snapshots.forget(state.version, monotonic_s())
        self._retain()
        self._spawn(self._notify_moved())
        self._feed(event)

    def _state_unused(self) -> bool:
        if self._state is not None:
            self._snapshots.forget(self._state.version, monotonic_s())
            self._state_reused = self._state.digest not in self._snapshots.digests()
        return self._state_reused

    def _retain(self) -> None:
        """Lanes keep the latest state, and those that others are copying."""
        read = self._snapshots.digests() | ({self._state.digest} if self._state is not None else set())
        self._numbers = {digest: number for digest, number in self._numbers.items() if digest in read}
        for lane in self.lanes:
            lane.retain(tuple(self._numbers.values()))

    def _close_again(self, version: int) -> None:
        """A state that was copied may be older than what closed here: the versions in between are to be applied."""
        with self._closed_changed:
            later = self._backlog.after(version)
            self._closed = deque(later)
            self.behind = bool(later) and later[0].commit.version != version + 1

    def _feed(self, event: m.Event) -> None:
        self._perform_all(self.machine.handle(event, monotonic_s()))

    def _perform_all(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.Send():
                self._spawn(self._send(effect))
            case m.BeginReduction(begin):
                self._begin(begin)
            case m.SendContribution():
                for lane in self.lanes:
                    lane.send_contribution(effect)
            case m.RepairReduction(repair):
                self._repair(repair)
            case m.FoldPart(version, attempt, part, omitted):
                self._lane_of(part).fold((version, attempt), part, omitted)
            case m.SendMean(version, attempt, part, omitted):
                self._lane_of(part).send_mean((version, attempt), part, omitted)
            case m.SealMean(version, attempt):
                self._call(self._seal, (version, attempt))
            case m.FetchMean(commit, sources):
                self._spawn(self._fetch_mean(commit, sources))
            case m.CatchUp(source, _):
                self._spawn(self._catch_up(source))
            case m.Close(commit):
                self._close(commit)
            case m.GiveUp(reason, exposed):
                self._answer(Skip(reason, exposed))
            case m.Resync(source, discarded_tokens):
                self._leave_lineage(source, discarded_tokens)
            case m.Note(reason, routine):
                self._on_reason(reason, routine)

    # ------------------------------------------------------------ sending

    def _header(self, kind: Kind, key: tuple[int, int], generation: int) -> StreamHeader:
        rules = self.terms.rules
        return StreamHeader(rules.run, rules.contract, self.machine.lineage, self.machine.me, kind, *key, generation)

    async def _send(self, effect: m.Send) -> None:
        step = _FAILPOINTS.get(type(effect.envelope.body))
        if step:
            failpoints.hit(f"before-{step}")
        try:
            reply = await self.link.deliver(effect.to.address, effect.envelope)
        except LinkDown:
            await self._lost(effect.to)
        except LinkSlow:
            logger.debug("%s did not answer %s", effect.to.peer, type(effect.envelope.body).__name__)
        except LinkRefused as error:
            self._note_refusal(effect.to, error.reply)
        else:
            self._note_refusal(effect.to, reply)
        if step:
            failpoints.hit(f"after-{step}")

    async def _lost(self, member: Member) -> None:
        """A connection broke. Damaged bytes do that too: only who does not answer on the next one is gone."""
        proven = await nobody_listens(member.address)
        if proven or not await self._answers(member.address):
            self._feed(m.Unreachable(member, proven))

    async def _answers(self, address: str) -> bool:
        try:
            await self.link.hello(address, self.terms.timing.heartbeat_s)
        except LinkDown:
            return False
        except (LinkSlow, LinkRefused):
            return True  # or it is silent, which is for its heartbeats to tell
        return True

    def _note_refusal(self, by: Member, reply: m.Reply) -> None:
        if reply in (m.Reply.STALE, m.Reply.REPLAYED):
            return  # the weather: it has moved on meanwhile
        if reply is not m.Reply.OK and reply is not self.refused:
            logger.warning("%s refuses: %s", by.peer, reply.name)
        self.refused = reply

    # ------------------------------------------------------------ reducing

    def _lane_of(self, part: int) -> Lane | RemoteLane:
        return self.lanes[part % len(self.lanes)]

    def _begin(self, begin: m.Begin) -> None:
        state = self._state
        number = self._numbers[state.digest] if state is not None and state.version == begin.version - 1 else 0
        self._contents = {}
        header = self._header(Kind.CONTRIBUTION, (begin.version, begin.attempt), 0)
        for lane in self.lanes:
            lane.begin(begin, self.machine.fragment, header, number)
        self._spawn(self._notify_moved())

    def _repair(self, repair: m.Repair) -> None:
        failpoints.hit("in-repair")
        before = self.lane.owners()
        for lane in self.lanes:
            lane.repair(repair)
        after = self.lane.owners()
        self._contents = {
            part: content for part, content in self._contents.items() if after.get(part) == before.get(part)
        }
        self._spawn(self._notify_moved())

    # ------------------------------------------------------------ what lanes tell (LaneEvents)

    def on_event(self, event: m.Event, content: bytes = b"") -> None:
        """What came of something; a part of a mean counts only while its owner is who made it."""
        if isinstance(event, m.PartFolded | m.MeanArrived):
            key, owners = (event.version, event.attempt), self.lane.owners()
            owner = event.sender if isinstance(event, m.MeanArrived) else self.name
            if self.lane.key != key or owners.get(event.part) != owner:
                return
            self._contents[event.part] = content
        self._feed(event)

    def on_lost(self, member: Member) -> None:
        """A stream to this member broke."""
        self._spawn(self._lost(member))

    async def admit(self, header: StreamHeader) -> m.Reply:
        """Whether a lane may read this stream; waits until its reduction has begun here."""
        reply = self.machine.admits(header.run, header.contract, header.lineage, header.sender, monotonic_s())
        if reply is not m.Reply.OK:
            return reply
        if header.kind not in (Kind.CONTRIBUTION, Kind.MEAN):
            return m.Reply.MALFORMED  # it is of another policy
        key = (header.version, header.attempt)
        if await self._reach(key, header.generation):
            return m.Reply.OK
        reached = self.machine.reducing or (self.machine.making, -1, 0)
        return m.Reply.STALE if reached > (*key, header.generation) else m.Reply.TOO_EARLY

    def _seal(self, key: tuple[int, int]) -> None:
        parts = self.terms.rules.parts[self.machine.fragment]
        if self.lane.key != key or len(self._contents) < parts:
            return  # a repair took parts away: they come once more
        failpoints.hit("after-mean")
        digest = digest_of(self._contents[part] for part in range(parts))
        for lane in self.lanes:
            lane.seal(key, digest)
        self._kept_mean(digest)
        self._feed(m.MeanHeld(digest, *key))

    def _keep_mean(self, digest: str, parts: Sequence[bytes]) -> None:
        """A mean that others gave us, whole."""
        lanes = len(self.lanes)
        for number, lane in enumerate(self.lanes):
            lane.keep_mean(digest, [part if index % lanes == number else b"" for index, part in enumerate(parts)])
        self._kept_mean(digest)

    def _kept_mean(self, digest: str) -> None:
        if digest in self._means:
            self._means.remove(digest)
        self._means.append(digest)
        kept = {*self._means, *self._backlog.means()}
        for lane in self.lanes:
            lane.keep_means(kept)

    async def _notify_moved(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # ------------------------------------------------------------ closing versions

    def _close(self, commit: Commit) -> None:
        state = self._state
        fits = state is not None and commit.state_digest == state.digest
        number = self._numbers[state.digest] if state is not None and fits else 0
        closed, *_ = [lane.close(commit, number) for lane in self.lanes]
        assert closed is not None
        if not self.machine.me.witness:
            self._backlog.add(Closed(commit, closed.parts), self._snapshots.oldest_version())
        with self._closed_changed:
            self._closed.append(closed)
            closes, self._closes = self._closes, None
        if closes is not None:
            settle(closes, None)
        self._answer(None)
        self._spawn(self._notify_moved())

    def _leave_lineage(self, source: Member, discarded_tokens: int) -> None:
        """Nothing that closed on our lineage, and was not applied yet, counts any more."""
        self.void_tokens += discarded_tokens
        self._backlog.clear()
        for lane in self.lanes:
            lane.drop()
            lane.take(None)
        with self._closed_changed:
            self._closed.clear()
        self._resync_from = [source.address]
        self.behind = True

    def _answer(self, outcome: Skip | None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            settle(waiting, outcome)

    async def _fetch_mean(self, commit: Commit, sources: Sequence[Member]) -> None:
        for source in sources:
            stall_s = self.terms.timing.stall_s
            try:
                with self._asking(commit.mean_digest, source):
                    parts = await self.link.fetch_mean(source.address, commit.mean_digest, self._limits, stall_s)
            except (_Asked, LinkDown, LinkSlow, LinkRefused):
                continue
            if is_mean_of(parts, commit, self.terms.lane.layout):
                self._keep_mean(commit.mean_digest, parts)
                self._feed(m.MeanHeld(commit.mean_digest))
                return

    @contextmanager
    def _asking(self, what: str, source: Member) -> Iterator[None]:
        """Raises _Asked where it is asked for this already, or `MAX_ASKED_AT_ONCE` others are."""
        if (what, source) in self._asked or sum(one == what for one, _ in self._asked) >= MAX_ASKED_AT_ONCE:
            raise _Asked
        self._asked.add((what, source))
        try:
            yield
        finally:
            self._asked.discard((what, source))

    @property
    def _limits(self) -> Limits:
        """Of what others give of their backlogs: these are no larger than ours may be."""
        rules, lane = self.terms.rules, self.terms.lane
        parts = max(rules.parts)
        mean_bytes = parts * self.max_part_bytes
        kept_bytes = state_bytes(lane.layout, lane.optimizer) + rules.backlog_versions * mean_bytes
        return Limits(parts, self.max_part_bytes, kept_bytes)

    def _since(self) -> int:
        """The version after which commits are missing."""
        return self.machine.version if self.machine.commit is not None else self.machine.version - 1

    async def _catch_up(self, source: Member) -> None:
        since = self._since()
        stall_s = self.terms.timing.stall_s
        try:
            with self._asking("commits", source):
                missed = await self.link.fetch_commits(source.address, since, self._limits, stall_s)
        except _Asked:
            return
        except (LinkDown, LinkSlow, LinkRefused) as error:
            logger.info("no commits from %s: %s", source.peer, error)
            return
        if not missed and since == self._since():  # else a version closed meanwhile
            self.behind = True
            self._feed(m.Withdrawn(m.TOO_FAR))
        for closed in missed:
            if not is_mean_of(closed.parts, closed.commit, self.terms.lane.layout):
                logger.warning("%s sent a mean that does not match its commit", source.peer)
                return
            self._keep_mean(closed.commit.mean_digest, closed.parts)
            self._feed(m.Learned(closed.commit))

    # ------------------------------------------------------------ what others ask (Service)

    async def on_envelope(self, envelope: m.Envelope) -> m.Reply:
        reply, effects = self.machine.receive(envelope, monotonic_s())
        self._perform_all(effects)
        return reply

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        return await self.lane.on_parts(header, parts)

    def on_bytes(self, header: StreamHeader) -> None:
        """A round counts parts: one that is late is repaired around."""

    async def _reach(self, key: tuple[int, int], generation: int) -> bool:
        """Wait for our own `Begin` or `Repair`: bytes may overtake it. Not reading holds the sender back. False: it
        did not come."""
        deadline_s = monotonic_s() + self.terms.timing.stall_s
        async with self._moved:
            while self._before((*key, generation)) and self.machine.making <= key[0]:
                left_s = deadline_s - monotonic_s()
                if left_s <= 0:
                    break
                try:
                    await asyncio.wait_for(self._moved.wait(), left_s)
                except TimeoutError:
                    break
        return self.lane.key == key

    def _before(self, moment: tuple[int, int, int]) -> bool:
        """Whether we have not come to this repair of this attempt yet."""
        work = self.lane.work
        return work is None or (*work.key, work.generation) < moment

    def on_hello(self) -> Welcome:
        machine = self.machine
        if not machine.me.address:
            raise LinkRefused(m.Reply.TOO_EARLY, "still starting")  # nor have we anything to tell of
        version = self._state.version if self._state else -1
        return Welcome(
            self.terms.contract_json,
            machine.lineage,
            version,
            machine.commit is not None,
            (machine.me, *self.others),
            self.directory,
            self.terms.layout_digest,
            self.terms.data,
            machine.forks,
        )

    def on_lanes(self) -> tuple[str, ...]:
        return (self.machine.me.address, *self._lane_addresses)

    async def on_fetch_commits(self, since: int) -> list[Closed]:
        found = []
        for closed in self._backlog.since(since):
            parts = await self.on_fetch_mean(closed.commit.mean_digest) if closed.parts else ()
            if parts is None:
                break
            found.append(Closed(closed.commit, parts))
        return found

    async def on_fetch_mean(self, digest: str) -> Sequence[bytes] | None:
        own = self.lane.mean(digest)
        others = [await lane.mean(digest) for lane in self._others()]
        if own is None or None in others:
            return None
        by_lane = [own, *(parts for parts in others if parts is not None)]
        return [by_lane[part % len(by_lane)][part] for part in range(len(own))]

    async def on_state_offer(self, have: str) -> StateOffer:
        while (state := await self._standing()) is not None:
            # Before a resumed run is founded anew, the commit of its state belongs to the view that is gone.
            commit = self._state_commit if self.machine.commit is not None else None
            offer = await self._loop.run_in_executor(self._pool, make_offer, state, commit)
            if have == offer.digest:
                return offer
            if not self._state_reused and self._state is state:
                given = self._snapshots.offer(state, offer, monotonic_s())
                self._retain()
                return given
        raise LinkRefused(m.Reply.TOO_EARLY, "no state here yet")

    async def _standing(self) -> OuterState | None:
        """The state, once it is not being overwritten; None when that takes too long, or there is none."""
        with suppress(TimeoutError):
            async with self._moved:
                await asyncio.wait_for(self._moved.wait_for(lambda: not self._state_reused), self.terms.timing.stall_s)
        return None if self._state_reused else self._state

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        failpoints.hit("serving-state")
        entry = self._snapshots.entry(digest, chunk, monotonic_s())
        if entry is None or digest not in self._numbers:
            return None
        lane = self._lane_of(entry.part)
        found = lane.chunk(self._numbers[digest], entry)
        return await found if isinstance(found, Awaitable) else found

    async def on_state_bytes(self, size_bytes: int) -> None:
        await asyncio.sleep(self._serving.delay_s(size_bytes, monotonic_s()))

    def on_status(self) -> str:
        terms, send_bps = self.terms, self._send_bps
        return status_json(self.machine, self._state, terms.total_tokens, self.directory, send_bps, monotonic_s())


class _Asked(Exception):
    """What is wanted is on its way."""
