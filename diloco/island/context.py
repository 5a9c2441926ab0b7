"""Context parallelism: each rank has a piece of every sequence, and attention sees the whole.

By heads (`divide_sequences` with `heads`; DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1): around attention an
all-to-all turns pieces of all heads into some heads of the whole sequence and back. It sends 4 T D / n elements per
rank and block, whatever kernel computes the attention, on gloo and on NCCL.

As a ring (`RingAttention`; arXiv 2310.01889): keys and values go round, and the heads need not divide. The loop over
the ring and the merging of its parts are torch's own (context parallelism of `torch.distributed.tensor.experimental`,
made for torch 2.13). It balances causal attention by giving rank r of n the r-th and the r-th last of 2 n chunks of a
sequence. An all-to-all brings our consecutive pieces into that order, and another one the result back. This sends as
many elements as attention by heads, and (n - 1) / n of all keys and values beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from diloco.base.errors import ConfigError
from diloco.models.transformer import Attention, Transformer, attend


def divide_sequences(model: Transformer, mesh: DeviceMesh, method: Literal["heads", "ring"] = "heads") -> None:
    """Context parallelism in place: each rank of a one-dimensional mesh calls the model with its piece of sequences.

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
    """A context-parallel rank's piece of sequences (n, L + 1): L / pieces tokens to read, and one more to predict."""
    length = (block.shape[1] - 1) // pieces
    return block[:, piece * length : (piece + 1) * length + 1]


class WholeSequences:
    """Attention by heads over whole sequences of which each rank has a piece: shapes as `attend`, T the piece's."""

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
        """All-to-all among context-parallel ranks: part i to rank i, in the order of the ranks they come from."""
        arrived: Tensor = all_to_all_single_autograd(parts.contiguous(), None, None, self._group)
        return arrived


HALVES = 2
"""Chunks of a sequence that a rank has."""


class RingAttention:
    """Causal attention over whole sequences of which each rank has a piece: shapes as `attend`, T being the piece's.

    T must be even.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Raises ConfigError where this torch has no ring attention."""
        _torch_ring()
        self._group = group
        chunks = range(HALVES * group.size())
        self._consecutive = [chunk // HALVES for chunk in chunks]
        """By chunk of a sequence: the rank that has it outside of attention."""
        self._balanced = [min(chunk, chunks[-1] - chunk) for chunk in chunks]
        """By chunk of a sequence: the rank that has it while keys and values go round."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's loop keeps tensors that it could not capture
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [part.shape[1] for part in (q, k, v)]
        moved = self._moved(torch.cat((q, k, v), dim=1), self._consecutive, self._balanced)
        mixed: Tensor = _Ring.apply(self._group, *torch.split(moved, heads, dim=1))  # type: ignore[no-untyped-call]
        return self._moved(mixed, self._balanced, self._consecutive)

    def _moved(self, x: Tensor, before: list[int], after: list[int]) -> Tensor:
        """Move chunks of sequences, (B, heads, T, E) with two of them along T, among context-parallel ranks, from those
        that have them `before` to those that have them `after`."""
        rank, ranks = self._group.rank(), range(self._group.size())
        had = [chunk for chunk, owner in enumerate(before) if owner == rank]
        wanted = [chunk for chunk, owner in enumerate(after) if owner == rank]
        # An all-to-all sends and receives rank by rank; chunks of one rank are in their own order.
        sent, arriving = sorted(had, key=after.__getitem__), sorted(wanted, key=before.__getitem__)
        given = [sum(after[chunk] == other for chunk in had) for other in ranks]
        received = [sum(before[chunk] == other for chunk in wanted) for other in ranks]
        chunks = dict(zip(had, x.chunk(HALVES, dim=2), strict=True))
        parts = torch.stack([chunks[chunk] for chunk in sent])
        arrived: Tensor = all_to_all_single_autograd(parts, received, given, self._group)
        found = dict(zip(arriving, arrived.unbind(), strict=True))
        return torch.cat([found[chunk] for chunk in wanted], dim=2)


class _Ring(torch.autograd.Function):
    """Torch's ring around a kernel that returns the logarithm of each query's softmax sum.

    The ring carries as few heads of keys and values as there are; kernels get as many as of queries.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        aten = torch.ops.aten
        kernel: Callable[..., Any] = (
            aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
        )

        def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Any:
            shared = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(shared, dim=1) for one in (key, value))
            return kernel(query, key, value, dropout_p=0.0, is_causal=is_causal)

        out, sums, *rest = _torch_ring()._templated_ring_attention(
            group, 2, attention, query=q, key=k, value=v, is_causal=True
        )
        ctx.group, ctx.rest = group, rest
        ctx.save_for_backward(q, k, v, out, sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        aten = torch.ops.aten

        def gradients_of(
            *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool,
        ) -> Any:  # fmt: skip
            heads = key.shape[1]
            wide = [one.repeat_interleave(query.shape[1] // heads, dim=1) for one in (key, value)]
            common = (grad_out, query, *wide, out, logsumexp)
            if q.is_cuda:
                lengths, (seed, offset) = ctx.rest[:4], ctx.rest[4:6]  # flash attention's, and its random state
                of_q, *of_kv = aten._scaled_dot_product_flash_attention_backward(
                    *common, *lengths, 0.0, is_causal, seed, offset
                )
            else:
                of_q, *of_kv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*common, 0.0, is_causal)
            return of_q, *(one.unflatten(1, (heads, -1)).sum(dim=2) for one in of_kv)

        found = _torch_ring()._templated_ring_attention_backward(
            ctx.group, 2, gradients_of, grad_out=gradients[0].contiguous(), grad_out_name="grad_out",
            query=q, key=k, value=v, out=out, logsumexp=sums, is_causal=True,
        )  # fmt: skip
        return None, *found[:3]


def _torch_ring() -> Any:
    """Torch's module of ring attention (context parallelism), set up for ours. Raises ConfigError if absent."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    except ImportError as error:
        cause = f"mesh.cp_method 'ring' needs the ring attention of torch 2.13, this is {torch.__version__}"
        raise ConfigError(cause, 'set mesh.cp_method = "heads"') from error
    ring._cp_options.enable_load_balance = True
    ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL
    return ring
