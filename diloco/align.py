"""A late pseudo-gradient, turned towards where the others have gone meanwhile (after HeLoCo, arXiv 2606.00271).

It was measured from weights that the others have left. Tensor by tensor it is set beside the outer momentum, which is
their way: what goes the same way stays as it is, what goes across is turned, and what goes against it is made less. The
contributor does this before it encodes, so nobody else needs to know of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.fragments import Fragment

WELL_ALIGNED = 0.5
"""Cosine from which nothing is changed."""


def aligned(gradient: Tensor, momentum: Tensor, fragment: Fragment, staleness: float) -> Tensor:
    """`gradient` as it is to be sent; all flat fp32 of the fragment's length.

    With lateness l = 1 - 1 / staleness, of a tensor at cosine c to the momentum:

    - c >= `WELL_ALIGNED`: itself;
    - 0 <= c: turned, at its own length, to the cosine c + l (`WELL_ALIGNED` - c);
    - c < 0: without the share l of its component against the momentum.

    staleness: versions that closed meanwhile over the trainers; up to 1 nothing is changed.
    """
    if staleness <= 1:
        return gradient
    late, result = 1 - 1 / staleness, torch.empty_like(gradient)
    for entry in fragment.entries:
        piece = slice(entry.offset, entry.offset + entry.elements)
        result[piece] = _aligned(gradient[piece], momentum[piece], late)
    return result


def _aligned(gradient: Tensor, momentum: Tensor, late: float) -> Tensor:
    lengths = float(gradient.norm()), float(momentum.norm())
    if not all(0 < length < math.inf for length in lengths):
        return gradient
    way = momentum / lengths[1]
    along = float(torch.dot(gradient, way))
    cosine = along / lengths[0]
    if cosine >= WELL_ALIGNED:
        return gradient
    if cosine < 0:
        return gradient - way * (late * along)
    across = gradient - way * along
    beside = float(across.norm())
    if not beside:
        return gradient
    wanted = cosine + late * (WELL_ALIGNED - cosine)
    return way * (lengths[0] * wanted) + across * (lengths[0] * math.sqrt(1 - wanted**2) / beside)
