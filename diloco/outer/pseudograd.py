"""The pseudo-gradient, defined here and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor | None = None) -> Tensor:
    """anchor - local: what the outer optimizer descends (DiLoCo, arXiv 2311.08105, algorithm 1).

    Both are flat fp32 of one length, the anchor as the local weights' dtype holds it (`Weights.rounded`), lest rounding
    pass for progress; the result is `out`, or new. Subtracting it from the anchor moves towards `local`.
    """
    return torch.sub(anchor, local, out=out)
