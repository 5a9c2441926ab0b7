"""The conduct of every simulated life by the rules of `docs/how/protocol.md`, checked at each step and message.

A broken rule does harm only when somebody dies, or is cut off, at the right moment. So each is looked at where it
applies, whether or not any harm comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.apart import SimulatedApart
from diloco.simulate.virtual.oracle.ballots import voters
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.plan import NO_CLOCK
from diloco.simulate.virtual.plans.setup import HEARTBEAT_S, STALL_S

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

SLACK_S = 0.05
MEMORY_S = 59.0
"""An earlier life of a peer is refused for at least so long after the later one was heard."""
LED = (m.Gather, m.Begin, m.Repair, m.Abort, m.Propose)
"""Messages of an attempt's coordinator, and those that it alone gets."""
ANSWERED = (m.Ready, m.Accept)
HEARD = (m.Reply.OK, m.Reply.STALE, m.Reply.UNREACHED, m.Reply.OTHER_HEAD, m.Reply.REPLAYED)
"""Replies to a sender that may speak."""


@dataclass(frozen=True, slots=True)
class Before:
    """State of a simulated peer when a message reaches it."""

    attempt: int
    lineage: str
    tokens: int
    forks: int


@dataclass(slots=True)
class Conduct:
    """Acts of one process so far, as far as rules bind it by them."""

    stands: str = ""
    """Digest of the commit at which it stands, since `stood_s`."""
    stood_s: float = 0.0
    gone: bool = False
    """It said goodbye."""
    accepted: tuple[str, int, str] = ("", -1, "")
    """The commit at which it stood, attempt and digest of its latest vote."""
    sent: dict[tuple[str, int, type, str], float] = field(default_factory=dict)
    """When it last said something: by the commit at which it stood, attempt, kind of message and receiver."""
    owes: tuple[object, float] = (None, 0.0)
    """The kind of message, with commit and attempt, that it says again until it is answered; and since when."""
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By peer: the latest life that it heard, and when."""
    lag: dict[Member, int] = field(default_factory=dict)
    """Versions that a peer was behind it by its last heartbeat."""
    joining: dict[Member, bool] = field(default_factory=dict)
    """Whether a peer asked to join in its last heartbeat."""
    proposal: tuple[int, str, float] = (-1, "", 0.0)
    """Attempt and digest of what it proposes, and since when."""
    made_of: tuple[object, dict[str, m.Ready]] = (None, {})
    """The tally of its attempt when a reduction began in it, and the promises at that time."""
    decided: Commit | None = None
    """A commit that it heard of and whose mean is still to come."""


class SimulatedConduct:
    """Checks of the conduct of all simulated lives (I1, I2, I5, I7, I8)."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world, self.apart = world, SimulatedApart(world)
        self._lives: dict[int, Conduct] = {}
        self._left: set[tuple[str, int]] = set()
        """Lives that said goodbye."""
        self._followed: set[tuple[str, int, str]] = set()
        """Peer, incarnation and a lineage that it followed."""
        self._members: set[tuple[str, int]] = set()
        """Lives that stood in a view: others may have joined and never have heard of it."""
        self._stood: dict[tuple[str, int], int] = {}
        """By life: the greatest height at which one of its processes stood."""
        self._founded: set[str] = set()
        self._proposed: set[str] = set()
        self._goes_on: dict[tuple[frozenset[str], int], str] = {}
        """By two lineages with as many tokens: the one that goes on."""
        self._clockless = any(fault.how == NO_CLOCK for fault in world.plan.faults)

    def _life(self, host: SimulatedProcess) -> Conduct:
        life = self._lives.get(host.life)
        if life is None:
            life = self._lives[host.life] = Conduct()
        return life

    @property
    def _may_lie(self) -> bool:
        """Whether there are peers in the plan that say what no honest one does, or took damage that shows as that."""
        return any(fault.kind in ("lie", "stranger", "drift") for fault in self.world.plan.faults)

    # ------------------------------------------------------------ what a peer says and does

    def on_effects(self, host: SimulatedProcess, effects: Sequence[fx.Effect]) -> None:
        """Check the effects of a step of a simulated peer, and where it stands afterwards."""
        life = self._life(host)
        for effect in effects:
            match effect:
                case fx.Send(_, m.Envelope(body=body)) if life.gone and not isinstance(body, m.Goodbye):
                    raise Violation("I1", f"{host.name} says {type(body).__name__} after its goodbye")
                case fx.Send(_, m.Envelope(body=m.Heartbeat(joining=joining), sender=me)):
                    if joining and (me.peer, me.incarnation) in self._members:
                        raise Violation("I1", f"{host.name} asks to join as a life that stood in a view")
                case fx.Send(to, envelope):
                    self._said(host, life, to, envelope)
                case fx.Close(commit):
                    self._closes(host, life, commit)
                case fx.Note(reason, _) if reason.startswith("refused, from ") and not self._may_lie:
                    raise Violation("I7", f"{host.name} takes an honest peer for a liar: {reason}")
                case fx.CatchUp(source) if source.witness:
                    raise Violation("I7", f"{host.name} asks the witness {source.peer} for commits")
        self._stands(host, life)

    def _said(self, host: SimulatedProcess, life: Conduct, to: Member, envelope: m.Envelope) -> None:
        body, view = envelope.body, envelope.head
        if isinstance(body, m.OfAttempt):
            life.sent[view, body.attempt, type(body), to.peer] = host.now
        before = self.world.invariants.commits.get(view)
        if before is not None and isinstance(body, LED + ANSWERED) and body.height == before.height:
            seat = self._seat(before, body.attempt)
            leader = envelope.sender if isinstance(body, LED) else to
            if (leader.peer, leader.incarnation) != (seat.peer, seat.incarnation):
                what = f"{type(body).__name__} of attempt {body.attempt} at height {body.height}"
                raise Violation("I1", f"{host.name}: {what} is led by {leader.peer}, and not {seat.peer}")
        match body:
            case m.Ready():
                self._promises(host, life, envelope, body)
            case m.Accept():
                self._accepts(host, life, envelope, body)
            case m.Goodbye():
                life.gone = True
                self._left.add((host.name, envelope.sender.incarnation))
            case m.Begin() if body.attempt == 0 and life.made_of[0] is not host.machine._coordinator._tally:
                self._check_group(host, body)
            case m.Propose() if body.commit.digest not in self._proposed:  # sent again, it is as old as it was
                self._proposed.add(body.commit.digest)
                self._check_newcomers(host, life, body.commit)
            case m.Committed(commit) if commit.founds:
                self._founds(host, life, commit)

    def _seat(self, before: Commit, attempt: int) -> Member:
        """The coordinator of an attempt after a commit: voters that train take turns, from the drafter of a view
        commit or else from one named by hash."""
        voting = [member for member in before.view if member.peer in voters(before)]
        trainers = [member for member in voting if not member.witness]
        drafters = [place for place, member in enumerate(trainers) if member.peer == before.drafter]
        first = drafters[0] if drafters else int(before.digest[:16], 16)
        return trainers[(first + attempt) % len(trainers)]

    # ------------------------------------------------------------ promises and votes

    def _promises(self, host: SimulatedProcess, life: Conduct, envelope: m.Envelope, ready: m.Ready) -> None:
        """A promise names the very commit that its sender accepted last, and votes that it has."""
        view, attempt, digest = life.accepted
        named = ready.accepted_attempt, ready.accepted.digest if ready.accepted is not None else ""
        known = (attempt, digest) if view == envelope.head else (-1, "")
        if named[0] < known[0] or (named[0] == known[0] and named != known) or (named[0] < 0) != (named[1] == ""):
            what = f"{named[1][:8] or 'nothing'} in attempt {named[0]}"
            raise Violation("I1", f"{host.name} promises that it accepted {what}, it was {known[1][:8]} in {known[0]}")
        if ready.accepted is not None and ready.accepted.previous != envelope.head:
            raise Violation("I1", f"{host.name} promises that it accepted {named[1][:8]}, which is of another version")
        machine, counts = host.machine, host.machine.electorate.voters()
        gone = self.world.machines.proved(host, machine.view)
        for one in machine.commit.voting if machine.commit is not None else ():
            if one.peer not in counts | gone and (one.peer, one.incarnation) not in self.world.promise.evicted:
                raise Violation("I1", f"{host.name} counts no vote of {one.peer}, which is not dead for certain")

    def _accepts(self, host: SimulatedProcess, life: Conduct, envelope: m.Envelope, accept: m.Accept) -> None:
        """Check that a voter stands at that attempt, and remembers the vote."""
        machine = host.machine
        life.accepted = envelope.head, accept.attempt, accept.commit_digest
        if machine.commit is None or machine.commit.digest != envelope.head:
            return
        attempt, commit = machine._acceptor.accepted
        if machine.attempt != accept.attempt:
            what = f"votes in attempt {accept.attempt}, and is in attempt {machine.attempt}"
            raise Violation("I1", f"{host.name} {what}")
        if commit is None or (attempt, commit.digest) != (accept.attempt, accept.commit_digest):
            raise Violation("I1", f"{host.name} votes for {accept.commit_digest[:8]}, and remembers another vote")

    def _check_tally(self, host: SimulatedProcess, life: Conduct) -> None:
        """A coordinator counts promises of its attempt, and after its `Begin` no others."""
        machine, tally = host.machine, host.machine._coordinator._tally
        if tally is None:
            return
        commit = machine.commit
        view = commit.digest if commit is not None else ""
        for peer, ready in tally.ready.items():
            if ready.key != (machine.height, tally.attempt):
                raise Violation("I1", f"{host.name} counts a promise of {peer} for {ready.key}, not for its attempt")
        if tally.begun and life.made_of[0] is not tally:
            life.made_of = tally, dict(tally.ready)
        elif tally.begun and life.made_of[1] != tally.ready:
            raise Violation("I2", f"{host.name} changes what attempt {tally.attempt} is made of after its Begin")
        if tally.proposal is None:
            return
        digest = tally.proposal.digest
        if life.proposal[:2] != (tally.attempt, digest):
            life.proposal = tally.attempt, digest, host.now
        if machine.me.peer in tally.accepts:
            life.accepted = view, tally.attempt, digest

    # ------------------------------------------------------------ the attempt, and commits

    def _check_group(self, host: SimulatedProcess, begin: m.Begin) -> None:
        """The first attempt of a version counts everybody that lives and offered, measured on the same state."""
        machine, tally = host.machine, host.machine._coordinator._tally
        most = machine.rules.policy.max_peers
        names = {entry.peer for entry in begin.contributors}
        if (
            tally is None
            or not tally.begun
            or not begin.height == machine.height == machine.since_height  # no view commit since the version before
            or (most is not None and most <= len(names))
        ):
            return
        states = {tally.ready[peer].state_digest for peer in names}
        alive = {member.peer for member in machine.alive() if not machine.roster.barred(member.peer)}
        for peer in alive & tally.offered_at_s.keys() - names:
            if tally.ready[peer].state_digest in states:
                raise Violation("I7", f"{host.name} leaves {peer} out of version {machine.making}, which offered")

    def on_commit(self, commit: Commit, before: Commit) -> None:
        """Check the view of a commit that follows another."""
        old = {(member.peer, member.incarnation) for member in before.view}
        new = {(member.peer, member.incarnation) for member in commit.view}
        for peer, incarnation in new - old:
            if not self._clockless and (peer, incarnation, commit.lineage) not in self._followed:
                raise Violation("I8", f"version {commit.version} takes {peer} in, which is in another lineage")

    def _check_newcomers(self, host: SimulatedProcess, life: Conduct, commit: Commit) -> None:
        """Joiners that a proposal takes in ask for it, answered its proposer, and are so near that commits bring them
        there. A life that was left out of a view asks no more."""
        machine = host.machine
        near = max(machine.rules.backlog_versions - 1, 0)
        known = {(member.peer, member.incarnation) for member in machine.view}
        for member in commit.view:
            if (member.peer, member.incarnation) in known:
                continue
            if not life.joining.get(member, True):
                raise Violation("I1", f"{host.name} takes {member.peer} in, which does not ask for it")
            if life.lag.get(member, 0) > near:
                raise Violation("I7", f"{host.name} takes {member.peer} in, {life.lag[member]} versions behind")
            if member.address not in host.link.answered_s:
                raise Violation("I7", f"{host.name} takes {member.peer} in, which never answered it")

    def _closes(self, host: SimulatedProcess, life: Conduct, commit: Commit) -> None:
        """Check that a version follows the commit that its closer stood at. A witness needs only the latest."""
        if life.stands and not host.witness and commit.previous != life.stands:
            raise Violation("I1", f"{host.name} closes version {commit.version}, which does not follow its own")
        if commit.founds:
            self._founds(host, life, commit)
            if commit.previous == life.stands and commit.lineage not in self.world.invariants.refounded:
                self.apart.follows(host, commit)
        life.stands, life.stood_s = commit.digest, host.now
        if host.machine.me in commit.view:
            self._members.add((host.name, host.machine.me.incarnation))

    def _founds(self, host: SimulatedProcess, life: Conduct, commit: Commit) -> None:
        """Check that a run begins with enough peers, and a lineage apart when it may."""
        if commit.digest in self._founded:
            return
        self._founded.add(commit.digest)
        invariants, rules = self.world.invariants, self.world.setup.rules
        trainers = [member for member in commit.view if not member.witness]
        if commit.previous not in invariants.commits or commit.lineage in invariants.refounded:
            if len(trainers) < rules.start_peers:
                raise Violation("I8", f"{host.name} founds with {len(trainers)} peers of {rules.start_peers}")
            return
        self.apart.founds(host, commit)

    # ------------------------------------------------------------ after each step

    def _stands(self, host: SimulatedProcess, life: Conduct) -> None:
        machine = host.machine
        commit = machine.commit
        digest = commit.digest if commit is not None else ""
        if digest != life.stands:
            life.stands, life.stood_s = digest, host.now
            if machine.in_view:
                self._members.add((host.name, machine.me.incarnation))
        one = host.name, machine.me.incarnation
        self._stood[one] = max(self._stood.get(one, -1), machine.height)
        self._followed.add((*one, machine.lineage))
        self._check_tally(host, life)

    # ------------------------------------------------------------ what a peer hears

    def before(self, host: SimulatedProcess) -> Before:
        """The state of a simulated peer that a message is about to reach."""
        machine = host.machine
        tokens = machine.commit.tokens if machine.commit is not None else -1
        return Before(machine.attempt, machine.lineage, tokens, len(machine.forks))

    def on_message(
        self,
        host: SimulatedProcess,
        envelope: m.Envelope,
        reply: m.Reply,
        effects: Sequence[fx.Effect],
        before: Before,
    ) -> None:
        """Check the answer of a simulated peer to a message."""
        life, body, machine = self._life(host), envelope.body, host.machine
        if life.gone or machine.gone:  # where nobody is left there is no goodbye
            return
        if isinstance(body, m.Evict):
            member = machine.commit.member(body.peer) if machine.commit is not None else None
            if reply is m.Reply.OK and member is not None and member.incarnation > body.incarnation:
                raise Violation("I1", f"{host.name} takes {body.peer} for dead, of which a later life is in its view")
            return
        if reply in HEARD and not isinstance(body, m.Committed):
            self._check_life(host, life, envelope.sender)
        self.apart.hears(host, envelope.sender, body, reply in (m.Reply.OK, m.Reply.STALE))
        match body:
            case m.Heartbeat() if reply in (m.Reply.OK, m.Reply.UNREACHED):
                self._check_beat(host, life, envelope.sender, body, effects)
            case m.Heartbeat() if reply is m.Reply.OTHER_LINEAGE:
                self._check_meeting(host, envelope, body, effects, before)
            case m.Stalled() if body.missing and not body.offence:
                self.world.invariants.reductions.on_stalled(host, envelope.sender.peer, body, effects)
            case m.Gather() if reply is m.Reply.OK and body.attempt < before.attempt:
                self._check_asked(host, effects)
            case m.Committed(commit) if reply is m.Reply.OK and machine.commit is not None and not host.witness:
                here = commit.previous == machine.commit.digest and commit.lineage == machine.lineage
                life.decided = commit if here else life.decided

    def _check_life(self, host: SimulatedProcess, life: Conduct, sender: Member) -> None:
        """An earlier life of a peer is refused once the next one has spoken, unless the view names it: of two that live
        at two addresses, each member goes on with the one that it heard first, and the coordinator's is named."""
        if sender.peer == host.name or self._clockless:
            return
        commit = host.machine.commit
        named = commit.member(sender.peer) if commit is not None else None
        latest, at_s = life.heard.get(sender.peer, (sender.incarnation, 0.0))
        if sender.incarnation < latest and host.now - at_s < MEMORY_S and sender != named:
            raise Violation("I1", f"{host.name} hears life {sender.incarnation} of {sender.peer} after {latest}")
        life.heard[sender.peer] = sender.incarnation, host.now

    def _check_beat(
        self, host: SimulatedProcess, life: Conduct, sender: Member, beat: m.Heartbeat, effects: Sequence[fx.Effect]
    ) -> None:
        """Check that nobody waits for a peer that hears nobody, and that one that is behind, and has answered at its
        address, gets the latest commit."""
        machine = host.machine
        life.lag[sender], life.joining[sender] = machine.version - beat.version, beat.joining
        if beat.deaf and sender in machine.alive():
            raise Violation("I7", f"{host.name} waits for {sender.peer}, which hears nobody")
        if machine.commit is None or machine.roster.awaits(sender):
            return
        late = beat.version < machine.version and host.now - life.stood_s >= HEARTBEAT_S
        if not beat.founded or beat.version < machine.version - 1 or late:
            heard = (
                isinstance(effect, fx.Send) and isinstance(effect.envelope.body, m.Committed) for effect in effects
            )
            if not any(heard):
                raise Violation("I7", f"{host.name} tells {sender.peer} at {beat.version} of no later version")

    def _check_meeting(
        self,
        host: SimulatedProcess,
        envelope: m.Envelope,
        beat: m.Heartbeat,
        effects: Sequence[fx.Effect],
        before: Before,
    ) -> None:
        """Check that of two lineages the one with more tokens goes on, of equal ones the later, for all the same."""
        left = before.lineage != envelope.lineage and any(isinstance(effect, fx.Resync) for effect in effects)
        if left and before.tokens > beat.committed_tokens:
            what = f"{before.tokens} committed tokens for one with {beat.committed_tokens}"
            raise Violation("I8", f"{host.name} leaves a lineage with {what}")
        if not left or before.tokens != beat.committed_tokens:
            return
        pair = frozenset((before.lineage, envelope.lineage)), before.tokens
        if before.forks > len(beat.forks) or self._goes_on.setdefault(pair, envelope.lineage) != envelope.lineage:
            raise Violation("I8", f"{host.name} leaves lineage {before.lineage} for {envelope.lineage}, which ends")

    def _check_asked(self, host: SimulatedProcess, effects: Sequence[fx.Effect]) -> None:
        """Check that who is asked for an earlier attempt answers a coordinator that lives, where one could."""
        alive, commit = host.machine.alive(), host.machine.commit
        seats = [one.peer for one in commit.voting if not one.witness] if commit is not None else []
        answers = [one for one in effects if isinstance(one, fx.Send) and isinstance(one.envelope.body, m.Ready)]
        for answer in answers:
            if answer.to not in alive and any(one.peer in seats for one in alive):
                raise Violation("I7", f"{host.name} promises an attempt of {answer.to.peer}, which does not live")

    # ------------------------------------------------------------ events

    def on_event(self, host: SimulatedProcess, event: m.Event) -> None:
        """Check a simulated peer after an event of its driver."""
        life = self._life(host)
        if life.gone or host.machine.commit is None:
            return
        if isinstance(event, m.Tick):
            self._check_repeats(host, life)
            self._check_complaint(host, life)
            self._check_witnesses(host)
            self._check_seat(host, life)
        elif isinstance(event, m.Unreachable):
            self.apart.loses(host, event.member)
            self._check_lost(host, event)
        elif isinstance(event, m.Reached) and host.link.answered_s.get(event.member.address) != host.world.now:
            raise Violation("I7", f"{host.name} takes {event.member.peer} for reachable, which did not answer now")
        elif isinstance(event, m.MeanHeld) and life.decided is not None:
            commit, life.decided = life.decided, life.decided if event.mean_digest != life.decided.mean_digest else None
            if life.decided is None and commit.previous == host.machine.commit.digest:
                raise Violation("I7", f"{host.name} has the mean of version {commit.version}, and does not close it")

    def _check_lost(self, host: SimulatedProcess, event: m.Unreachable) -> None:
        """A peer counts as silent as soon as it lets a call wait, or nobody takes a connection there; not before."""
        peer = event.member.peer
        if event.boot is None and host.link.silent_s.get(event.member.address) != host.world.now:
            raise Violation("I7", f"{host.name} takes {peer} for gone as one connection to it broke")
        if any(one == event.member and one.address == event.member.address for one in host.machine.alive()):
            raise Violation("I7", f"{host.name} takes {peer} for alive, where nothing can be delivered")

    def _check_complaint(self, host: SimulatedProcess, life: Conduct) -> None:
        """Check that a peer complains to the coordinator of parts that do not come."""
        machine, reduction = host.machine, host.machine._contributor.reduction
        if reduction is None or reduction.complete or machine.commit is None or not reduction.missing():
            return
        seat, attempt = reduction.leader.peer, reduction.begin.attempt
        said_s = max(
            (at_s for place, at_s in life.sent.items() if place[1:] == (attempt, m.Stalled, seat)), default=0.0
        )
        since_s = max(said_s, reduction.times.moved_at_s)
        if seat != host.name and host.now - since_s > STALL_S + SLACK_S:
            what = f"misses {', '.join(reduction.missing())} for {host.now - since_s:.1f} s"
            raise Violation("I7", f"{host.name} {what}, and does not complain to {seat}")

    def _check_seat(self, host: SimulatedProcess, life: Conduct) -> None:
        """Check that nobody who offers waits for a coordinator that has to copy the state, where another could be."""
        machine, contributor = host.machine, host.machine._contributor
        if contributor.offer is None or contributor.reduction is not None or machine.commit is None:
            return
        near = max(machine.rules.backlog_versions - 1, 0)
        seat, alive = self._seat(machine.commit, machine.attempt), machine.alive()
        beats = {one: machine.roster.heartbeat(one) for one in alive if one != machine.me}
        able = {one for one, beat in beats.items() if life.lag.get(one, 0) <= near and not (beat and beat.abstains)}
        able |= {machine.me} if not machine.abstains else set()
        others = any(one in able and not one.witness for one in machine.commit.voting)
        if others and seat in alive and life.lag.get(seat, 0) > near:
            raise Violation("I7", f"{host.name} waits for {seat.peer}, which has to copy the state first")

    def _check_witnesses(self, host: SimulatedProcess) -> None:
        """Check that a coordinator asks witnesses as soon as all other trainers that live have accepted."""
        machine, tally = host.machine, host.machine._coordinator._tally
        if tally is None or tally.proposal is None or not tally.proposal.moves or tally.witnesses_asked:
            return
        others = [member for member in machine.alive() if member != machine.me]
        waits = any(not one.witness and one.peer not in tally.accepts for one in others)
        if not waits and any(one.witness for one in others):
            raise Violation("I7", f"{host.name} asks no witness, and all other trainers have accepted")

    def _check_repeats(self, host: SimulatedProcess, life: Conduct) -> None:
        """Check that messages without an answer are said again, and that a proposal that nobody accepts is given up:
        later where bytes move on a slow link."""
        machine, tally = host.machine, host.machine._coordinator._tally
        attempt, contributor = machine.attempt, machine._contributor
        owed: list[tuple[type, Member]] = []
        lead = machine._coordinator._lead
        if tally is not None and tally.proposal is not None:
            owed = [(m.Propose, one) for one in tally.audience if one.peer not in tally.accepts]
        elif lead is not None and contributor.reduction is not None and lead.begin.key == contributor.reduction.key:
            owed, attempt = [(m.Begin, one) for one in lead.begin.receivers], lead.begin.attempt
        elif tally is not None and not tally.begun:
            owed = [(m.Gather, one) for one in machine.view if attempt and one.peer not in tally.ready]
        elif machine._acceptor.abstains or machine._acceptor._then:
            pass  # its disk is to say first that it took the promise
        elif machine.height < machine._acceptor._from_height <= self._stood[host.name, machine.me.incarnation]:
            pass  # it stood on a later head before a restart, and its disk tells no more what it promised here
        elif contributor.offer is not None and contributor.reduction is None and machine.commit and machine.in_view:
            owed = [(m.Ready, self._seat(machine.commit, attempt))]
        what = life.stands, attempt, owed[0][0] if owed else None
        if life.owes[0] != what:
            life.owes = what, host.now
        for kind, one in owed:
            said_s = life.sent.get((life.stands, attempt, kind, one.peer), 0.0)
            here = machine.roster.get(one) is not None  # and has not gone on as another life
            if here and host.now - max(said_s, life.owes[1]) > HEARTBEAT_S + SLACK_S:
                raise Violation("I7", f"{host.name} does not say {kind.__name__} again to {one.peer}")
        asks = tally is not None and tally.proposal is not None and not self.world.network.uplinks.limited
        moved_s = contributor.reduction.times.moved_at_s if contributor.reduction is not None else 0.0
        # Bytes of a next life may have moved for half of it, and just now, when this peer's clock jumped.
        if asks and host.now - max(life.proposal[2], moved_s) > 6 * STALL_S:
            raise Violation("I7", f"{host.name} does not give up a proposal that nobody accepts")
