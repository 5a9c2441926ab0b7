"""A rank's slices of torch's DTensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.island.slices import Slice


def held(name: str, tensor: Tensor) -> Slice:
    """This rank's slice of a tensor: a view, to be read or written. Any placement but a sum that is not made yet.

    FSDP over tensor parallelism divides one dimension twice, the outer of the two first (`_StridedShard`): torch says
    where the share begins, and it is one box, for tensor parallelism divides evenly.
    """
    if not isinstance(tensor, DTensor):
        return Slice.whole(name, tensor)
    local = tensor.to_local().detach()
    extent, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert extent == tuple(local.shape), f"{name}: torch holds {tuple(local.shape)}, not {extent}"
    return Slice.of(name, tensor.shape, offsets, local)
