"""What a checkpoint holds of a line, and a line from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from diloco.config.contract import Contract
from diloco.island.slices import Slice
from diloco.outer.line import Line, UncommittedProgress, adopt
from diloco.outer.merge import Eager
from diloco.outer.state import OuterState
from diloco.storage.checkpoint import Checkpoint, flat_buffers, fragment_slices, outer_state, read_together
from diloco.storage.saving import Contents
from diloco.storage.tensor_files import JsonValue


def save_line(line: Line, contract: Contract) -> Contents:
    """What a checkpoint holds of what a line stands at: references, to buffers that are not overwritten meanwhile.

    Group `local` is there, empty, when there is progress to keep: whoever saves adds the weights as the ranks hold them
    (under `diloco.outer.line.weights_to_keep`).
    """
    groups = line_slices(line)
    if line.trained.tokens:
        groups["local"] = []
    about: dict[str, JsonValue] = {
        "peer": line.peer,
        "contract": contract.to_json(),
        "commit": line.commit.to_bytes().decode() if line.commit else None,
        "steps": [fragment.steps for fragment in line.state.fragments],
        "tokens": line.trained.tokens,
        "blocks": line.trained.blocks,
        "parameters": [[name, list(shape)] for name, shape in line.weights.shapes],
    }
    return groups, about


def line_slices(line: Line) -> dict[str, list[Slice]]:
    """What this rank holds of the outer state, of residuals, and of what `eager` foresees."""
    own_share = line.merge.own if isinstance(line.merge, Eager) else {}
    own = [(f"{index}/{name}", slot) for index, state in own_share.items() for name, slot in state.slots.items()]
    return {
        "outer": _flat_slices(line, line.state.buffers()),
        "residual": _flat_slices(line, [(str(index), tensor) for index, tensor in line.residuals.items()]),
        "own": _flat_slices(line, own),
    }


def _flat_slices(line: Line, buffers: Iterable[tuple[str, Tensor]]) -> list[Slice]:
    """By part, where other ranks hold other parts; `buffers` by names that begin with their fragment's index."""
    slices = []
    for name, flat in buffers:
        fragment = line.layout.fragments[int(name.partition("/")[0])]
        slices += fragment_slices(name, fragment, flat)
    return slices


def restore_line(line: Line, opened: Callable[[], Checkpoint]) -> None:
    """Take outer state, residuals and what `eager` foresees from a checkpoint. All ranks together.

    The parameters are the anchor then; local weights, whoever trains reads. Raises StateError on all ranks when one
    cannot.
    """

    def read() -> tuple[OuterState, dict[str, Tensor], dict[str, Tensor]]:
        checkpoint, layout, optimizer = opened(), line.layout, line.optimizer
        return (
            outer_state(checkpoint, layout, optimizer),
            flat_buffers(checkpoint, "residual", layout),
            flat_buffers(checkpoint, "own", layout, optimizer.slot_names),
        )

    state, residuals, own_share = read_together(line.ranks, read)
    adopt(line, state)
    line.residuals.update((int(index), flat) for index, flat in residuals.items())
    if isinstance(line.merge, Eager):
        for name, flat in own_share.items():
            index, _, slot = name.partition("/")
            own = line.merge.own.setdefault(int(index), line.optimizer.start(torch.zeros_like(flat)))
            line.merge.own[int(index)] = replace(own, slots={**own.slots, slot: flat})


def book_restored(line: Line, checkpoint: Checkpoint) -> None:
    """After that: the commit, and what was trained and is not committed. Rank 0. Raises StateError."""
    line.commit = checkpoint.commit
    line.trained = UncommittedProgress(checkpoint.value("tokens", int), checkpoint.value("blocks", int))
    line.since = line.state.version
