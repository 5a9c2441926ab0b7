"""A failure made short: what can be left out of a plan without the failure going away is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from diloco.simulate.virtual.plan import FaultPlan
from diloco.simulate.virtual.world import World

MAX_RUNS = 300


def shrink(plan: FaultPlan) -> FaultPlan:
    """The shortest plan found that breaks the same invariant; `plan` itself when it breaks none."""
    broken = kind_of(plan)
    return _shrink(plan, lambda shorter: kind_of(shorter) == broken) if broken else plan


def kind_of(plan: FaultPlan) -> str:
    """The invariant that the plan breaks; empty if none."""
    return World(plan).run().violation.partition(":")[0]


def _shrink(plan: FaultPlan, fails: Callable[[FaultPlan], bool]) -> FaultPlan:
    runs = 0
    shorter = True
    while shorter and runs < MAX_RUNS:
        shorter = False
        for candidate in _simpler(plan):
            runs += 1
            if fails(candidate):
                plan, shorter = candidate, True
                break
    return plan


SETTINGS = (
    "loss", "witnesses", "fragments", "merge", "overlap", "feedback", "codec", "optimizer", "weighting", "uplinks",
    "sized_by", "speeds", "policy", "proven", "delay_s", "most_peers", "radial", "fixed_addresses",
)  # fmt: skip


def _simpler(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Plans with one thing less, the most telling first."""
    for index in range(len(plan.faults)):
        yield replace(plan, faults=(*plan.faults[:index], *plan.faults[index + 1 :]))
    default = FaultPlan()
    for name in SETTINGS:
        if getattr(plan, name) != getattr(default, name):
            yield replace(plan, **{name: getattr(default, name)})
    used = {peer for fault in plan.faults for peer in fault.peer.split("+")}
    if plan.peers > 2 and f"p{plan.peers - 1}" not in used:
        yield replace(plan, peers=plan.peers - 1)
    for index, fault in enumerate(plan.faults):
        changes = [replace(fault, at_s=float(round(fault.at_s)))] if fault.at_s != round(fault.at_s) else []
        changes += [replace(fault, for_s=round(fault.for_s / 2, 1))] if fault.for_s > 1 else []
        for change in changes:
            yield replace(plan, faults=(*plan.faults[:index], change, *plan.faults[index + 1 :]))
