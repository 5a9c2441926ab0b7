"""The cost of asynchrony in held-out loss at equal committed tokens, and the time that it saves.

    scripts/bench-async                                    all rows, 3 seeds: about an hour on one core
    scripts/bench-async --jobs 2 --rows 'sync*,delayed*'   two runs at a time, only these
    scripts/bench-async --steps 12 --batch 8 --json async.json

Model, data and line are those of `scripts/bench-quality`, with 4 peers of speeds 1, 0.93, 0.47 and 0.26, in virtual
time. `sync` waits for the slowest in every round; under policy `async` a version closes with each contribution, or in
rows with `window` counts who comes while the first one's overlapped steps last. The first versions of all rows but
`*-scratch` close as under `sync`. In `gossip` there are swaps instead, each of two peers; the loss is that of the final
average. Progress goes to stderr, the table to stdout; Ctrl-C prints the table so far.

    loss         held-out, nats per token, of the anchor at the end: mean over the seeds
    spread       smallest and largest of the seeds
    to sync      difference to `sync`, mean of the seeds' own differences
    time         until all tokens are committed, of what `sync` takes; of `gossip`, until nobody trains any more
    versions     closed, or swaps
    counts       contributions of a version after the start, mean
    stale        versions that closed while a contribution was made, mean
"""

from __future__ import annotations

from statistics import mean

from scripts.bench.quality_bench import Results, bench, loss_cells, options_of
from scripts.bench.quality_rows import Row, async_rows

REFERENCE = "sync"
HEADER = ("row", "loss", "spread", "to sync", "time", "versions", "counts", "stale", "")


def main() -> int:
    return bench(options_of(__doc__, async_rows), HEADER, cells)


def cells(name: str, row: Row, results: Results) -> tuple[str, ...]:
    runs, others = results[name], results.get(REFERENCE, {})
    both = [run.time / others[seed].time for seed, run in runs.items() if seed in others]
    return (
        f"`{name}`",
        *loss_cells(name, results, REFERENCE),
        f"{mean(both):.2f}" if both else "",
        f"{mean(run.versions for run in runs.values()):.0f}",
        f"{mean(run.counted for run in runs.values()):.1f}",
        f"{mean(run.staleness for run in runs.values()):.1f}",
        row.about,
    )
