"""Tokens/s of training while syncs are in flight, beside training that never syncs.

    scripts/bench-overlap                                       all rows: about 5 minutes
    scripts/bench-overlap --rows none,plain,stream4 --rounds 10 --json overlap.json
    scripts/bench-overlap --cost 0.5                            on a link on which a plain sync takes half of the time

Two real peers, a process each, through `diloco.found`, `diloco.join` and `Run.step`. An inner step is a training step
of a model of 1M parameters, filled up to `--step-s` by sleeping: so that it is as long on every machine, and leaves the
cores to the exchange, as an accelerator does. What a peer sends goes through a link of its own that is as slow as it
must be for a plain sync to take the share `--cost` of the time: between network namespaces as root, else by a relay.

    tokens/s   of both peers
    share      of the tokens/s of `none`
    waiting    seconds in each round of H steps that `Run.step` keeps the training thread: waiting for the network,
               pseudo-gradient, encoding, outer step and merge
    late       seconds in each round by which steps took longer than `--step-s`, where the exchange is on their cores
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import diloco
from diloco.config.contract import Contract, InnerSection, ModelSection
from diloco.config.site import Site
from diloco.inner.loop import InnerLoop
from diloco.models import build_model, count_parameters
from diloco.observe.events import RoundSkipped
from diloco.simulate.chaos.fleet import free_port
from diloco.simulate.chaos.network import ChaosNetwork, Rule
from scripts.bench.netns import NotPermitted, Star, congestion_controls
from scripts.bench.sync_group import Failed, Peer
from scripts.bench.sync_peer import take_stdout, tell
from scripts.environment import our_code

MODEL = ModelSection(layers=4, dim=144, heads=4)
VOCAB = 256
INNER = InnerSection(batch_size=2, lr=1e-3)
SEQUENCE = 32
PEERS = 2
BYTES_PER_PARAMETER = 1 + 4 / 256
"""int8: a code, and a scale for each block."""
HEADERS = 1.046
"""Bytes on a link for each byte of TCP: Ethernet, IP and TCP headers."""
WARM_ROUNDS = 2
START_S = 120.0
ROWS = ("none", "plain", "overlap", "stream2", "stream4", "eager")
HEADER = f"{'':<9}{'sync':<38}{'tokens/s':>9}{'share':>8}{'waiting':>10}{'late':>9}"


@dataclass(frozen=True)
class Task:
    """The settings of one peer."""

    sync: Mapping[str, Any] | None
    """The contract's `[sync]`; None: train alone."""
    steps: int
    """H."""
    rounds: int
    step_s: float
    rank: int = 0
    listen: str = ""
    advertise: str | None = None
    meet: str = ""
    """The first peer's address; empty for itself."""
    scratch: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    sync: Mapping[str, Any] | None
    tokens_per_s: float
    share: float | None
    waiting_s_per_round: float
    late_s_per_round: float
    link_mbit: float


def main() -> int:
    if sys.argv[1:2] == ["--peer"]:
        return be_peer(Task(**json.loads(sys.argv[2])))
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: everything is cleaned up
    link_mbit = mbit_of(options)
    print(f"link {link_mbit:.2f} Mbit/s, H = {options.steps} steps of {options.step_s:g} s, {options.network}")
    print(HEADER, flush=True)
    rows: list[Row] = []
    try:
        for name in options.rows:
            rows.append(measure(name, link_mbit, rows, options))
            print(line(rows[-1]), flush=True)
    except Failed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        return 130
    finally:
        if options.json:
            about = {"steps": options.steps, "step_s": options.step_s, "rounds": options.rounds, "cost": options.cost}
            options.json.write_text(json.dumps({**about, "rows": [*map(asdict, rows)]}, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), metavar="LIST", help=f"of {','.join(ROWS)} (all)")
    parser.add_argument("--rounds", type=int, default=8, help=f"measured, after {WARM_ROUNDS} to warm up (8)")
    parser.add_argument("--steps", type=int, default=20, help="H, a multiple of 4 (20)")
    parser.add_argument("--step-s", type=float, default=0.1, help="of one inner step (0.1)")
    parser.add_argument("--cost", type=float, default=0.3, help="share of the time that a plain sync takes (0.3)")
    parser.add_argument("--network", choices=["namespaces", "relay"], help="namespaces, if this is root's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.steps % 4 or not 0 < options.cost < 1:
        parser.error("--steps must be a multiple of 4, and --cost between 0 and 1")
    options.network = options.network or usual_network()
    return options


def usual_network() -> str:
    try:
        with namespaces(100.0):
            return "namespaces"
    except NotPermitted as error:
        print(f"no network namespaces here, so a relay: {error}", file=sys.stderr)
        return "relay"


def mbit_of(options: argparse.Namespace) -> float:
    """The link on which a plain sync, of which each peer sends and receives its payload once, takes its share."""
    payload = count_parameters(build_model(MODEL, VOCAB, 0)) * BYTES_PER_PARAMETER * HEADERS
    return 2 * (PEERS - 1) / PEERS * payload * 8 / sync_seconds(options) / 1e6


def sync_seconds(options: argparse.Namespace) -> float:
    """Seconds of a plain sync."""
    seconds: float = options.steps * options.step_s * options.cost / (1 - options.cost)
    return seconds


def sync_of(name: str, options: argparse.Namespace) -> Mapping[str, Any] | None:
    """The `[sync]` of a row. Overlap is as long as the bytes take, and one step more for all else."""
    steps: int = options.steps
    steps_in_flight: float = sync_seconds(options) / options.step_s

    def overlap(fragments: int) -> int:
        return min(math.ceil(steps_in_flight / fragments) + 1, steps // fragments)

    match name:
        case "none":
            return None
        case "plain":
            return {}
        case "overlap":
            return {"overlap": overlap(1)}
        case "eager":
            return {"overlap": steps, "merge": "eager"}
    fragments = int(name.removeprefix("stream"))
    return {"fragments": fragments, "overlap": overlap(fragments), "merge": "mix"}


# ---------------------------------------------------------------- the two peers


def measure(name: str, link_mbit: float, rows: Sequence[Row], options: argparse.Namespace) -> Row:
    """One row. Raises Failed."""
    task = Task(sync_of(name, options), options.steps, options.rounds, options.step_s)
    network = namespaces(link_mbit) if options.network == "namespaces" else relay(link_mbit)
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as scratch:
        answers = run(task, network, Path(scratch), options)
    tokens_per_s = sum(answer["tokens"] / answer["seconds"] for answer in answers)
    alone = next((row.tokens_per_s for row in rows if row.sync is None), None)
    return Row(
        name,
        task.sync,
        round(tokens_per_s, 1),
        alone and round(tokens_per_s / alone, 4),
        mean([answer["waiting_s"] for answer in answers]) / options.rounds,
        mean([answer["late_s"] for answer in answers]) / options.rounds,
        round(link_mbit, 3),
    )


@dataclass(frozen=True)
class Seat:
    """Where one peer is in the network."""

    inside: Sequence[str]
    """Words to put before its command."""
    listen: str
    advertise: str | None = None


@contextmanager
def namespaces(mbit: float) -> Iterator[list[Seat]]:
    """Raises NotPermitted."""
    with Star(PEERS, mbit, 0.0, congestion_controls()[0]) as star:
        yield [Seat(star.inside(rank), f"{star.address(rank)}:0") for rank in range(PEERS)]


@contextmanager
def relay(mbit: float) -> Iterator[list[Seat]]:
    """Doors on loopback, through which bytes come as slowly."""
    network = ChaosNetwork(seed=0)
    try:
        network.impose([Rule(None, None, bytes_per_s=mbit * 1e6 / 8)])
        ports = [free_port() for _ in range(PEERS)]
        yield [Seat((), f"127.0.0.1:{port}", network.address(f"p{rank}", port)) for rank, port in enumerate(ports)]
    finally:
        network.close()


def run(
    task: Task, network: AbstractContextManager[list[Seat]], scratch: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The measurements of each peer. Raises Failed."""
    variables = {"DILOCO_SECRET": secrets.token_hex(16), **our_code()}
    peers: list[Peer] = []
    with network as seats:
        try:
            meet = ""
            for rank, seat in enumerate(seats):
                own = replace(task, rank=rank, listen=seat.listen, advertise=seat.advertise, meet=meet)
                own = replace(own, scratch=str(scratch / f"p{rank}"))
                program = [sys.executable, "-m", "scripts.bench.overlap", "--peer", json.dumps(asdict(own))]
                peers.append(Peer([*seat.inside, *program], scratch / f"p{rank}.log", variables))
                meet = meet or peers[-1].answer(time.monotonic() + START_S)["meet"]
            peers[-1].answer(time.monotonic() + START_S)
            for peer in peers:
                peer.tell("train")
            usual_s = (options.rounds + WARM_ROUNDS + 1) * options.steps * options.step_s / (1 - options.cost)
            deadline_s = time.monotonic() + START_S + 3 * usual_s
            return [peer.answer(deadline_s) for peer in peers]
        finally:
            for peer in peers:
                peer.dismiss()
            for peer in peers:
                peer.end(time.monotonic() + 10.0)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def line(row: Row) -> str:
    about = "" if row.sync is None else ", ".join(f"{key} {value}" for key, value in row.sync.items())
    share = "" if row.share is None else f"{row.share:.1%}"
    waiting, late = row.waiting_s_per_round, row.late_s_per_round
    return f"{row.name:<9}{about:<38}{row.tokens_per_s:>9.1f}{share:>8}{waiting:>8.3f} s{late:>7.3f} s"


# ---------------------------------------------------------------- one peer


def be_peer(task: Task) -> int:
    """Enter the run, train when told to, say how it went, and stay until stdin ends."""
    answers = take_stdout()
    torch.set_num_threads(1)
    model = build_model(MODEL, VOCAB, seed=0)
    member = None if task.sync is None else enter(task, model)
    tell(answers, meet=member.address if member else "nobody")
    sys.stdin.readline()
    trainee = Trainee(task, InnerLoop(model, INNER, 10**12, torch.device("cpu")), member)
    if member is not None:
        member.wait(START_S)
    trainee.train(WARM_ROUNDS * task.steps)
    tell(answers, **trainee.train(task.rounds * task.steps))
    sys.stdin.read()
    if member is not None:
        member.close()
    return 0


def enter(task: Task, model: torch.nn.Module) -> diloco.Run:
    site = Site.model_validate(
        {
            "peer": {"name": f"p{task.rank}"},
            "device": {"kind": "cpu", "threads": 1},
            "network": {"listen": task.listen, "advertise": task.advertise},
            "storage": {"directory": task.scratch},
        }
    )
    if task.meet:
        return diloco.join(task.meet, model, site=site)
    contract = Contract.model_validate(
        {
            "run": {"name": "bench-overlap", "total_tokens": 10**12},
            "membership": {"start_peers": PEERS},
            "model": {"kind": "external"},
            "inner": {"steps": task.steps},
            "codec": {"name": "int8", "zstd": False},  # as many bytes in every round
            "sync": dict(task.sync or {}),
        }
    )
    return diloco.found(contract, model, site=site)


class Trainee:
    """The caller's own loop around `Run.step`."""

    def __init__(self, task: Task, inner: InnerLoop, member: diloco.Run | None) -> None:
        self._step_s, self._inner, self._member = task.step_s, inner, member
        self._tokens = 0

    def train(self, steps: int) -> dict[str, float]:
        """Do so many inner steps and return their seconds. Raises RuntimeError when a round was skipped."""
        began_s = time.monotonic()
        tokens, waiting_s, late_s = self._tokens, 0.0, 0.0
        for _ in range(steps):
            late_s += self._inner_step()
            waiting_s += self._sync()
        seconds = time.monotonic() - began_s
        return {"seconds": seconds, "tokens": self._tokens - tokens, "waiting_s": waiting_s, "late_s": late_s}

    def _inner_step(self) -> float:
        """Seconds by which it came late."""
        ends_s = time.monotonic() + self._step_s
        block = torch.randint(VOCAB, (INNER.sequences_per_step, SEQUENCE + 1))
        self._tokens += INNER.sequences_per_step * SEQUENCE
        self._inner.step(block, self._tokens)
        time.sleep(max(ends_s - time.monotonic(), 0.0))
        return time.monotonic() - ends_s

    def _sync(self) -> float:
        """Seconds that it took, if anything was to be done."""
        began_s = time.monotonic()
        for event in self._member.step(tokens=INNER.sequences_per_step * SEQUENCE) if self._member else ():
            if isinstance(event, RoundSkipped):
                raise RuntimeError(f"a round was skipped: {event.reason}")
        return time.monotonic() - began_s


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
