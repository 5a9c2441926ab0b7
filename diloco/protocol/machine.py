"""One peer's side of the round protocol, without I/O: events and the time go in, effects come out.

A version is made in *attempts*. Each attempt has a coordinator (`view.coordinator`); members that finished their
inner steps send it `Ready`; it sends `Begin` to a group; the group reduces in a butterfly; the coordinator proposes a
`Commit` that names the mean by its digest; members that hold this mean `Accept`; with a majority of the previous
view the commit holds (`Committed`). That is single-decree Paxos per version: the attempt is the ballot, `Ready` is
the promise and carries what its sender accepted before, `Accept` is the vote, and a later coordinator that finds an
accepted commit among a majority's promises proposes that one again.

A peer that dies or stalls in the reduction is repaired around (`Repair`): its parts get new owners, and each part
lists the contributors that it omits. When the coordinator itself is gone, or somebody sent nonsense, the next attempt
begins. Every wait is bounded by `Timing`. Nothing here blocks training: a peer that cannot commit gives up the round
and keeps its progress. `docs/how/protocol.md` has the picture and the argument why this is safe.

The machine is one class in layers: `MachineState`, `Committing`, `Coordinating`, `Reducing`, and here `Lineages`
(foundings and lineages) and `Machine` (inputs, time, joining and leaving).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from diloco.base.types import Commit, Member
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.committing import Committing
from diloco.protocol.coordinating import Coordinating
from diloco.protocol.reducing import Reducing
from diloco.protocol.view import Electorate, goes_on, parted_at


class Lineages(Reducing):
    """Lineages of a run that was cut in parts under `without_majority = "continue"`: chains of commits until they meet.

    A lineage is named by its founding. Where two meet, the one with more committed tokens goes on. Peers of the other
    copy its state, keep their uncommitted progress, and report the committed tokens that are void.
    """

    def _founding(self, view: Sequence[Member], before: Commit | None, lineage: str) -> Commit:
        """The first commit of a lineage, its view and leases: it moves no anchor."""
        names = [member.peer for member in view if not member.witness]
        need = self.rules.lease_blocks
        granted = leases.advance(before.leases, {}, names, need) if before else leases.found(names, need)
        return Commit(
            version=self._state.version,
            previous=before.digest if before else self.rules.contract,
            lineage=lineage,
            fragment=-1,
            view=tuple(view),
            counted=(),
            omitted=(),
            mean_digest="",
            tokens=before.tokens if before else 0,
            leases=granted,
            state_digest=self._state.digest,
        )

    def _check_majority(self) -> None:
        """Without a majority of votes commits wait, or this view's live members found a lineage apart."""
        no_majority = self._no_majority() if self.in_view else ""
        if not no_majority:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = self._now
        if self._offer is not None and self._now - self._offered_at > self.timing.stall_s:
            self._give_up(no_majority)
        after_s = self.rules.continue_after_s
        if after_s is None or self._now - self._alone_since < after_s:
            return
        # The first trainer that lives founds a lineage with the members that it can reach.
        alive = self.alive()
        trainers = [member for member in alive if not member.witness]
        if not trainers or trainers[0] != self.me or self._state.version != self.version:
            return
        assert self.commit is not None
        founder = f"{self.commit.digest}/{self.me.peer}/{self.me.incarnation}"  # no two founders choose the same name
        commit = self._founding(alive, self.commit, hashlib.sha256(founder.encode()).hexdigest()[:16])
        self._note(f"going on apart with {len(alive)} of {len(self.view)} members as lineage {commit.lineage}")
        self._announce(commit, alive)

    def _meet_lineage(self, envelope: m.Envelope) -> None:
        """A peer of another lineage of the run spoke: the lineage with more tokens goes on, peers of the other join."""
        beat, lineage = envelope.body, envelope.lineage
        if self.rules.continue_after_s is None or not isinstance(beat, m.Heartbeat):
            return
        if (self.founder and self.commit is None) or self.roster.is_earlier(envelope.sender, self._now):
            return
        self.roster.introduce(envelope.sender, self._now)  # so that it hears of us, too
        # A peer outside the view follows the lineage that it asked to join, while its members or its founder speak.
        members = [entry.member for entry in self.roster if entry.heartbeat and not entry.heartbeat.joining]
        hears_members = any(self.roster.alive(member, self._now) for member in members)
        # No peer of the lineage to copy may send heartbeats: an old conversation, heard again, led there. Then any live
        # lineage goes on, also that of a founder that still waits for its first members.
        copying = self.commit is None and bool(self._target_lineage)
        silent = copying and not hears_members and self._now - self._target_since_s > self.timing.suspect_s
        if not (beat.founded or silent) or beat.joining or (not self.in_view and hears_members):
            return
        # While a state is being copied, the lineage that it comes from is compared; a mere joiner follows anybody.
        mine = (*self.forks, m.Fork(self.lineage, self.commit.tokens if self.commit else -1))
        if copying and not silent:
            mine = self._target_lineage
        others = (*beat.forks, m.Fork(lineage, beat.committed_tokens))
        if goes_on(mine, others):
            return
        discarded = max(mine[-1].tokens - parted_at(mine, others), 0) if self.commit is not None else 0
        self._note(f"lineage {lineage} has more tokens and goes on; {discarded:,} tokens of ours are void")
        if self._offer is not None:
            self._give_up("our lineage ends here")
        self._forget_version()  # but not that we are exposed: that lineage may go on, with what we sent counted
        self.commit = None
        self._state = m.StateHeld(-1, "")
        self.electorate = Electorate()  # a peer that is dead there may live here
        self.roster.part_with(())
        self.lineage, self.forks = lineage, beat.forks
        self._alone_since = None
        self._new_incarnation()
        self._target_lineage, self._target_since_s = others, self._now
        self._out.append(m.Resync(envelope.sender, discarded))


class Machine(Lineages):
    """The protocol's state machine. `receive` and `handle` are its inputs; public attributes may be read any time."""

    def handle(self, event: m.Event, now: float) -> list[m.Effect]:
        """Take an event into the state machine at local time `now` (seconds, monotonic); return effects in order."""
        self._now = now
        self._out = []
        if not self._gone:
            self._events[type(event)](self, event)
        return self._out

    def receive(self, envelope: m.Envelope, now: float) -> tuple[m.Reply, list[m.Effect]]:
        """Take another peer's message into the state machine; return the protocol's reply and effects, in order."""
        self._now = now
        self._out = []
        return self._receive(envelope), self._out

    def _receive(self, envelope: m.Envelope) -> m.Reply:
        """Check a message against roster, lineage and view: refuse it, or give it to its protocol handler."""
        sender, body = envelope.sender, envelope.body
        if self._gone:
            return m.Reply.STALE
        if isinstance(body, m.Greeting | m.Invite):
            return m.Reply.MALFORMED  # it is of another policy
        if isinstance(body, m.Evict):
            return self._evict(envelope, body)
        reply = self._may_speak(envelope.run, envelope.contract, envelope.lineage, sender)
        if reply is m.Reply.OTHER_LINEAGE and not self._leads_here(body):
            self._meet_lineage(envelope)
            return reply
        decided = reply is m.Reply.BARRED and isinstance(body, m.Committed)  # a commit holds, whoever sends it
        if reply not in (m.Reply.OK, m.Reply.OTHER_LINEAGE) and not decided:
            return reply
        if self._admission.replayed(envelope):
            return m.Reply.REPLAYED
        if reply is m.Reply.OK:
            self.roster.heard(sender, self._now)
        reply = m.Reply.OK
        if not isinstance(body, m.Heartbeat | m.Committed):  # all others are about a version being made
            if body.version == self.making and self.commit is not None and envelope.view != self.commit.digest:
                return m.Reply.OTHER_VIEW
            if body.version < self.making:
                reply = m.Reply.STALE
        self._messages[type(body)](self, sender, body)
        return reply

    def admits(self, run: str, contract: str, lineage: str, sender: Member, now: float) -> m.Reply:
        """The protocol's reply to a peer that wants to stream parts now. OK: the roster notes a sign of life."""
        self._now = now
        reply = self._may_speak(run, contract, lineage, sender)
        if reply is m.Reply.OK:
            self.roster.heard(sender, now)
        return reply

    def _may_speak(self, run: str, contract: str, lineage: str, sender: Member) -> m.Reply:
        """OK if run, lineage and roster let this sender speak, else the protocol's reason for the refusal."""
        reply = self._admission.same_training(run, contract)
        if reply is not m.Reply.OK:
            return reply
        if lineage != self.lineage:
            return m.Reply.OTHER_LINEAGE
        if self.roster.barred(sender.peer) and not self._is_member(sender):
            return m.Reply.BARRED
        return m.Reply.OK if self.roster.may_speak(sender, self._now) else m.Reply.FENCED

    # ------------------------------------------------------------ time

    def _on_tick(self, _: m.Tick) -> None:
        if self._now >= self._heartbeat_at:
            self._heartbeat_at = self._now + self.timing.heartbeat_s
            tokens = self.commit.tokens if self.commit else 0
            founded, deaf = self.commit is not None, self.roster.deaf(self._now)
            beat = m.Heartbeat(self.version, founded, self.joining, self.progress, tokens, self.forks, deaf)
            self.roster.forget({member.peer for member in self.view}, self._now)
            self._admission.forget({entry.member.peer for entry in self.roster})
            known = [entry.member for entry in self.roster if not entry.left]
            for member in (*known, *self.roster.strangers(self._now)):
                self._send(member, beat)
        self._found_if_complete()
        if self.commit is None:
            return
        self._check_reduction()
        self._follow_coordinator()
        self._coordinate()
        self._check_majority()
        if self._now >= self._resend_at:
            self._resend_at = self._now + self.timing.heartbeat_s
            self._resend()

    def _resend(self) -> None:
        """Emit `Begin`, `Repair`, `Propose`, `Gather` or `Ready` again for those that have not answered."""
        tally = self._tally
        if tally is not None and (tally.begin is not None or tally.proposal is not None):
            again: Sequence[m.Body | None] = (tally.begin, tally.repair)
            if tally.proposal is not None:
                again = (m.Propose(self.making, self.attempt, tally.proposal),)
            silent = [member for member in tally.audience if member != self.me and member.peer not in tally.accepts]
            for member in silent:
                for body in again:
                    if body is not None:
                        self._send(member, body)
        elif tally is not None and self.attempt > 0:
            for member in self.view:
                if member.peer not in tally.ready:
                    self._send(member, m.Gather(self.making, self.attempt, self.reason))
        elif self._offer is not None and self._reduction is None:
            self._send_ready()

    # ------------------------------------------------------------ founding and joining

    def _on_state_held(self, event: m.StateHeld) -> None:
        self._state = event
        refounding = self.founder and self.commit is None  # a new view takes over from this commit
        commit = event.commit if event.commit != self.commit else None  # what was promised for the next version holds
        if commit is not None and not refounding and commit.version >= self.version:
            self._adopt(commit)
        self._found_if_complete()

    def _found_if_complete(self) -> None:
        """As founder, begin the run when enough peers on the roster hold its state."""
        if not self.founder or self.commit is not None or self._state.version < 0:
            return
        here = [self.me, *(member for member in self.roster.at_the_door(0, self._now) if not member.witness)]
        if len(here) < self.rules.start_peers:
            self._note(f"{len(here)} of {self.rules.start_peers} peers are here")
            return
        self._note(f"founded with {len(here)} peer{'s' if len(here) > 1 else ''}")
        self._announce(self._founding(here, self._state.commit, self.lineage), here)

    def _on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        self.roster.heard(sender, self._now, body, self.version)
        if len(body.forks) > len(self.forks):
            self.forks = body.forks
        # Those that made a version send its commit to all, and a heartbeat may have crossed with it a moment ago. Else
        # each peer would get it from all: n^2 commits of O(n) bytes each time.
        recent = self._now - self._stands_since < self.timing.heartbeat_s
        crossed = recent and body.version == self.version - 1
        behind = not body.founded or (body.version < self.version and not crossed)
        if self.commit is not None and behind:
            self._send(sender, m.Committed(self.commit))
        elif body.founded and body.version > self.version and not self._is_closing(body.version):
            self._catch_up(sender, body.version)

    # ------------------------------------------------------------ the training side

    def _on_offered(self, event: m.Offered) -> None:
        if not self.in_view:
            self._give_up("not in the view yet")
        elif event.offer.base_version != self.version:
            self._give_up(f"version {self.version} closed meanwhile")
        else:
            self._offer = event.offer
            self._leaving = event.offer.leaving
            self._offered_at = self._now
            self._follow_coordinator()
            if self._reduction is None:
                self._send_ready()

    def _on_withdrawn(self, event: m.Withdrawn) -> None:
        if self._offer is not None:
            self._give_up(event.reason or f"no commit before the round's deadline ({self._waiting_for})")

    def _on_leave_wanted(self, _: m.LeaveWanted) -> None:
        others = [member for member in self.alive() if member != self.me]
        heir = others[0].peer if others and self.in_view else ""
        votes = self.electorate.held_by(self.me.peer)
        self._send_all(others, m.Goodbye(self.making, self.attempt, heir, votes, *self._accepted))
        self._gone = True

    # ------------------------------------------------------------ other peers

    def _on_gather(self, sender: Member, body: m.Gather) -> None:
        if not self._current(sender, body.version) or not self.in_view or sender != self._seat(body.attempt):
            return
        if body.attempt < self.attempt:
            # The sender would wait for ever, for we promised a later attempt. It must hear of that one, or if its
            # coordinator is gone, of the next whose coordinator lives.
            if self._reduction is None and self._tally is None:
                self._follow_coordinator(asked=True)
                self._send_ready()
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, body.reason)
        if self._reduction is None:
            self._send_ready()

    def _on_goodbye(self, sender: Member, body: m.Goodbye) -> None:
        self.roster.left(sender.peer)
        self._note(f"{sender.peer} left")
        if body.version > self.making:
            self._bequests[sender.peer] = (sender, body)  # it speaks of a view that we do not know yet
        else:
            self._bequeath(sender, body)
        self._coordinate()

    def _evict(self, envelope: m.Envelope, body: m.Evict) -> m.Reply:
        """An operator's `Evict`: the electorate drops the vote of a life of a peer, in one lineage."""
        reply = self._admission.same_training(envelope.run, envelope.contract)
        if reply is not m.Reply.OK:
            return reply
        if envelope.lineage != self.lineage:
            return m.Reply.OTHER_LINEAGE
        member = self.commit.member(body.peer) if self.commit else None
        if member is not None and member.incarnation > body.incarnation:
            return m.Reply.STALE
        self.electorate.evict(body.peer, body.incarnation)
        entry = self.roster.get(body.peer)
        if entry is not None and entry.member.incarnation == body.incarnation:  # a later life may be at the door
            self.roster.left(body.peer)
        self._note(f"an operator declared {body.peer} dead")
        return m.Reply.OK

    def _on_unreachable(self, event: m.Unreachable) -> None:
        self.roster.unreachable(event.member.peer)
        if event.proven:
            self.electorate.died(event.member)

    _events: ClassVar[dict[type, Callable[..., None]]] = {
        m.Tick: _on_tick,
        m.Unreachable: _on_unreachable,
        m.StateHeld: _on_state_held,
        m.Offered: _on_offered,
        m.Withdrawn: _on_withdrawn,
        m.ContributionArrived: Reducing._on_contribution,
        m.ContributionRefused: Reducing._on_refused,
        m.PartFolded: Reducing._on_folded,
        m.MeanArrived: Reducing._on_mean,
        m.MeanHeld: Reducing._on_mean_held,
        m.Learned: Committing._on_learned,
        m.LeaveWanted: _on_leave_wanted,
    }
    _messages: ClassVar[dict[type, Callable[..., None]]] = {
        m.Heartbeat: _on_heartbeat,
        m.Ready: Coordinating._on_ready,
        m.Gather: _on_gather,
        m.Begin: Reducing._on_begin,
        m.Stalled: Coordinating._on_stalled,
        m.Repair: Reducing._on_repair,
        m.Abort: Reducing._on_abort,
        m.Propose: Committing._on_propose,
        m.Accept: Coordinating._on_accept,
        m.Committed: Committing._on_committed,
        m.Goodbye: _on_goodbye,
    }
