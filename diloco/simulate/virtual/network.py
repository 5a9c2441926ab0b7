"""The network of simulated peers: a `Link` for each, whose calls are late, lost, cut off, refused or damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.base.errors import ResourceError
from diloco.base.types import Closed, Member
from diloco.protocol.messages import Accept, Envelope, Propose, Reply
from diloco.protocol.streams import CHUNK_BYTES, Limits, Part, ProcessId, StateOffer, StreamHeader, Welcome
from diloco.simulate.memory_link import whole
from diloco.simulate.virtual.plans.lies import sent_by
from diloco.simulate.virtual.streams import SimulatedStream
from diloco.simulate.virtual.wires import (
    RETRANSMIT_S,
    SimulatedCut,
    SimulatedDeadlines,
    SimulatedUplinks,
    arrives,
    check_means,
    check_sizes,
    flipped,
    name_at,
    refusing,
    state_chunk,
    taking,
)
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow, Service, untold
from diloco.transport.pace import Outbox

if TYPE_CHECKING:
    from diloco.simulate.virtual.follower import SimulatedFollower
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

T = TypeVar("T")

LATE_SHARE = 0.3
"""Share of late messages, for a peer some of whose messages come late."""
FLIPPED_SHARE, BROKEN_SHARE = 0.2, 0.3
"""Share of the calls with a flipped bit, for a peer whose messages are damaged; share of those in which TLS finds it,
and the connection breaks."""
SINGLE_SHARE = 0.5
"""Share of the streams whose parts travel one by one; others' travel as many as there are."""
MORE_SHARE = 0.05
"""Share of a message's time on its way, for one that follows another at once."""
MAX_REMEMBERED = 64
"""Envelopes that an attacker may replay."""


class SimulatedCall:
    """A call of one simulated process to another, from its first byte to its answer."""

    def __init__(
        self,
        caller: SimulatedProcess,
        address: str,
        ask: Callable[[Service], Any],
        waits: bool = True,
        stream: bool = False,
        more: bool = False,
    ) -> None:
        """`waits`: `ask` is a coroutine. `stream`: parts follow. `more`: of what another call has begun to send: it is
        on its way already."""
        self.caller, self.address, self.ask, self.waits, self.stream = caller, address, ask, waits, stream
        self.travels = MORE_SHARE if more else 1.0
        """Share of a message's time on its way."""
        self.answer: asyncio.Future[Any] = caller.loop.create_future()
        self.task: asyncio.Task[Any] | None = None
        """The answering task, in the process that is called."""
        self.over = False
        """It is a stream that was broken off."""

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Give the caller its answer, unless it waits no more."""
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # the caller may look at it, or not

    def expire(self, within_s: float) -> None:
        """There was no answer in time."""
        self.settle(None, LinkSlow(f"{self.address}: no answer within {within_s:g} s"))

    def end(self) -> None:
        """The caller waits no more. A stream is broken off; a message that has arrived is taken all the same."""
        self.over = self.stream
        self.answer.cancel()
        if self.stream and self.task is not None:
            self.task.cancel()


class SimulatedNetwork:
    """All links between simulated peers. Every decision is the dice's."""

    def __init__(self, world: SimulatedWorld, dice: Random, delay_s: float, loss: float) -> None:
        self.world = world
        self.dice = dice
        self.delay_s = delay_s
        self.loss = loss
        self.cuts: list[SimulatedCut] = []
        self.slow: dict[str, float] = {}
        """Peers whose links are so many times slower."""
        self.late: dict[str, float] = {}
        """Peers of whose messages some come so much later (s), when everything else has moved on."""
        self.damaging: set[str] = set()
        """Peers whose streams are damaged on the way."""
        self.flipping: set[str] = set()
        """Peers whose messages are damaged on the way."""
        self.dark: set[str] = set()
        """Peers without power: nothing answers there, not even with a refusal."""
        self.schedules: list[Callable[[SimulatedCall, Envelope], bool]] = []
        """Faults that decide which messages pass, and keep the others."""
        self.uplinks = SimulatedUplinks(world.plan)
        self.seen: list[tuple[Envelope, str]] = []
        self.strangers: list[str] = []
        """Voters that are no members."""
        self._said = count(1)
        """Numbers of the strangers' messages."""
        self._listening: dict[str, SimulatedProcess] = {}
        self._listened: dict[str, SimulatedProcess] = {}
        """Processes that ever listened, by address: the last of each."""

    # ------------------------------------------------------------ who can be reached

    def listen(self, process: SimulatedProcess | SimulatedFollower) -> None:
        """A simulated process answers at its address from now on."""
        self._listening[process.address] = self._listened[process.address] = process  # type: ignore[assignment]
        self.dark.discard(process.name)

    def at(self, address: str) -> SimulatedProcess | None:
        """The simulated process that answers at an address; None: connections are refused there."""
        return self._listening.get(address)

    def died(self, process: SimulatedProcess) -> None:
        """A simulated process is dead: connections to it break."""
        if process.loses_power:
            self.dark.add(process.name)
        places: list[SimulatedProcess | SimulatedFollower] = [process, *process.followers]
        for place in places:
            if self._listening.get(place.address) is place:
                del self._listening[place.address]
            for call in list(place.calls):
                self._refuse(call, process.name)
            place.calls.clear()

    def sever(self, cut: SimulatedCut) -> None:
        """Cut peers off. Where senders are told, connections that there are break, too."""
        self.cuts.append(cut)
        for process in self._listening.values() if cut.reset else ():
            for call in [one for one in process.calls if cut.blocks(one.caller.name, process.name)]:
                call.settle(None, LinkDown(f"{call.address}: the connection was reset"))

    def moves(self, address: str) -> bool:
        """Whether a process answers at an address, and is not stopped."""
        process = self.at(address)
        return process is not None and process.working

    def blocked(self, source: str, target: str, answers: bool = False) -> bool:
        """Whether a cut of the simulated network blocks this direction, for calls or for `answers` to them."""
        return any(cut.blocks(source, target, answers) for cut in self.cuts)

    def connected(self, source: str, target: str) -> bool:
        """Whether no cut of the simulated network blocks either direction."""
        return not (self.cuts and (self.blocked(source, target) or self.blocked(target, source)))

    def latency(self, source: str, target: str) -> float:
        """Virtual seconds until a message arrives: thrown anew each time."""
        delay_s = self.delay_s * self.dice.random()
        if self.slow:
            delay_s *= max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        return delay_s

    # ------------------------------------------------------------ calls

    def call(self, call: SimulatedCall, more_s: float = 0.0) -> None:
        """Begin a call of a simulated process: it arrives so much later than it need to, or never."""
        caller, target = call.caller.name, name_at(call.address)
        if call.caller.loop.dead:
            return
        if self.cuts and self.blocked(caller, target):
            self.world.count("blocked messages")
            if any(cut.reset and cut.blocks(caller, target) for cut in self.cuts):
                self.world.after(self.delay_s, call.settle, None, LinkDown(f"{call.address}: no way there"))
            elif call.stream:
                self.world.after(RETRANSMIT_S, self._again, call)
            return
        more_s += self.uplinks.message_s(caller, self.world.now)
        self.world.after(self.latency(caller, target) * call.travels + more_s, self._arrive, call)

    def _again(self, call: SimulatedCall) -> None:
        if not call.over and not call.caller.loop.dead:
            self.call(call)

    def _arrive(self, call: SimulatedCall) -> None:
        if call.over or (call.caller.loop.dead and call.stream):
            return
        target = self.at(call.address)
        if target is None or target.service is None:
            self._refuse(call, name_at(call.address))
            return
        target.calls[call] = None
        if call.waits:
            task = call.task = target.loop.create_task(call.ask(target.service))
            task.add_done_callback(lambda _: self._answered(call, target, task))
        else:
            target.loop.call_soon(self._answer, call, target, target.service)

    def _answer(self, call: SimulatedCall, target: SimulatedProcess, service: Service) -> None:
        """Answer a call of a simulated process at once, in the process that is called."""
        try:
            result, error = call.ask(service), None
        except LinkRefused as refusal:
            result, error = None, refusal
        target.calls.pop(call, None)
        self._return(call, target.name, result, error)

    def _answered(self, call: SimulatedCall, target: SimulatedProcess, task: asyncio.Task[Any]) -> None:
        target.calls.pop(call, None)
        if task.cancelled():
            self._return(call, target.name, None, LinkDown(f"{call.address}: gone"))
        elif (error := task.exception()) is not None:
            if isinstance(error, ResourceError):  # a lane of an island that ends: gRPC breaks the stream off
                error = LinkDown(f"{call.address}: {error.cause}")
            elif not isinstance(error, LinkRefused):
                raise error
            self._return(call, target.name, None, error)
        else:
            self._return(call, target.name, task.result(), None)

    def _refuse(self, call: SimulatedCall, target: str) -> None:
        if target in self.dark:
            return
        self._return(call, target, None, LinkDown(f"{call.address}: nobody is there"))

    def _return(self, call: SimulatedCall, target: str, result: Any, error: BaseException | None) -> None:
        """An answer travels back."""
        if call.over or (self.cuts and self.blocked(target, call.caller.name, answers=True)):
            return
        self.world.after(self.latency(target, call.caller.name) * call.travels, call.settle, result, error)

    # ------------------------------------------------------------ messages

    def send(self, call: SimulatedCall, envelope: Envelope) -> None:
        """Deliver a message to a simulated peer once, never, or twice."""
        self._remember(envelope, call.address)
        for stranger in self.strangers:
            self._vote(Member(stranger, 1, f"{stranger}:0"), call.caller, envelope)
        if self.loss and self.dice.random() < self.loss:
            self.world.count("lost messages")
            return
        if self.flipping and self._flips(call, envelope):
            return
        self.call(call, self._lateness(call.caller.name))
        if self.loss and self.dice.random() < self.loss:
            self.world.count("doubled messages")
            self.call(SimulatedCall(call.caller, call.address, call.ask, call.waits), self._lateness(call.caller.name))

    def _flips(self, call: SimulatedCall, envelope: Envelope | None = None) -> bool:
        """Damage a call now and then. True: its connection breaks."""
        flips = {call.caller.name, name_at(call.address)} & self.flipping
        if not flips or self.dice.random() >= FLIPPED_SHARE:
            return False
        self.world.count("flipped bits")
        try:
            if envelope is None or self.dice.random() < BROKEN_SHARE:
                raise LinkDown("TLS found damaged bytes")
            call.ask = taking(flipped(envelope, self.dice))
        except LinkRefused as error:
            call.ask = refusing(error)
        except LinkDown as error:
            self.world.after(self.latency(call.caller.name, name_at(call.address)), call.settle, None, error)
            return True
        return False

    def _lateness(self, sender: str) -> float:
        if sender not in self.late or self.dice.random() >= LATE_SHARE:
            return 0.0
        self.world.count("late messages")
        return self.dice.uniform(0, self.late[sender])

    def _remember(self, envelope: Envelope, address: str) -> None:
        if self.world.replays:
            if len(self.seen) < MAX_REMEMBERED:
                self.seen.append((envelope, address))
            else:
                self.seen[self.dice.randrange(MAX_REMEMBERED)] = (envelope, address)

    def _vote(self, stranger: Member, coordinator: SimulatedProcess, envelope: Envelope) -> None:
        """The fault "stranger": one that is no member accepts a proposal, in the name of all members."""
        if isinstance(envelope.body, Propose):
            proposal = envelope.body
            accept = Accept(proposal.height, proposal.attempt, proposal.commit.digest)
            said = replace(envelope, sender=stranger, sequence=next(self._said), body=accept)
            self.world.after(self.latency(stranger.peer, coordinator.name), self.throw_in, coordinator, said)

    def replay(self) -> None:
        """The fault "replay": an attacker sends old messages again, to the simulated peers they were meant for."""
        for envelope, address in self.seen:
            process = self.world.hosts.get(name_at(address))
            if process is not None:
                self.throw_in(process, envelope)

    def throw_in(self, process: SimulatedProcess, envelope: Envelope) -> None:
        """A message reaches a simulated process, and nobody waits for its answer."""
        if process.alive and process.service is not None:
            process.loop.create_task(process.service.on_envelope(envelope))


# ---------------------------------------------------------------- links


class SimulatedLink(Link):
    """Calls of one simulated process to others."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, rpc_s: float) -> None:
        self._network, self._process = network, process
        self._deadlines = SimulatedDeadlines(process.loop, rpc_s)
        """For messages."""
        self.silent_s: dict[str, float] = {}
        """By address: when it last refused to say who it is, or let a message wait for an answer."""
        self.answered_s: dict[str, float] = {}
        """By address: when a message or a question was answered last."""

    @property
    def send_bps(self) -> int:
        return self._process.send_bps

    async def deliver(self, address: str, envelope: Envelope) -> Reply:
        call = SimulatedCall(self._process, address, taking(envelope), waits=False)
        if all(passes(call, envelope) for passes in self._network.schedules):
            self._network.send(call, envelope)
        self._deadlines.add(call)
        try:
            reply: Reply = await call.answer
            self.answered_s[address] = self._network.world.now
            return reply
        except LinkSlow:
            self.silent_s[address] = self._network.world.now
            raise
        except LinkRefused:
            self.answered_s[address] = self._network.world.now
            raise
        finally:
            call.end()

    async def send_parts(
        self,
        address: str,
        header: StreamHeader,
        parts: AsyncGenerator[Part],
        stall_s: float,
        taken: Callable[[int], None] = untold,
    ) -> Reply:
        stream = SimulatedStream(self._network, self._process, address, header, taken)
        call = SimulatedCall(self._process, address, lambda s: s.on_parts(header, stream.arriving(s)), stream=True)
        self._network.call(call)
        outbox = Outbox(sent_by(self._process, header, address, parts))

        def over(_: Any) -> None:
            outbox.close()
            stream.end()

        call.answer.add_done_callback(over)
        single = self._network.dice.random() < SINGLE_SHARE or self._network.uplinks.limited
        bite = 1 if single else CHUNK_BYTES
        try:
            batch: Sequence[Part] = [None]  # type: ignore[list-item]
            while batch and not call.answer.done():
                batch = await outbox.take(bite)
                if not call.answer.done():
                    await stream.carry(batch, stall_s)
            reply: Reply = await _answer(call, stall_s)
            return reply
        finally:
            outbox.close()
            call.end()

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        named = self._network.world.machines.named
        try:
            there = await self._ask_now(address, timeout_s, lambda s: replace(s.on_hello(), process=named(address)))
            self.answered_s[address] = self._network.world.now
            return there
        except LinkDown:
            self.silent_s[address] = self._network.world.now
            raise

    async def lanes(self, address: str, timeout_s: float) -> tuple[str, ...]:
        return await self._ask_now(address, timeout_s, lambda service: service.on_lanes())

    async def fetch_commits(self, address: str, since: int, limits: Limits, stall_s: float) -> list[Closed]:
        found = await self._ask(address, stall_s, lambda service: whole(service.on_fetch_commits(since)))
        found = await arrives(self._network, self._process.name, address, found, stall_s)
        check_means([closed.parts for closed in found], limits)
        return found

    async def fetch_mean(self, address: str, mean_digest: str, limits: Limits, stall_s: float) -> list[bytes]:
        payloads = await self._ask(address, stall_s, lambda service: service.on_fetch_mean(mean_digest))
        if payloads is None:
            raise LinkRefused(Reply.STALE, f"{address}: that mean is not here")
        payloads = await arrives(self._network, self._process.name, address, payloads, stall_s)
        check_means([payloads], limits)
        return list(payloads)

    async def fetch_state_offer(self, address: str, timeout_s: float, have: str = "") -> StateOffer:
        return await self._ask(address, timeout_s, lambda service: service.on_state_offer(have))

    async def fetch_state(
        self,
        address: str,
        digest: str,
        chunks: Sequence[int],
        max_chunk_bytes: int,
        stall_s: float,
        came: Callable[[int], None] = untold,
    ) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
        self._network.world.log_once(self._process.name, f"copies the state from {name_at(address)}")
        for index in chunks:
            payload = await self._ask(address, stall_s, state_chunk(digest, index), more=index != chunks[0])
            if payload is None:
                raise LinkRefused(Reply.STALE, f"{address}: chunk {index} of that state is not here")
            payload = await arrives(self._network, self._process.name, address, payload, stall_s)
            check_sizes([payload], max_chunk_bytes)
            came(len(payload))
            yield index, [payload]

    async def status(self, address: str, timeout_s: float) -> str:
        return await self._ask_now(address, timeout_s, lambda service: service.on_status())

    def lives(self, process: ProcessId) -> bool | None:
        return self._network.world.machines.lives(self._process, process)

    async def close(self) -> None:
        """Does nothing: connections end with the process."""

    async def _ask(
        self, address: str, within_s: float, ask: Callable[[Service], Awaitable[T]], more: bool = False
    ) -> T:
        call = SimulatedCall(self._process, address, ask, more=more)
        if not (self._network.flipping and self._network._flips(call)):
            self._network.call(call)
        found: T = await _answer(call, within_s)
        return found

    async def _ask_now(self, address: str, within_s: float, ask: Callable[[Service], T]) -> T:
        call = SimulatedCall(self._process, address, ask, waits=False)
        self._network.call(call)
        found: T = await _answer(call, within_s)
        return found


async def _answer(call: SimulatedCall, within_s: float) -> Any:
    """The answer to a call. Raises LinkDown, LinkSlow, LinkRefused."""
    late = call.caller.loop.call_later(within_s, call.expire, within_s)
    try:
        return await call.answer
    finally:
        late.cancel()
        call.end()
