"""The cost of liars to the loss, and of each rule of `outer.aggregation` where nobody lies.

    scripts/bench-robust                                         1 of 4 and 2 of 8 lie, 3 seeds: two hours on a core
    scripts/bench-robust --jobs 2 --rules centred --attacks flip:10 --peers 4

The runs are those of `scripts/bench-quality`, shorter: int8, 15 rounds of H = 8. The last quarter of the peers lie.
Each part's owner folds what they make of it, which may take all honest contributions to the part into account: so much
no real liar knows. `membership.max_norm_ratio` is off, which would put some of them out of the run.

    alone     the honest peers train without the others: what a defence can reach
    none      nobody lies
    flip:X    the liar's own contribution times -X
    alie:X    the honest mean less X standard deviations of each value (A Little Is Enough, arXiv 1902.06156)
    ipm:X     the honest mean times -X (inner product manipulation, arXiv 1903.03936)

Progress goes to stderr, the table to stdout: the loss (held-out, nats per token), mean over the seeds, and its
difference to the mean of as many honest peers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from statistics import mean

import torch
from torch import Tensor

from diloco.compress import Codec
from diloco.exchange import work
from diloco.outer.average import Terms, fold
from diloco.outer.robust import ROBUST, Rule
from scripts.bench.quality_bench import positive
from scripts.bench.quality_rows import Row, Scale, Sections, contract_of
from scripts.bench.quality_run import get_ready, train

ATTACKS = ("none", "flip:1", "flip:10", "flip:99", "alie:1.5", "ipm:0.5", "ipm:10")
HONEST, ALONE = "none", "alone"
ROUNDS = 15
LIARS = 4
"""One of so many peers lies."""
Run = tuple[int, str, str, int]
"""Peers, rule, attack, seed."""


def main() -> int:
    options = parse()
    losses: dict[Run, float] = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), get_ready) as pool:
        runs = {pool.submit(loss_of, run, options.small): run for run in wanted(options)}
        for done, future in enumerate(as_completed(runs), start=1):
            losses[runs[future]] = future.result()
            print(f"[{done}/{len(runs)}] {runs[future]}: {future.result():.3f}", file=sys.stderr, flush=True)
    print(f"| peers | attack | {' | '.join(options.rules)} |\n|---|---|{'---|' * len(options.rules)}")
    for peers in options.peers:
        for attack in options.attacks:
            cells = (cell(losses, peers, rule, attack, options.seeds) for rule in options.rules)
            print(f"| {peers} | `{attack}` | {' | '.join(cells)} |")
    return 0


def wanted(options: argparse.Namespace) -> list[Run]:
    """All runs, the clean ones among them, seed by seed."""
    chosen = [(peers, rule, attack) for peers in options.peers for attack in options.attacks for rule in options.rules]
    clean = [(peers, "mean", HONEST) for peers in options.peers]
    return [(*one, seed) for seed in range(1, options.seeds + 1) for one in dict.fromkeys([*clean, *chosen])]


def cell(losses: dict[Run, float], peers: int, rule: str, attack: str, seeds: int) -> str:
    found = mean(losses[peers, rule, attack, seed] for seed in range(1, seeds + 1))
    clean = mean(losses[peers, "mean", HONEST, seed] for seed in range(1, seeds + 1))
    return f"{found:.3f} ({found / clean - 1:+.1%})"


def loss_of(run: Run, small: bool) -> float:
    """Held-out loss at the end of a run."""
    peers, rule, attack, seed = run
    honest = peers - peers // LIARS if attack == ALONE else peers
    layers, batch_size = (2, 4) if small else (4, 8)
    scale = Scale(layers, 64, 64, batch_size, steps=8, rounds=ROUNDS, peers=honest, heldout=256)
    changes: Sections = {
        "codec": {"name": "int8"},
        "outer": {"aggregation": rule},
        "membership": {"max_norm_ratio": 0.0},
    }
    contract = contract_of(Row("", changes), scale, seed)
    with lying(attack, peers // LIARS):
        return train(contract, honest, together=False).loss


@contextmanager
def lying(attack: str, liars: int) -> Iterator[None]:
    """The last contributors to each part lie meanwhile, in this process."""

    def folded(
        terms: Terms, elements: int, codec: Codec, ratio: float, tokens: Sequence[int], rule: Rule, clipped: list[int]
    ) -> bytes:
        values = torch.stack([codec.decode(payload, elements) for _, payload in terms])
        values[-liars:] = lies(attack, values[:-liars], values[-liars:])
        sent = [(weight, codec.encode(one)) for (weight, _), one in zip(terms, values, strict=True)]
        return fold(sent, elements, codec, ratio, tokens, rule, clipped)

    try:
        if attack not in (HONEST, ALONE):
            setattr(work, "fold", folded)  # noqa: B010
        yield
    finally:
        setattr(work, "fold", fold)  # noqa: B010


def lies(attack: str, honest: Tensor, own: Tensor) -> Tensor:
    """Values that liars send in place of their own, (liars, values); `honest`: those of all others."""
    name, _, strength = attack.partition(":")
    match name:
        case "flip":
            return own * -float(strength)
        case "alie":
            return (honest.mean(0) - float(strength) * honest.std(0)).expand_as(own)
        case "ipm":
            return (honest.mean(0) * -float(strength)).expand_as(own)
    raise ValueError(attack)


def parse() -> argparse.Namespace:
    def names(known: Collection[str]) -> Callable[[str], list[str]]:
        def parsed(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
            return text.split(",")

        return parsed

    rules = ["mean", *ROBUST]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=names(rules), default=rules, help="with commas (mean and all robust ones)")
    parser.add_argument("--attacks", type=names(ATTACKS), default=[*ATTACKS], help=f"with commas ({','.join(ATTACKS)})")
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8], help="a quarter of them lies (4 8)")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row (3)")
    parser.add_argument("--small", action="store_true", help="two layers, and half the batch: a quarter of the time")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, one core each (1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
