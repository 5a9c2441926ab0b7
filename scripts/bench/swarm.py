"""Many peers of different speeds that come and go: what each sends, holds and waits for, by how many they are.

    scripts/bench-swarm                          16, 64 and 256 peers of speeds 0.1 to 1, side by side: 10 minutes
    scripts/bench-swarm --peers 16,32            fewer: half a minute
    scripts/bench-swarm --policy sync --sized-by contract --overlap 0     beside which one sees what `async` brings
    scripts/bench-swarm --churn 1                everybody is hit once a minute

Whole peers in virtual time (`diloco.simulate.virtual.swarm`), on a model of 6,000 numbers: control messages are counted
in bytes, as they are sealed; streams in sizes S of an encoded contribution, as if there were parts enough for all.
In the end all must be together again, every invariant must hold, and `diloco replay` must make every version again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> int:
    options = parse()
    from diloco.base.errors import UsageError
    from diloco.simulate.virtual.oracle.gate import Violation

    results: list[dict[str, Any]] = []
    try:
        results.extend(measure(options, peers) for peers in options.peers)
    except (UsageError, Violation) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if len(results) == len(options.peers) else 130


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=counts, default=[16, 64, 256], help="how many, with commas (16,64,256)")
    parser.add_argument("--policy", choices=("async", "quorum", "sync"), default="async", help="(async)")
    parser.add_argument("--speeds", default="0.1:1", help="slowest and fastest (0.1:1)")
    parser.add_argument("--sized-by", choices=("speed", "contract"), default="speed", help="inner.sized_by (speed)")
    parser.add_argument("--churn", type=float, default=0.1, help="share of the peers that is hit in a minute (0.1)")
    parser.add_argument("--overlap", type=float, default=1.0, help="share of a round that hides the exchange (1)")
    parser.add_argument("--round", type=float, default=2.0, help="seconds of a round of the fastest (2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time that are measured (30)")
    parser.add_argument("--seed", type=int, default=0, help="of speeds, churn and the network (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def counts(text: str) -> list[int]:
    """`16,64`. Raises ValueError, of which argparse makes an error."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 2:
        raise ValueError("a swarm is 2 at least")
    return found


def measure(options: argparse.Namespace, peers: int) -> dict[str, Any]:
    from diloco.simulate.virtual.search import speed_range
    from diloco.simulate.virtual.swarm import SwarmOptions, measure_swarm

    started_s = time.monotonic()
    result = measure_swarm(
        SwarmOptions(
            peers,
            seconds=options.seconds,
            speeds=speed_range(options.speeds),
            churn_per_minute=options.churn,
            policy=options.policy,
            sized_by=options.sized_by,
            round_s=options.round,
            overlap=options.overlap,
            seed=options.seed,
        )
    )
    print(f"{peers} peers: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A row for each figure, a column for each number of peers."""
    lines = [f"{'peers':46}" + "".join(f"{result['peers']:>12}" for result in results)]
    for title, cell in ROWS.items():
        lines.append(f"{title:46}" + "".join(f"{cell(result):>12}" for result in results))
    return "\n".join(lines)


def share(value: float) -> str:
    return f"{100 * value:.2f} %"


ROWS: dict[str, Callable[[dict[str, Any]], object]] = {
    "versions closed, per second": lambda r: f"{r['versions_per_s']:.2f}",
    "commits that only change members": lambda r: r["view_commits"],
    "contributions in a version, least": lambda r: f"{r['contributors']:.1f}, {r['contributors_least']}",
    "uploaded for one by its contributors, most": lambda r: f"{r['upload_sizes']:.2f} S, {r['upload_sizes_most']:.1f}",
    "versions since a peer was last counted, most": lambda r: f"{r['staleness']:.1f}, {r['staleness_most']}",
    "waited, share of the time": lambda r: share(r["waited_share"]),
    "  the one that waited most": lambda r: share(r["waited_share_most"]),
    "tokens committed of all trained, discarded": lambda r: (
        f"{100 * r['tokens_committed_share']:.1f}, {100 * r['tokens_discarded_share']:.1f} %"
    ),
    "control messages sent, per peer and second": lambda r: f"{r['messages_per_peer_per_s']:.0f}",
    "  bytes": lambda r: f"{r['bytes_per_peer_per_s']:,}",
    "  bytes of heartbeats": lambda r: f"{r['bytes_per_peer_per_s_by_kind'].get('Heartbeat', 0):,}",
    "  bytes of the one that sent most": lambda r: f"{r['bytes_of_the_busiest_per_s']:,}",
    "  bytes, per version": lambda r: f"{r['bytes_per_peer_per_version']:,}",
    "size of a commit, bytes": lambda r: f"{r['commit_bytes']:,}",
    "encoded means held, at most": lambda r: r["held"]["means"],
    "versions kept, at most": lambda r: r["held"]["backlog"],
    "peers known, half-way and in the end": lambda r: f"{r['held_half_way']['roster']}, {r['held']['roster']}",
    "streams and events waiting, at most": lambda r: r["held"]["tasks"] + r["held"]["to do"],
    "faults": lambda r: sum(n for kind, n in r["faults"].items() if " " not in kind),
}
