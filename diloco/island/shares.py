"""A rank's slices of torch's DTensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from diloco.island.slices import Slice


def sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a share of it (FSDP2, tensor parallelism)."""
    return isinstance(tensor, DTensor)


def device_of_share(tensor: Tensor) -> torch.device:
    """Where this rank's share lies."""
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


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
