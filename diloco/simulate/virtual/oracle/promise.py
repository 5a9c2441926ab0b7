"""The promise of the protocol's rules about a simulated run when its faults are over: that versions go on closing
without a person, or why one is needed. Judged by what is really so, and by the rules in `docs/how/protocol.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member, Voter
from diloco.protocol import messages as m

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld


class SimulatedPromise:
    """The rules of the protocol that promise liveness (I7)."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.evicted: dict[tuple[str, int], set[int]] = {}
        """By life that an operator declared dead: lives of processes that heard it. One that nobody heard is absent."""

    def on_message(self, host: SimulatedProcess, envelope: m.Envelope, reply: m.Reply) -> None:
        """Note an eviction that a simulated peer hears."""
        body = envelope.body
        if isinstance(body, m.Evict) and reply is m.Reply.OK:
            self.evicted.setdefault((body.peer, body.incarnation), set()).add(host.life)

    def person_needed(self) -> str:
        """The reason why versions may not close without a person's help; empty where the rules promise that they do."""
        world = self.world
        up = [host for host in world.hosts.values() if host.alive and host.up]
        inside = [host for host in up if host.machine.commit is not None and host.machine.in_view]
        if not any(not host.witness and host.alive for host in world.hosts.values()):
            return "no trainer runs"
        if not inside:
            return self._beginning()
        newest = max((host.machine.commit for host in inside if host.machine.commit), key=_height)
        heals = world.plan.without_majority == "continue"
        strays = [host.name for host in up if host.machine.lineage != newest.lineage]
        if strays and not heals:
            return f"{', '.join(strays)} speak of another lineage"
        if not any(host.holds(newest) and not host.exchange.behind for host in self._trainers(newest)):
            return f"version {newest.version} is with no trainer that lives"
        votes, needed = self._votes(newest)
        seats = [one for one in newest.voting if one.peer in votes and not one.witness]
        if len(votes) < needed or not seats:  # under `continue`, or where enough are evicted, the living go on apart
            stay = [one for one in newest.voting if not self._is_evicted(one, self._living(newest))]
            alone = heals or len(stay) < needed or all(one.witness for one in stay)
            found = f"{len(votes)} of {needed} votes for version {newest.version + 1} live"
            return "" if alone else found if seats else f"{found}, and no voter that trains"
        return self._means(newest, votes)

    def _trainers(self, commit: Commit) -> list[SimulatedProcess]:
        """Honest trainers of a commit's view that live."""
        members = [member for member in commit.view if not member.witness and self.world.lives(member)]
        return [self.world.hosts[member.peer] for member in members if member.peer not in self.world.liars]

    def _beginning(self) -> str:
        """A founder waits for so many peers before anything is agreed on."""
        hosts = [host for host in self.world.hosts.values() if host.alive and not host.witness]
        founders = [host for host in hosts if host.founds]
        if not founders:
            return "nobody that lives is in a view"
        lineages = {host.machine.lineage for host in founders if host.up}
        here = [host for host in hosts if not host.up or host.machine.lineage in lineages]
        enough = len(here) >= self.world.plan.peers and len(here) == len(hosts)
        return "" if enough else f"a founder waits for {self.world.plan.peers}, {len(here)} are here"

    def _living(self, commit: Commit) -> set[str]:
        return {member.peer for member in commit.view if self.world.lives(member)}

    def _votes(self, commit: Commit) -> tuple[set[str], int]:
        """Voters that live, and how many of them decide."""
        voting = commit.voting
        living = {member.peer for member in voting if self.world.lives(member)}
        gone = {member.peer for member in voting if self._is_gone(member, living)}
        evicted = {member.peer for member in voting if self._is_passed_over(member, voting, living)}
        named = all(self._is_named(voter) for voter in commit.voters if voter.peer in living)
        return living - gone - evicted, quorum(len(voting), len(gone) if named else 0)

    def _is_named(self, voter: Voter) -> bool:
        """Whether a commit names the very process in which this voter lives: only that is part of a half."""
        host = self.world.hosts[voter.peer]
        return host.up and host.machine.boot == voter.boot

    def _is_passed_over(self, member: Member, voting: Sequence[Member], living: set[str]) -> bool:
        """Whether all other live voters that coordinate heard that this life is dead: it came back, and they count no
        vote of it, nor follow it, until a commit drops it."""
        seats = {one.peer for one in voting if one.peer in living and not one.witness} - {member.peer}
        return bool(seats) and self._is_evicted(member, seats)

    def _is_gone(self, member: Member, living: set[str]) -> bool:
        """Whether nobody waits for the vote of a dead life: its machine proves its death."""
        return member.peer not in living and all(
            self.world.machines.provable(self.world.hosts[name], member) for name in living
        )

    def _is_evicted(self, member: Member, living: set[str]) -> bool:
        """Whether an operator declared this life dead to all these trainers: each may coordinate, and then counts."""
        heard = self.evicted.get((member.peer, member.incarnation))
        hosts = [host for host in self.world.living() if host.up and host.machine.me.peer in living]
        return heard is not None and all(host.life in heard or host.witness for host in hosts)

    def _means(self, commit: Commit, voters: set[str]) -> str:
        """Whether a mean that a living voter accepted for the next version lives, too: it may be needed again."""
        for accepted in self.world.invariants.ballots.accepted_by(commit.digest, voters):
            if any(host.holds_mean(accepted.mean_digest) for host in self._trainers(commit)):
                continue
            if not self._may_give_up(commit, {host.name for host in self._trainers(commit)}):
                return f"the mean of {accepted.digest[:8]}, which was accepted, is with no trainer that lives"
        return ""

    def given_up(self, commit: Commit) -> bool:
        """Whether a commit may be given up: an operator answers for all who may have had it, and no live trainer has
        its mean."""
        before = self.world.invariants.commits.get(commit.previous)
        trainers = [host for host in self.world.living() if host.up and not host.witness]
        has_it = any(host.holds_mean(commit.mean_digest) for host in trainers)
        return before is not None and not has_it and self._may_give_up(before, set())

    def _may_give_up(self, commit: Commit, heard_by: set[str]) -> bool:
        """Whether an operator answers for all trainers of a view that do not live, and these have heard it."""
        lost = [member for member in commit.view if not member.witness and not self.world.lives(member)]
        return bool(lost) and all(self._is_evicted(member, heard_by) for member in lost)


def _height(commit: Commit) -> tuple[int, int, int]:
    return commit.tokens, commit.version, commit.height


def quorum(members: int, gone: int) -> int:
    """Votes that decide in a view: a majority of all, or where half of an even view is dead for certain, the rest."""
    return members // 2 if 2 * gone >= members and members % 2 == 0 else members // 2 + 1
