"""`diloco peer` from its first line to its last: our data, our model, our inner loop, around a `Run`. On every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.errors import ConfigError, ResourceError
from diloco.base.life import Life
from diloco.base.types import Blocks, Commit
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data.dataset import Dataset
from diloco.data.reader import BlockReader, own_seed
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.observe.events import Evaluated, Event, ProfileWritten, SwapApplied, VersionClosed
from diloco.outer.line import Line
from diloco.peer.life import Ending
from diloco.peer.rank import PeerRank
from diloco.run.door import Entrance, Parts, open_run
from diloco.run.run import RunReader
from diloco.storage.checkpoint import Checkpoint


class TrainerLeases(RunReader):
    """The trainer's reader of the data blocks that commits lease to one peer, from version to version. On rank 0."""

    def __init__(self, dataset: Dataset, seed: int, line: Line, checkpoint: Checkpoint | None) -> None:
        """`checkpoint`: the one to go on from. Raises IncompatibleError for other data."""
        super().__init__(BlockReader(dataset, seed))
        self._dataset, self._seed, self._line = dataset, seed, line
        self._resumed_version = -1
        if checkpoint is not None:
            self.blocks.load_state_dict(checkpoint.value("reader", dict))
            self._resumed_version = checkpoint.version
        self._commit: Commit | None = None
        """Commit whose lease is read."""

    def next(self, count: int) -> tuple[Tensor, int]:
        """So many data blocks for the trainer, (count, L + 1) token ids; and the number of those that are new to it."""
        fresh = min(count, self.blocks.remaining)  # blocks read again are nobody's to count
        return self.blocks.next(count), fresh

    def closed(self, commit: Commit, before: Commit | None) -> None:
        """Have the trainer read on in its leased blocks. After a time outside the view they are all new."""
        self._commit = commit
        held = commit.leases.held.get(self._line.peer)
        if held is None:
            return
        newly = before is None or self._line.peer not in before.leases.held
        if newly and self._resumed_version != commit.version:
            self._restart(held, newly)
        else:
            self._go_on(held)

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Have the trainer read in the blocks leased to it at the version of a copied state."""
        before = self._commit or before
        if commit is None:  # a resumed run, not founded anew yet: the lease stays, and what was read of it stays used
            self._line.trained.blocks = self.blocks.used
        if commit is None or commit is before:
            return
        self._commit = commit
        held = commit.leases.held.get(self._line.peer)
        if held is not None:
            self._restart(held, newly=before is None or self._line.peer not in before.leases.held)

    def _restart(self, held: Sequence[Blocks], newly: bool) -> None:
        """Have the trainer read in leased blocks where nobody knows which were counted; `newly`: it held none before.

        The blocks of progress that is kept are not read again, and are counted with it. Where nothing is kept, all are.
        """
        if newly or not self._line.trained.tokens:
            self.blocks = BlockReader(self._dataset, self._seed)
            self.blocks.lease(held)
            self._line.trained.blocks = 0
        else:
            self._go_on(held)

    def _go_on(self, held: Sequence[Blocks]) -> None:
        """Have the trainer read on behind what it used: versions have counted what the lease lacks of its front."""
        self.blocks.catch_up(held)
        self._line.trained.blocks = self.blocks.used


ALL_BLOCKS = (Blocks(0, 2**60),)
"""Nobody leases blocks where there are no versions: each peer goes through all of them, in an order of its own."""


def device_of(site: Site) -> torch.device:
    """The torch device of a trainer, as the site asks, and its threads. Raises ResourceError when it is not there."""
    if site.device.threads is not None:
        torch.set_num_threads(site.device.threads)
    available = torch.cuda.is_available()
    if site.device.kind == "cuda" and not available:
        cause = "device.kind is 'cuda', but torch sees no GPU"
        raise ResourceError(cause, "install a CUDA build of torch, or use 'cpu'")
    return torch.device("cuda" if available and site.device.kind != "cpu" else "cpu")


class TrainerOwnOrder(RunReader):
    """The trainer's reader of all data blocks in an order of the peer's own, under gossip."""

    def __init__(self, model: RankModel, name: str, checkpoint: Checkpoint | None) -> None:
        """Raises ConfigError for data without an order."""
        if model.dataset is None or model.blocks_per_epoch is None:
            cause = "under gossip each peer reads in an order of its own, which a stream does not have"
            raise ConfigError(cause, "pack the data first: `diloco data pack`")
        super().__init__(BlockReader(model.dataset, own_seed(model.contract.run.seed, name)))
        self.blocks.lease(ALL_BLOCKS)
        if checkpoint is not None:
            self.blocks.load_state_dict(checkpoint.value("reader", dict))

    def next(self, count: int) -> tuple[torch.Tensor, int]:
        """So many blocks for the trainer under gossip, (count, L + 1) token ids; none of them is leased."""
        return self.blocks.next(count), 0


class Trainer:
    """`diloco peer` on one rank: the inner loop around a `Run`."""

    def __init__(self, enter: Callable[[], Entrance], site: Site, island: Island) -> None:
        """All ranks of an island make theirs together. `enter`: into the run, on rank 0."""
        self._enter, self._site, self._island = enter, site, island
        self._reader: TrainerLeases | TrainerOwnOrder | None = None

    def open(self) -> Life[None]:
        """Enter the run with the trainer of `diloco peer`, and get a state. Raises DilocoError."""
        self.run = yield from open_run(self._enter, self._site, self._island, self._build)
        self.run.subscribe(self._evaluate_if_due)

    def _build(self, contract: Contract) -> Parts:
        model = self.model = RankModel(contract, self._site, self._island)
        return Parts(model.weights, model, model.fingerprint, self._open_reader)

    def _open_reader(self, rank: PeerRank, entrance: Entrance) -> TrainerLeases | TrainerOwnOrder:
        model, self.line = self.model, rank.line
        assert model.dataset is not None
        if model.contract.membership.policy == "gossip":
            self._reader = TrainerOwnOrder(model, entrance.name, entrance.checkpoint)
        else:
            self._reader = TrainerLeases(model.dataset, model.contract.run.seed, rank.line, entrance.checkpoint)
        return self._reader

    def live(self) -> Life[Ending | None]:
        """After `open`: train until the run is done or this peer is asked to leave. None on the other ranks than 0."""
        run, contract, model = self.run, self.run.contract, self.model
        if run.directory is not None:
            traced = lambda path: run.emit(ProfileWritten(str(path), self._island.size))  # noqa: E731
            model.trace_into(run.directory / "profile", traced)
        try:
            yield from run.waiting(math.inf)
            while not (run.done or run.leaving):
                began_s = monotonic_s()
                loss, fresh = self.inner_step()
                yield from model.linger(began_s)
                yield from run.stepping(contract.tokens_per_step, loss, fresh)
            yield from run.leaves()
        finally:
            run.close()
        return run.ending

    def inner_step(self) -> tuple[float, int]:
        """One inner step of the trainer, on this rank. Returns its loss, nats per token, and the number of leased
        blocks that it read first."""
        model, inner = self.model, self.run.contract.inner
        block, fresh = None, 0
        if self._reader is not None:
            with model.inner.phases.host("data"):
                block, fresh = self._reader.next(inner.sequences_per_step)
        return model.step(block, self.run.position(self.run.contract.tokens_per_step)), fresh

    def _evaluate_if_due(self, event: Event) -> None:
        """Evaluate the trainer's held-out loss every so many versions: one peer does it for all."""
        run, every = self.run, self.run.contract.eval.every_versions
        if isinstance(event, VersionClosed | SwapApplied) and every and event.version % every == 0 and run.comes_first:
            with run.anchor():
                loss = self.model.evaluate()
            run.emit(Evaluated(version=event.version, tokens=event.tokens, val_loss=loss))
