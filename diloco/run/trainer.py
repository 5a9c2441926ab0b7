"""`diloco peer` from its first line to its last: our data, our model, our inner loop, around a `Run`. On every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.errors import ConfigError, ResourceError
from diloco.base.life import Life
from diloco.base.types import Blocks, Commit, Counted
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


class LeasedReader:
    """`BlockReader` in the leases that commits give to one peer. On rank 0."""

    def __init__(self, dataset: Dataset, seed: int, line: Line, resumed: dict[str, Any] | None, version: int) -> None:
        """`resumed`: what a checkpoint of `version` holds of a reader. Raises IncompatibleError for other data."""
        self._dataset, self._seed, self._line = dataset, seed, line
        self._reader = BlockReader(dataset, seed)
        self._resumed_version = -1
        if resumed is not None:
            self._reader.load_state_dict(resumed)
            self._resumed_version = version
        self._commit: Commit | None = None
        """Whose lease is read."""

    @property
    def repeats(self) -> int:
        """Blocks read again because the lease had no others."""
        return self._reader.repeats

    def next(self, count: int) -> tuple[Tensor, int]:
        """So many blocks, (count, L + 1) token ids; and how many of them were read for the first time."""
        fresh = min(count, self._reader.remaining)  # blocks read again are nobody's to count
        return self._reader.next(count), fresh

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"reader": self._reader.state_dict()}

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None) -> None:
        """Read on in what this peer holds now. After a time outside the view it is all new, and nothing of it used."""
        self._commit = commit
        held = commit.leases.held.get(self._line.peer)
        if held is None:
            return
        if self._newly(before) and self._resumed_version != commit.version:
            self._anew(commit)
            return
        try:
            self._reader.lease(held, mine.blocks if mine else 0)
        except ValueError:  # it counts what we sent in an earlier life: what is held is not what it was
            self._again(commit)

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Stand at the version of a state that was copied."""
        before = self._commit or before
        if commit is None or commit is before:
            return
        self._commit = commit
        if self._line.peer in commit.leases.held:
            (self._anew if self._newly(before) else self._again)(commit)

    def _newly(self, before: Commit | None) -> bool:
        """Whether this peer held nothing at that version."""
        return before is None or self._line.peer not in before.leases.held

    def _anew(self, commit: Commit) -> None:
        self._reader = BlockReader(self._dataset, self._seed)
        self._reader.lease(commit.leases.held[self._line.peer])
        self._line.trained.blocks = 0

    def _again(self, commit: Commit) -> None:
        """Read on where nobody knows what was counted. The blocks of progress that is kept are not read again, and go
        out with it; where nothing is kept, what was read and not counted is."""
        if not self._line.trained.tokens:
            self._anew(commit)
            return
        self._reader.catch_up(commit.leases.held[self._line.peer])
        self._line.trained.blocks = self._reader.used


ALL_BLOCKS = (Blocks(0, 2**60),)
"""Nobody leases blocks where there are no versions: each peer goes through all of them, in an order of its own."""


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


class OwnOrder:
    """The reader of a peer under gossip."""

    def __init__(self, model: RankModel, name: str, resumed: dict[str, Any] | None) -> None:
        """Raises ConfigError for data without an order."""
        if model.dataset is None or model.blocks_per_epoch is None:
            cause = "under gossip each peer reads in an order of its own, which a stream does not have"
            raise ConfigError(cause, "pack the data first: `diloco data pack`")
        self._reader = BlockReader(model.dataset, own_seed(model.contract.run.seed, name))
        self._reader.lease(ALL_BLOCKS)
        if resumed is not None:
            self._reader.load_state_dict(resumed)
        self.repeats = 0

    def next(self, count: int) -> tuple[torch.Tensor, int]:
        """So many blocks, (count, L + 1) token ids; none of them is leased."""
        return self._reader.next(count), 0

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"reader": self._reader.state_dict()}

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None) -> None:
        """No version closes."""

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Its order is its own."""


class Trainer:
    """The inner loop of one rank."""

    def __init__(self, enter: Callable[[], Entrance], site: Site, island: Island) -> None:
        """All ranks of an island make theirs together. `enter`: into the run, on rank 0."""
        self._enter, self._site, self._island = enter, site, island
        self._reader: LeasedReader | OwnOrder | None = None

    def open(self) -> Life[None]:
        """Enter the run, and get a state. Raises DilocoError."""
        self.run = yield from open_run(self._enter, self._site, self._island, self._build)
        self.run.subscribe(self._evaluate_if_due)

    def _build(self, contract: Contract) -> Parts:
        model = self.model = RankModel(contract, self._site, self._island)
        return Parts(model.weights, model, model.fingerprint, self._open_reader)

    def _open_reader(self, rank: PeerRank, entrance: Entrance) -> LeasedReader | OwnOrder:
        checkpoint, model, self.line = entrance.checkpoint, self.model, rank.line
        assert model.dataset is not None
        resumed = checkpoint.value("reader", dict) if checkpoint is not None else None
        if model.contract.membership.policy == "gossip":
            self._reader = OwnOrder(model, entrance.name, resumed)
        else:
            version = checkpoint.version if checkpoint is not None else 0
            self._reader = LeasedReader(model.dataset, model.contract.run.seed, rank.line, resumed, version)
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
        """One, on this rank. Returns its loss, nats per token, and how many leased blocks it read first."""
        model, inner = self.model, self.run.contract.inner
        block, fresh = None, 0
        if self._reader is not None:
            with model.inner.phases.host("data"):
                block, fresh = self._reader.next(inner.sequences_per_step)
        return model.step(block, self.run.position(self.run.contract.tokens_per_step)), fresh

    def _evaluate_if_due(self, event: Event) -> None:
        """Look at the held-out loss every so many versions: one peer does it for all."""
        every = self.run.contract.eval.every_versions
        if not (every and isinstance(event, VersionClosed | SwapApplied) and event.version % every == 0):
            return
        if self.run.comes_first:
            with self.run.anchor():
                loss = self.model.evaluate()
            self.run.emit(Evaluated(version=event.version, tokens=event.tokens, val_loss=loss))
