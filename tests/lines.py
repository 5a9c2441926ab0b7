"""Lines of one rank, moved on at once: what a peer's life does in pieces that wait."""

from __future__ import annotations

from diloco.base.decisions import Apply
from diloco.outer.line import Line, PendingContribution
from diloco.outer.optimizers import Stepped
from diloco.round import apply, measure
from diloco.simulate.virtual.training import adopt_state, drop_progress, step_outer, take_back
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.saving import book_restored, restore_line
from tests.fronts import drive


def measured(line: Line, overlaps: bool = True) -> PendingContribution:
    """What the line sends: pseudo-gradient and compress."""
    return measure(line, line.measuring(overlaps), {})


def apply_stepped(line: Line, version: Stepped, how: Apply) -> None:
    """A version that somebody steps."""
    drive(apply(line, version, how, {}))


def restored(line: Line, checkpoint: Checkpoint) -> None:
    """The line as a checkpoint has it."""
    restore_line(line, lambda: checkpoint)
    book_restored(line, checkpoint)


__all__ = ["adopt_state", "apply_stepped", "drop_progress", "measured", "restored", "step_outer", "take_back"]
