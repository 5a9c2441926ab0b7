"""The exchange under gossip: moves the bytes of one swap at a time, on a loop of its own. Also what the link calls.

    leader (training thread)        leader's loop                 follower's loop            follower (training thread)
    invite ----------------------> Invite ----------------------> free? OK
    Agreed <----------------------
    give(local weights) ---------> ==== WEIGHTS ================> decoded, whole
                                                                  Here ---------------------> between two inner steps:
                                                                  <---------------------- give(local weights), applied
    Here <------------------------ <================ ANSWER =====
    applied

Neither side stops training for it. Every wait has a deadline; who hears nothing gives the swap up, keeps its progress
and meets somebody else next time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.threads import one_thread
from diloco.base.types import Closed, Member, Progress
from diloco.compress import PayloadError
from diloco.exchange.archive import Backlog, Snapshots, make_offer
from diloco.exchange.background import Background
from diloco.exchange.statesync import download
from diloco.gossip.acquaintances import Acquaintances, gossip_status_json
from diloco.gossip.swaps import Swap, Swaps, SwapStage
from diloco.gossip.transfer import Agreed, Arriving, Failed, GossipTerms, Here, Outgoing
from diloco.outer.average import max_part_bytes
from diloco.outer.state import OuterState
from diloco.protocol import messages as m
from diloco.protocol.messages import Acquaintance, Greeting, Invite
from diloco.protocol.roster import Admission
from diloco.protocol.streams import Kind, Part, StateOffer, StreamHeader, Welcome
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow
from diloco.transport.pace import RateLimit

logger = logging.getLogger(__name__)

MAX_STREAM_TRIES = 3
STREAM_PAUSE_S = 0.1
"""How often weights are sent on a line that breaks or damages them, and how soon again."""
MAX_STEP_S = 60.0
"""A peer serves a swap between two inner steps, and tells how long they take; it is believed up to this."""
TICKS_PER_STALL = 8
SEEK_S = 10.0
"""How often one of those that fell silent is asked whether it is back."""
MAX_GREETED = 8
"""Of the peers that a directory names, so many are asked whom they know."""
MAX_WELCOMED = 64
"""Members that a stranger is told of; the first it greets tells it of the others."""


News = Agreed | Here | Failed


class Swapping(Background):
    """One peer's side that faces the world."""

    def __init__(
        self,
        me: Member,
        terms: GossipTerms,
        link: Link,
        lineage: str,
        loop: asyncio.AbstractEventLoop,
        on_reason: Callable[[str, bool], None],
        on_met: Callable[[Sequence[str]], None],
    ) -> None:
        """`lineage`: the founder's own, or that of the member that welcomed us. `on_met`: told who is new."""
        super().__init__(loop)
        self.terms, self.link, self.lineage = terms, link, lineage
        self.directory: tuple[str, ...] = ()
        self.max_part_bytes = max_part_bytes(terms.layout, terms.codecs)
        self.acquaintances = Acquaintances(me)
        self.others_tokens = 0
        """Trained by all others, as far as is known."""
        self._alive: Sequence[Acquaintance] = ()
        self.reason = ""
        self._fragment = terms.layout.fragments[0]
        self._swaps = Swaps(me.peer)
        self._admission = Admission(terms.run, terms.contract)
        self._on_reason, self._on_met = on_reason, on_met
        self._pool = one_thread("decode")
        self._news: deque[News] = deque()
        self._arriving: Arriving | None = None
        self._answer: Outgoing | None = None
        """To the last swap that we followed: who asks again gets it again."""
        self._offences: Counter[str] = Counter()
        self._sequence = 0
        self._sought_s = monotonic_s()
        self._state: OuterState | None = None
        self._snapshots = Snapshots(Backlog(0, 0))
        self._serving = RateLimit(terms.serve_bps)

    # ------------------------------------------------------------ for the training side (any thread)

    @property
    def me(self) -> Member:
        """This life of this peer."""
        return self.acquaintances.me

    @property
    def version(self) -> int:
        """Swaps that it has applied."""
        return self._state.version if self._state is not None else 0

    @property
    def busy(self) -> bool:
        """Whether it is in a swap."""
        return self._swaps.current is not None

    def start(self, address: str, directory: tuple[str, ...]) -> None:
        """Begin. `address`: where the server listens; `directory`: addresses of our directory node."""
        self.directory = directory
        self.acquaintances.me = replace(self.me, address=address)
        self._call(lambda: self._spawn(self._tick_for_ever()))

    def stop(self) -> None:
        """End the tasks. The link and the server are the caller's."""
        self._end_tasks()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def hold(self, state: OuterState) -> None:
        """The training side stands at `state` now."""
        self._state = state

    def report(self, progress: Progress, spread: float, swap_s: float) -> None:
        """What is told of this peer."""
        known = self.acquaintances
        known.progress, known.spread, known.swap_s = progress, spread, swap_s

    def alive(self) -> Sequence[Acquaintance]:
        """The others that may be met."""
        return self._alive

    @property
    def alone(self) -> bool:
        """Whether we know nobody that lives."""
        return not self._alive

    @property
    def others(self) -> Sequence[Member]:
        """Whom we know and that live."""
        return [word.member for word in self._alive]

    def meet(self, members: Sequence[Member]) -> None:
        """Peers to talk to, from a welcome or from the directory."""
        self._call(self._meet, tuple(members))

    def greet(self, member: Member) -> None:
        """Tell it whom we know, and hear whom it knows."""
        self._call(lambda: self._spawn(self._greet(member, answer=False)))

    def invite(self, member: Member) -> None:
        """Lead a swap with it, if we are in none. `news` tells what comes of it."""
        self._call(self._invite, member)

    def news(self) -> list[News]:
        """What happened since the last call."""
        self.raise_failure()
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def give(self, swap: Swap, weights: Tensor) -> None:
        """Our local weights, flat fp32, not to be written any more: to begin a swap that we lead, or to end another."""
        self._call(self._give, swap, weights)

    def applied(self, swap: Swap) -> None:
        """The swap that we led is over."""
        self._call(self._swaps.end, swap)

    def refuse(self, swap: Swap, reason: str) -> None:
        """The other sent what no honest peer sends, or we have nothing to give."""
        self._call(self._refuse, swap, reason)

    def cancel(self, swap: Swap, reason: str) -> None:
        """We have nothing to give."""
        self._call(self._fail, swap, reason)

    def copy_state(
        self, source: str, local: OuterState, progress: Callable[[int, int], None]
    ) -> Future[tuple[OuterState, StateOffer]]:
        """The state of the member at this address. Cancelled, it is given up. Raises StateError."""
        terms = self.terms
        task = download(self.link, [source], local, terms.layout, terms.optimizer, terms.timing.stall_s, progress)
        return self._start_task(task)

    # ------------------------------------------------------------ the loop's thread from here on

    async def _tick_for_ever(self) -> None:
        stall_s = self.terms.timing.stall_s
        while True:
            overdue = self._swaps.overdue(monotonic_s())
            if overdue is not None:
                self._lose(overdue.partner.peer)
                self._fail(overdue, f"no weights from {overdue.partner.peer} in time")
            self._refresh()
            self._seek(monotonic_s())
            self._snapshots.forget(0, monotonic_s())  # no version closes, upon which it would be looked at
            await asyncio.sleep(stall_s / TICKS_PER_STALL)

    def _seek(self, now_s: float) -> None:
        """Greet one of those that fell silent, now and then. After a cut that both sides noticed neither would ask the
        other again, and each would train on for itself."""
        member = self.acquaintances.silent(now_s) if now_s - self._sought_s >= SEEK_S else None
        if member is not None:
            self._sought_s = now_s
            self.acquaintances.lost(member.peer, now_s)  # it is another's turn next time
            self._spawn(self._look_for(member))

    async def _look_for(self, member: Member) -> None:
        greeting = Greeting(self.acquaintances.publish(monotonic_s()), False)
        with suppress(LinkDown, LinkSlow, LinkRefused):  # it is still away, which is no news
            await self.link.deliver(member.address, self._envelope(greeting))

    def _publish(self, news: News) -> None:
        self._news.append(news)

    def _note(self, reason: str, routine: bool = False) -> None:
        if reason != self.reason:
            self.reason = reason
            self._on_reason(reason, routine)

    def _hear(self, words: Sequence[Acquaintance]) -> None:
        new = self.acquaintances.hear(words, monotonic_s())
        self._refresh()
        if new:
            self._on_met(new)

    def _lose(self, peer: str) -> None:
        """It does not answer, or nothing sensible."""
        self.acquaintances.lost(peer, monotonic_s())
        self._refresh()

    def _refresh(self) -> None:
        """What the training thread sees of the others: it never waits for this one."""
        self._alive = self.acquaintances.alive(monotonic_s())
        self.others_tokens = self.acquaintances.tokens()

    def _patience_s(self, peer: str) -> float:
        """How long it may take until that peer is between two inner steps, and then some. As long as it has not told
        its pace, it is taken to be ours."""
        word = self.acquaintances.get(peer)
        pace = (word.progress.pace if word is not None else 0.0) or self.acquaintances.progress.pace
        step_s = self.terms.tokens_per_step / pace if pace > 0 else 0.0
        return self.terms.timing.stall_s + 2 * min(step_s, MAX_STEP_S)

    # ------------------------------------------------------------ talking

    def _envelope(self, body: m.Body) -> m.Envelope:
        self._sequence += 1
        terms = self.terms
        return m.Envelope(terms.run, terms.contract, self.lineage, self.me, "", self._sequence, body)

    async def _deliver(self, member: Member, body: m.Body) -> m.Reply | None:
        """Its answer; None: there is none, and it is not met again for now."""
        try:
            reply = await self.link.deliver(member.address, self._envelope(body))
        except LinkRefused as error:
            reply = error.reply
        except (LinkDown, LinkSlow) as error:
            self._lose(member.peer)
            self._note(f"{member.peer} does not answer: {type(error).__name__}", routine=True)
            return None
        if reply not in (m.Reply.OK, m.Reply.BUSY, m.Reply.STALE):
            self._lose(member.peer)
            self._note(f"{member.peer} refuses: {reply.name}")
        return reply

    def _meet(self, members: Sequence[Member]) -> None:
        strangers = [one for one in members if one.peer != self.me.peer and self.acquaintances.get(one.peer) is None]
        for stranger in strangers[:MAX_GREETED]:
            self._spawn(self._greet(stranger, answer=False))

    async def _greet(self, member: Member, answer: bool) -> None:
        await self._deliver(member, Greeting(self.acquaintances.publish(monotonic_s()), answer))

    def _invite(self, member: Member) -> None:
        swap = self._swaps.lead(member)
        if swap is not None:
            self._spawn(self._lead(swap))

    async def _lead(self, swap: Swap) -> None:
        reply = await self._deliver(swap.partner, Invite(swap.number, self.acquaintances.myself()))
        if reply is m.Reply.OK and self._swaps.agreed(swap):
            self._publish(Agreed(swap))
        else:
            self._swaps.end(swap)

    # ------------------------------------------------------------ sending

    def _give(self, swap: Swap, weights: Tensor) -> None:
        if self._swaps.current is not swap:
            return
        outgoing = Outgoing(swap, weights, self._fragment, self.terms.codecs)
        if swap.leads:
            self._spawn(self._send_weights(outgoing))
            return
        self._swaps.served(swap)
        self._swaps.end(swap)
        self._answer = outgoing
        self._spawn(self._send_answer(outgoing))

    async def _send_weights(self, outgoing: Outgoing) -> None:
        swap = outgoing.swap
        problem = await self._stream(Kind.WEIGHTS, outgoing)
        if problem:
            self._fail(swap, problem)
        else:
            self._swaps.moved(swap, monotonic_s(), self._patience_s(swap.partner.peer))

    async def _send_answer(self, outgoing: Outgoing) -> None:
        """Should it be lost, the other keeps its progress, and we have swapped all the same."""
        problem = await self._stream(Kind.ANSWER, outgoing)
        if problem:
            self._note(f"our answer was not taken: {problem}")

    async def _stream(self, kind: Kind, outgoing: Outgoing) -> str:
        """Send our weights, from the start again when the line breaks: the receiver ignores what it has. Returns what
        went wrong, if anything did."""
        to, problem = outgoing.swap.partner, ""
        for _ in range(MAX_STREAM_TRIES):
            problem, again = await self._stream_once(to, kind, outgoing)
            if not again:
                return problem
            await asyncio.sleep(STREAM_PAUSE_S)
        self._lose(to.peer)
        return problem

    async def _stream_once(self, to: Member, kind: Kind, outgoing: Outgoing) -> tuple[str, bool]:
        """What went wrong, and whether to try again."""
        terms, known = self.terms, self.acquaintances.publish(monotonic_s())
        number = outgoing.swap.number
        header = StreamHeader(terms.run, terms.contract, self.lineage, self.me, kind, number, 0, 0, known)
        try:
            reply = await self.link.send_parts(to.address, header, outgoing.parts(), terms.timing.stall_s)
        except LinkDown:
            return f"{to.peer} is gone", True
        except LinkSlow as error:
            self._lose(to.peer)
            return f"{to.peer}: {error}", False
        except LinkRefused as error:
            return f"{to.peer} refuses: {error}", error.reply is m.Reply.DAMAGED
        return ("" if reply is m.Reply.OK else f"{to.peer} refuses: {reply.name}"), reply is m.Reply.DAMAGED

    def _fail(self, swap: Swap, reason: str) -> None:
        if self._swaps.end(swap):
            self._arriving = None
            self._note(reason)
            self._publish(Failed(swap, reason))

    def _refuse(self, swap: Swap, reason: str) -> m.Reply:
        peer = swap.partner.peer
        self._offences[peer] += 1
        self._lose(peer)
        self._fail(swap, f"{peer} sent what no honest peer sends: {reason}")
        return m.Reply.MALFORMED

    # ------------------------------------------------------------ what others ask (Service)

    def _admits(self, run: str, contract: str, lineage: str, sender: Member) -> m.Reply:
        reply = self._admission.same_training(run, contract)
        if reply is not m.Reply.OK:
            return reply
        if lineage != self.lineage:
            return m.Reply.OTHER_LINEAGE
        if self._offences[sender.peer] >= self.terms.offences_allowed:
            return m.Reply.BARRED
        return m.Reply.OK if self.acquaintances.admits(sender) else m.Reply.FENCED

    async def on_envelope(self, envelope: m.Envelope) -> m.Reply:
        body, sender = envelope.body, envelope.sender
        if isinstance(body, m.Evict):
            reply = self._admission.same_training(envelope.run, envelope.contract)
            word = self.acquaintances.get(body.peer)
            if reply is m.Reply.OK and word is not None and word.member.incarnation == body.incarnation:
                self._lose(body.peer)
            return reply
        reply = self._admits(envelope.run, envelope.contract, envelope.lineage, sender)
        if reply is not m.Reply.OK:
            return reply
        match body:
            case Greeting(known, answer) if known and known[0].member == sender:
                self._hear(known)
                if not answer:
                    self._spawn(self._greet(sender, answer=True))
                return m.Reply.OK
            case Invite(number, word) if word.member == sender:
                self._hear([word])
                return self._swaps.invited(sender, number, monotonic_s(), self._patience_s(sender.peer))
        return m.Reply.MALFORMED

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> m.Reply:
        reply = self._admits(header.run, header.contract, header.lineage, header.sender)
        if reply is not m.Reply.OK:
            return reply
        named = bool(header.known) and header.known[0].member == header.sender
        if header.kind not in (Kind.WEIGHTS, Kind.ANSWER) or not named:
            return m.Reply.MALFORMED
        self._hear(header.known)
        if header.kind is Kind.WEIGHTS and self._swaps.has_served(header.sender, header.version):
            return self._answer_again(header)
        place = header.sender, header.version, header.kind is Kind.ANSWER
        swap = self._swaps.awaited(*place)
        if swap is None:
            return m.Reply.OK if self._swaps.has_whole(*place) else m.Reply.STALE
        try:
            return await self._take_all(swap, parts)
        except PayloadError as error:
            return self._refuse(swap, str(error))
        except LinkRefused as error:
            if error.reply is not m.Reply.DAMAGED:
                self._refuse(swap, str(error))
            raise

    def on_bytes(self, header: StreamHeader) -> None:
        """On a slow line one part takes longer than nothing may come."""
        swap = self._swaps.awaited(header.sender, header.version, header.kind is Kind.ANSWER)
        if swap is not None:
            self._swaps.moved(swap, monotonic_s(), self.terms.timing.stall_s)

    def _answer_again(self, header: StreamHeader) -> m.Reply:
        answer = self._answer
        if answer is None or answer.swap.leader != (header.sender.peer, header.sender.incarnation, header.version):
            return m.Reply.STALE
        self._spawn(self._send_answer(answer))
        return m.Reply.OK

    async def _take_all(self, swap: Swap, parts: AsyncIterator[Part]) -> m.Reply:
        if self._arriving is None or self._arriving.swap is not swap:
            self._arriving = Arriving(swap, self._fragment, self.terms.codecs)
        arriving = self._arriving
        async for part in parts:
            if swap.stage is SwapStage.WHOLE:
                break
            await self._loop.run_in_executor(self._pool, arriving.take, part)
            if self._swaps.current is not swap:
                return m.Reply.STALE
            self._swaps.moved(swap, monotonic_s(), self.terms.timing.stall_s)
            if not arriving.missing and self._swaps.whole(swap):
                self._arriving = None
                word = self.acquaintances.get(swap.partner.peer)
                self._publish(Here(swap, arriving.values, word.progress.phase if word is not None else ""))
        return m.Reply.OK

    def on_hello(self) -> Welcome:
        terms = self.terms
        if not self.me.address:
            raise LinkRefused(m.Reply.TOO_EARLY, "still starting")
        others = tuple(word.member for word in self.acquaintances.alive(monotonic_s())[:MAX_WELCOMED])
        return Welcome(
            terms.contract_json, self.lineage, self.version, True, (self.me, *others), self.directory,
            terms.layout.digest, terms.data,
        )  # fmt: skip

    def on_lanes(self) -> tuple[str, ...]:
        return ()

    async def on_fetch_commits(self, since: int) -> list[Closed]:
        return []

    async def on_fetch_mean(self, mean_digest: str) -> Sequence[bytes] | None:
        return None

    async def on_state_offer(self, have: str) -> StateOffer:
        """As of before the first swap: the joiner's own swaps are counted from there."""
        if self._state is None:
            raise LinkRefused(m.Reply.TOO_EARLY, "no state here yet")
        state = OuterState(0, self._state.fragments)
        offer = await self._loop.run_in_executor(self._pool, make_offer, state, None)
        return offer if have == offer.digest else self._snapshots.offer(state, offer, monotonic_s())

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        return self._snapshots.chunk(digest, chunk, monotonic_s())

    async def on_state_bytes(self, size_bytes: int) -> None:
        await asyncio.sleep(self._serving.delay_s(size_bytes, monotonic_s()))

    def on_status(self) -> str:
        terms = {
            "run": self.terms.run,
            "contract_digest": self.terms.contract,
            "lineage": self.lineage,
            "total_tokens": self.terms.total_tokens,
            "send_bps": self.link.send_bps,
            "directory": list(self.directory),
        }
        return gossip_status_json(self.acquaintances, terms, self.reason, monotonic_s())
