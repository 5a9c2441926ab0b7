"""The compiled twins of the block codecs and of the Nesterov outer step, where `diloco.compress.build` installed them;
else nothing happens here.

The same bits as in eager torch, five to twenty times faster (`scripts/bench-codecs`). C through ctypes and not
`torch.compile`, which is half as fast here and takes half a minute per process: nothing is traced or compiled again in
the worker threads that encode and decode, and the flags that decide about bits are ours. Calls release the interpreter.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

MOST_PACKED = 1024
"""Values of a block of codes below 8 bits, at most (`CHUNK` in kernels.c)."""
NAMES = ("int8", "int4", "e3m0", "sign", "binned8", "binned4", "binned2")

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Bytes whose content is still to be written, which C may do until somebody else holds them (Python's C API): a copy of
1 MiB into fresh pages would cost as much as encoding it. Nothing shorter than 2 bytes, which Python shares."""

_library: ctypes.CDLL | None = None


def install(library: ctypes.CDLL | None) -> None:
    """Use this build of kernels.c from now on, in the whole process; None: eager torch."""
    global _library
    for name in NAMES if library is not None else ():
        encoder, decoder, folder = (getattr(library, f"diloco_{verb}_{name}") for verb in ("encode", "decode", "fold"))
        encoder.restype, encoder.argtypes = ctypes.c_int, [_POINTER, _COUNT, _COUNT, ctypes.c_int, ctypes.c_char_p]
        decoder.restype, decoder.argtypes = None, [ctypes.c_char_p, _COUNT, _COUNT, _POINTER]
        folder.restype = ctypes.c_double
        folder.argtypes = [ctypes.c_char_p, _COUNT, _COUNT, ctypes.c_float, _POINTER]
    if library is not None:
        library.diloco_nesterov.restype = None
        library.diloco_nesterov.argtypes = [*[_POINTER] * 3, _COUNT, *[ctypes.c_float] * 4, *[_POINTER] * 2]
    _library = library


def installed() -> ctypes.CDLL | None:
    """What `install` was given last."""
    return _library


def encode(name: str, values: Tensor, block: int, stochastic: bool, payload_bytes: int) -> bytes | None:
    """A payload, or None: not here, or some values are not finite or have to saturate."""
    if _library is None or not _suits(name, block, values):
        return None
    payload = _new_bytes(None, payload_bytes)
    call = getattr(_library, f"diloco_encode_{name}")
    return payload if call(values.data_ptr(), values.numel(), block, stochastic, payload) else None


def decode(name: str, payload: bytes, block: int, out: Tensor) -> bool:
    """Fill `out` from a payload whose size and headers are good. False: not here."""
    if _library is None or not _suits(name, block, out):
        return False
    getattr(_library, f"diloco_decode_{name}")(payload, out.numel(), block, out.data_ptr())
    return True


def fold(name: str, payload: bytes, block: int, weight: float, total: Tensor) -> float | None:
    """`Codec.fold` of a payload whose size and headers are good. None: not here, and `total` is unchanged."""
    if _library is None or not _suits(name, block, total):
        return None
    squares: float = getattr(_library, f"diloco_fold_{name}")(payload, total.numel(), block, weight, total.data_ptr())
    return squares


def nesterov(
    mean: Tensor,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    kept: float,
    share: float,
    momentum: float,
    rate: float,
) -> bool:
    """`diloco.outer.Nesterov`: fill `after` from `before`, (momentum, anchor) each. False: not here."""
    flat = (mean, *before, *after)
    if _library is None or not all(one.dtype == torch.float32 and one.is_contiguous() for one in flat):
        return False
    places = [one.data_ptr() for one in flat]
    _library.diloco_nesterov(*places[:3], mean.numel(), kept, share, momentum, rate, *places[3:])
    return True


def _suits(name: str, block: int, values: Tensor) -> bool:
    fits = block <= MOST_PACKED or name in ("int8", "binned8")
    return fits and values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
