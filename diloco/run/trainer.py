"""`diloco peer` from its first line to its last: our data, our model, our inner loop, around `diloco.peer.peer`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError
from diloco.base.types import Commit, Counted, Phase
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data.reader import BlockReader
from diloco.inner.workbench import Workbench
from diloco.island import Island
from diloco.observe.event_log import Events
from diloco.observe.events import (
    FLIGHT,
    Ended,
    Evaluated,
    HardwareUsed,
    ProfileWritten,
    Started,
    TrainingProgress,
    VersionClosed,
)
from diloco.outer.eager import weights_to_keep
from diloco.peer.peer import Peer
from diloco.peer.schedule import Cadence, Stopwatch
from diloco.protocol.leases import front
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.saving import Contents, Keeper, Written
from diloco.transport.gate import Gate

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5


@dataclass(frozen=True)
class Ending:
    """How a peer's life ended."""

    reason: str
    """`done`: the run has its tokens; `left`: asked to leave."""
    version: int
    tokens: int
    state_digest: str
    chain_digest: str
    val_loss: float | None
    discarded_tokens: int
    spread: float | None = None
    """Under gossip: the largest that was left after the final average, as far as this peer saw."""


def device_of(site: Site) -> torch.device:
    """Raises ResourceError when the device asked for is not there."""
    if site.device.threads is not None:
        torch.set_num_threads(site.device.threads)
    available = torch.cuda.is_available()
    if site.device.kind == "cuda" and not available:
        raise ResourceError(
            "device.kind is 'cuda', but torch sees no GPU", "install a CUDA build of torch, or use 'cpu'"
        )
    return torch.device("cuda" if available and site.device.kind != "cpu" else "cpu")


class Trainer:
    """Inner loop, data and checkpoints of one peer, on rank 0 of its island, which the other ranks follow."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        site: Site,
        island: Island,
        gate: Gate,
        events: Events,
        directory: Path,
        stop: Callable[[], bool],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """`stop`: asked before every inner step whether to leave."""
        self.contract, self.site = contract, site
        self.events, self.directory, self.stop = events, directory, stop
        bench = self.bench = Workbench(contract, site, island)
        bench.trace_into(directory / "profile", lambda path: events.emit(ProfileWritten(str(path), island.size)))
        data = bench.dataset.fingerprint
        self.peer = Peer(name, contract, site, bench.weights, gate, events, checkpoint, data, directory, island)
        self.peer.idle = lambda: bench.idle() and not stop()
        self.reader = BlockReader(bench.dataset, contract.run.seed)
        self._resumed_version = -1
        if checkpoint is not None:
            self._restore(checkpoint)
        self._keeper = Keeper(events, self._begin_save)
        self.peer.saving = lambda: self._keeper.busy
        self._commit = self.peer.line.commit
        """Whose lease we read in."""
        self.peer.copied = self._take_over
        self._cadence = Cadence.of(contract)
        self._watch = Stopwatch()
        self._losses: list[float] = []
        self._tokens_here = 0
        self._started_s = self._reported_s = monotonic_s()

    # ------------------------------------------------------------ the life of a peer

    def run(self) -> Ending:
        """Train until the run is done or we are asked to leave. Raises DilocoError before training starts."""
        try:
            self.peer.open()
            self._emit_start()
            self._enter()
            while not (self.peer.done or self.stop()):
                self._round()
            return self._end()
        finally:
            self.bench.saver.wait(self.site.timeouts.leave_s)

    def _enter(self) -> bool:
        """Wait until the view includes us. False: we are asked to leave."""
        return self.peer.enter(lambda: self.bench.idle() and not self.stop(), self._on_closed)

    def _round(self) -> None:
        if self.peer.ending.finishing and not self._enter():
            return  # without inner steps to do, rounds that are skipped at once would follow each other at once
        self._losses = []
        self._size()
        leave_s = self.site.timeouts.leave_s
        deadline_s = self.contract.membership.round_deadline_s
        asked_s: list[float] = []

        def patience() -> bool:
            asked_s.append(monotonic_s())
            limit_s = min(leave_s, deadline_s) if self.stop() else deadline_s
            return self.bench.idle() and asked_s[-1] - asked_s[0] < limit_s

        self.peer.round(self._first_steps, self._on_closed, patience, self.stop, self._overlapped_steps)

    # ------------------------------------------------------------ inner steps

    def _first_steps(self) -> None:
        """Those before the contribution is measured."""
        self._inner_steps(self._cadence.before(self.peer.line.trained.tokens))

    def _overlapped_steps(self) -> None:
        """Those while it is on its way."""
        self._inner_steps(self._cadence.overlap)

    def _inner_steps(self, count: int) -> None:
        inner = self.contract.inner
        for _ in range(0 if self.peer.ending.finishing else count):  # then nothing is trained any more, only committed
            if self.stop() or self._cut_short():
                return
            began_s = monotonic_s()
            fresh = min(inner.sequences_per_step, self.reader.remaining)  # blocks read again are nobody's to count
            with self.bench.inner.phases.host("data"):
                block = self.reader.next(inner.sequences_per_step)
            self._losses.append(self.bench.step(block, self._position()))
            self._tokens_here += self.contract.tokens_per_step
            self.bench.linger(began_s)
            step_s = monotonic_s() - began_s
            self._watch.step(self.contract.tokens_per_step, step_s)
            self.bench.usage.step(self.contract.tokens_per_step, step_s)
            self.peer.journal.trained(self.contract.tokens_per_step, fresh)
            self._keeper.tell()
            self._report()

    def _size(self) -> None:
        """As many steps this time as our speed and the exchange ask for."""
        pace = self._watch.round()
        self.peer.report(pace=pace)
        if self.contract.rounds_vary:
            self._cadence = Cadence.fitted(self.contract, pace, *self.peer.exchange.speeds())
            self.peer.hide(self._cadence)

    def _cut_short(self) -> bool:
        """Whether to end the inner steps early, because most others wait (`membership.stragglers`)."""
        waits = self.contract.membership.stragglers == "wait"
        return not waits and bool(self._losses) and self.peer.exchange.awaited()

    def _position(self) -> int:
        """Tokens of the whole run at the end of this step, if all trainers go at our pace: sets the learning rate."""
        line = self.peer.line
        ours = line.trained.tokens + self.contract.tokens_per_step
        return line.commit.tokens + ours * line.trainers if line.commit else ours

    def _report(self) -> None:
        peer, now = self.peer, monotonic_s()
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            wire = peer.wire()
            peer.report(
                inner_step=self.bench.inner.steps,
                tokens=self._tokens_here,
                tokens_per_s=self._tokens_here / (now - self._started_s),
                loss=self._losses[-1],
                wire_bytes_sent=wire.sent if wire else 0,
            )
            step = self.bench.inner.steps
            self.events.emit(TrainingProgress(step, self._tokens_here, self._losses[-1]))

    # ------------------------------------------------------------ versions

    def _evaluates(self, commit: Commit) -> bool:
        """Whether we are the first member that trains."""
        first = next((member.peer for member in commit.view if not member.witness), None)
        return first == self.peer.name

    def _on_closed(
        self, commit: Commit, before: Commit | None, mine: Counted | None, seconds: dict[str, float]
    ) -> None:
        self._commit = commit
        self._lease(commit, before, mine)
        if before is None or commit.version == before.version:
            self._started_s = monotonic_s()
            self.bench.usage.begin()
            return
        self._emit_version(commit, before, mine, seconds)
        self.events.emit(HardwareUsed(version=commit.version, **self.bench.used()))
        every = self.contract.eval.every_versions
        if every and commit.version % every == 0 and self._evaluates(commit):
            val_loss = self.bench.evaluate(self.peer.line)
            self.events.emit(Evaluated(version=commit.version, tokens=commit.tokens, val_loss=val_loss))
        every = self.site.storage.checkpoint_every
        if every and commit.version % every == 0:
            self._keeper.due(commit.version, self._contents)

    def _lease(self, commit: Commit, before: Commit | None, mine: Counted | None) -> None:
        """Read on in what we hold now. After a time outside the view it is all new, and nothing of it is used."""
        held = commit.leases.held.get(self.peer.name)
        if held is None:
            return
        if self._newly(before) and self._resumed_version != commit.version:
            self._lease_anew(commit)
            return
        try:
            self.reader.lease(held, mine.blocks if mine else 0)
        except ValueError:  # it counts what we sent in an earlier life: what is held is not what it was
            self._lease_again(commit)

    def _newly(self, before: Commit | None) -> bool:
        """Whether we held nothing at that version."""
        return before is None or self.peer.name not in before.leases.held

    def _lease_anew(self, commit: Commit) -> None:
        self.reader = BlockReader(self.bench.dataset, self.contract.run.seed)
        self.reader.lease(commit.leases.held[self.peer.name])
        self.peer.line.trained.blocks = 0

    def _lease_again(self, commit: Commit) -> None:
        """Read on where we do not know what was counted. The blocks of progress that is kept are not read again, and go
        out with it; where nothing is kept, what was read and not counted is."""
        if not self.peer.line.trained.tokens:
            self._lease_anew(commit)
            return
        self.reader.catch_up(commit.leases.held[self.peer.name])
        self.peer.line.trained.blocks = self.reader.used

    def _take_over(self) -> None:
        """Stand at the version of a state that was copied: no version closed here, so nobody told us of its lease."""
        commit, before = self.peer.line.commit, self._commit
        if commit is None or commit is before:
            return
        self._commit = commit
        if self.peer.name in commit.leases.held:
            (self._lease_anew if self._newly(before) else self._lease_again)(commit)

    def _emit_version(self, commit: Commit, before: Commit, mine: Counted | None, seconds: dict[str, float]) -> None:
        peer = self.peer
        wire, flight_s = peer.wire(), seconds.pop(FLIGHT, None)
        trained = front(before.leases.held.get(peer.name, ()), mine.blocks) if mine else ()
        self.events.emit(
            VersionClosed(
                version=commit.version,
                lineage=commit.lineage,
                fragment=commit.fragment,
                tokens=commit.tokens,
                members=tuple(member.peer for member in commit.view),
                counted=tuple(counted.peer for counted in commit.counted),
                own=mine is not None,
                attempts=peer.exchange.machine.attempts,
                loss=sum(self._losses) / len(self._losses) if self._losses else None,
                inner_tokens=mine.tokens if mine else 0,
                blocks=tuple((run.start, run.stop) for run in trained),
                tokens_per_s=self._tokens_here / max(monotonic_s() - self._started_s, 1e-9),
                wire_bytes_sent=wire.sent if wire else None,
                wire_bytes_received=wire.received if wire else None,
                seconds={name: round(value, 6) for name, value in seconds.items()},
                flight_s=flight_s,
                state_digest=peer.line.state.digest,
                lr=self.bench.inner.lr,
                expert_imbalance=tuple(self.bench.inner.expert_imbalance()),
                repeats=self.reader.repeats,
            )
        )

    def _emit_start(self) -> None:
        self.events.emit(
            Started(
                run=self.contract.run.name,
                contract_digest=self.contract.digest,
                parameters=self.bench.parameters,
                resumed_version=self.peer.line.state.version,
                blocks_per_epoch=self.bench.dataset.blocks_per_epoch,
                total_tokens=self.contract.run.total_tokens,
                **self.bench.facts(),
            )
        )

    # ------------------------------------------------------------ the end

    def _end(self) -> Ending:
        peer = self.peer
        wall_s = monotonic_s() - self._started_s
        done = peer.done
        if done:
            peer.report(phase=Phase.DONE)
        else:
            # What was not counted in time is discarded: a checkpoint of it would train its data twice.
            peer.leave("left", self._on_closed)
            peer.close()  # or it would ask to be taken in again, while we evaluate
        commit = self._commit
        val_loss = self.bench.evaluate(peer.line) if commit is not None else None
        if done:
            peer.leave("done", self._on_closed)
            peer.close()
        ending = Ending(
            "done" if done else "left",
            peer.line.state.version,
            commit.tokens if commit else 0,
            peer.line.state.digest,
            commit.digest if commit else "",
            val_loss,
            peer.journal.discarded_tokens,
        )
        wire = peer.wire()
        self.events.emit(
            Ended(
                **{name: getattr(ending, name) for name in Ending.__dataclass_fields__},
                wire_bytes_sent=wire.sent if wire else None,
                wall_s=wall_s,
            )
        )
        self.save()
        self.bench.close()
        return ending

    # ------------------------------------------------------------ checkpoints

    def save(self) -> Path:
        """Write a checkpoint of this peer, and wait for it. Raises ResourceError."""
        return self._keeper.last(self.peer.line.state.version, self._contents)

    def _contents(self) -> Contents:
        groups, meta = self.peer.to_save()
        return groups, {**meta, "reader": self.reader.state_dict()}

    def _begin_save(self, contents: Contents) -> Future[Written]:
        version, keep = self.peer.line.state.version, self.site.storage.keep
        with weights_to_keep(self.peer.line):
            return self.bench.save(self.directory / "checkpoints", version, contents, keep)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.bench.restore(checkpoint)
        self.reader.load_state_dict(checkpoint.value("reader", dict))
        self._resumed_version = checkpoint.version
