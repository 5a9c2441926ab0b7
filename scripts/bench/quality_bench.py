"""The part that `scripts/bench-quality` and `scripts/bench-async` share: many runs on some cores, and a table."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import mean

from diloco.base.errors import DilocoError
from scripts.bench.quality_rows import QUICK, USUAL, Row, Scale, contract_of
from scripts.bench.quality_run import Outcome, get_ready, train

Results = Mapping[str, Mapping[int, Outcome]]
"""By row, then by seed."""
Cells = Callable[[str, Row, Results], tuple[str, ...]]
"""A line of the table: of the row of that name, which has results."""


def options_of(description: str, rows: Callable[[int], Mapping[str, Row]]) -> argparse.Namespace:
    """The command line, with `scale` and the `chosen` rows. `rows`: all of them, by H."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="LIST", help=f"of {','.join(rows(1))}, or patterns (all)")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row (3)")
    parser.add_argument("--rounds", type=positive, help=f"of H steps ({USUAL.rounds})")
    parser.add_argument("--steps", type=positive, help=f"H, a multiple of 4 ({USUAL.steps})")
    parser.add_argument("--batch", type=positive, help=f"sequences of an inner step of a peer ({USUAL.batch_size})")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, one core each (1)")
    for_report = "write all runs there, too, as they end, and the table for `diloco report --table`"
    parser.add_argument("--json", type=Path, metavar="FILE", help=for_report)
    parser.add_argument("--quick", action="store_true", help="tiny runs of a second, to try the bench itself")
    options = parser.parse_args()
    scale = QUICK if options.quick else USUAL
    asked = {"rounds": options.rounds, "steps": options.steps, "batch_size": options.batch}
    options.title = description.splitlines()[0]
    options.scale = replace(scale, **{name: value for name, value in asked.items() if value})
    if options.scale.steps % 4:
        parser.error("--steps must be a multiple of 4: rounds are cut into four")
    there = rows(options.scale.steps)
    patterns = options.rows.split(",") if options.rows else ["*"]
    if unknown := [text for text in patterns if not any(fnmatchcase(name, text) for name in there)]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(there)}")
    options.chosen = {
        name: row for name, row in there.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def bench(options: argparse.Namespace, header: Sequence[str], cells: Cells) -> int:
    """Run everything, and print the table, also after Ctrl-C. Returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the table is told
    scale, chosen = options.scale, options.chosen
    results: dict[str, dict[int, Outcome]] = {name: {} for name in chosen}
    status = 0
    try:
        for name, seed, outcome in _outcomes(chosen, scale, options.seeds, options.jobs):
            results[name][seed] = outcome
            if options.json:
                tree = _as_json(results, scale) | {"table": _as_table(options.title, chosen, results, header, cells)}
                options.json.write_text(json.dumps(tree, indent=1) + "\n")
    except KeyboardInterrupt:
        status = 130
    print(table(chosen, results, header, cells))
    return status


def _outcomes(chosen: Mapping[str, Row], scale: Scale, seeds: int, jobs: int) -> Iterator[tuple[str, int, Outcome]]:
    """(row, seed, outcome) of all runs as they end, seed by seed, so that early results compare all rows."""
    started_s = time.monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn"), get_ready) as pool:
        try:
            runs = {
                pool.submit(
                    train, contract_of(row, scale, seed), scale.peers, row.together, row.speeds[-scale.peers :]
                ): (name, seed)
                for seed in range(1, seeds + 1)
                for name, row in chosen.items()
            }
            for done, run in enumerate(as_completed(runs), start=1):
                name, seed = runs[run]
                left_s = (time.monotonic() - started_s) * (len(runs) - done) / done
                try:
                    outcome = run.result()
                except DilocoError as error:  # this machine cannot: an old torch has no Muon
                    _tell(f"{name} is left out: {error}")
                    continue
                yield name, seed, outcome  # first: a Ctrl-C after the line below is said must find it in the table
                _tell(f"[{done}/{len(runs)}] {name}, seed {seed}: {outcome.loss:.3f}; {_duration(left_s)} left")
        except BaseException:
            for worker in active_children():
                worker.terminate()
            raise


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _as_json(results: Results, scale: Scale) -> dict[str, object]:
    runs = [
        {"row": name, "seed": seed, **asdict(run)} for name, seeds in results.items() for seed, run in seeds.items()
    ]
    return {"scale": asdict(scale), "runs": runs}


def _as_table(
    title: str, chosen: Mapping[str, Row], results: Results, header: Sequence[str], cells: Cells
) -> dict[str, object]:
    """As `diloco report --table` reads it."""
    return {"title": title, "header": header, "rows": _lines(chosen, results, cells)}


# ---------------------------------------------------------------- the table


def table(chosen: Mapping[str, Row], results: Results, header: Sequence[str], cells: Cells) -> str:
    """As Markdown; rows without a run are left out."""
    lines = [tuple(header), ("---",) * len(header), *_lines(chosen, results, cells)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(_line_of(line, widths) for line in lines)


def _lines(chosen: Mapping[str, Row], results: Results, cells: Cells) -> list[tuple[str, ...]]:
    return [cells(name, row, results) for name, row in chosen.items() if results[name]]


def _line_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width, "-" if cell == "---" else " ") for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def loss_cells(name: str, results: Results, reference: str) -> tuple[str, str, str]:
    """Mean loss, smallest and largest, and the mean of the seeds' own relative differences to the reference's."""
    losses = [run.loss for run in results[name].values()]
    others = results.get(reference, {})
    both = [run.loss / others[seed].loss - 1 for seed, run in results[name].items() if seed in others]
    return (
        f"{mean(losses):.3f}",
        f"{min(losses):.3f} .. {max(losses):.3f}" if len(losses) > 1 else "",
        f"{mean(both):+.1%}" if both and name != reference else "",
    )
