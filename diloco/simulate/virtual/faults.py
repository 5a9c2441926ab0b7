"""Faults of a simulation: the effect of each kind on the simulated world, and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from diloco.protocol import effects as fx
from diloco.simulate.virtual.disk import SYNCS, SimulatedDisk
from diloco.simulate.virtual.plans.plan import (
    CHECKPOINT_S,
    FLIPPED,
    FORMER,
    FUSE_S,
    IN_CHECKPOINT,
    IN_RECORD,
    ITSELF,
    NO_CLOCK,
    Fault,
)
from diloco.simulate.virtual.process import SimulatedProcess
from diloco.simulate.virtual.schedules import SimulatedDuel, SimulatedMuffle
from diloco.simulate.virtual.timeline import WORK_S
from diloco.simulate.virtual.wires import SimulatedCut

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import SimulatedWorld


DRIFT = 1e-4
"""Change of an element of each fragment's anchor."""


class FaultFuse:
    """A fault that strikes a simulated peer before or after the next effect of a kind."""

    def __init__(self, how: str, happens: Callable[[], None]) -> None:
        self.when, _, self.effect = how.partition(" ")
        self.happens = happens

    def burns(self, effect: fx.Effect, when: str) -> bool:
        names = {type(effect).__name__}
        if isinstance(effect, fx.Send):
            names.add(type(effect.envelope.body).__name__)
        return when == self.when and self.effect in names


def strike(world: SimulatedWorld, fault: Fault) -> None:
    """Let a fault of the seed's plan happen to the simulated world now."""
    if world.happens(fault) and _STRIKES[fault.kind](world, fault):
        world.count(fault.kind)


def _kill(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    if fault.kind == "power":
        host.loses_power = True
    if fault.how == IN_CHECKPOINT:
        host.syncs_to_death = world.dice.randrange(SYNCS)
        world.after(CHECKPOINT_S, host.die, "killed")
    elif fault.how == IN_RECORD:
        host.disk.tears = partial(host.die, "in the middle of a record")
        world.after(FUSE_S, host.die, "killed")
    elif fault.how:
        host.fuse = FaultFuse(fault.how, partial(host.die, fault.how))
        world.after(FUSE_S, host.die, "killed")
    else:
        host.die("killed")
    return True


def _stop(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or not host.working:
        return False
    world.log(host.name, "is STOPPED")
    host.stop()
    world.after(fault.for_s, host.thaw)
    return True


def _busy(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "busy": the results of hashing, decoding and encoding come late, and messages as soon as ever."""
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    world.log(host.name, f"has a BUSY machine: what it computes takes {fault.how} s")
    host.loop.work_s = float(fault.how)
    world.after(fault.for_s, setattr, host.loop, "work_s", WORK_S)
    return True


def _cut(world: SimulatedWorld, fault: Fault) -> bool:
    return _sever(world, fault, "is CUT OFF", fault.peer.split("+"))


def _link(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "link": two simulated peers cannot reach each other, or one of them the other; all else is as ever."""
    first, _, second = fault.peer.partition("+")
    return _sever(world, fault, "have NO LINK", [first], frozenset((second,)))


def _sever(world: SimulatedWorld, fault: Fault, what: str, near: list[str], far: frozenset[str] = frozenset()) -> bool:
    """Cut simulated peers that are near off from those that are far, or where none are named, from everybody else."""
    direction, _, reset = fault.how.partition(", ")
    cut = SimulatedCut(frozenset(near), direction or "both", bool(reset), far)
    world.network.sever(cut)
    world.log(fault.peer, f"{what} ({fault.how or 'both'})")
    world.after(fault.for_s, _mend, world, cut, fault)
    return True


def _muffle(world: SimulatedWorld, fault: Fault) -> bool:
    world.log("", "some messages are HELD BACK until their receivers have gone on")
    world.after(fault.for_s, SimulatedMuffle(world, fault).end)
    return True


def _half(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "half": an owner dies when its means have reached another peer, and not the coordinator."""
    world.halving[fault.peer] = fault.how
    world.after(fault.for_s, world.halving.pop, fault.peer, None)
    return True


def _duel(world: SimulatedWorld, fault: Fault) -> bool:
    world.log("", "two coordinators are heard by ONE member each")
    world.after(fault.for_s, SimulatedDuel(world).end)
    return True


def _tunnel(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "tunnel": the forwarder before a simulated peer is gone: connections are refused where it lives."""
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    return _sever(world, replace(fault, how=f"{fault.how or 'both'}, reset"), "loses its TUNNEL", [fault.peer])


def _flip(world: SimulatedWorld, fault: Fault) -> bool:
    world.network.flipping.add(fault.peer)
    world.log(fault.peer, "sends and hears through a network that FLIPS bits of messages")
    world.after(fault.for_s, world.network.flipping.discard, fault.peer)
    return True


def _late(world: SimulatedWorld, fault: Fault) -> bool:
    world.network.late[fault.peer] = float(fault.how)
    world.log(fault.peer, f"sends through a network that HOLDS BACK messages, up to {fault.how} s")
    world.after(fault.for_s, world.network.late.pop, fault.peer, None)
    return True


MIN_VOTERS_OF_TWINS = 3


def _twin(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "twin": a living simulated peer is taken for dead, and started once more elsewhere. Not with a copy of
    its disk where its vote may decide without a third one's: two histories come of that, whatever the others say."""
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    commit = host.machine.commit if host.up else None
    if fault.how != "blank" and commit is not None and len(commit.voters) < MIN_VOTERS_OF_TWINS:
        return False
    world.log(host.name, "is STARTED TWICE")
    world.ghosts.append(world.hosts.pop(host.name))
    world.disks[host.name] = world.disks[host.name].cloned()
    world.join(host.name, with_disk=fault.how != "blank")
    return True


def _mend(world: SimulatedWorld, cut: SimulatedCut, fault: Fault) -> None:
    world.network.cuts.remove(cut)
    world.log(fault.peer, "is reachable again")


def _slow(world: SimulatedWorld, fault: Fault) -> bool:
    world.network.slow[fault.peer] = 20.0
    world.log(fault.peer, "has a SLOW link")
    world.after(fault.for_s, world.network.slow.pop, fault.peer, None)
    return True


def _corrupt(world: SimulatedWorld, fault: Fault) -> bool:
    world.network.damaging.add(fault.peer)
    world.log(fault.peer, "sends through a network that DAMAGES bytes")
    world.after(fault.for_s, world.network.damaging.discard, fault.peer)
    return True


def _lie(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    host.lie = fault.how
    world.liars.add(fault.peer)
    world.log(fault.peer, f"begins to LIE: {fault.how}")
    world.after(fault.for_s, _be_honest, host)
    return True


def _be_honest(host: SimulatedProcess) -> None:
    host.lie = ""


def _replay(world: SimulatedWorld, fault: Fault) -> bool:
    world.log("", "an old conversation is REPLAYED")
    world.network.replay()
    return True


def _stranger(world: SimulatedWorld, fault: Fault) -> bool:
    world.network.strangers.append(fault.peer)
    world.log(fault.peer, "is no member, and ACCEPTS whatever is proposed, for everybody")
    world.after(fault.for_s, world.network.strangers.remove, fault.peer)
    return True


def _jump(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or not host.alive:
        return False
    host.loop.jump(float(fault.how))
    world.log(host.name, f"clock JUMPS by {fault.how} s")
    return True


def _full(world: SimulatedWorld, fault: Fault) -> bool:
    disk = world.disks[fault.peer]
    what = "tight" if fault.how == "means" else "full"
    setattr(disk, what, True)
    world.log(fault.peer, f"disk is FULL{' for means' * disk.tight}")
    world.after(fault.for_s, setattr, disk, what, False)
    return True


def _disk(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "disk": its syncs are late, fail, or are lies."""
    disk = world.disks[fault.peer]
    how, _, seconds = fault.how.partition(" ")
    disk.late_s, disk.broken, disk.lying = float(seconds or 0), how == "broken", how == "lies"
    world.log(fault.peer, f"disk {_DISKS[how]}{f': {seconds} s' if seconds else ''}")
    world.after(fault.for_s, _mend_disk, disk)
    return True


_DISKS = {"late": "is SLOW to sync", "broken": "does NOT SYNC", "lies": "LIES about its syncs"}


def _mend_disk(disk: SimulatedDisk) -> None:
    if disk.lying:
        disk.settle()
    disk.late_s, disk.broken, disk.lying = 0.0, False, False


def _second(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "second": one more process is started in the folder of a simulated peer that lives."""
    host = world.host(fault.peer)
    if host is None or not host.has_folder:
        return False
    world.log(host.name, "is STARTED A SECOND TIME in the same folder")
    world.start_second(host)
    return True


def _join(world: SimulatedWorld, fault: Fault) -> bool:
    if fault.peer not in world.hosts:
        world.join(fault.peer, with_disk=False)
    return True


def _restart(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or host.alive:
        return False
    if fault.how == "old":
        world.disks[fault.peer].go_back()
    if fault.how == FLIPPED and world.disks[fault.peer].flip(world.dice):
        world.log(fault.peer, "newest checkpoint has a FLIPPED bit")
        world.count("flipped checkpoints")
    if fault.how == NO_CLOCK:
        world.clockless[fault.peer] = 0
    if fault.how == ITSELF:
        world.by_themselves.add(fault.peer)
    world.join(fault.peer, with_disk=fault.how != "blank")
    return True


def _leave(world: SimulatedWorld, fault: Fault) -> bool:
    host = world.host(fault.peer)
    if host is None or not host.working:
        return False
    world.log(host.name, "is asked to LEAVE")
    if fault.how:
        host.fuse = FaultFuse(fault.how, host.leave_now)
        world.after(FUSE_S, host.leave)
    else:
        host.leave()
    return True


def _blackout(world: SimulatedWorld, fault: Fault) -> bool:
    for host in (*world.hosts.values(), *world.ghosts):
        host.loses_power = host.alive and fault.how == "power"
        host.die("blackout")
    return True


def _resume(world: SimulatedWorld, fault: Fault) -> bool:
    world.operator.resume()
    return True


def _drift(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "drift": the anchor changes in memory alone, and what is hashed already stays so. One that no version
    has moved is shared by all processes, and of a small one a rank may hold nothing."""
    host = world.host(fault.peer)
    there = host is not None and host.alive and host.entered
    fragments = host.lines[-1].state.fragments if host and there else ()
    own = [state for state in fragments if state.steps and len(state.anchor)]
    for state in own:
        state.anchor[0] += DRIFT
    if host is None or not own:
        return False
    host.drifted = world.drifts = True
    world.log(fault.peer, "has an anchor that CHANGES in its memory")
    return True


def _evict(world: SimulatedWorld, fault: Fault) -> bool:
    (world.operator.evict_former if fault.how == FORMER else world.operator.evict)(fault.peer)
    return True


def _ranks(world: SimulatedWorld, fault: Fault) -> bool:
    """The fault "ranks": what rank 0 and another rank say about their lanes comes late, or the connection breaks."""
    host = world.host(fault.peer)
    if host is None or not host.alive or host.ranks is None:
        return False
    how, _, seconds = fault.how.partition(" ")
    if how == "broken":
        world.log(host.name, "has lanes whose connections BREAK")
        world.timeline.alone(host.loop, host.ranks.break_wires)
        return True
    world.log(host.name, f"has lanes that hear of each other up to {seconds} s LATE")
    host.ranks.late_s = float(seconds)
    world.after(fault.for_s, setattr, host.ranks, "late_s", 0.0)
    return True


_STRIKES: Mapping[str, Callable[[SimulatedWorld, Fault], bool]] = {
    "kill": _kill,
    "power": _kill,
    "stop": _stop,
    "busy": _busy,
    "cut": _cut,
    "link": _link,
    "duel": _duel,
    "muffle": _muffle,
    "half": _half,
    "late": _late,
    "twin": _twin,
    "stranger": _stranger,
    "slow": _slow,
    "join": _join,
    "leave": _leave,
    "jump": _jump,
    "full": _full,
    "disk": _disk,
    "second": _second,
    "tunnel": _tunnel,
    "flip": _flip,
    "corrupt": _corrupt,
    "lie": _lie,
    "ranks": _ranks,
    "drift": _drift,
    "replay": _replay,
    "blackout": _blackout,
    "restart": _restart,
    "resume": _resume,
    "evict": _evict,
}
