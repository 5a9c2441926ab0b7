"""Small costs of every version: a meeting of an island's ranks, and a commit of many members on the wire.

    scripts/bench-smalls
    scripts/bench-smalls --ranks 4 --members 256 --json FILE

A meeting is a decision of rank 0 that the other ranks receive (`Island.decide`), a process for each rank, on loopback.
Two figures: `in a row`, the mean of 2,000, after which all are there again; and `each alone`, when all ranks wait for
each other after each one (`Island.all`), less the time of that waiting alone. A commit is made, encoded, decoded and
checked, as its proposer and then every member does: the median of 50.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from diloco.base.decisions import Train
from diloco.base.types import Blocks, Commit, Counted, Leases, Member, Voter
from diloco.island import Island
from diloco.wire.convert import commit_from_wire, commit_to_wire

MEETINGS = 2000
COMMITS = 50
DIGEST = "0" * 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of the island (4)")
    parser.add_argument("--members", type=int, default=256, help="of the view, all counted (256)")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    in_a_row_ms, alone_ms = meeting_ms(options.ranks)
    found = {
        "ranks": options.ranks,
        "meeting_ms": in_a_row_ms,
        "meeting_alone_ms": alone_ms,
        "members": options.members,
        "commit_ms": commit_ms(options.members),
        "commit_bytes": len(commit_to_wire(commit_of(options.members))),
    }
    print(f"a meeting of {options.ranks} ranks: {in_a_row_ms:.3f} ms in a row, {alone_ms:.3f} ms each alone")
    about = f"{found['commit_bytes'] / 1e3:.0f} kB"
    print(
        f"a commit of {options.members} members, made, encoded, decoded, checked: {found['commit_ms']:.2f} ms, {about}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def meeting_ms(ranks: int) -> tuple[float, float]:
    """Milliseconds that a meeting takes in a row, and alone."""
    context = get_context("spawn")
    told = context.SimpleQueue()
    with TemporaryDirectory() as folder:
        about = (ranks, f"file://{folder}/meeting", told)
        started = [context.Process(target=_meet, args=(rank, *about)) for rank in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
    for process in started:
        if process.exitcode:
            raise SystemExit(f"error: a rank ended with {process.exitcode}; its lines above say why")
    in_a_row_ms, alone_ms = told.get()
    return in_a_row_ms, alone_ms


def _meet(rank: int, ranks: int, rendezvous: str, told: SimpleQueue[tuple[float, float]]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    island = Island.at(rank, ranks, torch.device("cpu"), rendezvous=rendezvous)

    def decide() -> None:
        if rank == 0:
            island.decide(Train(1))
        else:
            island.decision()

    def wait() -> None:
        island.all(True)

    def decide_and_wait() -> None:
        decide()
        wait()

    def each_ms(work: Callable[[], None], many: int) -> float:
        wait()
        began_s = time.perf_counter()
        for _ in range(many):
            work()
        wait()
        return 1000 * (time.perf_counter() - began_s) / many

    each_ms(decide_and_wait, MEETINGS // 10)  # to warm up
    in_a_row_ms = each_ms(decide, MEETINGS)
    alone_ms = each_ms(decide_and_wait, MEETINGS) - each_ms(wait, MEETINGS)
    if rank == 0:
        told.put((in_a_row_ms, alone_ms))
    island.close()


def commit_ms(members: int) -> float:
    """Milliseconds to make a commit, to encode and to decode it."""
    return 1000 * median(_seconds(lambda: commit_from_wire(commit_to_wire(commit_of(members)))) for _ in range(COMMITS))


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def commit_of(members: int) -> Commit:
    """A commit of a run of so many peers, each with data leased and counted."""
    names = [f"peer-{number:04}" for number in range(members)]
    view = tuple(Member(name, 10**15, f"10.0.{place // 256}.{place % 256}:7700") for place, name in enumerate(names))
    return Commit(
        version=1000,
        height=1000,
        previous=DIGEST,
        lineage="f" * 16,
        fragment=0,
        view=view,
        voters=tuple(Voter(name, 10**15, 0) for name in names),
        counted=tuple(Counted(name, 10**15, 999, 2**20, 2**20, 64) for name in names),
        omitted=(),
        mean_digest=DIGEST,
        tokens=10**9,
        leases=Leases(10**6, {name: (Blocks(64 * place, 64 * place + 128),) for place, name in enumerate(names)}),
        state_digest=DIGEST,
    )
