"""Drawing of a simulation's plan from a seed.

Each function after the first throws dice of its own: what it adds changes nothing of what the others drew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from diloco.config.codec import SPARSE_CODECS
from diloco.simulate.virtual.plans.agreement import of_agreement
from diloco.simulate.virtual.plans.kinds import (
    FIRST_FAULT_S,
    LAST_FAULT_S,
    MACHINES,
    OFTEN,
    PASSING,
    QUIET_AFTER_S,
    RARE,
    SELDOM,
)
from diloco.simulate.virtual.plans.plan import EXCHANGE_S, FUSED, NO_CLOCK, Fault, FaultPlan
from diloco.simulate.virtual.plans.storage import of_storage

POLICIES = {"sync": 50, "quorum": 28, "async": 17, "gossip": 5}
"""Policies of a seed that is given none, and how often each is drawn."""

GATHERED = ("topk", "topk", "topk-all", "topk+zstd", "dct-all", "lowrank")
GATHERED_SHARE = 0.25
"""Codecs whose contributions are gathered, and how many of the plans have one."""
UPLINKS_MBIT = (0, 1, 10, 12, 100, 1000)
UPLINKS_SHARE = 0.5
"""Rates that peers claim, and how many of the plans have some."""
DELAYED_SHARE = 0.5
"""Share of the `async` plans that have an outer optimizer for versions of few contributions."""
RARE_SHARE = 0.4
OTHER_CODECS = ("bf16", "int4", "e3m0", "two_bit", "sign", "topk/fp32", "int4/dct-all", "lowrank+zstd/sign")
OTHER_CODECS_SHARE = 0.4
SELDOM_SHARE = 0.12
BUSY_SHARE, BUSY_S = 0.1, (0.1, 0.3, 1.0)
"""Share of the plans in which a machine is busy, and how long what it computes takes then."""
BACKLOG_SHARE, BACKLOGS, MIN_KEPT_S = 0.15, (2, 3, 8), 1.0
"""Share of the plans in which peers keep another number of versions than 4, and the numbers. With 1 a joiner must have
the latest to be let in, which it never has where versions take no longer than a copy."""
BACK_S = 10.0
"""Time after which a peer is started again in a nightly plan, at the latest."""
CHECKPOINTS_EVERY = (2, 2, 3, 4)
"""Versions from one checkpoint to the next."""
MACHINES_SHARE, MACHINES_BEFORE = 0.6, 0.75
"""Share of the plans without a situation that have a fault of a machine, and of such among those before a situation."""
BEFORE_SHARE, MIN_BEFORE_S, MAX_EXCHANGE_S = 0.6, 20.0, 10.0
"""A situation comes after so many of a run's versions, and not before that time, in which the faults before it are over
and all are together again; over slower uplinks at once."""
BANDWIDTH_SHARE, BANDWIDTH_MBIT, LIMITED_ROUND_S = 0.15, ("0", "0.5", "1", "4"), 1.0
"""Share of the plans whose uplinks have a limit, and the limits. A round is then at least so long: a state is copied
while others go on, and whoever makes versions faster than a joiner can copy them is never caught up with."""
SLOW_LINKS_SHARE, SLOW_LINKS_MBIT, SLOW_ROUND_S = 0.06, ("0.4", "0.1", "0.05"), 5.0
"""Share of the plans with an uplink on which a part takes longer than `stall_s`, its limits, and the least round."""
SLOW_GOSSIP_SHARE = 0.3
"""Share of the plans under gossip with peers of different speeds."""
END_SHARE, CUT_SHARE = 0.1, 0.15
"""Share of the plans in which the run ends, and of those in which stragglers are cut."""
SITUATION_SHARES = (35, 35, 30)
"""Weights of the plans as they were drawn, and of those with a situation of `plans/agreement.py` or of
`plans/storage.py` after other faults: by chance each of these comes in one plan of hundreds."""
RADIAL_SHARE = 0.3
"""Share of those with radial averaging."""
PLAIN_CODECS = ("fp32", "fp16", "bf16", "int8", "int8+zstd")
"""Those whose mean is made once."""
ROBUST_SHARE, OF_SPARSE, BY_VALUE = 0.08, ("clip", "centred"), ("trimmed", "median")
"""Share of the plans whose mean is robust, the rules that go with codecs that send few values, and the other rules."""
RANKS_SHARE, RANKS, LATE_RANKS_SHARE = 0.12, ("2", "2", "2+1", "1+2", "3+1"), 0.5
"""Share of the plans with islands of several ranks, their ranks in turn, and share of those with a fault of these."""
ELEMENTS = (1000, 1000, 2000, 3000)
"""Elements of each of the two layers: one to three parts each."""
ASYNC_SPEEDS, CUT_SPEEDS = (0.1, 1.0), (0.2, 1.0)
"""Slowest and fastest peer where none waits for another, and where those who are late are cut."""


def draw(
    seed: int,
    policy: str = "",
    without_majority: str = "",
    speeds: tuple[float, float] | None = None,
    size: str = "usual",
) -> FaultPlan:
    """A seed's plan of faults, with a policy and a rule for lost majorities if they are given.

    `speeds`: the slowest and the fastest that a peer may be. Without, all are as fast, but under `async`. `size`:
    one of `SIZES`.
    """
    dice = Random(seed)
    peers = dice.choices((2, 3, 4, 5, 6), (30, 38, 22, 7, 3))[0]
    plan = FaultPlan(
        seed=seed,
        peers=peers,
        witnesses=int(dice.random() < (0.3 if peers == 2 else 0.08)),
        codec=dice.choices(("fp32", "fp16", "int8", "int8+zstd"), (45, 30, 20, 5))[0],
        fragments=dice.choices((1, 2), (70, 30))[0],
        optimizer=dice.choice(("nesterov", "nesterov", "sgd", "adam")),
        weighting=dice.choice(("uniform", "tokens")),
        policy=policy or dice.choices(list(POLICIES), list(POLICIES.values()))[0],
        without_majority=without_majority or dice.choices(("wait", "continue"), (70, 30))[0],
        delay_s=dice.choice((0.005, 0.05, 0.05, 0.3)),
        loss=dice.choice((0.0, 0.0, 0.02, 0.1)),
        proven=dice.random() < 0.4,
        round_s=dice.choice((0.3, 0.6, 1.0)),
    )
    # To copy the state takes some round trips: who alone makes versions faster than that is never caught up with.
    plan = replace(plan, round_s=max(plan.round_s, 4 * plan.delay_s))
    faults = tuple(sorted(_draw_faults(dice, plan), key=lambda fault: fault.at_s))
    plan = _schedule(Random(f"schedule {seed}"), replace(plan, faults=faults))
    plan = _rarely(Random(f"rare {seed}"), plan)
    plan = _seldom(Random(f"intruders {seed}"), plan)
    plan = _lately(Random(f"machines {seed}"), plan)
    speeds = speeds or (ASYNC_SPEEDS if plan.policy == "async" else None)
    plan = _at_own_pace(Random(f"speeds {seed}"), plan, speeds) if speeds else plan
    plan = _sized(Random(f"size {seed}"), plan, SIZES[size])
    plan = _over_slow_links(Random(f"links {seed}"), plan)
    if plan.policy == "gossip":
        return _of_a_size(Random(f"elements {seed}"), _gossiping(Random(f"gossip {seed}"), plan))
    dice = Random(f"situation {seed}")
    situation = dice.choices((_as_it_is, of_agreement, of_storage), SITUATION_SHARES)[0](dice, plan)
    if situation is not plan:
        situation = _comes_late(Random(f"before {seed}"), situation, SIZES[size])
    situation = _under_load(Random(f"load {seed}"), _served_by_one(situation))
    situation = _of_several_ranks(Random(f"ranks {seed}"), situation)
    situation = _tight(Random(f"tight {seed}"), _robust(Random(f"aggregation {seed}"), situation))
    return _of_a_size(Random(f"elements {seed}"), situation)


def _as_it_is(dice: Random, plan: FaultPlan) -> FaultPlan:
    return plan


def _comes_late(dice: Random, plan: FaultPlan, size: Size) -> FaultPlan:
    """A plan whose situation comes when the run has gone on for a while, through faults that are over by then."""
    if plan.longest_exchange_s > min(MAX_EXCHANGE_S, plan.round_s):  # who is left alone then is never caught up with
        needs_others = plan.without_majority == "wait" and plan.peers > 2  # else `_served_by_one` sees to the links
        slow = SLOW_LINKS_MBIT[-1] in plan.bandwidth.split("+")
        return _once_all_vote(plan) if needs_others and slow else plan
    names = [f"p{index}" for index in range(plan.peers)]
    round_s = plan.round_s + EXCHANGE_S
    before_s = max(BEFORE_SHARE * size.versions * round_s, MIN_BEFORE_S)
    factor = (before_s - MIN_BEFORE_S + QUIET_AFTER_S) / QUIET_AFTER_S
    faults = [replace(fault, at_s=round(before_s + fault.at_s, 2)) for fault in plan.faults]
    for number in range(dice.choices((0, 1, 2), (25, 45, 30))[0] + dice.randint(0, size.more_faults)):
        faults += [replace(fault, at_s=round(factor * fault.at_s, 2)) for fault in _passing(dice, names, number)]
    tokens = plan.total_tokens + _tokens(plan, before_s / round_s) if plan.total_tokens else 0
    return replace(plan, total_tokens=tokens, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _passing(dice: Random, names: Sequence[str], number: int) -> Iterator[Fault]:
    """A fault that heals by itself, mostly of a machine."""
    kinds = MACHINES if dice.random() < MACHINES_BEFORE else PASSING
    kind, at_s = dice.choice(list(kinds)), round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
    return kinds[kind](dice, Fault(at_s, kind, dice.choice(names)), names, 100 + number)


def _schedule(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Later settings of a seed's plan, thrown with dice of their own: the faults of a seed stay what they were."""
    overlap = dice.choices((0.0, 0.3, 1.0), (50, 25, 25))[0]
    merges = ("carry", "mix", "eager") if overlap and plan.optimizer != "adam" else ("carry",)
    plan = replace(plan, overlap=overlap, merge=dice.choice(merges), feedback=dice.choice((-1.0, -1.0, 0.95)))
    plan = replace(plan, codec=dice.choice(GATHERED)) if dice.random() < GATHERED_SHARE else plan
    uplinks = dice.choices(UPLINKS_MBIT, k=plan.peers) if dice.random() < UPLINKS_SHARE else []
    return replace(plan, uplinks="+".join(map(str, uplinks)))


def _rarely(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Rare settings and faults of a seed's plan. Dice of their own, and not for all: most seeds are what they were."""
    if dice.random() >= RARE_SHARE:
        return plan
    names = [f"p{index}" for index in range(plan.peers)]
    faults = list(plan.faults)
    for _ in range(dice.choices((1, 2), (70, 30))[0]):
        kind = dice.choice(list(RARE))
        at_s = round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
        faults += RARE[kind](dice, Fault(at_s, kind, dice.choice(names)), names, len(faults))
    codec = dice.choice(OTHER_CODECS) if dice.random() < OTHER_CODECS_SHARE else plan.codec
    most = dice.choice((0, 0, max(1, plan.peers - 1)))
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return replace(plan, faults=ordered, codec=codec, most_peers=most, fixed_addresses=dice.random() < 0.5)


def _seldom(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Settings and faults of a seed's plan that are rarer still, once more with dice of their own."""
    if dice.random() >= SELDOM_SHARE:
        return plan
    if dice.random() < RADIAL_SHARE:
        return replace(plan, radial=True, codec=dice.choice(PLAIN_CODECS))
    names = [f"p{index}" for index in range(plan.peers)]
    kind, at_s = dice.choice(list(SELDOM)), round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
    faults = [*plan.faults, *SELDOM[kind](dice, Fault(at_s, kind, dice.choice(names)), names, len(plan.faults))]
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _lately(dice: Random, plan: FaultPlan) -> FaultPlan:
    """Settings and faults of a seed's plan that concern machines: disks, uplinks, tunnels. With dice of their own."""
    if dice.random() < BANDWIDTH_SHARE:
        rates = "+".join(dice.choice(BANDWIDTH_MBIT) for _ in range(plan.peers))
        plan = replace(plan, bandwidth=rates, uplinks=rates if dice.random() < 0.5 else plan.uplinks)
        plan = replace(plan, round_s=max(plan.round_s, LIMITED_ROUND_S))
    if dice.random() < CUT_SHARE and plan.policy != "async":
        plan = replace(plan, stragglers="cut", speeds=draw_speeds(dice, plan.peers, CUT_SPEEDS))
    if dice.random() >= MACHINES_SHARE:
        return plan
    names = [f"p{index}" for index in range(plan.peers)]
    kind, at_s = dice.choice(list(MACHINES)), round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
    faults = [*plan.faults, *MACHINES[kind](dice, Fault(at_s, kind, dice.choice(names)), names, len(plan.faults))]
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _over_slow_links(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with links that are slow and never still."""
    if dice.random() >= SLOW_LINKS_SHARE or plan.policy == "gossip" or plan.total_tokens:
        return plan
    rates = [dice.choice(SLOW_LINKS_MBIT) for _ in range(plan.peers)]
    rates[dice.randrange(plan.peers)] = SLOW_LINKS_MBIT[-1]
    fastest = max(plan.speed(index) for index in range(plan.peers))
    round_s = max(plan.round_s, SLOW_ROUND_S * fastest)
    calm_s = plan.calm_s + 8 * SLOW_ROUND_S
    return _once_all_vote(replace(plan, bandwidth="+".join(rates), codec="fp32", round_s=round_s, calm_s=calm_s))


def _once_all_vote(plan: FaultPlan) -> FaultPlan:
    """A plan whose faults come when a first version has closed over slow links. Until then the founder votes alone, and
    could go on so for good."""
    voting_s = plan.round_s + plan.longest_exchange_s
    return replace(plan, faults=tuple(replace(one, at_s=round(one.at_s + voting_s, 2)) for one in plan.faults))


def _served_by_one(plan: FaultPlan) -> FaultPlan:
    """A plan whose slow links let one that went on alone give all others the state: under `continue`, and of two peers.

    Its uplink carries to each what that of one of two does. Where versions are faster than a state is copied over that,
    nobody would ever catch up: no link is slow.
    """
    rates = plan.bandwidth.split("+")
    if (plan.without_majority != "continue" and plan.peers > 2) or SLOW_LINKS_MBIT[-1] not in rates:
        return plan
    if plan.round_s < SLOW_ROUND_S:
        return replace(plan, bandwidth="")
    return replace(plan, bandwidth="+".join(f"{float(rate) * (plan.peers - 1):g}" for rate in rates))


def _under_load(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with peers that write checkpoints more or less often and keep fewer versions or more, and with a
    busy machine, most often while something else goes wrong."""
    plan = replace(plan, checkpoint_every=dice.choice(CHECKPOINTS_EVERY))
    if dice.random() < BACKLOG_SHARE:
        backlog = dice.choice(BACKLOGS)  # over slow links a state is copied for as long as the usual ones last
        # A joiner hears of a version with the next heartbeat; it asks for a state, chunks and commits.
        kept = math.ceil((MIN_KEPT_S + 8 * plan.delay_s) / plan.round_s)
        slow = plan.round_s >= SLOW_ROUND_S or plan.longest_exchange_s * plan.peers > plan.round_s
        plan = replace(plan, backlog=max(backlog, plan.backlog if slow else kept))
    if dice.random() >= BUSY_SHARE:
        return plan
    at_s = dice.choice([*(fault.at_s for fault in plan.faults), FIRST_FAULT_S])
    at_s, for_s = max(at_s - dice.uniform(0.0, 1.0), FIRST_FAULT_S), dice.uniform(1.0, 4.0)
    busy = Fault(round(at_s, 2), "busy", f"p{dice.randrange(plan.peers)}", round(for_s, 2), str(dice.choice(BUSY_S)))
    return replace(plan, faults=tuple(sorted((*plan.faults, busy), key=lambda fault: fault.at_s)))


def _of_several_ranks(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with islands of several ranks, whose connections may be late, or break."""
    if dice.random() >= RANKS_SHARE:
        return plan
    plan, at_s = replace(plan, ranks=dice.choice(RANKS)), round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
    how, for_s = dice.choice((("broken", 0.0), (f"late {dice.choice((0.1, 0.3, 1))}", 4.0)))
    fault = Fault(at_s, "ranks", f"p{dice.randrange(plan.peers)}", for_s, how)
    if how == "broken" and plan.peers == 2 and plan.longest_exchange_s > plan.round_s:
        return plan  # the other would go on alone, faster than a state is copied over its uplink
    faults = (*plan.faults, fault) if dice.random() < LATE_RANKS_SHARE else plan.faults
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _robust(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with a robust mean, where averaging and codecs allow one."""
    if plan.radial or dice.random() >= ROBUST_SHARE:
        return plan
    sparse = [codec for codec in plan.codec.split("/") if codec.startswith(SPARSE_CODECS)]
    if not all(codec.endswith("-all") for codec in sparse):
        return plan
    return replace(plan, aggregation=dice.choice(OF_SPARSE if sparse else OF_SPARSE + BY_VALUE))


def _tight(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan in which some of the disks that are full have room for votes all the same."""
    tight = [fault.kind == "full" and dice.random() < 0.5 for fault in plan.faults]
    faults = (replace(one, how="means") if so else one for one, so in zip(plan.faults, tight, strict=True))
    return replace(plan, faults=tuple(faults))


def _of_a_size(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with a model of few parts, which cost less, where its bytes are not what matters."""
    elements = dice.choice(ELEMENTS)
    return plan if plan.bandwidth else replace(plan, elements=elements)


def _at_own_pace(dice: Random, plan: FaultPlan, speeds: tuple[float, float]) -> FaultPlan:
    """Speeds of a seed's plan. Dice of their own, too: a seed without speeds has the plan that it had before."""
    sized_by = dice.choice(("contract", "speed"))
    few = plan.policy == "async" and dice.random() < DELAYED_SHARE
    optimizer = dice.choice(("delayed_nesterov", "buffered_nesterov")) if few else plan.optimizer
    drawn = draw_speeds(dice, plan.peers, speeds)
    return replace(plan, speeds=drawn, sized_by=sized_by, optimizer=optimizer)


def _gossiping(dice: Random, plan: FaultPlan) -> FaultPlan:
    """The plan of a seed under gossip: peers that never wait, some of them slow, and a run that ends."""
    names = ("seed", "policy", "peers", "delay_s", "loss", "round_s", "bandwidth", "fixed_addresses", "calm_s")
    kept: dict[str, Any] = {name: getattr(plan, name) for name in names}
    # Nobody votes; and whose clock begins anew is refused for good: an earlier life than the one that others know.
    faults = tuple(fault for fault in plan.faults if fault.how != NO_CLOCK and not fault.peer.startswith("w"))
    plan = FaultPlan(**kept, faults=faults, codec=dice.choice(("fp32", "fp16", "bf16")))
    rounds = (plan.quiet_s + dice.uniform(0.0, 10.0)) / (plan.round_s + EXCHANGE_S)
    speeds = draw_speeds(dice, plan.peers, (0.3, 1.0)) if dice.random() < SLOW_GOSSIP_SHARE else ""
    return replace(plan, total_tokens=max(1, round(rounds)) * plan.peers * 4, speeds=speeds)


@dataclass(frozen=True)
class Size:
    """Size of the simulations that are drawn."""

    max_peers: int
    versions: int
    """A run closes about so many, where nothing goes wrong."""
    more_peers: float
    """Share of the plans that get more peers than the seed's own draw has."""
    more_faults: int = 0
    """Most faults beside those of the seed's own draw, all of which pass."""


SIZES: Mapping[str, Size] = {
    "usual": Size(8, 34, 0.15),
    "nightly": Size(16, 130, 0.8, 15),
}


def _sized(dice: Random, plan: FaultPlan, size: Size) -> FaultPlan:
    """A seed's plan at a size. Dice of their own; the faults are those that it had, further apart."""
    if dice.random() < size.more_peers:
        plan = replace(plan, peers=dice.randint(plan.peers, size.max_peers))
    span_s = size.versions * (plan.round_s + EXCHANGE_S)
    factor = max(1.0, 0.6 * span_s / QUIET_AFTER_S)
    names = [f"p{index}" for index in range(plan.peers)]
    faults = list(plan.faults)
    for number in range(dice.randint(0, size.more_faults)):
        faults += _passing(dice, names, number)
    later = [replace(fault, at_s=round(fault.at_s * factor, 2)) for fault in faults]
    if size.more_faults:  # a long run goes on: whoever is not back by then is started again
        gone = [fault for fault in later if fault.kind in FUSED]
        later += [Fault(round(fault.at_s + BACK_S, 2), "restart", fault.peer, 0.0, "disk") for fault in gone]
    plan = replace(plan, faults=tuple(sorted(later, key=lambda fault: fault.at_s)), calm_s=round(0.2 * span_s, 1))
    if dice.random() < END_SHARE:
        rounds = (plan.quiet_s + dice.uniform(0.0, 0.4) * span_s) / (plan.round_s + EXCHANGE_S)
        plan = replace(plan, total_tokens=_tokens(plan, rounds))
    return plan


def _tokens(plan: FaultPlan, rounds: float) -> int:
    """About as many tokens as the peers train in so many rounds' time, each at its own speed."""
    return max(1, round(rounds * fmean(map(plan.speed, range(plan.peers))))) * plan.peers * 4


def draw_speeds(dice: Random, peers: int, speeds: tuple[float, float]) -> str:
    """A speed for each simulated peer, as many between 0.1 and 0.2 as between 0.5 and 1."""
    low, high = map(math.log, speeds)
    return "+".join(f"{math.exp(dice.uniform(low, high)):.3g}" for _ in range(peers))


def _draw_faults(dice: Random, plan: FaultPlan) -> Iterator[Fault]:
    names = [*(f"p{index}" for index in range(plan.peers)), *(f"w{index}" for index in range(plan.witnesses))]
    kinds = list(OFTEN)
    weights = [OFTEN[kind][0] for kind in kinds]
    for number in range(dice.choices((1, 2, 3, 4, 5), (25, 30, 25, 12, 8))[0]):
        kind = dice.choices(kinds, weights)[0]
        at_s = round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
        yield from OFTEN[kind][1](dice, Fault(at_s, kind, dice.choice(names)), names, number)
