"""`diloco init`: a contract and a site to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.base.errors import ResourceError, UsageError

commands = typer.Typer()


@commands.command(epilog="Example:  diloco init my-run && diloco simulate my-run/contract.toml --peers 2")
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to; this one.")] = Path(),
) -> None:
    """Write contract.toml and site.toml, with every key, its default and what it means."""
    from diloco.config.template import contract_template, site_template

    contract, site = directory / "contract.toml", directory / "site.toml"
    for path in (contract, site):
        if path.exists():
            raise UsageError(f"{path.absolute()} is there already", "name another folder: diloco init DIR")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        contract.write_text(contract_template(str(contract), str(site)))
        site.write_text(site_template())
    except OSError as error:
        raise ResourceError(
            f"cannot write to {directory.absolute()}: {error.strerror}", "name another folder"
        ) from error
    print(f"{contract}\n{site}\ntry:  diloco simulate {contract} --peers 2")
