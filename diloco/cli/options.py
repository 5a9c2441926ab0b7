"""Options that several commands share, and how they show progress."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

ContractArgument = Annotated[Path, typer.Argument(help="The run contract, a file or a shipped name: what is trained.")]
JOIN_HELP = "Join the run of the member at HOST:PORT[/DIGEST]; of several, with commas, the first that answers."
SitePath = Annotated[
    Path | None, typer.Option("--site", help="Local settings (peers/*.toml): device, network, folders.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value: beats the contract or site file. Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Listen beyond loopback without DILOCO_SECRET: whoever reaches the port may join."),
]
PeerFolders = Annotated[
    list[Path], typer.Argument(help="Folders of peers, or a folder that has them inside, such as a simulation's.")
]


def progress_in(unit: str) -> Callable[[int, int], None]:
    """A way to show how many of all are done; on a terminal only."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done:,} of {total:,} {unit}" + ("\n" if done >= total else ""))

    return show


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
