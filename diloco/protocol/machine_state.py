"""Where one peer stands in a run: its version, its view, the attempt that it is in, and how it speaks."""

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
    """The state of the machine, and what each of its halves needs of it."""

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
        self._waiting_for = ""
        self.attempt = 0
        self.attempts = 0
        """Attempts it took to make the latest version, as far as this peer knows."""
        self._admission = Admission(rules.run, rules.contract)
        self._sequence = 0
        self._state = m.StateHeld(-1, "")
        self._offer: m.Offer | None = None
        self._offered_at = now
        self._entered_at = now
        self._exposed = False
        self._accepted_attempt = -1
        self._accepted: Commit | None = None
        self._reduction: Reduction | None = None
        self._tally: Tally | None = None
        self._proposal: m.Propose | None = None
        self._decided: Commit | None = None
        self._held: list[str] = []
        self._without: tuple[str, ...] = ()
        self._bequests: dict[str, tuple[Member, m.Goodbye]] = {}
        self._target_lineage: tuple[m.Fork, ...] = ()
        self._target_since_s = now
        self._leaving = False
        self._gone = False
        """We said goodbye: the heir votes for us, and whatever we said from then on would be said beside it."""
        self._alone_since: float | None = None
        self._stands_since = now
        self._heartbeat_at = now
        self._resend_at = now
        self._complained_at = now
        self._catching_up_until = now
        self._fetching_until = now
        self._now = now
        self._out: list[m.Effect] = []

    # ------------------------------------------------------------ what others may ask

    @property
    def version(self) -> int:
        """The latest version this peer knows to be committed; before the founding, that of the state it holds."""
        return self.commit.version if self.commit else self._state.version

    @property
    def making(self) -> int:
        """The version that comes next."""
        return self.version + 1

    @property
    def fragment(self) -> int:
        """The fragment that the version being made moves; fragments take turns."""
        return (self.making - 1) % len(self.rules.parts)

    @property
    def view(self) -> tuple[Member, ...]:
        """Members of the run, in order of admission."""
        return self.commit.view if self.commit else ()

    @property
    def in_view(self) -> bool:
        return any(member == self.me for member in self.view)

    @property
    def alone(self) -> bool:
        """Whether most of the view cannot be reached: perhaps it went on elsewhere, and somebody should ask around."""
        return self._alone_since is not None

    @property
    def reducing(self) -> tuple[int, int, int] | None:
        """(version, attempt, generation) of the reduction under way."""
        return (*self._reduction.key, self._reduction.generation) if self._reduction else None

    @property
    def names(self) -> int:
        """Number of peers whose messages are remembered, so that none is taken twice."""
        return len(self._admission)

    def alive(self) -> list[Member]:
        """Members of the view that are not suspected."""
        return [member for member in self.view if self.roster.alive(member, self._now)]

    def _trainers_alive(self) -> list[Member]:
        """Live members that receive the mean and vote on it first."""
        return [member for member in self.alive() if not member.witness]

    def settled(self) -> bool:
        """Whether every live member is known to have reached this version."""
        entries = [self.roster.get(member.peer) for member in self.alive() if member != self.me]
        beats = [entry.heartbeat for entry in entries if entry is not None]
        return all(beat is not None and beat.version >= self.version for beat in beats)

    def awaited(self) -> bool:
        """Whether most other live trainers stand at this version and have done their inner steps."""
        beats = self._heard_of_trainers()
        reported = [beat.progress for beat in beats if beat is not None]
        ready = sum(progress.phase == Phase.SYNCING and progress.version == self.version for progress in reported)
        return 2 * ready > len(beats)

    def fastest(self) -> float:
        """The largest pace that a live trainer tells of, tokens per second; 0 while nobody does."""
        return max((beat.progress.pace for beat in self._heard_of_trainers() if beat is not None), default=0.0)

    def _heard_of_trainers(self) -> list[m.Heartbeat | None]:
        """The last heartbeat of each other live trainer; None where there was none yet."""
        entries = [self.roster.get(member.peer) for member in self._trainers_alive() if member != self.me]
        return [entry.heartbeat if entry is not None else None for entry in entries]

    # ------------------------------------------------------------ members and votes

    def _member(self, member: Member) -> Member | None:
        """The view's entry for this very life of a peer."""
        found = self.commit.member(member.peer) if self.commit else None
        return found if found is not None and found.incarnation == member.incarnation else None

    def _reachable_votes(self) -> int:
        return self.electorate.reachable({member.peer for member in self.alive()})

    def _no_majority(self) -> str:
        voters = len(self.electorate.voters())
        return f"{self._reachable_votes()} of {voters} voters can be reached, a commit takes {self.electorate.needed()}"

    def _bequeath(self, sender: Member, body: m.Goodbye) -> None:
        if body.heir and self._member(sender) is not None:
            self.electorate.bequeath((sender.peer, *body.votes), body.heir)
            if body.heir == self.me.peer and body.version == self.making:
                self._inherit(body)

    def _inherit(self, body: m.Goodbye) -> None:
        """Whoever votes for a leaver is bound by what the leaver accepted and promised."""
        if body.accepted is not None and body.accepted_attempt > self._accepted_attempt:
            self._accepted_attempt, self._accepted = body.accepted_attempt, body.accepted
        if body.attempt > self.attempt:
            self._enter(body.attempt, "taking over a leaver's vote")

    def _new_incarnation(self) -> None:
        """A new life under the same name: the votes and promises of the old one are void."""
        self.me = replace(self.me, incarnation=self.me.incarnation + 1)
        self.roster.me = self.me
        self.joining = True
        self.founder = False

    # ------------------------------------------------------------ attempts

    def _seat(self, attempt: int) -> Member:
        return coordinator(self.rules.run, self.making, attempt, self.view)

    def _follow_coordinator(self, asked: bool = False) -> None:
        """When the attempt's coordinator is gone, go on to the first attempt whose coordinator lives.

        Unless nobody `asked` us and we have no part in the version: others have, and they lead.
        """
        busy = asked or self._offer is not None or self._reduction is not None
        if not busy or not self.in_view or self.roster.alive(self._seat(self.attempt), self._now):
            return
        for step in range(1, len(self.view) + 1):
            if self.roster.alive(self._seat(self.attempt + step), self._now):
                self._enter(self.attempt + step, f"coordinator {self._seat(self.attempt).peer} is gone")
                return

    def _enter(self, attempt: int, reason: str) -> None:
        """Move on to a later attempt; the promise is made when `Ready` is sent."""
        self._note(reason)
        self.attempt = attempt
        self._entered_at = self._now
        self._reduction = None
        self._proposal = None
        self._tally = None
        if self._seat(attempt) == self.me and self.in_view:
            self._tally = Tally(attempt)
            for member in self.view:
                self._send(member, m.Gather(self.making, attempt, reason))
        elif self._offer is not None:
            self._send_ready()

    def _send_ready(self) -> None:
        ready = m.Ready(
            self.making,
            self.attempt,
            self._offer,
            self._state.digest,
            self._accepted_attempt,
            self._accepted,
            self.electorate.held_by(self.me.peer),
        )
        self._send(self._seat(self.attempt), ready)

    def _current(self, sender: Member, version: int) -> bool:
        """Whether the message is about the version being made; whoever is behind is told, whoever is ahead is asked."""
        if self.commit is None:
            return False
        if version < self.making:
            self._send(sender, m.Committed(self.commit))
        elif version > self.making and not self._is_closing(version - 1):
            self._catch_up(sender, version - 1)
        return version == self.making

    def _is_closing(self, version: int) -> bool:
        """Others stand at the version that closes here, too, any moment: its commit is on its way."""
        reduction = self._reduction
        recent = reduction is not None and self._now - reduction.progress_at_s < self.timing.stall_s
        return recent and version == self.making

    def _needs_commit(self, version: int) -> bool:
        """Whether somebody who says that it stands at `version` needs our commit.

        Not when that closed a moment ago: those who made it tell everybody, and a heartbeat may have crossed with it.
        Else each would get it from all, n^2 commits of O(n) bytes each time.
        """
        crossed = version == self.version - 1 and self._now - self._stands_since < self.timing.heartbeat_s
        return version < self.version and not crossed

    def _give_up(self, reason: str) -> None:
        self._offer = None
        self._note(reason)
        self._out.append(m.GiveUp(reason, self._exposed))
        if self.in_view and self._reduction is None:
            self._send_ready()  # without the offer: nobody must begin with what is not there any more

    def _complain(self, to: Member, begin: m.Begin, missing: Sequence[str], reason: str, offence: bool = False) -> None:
        self._send(to, m.Stalled(begin.version, begin.attempt, tuple(missing), reason, offence))

    def _catch_up(self, source: Member, version: int) -> None:
        """Ask once per stall time: the answer may be large. A witness needs no more than the commit it is told, and
        keeps no means for others, who would think that they are too far behind."""
        if source != self.me and self._now >= self._catching_up_until and not (self.me.witness or source.witness):
            self._catching_up_until = self._now + self.timing.stall_s
            self._out.append(m.CatchUp(source, version))

    def _forget_version(self) -> None:
        """Nothing of the version that was being made matters any more."""
        self.attempt = 0
        self._offer = None
        self._accepted_attempt, self._accepted = -1, None
        self._reduction = self._tally = self._proposal = self._decided = None
        self._without = ()
        self._fetching_until = self._now

    # ------------------------------------------------------------ saying things

    def _send_all(self, members: Sequence[Member], body: m.Body) -> None:
        """To all, to myself last: what I then do must not overtake what the others hear."""
        for member in members:
            if member != self.me:
                self._send(member, body)
        if self.me in members:
            self._send(self.me, body)

    def _send(self, to: Member, body: m.Body) -> None:
        if to == self.me:
            self._messages[type(body)](self, self.me, body)
            return
        self._sequence += 1
        view = self.commit.digest if self.commit else ""
        rules = self.rules
        envelope = m.Envelope(rules.run, rules.contract, self.lineage, self.me, view, self._sequence, body)
        self._out.append(m.Send(to, envelope))

    def _note(self, reason: str, routine: bool = False) -> None:
        if self._offer is not None:
            self._waiting_for = reason
        if reason != self.reason:
            self.reason = reason
            self._out.append(m.Note(reason, routine))

    _messages: ClassVar[dict[type, Callable[..., None]]] = {}
    """Handler of each kind of message; `Machine` fills it."""
