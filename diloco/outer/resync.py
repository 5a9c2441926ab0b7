"""A line onto another state: copied from others, or back to the anchor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.base.types import Commit, Counted
from diloco.outer.fragments import Fragment
from diloco.outer.landing import leave_over
from diloco.outer.line import Trained, complete, keep_local
from diloco.outer.merge import carry, carry_fragment
from diloco.outer.state import OuterState

if TYPE_CHECKING:
    from diloco.outer.line import Line, Sent


def adopt_state(line: Line, state: OuterState, commit: Commit | None) -> tuple[Counted | None, int]:
    """Take over a copied state; progress that is not committed yet is carried onto the new anchor.

    A contribution that was sent may be counted in the versions that were skipped, and must not count twice: it is not
    carried. Returns its entry, if a version that we know counts it; else None, and its tokens, which are discarded.
    Where none was skipped, as the state is that of the version at which we stand, it stays sent: the next version may
    still count it, and nothing in its place.
    """
    stays = commit is not None and commit == line.commit
    if stays:
        keep_local(line)
    given_up = line.sent.contribution.tokens if line.sent is not None and not stays else 0
    mine = _counted_on_the_way_to(line, commit)
    steps = [fragment.steps for fragment in state.fragments]
    line.ranks.announce("adopt", version=state.version, steps=steps, stays=stays)
    adopted(line, state, stays)
    line.diverged = False
    line.ranks.all(True)
    if stays:
        return None, 0
    line.commit = commit
    line.trained = Trained(line.trained.tokens - given_up, 0)  # the lease is another one, too
    if not line.trained.tokens:
        line.since = state.version
    return mine, 0 if mine is not None else given_up


def _counted_on_the_way_to(line: Line, commit: Commit | None) -> Counted | None:
    """What was sent, as a version counts it that leads to the state of `commit`: that version itself, or one that we
    could not apply. None: it is not counted, or nobody told us."""
    if line.sent is None or commit is None:
        return None
    sent = line.sent.contribution
    mine = Counted(line.peer, sent.base_version, sent.weight, sent.tokens, sent.blocks)
    told = [line.sent.passed] if line.sent.passed is not None and line.sent.passed.lineage == commit.lineage else []
    return mine if any(mine in version.counted for version in (*told, commit)) else None


def adopted(line: Line, state: OuterState, stays: bool = False) -> None:
    """`adopt_state` on one rank. `stays`: it is of the same version, and what was sent stays sent.

    Else what was sent is the run's or given up, and the residual with it: what the codec dropped of it remains.
    """
    sent, line.sent = line.sent, None
    for fragment, before, after in zip(line.layout.fragments, line.state.fragments, state.fragments, strict=True):
        base: Tensor | None = line.weights.rounded(fragment, before.anchor)
        if sent is not None and sent.contribution.fragment == fragment.index:
            if stays:
                line.sent = _moved(line, fragment, sent, before.anchor, after.anchor)
            else:
                base = sent.local
                leave_over(line, sent, fragment, lambda part: True)
        carry_fragment(line.weights, fragment, base, after.anchor)
        complete(line, after)
    line.state = state
    if stays:
        return
    line.own.clear()
    kept = line.residual_after_rejoin
    line.residuals = {index: residual * kept for index, residual in line.residuals.items()} if kept else {}


def _moved(line: Line, fragment: Fragment, sent: Sent, old: Tensor, new: Tensor) -> Sent:
    """What was sent stays sent, and the anchor under it turned out to be another."""
    rounded = partial(line.weights.rounded, fragment)
    base, onto = rounded(old), rounded(new)
    local = None if sent.local is None else rounded(carry(sent.local, base, onto))
    return replace(sent, local=local, unsent=carry(sent.unsent, base, onto))


def drop_progress(line: Line) -> int:
    """Go back to the anchor. Returns the tokens that are discarded by that; their data blocks stay used."""
    line.ranks.announce("drop")
    dropped(line)
    discarded, line.trained.tokens = line.trained.tokens, 0
    line.since = line.state.version
    return discarded


def dropped(line: Line) -> None:
    """`drop_progress` on one rank."""
    for fragment in line.layout.fragments:
        line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
    line.sent = None
