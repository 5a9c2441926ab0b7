"""Which of several contributions to one part is absurd: so large beside the others that no training explains it.

A mean has no defence of its own: one peer whose loss exploded, or who lies, moves it as far as it likes. Values that
are not finite never get here (`Codec.decode`).
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_RMS = 1e-3
"""The others count as at least that large. Where they hardly moved (rows of an embedding that few saw, the first steps
of a warm-up) any honest step would be a hundred times theirs; weights begin at about 0.02."""


def outlier(sizes: Sequence[float], max_norm_ratio: float) -> int | None:
    """The index of the largest contribution, if it is beyond `max_norm_ratio` times the others' lower median.

    `sizes`: the root mean square of each contribution to the part; sums over elements round differently from CPU to
    CPU, so the part's owner alone decides. One is never judged; of two, the larger by the
    smaller, for nobody could say which one lies. Zeros are peers that did not train: they set no measure. A ratio of 0
    lets everything pass.
    """
    moved = sorted(size for size in sizes if size > 0)
    if not max_norm_ratio or len(moved) < 2:
        return None
    lower_median = moved[(len(moved) - 1) // 2]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return largest if sizes[largest] > max_norm_ratio * max(lower_median, MIN_RMS) else None
