"""One peer's way through the data: the shuffled order of blocks, and its place in the blocks leased to it.

The order leads from a position, counted over all epochs, to a block: a seeded shuffle of each epoch in no memory. It is
a Feistel network over a grid of rows x columns just large enough for the epoch, on whole numbers only, so every machine
gets the same order (format-preserving encryption: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

This module imports neither torch nor numpy, so that whoever needs only the order does not pay for them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.base.errors import IncompatibleError
from diloco.base.types import Blocks
from diloco.protocol.leases import count, front, joined, without_front

if TYPE_CHECKING:
    import torch

    from diloco.data.dataset import Dataset

logger = logging.getLogger(__name__)

_MASK = 2**64 - 1


def block_at(position: int, blocks_per_epoch: int | None, seed: int) -> int:
    """Index of the data block at `position`; each run of `blocks_per_epoch` positions visits every block once.

    The order differs between epochs and seeds. A stream (`blocks_per_epoch` None) is read as it comes.
    """
    if blocks_per_epoch is None:
        return position
    epoch, block = divmod(position, blocks_per_epoch)
    rows = math.isqrt(blocks_per_epoch - 1) + 1
    columns = -(-blocks_per_epoch // rows)
    keys = _keys(seed, epoch)
    block = _permute(block, rows, columns, keys)
    while block >= blocks_per_epoch:  # one of the grid's few surplus cells is sent through again ("cycle walking")
        block = _permute(block, rows, columns, keys)
    return block


def own_seed(seed: int, peer: str) -> int:
    """A reader's own seed of the data shuffle, where nobody leases blocks to it: its order is unlike the others'."""
    digest = hashlib.blake2b(f"seed {seed} of {peer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _permute(cell: int, rows: int, columns: int, keys: tuple[int, ...]) -> int:
    """The data shuffle: a permutation of a grid's cells. Each turn moves one coordinate by a hash of the other."""
    row, column = divmod(cell, columns)
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _mix(column ^ row_key)) % rows
        column = (column + _mix(row ^ column_key)) % columns
    return row * columns + column


@functools.lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"block order of seed {seed}, epoch {epoch}".encode(), digest_size=64).digest()
    return struct.unpack("<8Q", digest)


def _mix(value: int) -> int:
    """The data shuffle's hash of 64 bits to 64 bits: the last steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class BlockReader:
    """Reads the blocks that a peer holds, in order, across versions.

    A peer that is cut off for long may read its whole lease; then it starts again at the front of that, so that no
    other peer's blocks are touched, and `repeats` counts.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        """`seed` is the run's: all peers must shuffle alike."""
        self.dataset = dataset
        self.used = 0
        """Blocks read that no version has counted yet, each once, from the front of the lease."""
        self.repeats = 0
        """Blocks read a second time for want of others, in all."""
        self._seed = seed
        self._held: tuple[Blocks, ...] = ()
        self._again = 0  # where in the lease to read once all of it is used

    @property
    def remaining(self) -> int:
        """Data blocks of the lease that the reader has not read."""
        return count(self._held) - self.used

    def lease(self, held: Sequence[Blocks], counted: int = 0) -> None:
        """Read on in the lease of a new version, `held`; the first `counted` blocks of the former one are committed.

        Raises ValueError when more is counted than used, or when `held` takes away blocks used since, as after a time
        out of the run: `catch_up` takes such a lease for unread.
        """
        if not 0 <= counted <= self.used:
            raise ValueError(f"{counted} blocks counted of {self.used} used")
        used = self.used - counted
        if front(held, used) != front(without_front(self._held, counted), used):
            raise ValueError(f"the new lease {held} does not begin with the {used} blocks used of the former one")
        self._held = joined(held)
        self.used = used
        self._again = max(0, self._again - counted)

    def catch_up(self, held: Sequence[Blocks]) -> None:
        """Read on in the lease of a version that was reached without those before it.

        They have counted what `held` lacks of the former lease's front; what was used since stays used. A lease that
        does not go on from the former one is all unread.
        """
        held = joined(held)
        try:
            self.lease(held, self._before(held[0].start) if held else 0)
        except ValueError:
            self._held, self.used, self._again = held, 0, 0

    def _before(self, position: int) -> int:
        """Data blocks of the lease before the one at `position`; all of them where it has no such block."""
        passed = 0
        for run in self._held:
            if run.start <= position < run.stop:
                return passed + position - run.start
            passed += len(run)
        return passed

    def next_positions(self, n: int) -> list[int]:
        """Positions of the data blocks that `next(n)` will read, over all epochs. Raises ValueError without a lease."""
        total = count(self._held)
        if not total:
            raise ValueError("no lease to read from")
        fresh = range(self.used, min(self.used + n, total))
        again = ((self._again + i) % total for i in range(n - len(fresh)))
        return [without_front(self._held, index)[0].start for index in (*fresh, *again)]

    def next(self, n: int) -> torch.Tensor:
        """Read the next `n` data blocks of the lease: int64 of shape (n, sequence_length + 1). Raises DataError."""
        positions = self.next_positions(n)
        per_epoch = self.dataset.blocks_per_epoch
        tokens = self.dataset.read([block_at(position, per_epoch, self._seed) for position in positions])
        fresh = min(n, self.remaining)
        again = n - fresh
        self.used += fresh
        if again and not self.repeats:
            logger.warning("all %d leased blocks are used and no version came: reading them again", self.used)
        self.repeats += again
        self._again = (self._again + again) % count(self._held)
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """The reader's place in the data as JSON values, for `load_state_dict` to go on at the same next block."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "held": [[blocks.start, blocks.stop] for blocks in self._held],
            "used": self.used,
            "again": self._again,
            "repeats": self.repeats,
            "dataset": self.dataset.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to the reader's place in `state`. Raises IncompatibleError when it belongs to other data."""
        theirs, ours = state["fingerprint"], self.dataset.fingerprint
        if theirs != ours:
            cause = f"the checkpoint was made with other data (fingerprint {theirs[:12]}..., here {ours[:12]}...)"
            raise IncompatibleError(cause, "resume with the files the run began with")
        self._held = tuple(Blocks(start, stop) for start, stop in state["held"])
        self.used = state["used"]
        self._again = state["again"]
        self.repeats = state["repeats"]
        self.dataset.load_state_dict(state["dataset"])
