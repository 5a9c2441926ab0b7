"""Lines of one rank, moved on at once: what a peer's life does in pieces that wait."""

from __future__ import annotations

from diloco.base.decisions import Apply
from diloco.base.types import Closed, Commit, Counted
from diloco.outer.line import (
    Diverged,
    Line,
    PendingContribution,
    adopt,
    adoption,
    book,
    book_adoption,
    book_drop,
    drop,
    expect,
    withdraw,
)
from diloco.outer.optimizers import Stepped, SteppedHere
from diloco.outer.state import OuterState
from diloco.round import apply, measure
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


def step_outer(line: Line, closed: Closed, state_unused: bool = False) -> Counted | None:
    """Apply a version to a line of one rank, at once. Returns its entry in it, if any.

    `state_unused`: nobody else reads the state before it, which may be overwritten.

    Raises Diverged when the version was made on another state, and PayloadError when the mean is no mean.
    """
    commit = closed.commit
    if commit.fragment < 0:  # a founding moves no anchor: what was sent stays what it is
        line.commit = commit
        return None
    try:
        mine = expect(line, commit)
    except Diverged as error:
        if error.uncounted:
            take_back(line)
        raise
    apply_stepped(line, SteppedHere(line, closed), line.applying(commit, mine is not None, state_unused))
    book(line, commit, mine)
    return mine


def take_back(line: Line) -> None:
    """What was sent is progress again, unless a version counts it."""
    if line.sent is None or line.sent.passed is None:
        withdraw(line)


def adopt_state(line: Line, state: OuterState, commit: Commit | None) -> tuple[Counted | None, int]:
    """Take over a copied state. Returns the line's entry counted on the way, tokens discarded."""
    taken = adoption(line, commit, ())
    adopt(line, state, taken.stays)
    book_adoption(line, taken)
    return taken.mine, taken.discarded


def drop_progress(line: Line) -> int:
    """Take a line back to the anchor. Returns the tokens that are discarded."""
    drop(line)
    return book_drop(line)
