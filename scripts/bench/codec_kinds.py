"""All codecs that `scripts/bench-codecs` measures and `scripts/fuzz` attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KINDS: Sequence[Mapping[str, object]] = (
    {"name": "fp32"},
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "int8"},
    {"name": "int8", "rounding": "stochastic"},
    {"name": "int8", "scale": "statistical"},
    {"name": "int4"},
    {"name": "int4", "rounding": "stochastic"},
    {"name": "int4", "scale": "statistical"},
    {"name": "e3m0"},
    {"name": "e3m0", "rounding": "stochastic"},
    {"name": "two_bit"},
    {"name": "sign"},
    {"name": "topk"},
    {"name": "dct"},
    {"name": "lowrank"},
)
"""Keys of a contract's `[codec]`, without `zstd`."""
