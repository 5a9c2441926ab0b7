"""Checks of admission (I6): no message is taken a second time, and no peer that sent malformed bytes again and again.

What either of them lets in does harm seldom, and later: so it is looked at here when it happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from diloco.protocol import messages as m

if TYPE_CHECKING:
    from diloco.simulate.virtual.host import Host
    from diloco.simulate.virtual.world import World

Word = tuple[str, int, int]
"""Sender, its incarnation, and the number of what it said."""


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Gate:
    """Messages that each life of a peer took from others, and its knowledge of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._taken: defaultdict[int, set[Word]] = defaultdict(set)
        """By life. Only where anything comes twice."""
        self._offences: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By life: attempts that it gave up for what a peer sent."""
        self._logged: set[tuple[int, str, int]] = set()
        """Life, commit and attempt of such words of its own, which go to several."""
        self._proposed: set[str] = set()

    def heeds(self, host: Host, envelope: m.Envelope) -> bool:
        """Whether a life is about to hear that the attempt that it is in failed for what a peer sent."""
        body, machine = envelope.body, host.machine
        if not (isinstance(body, m.Abort) and body.offence):
            return False
        here = (body.version, body.attempt) == (machine.making, machine.attempt)
        return here and envelope.sender == machine._seat(body.attempt)

    def on_message(self, host: Host, envelope: m.Envelope, reply: m.Reply, heeded: bool) -> None:
        """A message was taken, or refused."""
        if reply not in (m.Reply.OK, m.Reply.STALE):
            return
        if heeded and isinstance(envelope.body, m.Abort):
            self._offences[host.life].update(envelope.body.without)
        if self.world.twice and not isinstance(envelope.body, m.Evict):
            self._take(host, envelope)

    def _take(self, host: Host, envelope: m.Envelope) -> None:
        word = envelope.sender.peer, envelope.sender.incarnation, envelope.sequence
        if word in self._taken[host.life]:
            what = f"{type(envelope.body).__name__} {envelope.sequence} of {envelope.sender.peer}"
            raise Violation("I6", f"{host.name} takes {what} a second time")
        self._taken[host.life].add(word)

    def on_effect(self, host: Host, effect: m.Effect) -> None:
        """A peer is about to say something."""
        match effect:
            case m.Send(_, m.Envelope(body=m.Abort(offence=True) as abort, view=view)):
                place = host.life, view, abort.attempt
                if place not in self._logged:
                    self._logged.add(place)
                    self._offences[host.life].update(abort.without)
            case m.Send(_, m.Envelope(body=m.Propose(commit=commit))) if commit.digest not in self._proposed:
                self._proposed.add(commit.digest)
                self._take_in(host, [member.peer for member in commit.view])

    def _take_in(self, host: Host, view: list[str]) -> None:
        """Somebody says who is in the run from now on, and not only once more what another had said."""
        allowed = self.world.setup.rules.offences_allowed
        barred = {peer for peer, times in self._offences[host.life].items() if times >= allowed}
        if host.name not in barred and not barred.isdisjoint(view):  # else there may be nobody left
            names = ", ".join(sorted(barred.intersection(view)))
            raise Violation("I6", f"{host.name} keeps {names} in the run, which sent malformed bytes {allowed} times")
