"""An island: accelerators by name, nodes, the links between them, and meshes of its ranks; how numbers with units are
read.

Figures are the vendors' data sheets': memory, dense bf16 throughput, and the fast link to the other accelerators of a
node (NVLink, or PCIe where there is none) in one direction, which is half of what the sheets call bandwidth.

Ranks of a mesh are numbered so that `tp` varies fastest, then `ep`, `cp`, `dp_shard`, `pp`, and `dp_replicate` slowest:
what talks most stays inside a node.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from diloco.base.errors import UsageError
from diloco.plan.model import Model

USABLE = 0.92
"""Share of a GPU's memory that a plan fills: CUDA's context, NCCL's buffers and gaps between blocks need the rest."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, by its data sheet."""

    memory_bytes: float
    flops: float
    """Peak per second, dense bf16."""
    local_bps: float
    """Bits per second to the others of its node, in one direction."""


GPUS: Mapping[str, Gpu] = {
    "a100-40": Gpu(40e9, 312e12, 2400e9),
    "a100": Gpu(80e9, 312e12, 2400e9),
    "h100": Gpu(80e9, 989e12, 3600e9),
    "h200": Gpu(141e9, 989e12, 3600e9),
    "b200": Gpu(180e9, 2250e12, 7200e9),
    "l40s": Gpu(48e9, 362e12, 256e9),
    "rtx4090": Gpu(24e9, 165e12, 256e9),
    "rtx5090": Gpu(32e9, 209e12, 512e9),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """An island: equal nodes of equal GPUs."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    fabric_bps: float
    """Bits per second of one GPU's network card, in one direction."""
    efficiency: float
    """Share of the peak that computing reaches while it waits for nothing; waits come on top."""

    @property
    def world(self) -> int:
        """GPUs of the planned island."""
        return self.gpus_per_node * self.nodes

    def holds(self, memory_bytes: float) -> bool:
        """Whether so many estimated bytes fit on one GPU of the planned island."""
        return memory_bytes <= USABLE * self.gpu.memory_bytes


def gpu_of(name: str) -> Gpu:
    """Data sheet of the GPU of a name that users give. Raises UsageError when the plan's table does not have it."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    close = difflib.get_close_matches(name.lower(), GPUS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    fix = f"{hint}known are {', '.join(GPUS)}; for another one give --memory, --tflops and --nvlink"
    raise UsageError(f"unknown GPU {name!r}", fix)


DRIVER_NAMES: Mapping[str, str] = {
    "A100-SXM4-40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "A100-SXM4-80GB": "a100",
    "A100 80GB PCIe": "a100",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
    "L40S": "l40s",
    "GeForce RTX 4090": "rtx4090",
    "GeForce RTX 5090": "rtx5090",
}
"""As the driver calls them, without "NVIDIA". Variants of another speed (H100 PCIe and NVL) are not in the table."""


def gpu_called(name: str) -> Gpu | None:
    """Data sheet of the GPU that its driver calls so (`torch.cuda.get_device_name`); None: not in the plan's table."""
    return GPUS.get(DRIVER_NAMES.get(name.removeprefix("NVIDIA ").strip(), ""))


# ---------------------------------------------------------------- meshes

PLACED = ("tp", "ep", "cp", "dp_shard", "pp", "dp_replicate")
"""From neighbouring ranks to distant ones, as `diloco.island.mesh` has them."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Sizes of a mesh's dimensions; their product is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    """Ranks that divide weights, gradients or optimizer state, by ZeRO stage; with those of `cp` and `ep`."""
    ep: int = 1
    """Ranks that divide the experts; for all else they are data parallel."""
    cp: int = 1
    """Ranks that divide each sequence."""
    tp: int = 1
    """Ranks that divide each matrix; norms between them are sequence parallel."""
    pp: int = 1
    """Stages of layers."""

    @property
    def world(self) -> int:
        """Ranks of the planned mesh."""
        return self.dp_replicate * self.dp_shard * self.ep * self.cp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks of the planned mesh that train on sequences of their own."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def shard_ranks(self) -> int:
        """Number of ranks in the planned mesh that a ZeRO stage divides by, for parameters outside experts."""
        return self.dp_shard * self.cp * self.ep

    @property
    def last_zero_stage(self) -> int:
        """Highest ZeRO stage of the planned mesh that `mesh.shard` allows: a stage of a pipeline has its parameters and
        gradients whole during a step."""
        return 1 if self.pp > 1 else 3

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return " x ".join(sizes) or "one rank"


DIMENSIONS = tuple(field.name for field in fields(MeshLayout))


@dataclass(frozen=True, slots=True)
class Path:
    """Links that a collective over one dimension, or over several, crosses."""

    link: str
    """`node`, `network`, or `none` for a single rank."""
    ring_bps: float
    """Bits per second that each rank of a ring gets: NCCL's rings share the network cards of all their ranks in a
    node, as the bus bandwidth of NCCL-tests shows."""
    own_bps: float
    """The same where each rank sends on its own (all-to-all, send and receive)."""


def path_of(layout: MeshLayout, dimensions: tuple[str, ...], hardware: Hardware) -> Path:
    """Links of a planned mesh between ranks that differ in these dimensions, which must be neighbours in `PLACED`."""
    first = PLACED.index(dimensions[0])
    stride = math.prod(getattr(layout, name) for name in PLACED[:first])
    size = math.prod(getattr(layout, name) for name in dimensions)
    if size == 1:
        return Path("none", math.inf, math.inf)
    local = hardware.gpu.local_bps
    in_node = min(size, max(1, hardware.gpus_per_node // stride))
    if in_node == size:
        return Path("node", local, local)
    return Path("network", min(local, hardware.fabric_bps * in_node), min(local, hardware.fabric_bps))


def problem(
    layout: MeshLayout, model: Model, hardware: Hardware, batch: int, sequence_length: int
) -> tuple[str, str] | None:
    """Error of a planned mesh on this hardware and which number to change, or None where it is valid.

    `batch`: sequences per inner step of the island.
    """
    per_node = hardware.gpus_per_node
    checks = [
        (layout.world == hardware.world, f"{layout} makes {layout.world} ranks, not {hardware.world}",
         f"change a size so that the product is {hardware.world}, or --nodes and --gpus-per-node"),
        (layout.tp <= per_node and per_node % layout.tp == 0, f"tp {layout.tp} does not fit in nodes of {per_node}",
         f"make tp a divisor of {per_node}: its all-reduces want the node's fast links"),
        (model.heads % layout.tp == 0 and model.kv_heads % layout.tp == 0,
         f"tp {layout.tp} does not divide {model.heads} heads and {model.kv_heads} key/value heads",
         f"make tp a divisor of {math.gcd(model.heads, model.kv_heads)}"),
        (model.ffn_dim % layout.tp == 0, f"tp {layout.tp} does not divide the feed-forward width {model.ffn_dim}",
         f"make tp a divisor of {math.gcd(model.heads, model.ffn_dim)}"),
        (layout.tp == 1 or not model.experts, f"tp {layout.tp} does not go with a mixture of experts",
         "make tp 1, and divide the experts by ep"),
        (layout.tp == 1 or layout.cp == 1, f"tp {layout.tp} does not go with cp {layout.cp}: both divide the heads",
         "make one of them 1"),
        (layout.pp <= model.layers, f"pp {layout.pp} is more than the {model.layers} layers",
         f"make pp at most {model.layers}"),
        (layout.ep == 1 or (model.experts > 0 and model.experts % layout.ep == 0),
         f"ep {layout.ep} does not divide {model.experts} experts" if model.experts else "the model has no experts",
         f"make ep a divisor of {model.experts}" if model.experts else "leave ep out, or give --experts"),
        (sequence_length % (2 * layout.cp * layout.tp) == 0 or layout.cp * layout.tp == 1,
         f"sequences of {sequence_length} cannot be cut for tp {layout.tp} and cp {layout.cp}",
         f"make --sequence a multiple of {2 * layout.cp * layout.tp}"),
        (batch % layout.data_ranks == 0,
         f"{batch} sequences per step cannot be shared by {layout.data_ranks} data ranks",
         f"make --batch a multiple of {layout.data_ranks}, or dp_replicate x dp_shard x ep smaller"),
    ]  # fmt: skip
    return next(((cause, fix) for fits, cause, fix in checks if not fits), None)


def layouts(hardware: Hardware, model: Model, batch: int, sequence_length: int) -> Iterator[MeshLayout]:
    """Every possible mesh of the planned island's hardware.

    Context parallelism is not tried below 16,384 tokens: it only divides what other dimensions divide as well.
    """
    max_cp = hardware.world if sequence_length >= 16_384 else 1
    limits = {"ep": model.experts or 1, "cp": max_cp, "tp": hardware.gpus_per_node, "pp": model.layers}
    for sizes in _factorisations(hardware.world, [limits.get(name, hardware.world) for name in DIMENSIONS]):
        layout = MeshLayout(*sizes)
        if problem(layout, model, hardware, batch, sequence_length) is None:
            yield layout


def _factorisations(number: int, limits: list[int]) -> Iterator[tuple[int, ...]]:
    """Possible mesh sizes: all ordered products of `len(limits)` factors that make a number, none above its limit."""
    if len(limits) == 1:
        if number <= limits[0]:
            yield (number,)
        return
    for factor in range(1, min(number, limits[0]) + 1):
        if number % factor == 0:
            for rest in _factorisations(number // factor, limits[1:]):
                yield (factor, *rest)


def parse_layout(text: str) -> MeshLayout:
    """The mesh that the plan's option `dp_shard=4,tp=2` asks for; other sizes are 1. Raises UsageError."""
    sizes: dict[str, int] = {}
    for piece in text.split(","):
        name, _, value = piece.strip().partition("=")
        if name not in DIMENSIONS or name in sizes or not (value.isascii() and value.isdigit() and int(value)):
            fix = f"write sizes of {', '.join(DIMENSIONS)}: --layout dp_shard=4,tp=2"
            raise UsageError(f"cannot read {piece.strip()!r} as a part of a layout", fix)
        sizes[name] = int(value)
    return MeshLayout(**sizes)


# ---------------------------------------------------------------- numbers with units

_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_bps(text: str) -> float:
    """Bits per second of a planned link, from `1Gbit/s`, `400Gbps` or `50GB/s` (bytes). Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(bit|bps|b|B)(?:/s)?", text.strip())
    value = float(found[1]) * _PREFIX[found[2]] * (8 if found[3] == "B" else 1) if found else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"cannot read {text!r} as a bandwidth", "write 100Mbit/s, 1Gbit/s or 50GB/s")
    return value


def parse_seconds(text: str) -> float:
    """Seconds of a planned step or of a link's latency, from `50ms`, `0.05s` or `0`. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s)?", text.strip())
    if not found or (found[2] is None and float(found[1]) != 0):
        raise UsageError(f"cannot read {text!r} as a time", "write 50ms or 0.05s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)
