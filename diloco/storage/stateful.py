"""A user's objects in a checkpoint: any that have `state_dict` and `load_state_dict`. Nothing is pickled.

A torch optimizer is saved by parameter, in slices as the ranks hold them, and read again on any mesh. Of any other
object, each rank saves its own: dicts, lists, tensors and JSON values, in one JSON text with the tensors beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco.base.errors import StateError, UsageError
from diloco.island.slices import Pieces, Slice, held, sharded

JSON_TYPES = (bool, int, float, str, type(None))
TENSOR, PAIRS, TUPLE = "tensor", "pairs", "tuple"
"""Marks of what JSON has no word for: a tensor's number, a dict whose keys are no strings, a tuple."""


class Stateful(Protocol):
    """A user's object that a checkpoint can save: an optimizer, a scheduler, a scaler, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state of the object for a checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from a checkpoint's state, which `state_dict` returned."""


class UserState:
    """A user's objects by name, as one rank saves them in checkpoints and restores them."""

    def __init__(self, objects: Mapping[str, Stateful], parameters: Mapping[str, Tensor], rank: int) -> None:
        """`parameters`: what this rank holds of the model, by name. Raises UsageError for what cannot be saved."""
        self._objects, self._parameters, self._rank = dict(objects), parameters, rank
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for name, value in self._objects.items():
            if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
                cause = f"state[{name!r}] is a {type(value).__name__}, without state_dict and load_state_dict"
                raise UsageError(cause, "give objects that have both")
        self.slices()

    def slices(self) -> list[Slice]:
        """State of all user's objects as a checkpoint's slices: views, which inner steps change. Raises UsageError."""
        tensors: list[Tensor] = []
        tree: dict[str, Any] = {}
        slices: list[Slice] = []
        for name, value in self._objects.items():
            if isinstance(value, torch.optim.Optimizer):
                tree[name] = self._of_optimizer(name, value, slices, tensors)
            else:
                tree[name] = _flat(value.state_dict(), tensors, f"state[{name!r}]")
        text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        slices += [Slice.whole(f"{self._rank}/{number}", tensor) for number, tensor in enumerate(tensors)]
        return [*slices, Slice.whole(f"{self._rank}/json", text)]

    def load(self, pieces: Pieces) -> None:
        """Restore the user's objects from a checkpoint's group. Raises StateError when it is not of these objects."""
        key = f"{self._rank}/json"
        if key not in pieces:
            raise StateError("the checkpoint has no state of this rank", "resume with as many ranks as wrote it")
        try:
            tree = dict(json.loads(bytes(pieces[key].numpy())))
        except (ValueError, TypeError, RecursionError) as error:
            raise StateError("the checkpoint's state of this rank is malformed", "use one that diloco wrote") from error
        if set(tree) != set(self._objects):
            saved, given = ", ".join(sorted(tree)), ", ".join(sorted(self._objects))
            cause = f"the checkpoint has the state of {saved}; this loop gives {given}"
            raise StateError(cause, "give optimizer= and state= as in the life before")
        for name, value in self._objects.items():
            try:
                if isinstance(value, torch.optim.Optimizer):
                    self._load_optimizer(name, value, tree[name], pieces)
                else:
                    value.load_state_dict(_whole(tree[name], partial(self._own, pieces, "cpu")))
            except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
                cause = f"state[{name!r}] does not take what the checkpoint has: {error!r}"
                raise StateError(cause[:500], "resume with the same optimizer and objects") from error

    def _own(self, pieces: Pieces, device: torch.device | str, number: int) -> Tensor:
        """A tensor of this rank's user's objects from a checkpoint, by its number."""
        return pieces[f"{self._rank}/{number}"].to(device, copy=True)

    def _names_of(self, name: str, group: Mapping[str, Any]) -> list[str]:
        """Names of the parameters in a user's optimizer's group, for a checkpoint. Raises UsageError."""
        if not all(id(parameter) in self._names for parameter in group["params"]):
            cause = f"state[{name!r}] optimizes a tensor that is no trainable parameter of the model"
            raise UsageError(cause, "give the optimizer of this model's parameters")
        return [self._names[id(parameter)] for parameter in group["params"]]

    def _of_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, slices: list[Slice], tensors: list[Tensor]
    ) -> Any:
        """A user's optimizer for a checkpoint: JSON values by parameter, tensors in `slices`, and those of lists in
        `tensors`, each rank's own. Raises UsageError."""
        groups, values = [], {}
        for group in optimizer.param_groups:
            members = self._names_of(name, group)
            rest = {key: _number(value) for key, value in group.items() if key != "params"}
            groups.append({"params": members, "rest": _flat(rest, [], f"state[{name!r}]")})
            for member, parameter in zip(members, group["params"], strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        slices.append(held(f"{name}/{member}/{key}", value))
                    else:
                        values[f"{member}/{key}"] = _flat(value, tensors, f"state[{name!r}]")
        return {"groups": groups, "values": values}

    def _load_optimizer(self, name: str, optimizer: torch.optim.Optimizer, tree: Any, pieces: Pieces) -> None:
        """Restore a user's optimizer from a checkpoint: this rank's parameters, whatever mesh it was saved on."""
        if [group["params"] for group in tree["groups"]] != [self._names_of(name, g) for g in optimizer.param_groups]:
            raise ValueError("other groups of parameters")
        for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
            for key, value in _whole(saved["rest"], lambda number: None).items():
                before = group.get(key)
                group[key] = torch.full_like(before, value) if isinstance(before, Tensor) else value
        optimizer.state.clear()
        for entry in pieces:
            member, _, key = entry.removeprefix(f"{name}/").rpartition("/")
            parameter = self._parameters.get(member)
            if not entry.startswith(f"{name}/") or parameter is None:
                continue
            shape = pieces.shape(entry)
            if shape == tuple(parameter.shape):  # sharded as its parameter is
                value = torch.empty_like(parameter.detach(), dtype=pieces.dtype(entry))
            else:
                value = torch.empty(shape, dtype=pieces.dtype(entry), device=_device_of(parameter, key, optimizer))
            pieces.read(held(entry, value))
            optimizer.state[parameter][key] = value
        for entry, value in tree["values"].items():
            member, _, key = entry.rpartition("/")
            parameter = self._parameters[member]
            own = partial(self._own, pieces, _device_of(parameter, key, optimizer))
            optimizer.state[parameter][key] = _whole(value, own)


def _device_of(parameter: Tensor, key: str, optimizer: torch.optim.Optimizer) -> torch.device:
    """Device of a value of an optimizer's state that has another shape than its parameter: that of the parameter, as
    `torch.optim.Optimizer.load_state_dict` has it, but for a count of steps that no kernel reads."""
    group = next(one for one in optimizer.param_groups if any(parameter is each for each in one["params"]))
    counted = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if counted else parameter.device


def _number(value: Any) -> Any:
    """A learning rate that is a tensor as a number for a checkpoint, which `load` puts into a tensor again."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _flat(value: Any, tensors: list[Tensor], where: str) -> Any:
    """State of a user's object as JSON values for a checkpoint; its tensors go into `tensors`. Raises UsageError."""
    if isinstance(value, JSON_TYPES):
        return value
    if isinstance(value, Tensor) and sharded(value):
        fix = "ranks can save their shares only of tensors that an optimizer holds, in no list"
        raise UsageError(f"{where} holds a DTensor", fix)
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) for key in value) and not {TENSOR, PAIRS, TUPLE} & set(value)
        pairs = [[_flat(key, tensors, where), _flat(one, tensors, f"{where}[{key!r}]")] for key, one in value.items()]
        return dict(pairs) if plain else {PAIRS: pairs}
    if isinstance(value, tuple | list):
        flat = [_flat(one, tensors, f"{where}[{index}]") for index, one in enumerate(value)]
        return {TUPLE: flat} if isinstance(value, tuple) else flat
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy's
        return value.item()
    cause = f"{where} holds a {type(value).__name__}, which no checkpoint takes"
    raise UsageError(cause, "tensors, numbers, texts, lists and dicts can be saved; nothing is pickled")


def _whole(value: Any, tensor: Callable[[int], Any]) -> Any:
    """State of a user's object from a checkpoint's JSON values by `_flat`; `tensor` returns a tensor by its number."""
    if isinstance(value, list):
        return [_whole(one, tensor) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {TENSOR}:
        return tensor(value[TENSOR])
    if set(value) == {TUPLE}:
        return tuple(_whole(one, tensor) for one in value[TUPLE])
    if set(value) == {PAIRS}:
        return {_whole(key, tensor): _whole(one, tensor) for key, one in value[PAIRS]}
    return {key: _whole(one, tensor) for key, one in value.items()}
