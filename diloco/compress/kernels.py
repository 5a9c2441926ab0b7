"""The compiled twins of the block codecs, of top-k, of `magnitude`, of error feedback and of the Nesterov outer step,
where `diloco.kernels.build` installed them; else nothing happens here.

The same bits as in eager torch, five to twenty times faster (`scripts/bench-codecs`). C through ctypes and not
`torch.compile`, which is half as fast here and takes half a minute per process: nothing is traced or compiled again in
the worker threads that encode and decode, and the flags that decide about bits are ours. Calls release the interpreter.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco.base.memory import floats

MAX_PACKED = 1024
"""Values of a block of codes below 8 bits, at most (`MAX_PACKED` in kernels.c)."""
MAX_CHUNK = 4096
"""Values of a chunk of top-k, at most (`MAX_CHUNK` in kernels.c)."""
NAMES = ("int8", "int4", "e3m0", "sign", "binned8", "binned4", "binned2")

_POINTER, _COUNT, _FLOAT, _PAYLOAD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_char_p

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Bytes whose content is still to be written, which C may do until somebody else holds them (Python's C API): a copy of
1 MiB into fresh pages would cost as much as encoding it. Nothing shorter than 2 bytes, which Python shares."""

_library: ctypes.CDLL | None = None
_here: ContextVar[ctypes.CDLL | None] = ContextVar("kernels")
"""Library that replaces the installed one on this thread, within `using`."""


class TopkShape(NamedTuple):
    """Chunks of a part of `elements` values under the codec top-k: values in each, values sent of each, and of the
    short last one."""

    elements: int
    chunk: int
    kept: int
    kept_of_rest: int

    @property
    def sent(self) -> int:
        """Number of values that the codec top-k sends of the part."""
        return self.elements // self.chunk * self.kept + self.kept_of_rest

    @property
    def packed_bytes(self) -> int:
        """Bytes of the indices in a payload of the codec top-k: two in three bytes."""
        return 3 * math.ceil(self.sent / 2)


_CUT = [_COUNT] * len(TopkShape._fields)
_SIGNATURES = {
    **{f"encode_{name}": (ctypes.c_int, [_POINTER, _COUNT, _COUNT, ctypes.c_int, _PAYLOAD]) for name in NAMES},
    **{f"decode_{name}": (None, [_PAYLOAD, _COUNT, _COUNT, _POINTER]) for name in NAMES},
    **{f"fold_{name}": (ctypes.c_double, [_PAYLOAD, _COUNT, _COUNT, _FLOAT, _POINTER]) for name in NAMES},
    "topk_select": (None, [_POINTER, *_CUT, _PAYLOAD, _POINTER]),
    "topk_good": (ctypes.c_int, [_PAYLOAD, *_CUT]),
    "topk_decode": (None, [_PAYLOAD, _POINTER, *_CUT, _POINTER]),
    "topk_fold": (None, [_PAYLOAD, _POINTER, *_CUT, _FLOAT, _POINTER]),
    "topk_mean": (None, [_COUNT, *[_POINTER] * 3, _FLOAT, *_CUT, _POINTER]),
    "magnitude": (_FLOAT, [_POINTER, _COUNT]),
    "with_residual": (ctypes.c_int, [*[_POINTER] * 2, _COUNT, _FLOAT, _POINTER]),
    "nesterov": (None, [*[_POINTER] * 3, _COUNT, *[_FLOAT] * 4, *[_POINTER] * 2]),
}
"""Result and arguments of each function of kernels.c, whose name there begins with `diloco_`."""


def install(library: ctypes.CDLL | None) -> None:
    """Let all codecs of this process call these compiled kernels from now on; None: eager torch."""
    global _library
    if library is not None:
        _declare(library)
    _library = library


@contextmanager
def using(library: ctypes.CDLL | None) -> Iterator[None]:
    """Let codecs on this thread alone call these compiled kernels, or eager torch (None), whatever is installed."""
    if library is not None:
        _declare(library)
    token = _here.set(library)
    try:
        yield
    finally:
        _here.reset(token)


def installed() -> ctypes.CDLL | None:
    """Compiled kernels that codecs on this thread call: those given to `install` last, unless it is within `using`."""
    return _here.get(_library)


def _declare(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"diloco_{name}")
        function.restype, function.argtypes = result, arguments


def _library_for(*flat: Tensor) -> ctypes.CDLL | None:
    """Compiled kernels that codecs on this thread call, if C can read these tensors, all of one size."""
    library, elements = installed(), flat[0].numel()
    if library is not None:
        for one in flat:
            if not _is_plain(one, elements):
                return None
    return library


def _block_function(name: str, block: int, values: Tensor) -> Any:
    """The compiled encode, decode or fold of a codec with blocks. None: not here, or not for such blocks or values."""
    library = _library_for(values)
    fits = block <= MAX_PACKED or name.endswith(("_int8", "_binned8"))
    return None if library is None or not fits else getattr(library, f"diloco_{name}")


def encode(name: str, values: Tensor, block: int, stochastic: bool, payload_bytes: int) -> bytes | None:
    """Encode by a block codec's compiled kernel. None: not here, or some values are not finite or have to saturate."""
    call = _block_function(f"encode_{name}", block, values)
    if call is None:
        return None
    payload = _new_bytes(None, payload_bytes)
    return payload if call(values.data_ptr(), values.numel(), block, stochastic, payload) else None


def decode(name: str, payload: bytes, block: int, out: Tensor) -> bool:
    """Decode by a block codec's compiled kernel: `out` from a payload of good size and headers. False: not here."""
    call = _block_function(f"decode_{name}", block, out)
    if call is not None:
        call(payload, out.numel(), block, out.data_ptr())
    return call is not None


def fold(name: str, payload: bytes, block: int, weight: float, total: Tensor) -> float | None:
    """`Codec.fold` of a payload, its size and headers good, by compiled kernel. None: not here, `total` unchanged."""
    call = _block_function(f"fold_{name}", block, total)
    return None if call is None else call(payload, total.numel(), block, weight, total.data_ptr())


def magnitude(values: Tensor) -> float | None:
    """`diloco.compress.codec.magnitude` by a compiled kernel. None: not here."""
    library = _library_for(values)
    return None if library is None else library.diloco_magnitude(values.data_ptr(), values.numel())


def with_residual(gradient: Tensor, residual: Tensor, decay: float, out: Tensor) -> bool | None:
    """`diloco.outer.pseudograd.with_residual` by a kernel compiled with those of the codecs. None: not here."""
    library = _library_for(gradient, residual, out)
    if library is None:
        return None
    places = gradient.data_ptr(), residual.data_ptr()
    return bool(library.diloco_with_residual(*places, out.numel(), decay, out.data_ptr()))


Outer = tuple[Tensor, Tensor]
"""Momentum and anchor of the outer step."""


def nesterov(
    mean: Tensor, before: Outer, after: Outer, kept: float, share: float, momentum: float, rate: float
) -> bool:
    """`diloco.outer.optimizers.Nesterov` by kernel, compiled with the codecs'. False: not here, `after` unchanged."""
    flat = (mean, *before, *after)
    library = _library_for(*flat)
    if library is None:
        return False
    places = [one.data_ptr() for one in flat]
    library.diloco_nesterov(*places[:3], mean.numel(), kept, share, momentum, rate, *places[3:])
    return True


def has_topk(cut: TopkShape) -> bool:
    """Whether the codec top-k has compiled kernels here for such chunks; those below must not be called otherwise."""
    return installed() is not None and cut.chunk <= MAX_CHUNK


def topk_select(values: Tensor, cut: TopkShape) -> tuple[bytes, Tensor]:
    """Encode by top-k's compiled kernel: packed indices of each chunk's largest, and these, fp32.

    All that is not finite is among them, or at least some. `values`: flat contiguous fp32 on the host. Raises TypeError
    for others, as all that follows does for tensors and payloads that C must not be given.
    """
    library = _for_topk(cut, values)
    packed, largest = _new_bytes(None, cut.packed_bytes), floats(cut.sent)
    library.diloco_topk_select(values.data_ptr(), *cut, packed, largest.data_ptr())
    return packed, largest


def topk_good(payload: bytes, cut: TopkShape) -> bool:
    """Whether the indices at the beginning of a top-k payload, whose size is good, rise and stay in their chunks."""
    return bool(_for_topk(cut, None, [payload]).diloco_topk_good(payload, *cut))


def topk_decode(payload: bytes, sent: Tensor, cut: TopkShape, out: Tensor) -> None:
    """Decode top-k by the codec's compiled kernel: `out` from good indices and what was sent, else 0. All flat fp32."""
    library = _for_topk(cut, out, [payload], [sent])
    library.diloco_topk_decode(payload, sent.data_ptr(), *cut, out.data_ptr())


def topk_fold(payload: bytes, sent: Tensor, cut: TopkShape, weight: float, total: Tensor) -> None:
    """Decode and add a top-k payload by its compiled kernel: total += weight * values, where values were sent."""
    library = _for_topk(cut, total, [payload], [sent])
    library.diloco_topk_fold(payload, sent.data_ptr(), *cut, weight, total.data_ptr())


def topk_mean(terms: Sequence[tuple[float, bytes, Tensor]], total: float | None, cut: TopkShape, out: Tensor) -> None:
    """Mean of top-k payloads by compiled kernel: `out` is the weighted sum over `total`; None: over a value's senders.

    `terms`: weight, payload with good indices, and what was sent, decoded.
    """
    weights, payloads, sent = zip(*terms, strict=True)
    library = _for_topk(cut, out, payloads, sent)
    count = len(terms)
    columns = (_PAYLOAD * count)(*payloads), (_POINTER * count)(*[one.data_ptr() for one in sent])
    scales = (_FLOAT * count)(*weights)
    library.diloco_topk_mean(count, *columns, scales, -1.0 if total is None else total, *cut, out.data_ptr())


def _for_topk(
    cut: TopkShape, whole: Tensor | None, payloads: Sequence[bytes] = (), sent: Sequence[Tensor] = ()
) -> ctypes.CDLL:
    """Compiled kernels of the codec top-k for these arguments; `whole`: the part's size. TypeError if C would stray."""
    library = installed()
    if library is None or cut.chunk > MAX_CHUNK:
        raise TypeError(f"no kernels for chunks of {cut.chunk} values")
    plain = (whole is None or _is_plain(whole, cut.elements)) and all(_is_plain(one, cut.sent) for one in sent)
    if not plain or any(len(payload) < cut.packed_bytes for payload in payloads):
        raise TypeError("top-k in C takes flat contiguous fp32 tensors on the host, and payloads, of the part's size")
    return library


def _is_plain(values: Tensor, elements: int) -> bool:
    """Whether a codec's compiled kernel can read the tensor: fp32, contiguous, on the CPU, of this many elements."""
    return values.is_cpu and values.dtype is torch.float32 and values.is_contiguous() and values.numel() == elements
