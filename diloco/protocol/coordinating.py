"""Coordinating an attempt: the group that contributes, repairs around the dead, and the vote."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco.base.types import Commit, Member
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.committing import Committing
from diloco.protocol.reduction import Reduction, Tally
from diloco.protocol.view import GroupDecision, Policy, as_spans, decide, in_turn, respan, spans

MEAN_LOST = "a version was accepted whose mean nobody here has: bring back, or evict,"
"""Begins the reason; those who may have it follow."""


class Coordinating(Committing):
    """The coordinator's layer of the protocol's state machine; every trainer coordinates in its turn."""

    def _on_ready(self, sender: Member, body: m.Ready) -> None:
        if not self._current(sender, body.version) or not self._is_member(sender):
            return
        if self._seat(body.attempt) != self.me or body.attempt < self.attempt:
            return
        if body.offer is not None:
            # Nobody can have used more data than it holds, or measured against another version than this.
            assert self.commit is not None
            held = leases.count(self.commit.leases.held.get(sender.peer, ()))
            here = body.offer.base_version == self.version
            if sender.witness or not here or body.offer.weight <= 0 or body.offer.blocks > held:
                return
        if body.attempt > self.attempt:
            self._enter(body.attempt, f"{sender.peer} asked for attempt {body.attempt}")
        self.electorate.bequeath(body.votes, sender.peer)  # the leaver's goodbye may not have reached us
        if self._tally is None:
            self._tally = Tally(self.attempt)
        self._tally.hear(sender.peer, body, self._now)
        self._coordinate()

    def _coordinate(self) -> None:
        """As coordinator, take the attempt further: on to `Begin`, to a proposal, or to the commit."""
        tally = self._tally
        if tally is None or (tally.begin is not None and tally.proposal is None):
            return  # nothing to lead, or the mean is not here yet
        if tally.proposal is not None:
            self._commit_if_accepted(tally)
            return
        promises = len(tally.promises() & self.electorate.voters())
        earlier = tally.accepted()
        if self.attempt > 0 and promises < self.electorate.needed():
            self._note(f"attempt {self.attempt}: {promises} of {self.electorate.needed()} promises")
        elif earlier is not None and earlier.digest not in tally.lost:
            # It may have been decided already: with another value two commits could have a majority.
            self._note(f"attempt {self.attempt}: proposing again what was accepted before")
            self._propose(tally, earlier)
        else:
            self._begin_if_matched(tally)

    def _begin_if_matched(self, tally: Tally) -> None:
        """As coordinator, send `Begin` for the reduction when the group of contributors is complete."""
        decision = self._decision(tally)
        self._note(decision.reason, decision.routine)
        if decision.group is None:
            return
        # Joiners that hold this very state receive the mean like the others: they are in the next view.
        beats = [(member, self.roster.heartbeat(member.peer)) for member in self._newcomers() if not member.witness]
        joiners = [member for member, beat in beats if beat is not None and beat.version == self.version]
        turn = (self.making - 1) // len(self.rules.parts)
        group = in_turn(decision.group, self.rules.policy.max_peers, turn)
        contributors = tuple(tally.counted(peer) for peer in group)
        owners = spans(self.rules.parts[self.fragment], group, tally.send_bps(group))
        tally.audience = (*self._trainers_alive(), *joiners)
        tally.begin = m.Begin(self.making, self.attempt, contributors, tally.audience, owners)
        self._send_all(tally.audience, tally.begin)

    @property
    def _policy(self) -> Policy:
        """The policy by which the coordinator closes the version being made."""
        total = self.rules.total_tokens
        ending = total is not None and self.commit is not None and self.commit.tokens >= total
        return self.rules.policy.at(self.making, ending)

    def _decision(self, tally: Tally) -> GroupDecision:
        """The coordinator's decision: contributors of the attempt, or None to wait; with the reason."""
        no_majority = self._no_majority()
        if no_majority:
            return GroupDecision(None, no_majority)
        names = [member.peer for member in self.view if not member.witness]
        living = [member.peer for member in self._trainers_alive()]
        expected = [peer for peer in living if peer not in self._without and not self.roster.barred(peer)]
        if not expected:
            if self._now - self._entered_at < self.timing.stall_s:
                return GroupDecision(None, "every contribution was refused: asking again soon")
            expected = living
        waits_from = tally.waits_from(self.sync_s, reserve_s=self.timing.stall_s)
        return decide(self._policy, self._now, names, expected, tally.offered_at_s, tally.state_digests, waits_from)

    # ------------------------------------------------------------ failures in a reduction

    def _on_stalled(self, sender: Member, body: m.Stalled) -> None:
        tally = self._tally
        if tally is None or body.key != (self.making, self.attempt):
            return
        if tally.begin is None or not self._is_member(sender) or (tally.proposal is not None and body.missing):
            return
        reason = f"{sender.peer}: {body.reason}"
        if body.offence or not body.missing:
            self._abort(tally, body.missing, reason, body.offence)
        elif len(body.missing) > len(tally.begin.contributors) // 2:
            self._repair(tally, (sender.peer,), f"{reason} from most others")  # it is the one that is cut off
        else:
            self._repair(tally, body.missing, reason)

    def _repair(self, tally: Tally, lost: Sequence[str], reason: str) -> None:
        """As coordinator, send `Repair`: the attempt goes on without `lost`, parts still missing get other owners."""
        reduction = self._reduction
        if reduction is None:
            self._abort(tally, lost, reason)
            return
        gone = reduction.gone | set(lost)
        if reduction.complete or gone == reduction.gone:
            return
        left = [peer for peer in reduction.contributors if peer not in gone]
        if not left:
            self._abort(tally, sorted(gone), reason)
            return
        owners = respan(as_spans(reduction.owner), reduction.absent, gone, left, tally.send_bps(left))
        generation = reduction.generation + 1
        tally.repair = m.Repair(self.making, self.attempt, generation, tuple(sorted(gone)), tuple(owners), reason)
        self._send_all(tally.audience, tally.repair)

    def _abort(self, tally: Tally, without: Sequence[str], reason: str, offence: bool = False) -> None:
        self._send_all(tally.audience, m.Abort(self.making, self.attempt, tuple(without), reason, offence))

    # ------------------------------------------------------------ the vote

    def _propose(self, tally: Tally, commit: Commit) -> None:
        """As coordinator, ask for votes: of trainers first, for witnesses hold no mean, and the mean must live on."""
        tally.proposal = commit
        tally.proposed_at_s = self._now
        tally.audience = tally.audience or tuple(self._trainers_alive())
        self._proposal = m.Propose(self.making, self.attempt, commit)
        self._send_all([member for member in tally.audience if member != self.me], self._proposal)
        if commit.mean_digest not in self._held:
            self._fetch(self._proposal)
        self._commit_if_accepted(tally)

    def _ask_witnesses(self, tally: Tally, proposal: m.Propose) -> None:
        """As coordinator, ask witnesses to vote when every live trainer accepted the commit, or does not answer."""
        others = [member for member in self._trainers_alive() if member != self.me]
        patient = self._now - tally.proposed_at_s < self.timing.stall_s
        if tally.witnesses_asked or (patient and any(member.peer not in tally.accepts for member in others)):
            return
        tally.witnesses_asked = True
        witnesses = [member for member in self.alive() if member.witness]
        tally.audience = (*tally.audience, *witnesses)
        self._send_all(witnesses, proposal)

    def _on_accept(self, sender: Member, body: m.Accept) -> None:
        tally = self._tally
        if tally is None or tally.proposal is None or body.key != (self.making, self.attempt):
            return
        if body.commit_digest == tally.proposal.digest and self._is_member(sender):
            tally.accepts[sender.peer] = {sender.peer, *body.votes}
            self._commit_if_accepted(tally)

    def _commit_if_accepted(self, tally: Tally) -> None:
        """With a majority of votes the commit holds; live members about to accept get a moment to do so first.

        The coordinator's own vote comes when it decides: a mean that nobody else holds alike must not bind the next.
        """
        proposal = self._proposal
        assert proposal is not None
        self._ask_witnesses(tally, proposal)
        mine = {self.me.peer, *self.electorate.held_by(self.me.peer)}
        accepted = len((tally.votes() | mine) & self.electorate.voters()) >= self.electorate.needed()
        if not accepted or proposal.commit.mean_digest not in self._held:
            self._reconsider(tally, proposal.commit)
            return
        if self.me.peer not in tally.accepts:
            self._accept(proposal)  # comes back here
            return
        tally.majority_at_s = min(tally.majority_at_s, self._now)
        asked = {member.peer for member in tally.audience}  # not a member that came back meanwhile: it lacks the mean
        late = [member for member in self.alive() if member.peer in asked and member.peer not in tally.accepts]
        if not late or self._now >= self._patient_until_s(tally):
            self._announce(proposal.commit, tally.audience)

    def _patient_until_s(self, tally: Tally) -> float:
        """End of the coordinator's wait for votes of live members after a majority's: they may have been stopped.

        Under `async` no longer than all that offered have inner steps to do.
        """
        stall_s = tally.majority_at_s + self.timing.stall_s
        policy = self._policy
        if policy.quorum_peers is None or not policy.uses_slack:
            return stall_s
        return min((stall_s, *tally.waits_from().values()))

    def _reconsider(self, tally: Tally, commit: Commit) -> None:
        """As coordinator, give up a proposal that nobody can accept, since its mean died with the peers that held it.

        In the next attempt the living report what they accepted. If a majority of them accepted nothing, nothing was
        decided. If one did, only an operator can know that the peers that held the mean are gone for good: all of them,
        for one that is only out of reach may have made the version.
        """
        waited_s = self._now - tally.proposed_at_s
        lost = commit.mean_digest not in self._held
        evicted = self.electorate.evicted
        trainers = {member.peer for member in self.view if not member.witness}
        away = trainers - {member.peer for member in self._trainers_alive()} - evicted
        if evicted and lost and not away and waited_s > 2 * self.timing.stall_s:
            self._note("the mean that was accepted before died with an evicted peer")
            # Members that voted for it voted for nothing else, and are to be asked for the next proposal.
            tally.lost.add(commit.digest)
            tally.proposal = self._proposal = None
            tally.accepts = {}
            tally.witnesses_asked = False
        elif lost and away and self.timing.stall_s < waited_s <= 2 * self.timing.stall_s:
            self.mean_lost_with = tuple(sorted(away))
            self._note(f"{MEAN_LOST} {', '.join(self.mean_lost_with)}")
        elif waited_s > 3 * self.timing.stall_s:
            self._enter(self.attempt + 1, f"the proposal of attempt {self.attempt} was not accepted")

    def _announce(self, commit: Commit, audience: Sequence[Member]) -> None:
        """Send a commit that holds, or that founds a lineage, to all members that it concerns, and move on to it."""
        others = {member.peer: member for member in (*audience, *commit.view) if member != self.me}
        self._send_all(list(others.values()), m.Committed(commit))
        self._decide(commit, self.me)

    # ------------------------------------------------------------ the next commit

    def _newcomers(self) -> list[Member]:
        """Joiners on the roster for the next view: at this version, or so near that commits bring them there."""
        near = max(self.rules.backlog_versions - 1, 0)
        known = {member.peer for member in self.alive()}
        return [member for member in self.roster.at_the_door(near, self._now) if member.peer not in known]

    def _next_view(self, leaving: Collection[str]) -> list[Member]:
        """The view that the next commit names: members that stay, in their order, and then those that join."""
        alive = [member for member in self.alive() if not self.roster.barred(member.peer)] or self.alive()
        stay = [member for member in alive if member.peer not in leaving]
        join = [member for member in self._newcomers() if member.peer not in leaving]
        if all(member.witness for member in (*stay, *join)):
            stay = alive  # somebody must go on training
        kept = self._keep_one_silent_voter([*stay, *join], leaving)
        return [*(member for member in self.view if member in stay or member == kept), *join]

    def _keep_one_silent_voter(self, view: Sequence[Member], leaving: Collection[str]) -> Member | None:
        """One lost member to keep in the next view, at no cost in votes: two of three decide as two of two would.

        It may only be out of reach. When it is back it has its place and its vote; if another died meanwhile, those
        two decide.
        """
        if len(view) % 2:
            return None
        gone = self.electorate.voters() - {member.peer for member in view} - set(leaving)
        heard = {member: self.roster.last_heard_s(member) for member in self.view if member.peer in gone}
        lost = {member: at_s for member, at_s in heard.items() if at_s is not None}
        return max(lost, key=lambda member: lost[member], default=None)

    def _next_commit(self, tally: Tally, reduction: Reduction) -> Commit:
        """The commit that the coordinator proposes for a complete mean: contributions, next view, leases."""
        assert self.commit is not None
        counted, omitted = reduction.counted()
        used = {entry.peer: entry.blocks for entry in counted}
        left = {entry.member.peer for entry in self.roster if entry.left} - self.electorate.evicted
        leaving = left | (tally.leaving() & used.keys())  # a leaver whose contribution does not count offers it again
        view = self._next_view(leaving)
        names = [member.peer for member in view if not member.witness]
        return Commit(
            version=self.making,
            previous=self.commit.digest,
            lineage=self.lineage,
            fragment=self.fragment,
            view=tuple(view),
            counted=counted,
            omitted=omitted,
            mean_digest=reduction.mean_digest,
            tokens=self.commit.tokens + sum(entry.tokens for entry in counted),
            leases=leases.advance(self.commit.leases, used, names, self.rules.lease_blocks, leaving),
            state_digest=tally.ready[counted[0].peer].state_digest,
        )
