"""The compiled twins of the block codecs, of top-k, of `magnitude`, of error feedback and of the Nesterov outer step,
where `diloco.compress.build` installed them; else nothing happens here.

The same bits as in eager torch, five to twenty times faster (`scripts/bench-codecs`). C through ctypes and not
`torch.compile`, which is half as fast here and takes half a minute per process: nothing is traced or compiled again in
the worker threads that encode and decode, and the flags that decide about bits are ours. Calls release the interpreter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PACKED = 1024
"""Values of a block of codes below 8 bits, at most (`CHUNK` in kernels.c)."""
WIDEST_CHUNK = 4096
"""Values of a chunk of top-k, at most (`WIDEST` in kernels.c)."""
NAMES = ("int8", "int4", "e3m0", "sign", "binned8", "binned4", "binned2")

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Bytes whose content is still to be written, which C may do until somebody else holds them (Python's C API): a copy of
1 MiB into fresh pages would cost as much as encoding it. Nothing shorter than 2 bytes, which Python shares."""

_library: ctypes.CDLL | None = None


class Cut(NamedTuple):
    """How top-k cuts a part of `elements` values into chunks, and how many it sends of each, and of the short last."""

    elements: int
    chunk: int
    kept: int
    kept_of_rest: int


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
        cut = [_COUNT] * len(Cut._fields)
        library.diloco_topk_select.restype = None
        library.diloco_topk_select.argtypes = [_POINTER, *cut, ctypes.c_char_p, _POINTER]
        library.diloco_topk_good.restype, library.diloco_topk_good.argtypes = ctypes.c_int, [ctypes.c_char_p, *cut]
        library.diloco_topk_decode.restype = None
        library.diloco_topk_decode.argtypes = [ctypes.c_char_p, _POINTER, *cut, _POINTER]
        library.diloco_topk_fold.restype = None
        library.diloco_topk_fold.argtypes = [ctypes.c_char_p, _POINTER, *cut, ctypes.c_float, _POINTER]
        library.diloco_topk_mean.restype = None
        library.diloco_topk_mean.argtypes = [_COUNT, *[_POINTER] * 3, ctypes.c_float, *cut, _POINTER]
        library.diloco_magnitude.restype = ctypes.c_float
        library.diloco_magnitude.argtypes = [_POINTER, _COUNT]
        library.diloco_with_residual.restype = ctypes.c_int
        library.diloco_with_residual.argtypes = [*[_POINTER] * 2, _COUNT, ctypes.c_float, _POINTER]
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


def magnitude(values: Tensor) -> float | None:
    """`diloco.compress.codec.magnitude`. None: not here."""
    if _library is None or not _is_plain(values, values.numel()):
        return None
    largest: float = _library.diloco_magnitude(values.data_ptr(), values.numel())
    return largest


def with_residual(gradient: Tensor, residual: Tensor, decay: float, out: Tensor) -> bool | None:
    """`diloco.feedback.with_residual`. None: not here."""
    flat = (gradient, residual, out)
    if _library is None or not all(_is_plain(one, out.numel()) for one in flat):
        return None
    places = [one.data_ptr() for one in flat]
    return bool(_library.diloco_with_residual(*places[:2], out.numel(), decay, places[2]))


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
    if _library is None or not all(_is_plain(one, mean.numel()) for one in flat):
        return False
    places = [one.data_ptr() for one in flat]
    _library.diloco_nesterov(*places[:3], mean.numel(), kept, share, momentum, rate, *places[3:])
    return True


def has_topk(cut: Cut) -> bool:
    """Whether what follows is here for such chunks; it must not be called otherwise."""
    return _library is not None and cut.chunk <= WIDEST_CHUNK


def topk_select(values: Tensor, cut: Cut, packed_bytes: int, count: int) -> tuple[bytes, Tensor]:
    """The packed indices of the largest of each chunk, and these, fp32: with all that is not finite, or at least some.

    `values`: flat contiguous fp32 on the host.
    """
    assert _library is not None
    assert _is_plain(values, cut.elements)
    packed, largest = _new_bytes(None, packed_bytes), torch.empty(count)
    _library.diloco_topk_select(values.data_ptr(), *cut, packed, largest.data_ptr())
    return packed, largest


def topk_good(payload: bytes, cut: Cut) -> bool:
    """Whether the indices at the beginning of a payload, whose size is good, rise and stay in their chunks."""
    assert _library is not None
    return bool(_library.diloco_topk_good(payload, *cut))


def topk_decode(payload: bytes, sent: Tensor, cut: Cut, out: Tensor) -> None:
    """Fill `out` from good indices and what was sent, which is zero elsewhere. All tensors here are flat fp32."""
    assert _library is not None
    assert _is_plain(out, cut.elements)
    _library.diloco_topk_decode(payload, sent.data_ptr(), *cut, out.data_ptr())


def topk_fold(payload: bytes, sent: Tensor, cut: Cut, weight: float, total: Tensor) -> None:
    """total += weight * values, where values were sent."""
    assert _library is not None
    assert _is_plain(total, cut.elements)
    _library.diloco_topk_fold(payload, sent.data_ptr(), *cut, weight, total.data_ptr())


def topk_mean(terms: Sequence[tuple[float, bytes, Tensor]], total: float | None, cut: Cut, out: Tensor) -> None:
    """Fill `out` with the weighted sum over `total`; None: over the weights of those who sent a value.

    `terms`: weight, payload with good indices, and what was sent, decoded.
    """
    assert _library is not None
    assert _is_plain(out, cut.elements)
    count = len(terms)
    weights = (ctypes.c_float * count)(*[weight for weight, _, _ in terms])
    packed = (ctypes.c_char_p * count)(*[payload for _, payload, _ in terms])
    sent = (_POINTER * count)(*[values.data_ptr() for _, _, values in terms])
    divisor = -1.0 if total is None else total
    _library.diloco_topk_mean(count, packed, sent, weights, divisor, *cut, out.data_ptr())


def _suits(name: str, block: int, values: Tensor) -> bool:
    fits = block <= MOST_PACKED or name in ("int8", "binned8")
    return fits and _is_plain(values, values.numel())


def _is_plain(values: Tensor, elements: int) -> bool:
    """What C can be given."""
    plain = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
    return plain and values.numel() == elements
