"""Checks of admission in a simulation (I6): no message twice, no peer that sent malformed bytes again and again.

What either of them lets in does harm seldom, and later: so it is looked at here when it happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.wire.convert import seal, unseal

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

UNNUMBERED = (
    m.Reply.OTHER_RUN, m.Reply.OTHER_CONTRACT, m.Reply.OTHER_LINEAGE, m.Reply.FENCED, m.Reply.BARRED,
    m.Reply.MALFORMED, m.Reply.DAMAGED,
)  # fmt: skip
"""Replies that refuse a message before its number is looked at."""
Word = tuple[str, int, int, int]
"""Sender, its incarnation and process, and the number of what it said."""


class Violation(Exception):
    """An invariant does not hold in a simulation."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class SimulatedAdmissions:
    """Messages that each life of a simulated peer took from others, and the offences it heard of."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._taken: defaultdict[int, set[Word]] = defaultdict(set)
        """By life. Only where anything comes twice."""
        self._numbered: defaultdict[int, set[Word]] = defaultdict(set)
        """By life: messages whose numbers it looked at."""
        self._offences: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By life: attempts that it gave up for what a peer sent."""
        self._logged: set[tuple[int, str, int]] = set()
        """Life, commit and attempt of such words of its own, which go to several."""
        self._proposed: set[str] = set()
        self._said: set[tuple[int, type]] = set()
        """Life, and a kind of message that it has sent."""

    def heeds(self, host: SimulatedProcess, envelope: m.Envelope) -> bool:
        """Whether a simulated peer is about to hear that its attempt failed for what another sent."""
        body, machine = envelope.body, host.machine
        if not (isinstance(body, m.Abort) and body.offence):
            return False
        here = body.key == (machine.height, machine.attempt)
        return here and envelope.sender == machine._acceptor.seat(body.attempt)

    def on_message(self, host: SimulatedProcess, envelope: m.Envelope, reply: m.Reply, heeded: bool) -> None:
        """Check a message that a simulated peer took, or refused."""
        gone = host.machine.gone  # who is about to leave, and waits for others, still hears them
        if not (gone or isinstance(envelope.body, m.Evict)):
            self._number(host, envelope, reply)
        if reply not in (m.Reply.OK, m.Reply.STALE) or gone:
            return
        if heeded and isinstance(envelope.body, m.Abort):
            self._offences[host.life].update(envelope.body.without)
            self._check_counted(host)
        if self.world.twice and not isinstance(envelope.body, m.Evict):
            self._take(host, envelope)

    def _number(self, host: SimulatedProcess, envelope: m.Envelope, reply: m.Reply) -> None:
        """Check that a simulated peer refuses no message as one that came before, when it did not."""
        word = _word(envelope)
        if reply is m.Reply.REPLAYED and word not in self._numbered[host.life]:
            raise Violation("I6", f"{host.name} takes message {word[3]} of {word[0]} for a replay, it is new")
        if reply not in UNNUMBERED:
            self._numbered[host.life].add(word)

    def _check_counted(self, host: SimulatedProcess) -> None:
        """Check that a simulated peer counts each offence that it heard of."""
        for peer, times in self._offences[host.life].items():
            if host.machine.roster.offences.get(peer, 0) < times:
                raise Violation("I6", f"{host.name} does not count that {peer} sent malformed bytes {times} times")

    def _take(self, host: SimulatedProcess, envelope: m.Envelope) -> None:
        word = _word(envelope)
        if word in self._taken[host.life]:
            what = f"{type(envelope.body).__name__} {envelope.sequence} of {envelope.sender.peer}"
            raise Violation("I6", f"{host.name} takes {what} a second time")
        self._taken[host.life].add(word)

    def travels(self, host: SimulatedProcess, envelope: m.Envelope) -> None:
        """Check that the first message of each kind of a simulated life is read as it was said: no network here makes
        bytes of messages, and nobody would hear one that all refuse as malformed."""
        kind = type(envelope.body)
        if (host.life, kind) in self._said:
            return
        self._said.add((host.life, kind))
        try:
            read = unseal(seal(envelope))
        except ValueError as error:
            raise Violation("I7", f"{host.name} says {kind.__name__}, which all refuse: {error}") from error
        if read != envelope:
            raise Violation("I7", f"{host.name} says {envelope.body}, and others read {read.body}")

    def on_effect(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Check what a simulated peer is about to send for peers that it should have barred."""
        match effect:
            case fx.Send(_, m.Envelope(body=m.Abort(offence=True) as abort, head=head)):
                place = host.life, head, abort.attempt
                if place not in self._logged:
                    self._logged.add(place)
                    self._offences[host.life].update(abort.without)
                    self._check_counted(host)
            case fx.Send(_, m.Envelope(body=m.Propose(commit=commit))) if commit.digest not in self._proposed:
                self._proposed.add(commit.digest)
                if commit.moves:  # with a version members are put out of the run; others may be let in or leave before
                    self._take_in(host, [member.peer for member in commit.view])

    def _take_in(self, host: SimulatedProcess, view: list[str]) -> None:
        """Check a new proposal of a simulated peer: its view has none that this life barred for malformed bytes."""
        allowed = self.world.setup.rules.offences_allowed
        barred = {peer for peer, times in self._offences[host.life].items() if times >= allowed}
        if host.name not in barred and not barred.isdisjoint(view):  # else there may be nobody left
            names = ", ".join(sorted(barred.intersection(view)))
            raise Violation("I6", f"{host.name} keeps {names} in the run, which sent malformed bytes {allowed} times")


def _word(envelope: m.Envelope) -> Word:
    return envelope.sender.peer, envelope.sender.incarnation, envelope.boot, envelope.sequence
