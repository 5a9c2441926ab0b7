"""The strategy `eager`: local weights go ahead by what the outer step will do with their own contribution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.base.types import Commit
from diloco.outer.fragments import Fragment
from diloco.outer.merge import Carry, Mix, carry, eager_step, left_out
from diloco.outer.state import FragmentState

if TYPE_CHECKING:
    from diloco.outer.line import Line, PendingContribution


class Eager(Carry):
    """`eager_step` (arXiv 2502.12996): a contribution's own share of the mean is applied while it is on its way.

    Host memory: a fragment's anchor and slots once more for each fragment.
    """

    needs_gradient = True

    def __init__(self) -> None:
        self.own: dict[int, FragmentState] = {}
        """By fragment: the outer steps that this peer's contributions alone would have made."""

    def sent(
        self, line: Line, sent: PendingContribution, fragment: Fragment, gradient: Tensor | None, share: float
    ) -> PendingContribution:
        """Moves the fragment's local weights to where the outer step will have them, as far as that is known."""
        assert gradient is not None
        before = line.state.fragments[fragment.index]
        own = self.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(gradient))
        own_share = eager_step(replace(own, steps=before.steps), gradient, share, line.optimizer)
        line.weights.write(fragment, before.anchor + own_share.anchor)
        local = line.weights.read(fragment)  # as rounded to the parameters' dtype
        return replace(sent, local=local, base_if_skipped=local + gradient, own_share=own_share)

    def withdrawn(self, line: Line, sent: PendingContribution) -> None:
        """Takes out of the local weights what it foresaw."""
        fragment = line.layout.fragments[sent.contribution.fragment]
        anchor = line.weights.rounded(fragment, line.state.fragments[fragment.index].anchor)
        line.weights.write(fragment, carry(line.weights.read(fragment), sent.base_if_skipped, anchor))

    def counted(self, line: Line, sent: PendingContribution, commit: Commit, fragment: Fragment, steps: int) -> None:
        """What it foresaw has happened, but not in parts that omit this peer."""
        assert sent.own_share is not None
        own = self.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(sent.base_if_skipped))
        for start, stop in left_out(line.peer, commit, fragment):
            self._fade(line, own.part(start, stop), steps, sent.own_share.part(start, stop))
        self.own[fragment.index] = sent.own_share

    def uncounted(self, line: Line, fragment: Fragment, steps: int) -> None:
        """Only the momentum of its own contributions goes on."""
        own = self.own.get(fragment.index)
        if own is not None:
            self.own[fragment.index] = self._fade(line, own, steps)

    def copied(self) -> None:
        """Forgets its own contributions."""
        self.own.clear()

    def _fade(self, line: Line, own: FragmentState, steps: int, into: FragmentState | None = None) -> FragmentState:
        return line.optimizer.step(replace(own, steps=steps), torch.zeros_like(own.anchor), into)


def open_merge(name: str, mix_alpha: float) -> Carry:
    """The strategy of a contract (`SyncSection.merge` and `mix_alpha`)."""
    if name == "eager":
        return Eager()
    return Mix(mix_alpha) if name == "mix" else Carry()
