"""Situations of a simulation that chance seldom makes, and in which a rule of the protocol decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from diloco.simulate.virtual.plans.plan import FORMER, OFFERS, Fault, FaultPlan

DUEL_S = 16.0
"""Time for two attempts, and a third one."""
ALONE_S = 20.0
"""Time in which one that is left alone stays so: whatever a rule makes it do without the others, it has done then."""


def of_agreement(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with one situation of `UNDER_WAIT` in place of its faults, which would mostly prevent it."""
    if plan.total_tokens:
        return plan
    situations = APART if plan.without_majority == "continue" else UNDER_WAIT
    situation = dice.choices(list(situations), list(situations.values()))[0]
    plan = situation(dice, replace(plan, loss=0.0, witnesses=0, calm_s=min(plan.calm_s, 3.0)))
    return replace(plan, faults=tuple(sorted(plan.faults, key=lambda fault: fault.at_s)))


def _two_proposals(dice: Random, plan: FaultPlan) -> FaultPlan:
    fault = Fault(round(dice.uniform(1.0, 3.0), 2), "duel", "", DUEL_S)
    return replace(plan, peers=dice.choice((3, 3, 4, 5)), faults=(fault,))


def _muffled(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Members hear of attempts in different order; and a coordinator dies meanwhile, so that there are some."""
    at_s = dice.uniform(1.0, 3.0)
    dies = Fault(round(at_s + 0.5, 2), "kill", dice.choice(("p0", "p1", "p2")), how=f"after {dice.choice(VOTING)}")
    peers = dice.choice((3, 4, 4, 5))
    return replace(plan, peers=peers, faults=(Fault(round(at_s, 2), "muffle", "", 12.0), dies))


def _leaves_in_the_vote(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Some leave when they have voted, or know of a commit before others do: their heir hears of all that late."""
    plan = replace(plan, peers=max(plan.peers, 3), delay_s=0.05, round_s=max(plan.round_s, 0.6))
    at_s, first = dice.uniform(2.0, 4.0), dice.randrange(1, plan.peers)
    second = dice.choice([index for index in range(1, plan.peers) if index != first])
    faults = (
        Fault(round(at_s, 2), "slow", "p0", 8.0),
        Fault(round(at_s + 0.5, 2), "leave", f"p{first}", how="after Accept"),
        Fault(round(at_s + 3.0, 2), "leave", f"p{second}", how=dice.choice(("after Accept", "after Close"))),
        Fault(round(at_s + 6.0, 2), "restart", f"p{first}", 0.0, "disk"),
    )
    return replace(plan, faults=faults)


def _evicted_and_back(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A dead peer is evicted, comes back, and the word of its death comes once more."""
    peer, at_s = f"p{dice.randrange(plan.peers)}", dice.uniform(1.0, 4.0)
    faults = [
        Fault(round(at_s, 2), "kill", peer, how=f"after {dice.choice(VOTING)}"),
        Fault(round(at_s + dice.uniform(2.5, 4.0), 2), "evict", peer),
        Fault(round(at_s + 4.5, 2), "restart", peer, 0.0, dice.choice(("disk", "blank"))),
        Fault(round(at_s + dice.uniform(6.0, 9.0), 2), "evict", peer, 0.0, FORMER),
    ]
    return replace(plan, faults=tuple(faults))


def _mean_lost(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A witness accepts what only its coordinator has, which dies before it tells anybody that this decides."""
    away, at_s = dice.choice(("p0", "p1")), dice.uniform(5.0, 7.0)
    other = "p1" if away == "p0" else "p0"
    faults = [
        Fault(round(at_s, 2), "cut", away, 7.0, "both"),
        Fault(round(at_s + 0.5, 2), "kill", other, how="before Committed"),
    ]
    calm_s = dice.choice((plan.calm_s, ALONE_S))
    return replace(plan, peers=2, witnesses=1, calm_s=calm_s, faults=tuple(faults))


def _unanswered(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A witness that has promised an attempt is asked for an earlier one, when it takes no trainer for alive."""
    (away, other), at_s = dice.choice((("p0", "p1"), ("p1", "p0"))), dice.uniform(2.0, 4.0)
    faults = [
        Fault(round(at_s, 2), "cut", away, 9.5, "both"),
        Fault(round(at_s + dice.uniform(0.5, 1.5), 2), "stop", "w0", 7.3),
        Fault(round(at_s + dice.uniform(7.8, 8.6), 2), "kill", other, how="before Propose"),
    ]
    return replace(
        plan, peers=2, witnesses=1, round_s=0.6, delay_s=0.05, overlap=0.0, merge="carry", faults=tuple(faults)
    )


def _half_sent(dice: Random, plan: FaultPlan) -> FaultPlan:
    """An owner of parts dies when its mean has reached one peer, and not the coordinator."""
    plan = replace(plan, peers=max(plan.peers, 3), delay_s=0.3, round_s=1.2, bandwidth="")
    at_s = dice.uniform(0.5, 3.0)
    faults = [
        Fault(round(at_s + 3.0 * index, 2), "half", f"p{index}", 3.0, dice.choice(("", "whole"))) for index in range(3)
    ]
    return replace(plan, faults=tuple(faults[: plan.peers - 1]))


def _no_link(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Two living peers cannot reach each other in a reduction, of which a part counts one and not the other."""
    plan = replace(plan, peers=max(plan.peers, 3), feedback=dice.choice((0.95, 0.95, -1.0)))
    first, second = dice.sample(range(plan.peers), 2)
    fault = Fault(round(dice.uniform(1.0, 4.0), 2), "link", f"p{first}+p{second}", 5.0, "both")
    deaf = Fault(round(fault.over_s + 1.0, 2), "cut", f"p{first}", 4.0, "in")
    return replace(plan, faults=(fault, deaf))


def _two_lives(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A peer is cut off and started elsewhere; the life before speaks again, and its messages come late."""
    plan = replace(plan, peers=max(plan.peers, 3), fixed_addresses=False)
    peer, at_s = f"p{dice.randrange(plan.peers)}", dice.uniform(1.0, 3.0)
    faults = (
        Fault(round(at_s, 2), "cut", peer, 4.0, "both"),
        Fault(round(at_s + dice.uniform(2.2, 3.0), 2), "twin", peer, 0.0, dice.choice(("disk", "blank"))),
        Fault(round(at_s + 4.5, 2), "late", peer, 4.0, "3"),
        Fault(round(at_s + 5.0, 2), "stop", peer, 4.0),
    )
    return replace(plan, faults=faults)


def _malformed(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A peer sends what no honest peer sends, as often as is allowed, and the network damages bytes of another.

    What is absurdly large is seen beside one other contribution, too.
    """
    lie = dice.choice(("short", "long", "infinite", "absurd"))
    plan = replace(plan, peers=2 if lie == "absurd" else max(plan.peers, 3), radial=False)
    damaged, liar = dice.sample(range(plan.peers), 2)
    at_s = dice.uniform(1.0, 2.0)
    faults = (
        Fault(round(at_s, 2), "corrupt", f"p{damaged}", 3.0),
        Fault(round(at_s + 4.0, 2), "lie", f"p{liar}", 6.0, lie),
    )
    return replace(plan, faults=faults)


def _proven_deaths(dice: Random, plan: FaultPlan) -> FaultPlan:
    """One of an even view dies, and then another, where their machine proves it."""
    first, second, third = dice.sample(range(4), 3)
    at_s = dice.uniform(1.0, 3.0)
    faults = (
        Fault(round(at_s, 2), "kill", f"p{first}", how=f"after {dice.choice(VOTING)}"),
        Fault(round(at_s + dice.uniform(1.0, 4.0), 2), "kill", f"p{second}"),
        Fault(round(at_s + 5.0, 2), "restart", f"p{first}", 0.0, "disk"),
        Fault(round(at_s + 6.0, 2), "stop", f"p{third}", 3.0),
    )
    return replace(plan, peers=dice.choice((4, 4, 6)), proven=True, faults=faults)


def _half_dies(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Half of the peers die at one moment, for good, where their machine proves it: the others need nobody."""
    peers = dice.choice((2, 4))
    at_s = round(dice.uniform(1.0, 3.0), 2)
    faults = tuple(Fault(at_s, "kill", f"p{index}") for index in dice.sample(range(peers), peers // 2))
    return replace(plan, peers=peers, witnesses=0, proven=True, faults=faults)


def _withdrawn(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A fast peer gives rounds up before the others are ready, and the coordinator does not hear of it."""
    plan = replace(plan, peers=4, policy="sync", speeds="1+0.12+0.12+0.12", round_s=1.0, overlap=0.0, merge="carry")
    return replace(plan, sized_by="contract", bandwidth="", faults=(Fault(1.0, "muffle", "p0", 20.0, OFFERS),))


def _goes_apart(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Some are cut off for so long that a lineage of their own begins, and meet the others again."""
    group = "+".join(f"p{index}" for index in sorted(dice.sample(range(plan.peers), max(1, plan.peers // 2))))
    at_s, for_s = dice.uniform(2.0, 4.0), dice.choice((4.2, 4.7, 5.2, 6.0, 8.0))
    faults = [Fault(round(at_s, 2), "cut", group, for_s, "both")]
    if dice.random() < 0.4:
        faults += [Fault(round(at_s - dice.uniform(0.0, 0.8), 2), "join", "j9")]
    return replace(plan, faults=tuple(faults))


def _without_two_links(dice: Random, plan: FaultPlan) -> FaultPlan:
    """One of four reaches one other only; and perhaps one joins meanwhile, through a member that not all reach."""
    plan = replace(plan, peers=4)
    at_s, for_s = dice.uniform(1.0, 3.0), dice.choice((4.5, 6.0, 8.0))
    faults = [Fault(round(at_s, 2), "link", f"p0+p{other}", for_s, "both") for other in (2, 3)]
    if dice.random() < 0.5:
        faults.append(Fault(round(at_s + dice.uniform(0.5, 3.0), 2), "join", "j9"))
    return replace(plan, faults=tuple(faults))


VOTING = ("Ready", "Gather", "Propose", "Accept", "Committed")
"""Moments of a vote."""
UNDER_WAIT: Mapping[Callable[[Random, FaultPlan], FaultPlan], int] = {
    _two_proposals: 4,
    _muffled: 4,
    _leaves_in_the_vote: 3,
    _evicted_and_back: 3,
    _mean_lost: 2,
    _unanswered: 4,
    _half_sent: 3,
    _no_link: 2,
    _two_lives: 2,
    _malformed: 2,
    _proven_deaths: 2,
    _half_dies: 2,
    _withdrawn: 1,
}
"""Situations under `wait`, and how often each is drawn."""
APART: Mapping[Callable[[Random, FaultPlan], FaultPlan], int] = {_goes_apart: 4, _without_two_links: 1}
"""Situations under `continue`."""
