"""Host memory for values, and that of a fragment's size, which goes round instead of back to the kernel.

Each version makes its buffers anew, and the last one's are let go. Fresh pages are handed out and cleared one by one,
which took as long as all arithmetic of an outer step. What is let go here waits for the next of its size: the memory
that a sync needs stays with the process, 4 bytes per parameter and buffer.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

MIN_BYTES = 2**20
"""Smaller ones the allocator itself keeps."""
MAX_SPARE = 5
"""Freed buffers that are kept for each size: enough for anchor, two slots, a copy of the weights, and a residual."""

_spare: dict[int, deque[np.ndarray]] = {}


def floats(elements: int) -> Tensor:
    """Host memory for fp32 values, uninitialised and flat, whatever default dtype and device the process has.

    A user's own training script sets them (`torch.set_default_dtype`, `torch.set_default_device`), so nothing here
    relies on them: each tensor is made by naming both.
    """
    return torch.empty(elements, dtype=torch.float32, device="cpu")


def empty_as(flat: Tensor) -> Tensor:
    """Host memory of the same shape and dtype, uninitialised. It is used again when no view of it is left."""
    if flat.nbytes < MIN_BYTES:
        return torch.empty_like(flat)
    spare = _spare.setdefault(flat.nbytes, deque(maxlen=MAX_SPARE))
    try:
        memory = spare.pop()
    except IndexError:  # torch's memory, for NumPy's own is huge pages, slow to clear in a VM
        memory = torch.empty(flat.nbytes, dtype=torch.uint8, device="cpu").numpy()
    lent = memory.view(flat.numpy().dtype).reshape(flat.shape)
    weakref.finalize(lent, spare.append, memory).atexit = False
    return torch.from_numpy(lent)
