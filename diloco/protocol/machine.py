"""One peer's side of the round protocol, without I/O: events and the time go in, effects come out.

A version is made in *attempts*. Each attempt has a coordinator (`vote.seat`); members that finished their
inner steps send it `Ready`; it sends `Begin` to a group; the group reduces in a butterfly; the coordinator proposes a
`Commit` that names the mean by its digest; members that hold this mean `Accept`; with a majority of the voters that the
commit before names it holds (`Committed`). That is single-decree Paxos for each commit: the attempt is the ballot,
`Ready` is the promise and carries what its sender accepted before, `Accept` is the vote, and a later coordinator that
finds an accepted commit among a majority's promises proposes that one again.

A peer that dies or stalls in the reduction is repaired around (`Repair`): its parts get new owners, and each part
lists the contributors that it omits. When the coordinator itself is gone, or somebody sent nonsense, the next attempt
begins. Every wait is bounded by `Timing`. Nothing here blocks training: a peer that cannot commit gives up the round
and keeps its progress. `docs/how/protocol.md` has the picture and the argument why this is safe.

The machine is seven roles and a router. A role owns its state: nobody else assigns it. It asks others by named queries,
has another go on by a call, and several at once by `Post`, which leads to the sequences at the end of this file.

    membership     who this peer is, who lives, who may speak, whose votes count
    chain          the latest commit, the state held, commits that are missing
    lineage        the founding of a run or of a part of it, and which of two parts goes on
    acceptor       promises and votes
    coordinator    the attempt that this peer leads
    drafter        the content of the next commit
    contributor    offer, reduction, means that are here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.base.types import Commit, Member, Progress
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.acceptor import Acceptor
from diloco.protocol.chain import Chain
from diloco.protocol.contributor import Contributor
from diloco.protocol.coordinator import Coordinator
from diloco.protocol.draft import Drafter
from diloco.protocol.greetings import Greeting, Invite
from diloco.protocol.lineage import Lineage
from diloco.protocol.membership import Membership
from diloco.protocol.post import Post
from diloco.protocol.roster import Roster
from diloco.protocol.view import Electorate, Rules, Timing
from diloco.protocol.vote import Restored

VOTING = (m.Ready, m.Gather, m.Propose, m.Accept)
"""Messages of the vote on the successor of one head. Others of an attempt are of the reduction that began in it."""


class Machine:
    """The protocol's state machine. `receive` and `handle` are its inputs; properties may be read any time."""

    def __init__(
        self,
        me: Member,
        rules: Rules,
        timing: Timing,
        lineage: str,
        founder: bool,
        now: float,
        forks: tuple[m.Fork, ...] = (),
        boot: int = 0,
        restored: Restored | None = None,
    ) -> None:
        """`lineage` and the `forks` that led to it: the founder's own, or those of the member that welcomed us. `boot`:
        this process. `restored`: what the disk holds of our life, if it goes on."""
        self.rules, self.timing = rules, timing
        self._post = post = Post(rules, now, boot, restored.saved if restored is not None else 0)
        self._membership = membership = Membership(me, founder, restored is not None, rules, timing, post)
        self._chain = chain = Chain(rules, timing, post)
        self._lineage = lineages = Lineage(lineage, forks, rules, timing, post)
        self._acceptor = acceptor = Acceptor(rules, timing, post, restored)
        self._contributor = contributor = Contributor(rules, timing, post)
        self._coordinator = coordinator = Coordinator(rules, timing, post)
        self._drafter = Drafter(rules)
        self._introduce()
        self._messages: Mapping[type, tuple[Callable[[Member, Any], None], ...]] = {
            m.Heartbeat: (membership.on_heartbeat, lineages.on_heartbeat, chain.on_heartbeat),
            m.Ready: (coordinator.on_ready,),
            m.Gather: (acceptor.on_gather,),
            m.Begin: (contributor.on_begin,),
            m.Stalled: (coordinator.on_stalled,),
            m.Repair: (contributor.on_repair,),
            m.Abort: (coordinator.on_abort,),
            m.Propose: (acceptor.on_propose,),
            m.Accept: (coordinator.on_accept,),
            m.Committed: (chain.on_committed,),
            m.Goodbye: (membership.on_goodbye, lambda sender, body: coordinator.coordinate()),
        }
        """Handlers of each kind of message, in order."""
        self._events: Mapping[type, Callable[[Any], object]] = {
            m.Tick: self._on_tick,
            m.Unreachable: membership.on_unreachable,
            m.Reached: membership.on_reached,
            m.StateHeld: self._on_state_held,
            m.Outdated: membership.on_outdated,
            m.Offered: contributor.on_offered,
            m.Withdrawn: contributor.on_withdrawn,
            m.ContributionArrived: contributor.on_contribution,
            m.ContributionRefused: contributor.on_refused,
            m.PartFolded: contributor.on_folded,
            m.MeanArrived: contributor.on_mean,
            m.MeanHeld: self._on_mean_held,
            m.Learned: chain.on_learned,
            m.Saved: acceptor.on_saved,
            m.LeaveWanted: membership.on_leave_wanted,
        }
        """Handler of each kind of event."""

    def _introduce(self) -> None:
        """Give each role the others that it asks."""
        roles = {
            "acceptor": self._acceptor,
            "chain": self._chain,
            "contributor": self._contributor,
            "coordinator": self._coordinator,
            "drafter": self._drafter,
            "lineage": self._lineage,
            "membership": self._membership,
        }
        for role in (self._post, *roles.values()):
            for name in role.__annotations__.keys() & roles.keys():
                setattr(role, name, roles[name])
        post = self._post
        post.deliver, post.next_attempt = self._deliver_here, self._next_attempt
        post.adopt, post.leave_lineage = self._adopt, self._leave_lineage

    # ------------------------------------------------------------ what goes in

    def handle(self, event: m.Event, now: float) -> list[fx.Effect]:
        """Take an event into the state machine at local time `now` (seconds, monotonic); return effects in order."""
        self._post.begin(now)
        if not self._membership.gone:
            self._events[type(event)](event)
        return self._post.effects

    def receive(self, envelope: m.Envelope, now: float) -> tuple[m.Reply, list[fx.Effect]]:
        """Take another peer's message into the state machine; return the protocol's reply and effects, in order."""
        self._post.begin(now)
        return self._receive(envelope), self._post.effects

    def admits(self, run: str, contract: str, lineage: str, sender: Member, now: float) -> m.Reply:
        """The protocol's reply to a peer that wants to stream parts now. OK: the roster notes a sign of life."""
        self._post.begin(now)
        reply = self._membership.may_speak(run, contract, lineage, sender)
        if reply is m.Reply.OK:
            self._membership.heard(sender)
        return reply

    def _receive(self, envelope: m.Envelope) -> m.Reply:
        """Check a message against roster, lineage and view: refuse it, or give it to its protocol handler."""
        sender, body, membership, chain = envelope.sender, envelope.body, self._membership, self._chain
        if membership.gone:
            return m.Reply.STALE
        if isinstance(body, Greeting | Invite):
            return m.Reply.MALFORMED  # it is of another policy
        if isinstance(body, m.Evict):
            return membership.evict(envelope, body)
        reply = membership.may_speak(envelope.run, envelope.contract, envelope.lineage, sender)
        if reply is m.Reply.OK:
            reply = membership.boots(envelope)
        if reply is m.Reply.FENCED and membership.roster.is_old_copy(envelope):
            reply = m.Reply.OLD_COPY
        if reply is m.Reply.OTHER_LINEAGE and not chain.leads_here(body):
            self._lineage.meet(envelope)
            return reply
        decided = reply is m.Reply.BARRED and isinstance(body, m.Committed)  # a commit holds, whoever sends it
        if reply not in (m.Reply.OK, m.Reply.OTHER_LINEAGE) and not decided:
            return reply
        if membership.replayed(envelope):
            return m.Reply.REPLAYED
        if reply is m.Reply.OK:
            membership.taken(envelope)
            if isinstance(body, m.Heartbeat):
                chain.compare(sender, body, envelope.head)
        reply = m.Reply.OK
        if isinstance(body, m.OfAttempt) and body.attempt > self._acceptor.attempt + m.MAX_ATTEMPTS_AHEAD:
            return m.Reply.MALFORMED
        if isinstance(body, VOTING):
            if body.height == chain.height and chain.commit is not None and envelope.head != chain.commit.digest:
                return m.Reply.OTHER_HEAD
            if body.height < chain.height:
                reply = m.Reply.STALE
        elif isinstance(body, m.OfAttempt) and body.height < chain.since_height:
            reply = m.Reply.STALE
        self._deliver(sender, body)
        return m.Reply.UNREACHED if membership.turns_away(sender, body) else reply

    def _deliver(self, sender: Member, body: m.Body) -> None:
        for handler in self._messages[type(body)]:
            handler(sender, body)

    def _deliver_here(self, body: m.Body) -> None:
        self._deliver(self._membership.me, body)

    # ------------------------------------------------------------ what others may ask

    @property
    def me(self) -> Member:
        """This life of this peer."""
        return self._membership.me

    @property
    def founder(self) -> bool:
        """Whether this life founds the run, or its lineage."""
        return self._membership.founder

    @property
    def progress(self) -> Progress:
        """Progress that heartbeats carry."""
        return self._membership.progress

    @property
    def roster(self) -> Roster:
        """All peers heard of."""
        return self._membership.roster

    @property
    def electorate(self) -> Electorate:
        """The voters on the next version."""
        return self._membership.electorate

    @property
    def commit(self) -> Commit | None:
        """The latest commit known; None before the founding."""
        return self._chain.commit

    @property
    def version(self) -> int:
        """Version of the latest commit known; before the founding of the lineage, that of the state it holds."""
        return self._chain.version

    @property
    def height(self) -> int:
        """Height of the latest commit known; -1: none is."""
        return self._chain.height

    @property
    def since_height(self) -> int:
        """Height of the first commit of this version that this peer knows: reductions of it began since then."""
        return self._chain.since_height

    @property
    def making(self) -> int:
        """The version for which attempts are made and votes are taken: the next after the latest commit."""
        return self._chain.making

    @property
    def fragment(self) -> int:
        """The fragment that the next commit moves; fragments take turns by version."""
        return self._chain.fragment

    @property
    def view(self) -> tuple[Member, ...]:
        """The view: members that the latest commit names, in order of admission."""
        return self._chain.view

    @property
    def in_view(self) -> bool:
        """Whether this life of this peer is a member."""
        return self._membership.in_view

    @property
    def abstains(self) -> bool:
        """Whether the disk refuses what binds this voter."""
        return self._acceptor.abstains

    @property
    def gone(self) -> bool:
        """Whether this peer has said goodbye."""
        return self._membership.gone

    @property
    def lineage(self) -> str:
        """Name of the lineage that this peer follows."""
        return self._lineage.name

    @property
    def forks(self) -> tuple[m.Fork, ...]:
        """Lineages that led to ours."""
        return self._lineage.forks

    @property
    def alone(self) -> bool:
        """Whether most voters of the view cannot be reached: it may go on elsewhere, so others are to be asked."""
        return self._lineage.alone

    @property
    def attempt(self) -> int:
        """The latest attempt known at the version being made."""
        return self._acceptor.attempt

    @property
    def attempts(self) -> int:
        """Attempts it took to make the latest version, as far as this peer knows."""
        return self._chain.attempts

    @property
    def sync_s(self) -> float:
        """Seconds to make a version, from `Begin` to the commit: the longest of late, forgotten slowly."""
        return self._chain.sync_s

    @property
    def reason(self) -> str:
        """The reason of the latest decision."""
        return self._post.reason

    @property
    def mean_lost_with(self) -> tuple[str, ...]:
        """Trainers that do not live and may have the mean of a version that was accepted, which no live one has."""
        return self._coordinator.mean_lost_with

    @property
    def reducing(self) -> tuple[int, int, int] | None:
        """(height, attempt, generation) of the reduction that the state machine has under way."""
        reduction = self._contributor.reduction
        return (*reduction.key, reduction.generation) if reduction else None

    @property
    def names(self) -> int:
        """Number of peers whose protocol messages are remembered, so that none is taken twice."""
        return len(self._membership.admission)

    @property
    def conflict(self) -> str:
        """Another history that was heard of, in words; empty: none was."""
        return self._chain.conflict[1] if self._chain.conflict is not None else ""

    @property
    def boot(self) -> int:
        """This process."""
        return self._post.boot

    def boot_of(self, member: Member) -> int:
        """The latest process of this life that was heard; 0: none was."""
        return self._membership.boot_of(member)

    @property
    def votes_needed(self) -> int:
        """Number of votes that decide the next commit."""
        return self._membership.votes_needed()

    def alive(self) -> list[Member]:
        """Members of the view that the roster does not suspect."""
        return self._membership.alive()

    def others(self) -> list[Member]:
        """Members of the view that the roster does not suspect, without this peer."""
        return [member for member in self.alive() if member != self.me]

    def settled(self) -> bool:
        """Whether every live member of the view has reported this version in a heartbeat."""
        return self._membership.settled()

    def awaited(self) -> bool:
        """Whether heartbeats show most other live trainers of the view at this version, their inner steps done."""
        return self._membership.awaited()

    def fastest(self) -> float:
        """The largest pace in heartbeats of other live trainers of the view, tokens per second; 0 while unknown."""
        return self._membership.fastest()

    # ------------------------------------------------------------ what the driver tells

    def report(self, progress: Progress) -> None:
        """Set the progress that heartbeats carry."""
        self._membership.report(progress)

    def listen_at(self, address: str) -> None:
        """Tell others from now on that this peer listens at that address."""
        self._membership.listen_at(address)

    def comes_after(self, forks: tuple[m.Fork, ...]) -> None:
        """Begin in a lineage to which these led: that of the state on which it is founded is the last."""
        self._lineage.comes_after(forks)

    def remember(self, members: Sequence[Member], now: float) -> None:
        """Call these members, also while they are silent: they may be in a lineage apart."""
        self._post.begin(now)
        self._membership.meet(members)
        self._membership.part_with([member.peer for member in members])

    # ------------------------------------------------------------ sequences of several roles

    def _on_tick(self, event: m.Tick) -> None:
        self._contributor.on_tick(event)
        self._membership.beat()
        self._lineage.found_if_complete()
        if self._chain.commit is None:
            return
        self._contributor.check()
        self._acceptor.save_again()
        self._acceptor.follow_coordinator()
        self._coordinator.coordinate()
        self._lineage.check_majority()
        self._coordinator.resend()
        self._membership.go_when_free()

    def _on_state_held(self, event: m.StateHeld) -> None:
        chain, commit = self._chain, event.commit
        chain.hold(event)
        refounding = self._membership.founder and chain.commit is None  # a new view takes over from this commit
        news = commit != chain.commit  # else what was promised for the next version holds
        if commit is not None and news and not refounding and commit.height >= chain.height:
            self._adopt(commit)
        self._lineage.found_if_complete()

    def _on_mean_held(self, event: m.MeanHeld) -> None:
        if self._contributor.on_mean_held(event):
            self._coordinator.coordinate()
        decided = self._chain.has_decided(event.mean_digest)
        if decided is not None:
            self._chain.decide(decided, self._membership.me)
        elif self._coordinator.proposes:
            self._coordinator.count()
        else:
            self._acceptor.look_again()

    def _next_attempt(self, attempt: int, reason: str) -> None:
        self._post.note(reason)
        self._acceptor.enter(attempt)
        self._contributor.drop()
        leads = self._acceptor.seat(attempt) == self._membership.me and self._membership.in_view
        self._coordinator.enter(reason)
        if not leads and self._contributor.offer is not None:
            self._acceptor.answer()

    def _adopt(self, commit: Commit) -> None:
        chain, before = self._chain, self._chain.view
        if chain.commit is not None and commit.lineage != self._lineage.name:
            self._membership.part_with([member.peer for member in before if member not in commit.view])
        stood = chain.commit
        goes_on = stood is not None and not commit.founds and commit.version == stood.version
        self._lineage.adopt(commit)
        chain.adopt(commit, self._acceptor.attempt + 1)
        self._acceptor.stand(commit, stood)
        if goes_on:  # a view commit: the version is still being made
            self._coordinator.forget()
        else:
            self._contributor.adopt(commit.version)
            self._coordinator.forget_version()
        self._membership.stand(before)
        self._coordinator.enter("")
        if goes_on and self._contributor.offer is not None and self._membership.in_view:
            self._acceptor.answer()  # who leads now may have to begin anew

    def _leave_lineage(self, name: str, forks: tuple[m.Fork, ...], history: tuple[m.Fork, ...]) -> None:
        if self._contributor.offer is not None:
            self._contributor.give_up("our lineage ends here")
        self._contributor.forget()  # but not that we are exposed: that lineage may go on, with what we sent counted
        self._acceptor.forget()
        self._coordinator.forget_version()
        self._chain.leave_lineage()
        self._membership.leave_lineage()
        self._lineage.follow(name, forks, history)
