"""Error feedback: what a codec dropped is not lost, it is sent later (Seide et al. 2014; SparseLoCo, arXiv 2508.15706).

    target = pseudo-gradient + decay * residual;  sent = decode(encode(target));  residual = target - sent

The residual is final only when a version has counted what was sent: a round that is skipped leaves it as it was, and
so does a part whose owner left the contribution out. Host memory: 4 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diloco.compress import Codec
from diloco.fragments import Fragment


def with_residual(gradient: Tensor, residual: Tensor | None, decay: float) -> Tensor:
    """What to encode: both flat fp32 of one length; None is a residual of zero."""
    return gradient if residual is None else gradient + residual * decay


def left_over(
    target: Tensor,
    parts: Sequence[bytes],
    fragment: Fragment,
    codecs: Sequence[Codec],
    counted: Callable[[int], bool],
    before: Tensor | None,
) -> Tensor:
    """The new residual, flat fp32. Where a part was not `counted` it is still the one of `before`.

    `codecs`: by group of parameters.
    """
    residual = torch.zeros_like(target) if before is None else before.clone()
    for part, (start, stop) in fragment.cuts.items():
        if counted(part):
            sent = codecs[fragment.group_of(part)].decode(parts[part], stop - start)
            torch.sub(target[start:stop], sent, out=residual[start:stop])
    return residual
