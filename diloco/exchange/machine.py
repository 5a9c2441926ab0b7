"""One peer's side of the round protocol, without I/O: events and the time go in, effects come out.

A version is made in *attempts*. Each attempt has a coordinator (`view.coordinator`); members that finished their
inner steps tell it `Ready`; it says `Begin` to a group; the group reduces in a butterfly; the coordinator proposes a
`Commit` that names the mean by its digest; members that hold this mean `Accept`; with a majority of the previous
view the commit holds (`Committed`). That is single-decree Paxos per version: the attempt is the ballot, `Ready` is
the promise and carries what its sender accepted before, `Accept` is the vote, and a later coordinator that finds an
accepted commit among a majority's promises proposes that one again.

An attempt that fails (a peer died, stalled, sent nonsense) is followed by the next without the failed peer's
contribution. Every wait is bounded by `Timing`. Nothing here blocks training: who cannot commit gives up the round
and keeps its progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from diloco.data import leases
from diloco.exchange import messages as m
from diloco.exchange.reduction import Reduction, well_formed
from diloco.exchange.roster import Roster
from diloco.exchange.tally import Tally
from diloco.exchange.view import Decision, coordinator, decide_sync, spans, votes_needed
from diloco.types import Commit, Member, Progress


@dataclass(frozen=True, slots=True)
class Rules:
    """What the contract says about rounds."""

    run: str
    contract: str
    """Digest of the contract."""
    parts: tuple[int, ...]
    """Parts of each fragment."""
    start_peers: int
    lease_blocks: int
    """Data blocks that every member holds at least after a commit."""
    match_deadline_s: float
    backlog_versions: int
    """Commits that members keep for those who are behind."""

    @property
    def means_kept(self) -> int:
        """Encoded means that a peer holds: those of the backlog, and of attempts that may still be proposed again."""
        return self.backlog_versions + 2


@dataclass(frozen=True, slots=True)
class Timing:
    """What the site says about waiting."""

    heartbeat_s: float
    suspect_s: float
    stall_s: float

    @property
    def resend_s(self) -> float:
        """Unanswered messages are said again this often."""
        return self.heartbeat_s


class Machine:
    """The state machine. `handle` is its only input; the public attributes may be read at any time."""

    def __init__(self, me: Member, rules: Rules, timing: Timing, lineage: str, founder: bool, now: float) -> None:
        self.me = me
        self.rules = rules
        self.timing = timing
        self.lineage = lineage
        self.founder = founder
        self.joining = not founder
        self.progress = Progress()
        self.roster = Roster(me, timing.suspect_s)
        self.commit: Commit | None = None
        self.reason = ""
        self.attempt = 0
        self.attempts = 0
        """How many it took to make the latest version, as far as this peer knows."""
        self._state = m.StateHeld(-1, "")
        self._offer: m.Offer | None = None
        self._offered_at = now
        self._exposed = False
        self._accepted_attempt = -1
        self._accepted: Commit | None = None
        self._reduction: Reduction | None = None
        self._tally: Tally | None = None
        self._proposal: m.Propose | None = None
        self._decided: Commit | None = None
        self._held: list[str] = []
        self._heirs: dict[str, str] = {}
        self._evicted: set[str] = set()
        self._dead: set[tuple[str, int]] = set()
        self._without: tuple[str, ...] = ()
        self._heartbeat_at = now
        self._resend_at = now
        self._complained_at = now
        self._catching_up_until = now
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
    def view(self) -> tuple[Member, ...]:
        return self.commit.view if self.commit else ()

    @property
    def in_view(self) -> bool:
        return any(member == self.me for member in self.view)

    @property
    def reducing(self) -> tuple[int, int] | None:
        """(version, attempt) of the reduction under way."""
        return self._reduction.key if self._reduction else None

    def alive(self) -> list[Member]:
        """Members of the view that are not suspected."""
        return [member for member in self.view if self.roster.alive(member, self._now)]

    def settled(self) -> bool:
        """Whether every live member is known to have reached this version."""
        beats = [entry.heartbeat for entry in self.roster if self._member(entry.member) and not entry.left]
        return all(beat is not None and beat.version >= self.version for beat in beats)

    def handle(self, event: m.Event, now: float) -> list[m.Effect]:
        """Take one event at local time `now` (seconds, monotonic); return what to do, in order."""
        self._now = now
        self._out = []
        self._events[type(event)](self, event)
        return self._out

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
        beat = m.Heartbeat(self.version, self.commit is not None, self.joining, self.progress)
        self.roster.forget({member.peer for member in self.view}, self._now)
        for entry in self.roster:
            if not entry.left:
                self._send(entry.member, beat)

    def _resend(self) -> None:
        if self._tally is not None and self._tally.begin is not None:
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

    # ------------------------------------------------------------ founding and joining

    def _on_state_held(self, event: m.StateHeld) -> None:
        self._state = event
        refounding = self.founder and self.commit is None  # a new view takes over from this commit
        if event.commit is not None and not refounding and event.commit.version >= self.version:
            self._adopt(event.commit)
        self._found_if_complete()

    def _found_if_complete(self) -> None:
        """The founder starts the run when enough peers hold its state."""
        if not self.founder or self.commit is not None or self._state.version < 0:
            return
        here = [self.me, *self.roster.at_the_door(0, self._now)]
        if len(here) < self.rules.start_peers:
            self._note(f"{len(here)} of {self.rules.start_peers} peers are here")
            return
        self._note(f"founded with {len(here)} peers")
        self._announce(self._founding(here), here)

    def _founding(self, view: Sequence[Member]) -> Commit:
        before = self._state.commit
        names = [member.peer for member in view]
        if before is None:
            granted = leases.found(names, self.rules.lease_blocks)
        else:
            granted = leases.advance(before.leases, {}, names, self.rules.lease_blocks)
        return Commit(
            version=self._state.version,
            previous=before.digest if before else self.rules.contract,
            lineage=self.lineage,
            fragment=-1,
            view=tuple(view),
            counted=(),
            mean_digest="",
            tokens=before.tokens if before else 0,
            leases=granted,
            state_digest=self._state.digest,
        )

    def _on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        self.roster.heard(sender, self._now, body, self.version)
        if self.commit is not None and (body.version < self.version or not body.founded):
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
            self._offered_at = self._now
            self._follow_coordinator()
            if self._reduction is None:
                self._send_ready()

    def _on_withdrawn(self, _: m.Withdrawn) -> None:
        if self._offer is not None:
            self._give_up(f"no commit before the round's deadline ({self.reason})")

    def _give_up(self, reason: str) -> None:
        self._offer = None
        self._note(reason)
        self._out.append(m.GiveUp(reason, self._exposed))

    def _check_majority(self) -> None:
        """Nobody waits where nothing can be decided: training goes on, commits wait."""
        waited_s = self._now - self._offered_at
        if self._offer is not None and waited_s > self.timing.stall_s and self._reachable_votes() < self._needed():
            self._give_up(self._no_majority())

    def _reachable_votes(self) -> int:
        """Voters that live, or left their vote to one that lives."""
        alive = {member.peer for member in self.alive()}
        voting = {peer for peer in self._electorate() if peer in alive or self._heirs.get(peer) in alive}
        return len(voting)

    def _no_majority(self) -> str:
        voters = len(self._electorate())
        return f"{self._reachable_votes()} of {voters} voters can be reached, a commit takes {self._needed()}"

    def _my_votes(self) -> tuple[str, ...]:
        """Peers that left and gave me their vote."""
        return tuple(sorted(peer for peer, heir in self._heirs.items() if heir == self.me.peer))

    def _on_leave_wanted(self, _: m.LeaveWanted) -> None:
        others = [member for member in self.alive() if member != self.me]
        heir = others[0].peer if others and self.in_view else ""
        goodbye = m.Goodbye(
            self.making, self.attempt, heir, self._my_votes(), self._accepted_attempt, self._accepted
        )  # fmt: skip
        for member in others:
            self._send(member, goodbye)

    # ------------------------------------------------------------ attempts

    def _seat(self, attempt: int) -> Member:
        return coordinator(self.rules.run, self.making, attempt, self.view)

    def _follow_coordinator(self) -> None:
        """When the attempt's coordinator is gone, go on to the first attempt whose coordinator lives."""
        busy = self._offer is not None or self._reduction is not None
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
        self._reduction = None
        self._proposal = None
        self._tally = None
        if self._seat(attempt) == self.me and self.in_view:
            self._tally = Tally(attempt, self._now)
            for member in self.view:
                self._send(member, m.Gather(self.making, attempt, reason))
        elif self._offer is not None:
            self._send_ready()

    def _send_ready(self) -> None:
        offer = self._offer
        ready = m.Ready(
            self.making,
            self.attempt,
            offer,
            self._state.digest,
            self._accepted_attempt,
            self._accepted,
            self._my_votes(),
        )
        self._send(self._seat(self.attempt), ready)

    def _on_gather(self, sender: Member, body: m.Gather) -> None:
        if not self._current(sender, body.version) or body.attempt < self.attempt or not self.in_view:
            return
        if sender != self._seat(body.attempt):
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, body.reason)
        if self._reduction is None:
            self._send_ready()

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

    # ------------------------------------------------------------ coordinating

    def _on_ready(self, sender: Member, body: m.Ready) -> None:
        if not self._current(sender, body.version) or self._member(sender) is None:
            return
        if (
            self._seat(body.attempt) != self.me
            or body.attempt < self.attempt
            or not self._plausible(sender, body.offer)
        ):
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, f"{sender.peer} asked for attempt {body.attempt}")
        if self._tally is None:
            self._tally = Tally(self.attempt, self._now)
        self._tally.hear(sender.peer, body, self._now)
        self._coordinate()

    def _plausible(self, sender: Member, offer: m.Offer | None) -> bool:
        """Nobody can have used more data than it holds, or measured against another version than this."""
        assert self.commit is not None
        held = leases.count(self.commit.leases.held.get(sender.peer, ()))
        return offer is None or (offer.blocks <= held and offer.base_version == self.version and offer.weight > 0)

    def _coordinate(self) -> None:
        tally = self._tally
        if tally is None:
            return
        promises = len(tally.promises() & self._electorate())
        earlier = tally.accepted()
        if tally.proposal is not None:
            self._commit_if_accepted(tally)
        elif tally.begin is not None:
            return
        elif self.attempt > 0 and promises < self._needed():
            self._note(f"attempt {self.attempt}: {promises} of {self._needed()} promises")
        elif earlier is not None:
            self._note(f"attempt {self.attempt}: proposing again what was accepted before")
            self._propose(tally, earlier)
        else:
            self._begin_if_matched(tally)

    def _begin_if_matched(self, tally: Tally) -> None:
        alive = {member.peer for member in self.alive()}
        decision = decide_sync(
            self._now - tally.first_offer_at_s,
            self.rules.match_deadline_s,
            [member.peer for member in self.view],
            alive,
            tally.ready,
            self._without,
        )
        if self._reachable_votes() < self._needed():
            decision = Decision(None, self._no_majority())
        self._note(decision.reason, decision.routine)
        if decision.group is None:
            return
        newcomers = [member for member in self._newcomers() if self._stands_here(member)]
        parts = self.rules.parts[self.fragment]
        begin = m.Begin(
            self.making,
            self.attempt,
            tuple(tally.counted(peer) for peer in decision.group),
            (*self.alive(), *newcomers),
            spans(parts, decision.group),
        )
        tally.begin = begin
        tally.audience = begin.receivers
        self._tell(begin.receivers, begin)

    @property
    def fragment(self) -> int:
        """The fragment that the version being made moves; fragments take turns."""
        return (self.making - 1) % len(self.rules.parts)

    def _on_stalled(self, sender: Member, body: m.Stalled) -> None:
        tally = self._tally
        if tally is None or body.version != self.making or body.attempt != self.attempt or tally.proposal is not None:
            return
        if tally.begin is not None and self._member(sender) is not None:
            self._abort(tally, body.missing, f"{sender.peer}: {body.reason}")

    def _abort(self, tally: Tally, without: Sequence[str], reason: str) -> None:
        self._tell(tally.audience, m.Abort(self.making, self.attempt, tuple(without), reason))

    def _propose(self, tally: Tally, commit: Commit) -> None:
        tally.proposal = commit
        tally.audience = tally.audience or tuple(self.alive())
        self._tell(tally.audience, m.Propose(self.making, self.attempt, commit))

    def _on_accept(self, sender: Member, body: m.Accept) -> None:
        tally = self._tally
        if tally is None or tally.proposal is None or (body.version, body.attempt) != (self.making, self.attempt):
            return
        if body.commit_digest == tally.proposal.digest and self._member(sender) is not None:
            tally.accepts[sender.peer] = {sender.peer, *body.votes}
            self._commit_if_accepted(tally)

    def _commit_if_accepted(self, tally: Tally) -> None:
        """With a majority the commit holds; live members that are about to accept get a moment to do so first."""
        assert tally.proposal is not None
        if len(tally.votes() & self._electorate()) < self._needed():
            return
        tally.majority_at_s = min(tally.majority_at_s, self._now)
        late = [member for member in self.alive() if member.peer not in tally.accepts]
        if not late or self._now - tally.majority_at_s >= self.timing.stall_s:
            self._announce(tally.proposal, tally.audience)

    def _announce(self, commit: Commit, audience: Sequence[Member]) -> None:
        others = {member.peer: member for member in (*audience, *commit.view) if member != self.me}
        self._tell(list(others.values()), m.Committed(commit))
        self._decide(commit, self.me)

    def _stands_here(self, member: Member) -> bool:
        """Whether a joiner could take part in the reduction of the next version."""
        entry = self.roster.get(member.peer)
        return entry is not None and entry.heartbeat is not None and entry.heartbeat.version == self.version

    def _newcomers(self) -> list[Member]:
        """Joiners that are here, or so near that they catch up by commits: rounds may be shorter than heartbeats."""
        near = max(self.rules.backlog_versions - 2, 0)
        known = {member.peer for member in self.alive()}
        return [member for member in self.roster.at_the_door(near, self._now) if member.peer not in known]

    def _next_commit(self, begin: m.Begin, mean_digest: str) -> Commit:
        assert self.commit is not None
        assert self._tally is not None
        leaving = {peer for peer, ready in self._tally.ready.items() if ready.offer and ready.offer.leaving}
        leaving |= {entry.member.peer for entry in self.roster if entry.left} - self._evicted
        alive = self.alive()
        view = [member for member in (*alive, *self._newcomers()) if member.peer not in leaving] or alive
        used = {counted.peer: counted.blocks for counted in begin.contributors}
        names = [member.peer for member in view]
        return Commit(
            version=self.making,
            previous=self.commit.digest,
            lineage=self.lineage,
            fragment=self.fragment,
            view=tuple(view),
            counted=begin.contributors,
            mean_digest=mean_digest,
            tokens=self.commit.tokens + sum(counted.tokens for counted in begin.contributors),
            leases=leases.advance(self.commit.leases, used, names, self.rules.lease_blocks, leaving),
            state_digest=self._tally.ready[begin.contributors[0].peer].state_digest,
        )

    # ------------------------------------------------------------ reducing

    def _on_begin(self, sender: Member, body: m.Begin) -> None:
        if not self._current(sender, body.version) or body.attempt < self.attempt:
            return
        if sender != self._seat(body.attempt) or self.me not in body.receivers:
            return
        if self._reduction is not None and self._reduction.key == (body.version, body.attempt):
            return
        if not well_formed(body, self.rules.parts[self.fragment], [member.peer for member in self.view]):
            self._complain(sender, body, (), "malformed Begin")
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, "the coordinator began a later attempt")
        reduction = Reduction(body, self.me.peer, self._now)
        if reduction.contributes and not self._offer_matches(body):
            self._complain(sender, body, (self.me.peer,), "has withdrawn its contribution")
        else:
            self._start(reduction)

    def _offer_matches(self, begin: m.Begin) -> bool:
        mine = next(counted for counted in begin.contributors if counted.peer == self.me.peer)
        return self._offer is not None and Tally.as_counted(self.me.peer, self._offer) == mine

    def _start(self, reduction: Reduction) -> None:
        begin = reduction.begin
        self._reduction = reduction
        self._out.append(m.BeginReduction(begin))
        if not reduction.contributes:
            return
        self._exposed = True
        receivers = {member.peer: member for member in begin.receivers}
        for span in begin.spans:
            if span.owner != self.me.peer:
                self._out.append(m.SendContribution(*reduction.key, span, receivers[span.owner]))
        for span in reduction.own_spans():
            for part in range(span.start, span.stop):
                self._on_contribution(m.ContributionArrived(*reduction.key, self.me.peer, part))

    def _on_contribution(self, event: m.ContributionArrived) -> None:
        reduction = self._reduction
        if reduction is None or reduction.key != (event.version, event.attempt):
            return
        if reduction.contribution(event.sender, event.part, self._now):
            self._out.append(m.FoldPart(*reduction.key, event.part))

    def _on_refused(self, event: m.ContributionRefused) -> None:
        reduction = self._reduction
        if reduction is not None and reduction.key == (event.version, event.attempt):
            self._complain(self._seat(self.attempt), reduction.begin, (event.sender,), event.reason)

    def _on_folded(self, event: m.PartFolded) -> None:
        reduction = self._reduction
        if reduction is None or reduction.key != (event.version, event.attempt):
            return
        others = tuple(member for member in reduction.begin.receivers if member != self.me)
        self._out.append(m.SendMean(*reduction.key, event.part, others))
        self._on_mean(m.MeanArrived(*reduction.key, self.me.peer, event.part))

    def _on_mean(self, event: m.MeanArrived) -> None:
        reduction = self._reduction
        if reduction is None or reduction.key != (event.version, event.attempt):
            return
        if reduction.mean(event.part, event.sender, self._now):
            self._out.append(m.SealMean(*reduction.key))

    def _on_mean_held(self, event: m.MeanHeld) -> None:
        self._held = [*self._held, event.mean_digest][-self.rules.means_kept :]
        reduction = self._reduction
        if reduction is not None and reduction.key == (event.version, event.attempt):
            reduction.mean_digest = event.mean_digest
            reduction.progress_at_s = self._now
            if self._tally is not None and self._tally.begin is not None and self._tally.proposal is None:
                self._propose(self._tally, self._next_commit(self._tally.begin, event.mean_digest))
        if self._decided is not None and self._decided.mean_digest == event.mean_digest:
            self._decide(self._decided, self.me)
        elif self._proposal is not None and self._proposal.commit.mean_digest == event.mean_digest:
            self._accept(self._proposal)
        elif self._proposal is not None:
            self._out.append(m.FetchMean(self._proposal.commit, tuple(self._others(self._seat(self.attempt)))))

    def _check_reduction(self) -> None:
        """Bytes that do not come: the coordinator tries without the peer that owes them, or a new one takes over."""
        reduction = self._reduction
        if reduction is None:
            return
        silent = self._now - reduction.progress_at_s
        stall_s = self.timing.stall_s
        dead = self._dead_in(reduction)
        if silent > 3 * stall_s:
            self._enter(self.attempt + 1, f"attempt {self.attempt} made no progress for {silent:.1f} s")
        elif self._tally is not None and self._tally.begin is not None and self._tally.proposal is None and dead:
            self._abort(self._tally, dead, f"{', '.join(dead)} died in the reduction")
        elif silent > stall_s and not reduction.complete and self._now - self._complained_at > stall_s:
            self._complained_at = self._now
            reason = f"no bytes for {silent:.1f} s"
            self._complain(self._seat(self.attempt), reduction.begin, reduction.missing(), reason)

    def _dead_in(self, reduction: Reduction) -> list[str]:
        contributors = {counted.peer for counted in reduction.begin.contributors}
        members = [member for member in reduction.begin.receivers if member.peer in contributors]
        return [member.peer for member in members if not self.roster.alive(member, self._now)]

    def _complain(self, to: Member, begin: m.Begin, missing: Sequence[str], reason: str) -> None:
        self._send(to, m.Stalled(begin.version, begin.attempt, tuple(missing), reason))

    def _on_abort(self, sender: Member, body: m.Abort) -> None:
        if body.version != self.making or body.attempt != self.attempt or sender != self._seat(body.attempt):
            return
        self._without = body.without
        self._enter(self.attempt + 1, f"attempt {body.attempt} failed: {body.reason}")
        self._follow_coordinator()

    # ------------------------------------------------------------ accepting and committing

    def _on_propose(self, sender: Member, body: m.Propose) -> None:
        if not self._current(sender, body.version) or body.attempt < self.attempt or sender != self._seat(body.attempt):
            return
        if self.commit is None or body.commit.previous != self.commit.digest or body.commit.version != self.making:
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, "a later attempt proposes a commit")
        asked_before = self._proposal == body
        self._proposal = body
        if body.commit.mean_digest in self._held:
            self._accept(body)
        elif not asked_before and not self._mean_is_coming():
            self._out.append(m.FetchMean(body.commit, tuple(self._others(sender))))

    def _mean_is_coming(self) -> bool:
        """Whether a reduction here is still receiving or hashing its mean: then nothing needs to be fetched."""
        return self._reduction is not None and not self._reduction.mean_digest

    def _others(self, first: Member) -> list[Member]:
        alive = [member for member in self.alive() if member not in (self.me, first)]
        return ([first] if first != self.me else []) + alive

    def _accept(self, proposal: m.Propose) -> None:
        if not self.in_view:
            return  # a joiner holds the mean, but does not vote yet
        self._accepted_attempt = proposal.attempt
        self._accepted = proposal.commit
        accept = m.Accept(proposal.version, proposal.attempt, proposal.commit.digest, self._my_votes())
        self._send(self._seat(proposal.attempt), accept)

    def _on_committed(self, sender: Member, body: m.Committed) -> None:
        commit = body.commit
        if commit.version < self.making and not (self.commit is None and commit.version == self._state.version):
            return
        if commit.lineage == self.lineage:
            self._decide(commit, sender)

    def _decide(self, commit: Commit, source: Member) -> None:
        """A version closed. Close it here too, if its mean is here or on its way; else fetch it."""
        if self.commit is None and commit.fragment == -1 and commit.version == self._state.version:
            self._close(commit)
        elif self.commit is None or commit.previous != self.commit.digest:
            self._catch_up(source, commit.version)
        elif commit.mean_digest in self._held:
            self._close(commit)
        else:
            self._decided = commit
            if not self._mean_is_coming():
                self._catch_up(source, commit.version)

    def _catch_up(self, source: Member, version: int) -> None:
        """Ask once per stall time: the answer may be large."""
        if source != self.me and self._now >= self._catching_up_until:
            self._catching_up_until = self._now + self.timing.stall_s
            self._out.append(m.CatchUp(source, version))

    def _on_learned(self, event: m.Learned) -> None:
        self._catching_up_until = self._now
        follows = self.commit is not None and event.commit.previous == self.commit.digest
        founds = self.commit is None and event.commit.version == self._state.version
        if follows or founds:
            self._close(event.commit)

    def _close(self, commit: Commit) -> None:
        self._adopt(commit)
        self._out.append(m.Close(commit))

    def _adopt(self, commit: Commit) -> None:
        """Stand at a new version."""
        self.commit = commit
        self.attempts = self.attempt + 1
        self.attempt = 0
        self._offer = None
        self._exposed = False
        self._accepted_attempt, self._accepted = -1, None
        self._reduction = self._tally = self._proposal = self._decided = None
        self._without = ()
        names = {member.peer for member in commit.view}
        self._heirs = {peer: heir for peer, heir in self._heirs.items() if peer in names}
        self._evicted &= names
        self._dead &= {(member.peer, member.incarnation) for member in commit.view}
        self.roster.meet(commit.view, self._now)
        self._heartbeat_at = self._now  # tell the new version at once: who is done waits to see it everywhere
        if not self.joining and not self.in_view:
            # Thawed after a stop, or cut off for a while: the run went on without this life of mine.
            self.me = replace(self.me, incarnation=self.me.incarnation + 1)
            self.roster.me = self.me
            self._note("the view goes on without me: asking to be taken in again")
        self.joining = not self.in_view

    # ------------------------------------------------------------ members

    def _electorate(self) -> set[str]:
        """Members that may still vote."""
        living = {member.peer for member in self.view if (member.peer, member.incarnation) not in self._dead}
        return living - self._evicted

    def _needed(self) -> int:
        living = len(self._electorate())
        needed = votes_needed(len(self.view), len(self.view) - living)
        return min(needed, living) if self._evicted else needed  # an operator answers for what the dead may have agreed

    def _member(self, member: Member) -> Member | None:
        """The view's entry for this very life of a peer."""
        found = self.commit.member(member.peer) if self.commit else None
        return found if found is not None and found.incarnation == member.incarnation else None

    def _on_goodbye(self, sender: Member, body: m.Goodbye) -> None:
        self.roster.left(sender.peer)
        if body.heir and body.version <= self.making and self._member(sender) is not None:
            self._heirs |= dict.fromkeys((sender.peer, *body.votes), body.heir)
            if body.heir == self.me.peer and body.version == self.making:
                self._inherit(body)
        self._note(f"{sender.peer} left")
        self._coordinate()

    def _inherit(self, body: m.Goodbye) -> None:
        """Whoever votes for a leaver is bound by what the leaver accepted and promised."""
        if body.accepted is not None and body.accepted_attempt > self._accepted_attempt:
            self._accepted_attempt, self._accepted = body.accepted_attempt, body.accepted
        if body.attempt > self.attempt:
            self._enter(body.attempt, "taking over a leaver's vote")

    def _on_evict(self, _: Member, body: m.Evict) -> None:
        self._evicted.add(body.peer)
        self.roster.left(body.peer)
        self._note(f"an operator declared {body.peer} dead")

    def _on_unreachable(self, event: m.Unreachable) -> None:
        self.roster.unreachable(event.member.peer)
        if event.proven:
            self._dead.add((event.member.peer, event.member.incarnation))

    def _on_received(self, event: m.Received) -> None:
        if isinstance(event.body, m.Evict) or self.roster.heard(event.sender, self._now):
            self._messages[type(event.body)](self, event.sender, event.body)

    # ------------------------------------------------------------ saying things

    def _tell(self, members: Sequence[Member], body: m.Body) -> None:
        """To all, to myself last: what I then do must not overtake what the others hear."""
        for member in members:
            if member != self.me:
                self._send(member, body)
        if self.me in members:
            self._send(self.me, body)

    def _send(self, to: Member, body: m.Body) -> None:
        if to == self.me:
            self._messages[type(body)](self, self.me, body)
        else:
            self._out.append(m.Send(to, body))

    def _note(self, reason: str, routine: bool = False) -> None:
        if reason != self.reason:
            self.reason = reason
            self._out.append(m.Note(reason, routine))

    _events: ClassVar[dict[type, Callable[..., None]]] = {
        m.Tick: _on_tick,
        m.Received: _on_received,
        m.Unreachable: _on_unreachable,
        m.StateHeld: _on_state_held,
        m.Offered: _on_offered,
        m.Withdrawn: _on_withdrawn,
        m.ContributionArrived: _on_contribution,
        m.ContributionRefused: _on_refused,
        m.PartFolded: _on_folded,
        m.MeanArrived: _on_mean,
        m.MeanHeld: _on_mean_held,
        m.Learned: _on_learned,
        m.LeaveWanted: _on_leave_wanted,
    }
    _messages: ClassVar[dict[type, Callable[..., None]]] = {
        m.Heartbeat: _on_heartbeat,
        m.Ready: _on_ready,
        m.Gather: _on_gather,
        m.Begin: _on_begin,
        m.Stalled: _on_stalled,
        m.Abort: _on_abort,
        m.Propose: _on_propose,
        m.Accept: _on_accept,
        m.Committed: _on_committed,
        m.Goodbye: _on_goodbye,
        m.Evict: _on_evict,
    }
