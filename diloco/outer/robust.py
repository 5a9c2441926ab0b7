"""Rules for a part's mean that hold against members who lie about their values (`outer.aggregation`).

A mean goes as far as one liar likes. These rules bound that as long as liars are a quarter of the contributions:

    clip      a contribution longer than 1.5 times the median length is cut to that, then the weighted mean
    centred   centred clipping (Karimireddy, He, Jaggi 2021, arXiv 2012.10333): from the median of each value, three
              steps by the weighted mean of the differences, each cut to the median of their lengths
    trimmed   for each value, the weighted mean without the quarter of the contributions, at least one, at either end
    median    for each value, the middle one, or the plain mean of the middle two; trimmed mean and median are those of
              Yin, Chen, Ramchandran, Bartlett 2018, arXiv 1803.01498

A length is that of one part. What cuts and trims counts heads, because a weight is its sender's own word. Only what is
left is weighted, by at most twice the median weight. All is fp64 with separately rounded operations in a fixed order:
the same bits on any CPU, so that every receiver of a bundle and `diloco replay` make them again. Memory: one decoded
part from each contributor, two more in fp64, and 64 Ki values of each contributor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from diloco.compress import Codec, open_codecs
from diloco.config.contract import Contract

N = TypeVar("N", int, float)
Rule = Literal["mean", "radial", "clip", "centred", "trimmed", "median"]
"""Rule by which the contributions to a part become its mean."""
ROBUST: tuple[Rule, ...] = ("clip", "centred", "trimmed", "median")
MIN_CONTRIBUTIONS = 3
"""Fewer are averaged plainly: nobody could say which of two that differ lies."""
LONG = 1.5
"""`clip`: a contribution is cut to so many median lengths."""
CENTRED_STEPS = 3
TRIMMED = 0.25
"""Share of the contributions that `trimmed` leaves out at either end."""
HEAVY = 2
"""A contribution weighs at most so many median weights."""
FAR = 2.0
"""A contribution is an outlier where it is further from the mean than so many median distances."""
CHUNK = 2**16
"""Values of a part that are worked on at a time: they stay in the cache."""


def is_robust(rule: Rule, weights: Iterable[int]) -> bool:
    """Whether a part's mean is made by `robust_mean`; otherwise it is the rule's own, or the plain one."""
    return rule in ROBUST and sum(weight > 0 for weight in weights) >= MIN_CONTRIBUTIONS


def robust_mean(decoded: Sequence[Tensor], weights: Sequence[int], rule: Rule) -> tuple[Tensor, list[int]]:
    """The mean of one part by a robust rule, a new flat fp32 tensor, and the places of outliers.

    `decoded`: flat fp32 host tensors of finite values, all of one length, in the order of the view; `weights`: one per
    tensor, of which only ratios count. A contribution of weight 0 does not count at all. Three or more must count.
    """
    places = [place for place, weight in enumerate(weights) if weight > 0]
    counted = [decoded[place] for place in places]
    most = HEAVY * _lower_median([weights[place] for place in places])
    capped = [min(weights[place], most) for place in places]
    shares = [weight / sum(capped) for weight in capped]
    mean = _RULES[rule](counted, shares)
    away = _lengths(counted, mean)
    outliers = [place for place, length in zip(places, away, strict=True) if length > FAR * _lower_median(away)]
    return mean.float().nan_to_num_(), outliers


def _clip(counted: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    zero = torch.zeros(counted[0].numel(), dtype=torch.float64, device="cpu")
    lengths = _lengths(counted, zero)
    usual = _lower_median([length for length in lengths if length > 0] or [0.0])  # zeros did not train
    return _moved(zero, counted, shares, lengths, LONG * usual)


def _centred(counted: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    centre = _median(counted, shares)
    for _ in range(CENTRED_STEPS):
        away = _lengths(counted, centre)
        centre = _moved(centre, counted, shares, away, _lower_median(away))
    return centre


def _trimmed(counted: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    ends = max(1, int(TRIMMED * len(counted)))
    weights = torch.tensor(shares, dtype=torch.float64, device="cpu")[:, None]

    def trimmed(values: Tensor) -> Tensor:
        ordered = _ordered(values)
        # Values equal to the last one that is left are left, too: whose they are makes no difference.
        left = (values >= ordered[ends]) & (values <= ordered[-1 - ends])
        return _sum(torch.where(left, values * weights, 0.0)) / _sum(torch.where(left, weights, 0.0))

    return _by_chunks(counted, trimmed)


def _median(counted: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The middle of each value, without weights."""
    low, high = (len(counted) - 1) // 2, len(counted) // 2

    def middle(values: Tensor) -> Tensor:
        ordered = _ordered(values)
        return (ordered[low].double() + ordered[high]) * 0.5

    return _by_chunks(counted, middle)


_RULES: Mapping[Rule, Callable[[Sequence[Tensor], Sequence[float]], Tensor]] = {
    "clip": _clip,
    "centred": _centred,
    "trimmed": _trimmed,
    "median": _median,
}


def _by_chunks(counted: Sequence[Tensor], merge: Callable[[Tensor], Tensor]) -> Tensor:
    """`merge` of the contributions' values, (contributions, values) fp32, as one flat fp64 tensor."""
    merged = torch.empty(counted[0].numel(), dtype=torch.float64, device="cpu")
    for start in range(0, len(merged), CHUNK):
        values = torch.stack([one[start : start + CHUNK] for one in counted])
        merged[start : start + CHUNK] = merge(
            values.add_(0.0)
        )  # -0.0 becomes 0.0: which is the smaller is not agreed on
    return merged


def _ordered(values: Tensor) -> list[Tensor]:
    """The contributions' values in order, each for itself, by odd-even transposition: ten times faster than a sort."""
    rows = list(values)
    for turn in range(len(rows)):
        for row in range(turn % 2, len(rows) - 1, 2):
            one, other = rows[row], rows[row + 1]
            rows[row], rows[row + 1] = torch.minimum(one, other), torch.maximum(one, other)
    return rows


def _sum(rows: Tensor) -> Tensor:
    """Sum of rows in their order: the order that torch sums in depends on threads and vectors."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total


def _moved(
    centre: Tensor, counted: Sequence[Tensor], shares: Sequence[float], lengths: Sequence[float], longest: float
) -> Tensor:
    """The centre after a step towards each contribution, by its share of the distance, which is cut to `longest`."""
    moved = centre.clone()
    for values, share, length in zip(counted, shares, lengths, strict=True):
        step = share * (longest / length if length > longest else 1.0)
        for start in range(0, len(centre), CHUNK):
            span = slice(start, start + CHUNK)
            moved[span] += values[span].double().sub_(centre[span]).mul_(step)
    return moved


def _lower_median(numbers: Sequence[N]) -> N:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def _lengths(counted: Sequence[Tensor], centre: Tensor) -> list[float]:
    """Distance of each contribution from the centre."""
    spans = [slice(start, start + CHUNK) for start in range(0, len(centre), CHUNK)]
    return [
        math.sqrt(math.fsum(sum_of_squares(values[span].double().sub_(centre[span])) for span in spans))
        for values in counted
    ]


def sum_of_squares(values: Tensor) -> float:
    """Sum of the squares of flat fp64 values, the same bits on any CPU; a part has at least one.

    Their squares are added by halves, element by element: the order that torch sums in depends on threads and vectors.
    """
    squares = values * values
    while squares.numel() > 1:
        half = (squares.numel() + 1) // 2
        squares[: squares.numel() - half] += squares[half:]
        squares = squares[:half]
    return squares.item()


@dataclass(frozen=True)
class RobustGathered(Codec):
    """A gathered codec whose contributions are averaged by a robust rule, by every member for itself."""

    inner: Codec
    rule: Rule

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def gathered(self) -> bool:
        return True

    def encode(self, values: Tensor) -> bytes:
        return self.inner.encode(values)

    def decode_into(self, payload: bytes, out: Tensor) -> None:
        self.inner.decode_into(payload, out)

    def max_bytes(self, elements: int) -> int:
        """Most bytes of a payload of the gathered codec."""
        return self.inner.max_bytes(elements)

    def squares(self, payload: bytes, elements: int) -> float:
        return self.inner.squares(payload, elements)

    def mean_into(self, terms: Sequence[tuple[int, bytes]], out: Tensor) -> None:
        weights = [weight for weight, _ in terms]
        if is_robust(self.rule, weights):
            decoded = [self.inner.decode(payload, out.numel()) for _, payload in terms]
            out.copy_(robust_mean(decoded, weights, self.rule)[0])
        else:
            self.inner.mean_into(terms, out)


def codecs_of(contract: Contract) -> tuple[Codec, ...]:
    """The codecs of a contract, by group of parameters; those that gather contributions average them by its rule."""
    codecs, rule = open_codecs(contract.codec), contract.outer.aggregation
    return tuple(RobustGathered(one, rule) if one.gathered and rule in ROBUST else one for one in codecs)
