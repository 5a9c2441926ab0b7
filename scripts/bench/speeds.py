"""The throughput of peers of different speeds, and the time that they wait: async beside sync, with real processes.

    scripts/bench-speeds                                  1,1,1,0.25: about 5 minutes
    scripts/bench-speeds --speeds 1,0.5,0.1 --rounds 10 --json speeds.json
    scripts/bench-speeds --set inner.sized_by=contract    any key of contract or site

`diloco simulate --async --speeds ... --compare sync`: one `diloco peer` each on loopback. An inner step is a training
step of a small model, filled up to `--step-s` by sleeping, so that it is as long on every machine, as an accelerator's
is. Both train the same tokens; the first `--start` versions of the asynchronous run are as under sync. Its peers do
as many steps as their speed has room for (`inner.sized_by`), those of sync all do H. A second asynchronous run trains
`--more` times the tokens, for the time until sync's loss: which of two runs ends lower at equal tokens is chance.

    tokens/s     committed, from the first version to the last that a peer trained for, the common start left out
    of alone     of the sum of what the peers get done in the time of their inner steps alone
    waited       share of its time, after the start, that a peer waited for the exchange: the largest of all peers
    held-out     at the end, nats per token
    time         from the first version to the end, in seconds
    to its loss  seconds until the held-out loss was as low as that of sync at its end
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from diloco.observe.run_folder import Point, RunFolder, peer_times, read_run, read_state, timed_reports
from diloco.observe.run_state import Version

TOKENS_PER_STEP = 8 * 64
HEADER = ("policy", "tokens/s", "of alone", "waited", "held-out", "time", "to its loss")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    policy: str
    tokens_per_s: float
    of_alone: float
    waited: float
    waited_by_peer: dict[str, float]
    val_loss: float
    time_s: float
    time_to_loss_s: float | None


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        out = options.out or root / "out"
        longer = out.with_name(f"{out.name}-more")
        for folder, times, more in ((out, 1.0, ("--compare", "sync")), (longer, options.more, ())):
            contract = root / "speeds.toml"
            contract.write_text(contract_of(options, times))
            command = [sys.executable, "-m", "diloco", "simulate", str(contract), "--async", "--speeds", options.speeds]
            command += ["--out", str(folder), *more]
            settings = (f"device.step_s={options.step_s}", "storage.checkpoint_every=0", *options.overrides)
            command += [part for text in settings for part in ("--set", text)]
            done = subprocess.run(command, stdout=sys.stderr)
            if done.returncode:
                return done.returncode
        rows = rows_of({"async": out, f"async, {options.more:g} x tokens": longer, "sync": out / "sync"}, options.start)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", default="1,1,1,0.25", help="of each peer (1,1,1,0.25)")
    parser.add_argument("--rounds", type=int, default=30, help="of all peers: tokens of the run (30)")
    parser.add_argument("--start", type=int, default=6, help="versions that close as under sync (6)")
    parser.add_argument("--steps", type=int, default=16, help="H (16)")
    parser.add_argument("--step-s", type=float, default=0.06, help="seconds of an inner step at speed 1 (0.06)")
    parser.add_argument("--more", type=float, default=1.3, help="tokens of the second async run, of the first's (1.3)")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, help="keep the runs and their reports there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    return parser.parse_args()


def contract_of(options: argparse.Namespace, times: float) -> str:
    peers = len(options.speeds.split(","))
    return f"""
[run]
name = "speeds"
total_tokens = {int(times * options.rounds * peers * options.steps * TOKENS_PER_STEP)}
[membership]
sync_versions = {options.start}
grace_s = 0.0
backlog_versions = 32
[data]
sequence_length = 64
[model]            # 0.1M parameters: a step takes 5 to 10 ms of a core
layers = 2
dim = 64
heads = 2
[inner]
steps = {options.steps}
sized_by = "speed"
batch_size = 8
lr = 2e-3
betas = [0.9, 0.99]
warmup = 0.08
final_lr = 0.05
[outer]
lr = 0.7
momentum = 0.7
warmup_steps = {options.start}
[sync]
overlap = {max(options.steps // 4, 1)}
[eval]
every_versions = 3
sequences = 64
"""


def rows_of(folders: Mapping[str, Path], start: int) -> list[Row]:
    goal = read_run(folders["sync"]).curves[0].held_out[-1].loss
    return [row_of(policy, read_run(folder), folder, start, goal) for policy, folder in folders.items()]


def row_of(policy: str, run: RunFolder, folder: Path, start: int, goal: float) -> Row:
    trained = trained_for([version for version in run.versions if version.version >= start])
    there = {version.version for version in trained[1:]}  # after the first of them, up to the last
    reports = timed_reports(read_state(sorted(folder.glob("p*/events.jsonl"))))
    spent = peer_times(report for report in reports if report.event.version in there)
    rate = (trained[-1].tokens - trained[0].tokens) / (trained[-1].at_s - trained[0].at_s)
    waited = {time.peer: time.waited_s / time.total_s for time in spent}
    began_s, held_out = run.versions[0].at_s, run.curves[0].held_out
    reached_s = time_of(held_out, goal)
    return Row(
        policy,
        rate,
        rate / sum(time.tokens / time.inner_s for time in spent),
        max(waited.values()),
        waited,
        held_out[-1].loss,
        run.versions[-1].at_s - began_s,
        None if reached_s is None else reached_s - began_s,
    )


def trained_for(versions: Sequence[Version]) -> list[Version]:
    """Without those of the final sync, for which nobody trains any more."""
    last = max(later.version for sooner, later in pairwise(versions) if later.tokens > sooner.tokens)
    return [version for version in versions if version.version < last]


def time_of(curve: Sequence[Point], loss: float) -> float | None:
    """When a curve was at a loss for the first time, between its points as on a straight line."""
    for sooner, later in pairwise(curve):
        if later.loss <= loss:
            share = (sooner.loss - loss) / (sooner.loss - later.loss)
            return sooner.wall_s + max(share, 0.0) * (later.wall_s - sooner.wall_s)
    return None


def table(rows: Sequence[Row]) -> str:
    cells = [HEADER, *map(cells_of, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def cells_of(row: Row) -> tuple[str, ...]:
    to_loss = "never" if row.time_to_loss_s is None else f"{row.time_to_loss_s:.1f}"
    return (
        row.policy, f"{row.tokens_per_s:,.0f}", f"{row.of_alone:.1%}", f"{row.waited:.1%}", f"{row.val_loss:.3f}",
        f"{row.time_s:.1f}", to_loss,
    )  # fmt: skip
