"""A mixture of experts in the place of a block's feed-forward layer: a router, its balance, experts, shared experts.

Each token goes to its `experts_per_token` best experts and to all shared ones. It is dropless: an expert takes however
many tokens choose it. The maths is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) with one group of experts,
which Hugging Face has as `Glm4MoeForCausalLM` together with our attention, so every configuration can be exported.

Two ways to keep the experts equally busy (`model.balance`):

- `bias`: an expert with too few tokens gets a larger bias in the choice, and no auxiliary loss is needed. The bias is a
  *parameter*, although no optimizer moves it: DiLoCo agrees on parameters and on nothing else, so peers average it
  together with the router it belongs to, joiners and checkpoints get it, exports have it. What is kept as its gradient
  is the load error. The sums over micro-batches and over the ranks of an island are then those of every gradient, and
  the sign is taken of the load of the whole batch.
- `loss`: the auxiliary loss of Switch (arXiv 2101.03961, equations 4 to 6) moves the router's weights.

Shapes in comments: N tokens, D model width, E experts, K experts of one token, F width of one expert, R = N K rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.config.contract import ModelSection
from diloco.models.transformer import SwiGLU


def routers(model: nn.Module) -> list[Router]:
    """The routers of a transformer with experts in order; none of a dense one."""
    return [module for module in model.modules() if isinstance(module, Router)]


class Router(nn.Module):
    """The router of a mixture: chooses each token's experts and their weights, and keeps the experts' loads equal."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.experts_per_token = section.experts_per_token
        self.loss_weight = section.balance_loss
        self.rate = section.balance_rate
        self.weight = nn.Parameter(torch.empty(section.experts, section.dim))
        self.bias = nn.Parameter(torch.empty(section.experts)) if section.balance == "bias" else None
        self.total: Callable[[Tensor], Tensor] = lambda loads: loads
        """The sum of loads over all ranks that share a batch; an island puts its own here."""
        self.loads = torch.zeros(section.experts)
        """Tokens that each expert got from this rank in the last training step's last micro-batch (with an auxiliary
        loss, from all ranks), fp32."""
        self._loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens: x (N, D) -> weights (N, K), fp32, and the experts they are for (N, K), int64.

        The weights of several experts sum to 1. That of a single one is its score: at 1 the router would learn nothing.
        """
        with torch.autocast(x.device.type, enabled=False):  # bf16 scores would tie, and flip between two ranks
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        chosen = ranked.detach().topk(self.experts_per_token).indices
        weights = scores.gather(1, chosen)
        if self.training:
            experts = len(self.weight)
            loads = torch.bincount(chosen.flatten(), minlength=experts).float()
            if self.bias is None:
                loads = self.total(loads)
                share = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)  # Switch: softmax; the sum is 1 too
                self._loss = self.loss_weight * experts * (loads / loads.sum() @ share)
            else:
                # Whole numbers: a load that is even over all ranks is exactly zero however it is summed.
                excess = experts * loads - loads.sum()
                self._loss = (self.bias - self.bias.detach()) @ excess  # 0, with the gradient `excess`
            self.loads = loads
        if self.experts_per_token > 1:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return weights, chosen

    def take_loss(self) -> Tensor | float:
        """The router's auxiliary loss of the last forward pass in training mode, which is added to the loss that is
        minimised, once."""
        loss, self._loss = self._loss, 0.0
        return loss

    @torch.no_grad()
    def rebalance(self) -> None:
        """Move the router's bias by `balance_rate` against the sign of the load error that its gradient holds."""
        if self.bias is not None and self.bias.grad is not None:
            self.bias.sub_(self.bias.grad.sign(), alpha=self.rate)

    def imbalance(self) -> float:
        """The router's largest load of an expert over the mean, less one: 0 is even (MaxVio, arXiv 2408.15664, 4.1)."""
        return (self.loads.max() / self.loads.mean()).item() - 1 if self.loads.any() else 0.0


RunExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`run_experts`, or the same with activations computed again."""


class Experts(nn.Module):
    """The routed experts of a block, each a SwiGLU, their matrices stacked."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.run: RunExperts = run_experts
        width = section.expert_width
        self.gate = nn.Parameter(torch.empty(section.experts, width, section.dim))
        self.up = nn.Parameter(torch.empty(section.experts, width, section.dim))
        self.down = nn.Parameter(torch.empty(section.experts, section.dim, width))

    def forward(self, rows: Tensor, loads: Tensor) -> Tensor:
        """Apply the experts: rows (R, D), those of expert 0 first, and how many each has, int64 (E,) -> (R, D)."""
        return self.run(rows, loads, self.gate, self.up, self.down)


def run_experts(rows: Tensor, loads: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply the experts' SwiGLU to consecutive rows. Stacks (E, F, D), (E, F, D), (E, D, F); other shapes as above.

    bf16 takes torch's grouped product (one kernel for all experts, no wait for the loads), where torch has it.
    """
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    if dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        rows, gate, up, down = (tensor.to(dtype) for tensor in (rows, gate, up, down))
        ends = loads.cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
        return F.grouped_mm(hidden, down.mT, offs=ends)
    out: Tensor = _one_by_one(rows, loads, gate, up, down)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each step has other loads, and would be compiled anew
def _one_by_one(rows: Tensor, loads: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # `unbind` and not an index: the gradient of each index would be as large as the stack.
    stacks = zip(torch.split(rows, loads.tolist()), gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in stacks])


class MixtureOfExperts(nn.Module):
    """A block's feed-forward layer of experts: x (B, T, D) -> the weighted sum of each token's experts, plus the shared
    ones."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.router = Router(section)
        self.experts: nn.Module = Experts(section)
        together = section.model_copy(update={"ffn_dim": section.shared_experts * section.expert_width})
        self.shared = SwiGLU(together) if section.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, D)
        weights, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)  # row numbers (token x K + choice) by expert
        loads = torch.bincount(chosen.flatten(), minlength=len(self.router.weight))
        rows = self.experts(tokens[order // chosen.shape[1]], loads)
        mixed = (rows[order.argsort()].unflatten(0, chosen.shape) * weights[..., None]).sum(dim=1)  # fp32, (N, D)
        out: Tensor = mixed.view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        return out
