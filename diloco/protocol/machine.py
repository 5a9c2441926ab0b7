"""One peer's side of the round protocol, without I/O: events and the time go in, effects come out.

A version is made in *attempts*. Each attempt has a coordinator (`view.coordinator`); members that finished their
inner steps tell it `Ready`; it says `Begin` to a group; the group reduces in a butterfly; the coordinator proposes a
`Commit` that names the mean by its digest; members that hold this mean `Accept`; with a majority of the previous
view the commit holds (`Committed`). That is single-decree Paxos per version: the attempt is the ballot, `Ready` is
the promise and carries what its sender accepted before, `Accept` is the vote, and a later coordinator that finds an
accepted commit among a majority's promises proposes that one again.

A peer that dies or stalls in the reduction is repaired around (`Repair`): its parts get new owners, and each part
says whom it counts. When the coordinator itself is gone, or somebody sent nonsense, the next attempt begins. Every
wait is bounded by `Timing`. Nothing here blocks training: who cannot commit gives up the round and keeps its progress.
`docs/how/protocol.md` has the picture and the argument why this is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.protocol.committing import Committing
from diloco.protocol.coordinating import Coordinating
from diloco.protocol.gossip_messages import Greeting, Invite
from diloco.protocol.parting import Parting
from diloco.protocol.reducing import Reducing
from diloco.protocol.reduction import Tally


class Machine(Parting):
    """The state machine. `receive` and `handle` are its only inputs; public attributes may be read at any time."""

    def handle(self, event: m.Event, now: float) -> list[m.Effect]:
        """Take one event at local time `now` (seconds, monotonic); return what to do, in order."""
        self._now = now
        self._out = []
        if not self._gone:
            self._events[type(event)](self, event)
        return self._out

    def receive(self, envelope: m.Envelope, now: float) -> tuple[m.Reply, list[m.Effect]]:
        """Take one message from another peer; return what to answer, and what to do, in order."""
        self._now = now
        self._out = []
        return self._receive(envelope), self._out

    def _receive(self, envelope: m.Envelope) -> m.Reply:
        sender, body = envelope.sender, envelope.body
        if self._gone:
            return m.Reply.STALE
        if isinstance(body, Greeting | Invite):
            return m.Reply.MALFORMED  # it is of another policy
        if isinstance(body, m.Evict):
            return self._evict(envelope, body)
        reply = self._may_speak(envelope.run, envelope.contract, envelope.lineage, sender)
        if reply is m.Reply.OTHER_LINEAGE and not self._leads_here(body):
            self._meet_lineage(envelope)
            return reply
        decided = reply is m.Reply.BARRED and isinstance(body, m.Committed)  # what was decided is true whoever says it
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
        """Whether a peer may stream bytes to us now. If so, it lives."""
        self._now = now
        reply = self._may_speak(run, contract, lineage, sender)
        if reply is m.Reply.OK:
            self.roster.heard(sender, now)
        return reply

    def _may_speak(self, run: str, contract: str, lineage: str, sender: Member) -> m.Reply:
        reply = self._admission.same_training(run, contract)
        if reply is not m.Reply.OK:
            return reply
        if lineage != self.lineage:
            return m.Reply.OTHER_LINEAGE
        if self.roster.barred(sender.peer) and self._member(sender) is None:
            return m.Reply.BARRED
        return m.Reply.OK if self.roster.may_speak(sender, self._now) else m.Reply.FENCED

    # ------------------------------------------------------------ time

    def _on_tick(self, _: m.Tick) -> None:
        if self._now >= self._heartbeat_at:
            self._heartbeat_at = self._now + self.timing.heartbeat_s
            self._beat()
        self._found_if_complete()
        if self.commit is None:
            return
        self._check_reduction()
        self._follow_coordinator()
        self._coordinate()
        self._check_majority()
        if self._now >= self._resend_at:
            self._resend_at = self._now + self.timing.resend_s
            self._resend()

    def _beat(self) -> None:
        tokens = self.commit.tokens if self.commit else 0
        founded, deaf = self.commit is not None, self.roster.deaf(self._now)
        beat = m.Heartbeat(self.version, founded, self.joining, self.progress, tokens, self.forks, deaf)
        self.roster.forget({member.peer for member in self.view}, self._now)
        self._admission.forget({entry.member.peer for entry in self.roster})
        for entry in self.roster:
            if not entry.left:
                self._send(entry.member, beat)
        for stranger in self.roster.strangers(self._now):
            self._send(stranger, beat)

    def _resend(self) -> None:
        if self._tally is not None and (self._tally.begin is not None or self._tally.proposal is not None):
            self._tally_resend(self._tally)
        elif self._tally is not None and self.attempt > 0:
            for member in self.view:
                if member.peer not in self._tally.ready:
                    self._send(member, m.Gather(self.making, self.attempt, self.reason))
        elif self._offer is not None and self._reduction is None:
            self._send_ready()

    def _tally_resend(self, tally: Tally) -> None:
        for member in tally.audience:
            if member.peer in tally.accepts or member == self.me:
                continue
            if tally.proposal is not None:
                self._send(member, m.Propose(self.making, self.attempt, tally.proposal))
            elif tally.begin is not None:
                self._send(member, tally.begin)
                if tally.repair is not None:
                    self._send(member, tally.repair)

    # ------------------------------------------------------------ founding and joining

    def _on_state_held(self, event: m.StateHeld) -> None:
        self._state = event
        refounding = self.founder and self.commit is None  # a new view takes over from this commit
        commit = event.commit if event.commit != self.commit else None  # what was promised for the next version holds
        if commit is not None and not refounding and commit.version >= self.version:
            self._adopt(commit)
        self._found_if_complete()

    def _found_if_complete(self) -> None:
        """The founder starts the run when enough peers hold its state."""
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
        if self.commit is not None and (self._needs_commit(body.version) or not body.founded):
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
        goodbye = m.Goodbye(
            self.making,
            self.attempt,
            heir,
            self.electorate.held_by(self.me.peer),
            self._accepted_attempt,
            self._accepted,
        )
        for member in others:
            self._send(member, goodbye)
        self._gone = True

    # ------------------------------------------------------------ others

    def _on_gather(self, sender: Member, body: m.Gather) -> None:
        if not self._current(sender, body.version) or not self.in_view or sender != self._seat(body.attempt):
            return
        if body.attempt < self.attempt:
            self._lead_on()
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, body.reason)
        if self._reduction is None:
            self._send_ready()

    def _lead_on(self) -> None:
        """Somebody gathers for an attempt before the one that we promised: it would wait for us for ever.

        So it must hear of ours, or if its coordinator is gone, of the next whose coordinator lives.
        """
        if self._reduction is None and self._tally is None:
            self._follow_coordinator(asked=True)
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
        """An operator, who is no member, answers for the death of a life of a peer, in one lineage."""
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
