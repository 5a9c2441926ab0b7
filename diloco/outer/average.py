"""The mean of contributions, part by part: plain, radial or robust, without outliers; and the mean's digest.

A part's owner folds and encodes; everybody, the owner too, goes on with the encoded bytes, so that what a lossy
codec drops is dropped for all alike. Where the codec's sums do not stay small, these bytes are a bundle of the
contributions themselves (`diloco.compress.bundle`), and everybody takes the mean.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from diloco.base.hashing import content_hash
from diloco.base.memory import floats
from diloco.base.types import Commit
from diloco.compress import Codec, PayloadError, bundle
from diloco.config.contract import Contract
from diloco.outer.fragments import Fragment, Layout
from diloco.outer.robust import ROBUST, Rule, is_robust, robust_mean, sum_of_squares

T = TypeVar("T")
Terms = Sequence[tuple[int, bytes]]
"""Contributions to a part: (weight >= 0, encoded values)."""


MIN_RMS = 1e-3
"""The others' contributions to a part count as at least that large. Where they hardly moved (rows of an embedding that
few saw, the first steps of a warm-up) any honest step would be a hundred times theirs; weights begin at about 0.02."""


class BadTerm(PayloadError):
    """Refusal of one of the contributions to a part's mean."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        """Its place among the payloads."""


@dataclass(frozen=True)
class Averaging:
    """The rule by which a lane averages parts, and a count of outliers."""

    rule: Rule = "mean"
    _outliers: Counter[str] = field(default_factory=Counter, compare=False)

    @staticmethod
    def of(contract: Contract) -> Averaging:
        """The rule that a contract asks for; a contract has one that is not the mean at most."""
        outer = contract.outer
        return Averaging(outer.averaging if outer.aggregation == "mean" else outer.aggregation)

    def is_mean_of_few(self, weights: Sequence[int]) -> bool:
        """Whether the rule is robust, and contributions of these weights are too few for it."""
        return self.rule in ROBUST and not is_robust(self.rule, weights)

    def note(self, peers: Iterable[str]) -> None:
        """Count a part in which the contributions of these peers were outliers."""
        self._outliers.update(peers)

    def take(self) -> Mapping[str, int]:
        """Parts in which each peer's contribution was an outlier, by its name, since the last call."""
        return {peer: self._outliers.pop(peer) for peer in sorted(self._outliers)}


def fold(
    payloads: Terms,
    elements: int,
    codec: Codec,
    max_norm_ratio: float = 0.0,
    trained: Sequence[int] = (),
    rule: Rule = "mean",
    outliers: list[int] | None = None,
) -> bytes:
    """Weighted mean of one part, encoded: sum of weight * values over the sum of weights; or the bundle of them.

    `payloads` are (weight >= 0, encoded values), at least one, in the order of the view, never of arrival: the sum
    is separately rounded fp32 in that order. Only ratios of weights count, so a common divisor is taken out first:
    equal weights give the plain mean's bits and a single contribution its own. A sum that overflows saturates, lest
    one hostile contribution make a mean that everybody has to refuse; without any weight the mean is zero.
    `rule`: other than the plain mean it is by `radial_mean`, which a bundle cannot be, or `robust_mean`; all
    contributions are in memory, decoded, then. `outliers`: gets their indices, by a robust rule.

    Raises BadTerm when a payload does not decode (`Codec.decode`), or when it is beyond `max_norm_ratio` times the
    size of the others (`outlier`; 0: never). `trained`: tokens behind each payload.
    """
    weights = [weight for weight, _ in payloads]
    if codec.gathered and len(payloads) > bundle.MAX_CONTRIBUTIONS:
        most = bundle.MAX_CONTRIBUTIONS
        raise BadTerm(most, f"more contributions than the {most} of a bundle")
    if rule in ROBUST and is_robust(rule, weights):
        decoded = _each(payloads, lambda _, payload: codec.decode(payload, elements))
        squares = [float(torch.dot(values, values)) for values in decoded]
        values, far = robust_mean(decoded, weights, rule)
        mean = bundle.join(payloads) if codec.gathered else codec.encode(values)
        if outliers is not None:
            outliers += far
    elif codec.gathered:
        squares = _each(payloads, lambda _, payload: codec.squares(payload, elements))
        mean = bundle.join(payloads)
    elif rule == "radial":
        decoded = _each(payloads, lambda _, payload: codec.decode(payload, elements))
        squares = [float(torch.dot(values, values)) for values in decoded]
        mean = codec.encode(radial_mean(decoded, weights))
    else:
        unit = math.gcd(*weights) or 1
        total = floats(elements).fill_(-0.0)  # the one number that changes nothing: 0.0 + -0.0 is 0.0
        squares = _each(payloads, lambda weight, payload: codec.fold(payload, float(weight // unit), total))
        mean = codec.encode(total.div_(float(sum(weights) // unit)).nan_to_num_())
    sizes = [math.sqrt(square / elements) for square in squares]
    if trained:
        # A peer that was alone for long has gone far, and honestly: at most as many times as far as it trained more
        # than usual, which is the lower median.
        some = sorted(tokens for tokens in trained if tokens > 0)
        usual = some[(len(some) - 1) // 2] if some else 1
        sizes = [size / max(tokens / usual, 1.0) for size, tokens in zip(sizes, trained, strict=True)]
    absurd = outlier(sizes, max_norm_ratio)
    if absurd is not None:
        raise BadTerm(absurd, f"a part is absurdly large: root mean square {sizes[absurd]:.3g}")
    return mean


def _each(payloads: Terms, read: Callable[[int, bytes], T]) -> list[T]:
    """Result of `read`, from weight and encoded values, for each contribution to a part's mean. Raises BadTerm for a
    PayloadError."""
    found = []
    for index, (weight, payload) in enumerate(payloads):
        try:
            found.append(read(weight, payload))
        except PayloadError as error:
            raise BadTerm(index, str(error)) from error
    return found


def outlier(sizes: Sequence[float], max_norm_ratio: float) -> int | None:
    """Index of the outlier among contributions to a part's mean: one that no training explains, beside the others.

    A mean has no defence of its own: one peer whose loss exploded, or that lies, moves it as far as it likes. The
    largest is refused when it is beyond `max_norm_ratio` times the lower median; a ratio of 0 lets everything pass.
    `sizes`: the root mean square of each contribution. One is never judged; of two, the larger by the smaller, for
    nobody could say which one lies. Zeros are peers that did not train: they set no measure. Sums over elements round
    differently from CPU to CPU, so the part's owner alone decides.
    """
    moved = sorted(size for size in sizes if size > 0)
    if not max_norm_ratio or len(moved) < 2:
        return None
    lower_median = moved[(len(moved) - 1) // 2]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return largest if sizes[largest] > max_norm_ratio * max(lower_median, MIN_RMS) else None


def mean_into(payload: bytes, codec: Codec, out: Tensor) -> None:
    """Decode a part's mean, made by `fold`, into `out`, flat contiguous fp32 on the host: the same bits on any CPU.

    Raises PayloadError; `out` may then hold anything.
    """
    if codec.gathered:
        bundle.mean_into(payload, codec, out)
    else:
        codec.decode_into(payload, out)


def check_mean(payload: bytes, codec: Codec, elements: int) -> None:
    """Raise PayloadError unless a part's mean decodes (`mean_into`), without making the mean of a bundle."""
    if codec.gathered:
        bundle.check(payload, codec, elements)
    else:
        codec.decode(payload, elements)


def max_mean_bytes(codec: Codec, elements: int, contributions: int = bundle.MAX_CONTRIBUTIONS) -> int:
    """Largest size in bytes of a part's mean, as `fold` encodes it from so many elements and contributions."""
    return bundle.max_bytes(codec, elements, contributions) if codec.gathered else codec.max_bytes(elements)


def unpack(parts: Sequence[bytes], fragment: Fragment, codecs: Sequence[Codec]) -> Tensor:
    """A fragment's mean, flat fp32, from the parts that are held here: encoded, by number. `codecs`: by group.

    Raises PayloadError.
    """
    if len(parts) != fragment.parts:
        raise PayloadError(f"{len(parts)} parts, fragment {fragment.index} has {fragment.parts}")
    mean = floats(fragment.elements)
    for part, (start, stop) in fragment.cuts.items():
        mean_into(parts[part], codecs[fragment.group_of(part)], mean[start:stop])
    return mean


def mean_digest(parts: Sequence[bytes]) -> str:
    """Digest of a fragment's mean: SHA-256, hexadecimal, over its parts' `content_hash` (`Commit.mean_digest`)."""
    return digest_of(map(content_hash, parts))


def digest_of(contents: Iterable[bytes]) -> str:
    """`mean_digest` of a fragment's mean whose encoded parts have these hashes."""
    return hashlib.sha256(b"".join(contents)).hexdigest()


def is_mean_of(parts: Sequence[bytes], commit: Commit, layout: Layout) -> bool:
    """Whether encoded parts are the fragment's mean that a commit names; a founding has none."""
    if commit.fragment == -1:
        return not parts
    if commit.fragment >= len(layout.fragments) or len(parts) != layout.fragments[commit.fragment].parts:
        return False
    return mean_digest(parts) == commit.mean_digest


ROUNDING = 2.0**-23
"""Spacing of fp32 numbers at 1: directions whose sum is shorter than that, relative to their weights, cancel out."""


def radial_mean(decoded: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """The radial-directional mean of one part, a new flat fp32 tensor: the mean length in the mean direction.

        mean = (sum w_i |v_i| / sum w_i) * unit(sum w_i unit(v_i))

    Contributions of different peers are nearly orthogonal, so the length of their plain mean falls like 1 / sqrt(peers)
    and the outer learning rate that suits two peers is too small for sixteen. Lengths and directions that are averaged
    apart keep it (Decoupled DiLoCo, arXiv 2604.21428). Here v is one part of a fragment, where the paper takes one
    tensor, and for embeddings the plain mean. The bits are the same on any CPU: `diloco replay` makes them again.

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
        length = math.sqrt(sum_of_squares(exact))
        lengths.append(weight * length)
        if length > 0:
            direction.add_(exact.mul_(weight / length))
    total = sum(weight for _, weight in counted)
    resultant = math.sqrt(sum_of_squares(direction))
    if resultant <= total * ROUNDING:
        return torch.zeros_like(decoded[0])
    return direction.mul_(math.fsum(lengths) / total / resultant).float().nan_to_num_()
