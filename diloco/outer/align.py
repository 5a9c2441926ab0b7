"""A late pseudo-gradient, turned towards where the others have gone meanwhile (after HeLoCo, arXiv 2606.00271).

It was measured from weights that the others have left. Tensor by tensor it is set beside the outer momentum, which is
their way: what goes the same way stays as it is, what goes across is turned, and what goes against it is made less. The
contributor does this before it encodes, so nobody else needs to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment

Total = Callable[[Tensor], Tensor]
WELL_ALIGNED = 0.5
"""Cosine from which nothing is changed."""


def aligned(
    gradient: Tensor, momentum: Tensor, fragment: Fragment, staleness: float, total: Total = lambda sums: sums
) -> Tensor:
    """`gradient` as it is to be sent; all flat fp32 of the fragment's length.

    With lateness l = 1 - 1 / staleness, of a tensor at cosine c to the momentum:

    - c >= `WELL_ALIGNED`: itself;
    - 0 <= c: turned, at its own length, to the cosine c + l (`WELL_ALIGNED` - c);
    - c < 0: without the share l of its component against the momentum.

    staleness: versions that closed meanwhile over the trainers; up to 1 nothing is changed. `total` sums over the ranks
    that hold the fragment together.
    """
    if staleness <= 1:
        return gradient
    names = {entry.name: row for row, entry in enumerate(fragment.entries)}
    sums = torch.zeros(len(names), 3, dtype=torch.float64, device="cpu")
    pieces = [(names[spot.name], slice(spot.offset, spot.end)) for spot in fragment.spots]
    for row, at in pieces:
        pairs = (gradient, gradient), (momentum, momentum), (gradient, momentum)
        products = [float(torch.dot(one[at], other[at])) for one, other in pairs]
        sums[row] += torch.tensor(products, dtype=torch.float64, device="cpu")
    sums, late, result = total(sums), 1 - 1 / staleness, torch.empty_like(gradient)
    for row, at in pieces:
        result[at] = _aligned(gradient[at], momentum[at], late, sums[row].tolist())
    return result


def _aligned(gradient: Tensor, momentum: Tensor, late: float, sums: list[float]) -> Tensor:
    """A piece of a tensor; `sums`: the whole tensor's squares, the momentum's, and their products."""
    if not all(0 < square < math.inf for square in sums[:2]):
        return gradient
    lengths = math.sqrt(sums[0]), math.sqrt(sums[1])
    way = momentum / lengths[1]
    along = sums[2] / lengths[1]
    cosine = along / lengths[0]
    if cosine >= WELL_ALIGNED:
        return gradient
    if cosine < 0:
        return gradient - way * (late * along)
    across = gradient - way * along
    beside = math.sqrt(max(sums[0] - along**2, 0.0))
    if not beside:
        return gradient
    wanted = cosine + late * (WELL_ALIGNED - cosine)
    return way * (lengths[0] * wanted) + across * (lengths[0] * math.sqrt(1 - wanted**2) / beside)
