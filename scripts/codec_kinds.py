"""All codecs that `scripts/bench-codecs` measures and `scripts/fuzz-codecs` attacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

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


def enter_environment() -> None:
    """Go on in the project's own Python, which `scripts/setup` makes, unless this one has what is needed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        subprocess.run([ROOT / "scripts" / "setup", "--quiet"], check=True)
        python = str(ROOT / ".venv" / "bin" / "python")
        os.execv(python, [python, *sys.argv])
    sys.path.insert(0, str(ROOT))
