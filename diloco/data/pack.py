"""`diloco data pack`: text and JSONL files into one token shard, without holding them in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.base.errors import DataError, ResourceError, UsageError
from diloco.data.documents import pieces
from diloco.data.files import TEXT_SUFFIXES, expand
from diloco.data.shards import HEADER_BYTES, ShardHeader
from diloco.data.tokenizer import Tokenizer, token_dtype

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are."""


@dataclass(frozen=True, slots=True)
class PackResult:
    """Counts of a finished packing."""

    tokens: int
    """Tokens written, separators included."""
    files: int
    """Files read."""
    bytes: int
    """Bytes read."""


def pack(
    paths: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    text_field: str = "text",
    progress: Progress | None = None,
) -> PackResult:
    """Write the documents at `paths` (files, or folders searched recursively), in that order, to the shard `output`.

    The shard is written beside `output` and renamed when it is whole and on disk. Raises UsageError (`output` is no
    `.bin` file), DataError (a bad input, or no text in any) and ResourceError (it cannot be written: disk full).
    """
    if output.suffix != ".bin" or output.is_dir():
        raise UsageError(f"cannot pack into {output}", "name a file that ends in .bin")
    files = [file for path in paths for file in expand(path, TEXT_SUFFIXES, "name files or folders that are there")]
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        result = _write(files, partial, tokenizer, text_field, progress)
        if not result.tokens:
            raise DataError(f"no text in {', '.join(map(str, paths))}", "name files that hold text")
        partial.replace(output)
    except OSError as error:
        raise ResourceError(f"cannot write {output}: {error.strerror}", "free disk space or pack elsewhere") from error
    finally:
        with suppress(OSError):  # it may not be there, and its folder may be none
            partial.unlink()
    return result


def _write(
    files: Sequence[Path], partial: Path, tokenizer: Tokenizer, text_field: str, progress: Progress | None
) -> PackResult:
    total_bytes = sum(file.stat().st_size for file in files)
    tokens, read_bytes, checksum = 0, 0, hashlib.sha256()
    dtype = token_dtype(tokenizer.vocab_size)
    with partial.open("wb", buffering=2**20) as shard:
        shard.write(bytes(HEADER_BYTES))
        for piece in (piece for file in files for piece in pieces(file, tokenizer, text_field)):
            data = piece.tokens.astype(dtype, copy=False).tobytes()
            shard.write(data)
            checksum.update(data)
            tokens += len(piece.tokens)
            read_bytes += piece.input_bytes
            if progress:
                progress(read_bytes, total_bytes)
        header = ShardHeader(
            dtype.itemsize, tokenizer.vocab_size, tokens, checksum.digest(), bytes.fromhex(tokenizer.fingerprint)
        )
        shard.seek(0)
        shard.write(header.to_bytes())
        shard.flush()
        os.fsync(shard.fileno())
    return PackResult(tokens, len(files), read_bytes)
