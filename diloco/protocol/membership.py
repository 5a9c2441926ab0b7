"""Members and voters as one peer knows them: who it is itself, who lives, who may speak, whose votes count."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Member, Phase, Progress
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.post import Post
from diloco.protocol.roster import Admission, Roster
from diloco.protocol.view import Electorate, Rules, Timing
from diloco.protocol.vote import may_go

if TYPE_CHECKING:
    from diloco.protocol.acceptor import Acceptor
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.coordinator import Coordinator
    from diloco.protocol.lineage import Lineage


class Membership:
    """The member's role in the protocol: one life of each name speaks, and each vote counts once."""

    acceptor: Acceptor
    chain: Chain
    contributor: Contributor
    coordinator: Coordinator
    lineage: Lineage

    def __init__(self, me: Member, founder: bool, restored: bool, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.me = me
        self.founder = founder
        self.joining = not (founder or restored)
        self.progress = Progress()
        self.roster = Roster(me, timing.suspect_s, rules.offences_allowed)
        self.electorate = Electorate()
        self.leaving = False
        """Our latest offer is our last."""
        self.wants_out = False
        """We have nothing more to do here: we vote and serve until most can do without us."""
        self.gone = False
        """We said goodbye."""
        self.admission = Admission(rules.run, rules.contract)
        self._left_at: int | None = None
        """Height of the first commit that leaves us out, as we want to be."""
        self._heartbeat_at = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def in_view(self) -> bool:
        """Whether this life of this peer is a member."""
        return self.me in self.chain.view

    def alive(self) -> list[Member]:
        """Members of the view that the roster does not suspect, each with the address that it gave last."""
        roster, now = self.roster, self._post.now
        return [roster.latest(member) for member in self.chain.view if roster.alive(member, now)]

    def lives(self, member: Member) -> bool:
        """Whether the roster does not suspect this member."""
        return self.roster.alive(member, self._post.now)

    def boot_of(self, member: Member) -> int:
        """The latest process of this life that was heard; 0: none was."""
        return self._post.boot if member == self.me else self.roster.boot_of(member)

    def votes_needed(self) -> int:
        """Number of votes that decide, of the processes of voters that were heard."""
        return self.electorate.needed(self._boots())

    def is_lost(self) -> bool:
        """Whether an operator evicted so many that the others can decide nothing (`Electorate.is_lost`), and all these
        are within reach: they go on together, and two that do not hear each other would go on apart."""
        away = self.electorate.missing({member.peer for member in self.alive()})
        return self.electorate.is_lost(self._boots()) and not away

    def _boots(self) -> dict[str, int]:
        return {voter.peer: boot for voter in self._voting() if (boot := self.boot_of(voter))}

    def is_dead(self, voter: Member) -> bool:
        """Whether the latest process of this voter that was heard is over for certain."""
        known = self.boot_of(voter)
        return any(peer == voter.peer and boot >= known for peer, boot in self.electorate.dead)

    def leads(self, member: Member) -> bool:
        """Whether this member lives, and can coordinate: its disk takes votes, and commits bring it to our version. One
        that has to copy the state first may take long for that."""
        if member == self.me:
            return not self.acceptor.abstains
        entry = self.roster.get(member)
        far = entry is not None and entry.lag > self._near
        return self.lives(member) and not far and not self.abstains(member)

    def abstains(self, member: Member) -> bool:
        """Whether this other member says that its disk refuses its vote: nobody waits for that."""
        beat = self.roster.heartbeat(member)
        return beat is not None and beat.abstains

    def trainers_alive(self) -> list[Member]:
        """Live members of the view that receive the mean and vote on it first: all but witnesses."""
        return [member for member in self.alive() if not member.witness]

    def is_member(self, member: Member) -> bool:
        """Whether this very life of a peer is in the view."""
        commit = self.chain.commit
        found = commit.member(member.peer) if commit else None
        return found is not None and found.incarnation == member.incarnation

    def may_call(self, member: Member) -> bool:
        """Whether calls may go to a member's address: the view has it, or the roster more than the member's word."""
        return self.roster.is_located(member) or any(
            (one, one.address) == (member, member.address) for one in self.chain.view
        )

    def expected(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Those of these that calls may go to: members, wherever another found them, and who is known here."""
        return tuple(one for one in members if one == self.me or self.is_member(one) or self.may_call(one))

    def newcomers(self) -> list[Member]:
        """Joiners on the roster for the next view: at this version, or so near that commits bring them there."""
        known = {member.peer for member in self.alive()}
        return [member for member in self.roster.at_the_door(self._near, self._post.now) if member.peer not in known]

    @property
    def _near(self) -> int:
        """Versions behind ours from which commits bring a peer here."""
        return max(self._rules.backlog_versions - 1, 0)

    def learners(self) -> list[Member]:
        """Joiners that a view commit may take in: those of whose name there is neither a member nor a lease, else two
        lives of a peer might train on the same data."""
        commit = self.chain.commit
        taken = {member.peer for member in self.chain.view} | (
            commit.leases.held.keys() if commit is not None else set()
        )
        return [member for member in self.newcomers() if member.peer not in taken]

    def leavers(self) -> set[str]:
        """Members that want to be left out, or have gone. Of the voters that train and live, one stays as long as no
        other member can vote in its place: it goes when it is alone."""
        going = {member.peer for member in self.chain.view if self._wants_out(member)}
        return going if self._voter_stays(going) or self.successors(going) else going - {self.me.peer}

    def successors(self, leaving: Collection[str]) -> list[Member]:
        """Learners that train, and vote from now on where no voter does that trains and lives; else none."""
        if self._voter_stays(leaving):
            return []
        voting = self._voting()
        stay = [one for one in self.trainers_alive() if one not in voting and one.peer not in leaving]
        return [one for one in stay if self.is_reached(one)]

    def _voter_stays(self, leaving: Collection[str]) -> bool:
        return any(not one.witness and one.peer not in leaving and self.lives(one) for one in self._voting())

    def _voting(self) -> tuple[Member, ...]:
        return self.chain.commit.voting if self.chain.commit is not None else ()

    def _wants_out(self, member: Member) -> bool:
        if member == self.me:
            return self.wants_out
        entry = self.roster.get(member)
        return entry is not None and (entry.left or (entry.heartbeat is not None and entry.heartbeat.leaving))

    def changes(self) -> bool:
        """Whether members wait to be let in or out."""
        return bool(self.leavers() or self.learners())

    def is_here(self, member: Member) -> bool:
        """Whether this life of a peer says that it stands on our version."""
        beat = self.roster.heartbeat(member)
        return member == self.me or (beat is not None and beat.stands >= self.chain.since_height)

    def is_reached(self, learner: Member) -> bool:
        """Whether a learner stands on our version, and most voters say that they reach it."""
        voting = self._voting()
        beats = self._heartbeats(voting)
        reached = sum(beat is not None and learner.peer in beat.reaches for beat in beats)
        reached += self.me in voting and learner.peer in self._reaches()
        return self.is_here(learner) and 2 * reached > len(voting)

    def _reaches(self) -> tuple[str, ...]:
        """Learners of the view that answered us."""
        voting = self._voting()
        entries = {one.peer: self.roster.get(one) for one in self.alive() if one not in voting}
        return tuple(peer for peer, entry in entries.items() if entry is not None and entry.answered)

    def no_majority(self) -> str:
        """The reason why no commit can get its votes, or nobody proposes one; empty while enough voters of the view can
        be reached, and one of them trains."""
        alive = {member.peer: self.boot_of(member) for member in self.alive()}
        if self.electorate.suffice(alive):
            return "" if self.electorate.seats(alive) else "no voter that trains can be reached, to coordinate"
        reachable, needed = self.electorate.reachable(alive), self.votes_needed()
        return f"{reachable} of {len(self.electorate.voters())} voters can be reached, a commit takes {needed}"

    def settled(self) -> bool:
        """Whether every live member of the view has reported this version in a heartbeat; where none of them lives but
        this one, whether any peer has that stays."""
        beats = self._heartbeats(self.alive())
        if beats:
            return all(beat is not None and beat.version >= self.chain.version for beat in beats)
        return self.roster.holds(self.chain.version)

    def awaited(self) -> bool:
        """Whether heartbeats show most other live trainers of the view at this version, their inner steps done."""
        beats = self._heartbeats(self.trainers_alive())
        reported = [beat.progress for beat in beats if beat is not None]
        version = self.chain.version
        ready = sum(progress.phase == Phase.SYNCING and progress.version == version for progress in reported)
        return 2 * ready > len(beats)

    def fastest(self) -> float:
        """The largest pace in heartbeats of other live trainers of the view, tokens per second; 0 while unknown."""
        beats = self._heartbeats(self.trainers_alive())
        return max((beat.progress.pace for beat in beats if beat is not None), default=0.0)

    def _heartbeats(self, members: Sequence[Member]) -> list[m.Heartbeat | None]:
        """The roster's last heartbeat of each of these members but this one; None where there was none yet."""
        return [self.roster.heartbeat(member) for member in members if member != self.me]

    def may_speak(self, run: str, contract: str, lineage: str, sender: Member) -> m.Reply:
        """OK if run, lineage and roster let this sender speak, else the protocol's reason for the refusal."""
        if sender == self.me:  # our own words come by no link, and what they say is not checked again
            return m.Reply.MALFORMED
        reply = self.admission.same_training(run, contract)
        if reply is not m.Reply.OK:
            return reply
        if lineage != self.lineage.name:
            return m.Reply.OTHER_LINEAGE
        if self.roster.barred(sender.peer) and not self.is_member(sender):
            return m.Reply.BARRED
        return m.Reply.OK if self.roster.may_speak(sender, self._post.now) else m.Reply.FENCED

    def boots(self, envelope: m.Envelope) -> m.Reply:
        """Whether the sender is the latest process of its life (`Roster.boots`)."""
        return self.roster.boots(envelope)

    def replayed(self, envelope: m.Envelope) -> bool:
        """Whether this message was taken before; from now on it was."""
        return self.admission.replayed(envelope, self._post.now)

    # ------------------------------------------------------------ heartbeats

    def beat(self) -> None:
        """Send heartbeats, if they are due, to all on the roster, and to voters whose place on it a later life has:
        that they are dead can still be proven."""
        if self._post.now < self._heartbeat_at:
            return
        self._heartbeat_at = self._post.now + self._timing.heartbeat_s
        chain, now = self.chain, self._post.now
        tokens = chain.commit.tokens if chain.commit else 0
        stands = chain.standing.height if chain.standing is not None else -1
        deaf = self.roster.deaf(now)
        forks, moved_bytes = self.lineage.forks, self.contributor.moved_bytes
        beat = m.Heartbeat(
            chain.version, chain.height, self.joining, self.progress, tokens, forks, deaf, moved_bytes,
            self.wants_out, self._reaches(), stands, self.acceptor.abstains,
        )  # fmt: skip
        self.roster.forget({member.peer for member in chain.view}, now)
        self.admission.forget({entry.member.peer for entry in self.roster})
        known = [entry.member for entry in self.roster if not entry.left]
        voters = self.electorate.names() - {self.me.peer}
        replaced = [one for one in chain.view if one.peer in voters and self.roster.has_later(one)]
        for member in (*known, *replaced, *self.roster.strangers(now)):
            self._post.send(member, beat)

    def beat_now(self) -> None:
        """Have the next heartbeats come at once: a peer that is done waits to see that others stand on a commit."""
        self._heartbeat_at = self._post.now

    def heard(self, sender: Member) -> None:
        """Note a sign of life of a peer that may speak."""
        self.roster.heard(sender, self._post.now)

    def taken(self, envelope: m.Envelope) -> None:
        """Note a message of a peer that may speak, and the process that it is of."""
        self.heard(envelope.sender)
        self.roster.runs(envelope, self.electorate.has_evicted(envelope.sender))

    def on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        """Note a peer's heartbeat on the roster."""
        self.roster.heard(sender, self._post.now, body, self.chain.version)

    def on_unreachable(self, event: m.Unreachable) -> None:
        """Note that nothing can be delivered to a peer, and that its vote is lost where its death is proven."""
        moved = self.roster.latest(event.member).address != event.member.address  # nobody is there any more
        if not (moved or self.roster.has_later(event.member)):
            self.roster.unreachable(event.member)
        if event.boot is not None:
            self.electorate.died(event.member, event.boot)

    def on_outdated(self, _: m.Outdated) -> None:
        """Go on as another life: what bound this one is not all on our disk."""
        if not self.joining:
            self._new_incarnation()
            self.coordinator.forget_version()
            self.contributor.drop()
            reason = "our disk is an old copy: going on as another life, which asks to be taken in"
            if self.contributor.offer is not None:
                self.contributor.give_up(reason)
            self._post.note(reason)

    def on_reached(self, event: m.Reached) -> None:
        """Note that a peer answered."""
        self.roster.answered(event.member)

    def turns_away(self, joiner: Member, body: m.Body) -> bool:
        """Whether a heartbeat is of a joiner that nobody reaches: it is told, and so are people here, once."""
        joins = isinstance(body, m.Heartbeat) and body.joining
        if not joins or not self.roster.is_unreached(joiner, self._post.now):
            return False
        if self.roster.turns_away(joiner, self._post.now):
            self._post.emit(fx.Note(f"nobody reaches {joiner.address}, so that {joiner.peer} cannot join", False))
        return True

    # ------------------------------------------------------------ leaving

    def offers(self, offer: m.Offer) -> None:
        """This peer offers a contribution, which may be its last."""
        self.leaving = offer.leaving

    def on_leave_wanted(self, event: m.LeaveWanted) -> None:
        """Ask the members to leave this peer out; or go `now`, a silent voter."""
        self.wants_out = True
        if event.now:
            self._go()
        else:
            self._heartbeat_at = self._post.now
            self.go_when_free()

    def go_when_free(self) -> None:
        """A peer that wants out goes once most voters of a commit without it say that they stand on one, or have left
        (rule 9). That it was decided is not enough: perhaps by this peer's own vote, and it alone knows."""
        commit = self.chain.commit
        if self.gone or not self.wants_out:
            return
        if self.in_view:
            free = not any(member != self.me for member in self.alive())
        elif commit is None or self._left_at is None:
            free = True
        else:
            left_at, names = self._left_at, [member.peer for member in commit.voting]
            entries = [entry for member in commit.voting if (entry := self.roster.get(member)) is not None]
            standing = [one for one in entries if one.left or (one.heartbeat and one.heartbeat.stands >= left_at)]
            free = may_go([entry.member.peer for entry in standing], names)
        if free:
            self._go()

    def _go(self) -> None:
        self._post.send_all([entry.member for entry in self.roster if not entry.left], m.Goodbye())
        self.gone = True

    def on_goodbye(self, sender: Member, body: m.Goodbye) -> None:
        """Note on the roster that a peer has left."""
        self.roster.left(sender)
        self._post.note(f"{sender.peer} left")

    # ------------------------------------------------------------ who is out

    def evict(self, envelope: m.Envelope, body: m.Evict) -> m.Reply:
        """An operator's `Evict`: the electorate drops the vote of a life of a peer, in one lineage."""
        reply = self.admission.same_training(envelope.run, envelope.contract)
        if reply is not m.Reply.OK:
            return reply
        if envelope.lineage != self.lineage.name:
            return m.Reply.OTHER_LINEAGE
        member = self.chain.commit.member(body.peer) if self.chain.commit else None
        if member is not None and member.incarnation > body.incarnation:
            return m.Reply.STALE
        self.electorate.evict(body.peer, body.incarnation)
        self.chain.decide_for_us(body.peer)
        self.roster.left(Member(body.peer, body.incarnation, address=""))  # a later life may be at the door
        self._post.note(f"an operator declared {body.peer} dead")
        return m.Reply.OK

    def offended(self, peers: Sequence[str]) -> None:
        """Count on the roster that these peers sent what no honest peer sends."""
        for peer in peers:
            self.roster.offended(peer)

    def lied(self, sender: Member, lie: str) -> None:
        """A peer says what no honest peer says: note that, and count it as an offence."""
        self._post.note(f"refused, from {sender.peer}: {lie}")
        self.offended((sender.peer,))

    # ------------------------------------------------------------ another view, or lineage

    def part_with(self, peers: Collection[str]) -> None:
        """These members are in another lineage from now on."""
        self.roster.part_with(peers)

    def meet(self, members: Sequence[Member]) -> None:
        """Note on the roster members that this peer has not heard of: they hear of it from now on."""
        self.roster.meet(members, self._post.now)

    def introduce(self, stranger: Member) -> None:
        """A peer of another lineage hears of us from now on."""
        self.roster.introduce(stranger, self._post.now)

    def stand(self, before: Sequence[Member]) -> None:
        """A new commit names members and voters: this peer is among them, or asks to be taken in again."""
        chain, going = self.chain, self.leaving or self.wants_out
        self.electorate.stand(chain.commit)
        self.roster.meet(chain.view, self._post.now, before)
        if self.in_view:
            self._left_at = None
        elif going and self.me in before:
            self._left_at = chain.height
        elif not (self.joining or going or self.acceptor.stood_further):
            # Thawed after a stop, or cut off for a while: the run went on without this life of mine.
            self._new_incarnation()
            self._post.note("the view goes on without me: asking to be taken in again")
        self.joining = not (self.in_view or going or self.acceptor.stood_further)

    def leave_lineage(self) -> None:
        """Begin a new life outside the view of another lineage: a peer that is dead here may live there."""
        self.electorate = Electorate()
        self.roster.part_with(())
        self._new_incarnation()

    def _new_incarnation(self) -> None:
        """Begin a new life under the same name: the votes and promises of the old one are void. An old copy of the disk
        may not know which numbers lives had since: that of the process is new."""
        number = max(self.me.incarnation + 1, self._post.boot)
        self.me = self.roster.me = replace(self.me, incarnation=number)
        self.acceptor.forget_life()
        self.joining = True
        self.founder = False

    def report(self, progress: Progress) -> None:
        """Set the progress that heartbeats carry."""
        self.progress = progress

    def listen_at(self, address: str) -> None:
        """Tell others from now on that this peer listens at that address."""
        self.me = self.roster.me = replace(self.me, address=address)
