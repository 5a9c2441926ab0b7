"""The exchange: drives the protocol's state machine with real bytes, a real link and the local clock.

It runs on a thread and event loop of its own, so that neither network nor averaging holds up the inner steps. The
training side talks to it through a handful of blocking calls (`run`, `closed`, `hold`, `leave`); everything else
happens in reaction to other peers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from diloco import failpoints
from diloco.average import is_mean_of, max_part_bytes, mean_digest
from diloco.clock import monotonic_s
from diloco.compress import Codec, PayloadError
from diloco.exchange import messages as m
from diloco.exchange.background import Background
from diloco.exchange.link import (
    Kind,
    Link,
    LinkDown,
    LinkRefused,
    LinkSlow,
    Part,
    StateOffer,
    StreamHeader,
    Welcome,
)  # fmt: skip
from diloco.exchange.machine import Machine
from diloco.exchange.pace import RateLimit
from diloco.exchange.probe import nobody_listens
from diloco.exchange.rules import Rules, Timing
from diloco.exchange.statesync import Backlog, Snapshots, download, make_offer
from diloco.exchange.status import status_json
from diloco.exchange.stepping import Stepping
from diloco.exchange.work import BadContribution, Work
from diloco.fragments import Layout
from diloco.outer import OuterOptimizer, OuterState, state_bytes
from diloco.round import Ahead
from diloco.types import Closed, Commit, Contribution, Member, Progress, Skip
from diloco.weighing import Weighing

logger = logging.getLogger(__name__)

TICKS_PER_HEARTBEAT = 10
STREAM_TRIES = 3
STREAM_PAUSE_S = 0.1
"""How often a stream of parts is begun on a line that breaks or damages it, and how soon again."""

_FAILPOINTS = {m.Accept: "accept", m.Propose: "propose", m.Committed: "commit"}
"""Messages before and after which a drill can place a death."""


@dataclass(frozen=True)
class Terms:
    """What the exchange needs to know of the run."""

    contract_json: bytes
    rules: Rules
    timing: Timing
    layout: Layout
    """Without fragments for a witness."""
    layout_digest: str
    """What a joiner's model must have, too."""
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    total_tokens: int
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    max_norm_ratio: float = 0.0
    """A contribution that is so many times larger than the others' is refused; 0: none is."""
    radial: bool = False
    """Lengths and directions are averaged apart (`diloco.radial`)."""
    serve_bps: float = 0.0
    """Limit for serving the state to joiners, bits per second; 0: none."""


class Outlets:
    """My averaged parts on their way to every receiver, since `Begin` or since a repair.

    What was averaged stays here, so that a stream that broke can begin again.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.waiting = set(parts)
        """Parts that are not averaged yet."""
        self.streams: list[asyncio.Task[None]] = []
        self._count = len(parts)
        self._ready: list[Part] = []
        self._news = asyncio.Event()

    def put(self, part: Part) -> None:
        """One more is ready."""
        self.waiting.remove(part.index)
        self._ready.append(part)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def flow(self, fitted: Callable[[Part], Part]) -> AsyncIterator[Part]:
        """All of them, as they get ready, `fitted` to their receiver."""
        for index in range(self._count):
            if index == self._count // 2:
                failpoints.hit("mid-mean")
            while index >= len(self._ready):
                await self._news.wait()
            yield fitted(self._ready[index])


def _fitted(work: Work, receiver: str, part: Part) -> Part:
    return replace(part, payload=work.sent_to(receiver, part.index, part.payload, work.named(part.omitted)))


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
        self.max_part_bytes = max_part_bytes(terms.layout, terms.codecs)
        self.overlap_tokens = 0
        """Of the inner steps that go on while a contribution is on its way."""
        self.behind = False
        """Too far behind to fetch the missing commits: only a copy of the state helps."""
        self.refused: m.Reply = m.Reply.OK
        """The latest refusal of one of our messages."""
        self._on_reason = on_reason
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="average")
        self._work: Work | None = None
        self._stepping: Stepping | None = None
        """Of the version being made: attempts of one version have the parts in common that did not change."""
        self._outlets: list[Outlets] = []
        self._moved = asyncio.Condition()
        self._contribution: Contribution | None = None
        self._outcome: Future[Sequence[Closed] | Skip] = Future()
        """Of the latest offer, for the training side."""
        self._waiting: Future[Sequence[Closed] | Skip] | None = None
        """The same, as long as the offer stands."""
        self._means: OrderedDict[str, Sequence[bytes]] = OrderedDict()
        self._backlog = Backlog(terms.rules.backlog_versions, state_bytes(terms.layout, terms.optimizer))
        self._closed: deque[Closed] = deque()
        self._closed_changed = threading.Condition()
        self._state: OuterState | None = None
        self._state_commit: Commit | None = None
        self._snapshots = Snapshots(self._backlog)
        self._serving = RateLimit(terms.serve_bps)
        self.void_tokens = 0
        """Tokens committed on lineages that ended, as far as this peer followed them."""
        self._resync_from: list[str] = []

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
    def in_view(self) -> bool:
        """Whether this peer is a member of the run now."""
        return self.machine.in_view

    def offer(self, contribution: Contribution, leaving: bool) -> None:
        """Contribute to the version being made. `outcome` tells what comes of it; meanwhile training may go on."""
        self._outcome = Future()
        self._call(self._offer, contribution, leaving, self._outcome)

    def outcome(self, patience: Callable[[], bool]) -> Sequence[Closed] | Skip:
        """Wait until the version that was offered for closes.

        Returns the versions that closed, in order (ours may or may not be counted in them), or why the round is
        skipped. Asks `patience` a few times a second; when that is False the contribution is withdrawn.
        """
        withdrawn = False
        while True:
            try:
                return self._outcome.result(timeout=0.2)
            except TimeoutError:
                self._raise_failure()
                if not withdrawn and not patience():
                    withdrawn = True
                    self._call(self._feed, m.Withdrawn())

    def closed(self, timeout_s: float = 0.0) -> Sequence[Closed]:
        """Versions that closed since the last call; waits up to `timeout_s` for the first."""
        self._raise_failure()
        with self._closed_changed:
            if not self._closed and timeout_s:
                self._closed_changed.wait(timeout_s)
            return self._take_closed()

    def hold(self, state: OuterState, commit: Commit | None, copied: bool = False) -> None:
        """The training side stands at `state` now. `copied`: it came from others and not by a commit."""
        event = m.StateHeld(state.version, state.digest, commit if copied else None)
        self._call(self._hold, state, commit, event, copied)

    def report(self, progress: Progress) -> None:
        """What the heartbeats tell of this peer."""
        self.machine.progress = progress

    def copy_state(
        self, sources: Sequence[str], local: OuterState, timeout_s: float, progress: Callable[[int, int], None]
    ) -> tuple[OuterState, StateOffer]:
        """The state that the members at these addresses hold; `local` itself when it is that already.

        Raises StateError, and TimeoutError after `timeout_s`.
        """
        terms = self.terms
        stall_s, lineage = terms.timing.stall_s, self.machine.lineage
        task = download(self.link, sources, local, terms.layout, terms.optimizer, stall_s, progress, lineage)
        future = asyncio.run_coroutine_threadsafe(task, self._loop)
        try:
            result = future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise
        self.behind = False
        self._resync_from = []
        return result

    def alive(self) -> list[Member]:
        """Members of the view that are not suspected."""
        return self._ask(self.machine.alive)

    def sources(self) -> list[str]:
        """Addresses of those who can give us the state: of the view, or before we have one, of whom we heard."""
        return self._ask(self._sources)

    def _sources(self) -> list[str]:
        machine = self.machine
        others = [member.address for member in machine.alive() if member != machine.me and not member.witness]
        heard = [entry for entry in machine.roster if entry.heartbeat is not None and entry.heartbeat.founded]
        addresses = [entry.member.address for entry in heard if not entry.left and not entry.member.witness]
        return others or [*self._resync_from, *addresses]

    def awaited(self) -> bool:
        """Whether most others have done their inner steps and wait for those that have not."""
        return self._ask(self.machine.awaited)

    def speeds(self) -> tuple[float, float]:
        """The pace of the fastest other live trainer, tokens per second, 0 while nobody tells one; and the seconds
        that the last exchange took, 0 before the first."""
        return self._ask(lambda: (self.machine.fastest(), self.machine.sync_s))

    def said_goodbye(self) -> set[str]:
        """Peers that left in good order."""
        return self._ask(lambda: {entry.member.peer for entry in self.machine.roster if entry.left})

    def settle(self, timeout_s: float) -> None:
        """Wait until the others have the latest version too, so that it does not die with us."""
        deadline_s = monotonic_s() + timeout_s
        while monotonic_s() < deadline_s and not self._ask(self.machine.settled):
            time.sleep(0.05)

    def leave(self, timeout_s: float) -> None:
        """Say goodbye and give the vote away; to those who do not answer in time we have died."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(timeout_s)

    def stop(self) -> None:
        """End the tasks. The link and the server are the caller's."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def meet(self, members: Sequence[Member]) -> None:
        """Peers to talk to, from a welcome or from the directory."""
        self._call(lambda: self.machine.roster.meet(members, monotonic_s()))

    def start(self, address: str, directory: tuple[str, ...]) -> None:
        """Begin to tick. `address`: where the server listens; `directory`: addresses of our directory node."""
        self.directory = directory
        self._call(lambda: self._start(address))

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

    def _offer(self, contribution: Contribution, leaving: bool, future: Future[Sequence[Closed] | Skip]) -> None:
        if self._closed:
            future.set_result(self._take_closed())
            return
        self._contribution = contribution
        self._waiting = future
        c, pace = contribution, self.machine.progress.pace
        slack_s = self.overlap_tokens / pace if pace > 0 and not leaving else 0.0
        offer = m.Offer(c.base_version, c.weight, c.tokens, c.blocks, leaving, self.link.send_bps, slack_s)
        self._feed(m.Offered(offer))

    def _hold(self, state: OuterState, commit: Commit | None, event: m.StateHeld, copied: bool) -> None:
        self._state, self._state_commit = state, commit
        if copied:
            self._close_again(state.version)
        self._snapshots.forget(state.version, monotonic_s())
        self._feed(event)

    def _close_again(self, version: int) -> None:
        """A state that was copied may be older than what closed here: the versions in between are to be applied."""
        with self._closed_changed:
            later = self._backlog.after(version)
            self._closed = deque(later)
            self.behind = bool(later) and later[0].commit.version != version + 1
            self._closed_changed.notify_all()

    def _take_closed(self) -> Sequence[Closed]:
        taken = tuple(self._closed)
        self._closed.clear()
        return taken

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
                self._spawn(self._send_contribution(effect))
            case m.RepairReduction(repair):
                self._repair(repair)
            case m.FoldPart(version, attempt, part, omitted):
                self._spawn(self._fold((version, attempt), part, omitted))
            case m.SendMean(version, attempt, part, omitted):
                self._put_in_outlets((version, attempt), part, omitted)
            case m.SealMean(version, attempt):
                self._spawn(self._seal((version, attempt)))
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

    async def _stream(self, to: Member, header: StreamHeader, parts: Callable[[], AsyncIterator[Part]]) -> None:
        """Send parts, from the start again when the line breaks: the receiver ignores what it has."""
        for _ in range(STREAM_TRIES):
            if await self._stream_once(to, header, parts()) or self._work is None:
                return
            await asyncio.sleep(STREAM_PAUSE_S)
            if self._work is None or self._work.key != (header.version, header.attempt):
                return

    async def _stream_once(self, to: Member, header: StreamHeader, parts: AsyncIterator[Part]) -> bool:
        """Whether there is nothing more to try."""
        what = f"{header.kind.name.lower()} of {header.version}/{header.attempt} to {to.peer}"
        try:
            reply = await self.link.send_parts(to.address, header, parts, self.terms.timing.stall_s)
        except LinkDown:
            await self._lost(to)
            return False
        except LinkSlow as error:
            logger.info("%s: %s", what, error)
            return True
        except LinkRefused as error:
            logger.info("%s: %s", what, error)
            reply = error.reply
        if reply is not m.Reply.OK:
            logger.debug("%s: %s", what, reply.name)
        return reply not in (m.Reply.DAMAGED, m.Reply.TOO_EARLY)

    async def _send_contribution(self, effect: m.SendContribution) -> None:
        contribution = self._contribution
        if contribution is None:
            return
        start, stop = effect.span.start, effect.span.stop

        async def parts() -> AsyncIterator[Part]:
            for index in range(start, stop):
                if index == (start + stop) // 2:
                    failpoints.hit("mid-contribution")
                yield Part(index, await asyncio.to_thread(contribution.parts.__getitem__, index))  # or it is encoded

        failpoints.hit("before-contribution")
        header = self._header(Kind.CONTRIBUTION, (effect.version, effect.attempt), effect.generation)
        await self._stream(effect.to, header, parts)
        failpoints.hit("after-contribution")

    # ------------------------------------------------------------ reducing

    def _begin(self, begin: m.Begin) -> None:
        fragment = self.terms.layout.fragments[self.machine.fragment]
        self._drop_work()
        me = self.machine.me.peer
        terms = self.terms
        work = self._work = Work(begin, me, fragment, terms.codecs, terms.max_norm_ratio, terms.radial)
        if self._contribution is not None:
            work.take_own(self._contribution)
        if self._state is None or self._state.version != begin.version - 1:
            self._stepping = None
        else:
            share = terms.weighing.share(begin.contributors, begin.receivers)  # a repair, or who comes, may change it
            if not self._steps_from(self._state, fragment.index, share):
                self._stepping = self._step_from(self._state, fragment.index, share)
        self._open_outlets(work, work.owned())
        self._spawn(self._tell_moved())

    def _repair(self, repair: m.Repair) -> None:
        failpoints.hit("in-repair")
        work = self._work
        if work is not None and work.key == (repair.version, repair.attempt):
            self._open_outlets(work, work.repair(repair.generation, repair.spans))
            self._spawn(self._tell_moved())

    def _open_outlets(self, work: Work, parts: Sequence[int]) -> None:
        """A stream to every receiver for these parts of mine, which are yet to be averaged."""
        if not parts:
            return
        outlets = Outlets(parts)
        for member in work.begin.receivers:
            if member.peer != self.machine.me.peer:
                header = self._header(Kind.MEAN, work.key, work.generation)
                flow = partial(outlets.flow, partial(_fitted, work, member.peer))
                outlets.streams.append(self._spawn(self._stream(member, header, flow)))
        self._outlets.append(outlets)

    def _drop_work(self) -> None:
        """Streams whose parts were all averaged go on to their end: others may still need them."""
        for outlets in self._outlets:
            if outlets.waiting:
                for stream in outlets.streams:
                    stream.cancel()
        self._outlets = []
        self._work = None

    def _put_in_outlets(self, key: tuple[int, int], part: int, omitted: Sequence[str]) -> None:
        work = self._work
        if work is None or work.key != key:
            return
        payload = work.mean[part]
        assert payload is not None
        places = [entry.peer for entry in work.begin.contributors]
        sent = Part(part, payload, tuple(places.index(peer) for peer in omitted))
        for outlets in self._outlets:
            if part in outlets.waiting:
                outlets.put(sent)

    async def _fold(self, key: tuple[int, int], part: int, omitted: Sequence[str]) -> None:
        work = self._work
        if work is None or work.key != key:
            return
        failpoints.hit("before-fold")
        try:
            mean = await self._loop.run_in_executor(self._pool, work.fold, part, omitted)
        except BadContribution as error:
            self._feed(m.ContributionRefused(*key, error.sender, str(error)))
            return
        failpoints.hit("after-fold")
        if work.keep(part, mean):
            self._feed(m.PartFolded(*key, part))
            await self._check_mean(work, part, mean)

    async def _check_mean(self, work: Work, part: int, mean: bytes) -> None:
        """Raises PayloadError when nobody could apply it: then nobody must commit it. Steps by it, if we can."""
        stepping = self._stepping if self._work is work else None  # another version's by now
        check = work.check_mean if stepping is None else stepping.take
        await self._loop.run_in_executor(self._pool, check, part, mean)

    async def _seal(self, key: tuple[int, int]) -> None:
        work = self._work
        parts = work.whole() if work is not None and work.key == key else None
        if parts is not None:
            failpoints.hit("after-mean")
            digest = await self._loop.run_in_executor(self._pool, mean_digest, parts)
            self._keep_mean(digest, parts)
            self._feed(m.MeanHeld(digest, *key))

    def _keep_mean(self, digest: str, parts: Sequence[bytes]) -> None:
        self._means[digest] = parts
        self._means.move_to_end(digest)
        while len(self._means) > self.terms.rules.means_kept:
            self._means.popitem(last=False)

    async def _tell_moved(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # ------------------------------------------------------------ closing versions

    def _close(self, commit: Commit) -> None:
        held = self._means.get(commit.mean_digest, ())  # of a founding there is none, and a witness holds none
        closed = Closed(commit, held)
        if not self.machine.me.witness:
            self._backlog.add(closed, self._snapshots.oldest_version())
        self._drop_work()
        self._contribution = None
        with self._closed_changed:
            self._closed.append(self._stepped(closed))
            self._closed_changed.notify_all()
        if self._waiting is not None:
            self._answer(self._take_closed())
        self._spawn(self._tell_moved())

    def _stepped(self, closed: Closed) -> Closed:
        """End average and outer step on our own thread, if we know the state that the version was made on."""
        state, commit = self._state, closed.commit
        if state is None or not closed.parts or commit.state_digest != state.digest:
            self._stepping = None
            return closed
        share = self.terms.weighing.share(commit.counted, commit.view)
        if not self._steps_from(state, commit.fragment, share):
            self._stepping = self._step_from(state, commit.fragment, share)
        stepping, self._stepping = self._stepping, None
        assert stepping is not None
        return Ahead(commit, closed.parts, self._pool.submit(stepping.finish, closed.parts).result)

    def _steps_from(self, state: OuterState, fragment: int, share: float) -> bool:
        """Whether what was begun is this very step."""
        begun = self._stepping
        return begun is not None and (begun.state, begun.fragment.index, begun.share) == (state, fragment, share)

    def _step_from(self, state: OuterState, fragment: int, share: float) -> Stepping:
        terms = self.terms
        return Stepping(state, terms.layout.fragments[fragment], terms.codecs, terms.optimizer, share)

    def _leave_lineage(self, source: Member, discarded_tokens: int) -> None:
        """Nothing that closed on our lineage, and was not applied yet, counts any more."""
        self.void_tokens += discarded_tokens
        self._backlog.clear()
        self._drop_work()
        self._contribution = None
        with self._closed_changed:
            self._closed.clear()
        self._resync_from = [source.address]
        self.behind = True

    def _answer(self, outcome: Sequence[Closed] | Skip) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(outcome)

    async def _fetch_mean(self, commit: Commit, sources: Sequence[Member]) -> None:
        for source in sources:
            stall_s = self.terms.timing.stall_s
            try:
                parts = await self.link.fetch_mean(source.address, commit.mean_digest, self.max_part_bytes, stall_s)
            except (LinkDown, LinkSlow, LinkRefused):
                continue
            if is_mean_of(parts, commit, self.terms.layout):
                self._keep_mean(commit.mean_digest, parts)
                self._feed(m.MeanHeld(commit.mean_digest))
                return

    def _since(self) -> int:
        """The version after which commits are missing."""
        return self.machine.version if self.machine.commit is not None else self.machine.version - 1

    async def _catch_up(self, source: Member) -> None:
        since = self._since()
        stall_s = self.terms.timing.stall_s
        try:
            missed = await self.link.fetch_commits(source.address, since, self.max_part_bytes, stall_s)
        except (LinkDown, LinkSlow, LinkRefused) as error:
            logger.info("no commits from %s: %s", source.peer, error)
            return
        if not missed and since == self._since():  # else a version closed meanwhile
            self.behind = True
            self._feed(m.Withdrawn(m.TOO_FAR))
        for closed in missed:
            if not is_mean_of(closed.parts, closed.commit, self.terms.layout):
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
        reply = self.machine.admits(header.run, header.contract, header.lineage, header.sender, monotonic_s())
        if reply is not m.Reply.OK:
            return reply
        if header.kind not in (Kind.CONTRIBUTION, Kind.MEAN):
            return m.Reply.MALFORMED  # it is of another policy
        key = (header.version, header.attempt)
        work = await self._reach(key, header.generation)
        if work is None:
            reached = self.machine.reducing or (self.machine.making, -1, 0)
            return m.Reply.STALE if reached > (*key, header.generation) else m.Reply.TOO_EARLY
        try:
            async for part in parts:
                if self._work is not work:
                    return m.Reply.STALE
                reply = await self._take(work, header, part)
                if reply is not m.Reply.OK:
                    return reply
        except LinkRefused as error:
            if error.reply is not m.Reply.DAMAGED:
                self._refuse(key, header.sender.peer, str(error))
            elif work.damaged(header.sender.peer) >= STREAM_TRIES:
                self._refuse(key, header.sender.peer, str(error), offence=False)
            raise
        return m.Reply.OK

    def _refuse(self, key: tuple[int, int], sender: str, reason: str, offence: bool = True) -> m.Reply:
        """Bytes that are no good: the attempt does not wait for better ones."""
        self._feed(m.ContributionRefused(*key, sender, reason, offence))
        return m.Reply.MALFORMED

    async def _reach(self, key: tuple[int, int], generation: int) -> Work | None:
        """Wait for our own `Begin` or `Repair`: bytes may overtake it. Not reading holds the sender back."""
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
        return self._work if self._work is not None and self._work.key == key else None

    def _before(self, moment: tuple[int, int, int]) -> bool:
        """Whether we have not come to this repair of this attempt yet."""
        return self._work is None or (*self._work.key, self._work.generation) < moment

    async def _take(self, work: Work, header: StreamHeader, part: Part) -> m.Reply:
        sender, key = header.sender.peer, work.key
        if not work.expects(header.kind, sender, part.index):
            if work.generation:
                return m.Reply.STALE  # it has another owner since a repair
            return self._refuse(key, sender, f"part {part.index} is not its to send to me")
        if len(part.payload) > work.max_bytes(header.kind, part.index):
            return self._refuse(key, sender, f"part {part.index} has {len(part.payload)} bytes")
        if header.kind is Kind.CONTRIBUTION:
            work.put_contribution(sender, part.index, part.payload)
            self._feed(m.ContributionArrived(*key, sender, part.index))
            return m.Reply.OK
        try:
            omitted = work.named(part.omitted)
            mean = work.received(part.index, part.payload, omitted)
            await self._check_mean(work, part.index, mean)
        except PayloadError as error:
            return self._refuse(key, sender, f"sent a mean that does not decode: {error}")
        if not work.expects(header.kind, sender, part.index):
            return m.Reply.STALE  # repaired while we looked at it
        work.put_mean(part.index, mean)
        self._feed(m.MeanArrived(*key, sender, part.index, omitted))
        return m.Reply.OK

    def on_hello(self) -> Welcome:
        machine = self.machine
        others = [member for member in machine.alive() if member != machine.me]
        version = self._state.version if self._state else -1
        return Welcome(
            self.terms.contract_json,
            machine.lineage,
            version,
            machine.commit is not None,
            (machine.me, *others),
            self.directory,
            self.terms.layout_digest,
            self.terms.data,
            machine.forks,
        )

    def on_fetch_commits(self, since: int) -> list[Closed]:
        return self._backlog.since(since)

    def on_fetch_mean(self, digest: str) -> Sequence[bytes] | None:
        return self._means.get(digest)

    async def on_state_offer(self) -> StateOffer:
        if self._state is None:
            raise LinkRefused(m.Reply.TOO_EARLY, "no state here yet")
        # Before a resumed run is founded anew, the commit of its state belongs to the view that is gone.
        state, commit = self._state, self._state_commit if self.machine.commit is not None else None
        offer = await self._loop.run_in_executor(self._pool, make_offer, state, commit)
        return self._snapshots.offer(state, offer, monotonic_s())

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        failpoints.hit("serving-state")
        return self._snapshots.chunk(digest, chunk, monotonic_s())

    async def on_state_bytes(self, size_bytes: int) -> None:
        await asyncio.sleep(self._serving.delay_s(size_bytes, monotonic_s()))

    def on_status(self) -> str:
        terms, send_bps = self.terms, self.link.send_bps
        return status_json(self.machine, self._state, terms.total_tokens, self.directory, send_bps, monotonic_s())
