"""The mesh of an island: its ranks along named dimensions, of which torch makes one DeviceMesh, and the stages of a
pipeline.

A rank's number in the island counts the dimensions of `DIMENSIONS` like digits, the last one the fastest: ranks of one
tensor-parallel group have consecutive numbers, and as torchrun numbers the ranks node by node, they are in one node.
A new dimension is a line in `DIMENSIONS`, a key of `[mesh]`, and a check in `check`.

A stage of a pipeline is some consecutive blocks; the first has the embedding as well, the last the final norm and the
head. A step takes as long as the slowest stage lets it, so layers are cut into stages that are equally costly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from diloco.base.errors import ConfigError
from diloco.config.contract import Contract, ModelSection
from diloco.config.site import MeshSection, PipelineSchedule, Site

LOOPED: tuple[PipelineSchedule, ...] = ("interleaved-1f1b", "zero-bubble", "zbv")
"""Schedules under which a rank has several stages, `mesh.chunks` of them."""
SPLIT: tuple[PipelineSchedule, ...] = ("zero-bubble", "zbv")
"""Those that compute the gradients of inputs and of weights apart, the latter when there is nothing else to do."""


def count_stages(section: MeshSection, ranks: int) -> int:
    """Number of stages of an island's pipeline of so many ranks."""
    return ranks * section.chunks if section.schedule in LOOPED else ranks


def stages_of(place: int, section: MeshSection, ranks: int) -> list[int]:
    """Pipeline stages of the rank at this place, the earliest first.

    Round and round over the ranks; under `zbv` there and back, so that the first rank has the last stage.
    """
    if section.schedule == "zbv":
        return [place, 2 * ranks - 1 - place]
    return list(range(place, count_stages(section, ranks), ranks))


def home_of(stage: int, section: MeshSection, ranks: int) -> int:
    """Place in the pipeline of the rank that has this stage."""
    return next(place for place in range(ranks) if stage in stages_of(place, section, ranks))


def layer_costs(model: ModelSection, vocabulary: int, sequence_length: int) -> list[float]:
    """Cost of each block, to cut a model into pipeline stages: multiplications per token, embedding and head included.

    Each element of a matrix is one; attention to half of the sequence on average takes 2 D each. The embedding's row
    counts D in the first block, the head's matrix in the last.
    """
    kv_width = (model.kv_heads or model.heads) * (model.dim // model.heads)
    attention = 2 * model.dim * (model.dim + kv_width) + model.dim * sequence_length
    experts = (model.experts_per_token + model.shared_experts) * model.expert_width
    width = experts if model.experts else model.ffn_width
    costs = [float(attention + 3 * model.dim * width + model.dim * model.experts)] * model.layers
    costs[0] += model.dim
    costs[-1] += model.dim * vocabulary
    return costs


def cut(costs: Sequence[float], pieces: int) -> list[range]:
    """Cut layers into so many pipeline stages, none empty, such that the most costly one costs the least.

    Among such cuts one whose pieces are alike (the least sum of squares); of two of these, the one with more in front.
    `pieces` is at most the number of costs.
    """
    sums = [0.0, *accumulate(costs)]
    # best[end]: (largest piece, sum of squares, cuts) of the first `end` costs, in as many pieces as there were rounds.
    # Cuts are negated, so that the least of equally good ones is the later one.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}

    def extended(start: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        """The best cut into pipeline stages up to `start`, with the one from there to `end`."""
        largest, squares, cuts = best[start]
        cost = sums[end] - sums[start]
        return max(largest, cost), squares + math.pow(cost, 2), (*cuts, -end)

    for piece in range(1, pieces + 1):
        ends = range(piece, len(costs) - pieces + piece + 1)
        best = {end: min(extended(start, end) for start in best if start < end) for end in ends}
    return [range(-start, -end) for start, end in pairwise(best[len(costs)][2])]


DIMENSIONS = ("dp_replicate", "pp", "dp_shard", "cp", "ep", "tp")
"""Outermost first: what needs the fastest links comes last."""
DATA_DIMENSIONS = ("dp_replicate", "dp_shard", "ep")
"""Ranks that differ in these train on different rows."""
MODEL_DIMENSIONS = ("pp", "cp", "ep", "tp")
"""Ranks that differ in these compute one model together."""

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Mesh:
    """The mesh of an island, from one of its ranks."""

    sizes: Sizes
    """Ranks by dimension, in the order of `DIMENSIONS`."""
    rank: int = 0
    devices: DeviceMesh | None = None
    """Torch's, with the dimensions' names; None on an island of one rank."""
    timeout_s: float = 0.0
    """Longest that a rank waits for another in any of them."""

    @staticmethod
    def of(sizes: Sizes, rank: int, device_type: str, timeout_s: float) -> Mesh:
        """The mesh of an island that has a process group. All its ranks make it together."""
        if math.prod(sizes.values()) == 1:
            return Mesh(sizes)
        devices = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return Mesh(sizes, rank, _patient(devices, timeout_s), timeout_s)

    def size(self, *names: str) -> int:
        """Ranks along these dimensions of the mesh together."""
        return math.prod(self.sizes[name] for name in names)

    def place(self, *names: str) -> int:
        """This rank's place among the `size(*names)` along these dimensions of the mesh."""
        place, dimensions = 0, list(self.sizes)
        for name in names:
            behind = dimensions[dimensions.index(name) + 1 :]  # these vary faster
            place = place * self.sizes[name] + self.rank // self.size(*behind) % self.sizes[name]
        return place

    def along(self, *names: str) -> DeviceMesh:
        """Torch's DeviceMesh of the ranks that differ from this one in these dimensions only."""
        assert self.devices is not None
        return self.devices[names]

    def copies_of_shares(self, *also: str) -> DeviceMesh:
        """Torch's mesh for FSDP2, of two dimensions: copies, and shares of each, over `dp_shard` and `also` together.

        All ranks make it together.
        """
        assert self.devices is not None
        names = ("dp_shard", *(name for name in also if self.sizes[name] > 1))
        if len(names) == 1:
            return self.along("dp_replicate", "dp_shard")
        return DeviceMesh._concatenate([self.along("dp_replicate"), self._as_one(names, "_".join(names))])

    def of_one_stage(self) -> ProcessGroup:
        """The ranks that differ from this one in anything but `pp`. All ranks make it together."""
        names = tuple(name for name in self.sizes if name != "pp")
        return self._as_one(names, "stage").get_group()

    def _as_one(self, names: Sequence[str], name: str) -> DeviceMesh:
        """These dimensions of the mesh as one of that name."""
        return _patient(self.along(*names)._flatten(name), self.timeout_s)


def _patient(devices: DeviceMesh, timeout_s: float) -> DeviceMesh:
    """Set the timeout of a mesh's process groups: torch's do not take that of the group they were made from."""
    for group in devices.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return devices


def sizes_of(section: MeshSection, ranks: int) -> Sizes:
    """Ranks along each dimension of the mesh of an island of `ranks`. Raises ConfigError unless they divide evenly."""
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
    """Raise ConfigError, with the number to change, unless the mesh can divide the contract's model and batch."""
    section, model = site.mesh, contract.model
    data = math.prod(sizes[name] for name in DATA_DIMENSIONS)
    if contract.inner.batch_size % data:
        cause = f"inner.batch_size ({contract.inner.batch_size}) does not divide by {data} data-parallel ranks"
        raise ConfigError(cause, "start a number of ranks that divides it, or share the work by mesh.tp")
    share = contract.inner.batch_size // data
    if share % section.micro_batches:
        cause = f"mesh.micro_batches ({section.micro_batches}) does not divide the {share} sequences of a micro-batch"
        raise ConfigError(cause, f"set it to a divisor of {share}, which is inner.batch_size by data-parallel ranks")
    fix = 'set mesh.shard = "none", and mesh.pp, mesh.cp, mesh.ep and mesh.tp to 1: the ranks are copies then'
    if divides(sizes, section) and model.kind != "transformer":
        raise ConfigError(f"model.kind {model.kind!r} cannot be divided over ranks", fix)
    if model.kind != "transformer" and site.device.checkpointing != "none":
        cause = f"device.checkpointing is not for model.kind {model.kind!r}"
        raise ConfigError(cause, 'set device.checkpointing = "none"')
    if divides(sizes, section) and contract.inner.optimizer == "muon":
        raise ConfigError("inner.optimizer 'muon' makes whole matrices orthogonal, and [mesh] divides them", fix)
    if sizes["pp"] > 1:
        _check_pipeline(sizes["pp"], site, contract)
    if sizes["tp"] > 1:
        _check_tensor_parallel(sizes, site, contract, ranks_per_node)
    elif section.async_tp:
        raise ConfigError("mesh.async_tp is for mesh.tp > 1", "set mesh.async_tp = false")
    cp, length = sizes["cp"], contract.data.sequence_length
    if cp > 1 and section.cp_method == "heads":
        _check_divides("cp", cp, {**_heads(model), "data.sequence_length": length})
    elif cp > 1 and length % (2 * cp):
        cause = f"mesh.cp_method 'ring' cuts sequences into 2 x mesh.cp ({2 * cp}) chunks, and {length} does not divide"
        raise ConfigError(cause, "change mesh.cp, or set data.sequence_length to a multiple")
    if sizes["ep"] > 1:
        _check_expert_parallel(sizes, model)


def divides(sizes: Sizes, section: MeshSection) -> bool:
    """Whether a mesh divides the model: a rank has less than the whole, or computes less than all of it."""
    return section.shard != "none" or any(sizes[name] > 1 for name in MODEL_DIMENSIONS)


def _heads(model: ModelSection) -> dict[str, int]:
    return {"model.heads": model.heads, "model.kv_heads": model.kv_heads or model.heads}


def check_device(site: Site, contract: Contract, kind: str) -> None:
    """Raise ConfigError unless ranks of an island on such devices ("cpu", "cuda") can do what `[mesh]` asks for."""
    section = site.mesh
    if section.offload and kind == "cpu":
        raise ConfigError("mesh.offload moves shares from a GPU to the host", "leave it out on a CPU")
    if section.async_tp and kind == "cpu":
        raise ConfigError("mesh.async_tp overlaps what GPUs send over NVLink", "leave it out on a CPU")
    if section.cp_method == "ring" and kind == "cuda" and contract.inner.precision != "bf16":
        cause = "mesh.cp_method 'ring' is flash attention on a GPU, which is for inner.precision 'bf16'"
        raise ConfigError(cause, 'set mesh.cp_method = "heads"')


def _check_expert_parallel(sizes: Sizes, model: ModelSection) -> None:
    if not model.experts:
        raise ConfigError(f"mesh.ep ({sizes['ep']}) divides experts, and this model has none", "set mesh.ep = 1")
    _check_divides("ep", sizes["ep"], {"model.experts": model.experts})
    shares = sizes["dp_shard"] * sizes["cp"]
    said = f"mesh.dp_shard x mesh.cp ({shares})"
    for name, width in (("the width of an expert", model.expert_width), ("model.dim", model.dim)):
        if width % shares:
            cause = f"{said} does not divide {name} ({width}), along which experts are sharded"
            raise ConfigError(cause, "lower mesh.dp_shard, for instance by more mesh.dp_replicate")


def _check_divides(name: str, ranks: int, numbers: Mapping[str, int]) -> None:
    """Raise ConfigError unless `mesh.<name>`, a dimension of the mesh, divides all numbers."""
    for what, number in numbers.items():
        if number % ranks:
            common = math.gcd(*numbers.values())
            fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
            cause = f"mesh.{name} ({ranks}) does not divide {what} ({number})"
            raise ConfigError(cause, f"set mesh.{name} to one of {', '.join(fitting)}")


def _check_pipeline(pp: int, site: Site, contract: Contract) -> None:
    section, model = site.mesh, contract.model
    schedule = f"mesh.schedule {section.schedule!r}"
    stages = count_stages(section, pp)
    if model.layers < stages:
        most = model.layers * pp // stages
        cause = f"mesh.pp ({pp}) under {schedule} makes {stages} stages, and model.layers is {model.layers}"
        raise ConfigError(cause, f"set mesh.pp to at most {most}" if most > 1 else 'set mesh.schedule = "1f1b"')
    if section.schedule == "zbv" and model.tied:
        raise ConfigError(f"{schedule} is for model.tied = false", 'set mesh.schedule = "zero-bubble"')
    if section.schedule == "zbv" and section.chunks != 2:
        raise ConfigError(f"{schedule} has 2 stages on each rank, not {section.chunks}", "leave mesh.chunks out")
    if section.schedule in SPLIT and (site.device.compile or site.device.checkpointing != "none"):
        cause = f"{schedule} splits the backward pass, which goes with neither device.compile nor device.checkpointing"
        raise ConfigError(cause, 'leave these out, or set mesh.schedule = "1f1b"')
    if section.cp_method == "ring" and section.cp != 1:
        raise ConfigError(f"mesh.cp_method 'ring' does not go with mesh.pp ({pp})", 'set mesh.cp_method = "heads"')
    if section.offload:
        raise ConfigError(f"mesh.offload does not go with mesh.pp ({pp})", "leave it out: more stages need less memory")
    micro_batches = contract.inner.accumulation * section.micro_batches
    said = f"inner.accumulation x mesh.micro_batches is {micro_batches}"
    if section.schedule != "gpipe" and micro_batches < pp:
        cause = f"{schedule} keeps mesh.pp ({pp}) micro-batches on their way, and {said}"
        raise ConfigError(cause, f'raise mesh.micro_batches, set mesh.pp to at most {micro_batches}, or use "gpipe"')
    if section.schedule in ("interleaved-1f1b", "zero-bubble") and micro_batches % pp:
        cause = f"{schedule} needs a multiple of mesh.pp ({pp}) micro-batches, and {said}"
        raise ConfigError(cause, 'change mesh.micro_batches, or set mesh.schedule = "1f1b"')


def _check_tensor_parallel(sizes: Sizes, site: Site, contract: Contract, ranks_per_node: int) -> None:
    tp, section, model = sizes["tp"], site.mesh, contract.model
    if sizes["cp"] > 1:
        cause = f"mesh.tp ({tp}) does not go with mesh.cp ({sizes['cp']}): both divide the heads"
        raise ConfigError(cause, "set one of them to 1")
    if model.experts:
        cause = f"mesh.tp ({tp}) does not go with a mixture of experts"
        raise ConfigError(cause, "set mesh.tp = 1, and divide the experts by mesh.ep")
    if ranks_per_node % tp:
        cause = f"mesh.tp ({tp}) does not divide the {ranks_per_node} ranks of a node"
        raise ConfigError(cause, "tensor parallelism needs the links inside a node: lower mesh.tp")
    if section.async_tp and not (site.device.compile and section.sequence_parallel):
        cause = "mesh.async_tp is done by the compiler, for norms along the sequence"
        raise ConfigError(cause, "set device.compile = true and mesh.sequence_parallel = true, or leave it out")
    numbers = {**_heads(model), "the width of the feed-forward layer": model.ffn_width}
    if section.sequence_parallel:
        numbers["data.sequence_length"] = contract.data.sequence_length
    _check_divides("tp", tp, numbers)
