"""Decisions of contributors and owners in a reduction: contributions go to owners of parts, means to all receivers."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.protocol.coordinating import Coordinating
from diloco.protocol.reduction import Reduction, as_counted, covers, well_formed
from diloco.protocol.view import owner_of_parts


class Reducing(Coordinating):
    """The contributor's and owner's layer of the protocol's state machine, in the reduction of an attempt."""

    def _on_begin(self, sender: Member, body: m.Begin) -> None:
        if not self._current(sender, body.version) or body.attempt < self.attempt:
            return
        if sender != self._seat(body.attempt) or self.me not in body.receivers or self.me.witness:
            return
        if self._reduction_for(body) is not None:
            return
        if not well_formed(body, self.rules.parts[self.fragment], [member.peer for member in self.view]):
            self._send(sender, m.Stalled(*body.key, (), "malformed Begin"))
            return
        if body.attempt > self.attempt:
            self._enter(body.attempt, "the coordinator began a later attempt")
        reduction = Reduction(body, self.me.peer, self._now)
        if reduction.contributes:
            mine = as_counted(self.me.peer, self._offer) if self._offer is not None else None
            if mine not in body.contributors:
                self._send(sender, m.Stalled(*body.key, (self.me.peer,), "has withdrawn its contribution"))
                return
        self._reduction = reduction
        self._out.append(m.BeginReduction(body))
        if reduction.contributes:
            self._exposed = True
            self._contribute(reduction, body.spans)

    def _reduction_for(self, item: m.OfAttempt) -> Reduction | None:
        """The reduction under way in the state machine, if a message or event is of its attempt."""
        reduction = self._reduction
        return reduction if reduction is not None and reduction.key == item.key else None

    def _contribute(self, reduction: Reduction, owed: Sequence[m.Span]) -> None:
        """Emit `SendContribution` for spans of other owners; spans that I own have my contribution at once."""
        receivers = {member.peer: member for member in reduction.begin.receivers}
        for span in owed:
            if span.owner != self.me.peer:
                self._out.append(m.SendContribution(*reduction.key, reduction.generation, span, receivers[span.owner]))
        for part in owner_of_parts(span for span in owed if span.owner == self.me.peer):
            self._on_contribution(m.ContributionArrived(*reduction.key, self.me.peer, part))

    def _on_repair(self, sender: Member, body: m.Repair) -> None:
        reduction = self._reduction_for(body)
        if reduction is None or sender != self._seat(body.attempt) or body.generation <= reduction.generation:
            return
        if not covers(body.spans, self.rules.parts[self.fragment], reduction.contributors):
            return
        self._note(f"going on without {', '.join(body.gone)} ({body.reason})")
        moved, ready = reduction.repair(body, self._now)
        self._out.append(m.RepairReduction(body))
        for part in ready:
            self._average(reduction, part)
        if reduction.contributes and self._offer is not None:
            self._contribute(reduction, moved)

    def _on_contribution(self, event: m.ContributionArrived) -> None:
        reduction = self._reduction_for(event)
        if reduction is not None and reduction.contribution(event.sender, event.part, self._now):
            self._average(reduction, event.part)

    def _average(self, reduction: Reduction, part: int) -> None:
        self._out.append(m.FoldPart(*reduction.key, part, reduction.average(part)))

    def _on_refused(self, event: m.ContributionRefused) -> None:
        reduction = self._reduction_for(event)
        if reduction is not None and event.sender in reduction.contributors:  # a stranger's bytes harm nobody
            seat = self._seat(self.attempt)
            self._send(seat, m.Stalled(*reduction.key, (event.sender,), event.reason, event.offence))

    def _on_folded(self, event: m.PartFolded) -> None:
        reduction = self._reduction_for(event)
        if reduction is None:
            return
        others = tuple(member for member in reduction.begin.receivers if member != self.me)
        omitted = reduction.omitted[event.part]
        self._out.append(m.SendMean(*reduction.key, event.part, omitted, others))
        self._on_mean(m.MeanArrived(*reduction.key, self.me.peer, event.part, omitted))

    def _on_mean(self, event: m.MeanArrived) -> None:
        reduction = self._reduction_for(event)
        if reduction is None:
            return
        # Only the coordinator knows for certain whom its repairs left out so far.
        if self._coordinates(reduction) and not reduction.gone.issuperset(event.omitted):
            reason = "left somebody out of a part of the mean"
            self._on_refused(m.ContributionRefused(*reduction.key, event.sender, reason))
        elif reduction.mean(event.part, event.sender, event.omitted, self._now):
            self._out.append(m.SealMean(*reduction.key))

    def _coordinates(self, reduction: Reduction) -> bool:
        """Whether this peer is the coordinator of a reduction that it takes part in."""
        return self._tally is not None and self._tally.begin is reduction.begin

    def _on_mean_held(self, event: m.MeanHeld) -> None:
        self._held = [*self._held, event.mean_digest][-self.rules.means_kept :]
        reduction = self._reduction
        # It is not complete any more if it was repaired while we hashed.
        if reduction is not None and reduction.key == (event.version, event.attempt) and reduction.complete:
            reduction.mean_digest = event.mean_digest
            reduction.progress_at_s = self._now
            if self._tally is not None and self._tally.begin is not None and self._tally.proposal is None:
                self._propose(self._tally, self._next_commit(self._tally, reduction))
        if self._decided is not None and self._decided.mean_digest == event.mean_digest:
            self._decide(self._decided, self.me)
        elif self._proposal is not None and self._tally is not None:
            self._commit_if_accepted(self._tally)
        elif self._proposal is not None:
            self._on_propose(self._seat(self._proposal.attempt), self._proposal)

    # ------------------------------------------------------------ bytes that do not come

    def _check_reduction(self) -> None:
        """When parts do not come, send `Stalled` to the coordinator, which repairs the attempt or gives it up."""
        reduction = self._reduction
        if reduction is None:
            return
        silent = self._now - reduction.progress_at_s
        stall_s = self.timing.stall_s
        waited_for = set(reduction.contributors) - reduction.gone
        members = [member for member in reduction.begin.receivers if member.peer in waited_for]
        dead = [member.peer for member in members if not self.roster.alive(member, self._now)]
        if silent > 3 * stall_s:
            self._enter(self.attempt + 1, f"attempt {self.attempt} made no progress for {silent:.1f} s")
        elif self._tally is not None and self._coordinates(reduction) and dead:
            self._repair(self._tally, dead, f"{', '.join(dead)} died in the reduction")
        elif silent > stall_s and not reduction.complete and self._now - self._complained_at > stall_s:
            self._complained_at = self._now
            stalled = m.Stalled(*reduction.key, reduction.missing(), f"no bytes for {silent:.1f} s")
            self._send(self._seat(self.attempt), stalled)

    def _on_abort(self, sender: Member, body: m.Abort) -> None:
        if body.key != (self.making, self.attempt) or sender != self._seat(body.attempt):
            return
        if body.offence:
            for peer in body.without:
                self.roster.offended(peer)
        self._without = body.without
        self._enter(self.attempt + 1, f"attempt {body.attempt} failed: {body.reason}")
        self._follow_coordinator()
