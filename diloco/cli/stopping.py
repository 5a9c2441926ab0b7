"""Signals that ask a command to stop. Until a command calls one of these, Ctrl-C ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


def stop_asked() -> Callable[[], bool]:
    """Install handlers: the first SIGINT, SIGTERM or SIGHUP asks to stop, the second ends the process at once.

    Returns whether to stop.
    """
    asked: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        with suppress(OSError):  # a hangup comes where the terminal is gone
            os.write(2, b"leaving in good order; once more to end at once\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return lambda: bool(asked)


def raise_when_stopped() -> None:
    """From here on SIGINT and SIGTERM raise KeyboardInterrupt: this command has something to clean up, or to tell."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
