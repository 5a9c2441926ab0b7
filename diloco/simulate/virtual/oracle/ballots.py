"""Every vote of every simulated peer, and the rules of the vote (I1, I5), checked when one is cast.

Two versions that both close are rare even where voters break their word: somebody must die, or be cut off, between two
messages. What each of them says is seen here, also what nobody ever receives.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.vote import VoteRecord
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.oracle.promise import quorum

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

Ballot = tuple[int, str]
"""Attempt, and digest of the commit."""
SLACK_S = 0.3
"""A ballot is seen here a tick later than it began, at most."""


class SimulatedBallots:
    """Promises and votes of the simulated peers, by the commit that they follow."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._proposed: dict[str, Commit] = {}
        self._promisers: dict[tuple[str, int], set[str]] = {}
        """By the commit that they stood on, and attempt."""
        self._attempt: dict[str, int] = {}
        """The latest in which a commit was proposed."""
        self._led: set[tuple[str, int]] = set()
        """Attempts in which something was proposed."""
        self._votes: dict[str, dict[Ballot, set[str]]] = {}
        self._boots: dict[str, dict[str, int]] = {}
        """By commit: the process with which each peer voted for it last."""
        self._leaders: dict[tuple[str, int], int] = {}
        """By commit before and attempt: life of the process that leads it."""
        self._decided: set[str] = set()
        self._since: dict[tuple[int, int, str], float] = {}
        """When, by its own clock, a life of a coordinator first had a ballot."""
        self._asked: set[tuple[Member, int, str]] = set()
        """Witnesses, and the ballots for which they were asked."""
        self._chosen: dict[str, Ballot] = {}
        """The first that had the votes of a majority, whether or not anybody knew."""
        self._saves: dict[tuple[int, int], VoteRecord] = {}
        """By life of a process and number: records on their way to its disk."""
        self._saved: dict[int, VoteRecord] = {}
        """By life of a process: the record on its disk."""

    def on_effect(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Check what a simulated peer is about to send against the rules of the vote."""
        match effect:
            case fx.Save(number=number, record=record):
                self._saves[host.life, number] = record
            case fx.Send(_, m.Envelope(body=m.Ready() as ready) as envelope):
                self._promise(host, envelope, ready)
            case fx.Send(_, m.Envelope(body=m.Begin() as begin, head=head)) if begin.height == host.machine.height:
                self._lead_on(host, head, begin.attempt)
            case fx.Send(to, m.Envelope(body=m.Propose() as propose, head=head)):
                if head == propose.commit.previous:  # else it was said of the commit before, and is said again
                    self._lead_on(host, head, propose.attempt)
                self._ask(host, to, propose)
                self._propose(host, propose)
            case fx.Send(_, m.Envelope(body=m.Accept() as accept)):
                self._accept(host, accept)
            case fx.Send(_, m.Envelope(body=m.Committed(commit))) | fx.Close(commit):
                self._decide(host, commit)

    def on_saved(self, host: SimulatedProcess, event: m.Saved) -> None:
        """Note the record that a simulated disk has from now on."""
        record = self._saves.pop((host.life, event.number), None)
        if record is not None and not event.refused:
            self._saved[host.life] = record
            if not host.disk.lying:  # else a loss of power may take it
                host.disk.bound[host.machine.me.incarnation] = record

    def on_machine(self, host: SimulatedProcess) -> None:
        """Check a simulated coordinator's tally: it sends its own vote to nobody, and counts those that were cast."""
        machine = host.machine
        tally = machine._coordinator._tally
        if tally is None or tally.proposal is None:
            return
        commit, ballot = tally.proposal, (tally.attempt, tally.proposal.digest)
        self._since.setdefault((host.life, *ballot), host.now)
        if machine.me.peer in tally.accepts:
            self._vote(host, tally.attempt, commit)
            self._check_last(host, commit, ballot)
        uncast = tally.accepts.keys() - self._votes.get(commit.previous, {}).get(ballot, set())
        if uncast:
            names = ", ".join(sorted(uncast))
            raise Violation("I1", f"{host.name} counts a vote of {names} for {_name(commit, tally.attempt)}, not cast")

    def accepted_by(self, previous: str, peers: set[str]) -> list[Commit]:
        """Commits after the one with digest `previous` that one of these voters accepted last."""
        last: dict[str, Ballot] = {}
        for ballot, cast in self._votes.get(previous, {}).items():
            for voter in cast & peers:
                last[voter] = max(last.get(voter, ballot), ballot)
        return [self._proposed[digest] for digest in {digest for _, digest in last.values()}]

    def closed(self, host: SimulatedProcess, commit: Commit) -> None:
        """Note that a commit had its majority in the simulation. A coordinator with all votes proposes to nobody."""
        if not commit.founds:
            attempt = self._attempt.get(commit.digest, host.machine.attempts - 1)
            self._chosen.setdefault(commit.previous, (attempt, commit.digest))

    def _decide(self, host: SimulatedProcess, commit: Commit) -> None:
        """Check a simulated coordinator that decides a version: it has the votes needed, its own among them."""
        before = self.world.invariants.commits.get(commit.previous)
        if before is None or commit.founds or commit.digest in self._decided:
            return
        self._decided.add(commit.digest)
        members, mine = voters(before), {host.name}
        ballots = self._votes.get(commit.previous, {})
        cast = [cast for (_, digest), cast in ballots.items() if digest == commit.digest]
        votes = max((len((one | mine) & members) for one in cast), default=len(mine & members))
        needed = self.needed(host, before)
        if votes < needed:
            raise Violation("I1", f"{host.name} decides version {commit.version} with {votes} votes of {needed}")
        if 2 * votes == len(members):
            boots = {host.name: host.machine.boot, **self._boots.get(commit.digest, {})}
            later = [voter.peer for voter in before.voters if boots.get(voter.peer, voter.boot) != voter.boot]
            if later:  # rule 6: what the process before promised is not known
                raise Violation("I1", f"{host.name} decides by half, and {', '.join(later)} voted in another process")
        if commit.moves and not host.holds_mean(commit.mean_digest):
            raise Violation("I5", f"{host.name} decides version {commit.version} without its mean")

    def needed(self, host: SimulatedProcess, before: Commit) -> int:
        """Votes that decide after a commit, by the deaths that were proven to a simulated peer."""
        members = voters(before)
        gone = self.world.machines.proved(host, before.voting)
        return quorum(len(members), len(gone))

    def _check_last(self, host: SimulatedProcess, commit: Commit, ballot: Ballot) -> None:
        """Check that a simulated coordinator votes last, when its vote decides."""
        before = self.world.invariants.commits.get(commit.previous)
        cast = self._votes.get(commit.previous, {}).get(ballot, set())
        if before is None or not commit.moves or len(cast & voters(before)) >= self.needed(host, before):
            return
        if not host.holds_mean(commit.mean_digest):
            raise Violation("I5", f"{host.name} accepts {_name(commit, ballot[0])} without its mean")
        raise Violation("I5", f"{host.name} votes for its own {_name(commit, ballot[0])} before the others")

    def _promise(self, host: SimulatedProcess, envelope: m.Envelope, ready: m.Ready) -> None:
        """Note a simulated promise, by the commit under it: its sender may just have founded a lineage. It binds each
        process on this disk, and those on copies that are made of it later."""
        me, before = envelope.sender, envelope.head
        there = self._saved.get(host.life)
        if ready.attempt and (there is None or there.head != before or there.promised < ready.attempt):
            raise Violation("I1", f"{host.name} promises attempt {ready.attempt}, and its disk does not have that")
        if before:
            promised, place = host.disk.promised, (me.incarnation, before)
            if not host.disk.lying:  # else a loss of power may take the promise
                promised[place] = max(promised.get(place, 0), ready.attempt)
            self._promisers.setdefault((before, ready.attempt), set()).add(me.peer)

    def resumes(self, host: SimulatedProcess) -> None:
        """Check that a simulated process knows what bound the ones before it on this disk."""
        disk, life, record = host.disk, host.machine.me.incarnation, host.machine._acceptor._record
        self._saved[host.life] = record
        there = disk.bound.get(life, record)
        if disk.damaged or record.head != there.head:
            return
        promised = max(disk.promised.get((life, record.head), 0), there.promised)
        forgets = record.promised < promised or record.led < there.led or record.attempt < there.attempt
        if forgets or (record.attempt == there.attempt and record.value != there.value):
            what = f"goes on in the vote on {record.head[:8]}, and has forgotten what bound it:"
            raise Violation("I1", f"{host.name} {what} it promised {promised}, and {there} was saved, not {record}")

    def _lead_on(self, host: SimulatedProcess, head: str, attempt: int) -> None:
        """Check that the disk of a simulated coordinator has it that this process leads the attempt; no other did."""
        there = self._saved.get(host.life)
        if there is None or there.head != head or there.led < attempt:
            raise Violation("I1", f"{host.name} leads attempt {attempt}, and its disk does not have that")
        if self._leaders.setdefault((head, attempt), host.life) != host.life:
            raise Violation("I1", f"{host.name} leads attempt {attempt} on {head[:8]}, which another process led")

    def _ask(self, host: SimulatedProcess, to: Member, propose: m.Propose) -> None:
        """Check that a simulated witness is asked last: it holds no mean, and the mean must live on (I5)."""
        commit, ballot = propose.commit, (propose.attempt, propose.commit.digest)
        since_s = self._since.setdefault((host.life, *ballot), host.now)
        before = self.world.invariants.commits.get(commit.previous)
        if before is None or not (to.witness and commit.moves) or (to, *ballot) in self._asked:
            return
        self._asked.add((to, *ballot))
        cast = self._votes.get(commit.previous, {}).get(ballot, set())
        trainers = [member for member in before.view if not member.witness and member.peer not in {host.name, *cast}]
        roster = host.machine.roster
        beats = {member: roster.heartbeat(member) for member in trainers if roster.alive(member, host.now)}
        living = [member.peer for member, beat in beats.items() if beat is None or not beat.abstains]
        if living and host.now - since_s < self.world.setup.timing.stall_s - SLACK_S:
            what = f"asks {to.peer} for its vote for {_name(commit, propose.attempt)} before {', '.join(living)}"
            raise Violation("I5", f"{host.name} {what}")

    def _propose(self, host: SimulatedProcess, propose: m.Propose) -> None:
        commit = propose.commit
        self._proposed[commit.digest] = commit
        place = commit.previous, propose.attempt
        before = host.machine.commit
        stands = before is not None and before.digest == commit.previous  # else it decided alone, and went on
        if propose.attempt and stands and place not in self._led:
            self._lead(host, propose)
        self._led.add(place)
        self._attempt[commit.digest] = max(self._attempt.get(commit.digest, 0), propose.attempt)
        attempt, digest = self._chosen.get(commit.previous, (propose.attempt, commit.digest))
        other = propose.attempt > attempt and commit.digest != digest
        if other and not self._given_up(digest) and not self._voters_evicted(digest):
            what = f"proposes {_name(commit, propose.attempt)} when {digest[:8]} has the votes of a majority"
            raise Violation("I1", f"{host.name} {what}")

    def _lead(self, host: SimulatedProcess, propose: m.Propose) -> None:
        """Check a simulated later attempt's first proposal: enough promised it; it is the last accepted, if any."""
        commit, tally = propose.commit, host.machine._coordinator._tally
        before = self.world.invariants.commits[commit.previous]
        promised = self._promisers.get((commit.previous, propose.attempt), set()) | {host.name}
        promised &= voters(before)
        if len(promised) < self.needed(host, before):
            what = f"proposes {_name(commit, propose.attempt)} with {len(promised)} promises"
            raise Violation("I1", f"{host.name} {what}")
        ready = {peer: one for peer, one in tally.ready.items() if peer in voters(before)} if tally is not None else {}
        latest = [
            max(some, key=lambda one: one.accepted_attempt).accepted
            for some in combinations(ready.values(), min(self.needed(host, before), len(ready)))
            if some
        ]
        if latest and not any(known in (None, commit) for known in latest):
            what = f"proposes {_name(commit, propose.attempt)} and knows what was accepted later"
            raise Violation("I1", f"{host.name} {what}")

    def _given_up(self, digest: str) -> bool:
        """Whether what had votes died with lives for which an operator answers."""
        commits = self.world.invariants.commits  # who decides alone proposes to nobody
        commit = self._proposed.get(digest) or commits.get(digest)
        return commit is not None and self.world.promise.given_up(commit)

    def _voters_evicted(self, digest: str) -> bool:
        """Whether nobody closed what had votes, and an operator declared all dead who cast them, some for leavers."""
        commit = self._proposed.get(digest)
        before = self.world.invariants.commits.get(commit.previous) if commit is not None else None
        if commit is None or before is None or digest in self.world.invariants.commits:
            return False
        evicted = {one.peer for one in before.voting if (one.peer, one.incarnation) in self.world.promise.evicted}
        ballots = self._votes.get(commit.previous, {}).items()
        return all(cast <= evicted for (_, voted), cast in ballots if voted == digest)

    def _accept(self, host: SimulatedProcess, accept: m.Accept) -> None:
        commit = self._proposed.get(accept.commit_digest)
        if commit is None:
            raise Violation("I1", f"{host.name} accepts what nobody proposed")
        if commit.moves and not (host.witness or host.holds_mean(commit.mean_digest)):
            raise Violation("I5", f"{host.name} accepts {_name(commit, accept.attempt)} without its mean")
        if commit.moves and not host.witness:
            host.records.votes_for(commit)
        there, vote = self._saved.get(host.life), (commit.previous, accept.attempt, commit.digest)
        stands = host.machine.commit is not None and host.machine.commit.digest == commit.previous
        if stands and (there is None or (there.head, there.attempt, there.value) != vote):
            raise Violation(
                "I1", f"{host.name} accepts {_name(commit, accept.attempt)}, and its disk does not have that"
            )
        self._vote(host, accept.attempt, commit)

    def _vote(self, host: SimulatedProcess, attempt: int, commit: Commit) -> None:
        me, before = host.machine.me, host.machine.commit
        if before is None or before.digest != commit.previous or me not in before.view:
            raise Violation("I1", f"{host.name} votes for {_name(commit, attempt)} and is no member before it")
        promised = host.disk.promised.get((me.incarnation, before.digest), 0)
        if attempt < promised:
            raise Violation("I1", f"{host.name} accepts {_name(commit, attempt)} after it promised attempt {promised}")
        ballot = attempt, commit.digest
        cast = self._votes.setdefault(commit.previous, {}).setdefault(ballot, set())
        cast.add(host.name)
        self._boots.setdefault(commit.digest, {})[host.name] = host.machine.boot
        if 2 * len(cast & voters(before)) > len(before.voters):
            _, chosen = self._chosen.setdefault(commit.previous, ballot)
            if chosen != commit.digest and not self._given_up(chosen):
                what = f"{_name(commit, attempt)} and {chosen[:8]}"
                raise Violation("I1", f"of one version two commits have the votes of a majority: {what}")


def voters(commit: Commit) -> set[str]:
    """Names of those that vote on the commit after one in a simulation."""
    return {voter.peer for voter in commit.voters}


def _name(commit: Commit, attempt: int) -> str:
    return f"{commit.digest[:8]} (version {commit.version}, attempt {attempt})"
