"""The ranks of one island, joined by torch.distributed; the only place that imports it.

To the world an island is one peer: rank 0 talks to it, the other ranks follow. Started without torchrun an island is
one process, and nothing of torch.distributed is initialised.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import UsageError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest that a rank waits for another: rank 0 may wait for a round's deadline while the others wait for it."""


class Island:
    """This process's place among the ranks, and the few collectives that a peer needs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @staticmethod
    def here(device: torch.device) -> Island:
        """The island that torchrun started (RANK, WORLD_SIZE, ...), or an island of one.

        Raises UsageError when torchrun's variables are incomplete.
        """
        if "WORLD_SIZE" not in os.environ:
            return Island(0, 1, device)
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(
                f"WORLD_SIZE is set, but not {', '.join(missing)}", "start with torchrun, or unset WORLD_SIZE"
            )
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        return Island.at(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)

    @staticmethod
    def at(rank: int, size: int, device: torch.device, rendezvous: str = "env://") -> Island:
        """Rank `rank` of `size`; meets the others at `rendezvous` (torch's init_method)."""
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rendezvous, COLLECTIVE_TIMEOUT, world_size=size, rank=rank)
        return Island(rank, size, device)

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the world."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Average gradients over the ranks in every backward pass."""
        if self.size == 1:
            return model
        return cast(
            nn.Module, DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        )

    def my_share(self, block: Tensor) -> Tensor:
        """This rank's consecutive rows of a batch. The batch must divide by the number of ranks."""
        return block.chunk(self.size)[self.rank] if self.size > 1 else block

    def share(self, text: str = "") -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if self.leads and text else torch.empty(0)
        length = torch.tensor([len(text.encode())], device=self.device)
        dist.broadcast(length, 0)
        buffer = (
            data.to(self.device, torch.uint8)
            if self.leads
            else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        )
        if int(length):
            dist.broadcast(buffer, 0)
        return bytes(buffer.cpu().numpy()).decode()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into every rank's tensors, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        if self.size == 1:
            return value
        total = torch.tensor([value], device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def close(self) -> None:
        """Leave the process group, all ranks together: one that goes early takes the others' connections with it."""
        if self.size > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
