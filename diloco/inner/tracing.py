"""A few inner steps as a trace that a browser shows: torch's profiler on each rank, for `diloco peer --profile`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class Trace:
    """From now on until so many inner steps are over: what the CPU did, and the GPU where there is one."""

    def __init__(self, path: Path, steps: int, device: torch.device) -> None:
        """`path`: the file to write, Chrome's trace format in gzip (`.json.gz`)."""
        self.path, self._left = path, steps
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()

    def step(self) -> bool:
        """An inner step is over. True with the last one: the file is written, unless the disk refused it."""
        self._left -= 1
        if self._left:
            return False
        self._profile.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
        except OSError as error:
            logger.warning("no trace in %s: %s; training goes on", self.path, error.strerror)
        return True
