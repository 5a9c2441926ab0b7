"""The invariant: local = anchor + progress that is not committed yet."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.outer.merge import carry
from diloco.outer.pseudograd import pseudo_gradient

FLOATS = st.floats(-1e3, 1e3, width=32)


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def test_sign_of_the_pseudo_gradient() -> None:
    anchor, local = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.5])
    assert pseudo_gradient(anchor, local).tolist() == [-2.0, 0.5]


def test_counted_progress_made_since_is_kept() -> None:
    sent, now, new_anchor = torch.tensor([1.5]), torch.tensor([1.75]), torch.tensor([8.0])
    assert carry(now, sent, new_anchor).tolist() == [8.25]


def test_not_counted_all_progress_is_kept() -> None:
    old_anchor, now, new_anchor = torch.tensor([1.0]), torch.tensor([1.75]), torch.tensor([8.0])
    assert carry(now, old_anchor, new_anchor).tolist() == [8.75]


def test_no_progress_gives_the_bits_of_the_anchor() -> None:
    anchor = torch.tensor([-0.0, 0.0, 1e-45, -3.0, 1e38])
    local = torch.tensor([2.0, -0.0, 1.0, -1e38, 0.1])
    assert bits(carry(local, local.clone(), anchor)) == bits(anchor)


def test_each_element_for_itself() -> None:
    anchor = torch.tensor([-0.0, 1.0])
    assert bits(carry(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), anchor)) == bits(torch.tensor([-0.0, 2.0]))


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1), FLOATS)
def test_arguments_stay_as_they_are(pairs: list[tuple[float, float]], level: float) -> None:
    local, base = (torch.tensor(column) for column in zip(*pairs, strict=True))
    anchor = torch.full_like(local, level)
    before = [bits(values) for values in (local, base, anchor)]
    carry(local, base, anchor)
    assert [bits(values) for values in (local, base, anchor)] == before
