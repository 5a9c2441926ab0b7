"""Token shards: memory-mapped `.bin` files with a header of our own and 1-D `.npy` arrays, and the packing of text into
the former (`diloco data pack`), which does not hold it in memory.

A `.bin` shard is a header of 96 bytes and the tokens, all little-endian:

    magic 8s | version u16 | bytes per token u16 (1, 2, 4) | vocabulary u32 | tokens u64
    | SHA-256 of the token bytes 32s | fingerprint of the tokenizer 32s | CRC-32 of all before u32 | 4 zero bytes
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np

from diloco.base.errors import DataError, ResourceError, UsageError
from diloco.config.contract import DataSection
from diloco.data.dataset import ArrayDataset, Dataset, TokenArray, fingerprint, tail, token_dtype
from diloco.data.files import TEXT_SUFFIXES, expand, find, unreadable
from diloco.data.text import Tokenizer, pieces

MAGIC = b"DILOCO\0T"
VERSION = 1
VERIFY_BYTES = 256 * 2**20
"""Shards up to this size are read through and compared with their checksum when opened (about 0.2 s); of larger
ones only header and size are, and a token beyond the vocabulary is found when it is read."""

_LAYOUT = struct.Struct("<8sHHIQ32s32s")
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _LAYOUT.size + _CRC.size
_PACK_AGAIN = "pack or copy it again"


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """Header of a shard file; little-endian, `HEADER_BYTES` long. An `.npy` file has none: it gets one in memory."""

    token_bytes: int
    """Bytes per token: 1, 2 or 4."""
    vocab_size: int
    tokens: int
    checksum: bytes
    """SHA-256 of the token bytes."""
    tokenizer: bytes
    """Fingerprint of the tokenizer; empty for an `.npy` file, which does not say."""

    def to_bytes(self) -> bytes:
        """The header of a token file as it is there: `HEADER_BYTES` bytes."""
        fields = (self.token_bytes, self.vocab_size, self.tokens, self.checksum, self.tokenizer)
        data = _LAYOUT.pack(MAGIC, VERSION, *fields)
        return data + _CRC.pack(zlib.crc32(data))

    @staticmethod
    def from_bytes(data: bytes, path: Path) -> ShardHeader:
        """Parse a token file's header. Raises DataError, naming `path`, on anything that `to_bytes` does not write."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise DataError(f"{path} is not a token shard (no {MAGIC!r} header)", "make it with `diloco data pack`")
        _, version, *fields = _LAYOUT.unpack_from(data)
        if version != VERSION:
            raise DataError(f"{path} is a shard of format {version}, expected {VERSION}", "pack it again")
        header = ShardHeader(*fields)
        if header.to_bytes() != data or header.token_bytes not in (1, 2, 4) or not header.tokens:
            raise DataError(f"{path} has a damaged header", _PACK_AGAIN)
        return header


def open_shards(section: DataSection, root: Path) -> Dataset:
    """The data source `shards`: `.bin` and `.npy` files in the order of their paths.

    The last blocks of each file are held out. The vocabulary is the header's, and for `.npy` the largest token plus
    one. Raises DataError (missing, damaged, truncated, not a 1-D array of whole numbers, made by different tokenizers)
    and ConfigError.
    """
    files = find(section.paths, root, (".bin", ".npy"))
    shards = [_open_npy(file) if file.suffix == ".npy" else _open_bin(file) for file in files]
    headers = [header for _, header in shards]
    if len({header.tokenizer for header in headers} - {b""}) > 1:
        raise DataError(f"the shards in {root} were made by different tokenizers", "pack them again with one")
    parts = [tail(tokens, section.holdout, section.sequence_length) for tokens, _ in shards]
    vocab_size = max(header.vocab_size for header in headers)
    checksums = (header.checksum for header in headers)
    return ArrayDataset(
        [training for training, _ in parts],
        [heldout for _, heldout in parts],
        sequence_length=section.sequence_length,
        vocab_size=vocab_size,
        fingerprint=fingerprint(section.sequence_length, section.holdout, vocab_size, *checksums),
        where=f"{', '.join(section.paths)} in {root}",
    )


def _open_bin(path: Path) -> tuple[TokenArray, ShardHeader]:
    try:
        with path.open("rb") as file:
            header = ShardHeader.from_bytes(file.read(HEADER_BYTES), path)
        actual_bytes = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    expected_bytes = HEADER_BYTES + header.tokens * header.token_bytes
    if actual_bytes != expected_bytes:
        raise DataError(f"{path} has {actual_bytes} bytes where its header says {expected_bytes}", _PACK_AGAIN)
    tokens = np.memmap(path, np.dtype(f"<u{header.token_bytes}"), "r", HEADER_BYTES, (header.tokens,))
    if actual_bytes <= VERIFY_BYTES and hashlib.sha256(tokens.data).digest() != header.checksum:
        raise DataError(f"{path} is damaged: its tokens do not match its checksum", _PACK_AGAIN)
    return tokens, header


def _open_npy(path: Path) -> tuple[TokenArray, ShardHeader]:
    """A token file without a header is read through: for its largest token, and for a checksum whatever its type is."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, TypeError, OverflowError, TokenError) as error:  # what numpy makes of a bad header
        raise DataError(f"{path} is not a whole .npy array: {error}", "write it again with numpy.save") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise DataError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, expected a 1-D array of whole numbers")
    digest = hashlib.sha256()
    low, high = int(tokens[0]), int(tokens[0])
    for start in range(0, len(tokens), 2**20):
        piece = tokens[start : start + 2**20]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
        digest.update(np.ascontiguousarray(piece, "<i8").data)
    if low < 0 or high >= 2**31:
        raise DataError(f"{path} holds {low if low < 0 else high}, which is no token", "tokens are 0 to 2**31 - 1")
    return tokens, ShardHeader(tokens.itemsize, high + 1, len(tokens), digest.digest(), tokenizer=b"")


# ---------------------------------------------------------------- packing

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are."""


@dataclass(frozen=True, slots=True)
class PackResult:
    """Counts of a packed shard."""

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
    tokens, read_bytes, checksum = 0, 0, hashlib.sha256()
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        total_bytes = sum(file.stat().st_size for file in files)
        with partial.open("wb", buffering=2**20) as shard:
            shard.write(bytes(HEADER_BYTES))  # its place: it is known when all tokens are
            for piece in (piece for file in files for piece in pieces(file, tokenizer, text_field)):
                data = piece.tokens.astype(dtype, copy=False).tobytes()
                shard.write(data)
                checksum.update(data)
                tokens += len(piece.tokens)
                read_bytes += piece.input_bytes
                if progress:
                    progress(read_bytes, total_bytes)
            made_by = bytes.fromhex(tokenizer.fingerprint)
            header = ShardHeader(dtype.itemsize, tokenizer.vocab_size, tokens, checksum.digest(), made_by)
            shard.seek(0)
            shard.write(header.to_bytes())
            shard.flush()
            os.fsync(shard.fileno())
        if not tokens:
            raise DataError(f"no text in {', '.join(map(str, paths))}", "name files that hold text")
        partial.replace(output)
    except OSError as error:
        raise ResourceError(
            f"cannot write {output}: {error.strerror}", "name a file in a folder that exists, with room on its disk"
        ) from error
    finally:
        with suppress(OSError):  # it may not be there, and its folder may be none
            partial.unlink()
    return PackResult(tokens, len(files), read_bytes)
