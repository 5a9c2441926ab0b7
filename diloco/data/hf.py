"""The data source `hf` (extra `hf`): local files as a stream, by Hugging Face's `datasets`.

Nothing is downloaded and no code from a data folder is run. A stream has no random access: every peer runs through
all documents and keeps the blocks that are its own. For large runs a packed shard costs much less.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from diloco.base.errors import ConfigError, DataError
from diloco.config.contract import DataSection
from diloco.data.dataset import Dataset, TokenArray, fingerprint, token_dtype
from diloco.data.files import find, missing_extra, unreadable
from diloco.data.text import Tokenizer, open_tokenizer, text_of

try:
    import datasets
except ImportError as missing:
    raise missing_extra(missing) from missing

# Else opening even a local file asks the hub to count it, and waits up to 3 s for the answer.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""The `datasets` builder by the end of a file's name."""

_BAD_FILE = (ValueError, TypeError, NotImplementedError, OSError, datasets.exceptions.DatasetsError)
"""Errors that the builders raise for a file that they cannot parse."""


Load: TypeAlias = Callable[[], datasets.IterableDataset]
"""Opens a stream of records at its beginning."""


class StreamDataset:
    """A dataset of blocks of a stream of documents, in order; the stream starts again at its end, without a break.

    Reading a later block costs the tokenising of what lies between, an earlier one that of all before it. A document
    is held out by the hash of its text.
    """

    def __init__(self, load: Load, tokenizer: Tokenizer, section: DataSection, files_digest: str, where: str) -> None:
        """`files_digest` is a digest of the files that `load` reads; `where` names them in errors.

        Raises DataError when there is not one block to train on, or not one to hold out.
        """
        self._load = load
        self._tokenizer = tokenizer
        self._text_field = section.text_field
        self._held_below = int(section.holdout * 2**64)
        self._where = where
        self._heldout: dict[int, TokenArray] = {}
        self.vocab_size = tokenizer.vocab_size
        self.sequence_length = section.sequence_length
        self.blocks_per_epoch: int | None = None
        # Where one pass has no block to train on, the endless stream would repeat one text, or fill the memory.
        tokens = 0
        for document in self._documents(self._load(), held=False):
            tokens += len(document)
            if tokens > self.sequence_length:
                break
        else:
            if not tokens:
                raise DataError(f"{where}: no text to train on", "check data.paths and data.text_field")
            cause = f"{where}: {tokens} tokens do not make one training block of {self.sequence_length}"
            raise DataError(cause, "add text or lower data.sequence_length")
        self._start(None, 0, 0)
        first, held = self._row(0), self._collect(1)
        self.fingerprint = fingerprint(section.holdout, tokenizer.fingerprint, files_digest, first, held)

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        rows = np.empty((len(blocks), self.sequence_length + 1), np.int64)
        for row in np.argsort(blocks, stable=True):
            rows[row] = self._row(blocks[row])
        return torch.from_numpy(rows)

    def heldout(self, sequences: int) -> torch.Tensor:
        if sequences not in self._heldout:
            self._heldout[sequences] = self._collect(sequences)
        return torch.from_numpy(self._heldout[sequences])

    def state_dict(self) -> dict[str, Any]:
        return {"block": self._block, "stream": self._stream, "skip": self._skip}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "skip" in state:
            self._start(state["stream"], state["block"], state["skip"])
        else:  # of a diloco that kept tokens: its stream stands behind those, so the place is found from the beginning
            self._start(None, 0, 0)

    def _start(self, stream: dict[str, Any] | None, block: int, skip: int) -> None:
        """Go to `block` of the data stream, which begins `skip` tokens after `stream`, a state of the iterable."""
        self._records = self._load()
        if stream is not None:
            self._records.load_state_dict(stream)
        self._training = self._passes()
        self._block = block
        self._pending: TokenArray = np.empty(0, token_dtype(self.vocab_size))
        # To come back here nothing is kept but where a document began: one may be as large as a file.
        self._stream, self._skip = self._records.state_dict(), 0
        self._later: tuple[dict[str, Any], int] | None = None
        """The beginning of a later document, and tokens up to there."""
        self._advance(skip)

    def _passes(self) -> Iterator[TokenArray]:
        while True:
            yield from self._documents(self._records, held=False)
            # A fresh one: the same would go back to the state it was loaded with.
            self._records = self._load()

    def _row(self, block: int) -> TokenArray:
        """The L + 1 tokens of `block`, at which the data stream is then."""
        if block < self._block:
            self._start(None, 0, 0)
        while self._block < block:
            self._advance(self.sequence_length)
            self._block += 1
        self._fill(self.sequence_length + 1)
        return self._pending[: self.sequence_length + 1]

    def _advance(self, tokens: int) -> None:
        self._fill(tokens)
        self._pending = self._pending[tokens:]
        self._skip += tokens
        if self._later is not None and self._later[1] <= self._skip:
            self._stream, passed = self._later
            self._skip -= passed
            self._later = None

    def _fill(self, tokens: int) -> None:
        while len(self._pending) < tokens:
            if self._later is None:
                self._later = self._records.state_dict(), self._skip + len(self._pending)
            self._pending = np.concatenate([self._pending, next(self._training)])

    def _collect(self, sequences: int) -> TokenArray:
        """The stream's first held-out blocks of data, int64 of shape (at most `sequences`, L + 1). Raises DataError."""
        tokens = np.empty(0, np.int64)
        for document in self._documents(self._load(), held=True):
            tokens = np.concatenate([tokens, document])
            if len(tokens) > sequences * self.sequence_length:
                break
        if len(tokens) <= self.sequence_length:
            raise DataError(f"{self._where}: no held-out block in {len(tokens)} held-out tokens", "raise data.holdout")
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self.sequence_length + 1)
        return windows[:: self.sequence_length][:sequences].copy()

    def _documents(self, records: datasets.IterableDataset, held: bool) -> Iterator[TokenArray]:
        """Tokens of the held-out or training documents in one pass through the data, each with the separator."""
        separator = np.array([self._tokenizer.separator], token_dtype(self.vocab_size))
        for text in self._texts(records):
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_held = int.from_bytes(digest, "little") < self._held_below
            if text and is_held == held:
                yield np.concatenate([self._tokenizer.encode(text), separator])

    def _texts(self, records: datasets.IterableDataset) -> Iterator[str]:
        try:
            for record in records:
                yield text_of(record, self._text_field, f"a record of {self._where}")
        except _BAD_FILE as error:
            raise DataError(f"{self._where}: cannot be read: {error}", "check the files") from error


def open_stream(section: DataSection, root: Path) -> Dataset:
    """The data source `hf`: JSON, JSONL, parquet or text files (one kind), in the order of their paths, as an endless
    stream of documents.

    Raises DataError (missing, empty, malformed) and ConfigError (a path outside `root`, several kinds).
    """
    files = find(section.paths, root, tuple(_BUILDERS))
    kinds = {file.suffix for file in files}
    if len(kinds) > 1 or not kinds <= _BUILDERS.keys():
        cause = f"data.paths lead to files that end in {', '.join(sorted(kinds))}"
        raise ConfigError(cause, f"name one of {', '.join(_BUILDERS)}")
    builder = _BUILDERS[kinds.pop()]
    options = {"sample_by": "document"} if builder == "text" else {}  # by default each line would be one
    names = [glob.escape(str(file)) for file in files]

    def load() -> datasets.IterableDataset:
        try:
            return datasets.load_dataset(builder, data_files=names, split="train", streaming=True, **options)
        except StopIteration as error:  # how the JSON builder meets a first file without a record
            raise DataError(f"{files[0]} is empty", "leave it out of data.paths") from error
        except _BAD_FILE as error:
            raise DataError(f"{files[0]} and what follows cannot be read: {error}", "check the files") from error

    tokenizer = open_tokenizer(section.tokenizer, root)
    digest = fingerprint(builder, *(_sample(file) for file in files))
    return StreamDataset(load, tokenizer, section, digest, where=f"{', '.join(section.paths)} in {root}")


def _sample(file: Path) -> str:
    """Digest of a data file's size and of up to 16 pieces of 64 KiB spread over it: whole, it may be too large."""
    piece_bytes, pieces = 2**16, 16
    try:
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            step_bytes = max(piece_bytes, (size_bytes - piece_bytes) // (pieces - 1) + 1)
            digest = hashlib.sha256(str(size_bytes).encode())
            for start_bytes in range(0, size_bytes, step_bytes):
                stream.seek(start_bytes)
                digest.update(stream.read(piece_bytes))
    except OSError as error:
        raise unreadable(file, error) from error
    return digest.hexdigest()
