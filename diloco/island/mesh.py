"""The mesh of an island: its ranks along named dimensions, of which torch makes one DeviceMesh.

A rank's number in the island counts the dimensions of `DIMENSIONS` like digits, the last one the fastest: ranks of one
tensor-parallel group have consecutive numbers, and as torchrun numbers the ranks node by node, they are in one node.
A new dimension is a line in `DIMENSIONS`, a key of `[mesh]`, and a check in `check`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diloco.config import Contract, MeshSection, Site
from diloco.errors import ConfigError
from diloco.models.transformer import ffn_width

DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
"""Outermost first: what needs the fastest links comes last."""
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
"""Ranks that differ in these train on different rows."""

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh."""

    sizes: Sizes
    """Ranks by dimension, in the order of `DIMENSIONS`."""
    rank: int = 0
    devices: DeviceMesh | None = None
    """Torch's, with the dimensions' names; None on an island of one rank."""

    @staticmethod
    def of(sizes: Sizes, rank: int, device_type: str) -> Mesh:
        """The mesh of an island whose process group stands. All its ranks make it together."""
        if math.prod(sizes.values()) == 1:
            return Mesh(sizes)
        return Mesh(sizes, rank, init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))

    def size(self, *names: str) -> int:
        """Ranks along these dimensions together."""
        return math.prod(self.sizes[name] for name in names)

    def place(self, *names: str) -> int:
        """This rank's place among the `size(*names)` along these dimensions."""
        place = 0
        for name in names:
            place = place * self.sizes[name] + self._places[name]
        return place

    def along(self, *names: str) -> DeviceMesh:
        """Torch's mesh of the ranks that differ from this one in these dimensions only."""
        assert self.devices is not None
        return self.devices[names]

    @cached_property
    def _places(self) -> Sizes:
        places: dict[str, int] = {}
        rest = self.rank
        for name in reversed(list(self.sizes)):
            rest, places[name] = divmod(rest, self.sizes[name])
        return places


def sizes_of(section: MeshSection, ranks: int) -> Sizes:
    """Ranks by dimension when the island has `ranks` in all. Raises ConfigError unless that comes out even."""
    sizes = {name: getattr(section, name) for name in DIMENSIONS}
    given = math.prod(size for size in sizes.values() if size > 0)
    said = " x ".join(f"{name} ({size})" for name, size in sizes.items() if size > 0)
    left = next((name for name, size in sizes.items() if size < 0), None)
    if left is not None:
        if ranks % given:
            cause = f"mesh.{said} is {given}, which does not divide the island's {ranks} ranks"
            raise ConfigError(cause, f"change one of these numbers, or start a multiple of {given} ranks")
        sizes[left] = ranks // given
    elif given != ranks:
        cause = f"mesh.{said} is {given} ranks, but the island has {ranks}"
        raise ConfigError(cause, f"start {given} ranks (device.ranks, or torchrun), or set one of these numbers to -1")
    if section.shard == "none":  # ranks that share nothing are copies
        sizes |= {"dp_replicate": sizes["dp_replicate"] * sizes["dp_shard"], "dp_shard": 1}
    return sizes


def check(sizes: Sizes, site: Site, contract: Contract, ranks_per_node: int) -> None:
    """Whether the contract's model and batch can be divided so. Raises ConfigError, saying which number to change."""
    section = site.mesh
    data = math.prod(sizes[name] for name in DATA_DIMENSIONS)
    if contract.inner.batch_size % data:
        cause = f"inner.batch_size ({contract.inner.batch_size}) does not divide by {data} data-parallel ranks"
        raise ConfigError(cause, "start a number of ranks that divides it, or share the work by mesh.tp")
    if contract.model.kind != "transformer" and (section.shard != "none" or sizes["tp"] > 1):
        cause = f"model.kind {contract.model.kind!r} cannot be divided over ranks"
        raise ConfigError(cause, 'set mesh.shard = "none" and mesh.tp = 1: the ranks are copies then')
    if contract.model.kind != "transformer" and site.device.checkpointing != "none":
        cause = f"device.checkpointing is not for model.kind {contract.model.kind!r}"
        raise ConfigError(cause, 'set device.checkpointing = "none"')
    if contract.inner.optimizer == "muon" and (section.shard != "none" or sizes["tp"] > 1):
        cause = "inner.optimizer 'muon' makes whole matrices orthogonal, and [mesh] divides them"
        raise ConfigError(cause, 'set mesh.shard = "none" and mesh.tp = 1: the ranks are copies then')
    if sizes["tp"] > 1:
        _check_tensor_parallel(sizes["tp"], section, contract, ranks_per_node)


def _check_tensor_parallel(tp: int, section: MeshSection, contract: Contract, ranks_per_node: int) -> None:
    if ranks_per_node % tp:
        cause = f"mesh.tp ({tp}) does not divide the {ranks_per_node} ranks of a node"
        raise ConfigError(cause, "tensor parallelism needs the links inside a node: lower mesh.tp")
    model = contract.model
    numbers = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads or model.heads,
        "the width of the feed-forward layer": ffn_width(model),
    }
    if section.sequence_parallel:
        numbers["data.sequence_length"] = contract.data.sequence_length
    for name, number in numbers.items():
        if number % tp:
            common = math.gcd(*numbers.values())
            fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
            cause = f"mesh.tp ({tp}) does not divide {name} ({number})"
            raise ConfigError(cause, f"set mesh.tp to one of {', '.join(fitting)}")
