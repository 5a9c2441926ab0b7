"""The bridge between the canonical layout and what the ranks of an island hold of a model.

A round works on parts of the canonical layout, and every rank on its own: whatever the mesh is, each reads what it
needs of the parameters, and writes what it has. Parameter by parameter, so that no rank ever holds more than one whole
parameter beside its share of the model and of the fragment that moves.

What is read from shares and written again is bit for bit the same, whatever the mesh. A rank of a pipeline has the
parameters of its stages only: those of others it gets along its `Column`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco.base.decisions import GatherWeights, TakeWeights
from diloco.base.memory import floats
from diloco.island import Island
from diloco.island.slices import full
from diloco.outer.fragments import Fragment, NamedShapes, ParameterEntry, Spot, Weights

AHEAD = 4
"""Parts of a fragment that a rank has gathered, and not encoded yet."""


@dataclass(frozen=True)
class Column:
    """The ranks of an island at one place of all stages of a pipeline: any can get what one of them has."""

    group: dist.ProcessGroup
    shapes: Mapping[str, torch.Size]
    """Shape of every parameter of the model, by name in model order."""
    holders: Mapping[str, int]
    """The rank in this column that has a parameter; the first one, where two have it."""
    device: torch.device

    def broadcast(self, name: str, value: Tensor | None) -> Tensor:
        """A parameter, fp32, on all ranks of a pipeline, from the one that holds it. The others' `value` is ignored."""
        holder = self.holders[name]
        if dist.get_rank() == holder:
            assert value is not None
            whole = full(value).detach().to(self.device).contiguous()
        else:
            whole = torch.empty(self.shapes[name], dtype=torch.float32, device=self.device)
        dist.broadcast(whole, holder, self.group)
        return whole


def take(whole: Tensor, into: Tensor) -> None:
    """Copy this rank's share of a `whole` parameter, which every rank of the mesh has, into `into`."""
    if isinstance(into, DTensor):
        share = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None).to_local()
        into.to_local().copy_(share)
    else:
        into.copy_(whole)


def _handed_over(values: Tensor, room: threading.Semaphore) -> Tensor:
    room.release()
    return values


Plan = list[tuple[ParameterEntry, list[list[Spot]]]]


class Bridge(Weights):
    """A model's parameters on the ranks of an island. All of them read and write together."""

    def __init__(self, held: Mapping[str, Tensor], island: Island, column: Column | None = None) -> None:
        """`held`: what this rank holds of each parameter. `column`: where stages of a pipeline hold other parameters
        each."""
        super().__init__({name: tensor.detach() for name, tensor in held.items()})
        self._island, self._column = island, column
        self._plans: dict[tuple[int, int], Plan] = {}

    @property
    def shapes(self) -> NamedShapes:
        if self._column is None:
            return super().shapes
        return [(name, tuple(shape)) for name, shape in self._column.shapes.items()]

    @torch.no_grad()
    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Copy rank 0's `values` of whole parameters, on any device, into every rank's shares of them."""
        for name, shape in self.shapes:
            # A rank that has nothing of a parameter gets it with the others all the same, as fp32 on its own device.
            into = self.parameters.get(name)
            device: torch.device | str = self._island.device
            if into is not None:
                device = into.device_mesh.device_type if isinstance(into, DTensor) else into.device
            dtype = torch.float32 if into is None else into.dtype
            if self._island.leads:
                whole = values[name].detach().to(device, dtype)
            else:
                whole = torch.empty(shape, dtype=dtype, device=device)
            self._from_rank_0(whole)
            if into is not None:
                take(whole, into)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter as the ranks hold it now, whole on each of them. They call it together."""
        held = self.parameters.get(name)
        if self._column is not None:
            return self._column.broadcast(name, held)
        assert held is not None
        return full(held).detach()

    @torch.no_grad()
    def read(self, fragment: Fragment, into: Tensor | None = None) -> Tensor:
        """Gather the parameters from the ranks' shares: every rank gets the parts that its `fragment` holds."""
        flat = floats(fragment.elements) if into is None else into
        for entry, lanes in self._plan(fragment):
            whole = self.whole(entry.name).flatten()
            for spot in lanes[self._island.rank]:
                flat[spot.offset : spot.end].copy_(whole[spot.start : spot.stop])
        return flat

    @torch.no_grad()
    def parts(self, fragment: Fragment) -> Iterator[tuple[int, Callable[[], Tensor]]]:
        """Parts of a fragment gathered from all ranks, on the thread that asks for the next part. That waits while
        `AHEAD` parts were not asked for their values."""
        room = threading.Semaphore(AHEAD)
        cuts = iter(fragment.cuts.items())
        part, (begin, end) = next(cuts, (-1, (0, 0)))
        flat = floats(end - begin)
        for entry, lanes in self._plan(fragment):
            whole = self.whole(entry.name).flatten()
            for spot in lanes[self._island.rank]:
                flat[spot.offset - begin :][: spot.elements].copy_(whole[spot.start : spot.stop])
                if spot.end == end:
                    room.acquire()
                    yield part, partial(_handed_over, flat, room)
                    part, (begin, end) = next(cuts, (-1, (0, 0)))
                    flat = floats(end - begin)

    def _held(self, parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    @torch.no_grad()
    def write(self, fragment: Fragment, flat: Tensor) -> None:
        """Scatter parameters to the ranks: each gives the parts that its `fragment` holds, and takes its shares."""
        for entry, lanes in self._plan(fragment):
            own = [flat[spot.offset : spot.end] for spot in lanes[self._island.rank]]
            self._take(entry, own, lanes, fragment.lanes)

    @torch.no_grad()
    def change(self, fragment: Fragment, changed: Callable[[Tensor, slice], Tensor]) -> None:
        for entry, lanes in self._plan(fragment):
            whole = self.whole(entry.name).flatten()
            own = [
                changed(whole[spot.start : spot.stop].to("cpu", torch.float32), slice(spot.offset, spot.end))
                for spot in lanes[self._island.rank]
            ]
            self._take(entry, own, lanes, fragment.lanes)

    def _take(
        self, entry: ParameterEntry, own: Sequence[Tensor], lanes: Sequence[Sequence[Spot]], holders: int
    ) -> None:
        """Make a parameter whole on every rank from the pieces that each has (`own`), and copy shares into the model.

        Pieces are moved, not summed: a sum turns -0.0 into 0.0.
        """
        mine = torch.cat([*own, floats(0)])
        if holders == 1:
            whole = (mine if self._island.leads else floats(entry.elements)).to(self._island.device)
            self._from_rank_0(whole)
        else:
            most = max(sum(spot.elements for spot in spots) for spots in lanes)
            padded = torch.cat([mine, floats(most - mine.numel())]).to(self._island.device)
            every = self._from_all(padded)
            whole = padded.new_empty(entry.elements)
            for spots, pieces in zip(lanes, every, strict=True):
                begin = 0
                for spot in spots:
                    whole[spot.start : spot.stop] = pieces[begin : begin + spot.elements]
                    begin += spot.elements
        held = self.parameters.get(entry.name)
        if held is not None:
            take(whole.view(entry.shape).to(held.dtype), held)

    def _from_rank_0(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor into that of every rank of the island."""
        dist.broadcast(tensor, 0)

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the island, of one shape."""
        every = [torch.empty_like(tensor) for _ in range(self._island.size)]
        dist.all_gather(every, tensor)
        return every

    def _plan(self, fragment: Fragment) -> Plan:
        """Pieces of each parameter of a fragment that each rank of the island holds, and their places in its buffer."""
        key = fragment.index, fragment.lanes
        if key not in self._plans:
            shares = [fragment.on_lane(rank, fragment.lanes).spots for rank in range(self._island.size)]
            by_name: list[dict[str, list[Spot]]] = [{} for _ in shares]
            for spots, named in zip(shares, by_name, strict=True):
                for spot in spots:
                    named.setdefault(spot.name, []).append(spot)
            self._plans[key] = [(entry, [named.get(entry.name, []) for named in by_name]) for entry in fragment.entries]
        return self._plans[key]


class Led(Weights):
    """A bridge for a peer whose rank 0 holds the whole outer state: it has the others do what it does."""

    def __init__(self, bridge: Bridge, island: Island) -> None:
        super().__init__(bridge.parameters)
        self._bridge, self._island = bridge, island

    @property
    def shapes(self) -> NamedShapes:
        return self._bridge.shapes

    def read(self, fragment: Fragment, into: Tensor | None = None) -> Tensor:
        self._island.decide(GatherWeights(fragment.index))
        return self._bridge.read(fragment, into)

    def write(self, fragment: Fragment, flat: Tensor) -> None:
        self._island.decide(TakeWeights(fragment.index))
        self._bridge.write(fragment, flat)

    def change(self, fragment: Fragment, changed: Callable[[Tensor, slice], Tensor]) -> None:
        self.write(fragment, changed(self.read(fragment), slice(0, fragment.elements)))  # as the others are told
