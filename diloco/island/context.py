"""Context parallelism: each rank has a piece of every sequence, and attention sees the whole.

By heads (DeepSpeed-Ulysses; the other way, a ring, is `diloco.island.ring`): around attention an all-to-all turns
pieces of all heads into some heads of the whole sequence and back (arXiv 2309.14509, section 3.1); all else needs one
token at a time. It sends 4 T D / n elements per rank and block, whatever kernel computes the attention, on gloo and on
NCCL.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from diloco.island.ring import RingAttention
from diloco.models.transformer import Attention, Transformer, attend


def divide_sequences(model: Transformer, mesh: DeviceMesh, method: Literal["heads", "ring"] = "heads") -> None:
    """Let each rank of a one-dimensional mesh call the model with its piece of the sequences, in place.

    Pieces are consecutive and in the order of the ranks (`piece_of`). With "heads", those of queries and those of keys
    and values must divide by the ranks; with "ring", pieces are of even length. Raises ConfigError where torch has no
    ring.
    """
    model.piece = mesh.get_local_rank()
    whole = RingAttention(mesh.get_group()) if method == "ring" else WholeSequences(mesh.get_group())
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = whole


def piece_of(block: Tensor, piece: int, pieces: int) -> Tensor:
    """A rank's columns of sequences (n, L + 1): L / pieces tokens to read, and one more, as each is to be foretold."""
    length = (block.shape[1] - 1) // pieces
    return block[:, piece * length : (piece + 1) * length + 1]


class WholeSequences:
    """Attention over whole sequences of which each rank has a piece: shapes as `attend`, T being the piece's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = group.size()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = self._ranks
        shares = [heads.shape[1] // ranks for heads in (q, k, v)]
        # One exchange for all three: [rank it is for, B, its heads of q, k and v, T, E].
        parts = torch.cat([torch.unflatten(heads, 1, (ranks, -1)) for heads in (q, k, v)], dim=2).transpose(0, 1)
        whole = self._exchanged(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B, (H + 2 K) / n, n T, E)
        mixed = attend(*torch.split(whole, shares, dim=1))
        pieces = torch.unflatten(mixed, 2, (ranks, -1)).permute(2, 0, 1, 3, 4)  # [rank it is for, B, H / n, T, E]
        return self._exchanged(pieces).transpose(0, 1).flatten(1, 2)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Part i to rank i, in the order of the ranks they come from."""
        arrived: Tensor = all_to_all_single_autograd(parts.contiguous(), None, None, self._group)
        return arrived
