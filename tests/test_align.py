"""Late pseudo-gradients turned towards the momentum: in the plane, where one can see what is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.fragments import Layout
from diloco.outer.pseudograd import WELL_ALIGNED, aligned

PLANE = Layout.of([("w", (2,))]).fragments[0]
EAST = torch.tensor([5.0, 0.0])


def at(degrees: float, length: float = 2.0) -> Tensor:
    return length * torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


def cosine(values: Tensor) -> float:
    return float(values[0] / values.norm())


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0])
def test_who_is_not_late_sends_what_it_has(staleness: float) -> None:
    gradient = at(170)
    assert aligned(gradient, EAST, PLANE, staleness) is gradient


@pytest.mark.parametrize("degrees", [0.0, 30.0, -59.0])
def test_what_goes_the_same_way_stays(degrees: float) -> None:
    assert torch.equal(aligned(at(degrees), EAST, PLANE, 100.0), at(degrees))


@pytest.mark.parametrize("degrees", [61.0, 75.0, 90.0, -80.0])
@pytest.mark.parametrize("staleness", [1.5, 4.0, 1e9])
def test_what_goes_across_is_turned_at_its_own_length(degrees: float, staleness: float) -> None:
    before, after = at(degrees), aligned(at(degrees), EAST, PLANE, staleness)
    assert after.norm().item() == pytest.approx(2.0, rel=1e-6)
    wanted = cosine(before) + (1 - 1 / staleness) * (WELL_ALIGNED - cosine(before))
    assert cosine(after) == pytest.approx(wanted, abs=1e-6)
    assert after[1].sign() == before[1].sign()


def test_what_goes_against_it_is_made_less() -> None:
    """(-1, 3) at staleness 4: a quarter of the component against it is left."""
    after = aligned(torch.tensor([-1.0, 3.0]), EAST, PLANE, 4.0)
    assert after.tolist() == pytest.approx([-0.25, 3.0])


@given(st.floats(0, 360), st.floats(1.01, 1e6))
def test_never_longer_and_never_less_aligned(degrees: float, staleness: float) -> None:
    before, after = at(degrees), aligned(at(degrees), EAST, PLANE, staleness)
    assert after.norm() <= before.norm() * (1 + 1e-5)
    assert cosine(after) >= cosine(before) - 1e-5


def test_each_tensor_on_its_own() -> None:
    fragment = Layout.of([("a", (2,)), ("b", (2,))]).fragments[0]
    gradient, momentum = torch.cat([at(30), at(180)]), torch.cat([EAST, EAST])
    after = aligned(gradient, momentum, fragment, 2.0)
    assert torch.equal(after[:2], at(30))
    assert after[2:].tolist() == pytest.approx([-1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("values", [(0.0, 0.0), (math.inf, 0.0)])
def test_without_a_direction_nothing_is_turned(values: tuple[float, float]) -> None:
    no_way = torch.tensor(values)
    assert torch.equal(aligned(at(120), no_way, PLANE, 5.0), at(120))
    assert torch.equal(aligned(no_way, EAST, PLANE, 5.0), no_way)
