"""Situations in which storage, copies and books of simulated peers matter, in place of the faults that a seed drew.

By chance alone each of them comes in one plan of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from diloco.simulate.virtual.plans.plan import (
    CHECKPOINT_S,
    FILTERED,
    FLIPPED,
    FUSE_S,
    IN_CHECKPOINT,
    IN_RECORD,
    MEDDLES,
    Fault,
    FaultPlan,
)

LOSSY = ("topk", "sign", "int4")
"""Codecs that leave over so much that nobody can miss it."""
CALM_S = 3.0
SLOW = "1+1+1+0.1"
ONE_FAST, ONE_FASTER, ONE_FASTEST = "1+0.5+0.5+0.5", "1+0.25+0.25+0.25", "1+0.1+0.1"
COPIED_SLOWLY = "0.2+0+0+0"
"""Uplinks in Mbit/s, over one of which a state takes 3 seconds."""
TWO_SLOW = "0.03+0.03"
"""Uplinks in Mbit/s, over both of which a state takes 8 seconds."""
SLOWEST = ("0.02+4", "0.01+4", "4+0.02")
"""Uplinks in Mbit/s, one of which needs 5 to 10 seconds for half of a contribution."""
ALL_SLOWEST = "0.01+0.01+0.01"


def of_storage(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with one situation in place of its faults."""
    situations = dict(SITUATIONS)
    if plan.policy == "quorum":
        situations[_lags] = 5
    if plan.policy == "async":
        situations[_drifts_alone] = 12
    if plan.without_majority == "continue":
        situations |= {_parts: 32, _copies_again: 10, _parts_unseen: 8}
    situation = dice.choices(list(situations), list(situations.values()))[0]
    found = situation(dice, replace(plan, calm_s=min(plan.calm_s, CALM_S), total_tokens=0))
    faults = [replace(fault, at_s=round(fault.at_s, 2), for_s=round(fault.for_s, 2)) for fault in found.faults]
    return replace(found, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _peer(dice: Random, plan: FaultPlan) -> str:
    return f"p{dice.randrange(plan.peers)}"


def _overlapping(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A plan in which inner steps go on while contributions are on their way."""
    return replace(plan, overlap=dice.choice((0.3, 1.0)), merge="carry")


def _goes_on(dice: Random, plan: FaultPlan) -> FaultPlan:
    """One dies, or all do, and goes on from its checkpoint, which may be damaged; it holds progress and a residual."""
    plan = replace(_overlapping(dice, plan), codec=dice.choice(LOSSY), feedback=0.95, radial=False)
    at_s, peer = dice.uniform(3.0, 6.0), _peer(dice, plan)
    back_s, how = at_s + dice.uniform(0.3, 1.5), dice.choice(("disk", FLIPPED))
    if dice.random() < 0.3:
        return replace(plan, faults=(Fault(at_s, "blackout", "*"), Fault(back_s, "resume", "p0")))
    dies = dice.choice(("", "after Close", IN_CHECKPOINT))
    wait_s = CHECKPOINT_S if dies == IN_CHECKPOINT else FUSE_S if dies else 0.0
    return replace(plan, faults=(Fault(at_s, "kill", peer, how=dies), Fault(back_s + wait_s, "restart", peer, how=how)))


def _fills(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A disk is full while versions close, and has room again, twice; then its peer starts again from it."""
    peer, at_s = _peer(dice, plan), dice.uniform(1.0, 2.0)
    for_s = dice.uniform(1.0, 2.0)
    faults = [Fault(at_s, "full", peer, for_s), Fault(at_s + for_s + 1.5, "full", peer, for_s)]
    if dice.random() < 0.5:
        at_s = at_s + 2 * for_s + dice.uniform(1.0, 3.0)
        faults += [Fault(at_s, "kill", peer), Fault(at_s + 0.5, "restart", peer, how="disk")]
    return replace(plan, faults=tuple(faults))


def _tears(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A machine loses power in the middle of a record of the ledger, which its peer goes on with."""
    peer, at_s = _peer(dice, plan), dice.uniform(1.0, 4.0)
    kind, back_s = dice.choice(("kill", "power")), at_s + FUSE_S + dice.uniform(0.2, 1.0)
    return replace(plan, faults=(Fault(at_s, kind, peer, how=IN_RECORD), Fault(back_s, "restart", peer, how="disk")))


def _damages(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A peer damages what it sends, while one joins and another misses versions; or all do whom that one asks then."""
    plan = replace(plan, peers=max(plan.peers, 4))
    bad, away, other = dice.sample(range(plan.peers), 3)
    at_s = dice.uniform(1.0, 2.0)
    kind = dice.choice(("stop", "cut", "link", "link"))
    faults = [
        Fault(at_s, "corrupt", f"p{bad}", 6.0),
        Fault(at_s + 0.2, kind, f"p{away}+p{other}" if kind == "link" else f"p{away}", 3.5),
        Fault(at_s + dice.uniform(0.2, 2.0), "join", "j9"),
    ]
    if dice.random() < 0.5:
        faults += [Fault(at_s + 3.5, "corrupt", f"p{peer}", 1.5) for peer in range(plan.peers) if peer != away]
    return replace(plan, faults=tuple(faults))


def _meddles(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A member sends means of parts that others own."""
    plan = replace(plan, peers=max(plan.peers, 3))
    return replace(plan, faults=(Fault(dice.uniform(0.5, 2.0), "lie", _peer(dice, plan), 4.0, MEDDLES),))


def _copies_slowly(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Versions close while one that joins copies the state; one of those that give it may die meanwhile."""
    plan = replace(plan, peers=max(plan.peers, 3), delay_s=0.05, round_s=0.4, bandwidth="")
    at_s = dice.uniform(1.0, 3.0)
    faults = [Fault(at_s, "slow", "j9", dice.choice((4.0, 8.0))), Fault(at_s, "join", "j9")]
    if dice.random() < 0.5:
        faults.append(Fault(at_s + dice.uniform(1.0, 4.0), "kill", "p1"))
    plan, roll = replace(plan, faults=tuple(faults)), dice.random()
    return _copies_in_turn(dice, plan) if roll < 0.5 else _hides(dice, plan) if roll < 0.8 else plan


def _copies_in_turn(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Two join, over slow uplinks, and only one of them reaches those that have the state: the other waits for it."""
    plan = replace(plan, peers=2, bandwidth=TWO_SLOW, round_s=5.0, calm_s=12.0, fragments=1, codec="fp32", loss=0.0)
    at_s = dice.uniform(16.0, 24.0)
    also_s = at_s + dice.uniform(0.1, 0.5)
    away_s = also_s + dice.uniform(0.5, 1.0)
    faults = [Fault(at_s, "join", "j9"), Fault(also_s, "join", "j8")]
    faults += [Fault(away_s, "link", f"j8+p{index}", 9.0, "both, reset") for index in (0, 1)]
    return replace(plan, overlap=0.0, merge="carry", most_peers=0, faults=tuple(faults))


def _hides(dice: Random, plan: FaultPlan) -> FaultPlan:
    """One joins that others hear and cannot reach, as behind a filter, and then they can."""
    at_s, for_s = dice.uniform(1.0, 3.0), dice.choice((2.0, 6.0))
    return replace(plan, faults=(Fault(at_s, "cut", "j9", for_s, FILTERED), Fault(at_s, "join", "j9")))


def _misses(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A peer that has just sent its contribution misses about as many versions as others keep."""
    plan = replace(_overlapping(dice, plan), peers=max(plan.peers, 3), round_s=0.4, delay_s=0.05)
    peer, at_s = _peer(dice, plan), dice.uniform(1.0, 3.0)
    kind = dice.choice(("stop", "cut", "link"))
    group = f"{peer}+p{(int(peer[1:]) + 1) % plan.peers}" if kind == "link" else peer
    return replace(plan, faults=(Fault(at_s, kind, group, dice.uniform(2.5, 6.0)),))


def _copies_again(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A peer has missed more versions than others keep, and all connections break while it copies the state."""
    plan = replace(plan, peers=max(plan.peers, 3), backlog=2, round_s=0.4, delay_s=0.05, bandwidth="")
    peer, at_s, for_s = _peer(dice, plan), dice.uniform(1.0, 2.0), dice.uniform(5.0, 7.0)
    breaks = Fault(at_s + for_s + dice.uniform(0.3, 0.6), "cut", peer, 4.0, "both, reset")
    return replace(plan, faults=(Fault(at_s, "stop", peer, for_s), breaks))


def _lags(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A quorum goes on without one that is slow, and counts it: it finds that out when more has closed than is kept."""
    plan = replace(plan, peers=4, speeds=SLOW, overlap=1.0, merge="carry", round_s=0.4, delay_s=0.05, calm_s=6.0)
    plan = replace(
        plan,
        bandwidth="",
        most_peers=0,
        codec=dice.choice(("fp32", "topk")),
        radial=False,
        feedback=dice.choice((-1.0, 0.95)),
    )
    return replace(plan, faults=(Fault(dice.uniform(2.0, 4.0), "join", "j9"),))


def _drifts(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The anchor of one peer changes in its memory, twice. Of two states that of the next version is right."""
    plan = replace(_overlapping(dice, plan), most_peers=0)
    peer, at_s = _peer(dice, plan), dice.uniform(1.0, 3.0)
    kind = dice.choice(("stop", "slow"))
    faults = [Fault(at_s + more_s, "drift", peer) for more_s in (0.0, dice.uniform(3.0, 4.0))]
    if dice.random() < 0.6:
        faults.append(Fault(at_s + dice.uniform(0.0, 1.0), kind, peer, dice.uniform(0.5, 2.0)))
    return replace(plan, faults=tuple(faults))


def _drifts_alone(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The anchor of the fastest changes in its memory, again and again, and most versions count no other: where one was
    made on that anchor, all others are on a state that the run did not go on from."""
    plan = replace(plan, peers=4, speeds=ONE_FASTER, overlap=1.0, merge="carry", round_s=0.6, delay_s=0.3, most_peers=0)
    at_s = dice.uniform(1.0, 4.0)
    faults = [Fault(at_s + 3.1 * number, "drift", "p0") for number in range(5)]
    codec = dice.choice((*LOSSY, "lowrank"))
    return replace(plan, bandwidth="", codec=codec, radial=False, faults=tuple(faults))


def _parts(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Some go on apart, with inner steps beside the exchange, and meet the others again.

    One that goes on alone may make more versions than the others, with fewer tokens. Another joins it then, copies its
    state, and hears of the others: "slowly" it copies over a slow link, and the one alone hears of them later than it
    does. Where it is the others that are fewer, one joins them.
    """
    plan = replace(_overlapping(dice, plan), peers=max(plan.peers, 3), round_s=0.4, delay_s=0.05, bandwidth="")
    at_s, for_s = dice.uniform(1.0, 3.0), dice.uniform(5.0, 7.0)
    match dice.choice(("fast", "slowly", "slowly", "slowly", "joined", "halves")):
        case "fast" | "slowly" as how:
            for_s += 5.0
            at_s += 6.0 if how == "slowly" else 0.0  # all vote by then: the others go on as soon as the one alone
            joins_s = at_s + for_s - dice.uniform(0.2, 2.5)
            faults = [Fault(at_s, "cut", "p0+j9", for_s), Fault(joins_s, "join", "j9")]
            if how == "slowly":
                # The others have more tokens: over that uplink nobody could ever catch up with the one alone.
                plan = replace(plan, bandwidth=COPIED_SLOWLY, most_peers=0, stragglers="wait", loss=0.0)
                apart_s = for_s + dice.choice((6.0, 14.0))
                faults += [Fault(at_s, "link", f"p0+p{other}", apart_s, "both") for other in (1, 2, 3)]
            return replace(plan, peers=4, speeds=ONE_FAST, faults=tuple(faults))
        case "joined":
            group = "+".join(f"p{index}" for index in range(1, plan.peers))
            joins = Fault(at_s + for_s - dice.uniform(0.5, 2.0), "join", "j9")
            return replace(plan, faults=(Fault(at_s, "cut", group, for_s), joins))
    group = "+".join(f"p{index}" for index in range(plan.peers // 2))
    return replace(plan, faults=(Fault(at_s, "cut", group, for_s),))


def _parts_unseen(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The disk of one of two is slow as it applies a version, and the next one counts it. Then the other goes on apart,
    and the first, which has not applied that next version, follows it."""
    plan = replace(_overlapping(dice, plan), peers=2, speeds="1+0.4", overlap=1.0, round_s=1.0, delay_s=0.05, backlog=8)
    faults, at_s = [], dice.uniform(4.0, 12.0)
    for number in range(2):
        slow_s = at_s + 22.0 * number + dice.uniform(0.0, 2.0)
        faults += [Fault(slow_s, "disk", "p1", 1.0, "late 13")]  # for each sync: a few are 40 seconds
        faults += [Fault(slow_s + dice.uniform(2.0, 3.5), "cut", "p0", 5.5)]
    plan = replace(plan, bandwidth="", most_peers=0, stragglers="wait", loss=0.0, witnesses=0, proven=False)
    return replace(plan, calm_s=30.0, faults=tuple(faults))


def _leaves(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Peers leave in good order, one of them when it is out of the view."""
    plan = replace(_overlapping(dice, plan), peers=max(plan.peers, 3))
    first, second = dice.sample(range(plan.peers), 2)
    at_s = dice.uniform(1.5, 3.0)
    faults = [
        Fault(at_s, "leave", f"p{first}", how=dice.choice(("", "after Close", "after Close"))),
        Fault(at_s, "cut", f"p{second}", 3.0),
        Fault(at_s + 3.0 + dice.uniform(0.6, 2.0), "leave", f"p{second}"),
    ]
    return replace(plan, faults=tuple(faults))


def _ends(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The run ends soon, with overlapped inner steps left over, and some of its peers stop for a while before that."""
    plan = replace(_overlapping(dice, plan), peers=min(plan.peers, 4), most_peers=0)
    plan = replace(plan, fragments=dice.choice((1, 2)), total_tokens=plan.peers * 4 * dice.randint(2, 5))
    return replace(plan, faults=(Fault(dice.uniform(1.0, 4.0), "stop", _peer(dice, plan), dice.uniform(0.5, 3.0)),))


def _waits(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The uplink of one of two is so slow that a version takes longer than its peers wait for it; or all uplinks are,
    and one of three is so fast that it contributes alone."""
    if plan.without_majority == "continue":
        return plan  # who goes on alone over such an uplink is never caught up with
    plan = replace(plan, peers=2, bandwidth=dice.choice(SLOWEST), round_s=1.0, fragments=1, codec="fp32", witnesses=0)
    plan = replace(plan, overlap=0.0, merge="carry", loss=0.0)  # before both vote, a lost message leaves one alone
    plan = replace(plan, faults=(Fault(dice.uniform(7.0, 9.0), "stop", "p1", 0.1),))
    if dice.random() < 0.4:
        return plan
    return replace(plan, peers=3, bandwidth=ALL_SLOWEST, speeds=ONE_FASTEST, round_s=5.0, calm_s=12.0, most_peers=0)


SITUATIONS: Mapping[Callable[[Random, FaultPlan], FaultPlan], int] = {
    _goes_on: 3,
    _fills: 2,
    _tears: 2,
    _damages: 5,
    _copies_slowly: 3,
    _misses: 2,
    _copies_again: 4,
    _leaves: 5,
    _ends: 2,
    _waits: 4,
    _meddles: 1,
    _drifts: 4,
}
"""Stories of a plan, and how often each is drawn beside the others."""
