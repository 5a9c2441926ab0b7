"""Time and memory of a sync by the number of ranks of an island that exchange: two islands, every rank behind a shaped
link of its own (network namespaces: root, iproute2).

    scripts/bench-lanes                                   4 ranks, lanes 1, 2, 4, at 1.5 Mbit/s each: 5 minutes
    scripts/bench-lanes --ranks 2 --lanes 1,2 --link-mbit 20 --json lanes.json

Both islands are `diloco peer` with FSDP2 over their ranks (gloo, over a network that is not shaped), as on two clusters
whose nodes have an uplink each. `network.lanes` says how many of the ranks hold the outer state and exchange.

    lanes        ranks of each island that exchange, each over its own link
    sync s       from the measuring of a pseudo-gradient to the version that counts it: median of the versions
    of 1         of the first row's
    limit s      `2 (N - 1) / N x payload / bandwidth`, over the links of all lanes together
    outer MB     of the outer state that the rank with the most of it holds
    extra MB     the most that a rank had in RAM until its second sync was over, beyond the most that it had before its
                 first one began, when inner steps were done already: of the rank with the most, in the island that
                 joined; the first use of gRPC, TLS and threads is in it, so compare two sizes of model
    serving MB   the same in the island that founded the run
    fragment MB  of a fragment in fp32
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.base.readable import aligned
from diloco.observe.event_log import read_lines
from scripts.bench import netns

WARM_UPS = 2
"""Versions: fresh memory is handed out in the first, and torch gets to know the collectives."""
DEADLINE_S = 400.0
CONTRACT = """
[run]
name = "lanes"
total_tokens = 1000000000
[membership]
start_peers = 2
match_deadline_s = 60.0
round_deadline_s = 200.0
[data]
sequence_length = 16
[model]
layers = {layers}
dim = {dim}
heads = 4
[inner]
steps = 2
batch_size = 8
warmup = 0.0
[codec]
name = "int8"
[eval]
every_versions = 0
sequences = 8
"""


@dataclass(frozen=True)
class Row:
    """The measurements of one setting."""

    lanes: int
    ranks: int
    link_mbit: float
    params: int
    seconds: float
    limit_seconds: float
    ratio: float
    outer_bytes: int
    extra_bytes: int
    serving_bytes: int
    fragment_bytes: int
    versions: int


class Rank:
    """One rank of an island, in a namespace of its own."""

    def __init__(self, star: netns.Star, place: int, first: int, ranks: int, folder: Path, how: Sequence[str]) -> None:
        rank = place - first
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": star.local_address(first), "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": netns.LOCAL_INTERFACE, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            *star.inside(place), sys.executable, "-m", "diloco", "peer", *how,
            "--dir", str(folder), "--insecure", "--set", f"network.listen={star.address(place)}:0",
        ]  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.log = (folder / f"rank-{rank}.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def resident_bytes(self) -> int:
        """Resident memory of the process now; 0 when it is gone."""
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon"))


def measure(options: argparse.Namespace, lanes: int, folder: Path) -> tuple[list[float], list[int], int]:
    """Seconds of the syncs, extra bytes of each rank (those of the founder first), and the model's parameters."""
    ranks = options.ranks
    contract = folder / "contract.toml"
    contract.write_text(CONTRACT.format(layers=options.layers, dim=options.dim))
    common = ["--set", f"mesh.shard={'parameters' if ranks > 1 else 'none'}", "--set", f"network.lanes={lanes}",
              "--set", f"device.outer_step={options.outer_step}",
              "--set", "storage.checkpoint_every=0", "--set", "device.threads=1",
              "--set", "timeouts.stall_s=15", "--set", "timeouts.suspect_s=15"]  # fmt: skip
    with netns.Star(2 * ranks, options.link_mbit, 0.0, netns.congestion_controls()[0]) as star:
        star.add_local_network()
        everybody: list[Rank] = []
        try:
            here, there = folder / "here", folder / "there"
            everybody += [Rank(star, place, 0, ranks, here, [str(contract), *common]) for place in range(ranks)]
            ticket = wait_for(lambda: ticket_of(here), everybody, here)
            join = ["--join", ticket, *common]
            everybody += [Rank(star, place, ranks, ranks, there, join) for place in range(ranks, 2 * ranks)]
            samples: list[tuple[float, list[int]]] = []

            def done() -> bool:
                samples.append((time.time(), [one.resident_bytes() for one in everybody]))
                return bool(len(versions(here)) >= WARM_UPS + options.versions)

            wait_for(done, everybody, here)
        finally:
            for one in everybody:
                one.process.send_signal(signal.SIGKILL)
                one.process.wait()
                one.log.close()
    closed = versions(here)
    seconds = [event["flight_s"] for event in closed[WARM_UPS:]]
    before = [sizes for at, sizes in samples if at < closed[0]["time"] - closed[0]["flight_s"]]
    within = [sizes for at, sizes in samples if at <= closed[1]["time"]]
    extra = [
        max(after) - max(early)
        for early, after in zip(zip(*before, strict=True), zip(*within, strict=True), strict=True)
    ]
    parameters = next(event["parameters"] for event in read_lines(here / "events.jsonl") if event["kind"] == "start")
    return seconds, extra, parameters


def versions(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    found = read_lines(path) if path.exists() else []
    return [event for event in found if event["kind"] == "version" and len(event["counted"]) == 2]


def ticket_of(folder: Path) -> str:
    card = folder / "peer.json"
    return str(json.loads(card.read_text())["ticket"]) if card.exists() else ""


def wait_for(found: Any, everybody: Sequence[Rank], folder: Path) -> Any:
    """Call `found` until it returns something, and return that. Ends the program when a rank ended, or time is up."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        value = found()
        if value:
            return value
        ended = [one for one in everybody if one.process.poll() is not None]
        if ended:
            sys.exit(f"a rank ended with {ended[0].process.returncode}: {Path(ended[0].log.name).read_text()[-2000:]}")
        time.sleep(0.2)
    sys.exit(f"not within {DEADLINE_S:g} s; see {folder}")


def rows(options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    for lanes in options.lanes:
        with tempfile.TemporaryDirectory() as folder:
            seconds, extra, parameters = measure(options, lanes, Path(folder))
        middle = statistics.median(seconds)
        print(f"{lanes} of {options.ranks} ranks: {middle:.2f} s", file=sys.stderr, flush=True)
        limit = parameters * 8 / (options.link_mbit * 1e6 * lanes)  # 2 peers: one payload of a byte per parameter
        first = found[0].seconds if found else middle
        outer = 8 * -(-parameters // lanes)
        joined, serving = max(extra[options.ranks :]), max(extra[: options.ranks])
        sizes = (outer, joined, serving, 4 * parameters)
        times = (middle, limit, middle / first)
        found.append(Row(lanes, options.ranks, options.link_mbit, parameters, *times, *sizes, len(seconds)))
    return found


def table(found: Sequence[Row]) -> str:
    lines = [["lanes", "sync s", "of 1", "limit s", "outer MB", "extra MB", "serving MB", "fragment MB"]]
    for row in found:
        sizes = (row.outer_bytes, row.extra_bytes, row.serving_bytes, row.fragment_bytes)
        times = [f"{row.seconds:.2f}", f"{row.ratio:.2f}", f"{row.limit_seconds:.2f}"]
        lines.append([str(row.lanes), *times, *(f"{size / 1e6:.1f}" for size in sizes)])
    return "\n".join(aligned(lines))


def counts(text: str) -> list[int]:
    """Numbers with commas between them, as of `--lanes`."""
    numbers = list(map(int, text.split(",")))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of each island (default: %(default)s)")
    parser.add_argument(
        "--lanes", type=counts, default="1,2,4", help="settings of network.lanes (default: %(default)s)"
    )
    parser.add_argument("--link-mbit", type=float, default=1.5, help="of each rank (default: %(default)s)")
    outer_steps = ("auto", "ahead", "in_place")
    parser.add_argument("--outer-step", choices=outer_steps, default="auto", help="device.outer_step of all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--versions", type=int, default=2, help="measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        found = rows(options)
    except netns.NotPermitted as error:
        sys.exit(f"bench-lanes: no network namespaces can be made here: {error}")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
