"""Which layers are in which stage of a pipeline, and which stages a rank has: arithmetic only.

A stage is some consecutive blocks; the first has the embedding as well, the last the final norm and the head. A step
takes as long as the slowest stage lets it, so they are cut to be equally costly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from diloco.config.contract import ModelSection
from diloco.config.site import MeshSection, PipelineSchedule

LOOPED: tuple[PipelineSchedule, ...] = ("interleaved-1f1b", "zero-bubble", "zbv")
"""Schedules under which a rank has several stages, `mesh.chunks` of them."""
SPLIT: tuple[PipelineSchedule, ...] = ("zero-bubble", "zbv")
"""Those that compute the gradients of inputs and of weights apart, the latter when there is nothing else to do."""


def count_stages(section: MeshSection, ranks: int) -> int:
    """Stages of a pipeline of so many ranks."""
    return ranks * section.chunks if section.schedule in LOOPED else ranks


def stages_of(place: int, section: MeshSection, ranks: int) -> list[int]:
    """The stages of the rank at this place of a pipeline, the earliest first.

    Round and round over the ranks; under `zbv` there and back, so that the first rank has the last stage.
    """
    if section.schedule == "zbv":
        return [place, 2 * ranks - 1 - place]
    return list(range(place, count_stages(section, ranks), ranks))


def home_of(stage: int, section: MeshSection, ranks: int) -> int:
    """The place of the rank that has a stage."""
    if section.schedule == "zbv":
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def layer_costs(model: ModelSection, vocabulary: int, sequence_length: int) -> list[float]:
    """Multiplications of one token in each block; in the first those of the embedding as well, in the last the head's.

    Of a token's matrices, each element is one; attention to half of the sequence on average takes 2 D each. A row of
    the embedding counts D.
    """
    kv_width = (model.kv_heads or model.heads) * (model.dim // model.heads)
    attention = 2 * model.dim * (model.dim + kv_width) + model.dim * sequence_length
    experts = (model.experts_per_token + model.shared_experts) * model.expert_width
    width = experts if model.experts else model.ffn_width
    costs = [float(attention + 3 * model.dim * width + model.dim * model.experts)] * model.layers
    costs[0] += model.dim
    costs[-1] += model.dim * vocabulary
    return costs


def cut(costs: Sequence[float], pieces: int) -> list[range]:
    """Indices cut into so many consecutive pieces, none empty, such that the most costly one costs the least.

    Among such cuts one whose pieces are alike (the least sum of squares); of two of these, the one with more in front.
    `pieces` is at most the number of costs.
    """
    sums = [0.0, *accumulate(costs)]
    # best[end]: (largest piece, sum of squares, cuts) of the first `end` costs, in as many pieces as there were rounds.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for piece in range(1, pieces + 1):
        ends = range(piece, len(costs) - pieces + piece + 1)
        best = {end: min(_extended(best, start, end, sums) for start in best if start < end) for end in ends}
    cuts = [-at for at in best[len(costs)][2]]
    return [range(start, end) for start, end in pairwise(cuts)]


def _extended(
    best: dict[int, tuple[float, float, tuple[int, ...]]], start: int, end: int, sums: Sequence[float]
) -> tuple[float, float, tuple[int, ...]]:
    """The best cut up to `start`, with the piece from there to `end`. Cuts are negated, to prefer the later one."""
    largest, squares, cuts = best[start]
    cost = sums[end] - sums[start]
    return max(largest, cost), squares + math.pow(cost, 2), (*cuts, -end)
