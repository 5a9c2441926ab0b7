"""Which part is held out for evaluation: decided by names and sizes, never by chance or by the file system's order."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from diloco.config.contract import DataSection
from diloco.data.dataset import ArrayDataset, TokenArray, block_count, fingerprint


def split_dataset(
    documents: Mapping[str, Sequence[TokenArray]],
    section: DataSection,
    vocab_size: int,
    distinguished_by: Sequence[int],
    where: str,
) -> ArrayDataset:
    """The dataset of `documents` in memory. Its fingerprint is that of both parts, and of `distinguished_by`."""
    length = section.sequence_length
    training, heldout = split(documents, section.holdout, length)
    digest = fingerprint(length, *distinguished_by, training, heldout)
    return ArrayDataset(
        [training], [heldout], sequence_length=length, vocab_size=vocab_size, fingerprint=digest, where=where
    )


def split(
    documents: Mapping[str, Sequence[TokenArray]], holdout: float, sequence_length: int
) -> tuple[TokenArray, TokenArray]:
    """(training, held-out) tokens of `documents`, the documents of each file by the file's name.

    Whole files are held out where that comes near the share `holdout` of the tokens; with few files, whole
    documents; with few documents, the end of the text.
    """
    single = {f"{name}#{i}": [array] for name, arrays in documents.items() for i, array in enumerate(arrays)}
    for units in (documents, single):
        sizes = {name: sum(map(len, arrays)) for name, arrays in units.items()}
        chosen = choose(sizes, holdout)
        if sum(sizes[name] for name in chosen) > sequence_length:
            training, heldout = (
                _concatenate(array for name in units if (name in chosen) == held for array in units[name])
                for held in (False, True)
            )
            return training, heldout
    return tail(_concatenate(itertools.chain.from_iterable(documents.values())), holdout, sequence_length)


def choose(sizes: Mapping[str, int], holdout: float) -> frozenset[str]:
    """Names, in the order of their hash, that together have the share `holdout` of the sizes and less than twice that.

    A name that is larger than the share is passed over. Empty when the others do not reach the share.
    """
    target = holdout * sum(sizes.values())
    small = sorted((name for name, size in sizes.items() if size <= target), key=_hash)
    sums = list(itertools.accumulate(sizes[name] for name in small))
    reached = next((count for count, total in enumerate(sums, 1) if total >= target), 0)
    return frozenset(small[:reached])


def tail(tokens: TokenArray, holdout: float, sequence_length: int) -> tuple[TokenArray, TokenArray]:
    """(training, held-out) where held-out is the share `holdout` of the blocks, at least one, at the end."""
    held_blocks = math.ceil(block_count(len(tokens), sequence_length) * holdout)
    cut = max(0, len(tokens) - (held_blocks * sequence_length + 1))
    return tokens[:cut], tokens[cut:]


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _concatenate(arrays: Iterable[TokenArray]) -> TokenArray:
    listed = list(arrays)
    return np.concatenate(listed) if listed else np.empty(0, np.uint8)
