"""The seam between data and training: blocks of tokens by index, and `ArrayDataset`, which holds them in arrays.

A block is one training sequence and one token more, so that inputs are `block[:, :-1]` and targets `block[:, 1:]`.
Consecutive blocks of a run of tokens advance by `sequence_length` tokens: they share one token, which is a
target of the first and an input of the second.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diloco.base.errors import DataError
from diloco.config.contract import DataSection

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]
Runs: TypeAlias = Sequence[TokenArray]
"""Runs of tokens; no block crosses from one to the next."""
Documents: TypeAlias = Mapping[str, Sequence[TokenArray]]
"""Tokens of the documents of each file, by the file's name."""


class Dataset(Protocol):
    """A source of training blocks. The order in which they are trained on is `diloco.data.reader`'s business."""

    vocab_size: int
    sequence_length: int
    """L: tokens of one sequence."""
    blocks_per_epoch: int | None
    """Training blocks in all; None when nobody knows yet: a stream, which starts again at its end."""
    fingerprint: str
    """Hexadecimal; equal exactly when two peers read the same blocks."""

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """The dataset's training blocks by index in source order: int64 of shape (len(blocks), L + 1).

        Raises IndexError for a block beyond the epoch and DataError for damaged data.
        """
        ...

    def heldout(self, sequences: int) -> torch.Tensor:
        """The dataset's held-out blocks, the same at each call and on every peer, never trained on: int64 (n, L + 1).

        n is `sequences`, or fewer (at least 1) where the held-out part has no more.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place in a stream of data, as JSON values; empty where blocks are read in any order."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to the place in the stream of data that `state_dict` returned."""
        return


class ArrayDataset(Dataset):
    """A dataset of blocks cut from arrays of tokens, in memory or memory-mapped."""

    def __init__(
        self, training: Runs, heldout: Runs, *, sequence_length: int, vocab_size: int, fingerprint: str, where: str
    ) -> None:
        """`where` names the data in errors. Raises DataError when either part has not even one block."""
        self._training = _Blocks(training, sequence_length)
        self._heldout = _Blocks(heldout, sequence_length)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.blocks_per_epoch: int | None = self._training.total
        self.fingerprint = fingerprint
        self._where = where
        if not (self._training.total and self._heldout.total):
            tokens = sum(map(len, training)) + sum(map(len, heldout))
            cause = f"{tokens} tokens do not make one training and one held-out block of {sequence_length} each"
            raise DataError(f"{where}: {cause}", "add text or lower data.sequence_length")

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._checked(self._training.read(blocks))

    def heldout(self, sequences: int) -> torch.Tensor:
        # Spread over the whole held-out part: its first blocks alone would often be one file.
        count = min(sequences, self._heldout.total)
        return self._checked(self._heldout.read([i * self._heldout.total // count for i in range(count)]))

    def _checked(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        # An index beyond the embedding is a crash far from its cause (on a GPU, an assertion on the device).
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.vocab_size:
            cause = f"{self._where}: holds token {rows.max()}, beyond its vocabulary of {self.vocab_size}"
            raise DataError(cause, "the file is damaged: pack or copy it again")
        return torch.from_numpy(rows)


class _Blocks:
    """Blocks numbered through several arrays of tokens; copied from them only when they are read."""

    def __init__(self, arrays: Runs, sequence_length: int) -> None:
        self._arrays = arrays
        self._length = sequence_length
        counts = (block_count(len(array), sequence_length) for array in arrays)
        self._ends = list(itertools.accumulate(counts))
        self.total = self._ends[-1] if self._ends else 0

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        rows = np.empty((len(blocks), self._length + 1), np.int64)
        for row, block in zip(rows, blocks, strict=True):
            if not 0 <= block < self.total:
                raise IndexError(f"block {block} of {self.total}")
            which = bisect.bisect_right(self._ends, block)
            first = block - (self._ends[which - 1] if which else 0)
            start = first * self._length
            row[:] = self._arrays[which][start : start + self._length + 1]
        return rows


def block_count(tokens: int, sequence_length: int) -> int:
    """Number of training blocks that a text of `tokens` tokens makes; what is left at its end is not used."""
    return max(0, (tokens - 1) // sequence_length)


def fingerprint(*parts: str | int | float | bytes | TokenArray) -> str:
    """A dataset's SHA-256 over parts, each preceded by its length so that no two lists of parts look alike; in hex."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.data if isinstance(part, np.ndarray) else memoryview(repr(part).encode())
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def split_dataset(
    documents: Documents, section: DataSection, vocab_size: int, distinguished_by: Sequence[int], where: str
) -> ArrayDataset:
    """The dataset of `documents` in memory. Its fingerprint is that of both parts, and of `distinguished_by`."""
    length = section.sequence_length
    training, heldout = split(documents, section.holdout, length)
    digest = fingerprint(length, *distinguished_by, training, heldout)
    return ArrayDataset(
        [training], [heldout], sequence_length=length, vocab_size=vocab_size, fingerprint=digest, where=where
    )


def split(documents: Documents, holdout: float, sequence_length: int) -> tuple[TokenArray, TokenArray]:
    """Training and held-out tokens of `documents`: decided by names and sizes, never by chance or by the file system's
    order.

    Whole files are held out where that comes near the share `holdout` of the tokens; with few files, whole
    documents; with few documents, the end of the text.
    """
    single = {f"{name}#{i}": [array] for name, arrays in documents.items() for i, array in enumerate(arrays)}
    for units in (documents, single):
        sizes = {name: sum(map(len, arrays)) for name, arrays in units.items()}
        chosen = choose(sizes, holdout)
        if sum(sizes[name] for name in chosen) > sequence_length:
            return (
                _concatenate(array for name in units if name not in chosen for array in units[name]),
                _concatenate(array for name in units if name in chosen for array in units[name]),
            )
    return tail(_concatenate(itertools.chain.from_iterable(documents.values())), holdout, sequence_length)


def choose(sizes: Mapping[str, int], holdout: float) -> frozenset[str]:
    """Names of held-out documents: the first by hash with the share `holdout` of the sizes, and less than twice that.

    A name that is larger than the share is passed over. Empty when the others do not reach the share.
    """
    target = holdout * sum(sizes.values())
    small = [name for name, size in sizes.items() if size <= target]
    small.sort(key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    sums = list(itertools.accumulate(sizes[name] for name in small))
    reached = next((count for count, total in enumerate(sums, 1) if total >= target), 0)
    return frozenset(small[:reached])


def tail(tokens: TokenArray, holdout: float, sequence_length: int) -> tuple[TokenArray, TokenArray]:
    """Training and held-out tokens of a text: held out is the share `holdout` of blocks, at least one, at the end."""
    held_blocks = math.ceil(block_count(len(tokens), sequence_length) * holdout)
    cut = max(0, len(tokens) - (held_blocks * sequence_length + 1))
    return tokens[:cut], tokens[cut:]


def _concatenate(arrays: Iterable[TokenArray]) -> TokenArray:
    listed = list(arrays)
    return np.concatenate(listed) if listed else np.empty(0, np.uint8)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest little-endian unsigned type that holds every token of a tokenizer's vocabulary."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")
