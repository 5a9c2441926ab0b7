"""Refusals of what a contract asks of this machine: contracts come from others, and joiners take them as they are."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from diloco.base.errors import ConfigError
from diloco.base.readable import readable_bytes

FP32_BYTES = 4
MEMORY = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max")
RIGHT_RUN = "check that this is the run you mean"


def check_parameters(model: str, parameters: int, max_params: int | None) -> None:
    """Refuse a model, described by `model`, that has more than `max_params` parameters; None: more than this machine's
    memory holds in fp32. Raises ConfigError."""
    memory_bytes = host_bytes()
    limit = max_params or int(memory_bytes // FP32_BYTES)
    if parameters > limit:
        needed = f"{parameters:,} parameters, {readable_bytes(FP32_BYTES * parameters)} in fp32"
        why = "is set" if max_params else f"fit once into this machine's {readable_bytes(memory_bytes)}"
        cause = f"{model} has {needed}; the limit here is {limit:,}, which {why}"
        raise ConfigError(cause, f"{RIGHT_RUN}; raise the limit with --max-params, as in 7B")


def check_bytes(what: str, needed: float, available: float, fix: str) -> None:
    """Refuse `what`, which takes at least `needed` bytes of memory, where fewer are `available`. Raises ConfigError."""
    if needed > available:
        cause = f"{what} takes at least {readable_bytes(needed)}; there are {readable_bytes(available)}"
        raise ConfigError(cause, f"{RIGHT_RUN}; {fix}")


def host_bytes() -> float:
    """Bytes of RAM and swap on this machine, or of RAM that its container may use, and swap. Swap and containers are
    Linux's alone."""
    ram, swap = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 0.0
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        ram = min(ram, float(CONTAINER.read_text()))
    with suppress(OSError):  # it may be that this process has as many files open as it may
        lines = [line.split() for line in MEMORY.read_text().splitlines()]
        swap = sum(1024.0 * int(line[1]) for line in lines if line[0] == "SwapTotal:")
    return ram + swap
