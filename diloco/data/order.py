"""From a position, counted over all epochs, to a block: a seeded shuffle of each epoch in no memory.

A Feistel network over a grid of rows x columns just large enough for the epoch, on whole numbers only, so every
machine gets the same order (format-preserving encryption: Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). What falls on the grid's few surplus cells is sent through again ("cycle walking").
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct

_MASK = 2**64 - 1


def block_at(position: int, blocks_per_epoch: int | None, seed: int) -> int:
    """Index of the block at `position`; each run of `blocks_per_epoch` positions visits every block once.

    The order differs between epochs and seeds. A stream (`blocks_per_epoch` None) is read as it comes.
    """
    if blocks_per_epoch is None:
        return position
    epoch, block = divmod(position, blocks_per_epoch)
    rows = math.isqrt(blocks_per_epoch - 1) + 1
    columns = -(-blocks_per_epoch // rows)
    keys = _keys(seed, epoch)
    block = _permute(block, rows, columns, keys)
    while block >= blocks_per_epoch:
        block = _permute(block, rows, columns, keys)
    return block


def own_seed(seed: int, peer: str) -> int:
    """A seed of this peer's own, where nobody leases blocks to it: its order has nothing to do with the others'."""
    digest = hashlib.blake2b(f"seed {seed} of {peer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _permute(cell: int, rows: int, columns: int, keys: tuple[int, ...]) -> int:
    """A permutation of the cells of a grid: each turn moves one coordinate by a hash of the other."""
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
    """A hash of 64 bits to 64 bits: the last steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
