"""The progress of one simulated life, followed in pieces, to compare with what production code has.

One piece is what one inner step trained. A piece is in the local weights until a commit counts it or somebody reports
it as discarded, never both, and never twice. Sets of pieces are bit masks, one for each part of each fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Totals
from diloco.base.types import Closed, Commit, Counted, Skip
from diloco.outer.fragments import Fragment, read_fragment
from diloco.outer.line import Line, PendingContribution
from diloco.outer.merge import Mix
from diloco.simulate.virtual.oracle.applied import bits
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.setup import NOISES, flat_noise, noises

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess

TOLERANCE = 1e-3


def union(masks: Iterable[Iterable[int]]) -> int:
    """All pieces of some parts of fragments."""
    return reduce(or_, (pieces for parts in masks for pieces in parts), 0)


class SimulatedProgress:
    """The pieces of one simulated life: which are in its weights, to compare with what production code has."""

    def __init__(self, host: SimulatedProcess, line: Line, journal: Journal) -> None:
        self.host = host
        self.journal = journal
        self.line = line
        self.invariants = host.world.invariants
        self.uncommitted: list[list[int]] = [list(masks) for masks in self.invariants.nothing]
        self.sums: list[Tensor] = [torch.zeros(fragment.elements) for fragment in line.layout.fragments]
        self.mine = 0
        """All pieces of this life."""
        self.discarded: list[list[int]] = [list(masks) for masks in self.invariants.nothing]
        self.tokens = 0
        """Trained in this life or brought from a checkpoint, and neither counted nor discarded by now."""
        self.trained = self.committed = self.given_up = 0
        """All tokens of this life, and where those went that are not here any more."""
        self.booked: list[Totals] = []
        """Totals that each record of this life's ledger must have."""
        self._elements = host.world.plan.elements
        self.pending = False
        """Others may count the contribution that was offered last."""
        self.copied_version = 0
        """Version that was copied last: the checkpoints of versions since are this life's own."""
        self._given: list[Commit] = []
        """Versions that it has to apply in this round."""
        self._sent_fragment = 0
        self._sent_pieces: tuple[int, ...] = ()
        self._sent_parts: Sequence[bytes] = ()
        self._sent_sum: Tensor | None = None
        self.residuals = [torch.zeros(fragment.elements) for fragment in line.layout.fragments]
        """Errors of the codec in counted contributions, by fragment."""

    def given(self, outcome: Sequence[Closed] | Skip) -> None:
        """Note the versions that a simulated peer has to apply in this round."""
        self._given = [] if isinstance(outcome, Skip) else [closed.commit for closed in outcome]

    def begins_round(self) -> None:
        """Check that all versions of the round before were applied, unless a state was copied that has them, or is to
        be: they were made on another state than the one here."""
        stands = self.line.commit.version if self.line.commit is not None else -1
        left = [commit for commit in self._given if commit.version > stands]
        if left and not self.host.drifted:
            raise Violation("I7", f"{self.host.name} does not apply {len(left)} versions that closed")

    def as_json(self) -> list[list[str]]:
        """The uncommitted pieces of each part of each fragment, for a checkpoint."""
        return [list(map(hex, masks)) for masks in self.uncommitted]

    def restored(self, pieces: Sequence[Sequence[str]], tokens: int) -> None:
        """Take the pieces of progress that a checkpoint holds. Before the line has the rest of it."""
        self.tokens = tokens
        if pieces:
            self.uncommitted = [[int(text, 16) for text in masks] for masks in pieces]
        for fragment, masks, total in zip(self.line.layout.fragments, self.uncommitted, self.sums, strict=True):
            total.zero_()
            for part, (start, stop) in enumerate(map(fragment.part_bounds, range(fragment.parts))):
                for piece in bits(masks[part]):
                    total[start:stop] += flat_noise(piece % NOISES, fragment, self._elements)[start:stop]

    def opened(self) -> None:
        """The life begins, with what its line has."""
        self.trained = self.tokens
        if self.journal.opening.resumed:
            saved, redone, gone = self.host.records.resumed()
            self.residuals = [residual.clone() for residual in saved.residuals]
            for commit in redone:
                if commit.fragment >= 0:
                    self._fade(commit)
            if gone:
                self.restored([["0"] * len(masks) for masks in self.uncommitted], 0)
                self.trained = 0
        self._check("its beginning")

    def redone(self, commit: Commit, state_digest: str) -> None:
        """A version that was applied again, and that no ledger had, is booked."""
        self.invariants.redone(self.host.name, commit, state_digest)
        self._check("what it applied again")

    def train(self, tokens: int, block: int = -1) -> dict[str, Tensor]:
        """One more simulated piece of progress, for which a data block was read; -1: one that was read before. Returns
        what it does to the weights."""
        piece = self.host.world.next_piece()
        if block >= 0:
            committed = self.invariants.committed(self.line.commit)
            counted = union(committed) | union(self.uncommitted)
            self.invariants.blocks.reads(self.host.name, self.line, block, piece, counted)
        self.mine |= 1 << piece
        for fragment in self.line.layout.fragments:
            self.sums[fragment.index] += flat_noise(piece % NOISES, fragment, self._elements)
            self.uncommitted[fragment.index] = [masks | 1 << piece for masks in self.uncommitted[fragment.index]]
        self.tokens += tokens
        self.trained += tokens
        self.invariants.trained_tokens += tokens
        return noises(self._elements)[piece % NOISES]

    def measured(self, sent: PendingContribution) -> None:
        """Note that all uncommitted pieces of a fragment went into a simulated contribution."""
        if self.pending:
            raise Violation("I2", f"{self.host.name} offers other progress than before, which others may count")
        self.pending = True
        index = self._sent_fragment = sent.contribution.fragment
        self._sent_pieces = tuple(self.uncommitted[index])
        self._sent_parts = sent.contribution.parts
        self._sent_sum = self.sums[index].clone()
        self.invariants.made(self.host, sent, self._sent_pieces)
        self.invariants.blocks.sends(self.host.name, self.line, sent.contribution, union(self.uncommitted))
        if sent.target is not None and self.line.feedback is not None and self.exact:
            target = self.line.feedback * self.residuals[index] - self.sums[index]
            self._alike("sends", sent.target, target, self.line.layout.fragments[index])

    def applied(self, commit: Commit, mine: Counted | None) -> None:
        """Check the pieces of a simulated peer after it applied a version."""
        self.pending = self.line.sent is not None
        self._given = [given for given in self._given if given.digest != commit.digest]
        counted_tokens = self.invariants.counts(commit, self.host)
        if counted_tokens != (mine.tokens if mine is not None else 0):
            what = f"{self.host.name} takes version {commit.version} to count {mine}, it counts {counted_tokens} tokens"
            raise Violation("I2", f"{what} of this life")
        self.committed += counted_tokens
        if mine is not None:
            self.tokens -= mine.tokens
            fragment = self.line.layout.fragments[commit.fragment]
            counted = [part for part in range(fragment.parts) if commit.counts(mine.peer, part)]
            self._leave_over(fragment, counted)
            self._take_out(fragment, counted)
        elif any(entry.peer == self.host.name for entry in commit.counted):
            self._fade(commit)
        self._check(f"version {commit.version}", applied=commit)

    def _fade(self, commit: Commit) -> None:
        """A version counts what an earlier life sent, with the codec's error in it: the residual that came from there
        is void."""
        fragment = self.line.layout.fragments[commit.fragment]
        for part in range(fragment.parts):
            if commit.counts(self.host.name, part):
                start, stop = fragment.part_bounds(part)
                self.residuals[fragment.index][start:stop] *= self.line.residual_after_rejoin

    def _take_out(self, fragment: Fragment, parts: Sequence[int]) -> None:
        """Move the sent values of these parts out of simulated progress: they are the run's now."""
        if self._sent_sum is None:
            return
        masks, total = self.uncommitted[fragment.index], self.sums[fragment.index]
        for part in parts:
            start, stop = fragment.part_bounds(part)
            masks[part] &= ~self._sent_pieces[part]
            total[start:stop] -= self._sent_sum[start:stop]

    def _leave_over(self, fragment: Fragment, counted: Sequence[int]) -> None:
        """Keep the codec's error in the counted parts of a simulated contribution, to be sent later."""
        feedback, codecs = self.line.feedback, self.line.codecs
        if feedback is None or self._sent_sum is None or not self.exact:
            return
        residual = self.residuals[fragment.index]
        for part in counted:
            start, stop = fragment.part_bounds(part)
            target = feedback * residual[start:stop] - self._sent_sum[start:stop]
            decoded = codecs[fragment.group_of(part)].decode(self._sent_parts[part], stop - start)
            residual[start:stop] = target - decoded

    def adopted(self, mine: Counted | None, discarded_tokens: int, before: Commit | None) -> None:
        """Check the pieces after a simulated copy of the state: those sent are counted, given up, or still sent."""
        self.pending = self.line.sent is not None
        self._given = []
        if mine is not None or discarded_tokens:
            fragment = self.line.layout.fragments[self._sent_fragment]
            self._discard(fragment.index, self._sent_pieces)
            self._take_out(fragment, range(fragment.parts))
            self._check_given_up(before if discarded_tokens else self.line.commit)
        counted_tokens = mine.tokens if mine is not None else 0
        self.tokens -= discarded_tokens + counted_tokens
        self.committed += counted_tokens
        self._gives_up(discarded_tokens)
        old, new = self.invariants.committed(before), self.invariants.committed(self.line.commit)
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            self._discard(index, [a & ~b for a, b in zip(was, now, strict=True)])  # of a lineage that ended
        if before is None or self.line.commit != before:
            for residual in self.residuals:
                residual.zero_()  # it was measured on another anchor
        self._check(f"the copied version {self.line.state.version}")
        self.copied_version = self.line.state.version
        self.host.records.copied(before)
        self.host.steps.copied(before)

    def _check_given_up(self, before: Commit | None) -> None:
        """I2: nothing is given up that a version counts which closed here, and was passed over since `before`."""
        commit = self.line.commit
        if before is None or commit is None:
            return
        applied = set(self.invariants.back_from(before))
        for digest in self.invariants.back_from(commit):
            if digest in applied:
                return
            passed = self.invariants.commits[digest]
            if self.invariants.closed_here(self.host, passed) and self.invariants.counts(passed, self.host):
                what = f"gives up what version {passed.version} counts, which closed here"
                raise Violation("I2", f"{self.host.name} {what}")

    def _others_get_its_data(self) -> bool:
        """Whether the version applied last leases this simulated peer's data to others, as of one that left."""
        commit, name = self.line.commit, self.host.name
        before = self.invariants.commits.get(commit.previous) if commit is not None else None
        if commit is None or before is None or name in commit.leases.held or name not in before.leases.held:
            return False
        last = before.leases.held[name][-1].stop - 1
        there = [*commit.leases.returned, *chain.from_iterable(commit.leases.held.values())]
        return any(run.start <= last < run.stop for run in there)

    def dropped(self, discarded_tokens: int, done: bool) -> None:
        """Check that a simulated peer gives its progress up only where it ends or begins, or others get its data: who
        skips a round keeps it. Simulated progress is finite. `done`: it knows that the run has ended."""
        if discarded_tokens and self.mine and not (self.host.leaving or done or self._others_get_its_data()):
            raise Violation("I4", f"{self.host.name} gives {discarded_tokens} tokens up, and neither ends nor begins")
        self.pending = False
        for index, masks in enumerate(self.uncommitted):
            self._discard(index, masks)
            self.uncommitted[index] = [0] * len(masks)
            self.sums[index].zero_()
        self.tokens -= discarded_tokens
        self._gives_up(discarded_tokens)
        self._check("discarding", records=discarded_tokens > 0)

    def closes(self) -> None:
        """The life ends in good order: all its progress is booked, and the others know."""
        if self.tokens:
            raise Violation("I2", f"{self.host.name} ends, and {self.tokens} of its tokens are nowhere")
        self._check("its end")
        machine, at = self.host.machine, self.host.world.at
        there = [at(member) for member in machine.view if member != machine.me]
        others = [host.name for host in there if host is not None and not host.gone and machine.me in host.machine.view]
        if others and machine.in_view and not self.host.gone:
            raise Violation("I7", f"{self.host.name} ends without a goodbye to {', '.join(others)}")

    def _gives_up(self, tokens: int) -> None:
        self.given_up += tokens
        self.invariants.discarded_tokens += tokens

    def _discard(self, index: int, masks: Sequence[int]) -> None:
        self.discarded[index] = [a | b for a, b in zip(self.discarded[index], masks, strict=True)]

    def _check(self, after: str, records: bool = True, applied: Commit | None = None) -> None:
        """I2 and I4: a simulated peer's weights are the anchor and exactly the pieces that are still its own.

        `records`: the ledger has a record of it; `applied`: with this version.
        """
        name, line = self.host.name, self.line
        if line.trained.tokens != self.tokens or self.tokens < 0:
            raise Violation("I2", f"{name} after {after}: {line.trained.tokens} tokens of progress, not {self.tokens}")
        totals = Totals(self.trained, self.committed, self.given_up, self.tokens)
        if not totals.balanced or self.journal.totals != totals:
            raise Violation("I2", f"{name} after {after}: the books say {self.journal.totals}, it was {totals}")
        if records:
            self.booked.append(totals)
            self.host.records.booked(len(self.booked), applied)
        committed = self.invariants.committed(line.commit)
        for index, masks in enumerate(self.uncommitted):
            for part, (ours, theirs, gone) in enumerate(
                zip(masks, committed[index], self.discarded[index], strict=True)
            ):
                if ours & theirs:
                    raise Violation("I2", f"{name} after {after}: keeps progress in part {part} that is committed")
                if self.mine & ~(ours | theirs | gone):
                    raise Violation("I4", f"{name} after {after}: progress in part {part} is nowhere")
        if self.exact:
            self._check_values(after)

    @property
    def exact(self) -> bool:
        """Whether simulated weights are nothing but anchor and progress: `mix` keeps a share of what is committed."""
        return not self.host.world.hostile and not isinstance(self.line.merge, Mix)

    def _check_values(self, after: str) -> None:
        for fragment, total in zip(self.line.layout.fragments, self.sums, strict=True):
            sent, base = self.line.sent, self.line.state.fragments[fragment.index].anchor
            if sent is not None and sent.contribution.fragment == fragment.index:
                base = sent.base_if_skipped  # `eager` shows what is on its way at its expected effect
            progress = read_fragment(self.line.parameters, fragment) - base
            error = (progress - total).abs_().max().item()
            if not error <= TOLERANCE:
                what = f"{self.host.name} after {after}: the weights are off by {error:.2g} from anchor plus progress"
                raise Violation("I4", what)
            if self.line.feedback is not None:
                kept = self.line.residuals.get(fragment.index)
                dropped = torch.zeros(fragment.elements) if kept is None else kept
                self._alike(f"keeps after {after}", dropped, self.residuals[fragment.index], fragment)

    def _alike(self, does: str, found: Tensor, true: Tensor, fragment: Fragment) -> None:
        """Check that nothing of what a simulated peer's codec drops is lost, or sent twice."""
        error = (found - true).abs_().max().item()
        if not error <= TOLERANCE * (1 + true.abs().max().item()):
            what = f"{self.host.name} {does} what is off by {error:.2g} from progress and residual"
            raise Violation("I4", f"{what} of fragment {fragment.index}")
