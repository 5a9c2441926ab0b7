"""The simulated operator of a run: declares the dead dead, and begins again when all have died."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.protocol.coordinator import MEAN_LOST
from diloco.storage.checkpoint import latest

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import SimulatedWorld

OPERATOR = Member("operator", 0, "")


class SimulatedOperator:
    """Acts on what is really so in the simulated world, which people can find out and peers cannot."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world

    def help(self) -> None:
        """Do what a simulated run needs in which too many died."""
        commit = self._newest_commit()
        if commit is None and any(host.founds for host in self.world.hosts.values()):
            self._start_all()  # a run begins, and waits for so many
        elif commit is None or not self._can_go_on(commit):
            self.resume()
        else:
            self._restart_strays(commit)
            self._evict_if_needed(commit)

    def _evict_if_needed(self, commit: Commit) -> None:
        """Evict dead simulated peers if the living are too few, or lack a mean; resume if the dead were ahead."""
        alive = [member for member in commit.view if self.world.lives(member)]
        asked = any(self.world.hosts[member.peer].machine.reason.startswith(MEAN_LOST) for member in alive)
        few = self.world.plan.without_majority == "wait" and len(alive) <= len(commit.view) // 2
        if not (few or asked):
            return
        if any(version > commit.version for version in self._checkpoints().values()):
            self.resume()
            return
        for member in commit.view:
            if not self.world.lives(member):
                self.evict(member.peer)

    def _restart_strays(self, commit: Commit) -> None:
        """Start simulated peers again whose run was founded anew meanwhile: until then they are refused."""
        heals = self.world.plan.without_majority == "continue"
        for host in list(self.world.hosts.values()):
            ended = host.alive and host.up and host.machine.lineage != commit.lineage
            if ended and not (heals and host.machine.commit):
                host.die("the operator starts it again")
                self.world.join(host.name, with_disk=True)

    def evict(self, peer: str) -> None:
        """A simulated `diloco evict`: declare to every live member that this peer is dead. If it lives, do nothing."""
        commit = self._newest_commit()
        member = commit.member(peer) if commit else None
        if member is None or self.world.lives(member):
            return
        self.world.log("", f"the operator EVICTS {peer}")
        self.world.invariants.evicted = True
        for host in self.world.hosts.values():
            if host.alive and host.up and host.machine.in_view:
                rules, lineage = self.world.setup.rules, host.machine.lineage
                body = m.Evict(peer, member.incarnation)
                envelope = m.Envelope(rules.run, rules.contract, lineage, OPERATOR, "", 0, body)
                self.world.network.throw_in(host, envelope)

    def resume(self) -> None:
        """A simulated `diloco peer --resume`: the peer with the latest checkpoint founds anew, the others join it."""
        world = self.world
        for host in (*world.hosts.values(), *world.ghosts):
            host.die("the operator begins again")
        world.liars.clear()
        kept = self._checkpoints()
        first = max(kept, key=lambda name: kept[name], default="p0")
        world.log(first, f"begins again from {'its checkpoint' if first in kept else 'nothing'}")
        world.start(first, founder=True, resumes=True)
        self._start_all()

    def _checkpoints(self) -> dict[str, int]:
        """Version of the latest checkpoint of each simulated peer of the beginning."""
        disks = {name: disk for name, disk in self.world.disks.items() if name.startswith("p")}
        found = {name: latest(disk.folder / "checkpoints") for name, disk in disks.items()}
        return {name: int(path.name.lstrip(".v").partition(".")[0]) for name, path in found.items() if path}

    def _start_all(self) -> None:
        """Start all simulated peers whom the founder waits for and who are not there."""
        for index in range(self.world.plan.peers):
            self.world.after(0.05, self.world.join, f"p{index}", True)

    def _newest_commit(self) -> Commit | None:
        up = [host for host in self.world.hosts.values() if host.alive and host.up]
        commits = [host.machine.commit for host in up if host.machine.commit]
        return max(commits, key=lambda commit: (commit.version, commit.tokens), default=None)

    def _can_go_on(self, commit: Commit) -> bool:
        """Whether an honest simulated trainer of the latest view lives, and one has its state or can make it."""
        trainers = [member for member in commit.view if not member.witness]
        hosts = [self.world.hosts[member.peer] for member in trainers if self.world.lives(member)]
        honest = [host for host in hosts if host.name not in self.world.liars]
        return bool(honest) and any(host.holds(commit) for host in hosts)
