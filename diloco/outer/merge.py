"""Merge strategies: the local weights when a version closes, and while a contribution is on its way.

The invariant of every mode: local = anchor + progress that is not committed yet; the anchor as the parameters' dtype
holds it (`Weights.rounded`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.base.types import Commit
from diloco.outer.fragments import Fragment, Weights
from diloco.outer.state import FragmentState, tiles

if TYPE_CHECKING:
    from diloco.outer.line import Line, PendingContribution


class Carry:
    """Merge strategy `carry`: a version that counts a contribution leaves the anchor, and what was trained since it was
    measured. The base of the other strategies, which look at more than the weights at hand.
    """

    needs_gradient = False
    """Whether the pseudo-gradient is needed whole when it is sent, and the old anchor when its version closes."""
    alpha: float | None = None
    """Share of the local weights that `mix` keeps."""

    def sent(
        self, line: Line, sent: PendingContribution, fragment: Fragment, gradient: Tensor | None, share: float
    ) -> PendingContribution:
        """Prepare the merge of a contribution of `gradient`, flat fp32, to weigh `share` of the mean. Returns it."""
        return sent

    def withdrawn(self, line: Line, sent: PendingContribution) -> None:
        """Undo what the merge strategy did for a contribution that comes to nothing."""

    def land(self, line: Line, commit: Commit, fragment: Fragment, counted: bool, old: Tensor, new: Tensor) -> None:
        """Merge the local weights onto the new anchor. A part that omits this peer, or a version, leaves it progress.

        `old`, `new`: anchors before and after, flat fp32. `counted`: the version counts what was sent.
        """
        sent = line.sent
        base_if_skipped = line.weights.rounded(fragment, old) if sent is None else sent.base_if_skipped
        base = sent.local if counted and sent is not None else base_if_skipped
        omitted = left_out(line.peer, commit, fragment) if counted else []
        if not omitted and not (counted and self.alpha is not None):
            carry_fragment(line.weights, fragment, base, new)
            return
        onto = line.weights.rounded(fragment, new)

        def merged(local: Tensor, at: slice) -> Tensor:
            if counted and self.alpha is not None:
                after = mix(local, onto[at], self.alpha)
            else:
                after = carry_piece(local, base, onto, at).clone()  # it may be a view of the anchor
            for start, stop in omitted:
                here = slice(max(start - at.start, 0), max(stop - at.start, 0))
                after[here] = carry(local[here], base_if_skipped[at][here], onto[at][here])
            return after

        line.weights.change(fragment, merged)

    def counted(self, line: Line, sent: PendingContribution, commit: Commit, fragment: Fragment, steps: int) -> None:
        """Update the merge strategy: a version counts the contribution. `steps`: outer steps before it."""

    def uncounted(self, line: Line, fragment: Fragment, steps: int) -> None:
        """Update the merge strategy: a version counts no contribution of this life."""

    def copied(self) -> None:
        """Reset the merge strategy: the outer state was copied from others."""


class Mix(Carry):
    """Merge strategy `mix`: a version that counts a contribution leaves a share of the local weights."""

    def __init__(self, alpha: float) -> None:
        """`alpha`: share of the local weights (`SyncSection.mix_alpha`)."""
        self.alpha = alpha


def left_out(peer: str, commit: Commit, fragment: Fragment) -> list[tuple[int, int]]:
    """Bounds, in the flat fragment, of the parts whose mean leaves `peer` out: there its progress stays."""
    return [bounds for part, bounds in fragment.cuts.items() if not commit.counts(peer, part)]


def carry(local: Tensor, base: Tensor, anchor: Tensor) -> Tensor:
    """Move progress that is not committed yet onto a new anchor: anchor + (local - base).

    `local` is what the peer holds now and `anchor` the new one, both flat fp32; `base` is the part of `local`
    that is already accounted for:

    - the commit counted us: `base` is `local` as it was when the contribution was measured. Without overlap
      nothing was done since, and the result is the anchor.
    - the commit did not count us: `base` is the old anchor, and all progress since is kept.

    Where `local` equals `base` the result has the anchor's very bits: anchor + 0.0 would turn a -0.0 into 0.0,
    and peers without progress must not differ.
    """
    carried = torch.empty_like(anchor)
    for tile in tiles(anchor.numel()):
        moved = (local[tile] - base[tile]).add_(anchor[tile])
        torch.where(local[tile] == base[tile], anchor[tile], moved, out=carried[tile])
    return carried


def carry_fragment(weights: Weights, fragment: Fragment, base: Tensor | None, anchor: Tensor) -> None:
    """`carry` a fragment's local weights (any device, any dtype) onto a new anchor, in place.

    `base` and `anchor`: flat fp32. Where nothing was done since `base` they are only compared and overwritten.
    `base` None: nothing was done at all. Progress is added to the anchor as the parameters' dtype holds it, and the sum
    rounded to that.
    """
    if base is None:
        weights.write(fragment, anchor)
    else:
        onto = weights.rounded(fragment, anchor)
        weights.change(fragment, lambda local, at: carry_piece(local, base, onto, at))


def carry_piece(local: Tensor, base: Tensor | None, anchor: Tensor, at: slice) -> Tensor:
    """`carry` the piece of a fragment `at` a place of `base` onto the new `anchor`. May be a view of those."""
    if base is None or torch.equal(local, base[at]):
        return anchor[at]
    return carry(local, base[at], anchor[at])


def mix(local: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Merge as alpha * local + (1 - alpha) * anchor (Streaming DiLoCo, arXiv 2501.18512, algorithm 2), flat fp32.

    For a version that counted us. `alpha` 0 drops what was trained while the bytes were in flight. Above 0 the local
    weights stay apart from the anchor by a share of what was committed already, and the next pseudo-gradient holds
    that share once more: so it is published.
    """
    return local * alpha + anchor * (1.0 - alpha)


class Eager(Carry):
    """Merge strategy `eager` (arXiv 2502.12996): the outer step of a contribution's own share of the mean moves the
    local weights while the contribution is on its way.

    Outer steps are linear in what they are given (SGD, Nesterov), so this is exactly the paper's replica, which steps
    by its own fresh share and the others' previous one, while the agreed anchor stays the same for all. Host memory: a
    fragment's anchor and slots once more for each fragment.
    """

    needs_gradient = True

    def __init__(self) -> None:
        self.own: dict[int, FragmentState] = {}
        """By fragment: the outer steps that this peer's contributions alone would have made."""

    def sent(
        self, line: Line, sent: PendingContribution, fragment: Fragment, gradient: Tensor | None, share: float
    ) -> PendingContribution:
        """Move the fragment's local weights ahead by the outer step of this contribution's own share of the mean."""
        assert gradient is not None
        before = line.state.fragments[fragment.index]
        own = self.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(gradient))
        # From a zero anchor, so that the result's anchor is what to add to the agreed one.
        start = FragmentState(torch.zeros_like(gradient), own.slots, before.steps)
        own_share = line.optimizer.step(start, gradient * share)
        line.weights.write(fragment, before.anchor + own_share.anchor)
        local = line.weights.read(fragment)  # as rounded to the parameters' dtype
        return replace(sent, local=local, base_if_skipped=local + gradient, own_share=own_share)

    def withdrawn(self, line: Line, sent: PendingContribution) -> None:
        """Take the outer step of the contribution's own share out of the local weights again."""
        fragment = line.layout.fragments[sent.contribution.fragment]
        anchor = line.weights.rounded(fragment, line.state.fragments[fragment.index].anchor)
        line.weights.write(fragment, carry(line.weights.read(fragment), sent.base_if_skipped, anchor))

    def counted(self, line: Line, sent: PendingContribution, commit: Commit, fragment: Fragment, steps: int) -> None:
        """Keep the own share as part of the outer step that was made, but not in parts that omit this peer."""
        assert sent.own_share is not None
        own = self.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(sent.base_if_skipped))
        for start, stop in left_out(line.peer, commit, fragment):
            self._fade(line, own.part(start, stop), steps, sent.own_share.part(start, stop))
        self.own[fragment.index] = sent.own_share

    def uncounted(self, line: Line, fragment: Fragment, steps: int) -> None:
        """Step the outer momentum of this peer's own contributions on, without a new one."""
        own = self.own.get(fragment.index)
        if own is not None:
            self.own[fragment.index] = self._fade(line, own, steps)

    def copied(self) -> None:
        """Reset the outer momentum of this peer's own contributions: the outer state was copied."""
        self.own.clear()

    def _fade(self, line: Line, own: FragmentState, steps: int, into: FragmentState | None = None) -> FragmentState:
        return line.optimizer.step(replace(own, steps=steps), torch.zeros_like(own.anchor), into)


def open_merge(name: str, mix_alpha: float) -> Carry:
    """The merge strategy of a contract (`SyncSection.merge` and `mix_alpha`)."""
    if name == "eager":
        return Eager()
    return Mix(mix_alpha) if name == "mix" else Carry()
