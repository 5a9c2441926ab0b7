"""Somebody's own training loop, as a run sees it: parameters, optimizer, and whatever else is to be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diloco.inner.loop import random_states, restore_random_states
from diloco.inner.meter import Phases, Usage, device_name, memory_of
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.shares import device_of_share, held, unwrapped
from diloco.island.slices import Pieces, Slices
from diloco.models import count_parameters
from diloco.observe.events import RankMemory
from diloco.outer.fragments import Weights, named_parameters
from diloco.storage.checkpoint import Checkpoint, read_together
from diloco.storage.saving import Contents
from diloco.storage.stateful import Stateful, UserState

STATE = "state"
"""Group of a checkpoint that holds these objects."""


class RandomStates:
    """The global random states of this process: what dropout and shuffling draw from."""

    def state_dict(self) -> dict[str, Any]:
        """Of Python, NumPy and torch (CPU and the current GPU)."""
        return random_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put them back."""
        restore_random_states(state_dict)


class OwnLoop:
    """What a run asks of a loop that is not ours (`diloco.peer.rank.Trains`)."""

    def __init__(self, model: nn.Module, island: Island, state: Mapping[str, Stateful]) -> None:
        """`state`: objects to save and restore. Raises UsageError for one that cannot be."""
        bare = unwrapped(model)
        self.island = island
        self.parameters = named_parameters(bare)
        self.weights = Bridge(self.parameters, island) if island.size > 1 else Weights(self.parameters)
        self._count = count_parameters(bare)
        self._state = UserState({"random": RandomStates(), **state}, self.parameters, island.rank)
        self.usage = Usage(None, None, island.size, Phases(island.device))

    @staticmethod
    def device_of(model: nn.Module) -> torch.device:
        """Where the parameters are; of those that lie on several devices, that of the first."""
        first = next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else device_of_share(first)

    def live(self, *, local: bool) -> Slices:
        """The objects' state, and the weights if they are wanted."""
        live = {STATE: self._state.slices()}
        weights = [held(name, parameter.detach()) for name, parameter in self.parameters.items()]
        return {**live, "local": weights} if local else live

    def kept(self) -> Contents:
        """Nothing that stands still."""
        return {}, {}

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Objects and weights of a checkpoint. Raises StateError on all ranks when one cannot."""
        read_together(self.island, lambda: self._take(opened()))

    def _take(self, checkpoint: Checkpoint) -> None:
        weights = checkpoint.groups.get("local", Pieces(()))
        for name, parameter in self.parameters.items() if weights else ():
            weights.read(held(name, parameter.detach()))
        self._state.load(checkpoint.groups.get(STATE, Pieces(())))

    def evaluate(self) -> float | None:
        """A loop that is not ours does that by itself."""
        return None

    def facts(self) -> dict[str, Any]:
        """Fields of `Started`."""
        return {
            "parameters": self._count,
            "ranks": self.island.size,
            "device": device_name(self.island.device),
        }

    def version_fields(self) -> dict[str, Any]:
        """No more than a run knows by itself."""
        return {}

    def used(self) -> dict[str, Any]:
        """Fields of `HardwareUsed`, since it was asked last."""
        memories = self.island.gather(json.dumps(memory_of(self.island.device)))
        return {**self.usage.fields(), "memory": tuple(RankMemory(*json.loads(one)) for one in memories)}
