"""The cost of each codec and schedule in held-out loss, at equal tokens, beside DDP and DiLoCo in fp32.

    scripts/bench-quality                                  all rows, 3 seeds: 1 to 2 hours on one core
    scripts/bench-quality --jobs 2 --rows fp32,int4,eager  two runs at a time, only these
    scripts/bench-quality --steps 12 --batch 8 --json quality.json

A model of 0.23M parameters learns the source text of Python's standard library, from random weights, by 4 peers in one
process, on the line of a real run: only the network is left out. A seed decides about weights and the order of the
data, and all rows of a seed read the same blocks. Progress goes to stderr, the table to stdout; Ctrl-C prints the table
so far.

    loss         held-out, nats per token, of the anchor after the last sync: mean over the seeds
    spread       smallest and largest of the seeds
    to fp32      difference to `fp32`, mean of the seeds' own differences
    bits         of a parameter on the wire of one sync, as one peer encodes it, zstd included
    bytes/token  that a peer sends for each token it trains: contributions and means; `ddp`: fp32 in a ring

`--rows` takes patterns, too: `--rows 'stream*,fp32'`.

A model this small, and so few rounds, show orders and not sizes: seeds alone differ by 1 %, and what needs long runs
(sparsity below 10 %, a mean that is a round old) looks worse than it is.
"""

from __future__ import annotations

from statistics import mean

from scripts.bench.quality_bench import Results, bench, loss_cells, options_of
from scripts.bench.quality_rows import Row, rows

REFERENCE = "fp32"
HEADER = ("row", "loss", "spread", "to fp32", "bits", "bytes/token", "")


def main() -> int:
    return bench(options_of(__doc__, rows), HEADER, cells)


def cells(name: str, row: Row, results: Results) -> tuple[str, ...]:
    runs = results[name].values()
    bits, sent = mean(run.bits for run in runs), mean(run.bytes_per_token for run in runs)
    return f"`{name}`", *loss_cells(name, results, REFERENCE), f"{bits:.2f}", f"{sent:,.1f}", row.about
