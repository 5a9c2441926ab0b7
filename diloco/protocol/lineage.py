"""Lineages of a run that was cut in parts under `without_majority = "continue"`: chains of commits until they meet.

A lineage is named by its founding. Where two meet, the one with more committed tokens goes on. Peers of the other
copy its state, keep their uncommitted progress, and report the committed tokens that are void.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member, Voter
from diloco.protocol import effects as fx
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.post import Post
from diloco.protocol.view import Rules, Timing, goes_on, parted_at

if TYPE_CHECKING:
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.coordinator import Coordinator
    from diloco.protocol.membership import Membership


class Lineage:
    """The founder's role in the protocol: it founds lineages, and decides which of two goes on."""

    chain: Chain
    contributor: Contributor
    coordinator: Coordinator
    membership: Membership

    def __init__(self, name: str, forks: tuple[m.Fork, ...], rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.name = name
        self.forks = forks[-m.MAX_FORKS :]
        """Lineages that led to ours, the latest of them."""
        self._target: tuple[m.Fork, ...] = ()
        """History of the lineage whose state this peer copies; empty: none."""
        self._target_since_s = post.now
        self._alone_since: float | None = None
        self._warned = False
        """People here know that a lineage has gone on from which ours was founded."""

    @property
    def alone(self) -> bool:
        """Whether most voters of the view cannot be reached: it may go on elsewhere, so others are to be asked."""
        return self._alone_since is not None

    @property
    def copying(self) -> bool:
        """Whether this peer left its lineage for another, whose state it copies."""
        return bool(self._target)

    @property
    def may_fork(self) -> bool:
        """Whether this peer may found a lineage apart, or follow another member into one."""
        return self.alone and (self._rules.continue_after_s is not None or self.membership.is_lost())

    def may_follow(self, commit: Commit) -> bool:
        """Whether this peer may follow a founding out of its lineage: it may fork, or an operator told it, too, of the
        death of those for whom the founding answers."""
        answered = bool(commit.evicted) and self.membership.electorate.evicted.issuperset(commit.evicted)
        return self.may_fork or answered

    def on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        """Learn the lineages that led to ours, from a member; a peer without a view, from whoever names them."""
        named = self.chain.commit is None or self.membership.is_member(sender)
        if named and len(body.forks) > len(self.forks):
            self.forks = body.forks

    # ------------------------------------------------------------ founding

    def found_if_complete(self) -> None:
        """As founder, begin the run when enough peers on the roster hold its state."""
        membership, chain, post = self.membership, self.chain, self._post
        if not membership.founder or chain.commit is not None or chain.state.version < 0:
            return
        waiting = membership.roster.at_the_door(0, post.now)
        here = [membership.me, *(member for member in waiting if not member.witness)]
        if len(here) < self._rules.start_peers:
            post.note(f"{len(here)} of {self._rules.start_peers} peers are here")
            return
        post.note(f"founded with {len(here)} peer{'s' if len(here) > 1 else ''}")
        self.coordinator.announce(self._founding(here, chain.state.commit, self.name), here)

    def _founding(self, view: Sequence[Member], before: Commit | None, lineage: str) -> Commit:
        """The first commit of a lineage, its view and leases: it moves no anchor."""
        names = [member.peer for member in view if not member.witness]
        need, state = self._rules.bounds.lease_blocks, self.chain.state
        granted = leases.advance(before.leases, {}, names, need) if before else leases.found(names, need)
        return Commit(
            version=state.version,
            height=before.height + 1 if before else 0,
            previous=before.digest if before else self._rules.contract,
            lineage=lineage,
            fragment=-1,
            view=tuple(view),
            voters=(Voter(self.membership.me.peer, self._post.boot, state.version - 1),),
            evicted=tuple(sorted(self.membership.electorate.evicted)),
            counted=(),
            omitted=(),
            mean_digest="",
            tokens=before.tokens if before else 0,
            leases=granted,
            state_digest=state.digest,
        )

    def check_majority(self) -> None:
        """Without a majority of votes commits wait, or this view's live members found a lineage apart: under
        `continue`, or where an operator evicted those that lack."""
        membership, now = self.membership, self._post.now
        if self.chain.conflict is not None:
            self.contributor.give_up_late(self.chain.conflict[1])
            return
        no_majority = membership.no_majority() if membership.in_view else ""
        if not no_majority:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        self.contributor.give_up_late(no_majority)
        after_s = 0.0 if membership.is_lost() else self._rules.continue_after_s
        if after_s is None or now - self._alone_since < after_s:
            return
        # The first trainer that lives founds a lineage with the members that it can reach.
        trainers = membership.trainers_alive()
        if trainers and trainers[0] == membership.me:
            self.found_apart()

    def found_apart(self) -> None:
        """Found a lineage with the members that this peer can reach, on the version where it stands."""
        membership, chain = self.membership, self.chain
        if chain.state.version != chain.version:
            return
        alive = membership.alive()
        assert chain.commit is not None
        # No two founders choose the same name, nor two processes of one: the first may have lost its founding.
        founder = f"{chain.commit.digest}/{membership.me.peer}/{membership.me.incarnation}/{self._post.boot}"
        commit = self._founding(alive, chain.commit, hashlib.sha256(founder.encode()).hexdigest()[:16])
        self._post.note(f"going on apart with {len(alive)} of {len(chain.view)} members as lineage {commit.lineage}")
        self.coordinator.announce(commit, alive)

    # ------------------------------------------------------------ two that meet

    def meet(self, envelope: m.Envelope) -> None:
        """A peer of another lineage of the run spoke: the lineage with more tokens goes on, peers of the other join."""
        beat, membership, commit, now = envelope.body, self.membership, self.chain.commit, self._post.now
        founding = self.chain.founding
        knows = founding is not None and bool(founding.evicted) and envelope.sender in founding.view
        if isinstance(beat, m.Heartbeat) and founding is not None and knows:
            self._post.send(envelope.sender, m.Committed(founding))  # an operator may have told it only now
        if not isinstance(beat, m.Heartbeat):
            return
        if self._rules.continue_after_s is None:
            self._meet_former(envelope.lineage, envelope.sender, beat)
            return
        roster = membership.roster
        if (membership.founder and commit is None) or roster.is_earlier(envelope.sender, now):
            return
        membership.introduce(envelope.sender)  # so that it hears of us, too
        if not membership.may_call(envelope.sender):
            return  # its state would be copied from an address that is its own word
        # A peer outside the view follows the lineage that it asked to join, while its members or its founder speak.
        members = [entry.member for entry in roster if entry.heartbeat and not entry.heartbeat.joining]
        hears_members = any(map(membership.lives, members))
        # No peer of the lineage to copy may send heartbeats: an old conversation, heard again, led there. Then any live
        # lineage goes on, also that of a founder that still waits for its first members.
        copying = commit is None and self.copying
        silent = copying and not hears_members and now - self._target_since_s > self._timing.suspect_s
        if not (beat.founded or silent) or beat.joining or (not membership.in_view and hears_members):
            return
        # While a state is being copied, the lineage that it comes from is compared; a mere joiner follows anybody.
        mine = (*self.forks, m.Fork(self.name, commit.tokens if commit else -1))
        if copying and not silent:
            mine = self._target
        others = (*beat.forks, m.Fork(envelope.lineage, beat.committed_tokens))
        if goes_on(mine, others):
            return
        discarded = max(mine[-1].tokens - parted_at(mine, others), 0) if commit is not None else 0
        tokens = f"{discarded:,} tokens of ours are void"
        self._post.note(f"lineage {envelope.lineage} has more tokens and goes on; {tokens}")
        self._post.leave_lineage(envelope.lineage, beat.forks, others)
        self._post.emit(fx.Resync(envelope.sender, discarded))

    def _meet_former(self, name: str, sender: Member, beat: m.Heartbeat) -> None:
        """A lineage from which ours was founded may have gone on: its peers have versions that ours lacks, and a person
        must say which of the two it is to be."""
        left_at = next((fork.tokens for fork in self.forks if fork.lineage == name), beat.committed_tokens)
        if beat.committed_tokens > left_at and not self._warned:
            self._warned = True
            has = f"{sender.peer} has version {beat.version} of the lineage from which ours was founded earlier"
            way = "this peer goes on apart. To go on there, resume with --join"
            self._post.emit(fx.Note(f"{has}: {way} {sender.address}", False))

    def comes_after(self, forks: tuple[m.Fork, ...]) -> None:
        """These lineages led to the one in which this peer begins."""
        self.forks = forks[-m.MAX_FORKS :]

    # ------------------------------------------------------------ moving on

    def adopt(self, commit: Commit) -> None:
        """Follow a commit into its lineage, which may be one apart from ours."""
        if self.chain.commit is not None and commit.lineage != self.name:
            self.forks = (*self.forks, m.Fork(self.name, commit.tokens))[-m.MAX_FORKS :]
        self.name = commit.lineage
        self._target = ()
        self._alone_since = None

    def follow(self, name: str, forks: tuple[m.Fork, ...], history: tuple[m.Fork, ...]) -> None:
        """Leave this lineage for another, whose state is to be copied."""
        self.name, self.forks = name, forks
        self._target, self._target_since_s = history, self._post.now
        self._alone_since = None
