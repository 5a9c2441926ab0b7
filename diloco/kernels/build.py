"""Compile kernels.c on this machine with the system's compiler, once, and switch codecs, error feedback and outer step
to it.

The library lies in the user's cache folder, under a name that follows from source, compiler, flags and processor: a
home directory may be shared by different machines. It is used only if it makes the bits that eager torch makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from diloco.base.errors import ConfigError
from diloco.base.files import sync_path
from diloco.compress import Codec, kernels, open_codec
from diloco.compress.codec import magnitude
from diloco.config.codec import CodecSection
from diloco.outer.optimizers import Nesterov
from diloco.outer.pseudograd import with_residual
from diloco.outer.state import FragmentState

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC")
"""None of them lets a result differ: no -ffast-math, which would also make the whole process flush subnormals."""
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 120.0
CPUINFO = Path("/proc/cpuinfo")
"""File that tells processors apart. Without it nothing is compiled for this one alone."""
COMPILED, EAGER = "compiled codecs", "eager codecs"

log = logging.getLogger(__name__)

_deciding = threading.Lock()
_used: str | None = None
"""Choice that `compiled_codecs` made."""


class NoKernelsError(Exception):
    """There is no C compiler, it fails, or its kernels do not make the bits of eager torch."""


def compiled_codecs(mode: Literal["auto", "on", "off"]) -> str:
    """Compile the C kernels for a peer. The first one of the process decides for all: its threads may encode already.

    Raises ConfigError for `on` where that one has none.
    """
    global _used
    with _deciding:
        if _used is None:
            _used = use_compiled(mode)
        elif mode == "on" and _used != COMPILED:
            cause = f"device.compile_codecs = on: another peer of this process has {_used}"
            raise ConfigError(cause, "say on for all peers of a process")
        elif mode == "off" and _used == COMPILED:
            log.warning("device.compile_codecs = off: another peer of this process has %s, so has this one", _used)
        return _used


def use_compiled(mode: Literal["auto", "on", "off"] = "auto", cache: Path | None = None) -> str:
    """Switch this process's codecs and outer step to compiled C kernels, or back. Returns a name of those in use.

    `auto`: eager torch, with a warning, where there can be none; `on`: that raises ConfigError. `cache`: the folder to
    keep the library in. Seconds when it has to be compiled, 0.1 s when not. Nothing changes for other threads until
    all is found good.
    """
    if mode == "off":
        kernels.install(None)
        return EAGER
    try:
        library = _found(cache)
    except NoKernelsError as error:
        if mode == "on":
            fix = "install a C compiler (package gcc or clang), or say auto"
            raise ConfigError(f"device.compile_codecs = on: {error}", fix) from error
        log.warning("codecs run uncompiled: %s", error)
        kernels.install(None)
        return f"{EAGER}: {error}"
    kernels.install(library)
    return COMPILED


def _found(cache: Path | None) -> ctypes.CDLL:
    """Kernel library of the first C compiler that makes the right bits."""
    try:
        folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco"
    except RuntimeError as error:
        raise NoKernelsError(f"no folder to keep them in: {error} Set XDG_CACHE_HOME.") from error
    compilers: dict[str, str] = {}
    for path in filter(None, map(shutil.which, COMPILERS)):
        compilers.setdefault(os.path.realpath(path), path)  # cc is mostly another name of one of the others
    if not compilers:
        raise NoKernelsError(f"no C compiler found ({', '.join(COMPILERS)})")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(folder)
    except OSError as error:
        raise NoKernelsError(f"cannot compile the codecs: {error}") from error
    failures = []
    for compiler in compilers.values():
        try:
            library = _compiled(compiler, folder)
            _check(library)
        except NoKernelsError as error:
            failures.append(str(error))
        else:
            return library
    raise NoKernelsError("; ".join(failures))


def _compiled(compiler: str, folder: Path) -> ctypes.CDLL:
    """Kernel library in the cache folder, or compiled there now from C. Raises NoKernelsError."""
    try:
        path = folder / f"kernels-{_key(compiler)}.so"
        if path.exists():
            _refuse_shared(path)
            with contextlib.suppress(OSError):  # it is damaged: compiled anew
                return ctypes.CDLL(str(path))
        # Into a file of its own, then renamed: several peers may start at once, and a machine may lose its power.
        native = [["-march=native"]] if CPUINFO.exists() else []  # which not every compiler knows
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / path.name
            for machine in [*native, []]:
                run = _run([compiler, *FLAGS, *machine, "-shared", "-o", str(made), str(SOURCE), "-lm"])
                if run.returncode == 0:
                    made.chmod(0o700)
                    sync_path(made)
                    made.replace(path)
                    return ctypes.CDLL(str(path))
        raise NoKernelsError(f"{compiler} fails: {run.stderr.strip()[-300:]}")
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernelsError(f"cannot compile the codecs: {error}") from error


def _refuse_shared(path: Path) -> None:
    """Raise NoKernelsError where others may write: a compiled library there could hold anybody's code."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NoKernelsError(f"{path} can be written by others")


def _key(compiler: str) -> str:
    """Digest of all that the compiled kernels depend on: C source, compiler, flags, processor."""
    version = _run([compiler, "--version"]).stdout
    cpu = CPUINFO.read_text(errors="replace").split("\n\n")[0] if CPUINFO.exists() else ""
    abilities = [line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features", "CPU"))]
    parts = [SOURCE.read_text("utf-8"), compiler, version, *FLAGS, platform.machine(), *abilities]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
    )


# ---------------------------------------------------------------- comparing with torch


def _check(library: ctypes.CDLL) -> None:
    """Compare compiled C kernels with torch: raise NoKernelsError unless all make the same bits with them as without.

    They are codecs, error feedback and outer step. Other threads go on with what is installed.
    """
    ties = torch.arange(-127.0, 127.25, 0.25, dtype=torch.float32, device="cpu")
    seeded = torch.Generator(device="cpu").manual_seed(1)
    some = torch.randn(20_000, generator=seeded, dtype=torch.float32, device="cpu").exp_().sub_(1.0)
    values = torch.cat([ties, some, some.new_zeros(5000)])
    # Contracts' codecs that between them use every kernel.
    names = ("int8", "int4", "e3m0", "two_bit", "sign")
    plain = [CodecSection(name=name, zstd=False) for name in names]  # type: ignore[arg-type]
    dithered = [section.model_copy(update={"rounding": "stochastic"}) for section in plain[:3]]
    binned = [section.model_copy(update={"scale": "statistical"}) for section in plain[:2]]
    topk = [CodecSection(name="topk", values="int8", density=density, zstd=False) for density in (0.01, 0.125)]
    halves = topk[0].model_copy(update={"values": "fp16", "mean": "all"})
    codecs = [open_codec(section) for section in (*plain, *dithered, *binned, *topk, halves)]
    trials: list[tuple[str, Callable[[torch.Tensor], Sequence[bytes]]]] = [
        *((codec.name, partial(_outcome, codec)) for codec in codecs),
        ("largest value", _sized),
        ("error feedback", _fed_back),
        ("outer step", _stepped),
    ]
    for name, trial in trials:
        with kernels.using(None):
            eager = trial(values)
        try:
            with kernels.using(library):
                same = trial(values) == eager
        except Exception as error:  # whatever a wrong library leads to: it may refuse its own payload
            log.debug("a trial of compiled codecs: %r", error)
            same = False
        if not same:
            raise NoKernelsError(f"the compiled {name} makes other bits than torch does on this machine")


def _sized(values: torch.Tensor) -> list[bytes]:
    """Trial of the C kernel of `magnitude`: as text, those of some finite values, of infinite ones, and of NaN."""
    infinite = values.where(values < 1.0, -math.inf)
    return [str(magnitude(some)).encode() for some in (values, values[-7:], infinite, values / values)]


def _fed_back(values: torch.Tensor) -> list[bytes]:
    """Trial of the C kernel of error feedback, with values that are finite, and with one that is not."""
    target = torch.empty_like(values)
    finite = [with_residual(values, values.roll(7), decay, target) for decay in (1e38, 1 / 3)]
    return [bytes(finite), target.numpy().tobytes()]


def _stepped(values: torch.Tensor) -> list[bytes]:
    """Trial of the C kernel of the Nesterov outer step, of a whole one and of a third."""
    optimizer = Nesterov(0.7, 0.9)
    state = FragmentState(values, {"momentum": values.flip(0)}, 1)
    after = [optimizer.step(state, values.roll(7), share=share) for share in (1.0, 1 / 3)]
    return [buffer.numpy().tobytes() for one in after for buffer in one.buffers().values()]


def _outcome(codec: Codec, values: torch.Tensor) -> list[bytes]:
    """Trial of a codec's C kernels: payloads, and sum, mean and values from them."""
    payload, other = codec.encode(values), codec.encode(values.flip(0))
    total, mean = values.clone(), torch.empty_like(values)
    codec.fold(payload, 3.0, total)
    codec.mean_into([(3, payload), (2**64 - 1, other)], mean)
    decoded = codec.decode(payload, values.numel())
    return [payload, other, *(one.numpy().tobytes() for one in (decoded, total, mean))]
