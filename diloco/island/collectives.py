"""Bandwidth between the ranks of an island: `diloco bench collectives`.

Bandwidths as NCCL-tests defines them (its doc/PERFORMANCE.md). *Algorithm* bandwidth is size / time; *bus* bandwidth is
that times what a rank must at least send for each byte, so that it can be compared with a link whatever the number of
ranks. Size: of what is reduced, of the whole that is gathered or scattered, of all that a rank has for the others, of
one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from diloco.base.clock import monotonic_s
from diloco.base.errors import UsageError
from diloco.island import Island
from diloco.plan.hardware import PLACED, MeshLayout

WARM_UPS = 2
MAX_REPEATS = 1000

# Torch 2.13 calls them otherwise, and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "send and receive": lambda ranks: 1.0,
}
"""Bus bandwidth over algorithm bandwidth, by number of ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One torch.distributed collective with one size over one dimension of the mesh; the slowest rank's time."""

    collective: str
    dimension: str
    ranks: int
    size_bytes: int
    seconds: float

    @property
    def algorithm_bps(self) -> float:
        """Algorithm bandwidth of the collective in bits per second, as NCCL-tests defines it."""
        return 8 * self.size_bytes / self.seconds

    @property
    def bus_bps(self) -> float:
        """Bus bandwidth of the collective in bits per second, as NCCL-tests defines it."""
        return self.algorithm_bps * BUS_FACTORS[self.collective](self.ranks)


def measure(island: Island, layout: MeshLayout | None, sizes: Sequence[int], timed_s: float) -> Iterator[Measured]:
    """Time every collective over every dimension of the mesh with more than one rank, or over all ranks if there is no
    layout; called by all ranks alike. Sizes are in bytes, rounded up so that each rank has as many fp32 values; a
    measurement takes about `timed_s`, or one call.

    Raises UsageError when there is one rank only, or the layout has another number of them.
    """
    if island.size == 1:
        fix = "start with torchrun: torchrun --nproc-per-node 2 -m diloco bench collectives"
        raise UsageError("one rank has nobody to talk to", fix)
    if layout is not None and layout.world != island.size:
        cause = f"{layout} makes {layout.world} ranks, and {island.size} were started"
        raise UsageError(cause, "change --layout, or torchrun's --nproc-per-node and --nnodes")
    groups: list[tuple[str, Any]] = [("all", dist.group.WORLD)]
    if layout is not None:
        names = tuple(reversed(PLACED))  # a mesh's last dimension varies fastest
        extents = tuple(getattr(layout, name) for name in names)
        mesh = init_device_mesh(island.device.type, extents, mesh_dim_names=names)
        groups = [(name, mesh[name].get_group()) for name in PLACED if getattr(layout, name) > 1]
    for dimension, group in groups:
        ranks = dist.get_world_size(group)
        for collective in BUS_FACTORS:
            for values in (math.ceil(size / 4 / ranks) * ranks for size in sizes):
                call = _call(collective, values, island.device, group)
                for _ in range(WARM_UPS):  # the first one sets up connections
                    call()
                once_s = _slowest_s(call, 1, island.device, group)
                repeats = min(max(1, round(timed_s / once_s)), MAX_REPEATS)  # the same on every rank
                seconds = _slowest_s(call, repeats, island.device, group)
                yield Measured(collective, dimension, ranks, 4 * values, seconds)


def _call(collective: str, values: int, device: torch.device, group: Any) -> Callable[[], object]:
    """The torch.distributed collective to time, with its buffers: `values` fp32 numbers, which its ranks divide."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(values, dtype=torch.float32, device=device)
    other, share = torch.empty_like(whole), whole.new_zeros(values // ranks)

    def shift() -> None:
        """Collective in which each rank sends to the next one and receives from the one before."""
        sends = dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    calls: Mapping[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: _all_gather(whole, share, group=group),
        "reduce-scatter": lambda: _reduce_scatter(share, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send and receive": shift,
    }
    return calls[collective]


def _slowest_s(call: Callable[[], object], repeats: int, device: torch.device, group: Any) -> float:
    """Seconds of one collective, the mean of so many, on the slowest rank of the group."""
    dist.barrier(group)
    _finish(device)
    began_s = monotonic_s()
    for _ in range(repeats):
        call()
    _finish(device)
    seconds: Tensor = torch.tensor([(monotonic_s() - began_s) / repeats], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return seconds.item()


def _finish(device: torch.device) -> None:
    """Wait until a rank's GPU has done what collectives only enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
