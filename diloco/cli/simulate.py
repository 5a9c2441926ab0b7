"""`diloco simulate`: real peers on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.options import AsJson, ContractArgument, Overrides, SitePath, stop_asked

commands = typer.Typer()


@commands.command(
    epilog="Examples:  diloco simulate quick --peers 3 --compare ddp --out runs/try   |   "
    "diloco simulate quick --async --speeds 1,1,0.5,0.25 --compare sync"
)
def simulate(
    contract: ContractArgument,
    peers: Annotated[int | None, typer.Option(min=1, max=64, help="Real peer processes on loopback; 4.")] = None,
    speeds: Annotated[
        str, typer.Option(help="One peer for each of these, so many times as fast as it could be: 1,1,0.5,0.25.")
    ] = "",
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Each at its own pace: the same as --set membership.policy=async.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Also train: ddp (torch DistributedDataParallel), average (outer SGD at rate 1), alone, sync "
            "(everybody waits for the slowest). Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; runs/<run> by default.")] = None,
    site: SitePath = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train with N real peer processes on this machine, through the code path of a real run, and compare."""
    from diloco.config.load import split_overrides
    from diloco.simulate.local.simulation import SimulateOptions, read_speeds, run_simulation

    by_peer = read_speeds(speeds, peers)
    count = peers or len(by_peer) or 4
    names = dict.fromkeys(part for text in compare or () for part in text.split(",") if part)
    policies = ["membership.policy=async"] if asynchronous else []
    site_overrides, contract_overrides = split_overrides([*policies, *(overrides or [])])
    options = SimulateOptions(contract, count, tuple(names), out, site, contract_overrides, site_overrides, by_peer)
    live = sys.stdout.isatty() and not as_json
    result = run_simulation(options, stop_asked(), sys.stderr if as_json else sys.stdout, live)
    print(json.dumps(result.summary, indent=2) if as_json else result.text)
    raise typer.Exit(result.exit_code)
