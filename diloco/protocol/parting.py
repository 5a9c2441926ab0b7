"""When most of the view is gone: wait, or go on apart; and when the parts of a run meet again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from diloco.base.types import Commit, Member
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.messages import Fork
from diloco.protocol.reducing import Reducing
from diloco.protocol.view import Electorate


def fork_name(commit: Commit, founder: Member) -> str:
    """The name of the lineage that `founder` starts at this commit: no two founders choose the same."""
    return hashlib.sha256(f"{commit.digest}/{founder.peer}/{founder.incarnation}".encode()).hexdigest()[:16]


def goes_on(mine: Sequence[Fork], other: Sequence[Fork]) -> bool:
    """Whether the first of two histories (see `parted_at`) is the one that goes on: both sides agree on the answer.

    More committed tokens win; at a tie the later founded one, for whoever it left behind could not go on.
    """
    return _rank(mine) > _rank(other)


def _rank(history: Sequence[Fork]) -> tuple[int, int, str]:
    return history[-1].tokens, len(history), history[-1].lineage


def parted_at(mine: Sequence[Fork], other: Sequence[Fork]) -> int:
    """Committed tokens at which two histories parted.

    A history lists the lineages that led here, each with the tokens at which it was left; the last is the one that
    goes on, with its tokens now. Histories that share nothing parted at 0.
    """
    parted = 0
    for own, theirs in zip(mine, other, strict=False):
        if own.lineage != theirs.lineage:
            break
        parted = min(own.tokens, theirs.tokens)
    return parted


class Parting(Reducing):
    """Foundings and lineages."""

    def _founding(self, view: Sequence[Member], before: Commit | None, lineage: str) -> Commit:
        """The first commit of a lineage: it moves no anchor."""
        names = [member.peer for member in view if not member.witness]
        if before is None:
            granted = leases.found(names, self.rules.lease_blocks)
        else:
            granted = leases.advance(before.leases, {}, names, self.rules.lease_blocks)
        return Commit(
            version=self._state.version,
            previous=before.digest if before else self.rules.contract,
            lineage=lineage,
            fragment=-1,
            view=tuple(view),
            counted=(),
            omitted=(),
            mean_digest="",
            tokens=before.tokens if before else 0,
            leases=granted,
            state_digest=self._state.digest,
        )

    def _check_majority(self) -> None:
        """Nobody waits where nothing can be decided: training goes on; commits wait, or go on as a lineage apart."""
        if not self.in_view or self._reachable_votes() >= self.electorate.needed():
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = self._now
        if self._offer is not None and self._now - self._offered_at > self.timing.stall_s:
            self._give_up(self._no_majority())
        after_s = self.rules.continue_after_s
        if after_s is not None and self._now - self._alone_since >= after_s:
            self._go_on_apart()

    def _go_on_apart(self) -> None:
        """The first trainer that lives founds a lineage with those it can reach."""
        alive = self.alive()
        trainers = [member for member in alive if not member.witness]
        if not trainers or trainers[0] != self.me or self._state.version != self.version:
            return
        assert self.commit is not None
        commit = self._founding(alive, self.commit, fork_name(self.commit, self.me))
        self._note(f"going on apart with {len(alive)} of {len(self.view)} members as lineage {commit.lineage}")
        self._announce(commit, alive)

    # ------------------------------------------------------------ meeting again

    def _meet_lineage(self, envelope: m.Envelope) -> None:
        """Two parts of the run see each other again: the one with more tokens goes on, the other joins it."""
        beat, lineage = envelope.body, envelope.lineage
        if self.rules.continue_after_s is None or not isinstance(beat, m.Heartbeat):
            return
        if (self.founder and self.commit is None) or self._earlier_life(envelope.sender):
            return
        self.roster.introduce(envelope.sender, self._now)  # so that it hears of us, too
        if not (beat.founded or self._target_lineage_silent()) or beat.joining:
            return
        if not self.in_view and self._hears_members():
            return
        mine = self._history()
        others = (*beat.forks, m.Fork(lineage, beat.committed_tokens))
        if not goes_on(mine, others):
            discarded = max(mine[-1].tokens - parted_at(mine, others), 0) if self.commit is not None else 0
            self._note(f"lineage {lineage} has more tokens and goes on; {discarded:,} tokens of ours are void")
            self._change_lineage(lineage, beat.forks)
            self._target_lineage, self._target_since_s = others, self._now
            self._out.append(m.Resync(envelope.sender, discarded))

    def _earlier_life(self, sender: Member) -> bool:
        """Whether an old conversation is heard again: of a peer that has lived anew since."""
        if sender.peer == self.me.peer:
            return self.me.incarnation > sender.incarnation
        return self.roster.is_earlier(sender, self._now)

    def _hears_members(self) -> bool:
        """Whether members, or the founder, of the lineage that a joiner asks to join still speak."""
        beats = (entry for entry in self.roster if entry.heartbeat is not None and not entry.heartbeat.joining)
        return any(self.roster.alive(entry.member, self._now) for entry in beats)

    def _history(self) -> tuple[m.Fork, ...]:
        """Ours, or while its state is being copied, that of the lineage we go to; a mere joiner follows anybody."""
        if self.commit is None and self._target_lineage and not self._target_lineage_silent():
            return self._target_lineage
        return (*self.forks, m.Fork(self.lineage, self.commit.tokens if self.commit else -1))

    def _target_lineage_silent(self) -> bool:
        """Whether nobody speaks for the lineage that we are bound for: an old conversation, heard again, led there.

        Then whoever lives leads, also a founder that still waits for its first members.
        """
        silent = self._now - self._target_since_s > self.timing.suspect_s and not self._hears_members()
        return bool(self._target_lineage) and self.commit is None and silent

    def _change_lineage(self, lineage: str, forks: tuple[m.Fork, ...]) -> None:
        self._give_up_if_waiting("our lineage ends here")
        self._forget_version()  # but not that we are exposed: that lineage may go on, with what we sent counted
        self.commit = None
        self._state = m.StateHeld(-1, "")
        self.electorate = Electorate()  # who is dead there may live here
        self.roster.part_with(())
        self.lineage, self.forks = lineage, forks
        self._alone_since = None
        self._new_incarnation()

    def _give_up_if_waiting(self, reason: str) -> None:
        if self._offer is not None:
            self._give_up(reason)
