"""The invariant of every mode: local = anchor + progress that is not committed yet."""

from __future__ import annotations

import torch
from torch import Tensor


def carry(local: Tensor, base: Tensor, anchor: Tensor) -> Tensor:
    """Move progress that is not committed yet onto a new anchor: anchor + (local - base).

    `local` is what the peer holds now and `anchor` the new one, both flat fp32; `base` says what of `local` is
    already accounted for:

    - the commit counted us: `base` is `local` as it was when the contribution was measured. Without overlap
      nothing was done since, and the result is the anchor.
    - the commit did not count us: `base` is the old anchor, and all progress since is kept.

    Where `local` equals `base` the result has the anchor's very bits: anchor + 0.0 would turn a -0.0 into 0.0,
    and peers without progress must not differ.
    """
    return torch.where(local == base, anchor, anchor + (local - base))
