"""Error feedback: what a codec dropped is not lost, it is sent later (Seide et al. 2014; SparseLoCo, arXiv 2508.15706).

    target = pseudo-gradient + decay * residual;  sent = decode(encode(target));  residual = target - sent

The residual is final only when a version has counted what was sent: a round that is skipped leaves it as it was, and
so does a part whose owner left the contribution out. Host memory: 4 bytes per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diloco.compress import Codec, kernels
from diloco.compress.codec import magnitude
from diloco.outer.fragments import Fragment
from diloco.outer.state import tiles


def with_residual(gradient: Tensor, residual: Tensor | None, decay: float, out: Tensor) -> bool:
    """Fill `out`, which may be `gradient`, with what to encode. Returns whether that is finite.

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
    """`target`, flat fp32, made the new residual in place. Where a part was not `counted` that is still the one of
    `before`.

    `codecs`: by group of parameters.
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
