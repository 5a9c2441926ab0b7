"""Bundles of encoded contributions, which a part's owner sends to all peers where a sum would not stay small.

The owner joins the payloads that the part counts, as they came, with their weights, in the order of the view. Every
member decodes them and takes the mean for itself, the same bits as everybody. A contributor has its own payload
already, and gets the bundle `without` it.

A bundle is a count (u32), for each contribution its weight (u64) and its size (u32), then the payloads. It grows with
the contributors, so there is a most of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from diloco.compress.codec import Codec, PayloadError

MAX_CONTRIBUTIONS = 64
_COUNT = struct.Struct("<I")
_TERM = struct.Struct("<QI")


def join(terms: Sequence[tuple[int, bytes]]) -> bytes:
    """The bundle of encoded contributions: (0 <= weight < 2**64, payload), 1 to `MAX_CONTRIBUTIONS` of them."""
    assert 0 < len(terms) <= MAX_CONTRIBUTIONS
    table = b"".join(_TERM.pack(weight, len(payload)) for weight, payload in terms)
    return b"".join([_COUNT.pack(len(terms)), table, *(payload for _, payload in terms)])


def split(bundle: bytes, max_payload_bytes: int) -> list[tuple[int, bytes]]:
    """Weights and payloads of a bundle, the inverse of `join`. PayloadError for too long ones and bytes left over."""
    table = _table(bundle)
    if any(end - start > max_payload_bytes for _, start, end in table) or table[-1][2] != len(bundle):
        raise PayloadError(f"bundle of {len(bundle)} bytes whose sizes are wrong")
    return [(weight, bundle[start:end]) for weight, start, end in table]


def without(bundle: bytes, place: int) -> bytes:
    """Bundle of encoded contributions for the peer that has the payload at `place`: that one is left out, and the table
    stays whole."""
    _, start, end = _table(bundle)[place]
    return bundle[:start] + bundle[end:]


def restored(sent: bytes, place: int, payload: bytes) -> bytes:
    """The whole bundle, inverse of `without`. Raises PayloadError when no payload of that size was left out there."""
    table = _table(sent)
    if place >= len(table) or table[place][2] - table[place][1] != len(payload):
        raise PayloadError("bundle without room for our own contribution")
    start = table[place][1]
    if start > len(sent):
        raise PayloadError(f"bundle of {len(sent)} bytes that ends before our own contribution")
    return sent[:start] + payload + sent[start:]


def _table(bundle: bytes) -> list[tuple[int, int, int]]:
    """Weight of each payload of a bundle, and its first byte and the one behind its last. Raises PayloadError.

    The sizes are the sender's: they may lead beyond the bundle's end.
    """
    count = _COUNT.unpack_from(bundle)[0] if len(bundle) >= _COUNT.size else 0
    begin = _COUNT.size + count * _TERM.size
    if not 0 < count <= MAX_CONTRIBUTIONS or len(bundle) < begin:
        raise PayloadError(f"bundle of {count} contributions in {len(bundle)} bytes")
    terms = list(_TERM.iter_unpack(bundle[_COUNT.size : begin]))
    bounds = pairwise(accumulate((size for _, size in terms), initial=begin))
    return [(weight, start, end) for (weight, _), (start, end) in zip(terms, bounds, strict=True)]


def mean_into(bundle: bytes, codec: Codec, out: Tensor) -> None:
    """Fill `out`, flat contiguous fp32 on the host, with the mean of a bundle, the same bits on any CPU.

    Only ratios of weights count, as in `diloco.outer.average.fold`. Raises PayloadError; `out` may then hold anything.
    """
    terms = split(bundle, codec.max_bytes(out.numel()))
    unit = math.gcd(*(weight for weight, _ in terms)) or 1
    codec.mean_into([(weight // unit, payload) for weight, payload in terms], out)


def check(bundle: bytes, codec: Codec, elements: int) -> None:
    """Raises PayloadError where `mean_into` of a bundle would: each payload is decoded, and no mean is made."""
    for _, payload in split(bundle, codec.max_bytes(elements)):
        codec.squares(payload, elements)


def max_bytes(codec: Codec, elements: int, contributions: int = MAX_CONTRIBUTIONS) -> int:
    """Most bytes of a bundle of so many encoded contributions to a part of so many values."""
    return _COUNT.size + contributions * (_TERM.size + codec.max_bytes(elements))
