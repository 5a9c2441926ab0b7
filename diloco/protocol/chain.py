"""The chain of commits as one peer follows it: each follows the one before by its digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.claims import why_malformed, why_no_successor
from diloco.protocol.post import Post
from diloco.protocol.view import Rules, Timing

if TYPE_CHECKING:
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.lineage import Lineage
    from diloco.protocol.membership import Membership

SYNC_MEMORY = 8
"""A version that took long is remembered for about so many: peers wait more for one begun too late than they lose by
one begun early."""


MAX_COMPARED = 256
"""Latest commits whose digests are compared with those of others."""


class Chain:
    """The follower's role in the protocol: the latest commit, the state held, and commits that are missing."""

    contributor: Contributor
    lineage: Lineage
    membership: Membership

    def __init__(self, rules: Rules, timing: Timing, post: Post) -> None:
        self._rules, self._timing, self._post = rules, timing, post
        self.commit: Commit | None = None
        self.standing: Commit | None = None
        """The commit on which this peer says that it stands: the latest that is on its disk."""
        self.state = m.StateHeld(-1, "")
        self.attempts = 0
        """Attempts it took to make the latest version, as far as this peer knows."""
        self.sync_s = 0.0
        """Seconds to make a version, from `Begin` to the commit: the longest of late, forgotten slowly."""
        self._decided: Commit | None = None
        """A commit that holds and whose mean is not here yet."""
        self.conflict: tuple[str, str] | None = None
        """A peer that has another commit in the place of one of ours, and that in words. A person must decide."""
        self._digests: dict[int, str] = {}
        """Digests of the latest commits on which we stood, by height."""
        self.founding: Commit | None = None
        """The latest founding that this peer followed."""
        self._heads: list[Commit] = []
        """The commits of this version on which this peer stood, the latest last."""
        self._stands_since = self._catching_up_until = post.now

    # ------------------------------------------------------------ what others may ask

    @property
    def version(self) -> int:
        """Version of the latest commit known; before the founding of the lineage, that of the state it holds."""
        return self.commit.version if self.commit else self.state.version

    @property
    def height(self) -> int:
        """Height of the latest commit known: attempts that are named by it decide the next one. -1: none is."""
        return self.commit.height if self.commit else -1

    def head_at(self, height: int) -> Commit | None:
        """The commit of that height and of this version on which this peer stood; None: there is none."""
        return next((commit for commit in self._heads if commit.height == height), None)

    @property
    def since_height(self) -> int:
        """Height of the first commit of this version on which this peer stood: reductions of it began since then."""
        return self._heads[0].height if self._heads else -1

    @property
    def members_at_first(self) -> set[str]:
        """Members of the first commit of this version on which this peer stood."""
        return {member.peer for member in self._heads[0].view} if self._heads else set()

    @property
    def evicted(self) -> set[str]:
        """Voters that an operator evicted, by the commits of this version that left them out before the next."""
        return {peer for head in self._heads[1:] for peer in head.evicted}

    @property
    def making(self) -> int:
        """The version for which attempts are made and votes are taken: the next after the latest commit."""
        return self.version + 1

    @property
    def fragment(self) -> int:
        """The fragment that the next version moves."""
        return self._rules.bounds.turns.next(self.version, self.commit.tokens if self.commit else 0)

    @property
    def view(self) -> tuple[Member, ...]:
        """The view: members that the latest commit names, in order of admission."""
        return self.commit.view if self.commit else ()

    def forks_here(self, commit: Commit) -> bool:
        """Whether a commit founds a lineage on the version that the chain is at."""
        return commit.founds and self.leads_on(commit)

    def leads_here(self, body: m.Body) -> bool:
        """Whether a commit takes this voter along into a lineage apart: it and the founder lack a majority alike."""
        commit = body.commit if isinstance(body, m.Committed) else None
        return commit is not None and self._takes_along(commit) and self.lineage.may_follow(commit)

    def _takes_along(self, commit: Commit) -> bool:
        return self.forks_here(commit) and self.membership.me in commit.view

    def has_decided(self, mean_digest: str) -> Commit | None:
        """The commit that holds and waits for this mean, if one does."""
        decided = self._decided
        return decided if decided is not None and decided.mean_digest == mean_digest else None

    # ------------------------------------------------------------ two histories

    def compare(self, sender: Member, beat: m.Heartbeat, head: str) -> None:
        """Look whether a peer of our lineage stands on another commit than we did in that place (rule 12): then a disk
        lied, or an old copy of one voted. Nobody may vote until a person has decided which history goes on."""
        ours = self._digests.get(beat.height)
        decided = self.membership.electorate.has_evicted(sender)  # it may live, and go on to say so
        if ours is not None and head != ours and self.conflict is None and not decided:
            place = f"height {beat.height} (version {beat.version})"
            words = f"two histories: at {place} {sender.peer} stands on commit {head[:12]}, and we on {ours[:12]}"
            self.conflict = sender.peer, words
            self._post.emit(fx.Note(words, False))

    def decide_for_us(self, peer: str) -> None:
        """A person says that this peer is gone for good: if it had the other history, ours goes on."""
        if self.conflict is not None and self.conflict[0] == peer:
            self.conflict = None

    # ------------------------------------------------------------ commits that come

    def current(self, sender: Member, height: int) -> bool:
        """Whether a protocol message is of the vote on the successor of our commit. A sender that is behind gets that
        commit; one that is ahead is asked for the commits that we missed."""
        if self.commit is None:
            return False
        if height < self.height:
            self._post.send(sender, m.Committed(self.commit))
        elif height > self.height and not self._is_closing(height):
            self._catch_up(sender)
        return height == self.height

    def on_heartbeat(self, sender: Member, body: m.Heartbeat) -> None:
        """Give a peer that is behind the latest commit; ask one that is ahead for what is missing."""
        # Those that made a version send its commit to all, and a heartbeat may have crossed with it a moment ago. Else
        # each peer would get it from all: n^2 commits of O(n) bytes each time.
        recent = self._post.now - self._stands_since < self._timing.heartbeat_s
        crossed = recent and body.height == self.height - 1
        behind = not body.founded or (body.height < self.height and not crossed)
        if self.commit is not None and behind:
            self._post.send(sender, m.Committed(self.commit))
        elif body.founded and body.height > self.height and not self._is_closing(body.height):
            self._catch_up(sender)

    def _is_closing(self, height: int) -> bool:
        """Whether the reduction under way may still bring the next commit, where others already stand on that."""
        return height == self.height + 1 and self.contributor.moves

    def _catch_up(self, source: Member) -> None:
        """Emit `CatchUp` towards a trainer for commits that we missed, once per stall time: the answer may be large.

        A witness needs no commits but the one that it gets, and keeps no means for others: a trainer that asked it
        would take itself to be too far behind.
        """
        me, now = self.membership.me, self._post.now
        comes = self.lineage.copying  # the state, with the commit on which it stands: all before would be sent in vain
        useless = comes or me.witness or source.witness or not self.membership.may_call(source)
        if source != me and now >= self._catching_up_until and not useless:
            self._catching_up_until = now + self._timing.stall_s
            self._post.emit(fx.CatchUp(source))

    def on_committed(self, sender: Member, body: m.Committed) -> None:
        """Move on to a commit, if it is for this lineage and not known yet."""
        commit = body.commit
        news = commit.height > self.height if self.commit is not None else commit.version >= self.state.version
        follows = commit.lineage == self.lineage.name and news
        if follows and self.lineage.copying:
            self.membership.meet(commit.view)  # of this lineage we know who told us of it, and perhaps nobody else
        if follows or self.leads_here(body):
            self.decide(commit, sender)

    def decide(self, commit: Commit, source: Member) -> None:
        """A commit holds: close its version if its mean is held or on its way, else request that. Those that are our
        own word were checked before."""
        if source != self.membership.me and self._refuses(commit, source):
            return
        founds = self.commit is None and commit.founds and commit.version == self.state.version
        follows = self.leads_on(commit)
        held = follows and (not commit.moves or self.contributor.holds(commit.mean_digest))
        if founds or self.membership.me.witness or self.forks_here(commit) or held:
            self._close(commit)
            return
        if follows:
            self._decided = commit
        if not follows or not self.contributor.mean_is_coming():
            self._catch_up(source)

    def leads_on(self, commit: Commit) -> bool:
        """Whether this commit names ours as the one before it."""
        return self.commit is not None and commit.previous == self.commit.digest

    def _refuses(self, commit: Commit, source: Member) -> bool:
        """Whether no honest peer drafts this commit, be it what follows ours or any: it is not followed."""
        bounds, ours = self._rules.bounds, self.commit
        lie = (
            why_no_successor(ours, commit, bounds) if ours and self.leads_on(commit) else why_malformed(commit, bounds)
        )
        if lie:
            self.membership.lied(source, f"a commit that cannot be: {lie}")
        return bool(lie)

    def on_learned(self, event: m.Learned) -> None:
        """Move on to a commit that was fetched with its mean."""
        self._catching_up_until = self._post.now
        founds = self.commit is None and event.commit.version == self.state.version
        if (self.leads_on(event.commit) or founds) and not self._refuses(event.commit, event.source):
            self._close(event.commit)

    def _close(self, commit: Commit) -> None:
        took_s = self.contributor.took_s()
        if took_s is not None and commit.moves:
            self.sync_s = max(took_s, self.sync_s + (took_s - self.sync_s) / SYNC_MEMORY)
        self._post.adopt(commit)
        self._post.emit(fx.Close(commit))

    # ------------------------------------------------------------ moving on

    def hold(self, event: m.StateHeld) -> None:
        """The training side holds another state."""
        self.state = event

    def adopt(self, commit: Commit, attempts: int) -> None:
        """Stand on a commit from now on, which took so many attempts."""
        if commit.moves:
            self.attempts = attempts
        if self.commit is None or commit.moves or commit.founds or commit.version != self.commit.version:
            self._heads = []
        self.commit = commit
        self._heads.append(commit)
        self._digests[commit.height] = commit.digest
        for height in list(self._digests)[:-MAX_COMPARED]:
            del self._digests[height]
        if commit.founds:
            self.founding = commit
        self._decided = None
        self._stands_since = self._post.now

    def stands(self, commit: Commit) -> None:
        """A commit on which this peer stands is on the disk: others may hear so at once."""
        self.standing = commit
        self.membership.beat_now()

    def leave_lineage(self) -> None:
        """Stand on nothing: the state of another lineage is copied."""
        self.commit, self.standing, self._decided, self._heads = None, None, None, []
        self._digests, self.conflict = {}, None
        self.state = m.StateHeld(-1, "")
