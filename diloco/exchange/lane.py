"""A lane: the bytes of the parts that one rank of an island holds, on their way from and to other peers.

A peer of one rank has one lane. Where several ranks divide the outer state, each has a lane of its own, with
connections of its own: it encodes, sends, receives, averages and steps its parts. The `Exchange` of rank 0 drives the
protocol and the lanes, which report events to it. Lane p mod L holds part p, on every peer for its own number of lanes
L, so that each lane has its share of what a peer owns, sends and receives, whoever owns what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from diloco.base import failpoints
from diloco.base.hashing import content_hash
from diloco.base.threads import condition, one_thread
from diloco.base.types import Closed, Commit, Contribution, Member
from diloco.compress import PayloadError
from diloco.exchange.background import ExchangeTasks
from diloco.exchange.log import LaneLog
from diloco.exchange.outlets import MovedBytes, Outlets, Precedence, encoded
from diloco.exchange.sending import MAX_STREAM_TRIES, Key, PartSender
from diloco.exchange.statesync import RankCopy
from diloco.exchange.terms import LaneTerms
from diloco.exchange.work import BadContribution, LaneEvents, LanePayloads, SteppedVersion
from diloco.outer.optimizers import Stepping
from diloco.outer.state import OuterState, StateChunk
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.streams import Kind, Part, StreamHeader
from diloco.transport.link import Link, LinkRefused

NEWS_S = 60.0
"""Seconds that the training side of a rank other than 0 waits while nothing comes of what rank 0 has announced. Of a
copied state all parts come first, and rank 0 may have them faster than it passes them on."""


class Lane(ExchangeTasks):
    """The lane of one rank. Methods are for the loop's thread, but for those that say otherwise."""

    def __init__(self, terms: LaneTerms, link: Link, loop: asyncio.AbstractEventLoop, log: LaneLog | None = None):
        """`log`: of this rank; None: means stay in memory."""
        super().__init__(loop)
        self.terms, self._log = terms, log or LaneLog()
        self._log.failed = partial(self._call, self.failed)
        self.head: LaneEvents | None = None
        self.work: LanePayloads | None = None
        # Folds have a thread of their own: others wait for what we average, nobody for what we step.
        self._folder = one_thread("average")
        self._stepper = one_thread("step")
        self._header: StreamHeader | None = None
        self._stepping: Stepping | None = None
        """Outer step of the version being made: attempts of one version have the parts in common that did not
        change."""
        self._outlets: list[Outlets] = []
        self._contributing: list[asyncio.Task[None]] = []
        """Streams of our contribution."""
        self._precedence = Precedence(terms.stall_s / 4)
        self._contribution: Contribution | None = None
        self._measured: Contribution | None = None
        """On a rank that does not lead."""
        self._means: dict[str, Sequence[bytes]] = {}
        """By digest; what other lanes hold is empty."""
        self.held = 0
        """Counts the states that were held here: the latest one's number, the same on all ranks of an island."""
        self._latest: OuterState | None = None
        self._states: dict[int, OuterState] = {}
        self._copy = RankCopy(terms.layout, terms.optimizer)
        self._copied: OuterState | None = None
        self._closed: dict[int, tuple[int, Closed]] = {}
        """Versions that this rank is to apply, each with the number of the state it was closed on; 0: none here."""
        self._news = condition()
        self._moved = MovedBytes(terms.stall_s / 16, lambda size_bytes: self._head.on_moved(size_bytes))
        self.sender = PartSender(link, terms.stall_s, self._lost, self._moved.count, lambda: self.key)

    # ------------------------------------------------------------ for the training side (any thread)

    def hold(self, state: OuterState) -> None:
        """Hand this lane the `state` at which training is now."""
        if state is not self._latest:
            self._latest = state
            self.held += 1
            self._call(self._keep_state, self.held, state)

    def measured(self, contribution: Contribution) -> None:
        """Hand this lane its parts of a contribution, to be taken as often as rank 0 offers it."""
        self._call(self._keep_measured, contribution)

    def closed(self, commit: Commit) -> Closed:
        """A version that this lane closed, with its parts of the mean, or with the step by it. Waits for it.

        For ranks that do not lead. Raises TimeoutError.
        """
        at = commit.version
        self._wait_for(lambda: at in self._closed and self._closed[at][1].commit == commit, f"version {at}")
        with self._news:
            number, closed = self._closed[at]
            self._closed = {version: entry for version, entry in self._closed.items() if version > at}
        return closed if number == self.held else Closed(commit, closed.parts)

    def copied(self) -> OuterState:
        """The state that was copied from other peers into this lane. Waits for it. Raises TimeoutError."""
        self._wait_for(lambda: self._copied is not None, "the copied state")
        state, self._copied = self._copied, None
        assert state is not None
        return state

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        with self._news:
            filled = self._copy.filled
            while not self._news.wait_for(lambda: there() or self._failure is not None, NEWS_S):
                if self._copy.filled == filled:
                    raise TimeoutError(f"{what} did not come from rank 0 within {NEWS_S:g} s")
                filled = self._copy.filled
        self.raise_failure()

    def stop(self) -> None:
        """End the tasks of this lane. The link is the caller's."""
        self._end_tasks()
        for pool in (self._folder, self._stepper):
            pool.shutdown(wait=False, cancel_futures=True)
        self._log.stop()

    # ------------------------------------------------------------ reducing

    def failed(self, error: BaseException) -> None:
        """End this lane, its exchange, and whoever waits for the lane, with `error`."""
        super().failed(error)
        self._head.failed(error)
        with self._news:
            self._news.notify_all()

    def _keep_measured(self, contribution: Contribution) -> None:
        self._measured = contribution

    def take_measured(self) -> None:
        """Set the contribution measured last on this rank as the one that this lane sends: rank 0 offers it."""
        self._contribution = self._measured

    def take(self, contribution: Contribution | None) -> None:
        """Set the contribution that this lane sends when a reduction counts this peer; None: nothing any more."""
        self._contribution = contribution

    async def contributed(self) -> Sequence[bytes]:
        """Encoded parts of the contribution measured last that this lane holds. Waits until they are encoded."""
        contribution = self._measured
        return await asyncio.to_thread(list, contribution.parts) if contribution is not None else ()

    def begin(self, begin: m.Begin, version: int, fragment: int, header: StreamHeader, number: int) -> None:
        """Make room in this lane for a version's parts. `number`: of the state it is made on, if held; else 0."""
        self.drop()
        terms, me, draft = self.terms, header.sender.peer, self._log.begin(version)
        piece = terms.layout.fragments[fragment]
        work = self.work = LanePayloads(begin, me, piece, terms.codecs, terms.max_norm_ratio, terms.averaging, draft)
        self._header = header
        self.sender.keep(begin.receivers)
        self._precedence = Precedence(terms.stall_s / 4)  # streams of an attempt before this hold up nobody
        if self._contribution is not None:
            work.take_own(self._contribution)
        share = terms.weighing.share(begin.contributors, begin.receivers)  # a repair, or who comes, may change it
        self._stepping = self._step_from(number, fragment, share)
        self._open_outlets(work, work.owned())

    def repair(self, repair: m.Repair) -> None:
        """Owners of parts changed: open streams for the parts of this lane that are ours since, and end those that
        nobody waits for any more: a slow uplink has better to do."""
        work = self.work
        if work is None or work.key != repair.key:
            return
        gained = work.repair(repair.generation, repair.spans)
        ours = set(work.owned())
        for outlets in self._outlets:
            if not outlets.parts & ours:
                outlets.end()
        if work.me in repair.gone:
            self._end_contribution()
        self._open_outlets(work, gained)

    def drop(self) -> None:
        """Drop the attempt in this lane. Streams with all parts averaged go on to their end: others may need them."""
        for outlets in self._outlets:
            if outlets.waiting:
                outlets.end()
        self._outlets = []
        self._end_contribution()
        if self.work is not None:
            self.work.draft.drop()
        self.work = None

    def _end_contribution(self) -> None:
        for stream in self._contributing:
            stream.cancel()
        self._contributing = []

    def send_contribution(self, effect: fx.SendContribution) -> None:
        """Stream this lane's encoded parts of a span to their owner."""
        self._contributing.append(self._spawn(self._send_contribution(effect)))

    def fold(self, key: Key, part: int, omitted: Sequence[str]) -> None:
        """Average a part that we own and this lane holds."""
        self._spawn(self._fold(key, part, omitted))

    def send_mean(self, key: Key, part: int, omitted: Sequence[str]) -> None:
        """Send a part that this lane averaged to every receiver."""
        work = self.work
        if work is None or work.key != key:
            return
        payload = work.mean[part]
        assert payload is not None
        places = [entry.peer for entry in work.begin.contributors]
        sent = Part(part, payload, tuple(places.index(peer) for peer in omitted))
        for outlets in self._outlets:
            if part in outlets.waiting:
                outlets.put(sent)

    def seal(self, key: Key, digest: str) -> None:
        """Keep this lane's parts of a mean that is complete on all lanes together, under its digest."""
        work = self.work
        parts = work.whole() if work is not None and work.key == key else None
        if work is not None and parts is not None:
            work.draft.end(digest)
            self.keep_mean(digest, parts)

    def take_mean(self, version: int, digest: str, parts: Sequence[bytes], held: Collection[int]) -> None:
        """Keep a mean that was fetched in this lane. Of `parts` only those that are `held` here need be there."""
        self._log.fetched(version, digest, parts, held)
        self.keep_mean(digest, parts)

    def log_again(self, version: int, fragment: int, digest: str) -> None:
        """Log a mean once more that this lane keeps, if its log has refused it."""
        if (parts := self._means.get(digest)) is not None:
            self._log.again(version, digest, parts, self.terms.layout.fragments[fragment].cuts)

    def moves(self) -> None:
        """Tell others that something moves here, though no bytes do."""
        self._head.on_moved(1)

    async def logged(self, digest: str) -> bool:
        """Whether a mean that was sealed or taken in this lane is on the disk. Waits until it is, or was refused."""
        return await self._log.durable(digest)

    def keep_mean(self, digest: str, parts: Sequence[bytes]) -> None:
        """Keep a mean in this lane under its digest; of `parts` only those that the lane holds need be there."""
        with self._news:
            self._means[digest] = parts
            self._news.notify_all()

    def keep_means(self, digests: Collection[str]) -> None:
        """Forget all means that this lane keeps but those with these digests."""
        self._means = {digest: parts for digest, parts in self._means.items() if digest in digests}

    def mean(self, digest: str) -> Sequence[bytes] | None:
        """This lane's encoded parts of the kept mean with that digest; None: it is not kept."""
        return self._means.get(digest)

    def close(self, commit: Commit, number: int) -> Closed:
        """Close a version in this lane. The lane's thread makes its step if that is from state `number`, held here."""
        parts = self._means.get(commit.mean_digest, ())  # of a founding there is none, and a witness holds none
        stepping = None
        if parts and commit.fragment >= 0:
            stepping = self._step_from(number, commit.fragment, self.terms.weighing.share(commit.counted, commit.view))
        self._stepping, self._contribution = None, None
        self.drop()
        if stepping is None:
            return Closed(commit, parts)
        averaging = self._stepper.submit(stepping.average, parts)
        stepped = self._stepper.submit(stepping.outer, parts) if self.terms.ahead else None
        return SteppedVersion(commit, parts, stepping, self._stepper, averaging, stepped)

    def close_for_follower(self, commit: Commit, number: int) -> None:
        """Close a version in the lane of a rank that does not lead, for `Lane.closed` to find."""
        closed = self.close(commit, number)
        with self._news:
            if commit.fragment >= 0:  # else no rank applies anything
                self._closed[commit.version] = number, closed
            self._news.notify_all()

    def pass_over(self, version: int, again: Sequence[Commit]) -> None:
        """Forget the versions from this one on that were closed here: no rank applies them. But `again` are applied."""
        kept = {v: entry for v, entry in self._closed.items() if v < version}
        means = {c.version: Closed(c, self._means.get(c.mean_digest, ())) for c in again if c.fragment >= 0}
        with self._news:
            self._closed = kept | {v: (0, closed) for v, closed in means.items()}
            self._news.notify_all()

    def _step_from(self, number: int, fragment: int, share: float) -> Stepping | None:
        """The outer step from the lane's state `number`: the one begun if it is this very step. None: not held."""
        state, terms, begun = self._states.get(number), self.terms, self._stepping
        if state is None:
            return None
        piece = terms.layout.fragments[fragment]
        if begun is not None and (begun.state, begun.fragment.index, begun.share) == (state, fragment, share):
            return begun
        return Stepping(state, piece, terms.codecs, terms.optimizer, share, terms.ahead)

    @property
    def key(self) -> Key | None:
        """Version and attempt that this lane has under way; None: none."""
        return self.work.key if self.work is not None else None

    def owners(self) -> Mapping[int, str]:
        """Owner of each part in the lane's attempt, also of parts that other lanes hold."""
        return self.work.owners if self.work is not None else {}

    # ------------------------------------------------------------ the state, for other peers

    def _keep_state(self, number: int, state: OuterState) -> None:
        self._states[number] = state

    def retain(self, numbers: Collection[int]) -> None:
        """Forget the states of this lane that are older than the latest of these numbers, but for these."""
        latest = max(numbers, default=0)
        self._states = {n: state for n, state in self._states.items() if n in numbers or n > latest}

    def chunk(self, number: int, entry: StateChunk) -> bytes | None:
        """The part of a state that this lane holds, for another peer's copy; None if that state is gone."""
        state = self._states.get(number)
        return state.chunk(entry) if state is not None else None

    def begin_copy(self) -> None:
        """Begin to copy a state from other peers into this lane; the copy begins with the lane's latest state."""
        assert self._latest is not None
        self._copied = None
        self._copy.begun += 1
        self._spawn(self._beside(self._copy.begin, self._latest))

    def fill(self, buffer: str, part: int, data: bytes) -> None:
        """Put one part into the copy of a state that this lane receives."""
        self._spawn(self._beside(self._copy.fill, buffer, part, data))

    def end_copy(self, version: int, steps: Sequence[int]) -> None:
        """Complete the copy of a state in this lane: all its parts were passed."""
        self._spawn(self._beside(self._end_copy, self._copy.begun, version, steps))

    def drop_copy(self) -> None:
        """Give up the copy of a state in this lane."""
        self._spawn(self._beside(self._copy.drop))

    async def _beside(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a copy's work of this lane on another thread, in order: to copy a GB takes a third of a second."""
        await self._loop.run_in_executor(self._folder, work, *arguments)

    def _end_copy(self, number: int, version: int, steps: Sequence[int]) -> None:
        state = self._copy.end(version, steps)
        with self._news:
            self._copied = state if number == self._copy.begun else None  # another copy may have begun
            self._news.notify_all()

    # ------------------------------------------------------------ sending

    async def _send_contribution(self, effect: fx.SendContribution) -> None:
        contribution, work, precedence = self._contribution, self.work, self._precedence
        if contribution is None or work is None:
            return
        span = effect.span
        wanted = [part for part in work.fragment.cuts if span.start <= part < span.stop]

        async def flow(parts: Sequence[int]) -> AsyncGenerator[Part]:
            with precedence.first(len(parts)) as out:
                for index in parts:
                    if index == parts[len(parts) // 2]:
                        failpoints.hit("mid-contribution")
                    part = Part(index, await encoded(contribution.parts, index))
                    out()
                    yield part

        failpoints.hit("before-contribution")
        await self.sender.send(effect.to, self._headed(Kind.CONTRIBUTION, effect.generation), wanted, flow)
        failpoints.hit("after-contribution")

    def _open_outlets(self, work: LanePayloads, parts: Sequence[int]) -> None:
        """Open a stream to every receiver for these parts of the lane that are ours, which are yet to be averaged."""
        if not parts:
            return
        outlets = Outlets(parts)
        header = self._headed(Kind.MEAN, work.generation)

        def fitted(receiver: str, part: Part) -> Part:
            payload = work.sent_to(receiver, part.index, part.payload, work.named(part.omitted))
            return replace(part, payload=payload)

        for member in work.begin.receivers:
            if member.peer != work.me:
                flow = partial(outlets.flow, partial(fitted, member.peer), self._precedence, set())
                outlets.streams.append(self._spawn(self.sender.send(member, header, parts, flow)))
        self._outlets.append(outlets)

    def _headed(self, kind: Kind, generation: int) -> StreamHeader:
        assert self._header is not None
        return replace(self._header, kind=kind, generation=generation)

    # ------------------------------------------------------------ receiving

    def _lost(self, member: Member) -> None:
        self._head.on_lost(member)

    @property
    def _head(self) -> LaneEvents:
        assert self.head is not None
        return self.head

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        """Take a stream of parts from another peer into this lane."""
        reply = await self._head.admit(header)
        if reply is not m.Reply.OK:
            return reply
        work, key = self.work, header.key
        if work is None or work.key != key or not work.knows(header.sender.peer):
            return m.Reply.STALE
        try:
            async for part in parts:
                if self.work is not work:
                    return m.Reply.STALE
                reply = await self._take(work, header, part)
                if reply is not m.Reply.OK:
                    return reply
        except LinkRefused as error:
            if error.reply is m.Reply.STALE:
                return error.reply
            if error.reply is not m.Reply.DAMAGED:
                self._refuse(key, header.sender.peer, str(error))
            elif work.damaged(header.sender.peer) >= MAX_STREAM_TRIES:
                self._refuse(key, header.sender.peer, str(error), offence=False)
            raise
        return m.Reply.OK

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        """Note bytes that have arrived in this lane, of a part that may take long to be complete. Raises LinkRefused
        when the attempt is over."""
        work = self.work
        if work is None or work.key != header.key:
            raise LinkRefused(m.Reply.STALE, "that attempt is over here")
        if work.knows(header.sender.peer):
            self._moved.count(size_bytes)

    def _refuse(self, key: Key, sender: str, reason: str, offence: bool = True) -> m.Reply:
        """Report parts to the exchange that are no good: the attempt does not wait for better ones."""
        self._head.on_event(m.ContributionRefused(*key, sender, reason, offence))
        return m.Reply.MALFORMED

    async def _take(self, work: LanePayloads, header: StreamHeader, part: Part) -> m.Reply:
        sender, key = header.sender.peer, work.key
        if not work.expects(header.kind, sender, part.index):
            if work.generation:
                return m.Reply.STALE  # it has another owner since a repair
            return self._refuse(key, sender, f"part {part.index} is not its to send to me")
        if len(part.payload) > work.max_bytes(header.kind, part.index):
            return self._refuse(key, sender, f"part {part.index} has {len(part.payload)} bytes")
        if header.kind is Kind.CONTRIBUTION:
            work.put_contribution(sender, part.index, part.payload)
            self._head.on_event(m.ContributionArrived(*key, sender, part.index))
            return m.Reply.OK
        try:
            omitted = work.named(part.omitted)
            mean = work.received(part.index, part.payload, omitted)
            content = await self._check(work, part.index, mean)
        except PayloadError as error:
            return self._refuse(key, sender, f"sent a mean that does not decode: {error}")
        if not work.expects(header.kind, sender, part.index):
            return m.Reply.STALE  # repaired while we looked at it
        work.put_mean(part.index, mean)
        self._head.on_event(m.MeanArrived(*key, sender, part.index, omitted), content)
        return m.Reply.OK

    async def _fold(self, key: Key, part: int, omitted: Sequence[str]) -> None:
        work = self.work
        if work is None or work.key != key:
            return
        failpoints.hit("before-fold")
        try:
            mean, content = await self._loop.run_in_executor(self._folder, work.fold, part, omitted)
        except BadContribution as error:
            self._head.on_event(m.ContributionRefused(*key, error.sender, str(error)))
            return
        failpoints.hit("after-fold")
        if work.keep(part, mean):
            self._head.on_event(m.PartFolded(*key, part), content)
            await self._check(work, part, mean)

    async def _check(self, work: LanePayloads, part: int, mean: bytes) -> bytes:
        """The `content_hash` of a part of a mean in this lane, which also goes into the outer step, if the state is
        held. Raises PayloadError when nobody could apply the part: then nobody must commit it."""
        stepping = self._stepping if self.work is work else None  # another version's by now
        check = work.check_mean if stepping is None else stepping.take

        def checked() -> bytes:
            try:
                check(part, mean)
            except PayloadError:
                raise
            except Exception as error:  # gRPC would keep it to itself
                self._call(self.failed, error)
                raise
            return content_hash(mean)

        return await self._loop.run_in_executor(self._stepper, checked)
