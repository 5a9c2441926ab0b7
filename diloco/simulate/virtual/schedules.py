"""Schedules of a simulation that are made against its agreement: some hear of an attempt, some late, some never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from diloco.protocol import messages as m
from diloco.simulate.virtual.plans.plan import OFFERS, Fault
from diloco.simulate.virtual.wires import SimulatedCut

if TYPE_CHECKING:
    from diloco.simulate.virtual.network import SimulatedCall
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld


class SimulatedDuel:
    """The fault "duel": two attempts propose, and of each one member alone hears, which no other hears of at first.

    So promises of a third attempt name two commits, as they seldom do by chance. An agreement must take the later one.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._chosen: dict[tuple[str, int], str] = {}
        """By the commit that a proposal follows, and its attempt: who hears of it."""
        self._cut: SimulatedCut | None = None
        self._promised: set[str] = set()
        """Which of the two members promised a later attempt."""
        self._held: list[tuple[SimulatedCall, m.Envelope]] = []
        """Messages that did not pass: they come late."""
        world.network.schedules.append(self.passes)
        self._let_go()

    def passes(self, call: SimulatedCall, envelope: m.Envelope) -> bool:
        """Whether a message is no proposal that others should not hear of, and no vote for one. Else it is kept."""
        body, caller, target = envelope.body, call.caller.name, call.address.partition(":")[0]
        if isinstance(body, m.Propose):
            chosen = self._choice(envelope, body, target)
            passes = chosen in (target, "")
        elif isinstance(body, m.Ready | m.Gather) and len(self._chosen) > 1:
            passes = self._both_promise(envelope, body, target)
        else:
            chosen = self._chosen.get((envelope.head, body.attempt), "") if isinstance(body, m.Accept) else ""
            passes = chosen != caller
        if not passes:
            self._held.append((call, envelope))
        return passes

    def _both_promise(self, envelope: m.Envelope, body: m.Ready | m.Gather, target: str) -> bool:
        """Whether a promise may pass: of an attempt after both, those of the two come first, and nobody else is asked
        for one."""
        name, asked = envelope.sender.peer, (envelope.head, body.attempt)
        if asked in self._chosen or envelope.head != next(iter(self._chosen))[0]:
            return True
        if isinstance(body, m.Gather):
            return target in self._chosen.values()
        if name in self._chosen.values():
            self._promised.add(name)
            return True
        return self._promised.issuperset(self._chosen.values())

    def _choice(self, envelope: m.Envelope, proposal: m.Propose, target: str) -> str:
        """The member that hears of a proposal; empty: all do."""
        place = envelope.head, proposal.attempt
        begun = next(iter(self._chosen), place)
        if begun[0] != place[0] or (len(self._chosen) > 1 and place not in self._chosen):
            return ""
        if place not in self._chosen:
            if target.startswith("w") or target in self._chosen.values():
                return "nobody"
            self._chosen[place] = target
            self.world.log(target, f"ALONE hears of attempt {proposal.attempt} at version {proposal.commit.version}")
            self.world.after(2 * self.world.plan.delay_s, self._alone, target)
        return self._chosen[place]

    def _alone(self, member: str) -> None:
        """The first of the two members is cut off until the second has its proposal."""
        if self._cut is None:
            self._cut = SimulatedCut(frozenset((member,)), "both", reset=False)
            self.world.network.sever(self._cut)
        elif self._cut in self.world.network.cuts:
            self.world.network.cuts.remove(self._cut)

    def _let_go(self) -> None:
        """Send messages that were held back once their receiver has gone on to a later attempt."""
        if self.passes not in self.world.network.schedules:
            return
        self.world.after(LOOK_S, self._let_go)
        self._held = release(self.world, self._held)

    def end(self) -> None:
        """All hear of everything again."""
        self.world.network.schedules.remove(self.passes)
        if self._cut in self.world.network.cuts:
            self.world.network.cuts.remove(self._cut)


class SimulatedMuffle:
    """The fault "muffle": some messages about an attempt do not reach some members until these have gone on.

    They are the same ones each time that they are said, so that to say them again does not help.
    """

    def __init__(self, world: SimulatedWorld, fault: Fault) -> None:
        self.world = world
        self._early = fault.peer if fault.how == OFFERS else ""
        """A peer of whose promises only the first arrives; nothing else is held back then."""
        self._fate: dict[tuple[type, str, int, str, str], bool] = {}
        """By kind, view, attempt, sender and receiver: whether it passes."""
        self._held: list[tuple[SimulatedCall, m.Envelope]] = []
        world.network.schedules.append(self.passes)
        self._let_go()

    def passes(self, call: SimulatedCall, envelope: m.Envelope) -> bool:
        """Whether a message is not held back. Else it is kept."""
        body, caller, target = envelope.body, call.caller.name, call.address.partition(":")[0]
        if isinstance(body, m.OfAttempt):
            about = type(body), envelope.head, body.attempt, caller, target
            if self._early and isinstance(body, m.Ready) and caller == self._early:
                held = about in self._fate
                self._fate[about] = held
            else:
                share = 0.0 if self._early else MUFFLED.get(type(body), 0.0)
                held = self._fate.setdefault(about, self.world.dice.random() < share)
            if held:
                self._held.append((call, envelope))
                return False
        return True

    def _let_go(self) -> None:
        if self.passes in self.world.network.schedules:
            self.world.after(LOOK_S, self._let_go)
            self._held = release(self.world, self._held)

    def end(self) -> None:
        """All hear of everything again."""
        self.world.network.schedules.remove(self.passes)
        for call, envelope in self._held:
            self.world.network.send(call, envelope)
        self._held = []


MUFFLED: Mapping[type, float] = {m.Propose: 0.35, m.Accept: 0.25, m.Gather: 0.4, m.Repair: 0.2}
"""Share of the receivers of each kind of message that the fault "muffle" keeps it from."""
LOOK_S = 0.1

Held = list[tuple["SimulatedCall", m.Envelope]]


def release(world: SimulatedWorld, held: Held) -> Held:
    """Send messages that were held back and whose receivers have gone on to a later attempt. Returns the others."""
    kept: Held = []
    for call, envelope in held:
        host, body = world.network.at(call.address), envelope.body
        assert isinstance(body, m.OfAttempt)
        if host is None or not host.up:
            continue
        here = (host.machine.height, host.machine.attempt) <= body.key
        if here:
            kept.append((call, envelope))
        else:
            world.network.send(call, envelope)
    return kept


def halve(world: SimulatedWorld, host: SimulatedProcess, event: m.MeanArrived) -> None:
    """A part of the mean has reached a simulated peer: its owner may die of the fault "half"."""
    owner, machine, reduction = world.host(event.sender), host.machine, host.machine._contributor.reduction
    if owner is None or reduction is None or event.sender not in world.halving or host is owner:
        return
    seat = world.host(machine._acceptor.seat(event.attempt).peer)
    if seat is None or not seat.up or seat in (host, owner):
        return
    theirs = seat.machine._contributor.reduction
    whole = reduction.complete or world.halving[event.sender] != "whole"
    if whole and theirs is not None and theirs.key == event.key and event.part in theirs.absent:
        del world.halving[event.sender]
        owner.die("half of its means have arrived")
