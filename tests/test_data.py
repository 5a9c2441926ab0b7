"""Sources held in memory: the standard library and text files; paths, held-out split, blocks, errors."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.base.errors import ConfigError, DataError
from diloco.config.contract import DataSection
from diloco.data import open_dataset
from diloco.data.dataset import ArrayDataset, Dataset, choose, fingerprint, split, tail, token_dtype
from diloco.data.files import find
from diloco.data.text import ByteTokenizer, open_tokenizer, pieces, read_library


def text_section(*paths: str, **keys: Any) -> DataSection:
    keys = {"sequence_length": 8, "holdout": 0.1} | keys
    return DataSection(source="text", paths=paths, **keys)


def everything(dataset: Dataset) -> torch.Tensor:
    assert dataset.blocks_per_epoch is not None
    return dataset.read(range(dataset.blocks_per_epoch))


def write_tree(root: Path, files: dict[str, str], order: list[str] | None = None) -> Path:
    for name in order or list(files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(files[name], encoding="utf-8")
    return root


def numbered(count: int) -> dict[str, str]:
    return {f"d{i % 7}/f{i:03}.txt": f"[{i:03}]" * 8 for i in range(count)}


# ---------------------------------------------------------------- blocks


def test_blocks_of_a_hand_made_text(tmp_path: Path) -> None:
    write_tree(tmp_path, {"one.txt": "abcdefghijkl", "two.txt": "mnopq"})
    dataset = open_dataset(text_section(".", sequence_length=4), tmp_path)
    # 19 tokens, "abcdefghijkl\0mnopq\0": 4 blocks, of which the last is held out with the token it needs more.
    assert dataset.blocks_per_epoch == 3
    assert everything(dataset).tolist() == [list(b"abcde"), list(b"efghi"), list(b"ijkl\0")]
    assert dataset.heldout(5).tolist() == [list(b"nopq\0")]
    assert dataset.read([2, 0]).tolist() == [list(b"ijkl\0"), list(b"abcde")]
    assert dataset.read([]).shape == (0, 5)
    assert dataset.read([0]).dtype == torch.int64
    assert dataset.state_dict() == {}


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_beyond_the_epoch_is_an_error(tmp_path: Path, block: int) -> None:
    dataset = open_dataset(text_section(".", sequence_length=4), write_tree(tmp_path, {"a.txt": "abcdefghijklmnopqr"}))
    with pytest.raises(IndexError):
        dataset.read([block])


def test_blocks_do_not_cross_arrays() -> None:
    arrays = [np.arange(start, start + n) for start, n in ((0, 5), (10, 2), (20, 9))]
    dataset = ArrayDataset(
        arrays, [np.arange(5)], sequence_length=4, vocab_size=30, fingerprint=fingerprint(), where="here"
    )
    assert everything(dataset)[:, 0].tolist() == [0, 20, 24]


def test_the_held_out_blocks_are_spread_over_their_part() -> None:
    held = np.arange(1 + 4 * 10) % 256
    dataset = ArrayDataset([held], [held], sequence_length=4, vocab_size=256, fingerprint="", where="here")
    assert dataset.heldout(5)[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert len(dataset.heldout(1000)) == 10


def test_a_token_beyond_the_vocabulary_is_an_error_and_not_a_crash_in_the_model() -> None:
    held = np.arange(9)
    dataset = ArrayDataset([held], [held], sequence_length=4, vocab_size=8, fingerprint="", where="bad.bin")
    dataset.read([0])
    with pytest.raises(DataError, match=r"bad\.bin: holds token 8"):
        dataset.read([1])


def test_fingerprints_tell_apart_what_differs() -> None:
    array = np.arange(4, dtype=np.uint8)
    variants = [
        (1, array),
        (2, array),
        (1, array[:3]),
        (1, array + np.uint8(1)),
        (1, array[:2], array[2:]),
        (1, array[:3], array[3:]),
    ]
    assert len({fingerprint(*parts) for parts in variants}) == len(variants)


# ---------------------------------------------------------------- text


def test_the_order_of_the_directory_does_not_matter(tmp_path: Path) -> None:
    files = numbered(60)
    names = list(files)
    first = open_dataset(text_section("."), write_tree(tmp_path / "first", files, names))
    second = open_dataset(text_section("."), write_tree(tmp_path / "second", files, names[::-1]))
    assert first.fingerprint == second.fingerprint
    assert torch.equal(everything(first), everything(second))
    assert torch.equal(first.heldout(8), second.heldout(8))


@pytest.mark.parametrize("change", [{"sequence_length": 9}, {"holdout": 0.3}])
def test_the_fingerprint_changes_with_the_contract(tmp_path: Path, change: dict[str, Any]) -> None:
    write_tree(tmp_path, numbered(60))
    before, again, after = (open_dataset(text_section(".", **keys), tmp_path) for keys in ({}, {}, change))
    assert before.fingerprint == again.fingerprint != after.fingerprint


def test_the_fingerprint_changes_with_one_letter(tmp_path: Path) -> None:
    before = open_dataset(text_section("."), write_tree(tmp_path, numbered(60)))
    (tmp_path / "d3/f003.txt").write_text("[00x]" * 8)
    assert open_dataset(text_section("."), tmp_path).fingerprint != before.fingerprint


@pytest.mark.parametrize("layout", ["many files", "one jsonl", "one text"])
def test_held_out_text_is_never_in_training(tmp_path: Path, layout: str) -> None:
    texts = [f"<{i:05}>" for i in range(500)]
    if layout == "many files":
        write_tree(tmp_path, {f"{i}.txt": text for i, text in enumerate(texts)})
    elif layout == "one jsonl":
        write_tree(tmp_path, {"all.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts)})
    else:
        write_tree(tmp_path, {"all.txt": "\0".join(texts)})
    dataset = open_dataset(text_section(".", sequence_length=1), tmp_path)
    training, heldout = (bytes(rows[:, 0].tolist()) for rows in (everything(dataset), dataset.heldout(10**6)))
    seen = [{part for part in data.split(b"\0") if len(part) == 7} for data in (training, heldout)]
    assert not seen[0] & seen[1]
    assert 45 <= len(seen[1]) <= 55  # the share of 0.1, give or take the documents cut at the border
    assert len(seen[0]) + len(seen[1]) >= 497


def test_jsonl_documents(tmp_path: Path) -> None:
    lines = [{"body": "abcd", "n": 1}, {"body": ""}, {"body": "Zé"}, {"body": "\ud800!"}]
    write_tree(tmp_path, {"a.jsonl": "\n\n".join(map(json.dumps, lines))})
    tokens = [piece.tokens.tobytes() for piece in pieces(tmp_path / "a.jsonl", ByteTokenizer(), "body")]
    assert tokens == [b"abcd\0", "Zé\0".encode(), "\ufffd!\0".encode()]


def test_a_long_text_is_read_in_pieces_and_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i} é\n" for i in range(500))
    path = write_tree(tmp_path, {"a.txt": text}) / "a.txt"
    monkeypatch.setattr("diloco.data.text.PIECE_BYTES", 100)
    parts = list(pieces(path, ByteTokenizer(), "text"))
    assert len(parts) > 50
    assert b"".join(piece.tokens.tobytes() for piece in parts) == text.encode() + b"\0"
    assert sum(piece.input_bytes for piece in parts) == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "good"}\n{"body": "x", "n": 1}\n',
            r"a\.jsonl:2: no field 'text' \(fields: 'body', 'n'\)",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: field 'text' holds int"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: expected an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y\n', r"a\.jsonl:2: not JSON"),
        ("a.txt", b"good\n\xff\xfe", r"a\.txt is not UTF-8 text: byte 0xff at offset 5"),
        ("a.txt", b"", "0 tokens do not make one training and one held-out block"),
        ("a.txt", b"too short", "10 tokens do not make"),
        ("a.csv", b"a,b", r"holds no data \(looked for \*\.txt, "),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(text_section("in", sequence_length=16), tmp_path)
    assert "\n" not in caught.value.cause


def test_a_line_of_many_brackets_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + b"[" * 200_000)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        open_dataset(text_section("a.jsonl"), tmp_path)


def test_an_empty_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path}/empty holds no data") as caught:
        open_dataset(text_section("empty"), tmp_path)
    assert caught.value.fix
    with pytest.raises(DataError, match=f"no such file or folder: {tmp_path}/absent"):
        open_dataset(text_section("absent"), tmp_path)
    with pytest.raises(DataError, match=r"nothing matches '\*\.py' in"):
        open_dataset(text_section("*.py"), tmp_path)


def test_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
        open_dataset(text_section("in"), tmp_path)


# ---------------------------------------------------------------- paths


def test_files_folders_and_globs_are_found_once_and_sorted(tmp_path: Path) -> None:
    files = ["b/x.txt", "b/c/y.md", "b/z.csv", "b/.hidden/h.txt", "b/.h.txt", "a.py", "we[i]rd.txt"]
    write_tree(tmp_path, dict.fromkeys(files, "text"))

    def names(*paths: str) -> list[str]:
        return [file.relative_to(tmp_path).as_posix() for file in find(paths, tmp_path, (".txt", ".md"))]

    assert names("b", "a.py", "b/x.txt") == ["a.py", "b/c/y.md", "b/x.txt"]
    assert names("**/*.csv", "*.py") == ["a.py", "b/z.csv"]
    assert names("b/**") == ["b/c/y.md", "b/x.txt", "b/z.csv"]
    assert names("we[i]rd.txt") == ["we[i]rd.txt"]
    assert names(".") == ["b/c/y.md", "b/x.txt", "we[i]rd.txt"]


@pytest.mark.parametrize(
    "path", ["../secret.txt", "/etc/hostname", "in/../../secret.txt", ".ssh/id", "link.txt", "l*.txt"]
)
def test_a_contract_cannot_read_outside_the_data_folder(tmp_path: Path, path: str) -> None:
    root = write_tree(tmp_path / "root", {"in/a.txt": "a", ".ssh/id": "key"})
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigError, match=r"leads? out of|goes through"):
        open_dataset(text_section(path), root)


@pytest.mark.parametrize("path", ["a\0b", "a*\0"])
def test_a_path_that_no_file_can_have(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="holds a zero byte") as caught:
        open_dataset(text_section(path), tmp_path)
    assert caught.value.cause.isprintable()


def test_a_link_out_of_a_searched_folder_is_refused_too(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "root", {"in/a.txt": "a"})
    (tmp_path / "secret.txt").write_text("secret")
    (root / "in" / "b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigError, match=r"b\.txt leads out of"):
        open_dataset(text_section("in"), root)


def test_no_paths_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.paths is empty"):
        open_dataset(text_section(), tmp_path)


# ---------------------------------------------------------------- split


def test_choose_takes_the_share_and_less_than_twice_that() -> None:
    for count, holdout in ((100, 0.02), (1000, 0.1), (30, 0.5)):
        sizes = {f"name {i}": 1 + i % 5 for i in range(count)}
        held = sum(sizes[name] for name in choose(sizes, holdout))
        assert 1 <= held / (holdout * sum(sizes.values())) < 2


def test_choose_looks_at_names_only_and_passes_over_the_large() -> None:
    sizes = {f"n{i}": 10 for i in range(100)}
    assert choose(sizes, 0.1) == choose(dict(reversed(sizes.items())), 0.1)
    assert "large" not in choose(sizes | {"large": 500}, 0.1)
    assert choose({"a": 10, "b": 10}, 0.1) == frozenset()


def test_split_falls_back_from_files_to_documents_to_the_end() -> None:
    document = np.arange(10, dtype=np.uint8)
    few_files = {"a": [document] * 20, "b": [document] * 20}
    training, heldout = split(few_files, 0.1, 4)
    assert (len(training), len(heldout)) == (360, 40)
    training, heldout = split({"a": [document, document]}, 0.1, 4)
    assert training.tolist() + heldout.tolist() == document.tolist() * 2
    assert len(heldout) == 5


def test_tail_keeps_whole_blocks_apart() -> None:
    tokens = np.arange(101)
    training, heldout = tail(tokens, 0.1, 10)
    assert heldout.tolist() == list(range(90, 101))
    assert training.tolist() == list(range(90))


# ---------------------------------------------------------------- standard library


def test_the_standard_library_is_the_same_each_time() -> None:
    first, second = (open_dataset(DataSection(), Path()) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert (first.vocab_size, first.sequence_length) == (256, 128)
    assert first.blocks_per_epoch is not None
    assert first.blocks_per_epoch > 30_000
    share = len(first.heldout(10**6)) / (first.blocks_per_epoch + len(first.heldout(10**6)))
    assert 0.02 <= share <= 0.04
    assert first.heldout(128).shape == (128, 129)
    assert torch.equal(first.heldout(64), second.heldout(64))


def test_the_standard_library_s_text_is_there_once() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    dataset = open_dataset(DataSection(sequence_length=64), Path())
    training, heldout = (
        rows[:, :-1].to(torch.uint8).numpy().tobytes() for rows in (everything(dataset), dataset.heldout(10**8))
    )
    for name in ("argparse.py", "json/decoder.py", "asyncio/events.py"):
        source = (library / name).read_bytes()
        assert (source in training) != (source in heldout)


def test_only_source_of_the_library_itself_is_read(tmp_path: Path) -> None:
    kept = {f"mod{i:02}.py": f"'module {i}'\n" * 9 for i in range(40)} | {"json/__init__.py": "'json'\n" * 9}
    left_out = [
        "site-packages/x.py",
        "json/__pycache__/y.py",
        "test/z.py",
        "lib-dynload/a.py",
        "b.txt",
        "email/test/c.py",
    ]
    left_out += ["_sysconfigdata__linux.py", "dist-packages/d.py", "sitecustomize.py", ".hidden.py"]
    section = DataSection(sequence_length=8, holdout=0.1)
    alone = read_library(write_tree(tmp_path / "alone", kept), section)
    more = read_library(
        write_tree(tmp_path / "more", dict.fromkeys(left_out, "'no'") | dict(reversed(kept.items()))), section
    )
    assert alone.fingerprint == more.fingerprint


def test_a_python_without_source_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no source of the standard library"):
        read_library(tmp_path, DataSection())


@pytest.mark.parametrize("keys", [{"paths": ("x",)}, {"tokenizer": "gpt2"}])
def test_the_standard_library_takes_no_paths_and_no_tokenizer(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'stdlib' takes bytes only and no paths"):
        open_dataset(DataSection(**keys), Path())


def test_an_unreadable_file_of_the_library_is_named(tmp_path: Path) -> None:
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "json", tmp_path / "json")
    os.symlink(tmp_path / "gone", tmp_path / "broken.py")
    with pytest.raises(DataError, match=r"cannot read .*broken\.py: No such file"):
        read_library(tmp_path, DataSection())


# ---------------------------------------------------------------- tokenizer


def test_byte_tokens_round_trip() -> None:
    tokenizer = open_tokenizer("bytes", Path())
    tokens = tokenizer.encode("héllo")
    assert tokens.tolist() == list("héllo".encode())
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == "héllo"
    assert tokenizer.decode([0xFF]) == "\ufffd"


def test_the_smallest_token_type() -> None:
    assert [token_dtype(size).itemsize for size in (1, 256, 257, 65536, 65537)] == [1, 1, 2, 2, 4]
