"""Slices: what makes a tensor whole, what two of them share, and who writes which."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from diloco.island.slices import Pieces, Slice, whole_slices
from diloco.storage.saving import chosen, offered, writers_of


def cut(name: str, tensor: Tensor, *cuts: list[int]) -> list[Slice]:
    """A grid of slices: by dimension, where to cut."""
    bounds = [list(itertools.pairwise([0, *at, size])) for at, size in zip(cuts, tensor.shape, strict=True)]
    return [
        Slice.of(name, tensor.shape, [a for a, _ in box], tensor[tuple(slice(a, b) for a, b in box)])
        for box in itertools.product(*bounds)
    ]


WHOLE = torch.arange(35.0).view(5, 7)
GRIDS = [([], []), ([2, 4], []), ([], [1, 6]), ([3], [2, 3, 4]), ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("other", GRIDS, ids=str)
def test_what_was_cut_one_way_is_read_another_way(grid: tuple[list[int], ...], other: tuple[list[int], ...]) -> None:
    slices = cut("w", WHOLE, *grid)
    random.Random(0).shuffle(slices)
    kept = Pieces.of(slices)
    assert torch.equal(kept["w"], WHOLE)
    for wanted in cut("w", WHOLE, *other):
        into = Slice(wanted.box, torch.full_like(wanted.local, -1.0))
        kept.read(into)
        assert torch.equal(into.local, wanted.local)


def test_ranges_of_a_flat_buffer_scalars_and_empty_tensors() -> None:
    flat, scalar = torch.arange(10.0), torch.tensor(3.0)
    kept = Pieces.of([*cut("0/anchor", flat, [3, 4]), *whole_slices({"step": scalar, "none": torch.empty(0, 4)})])
    assert list(kept) == ["0/anchor", "step", "none"]
    assert torch.equal(kept["0/anchor"], flat)
    assert kept["step"] == 3
    assert kept["none"].shape == kept.shape("none") == (0, 4)


def test_a_tensor_of_one_slice_is_not_copied() -> None:
    assert Pieces.of(whole_slices({"w": WHOLE}))["w"].data_ptr() == WHOLE.data_ptr()


def box(offsets: tuple[int, ...], extent: tuple[int, ...], shape: tuple[int, ...] = (4, 4)) -> Slice:
    return Slice.of("w", shape, offsets, torch.zeros(extent))


@pytest.mark.parametrize(
    "slices",
    [
        [box((0, 0), (2, 4))],
        [box((2, 0), (2, 4))],
        [box((0, 0), (2, 4)), box((3, 0), (1, 4))],
        [box((0, 0), (3, 4)), box((2, 0), (2, 4))],
        [box((0, 0), (2, 4)), box((0, 0), (2, 4)), box((2, 0), (2, 4))],
        [box((0, 0), (4, 2)), box((0, 2), (2, 2))],
        [box((0, 0), (4, 4)), box((4, 0), (1, 4))],
        [box((0, 0), (4, 4)), box((4, 0), (0, 4))],
        [box((0, 0), (4, 4)), box((0, 0), (4, 4))],
        [box((0, 0), (2, 4)), box((2, 0), (2, 4), (4, 5))],
        [box((0, 0), (4, 4), (2**62, 2**62))],
        [box((0,), (4,), (4, 4))],
        [box((0, 0, 0), (4, 4), (4, 4))],
        [box((), (), ()), box((), (), ())],
    ],
)
def test_gaps_overlaps_and_other_shapes_are_refused(slices: list[Slice]) -> None:
    with pytest.raises(ValueError, match="slices of 'w'"):
        Pieces.of(slices)


def test_every_slice_is_written_once_and_copies_share_the_work() -> None:
    """Two copies of two shares; what one rank alone has; a replicated tensor; a rank without one of the tensors."""
    shares = cut("w", torch.zeros(8, 6), [4], [])
    alone = whole_slices({"0/anchor": torch.zeros(100)})
    small = whole_slices({"step": torch.tensor(1.0), "norm": torch.zeros(6)})
    held = [{"inner": [shares[rank % 2], *(small if rank < 3 else [])]} for rank in range(4)]
    held[0]["outer"] = alone
    writers = writers_of([offered(groups) for groups in held])
    written = [chosen(groups, writers, rank) for rank, groups in enumerate(held)]
    assert [one for part in written for one in part.get("outer", [])] == alone
    everything = [one for part in written for one in part["inner"]]
    assert sorted(one.box.key for one in everything) == ["norm", "step", "w@0,0", "w@4,0"]
    assert Pieces.of(everything).shape("w") == (8, 6)
    assert not written[0]["inner"]  # it has the outer state to write
    assert max(sum(one.local.nbytes for one in part["inner"]) for part in written) <= 4 * 24 + 28


def test_empty_shares_are_nobody_s_to_write() -> None:
    """More ranks than rows: FSDP leaves some without any."""
    shares = [Slice.of("w", (1, 3), (min(rank, 1), 0), torch.zeros(1 - min(rank, 1), 3)) for rank in range(3)]
    writers = writers_of([offered({"inner": [share]}) for share in shares])
    assert [len(chosen({"inner": [share]}, writers, rank)["inner"]) for rank, share in enumerate(shares)] == [1, 0, 0]


def test_ranks_that_have_not_all_of_a_tensor_are_refused() -> None:
    share = cut("w", torch.zeros(8, 6), [4], [])[0]
    with pytest.raises(ValueError, match="leave a gap"):
        writers_of([offered({"inner": [share]})])
