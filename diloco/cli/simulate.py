"""`diloco simulate` and `diloco virtual`: many peers on one machine, as processes or in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from diloco.base.errors import UsageError
from diloco.base.files import keep_files_private
from diloco.cli.options import AsJson, ContractArgument, Overrides, SitePath, raise_when_stopped, stop_asked, write_json

commands = Typer()

PLANTED_SEEDS = 1000
"""Seeds that a planted bug may stay hidden in."""


@commands.command(
    epilog="Examples:  diloco simulate quick --peers 3 --compare ddp --out runs/try   |   "
    "diloco simulate quick --async --speeds 1,1,0.5,0.25 --compare sync"
)
def simulate(
    contract: ContractArgument,
    peers: Annotated[int | None, Option(min=1, max=64, help="Real peer processes on loopback; 4.")] = None,
    speeds: Annotated[
        str, Option(help="One peer for each of these, so many times as fast as it could be: 1,1,0.5,0.25.")
    ] = "",
    asynchronous: Annotated[
        bool, Option("--async", help="Each at its own pace: the same as --set membership.policy=async.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        Option(
            help="Also train: ddp (torch DistributedDataParallel), average (outer SGD at rate 1), alone, sync "
            "(everybody waits for the slowest). Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for results; runs/<run> by default.")] = None,
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
    keep_files_private()
    result = run_simulation(options, stop_asked(), sys.stderr if as_json else sys.stdout, live)
    print(json.dumps(result.summary, indent=2) if as_json else result.text)
    raise Exit(result.exit_code)


@commands.command(
    epilog="Examples:  diloco virtual --seed 7   |   diloco virtual --seeds 0:100000 --json virtual.json   |   "
    "diloco virtual --policy async --speeds 0.1:1 --seeds 0:3000"
)
def virtual(
    file: Annotated[Path | None, Argument(help="With --json: write it to this file.")] = None,
    seed: Annotated[int | None, Option(help="Run one seed and tell what happened.")] = None,
    seeds: Annotated[str | None, Option(help="Run the seeds A:B (B excluded), or a list as 7,12,20:30.")] = None,
    plan: Annotated[Path | None, Option(help="Run what this text says (tests/transcripts).")] = None,
    policy: Annotated[str, Option(help="Only sync, quorum, async or gossip.")] = "",
    without_majority: Annotated[str, Option(help="Only wait or only continue.")] = "",
    speeds: Annotated[str, Option(help="Of the peers, drawn from LOW:HIGH; 0.1:1 for async, else all the same.")] = "",
    jobs: Annotated[int | None, Option(min=1, help="With --seeds: processes; one for each core.")] = None,
    until_found: Annotated[
        bool, Option("--until-found", help="With --seeds: stop at the first seed that breaks an invariant.")
    ] = False,
    size: Annotated[str, Option(help="Of the runs: usual (2 to 8 peers, 30 versions), nightly (16, 100).")] = "usual",
    planted: Annotated[bool, Option("--planted", help="How many seeds it takes to notice each bug.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the protocol itself through thousands of seeds of faults, in virtual time and without processes.

    Exits with 1 when an invariant breaks. The failure is shrunk to a short plan and told as a transcript.
    """
    from diloco.simulate.virtual import search

    choice = search.SeedOptions(policy, without_majority, speeds=speeds, size=size)
    given = {"--seed": seed is not None, "--seeds": seeds is not None, "--plan": plan is not None, "--planted": planted}
    asked = [option for option, there in given.items() if there]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do not go together", "give one of them")
    if (plan or planted) and choice != search.SeedOptions():
        cause = f"--policy, --without-majority, --speeds and --size are for seeds, not for {asked[0]}"
        raise UsageError(cause, "leave them out, or give --seed or --seeds")
    raise_when_stopped()  # what was found until then is told
    choice.check()
    if file is not None and (file.suffix == ".toml" or not as_json):  # a contract, which must not be written over
        raise UsageError(f"virtual time does not read {file}", "leave it out; --json FILE writes a file")
    if seeds is None and (jobs or until_found):
        raise UsageError(f"{'--jobs' if jobs else '--until-found'} is for many seeds", "add --seeds A:B")
    if planted:
        table = list(search.catch_planted(PLANTED_SEEDS))
        lines = [f"{caught.bug:16} {caught.seeds or 'not noticed':>6}  {caught.violation}" for caught in table]
        _print_or_write(lines, [asdict(caught) for caught in table], as_json, file)
        raise Exit(0 if all(caught.seeds for caught in table) else 1)
    if seeds is not None:
        report = search.search(search.read_seeds(seeds), choice, _print_tally, jobs, until_found)
        _print_or_write(search.report_lines(report), report, as_json, file)
        raise Exit(130 if report["interrupted"] else 1 if report["violations"] else 0)
    outcome = search.narrate(search.read_plan(plan) if plan else choice.draw(seed or 0))
    if outcome.violation:
        print(f"{outcome.violation}\nshrinking ...", file=sys.stderr)
        outcome = search.explain(outcome.plan)
    _print_or_write(search.outcome_lines(outcome), search.outcome_json(outcome), as_json, file)
    raise Exit(1 if outcome.violation else 0)


def _print_tally(done: int, total: int, violations: int) -> None:
    text = f"{done:,} of {total:,} seeds, {violations} violations"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} " + ("\n" if done >= total else ""))
    elif done >= total or done % 1000 == 0:
        sys.stderr.write(f"{text}\n")


def _print_or_write(lines: Sequence[str], tree: object, as_json: bool, file: Path | None) -> None:
    """Print a command's text for people or JSON for programs; both with a file for the JSON. Raises UsageError then."""
    print(json.dumps(tree, indent=2) if as_json and file is None else "\n".join(lines))
    write_json(file, tree)
