"""Radial-directional averaging: the mean length in the mean direction, so that a mean keeps its length.

Contributions of different peers are nearly orthogonal, so the length of their plain mean falls like 1 / sqrt(peers),
and the outer learning rate that suits two peers is too small for sixteen. Here lengths and directions are averaged
apart (Decoupled DiLoCo, arXiv 2604.21428):

    mean = (sum w_i |v_i| / sum w_i) * unit(sum w_i unit(v_i))

Ours takes one part of a fragment for v, where the paper takes one tensor, and for embeddings the plain mean. A part's
owner computes it, and the result travels as bytes; it is the same bits on any CPU all the same, so that `diloco replay`
can make it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 2.0**-23
"""Spacing of fp32 numbers at 1: directions whose sum is shorter than that, relative to their weights, cancel out."""


def radial_mean(decoded: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """The radial-directional mean of one part, a new flat fp32 tensor.

    `decoded`: at least one flat fp32 host tensor of finite values, all of one length, in the order of the view;
    `weights`: one per tensor, >= 0, of which only ratios count. A contribution of weight 0 does not count at all; one
    of zeros has a length, which is 0, but no direction. Where only one counts, the mean is its bits. Without any
    weight, or where the directions cancel out, it is zero. Values beyond fp32 saturate.
    """
    counted = [(values, weight) for values, weight in zip(decoded, weights, strict=True) if weight > 0]
    if len(counted) == 1:
        return counted[0][0].clone()
    direction = torch.zeros(decoded[0].numel(), dtype=torch.float64, device="cpu")
    lengths = []
    for values, weight in counted:
        exact = values.double()
        length = _length(exact)
        lengths.append(weight * length)
        if length > 0:
            direction.add_(exact.mul_(weight / length))
    total = sum(weight for _, weight in counted)
    resultant = _length(direction)
    if resultant <= total * ROUNDING:
        return torch.zeros_like(decoded[0])
    return direction.mul_(math.fsum(lengths) / total / resultant).float().nan_to_num_()


def _length(values: Tensor) -> float:
    """The Euclidean norm of flat fp64 values, the same bits on any CPU.

    Their squares are added by halves, element by element: the order that torch sums in depends on threads and vectors.
    """
    squares = values * values
    while squares.numel() > 1:
        half = (squares.numel() + 1) // 2
        squares[: squares.numel() - half] += squares[half:]
        squares = squares[:half]
    return math.sqrt(squares.item())
