"""Voting for a commit that a coordinator proposes, and moving on to the version that was decided."""

from __future__ import annotations

from diloco.base.types import Commit, Member
from diloco.protocol import messages as m
from diloco.protocol.machine_state import MachineState

SYNC_MEMORY = 8
"""A version that took long is remembered for about so many: peers wait more for one begun too late than they lose by
one begun early."""


class Committing(MachineState):
    """The voter's layer of the protocol's state machine: `Propose` to `Accept`, `Committed` to the next version."""

    def _on_propose(self, sender: Member, body: m.Propose) -> None:
        if not self._current(sender, body.version) or body.attempt < self.attempt or sender != self._seat(body.attempt):
            return
        if self.commit is None or body.commit.previous != self.commit.digest or body.commit.version != self.making:
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, "a later attempt proposes a commit")
        self._proposal = body
        reduction = self._reduction
        if self.me.witness or body.commit.mean_digest in self._held:
            self._accept(body)
        elif reduction is not None and reduction.mean_digest and reduction.key == body.key:
            self._send(sender, m.Stalled(*body.key, (), "holds another mean: an owner sent two"))
        elif not self._mean_is_coming():
            self._fetch(body)

    def _mean_is_coming(self) -> bool:
        """Whether the reduction under way may still complete its mean, so that the voter need not ask for a fetch."""
        reduction = self._reduction
        if reduction is None or reduction.mean_digest:
            return False
        alive = {member.peer for member in self.alive()}
        owed = reduction.owners_of_absent() - (alive - reduction.gone)
        return not owed and self._now - reduction.progress_at_s <= self.timing.stall_s

    def _fetch(self, proposal: m.Propose) -> None:
        """Emit `FetchMean` towards coordinator and trainers, once per stall time: the proposed mean may be large."""
        if self._now >= self._fetching_until:
            self._fetching_until = self._now + self.timing.stall_s
            seat = self._seat(proposal.attempt)
            others = [member for member in (seat, *self._trainers_alive()) if member != self.me]
            self._out.append(m.FetchMean(proposal.commit, tuple(dict.fromkeys(others))))

    def _accept(self, proposal: m.Propose) -> None:
        if not self.in_view:
            return  # a joiner holds the mean, but does not vote yet
        self._accepted = (proposal.attempt, proposal.commit)
        votes = self.electorate.held_by(self.me.peer)
        self._send(self._seat(proposal.attempt), m.Accept(*proposal.key, proposal.commit.digest, votes))

    def _on_committed(self, sender: Member, body: m.Committed) -> None:
        commit = body.commit
        founds = self.commit is None and commit.version == self._state.version
        follows = commit.lineage == self.lineage and (commit.version >= self.making or founds)
        if follows or self._leads_here(body):
            self._decide(commit, sender)

    def _leads_here(self, body: m.Body) -> bool:
        """Whether a commit takes this voter along into a lineage apart: it and the founder lack a majority alike."""
        commit = body.commit if isinstance(body, m.Committed) else None
        may_fork = self._alone_since is not None and self.rules.continue_after_s is not None
        return commit is not None and may_fork and self._forks_here(commit) and self.me in commit.view

    def _forks_here(self, commit: Commit) -> bool:
        """Whether a commit founds a lineage on the version that the state machine is at."""
        return self.commit is not None and commit.fragment == -1 and commit.previous == self.commit.digest

    def _decide(self, commit: Commit, source: Member) -> None:
        """A commit holds: close its version if its mean is held or on its way, else request that."""
        founds = self.commit is None and commit.fragment == -1 and commit.version == self._state.version
        follows = self.commit is not None and commit.previous == self.commit.digest
        if founds or self.me.witness or self._forks_here(commit) or (follows and commit.mean_digest in self._held):
            self._close(commit)
            return
        if follows:
            self._decided = commit
        if not follows or not self._mean_is_coming():
            self._catch_up(source, commit.version)

    def _on_learned(self, event: m.Learned) -> None:
        self._catching_up_until = self._now
        follows = self.commit is not None and event.commit.previous == self.commit.digest
        founds = self.commit is None and event.commit.version == self._state.version
        if follows or founds:
            self._close(event.commit)

    def _close(self, commit: Commit) -> None:
        reduction = self._reduction
        if reduction is not None and reduction.begin.version == commit.version:
            took_s = self._now - reduction.began_at_s
            self.sync_s = max(took_s, self.sync_s + (took_s - self.sync_s) / SYNC_MEMORY)
        self._adopt(commit)
        self._out.append(m.Close(commit))

    def _adopt(self, commit: Commit) -> None:
        """Move the state machine on to a commit's version, and to its view, voters and lineage."""
        if self.commit is not None and commit.lineage != self.lineage:
            self.forks = (*self.forks, m.Fork(self.lineage, commit.tokens))
            self.roster.part_with([member.peer for member in self.view if member not in commit.view])
        self.lineage = commit.lineage
        self._target_lineage = ()
        before = self.view
        self.commit = commit
        self._stands_since = self._now
        self.attempts = self.attempt + 1
        self._exposed = self._exposed and commit.fragment == -1  # a founding makes no version: what was sent stays sent
        self._forget_version()
        self.electorate.stand(commit.view)
        self.roster.meet(commit.view, self._now, before)
        self._alone_since = None
        self._heartbeat_at = self._now  # report the new version at once: a peer that is done waits to see it everywhere
        if not self.joining and not self.in_view and not self._leaving:
            # Thawed after a stop, or cut off for a while: the run went on without this life of mine.
            self._new_incarnation()
            self._note("the view goes on without me: asking to be taken in again")
        self.joining = not self.in_view and not self._leaving
        for sender, body in self._bequests.values():
            if body.version == self.making:
                self._bequeath(sender, body)
        self._bequests = {peer: kept for peer, kept in self._bequests.items() if kept[1].version > self.making}
