"""Coordinating an attempt: the group that contributes, repairs around the dead, the vote, and the next commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.post import Post
from diloco.protocol.reduction import Reduction, Tally
from diloco.protocol.view import GroupDecision, Policy, Rules, Timing, as_spans, decide, in_turn, respan, spans

if TYPE_CHECKING:
    from diloco.protocol.acceptor import Acceptor
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.lineage import Lineage
    from diloco.protocol.membership import Membership

MEAN_LOST = "a version was accepted whose mean nobody here has: bring back, or evict,"
"""Begins the reason; those who may have it follow."""


class Coordinator:
    """The coordinator's role in the protocol: one value in each attempt. Every trainer coordinates in its turn."""

    acceptor: Acceptor
    chain: Chain
    contributor: Contributor
    lineage: Lineage
    membership: Membership

    def __init__(self, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self._tally: Tally | None = None
        """The record of the attempt that this peer leads; None: another leads it."""
        self._without: tuple[str, ...] = ()
        """Peers whose contributions made the attempt before fail."""
        self.mean_lost_with: tuple[str, ...] = ()
        """Trainers that do not live and may have the mean of a version that was accepted, which no live one has."""
        self._entered_at = self._resend_at = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def leads(self) -> bool:
        """Whether this peer has begun to lead the attempt."""
        return self._tally is not None

    @property
    def proposes(self) -> bool:
        """Whether this peer's attempt has come to its proposal."""
        return self._tally is not None and self._tally.proposal is not None

    def began(self, begin: m.Begin) -> bool:
        """Whether this peer leads the reduction that began so."""
        return self._tally is not None and self._tally.begin is begin

    # ------------------------------------------------------------ the attempt

    def enter(self, leads: bool, reason: str) -> None:
        """Move on to a later attempt, and ask all members for promises if this peer `leads` it."""
        attempt = self.acceptor.attempt
        self._entered_at = self._post.now
        self._tally = Tally(attempt) if leads else None
        if leads:
            self._post.send_all(self.chain.view, m.Gather(self.chain.making, attempt, reason))

    def on_ready(self, sender: Member, body: m.Ready) -> None:
        """Count a promise, and the offer with it."""
        chain, membership, acceptor = self.chain, self.membership, self.acceptor
        if not chain.current(sender, body.version) or not membership.is_member(sender):
            return
        if acceptor.seat(body.attempt) != membership.me or body.attempt < acceptor.attempt:
            return
        if body.offer is not None:
            # Nobody can have used more data than it holds, or measured against another version than this.
            assert chain.commit is not None
            held = leases.count(chain.commit.leases.held.get(sender.peer, ()))
            here = body.offer.base_version == chain.version
            if sender.witness or not here or body.offer.weight <= 0 or body.offer.blocks > held:
                return
        if body.attempt > acceptor.attempt:
            self._post.next_attempt(body.attempt, f"{sender.peer} asked for attempt {body.attempt}")
        membership.bequeathed(body.votes, sender.peer)
        if self._tally is None:
            self._tally = Tally(acceptor.attempt)
        self._tally.hear(sender.peer, body, self._post.now)
        self.coordinate()

    def coordinate(self) -> None:
        """As coordinator, take the attempt further: on to `Begin`, to a proposal, or to the commit."""
        tally = self._tally
        if tally is None or (tally.begin is not None and tally.proposal is None):
            return  # nothing to lead, or the mean is not here yet
        if tally.proposal is not None:
            self._commit_if_accepted(tally, tally.proposal)
            return
        electorate, attempt = self.membership.electorate, self.acceptor.attempt
        promises = len(tally.promises() & electorate.voters())
        earlier = tally.accepted()
        if attempt > 0 and promises < electorate.needed():
            self._post.note(f"attempt {attempt}: {promises} of {electorate.needed()} promises")
        elif earlier is not None and earlier.digest not in tally.lost:
            # It may have been decided already: with another value two commits could have a majority.
            self._post.note(f"attempt {attempt}: proposing again what was accepted before")
            self._propose(tally, earlier)
        else:
            self._begin_if_matched(tally)

    def _begin_if_matched(self, tally: Tally) -> None:
        """As coordinator, send `Begin` for the reduction when the group of contributors is complete."""
        decision = self._decision(tally)
        self._post.note(decision.reason, decision.routine)
        if decision.group is None:
            return
        chain, membership, rules = self.chain, self.membership, self._rules
        # Joiners that hold this very state receive the mean like the others: they are in the next view.
        newcomers = [member for member in membership.newcomers() if not member.witness]
        beats = [(member, membership.roster.heartbeat(member.peer)) for member in newcomers]
        joiners = [member for member, beat in beats if beat is not None and beat.version == chain.version]
        turn = (chain.making - 1) // len(rules.parts)
        group = in_turn(decision.group, rules.policy.max_peers, turn)
        contributors = tuple(tally.counted(peer) for peer in group)
        owners = spans(rules.parts[chain.fragment], group, tally.send_bps(group))
        tally.audience = (*membership.trainers_alive(), *joiners)
        tally.begin = m.Begin(chain.making, self.acceptor.attempt, contributors, tally.audience, owners)
        self._post.send_all(tally.audience, tally.begin)

    @property
    def _policy(self) -> Policy:
        """The policy by which the coordinator closes the version being made."""
        total, commit = self._rules.total_tokens, self.chain.commit
        ending = total is not None and commit is not None and commit.tokens >= total
        return self._rules.policy.at(self.chain.making, ending)

    def _decision(self, tally: Tally) -> GroupDecision:
        """The coordinator's decision: contributors of the attempt, or None to wait; with the reason."""
        membership, now, stall_s = self.membership, self._post.now, self._timing.stall_s
        no_majority = membership.no_majority()
        if no_majority:
            return GroupDecision(None, no_majority)
        names = [member.peer for member in self.chain.view if not member.witness]
        living = [member.peer for member in membership.trainers_alive()]
        allowed = [peer for peer in living if not membership.roster.barred(peer)]
        expected = [peer for peer in allowed if peer not in self._without]
        if not any(peer in tally.offered_at_s for peer in expected):  # who was left out may be all that contribute
            if now - self._entered_at >= stall_s:
                expected = allowed or living
            elif not expected:
                return GroupDecision(None, "every contribution was refused: asking again soon")
        waits_from = tally.waits_from(self.chain.sync_s, reserve_s=stall_s)
        return decide(self._policy, now, names, expected, tally.offered_at_s, tally.state_digests, waits_from)

    # ------------------------------------------------------------ failures in a reduction

    def on_stalled(self, sender: Member, body: m.Stalled) -> None:
        """Repair the reduction around those whose bytes do not come, or give the attempt up.

        Who moves elsewhere is no reason: it may wait for others' bytes itself, or its uplink serves others first.
        """
        tally = self._tally
        if tally is None or body.key != (self.chain.making, self.acceptor.attempt):
            return
        member = self.membership.is_member(sender)
        if tally.begin is None or not member or (tally.proposal is not None and body.missing):
            return
        reason = f"{sender.peer}: {body.reason}"
        missing = [peer for peer in body.missing if not (body.still and self._moves(peer))]
        cut_off = body.still and len(body.missing) > len(tally.begin.contributors) // 2
        if body.offence or not body.missing:
            self._abort(tally, body.missing, reason, body.offence)
        elif cut_off and missing == [*body.missing]:
            self.repair((sender.peer,), f"{reason} from most others")
        elif missing and not cut_off and not self.contributor.goes_on_without(sender.peer):
            self.repair(missing, reason)

    def _moves(self, peer: str) -> bool:
        """Whether bytes moved at a peer, as far as its heartbeats tell, since another began to wait for `stall_s`."""
        if peer == self.membership.me.peer:
            return self.contributor.moves
        return self._post.now - self.membership.roster.moved_at_s((peer,)) < self._timing.stall_s / 2

    def repair(self, lost: Sequence[str], reason: str) -> None:
        """As coordinator, send `Repair`: the attempt goes on without `lost`, parts still missing get other owners.

        If this peer is one of them, it gives away all its parts: it may have made their means, which others lack.
        """
        tally, reduction = self._tally, self.contributor.reduction
        assert tally is not None
        if reduction is None:
            self._abort(tally, lost, reason)
            return
        gone, me = reduction.gone | set(lost), self.membership.me.peer
        lacking = reduction.absent | (reduction.parts_of(me) if me in lost else set())
        if not lacking or gone == reduction.gone:
            return
        left = [peer for peer in reduction.contributors if peer not in gone]
        if not left:
            self._abort(tally, sorted(gone), reason)
            return
        owners = respan(as_spans(reduction.owner), lacking, gone, left, tally.send_bps(left))
        generation, making, attempt = reduction.generation + 1, self.chain.making, self.acceptor.attempt
        tally.repair = m.Repair(making, attempt, generation, tuple(sorted(gone)), tuple(owners), reason)
        self._post.send_all(tally.audience, tally.repair)

    def _abort(self, tally: Tally, without: Sequence[str], reason: str, offence: bool = False) -> None:
        abort = m.Abort(self.chain.making, self.acceptor.attempt, tuple(without), reason, offence)
        self._post.send_all(tally.audience, abort)

    def on_abort(self, sender: Member, body: m.Abort) -> None:
        """The attempt failed: go on to the next one, without those who made it fail."""
        acceptor = self.acceptor
        if body.key != (self.chain.making, acceptor.attempt) or sender != acceptor.seat(body.attempt):
            return
        if body.offence:
            self.membership.offended(body.without)
        self._without = body.without
        self._post.next_attempt(acceptor.attempt + 1, f"attempt {body.attempt} failed: {body.reason}")
        acceptor.follow_coordinator()

    # ------------------------------------------------------------ the vote

    def propose_mean(self) -> None:
        """As coordinator, propose the commit of the reduction, whose mean is complete here."""
        tally, reduction = self._tally, self.contributor.reduction
        if tally is not None and tally.begin is not None and tally.proposal is None and reduction is not None:
            self._propose(tally, self._next_commit(tally, reduction))

    def _propose(self, tally: Tally, commit: Commit) -> None:
        """As coordinator, ask for votes: of trainers first, for witnesses hold no mean, and the mean must live on."""
        tally.proposal = commit
        tally.proposed_at_s = self._post.now
        tally.audience = tally.audience or tuple(self.membership.trainers_alive())
        proposal = self._proposed(commit)
        me = self.membership.me
        self._post.send_all([member for member in tally.audience if member != me], proposal)
        if not self.contributor.holds(commit.mean_digest):
            self.acceptor.fetch(proposal)
        self._commit_if_accepted(tally, commit)

    def _proposed(self, commit: Commit) -> m.Propose:
        """The message that asks for votes in this attempt."""
        return m.Propose(self.chain.making, self.acceptor.attempt, commit)

    def _ask_witnesses(self, tally: Tally, proposal: m.Propose) -> None:
        """As coordinator, ask witnesses to vote when every live trainer accepted the commit, or does not answer."""
        membership = self.membership
        others = [member for member in membership.trainers_alive() if member != membership.me]
        stall_s = self._timing.stall_s
        patient = self._post.now - tally.proposed_at_s < stall_s or self.contributor.still_s() < stall_s
        if tally.witnesses_asked or (patient and any(member.peer not in tally.accepts for member in others)):
            return
        tally.witnesses_asked = True
        witnesses = [member for member in membership.alive() if member.witness]
        tally.audience = (*tally.audience, *witnesses)
        self._post.send_all(witnesses, proposal)

    def on_accept(self, sender: Member, body: m.Accept) -> None:
        """Count a vote for the proposal."""
        tally = self._tally
        if tally is None or tally.proposal is None or body.key != (self.chain.making, self.acceptor.attempt):
            return
        if body.commit_digest == tally.proposal.digest and self.membership.is_member(sender):
            tally.accepts[sender.peer] = {sender.peer, *body.votes}
            self._commit_if_accepted(tally, tally.proposal)

    def count(self) -> None:
        """As coordinator, look whether the proposal has its votes by now."""
        if self._tally is not None and self._tally.proposal is not None:
            self._commit_if_accepted(self._tally, self._tally.proposal)

    def _commit_if_accepted(self, tally: Tally, commit: Commit) -> None:
        """With a majority of votes the commit holds; live members about to accept get a moment to do so first.

        The coordinator's own vote comes when it decides: a mean that nobody else holds alike must not bind the next.
        """
        proposal, membership = self._proposed(commit), self.membership
        me, electorate = membership.me.peer, membership.electorate
        self._ask_witnesses(tally, proposal)
        mine = {me, *membership.votes()}
        accepted = len((tally.votes() | mine) & electorate.voters()) >= electorate.needed()
        if not accepted or not self.contributor.holds(commit.mean_digest):
            self._reconsider(tally, commit)
            return
        if me not in tally.accepts:
            self.acceptor.accept(proposal)  # comes back here
            return
        tally.majority_at_s = min(tally.majority_at_s, self._post.now)
        asked = {member.peer for member in tally.audience}  # not a member that came back meanwhile: it lacks the mean
        late = [member for member in membership.alive() if member.peer in asked and member.peer not in tally.accepts]
        if not late or self._post.now >= self._patient_until_s(tally):
            self.announce(commit, tally.audience)

    def _patient_until_s(self, tally: Tally) -> float:
        """End of the coordinator's wait for votes of live members after a majority's: they may have been stopped.

        Under `async` no longer than all that offered have inner steps to do.
        """
        stall_s = tally.majority_at_s + self._timing.stall_s
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
        membership, stall_s, attempt = self.membership, self._timing.stall_s, self.acceptor.attempt
        waited_s = self._post.now - tally.proposed_at_s
        living = {member.peer for member in membership.trainers_alive()}
        lost = not self.contributor.holds(commit.mean_digest) and not living & tally.accepts.keys()
        evicted = membership.electorate.evicted
        trainers = {member.peer for member in self.chain.view if not member.witness}
        away = trainers - living - evicted
        if evicted and lost and not away and waited_s > 2 * stall_s:
            self._post.note("the mean that was accepted before died with an evicted peer")
            # Members that voted for it voted for nothing else, and are to be asked for the next proposal.
            tally.lost.add(commit.digest)
            tally.proposal = None
            tally.accepts = {}
            tally.witnesses_asked = False
        elif lost and away and stall_s < waited_s <= 2 * stall_s:
            self.mean_lost_with = tuple(sorted(away))
            self._post.note(f"{MEAN_LOST} {', '.join(self.mean_lost_with)}")
        elif min(waited_s, self.contributor.still_s()) > 3 * stall_s:
            self._post.next_attempt(attempt + 1, f"the proposal of attempt {attempt} was not accepted")

    def announce(self, commit: Commit, audience: Sequence[Member]) -> None:
        """Send a commit that holds, or that founds a lineage, to all members that it concerns, and move on to it."""
        me = self.membership.me
        others = {member.peer: member for member in (*audience, *commit.view) if member != me}
        self._post.send_all(list(others.values()), m.Committed(commit))
        self.chain.decide(commit, me)

    def resend(self) -> None:
        """Emit again what has not been answered, if that is due: `Begin`, `Repair`, `Propose`, `Gather` or `Ready`."""
        if self._post.now < self._resend_at:
            return
        self._resend_at = self._post.now + self._timing.heartbeat_s
        tally, making, attempt = self._tally, self.chain.making, self.acceptor.attempt
        if tally is not None and (tally.begin is not None or tally.proposal is not None):
            again: Sequence[m.Body | None] = (tally.begin, tally.repair)
            if tally.proposal is not None:
                again = (self._proposed(tally.proposal),)
            me = self.membership.me
            silent = [member for member in tally.audience if member != me and member.peer not in tally.accepts]
            for member in silent:
                for body in again:
                    if body is not None:
                        self._post.send(member, body)
        elif tally is not None and attempt > 0:
            for member in self.chain.view:
                if member.peer not in tally.ready:
                    self._post.send(member, m.Gather(making, attempt, self._post.reason))
        elif self.contributor.offer is not None and self.contributor.reduction is None:
            self.acceptor.answer()

    # ------------------------------------------------------------ the next commit

    def _next_view(self, leaving: Collection[str]) -> list[Member]:
        """The view that the next commit names: members that stay, in their order, and then those that join."""
        membership = self.membership
        alive = [member for member in membership.alive() if not membership.roster.barred(member.peer)]
        alive = alive or membership.alive()
        stay = [member for member in alive if member.peer not in leaving]
        join = [member for member in membership.newcomers() if member.peer not in leaving]
        if all(member.witness for member in (*stay, *join)):
            stay = alive  # somebody must go on training
        kept = self._keep_one_silent_voter([*stay, *join], leaving)
        return [*(member for member in self.chain.view if member in stay or member == kept), *join]

    def _keep_one_silent_voter(self, view: Sequence[Member], leaving: Collection[str]) -> Member | None:
        """One lost member to keep in the next view, at no cost in votes: two of three decide as two of two would.

        It may only be out of reach. When it is back it has its place and its vote; if another died meanwhile, those
        two decide.
        """
        if len(view) % 2:
            return None
        membership = self.membership
        gone = membership.electorate.voters() - {member.peer for member in view} - set(leaving)
        heard = {member: membership.roster.last_heard_s(member) for member in self.chain.view if member.peer in gone}
        lost = {member: at_s for member, at_s in heard.items() if at_s is not None}
        return max(lost, key=lambda member: lost[member], default=None)

    def _next_commit(self, tally: Tally, reduction: Reduction) -> Commit:
        """The commit that the coordinator proposes for a complete mean: contributions, next view, leases."""
        before, membership = self.chain.commit, self.membership
        assert before is not None
        counted, omitted = reduction.counted()
        used = {entry.peer: entry.blocks for entry in counted}
        gone = [entry.member for entry in membership.roster if entry.left]
        left = {member.peer for member in gone if membership.is_member(member)} - membership.electorate.evicted
        leaving = left | (tally.leaving() & used.keys())  # a leaver whose contribution does not count offers it again
        view = self._next_view(leaving)
        names = [member.peer for member in view if not member.witness]
        return Commit(
            version=self.chain.making,
            previous=before.digest,
            lineage=self.lineage.name,
            fragment=self.chain.fragment,
            view=tuple(view),
            counted=counted,
            omitted=omitted,
            mean_digest=reduction.mean_digest,
            tokens=before.tokens + sum(entry.tokens for entry in counted),
            leases=leases.advance(before.leases, used, names, self._rules.lease_blocks, leaving),
            state_digest=tally.ready[counted[0].peer].state_digest,
        )

    # ------------------------------------------------------------ moving on

    def forget(self) -> None:
        """Drop the tally: attempts at another version come next."""
        self._tally, self._without, self.mean_lost_with = None, (), ()
