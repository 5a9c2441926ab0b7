"""Muon: the inner optimizer of MuLoCo (arXiv 2505.23725), with AdamW for what is no matrix inside a layer.

Muon moves a matrix by its momentum made orthogonal (five Newton-Schulz steps in bf16), so that every direction of the
matrix moves alike. Pseudo-gradients of several peers then agree better than after AdamW, and more peers cost less:
with 16 peers 2.165 nats against 2.215 for 3.1B parameters (published).

Both parts are torch's own, behind one optimizer, so that schedule, checkpoints and clipping know of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.config.contract import InnerSection

LR_RATIO = "lr_ratio"
"""Key of an optimizer group: its learning rate is that many times the scheduled one."""


class MuonAdamW(Optimizer):
    """Inner optimizer: Muon on its group and AdamW on the others, over one `state` and one list of `param_groups`."""

    def __init__(self, groups: list[dict[str, Any]], matrices: list[nn.Parameter], section: InnerSection) -> None:
        """`groups` are those of AdamW alone; of these Muon takes `matrices`."""
        group = {"params": matrices, "weight_decay": section.weight_decay, LR_RATIO: section.muon_lr / section.lr}
        muon: Optimizer = torch.optim.Muon([group], lr=section.muon_lr, momentum=section.muon_momentum)
        taken = set(matrices)
        left = [{**group, "params": [p for p in group["params"] if p not in taken]} for group in groups]
        others = [group for group in left if group["params"]]
        adamw = torch.optim.AdamW(others, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = (muon, adamw)
        self._share()

    def _share(self) -> None:
        """Let both inner optimizers, Muon and AdamW, work on one set of groups and one state."""
        muon, adamw = self._parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()  # torch put other groups and another state in their places

    def step(self) -> None:  # type: ignore[override]
        """One step of both inner optimizers, Muon and AdamW."""
        for part in self._parts:
            part.step()


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that the inner optimizer Muon moves: trainable matrices inside layers, in model order, tied ones once.

    A layer is an entry of a module list (`blocks.<i>.`). Embeddings are not Muon's wherever they are (each of their
    rows is a vector of its own), nor a head that shares its weights with one; a head of its own is in no layer.
    Convolutions and stacked experts, which have more than two dimensions, stay AdamW's too.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in embeddings
        if any(piece.isdecimal() for piece in name.split("."))
    ]
