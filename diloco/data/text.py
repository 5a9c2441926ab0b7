"""Text as tokens: tokenizers, documents of text and JSONL files, and the data sources `text` and `stdlib`.

Both sources are tokenised into memory when they are opened. For text that does not fit, make a shard first, which reads
a file a piece at a time (`diloco data pack`).
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from diloco.base.errors import ConfigError, DataError
from diloco.base.paths import inside
from diloco.config.contract import DataSection
from diloco.data.dataset import Dataset, TokenArray, fingerprint, split_dataset, token_dtype
from diloco.data.files import TEXT_SUFFIXES, find, read_bytes, unreadable, walk

# ---------------------------------------------------------------- tokenizers


class Tokenizer(Protocol):
    """Conversion of text to tokens and back."""

    vocab_size: int
    separator: int
    """The token that ends a document."""
    fingerprint: str
    """Hexadecimal; differs between tokenizers that give other tokens."""

    def encode(self, text: str) -> TokenArray:
        """The tokenizer's tokens of `text`, without special ones: 1-D, of `token_dtype(vocab_size)`."""
        ...

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """The tokenizer's text of `tokens`; what is not text becomes U+FFFD."""
        ...


class ByteTokenizer:
    """A token is a byte of UTF-8; the separator is the byte 0, which text does not hold."""

    vocab_size = 256
    separator = 0
    fingerprint = fingerprint("bytes")

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def open_tokenizer(name: str, root: Path) -> Tokenizer:
    """The tokenizer `bytes`, or the Hugging Face one in the folder `root / name`; nothing is ever downloaded.

    Raises DataError (no such tokenizer) and ConfigError (a path outside `root`, or the extra is missing).
    """
    if name == "bytes":
        return ByteTokenizer()
    from diloco.data.hf_tokenizer import HFTokenizer

    return HFTokenizer(inside(name, root))


# ---------------------------------------------------------------- documents

PIECE_BYTES = 16 * 2**20
"""A text file is tokenised in pieces of about this size, each to the end of a line."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one document, or of a part of a long one; the last token of a document is the separator."""

    tokens: TokenArray
    input_bytes: int
    """Bytes of the file it was made of."""


def pieces(path: Path, tokenizer: Tokenizer, text_field: str) -> Iterator[Piece]:
    """Tokens of a `.jsonl` file (one document a line, in `text_field`) or of any other file (one UTF-8 document).

    Raises DataError, naming file and line.
    """
    separator = np.array([tokenizer.separator], token_dtype(tokenizer.vocab_size))
    texts = _jsonl(path, text_field) if path.suffix == ".jsonl" else _plain(path)
    try:
        for text, ends, input_bytes in texts:
            tokens = tokenizer.encode(text)
            yield Piece(np.concatenate([tokens, separator]) if ends else tokens, input_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def _plain(path: Path) -> Iterator[tuple[str, bool, int]]:
    """The one training document of a text file, in pieces: (text, whether the document ends with it, bytes read)."""
    with path.open("rb") as file:
        start = 0
        data = file.read(PIECE_BYTES) + file.readline()
        while data:
            following = file.read(PIECE_BYTES) + file.readline()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                cause = f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at offset {start + error.start}"
                raise DataError(cause, "convert it to UTF-8, or leave it out of data.paths") from error
            yield text, not following, len(data)
            start += len(data)
            data = following


def _jsonl(path: Path, text_field: str) -> Iterator[tuple[str, bool, int]]:
    """The training documents of a JSONL file, as `_plain` has them; blank lines and empty texts are none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON: {error}", "write one JSON object on each line") from error
            text = text_of(record, text_field, where)
            if text:
                yield text, True, len(line)


def text_of(record: object, text_field: str, where: str) -> str:
    """Text in a data record's field, with lone surrogates (which no UTF-8 text can hold) replaced. Raises DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with the field {text_field!r}, got {type(record).__name__}")
    if text_field not in record:
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"{where}: no field {text_field!r} (fields: {fields})", "set data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text", "set data.text_field")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---------------------------------------------------------------- sources


def open_text(section: DataSection, root: Path) -> Dataset:
    """The data source `text`: documents are files, or the lines of `.jsonl` files, in the order of their paths.

    Raises DataError (missing, empty, not UTF-8, not JSON, no such field) and ConfigError (a path outside `root`).
    """
    tokenizer = open_tokenizer(section.tokenizer, root)
    documents = {
        file.relative_to(root).as_posix(): [piece.tokens for piece in pieces(file, tokenizer, section.text_field)]
        for file in find(section.paths, root, TEXT_SUFFIXES)
    }
    where = f"{', '.join(section.paths)} in {root}"
    return split_dataset(documents, section, tokenizer.vocab_size, (tokenizer.vocab_size,), where)


_SKIP_FOLDERS = frozenset(
    # not the standard library, or compiled
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    # packaged separately by distributions
    | {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    # 1.4 MB of character tables
    | {"encodings"}
)
_SKIP_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Beginnings of file names that hold this machine's own settings."""


def open_stdlib(section: DataSection) -> Dataset:
    """The data source `stdlib`: source text of the Python standard library on this machine, as bytes.

    It needs no download, and two machines with the same Python hold the same text. Raises DataError when the library's
    source is not installed, and ConfigError for keys that it does not take.
    """
    if section.tokenizer != "bytes" or section.paths:
        raise ConfigError("data.source 'stdlib' takes bytes only and no paths", "for anything else use 'text'")
    return read_library(Path(sysconfig.get_path("stdlib")), section)


def read_library(folder: Path, section: DataSection) -> Dataset:
    """The dataset of a standard library in `folder`: documents are files, each followed by the byte 0.

    Left out are the parts that distributions leave out or that differ from build to build, tests, and tables of
    numbers. Raises DataError.
    """
    files = [file for file in walk(folder, (".py",), _SKIP_FOLDERS) if not file.name.startswith(_SKIP_FILES)]
    documents = {
        file.relative_to(folder).as_posix(): [np.frombuffer(read_bytes(file) + b"\0", np.uint8)] for file in files
    }
    if not documents:
        raise DataError(f"{folder} holds no source of the standard library (*.py)", "use data.source = 'text'")
    return split_dataset(documents, section, ByteTokenizer.vocab_size, (), str(folder))
