"""The network of simulated peers: messages, questions, streams that are late, lost, doubled, cut off, damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, TypeVar

from diloco.base.types import Member
from diloco.protocol.messages import Accept, Envelope, Propose
from diloco.protocol.streams import Kind

if TYPE_CHECKING:
    from diloco.simulate.virtual.host import SimulatedHost
    from diloco.simulate.virtual.world import SimulatedWorld

T = TypeVar("T")

RETRANSMIT_S = 0.4
"""A stream over a path that is cut tries again this often, as TCP does, until its deadline."""
LATE_SHARE = 0.3
"""Share of late messages, for a peer some of whose messages come late."""
MAX_REMEMBERED = 64
"""Envelopes that an attacker may replay."""


@dataclass(frozen=True)
class SimulatedCut:
    """A fault of the simulated network: nothing passes between a group and the rest, or in one direction only."""

    group: frozenset[str]
    direction: str
    """both, in (nothing reaches the group) or out."""
    reset: bool
    """Senders are told at once that there is no way, instead of hearing nothing."""
    others: frozenset[str] = frozenset()
    """Only these are cut off from the group, and everybody else reaches both; empty: all the rest are."""

    def blocks(self, source: str, target: str) -> bool:
        """Whether this cut of the simulated network lets nothing pass from `source` to `target`."""
        leaves, enters = self._leads_out(source, target), self._leads_out(target, source)
        return (leaves and self.direction != "in") or (enters and self.direction != "out")

    def _leads_out(self, source: str, target: str) -> bool:
        return source in self.group and (target in self.others if self.others else target not in self.group)


@dataclass
class Stream:
    """Parts on their way from one simulated peer to another, in order."""

    sender: SimulatedHost
    to: Member
    kind: Kind
    key: tuple[int, int]
    generation: int
    let_in: bool = False
    """The receiver has looked at who opens it."""
    arrives_s: float = 0.0
    moved_s: float = 0.0
    waiting: list[tuple[int, bytes, tuple[str, ...]]] = field(default_factory=list)
    """Parts that stand at the receiver's door."""
    broken: bool = False

    def __post_init__(self) -> None:
        self.member, self.lineage = self.sender.machine.me, self.sender.machine.lineage


class SimulatedNetwork:
    """All links between simulated peers. Every decision is the dice's; `counts` says what it did."""

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
        self.seen: list[tuple[Envelope, Member]] = []
        self.strangers: list[str] = []
        """Voters that are no members."""
        self._said = count(1)
        """Numbers of the strangers' messages."""

    def blocked(self, source: str, target: str) -> bool:
        """Whether a cut of the simulated network blocks this direction."""
        return any(cut.blocks(source, target) for cut in self.cuts)

    def connected(self, source: str, target: str) -> bool:
        """Whether no cut of the simulated network blocks either direction."""
        return not (self.cuts and (self.blocked(source, target) or self.blocked(target, source)))

    def latency(self, source: str, target: str) -> float:
        """Virtual seconds until a message arrives: thrown anew each time."""
        delay_s = self.delay_s * self.dice.random()
        if self.slow:
            delay_s *= max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        return delay_s

    # ------------------------------------------------------------ messages

    def send(self, sender: SimulatedHost, to: Member, envelope: Envelope) -> None:
        """Deliver a message to a simulated peer once, never, or twice."""
        self._remember(envelope, to)
        for stranger in self.strangers:
            self._vote(Member(stranger, 1, f"{stranger}:0"), sender, envelope)
        if self.cuts and self.blocked(sender.name, to.peer):
            if any(cut.reset and cut.blocks(sender.name, to.peer) for cut in self.cuts):
                self.world.after(self.delay_s, sender.unreachable, to, False)
            self.world.count("blocked messages")
        elif self.loss and self.dice.random() < self.loss:
            self.world.count("lost messages")
        else:
            self._arrive(sender, to, envelope)
            if self.loss and self.dice.random() < self.loss:
                self.world.count("doubled messages")
                self._arrive(sender, to, envelope)

    def _arrive(self, sender: SimulatedHost, to: Member, envelope: Envelope) -> None:
        delay_s = self.latency(sender.name, to.peer)
        if sender.name in self.late and self.dice.random() < LATE_SHARE:
            self.world.count("late messages")
            delay_s += self.dice.uniform(0, self.late[sender.name])
        self.world.after(delay_s, self._deliver, sender, to, envelope)

    def _deliver(self, sender: SimulatedHost, to: Member, envelope: Envelope) -> None:
        receiver = self.world.at(to)
        if receiver is None:
            sender.unreachable(to, self.world.plan.proven)
        else:
            receiver.due(receiver.receive, (envelope, sender))

    def _remember(self, envelope: Envelope, to: Member) -> None:
        if self.world.replays:
            if len(self.seen) < MAX_REMEMBERED:
                self.seen.append((envelope, to))
            else:
                self.seen[self.dice.randrange(MAX_REMEMBERED)] = (envelope, to)

    def _vote(self, stranger: Member, coordinator: SimulatedHost, envelope: Envelope) -> None:
        """The fault "stranger": one that is no member accepts a proposal, in the name of all members."""
        if isinstance(envelope.body, Propose):
            proposal, members = envelope.body, coordinator.machine.view
            votes = tuple(member.peer for member in members)
            accept = Accept(proposal.version, proposal.attempt, proposal.commit.digest, votes)
            said = replace(envelope, sender=stranger, sequence=next(self._said), body=accept)
            delay_s = self.latency(stranger.peer, coordinator.name)
            self.world.after(delay_s, coordinator.due, coordinator.receive, (said, None))

    def replay(self) -> None:
        """The fault "replay": an attacker sends old messages again, to the simulated peers they were meant for."""
        for envelope, to in self.seen:
            now_there = self.world.hosts.get(to.peer)
            if now_there is not None and now_there.alive:
                now_there.due(now_there.receive, (envelope, None))

    # ------------------------------------------------------------ questions

    def ask(
        self, asker: SimulatedHost, member: Member, question: Callable[[SimulatedHost], T], then: Callable[[T], None],
        failed: Callable[[], None],
    ) -> None:  # fmt: skip
        """A simulated call: answered, or failed at once when nobody is there, after the stall time when all stalls."""

        def arrive() -> None:
            other = self.world.at(member)
            if other is None:
                asker.due(failed, ())
            elif other.stopped or not self.connected(asker.name, member.peer):
                self.world.after(self.world.setup.timing.stall_s, asker.due, failed, ())
            else:
                answer = question(other)
                self.world.after(self.latency(member.peer, asker.name), asker.due, then, (answer,))

        self.world.after(self.latency(asker.name, member.peer), arrive)

    # ------------------------------------------------------------ streams

    def put(self, stream: Stream, part: int, payload: bytes, omitted: Sequence[str] = ()) -> None:
        """Send one more part on a simulated stream; parts of a stream do not overtake each other."""
        now = self.world.now
        stream.arrives_s = max(stream.arrives_s, now + self.latency(stream.sender.name, stream.to.peer))
        stream.moved_s = max(stream.moved_s, now)
        entry = (part, payload, tuple(omitted))
        self.world.after(stream.arrives_s - now, self._part_arrives, stream, entry)

    def _part_arrives(self, stream: Stream, entry: tuple[int, bytes, tuple[str, ...]]) -> None:
        world, sender = self.world, stream.sender
        receiver = world.at(stream.to)
        if stream.broken or not sender.alive:
            stream.broken = True
        elif receiver is None:
            stream.broken = True
            sender.unreachable(stream.to, world.plan.proven)
        elif receiver.stopped or (self.cuts and not self.connected(sender.name, stream.to.peer)):
            stream.broken = world.now - stream.moved_s > world.setup.timing.stall_s
            world.after(RETRANSMIT_S, self._part_arrives, stream, entry)
        elif sender.name in self.damaging and self.dice.random() < 0.3:
            stream.broken = True
            world.count("damaged streams")
        else:
            stream.moved_s = world.now
            receiver.arrive(stream, entry)
