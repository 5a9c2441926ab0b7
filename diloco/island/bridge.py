"""The bridge between the canonical layout and what the ranks of an island hold of it.

A round works on rank 0, on whole parameters by name. Before it reads a fragment, that is gathered from the ranks; after
it wrote one, that is spread over them: parameter by parameter, so that no accelerator ever holds more than one whole
parameter beside its share of the model. Only the fragment that a version moves crosses the bridge, twice each way at
most. Rank 0's host holds a copy of all parameters for it, 4 bytes each, beside the outer state (8 bytes each).

What is gathered from shares and spread again is bit for bit the same, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco.fragments import Fragment, Weights
from diloco.island import Island


def collect(value: Tensor) -> Tensor:
    """A copy of a tensor as a plain one on rank 0's host; empty on other ranks. All of them call it together."""
    whole = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return whole.to("cpu", copy=True) if dist.get_rank() == 0 else torch.empty(0)


def spread(value: Tensor, into: Tensor) -> Tensor:
    """Rank 0's `value`, whole and on any device, into a tensor that each rank may hold a share of. Returns `into`.

    All ranks call it together; what others than rank 0 give as `value` is not looked at.
    """
    share = into.to_local() if isinstance(into, DTensor) else into
    device = into.device_mesh.device_type if isinstance(into, DTensor) else into.device
    whole = (
        value.to(device, into.dtype)
        if dist.get_rank() == 0
        else torch.empty(into.shape, dtype=into.dtype, device=device)
    )
    dist.broadcast(whole, 0)
    if isinstance(into, DTensor):
        whole = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None).to_local()
    share.copy_(whole)
    return into


class Bridge(Weights):
    """A model's parameters for the rounds on rank 0. The other ranks do what rank 0 announces (`tasks`)."""

    def __init__(self, parameters: Mapping[str, Tensor], held: Mapping[str, Tensor], island: Island) -> None:
        """`held`: what this rank holds of each parameter. `parameters`: on rank 0 whole and fp32, where `held` are not
        whole; else they are the same."""
        super().__init__(parameters)
        self._held = {name: tensor.detach() for name, tensor in held.items()}
        self._island = island
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
        self._scatter(self._held)

    def moved(self) -> None:
        """An inner step has moved all parameters."""
        self._current.clear()

    @torch.no_grad()
    def _gather(self, names: Iterable[str]) -> None:
        for name in names:
            whole = collect(self._held[name])
            if self._island.leads:
                self.parameters[name].copy_(whole)

    @torch.no_grad()
    def _scatter(self, names: Iterable[str]) -> None:
        for name in names:
            held = self._held[name]
            spread(self.parameters[name].detach() if self._island.leads else held, held)
