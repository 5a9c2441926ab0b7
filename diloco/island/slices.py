"""Tensors in slices: what each of several processes holds of one, and how they make it whole again.

A slice is a box: for each dimension an offset and an extent. The slices of a tensor tile it: they are intervals along
the first dimension, without gap or overlap, and the slices that share an interval tile the other dimensions. So do all
that a mesh divides evenly or unevenly, along any dimensions, and ranges of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel


def sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a share of a tensor (FSDP2, tensor parallelism)."""
    return isinstance(tensor, DTensor)


def full(tensor: Tensor) -> Tensor:
    """A tensor, whole on each rank, of which each may have a share or a summand. Ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def device_of_share(tensor: Tensor) -> torch.device:
    """Device of this rank's share of a tensor."""
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel around it, if that is there."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def held(name: str, tensor: Tensor) -> Slice:
    """This rank's slice of a tensor: a view, to read or write. Any placement but a pending sum.

    FSDP over tensor parallelism divides one dimension twice, the outer of the two first (`_StridedShard`): torch says
    where the share begins, and it is one box, for tensor parallelism divides evenly.
    """
    if not isinstance(tensor, DTensor):
        return Slice.whole(name, tensor)
    local = tensor.to_local().detach()
    extent, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert extent == tuple(local.shape), f"{name}: torch holds {tuple(local.shape)}, not {extent}"
    return Slice.of(name, tensor.shape, offsets, local)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Place of a rank's slice in a tensor."""

    name: str
    """The tensor's."""
    shape: Shape
    """The whole tensor's."""
    offsets: Shape
    """Place of the first element, by dimension."""
    extent: Shape
    """Elements by dimension."""

    @property
    def whole(self) -> bool:
        """Whether the slice is all of its tensor."""
        return self.extent == self.shape

    @property
    def key(self) -> str:
        """Name of the slice among a rank's others: the tensor's where it is whole."""
        return self.name if self.whole else f"{self.name}@{','.join(map(str, self.offsets))}"

    def overlap(self, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Overlap of two ranks' slices of one tensor, as indices into each of the two; None for nothing."""
        starts = list(map(max, self.offsets, other.offsets))
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.extent, other.offsets, other.extent, strict=True)
        ]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        bounds = list(zip(starts, stops, strict=True))
        return self._within(bounds), other._within(bounds)

    def _within(self, bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """(start, stop) by dimension of the whole tensor, as an index into this rank's slice."""
        pairs = zip(bounds, self.offsets, strict=True)
        return tuple(slice(start - offset, stop - offset) for (start, stop), offset in pairs)


@dataclass(frozen=True, eq=False)
class Slice:
    """A slice of a tensor that a rank or a file holds."""

    box: Box
    local: Tensor
    """The box's values, in its extent; any device."""

    @staticmethod
    def of(name: str, shape: Sequence[int], offsets: Sequence[int], local: Tensor) -> Slice:
        """A rank's slice `local` of a tensor of `shape`, which begins at `offsets`."""
        return Slice(Box(name, tuple(shape), tuple(offsets), tuple(local.shape)), local)

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Slice:
        """Slice that is a whole tensor, held by one rank."""
        return Slice.of(name, tensor.shape, [0] * tensor.ndim, tensor.detach())


Slices = Mapping[str, Sequence[Slice]]
"""By group, such as `inner` or `local`."""


def whole_slices(tensors: Mapping[str, Tensor]) -> list[Slice]:
    """Slices that are whole tensors, held by one rank."""
    return [Slice.whole(name, tensor) for name, tensor in tensors.items()]


class Pieces(Mapping[str, Tensor]):
    """Tensors by name, made whole from slices of several ranks; one kept in several slices is in new memory."""

    def __init__(self, slices: Iterable[tuple[Box, Callable[[], Tensor]]]) -> None:
        """Each slice with what gets its values. Raises ValueError unless the slices of each tensor tile it."""
        self._slices: dict[str, list[tuple[Box, Callable[[], Tensor]]]] = {}
        for box, values in slices:
            self._slices.setdefault(box.name, []).append((box, values))
        for name, mine in self._slices.items():
            check_tiled(name, [box for box, _ in mine])

    @staticmethod
    def of(slices: Iterable[Slice]) -> Pieces:
        """Tensors made whole from slices of ranks in memory."""
        return Pieces((one.box, lambda one=one: one.local) for one in slices)  # type: ignore[misc]

    def shape(self, name: str) -> Shape:
        """Shape of the whole tensor that the ranks' slices make."""
        return self._slices[name][0][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor in slices: that of its first one."""
        return self._slices[name][0][1]().dtype

    def read(self, into: Slice) -> None:
        """Copy a tensor's values into a rank's slice of it, from slices that overlap it. Raises KeyError for a name
        that is not here; shapes must be equal."""
        for box, values in self._slices[into.box.name]:
            shared = box.overlap(into.box)
            if shared is not None:
                into.local[shared[1]].copy_(values()[shared[0]])

    def __getitem__(self, name: str) -> Tensor:
        (box, values), *others = self._slices[name]
        first = values()
        if not others:
            return first
        whole = Slice.whole(name, torch.empty(box.shape, dtype=first.dtype, device="cpu"))
        self.read(whole)
        return whole.local

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def check_tiled(name: str, boxes: Sequence[Box]) -> None:
    """Raise ValueError unless the ranks' slices of a tensor tile it."""
    shapes = {box.shape for box in boxes}
    if len(shapes) > 1:
        raise ValueError(f"slices of {name[:100]!r} are of tensors of different shapes")
    (shape,) = shapes
    if any(len(box.extent) != len(shape) or len(box.offsets) != len(shape) for box in boxes):
        raise ValueError(f"slices of {name[:100]!r} have another number of dimensions than it")
    if not tiles([tuple(zip(box.offsets, box.extent, strict=True)) for box in boxes], shape):
        raise ValueError(f"the slices of {name[:100]!r} leave a gap, or overlap")


def tiles(boxes: Sequence[Sequence[tuple[int, int]]], shape: Shape) -> bool:
    """Whether slices of a tensor, (offset, extent) by dimension, cover its `shape` once: without gap or overlap."""
    if not shape:
        return len(boxes) == 1
    intervals: dict[tuple[int, int], list[Sequence[tuple[int, int]]]] = {}
    for box in boxes:
        intervals.setdefault(box[0], []).append(box[1:])
    end = 0
    for offset, extent in sorted(intervals):
        if offset != end or extent < min(1, shape[0]):  # an empty slice belongs only to an empty tensor
            return False
        end += extent
    return end == shape[0] and all(tiles(rest, shape[1:]) for rest in intervals.values())
