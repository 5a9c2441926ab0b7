"""The pseudo-gradient, defined here and nowhere else; its alignment when it is late; and error feedback.

Error feedback (Seide et al. 2014; SparseLoCo, arXiv 2508.15706) sends later what a codec dropped:

    target = pseudo-gradient + decay * residual;  sent = decode(encode(target));  residual = target - sent

The residual is final only when a version has counted what was sent: a round that is skipped leaves it as it was, and so
does a part whose owner left the contribution out. Host memory: 4 bytes per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from diloco.compress import Codec, kernels
from diloco.compress.codec import magnitude
from diloco.outer.fragments import Fragment, Weights
from diloco.outer.state import tiles


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor | None = None) -> Tensor:
    """anchor - local: what the outer optimizer descends (DiLoCo, arXiv 2311.08105, algorithm 1).

    Both are flat fp32 of one length, the anchor as the local weights' dtype holds it (`Weights.rounded`), lest rounding
    pass for progress; the result is `out`, or new. Subtracting it from the anchor moves towards `local`.
    """
    return torch.sub(anchor, local, out=out)


def gradients(
    weights: Weights,
    fragment: Fragment,
    codecs: Sequence[Codec],
    anchor: Tensor,
    local: Tensor | None,
    target: Tensor | None,
) -> Iterator[tuple[int, Codec, Callable[[], Tensor]]]:
    """Pseudo-gradient of a fragment, part by part: number, codec, and a function that makes the values when asked.

    `target`: where it is here whole, flat fp32. Else it is the pseudo-gradient of `local`; None: of the weights as they
    are.
    """

    def gradient(at: slice, values: Callable[[], Tensor]) -> Tensor:
        return pseudo_gradient(anchor[at], values())

    whole = local if target is None else target
    if whole is None:
        made = weights.parts(fragment)
    else:
        made = ((part, partial(whole.__getitem__, slice(*bounds))) for part, bounds in fragment.cuts.items())
    for part, values in made:
        made_here = values if target is not None else partial(gradient, slice(*fragment.cuts[part]), values)
        yield part, codecs[fragment.group_of(part)], made_here


Total = Callable[[Tensor], Tensor]
WELL_ALIGNED = 0.5
"""Cosine from which nothing is changed."""


def aligned(
    gradient: Tensor, momentum: Tensor, fragment: Fragment, staleness: float, total: Total = lambda sums: sums
) -> Tensor:
    """A late pseudo-gradient, turned towards the outer momentum (after HeLoCo, arXiv 2606.00271).

    `gradient` was measured from weights that the others have left; the outer `momentum` is their way. Both are flat
    fp32 of the fragment's length. The contributor does this before it encodes, so nobody else needs to know of it.

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
    """A piece of `aligned`, of one tensor. `sums`: the tensor's squares, the outer momentum's, their products."""
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


def with_residual(gradient: Tensor, residual: Tensor | None, decay: float, out: Tensor) -> bool:
    """Add the residual of error feedback to a pseudo-gradient, into `out`, perhaps `gradient`. Returns whether finite.

    All flat fp32 of one length; None is a residual of zero.
    """
    finite = kernels.with_residual(gradient, residual, decay, out) if residual is not None else None
    if finite is not None:
        return finite
    finite = True
    for tile in tiles(gradient.numel()):
        if residual is not None:
            torch.add(gradient[tile], residual[tile] * decay, out=out[tile])
        elif out is not gradient:
            out[tile] = gradient[tile]
        finite = finite and math.isfinite(magnitude(out[tile]))
    return finite


def left_over(
    target: Tensor,
    parts: Sequence[bytes],
    fragment: Fragment,
    codecs: Sequence[Codec],
    counted: Callable[[int], bool],
    before: Tensor | None,
) -> Tensor:
    """The residual of error feedback after a round: `target`, flat fp32, changed in place. In a part that was not
    `counted` it is that of `before`. `codecs`: by group of parameters.
    """
    encoded = parts[:]  # waits: they may still be made of this very target
    for part, (start, stop) in fragment.cuts.items():
        left = target[start:stop]
        if counted(part):
            codecs[fragment.group_of(part)].fold(encoded[part], -1.0, left)
        elif before is not None:
            left.copy_(before[start:stop])
        else:
            left.zero_()
    return target
