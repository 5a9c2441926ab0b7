"""The model on the ranks of a mesh, by torch's own engine: DDP, or tensor parallelism with FSDP2 around it.

The order is that of torch's own recipes: tensor parallelism, activation checkpointing, compiling, FSDP2. What is
divided over `dp_shard` are settings of one mechanism, FSDP2 (`[mesh] shard`):

    none, optimizer    parameters are gathered once per step; gradients are whole until the step's last micro-batch
    gradients          parameters are gathered once per step; gradients are divided after each micro-batch
    parameters         a block's parameters are gathered when it needs them; gradients as above

In all of them a rank owns its share of the fp32 weights and of the optimizer's state, and gradients are averaged over
all data-parallel ranks in fp32. Copies of the whole model, with nothing divided, are DistributedDataParallel instead.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from diloco.base.errors import ConfigError
from diloco.config.site import MeshSection, Site
from diloco.island.context import divide_sequences
from diloco.island.experts import DividedExperts, divide_experts
from diloco.island.mesh import Mesh
from diloco.models.moe import MixtureOfExperts, routers
from diloco.models.transformer import Block, Transformer

Checkpointing = Literal["none", "selective", "full"]


class ModelRanks:
    """The ranks of an island that hold a model together. Here one process has all of it."""

    bf16 = False
    """Whether a sharded model gathers its parameters as bf16: without autocast the inputs would then be fp32."""

    def __init__(self, forward: nn.Module) -> None:
        self.forward = forward
        """The module to call: the model itself, or its wrapper."""

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a micro-batch on the ranks of an island. The gradient is complete after the `last` of a step."""
        return contextlib.nullcontext()


class DataParallelRanks(ModelRanks):
    """Ranks that each hold the whole model (DistributedDataParallel)."""

    forward: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`model` is on `device` already. Rank 0's weights become everybody's."""
        super().__init__(DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None))

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a micro-batch (DDP): ranks average gradients in the last one of a step only."""
        return contextlib.nullcontext() if last else self.forward.no_sync()


class Divided(ModelRanks):
    """Ranks that each hold a share of the model (FSDP2, tensor parallelism)."""

    def __init__(self, model: nn.Module, section: MeshSection, mesh: Mesh, *, bf16: bool) -> None:
        """`model` was divided over the mesh by `divide`."""
        super().__init__(model)
        assert isinstance(model, FSDPModule)
        self.bf16 = bf16
        self._fsdp: FSDPModule = model
        self._gathers_per_block = section.shard == "parameters"
        self._divides_gradients = section.shard in ("gradients", "parameters")
        self._tensor_parallel = mesh.size("tp") > 1

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Context of a micro-batch (FSDP2): nothing is reduced or gathered among the ranks before it must be."""
        self._fsdp.set_requires_gradient_sync(last or self._divides_gradients)
        self._fsdp.set_requires_all_reduce(last)
        self._fsdp.set_reshard_after_backward(last or self._gathers_per_block)
        with loss_parallel() if self._tensor_parallel else contextlib.nullcontext():
            yield


def give_back(model: nn.Module) -> None:
    """Free what FSDP2 gathered in forward passes of a model: this rank keeps its shares. Without FSDP2 nothing is done.

    A backward pass does it by itself.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def divide(model: Transformer, root: nn.Module, mesh: Mesh, site: Site, *, bf16: bool) -> None:
    """Divide a model, or a part of one, over the mesh, in place, as `[mesh]` and `[device]` of the site have it.

    Parameters become DTensors where they are: a model on the meta device takes no memory, and gets its own (`to_empty`)
    and its values afterwards. `root`: what is called, the model or the stage around it, which has no other parameters.
    `bf16`: what is gathered travels as bf16, and gradients are reduced in fp32. Raises ConfigError when the vocabulary
    is too small for `tp`.
    """
    # Stages gather their parameters once for all micro-batches.
    by_block = site.mesh.shard == "parameters" and mesh.size("pp") == 1
    if mesh.size("tp") > 1:
        split_matrices(model, mesh, sequence_parallel=site.mesh.sequence_parallel)
    if mesh.size("cp") > 1:
        divide_sequences(model, mesh.along("cp"), site.mesh.cp_method)
    if mesh.size("ep") > 1:
        divide_experts(model, mesh.along("ep"))
    checkpoint_blocks(model, site.device.checkpointing)
    if site.device.compile:
        if mesh.size("tp") > 1 and model.embed is not None:
            model.embed.register_forward_hook(_arrived)
        if site.mesh.async_tp:
            overlap_with_products(mesh.along("tp"))
        for block in model.blocks:
            block.compile()
    policy: dict[str, Any] = {
        "mesh": mesh.copies_of_shares("cp", "ep"),
        "offload_policy": CPUOffloadPolicy() if site.mesh.offload else OffloadPolicy(),
    }
    # Autocast stays on: it casts activations, and norms and the residuals stay fp32, as on one rank.
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if mesh.size("ep") > 1:
        # An expert's copies are on fewer ranks. Sharded by another dimension than the one that `ep` divides.
        apart = {**policy, "mesh": mesh.copies_of_shares("cp"), "shard_placement_fn": lambda _: Shard(1)}
        for experts in [module for module in model.modules() if isinstance(module, DividedExperts)]:
            fully_shard(experts, reshard_after_forward=by_block, mp_policy=precision, **apart)
    for router in routers(model) if bf16 else ():
        fully_shard(router, reshard_after_forward=False, **policy)  # stays fp32, as its scores are
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=by_block, mp_policy=precision, **policy)
    # What is in no block stays gathered from its first use to its last: a tied head is the embedding. It stays fp32.
    fully_shard(root, reshard_after_forward=False, **policy)


# ---------------------------------------------------------------- tensor parallelism


class Replicated(ParallelStyle):
    """Module that each rank of tensor parallelism computes whole; parameters are DTensors, so that norms add up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

        def leave(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)


def split_matrices(model: Transformer, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Tensor parallelism in place (Megatron-LM, arXiv 1909.08053, section 3; 2205.05198 for the sequence).

    Attention's heads and the feed-forward's width are divided over the ranks, and the vocabulary of embedding, head and
    loss. Logits come out as a DTensor divided by vocabulary, of which the last rank may have less than the others.
    Raises ConfigError when it would have nothing.
    """
    tp = mesh.along("tp")
    rows = model.vocab_size
    if math.ceil(rows / tp.size()) * (tp.size() - 1) >= rows:
        raise ConfigError(f"mesh.tp ({tp.size()}) leaves a rank no part of the vocabulary ({rows})", "lower mesh.tp")
    model.hidden_pieces = tp.size() if sequence_parallel else 1
    between = Shard(1) if sequence_parallel else Replicate()  # of (B, T, D), where the residuals are
    norm = SequenceParallel() if sequence_parallel else Replicated()
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(model, between, norm))
    if model.embed is not None:
        parallelize_module(model.embed, tp, RowwiseParallel(input_layouts=Replicate(), output_layouts=between))
    if model.head is not None:
        parallelize_module(model.head, tp, ColwiseParallel())
    if model.norm is not None:
        parallelize_module(model.norm, tp, norm)
        # The product with the head is no module where the head is the embedding, so its input is made whole here.
        whole = PrepareModuleOutput(output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False)
        parallelize_module(model.norm, tp, whole)


def _arrived(_: nn.Module, __: Any, x: Tensor) -> Tensor:
    """Wait for the embedding's output, which tensor-parallel ranks still send: a compiled block that gets it on its way
    loses the gradient with respect to it (torch 2.13)."""
    return x.clone()


def overlap_with_products(tp: DeviceMesh) -> None:
    """Asynchronous tensor parallelism: modules compiled from now on gather and scatter piece by piece, each while the
    product of the one before is computed. It needs NVLink and sequence-parallel norms."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # It calls itself needless, but torch 2.13's compiler asks for it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True


def _block_plan(model: Transformer, between: Shard | Replicate, norm: ParallelStyle) -> dict[str, ParallelStyle]:
    def whole(inputs: int) -> PrepareModuleInput:
        """Tensor parallelism: the first input is gathered once for all matrices; tables of angles are whole anyway."""
        layouts, desired = (between, *[None] * (inputs - 1)), (Replicate(), *[None] * (inputs - 1))
        return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired)

    plan: dict[str, ParallelStyle] = {
        "attn_norm": norm,
        "attn": whole(3),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        "attn.out": RowwiseParallel(output_layouts=between),
        "ffn_norm": norm,
        "ffn": whole(1),
        **{f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
        "ffn.down": RowwiseParallel(output_layouts=between),
    }
    block = next(iter(model.blocks))
    assert isinstance(block, Block)
    if isinstance(block.attn.q_norm, nn.RMSNorm):
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)  # of (B, T, heads, E): each rank has some
        plan |= {"attn.q_norm": heads, "attn.k_norm": heads}
    return plan


# ---------------------------------------------------------------- activations


def checkpoint_blocks(model: Transformer, how: Checkpointing) -> None:
    """Activation checkpointing of the model on a rank: compute activations again in backward, in place of keeping them.

    `full`: all of a block's but its input. `selective`: all but the results of matrix products and of attention, so
    that only what is cheap is computed twice (the aim of arXiv 2205.05198, section 5).
    """
    if how == "none":
        return
    keep: dict[str, Any] = {"preserve_rng_state": False}
    if how == "selective":
        keep["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
    for name, block in list(model.blocks.named_children()):  # a part's do not begin at 0
        assert isinstance(block, Block)
        if how == "selective" and isinstance(block.ffn, MixtureOfExperts):
            # Attention and each SwiGLU apart: routing, and tokens that go to other ranks and come back, happen once.
            parts: Any = block
            parts.attn = checkpoint_wrapper(block.attn, **keep)
            if block.ffn.shared is not None:
                parts.ffn.shared = checkpoint_wrapper(block.ffn.shared, **keep)
            experts = parts.ffn.experts
            experts.run = partial(checkpoint, experts.run, use_reentrant=False, **keep)
        else:
            model.blocks.add_module(name, checkpoint_wrapper(block, **keep))


PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    *([torch.ops.aten._grouped_mm.default] if hasattr(torch.ops.aten, "_grouped_mm") else []),  # of experts, in bf16
]
"""Operations whose results `selective` keeps."""
