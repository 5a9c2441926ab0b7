"""The exchange under gossip: moves the bytes of one swap at a time, on a loop of its own. Also the link's `Service`.

    leader (training thread)        leader's loop                 follower's loop            follower (training thread)
    invite ----------------------> Invite ----------------------> free? OK
    Agreed <----------------------
    give(local weights) ---------> ==== WEIGHTS ================> decoded, whole
                                                                  Here ---------------------> between two inner steps:
                                                                  <---------------------- give(local weights), applied
    Here <------------------------ <================ ANSWER =====
    applied

Neither side stops training for it. Every wait has a deadline. A peer whose partner falls silent gives the swap up,
keeps its progress and meets another peer next time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.threads import one_thread
from diloco.base.types import Closed, Member
from diloco.compress import PayloadError
from diloco.exchange.archive import Backlog, Snapshots, make_offer
from diloco.exchange.statesync import download
from diloco.exchange.terms import max_part_bytes
from diloco.gossip.greeter import GossipTerms, Greeter
from diloco.gossip.swaps import Agreed, Arriving, Failed, Here, Outgoing, Swap, Swaps, SwapStage
from diloco.observe.events import Event, StateCopying
from diloco.outer.line import Line
from diloco.outer.state import OuterState
from diloco.peer.terms import serve_bps_of
from diloco.protocol import messages as m
from diloco.protocol.greetings import Greeting, Invite
from diloco.protocol.roster import Admission
from diloco.protocol.streams import Kind, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.endpoint import Runtime
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow
from diloco.transport.pace import RateLimit, StreamQuota

MAX_STREAM_TRIES = 3
MAX_SENDING = 3
"""Streams under way with which an answer is sent once more."""
STREAM_PAUSE_S = 0.1
"""Times that weights are sent on a line that breaks or damages them, and the pause between two of them."""
MAX_STEP_S = 60.0
"""Longest inner step of a partner that we wait for: it serves a swap between two of them, and claims their pace."""
TICKS_PER_STALL = 8
MAX_WELCOMED = 64
"""Members in a welcome. The first one that a joiner greets passes on the others."""


News = Agreed | Here | Failed


class Swapping(Greeter):
    """The exchange of one peer under gossip: its swaps, and its answers to other peers."""

    def __init__(
        self, me: Member, terms: GossipTerms, line: Line, runtime: Runtime, lineage: str, emit: Callable[[Event], None]
    ) -> None:
        """As for `Greeter`."""
        super().__init__(me, terms, line, runtime, lineage, emit)
        self._contract_json = terms.agreed.to_json().encode()
        self.directory: tuple[str, ...] = ()
        self.max_part_bytes = max_part_bytes(line.layout, line.codecs)
        self._fragment, self._stall_s = line.layout.fragments[0], terms.site.timeouts.stall_s
        self._swaps = Swaps(me.peer)
        self._admission = Admission(terms.run, terms.contract)
        self._streams = StreamQuota()
        self._pool = one_thread("decode")
        self._news: deque[News] = deque()
        self._arriving: Arriving | None = None
        self._answer: Outgoing | None = None
        """The weights that answered the last swap that we followed, for a leader that asks again."""
        self._offences: Counter[str] = Counter()
        self.state: OuterState | None = None
        """The outer state that joiners are offered. The training thread sets it."""
        self._snapshots = Snapshots(Backlog(0, 0), terms.site.timeouts.stall_s)
        self._serving = RateLimit(serve_bps_of(terms.site))
        self.sending = 0
        """Weights of swaps that are on their way from here."""
        self.copied_s = 0.0
        """Local time at which bytes of a state last came here."""

    # ------------------------------------------------------------ for the training side (any thread)

    @property
    def version(self) -> int:
        """Swaps that this peer has applied."""
        return self.state.version if self.state is not None else 0

    @property
    def busy(self) -> bool:
        """Whether this peer is in a swap."""
        return self._swaps.current is not None

    def start(self, address: str, directory: tuple[str, ...]) -> None:
        """Begin to look after swaps. `address`: where the server listens; `directory`: addresses of our directory
        node."""
        self.directory = directory
        self.acquaintances.me = replace(self.me, address=address)
        self._call(lambda: self._spawn(self._tick_for_ever()))

    def stop(self) -> None:
        """End the tasks that swap. The link and the server are the caller's."""
        self._end_tasks()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def invite(self, member: Member) -> None:
        """Lead a swap with this peer, if we are in none. `news` has the outcome."""
        self._call(self._invite, member)

    def news(self) -> list[News]:
        """The news of swaps since the last call. Raises what has made the exchange fail."""
        self.raise_failure()
        return [self._news.popleft() for _ in range(len(self._news))]

    def give(self, swap: Swap, weights: Tensor) -> None:
        """Send our local weights: to begin a swap that we lead, or to answer one that we follow. Flat fp32; nobody may
        write to them any more."""
        self._call(self._give, swap, weights)

    def applied(self, swap: Swap) -> None:
        """End a swap that we led."""
        self._call(self._swaps.end, swap)

    def refuse(self, swap: Swap, reason: str) -> None:
        """End a swap whose partner sent what no honest peer sends."""
        self._call(self._refuse, swap, reason)

    def cancel(self, swap: Swap, reason: str) -> None:
        """End a swap to which this peer has no weights to give."""
        self._call(self._fail, swap, reason)

    def copy_state(self, source: str, local: OuterState) -> Future[tuple[OuterState, StateOffer]]:
        """A gossip joiner's copy of a member's outer state. Cancelling the future gives it up. Raises StateError."""

        def progress(done_bytes: int, total_bytes: int) -> None:
            self.copied_s = monotonic_s()
            if done_bytes == total_bytes:
                self._emit(StateCopying(done_bytes, total_bytes))

        self.trusted = source
        layout, optimizer = self._line.layout, self._line.optimizer
        copy = download(self.link, lambda: [source], local, layout, optimizer, self._stall_s, progress=progress)
        return self._start_task(copy)

    # ------------------------------------------------------------ the loop's thread from here on

    async def _tick_for_ever(self) -> None:
        while True:
            now_s = monotonic_s()
            if (overdue := self._swaps.overdue(now_s)) is not None:
                self._lose(overdue.partner.peer)
                self._fail(overdue, f"no weights from {overdue.partner.peer} in time")
            self._refresh()
            self._seek(now_s)
            self._snapshots.forget(0, now_s)  # no version closes, upon which it would be looked at
            await asyncio.sleep(self._stall_s / TICKS_PER_STALL)

    def _patience_s(self, peer: str) -> float:
        """Seconds to wait until a partner is between two inner steps, and then some. A peer whose pace is not known yet
        counts as fast as this one."""
        word = self.acquaintances.get(peer)
        pace = (word.progress.pace if word is not None else 0.0) or self.acquaintances.progress.pace
        step_s = self.terms.agreed.tokens_per_step / pace if pace > 0 else 0.0
        return self._stall_s + 2 * min(step_s, MAX_STEP_S)

    def _invite(self, member: Member) -> None:
        if (swap := self._swaps.lead(member)) is not None:  # at once, not in the task: `busy` must hold from now on
            self._spawn(self._lead(swap))

    async def _lead(self, swap: Swap) -> None:
        reply = await self._deliver(swap.partner, Invite(swap.number, self.acquaintances.myself()))
        if reply is m.Reply.OK and self._swaps.agreed(swap):
            self._news.append(Agreed(swap))
        else:
            self._swaps.end(swap)

    # ------------------------------------------------------------ sending

    def _give(self, swap: Swap, weights: Tensor) -> None:
        if self._swaps.current is not swap:
            return
        outgoing = Outgoing(swap, weights, self._fragment, self._line.codecs)
        if not swap.leads:
            self._swaps.served(swap)
            self._swaps.end(swap)
            self._answer = outgoing
        self._spawn(self._send(outgoing))

    async def _send(self, outgoing: Outgoing) -> None:
        """Send our weights of a swap, again when the line breaks: the partner ignores the parts that it has."""
        self.sending += 1
        try:
            await self._deliver_weights(outgoing)
        finally:
            self.sending -= 1

    async def _deliver_weights(self, outgoing: Outgoing) -> None:
        terms, swap, problem = self.terms, outgoing.swap, ""
        to, kind = swap.partner, Kind.WEIGHTS if swap.leads else Kind.ANSWER
        for _ in range(MAX_STREAM_TRIES):
            known = self.acquaintances.publish(monotonic_s())
            header = StreamHeader(terms.run, terms.contract, self.lineage, self.me, kind, swap.number, 0, 0, known)
            try:
                reply = await self.link.send_parts(to.address, header, outgoing.parts(), self._stall_s)
                problem = "" if reply is m.Reply.OK else f"{to.peer} refuses: {reply.name}"
                again = reply is m.Reply.DAMAGED
            except LinkDown:
                problem, again = f"{to.peer} is gone", True
            except LinkSlow as error:
                self._lose(to.peer)
                problem, again = f"{to.peer}: {error}", False
            except LinkRefused as error:
                problem, again = f"{to.peer} refuses: {error}", error.reply is m.Reply.DAMAGED
            if not again:
                break
            await asyncio.sleep(STREAM_PAUSE_S)
        else:
            self._lose(to.peer)
        if problem and swap.leads:
            self._fail(swap, problem)
        elif problem:  # the other keeps its progress, and we have swapped all the same
            self._note(f"our answer was not taken: {problem}")
        elif swap.leads:
            self._swaps.moved(swap, monotonic_s(), self._patience_s(to.peer))

    def _fail(self, swap: Swap, reason: str) -> None:
        if self._swaps.end(swap):
            self._arriving = None
            self._note(reason)
            self._news.append(Failed(reason))

    def _refuse(self, swap: Swap, reason: str) -> m.Reply:
        peer = swap.partner.peer
        self._offences[peer] += 1
        self._lose(peer)
        self._fail(swap, f"{peer} sent what no honest peer sends: {reason}")
        return m.Reply.MALFORMED

    # ------------------------------------------------------------ what others ask (Service)

    def _admits(self, message: m.Envelope | StreamHeader) -> m.Reply:
        if (reply := self._admission.same_training(message.run, message.contract)) is not m.Reply.OK:
            return reply
        if message.lineage != self.lineage:
            return m.Reply.OTHER_LINEAGE
        if self._offences[message.sender.peer] >= self.terms.agreed.membership.offences_allowed:
            return m.Reply.BARRED
        return m.Reply.OK if self.acquaintances.admits(message.sender) else m.Reply.FENCED

    async def on_envelope(self, envelope: m.Envelope) -> m.Reply:
        body, sender = envelope.body, envelope.sender
        if isinstance(body, m.Evict):
            reply = self._admission.same_training(envelope.run, envelope.contract)
            word = self.acquaintances.get(body.peer)
            if reply is m.Reply.OK and word is not None and word.member.incarnation == body.incarnation:
                self._lose(body.peer)
            return reply
        if (reply := self._admits(envelope)) is not m.Reply.OK:
            return reply
        match body:
            case Greeting(known, answer) if known and known[0].member == sender:
                self._spawn(self._greeted(known, answer))
                return m.Reply.OK
            case Invite(number, word) if word.member == sender:
                if not self.lives.met(word.member, 0):
                    self._spawn(self._greeted([word], answer=True))
                    return m.Reply.BUSY  # by its next invitation it has answered, or our weights would go nowhere
                self._hear([word])
                return self._swaps.invited(word.member, number, monotonic_s(), self._patience_s(sender.peer))
        return m.Reply.MALFORMED

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        if (reply := self._admits(header)) is not m.Reply.OK:
            return reply
        named = bool(header.known) and header.known[0].member == header.sender
        if header.kind not in (Kind.WEIGHTS, Kind.ANSWER) or not named:
            return m.Reply.MALFORMED
        with self._streams.open(header.sender.peer):
            return await self._take(header, parts)

    async def _take(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        if self.lives.met(header.known[0].member, 0):  # others are in no swap
            self._hear(header.known)
        if header.kind is Kind.WEIGHTS and self._swaps.has_served(header.sender, header.height):
            if self._answer is None or not self._answer.swap.led_by(header.sender, header.height):
                return m.Reply.STALE
            if self.sending < MAX_SENDING:  # a leader that lies asks again and again
                self._spawn(self._send(self._answer))
            return m.Reply.OK
        place = header.sender, header.height, header.kind is Kind.ANSWER
        if (swap := self._swaps.awaited(*place)) is None:
            return m.Reply.OK if self._swaps.has_whole(*place) else m.Reply.STALE
        if self._arriving is None or self._arriving.swap is not swap:
            self._arriving = Arriving(swap, self._fragment, self._line.codecs)
        arriving = self._arriving
        try:
            async for part in parts:
                if swap.stage is SwapStage.WHOLE:  # another stream of the same weights brought the last part
                    break
                await self._loop.run_in_executor(self._pool, arriving.take, part)
                if self._swaps.current is not swap:
                    return m.Reply.STALE
                self._swaps.moved(swap, monotonic_s(), self._stall_s)
                if not arriving.missing and self._swaps.whole(swap):
                    self._arriving = None
                    word = self.acquaintances.get(swap.partner.peer)
                    self._news.append(Here(swap, arriving.values, word.progress.phase if word is not None else ""))
        except PayloadError as error:
            return self._refuse(swap, str(error))
        except LinkRefused as error:
            if error.reply is not m.Reply.DAMAGED:
                self._refuse(swap, str(error))
            raise
        return m.Reply.OK

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        """Prolong the swap's deadline: on a slow line one part may take longer than `stall_s`."""
        if (swap := self._swaps.awaited(header.sender, header.height, header.kind is Kind.ANSWER)) is not None:
            self._swaps.moved(swap, monotonic_s(), self._stall_s)

    def on_hello(self) -> Welcome:
        if not self.me.address or self.state is None:
            raise LinkRefused(m.Reply.TOO_EARLY, "still starting, or copying the state")
        others = tuple(word.member for word in self.acquaintances.alive(monotonic_s())[:MAX_WELCOMED])
        return Welcome(
            self._contract_json, self.lineage, self.version, True, (self.me, *others), self.directory,
            self._line.layout.digest, self.terms.data,
        )  # fmt: skip

    def on_lanes(self) -> tuple[str, ...]:
        return ()

    async def on_fetch_commits(self, since: int) -> AsyncIterator[Closed]:
        for closed in list[Closed]():  # nothing is committed
            yield closed

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        return None

    async def on_state_offer(self, have: str) -> StateOffer:
        """Offer the outer state under gossip as version 0: a joiner counts its own swaps."""
        if self.state is None:
            raise LinkRefused(m.Reply.TOO_EARLY, "no state here yet")
        state = OuterState(0, self.state.fragments)
        offer = await self._loop.run_in_executor(self._pool, make_offer, state, None)
        return offer if have == offer.digest else self._snapshots.offer(state, offer, monotonic_s())

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        return self._snapshots.chunk(digest, chunk, monotonic_s())

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        self._snapshots.read(digest, monotonic_s())
        await asyncio.sleep(self._serving.delay_s(size_bytes, monotonic_s()))

    def on_status(self) -> str:
        return json.dumps(
            {
                "run": self.terms.run,
                "contract_digest": self.terms.contract,
                "lineage": self.lineage,
                "total_tokens": self.terms.agreed.run.total_tokens,
                "send_bps": self.link.send_bps,
                "directory": list(self.directory),
                **self.acquaintances.status(self.reason, monotonic_s()),
            }
        )
