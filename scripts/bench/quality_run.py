"""One run of `scripts/bench-quality`: all peers in one process, in virtual time, and no network between them.

They live `diloco peer`'s own life, inner loop, leases, rounds, exchange and all: only that bytes take no time, and an
inner step as long as the peer's speed has it.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import torch
from torch import nn

from diloco.base.clock import monotonic_s
from diloco.base.types import Commit
from diloco.compress.encoding import Encode, Piece
from diloco.config.contract import Contract, DataSection
from diloco.config.site import Site
from diloco.data import open_dataset
from diloco.data.dataset import Dataset
from diloco.data.reader import BlockReader
from diloco.inner.loop import InnerLoop, evaluate, seed_everything
from diloco.island import Island
from diloco.models import build_model, count_parameters
from diloco.observe.events import Ended, Event, SwapApplied, VersionClosed
from diloco.outer.line import Line
from diloco.protocol import leases
from diloco.protocol.streams import Welcome
from diloco.run.door import Entrance
from diloco.run.trainer import Trainer
from diloco.simulate.local.processes import die_with_parent
from diloco.simulate.memory_link import MemoryEndpoint, MemoryNetwork, MemoryRuntime
from diloco.simulate.virtual_time import VirtualLoop, lived, virtual_time

CPU = torch.device("cpu")
FP32_BYTES = 4
STEP_S = 1.0
"""Virtual seconds of an inner step at speed 1."""
HEARTBEAT_S = 2.0
RPC_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    loss: float
    """Held-out, in nats per token, of the anchor after the last sync."""
    bits: float
    """Bits per parameter on the wire of one sync, as one peer encodes it, zstd included."""
    bytes_per_token: float
    """Bytes that a peer sends per token that it trains, as contributor and as owner of its share of the parts."""
    tokens: int
    """Trained by all peers."""
    cpu_s: float
    time: float = 0.0
    """In inner steps of the fastest peer, where peers have speeds."""
    versions: int = 0
    """And how many there were."""
    staleness: float = 0.0
    """Versions that closed while a contribution was made, mean."""
    counted: float = 0.0
    """Contributions of a version where each goes at its own pace, mean."""


def get_ready() -> None:
    """For a process that makes runs: one core, Ctrl-C is for the process that started it, and it ends with that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)


def train(contract: Contract, peers: int, together: bool, speeds: Sequence[float] = ()) -> Outcome:
    """A whole run: `together` on all peers' batches in one step, or DiLoCo, all alike or at these `speeds`."""
    started_s = process_time()
    seed_everything(contract.run.seed)
    names = [f"p{peer}" for peer in range(peers)]
    if together:
        outcome = train_together(contract, names)
    else:
        outcome = Fleet(contract, names, speeds or [1.0] * peers).train()
    return replace(outcome, cpu_s=round(process_time() - started_s, 1))


@cache
def dataset_of(section: DataSection) -> Dataset:
    return open_dataset(section, Path())


def heldout_loss(contract: Contract, model: nn.Module) -> float:
    heldout = dataset_of(contract.data).heldout(contract.eval.sequences)
    return evaluate(model, heldout, contract.inner.batch_size, CPU)


# ---------------------------------------------------------------- data parallel


def train_together(contract: Contract, names: Sequence[str]) -> Outcome:
    """Train as DistributedDataParallel does: by the mean gradient of the very blocks that the peers read apart."""
    dataset, total_tokens = dataset_of(contract.data), contract.run.total_tokens
    model = build_model(contract.model, dataset.vocab_size, contract.run.seed)
    sequences = contract.inner.batch_size
    inner = InnerLoop(
        model, contract.inner.model_copy(update={"batch_size": sequences * len(names)}), total_tokens, CPU
    )
    held = leases.found(names, contract.lease_blocks)
    readers = {name: BlockReader(dataset, contract.run.seed) for name in names}
    tokens, used = 0, 0
    while tokens < total_tokens:
        for name, reader in readers.items():
            reader.lease(held.held[name], used)
        for _ in range(contract.steps_per_round):
            tokens += contract.tokens_per_step * len(names)
            inner.step(torch.cat([reader.next(sequences) for reader in readers.values()]), tokens)
        used = contract.blocks_per_round
        held = leases.advance(held, dict.fromkeys(names, used), names, contract.lease_blocks)
    ring_bytes = 2 * (len(names) - 1) / len(names) * FP32_BYTES * count_parameters(model)
    return Outcome(heldout_loss(contract, model), FP32_BYTES * 8, ring_bytes / contract.tokens_per_step, tokens, 0.0)


# ---------------------------------------------------------------- DiLoCo


class Fleet:
    """The peers of a run, on one thread and on a network in memory."""

    def __init__(self, contract: Contract, names: Sequence[str], speeds: Sequence[float]) -> None:
        """`speeds`: of each peer, in inner steps per `STEP_S`; at most 1."""
        # Nobody waits for time's sake: a version closes when whoever offered first has nothing else to do.
        rules = {"start_peers": len(names), "grace_s": 0.0, "round_deadline_s": 1e6}
        membership = contract.membership.model_copy(update=rules)
        # What is under way at the end is committed, too: with overlap all would train more.
        in_flight = contract.sync.overlap * contract.tokens_per_step * len(names)
        run = contract.run.model_copy(update={"total_tokens": contract.run.total_tokens - in_flight})
        self.contract = contract.model_copy(update={"membership": membership, "run": run})
        self._speeds = dict(zip(names, speeds, strict=True))
        self._network = MemoryNetwork()
        self.peers: list[Trainer] = []
        self.commits: list[Commit] = []
        """Commits of the versions that closed, without the founding."""
        self._swaps = 0
        self._bits: list[float] = []
        self._staleness: list[int] = []
        self._began_s = self._complete_s = math.inf
        """When the first inner steps began, and when the run had its tokens."""

    def train(self) -> Outcome:
        """Until all tokens are committed."""
        with virtual_time() as loop:
            loop.run_until_complete(self._live(loop))
        return self._outcome()

    async def _live(self, loop: VirtualLoop) -> None:
        welcome: Welcome | None = None
        for name in self._speeds:
            runtime = MemoryRuntime(self._network, loop, f"{name}:1", RPC_S)
            peer = self._peer(name, MemoryEndpoint(self._site(name), runtime, welcome))
            await lived(peer.open())
            peer.run.subscribe(partial(self._on_event, peer))
            peer.line.encode = partial(self._encoded, peer.line, peer.line.encode)
            await asyncio.sleep(HEARTBEAT_S)
            welcome = welcome or await runtime.link.hello(f"{name}:1", RPC_S)
            self.peers.append(peer)
        await asyncio.gather(*(lived(peer.live()) for peer in self.peers))

    def _peer(self, name: str, endpoint: Any) -> Trainer:
        return Trainer(lambda: Entrance(self.contract, endpoint, name, None), endpoint.site, Island(0, 1, CPU))

    def _site(self, name: str) -> Site:
        tree = {
            "device": {"kind": "cpu", "step_s": STEP_S, "speed": self._speeds[name]},
            "timeouts": {"heartbeat_s": HEARTBEAT_S, "suspect_s": 4 * HEARTBEAT_S, "rpc_s": RPC_S},
            "storage": {"checkpoint_every": 0},
        }
        return Site.model_validate(tree)

    def _on_event(self, peer: Trainer, event: Event) -> None:
        if isinstance(event, Ended) and event.wall_s is not None:
            self._began_s = min(self._began_s, monotonic_s() - event.wall_s)
        elif isinstance(event, SwapApplied):
            self._swaps += 1
        elif isinstance(event, VersionClosed) and peer is self.peers[0]:
            assert peer.line.commit is not None
            self.commits.append(peer.line.commit)
            if event.tokens >= self.contract.run.total_tokens:
                self._complete_s = min(self._complete_s, monotonic_s())

    def _longest(self) -> float:
        """Time of the inner steps of whoever did most for its speed."""
        return max(peer.run.steps / speed for peer, speed in zip(self.peers, self._speeds.values(), strict=True))

    def _encoded(self, line: Line, encode: Encode, parts: int, pieces: Iterable[Piece]) -> Sequence[bytes]:
        encoded = encode(parts, pieces)
        if line.trained.tokens:  # else it is nearly nothing, in hardly any bytes
            self._bits.append(8 * sum(map(len, encoded)) / line.due.elements)
            self._staleness.append(line.state.version - line.since)
        return encoded

    def _outcome(self) -> Outcome:
        ending = self.peers[0].run.ending
        assert ending is not None
        assert ending.val_loss is not None
        tokens = sum(peer.run.steps for peer in self.peers) * self.contract.tokens_per_step
        membership = self.contract.membership
        together = membership.sync_versions if membership.policy == "async" else 0
        apart = [commit for commit in self.commits if commit.version > together]
        return Outcome(
            loss=ending.val_loss,
            bits=mean(self._bits or [8 * FP32_BYTES]),
            bytes_per_token=sum(self._network.sent_bytes.values()) / tokens,
            tokens=tokens,
            cpu_s=0.0,
            time=(self._complete_s - self._began_s) / STEP_S if self.commits else self._longest(),
            versions=len(self.commits) or self._swaps // 2,
            staleness=mean(self._staleness or [0]),
            counted=mean([len(commit.counted) for commit in apart] or [0]),
        )
