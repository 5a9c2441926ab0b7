"""One peer's place in its lease: the next blocks to train on, and how many a contribution stands for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diloco.base.errors import IncompatibleError
from diloco.base.types import Blocks
from diloco.data.dataset import Dataset
from diloco.data.order import block_at
from diloco.protocol.leases import count, front, joined, without_front

logger = logging.getLogger(__name__)


class BlockReader:
    """Reads the blocks that a peer holds, in order, across versions.

    A peer that is cut off for long may read its whole lease; then it starts again at the front of that, so that no
    other peer's blocks are touched, and `repeats` counts.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        """`seed` is the run's: all peers must shuffle alike."""
        self.dataset = dataset
        self._seed = seed
        self._held: tuple[Blocks, ...] = ()
        self._used = 0
        self._again = 0  # where in the lease to read once all of it is used
        self._repeats = 0

    @property
    def used(self) -> int:
        """Blocks read that no version has counted yet, each once, from the front of the lease."""
        return self._used

    @property
    def remaining(self) -> int:
        """Blocks of the lease that have not been read."""
        return count(self._held) - self._used

    @property
    def repeats(self) -> int:
        """Blocks read a second time for want of others, in all."""
        return self._repeats

    def lease(self, held: Sequence[Blocks], counted: int = 0) -> None:
        """A new version: the first `counted` blocks of the former lease are committed, and `held` is what I hold now.

        Raises ValueError when more is counted than used, or when `held` takes away blocks used since: then the peer
        was out of the run in between, and starts with a new reader.
        """
        if not 0 <= counted <= self._used:
            raise ValueError(f"{counted} blocks counted of {self._used} used")
        used = self._used - counted
        if front(held, used) != front(without_front(self._held, counted), used):
            raise ValueError(f"the new lease {held} does not begin with the {used} blocks used of the former one")
        self._held = joined(held)
        self._used = used
        self._again = max(0, self._again - counted)

    def catch_up(self, held: Sequence[Blocks]) -> None:
        """A version that was reached without those before it: what `held` lacks of the former lease's front they have
        counted, and what was used since stays used. What does not go on from the former lease is all unread."""
        held = joined(held)
        try:
            self.lease(held, self._before(held[0].start) if held else 0)
        except ValueError:
            self._held, self._used, self._again = held, 0, 0

    def next_positions(self, n: int) -> list[int]:
        """The positions that `next(n)` will read, counted over all epochs. Raises ValueError without a lease."""
        total = count(self._held)
        if not total:
            raise ValueError("no lease to read from")
        fresh = range(self._used, min(self._used + n, total))
        again = ((self._again + i) % total for i in range(n - len(fresh)))
        return [self._position(index) for index in (*fresh, *again)]

    def next(self, n: int) -> torch.Tensor:
        """The next `n` blocks of the lease: int64 of shape (n, sequence_length + 1). Raises DataError."""
        positions = self.next_positions(n)
        per_epoch = self.dataset.blocks_per_epoch
        tokens = self.dataset.read([block_at(position, per_epoch, self._seed) for position in positions])
        fresh = min(n, self.remaining)
        self._used += fresh
        self._repeat(n - fresh)
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on at the same next block, as JSON values."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "held": [[blocks.start, blocks.stop] for blocks in self._held],
            "used": self._used,
            "again": self._again,
            "repeats": self._repeats,
            "dataset": self.dataset.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises IncompatibleError when the state belongs to other data."""
        if state["fingerprint"] != self.dataset.fingerprint:
            raise IncompatibleError(
                f"the checkpoint was made with other data (fingerprint {state['fingerprint'][:12]}..., "
                f"here {self.dataset.fingerprint[:12]}...)",
                "resume with the files the run began with",
            )
        self._held = tuple(Blocks(start, stop) for start, stop in state["held"])
        self._used = state["used"]
        self._again = state["again"]
        self._repeats = state["repeats"]
        self.dataset.load_state_dict(state["dataset"])

    def _position(self, index: int) -> int:
        """The position `index` blocks into the lease."""
        return without_front(self._held, index)[0].start

    def _before(self, position: int) -> int:
        """Blocks of the lease before the one at `position`; all of them where it has no such block."""
        passed = 0
        for run in self._held:
            if run.start <= position < run.stop:
                return passed + position - run.start
            passed += len(run)
        return passed

    def _repeat(self, n: int) -> None:
        if n and not self._repeats:
            logger.warning("all %d leased blocks are used and no version came: reading them again", self._used)
        self._repeats += n
        self._again = (self._again + n) % count(self._held)
