"""From a text or JSONL file to tokens, a piece at a time, so that a file larger than memory can be packed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco.base.errors import DataError
from diloco.data.dataset import TokenArray
from diloco.data.files import unreadable
from diloco.data.tokenizer import Tokenizer, token_dtype

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
    """(text, whether the document ends with it, bytes read)."""
    with path.open("rb") as file:
        start = 0
        data = file.read(PIECE_BYTES) + file.readline()
        while data:
            following = file.read(PIECE_BYTES) + file.readline()
            yield _decode(data, path, start), not following, len(data)
            start += len(data)
            data = following


def _decode(data: bytes, path: Path, start: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at offset {start + error.start}",
            "convert it to UTF-8, or leave it out of data.paths",
        ) from error


def _jsonl(path: Path, text_field: str) -> Iterator[tuple[str, bool, int]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _field(line, text_field, f"{path}:{number}") if line.strip() else ""
            if text:
                yield text, True, len(line)


def _field(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}", "write one JSON object on each line") from error
    return text_of(record, text_field, where)


def text_of(record: object, text_field: str, where: str) -> str:
    """The text in a record's field, with lone surrogates (which no UTF-8 text can hold) replaced. Raises DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with the field {text_field!r}, got {type(record).__name__}")
    if text_field not in record:
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"{where}: no field {text_field!r} (fields: {fields})", "set data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text", "set data.text_field")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
