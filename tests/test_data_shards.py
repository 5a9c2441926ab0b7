"""Token shards: what `pack` writes is what training reads, and a damaged file never gets that far."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.base.errors import DataError, ResourceError, UsageError
from diloco.config.contract import DataSection
from diloco.data import open_dataset
from diloco.data.dataset import token_dtype
from diloco.data.shards import HEADER_BYTES, MAGIC, ShardHeader, pack
from diloco.data.text import ByteTokenizer

TEXT = "".join(f"line {i} of a text for packing\n" for i in range(100))


class WideTokenizer:
    """A token is a character; `vocab_size` decides how wide tokens are on disk."""

    separator = 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = hashlib.sha256(str(vocab_size).encode()).hexdigest()

    def encode(self, text: str) -> Any:
        return np.array([ord(letter) for letter in text], token_dtype(self.vocab_size))

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def section(*paths: str, **keys: Any) -> DataSection:
    return DataSection(source="shards", paths=paths, **({"sequence_length": 8, "holdout": 0.1} | keys))


def packed(root: Path, text: str = TEXT, name: str = "a") -> Path:
    (root / f"{name}.txt").write_text(text, encoding="utf-8")
    pack([root / f"{name}.txt"], root / f"{name}.bin", ByteTokenizer())
    return root / f"{name}.bin"


def test_a_packed_text_reads_back(tmp_path: Path) -> None:
    packed(tmp_path)
    dataset = open_dataset(section("a.bin"), tmp_path)
    tokens = TEXT.encode() + b"\0"
    blocks = dataset.blocks_per_epoch
    assert blocks is not None
    assert dataset.vocab_size == 256
    assert dataset.read(range(blocks)).tolist() == [list(tokens[8 * i : 8 * i + 9]) for i in range(blocks)]
    heldout = dataset.heldout(10**6)
    assert 8 * blocks + 8 * len(heldout) <= len(tokens) - 2
    assert bytes(heldout[-1].tolist()) == tokens[-9:]
    assert len(heldout) == -(-((len(tokens) - 1) // 8) // 10)


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 1), (40_000, 2), (200_000, 4)])
def test_tokens_of_every_width(tmp_path: Path, vocab_size: int, width: int) -> None:
    letter = chr(vocab_size - 1)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": letter * 10}) + "\n" for _ in range(20)))
    result = pack([tmp_path / "a.jsonl"], tmp_path / "a.bin", WideTokenizer(vocab_size))
    assert result.tokens == 220
    assert (tmp_path / "a.bin").stat().st_size == HEADER_BYTES + 220 * width
    dataset = open_dataset(section(".", sequence_length=10), tmp_path)
    assert dataset.vocab_size == vocab_size
    assert dataset.read([0]).tolist() == [[vocab_size - 1] * 10 + [1]]


def test_the_shard_says_what_it_holds(tmp_path: Path) -> None:
    data = packed(tmp_path, "abc").read_bytes()
    assert data[HEADER_BYTES:] == b"abc\0"
    header = ShardHeader.from_bytes(data[:HEADER_BYTES], tmp_path)
    tokenizer = bytes.fromhex(ByteTokenizer.fingerprint)
    assert header == ShardHeader(1, 256, 4, hashlib.sha256(b"abc\0").digest(), tokenizer)


def test_several_shards_are_one_dataset(tmp_path: Path) -> None:
    for name, letter in (("b", "b"), ("a", "a"), ("c", "c")):
        packed(tmp_path, letter * 200, name)
    dataset = open_dataset(section("."), tmp_path)
    assert dataset.blocks_per_epoch == 3 * 21  # 25 blocks each; 3 held out; one token kept apart costs one more
    assert dataset.read([0, 21, 62])[:, 0].tolist() == [ord(letter) for letter in "abc"]
    assert set(dataset.heldout(9)[:, 0].tolist()) == {ord(letter) for letter in "abc"}


def test_the_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    first = open_dataset(section(packed(tmp_path).name), tmp_path).fingerprint
    assert open_dataset(section(packed(tmp_path, TEXT, "same").name), tmp_path).fingerprint == first
    assert open_dataset(section(packed(tmp_path, TEXT[:-1] + "!", "other").name), tmp_path).fingerprint != first
    assert open_dataset(section("a.bin", holdout=0.2), tmp_path).fingerprint != first


# ---------------------------------------------------------------- damage


def sealed(fields: bytes) -> bytes:
    return fields + struct.pack("<I4x", zlib.crc32(fields))


def damages() -> Iterator[Any]:
    def rewrite(at: int, new: bytes) -> Any:
        return lambda data: sealed(data[:at] + new + data[at + len(new) : 88]) + data[HEADER_BYTES:]

    yield pytest.param(lambda data: data[:-1], r"has \d+ bytes where its header says", id="truncated")
    yield pytest.param(lambda data: data + b"x", r"has \d+ bytes where its header says", id="longer")
    yield pytest.param(lambda data: data[:50], "is not a token shard", id="only half a header")
    yield pytest.param(lambda data: b"", "is not a token shard", id="empty")
    yield pytest.param(lambda data: b"x" + data[1:], "is not a token shard", id="no magic")
    yield pytest.param(lambda data: data[:20] + b"\xff" + data[21:], "has a damaged header", id="flipped header")
    yield pytest.param(rewrite(8, b"\x07\0"), "shard of format 7, expected 1", id="later format")
    yield pytest.param(rewrite(10, b"\x03\0"), "has a damaged header", id="3 bytes per token")
    yield pytest.param(rewrite(16, b"\xff" * 8), "where its header says", id="absurd size")
    yield pytest.param(rewrite(16, bytes(8)), "has a damaged header", id="no tokens")
    yield pytest.param(lambda data: data[:-5] + b"#" + data[-4:], "do not match its checksum", id="flipped token")


@pytest.mark.parametrize(("damage", "message"), damages())
def test_a_damaged_shard_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = packed(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"a.bin.*{message}"):
        open_dataset(section("a.bin"), tmp_path)


def test_a_shard_too_large_to_verify_still_yields_no_token_beyond_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.data.shards.VERIFY_BYTES", 0)
    (tmp_path / "a.txt").write_text("x" * 1000)
    pack([tmp_path / "a.txt"], tmp_path / "a.bin", WideTokenizer(300))
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[HEADER_BYTES + 1] = 0xFF
    (tmp_path / "a.bin").write_bytes(data)
    dataset = open_dataset(section("a.bin"), tmp_path)
    assert dataset.read([1]).unique().tolist() == [ord("x")]
    with pytest.raises(DataError, match="holds token 65400, beyond its vocabulary of 300"):
        dataset.read([0])


def test_shards_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    packed(tmp_path)
    pack([tmp_path / "a.txt"], tmp_path / "b.bin", WideTokenizer(256))
    with pytest.raises(DataError, match="made by different tokenizers"):
        open_dataset(section("."), tmp_path)


def test_a_shard_smaller_than_two_blocks_is_an_error(tmp_path: Path) -> None:
    packed(tmp_path, "short")
    with pytest.raises(DataError, match=r"a\.bin in .*: 6 tokens do not make"):
        open_dataset(section("a.bin"), tmp_path)


# ---------------------------------------------------------------- npy


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "<i8", "u8"])
def test_npy_arrays_of_any_whole_number_type(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(200) % 101
    np.save(tmp_path / "a.npy", tokens.astype(dtype))
    np.save(tmp_path / "b.npy", tokens)
    dataset, wide = (open_dataset(section(name), tmp_path) for name in ("a.npy", "b.npy"))
    assert dataset.vocab_size == 101
    assert dataset.read([1]).tolist() == [list(range(8, 17))]
    assert dataset.fingerprint == wide.fingerprint
    assert dataset.read([0]).dtype == torch.int64


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 50), np.uint8), r"uint8 of shape \(2, 50\), expected a 1-D array"),
        (np.zeros(50), "holds float64"),
        (np.array([], np.uint8), r"of shape \(0,\)"),
        (np.arange(50) - 3, "holds -3, which is no token"),
        (np.array([2**31] * 50), "holds 2147483648, which is no token"),
        (np.array([{}], object), "is not a whole .npy array"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=f"a.npy.*{message}"):
        open_dataset(section("a.npy"), tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_npy_file_is_refused(tmp_path: Path, keep: int) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.npy is not a whole \.npy array"):
        open_dataset(section("a.npy"), tmp_path)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"}", b" "),
        (b"(100,)", b"(10.,)"),
        (b"(100,)", b"(9" + b"9" * 30 + b",)"),
        (b"'<i8'", b"'<i8 "),
        (b"{", b"\xff"),
    ],
)
def test_a_npy_file_with_a_damaged_header_is_refused(tmp_path: Path, was: bytes, becomes: bytes) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    whole = (tmp_path / "a.npy").read_bytes()
    header = whole[10:128].replace(was, becomes)
    header = header.rstrip()[:117].ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(whole[:10] + header + whole[128:])
    with pytest.raises(DataError, match=r"a\.npy is not a whole \.npy array"):
        open_dataset(section("a.npy"), tmp_path)


def test_an_archive_of_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(100))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"a\.npy is not a whole \.npy array"):
        open_dataset(section("a.npy"), tmp_path)


def test_an_empty_folder_of_shards_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no data \(looked for \*\.bin, \*\.npy\)"):
        open_dataset(section("."), tmp_path)


# ---------------------------------------------------------------- pack


def test_pack_reads_folders_and_reports(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("two")
    (tmp_path / "in" / "a.jsonl").write_text('{"body": "one"}\n{"body": "1"}\n')
    (tmp_path / "in" / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "last.log").write_text("three")
    seen: list[tuple[int, int]] = []
    result = pack(
        [tmp_path / "in", tmp_path / "last.log"],
        tmp_path / "out.bin",
        ByteTokenizer(),
        text_field="body",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (tmp_path / "out.bin").read_bytes()[HEADER_BYTES:] == b"one\x001\0two\0three\0"
    total = sum(len(text) for text in ('{"body": "one"}\n{"body": "1"}\n', "two", "three"))
    assert (result.tokens, result.files, result.bytes) == (16, 3, total)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_packed_text_gives_the_same_blocks_as_the_text(tmp_path: Path) -> None:
    packed(tmp_path)
    shard = open_dataset(section("a.bin"), tmp_path)
    text = open_dataset(DataSection(source="text", paths=("a.txt",), sequence_length=8, holdout=0.1), tmp_path)
    assert shard.blocks_per_epoch == text.blocks_per_epoch
    assert torch.equal(shard.read(range(100)), text.read(range(100)))
    assert torch.equal(shard.heldout(9), text.heldout(9))


@pytest.mark.parametrize("bad", [b'{"text": 1}', b'{"no": "x"}', b"{"])
def test_a_failed_pack_leaves_the_old_shard_and_nothing_else(tmp_path: Path, bad: bytes) -> None:
    path = packed(tmp_path)
    before = path.read_bytes()
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "good"}\n' + bad)
    with pytest.raises(DataError, match=r"b\.jsonl:2: "):
        pack([tmp_path / "b.jsonl"], path, ByteTokenizer())
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.txt", "b.jsonl"]


def test_a_full_disk_is_a_resource_error(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write itself fails, part of the way."""
    (tmp_path / "a.txt").write_text("x" * 2**22)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*a\.bin: File too large") as caught:
            pack([tmp_path / "a.txt"], tmp_path / "a.bin", ByteTokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_where_a_shard_cannot_go(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder.bin").mkdir()
    for output in (tmp_path / "a.npy", tmp_path / "folder.bin"):
        with pytest.raises(UsageError, match="cannot pack into"):
            pack([tmp_path / "a.txt"], output, ByteTokenizer())
    for folder, why in (("absent", "No such file or directory"), ("a.txt", "Not a directory")):
        with pytest.raises(ResourceError, match=why):
            pack([tmp_path / "a.txt"], tmp_path / folder / "a.bin", ByteTokenizer())


def test_nothing_to_pack(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text in"):
        pack([tmp_path / "a.txt"], tmp_path / "a.bin", ByteTokenizer())
    with pytest.raises(DataError, match="no such file or folder"):
        pack([tmp_path / "b.txt"], tmp_path / "a.bin", ByteTokenizer())
    assert not (tmp_path / "a.bin").exists()


def test_the_magic_is_not_text() -> None:
    assert len(MAGIC) == 8
    assert b"\0" in MAGIC
