"""Kinds of faults as they are drawn: how the rest of each is thrown, and how often it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from diloco.simulate.virtual.plans.plan import (
    CHECKPOINT_S,
    FLIPPED,
    FUSE_S,
    IN_CHECKPOINT,
    IN_RECORD,
    NO_CLOCK,
    OMITS,
    Fault,
)

FIRST_FAULT_S, LAST_FAULT_S = 0.2, 8.0
QUIET_AFTER_S = 10.0
"""Faults are over by then, and those that wait for a moment of their peer soon afterwards."""
FIRST_CHECKPOINT_S = 4.0
"""A peer has a checkpoint by then, mostly."""
MOMENTS = (
    "BeginReduction", "RepairReduction", "SendContribution", "FoldPart", "SendMean", "SealMean", "FetchMean", "CatchUp",
    "Close", "GiveUp", "Heartbeat", "Ready", "Gather", "Begin", "Stalled", "Repair", "Abort", "Propose", "Accept",
    "Committed",
)  # fmt: skip
"""Effects, and messages sent: a death can be placed before or after any of them."""
LATE_S = (1, 3, 6)
LIES = ("short", "long", "garbled", "infinite", "absurd", "two-faced")

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


def _one_way(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw a link that carries nothing in one direction, or a peer that hears nothing, or is not heard."""
    if dice.random() < 0.5:
        found = replace(fault, kind="link", peer="+".join(dice.sample(names, 2)), how="out")
    else:
        found = replace(fault, kind="cut", how=dice.choice(("in", "out")))
    yield from _for_a_while(dice, found, names, number)


def _late_syncs(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    how = f"late {dice.choice((0.5, 2, 5))}"
    yield from _for_a_while(dice, replace(fault, kind="disk", how=how), names, number)


def _failing_syncs(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield from _for_a_while(dice, replace(fault, kind="disk", how="broken"), names, number)


def _lying_syncs(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw syncs that are lies; power is lost meanwhile, or soon after."""
    yield from _for_a_while(dice, replace(fault, kind="disk", how="lies"), names, number)
    yield from _dark(dice, replace(fault, at_s=round(fault.at_s + dice.uniform(0.2, 3.0), 2)), names, number)


def _dark(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw a loss of power, of one simulated peer or of all."""
    if dice.random() < 0.2:
        yield replace(fault, kind="blackout", peer="*", how="power")
        yield Fault(_back_s(dice, fault), "resume", names[0])
    else:
        yield replace(fault, kind="power", how="")
        yield Fault(_back_s(dice, fault), "restart", fault.peer, 0.0, "disk")


def _in_checkpoint(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, kind=dice.choice(("kill", "power")), how=IN_CHECKPOINT)
    yield Fault(_back_s(dice, fault) + CHECKPOINT_S, "restart", fault.peer, 0.0, "disk")


def _in_record(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    yield replace(fault, kind=dice.choice(("kill", "power")), how=IN_RECORD)
    yield Fault(_back_s(dice, fault) + FUSE_S, "restart", fault.peer, 0.0, "disk")


def _flipped(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw a checkpoint with a flipped bit: later than others, so that there is one."""
    fault = replace(fault, kind="kill", at_s=max(fault.at_s, FIRST_CHECKPOINT_S))
    yield fault
    yield Fault(_back_s(dice, fault), "restart", fault.peer, 0.0, FLIPPED)


def _killed(dice: Random, fault: Fault, names: Sequence[str], number: int) -> Iterator[Fault]:
    """Draw a death from which its peer comes back."""
    yield replace(fault, how=f"{dice.choice(('before', 'after'))} {dice.choice(MOMENTS)}")
    yield Fault(_back_s(dice, fault) + FUSE_S, "restart", fault.peer, 0.0, dice.choice(("disk", "disk", "blank")))


def _back_s(dice: Random, fault: Fault) -> float:
    return round(min(fault.at_s + dice.uniform(0.3, 3.0), QUIET_AFTER_S), 2)


RARE: Mapping[str, Draw] = {
    "link": _link,
    "late": _late,
    "twin": _twin,
    "leave": _hasty_leave,
    "evict": _early_evict,
}
"""Kinds of what goes wrong seldom."""
SELDOM: Mapping[str, Draw] = {"lie": _omit, "stranger": _stranger, "restart": _no_clock}
"""Kinds of what goes wrong more seldom still."""
MACHINES: Mapping[str, Draw] = {
    "tunnel": _tunnel,
    "flip": _for_a_while,
    "full": _for_a_while,
    "second": _simple,
    "one way": _one_way,
    "late syncs": _late_syncs,
    "failing syncs": _failing_syncs,
    "lying syncs": _lying_syncs,
    "dark": _dark,
    "in checkpoint": _in_checkpoint,
    "in record": _in_record,
    "flipped": _flipped,
    "old disk": _old_disk,
}
"""Faults of machines: forwarders, links, bits, disks, power, processes started twice. All heal."""
PASSING: Mapping[str, Draw] = {
    "kill": _killed,
    "stop": _for_a_while,
    "cut": _cut,
    "link": _link,
    "slow": _for_a_while,
    "late": _late,
    "corrupt": _for_a_while,
    "jump": _jump,
}
"""Other faults that heal by themselves."""
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
