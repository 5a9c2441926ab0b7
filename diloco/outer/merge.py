"""What becomes of the local weights when a version closes, and while a contribution is on its way.

The invariant of every mode: local = anchor + progress that is not committed yet; the anchor as the parameters' dtype
holds it (`Weights.rounded`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment, Weights
from diloco.outer.state import FragmentState, OuterOptimizer, tiles


def carry(local: Tensor, base: Tensor, anchor: Tensor) -> Tensor:
    """Move progress that is not committed yet onto a new anchor: anchor + (local - base).

    `local` is what the peer holds now and `anchor` the new one, both flat fp32; `base` says what of `local` is
    already accounted for:

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
    """`carry` a fragment's parameters (any device, any dtype) in place.

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
    """`carry` the piece of a fragment that is `at` a place of the flat `base` and `anchor`. May be a view of those."""
    if base is None or torch.equal(local, base[at]):
        return anchor[at]
    return carry(local, base[at], anchor[at])


def mix(local: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """alpha * local + (1 - alpha) * anchor (Streaming DiLoCo, arXiv 2501.18512, algorithm 2), flat fp32.

    For a version that counted us. `alpha` 0 drops what was trained while the bytes were in flight. Above 0 the local
    weights stay apart from the anchor by a share of what was committed already, and the next pseudo-gradient holds
    that share once more: so it is published.
    """
    return local * alpha + anchor * (1.0 - alpha)


def foresee(own: FragmentState, gradient: Tensor, share: float, optimizer: OuterOptimizer) -> FragmentState:
    """What the outer step will do with our own share of a mean that is still on its way (arXiv 2502.12996, eager).

    `own`: the steps that our contributions alone would have made, of a zero anchor; `gradient`, flat fp32: the
    pseudo-gradient just sent; `share`: its weight in the mean, 1 / peers. The result's anchor is what to add to the
    agreed one. Outer steps are linear in what they are given (SGD, Nesterov), so this is exactly the paper's replica,
    which steps by its own fresh share and the others' previous one, while the agreed anchor stays the same for all.
    """
    return optimizer.step(FragmentState(torch.zeros_like(gradient), own.slots, own.steps), gradient * share)
