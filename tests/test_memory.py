"""Memory goes round, and never while somebody can see it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from diloco.base.memory import MAX_SPARE, MIN_BYTES, empty_as

ELEMENTS = MIN_BYTES // 4 + 12_345  # a size that no other test has


def test_what_is_let_go_is_lent_again() -> None:
    like = torch.zeros(ELEMENTS)
    first = empty_as(like)
    place = first.data_ptr()
    del first
    again = empty_as(like)
    assert again.data_ptr() == place
    assert again.shape == like.shape
    assert again.dtype == like.dtype


@pytest.mark.parametrize(
    "view",
    [lambda whole: whole[5:9], lambda whole: whole.numpy(), lambda whole: whole.numpy().data, torch.Tensor.detach],
    ids=["slice", "array", "memoryview", "detached"],
)
def test_a_view_keeps_it(view: object) -> None:
    like = torch.zeros(ELEMENTS + 1)
    whole = empty_as(like).fill_(3.0)
    seen = view(whole)  # type: ignore[operator]
    del whole
    gc.collect()
    other = empty_as(like).fill_(4.0)
    assert all(float(value) == 3.0 for value in np.asarray(seen)[:4])
    del seen, other


def test_other_sizes_and_dtypes_get_their_own() -> None:
    single, double = torch.zeros(2 * ELEMENTS), torch.zeros(ELEMENTS, dtype=torch.float64)
    first = empty_as(single)
    place = first.data_ptr()
    del first
    taken = empty_as(double)
    assert taken.data_ptr() == place  # as many bytes
    assert (taken.shape, taken.dtype) == (double.shape, torch.float64)
    assert empty_as(torch.zeros(7)).shape == (7,)


def test_no_more_than_a_few_are_kept() -> None:
    like = torch.zeros(ELEMENTS + 2)
    many = [empty_as(like) for _ in range(MAX_SPARE + 3)]
    places = {tensor.data_ptr() for tensor in many}
    assert len(places) == MAX_SPARE + 3
    del many
    from diloco.base.memory import _spare

    assert len(_spare[like.nbytes]) == MAX_SPARE
