"""State of the protocol's state machine: its version, its view, the attempt that it is in, the messages it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from diloco.base.types import Commit, Member, Phase, Progress
from diloco.protocol import messages as m
from diloco.protocol.reduction import Reduction, Tally
from diloco.protocol.roster import Admission, Roster
from diloco.protocol.view import Electorate, Rules, Timing, coordinator


class MachineState:
    """Base of the protocol's state machine: state that its layers share, the way into an attempt, messages out."""

    def __init__(self, me: Member, rules: Rules, timing: Timing, lineage: str, founder: bool, now: float) -> None:
        self.me = me
        self.rules = rules
        self.timing = timing
        self.lineage = lineage
        self.founder = founder
        self.joining = not founder
        self.progress = Progress()
        self.sync_s = 0.0
        """Seconds to make a version, from `Begin` to the commit: the longest of late, forgotten slowly."""
        self.roster = Roster(me, timing.suspect_s, rules.offences_allowed)
        self.electorate = Electorate()
        self.commit: Commit | None = None
        self.forks: tuple[m.Fork, ...] = ()
        """Lineages that led to ours."""
        self.reason = ""
        """The reason of the latest decision."""
        self._waiting_for = ""
        """The latest reason since this peer offered: why its offer is not committed yet."""
        self.attempts = 0
        """Attempts it took to make the latest version, as far as this peer knows."""
        self._admission = Admission(rules.run, rules.contract)
        self._sequence = 0
        self._state = m.StateHeld(-1, "")
        self._exposed = False
        """Others have bytes of our contribution and may count it."""
        self._held: list[str] = []
        """Digests of the latest means that are here, whole."""
        self._bequests: dict[str, tuple[Member, m.Goodbye]] = {}
        """Goodbyes that came before the commit of whose view they speak."""
        self._target_lineage: tuple[m.Fork, ...] = ()
        """History of the lineage whose state this peer copies; empty: none."""
        self._leaving = False
        """Our latest offer is our last."""
        self._gone = False
        """We said goodbye: our heir votes for us and could not know of any message that we sent afterwards."""
        self._alone_since: float | None = None
        self._now = self._entered_at = self._offered_at = self._stands_since = self._target_since_s = now
        self._heartbeat_at = self._resend_at = self._complained_at = self._catching_up_until = now
        self._out: list[m.Effect] = []
        self._forget_version()

    def _forget_version(self) -> None:
        """Drop offer, votes and tally of the version that was being made: attempts at another one come next."""
        self.attempt = 0
        self._offer: m.Offer | None = None
        self._accepted: tuple[int, Commit | None] = (-1, None)
        """The latest attempt in which this peer accepted a commit, and that commit."""
        self._reduction: Reduction | None = None
        self._tally: Tally | None = None
        self._proposal: m.Propose | None = None
        self._decided: Commit | None = None
        """A commit that holds and whose mean is not here yet."""
        self.mean_lost_with: tuple[str, ...] = ()
        """Trainers that do not live and may have the mean of a version that was accepted, which no live one has."""
        self._without: tuple[str, ...] = ()
        """Peers whose contributions made the attempt before fail."""
        self._fetching_until = self._now

    # ------------------------------------------------------------ what others may ask

    @property
    def version(self) -> int:
        """Version of the latest commit known; before the founding of the lineage, that of the state it holds."""
        return self.commit.version if self.commit else self._state.version

    @property
    def making(self) -> int:
        """The version for which attempts are made and votes are taken: the next after the latest commit."""
        return self.version + 1

    @property
    def fragment(self) -> int:
        """The fragment that the next commit moves; fragments take turns by version."""
        return (self.making - 1) % len(self.rules.parts)

    @property
    def view(self) -> tuple[Member, ...]:
        """The view: members that the latest commit names, in order of admission."""
        return self.commit.view if self.commit else ()

    @property
    def in_view(self) -> bool:
        return any(member == self.me for member in self.view)

    @property
    def alone(self) -> bool:
        """Whether most voters of the view cannot be reached: it may go on elsewhere, so others are to be asked."""
        return self._alone_since is not None

    @property
    def reducing(self) -> tuple[int, int, int] | None:
        """(version, attempt, generation) of the reduction that the state machine has under way."""
        return (*self._reduction.key, self._reduction.generation) if self._reduction else None

    @property
    def names(self) -> int:
        """Number of peers whose protocol messages are remembered, so that none is taken twice."""
        return len(self._admission)

    def alive(self) -> list[Member]:
        """Members of the view that the roster does not suspect."""
        return [member for member in self.view if self.roster.alive(member, self._now)]

    def _trainers_alive(self) -> list[Member]:
        """Live members of the view that receive the mean and vote on it first: all but witnesses."""
        return [member for member in self.alive() if not member.witness]

    def settled(self) -> bool:
        """Whether every live member of the view has reported this version in a heartbeat."""
        beats = self._heartbeats(self.alive())
        return all(beat is not None and beat.version >= self.version for beat in beats)

    def awaited(self) -> bool:
        """Whether heartbeats show most other live trainers of the view at this version, their inner steps done."""
        beats = self._heartbeats(self._trainers_alive())
        reported = [beat.progress for beat in beats if beat is not None]
        ready = sum(progress.phase == Phase.SYNCING and progress.version == self.version for progress in reported)
        return 2 * ready > len(beats)

    def fastest(self) -> float:
        """The largest pace in heartbeats of other live trainers of the view, tokens per second; 0 while unknown."""
        beats = self._heartbeats(self._trainers_alive())
        return max((beat.progress.pace for beat in beats if beat is not None), default=0.0)

    def _heartbeats(self, members: Sequence[Member]) -> list[m.Heartbeat | None]:
        """The roster's last heartbeat of each of these members but this one; None where there was none yet."""
        return [self.roster.heartbeat(member.peer) for member in members if member != self.me]

    # ------------------------------------------------------------ members and votes

    def _is_member(self, member: Member) -> bool:
        """Whether this very life of a peer is in the view."""
        found = self.commit.member(member.peer) if self.commit else None
        return found is not None and found.incarnation == member.incarnation

    def _no_majority(self) -> str:
        """The reason why no commit can get its votes; empty while enough voters of the view can be reached."""
        alive = {member.peer for member in self.alive()}
        reachable, needed = self.electorate.reachable(alive), self.electorate.needed()
        if reachable >= needed:
            return ""
        return f"{reachable} of {len(self.electorate.voters())} voters can be reached, a commit takes {needed}"

    def _bequeath(self, sender: Member, body: m.Goodbye) -> None:
        """A leaver of this view gives its vote away, and what it promised and accepted with it."""
        if not body.heir or not self._is_member(sender):
            return
        self.electorate.bequeath((sender.peer, *body.votes), body.heir)
        if body.heir != self.me.peer or body.version != self.making:
            return
        # Who votes for a leaver is bound as the leaver was: else two commits could have its vote.
        if body.accepted is not None and body.accepted_attempt > self._accepted[0]:
            self._accepted = (body.accepted_attempt, body.accepted)
        if body.attempt > self.attempt:
            self._enter(body.attempt, "taking over a leaver's vote")

    def _new_incarnation(self) -> None:
        """Begin a new life under the same name: the votes and promises of the old one are void."""
        self.me = replace(self.me, incarnation=self.me.incarnation + 1)
        self.roster.me = self.me
        self.joining = True
        self.founder = False

    # ------------------------------------------------------------ attempts

    def _seat(self, attempt: int) -> Member:
        """The coordinator of an attempt to make the next version."""
        return coordinator(self.rules.run, self.making, attempt, self.view)

    def _follow_coordinator(self, asked: bool = False) -> None:
        """When the attempt's coordinator is gone, go on to the first attempt whose coordinator lives.

        A peer that has no part in the version does so only when another `asked` it: others lead on.
        """
        busy = asked or self._offer is not None or self._reduction is not None
        if not busy or not self.in_view or self.roster.alive(self._seat(self.attempt), self._now):
            return
        for step in range(1, len(self.view) + 1):
            if self.roster.alive(self._seat(self.attempt + step), self._now):
                self._enter(self.attempt + step, f"coordinator {self._seat(self.attempt).peer} is gone")
                return

    def _enter(self, attempt: int, reason: str) -> None:
        """Move on to a later attempt, under another coordinator; the promise is made when `Ready` is sent."""
        self._note(reason)
        self.attempt = attempt
        self._entered_at = self._now
        self._reduction = self._proposal = self._tally = None
        if self._seat(attempt) == self.me and self.in_view:
            self._tally = Tally(attempt)
            for member in self.view:
                self._send(member, m.Gather(self.making, attempt, reason))
        elif self._offer is not None:
            self._send_ready()

    def _send_ready(self) -> None:
        votes = self.electorate.held_by(self.me.peer)
        ready = m.Ready(self.making, self.attempt, self._offer, self._state.digest, *self._accepted, votes)
        self._send(self._seat(self.attempt), ready)

    def _current(self, sender: Member, version: int) -> bool:
        """Whether a protocol message is about the version being made. A sender that is behind gets our commit; one that
        is ahead is asked for the commits that we missed."""
        if self.commit is None:
            return False
        if version < self.making:
            self._send(sender, m.Committed(self.commit))
        elif version > self.making and not self._is_closing(version - 1):
            self._catch_up(sender, version - 1)
        return version == self.making

    def _is_closing(self, version: int) -> bool:
        """Whether the reduction under way may still bring the next commit, where others already have that version."""
        reduction = self._reduction
        recent = reduction is not None and self._now - reduction.progress_at_s < self.timing.stall_s
        return recent and version == self.making

    def _give_up(self, reason: str) -> None:
        self._offer = None
        self._note(reason)
        self._out.append(m.GiveUp(reason, self._exposed))
        if self.in_view and self._reduction is None:
            self._send_ready()  # without the offer: nobody must begin with what is not there any more

    def _catch_up(self, source: Member, version: int) -> None:
        """Emit `CatchUp` towards a trainer for commits that we missed, once per stall time: the answer may be large.

        A witness needs no commits but the one that it gets, and keeps no means for others: a trainer that asked it
        would take itself to be too far behind.
        """
        if source != self.me and self._now >= self._catching_up_until and not (self.me.witness or source.witness):
            self._catching_up_until = self._now + self.timing.stall_s
            self._out.append(m.CatchUp(source, version))

    # ------------------------------------------------------------ sending

    def _send_all(self, members: Sequence[Member], body: m.Body) -> None:
        """Emit a protocol message to members, to myself last: what I then do must not overtake what the others hear."""
        for member in sorted(members, key=lambda member: member == self.me):
            self._send(member, body)

    def _send(self, to: Member, body: m.Body) -> None:
        """Emit a protocol message as an effect; one to this peer itself is handled at once."""
        if to == self.me:
            self._messages[type(body)](self, self.me, body)
            return
        self._sequence += 1
        view = self.commit.digest if self.commit else ""
        rules = self.rules
        envelope = m.Envelope(rules.run, rules.contract, self.lineage, self.me, view, self._sequence, body)
        self._out.append(m.Send(to, envelope))

    def _note(self, reason: str, routine: bool = False) -> None:
        """Emit the reason of a protocol decision as `Note`, when it changed."""
        if self._offer is not None:
            self._waiting_for = reason
        if reason != self.reason:
            self.reason = reason
            self._out.append(m.Note(reason, routine))

    _messages: ClassVar[dict[type, Callable[..., None]]] = {}
    """Handler of each kind of message; `Machine` fills it."""
