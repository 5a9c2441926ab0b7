"""A peer's part in the reduction of an attempt: contributions go to owners of parts, means to all receivers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.acceptor import seat_after
from diloco.protocol.claims import why_not_counted
from diloco.protocol.post import Post
from diloco.protocol.reduction import Reduction, as_counted, covers, well_formed
from diloco.protocol.view import Rules, Timing, owner_of_parts

if TYPE_CHECKING:
    from diloco.protocol.acceptor import Acceptor
    from diloco.protocol.chain import Chain
    from diloco.protocol.coordinator import Coordinator
    from diloco.protocol.membership import Membership


class Contributor:
    """The contributor's and owner's role in the protocol: a part is averaged once, and what was sent stays sent."""

    acceptor: Acceptor
    chain: Chain
    coordinator: Coordinator
    membership: Membership

    def __init__(self, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.offer: m.Offer | None = None
        self.reduction: Reduction | None = None
        self.moved_bytes = 0
        """Bytes that this peer has received, and others have taken from it, in rounds so far."""
        self._exposed_at = -1
        """Version on which the contribution was measured that others have bytes of, and may count; -1: none."""
        self._held: list[str] = []
        """Digests of the latest means that are here, whole, since this version is made: two may have an equal mean, and
        that of the earlier one may be gone already, or be in no log of the later."""
        self.unlogged: set[str] = set()
        """Digests of means that the log refused: this voter accepts none of them. Where the version closes without its
        vote they stay, until the log takes another mean."""
        self._whole: Reduction | None = None
        """The latest reduction of this version whose mean is here."""
        self._over = (-1, -1)
        """The latest reduction of this version that this peer dropped: it takes part in none of before."""
        self._offered_at = self._complained_at = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def takes_part(self) -> bool:
        """Whether this peer has an offer, or a reduction under way."""
        return self.offer is not None or self.reduction is not None

    @property
    def waits(self) -> bool:
        """Whether no reduction is under way here whose leader lives."""
        return self.reduction is None or not self.membership.lives(self.reduction.leader)

    @property
    def moves(self) -> bool:
        """Whether bytes of the reduction under way moved here lately."""
        reduction = self.reduction
        return reduction is not None and self._post.now - reduction.times.moved_at_s < self._timing.stall_s

    def holds(self, mean_digest: str) -> bool:
        """Whether this mean is here, whole."""
        return mean_digest in self._held

    @property
    def whole(self) -> Reduction | None:
        """The latest reduction of this version whose mean is here, whole."""
        return self._whole if self._whole is not None and self._whole.mean_digest else None

    @property
    def to_propose(self) -> Reduction | None:
        """That reduction, if its mean may be proposed: repairs that are known here explain whom its parts omit. Its
        leader gives up another mean, and may die before, or its word may come too late."""
        whole = self.whole
        return whole if whole is not None and all(map(whole.explains, whole.omitted.values())) else None

    def has_other_mean(self, proposal: m.Propose) -> bool:
        """Whether the reduction that the proposal is of came to another mean here, or counts others in it."""
        whole, commit = self.whole, proposal.commit
        key = proposal.reduction_height, proposal.reduction_attempt
        # A later attempt may have to propose what was accepted before, and then names no reduction.
        if whole is None or not (key == whole.key or (proposal.attempt == 0 and key == (-1, -1))):
            return False
        if commit.mean_digest != whole.mean_digest:
            return not self.holds(commit.mean_digest)
        return whole.counted() != (commit.counted, commit.omitted)

    def complain_of_mean(self) -> None:
        """Tell the leader of the reduction whose mean is here, and another one elsewhere: it is to begin anew."""
        whole = self.whole
        if whole is not None:
            self._post.send(whole.leader, m.Stalled(*whole.key, (), "holds another mean: an owner sent two"))

    def has_failed(self, key: tuple[int, int], leader: Member) -> bool:
        """Whether this is the reduction under way, or the one whose mean is here, as its leader gives it up: then that
        mean is not proposed any more."""
        whole, reduction = self._whole, self.reduction
        ours = [one for one in (whole, reduction) if one is not None and (one.key, one.leader) == (key, leader)]
        if whole is not None and whole in ours:
            self._whole = None
        return bool(ours)

    def mean_is_coming(self) -> bool:
        """Whether the reduction under way may still complete its mean, so that the voter need not ask for a fetch."""
        reduction = self.reduction
        if reduction is None or reduction.mean_digest:
            return False
        alive = {member.peer for member in self.membership.alive()}
        owed = reduction.owners_of_absent() - (alive - reduction.gone)
        return not owed and self.moves

    def goes_on_without(self, peer: str) -> bool:
        """Whether the reduction under way was repaired around this peer."""
        return self.reduction is not None and peer in self.reduction.gone

    def still_s(self) -> float:
        """Seconds since bytes of the reduction under way moved anywhere, as far as heartbeats tell; inf: none is."""
        reduction = self.reduction
        if reduction is None:
            return math.inf
        others = [member.peer for member in reduction.begin.receivers]
        return self._post.now - max(reduction.times.moved_at_s, self.membership.roster.moved_at_s(others))

    def took_s(self) -> float | None:
        """Seconds since the reduction under way began; None: none is."""
        reduction = self.reduction
        return self._post.now - reduction.times.began_at_s if reduction is not None else None

    def _reduction_for(self, item: m.OfAttempt) -> Reduction | None:
        """The reduction under way in the state machine, if a message or event is of its attempt."""
        reduction = self.reduction
        return reduction if reduction is not None and reduction.key == item.key else None

    # ------------------------------------------------------------ the training side

    def on_offered(self, event: m.Offered) -> None:
        """Offer a contribution to the version being made, if it was measured on the one before."""
        if not self.membership.in_view:
            self.give_up("not in the view yet")
        elif event.offer.base_version != self.chain.version:
            self.give_up(f"version {self.chain.version} closed meanwhile")
        else:
            self.offer = event.offer
            self.membership.offers(event.offer)
            self._offered_at = self._post.now
            self.acceptor.follow_coordinator()
            if self.reduction is None:
                self.acceptor.answer()

    def on_withdrawn(self, event: m.Withdrawn) -> None:
        """The training side waits no longer."""
        if self.offer is not None:
            waiting_for = self._post.waiting_for
            self.give_up(event.reason or f"no commit before the round's deadline ({waiting_for})")

    def give_up(self, reason: str) -> None:
        """Have the training side skip the round."""
        self.offer = None
        self._post.note(reason)
        self._post.emit(fx.GiveUp(reason, self._exposed_at >= 0))
        if self.membership.in_view and self.reduction is None:
            self.acceptor.answer()  # without the offer: nobody must begin with what is not there any more

    def give_up_late(self, reason: str) -> None:
        """Have the training side skip the round, if its offer has waited for long."""
        if self.offer is not None and self._post.now - self._offered_at > self._timing.stall_s:
            self.give_up(reason)

    # ------------------------------------------------------------ reducing

    def on_begin(self, sender: Member, body: m.Begin) -> None:
        """Take part in the reduction of an attempt, as the coordinator has it."""
        me, acceptor, chain = self.membership.me, self.acceptor, self.chain
        # It may have begun before a view commit: a reduction is of the version.
        head = chain.head_at(body.height)
        if head is None:
            chain.current(sender, body.height)
            return
        here = head is chain.commit
        latest = max(self._over, self.reduction.key if self.reduction is not None else (-1, -1))
        if body.key <= latest or (here and body.attempt < acceptor.attempt):
            return
        if sender != seat_after(head, body.attempt) or me not in body.receivers or me.witness:
            return
        body = replace(body, receivers=self.membership.expected(body.receivers))  # a liar may name any addresses
        members = [member.peer for member in head.view]
        lies = (why_not_counted(entry, head, self._rules.bounds) for entry in body.contributors)
        if any(lies) or not well_formed(body, self._rules.parts[self.chain.fragment], members):
            self._post.send(sender, m.Stalled(*body.key, (), "malformed Begin"))
            return
        if here and body.attempt > acceptor.attempt:
            self._post.next_attempt(body.attempt, "the coordinator began a later attempt")
        reduction = Reduction(body, sender, me.peer, self._post.now)
        if reduction.contributes:
            if self.offer is None or as_counted(me.peer, self.offer) not in body.contributors:
                self._post.send(sender, m.Stalled(*body.key, (me.peer,), "has withdrawn its contribution"))
                return
            self._exposed_at = self.offer.base_version
        self.reduction = reduction
        self._post.emit(fx.BeginReduction(body))
        if reduction.contributes:
            self._contribute(reduction, body.spans)

    def _contribute(self, reduction: Reduction, owed: Sequence[m.Span]) -> None:
        """Emit `SendContribution` for spans of other owners; spans that I own have my contribution at once."""
        me = self.membership.me.peer
        receivers = {member.peer: member for member in reduction.begin.receivers}
        for span in owed:
            if span.owner != me:
                self._post.emit(fx.SendContribution(*reduction.key, reduction.generation, span, receivers[span.owner]))
        for part in owner_of_parts(span for span in owed if span.owner == me):
            self.on_contribution(m.ContributionArrived(*reduction.key, me, part))

    def on_repair(self, sender: Member, body: m.Repair) -> None:
        """Go on without the dead, as the coordinator has it."""
        reduction = self._reduction_for(body)
        if reduction is None or sender != reduction.leader or body.generation <= reduction.generation:
            return
        left = {*reduction.contributors} - reduction.gone - {*body.gone}
        if not (left and covers(body.spans, self._rules.parts[self.chain.fragment], reduction.contributors)):
            return
        self._post.note(f"going on without {', '.join(body.gone)} ({body.reason})")
        moved, ready = reduction.repair(body, self._post.now)
        self._post.emit(fx.RepairReduction(body))
        for part in ready:
            self._average(reduction, part)
        if reduction.contributes:  # though the offer was withdrawn meanwhile: others count it
            self._contribute(reduction, moved)

    def on_contribution(self, event: m.ContributionArrived) -> None:
        """Average a part of ours, if this was the last contribution to it that was missing."""
        reduction = self._reduction_for(event)
        if reduction is not None and reduction.contribution(event.sender, event.part, self._post.now):
            self._average(reduction, event.part)

    def _average(self, reduction: Reduction, part: int) -> None:
        self._post.emit(fx.FoldPart(*reduction.key, part, reduction.average(part)))

    def on_refused(self, event: m.ContributionRefused) -> None:
        """Tell the coordinator of bytes that are no good."""
        reduction = self._reduction_for(event)
        if reduction is not None and event.sender in reduction.contributors:  # a stranger's bytes harm nobody
            self._post.send(reduction.leader, m.Stalled(*reduction.key, (event.sender,), event.reason, event.offence))

    def on_folded(self, event: m.PartFolded) -> None:
        """Send a part's mean to all receivers."""
        reduction = self._reduction_for(event)
        if reduction is None:
            return
        me = self.membership.me
        others = tuple(member for member in reduction.begin.receivers if member != me)
        omitted = reduction.omitted[event.part]
        self._post.emit(fx.SendMean(*reduction.key, event.part, omitted, others))
        self.on_mean(m.MeanArrived(*reduction.key, me.peer, event.part, omitted))

    def on_mean(self, event: m.MeanArrived) -> None:
        """Have the mean sealed, if this was the last part of it that was missing."""
        reduction = self._reduction_for(event)
        if reduction is None:
            return
        # Only the coordinator knows for certain whom its repairs left out so far.
        if self.coordinator.began(reduction.begin) and not reduction.explains(event.omitted):
            reason = "left somebody out of a part of the mean"
            self.on_refused(m.ContributionRefused(*reduction.key, event.sender, reason))
        elif reduction.mean(event.part, event.sender, event.omitted, self._post.now):
            self._post.emit(fx.SealMean(*reduction.key))

    def on_mean_held(self, event: m.MeanHeld) -> bool:
        """Note a mean that is here, whole. True: it is that of the reduction under way, which is complete."""
        digest, reduction = event.mean_digest, self.reduction
        self._held = [*(one for one in self._held if one != digest), digest][-self._rules.means_kept :]
        self.unlogged = self.unlogged & {*self._held} - {digest} if event.logged else self.unlogged | {digest}
        # It is not complete any more if it was repaired while we hashed.
        if reduction is None or reduction.key != (event.height, event.attempt) or not reduction.complete:
            return False
        reduction.mean_digest = digest
        self._whole = reduction
        reduction.times.moved_at_s = self._post.now
        return True

    # ------------------------------------------------------------ bytes that do not come

    def on_tick(self, event: m.Tick) -> None:
        """Note that bytes moved: a part may take longer than any peer may be still."""
        if event.moved_bytes > self.moved_bytes:
            self.moved_bytes = event.moved_bytes
            if self.reduction is not None:
                self.reduction.times.moved_at_s = self._post.now

    def check(self) -> None:
        """When parts do not come, send `Stalled` to the coordinator, which repairs the attempt or gives it up.

        Who does not move is left out after `stall_s`, who moves and is far slower than most (`Reduction.look`) then.
        """
        reduction, now, membership = self.reduction, self._post.now, self.membership
        if reduction is None:
            return
        silent, stall_s = now - reduction.times.moved_at_s, self._timing.stall_s
        attempt, policy = self.acceptor.attempt, self._rules.policy.at(self.chain.making, ending=False)
        grace_s, alone_s = policy.bytes_grace(self.chain.sync_s, reduction.begin.attempt)
        receivers = {member.peer for member in reduction.begin.receivers if membership.is_member(member)}
        voters = receivers & membership.electorate.names()
        reduction.look(now, max(grace_s, stall_s), max(alone_s, stall_s), receivers, voters)
        late = now > reduction.times.until_s
        waited_for = set(reduction.contributors) - reduction.gone
        members = [member for member in reduction.begin.receivers if member.peer in waited_for]
        dead = [member.peer for member in members if not membership.lives(member)]
        if self.still_s() > 3 * stall_s:
            self._post.next_attempt(attempt + 1, f"attempt {attempt} made no progress for {silent:.1f} s")
        elif now > reduction.times.until_s + 3 * stall_s:
            self._post.next_attempt(attempt + 1, f"attempt {attempt} is not over long after most were done")
        elif dead and self.coordinator.began(reduction.begin):
            self.coordinator.repair(dead, f"{', '.join(dead)} died in the reduction")
        elif (late or silent > stall_s) and not reduction.complete and now - self._complained_at > stall_s:
            self._complained_at = now
            took_s = now - reduction.times.began_at_s
            reason = f"slower than most, after {took_s:.1f} s" if late else f"no bytes for {silent:.1f} s"
            stalled = m.Stalled(*reduction.key, reduction.missing(), reason, still=not late)
            self._post.send(reduction.leader, stalled)

    # ------------------------------------------------------------ moving on

    def drop(self) -> None:
        """Drop the reduction under way."""
        if self.reduction is not None:
            self._over = self.reduction.key
        self.reduction = None

    def adopt(self, version: int) -> None:
        """Drop the offer, too: another version is made. A founding makes none, nor does the return to the version on
        which another lineage parted: what was sent stays sent."""
        if version != self._exposed_at:
            self._exposed_at = -1
        self.forget()

    def forget(self) -> None:
        """Drop offer and reduction: another version is made next."""
        self.offer = self.reduction = self._whole = None
        self._held, self._over = [], (-1, -1)
