"""The garbage collector at a program's two ends. While it imports and when it ends there is nothing to find, and what
is imported is a million objects to look at: two fifths of the CPU time of a short command."""

from __future__ import annotations

import atexit
import gc

_USUAL = gc.get_threshold()
_IMPORTING = (50_000, *_USUAL[1:])


def starts() -> None:
    """A program starts: the collector comes seldom until `started`, and looks at nothing when the program ends.

    A command that is soon over never calls that.
    """
    gc.set_threshold(*_IMPORTING)
    atexit.register(gc.freeze)


def started() -> None:
    """The program has imported what it needs: from now on the collector comes as usual."""
    gc.set_threshold(*_USUAL)
