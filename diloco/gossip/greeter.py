"""Peers that one peer meets under gossip: whom it asks, hears and greets, on the loop of its exchange.

A peer is found by its own greeting, in the words of others, or in the directory. All of these can lie, and give the
address of somebody who has no part in the run. So an address gets one `Hello` at a time (`Lives`), and nothing else
until it has answered as the life that is said to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from diloco.base.clock import monotonic_s
from diloco.base.types import Member
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.background import ExchangeTasks
from diloco.exchange.lives import Lives
from diloco.gossip.acquaintances import Acquaintances, Row, table_of, tokens_in
from diloco.observe.events import Event, Remark, ViewChanged
from diloco.outer.line import Line
from diloco.peer.terms import timing_of
from diloco.protocol import messages as m
from diloco.protocol.greetings import Acquaintance, Greeting
from diloco.storage.checkpoint import Checkpoint
from diloco.transport.endpoint import Runtime
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow

SEEK_S = 10.0
"""Seconds between two greetings of peers that fell silent, one at a time."""
MAX_GREETED = 8
"""Peers greeted of those that the directory names, and asked at once of those known by hearsay."""


@dataclass(frozen=True)
class GossipTerms:
    """Settings from contract and site that swapping needs."""

    agreed: Contract
    site: Site
    run: str
    contract: str
    """Digest of the contract."""
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""


class Greeter(ExchangeTasks):
    """The acquaintances of one peer, and what it says to them. `Swapping` adds the swaps."""

    def __init__(
        self, me: Member, terms: GossipTerms, line: Line, runtime: Runtime, lineage: str, emit: Callable[[Event], None]
    ) -> None:
        """`line`: of the training thread, and only read here. `lineage`: the founder's own, or that of the member that
        welcomed us. `emit`: records an event, from any thread."""
        super().__init__(runtime.loop)
        self.terms, self.link, self.lineage = terms, runtime.link, lineage
        self._line, self._emit = line, emit
        self.acquaintances = Acquaintances(me, terms.agreed.inner.steps * terms.agreed.tokens_per_step)
        self.lives = Lives(runtime.link, timing_of(terms.site))
        self.trusted = ""
        """Address of the member whose weights this peer took, until that has said what others have trained."""
        self.table: Sequence[Row] = ()
        """The others and their tokens, for a checkpoint."""
        self.others_tokens = 0
        """Tokens trained by all others, as far as this peer knows."""
        self._alive: Sequence[Acquaintance] = ()
        self.reason = ""
        self._sequence = 0
        self._sought_s = monotonic_s()

    # ------------------------------------------------------------ for the training side (any thread)

    @property
    def me(self) -> Member:
        """This life of this peer, as its partners see it."""
        return self.acquaintances.me

    def alive(self) -> Sequence[Acquaintance]:
        """The other peers that may be met for a swap."""
        return self._alive

    @property
    def alone(self) -> bool:
        """Whether this peer knows no other that lives to swap with."""
        return not self._alive

    @property
    def others(self) -> Sequence[Member]:
        """The other peers that live, as far as this one knows by gossip."""
        return [word.member for word in self._alive]

    def restore(self, tokens: int, checkpoint: Checkpoint) -> None:
        """Before the exchange starts: go on from this peer's own tokens, and the table of a checkpoint. Raises
        StateError for a table that no peer writes so."""
        self.acquaintances.restore(tokens, table_of(checkpoint), monotonic_s())
        self._refresh()

    def join(self, members: Sequence[Member]) -> None:
        """Greet the members of a welcome. The first is trusted where this peer took nobody's weights: it comes back."""
        self.trusted = self.trusted or members[0].address
        self.greet(members[0])
        self.seek(members[1:])

    def seek(self, listed: Sequence[Member]) -> None:
        """Greet peers that a welcome or the directory names, unless they are known."""
        strangers = [one for one in listed if one.peer != self.me.peer and self.acquaintances.get(one.peer) is None]
        for stranger in strangers[:MAX_GREETED]:
            self.greet(stranger)

    def greet(self, member: Member) -> None:
        """Exchange tables of acquaintances with this peer."""
        self._call(lambda: self._spawn(self._greet(member, answer=False)))

    # ------------------------------------------------------------ the loop's thread from here on

    def _seek(self, now_s: float) -> None:
        """Ask those that are known by hearsay, and now and then greet one that fell silent."""
        for stranger in self.acquaintances.strangers(now_s)[:MAX_GREETED]:
            self._spawn(self._verify(stranger))
        # After a cut that both sides noticed neither would ask the other again, and each would train on alone.
        if now_s - self._sought_s >= SEEK_S and (member := self.acquaintances.silent(now_s)) is not None:
            self._sought_s = now_s
            self.acquaintances.lost(member.peer, now_s)  # it is another's turn next time
            self._spawn(self._look_for(member))

    async def _look_for(self, member: Member) -> None:
        """Greet an acquaintance that fell silent."""
        if await self._reaches(member):
            known = self.acquaintances.publish(monotonic_s())
            with suppress(LinkDown, LinkSlow, LinkRefused):  # it is still away, which is no news
                await self.link.deliver(member.address, self._envelope(Greeting(known, answer=False)))

    async def _verify(self, member: Member) -> None:
        """Ask a peer that is known by hearsay whether it is there."""
        if not await self._reaches(member):
            self._lose(member.peer)

    async def _reaches(self, member: Member) -> bool:
        """Whether a life has answered at its address. Before that one `Hello` at a time goes there, and nothing else:
        it is the word of somebody who may lie."""
        if not self.lives.met(member, 0) and not await self.lives.ask(member, 0, stranger=True):
            return False
        if self.acquaintances.answered(member):
            self._refresh(member.peer)
        return True

    def _note(self, reason: str, routine: bool = False) -> None:
        if reason != self.reason:
            self.reason = reason
            self._emit(Remark(reason, routine))

    def _hear(self, words: Sequence[Acquaintance]) -> None:
        """Enter the words of a peer that has answered at its address; the first is of itself."""
        sender = words[0].member
        trusted = sender.address == self.trusted
        new = self.acquaintances.hear(words, monotonic_s(), trusted)
        if trusted and len(words) > 1:  # an invitation has but one
            self.trusted = ""
        self._refresh(*[sender.peer] * new)

    async def _greeted(self, words: Sequence[Acquaintance], answer: bool) -> None:
        """Hear a greeting, and answer it where it is no `answer` itself: once its sender has answered ours."""
        sender = words[0].member
        if not self.lives.met(sender, 0):
            words = words[:1]  # the tables of many strangers that wait would fill the memory
        if await self._reaches(sender):
            self._hear(words)
            if not answer and self.acquaintances.greets_back(sender.peer, monotonic_s()):
                await self._greet(sender, answer=True)

    def _lose(self, peer: str) -> None:
        """Meet this peer no more before a newer word of it: it does not answer, or answers nonsense."""
        self.acquaintances.lost(peer, monotonic_s())
        self._refresh()

    def _refresh(self, *new: str) -> None:
        """Update what the training thread reads of acquaintances: it never waits for this thread. `new`: peers that
        have answered for the first time."""
        self._alive = self.acquaintances.alive(monotonic_s())
        self.table = self.acquaintances.table(monotonic_s())
        self.others_tokens = tokens_in(self.table)
        if new:
            self._emit(ViewChanged(self._line.state.version, new))

    def _envelope(self, body: m.Body) -> m.Envelope:
        self._sequence += 1
        return m.Envelope(self.terms.run, self.terms.contract, self.lineage, self.me, 0, 0, 0, "", self._sequence, body)

    async def _deliver(self, member: Member, body: m.Body) -> m.Reply | None:
        """Deliver one gossip message. Returns the member's reply; None: it gave none, and is not met again for now."""
        try:
            if not await self._reaches(member):
                raise LinkDown(f"no answer at {member.address}")
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

    async def _greet(self, member: Member, answer: bool) -> None:
        await self._deliver(member, Greeting(self.acquaintances.publish(monotonic_s()), answer))
