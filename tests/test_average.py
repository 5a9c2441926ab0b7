"""The weighted mean: order, weights, bits, and contributions that are none."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.compress import Codec, PayloadError, bundle, open_codec
from diloco.config.codec import CodecSection
from diloco.outer.average import BadTerm, fold, max_mean_bytes, mean_digest, mean_into, radial_mean, unpack
from diloco.outer.fragments import Layout

FP32 = open_codec(CodecSection(name="fp32", zstd=False))
INT8 = open_codec(CodecSection(name="int8"))
TOPK = open_codec(CodecSection(name="topk", density=0.1, values="fp16", zstd=False))
TOPK_ALL = open_codec(CodecSection(name="topk", density=0.1, values="int8", mean="all", zstd=True))
LOWRANK = open_codec(CodecSection(name="lowrank", rank=4, columns=64, zstd=False))
GATHERED = {"topk": TOPK, "topk over all": TOPK_ALL, "lowrank": LOWRANK}
FP32_MAX = torch.finfo(torch.float32).max


def contributions(count: int, elements: int = 500) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def mean_of(weights: list[int], values: list[Tensor]) -> Tensor:
    payloads = [(weight, FP32.encode(v)) for weight, v in zip(weights, values, strict=True)]
    elements = values[0].numel()
    return FP32.decode(fold(payloads, elements, FP32), elements)


def plain_mean(weights: list[int], values: list[Tensor]) -> Tensor:
    """One numpy fp32 operation at a time, in the order given."""
    total = np.float32(weights[0]) * values[0].numpy()
    for weight, v in zip(weights[1:], values[1:], strict=True):
        product = np.float32(weight) * v.numpy()
        total = total + product
    return torch.from_numpy(total / np.float32(sum(weights)))


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def test_by_hand() -> None:
    values = [torch.tensor([1.0, -4.0]), torch.tensor([5.0, 0.0])]
    assert mean_of([1, 1], values).tolist() == [3.0, -2.0]
    assert mean_of([1, 3], values).tolist() == [4.0, -1.0]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_bits_of_the_definition(weights: list[int]) -> None:
    values = contributions(len(weights))
    unit = int(np.gcd.reduce(weights))
    assert bits(mean_of(weights, values)) == bits(plain_mean([weight // unit for weight in weights], values))


@pytest.mark.parametrize("weight", [1, 3, 102_400, 2**40 + 1])
def test_one_contribution_keeps_its_bits(weight: int) -> None:
    values = torch.cat([contributions(1)[0], torch.tensor([-0.0, 1e-45, FP32_MAX])])
    assert bits(mean_of([weight], [values])) == bits(values)


def test_equal_weights_give_the_plain_mean() -> None:
    values = contributions(3)
    assert bits(mean_of([51_200] * 3, values)) == bits(mean_of([1] * 3, values))


def test_no_weight_counts_nothing() -> None:
    values = contributions(2)
    assert bits(mean_of([0, 7], values)) == bits(values[1])
    assert mean_of([0, 0], values).count_nonzero() == 0


def test_contributions_are_summed_in_the_order_given() -> None:
    values = contributions(4)
    forward, backward = mean_of([1, 2, 3, 4], values), mean_of([4, 3, 2, 1], values[::-1])
    assert torch.allclose(forward, backward, atol=1e-6)
    assert not torch.equal(forward, backward)


def test_order_in_which_parts_are_folded_does_not_show() -> None:
    values = contributions(3, 3000)
    (fragment,) = Layout.of([("w", (3000,))], part_elements=1024).fragments
    bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
    digests = set()
    for order in itertools.permutations(range(fragment.parts)):
        means = {}
        for part in order:
            start, stop = bounds[part]
            payloads = [(1 + peer, INT8.encode(values[peer][start:stop])) for peer in range(3)]
            means[part] = fold(payloads, stop - start, INT8)
        digests.add(mean_digest([means[part] for part in range(fragment.parts)]))
    assert len(digests) == 1


def test_huge_contributions_saturate() -> None:
    """A mean that nobody can decode would be a way to stop a run."""
    hostile = [torch.tensor([FP32_MAX, FP32_MAX, -FP32_MAX]), torch.tensor([FP32_MAX, -FP32_MAX, -FP32_MAX])]
    assert mean_of([1, 1], hostile).tolist() == [FP32_MAX, 0.0, -FP32_MAX]
    payloads = [(1, INT8.encode(values)) for values in hostile]
    assert INT8.decode(fold(payloads, 3, INT8), 3).isfinite().all()


def test_bad_contribution_is_refused() -> None:
    good = FP32.encode(torch.ones(4))
    for bad in (good[:-1], good + b"\0", np.array([1, 2, np.nan, 4], dtype="<f4").tobytes()):
        with pytest.raises(PayloadError):
            fold([(1, good), (1, bad)], 4, FP32)


@given(st.integers(1, 700), st.integers(1, 300))
def test_unpack_puts_parts_in_place(elements: int, part_elements: int) -> None:
    (fragment,) = Layout.of([("w", (elements,))], part_elements=part_elements).fragments
    values = torch.arange(elements, dtype=torch.float32)
    bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
    parts = [FP32.encode(values[start:stop]) for start, stop in bounds]
    assert torch.equal(unpack(parts, fragment, [FP32]), values)


def test_unpack_refuses_wrong_parts() -> None:
    (fragment,) = Layout.of([("w", (10,))], part_elements=4).fragments
    parts = [FP32.encode(torch.ones(n)) for n in (4, 4, 2)]
    for wrong in (parts[:2], [*parts, parts[0]], parts[::-1]):
        with pytest.raises(PayloadError):
            unpack(wrong, fragment, [FP32])


def test_digest_of_the_mean() -> None:
    parts = [b"one", b"two"]
    inner = blake3(b"one").digest() + blake3(b"two").digest()
    assert mean_digest(parts) == hashlib.sha256(inner).hexdigest()
    assert len({mean_digest(p) for p in (parts, parts[::-1], [b"onetwo"], [b"on", b"etwo"])}) == 4


def test_who_trained_more_may_have_gone_as_much_farther() -> None:
    usual, far = (FP32.encode(torch.full((4,), size)) for size in (0.01, 5.0))
    with pytest.raises(BadTerm):
        fold([(1, usual), (1, far)], 4, FP32, 100.0, [1000, 1000])
    assert fold([(1, usual), (1, far)], 4, FP32, 100.0, [1000, 6000]) == fold([(1, usual), (1, far)], 4, FP32)


# ---------------------------------------------------------------- gathered, and radial

each_gathered = pytest.mark.parametrize("codec", GATHERED.values(), ids=GATHERED)


def decoded_mean(payload: bytes, codec: Codec, elements: int) -> Tensor:
    out = torch.empty(elements)
    mean_into(payload, codec, out)
    return out


@each_gathered
@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=6), counted=st.integers(1, 63))
def test_gathered_mean_of_those_who_count(codec: Codec, weights: list[int], counted: int) -> None:
    """Whoever a part omits is neither in the sum nor in the divisor."""
    sent = [(weight, codec.encode(v)) for weight, v in zip(weights, contributions(len(weights)), strict=True)]
    terms = [term for index, term in enumerate(sent) if counted >> index & 1] or sent
    values = np.stack([codec.decode(payload, 500).double().numpy() for _, payload in terms])
    weight = np.array([[float(weight)] for weight, _ in terms])
    divisor = (weight * (values != 0)).sum(axis=0) if codec is TOPK else weight.sum(axis=0)
    expected = (weight * values).sum(axis=0) / np.where(divisor == 0, 1, divisor)
    mean = decoded_mean(fold(terms, 500, codec), codec, 500).numpy()
    assert np.abs(mean - expected).max() <= 1e-6 * np.abs(values).max()


@each_gathered
def test_a_bundle_has_the_order_of_the_view_and_the_payloads_as_they_came(codec: Codec) -> None:
    terms = [(1 + index, codec.encode(v)) for index, v in enumerate(contributions(3))]
    payload = fold(terms, 500, codec)
    assert bundle.split(payload, codec.max_bytes(500)) == terms
    assert fold(terms[::-1], 500, codec) != payload
    assert len(payload) <= max_mean_bytes(codec, 500, 3) < max_mean_bytes(codec, 500)
    assert max_mean_bytes(INT8, 500) == INT8.max_bytes(500)


def test_topk_sums_in_the_order_given_bit_for_bit() -> None:
    terms = [(weight, TOPK.encode(v)) for weight, v in zip((1, 5, 7), contributions(3), strict=True)]
    total, divisor = np.zeros(500, np.float32), np.zeros(500, np.float32)
    for weight, payload in terms:
        values = TOPK.decode(payload, 500).numpy()
        total += values * np.float32(weight)
        divisor += (values != 0) * np.float32(weight)
    expected = total / np.where(divisor == 0, np.float32(1), divisor)
    assert bits(decoded_mean(fold(terms, 500, TOPK), TOPK, 500)) == bits(torch.from_numpy(expected))


@each_gathered
def test_bad_and_absurd_contributions_are_named_before_they_are_gathered(codec: Codec) -> None:
    good, large = (codec.encode(v * size) for v, size in zip(contributions(2), (1.0, 1000.0), strict=True))
    for bad in (good[:-1], good + b"\0", b"", b"\xff" * len(good)):
        with pytest.raises(BadTerm) as refused:
            fold([(1, good), (1, bad), (1, good)], 500, codec)
        assert refused.value.index == 1
    with pytest.raises(BadTerm, match="absurdly large") as refused:
        fold([(1, good), (1, good), (1, large)], 500, codec, 100.0)
    assert refused.value.index == 2
    assert fold([(1, good), (1, large)], 500, codec)


def test_a_bundle_has_room_for_so_many() -> None:
    terms = [(1, TOPK.encode(contributions(1)[0]))] * bundle.MAX_CONTRIBUTIONS
    assert len(fold(terms, 500, TOPK)) == max_mean_bytes(TOPK, 500)
    with pytest.raises(BadTerm) as refused:
        fold([*terms, terms[0]], 500, TOPK)
    assert refused.value.index == bundle.MAX_CONTRIBUTIONS


def test_unpack_of_gathered_parts() -> None:
    (fragment,) = Layout.of([("w", (500,))], part_elements=200).fragments
    bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
    values = contributions(2)
    parts = [fold([(1, TOPK.encode(v[a:b])) for v in values], b - a, TOPK) for a, b in bounds]
    pieces = [decoded_mean(part, TOPK, b - a) for part, (a, b) in zip(parts, bounds, strict=True)]
    assert torch.equal(unpack(parts, fragment, [TOPK]), torch.cat(pieces))
    for wrong in (parts[:2], parts[::-1], [part[:-1] for part in parts]):
        with pytest.raises(PayloadError):
            unpack(wrong, fragment, [TOPK])


def test_radial_mean_is_made_of_what_was_decoded_and_encoded_once() -> None:
    weights, values = [1, 2, 3], contributions(3)
    payloads = [(weight, INT8.encode(v)) for weight, v in zip(weights, values, strict=True)]
    decoded = [INT8.decode(payload, 500) for _, payload in payloads]
    folded = fold(payloads, 500, INT8, rule="radial")
    assert folded == INT8.encode(radial_mean(decoded, weights)) != fold(payloads, 500, INT8)
    with pytest.raises(BadTerm) as refused:
        fold([*payloads, (1, b"")], 500, INT8, rule="radial")
    assert refused.value.index == 3
    with pytest.raises(BadTerm, match="absurdly large"):
        fold([*payloads, (1, INT8.encode(values[0] * 1000))], 500, INT8, 100.0, rule="radial")
