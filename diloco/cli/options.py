"""Options that several commands share, their progress and JSON files, and the signals that stop them.

Until a command calls `stop_asked` or `raise_when_stopped`, Ctrl-C ends the process at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

from typer import Argument, Option

from diloco.base.errors import UsageError
from diloco.base.readable import printable

ContractArgument = Annotated[Path, Argument(help="The run contract, a file or a shipped name: what is trained.")]
JOIN_HELP = "Join the run of the member at HOST:PORT[/DIGEST]; of several, with commas, the first that answers."
SitePath = Annotated[Path | None, Option("--site", help="Local settings (peers/*.toml): device, network, folders.")]
Overrides = Annotated[
    list[str] | None, Option("--set", help="section.key=value: beats the contract or site file. Repeatable.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs.")]
Insecure = Annotated[
    bool,
    Option("--insecure", help="Where no DILOCO_SECRET is set: listen beyond loopback, too, and let anybody join."),
]
PeerFolders = Annotated[
    list[Path], Argument(help="Folders of peers, or a folder that has them inside, such as a simulation's.")
]


def show(text: str) -> None:
    """Print a command's answer. Whatever other machines wrote of it does nothing to the terminal."""
    print("\n".join(map(printable, text.split("\n"))))


def write_json(path: Path | None, tree: object) -> None:
    """Write a command's numbers to the file of its option `--json FILE`, if it was given. Raises UsageError."""
    if path is not None:
        try:
            path.write_text(json.dumps(tree, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", "name a file in a folder that exists") from error


def progress_in(unit: str) -> Callable[[int, int], None]:
    """A command's progress on a terminal, one line that is written again and again: so many of all are done."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done:,} of {total:,} {unit}" + ("\n" if done >= total else ""))

    return show


def stop_asked() -> Callable[[], bool]:
    """Install signal handlers: the first SIGINT, SIGTERM or SIGHUP asks the command to stop, the second ends the
    process at once. Returns a function: whether the command shall stop.
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
    """From here on SIGINT and SIGTERM raise KeyboardInterrupt: this command has something to clean up, or to print."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
