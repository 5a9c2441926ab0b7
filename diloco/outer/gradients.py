"""The pseudo-gradient part by part, made when it is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from diloco.outer.fragments import Fragment
from diloco.outer.pseudograd import pseudo_gradient

if TYPE_CHECKING:
    from diloco.outer.line import Line


Made = Iterable[tuple[int, Callable[[], Tensor]]]
"""The number of each part that is held here, and what makes its values."""


def cut(flat: Tensor, fragment: Fragment) -> Made:
    return ((part, partial(flat.__getitem__, slice(*bounds))) for part, bounds in fragment.cuts.items())


def gradients(line: Line, fragment: Fragment, anchor: Tensor, local: Tensor | None) -> Made:
    """`local` None: of the weights as they stand."""

    def gradient(at: slice, weights: Callable[[], Tensor]) -> Tensor:
        return pseudo_gradient(anchor[at], weights())

    cuts = fragment.cuts
    made = line.weights.parts(fragment) if local is None else cut(local, fragment)
    return ((part, partial(gradient, slice(*cuts[part]), weights)) for part, weights in made)
