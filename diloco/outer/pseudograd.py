"""The pseudo-gradient, defined here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment, Weights


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor | None = None) -> Tensor:
    """anchor - local: what the outer optimizer descends (DiLoCo, arXiv 2311.08105, algorithm 1).

    Both are flat fp32 of one length, the anchor as the local weights' dtype holds it (`Weights.rounded`), lest rounding
    pass for progress; the result is `out`, or new. Subtracting it from the anchor moves towards `local`.
    """
    return torch.sub(anchor, local, out=out)


def gradients(
    weights: Weights, fragment: Fragment, anchor: Tensor, local: Tensor | None, target: Tensor | None
) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """What to encode, part by part: its number, and what makes its values when somebody asks for them.

    `target`: where it is here whole, flat fp32. Else it is the pseudo-gradient of `local`; None: of the weights as they
    stand.
    """
    cuts = fragment.cuts
    if target is not None:
        yield from ((part, partial(target.__getitem__, slice(*bounds))) for part, bounds in cuts.items())
        return

    def gradient(at: slice, values: Callable[[], Tensor]) -> Tensor:
        return pseudo_gradient(anchor[at], values())

    held = local.__getitem__ if local is not None else None
    made = weights.parts(fragment) if held is None else ((p, partial(held, slice(*b))) for p, b in cuts.items())
    yield from ((part, partial(gradient, slice(*cuts[part]), values)) for part, values in made)
