"""Members and voters as one peer knows them: who it is itself, who lives, who may speak, whose votes count."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Member, Phase, Progress
from diloco.protocol import messages as m
from diloco.protocol.post import Post
from diloco.protocol.roster import Admission, Roster
from diloco.protocol.view import Electorate, Rules, Timing

if TYPE_CHECKING:
    from diloco.protocol.acceptor import Acceptor
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.lineage import Lineage


class Membership:
    """The member's role in the protocol: one life of each name speaks, and each vote counts once."""

    acceptor: Acceptor
    chain: Chain
    contributor: Contributor
    lineage: Lineage

    def __init__(self, me: Member, founder: bool, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.me = me
        self.founder = founder
        self.joining = not founder
        self.progress = Progress()
        self.roster = Roster(me, timing.suspect_s, rules.offences_allowed)
        self.electorate = Electorate()
        self.leaving = False
        """Our latest offer is our last."""
        self.gone = False
        """We said goodbye: our heir votes for us and could not know of any message that we sent afterwards."""
        self.admission = Admission(rules.run, rules.contract)
        self._bequests: dict[str, tuple[Member, m.Goodbye]] = {}
        """Goodbyes that came before the commit of the view in which their senders vote."""
        self._heartbeat_at = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def in_view(self) -> bool:
        """Whether this life of this peer is a member."""
        return self.me in self.chain.view

    def alive(self) -> list[Member]:
        """Members of the view that the roster does not suspect."""
        return [member for member in self.chain.view if self.roster.alive(member, self._post.now)]

    def lives(self, member: Member) -> bool:
        """Whether the roster does not suspect this member."""
        return self.roster.alive(member, self._post.now)

    def trainers_alive(self) -> list[Member]:
        """Live members of the view that receive the mean and vote on it first: all but witnesses."""
        return [member for member in self.alive() if not member.witness]

    def is_member(self, member: Member) -> bool:
        """Whether this very life of a peer is in the view."""
        commit = self.chain.commit
        found = commit.member(member.peer) if commit else None
        return found is not None and found.incarnation == member.incarnation

    def newcomers(self) -> list[Member]:
        """Joiners on the roster for the next view: at this version, or so near that commits bring them there."""
        near = max(self._rules.backlog_versions - 1, 0)
        known = {member.peer for member in self.alive()}
        return [member for member in self.roster.at_the_door(near, self._post.now) if member.peer not in known]

    def votes(self) -> tuple[str, ...]:
        """Leavers for whom this peer votes."""
        return self.electorate.held_by(self.me.peer)

    def no_majority(self) -> str:
        """The reason why no commit can get its votes; empty while enough voters of the view can be reached."""
        alive = {member.peer for member in self.alive()}
        reachable, needed = self.electorate.reachable(alive), self.electorate.needed()
        if reachable >= needed:
            return ""
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
        return [self.roster.heartbeat(member.peer) for member in members if member != self.me]

    def may_speak(self, run: str, contract: str, lineage: str, sender: Member) -> m.Reply:
        """OK if run, lineage and roster let this sender speak, else the protocol's reason for the refusal."""
        reply = self.admission.same_training(run, contract)
        if reply is not m.Reply.OK:
            return reply
        if lineage != self.lineage.name:
            return m.Reply.OTHER_LINEAGE
        if self.roster.barred(sender.peer) and not self.is_member(sender):
            return m.Reply.BARRED
        return m.Reply.OK if self.roster.may_speak(sender, self._post.now) else m.Reply.FENCED

    def replayed(self, envelope: m.Envelope) -> bool:
        """Whether this message was taken before; from now on it was."""
        return self.admission.replayed(envelope)

    # ------------------------------------------------------------ heartbeats

    def beat(self) -> None:
        """Send heartbeats, if they are due, to all on the roster, and to voters whose place on it a later life has:
        that they are dead can still be proven."""
        if self._post.now < self._heartbeat_at:
            return
        self._heartbeat_at = self._post.now + self._timing.heartbeat_s
        chain, now = self.chain, self._post.now
        tokens = chain.commit.tokens if chain.commit else 0
        founded, deaf = chain.commit is not None, self.roster.deaf(now)
        forks, moved_bytes = self.lineage.forks, self.contributor.moved_bytes
        beat = m.Heartbeat(chain.version, founded, self.joining, self.progress, tokens, forks, deaf, moved_bytes)
        self.roster.forget({member.peer for member in chain.view}, now)
        self.admission.forget({entry.member.peer for entry in self.roster})
        known = [entry.member for entry in self.roster if not entry.left]
        voters = self.electorate.voters() - {self.me.peer}
        replaced = [one for one in chain.view if one.peer in voters and self.roster.has_later(one)]
        for member in (*known, *replaced, *self.roster.strangers(now)):
            self._post.send(member, beat)

    def heard(self, sender: Member) -> None:
        """Note a sign of life of a peer that may speak."""
        self.roster.heard(sender, self._post.now)

    def on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        """Note a peer's heartbeat on the roster."""
        self.roster.heard(sender, self._post.now, body, self.chain.version)

    def on_unreachable(self, event: m.Unreachable) -> None:
        """Note that nothing can be delivered to a peer, and that its vote is lost where its death is proven."""
        if not self.roster.has_later(event.member):
            self.roster.unreachable(event.member.peer)
        if event.proven:
            self.electorate.died(event.member)

    def on_reached(self, event: m.Reached) -> None:
        """Note that a peer answered."""
        self.roster.answered(event.member, self._post.now)

    def turns_away(self, joiner: Member, body: m.Body) -> bool:
        """Whether a heartbeat is of a joiner that nobody reaches: it is told, and so are people here, once."""
        joins = isinstance(body, m.Heartbeat) and body.joining
        if not joins or not self.roster.is_unreached(joiner, self._post.now):
            return False
        if self.roster.turns_away(joiner):
            self._post.emit(m.Note(f"nobody reaches {joiner.address}, so that {joiner.peer} cannot join", False))
        return True

    # ------------------------------------------------------------ leaving

    def offers(self, offer: m.Offer) -> None:
        """This peer offers a contribution, which may be its last."""
        self.leaving = offer.leaving

    def on_leave_wanted(self, _: m.LeaveWanted) -> None:
        """Give this peer's vote away, and say goodbye to the members."""
        others = [member for member in self.alive() if member != self.me]
        heir = others[0].peer if others else ""  # a joiner may be in the view by now, and not know it yet
        making, acceptor = self.chain.making, self.acceptor
        goodbye = m.Goodbye(making, acceptor.attempt, heir, self.votes(), *acceptor.accepted)
        self._post.send_all(others, goodbye)
        self.gone = True

    def on_goodbye(self, sender: Member, body: m.Goodbye) -> None:
        """Note that a peer has left the roster, and who votes for it from now on."""
        self.roster.left(sender.peer)
        self._post.note(f"{sender.peer} left")
        if self.chain.commit is None or body.version > self.chain.making or not self.is_member(sender):
            self._bequests[sender.peer] = (sender, body)  # it is of a view that we do not know yet
        else:
            self._bequeath(sender, body)

    def _bequeath(self, sender: Member, body: m.Goodbye) -> None:
        """A leaver of this view gives its vote away, and what it promised and accepted with it."""
        if not body.heir or not self.is_member(sender):
            return
        of_this_view = body.version == self.chain.making
        # Leavers of an earlier view, whose votes it had, may be members again, and vote for themselves.
        self.electorate.bequeath((sender.peer, *(body.votes if of_this_view else ())), body.heir)
        if body.heir == self.me.peer and of_this_view:
            self.acceptor.take_over(body)

    def bequeathed(self, votes: Sequence[str], heir: str) -> None:
        """A member votes for these leavers: their goodbye may not have reached us."""
        self.electorate.bequeath(votes, heir)

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
        entry = self.roster.get(body.peer)
        if entry is not None and entry.member.incarnation == body.incarnation:  # a later life may be at the door
            self.roster.left(body.peer)
        self._post.note(f"an operator declared {body.peer} dead")
        return m.Reply.OK

    def offended(self, peers: Sequence[str]) -> None:
        """Count on the roster that these peers sent what no honest peer sends."""
        for peer in peers:
            self.roster.offended(peer)

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
        """A new view votes, in place of `before`: this peer is in it, or asks to be taken in again."""
        chain = self.chain
        self.electorate.stand(chain.view)
        self.roster.meet(chain.view, self._post.now, before)
        self._heartbeat_at = self._post.now  # tell the new version at once: a peer that is done waits to see it
        if not self.joining and not self.in_view and not self.leaving:
            # Thawed after a stop, or cut off for a while: the run went on without this life of mine.
            self._new_incarnation()
            self._post.note("the view goes on without me: asking to be taken in again")
        self.joining = not self.in_view and not self.leaving

    def read_bequests(self) -> None:
        """Take the goodbyes that came before the commit of the view that votes now."""
        making = self.chain.making
        for sender, body in self._bequests.values():
            if body.version <= making:
                self._bequeath(sender, body)
        self._bequests = {peer: kept for peer, kept in self._bequests.items() if kept[1].version > making}

    def leave_lineage(self) -> None:
        """Begin a new life outside the view of another lineage: a peer that is dead here may live there."""
        self.electorate = Electorate()
        self.roster.part_with(())
        self._new_incarnation()

    def _new_incarnation(self) -> None:
        """Begin a new life under the same name: the votes and promises of the old one are void."""
        self.me = self.roster.me = replace(self.me, incarnation=self.me.incarnation + 1)
        self.joining = True
        self.founder = False

    def report(self, progress: Progress) -> None:
        """Set the progress that heartbeats carry."""
        self.progress = progress

    def listen_at(self, address: str) -> None:
        """Tell others from now on that this peer listens at that address."""
        self.me = self.roster.me = replace(self.me, address=address)
