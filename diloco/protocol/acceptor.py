"""Promises and votes of one peer: within a version both only grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.claims import why_no_successor
from diloco.protocol.post import Post
from diloco.protocol.view import Rules, Timing
from diloco.protocol.vote import Restored, VoteRecord, seat

if TYPE_CHECKING:
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.coordinator import Coordinator
    from diloco.protocol.membership import Membership


class Acceptor:
    """The voter's role in the protocol: `Gather` to `Ready`, the promise, and `Propose` to `Accept`, the vote."""

    chain: Chain
    contributor: Contributor
    coordinator: Coordinator
    membership: Membership

    def __init__(self, rules: Rules, timing: Timing, post: Post, restored: Restored | None) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.attempt = 0
        """The latest attempt known: nothing of an earlier one is accepted."""
        self._record = restored.record if restored is not None else VoteRecord("")
        """The record that binds this voter. It may be on its way to the disk."""
        self._accepted = restored.accepted if restored is not None else None
        """The commit that the record names as accepted."""
        self._from_height = restored.head.height if restored is not None else -1
        """In votes before that on this head's successor it has no part: what bound this voter there is forgotten."""
        self._number = post.saved
        """Number of the latest `Save`."""
        self._enough = 0
        """Number of the first `Save` since the disk refused one: each since then has the head."""
        self._refused = False
        """The disk refuses what binds this voter, which therefore promises and accepts nothing."""
        self._again_at = post.now
        self._then: dict[str, tuple[int, Callable[[], None]]] = {}
        """To be done when that number is on the disk, by the kind of message that waits for it."""
        self._proposal: m.Propose | None = None
        """The proposal of another peer's attempt."""
        self._fetching_until = post.now

    @property
    def accepted(self) -> tuple[int, Commit | None]:
        """The latest attempt in which this voter accepted a commit, and that commit."""
        return self._record.attempt, self._accepted

    @property
    def stood_further(self) -> bool:
        """Whether this voter stood on a later commit before it was restarted than it does now: its record is about the
        successor of that one, and commits before it say nothing about its life."""
        return self.chain.height < self._from_height

    @property
    def abstains(self) -> bool:
        """Whether the disk refuses what binds this voter, or the log the mean on which it would vote."""
        return self._refused or bool(self.contributor.unlogged)

    def seat(self, attempt: int) -> Member:
        """The coordinator of an attempt to decide the next commit."""
        commit = self.chain.commit
        assert commit is not None
        return seat_after(commit, attempt)

    # ------------------------------------------------------------ promises

    def follow_coordinator(self, asked: bool = False) -> None:
        """When the attempt's coordinator is gone, go on to the first attempt whose coordinator lives.

        A peer that has no part in the version does so only when another `asked` it: others lead on. Where nobody else
        can, one leads whose log refused the mean of an earlier version: only the next mean shows if there is room.
        """
        membership = self.membership
        if not membership.in_view or not (asked or self.contributor.takes_part or membership.changes()):
            return
        seat = self.seat(self.attempt)
        if membership.leads(seat):
            return
        seats = [self.seat(self.attempt + step) for step in range(len(self.chain.view) + 1)]
        able = [step for step, member in enumerate(seats) if membership.leads(member)]
        if not (able or self._refused or any(map(self.contributor.holds, self.contributor.unlogged))):
            able = [step for step, member in enumerate(seats) if member == membership.me]
        if able and able[0] > 0:
            self._post.next_attempt(self.attempt + able[0], f"coordinator {seat.peer} is gone")

    def enter(self, attempt: int) -> None:
        """Move on to a later attempt, under another coordinator; the promise is made when `Ready` is sent."""
        self.attempt, self._proposal = attempt, None

    def answer(self) -> None:
        """Promise the attempt's coordinator to accept nothing of an earlier one; with the offer, if there is one. The
        first attempt takes no promise: there is nothing earlier."""
        attempt = self.attempt
        record = self._record.promise(attempt)
        if record is not None:
            self._bind(record, self._accepted, "Ready", lambda: self._say_ready(attempt))

    def _say_ready(self, attempt: int) -> None:
        if attempt == self.attempt:  # else it went on while the disk was written, which has no promise of the next
            chain = self.chain
            ready = m.Ready(chain.height, attempt, self.contributor.offer, chain.state.digest, *self.accepted)
            self._post.send(self.seat(attempt), ready)

    def on_gather(self, sender: Member, body: m.Gather) -> None:
        """Answer the coordinator of a later attempt."""
        current = self.chain.current(sender, body.height)
        if not current or not self.membership.in_view or sender != self.seat(body.attempt):
            return
        if body.attempt < self.attempt:
            # The sender would wait for ever, for we promised a later attempt. It must hear of that one, or if its
            # coordinator is gone, of the next whose coordinator lives.
            if self.contributor.reduction is None and not self.coordinator.leads:
                self.follow_coordinator(asked=True)
                self.answer()
            return
        if body.attempt > self.attempt:
            self._post.next_attempt(body.attempt, body.reason)
        if self.contributor.reduction is None:
            self.answer()

    # ------------------------------------------------------------ votes

    def on_propose(self, sender: Member, body: m.Propose) -> None:
        """Vote for a commit whose mean is here, or see that it comes."""
        current = self.chain.current(sender, body.height)
        if not current or body.attempt < self.attempt or sender != self.seat(body.attempt):
            return
        if not self.chain.leads_on(body.commit):
            return  # of another history at the same height: no lie, and heartbeats name it
        if lie := self._why_refused(body):
            self.membership.lied(sender, f"it proposes a commit that cannot be: {lie}")
            self._post.next_attempt(body.attempt + 1, self._post.reason)
            return
        if body.attempt > self.attempt:
            self._post.next_attempt(body.attempt, "a later attempt proposes a commit")
        self._proposal = body
        if body.commit.moves and self.contributor.has_other_mean(body):
            self.contributor.complain_of_mean()
            return
        if not body.commit.moves or self.membership.me.witness or self.contributor.holds(body.commit.mean_digest):
            self.accept(body)
        elif not self.contributor.mean_is_coming():
            self.fetch(body)

    def _why_refused(self, proposal: m.Propose) -> str:
        """Reason why no honest peer proposes this; empty: one may."""
        before, commit = self.chain.commit, proposal.commit
        assert before is not None
        if commit.founds:
            return "a founding is not voted on"
        return why_no_successor(before, commit, self._rules.bounds)

    def look_again(self) -> None:
        """A mean came: vote for what another peer's attempt proposes, if that is it."""
        if self._proposal is not None:
            self.on_propose(self.seat(self._proposal.attempt), self._proposal)

    def fetch(self, proposal: m.Propose) -> None:
        """Emit `FetchMean` towards coordinator and trainers, once per stall time: the proposed mean may be large."""
        if self._post.now >= self._fetching_until:
            self._fetching_until = self._post.now + self._timing.stall_s
            seat, me = self.membership.roster.latest(self.seat(proposal.attempt)), self.membership.me
            others = [member for member in (seat, *self.membership.trainers_alive()) if member != me]
            self._post.emit(fx.FetchMean(proposal.commit, tuple(dict.fromkeys(others))))

    def accept(self, proposal: m.Propose) -> None:
        """Vote for a proposed commit, unless the log has refused its mean: whoever accepts has that after a restart.

        A learner says so that it holds the mean: its vote does not count yet.
        """
        record = self._record.accept(proposal.attempt, proposal.commit.digest)
        unlogged = proposal.commit.mean_digest in self.contributor.unlogged
        if record is None or unlogged or not self.membership.in_view:
            return
        self._bind(record, proposal.commit, "Accept", lambda: self._say_accept(proposal))

    def _say_accept(self, proposal: m.Propose) -> None:
        if proposal.attempt == self.attempt:  # else it went on while the disk was written
            accept = m.Accept(*proposal.key, proposal.commit.digest)
            self._post.send(self.seat(proposal.attempt), accept)

    # ------------------------------------------------------------ what binds

    def leads(self, then: Callable[[], None]) -> bool:
        """Whether it is on the disk that this voter leads the attempt: before, it begins and proposes nothing. False:
        `then` comes when it is. After a restart it leads only later attempts."""
        record = self._record.lead(self.attempt)
        if record is not None:
            self._bind(record, self._accepted, "lead", then)
            return False
        return self._record.led == self.attempt and self._post.saved >= self._then.get("lead", (0, then))[0]

    def _bind(self, record: VoteRecord, accepted: Commit | None, what: str, then: Callable[[], None]) -> None:
        """Have a record on the disk, and then do this."""
        if self.stood_further or self.chain.conflict is not None:
            return
        if record != self._record:
            self._record, self._accepted = record, accepted
            self._number = self._post.save(record, accepted, self.chain.commit if self._refused else None)
        if self._post.saved >= self._number:
            then()
        else:
            self._then[what] = self._number, then

    def on_saved(self, event: m.Saved) -> None:
        """Go on with what waited for the disk. A disk that refuses is asked again: until then this voter abstains."""
        if event.refused:  # with the head, perhaps, which those that are under way may lack: they are not enough
            self._refused, self._enough = True, self._number + 1
        if event.number < self._enough:
            return
        self._refused = False
        self._post.on_saved(event.number)
        due = {what: then for what, (number, then) in self._then.items() if number <= self._post.saved}
        self._then = {what: waiting for what, waiting in self._then.items() if what not in due}
        for then in due.values():
            then()

    def save_again(self) -> None:
        """Ask a disk that refused once more, if that is due."""
        if not self.abstains or self._post.now < self._again_at:
            return
        self._again_at = self._post.now + self._timing.heartbeat_s
        for digest in filter(self.contributor.holds, sorted(self.contributor.unlogged)):
            self._post.emit(fx.LogMean(digest))
        if self._refused:
            self._number = self._post.save(self._record, self._accepted, self.chain.commit)
            self._then = {what: (self._number, then) for what, (_, then) in self._then.items()}

    def stand(self, commit: Commit, before: Commit | None) -> None:
        """Vote on the successor of another head from now on. That is said when it is on the disk."""
        self.forget()
        self._then = {}
        if commit.digest == self._record.head:  # restored, or a copy of the state where we stand
            self.attempt = max(self._record.promised, self._record.led + 1)
        elif not self.stood_further:
            self._record, self._accepted = VoteRecord(commit.digest), None
            self._number = self._post.save(self._record, None, commit)
        if self._post.saved < self._number:
            self._then["stand"] = self._number, lambda: self.chain.stands(commit)
        else:
            self.chain.stands(commit)

    def forget_life(self) -> None:
        """Another life begins: nothing binds it, and it says nothing that waited for the disk of the one before."""
        self._then = {}
        self._record, self._accepted, self._from_height = VoteRecord(""), None, -1

    def forget(self) -> None:
        """Drop the attempt: those to decide the successor of another head come next."""
        self.attempt, self._proposal = 0, None
        self._fetching_until = self._post.now


def seat_after(commit: Commit, attempt: int) -> Member:
    """The coordinator of an attempt to decide the successor of a commit: voters that train take turns."""
    voters = [member for member in commit.voting if not member.witness]
    drafter = next((member for member in voters if member.peer == commit.drafter), None)
    return seat(voters, attempt, drafter, commit.digest)
