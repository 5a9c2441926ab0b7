"""A version has closed: the local weights onto its anchor, and what is left of what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.base.types import Commit
from diloco.outer.eager import fade
from diloco.outer.feedback import left_over
from diloco.outer.fragments import Fragment
from diloco.outer.merge import carry, carry_fragment, carry_piece, mix

if TYPE_CHECKING:
    from diloco.outer.line import Line, Sent


def merge_local(line: Line, commit: Commit, fragment: Fragment, counted: bool, old: Tensor, new: Tensor) -> None:
    """The local weights onto the new anchor. A part that omits us, or a version, leaves what we sent progress."""
    sent = line.sent
    unsent = line.weights.rounded(fragment, old) if sent is None else sent.unsent
    base = sent.local if counted and sent is not None else unsent
    omitted = _omitted(line, commit, fragment) if counted else []
    mixes = counted and line.merge == "mix"
    if not omitted and not mixes:
        carry_fragment(line.weights, fragment, base, new)
        return
    onto = line.weights.rounded(fragment, new)

    def merged(local: Tensor, at: slice) -> Tensor:
        anchor = onto[at]
        after = mix(local, anchor, line.mix_alpha) if mixes else carry_piece(local, base, onto, at).clone()
        for start, stop in omitted:
            here = slice(max(start - at.start, 0), max(stop - at.start, 0))
            after[here] = carry(local[here], unsent[at][here], anchor[here])
        return after

    line.weights.change(fragment, merged)


def _omitted(line: Line, commit: Commit, fragment: Fragment) -> list[tuple[int, int]]:
    """Bounds of the parts whose mean leaves us out, though the version counts us."""
    return [bounds for part, bounds in fragment.cuts.items() if not commit.counts(line.peer, part)]


def settle(line: Line, commit: Commit, fragment: Fragment, steps: int) -> None:
    """What we sent is counted: what the codec dropped of it is the residual, what we foresaw has happened; not so in
    parts that omit us. `steps`: of the state before."""
    sent = line.sent
    assert sent is not None
    leave_over(line, sent, fragment, lambda part: commit.counts(line.peer, part))
    if sent.foreseen is not None:
        own = line.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(sent.unsent))
        for start, stop in _omitted(line, commit, fragment):
            fade(line, own.part(start, stop), steps, sent.foreseen.part(start, stop))
        line.own[fragment.index] = sent.foreseen


def leave_over(line: Line, sent: Sent, fragment: Fragment, counted: Callable[[int], bool]) -> None:
    """Of the parts that are `counted`, what the codec dropped of what was sent is the residual."""
    if sent.target is not None:
        before = line.residuals.get(fragment.index)
        left = left_over(sent.target, sent.contribution.parts, fragment, line.codecs, counted, before)
        line.residuals[fragment.index] = left


def pass_over(line: Line, commit: Commit, fragment: Fragment, steps: int) -> None:
    """The version counts nothing that we know to have sent. `steps`: of the state before.

    An entry of our name is that of an earlier life, whose contribution had in it what the codec had dropped before: of
    the residual as much stays as after a copy of the state.
    """
    own, residual = line.own.get(fragment.index), line.residuals.get(fragment.index)
    if own is not None:
        line.own[fragment.index] = fade(line, own, steps)
    if residual is None or not any(entry.peer == line.peer for entry in commit.counted):
        return
    left = residual.clone()  # a checkpoint may hold the other
    for part, (start, stop) in fragment.cuts.items():
        if commit.counts(line.peer, part):
            left[start:stop] *= line.residual_after_rejoin
    line.residuals[fragment.index] = left
