"""`diloco peer` under gossip: our data, model and inner loop around `diloco.gossip.peer`, on rank 0 of an island."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from diloco.base.clock import monotonic_s
from diloco.base.errors import ConfigError
from diloco.base.types import Blocks
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data.order import own_seed
from diloco.data.reader import BlockReader
from diloco.gossip.peer import GossipPeer
from diloco.inner.workbench import Workbench
from diloco.island import Island
from diloco.observe.event_log import Events
from diloco.observe.events import Ended, Evaluated, HardwareUsed, ProfileWritten, Started, TrainingProgress
from diloco.run.trainer import REPORT_EVERY_S, Ending
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.saving import Contents, Keeper, Written
from diloco.transport.gate import Gate

logger = logging.getLogger(__name__)

ALL_BLOCKS = (Blocks(0, 2**60),)
"""Nobody leases blocks where there are no versions: each peer goes through all of them, in an order of its own."""


class GossipTrainer:
    """Inner loop, data and checkpoints of one peer."""

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
        """`stop`: asked after every inner step whether to leave."""
        self.contract, self.site = contract, site
        self.events, self.directory, self.stop = events, directory, stop
        bench = self.bench = Workbench(contract, site, island)
        bench.trace_into(directory / "profile", lambda path: events.emit(ProfileWritten(str(path), island.size)))
        if bench.dataset.blocks_per_epoch is None:
            cause = "under gossip each peer reads in an order of its own, which a stream does not have"
            raise ConfigError(cause, "pack the data first: `diloco data pack`")
        data = bench.dataset.fingerprint
        self.peer = GossipPeer(name, contract, site, bench.weights, gate, events, checkpoint, data)
        self.peer.idle = lambda: bench.idle() and not stop()
        self.reader = BlockReader(bench.dataset, own_seed(contract.run.seed, name))
        self.reader.lease(ALL_BLOCKS)
        if checkpoint is not None:
            bench.restore(checkpoint)
            self.reader.load_state_dict(checkpoint.value("reader", dict))
        self._keeper = Keeper(events, self._begin_save)
        self._started_s = self._reported_s = monotonic_s()

    # ------------------------------------------------------------ the life of a peer

    def run(self) -> Ending:
        """Train until the run is done or we are asked to leave. Raises DilocoError before training starts."""
        try:
            self.peer.open()
            self._emit_start(self.peer)
            self.peer.enter(lambda: self.bench.idle() and not self.stop())
            self._started_s = monotonic_s()
            self.bench.usage.begin()
            while not (self.peer.finishing or self.stop()):
                self._inner_step()
                self._between_steps()
            return self._end()
        finally:
            self.bench.saver.wait(self.site.timeouts.leave_s)

    def _inner_step(self) -> None:
        inner, tokens = self.contract.inner, self.contract.tokens_per_step
        began_s = monotonic_s()
        with self.bench.inner.phases.host("data"):
            block = self.reader.next(inner.sequences_per_step)
        loss = self.bench.step(block, self.peer.position() + tokens)
        self.bench.linger(began_s)
        step_s = monotonic_s() - began_s
        self.peer.trained(tokens, step_s, loss)
        self.bench.usage.step(tokens, step_s)
        self._report(self.peer, loss)

    def _between_steps(self) -> None:
        """Swaps, and what hangs on them."""
        self._keeper.tell()
        peer = self.peer
        if not peer.between_steps():
            return
        self.events.emit(HardwareUsed(version=peer.version, **self.bench.used()))
        every = self.contract.eval.every_versions
        if every and peer.version % every == 0 and peer.comes_first:
            val_loss = self.bench.evaluate(peer.line)
            self.events.emit(Evaluated(version=peer.version, tokens=peer.position(), val_loss=val_loss))
        every = self.site.storage.checkpoint_every
        if every and peer.version % every == 0:
            self._keeper.due(peer.version, self._contents)

    def _report(self, peer: GossipPeer, loss: float) -> None:
        now = monotonic_s()
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            wire, step = peer.counter.sample(), self.bench.inner.steps
            sent = wire.sent if wire else 0
            peer.report(inner_step=step, tokens_per_s=peer.tokens_per_s, loss=loss, wire_bytes_sent=sent)
            self.events.emit(TrainingProgress(step, peer.tokens, loss))

    def _emit_start(self, peer: GossipPeer) -> None:
        self.events.emit(
            Started(
                run=self.contract.run.name,
                contract_digest=self.contract.digest,
                parameters=self.bench.parameters,
                resumed_version=peer.version,
                blocks_per_epoch=self.bench.dataset.blocks_per_epoch,
                total_tokens=self.contract.run.total_tokens,
                **self.bench.facts(),
            )
        )

    # ------------------------------------------------------------ the end

    def _end(self) -> Ending:
        peer = self.peer
        done = peer.finishing
        if done:
            peer.average(lambda: self.bench.idle() and not self.stop())
        else:
            peer.leave(lambda: True)
        val_loss = self.bench.evaluate(peer.line)
        digest, discarded = peer.line.state.digest, peer.discarded_tokens
        reason, spread = "done" if done else "left", peer.spread if done else None
        ending = Ending(reason, peer.version, peer.position(), digest, "", val_loss, discarded, spread)
        wire, wall_s = peer.counter.sample(), monotonic_s() - self._started_s
        self.events.emit(Ended(**vars(ending), wire_bytes_sent=wire.sent if wire else None, wall_s=wall_s))
        self.save()
        peer.close()
        self.bench.close()
        return ending

    # ------------------------------------------------------------ checkpoints

    def save(self) -> Path:
        """Write a checkpoint of this peer, and wait for it. Raises ResourceError."""
        return self._keeper.last(self.peer.version, self._contents)

    def _contents(self) -> Contents:
        groups, meta = self.peer.to_save()
        return groups, {**meta, "reader": self.reader.state_dict()}

    def _begin_save(self, contents: Contents) -> Future[Written]:
        return self.bench.save(self.directory / "checkpoints", self.peer.version, contents, self.site.storage.keep)
