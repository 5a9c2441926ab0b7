"""One run of `scripts/bench-quality`: all peers in one process, one after the other, and no network between them.

The line is production's: inner loop, data leases, cadence, pseudo-gradient, codec, mean, commits, outer step, merge.
Only that what peers send each other is handed over here.
"""

from __future__ import annotations

import heapq
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from statistics import mean
from time import process_time

import torch
from torch import nn

from diloco.base.types import Blocks, Closed, Commit, Counted, Member
from diloco.config.contract import Contract, DataSection
from diloco.data import open_dataset
from diloco.data.dataset import Dataset
from diloco.data.order import own_seed
from diloco.data.reader import BlockReader
from diloco.gossip.pairing import Pairing, pair_mean, settle, spread
from diloco.inner.loop import InnerLoop, evaluate, seed_everything
from diloco.models import build_model, count_parameters
from diloco.outer.average import fold, mean_digest
from diloco.outer.fragments import Weights, read_fragment, write_fragment
from diloco.outer.line import Line, Sent
from diloco.outer.state import FragmentState, OuterState
from diloco.peer.schedule import Cadence, Finish
from diloco.peer.terms import open_line
from diloco.protocol import leases
from diloco.round import measure
from diloco.simulate.local.processes import die_with_parent
from diloco.simulate.virtual.training import step_outer

CPU = torch.device("cpu")
FP32_BYTES = 4


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
    elif contract.membership.policy == "gossip":
        outcome = GossipRun(contract, names, speeds or [1.0] * peers).train()
    else:
        outcome = (AsyncRun(contract, names, speeds) if speeds else Run(contract, names)).train()
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


class Peer:
    """One of them: a model, its inner loop, its place in the data, and the line."""

    def __init__(self, name: str, contract: Contract) -> None:
        dataset, seed = dataset_of(contract.data), contract.run.seed
        self.name, self._contract = name, contract
        self.model = build_model(contract.model, dataset.vocab_size, seed)
        self.line = open_line(name, contract, Weights.of(self.model))
        self.inner = InnerLoop(self.model, contract.inner, contract.run.total_tokens, CPU)
        self._reader = BlockReader(dataset, seed)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            block = self._reader.next(self._contract.inner.sequences_per_step)
            self.line.trained.add(self._contract.tokens_per_step, len(block))
            self.inner.step(block, self._position())

    def apply(self, closed: Closed) -> None:
        mine = step_outer(self.line, closed)
        self._reader.lease(closed.commit.leases.held[self.name], mine.blocks if mine else 0)

    def heldout_loss(self) -> float:
        """Held-out loss of the anchor, which takes the place of the local weights."""
        for fragment in self.line.layout.fragments:
            write_fragment(self.line.parameters, fragment, self.line.state.fragments[fragment.index].anchor)
        return heldout_loss(self._contract, self.model)

    def _position(self) -> int:
        """Tokens of the whole run at the end of this step."""
        commit = self.line.commit
        assert commit is not None
        return commit.tokens + self.line.trained.tokens * len(commit.view)


class Run:
    """Peers, the commits of a faultless network between them, and the bytes that it would have moved."""

    def __init__(self, contract: Contract, names: Sequence[str]) -> None:
        self._contract = contract
        self.peers = [Peer(name, contract) for name in names]
        in_flight = contract.sync.overlap * contract.tokens_per_step * len(names)
        finish = Finish.of(contract)
        self._finish = replace(finish, total_tokens=finish.total_tokens - in_flight)  # else overlap would train more
        self._bits: list[float] = []
        self._sent_bytes = 0.0
        self._apply(Closed(self._founding(names), ()))

    def train(self) -> Outcome:
        """Until all tokens are committed, and what is still under way."""
        while not self._finish.done:
            self._round()
        return self._outcome()

    def _outcome(self) -> Outcome:
        tokens = sum(peer.inner.steps for peer in self.peers) * self._contract.tokens_per_step
        return Outcome(self.peers[0].heldout_loss(), mean(self._bits), self._sent_bytes / tokens, tokens, 0.0)

    def _round(self) -> None:
        for peer in self.peers:
            self._train(peer, self._before(peer))
            peer.line.sent = self._measured(peer.line)
            self._train(peer, self._cadence_of(peer).overlap)
        self._apply(self._close(self.peers))

    def _train(self, peer: Peer, steps: int) -> None:
        if not self._finish.finishing:
            peer.train(steps)

    def _before(self, peer: Peer) -> int:
        """Inner steps before its contribution is measured."""
        return self._cadence_of(peer).before(peer.line.trained.tokens)

    def _cadence_of(self, peer: Peer) -> Cadence:
        return Cadence.of(self._contract)

    def _measured(self, line: Line) -> Sent:
        sent = measure(line, line.measuring(overlaps=True), {})
        if sent.contribution.tokens:  # else it is nearly nothing, in hardly any bytes
            self._bits.append(8 * sum(map(len, sent.contribution.parts)) / line.due.elements)
        return sent

    def _apply(self, closed: Closed) -> None:
        for peer in self.peers:
            peer.apply(closed)  # raises Diverged unless all hold the same state
        self._finish.passed(closed.commit)

    def _founding(self, names: Sequence[str]) -> Commit:
        view = tuple(Member(name, 1, f"{name}:1") for name in names)
        held = leases.found(names, self._contract.lease_blocks)
        digest = self.peers[0].line.state.digest
        return Commit(0, self._contract.digest, "paper", -1, view, (), (), "", 0, held, digest)

    def _close(self, group: Sequence[Peer]) -> Closed:
        """The next version after where this group stands: it counts what they sent."""
        line = group[0].line
        before, fragment = line.commit, line.due
        assert before is not None
        sent = {peer.name: peer.line.sent.contribution for peer in group if peer.line.sent}
        parts = []
        for part in range(fragment.parts):
            start, stop = fragment.part_bounds(part)
            terms = [(one.weight, one.parts[part]) for one in sent.values()]
            parts.append(fold(terms, stop - start, line.codecs[fragment.group_of(part)]))
            self._count([len(payload) for _, payload in terms], len(parts[-1]))
        names, need = [peer.name for peer in self.peers], self._contract.lease_blocks
        commit = replace(
            before,
            version=before.version + 1,
            previous=before.digest,
            fragment=fragment.index,
            counted=tuple(
                Counted(name, one.base_version, one.weight, one.tokens, one.blocks) for name, one in sent.items()
            ),
            mean_digest=mean_digest(parts),
            tokens=before.tokens + sum(one.tokens for one in sent.values()),
            leases=leases.advance(before.leases, {name: one.blocks for name, one in sent.items()}, names, need),
            state_digest=line.state.digest,
        )
        return Closed(commit, parts)

    def _count(self, encoded_bytes: Sequence[int], mean_bytes: int) -> None:
        """A part goes from all to its owner, who is as likely one as the other, and its mean from there to all."""
        others = len(encoded_bytes) - 1
        self._sent_bytes += sum(encoded_bytes) * others / len(encoded_bytes) + mean_bytes * others


# ---------------------------------------------------------------- each at its own pace


class Moment(IntEnum):
    """Kinds of events of the simulated run, in their order when they fall on one time."""

    OFFER = 0
    """The steps before a contribution is measured are done."""
    CLOSE = 1
    DONE = 2
    """The steps that overlap with the exchange are done."""


class AsyncRun(Run):
    """Peers of different speeds, in virtual time, under the contract's policy: `sync` or `async`.

    Inner steps are done when a peer comes to their end, and then the versions that closed meanwhile are applied, as in
    a real run. The exchange takes no time; a version closes when the first that offered would have to wait.
    """

    def __init__(self, contract: Contract, names: Sequence[str], speeds: Sequence[float]) -> None:
        """`speeds`: of each peer, in inner steps per unit of time."""
        super().__init__(contract, names)
        self._speeds = dict(zip(names, speeds, strict=True))
        self._pending: dict[str, list[Closed]] = {name: [] for name in names}
        self._staleness: list[int] = []
        self.counted: list[int] = []
        """By each version that closed apart."""
        self._offered: list[Peer] = []
        self._to_come: list[tuple[float, Moment, int]] = []
        self._now = 0.0
        membership = contract.membership
        self._sync_versions = membership.sync_versions if membership.policy == "async" else None

    def train(self) -> Outcome:
        """Rounds of all together, as many as the policy has; then each at its own pace."""
        versions = 0
        while not self._finish.done and (self._sync_versions is None or versions < self._sync_versions):
            versions += 1
            self._round()
            self._now += max(self._cadence_of(peer).steps / self._speeds[peer.name] for peer in self.peers)
        self._train_apart()
        outcome = self._outcome()
        stale = mean(self._staleness) if self._staleness else 0.0
        count, counted = len(self.counted), mean(self.counted) if self.counted else 0.0
        return replace(outcome, time=self._now, versions=versions + count, staleness=stale, counted=counted)

    def _train_apart(self) -> None:
        for place, peer in enumerate(self.peers):
            self._after(self._before(peer), Moment.OFFER, place)
        happens = {Moment.OFFER: self._offer, Moment.CLOSE: self._close_version, Moment.DONE: self._done}
        while not self._finish.finishing:
            self._now, moment, place = heapq.heappop(self._to_come)
            happens[moment](place)
        for peer in self.peers:
            self._catch_up(peer)
        while not self._finish.done:
            self._round()

    def _offer(self, place: int) -> None:
        peer = self.peers[place]
        self._train(peer, self._before(peer))
        self._staleness.append(len(self._pending[peer.name]))
        self._catch_up(peer)
        peer.line.sent = self._measured(peer.line)
        self._offered.append(peer)
        overlap = self._cadence_of(peer).overlap
        self._after(overlap, Moment.CLOSE, place)
        self._after(overlap, Moment.DONE, place)

    def _close_version(self, place: int) -> None:
        """Unless another one's end has closed it."""
        group = [peer for peer in self.peers if peer in self._offered]
        if self.peers[place] not in group:
            return
        closed = self._close(group)
        self._offered.clear()
        self.counted.append(len(group))
        for missed in self._pending.values():
            missed.append(closed)
        self._finish.passed(closed.commit)

    def _done(self, place: int) -> None:
        peer = self.peers[place]
        self._train(peer, self._cadence_of(peer).overlap)
        self._catch_up(peer)
        self._after(self._before(peer), Moment.OFFER, place)

    def _after(self, steps: int, moment: Moment, place: int) -> None:
        """So many inner steps of this peer from now."""
        time = self._now + steps / self._speeds[self.peers[place].name]
        heapq.heappush(self._to_come, (time, moment, place))

    def _catch_up(self, peer: Peer) -> None:
        for closed in self._pending[peer.name]:
            peer.apply(closed)
        self._pending[peer.name].clear()

    def _cadence_of(self, peer: Peer) -> Cadence:
        speeds = self._speeds
        return Cadence.fitted(self._contract, speeds[peer.name], max(speeds.values()), sync_s=0.0)


# ---------------------------------------------------------------- in pairs


class Gossiper(Peer):
    """One with an order of its own through the data, and weights of its own."""

    def __init__(self, name: str, contract: Contract, speed: float, all_speeds: float) -> None:
        super().__init__(name, contract)
        self.speed, self._all_speeds = speed, all_speeds
        self._reader = BlockReader(dataset_of(contract.data), own_seed(contract.run.seed, name))
        self._reader.lease((Blocks(0, 2**60),))
        self.swapped_at = 0
        """Its inner steps when it swapped last."""

    def advance(self, now: float) -> None:
        """Do the inner steps that there was time for."""
        self.train(int(now * self.speed + 1e-9) - self.inner.steps)

    def due(self) -> float:
        """When it has done H inner steps since its last swap."""
        return (self.swapped_at + self._contract.inner.steps) / self.speed

    @property
    def local(self) -> torch.Tensor:
        return read_fragment(self.line.parameters, self.line.layout.fragments[0])

    def take(self, after: FragmentState) -> None:
        """Stand where a swap leads."""
        self.line.state = OuterState(self.line.state.version + 1, (after,))
        write_fragment(self.line.parameters, self.line.layout.fragments[0], after.anchor)
        self.swapped_at = self.inner.steps

    def _position(self) -> int:
        """Tokens of the whole run when this step ends: all others go on, too."""
        return int((self.inner.steps + 1) / self.speed * self._all_speeds) * self._contract.tokens_per_step


class GossipRun:
    """Peers that swap in pairs, in virtual time: whoever did H inner steps meets another one at random, as it stands.

    A swap takes no time, and everybody knows how far all are. The loss is that of the final average.
    """

    def __init__(self, contract: Contract, names: Sequence[str], speeds: Sequence[float]) -> None:
        self._contract = contract
        self.peers = [Gossiper(name, contract, speed, sum(speeds)) for name, speed in zip(names, speeds, strict=True)]
        self._pairing = Pairing(contract.outer.lr, contract.outer.momentum)
        self._draw = random.Random(contract.run.seed)
        self._ends = contract.run.total_tokens / (sum(speeds) * contract.tokens_per_step)
        self._swaps = 0

    def train(self) -> Outcome:
        """Until the run has its tokens; then on average, plainly, until all are alike."""
        while (first := min(self.peers, key=Gossiper.due)).due() <= self._ends:
            self._swap(first, first.due())
        for peer in self.peers:
            peer.advance(self._ends)
        self._average()
        tokens = sum(peer.inner.steps for peer in self.peers) * self._contract.tokens_per_step
        sent_bytes = 2 * self._swaps * FP32_BYTES * count_parameters(self.peers[0].model)
        loss = self.peers[0].heldout_loss()
        return Outcome(loss, FP32_BYTES * 8, sent_bytes / tokens, tokens, 0.0, time=self._ends, versions=self._swaps)

    def _swap(self, first: Gossiper, now: float) -> None:
        pair = (first, self._draw.choice([peer for peer in self.peers if peer is not first]))
        for peer in pair:
            peer.advance(now)
        mean = pair_mean(*(peer.local for peer in pair))
        for peer in pair:
            peer.take(self._pairing.step(peer.line.state.fragments[0], mean))
        self._swaps += 1

    def _average(self) -> None:
        while max(spread(one.local, self.peers[0].local) for one in self.peers) > self._contract.gossip.tolerance:
            pair = self._draw.sample(self.peers, 2)
            mean = pair_mean(*(peer.local for peer in pair))
            for peer in pair:
                peer.take(settle(peer.line.state.fragments[0], mean))
            self._swaps += 1
