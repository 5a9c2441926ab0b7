"""A line onto another state: copied from others, or back to the anchor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.base.types import Commit, Counted
from diloco.outer.fragments import Fragment
from diloco.outer.line import UncommittedProgress, complete, keep_local, keep_residual
from diloco.outer.merge import carry, carry_fragment
from diloco.outer.state import OuterState

if TYPE_CHECKING:
    from diloco.outer.line import Line, PendingContribution


@dataclass(frozen=True)
class Adoption:
    """What a copied state means for what was trained and sent: fixed before it is adopted, booked afterwards."""

    commit: Commit | None
    """That of the state."""
    stays: bool
    """It is of the version at which the line stands: what was sent stays sent, and the next version may count it."""
    mine: Counted | None
    """What was sent, as a version counts it that leads there."""
    given_up: int
    """Tokens sent that may be counted in versions that were skipped, and must not count twice: they are not carried."""

    @property
    def discarded(self) -> int:
        """Tokens of those that no known version counts."""
        return 0 if self.mine is not None else self.given_up


def adoption(line: Line, commit: Commit | None) -> Adoption:
    """The copied state of `commit` is to be adopted. Rank 0."""
    stays = commit is not None and commit == line.commit
    given_up = line.sent.contribution.tokens if line.sent is not None and not stays else 0
    return Adoption(commit, stays, None if stays else _counted_on_the_way_to(line, commit), given_up)


def _counted_on_the_way_to(line: Line, commit: Commit | None) -> Counted | None:
    """What was sent, as a version counts it that leads to the state of `commit`: that version itself, or one that we
    could not apply. None: it is not counted, or nobody told us."""
    if line.sent is None or commit is None:
        return None
    sent = line.sent.contribution
    mine = Counted(line.peer, sent.base_version, sent.weight, sent.tokens, sent.blocks)
    reported = [line.sent.passed] if line.sent.passed is not None and line.sent.passed.lineage == commit.lineage else []
    return mine if any(mine in version.counted for version in (*reported, commit)) else None


def book_adoption(line: Line, adoption: Adoption) -> None:
    """After it was adopted. Rank 0."""
    line.diverged = False
    if adoption.stays:
        return
    line.commit = adoption.commit
    line.trained = UncommittedProgress(line.trained.tokens - adoption.given_up, 0)  # the lease is another one, too
    if not line.trained.tokens:
        line.since = line.state.version


def adopt(line: Line, state: OuterState, stays: bool = False) -> None:
    """Take over a copied state; progress that is not committed yet is carried onto the new anchor.

    `stays`: it is of the same version, and what was sent stays sent. Else what was sent is the run's or given up, and
    the residual with it: what the codec dropped of it remains.
    """
    if stays:
        keep_local(line)
    sent, line.sent = line.sent, None
    for fragment, before, after in zip(line.layout.fragments, line.state.fragments, state.fragments, strict=True):
        base: Tensor | None = line.weights.rounded(fragment, before.anchor)
        if sent is not None and sent.contribution.fragment == fragment.index:
            if stays:
                line.sent = _moved(line, fragment, sent, before.anchor, after.anchor)
            else:
                base = sent.local
                keep_residual(line, sent, fragment)
        carry_fragment(line.weights, fragment, base, after.anchor)
        complete(line, after)
    line.state = state
    if stays:
        return
    line.merge.copied()
    kept = line.residual_after_rejoin
    line.residuals = {index: residual * kept for index, residual in line.residuals.items()} if kept else {}


def _moved(line: Line, fragment: Fragment, sent: PendingContribution, old: Tensor, new: Tensor) -> PendingContribution:
    """What was sent stays sent, and the anchor under it turned out to be another."""
    rounded = partial(line.weights.rounded, fragment)
    base, onto = rounded(old), rounded(new)
    local = None if sent.local is None else rounded(carry(sent.local, base, onto))
    return replace(sent, local=local, base_if_skipped=carry(sent.base_if_skipped, base, onto))


def drop(line: Line) -> None:
    """Go back to the anchor."""
    for fragment in line.layout.fragments:
        line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
    line.sent = None


def book_drop(line: Line) -> int:
    """After that. Returns the tokens that are discarded by it; their data blocks stay used. Rank 0."""
    discarded, line.trained.tokens = line.trained.tokens, 0
    line.since = line.state.version
    return discarded
