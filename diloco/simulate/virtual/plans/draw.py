"""Drawing of a simulation's plan from a seed.

Each function after the first throws dice of its own: what it adds changes nothing of what the others drew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from diloco.simulate.virtual.plans.agreement import of_agreement
from diloco.simulate.virtual.plans.plan import (
    CHECKPOINT_S,
    EXCHANGE_S,
    FLIPPED,
    IN_CHECKPOINT,
    NO_CLOCK,
    OMITS,
    Fault,
    FaultPlan,
)
from diloco.simulate.virtual.plans.storage import of_storage

FIRST_FAULT_S, LAST_FAULT_S = 0.2, 8.0
QUIET_AFTER_S = 10.0
"""Faults are over by then."""
MOMENTS = (
    "BeginReduction", "RepairReduction", "SendContribution", "FoldPart", "SendMean", "SealMean", "FetchMean", "CatchUp",
    "Close", "GiveUp", "Heartbeat", "Ready", "Gather", "Begin", "Stalled", "Repair", "Abort", "Propose", "Accept",
    "Committed",
)  # fmt: skip
"""Effects, and messages sent: a death can be placed before or after any of them."""
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
LATE_S = (1, 3, 6)
LIES = ("short", "long", "garbled", "infinite", "absurd", "two-faced")
SELDOM_SHARE = 0.12
BUSY_SHARE, BUSY_S = 0.1, (0.1, 0.3, 1.0)
"""Share of the plans in which a machine is busy, and how long what it computes takes then."""
BACKLOG_SHARE, BACKLOGS = 0.15, (2, 3, 8)
"""Share of the plans in which peers keep another number of versions than 4, and the numbers. With 1 a joiner must have
the latest to be let in, which it never has where versions take no longer than a copy."""
MACHINES_SHARE = 0.25
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
`plans/storage.py` in place of their faults: by chance each of these comes in one plan of hundreds."""
RADIAL_SHARE = 0.3
"""Share of those with radial averaging."""
PLAIN_CODECS = ("fp32", "fp16", "bf16", "int8", "int8+zstd")
"""Those whose mean is made once."""
ASYNC_SPEEDS = (0.1, 1.0)
"""Slowest and fastest peer where none waits for another."""


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
    peers = dice.choices((2, 3, 4, 5, 6), (25, 35, 25, 10, 5))[0]
    plan = FaultPlan(
        seed=seed,
        peers=peers,
        witnesses=int(dice.random() < (0.3 if peers == 2 else 0.08)),
        codec=dice.choices(("fp32", "fp16", "int8", "int8+zstd"), (45, 30, 20, 5))[0],
        fragments=dice.choices((1, 2), (70, 30))[0],
        optimizer=dice.choice(("nesterov", "nesterov", "sgd", "adam")),
        weighting=dice.choice(("uniform", "tokens")),
        policy=policy or dice.choices(("sync", "quorum"), (65, 35))[0],
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
        return _gossiping(Random(f"gossip {seed}"), plan)
    dice = Random(f"situation {seed}")
    plan = _served_by_one(dice.choices((_as_it_is, of_agreement, of_storage), SITUATION_SHARES)[0](dice, plan))
    return _under_load(Random(f"load {seed}"), plan)


def _as_it_is(dice: Random, plan: FaultPlan) -> FaultPlan:
    return plan


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
    if dice.random() < CUT_SHARE:
        plan = replace(plan, stragglers="cut")
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
    round_s = plan.round_s if plan.speeds else max(plan.round_s, SLOW_ROUND_S)
    calm_s = plan.calm_s + 8 * SLOW_ROUND_S
    return replace(plan, bandwidth="+".join(rates), codec="fp32", round_s=round_s, calm_s=calm_s)


def _served_by_one(plan: FaultPlan) -> FaultPlan:
    """A plan whose slow links let one that went on alone give all others the state: under `continue`, and of two peers.

    Its uplink carries to each what that of one of two does. Where versions are faster than a state is copied over that,
    nobody would ever catch up: no link is slow.
    """
    rates = plan.bandwidth.split("+")
    if (plan.without_majority != "continue" and plan.peers > 2) or SLOW_LINKS_MBIT[-1] not in rates:
        return plan
    if plan.speeds or plan.round_s < SLOW_ROUND_S:
        return replace(plan, bandwidth="")
    return replace(plan, bandwidth="+".join(f"{float(rate) * (plan.peers - 1):g}" for rate in rates))


def _under_load(dice: Random, plan: FaultPlan) -> FaultPlan:
    """A seed's plan with peers that keep fewer versions or more, and with a busy machine, most often while something
    else goes wrong."""
    if dice.random() < BACKLOG_SHARE:
        plan = replace(plan, backlog=dice.choice(BACKLOGS))
    if dice.random() >= BUSY_SHARE:
        return plan
    at_s = dice.choice([*(fault.at_s for fault in plan.faults), FIRST_FAULT_S])
    at_s, for_s = max(at_s - dice.uniform(0.0, 1.0), FIRST_FAULT_S), dice.uniform(1.0, 4.0)
    busy = Fault(round(at_s, 2), "busy", f"p{dice.randrange(plan.peers)}", round(for_s, 2), str(dice.choice(BUSY_S)))
    return replace(plan, faults=tuple(sorted((*plan.faults, busy), key=lambda fault: fault.at_s)))


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
    """Most faults beside those of the seed's own draw."""


SIZES: Mapping[str, Size] = {
    "usual": Size(8, 30, 0.25),
    "nightly": Size(16, 100, 0.8, 15),
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
        kind = dice.choices(list(OFTEN), [OFTEN[kind][0] for kind in OFTEN])[0]
        at_s = round(dice.uniform(FIRST_FAULT_S, LAST_FAULT_S), 2)
        faults += OFTEN[kind][1](dice, Fault(at_s, kind, dice.choice(names)), names, 100 + number)
    later = [replace(fault, at_s=round(fault.at_s * factor, 2)) for fault in faults]
    plan = replace(plan, faults=tuple(sorted(later, key=lambda fault: fault.at_s)), calm_s=round(0.2 * span_s, 1))
    if dice.random() < END_SHARE:
        rounds = (plan.quiet_s + dice.uniform(0.0, 0.4) * span_s) / (plan.round_s + EXCHANGE_S)
        plan = replace(plan, total_tokens=round(rounds) * plan.peers * 4)
    return plan


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


Draw = Callable[[Random, Fault, Sequence[str], int], Iterator[Fault]]


def _for_a_while(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    duration = round(min(dice.choice((0.5, 1.5, 3.0, 5.0)) * dice.uniform(0.5, 1.5), QUIET_AFTER_S - fault.at_s), 2)
    yield replace(fault, for_s=duration)


def _death(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    how = "" if dice.random() < 0.2 else f"{dice.choice(('before', 'after'))} {dice.choice(MOMENTS)}"
    yield replace(fault, how=how)
    if dice.random() < 0.5:
        at_s = round(min(fault.at_s + dice.uniform(0.3, 5.0), QUIET_AFTER_S), 2)
        yield Fault(at_s, "restart", fault.peer, 0.0, dice.choice(("disk", "disk", "blank")))


def _all_die(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, peer="*")
    yield Fault(round(fault.at_s + dice.uniform(0.2, 1.0), 2), "resume", dice.choice(names[:1]))


def _cut(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    group = "+".join(sorted(dice.sample(names, dice.randint(1, max(1, len(names) // 2)))))
    how = dice.choice(("both", "both", "both, reset", "in", "out"))
    yield from _for_a_while(dice, replace(fault, peer=group, how=how), names, number)


def _lie(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, how=dice.choice(LIES)), names, number)


def _jump(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, how=str(dice.choice((1, 3, 10, 1000))))


def _newcomer(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, peer=f"j{number}")


def _simple(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield fault


def _link(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    how = dice.choice(("both", "both", "both, reset", "out"))
    yield from _for_a_while(dice, replace(fault, peer="+".join(dice.sample(names, 2)), how=how), names, number)


def _late(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, how=str(dice.choice(LATE_S))), names, number)


def _twin(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw the fault "twin": a silent simulated peer, or one that is not silent at all, is started once more."""
    silence = Fault(fault.at_s, dice.choice(("stop", "cut")), fault.peer)
    if dice.random() < 0.8:
        yield from _for_a_while(dice, silence, names, number)
    at_s = round(fault.at_s + dice.uniform(0.1, 4.0), 2)
    yield replace(fault, at_s=at_s, how=dice.choice(("disk", "blank")))


def _hasty_leave(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, how=f"{dice.choice(('before', 'after'))} {dice.choice(MOMENTS)}")


def _old_disk(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, kind="kill")
    yield Fault(round(min(fault.at_s + dice.uniform(0.3, 3.0), QUIET_AFTER_S), 2), "restart", fault.peer, 0.0, "old")


def _early_evict(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw the fault "evict": the simulated operator is quick, and everything else still goes on."""
    yield replace(fault, kind="kill", how=f"after {dice.choice(MOMENTS)}")
    yield Fault(round(fault.at_s + dice.uniform(0.5, 4.0), 2), "evict", fault.peer)


def _omit(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, how=OMITS), names, number)


def _stranger(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, peer=f"x{number}"), names, number)


def _no_clock(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw the fault "no clock", not for the first simulated peer, whose first life began when time did."""
    peer = dice.choice(names[1:])
    yield replace(fault, kind="kill", peer=peer)
    at_s = round(min(fault.at_s + dice.uniform(0.3, 3.0), QUIET_AFTER_S), 2)
    yield Fault(at_s, "restart", peer, 0.0, NO_CLOCK)


def _tunnel(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, how=dice.choice(("", "", "in", "out"))), names, number)


def _disk(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw the fault "disk": where its syncs are lies, power is lost meanwhile, or soon after."""
    how = dice.choice((f"late {dice.choice((0.5, 2, 5))}", "broken", "lies", "lies"))
    yield from _for_a_while(dice, replace(fault, how=how), names, number)
    if how == "lies":
        yield from _power(dice, replace(fault, at_s=round(fault.at_s + dice.uniform(0.2, 3.0), 2)), names, number)


def _power(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw a loss of power, in the middle of a checkpoint or at any time, of one simulated peer or of all."""
    back_s = round(min(fault.at_s + dice.uniform(0.3, 3.0), QUIET_AFTER_S), 2)
    if dice.random() < 0.2:
        yield replace(fault, kind="blackout", peer="*", for_s=0.0, how="power")
        yield Fault(back_s, "resume", names[0])
    else:
        how = dice.choice(("", IN_CHECKPOINT, IN_CHECKPOINT))
        yield replace(fault, kind=dice.choice(("kill", "power")), for_s=0.0, how=how)
        yield Fault(back_s + CHECKPOINT_S * bool(how), "restart", fault.peer, 0.0, dice.choice(("disk", FLIPPED)))


RARE: Mapping[str, Draw] = {
    "link": _link,
    "late": _late,
    "twin": _twin,
    "leave": _hasty_leave,
    "restart": _old_disk,
    "evict": _early_evict,
}
"""Kinds of what goes wrong seldom."""
SELDOM: Mapping[str, Draw] = {"lie": _omit, "stranger": _stranger, "restart": _no_clock}
"""Kinds of what goes wrong more seldom still."""
MACHINES: Mapping[str, Draw] = {
    "tunnel": _tunnel,
    "flip": _for_a_while,
    "disk": _disk,
    "power": _power,
    "second": _simple,
}
"""Kinds of what goes wrong with machines: forwarders, bits of messages, disks, power, processes started twice."""
OFTEN: Mapping[str, tuple[int, Draw]] = {
    "kill": (26, _death),
    "power": (6, _death),
    "stop": (14, _for_a_while),
    "cut": (18, _cut),
    "slow": (6, _for_a_while),
    "join": (9, _newcomer),
    "leave": (6, _simple),
    "jump": (4, _jump),
    "full": (2, _for_a_while),
    "corrupt": (4, _for_a_while),
    "lie": (7, _lie),
    "replay": (4, _simple),
    "blackout": (2, _all_die),
}
"""Kinds of faults of every plan: how often, and how the rest of one is drawn."""
