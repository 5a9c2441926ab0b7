"""Targets: the decoder of every codec, with compiled kernels and without, and bundles of encoded contributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from diloco.compress import Codec, PayloadError, bundle, kernels, open_codec
from diloco.config.codec import CodecSection
from diloco.kernels.build import use_compiled
from scripts.bench.codec_kinds import KINDS
from scripts.fuzzing.target import Target

SIZES = (1, 2, 3, 7, 63, 64, 65, 255, 256, 257, 1000, 1024, 4097)
"""Values of a part, chosen by the first byte of an input."""


@dataclass(frozen=True)
class Outcome:
    """A decoder's result for one payload: the reason of its refusal, or all bits of values, sum and mean."""

    refused: str
    values: bytes = b""
    total: bytes = b""
    mean: bytes = b""


def targets() -> Iterator[Target]:
    """A target for each codec, and two for bundles."""
    use_compiled("auto")
    kinds = [{**kind, "zstd": zstd} for kind in KINDS for zstd in (False, True)]
    codecs = {codec.name: codec for codec in (open_codec(CodecSection.model_validate(kind)) for kind in kinds)}
    for name, codec in codecs.items():
        refusals, room_bytes = (PayloadError,), 2**23  # a bound of each decoder: the values of its part, several times
        yield Target(
            f"codec-{name}", partial(_decode, codec), partial(_payloads, codec), refusals, room_bytes=room_bytes
        )
    gathered = codecs["topk"]
    yield Target("bundle", partial(_average, gathered), partial(_bundles, gathered), (PayloadError,), room_bytes=2**23)
    yield Target("bundle-restored", _restore, partial(_shortened, gathered), (PayloadError,))


def _payloads(codec: Codec) -> list[bytes]:
    return [bytes([place]) + codec.encode(_values(size)) for place, size in enumerate(SIZES)]


def _values(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def _decode(codec: Codec, data: bytes) -> None:
    """The outcome, the same with and without kernels. Raises AssertionError on anything else, and PayloadError."""
    payload, elements = data[1:], SIZES[(data or b"\0")[0] % len(SIZES)]
    library = kernels.installed()
    outcome = _outcome(codec, payload, elements)
    kernels.install(None)
    try:
        assert library is None or _outcome(codec, payload, elements) == outcome, "compiled and eager differ"
    finally:
        kernels.install(library)
    if outcome.refused:
        raise PayloadError(outcome.refused)


def _outcome(codec: Codec, payload: bytes, elements: int) -> Outcome:
    before = torch.linspace(-1.0, 1.0, elements)
    total = before.clone()
    try:
        values = codec.decode(payload, elements)
    except PayloadError as error:
        _assert_refuses_fold(codec, payload, total)
        assert torch.equal(total, before), "a refused fold changed the sum"
        return Outcome(str(error))
    assert values.isfinite().all(), "values that are not finite"
    codec.fold(payload, 3.0, total)
    mean = torch.empty(elements)
    codec.mean_into([(3, payload), (2**64 - 1, payload)], mean)
    assert mean.isfinite().all(), "a mean that is not finite"
    return Outcome("", *(one.numpy().tobytes() for one in (values, total.nan_to_num(), mean)))


def _assert_refuses_fold(codec: Codec, payload: bytes, total: torch.Tensor) -> None:
    try:
        codec.fold(payload, 1.0, total)
    except PayloadError:
        return
    raise AssertionError("decoding refuses what fold takes")


# ---------------------------------------------------------------- bundles


def _terms(codec: Codec, place: int, size: int) -> Sequence[tuple[int, bytes]]:
    return [(weight, codec.encode(_values(size))) for weight in range(1, 2 + place % 3)]


def _bundles(codec: Codec) -> list[bytes]:
    return [bytes([place]) + bundle.join(_terms(codec, place, size)) for place, size in enumerate(SIZES)]


def _average(codec: Codec, data: bytes) -> None:
    elements = SIZES[(data or b"\0")[0] % len(SIZES)]
    bundle.check(data[1:], codec, elements)
    mean = torch.empty(elements)
    bundle.mean_into(data[1:], codec, mean)
    assert mean.isfinite().all(), "a mean that is not finite"


def _shortened(codec: Codec) -> list[bytes]:
    """Bundles without their first payload, behind it and its size."""
    found = []
    for place, size in enumerate(SIZES):
        terms = _terms(codec, place, size)
        own = terms[0][1]
        found.append(len(own).to_bytes(2, "little") + own + bundle.without(bundle.join(terms), 0))
    return found


def _restore(data: bytes) -> None:
    size = int.from_bytes(data[:2], "little")
    own, sent = data[2 : 2 + size], data[2 + size :]
    for place in (0, 1, bundle.MAX_CONTRIBUTIONS):
        try:
            whole = bundle.restored(sent, place, own)
        except PayloadError:
            if place == 0:
                raise
        else:
            assert bundle.without(whole, place) == sent, "restored is not the inverse of without"
