"""The weighted mean: order, weights, bits, and contributions that are none."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.average import BadTerm, fold, mean_digest, unpack
from diloco.compress import PayloadError, open_codec
from diloco.config import CodecSection
from diloco.fragments import Layout

FP32 = open_codec(CodecSection(name="fp32", zstd=False))
INT8 = open_codec(CodecSection(name="int8"))
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
    assert torch.equal(unpack(parts, fragment, FP32), values)


def test_unpack_refuses_wrong_parts() -> None:
    (fragment,) = Layout.of([("w", (10,))], part_elements=4).fragments
    parts = [FP32.encode(torch.ones(n)) for n in (4, 4, 2)]
    for wrong in (parts[:2], [*parts, parts[0]], parts[::-1]):
        with pytest.raises(PayloadError):
            unpack(wrong, fragment, FP32)


def test_digest_of_the_mean() -> None:
    parts = [b"one", b"two"]
    inner = hashlib.sha256(b"one").digest() + hashlib.sha256(b"two").digest()
    assert mean_digest(parts) == hashlib.sha256(inner).hexdigest()
    assert len({mean_digest(p) for p in (parts, parts[::-1], [b"onetwo"], [b"on", b"etwo"])}) == 4


def test_who_trained_more_may_have_gone_as_much_farther():
    usual, far = (FP32.encode(torch.full((4,), size)) for size in (0.01, 5.0))
    with pytest.raises(BadTerm):
        fold([(1, usual), (1, far)], 4, FP32, 100.0, [1000, 1000])
    assert fold([(1, usual), (1, far)], 4, FP32, 100.0, [1000, 6000]) == fold([(1, usual), (1, far)], 4, FP32)
