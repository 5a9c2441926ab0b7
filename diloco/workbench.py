"""The inner side of a peer, on every rank of its island: data, model, inner loop. A trainer puts a loop around it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.checkpoint import Checkpoint, JsonValue
from diloco.clock import monotonic_s
from diloco.config import Contract, Site
from diloco.data import open_dataset
from diloco.errors import UsageError
from diloco.fragments import read_fragment, write_fragment
from diloco.inner import InnerLoop, evaluate, random_states, restore_random_states, seed_everything
from diloco.island import Island
from diloco.models import build_model
from diloco.round import Line


class Workbench:
    """What inner steps are done on."""

    def __init__(self, contract: Contract, site: Site, island: Island) -> None:
        if contract.inner.batch_size % island.size:
            cause = f"inner.batch_size ({contract.inner.batch_size}) does not divide by {island.size} ranks"
            raise UsageError(cause, "start torchrun with a number of ranks that divides it")
        self.contract, self.site, self.island = contract, site, island
        root = Path(site.data.root)
        self.dataset = open_dataset(contract.data, root)
        self.model = build_model(contract.model, self.dataset.vocab_size, contract.run.seed, root)
        seed_everything(contract.run.seed)
        wrapped = island.wrap(self.model.to(island.device))
        total = contract.run.total_tokens
        self.inner = InnerLoop(wrapped, self._inner_section(), total, island.device, compile=site.device.compile)

    def _inner_section(self) -> Any:
        """Each rank trains its share of the peer's micro-batch."""
        share = self.contract.inner.batch_size // self.island.size
        return self.contract.inner.model_copy(update={"batch_size": share})

    def step(self, block: Tensor, position: int) -> float:
        """One inner step of the whole island, at this many tokens of the run. Returns the mean loss."""
        return self.island.mean(self.inner.step(self._my_share(block), position))

    def _my_share(self, block: Tensor) -> Tensor:
        micro_batches = torch.split(block, self.contract.inner.batch_size)
        return torch.cat([self.island.my_share(micro_batch) for micro_batch in micro_batches])

    def linger(self, began_s: float) -> None:
        """As slow as `device.step_s` and `device.speed` have it."""
        device = self.site.device
        lasts_s = max(monotonic_s() - began_s, device.step_s) / device.speed
        if device.step_s or device.speed < 1:
            time.sleep(max(began_s + lasts_s - monotonic_s(), 0.0))

    def evaluate(self, line: Line) -> float:
        """Held-out loss of the anchor (nats per token); local weights are put back afterwards."""
        local = [read_fragment(line.parameters, fragment) for fragment in line.layout.fragments]
        try:
            for fragment in line.layout.fragments:
                write_fragment(line.parameters, fragment, line.state.fragments[fragment.index].anchor)
            heldout = self.dataset.heldout(self.contract.eval.sequences)
            return evaluate(self.model, heldout, self.contract.inner.batch_size, self.island.device)
        finally:
            for fragment, weights in zip(line.layout.fragments, local, strict=True):
                write_fragment(line.parameters, fragment, weights)

    def to_save(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, JsonValue]]:
        """Tensors and numbers of the inner side, for a checkpoint."""
        states = {"inner": self.inner.state_dict(), "random": random_states()}
        groups = {
            group: {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for group, state in states.items()
        }
        meta: dict[str, JsonValue] = {
            group: {name: value for name, value in state.items() if not isinstance(value, Tensor)}
            for group, state in states.items()
        }
        return groups, {"vocab_size": self.dataset.vocab_size, **meta}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back what `to_save` gave. Raises StateError."""
        self.inner.load_state_dict({**checkpoint.groups.get("inner", {}), **checkpoint.value("inner", dict)})
        restore_random_states({**checkpoint.groups.get("random", {}), **checkpoint.value("random", dict)})
