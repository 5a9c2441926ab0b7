"""Radial-directional averaging: lengths and directions apart, at points checked by hand and bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.average import radial_mean


def orthogonal(peers: int, length: float = 1.0, elements: int = 64) -> list[Tensor]:
    """Contributions with nothing in common, all of one length."""
    generator = torch.Generator().manual_seed(0)
    rows, _ = torch.linalg.qr(torch.randn(elements, peers, generator=generator, dtype=torch.float64))
    return [(length * row).float() for row in rows.T]


def gaussians(peers: int, elements: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(elements, generator=generator) for _ in range(peers)]


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize("peers", [2, 4, 16])
def test_the_length_does_not_depend_on_the_number_of_peers(peers: int) -> None:
    """The plain mean of orthogonal contributions shrinks with the square root of their number."""
    contributions = orthogonal(peers, length=3.0)
    assert torch.stack(contributions).mean(0).norm().item() == pytest.approx(3.0 / math.sqrt(peers), rel=1e-5)
    assert radial_mean(contributions, [1] * peers).norm().item() == pytest.approx(3.0, rel=1e-6)


def test_equal_contributions_give_themselves() -> None:
    values = gaussians(1, 1000)[0]
    torch.testing.assert_close(radial_mean([values] * 5, [1, 2, 3, 4, 5]), values, rtol=2e-7, atol=0)


def test_contributions_of_one_length_keep_the_direction_of_their_mean() -> None:
    contributions = orthogonal(3)
    mean = torch.stack(contributions).mean(0)
    torch.testing.assert_close(radial_mean(contributions, [1, 1, 1]), mean / mean.norm())


# ---------------------------------------------------------------- by hand


def test_weights_count_for_length_and_direction() -> None:
    """Lengths 5 and 1 at weights 1 and 3: (5 + 3) / 4 = 2. Directions (3, 4) / 5 + 3 (1, 0) = (3.6, 0.8)."""
    mean = radial_mean([torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])], [1, 3])
    expected = 2 / math.hypot(3.6, 0.8) * np.array([3.6, 0.8])
    assert mean.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_only_ratios_of_weights_count() -> None:
    contributions = gaussians(3, 50)
    torch.testing.assert_close(
        radial_mean(contributions, [1, 2, 3]), radial_mean(contributions, [10**12, 2 * 10**12, 3 * 10**12])
    )


def test_a_large_contribution_turns_the_mean_no_more_than_a_small_one() -> None:
    x, y = torch.tensor([1e6, 0.0]), torch.tensor([0.0, 1.0])
    mean = radial_mean([x, y], [1, 1])
    assert mean[0].item() == pytest.approx(mean[1].item())


@pytest.mark.parametrize("others", [[], [0], [0, 0]])
def test_one_that_counts_alone_gives_its_bits(others: list[int]) -> None:
    values = torch.tensor([1e-42, -0.0, 0.1, 3e38, -7.0])
    noise = [torch.full((5,), 9.0) for _ in others]
    mean = radial_mean([*noise, values], [*others, 7])
    assert mean.numpy().tobytes() == values.numpy().tobytes()
    assert mean.data_ptr() != values.data_ptr()


def test_zeros_have_a_length_and_no_direction() -> None:
    values = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(radial_mean([values, torch.zeros(2)], [1, 1]), values / 2)
    assert radial_mean([torch.zeros(2)] * 3, [1, 1, 1]).tolist() == [0.0, 0.0]
    assert radial_mean([values, values], [0, 0]).tolist() == [0.0, 0.0]


def test_opposite_directions_cancel_out_instead_of_leaving_their_rounding() -> None:
    values = gaussians(1, 1000)[0]
    assert not radial_mean([values, -3.0 * values], [1, 1]).any()
    assert not radial_mean([values, values / 3, -0.7 * values], [1, 1, 2]).any()


def test_extremes_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    wide = radial_mean([torch.full((100,), largest), torch.tensor([largest] + [0.0] * 99)], [1, 1])
    assert wide.isfinite().all()
    narrow = radial_mean([torch.full((100,), 1e-45), torch.tensor([1e-45] + [0.0] * 99)], [1, 1])
    assert narrow.isfinite().all()


# ---------------------------------------------------------------- the same bits everywhere


def in_numpy(contributions: list[Tensor], weights: list[int]) -> bytes:
    """The same in numpy, one rounding at a time: fp64, squares added by halves."""
    values = [tensor.numpy().astype(np.float64) for tensor in contributions]
    lengths = [halved(one) for one in values]
    direction = np.zeros(len(values[0]))
    for one, weight, length in zip(values, weights, lengths, strict=True):
        direction = direction + one * (weight / length)
    radius = math.fsum(weight * length for weight, length in zip(weights, lengths, strict=True)) / sum(weights)
    return (direction * (radius / halved(direction))).astype(np.float32).tobytes()


def halved(values: np.ndarray) -> float:
    squares = values * values
    while len(squares) > 1:
        half = -(-len(squares) // 2)
        squares = np.concatenate((squares[: len(squares) - half] + squares[half:], squares[len(squares) - half : half]))
    return math.sqrt(squares[0])


@settings(max_examples=40)
@given(st.integers(1, 3000), st.lists(st.integers(1, 10**9), min_size=2, max_size=6), st.sampled_from([1e-30, 1e-3, 1]))
def test_bits_of_plain_numpy(elements: int, weights: list[int], scale: float) -> None:
    contributions = gaussians(len(weights), elements, scale)
    assert radial_mean(contributions, weights).numpy().tobytes() == in_numpy(contributions, weights)


def test_threads_change_no_bit() -> None:
    contributions = gaussians(3, 100_003)
    before = torch.get_num_threads()
    results = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.add(radial_mean(contributions, [3, 1, 2]).numpy().tobytes())
    torch.set_num_threads(before)
    assert len(results) == 1
