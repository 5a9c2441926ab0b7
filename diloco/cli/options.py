"""Options that several commands share, and how they show progress."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
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
