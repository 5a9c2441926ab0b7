"""The weighted mean of contributions, part by part, and the digest of what came out.

A part's owner folds and encodes; everybody, the owner too, goes on with the encoded bytes, so that what a lossy
codec drops is dropped for all alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from diloco.compress import Codec, PayloadError
from diloco.fragments import Fragment


def fold(payloads: Sequence[tuple[int, bytes]], elements: int, codec: Codec) -> bytes:
    """The encoded mean of one part: sum of weight * values, over the sum of weights.

    `payloads` are (weight >= 0, encoded values), at least one, in the order of the view, never of arrival: the sum
    is separately rounded fp32 in that order. Only ratios of weights count, so a common divisor is taken out first:
    equal weights give the plain mean's bits and a single contribution its own. A sum that overflows saturates, lest
    one hostile contribution make a mean that everybody has to refuse; without any weight the mean is zero.

    Raises PayloadError when a payload is refused (`Codec.decode`).
    """
    weights = [weight for weight, _ in payloads]
    unit = math.gcd(*weights) or 1
    terms = (codec.decode(payload, elements).mul_(float(weight // unit)) for weight, payload in payloads)
    total = reduce(Tensor.add_, terms)
    return codec.encode(total.div_(float(sum(weights) // unit)).nan_to_num_())


def unpack(parts: Sequence[bytes], fragment: Fragment, codec: Codec) -> Tensor:
    """A fragment's mean, flat fp32, from its encoded parts in order. Raises PayloadError."""
    if len(parts) != fragment.parts:
        raise PayloadError(f"{len(parts)} parts, fragment {fragment.index} has {fragment.parts}")
    mean = torch.empty(fragment.elements, dtype=torch.float32)
    for part, payload in enumerate(parts):
        start, stop = fragment.part_bounds(part)
        mean[start:stop] = codec.decode(payload, stop - start)
    return mean


def mean_digest(parts: Sequence[bytes]) -> str:
    """SHA-256, hexadecimal, over the SHA-256 of each encoded part in order (`Commit.mean_digest`)."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
