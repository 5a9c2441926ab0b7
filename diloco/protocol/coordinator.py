"""Coordinating an attempt: the group that contributes, repairs around the dead, the vote, and the next commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.protocol.claims import why_no_successor, why_not_counted
from diloco.protocol.post import Post
from diloco.protocol.reduction import Lead, Reduction, Tally, as_counted
from diloco.protocol.view import GroupDecision, Policy, Rules, Timing, as_spans, decide, in_turn, respan, spans
from diloco.protocol.vote import Promised, choices, choose

if TYPE_CHECKING:
    from diloco.protocol.acceptor import Acceptor
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.draft import Drafter
    from diloco.protocol.lineage import Lineage
    from diloco.protocol.membership import Membership

MEAN_LOST = "a version was accepted whose mean nobody here has: bring back, or evict,"
"""Begins the reason; those who may have it follow."""


class Coordinator:
    """The coordinator's role in the protocol: one value in each attempt. Every trainer coordinates in its turn."""

    acceptor: Acceptor
    chain: Chain
    contributor: Contributor
    drafter: Drafter
    lineage: Lineage
    membership: Membership

    def __init__(self, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self._tally: Tally | None = None
        """The record of the attempt that this peer leads; None: another leads it."""
        self._lead: Lead | None = None
        """The record of the reduction that this peer began for the version being made."""
        self._without: tuple[str, ...] = ()
        """Peers whose contributions made the attempt before fail, or whose offer no honest peer makes."""
        self.mean_lost_with: tuple[str, ...] = ()
        """Trainers that do not live and may have the mean of a version that was accepted, which no live one has."""
        self._entered_at = self._resend_at = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def leads(self) -> bool:
        """Whether this peer leads the attempt, and has begun to."""
        tally = self._tally
        return tally is not None and (bool(tally.ready) or tally.begun or tally.proposal is not None)

    @property
    def proposes(self) -> bool:
        """Whether this peer's attempt has come to its proposal."""
        return self._tally is not None and self._tally.proposal is not None

    def began(self, begin: m.Begin) -> bool:
        """Whether this peer leads the reduction that began so."""
        return self._lead is not None and self._lead.begin.key == begin.key

    # ------------------------------------------------------------ the attempt

    def enter(self, reason: str) -> None:
        """Move on to another attempt. Who leads a later one asks all members for promises; the first needs none."""
        acceptor, membership = self.acceptor, self.membership
        leads = membership.in_view and acceptor.seat(acceptor.attempt) == membership.me
        self._entered_at = self._post.now
        self._tally = Tally(acceptor.attempt) if leads else None
        if leads and acceptor.attempt:
            self._post.send_all(self.chain.view, m.Gather(self.chain.height, acceptor.attempt, reason))

    def on_ready(self, sender: Member, body: m.Ready) -> None:
        """Count a promise, and the offer with it."""
        chain, membership, acceptor = self.chain, self.membership, self.acceptor
        if not chain.current(sender, body.height) or not membership.is_member(sender):
            return
        if acceptor.seat(body.attempt) != membership.me or body.attempt < acceptor.attempt:
            return
        if body.offer is not None and (sender.witness or body.offer.base_version != chain.version):
            return
        assert chain.commit is not None
        bounds, lie = self._rules.bounds, ""
        if body.accepted is not None and not chain.leads_on(body.accepted):
            return  # it stands on another history at the same height
        if body.accepted is not None and (lie := why_no_successor(chain.commit, body.accepted, bounds)):
            membership.lied(sender, f"it accepted a commit that cannot be: {lie}")
            return
        if body.attempt > acceptor.attempt:
            self._post.next_attempt(body.attempt, f"{sender.peer} asked for attempt {body.attempt}")
        if self._tally is None:
            self._tally = Tally(acceptor.attempt)
        if body.offer is not None:
            lie = why_not_counted(as_counted(sender.peer, body.offer), chain.commit, bounds)
        if lie:  # the promise counts
            membership.lied(sender, lie)
            self._without = tuple(dict.fromkeys((*self._without, sender.peer)))
            body = replace(body, offer=None)
        self._tally.hear(sender.peer, membership.boot_of(sender), body, self._post.now)
        self.coordinate()

    def coordinate(self) -> None:
        """As coordinator, take the attempt further: on to `Begin`, to a proposal, or to the commit.

        It proposes one commit, the first that applies: what was accepted before; the version whose mean is here; a
        change of members that waits. Else it waits for the reduction under way, or begins one.
        """
        tally = self._tally
        if tally is None:
            return  # nothing to lead
        if tally.proposal is not None:
            self._commit_if_accepted(tally, tally.proposal)
            return
        attempt = self.acceptor.attempt
        enough, earlier = self._earlier(tally)
        if attempt > 0 and not enough:
            promises = len(tally.promises() & self.membership.electorate.voters())
            self._post.note(f"attempt {attempt}: {promises} of {self.membership.votes_needed()} promises")
        elif earlier is not None:
            # It may have been decided already: with another value two commits could have a majority.
            self._post.note(f"attempt {attempt}: proposing again what was accepted before")
            self._propose(tally, earlier)
        elif (whole := self.contributor.to_propose) is not None and whole.mean_digest not in self.contributor.unlogged:
            self._propose(tally, self.drafter.version_commit(whole), whole)
        elif self.membership.changes():
            self._propose(tally, self.drafter.view_commit())
        elif whole is not None:
            self._post.note("the log refuses the mean, which is proposed when the disk takes it")
        elif not self._is_reducing():
            self._begin_if_matched(tally)

    def _earlier(self, tally: Tally) -> tuple[bool, Commit | None]:
        """Whether enough voters promised; and the commit that is to be proposed again. Of several majorities among the
        promises one is preferred that accepted nothing, or whose mean can be had."""
        electorate, ready = self.membership.electorate, tally.ready
        accepted = {one.accepted.digest: one.accepted for one in ready.values() if one.accepted is not None}
        promises = {
            peer: Promised(tally.boots[peer], one.accepted_attempt, one.accepted.digest if one.accepted else "")
            for peer, one in ready.items()
            if peer in electorate.voters()
        }
        options = choices(promises, electorate.named, electorate.dead)
        value = choose(options, lambda digest: self._can_be_had(accepted[digest], tally))
        return value is not None, accepted[value] if value else None

    def _can_be_had(self, commit: Commit, tally: Tally) -> bool:
        """Whether the mean of a commit is here, or with somebody that lives."""
        living = {member.peer for member in self.membership.trainers_alive()}
        holders = {peer for peer, ready in tally.ready.items() if ready.accepted == commit}
        return self._is_here(commit) or bool(living & holders)

    def _is_reducing(self) -> bool:
        """Whether a reduction is under way whose leader lives. One whose leader is gone ends here."""
        reduction = self.contributor.reduction
        if reduction is None or self.membership.lives(reduction.leader):
            return reduction is not None
        self._post.note(f"{reduction.leader.peer}, which began the reduction, is gone")
        self.contributor.drop()
        return False

    def _begin_if_matched(self, tally: Tally) -> None:
        """As coordinator, send `Begin` for the reduction when the group of contributors is complete."""
        decision = self._decision(tally)
        self._post.note(decision.reason, decision.routine)
        if decision.group is None:
            return
        if not self.acceptor.leads(self.coordinate):
            return
        chain, membership, rules = self.chain, self.membership, self._rules
        # Joiners that hold this very state receive the mean like the others: they are in the next view.
        newcomers = [member for member in membership.newcomers() if not member.witness]
        beats = [(member, membership.roster.heartbeat(member)) for member in newcomers]
        joiners = [member for member, beat in beats if beat is not None and beat.version == chain.version]
        turn = (chain.making - 1) // len(rules.parts)
        group = in_turn(decision.group, rules.policy.max_peers, turn)
        contributors, send_bps = tuple(tally.counted(peer) for peer in group), tally.send_bps()
        owners = spans(rules.parts[chain.fragment], group, [send_bps[peer] for peer in group])
        audience = (*membership.trainers_alive(), *joiners)
        last = tuple(sorted(tally.leaving() & {*group}))
        state = tally.ready[group[0]].state_digest
        begin = m.Begin(chain.height, self.acceptor.attempt, contributors, audience, owners, state, last)
        tally.begun, self._lead = True, Lead(begin, send_bps)
        self._post.send_all(audience, begin)

    @property
    def _policy(self) -> Policy:
        """The policy by which the coordinator closes the version being made."""
        commit, turns = self.chain.commit, self._rules.bounds.turns
        ending = commit is not None and turns.is_final(commit.tokens)
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
        early = self.chain.members_at_first  # who came later has trained for less long, and is not waited for
        expected = [
            peer for peer in allowed if peer not in self._without and (peer in early or peer in tally.offered_at_s)
        ]
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
        lead, tally = self._lead, self._tally
        if lead is None or body.key != lead.begin.key or sender not in lead.begin.receivers:
            return
        if tally is not None and tally.proposal is not None and tally.proposal.moves and body.missing:
            return
        reason = f"{sender.peer}: {body.reason}"
        missing = [peer for peer in body.missing if not (body.still and self._moves(peer))]
        cut_off = body.still and len(body.missing) > len(lead.begin.contributors) // 2
        if body.offence or not body.missing:
            self._abort(lead, body.missing, reason, body.offence)
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
        """As leader, send `Repair`: the reduction goes on without `lost`, parts still missing get other owners.

        If this peer is one of them, it gives away all its parts: it may have made their means, which others lack.
        """
        lead, reduction = self._lead, self.contributor.reduction
        assert lead is not None
        if reduction is None:
            self._abort(lead, lost, reason)
            return
        gone, me = reduction.gone | set(lost), self.membership.me.peer
        lacking = reduction.absent | (reduction.parts_of(me) if me in lost else set())
        if not lacking or gone == reduction.gone:
            return
        left = [peer for peer in reduction.contributors if peer not in gone]
        if not left:
            self._abort(lead, sorted(gone), reason)
            return
        send_bps = [lead.send_bps.get(peer, 0) for peer in left]
        owners = respan(as_spans(reduction.owner), lacking, gone, left, send_bps)
        lead.repair = m.Repair(*reduction.key, reduction.generation + 1, tuple(sorted(gone)), tuple(owners), reason)
        self._post.send_all(lead.begin.receivers, lead.repair)

    def _abort(self, lead: Lead, without: Sequence[str], reason: str, offence: bool = False) -> None:
        self._post.send_all(lead.begin.receivers, m.Abort(*lead.begin.key, tuple(without), reason, offence))

    def on_abort(self, sender: Member, body: m.Abort) -> None:
        """The reduction failed: go on to the next attempt, without those who made it fail."""
        acceptor = self.acceptor
        here = body.key == (self.chain.height, acceptor.attempt) and sender == acceptor.seat(body.attempt)
        if not (self.contributor.has_failed(body.key, sender) or here):
            return
        if self._lead is not None and self._lead.begin.key == body.key:
            self._lead = None
        if body.offence:
            self.membership.offended(body.without)
        me = self.membership.me.peer  # it lives, whoever took it for dead
        self._without = tuple(peer for peer in body.without if peer != me or body.offence)
        self._post.next_attempt(acceptor.attempt + 1, f"attempt {body.attempt} failed: {body.reason}")
        acceptor.follow_coordinator()

    # ------------------------------------------------------------ the vote

    def _propose(self, tally: Tally, commit: Commit, whole: Reduction | None = None) -> None:
        """As coordinator, ask for votes: of trainers first, for witnesses hold no mean, and the mean must live on."""
        if not self.acceptor.leads(self.coordinate):
            return
        membership, me = self.membership, self.membership.me
        tally.proposal, tally.reduction = commit, whole.key if whole is not None else (-1, -1)
        tally.proposed_at_s = self._post.now
        receivers = whole.begin.receivers if whole is not None else ()  # joiners among them
        alive = membership.trainers_alive() if commit.moves else membership.alive()
        tally.audience = tuple(dict.fromkeys((*alive, *receivers)))
        proposal = self._proposed(tally, commit)
        self._post.send_all([member for member in tally.audience if member != me], proposal)
        if not self._is_here(commit):
            self.acceptor.fetch(proposal)
        self._commit_if_accepted(tally, commit)

    def _proposed(self, tally: Tally, commit: Commit) -> m.Propose:
        """The message that asks for votes in this attempt."""
        return m.Propose(self.chain.height, self.acceptor.attempt, commit, *tally.reduction)

    def _is_here(self, commit: Commit) -> bool:
        """Whether the mean of a commit is here, if it has one."""
        return not commit.moves or self.contributor.holds(commit.mean_digest)

    def _ask_witnesses(self, tally: Tally, proposal: m.Propose) -> None:
        """As coordinator, ask witnesses to vote when every live trainer accepted the commit, abstains, or does not
        answer."""
        membership = self.membership
        trainers = [member for member in membership.trainers_alive() if not membership.abstains(member)]
        others = [member for member in trainers if member != membership.me]
        stall_s = self._timing.stall_s
        patient = self._post.now - tally.proposed_at_s < stall_s or self.contributor.still_s() < stall_s
        asked = tally.witnesses_asked or not proposal.commit.moves
        if asked or (patient and any(member.peer not in tally.accepts for member in others)):
            return
        tally.witnesses_asked = True
        witnesses = [member for member in membership.alive() if member.witness]
        tally.audience = (*tally.audience, *witnesses)
        self._post.send_all(witnesses, proposal)

    def on_accept(self, sender: Member, body: m.Accept) -> None:
        """Count a vote for the proposal."""
        tally = self._tally
        if tally is None or tally.proposal is None or body.key != (self.chain.height, self.acceptor.attempt):
            return
        if body.commit_digest == tally.proposal.digest and self.membership.is_member(sender):
            tally.accepts[sender.peer] = self.membership.boot_of(sender)
            self._commit_if_accepted(tally, tally.proposal)

    def count(self) -> None:
        """As coordinator, look whether the proposal has its votes by now."""
        if self._tally is not None and self._tally.proposal is not None:
            self._commit_if_accepted(self._tally, self._tally.proposal)

    def _commit_if_accepted(self, tally: Tally, commit: Commit) -> None:
        """With a majority of votes the commit holds; live members about to accept get a moment to do so first.

        The coordinator's own vote comes when it decides: a mean that nobody else holds alike must not bind the next.
        """
        proposal, membership = self._proposed(tally, commit), self.membership
        me, electorate = membership.me.peer, membership.electorate
        self._ask_witnesses(tally, proposal)
        accepted = electorate.suffice(tally.accepts | {me: self._post.boot})
        if not accepted or not self._is_here(commit) or commit.mean_digest in self.contributor.unlogged:
            self._reconsider(tally, commit)
            return
        if me not in tally.accepts:
            self.acceptor.accept(proposal)  # comes back here
            return
        tally.majority_at_s = min(tally.majority_at_s, self._post.now)
        asked = {member.peer for member in tally.audience}  # not a member that came back meanwhile: it lacks the mean
        late = [member for member in membership.alive() if member.peer in asked and member.peer not in tally.accepts]
        late = [member for member in late if not membership.abstains(member)]
        if not (late and commit.moves) or self._post.now >= self._patient_until_s(tally):
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
        for one that is only out of reach may have made the version. Then a lineage of its own begins: within one, what
        was accepted is never passed over.
        """
        membership, stall_s, attempt = self.membership, self._timing.stall_s, self.acceptor.attempt
        waited_s = self._post.now - tally.proposed_at_s
        living = {member.peer for member in membership.trainers_alive()}
        lost = not self._is_here(commit) and not living & tally.accepts.keys()
        evicted = membership.electorate.evicted
        trainers = {member.peer for member in self.chain.view if not member.witness}
        away = trainers - living - evicted
        if evicted and lost and not away and waited_s > 2 * stall_s:
            self._post.note("the mean that was accepted before died with an evicted peer")
            self.lineage.found_apart()
        elif lost and away and stall_s < waited_s <= 2 * stall_s:
            self.mean_lost_with = tuple(sorted(away))
            self._post.note(f"{MEAN_LOST} {', '.join(self.mean_lost_with)}")
        elif min(waited_s, self.contributor.still_s()) > 3 * stall_s:
            self._post.next_attempt(attempt + 1, f"the proposal of attempt {attempt} was not accepted")

    def announce(self, commit: Commit, audience: Sequence[Member]) -> None:
        """Send a commit that holds, or that founds a lineage, to all members that it concerns, and move on to it."""
        me = self.membership.me
        others = {member.peer: member for member in (*audience, *self.chain.view, *commit.view) if member != me}
        self._post.send_all(list(others.values()), m.Committed(commit))
        self.chain.decide(commit, me)

    def resend(self) -> None:
        """Emit again what has not been answered, if that is due: `Begin`, `Repair`, `Propose`, `Gather` or `Ready`."""
        if self._post.now < self._resend_at:
            return
        self._resend_at = self._post.now + self._timing.heartbeat_s
        tally, lead, me = self._tally, self._lead, self.membership.me
        proposes = tally is not None and tally.proposal is not None
        if lead is not None and self.contributor.reduction is not None and not proposes:
            for member in lead.begin.receivers:
                for body in (lead.begin, lead.repair):
                    if member != me and body is not None:
                        self._post.send(member, body)
        if tally is not None and tally.proposal is not None:
            proposal, news = self._proposed(tally, tally.proposal), tally.proposed_at_s == self._post.now
            for member in tally.audience if not news else ():
                if member != me and member.peer not in tally.accepts:
                    self._post.send(member, proposal)
        elif tally is not None and tally.attempt > 0 and not tally.begun:
            for member in self.chain.view:
                if member.peer not in tally.ready:
                    self._post.send(member, m.Gather(self.chain.height, tally.attempt, self._post.reason))
        if self.contributor.offer is not None and self.contributor.waits and self.membership.in_view:
            self.acceptor.answer()

    # ------------------------------------------------------------ moving on

    def forget(self) -> None:
        """Drop the tally: attempts to decide the successor of another head come next."""
        self._tally = None

    def forget_version(self) -> None:
        """Drop the reduction, too: another version is made next."""
        self.forget()
        self._lead, self._without, self.mean_lost_with = None, (), ()
