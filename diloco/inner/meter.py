"""Meter of inner steps: seconds of each phase, memory, and FLOP/s beside the device's peak (MFU).

FLOPs are the model's, 6 N and attention's per token (`diloco.plan.model`), whatever a rank computes twice to save
memory. MFU is what of the peak of all ranks they make up (arXiv 2204.02311, appendix B): once of the time of the inner
steps, once of all time, with syncs, waiting, evaluations and checkpoints.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from diloco.base.clock import monotonic_s
from diloco.base.limits import host_bytes
from diloco.config.site import DeviceSection
from diloco.observe.events import timed
from diloco.plan.hardware import gpu_called


class Phases:
    """Seconds of each phase of inner steps on this rank, added up.

    On a GPU, phases are marked on its stream by events, and read where a step has waited for it anyway, so nothing is
    synchronised for their sake. A collective that overlaps with a phase is in it: gradients are reduced in `backward`.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Time a phase of an inner step on the device; on a GPU, around what enqueues it."""
        with torch.profiler.record_function(name):
            if not self._on_gpu:
                with timed(self.seconds, name):
                    yield
                return
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            yield
            ended.record()
            self._marks.append((name, began, ended))

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Time a phase of an inner step on the host, waiting included."""
        with torch.profiler.record_function(name), timed(self.seconds, name):
            yield

    def read(self) -> None:
        """Add up the phases of inner steps marked on the GPU, when it has done them all."""
        for name, began, ended in self._marks:
            self.seconds[name] = self.seconds.get(name, 0.0) + began.elapsed_time(ended) / 1000
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Seconds of each phase of inner steps since they were taken last."""
        taken, self.seconds = self.seconds, {}
        return taken


def memory_of(device: torch.device) -> list[int]:
    """Memory of a rank that runs inner steps, peak and current, on host and device: fields of `RankMemory`."""
    # Of this program only: getrusage may return the peak of the process that started it.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux; or this process has as many files open as it may
        lines = []
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    if found is not None:
        peak = int(found.split()[1]) * 1024
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type != "cuda":
        return [peak, 0, 0]
    return [peak, torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)]


def device_bytes(device: torch.device) -> float:
    """Memory of a device for inner steps: a GPU's, or this machine's RAM and swap."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes()


def peak_flops(section: DeviceSection, device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a rank's device, for the MFU of inner steps: the site's, else a known GPU's for bf16, or None."""
    if section.peak_tflops is not None:
        return section.peak_tflops * 1e12
    if device.type != "cuda" or precision != "bf16":
        return None
    gpu = gpu_called(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops


def device_name(device: torch.device) -> str:
    """Name of the device of inner steps: a GPU's as its driver has it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Throughput:
    """Throughput, MFU and phases of a peer's inner steps since the last report."""

    def __init__(self, flops_per_token: float | None, peak_flops: float | None, ranks: int, phases: Phases) -> None:
        """`peak_flops`: of one of `ranks`, per second."""
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._peak_of_all = None if peak_flops is None else peak_flops * ranks
        self._phases = phases
        self.begin()

    def begin(self) -> None:
        """Start to measure the throughput of inner steps anew."""
        self._tokens, self._inner_s, self._since_s = 0, 0.0, monotonic_s()
        self._phases.take()

    def step(self, tokens: int, seconds: float) -> None:
        """Count an inner step of the whole island in the throughput."""
        self._tokens += tokens
        self._inner_s += seconds

    def fields(self) -> dict[str, Any]:
        """Throughput and MFU of inner steps as fields of a "usage" event; what is not known is None. Begins anew."""
        wall_s = monotonic_s() - self._since_s
        flops = None if self.flops_per_token is None else self._tokens * self.flops_per_token
        inner, wall = _rate(flops, self._inner_s), _rate(flops, wall_s)
        fields = {
            "inner_tokens": self._tokens,
            "inner_s": round(self._inner_s, 6),
            "wall_s": round(wall_s, 6),
            "phases": {name: round(seconds, 6) for name, seconds in self._phases.take().items()},
            "flops": flops,
            "flops_per_s": inner,
            "flops_per_s_wall": wall,
            "mfu": _rate(inner, self._peak_of_all),
            "mfu_wall": _rate(wall, self._peak_of_all),
        }
        self.begin()
        return fields


def _rate(amount: float | None, over: float | None) -> float | None:
    return amount / over if amount is not None and over else None


logger = logging.getLogger(__name__)


class Trace:
    """A trace of the next inner steps of this rank for a browser, by torch's profiler (`diloco peer --profile`)."""

    def __init__(self, path: Path, steps: int, device: torch.device) -> None:
        """`path`: the file to write, Chrome's trace format in gzip (`.json.gz`)."""
        self.path, self._left = path, steps
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()

    def step(self) -> bool:
        """Count a traced inner step. Returns True after the last: the file is written, unless the disk refused it."""
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
