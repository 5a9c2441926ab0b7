"""Expert parallelism: the experts of a block divided over ranks, tokens brought to them by all-to-all and back.

Each rank of the group trains on rows of its own and routes them by the whole router; its tokens' rows go to the ranks
that have their experts, and come back as results (GShard, arXiv 2006.16668, section 3.2; dropless, so splits are
uneven). Gloo and NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from diloco.models.moe import Experts, MixtureOfExperts, routers


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Expert parallelism in place: leave each rank of a one-dimensional mesh its share of all experts.

    The stacks keep their names and become DTensors, sharded over `mesh` by expert. The number of experts must divide.
    """
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and isinstance(module.experts, Experts):
            module.experts = DividedExperts(module.experts, mesh)


def balance_together(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Expert parallelism: let an auxiliary loss see the loads of all ranks, which share a batch, as one rank's.

    `group`: the ranks that have the same layers; None: all.
    """

    def total(loads: Tensor) -> Tensor:
        dist.all_reduce(loads, group=group)
        return loads

    for router in routers(model):
        router.total = total


class DividedExperts(nn.Module):
    """Experts divided over ranks, in the place of `Experts`, under the same parameter names."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self.run = experts.run
        for name, stack in experts.named_parameters():
            share = stack.detach().chunk(self._ranks)[mesh.get_local_rank()].clone()
            self.register_parameter(name, nn.Parameter(DTensor.from_local(share, mesh, [Shard(0)], run_check=False)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each step has other splits, and would be compiled anew
    def forward(self, rows: Tensor, loads: Tensor) -> Tensor:
        """All-to-all to the experts' ranks and back: rows (R, D) of this rank's tokens, by expert; `loads` of each."""
        leaving = loads.view(self._ranks, -1)
        arriving = torch.empty_like(leaving)  # [rank it comes from, expert here] -> rows
        dist.all_to_all_single(arriving, leaving.contiguous(), group=self._group)
        sent = leaving.sum(dim=1).tolist()
        received = arriving.sum(dim=1).tolist()
        here = arriving.shape[1]
        rows = all_to_all_single_autograd(rows, received, sent, self._group)
        # They come rank by rank, each rank's by expert: an expert wants its own from all ranks together.
        numbers = torch.arange(here, dtype=torch.int64, device=loads.device)
        experts = numbers.repeat(self._ranks).repeat_interleave(arriving.flatten())
        order = experts.argsort(stable=True)
        # This rank's shares of gate, up and down. Their gradient sums over all ranks' tokens, each rank's loss being a
        # mean over its own: divided by the ranks it is the gradient of the mean loss, so that gradients can be averaged
        # over copies like those of all other parameters.
        stacks = [stack.to_local() if isinstance(stack, DTensor) else stack for stack in self.parameters()]
        for stack in stacks:
            if stack.requires_grad:
                stack.register_hook(lambda gradient: gradient / self._ranks)  # type: ignore[no-untyped-call]
        out = self.run(rows[order], arriving.sum(dim=0), *stacks)
        return all_to_all_single_autograd(out[order.argsort()], sent, received, self._group)
