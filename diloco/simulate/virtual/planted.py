"""Bugs that other systems shipped, planted in the simulated code on purpose: each must break an invariant soon."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.base.decisions import Measure
from diloco.base.types import Leases, Member
from diloco.compress import Codec
from diloco.exchange.work import LanePayloads
from diloco.outer import average, optimizers
from diloco.outer import line as line_of
from diloco.outer.average import mean_into
from diloco.outer.fragments import Fragment, write_fragment
from diloco.outer.line import Line, PendingContribution, UncommittedProgress
from diloco.outer.pseudograd import left_over
from diloco.peer import rank
from diloco.peer.restart import Restart
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.coordinator import Coordinator
from diloco.protocol.machine import Machine
from diloco.protocol.reduction import Reduction, Tally
from diloco.protocol.roster import Admission, Roster, RosterEntry
from diloco.protocol.vote import Restored, VoteRecord, Voters
from diloco.round import measure
from diloco.simulate.virtual.plans.plan import NO_CLOCK, OMITS, FaultPlan
from diloco.simulate.virtual.timeline import ProcessLoop


@dataclass(frozen=True)
class Bug:
    """One bug planted for the simulator to find."""

    what: str
    plant: Callable[[], Iterator[None]]
    shows: Callable[[FaultPlan], bool] = lambda plan: True
    """Plans of which it can break anything: no others are tried."""


MALFORMED = ("short", "long", "infinite", "absurd")
"""Lies that no peer believes."""


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant the named bug for the simulator to find, for as long as the context lasts."""
    with contextmanager(BUGS[name].plant)():
        yield


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute by a planted bug, for as long as the context lasts."""
    before = getattr(owner, name) if not isinstance(owner, type) else owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _no_majority() -> Iterator[None]:
    with _replaced(Voters, "suffice", lambda voters, votes, dead: bool(votes)):
        yield


def _early_divisor() -> Iterator[None]:
    fold = LanePayloads.fold

    def fold_for_all(work: LanePayloads, part: int, omitted: Sequence[str]) -> tuple[bytes, bytes]:
        """Planted bug: an omitted contributor adds nothing to the sum, but its weight to the divisor."""
        start, stop = work.fragment.part_bounds(part)
        for peer in omitted:
            work.put_contribution(peer, part, work.codec(part).encode(torch.zeros(stop - start)))
        return fold(work, part, ())

    with _replaced(LanePayloads, "fold", fold_for_all):
        yield


def _early_progress() -> Iterator[None]:
    def measure_and_finish(line: Line, how: Measure, seconds: dict[str, float]) -> PendingContribution:
        """Planted bug: a contribution counts as committed once it was sent."""
        sent = measure(line, how, seconds)
        fragment = line.layout.fragments[sent.contribution.fragment]
        anchor = line.state.fragments[fragment.index].anchor
        write_fragment(line.parameters, fragment, anchor)
        line.trained = UncommittedProgress()
        return replace(sent, local=anchor)

    with _replaced(rank, "measure", measure_and_finish):
        yield


def _private_mean() -> Iterator[None]:
    """Planted bug: an owner goes on with its fp32 mean, the others with the bytes that it sent."""
    keep = LanePayloads.keep
    private: dict[tuple[str, bytes], Tensor] = {}

    def keep_private(work: LanePayloads, part: int, mean: bytes) -> bool:
        start, stop = work.fragment.part_bounds(part)
        total = sum(entry.weight for entry in work.begin.contributors)
        values = torch.zeros(stop - start)
        for entry in work.begin.contributors:
            payload = work._payloads[part].get(entry.peer)
            if payload is not None:
                values += work.codec(part).decode(payload, stop - start) * (entry.weight / total)
        private[work.me, mean] = values
        return keep(work, part, mean)

    def mean_of_its_own(mean: bytes, codec: Codec, out: Tensor) -> None:
        values = private.get((_here(), mean))
        if values is None:
            mean_into(mean, codec, out)
        else:
            out.copy_(values)

    with _replaced(LanePayloads, "keep", keep_private), _replaced(optimizers, "mean_into", mean_of_its_own):
        yield


def _here() -> str:
    """Name of the simulated peer to which something happens now."""
    loop = asyncio.get_running_loop()
    return loop.name if isinstance(loop, ProcessLoop) else ""


def _stale_life() -> Iterator[None]:
    """Planted bug: a restarted peer comes back as the life that the view has, of which it remembers nothing."""
    life = Restart.life

    def forgetful(restart: Restart, *about: Any) -> Restored | None:
        restored = life(restart, *about)
        if restored is None:
            return None
        return replace(restored, record=VoteRecord(restored.head.digest), accepted=None)

    with _replaced(Restart, "life", forgetful):
        yield


@contextmanager
def _hearing(kind: type[m.Body], before: Callable[[Machine, Any], Callable[[], None]]) -> Iterator[None]:
    """Planted bug at a kind of message: `before` runs each time one is heard, and returns the way to undo it."""
    deliver = Machine._deliver

    def otherwise(machine: Machine, sender: Member, body: m.Body) -> None:
        undo = before(machine, body) if isinstance(body, kind) else lambda: None
        deliver(machine, sender, body)
        undo()

    with _replaced(Machine, "_deliver", otherwise):
        yield


def _broken_promise() -> Iterator[None]:
    def forget(machine: Machine, body: m.Propose) -> Callable[[], None]:
        acceptor = machine._acceptor
        if body.height == machine.height:
            acceptor.attempt = min(acceptor.attempt, body.attempt)
            acceptor._record = replace(acceptor._record, promised=min(acceptor._record.promised, body.attempt))
        return lambda: None

    with _hearing(m.Propose, forget):
        yield


def _unseen_vote() -> Iterator[None]:
    def pretend(machine: Machine, body: m.Propose) -> Callable[[], None]:
        contributor = machine._contributor
        held = contributor._held
        contributor._held = [*held, body.commit.mean_digest]

        def admit() -> None:
            contributor._held = held

        return admit

    with _hearing(m.Propose, pretend):
        yield


def _deaf_coordinator() -> Iterator[None]:
    earlier = Coordinator._earlier
    with _replaced(Coordinator, "_earlier", lambda coordinator, tally: (earlier(coordinator, tally)[0], None)):
        yield


def _lost_residual() -> Iterator[None]:
    def nothing(
        target: Tensor,
        parts: Sequence[bytes],
        fragment: Fragment,
        codecs: Sequence[Codec],
        counted: Callable[[int], bool],
        before: Tensor | None,
    ) -> Tensor:
        return left_over(target, parts, fragment, codecs, counted, before).zero_()

    with _replaced(line_of, "left_over", nothing):
        yield


def _shared_lease() -> Iterator[None]:
    advance = leases.advance

    def again(before: Leases, *arguments: Any) -> Leases:
        return advance(replace(before, cursor=max(before.cursor - 1, 0)), *arguments)

    with _replaced(leases, "advance", again):
        yield


def _early_witness() -> Iterator[None]:
    ask = Coordinator._ask_witnesses

    def ask_at_once(coordinator: Coordinator, tally: Tally, proposal: m.Propose) -> None:
        began_s, tally.proposed_at_s = tally.proposed_at_s, -math.inf
        ask(coordinator, tally, proposal)
        tally.proposed_at_s = began_s

    with _replaced(Coordinator, "_ask_witnesses", ask_at_once):
        yield


def _strange_vote() -> Iterator[None]:
    def admit(machine: Machine, body: m.Accept) -> Callable[[], None]:
        membership = vars(machine._membership)
        membership["is_member"] = lambda member: True
        return partial(membership.pop, "is_member", None)

    def of_anybody(voters: Voters, votes: Mapping[str, int], dead: object) -> bool:
        return 2 * len(votes) > len(voters.boots)

    with _hearing(m.Accept, admit), _replaced(Voters, "suffice", of_anybody):
        yield


def _believed_omission() -> Iterator[None]:
    with _replaced(Reduction, "explains", lambda reduction, omitted: True):
        yield


def _forgiven_offence() -> Iterator[None]:
    with _replaced(Roster, "offended", lambda roster, peer: None):
        yield


def _replay_heard() -> Iterator[None]:
    with _replaced(Admission, "replayed", lambda admission, envelope, now: False):
        yield


def _clock_believed() -> Iterator[None]:
    succeeds = Roster._succeeds

    def only_later(roster: Roster, member: Member, known: RosterEntry, now: float) -> bool:
        return member.incarnation > known.member.incarnation and succeeds(roster, member, known, now)

    with _replaced(Roster, "_succeeds", only_later):
        yield


def _plain_radial() -> Iterator[None]:
    def plain(decoded: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        total = sum(weights) or 1
        return torch.stack([values * (weight / total) for values, weight in zip(decoded, weights, strict=True)]).sum(0)

    with _replaced(average, "radial_mean", plain):
        yield


def _is_radial(plan: FaultPlan) -> bool:
    return plan.radial


def _has(*faults: str) -> Callable[[FaultPlan], bool]:
    """Condition on plans of faults: one with a fault of such a kind, or that happens so."""
    return lambda plan: any(name in faults for fault in plan.faults for name in (fault.kind, fault.how))


BUGS: Mapping[str, Bug] = {
    "no-majority": Bug("commit with one vote instead of a majority", _no_majority),
    "early-divisor": Bug("divide by the weights of all who began, not of those who count in the part", _early_divisor),
    "early-progress": Bug("take progress for committed when it is sent", _early_progress),
    "private-mean": Bug("an owner applies its own mean instead of the bytes it sent", _private_mean),
    "stale-life": Bug("take the word of an earlier life of a peer for that of the present one", _stale_life),
    "broken-promise": Bug("accept what is proposed in an earlier attempt than was promised", _broken_promise),
    "unseen-vote": Bug("accept a mean that one does not hold", _unseen_vote),
    "deaf-coordinator": Bug("propose anew, whatever was accepted before", _deaf_coordinator),
    "lost-residual": Bug("forget what the codec dropped", _lost_residual),
    "shared-lease": Bug("give a block of data to two peers", _shared_lease),
    "early-witness": Bug("ask a witness for its vote before the trainers", _early_witness, lambda p: p.witnesses > 0),
    "strange-vote": Bug("count the vote of one who is no member", _strange_vote, _has("stranger")),
    "believed-omission": Bug("believe any owner that it left somebody out", _believed_omission, _has(OMITS)),
    "forgiven-offence": Bug("keep who sends malformed bytes again and again", _forgiven_offence, _has(*MALFORMED)),
    "replay-heard": Bug("take a message that comes a second time", _replay_heard, lambda plan: plan.loss > 0),
    "clock-believed": Bug("refuse for good whoever its clock makes an earlier life", _clock_believed, _has(NO_CLOCK)),
    "plain-radial": Bug("average plainly where lengths and directions are to be apart", _plain_radial, _is_radial),
}


def shows(bug: str, plan: FaultPlan) -> bool:
    """Whether a planted bug can break anything in a plan: not where nobody votes."""
    return plan.policy != "gossip" and BUGS[bug].shows(plan)
