"""The bridge between the canonical layout and what the ranks of an island hold of it.

A round works on rank 0, on whole parameters by name. Before it reads a fragment, that is gathered from the ranks; after
it wrote one, that is spread over them: parameter by parameter, so that no accelerator ever holds more than one whole
parameter beside its share of the model. Only the fragment that a version moves crosses the bridge, twice each way at
most. Rank 0's host holds a copy of all parameters for it, 4 bytes each, beside the outer state (8 bytes each).

What is gathered from shares and spread again is bit for bit the same, whatever the mesh. A rank of a pipeline has the
parameters of its stages only: those of others it gets along its `Column`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco.fragments import Fragment, Weights
from diloco.island import Island


@dataclass(frozen=True)
class Column:
    """The ranks of an island at one place of all stages of a pipeline: any can get what one of them has."""

    group: dist.ProcessGroup
    shapes: Mapping[str, torch.Size]
    """Of all parameters of the model, by name in model order."""
    holders: Mapping[str, int]
    """The rank in this column that has a parameter; the first one, where two have it."""
    device: torch.device

    def told(self, name: str, value: Tensor | None, shape: torch.Size) -> Tensor:
        """On all ranks: what the holder of a parameter has of this shape, fp32. Others' `value` is not looked at."""
        holder = self.holders[name]
        if dist.get_rank() == holder:
            assert value is not None
            whole = whole_of(value).to(self.device).contiguous()
        else:
            whole = torch.empty(shape, device=self.device)
        dist.broadcast(whole, holder, self.group)
        return whole


def whole_of(value: Tensor) -> Tensor:
    """A tensor of which each rank may have a share, whole on each of them. They call it together."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def collect(value: Tensor) -> Tensor:
    """A copy of a tensor as a plain one on rank 0's host; empty on other ranks. All of them call it together."""
    whole = whole_of(value)
    return whole.to("cpu", copy=True) if dist.get_rank() == 0 else torch.empty(0)


def spread(value: Tensor, into: Tensor | None, device: torch.device | str | None = None) -> Tensor | None:
    """Rank 0's `value`, whole and on any device, into a tensor that each rank may hold a share of. Returns `into`.

    All ranks call it together; of what others than rank 0 give as `value` only the shape is looked at. None: this rank
    has nothing of it, and `value` travels as fp32 over `device`.
    """
    share = into.to_local() if isinstance(into, DTensor) else into
    dtype = torch.float32 if into is None else into.dtype
    if into is not None:
        device = into.device_mesh.device_type if isinstance(into, DTensor) else into.device
    leads = dist.get_rank() == 0
    whole = value.to(device, dtype) if leads else torch.empty(value.shape, dtype=dtype, device=device)
    dist.broadcast(whole, 0)
    if share is None:
        return None
    if isinstance(into, DTensor):
        whole = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None).to_local()
    share.copy_(whole)
    return into


class Bridge(Weights):
    """A model's parameters for the rounds on rank 0. The other ranks do what rank 0 announces (`tasks`)."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        island: Island,
        column: Column | None = None,
    ) -> None:
        """`held`: what this rank holds of each parameter. `parameters`: on rank 0 whole and fp32, where `held` are not
        whole; else they are the same. `column`: where stages of a pipeline hold other parameters each."""
        super().__init__(parameters)
        self._held = {name: tensor.detach() for name, tensor in held.items()}
        self._island = island
        self._column = column
        self._divided = any(isinstance(tensor, DTensor) for tensor in held.values())
        self._current: set[int] = set()
        self.tasks = {"fetch": self._gather, "flush": self._scatter}

    def fetch(self, fragment: Fragment) -> None:
        """Gather a fragment's parameters, unless nothing has moved them since that was done last."""
        if self._divided and fragment.index not in self._current:
            names = [entry.name for entry in fragment.entries]
            self._island.announce("fetch", names=names)
            self._gather(names)
        self._current.add(fragment.index)

    def flush(self, fragment: Fragment) -> None:
        """Spread a fragment's parameters."""
        names = [entry.name for entry in fragment.entries]
        self._island.announce("flush", names=names)
        self._scatter(names)
        self._current.add(fragment.index)

    def begin(self) -> None:
        """All ranks together, once: rank 0's whole parameters become everybody's shares."""
        self._scatter(self._column.shapes if self._column else self._held)

    def moved(self) -> None:
        """An inner step has moved all parameters."""
        self._current.clear()

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter as the ranks hold it now, whole and fp32 on each of them. They call it together."""
        held = self._held.get(name)
        if self._column:
            return self._column.told(name, held, self._column.shapes[name])
        assert held is not None
        return whole_of(held)

    @torch.no_grad()
    def _gather(self, names: Iterable[str]) -> None:
        for name in names:
            whole = self.whole(name)
            if self._island.leads:
                self.parameters[name].copy_(whole)

    @torch.no_grad()
    def _scatter(self, names: Iterable[str]) -> None:
        for name in names:
            held = self._held.get(name)
            value = self.parameters[name].detach() if self._island.leads else held
            if value is None:
                assert self._column
                value = torch.empty(self._column.shapes[name], device="meta")
            spread(value, held, self._island.device)
