"""Pipeline parallelism: stages of layers on different ranks, by torch's own engine (torch.distributed.pipelining).

A step is one call of a schedule: micro-batches go through the stages and their gradients come back, sent from rank to
rank. A stage is a part of our transformer, made before tensor parallelism and FSDP2 divide it further; the engine
drives FSDP2, too: a stage's parameters are gathered once for all micro-batches of a step, and its gradients divided
after the last, whatever `mesh.shard` says, as a stage is a small part of the model anyway.

Where the head is the embedding, the first stage and the last have it both: their gradients are summed, and as both take
the same optimizer steps they stay the same bits. It counts once in the norm of the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from diloco.config.contract import Contract
from diloco.config.site import MeshSection, PipelineSchedule, Site
from diloco.island.bridge import Column
from diloco.island.mesh import LOOPED, Mesh, count_stages, cut, home_of, layer_costs, stages_of
from diloco.island.parallel import ModelRanks, divide
from diloco.island.slices import full
from diloco.models.moe import routers
from diloco.models.transformer import Transformer, token_loss
from diloco.outer.fragments import named_parameters

SCHEDULES: Mapping[PipelineSchedule, Callable[..., Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class Stage(nn.Module):
    """Pipeline stage: tokens int64 (B, T) or hidden states fp32 (B, T, D) -> hidden states, or logits (B, T, V)."""

    def __init__(self, part: Transformer, *, bf16: bool) -> None:
        super().__init__()
        self.part = part
        self.share = 1.0
        """Share of one micro-batch in a step's loss."""
        self._bf16 = bf16

    def forward(self, x: Tensor) -> Tensor:
        # Around the forward pass only: the engine goes forwards and backwards in one call.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            out: Tensor = self.part(x)
        loss = sum(router.take_loss() for router in routers(self.part)) if self.training else 0
        if not isinstance(loss, Tensor):
            return out
        both: Tensor = _AlsoMinimised.apply(out, loss * self.share)  # type: ignore[no-untyped-call]
        return both


class _AlsoMinimised(torch.autograd.Function):
    """Identity of a pipeline stage's `out`; `loss` is minimised as if added to that of the last stage."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return out.clone()  # the engine detaches what a stage gives in place, which a view is not for

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=ctx.dtype, device=gradient.device)


class Stages(nn.ModuleList):
    """Pipeline stages of a rank, as one module. Parameters have the names they have in the whole model."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all pipeline stages of this rank, named as in the whole model."""
        for stage in self:
            assert isinstance(stage, Stage)
            yield from stage.part.named_parameters(*args, **kwargs)


def pipelined(
    whole: Transformer, mesh: Mesh, site: Site, contract: Contract, device: torch.device, *, bf16: bool
) -> Pipelined:
    """Cut a model, given on the meta device, into the stages of a pipeline, and divide this rank's over the mesh.

    They have memory of their own then, and no values yet. All ranks make theirs together.
    """
    section, ranks = site.mesh, mesh.size("pp")
    costs = layer_costs(contract.model, whole.vocab_size, contract.data.sequence_length)
    layers = cut(costs, count_stages(section, ranks))
    mine = stages_of(mesh.place("pp"), section, ranks)
    stages = {stage: Stage(whole.part(layers[stage]), bf16=bf16) for stage in mine}
    for stage in stages.values():
        divide(stage.part, stage, mesh, site, bf16=bf16)
        stage.to_empty(device=device)
    group = mesh.along("pp").get_group()
    members = dist.get_process_group_ranks(group)
    homes = [members[home_of(stage, section, ranks)] for stage in range(len(layers))]
    holders: dict[str, int] = {}
    for home, of_stage in zip(homes, layers, strict=True):
        for name in named_parameters(whole.part(of_stage)):
            holders.setdefault(name, home)
    shapes = {name: parameter.shape for name, parameter in named_parameters(whole).items()}
    return Pipelined(stages, homes, whole, mesh, section, Column(group, shapes, holders, device))


class Pipelined(ModelRanks):
    """Ranks that each hold some pipeline stages of the model, and a share of those. Stages take care of bf16."""

    def __init__(
        self,
        stages: dict[int, Stage],
        homes: list[int],
        whole: Transformer,
        mesh: Mesh,
        section: MeshSection,
        column: Column,
    ) -> None:
        """`stages`: this rank's, by number, divided as `[mesh]` has it. `homes`: the rank that has each stage."""
        super().__init__(Stages(stages.values()))
        self.whole_model: nn.Module = whole
        """On the meta device: all parameters, of which this rank has some."""
        self.column = column
        self._tied_head = whole.head is None
        self._section = section
        self._count, self._home = len(homes), homes
        self._stages = stages
        self._tensor_parallel = mesh.size("tp") > 1
        self._hidden = whole.width
        self._schedules: dict[tuple[int, torch.Size], Any] = {}

    def backward(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Run the pipeline: gradient of the mean loss over micro-batches, all int64 (n, L + 1). Returns that loss."""
        rows, shape = torch.cat(list(micro_batches)), micro_batches[0].shape
        key = len(micro_batches), shape
        if key not in self._schedules:
            self._schedules[key] = self._scheduled(*key)
        losses: list[Tensor] = []
        tokens = (rows[:, :-1],) if 0 in self._stages else ()
        target = rows[:, 1:] if self._ends else None
        for stage in self._stages.values():
            stage.share = 1 / len(micro_batches)
        with self.micro_batch(last=True):
            self._schedules[key].step(*tokens, target=target, losses=losses, return_outputs=False)
        weight = self._tied()
        if weight is not None and weight.grad is not None:
            # The two copies of a tied embedding are on two ranks, and get the sum of both gradients.
            gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            other = torch.empty_like(gradient)
            peer, group = self._home[0 if self._ends else self._count - 1], self.column.group
            sends = dist.P2POp(dist.isend, gradient.contiguous(), peer, group)
            for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, other, peer, group)]):
                work.wait()
            gradient.add_(other)
        return self._from_last(torch.stack([loss.detach() for loss in losses]).sum() if self._ends else None)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss over sequences (n, L + 1), on all ranks of the pipeline; forwards only."""
        x = rows[:, :-1]
        loss = None
        for index, stage in self._stages.items():
            if index > 0 and index - 1 not in self._stages:
                x = torch.empty(self._hidden_shape(rows.shape), dtype=torch.float32, device=rows.device)
                dist.recv(x, self._home[index - 1], self.column.group)
            x = stage(x)
            if index + 1 == self._count:
                loss = full(token_loss(x, rows[:, 1:]))
            elif index + 1 not in self._stages:
                dist.send(x.contiguous(), self._home[index + 1], self.column.group)
        return self._from_last(loss)

    def norm(self, own: Tensor) -> Tensor:
        """Norm of the gradients of all ranks of the pipeline, from each rank's `own`."""
        squares = own.square()
        dist.all_reduce(squares, group=self.column.group)
        return squares.sqrt()

    def counts(self, parameter: Tensor) -> bool:
        """Whether a parameter of this rank's pipeline stages is no copy of another rank's."""
        return not (self._ends and 0 not in self._stages and parameter is self._tied())

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of all micro-batches of a step through the pipeline."""
        return loss_parallel() if self._tensor_parallel else contextlib.nullcontext()

    @property
    def _ends(self) -> bool:
        return self._count - 1 in self._stages

    def _scheduled(self, micro_batches: int, shape: torch.Size) -> Any:
        """Pipeline schedule for so many micro-batches of (n, L + 1)."""
        tokens = torch.empty((shape[0], shape[1] - 1), dtype=torch.int64, device="meta")
        hidden = torch.empty(self._hidden_shape(shape), dtype=torch.float32, device="meta", requires_grad=True)
        device, group = self.column.device, self.column.group
        # Nobody receives the last stage's logits: their shape need not be right.
        engine = partial(PipelineStage, num_stages=self._count, device=device, output_args=hidden, group=group)
        stages = [engine(stage, index, input_args=hidden if index else tokens) for index, stage in self._stages.items()]
        given: Any = stages if self._section.schedule in LOOPED else stages[0]

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return full(token_loss(logits, target)) / micro_batches

        return SCHEDULES[self._section.schedule](given, micro_batches, loss_fn=loss, scale_grads=False)

    def _hidden_shape(self, shape: torch.Size) -> tuple[int, int, int]:
        """Shape of the activations that travel between two pipeline stages for sequences (n, L + 1)."""
        pieces = next(iter(self._stages.values())).part.hidden_pieces
        return shape[0], (shape[1] - 1) // pieces, self._hidden

    def _from_last(self, value: Tensor | None) -> Tensor:
        """Scalar of the rank with the last pipeline stage, on all ranks."""
        scalar = torch.zeros((), dtype=torch.float32, device=self.column.device) if value is None else value
        dist.broadcast(scalar, self._home[-1], self.column.group)
        return scalar

    def _tied(self) -> Tensor | None:
        """This rank's copy of an embedding that the first and last pipeline stage share."""
        if not self._tied_head or not (0 in self._stages or self._ends):
            return None
        embed = self._stages[0 if 0 in self._stages else self._count - 1].part.embed
        assert embed is not None
        return embed.weight
