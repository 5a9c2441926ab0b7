"""What `eager` takes ahead of the outer step, and how it is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment
from diloco.outer.merge import carry, foresee
from diloco.outer.state import FragmentState

if TYPE_CHECKING:
    from diloco.outer.line import Line, Sent


def look_ahead(line: Line, sent: Sent, fragment: Fragment, gradient: Tensor, share: float) -> Sent:
    before = line.state.fragments[fragment.index]
    own = line.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(gradient))
    foreseen = foresee(replace(own, steps=before.steps), gradient, share, line.optimizer)
    line.weights.write(fragment, before.anchor + foreseen.anchor)
    local = line.weights.read(fragment)  # as rounded to the parameters' dtype
    return replace(sent, local=local, unsent=local + gradient, foreseen=foreseen)


def withdraw(line: Line) -> None:
    """What was sent comes to nothing, and nobody holds it: it is progress again, unless a version counts it."""
    sent = line.sent
    if sent is not None and sent.passed is not None:
        return
    line.ranks.announce("withdraw")
    if sent is not None and sent.foreseen is not None:
        forget_foreseen(line, sent)
    line.sent = None


def forget_foreseen(line: Line, sent: Sent) -> None:
    """Take out of the local weights what `eager` foresees."""
    fragment = line.layout.fragments[sent.contribution.fragment]
    anchor = line.weights.rounded(fragment, line.state.fragments[fragment.index].anchor)
    line.weights.write(fragment, carry(line.weights.read(fragment), sent.unsent, anchor))


@contextmanager
def weights_to_keep(line: Line) -> Iterator[None]:
    """Meanwhile the model holds anchor plus all progress that is not committed: without what `eager` foresees.

    A checkpoint holds these, for a contribution that is on its way is progress after a restart.
    """
    line.ranks.announce("stand_without_foreseen")
    sent = line.sent
    if sent is None or sent.foreseen is None:
        try:
            yield
        finally:
            line.ranks.announce("stand_back")
        return
    fragment = line.layout.fragments[sent.contribution.fragment]
    local = line.weights.read(fragment)
    forget_foreseen(line, sent)
    try:
        yield
    finally:
        line.ranks.announce("stand_back")
        line.weights.write(fragment, local)


def fade(line: Line, own: FragmentState, steps: int, into: FragmentState | None = None) -> FragmentState:
    """What our contributions made of the outer state, to `eager`, where a version has none: only momentum goes on."""
    return line.optimizer.step(replace(own, steps=steps), torch.zeros_like(own.anchor), into)
