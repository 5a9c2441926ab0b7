"""The training of a simulated peer: inner steps are noise on a model of a few numbers, and its data have no content.

Beside it are the bytes of a lying peer, which no honest peer would send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from diloco.inner.meter import Phases, Throughput
from diloco.island import Island
from diloco.island.slices import Pieces, Slices, held
from diloco.outer.fragments import Weights
from diloco.outer.line import Line
from diloco.run.trainer import TrainerLeases
from diloco.simulate.virtual.plans.setup import NOISES, STEPS, SimulatedModel
from diloco.simulate.virtual.ranks.island import SimulatedBridge, SimulatedIsland
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.saving import Contents

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess

NOTHING = torch.empty(0)
SEED = 0
"""Seed of the order of the data."""


class SimulatedTraining:
    """Whoever trains for a simulated peer (`diloco.peer.rank.PeerTraining`)."""

    def __init__(self, process: SimulatedProcess, island: Island) -> None:
        self._process, self._island = process, island
        plan = process.world.plan
        self.weights = Weights.of(SimulatedModel(plan.elements))
        if isinstance(island, SimulatedIsland):
            self.weights = SimulatedBridge(self.weights.parameters, island)
        self.usage = Throughput(None, None, 1, Phases(torch.device("cpu")))
        self._step_s = plan.round_s / STEPS / plan.speed(int(process.name[1:]))
        self._reader: TrainerLeases | None = None
        self._data = SimulatedData()
        self.steps = 0
        """Inner steps of this life."""

    def reader(self, line: Line, checkpoint: Checkpoint | None) -> TrainerLeases:
        """The reader of the simulated peer's leased data, as a trainer has it."""
        self._reader = TrainerLeases(self._data, SEED, line, checkpoint)  # type: ignore[arg-type]
        return self._reader

    def step_s(self) -> float:
        """Virtual seconds of the next inner step."""
        world = self._process.world
        jitter = world.plan.jitter
        return self._step_s * world.dice.uniform(1 - jitter, 1 + jitter)

    def step(self) -> int:
        """An inner step. Returns the number of leased blocks that were read first."""
        self.steps += 1
        assert self._reader is not None
        assert self._process.progress is not None
        _, fresh = self._reader.next(1)
        block = self._data.last if fresh else -1
        progress = self._process.progress
        self.follow(progress.train(1, block))
        if self._island.size > 1:
            self._island.share(str((progress.mine.bit_length() - 1) % NOISES))  # the latest piece
        return fresh

    def follow(self, noises: Mapping[str, torch.Tensor]) -> None:
        """Change the weights as an inner step does, on every simulated rank alike."""
        for name, noise in noises.items():
            self.weights.parameters[name].data.add_(noise)

    # ------------------------------------------------------------ what a rank asks

    def live(self, *, local: bool) -> Slices:
        """The weights, where they are wanted."""
        return {"local": [held(name, one.detach()) for name, one in self.weights.parameters.items()]} if local else {}

    def kept(self) -> Contents:
        """The pieces of progress in the weights, and their tokens."""
        progress = self._process.progress
        assert progress is not None
        return {}, {"pieces": progress.as_json(), "pieces_tokens": progress.tokens}

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Take the weights and the pieces of progress in them from a checkpoint."""
        checkpoint = opened()
        weights = checkpoint.groups.get("local", Pieces(()))
        for name, parameter in self.weights.parameters.items() if weights else ():
            weights.read(held(name, parameter.detach()))
        assert self._process.progress is not None
        if weights:
            self._process.progress.restored(checkpoint.value("pieces", list), checkpoint.value("pieces_tokens", int))
        else:
            self._process.progress.restored([], 0)

    def evaluate(self) -> float | None:
        """None: there is nothing to learn."""
        return None

    def facts(self) -> dict[str, Any]:
        """No facts."""
        return {}

    def version_fields(self) -> dict[str, Any]:
        """No fields."""
        return {}

    def used(self) -> dict[str, Any]:
        """Use of hardware that is not there."""
        return {**self.usage.fields(), "memory": ()}


class SimulatedData:
    """Data without content (`diloco.data.dataset.Dataset`): a reader follows which blocks are read."""

    blocks_per_epoch = None
    fingerprint = "none"
    last = -1
    """The block that was read last."""

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """No tokens: nobody looks at them."""
        self.last = blocks[-1]
        return NOTHING

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take no state."""
