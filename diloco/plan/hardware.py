"""Accelerators by name, nodes and the links between them; and how numbers with units are read.

Figures are the vendors' data sheets': memory, dense bf16 throughput, and the fast link to the other accelerators of a
node (NVLink, or PCIe where there is none) in one direction, which is half of what the sheets call bandwidth.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.base.errors import UsageError

USABLE = 0.92
"""Share of a GPU's memory that a plan fills: CUDA's context, NCCL's buffers and gaps between blocks need the rest."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator."""

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
        """Number of GPUs."""
        return self.gpus_per_node * self.nodes

    def holds(self, memory_bytes: float) -> bool:
        """Whether so much fits on a GPU."""
        return memory_bytes <= USABLE * self.gpu.memory_bytes


def gpu_of(name: str) -> Gpu:
    """Raises UsageError when nothing is known of it."""
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
    """The GPU that its driver calls so (`torch.cuda.get_device_name`); None: not in our table."""
    known = DRIVER_NAMES.get(name.removeprefix("NVIDIA ").strip())
    return None if known is None else GPUS[known]


_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)(bit|bps|b|B)(?:/s)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_bps(text: str) -> float:
    """Bits per second: `1Gbit/s`, `400Gbps`, `50GB/s` (bytes). Raises UsageError."""
    found = _RATE.fullmatch(text.strip())
    value = float(found[1]) * _PREFIX[found[2]] * (8 if found[3] == "B" else 1) if found else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"cannot read {text!r} as a bandwidth", "write 100Mbit/s, 1Gbit/s or 50GB/s")
    return value


def parse_seconds(text: str) -> float:
    """A time: `50ms`, `0.05s`, `0`. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s)?", text.strip())
    if not found or (found[2] is None and float(found[1]) != 0):
        raise UsageError(f"cannot read {text!r} as a time", "write 50ms or 0.05s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)
