"""Promises and votes of one peer: within a version both only grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.protocol.post import Post
from diloco.protocol.view import Rules, Timing, coordinator

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

    def __init__(self, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.attempt = 0
        """The latest attempt known: nothing of an earlier one is accepted."""
        self.accepted: tuple[int, Commit | None] = (-1, None)
        """The latest attempt in which this peer accepted a commit, and that commit."""
        self._proposal: m.Propose | None = None
        """The proposal of another peer's attempt."""
        self._fetching_until = post.now

    def seat(self, attempt: int) -> Member:
        """The coordinator of an attempt to make the next version."""
        return coordinator(self._rules.run, self.chain.making, attempt, self.chain.view)

    # ------------------------------------------------------------ promises

    def follow_coordinator(self, asked: bool = False) -> None:
        """When the attempt's coordinator is gone, go on to the first attempt whose coordinator lives.

        A peer that has no part in the version does so only when another `asked` it: others lead on.
        """
        membership = self.membership
        if not (asked or self.contributor.takes_part) or not membership.in_view:
            return
        seat = self.seat(self.attempt)
        if membership.lives(seat):
            return
        for step in range(1, len(self.chain.view) + 1):
            if membership.lives(self.seat(self.attempt + step)):
                self._post.next_attempt(self.attempt + step, f"coordinator {seat.peer} is gone")
                return

    def enter(self, attempt: int) -> None:
        """Move on to a later attempt, under another coordinator; the promise is made when `Ready` is sent."""
        self.attempt, self._proposal = attempt, None

    def answer(self) -> None:
        """Promise the attempt's coordinator to accept nothing of an earlier one; with the offer, if there is one."""
        chain, contributor = self.chain, self.contributor
        votes = self.membership.votes()
        ready = m.Ready(chain.making, self.attempt, contributor.offer, chain.state.digest, *self.accepted, votes)
        self._post.send(self.seat(self.attempt), ready)

    def on_gather(self, sender: Member, body: m.Gather) -> None:
        """Answer the coordinator of a later attempt."""
        current = self.chain.current(sender, body.version)
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

    def take_over(self, goodbye: m.Goodbye) -> None:
        """Be bound as the leaver was whose vote this peer has: else two commits could have it."""
        if goodbye.accepted is not None and goodbye.accepted_attempt > self.accepted[0]:
            self.accepted = (goodbye.accepted_attempt, goodbye.accepted)
        if goodbye.attempt > self.attempt:
            self._post.next_attempt(goodbye.attempt, "taking over a leaver's vote")

    # ------------------------------------------------------------ votes

    def on_propose(self, sender: Member, body: m.Propose) -> None:
        """Vote for a commit whose mean is here, or see that it comes."""
        current = self.chain.current(sender, body.version)
        if not current or body.attempt < self.attempt or sender != self.seat(body.attempt):
            return
        before = self.chain.commit
        if before is None or body.commit.previous != before.digest or body.commit.version != self.chain.making:
            return
        if body.attempt > self.attempt:
            self._post.next_attempt(body.attempt, "a later attempt proposes a commit")
        self._proposal = body
        if self.membership.me.witness or self.contributor.holds(body.commit.mean_digest):
            self.accept(body)
        elif self.contributor.has_other_mean(body):
            self._post.send(sender, m.Stalled(*body.key, (), "holds another mean: an owner sent two"))
        elif not self.contributor.mean_is_coming():
            self.fetch(body)

    def look_again(self) -> None:
        """A mean came: vote for what another peer's attempt proposes, if that is it."""
        if self._proposal is not None:
            self.on_propose(self.seat(self._proposal.attempt), self._proposal)

    def fetch(self, proposal: m.Propose) -> None:
        """Emit `FetchMean` towards coordinator and trainers, once per stall time: the proposed mean may be large."""
        if self._post.now >= self._fetching_until:
            self._fetching_until = self._post.now + self._timing.stall_s
            seat, me = self.seat(proposal.attempt), self.membership.me
            others = [member for member in (seat, *self.membership.trainers_alive()) if member != me]
            self._post.emit(m.FetchMean(proposal.commit, tuple(dict.fromkeys(others))))

    def accept(self, proposal: m.Propose) -> None:
        """Vote for a proposed commit. A joiner holds the mean, but does not vote yet."""
        if not self.membership.in_view:
            return
        self.accepted = (proposal.attempt, proposal.commit)
        accept = m.Accept(*proposal.key, proposal.commit.digest, self.membership.votes())
        self._post.send(self.seat(proposal.attempt), accept)

    def forget(self) -> None:
        """Drop promise and vote: attempts at another version come next."""
        self.attempt, self.accepted, self._proposal = 0, (-1, None), None
        self._fetching_until = self._post.now
