"""The extra `hf`: streaming local files and a tokenizer trained here. Nothing is downloaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.base.errors import ConfigError, DataError
from diloco.config.contract import DataSection
from diloco.data import open_dataset
from diloco.data.shards import pack
from diloco.data.text import ByteTokenizer, open_tokenizer

WORDS = ["the", "peer", "sends", "its", "part", "to", "its", "owner", "and", "gets", "the", "mean", "back"]
TEXTS = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(3 + i % 9)) + f" {i}." for i in range(300)]


def test_a_missing_extra_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "diloco.data.hf_tokenizer", raising=False)
    monkeypatch.delitem(sys.modules, "diloco.data.hf", raising=False)
    for attempt in (lambda: open_dataset(section("x"), tmp_path), lambda: open_tokenizer("x", tmp_path)):
        with pytest.raises(ConfigError, match=r"a package that is missing: (datasets|transformers)") as caught:
            attempt()
        assert caught.value.fix == "pip install 'diloco[hf]'"


def section(*paths: str, **keys: Any) -> DataSection:
    return DataSection(source="hf", paths=paths, **({"sequence_length": 16, "holdout": 0.1} | keys))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("hf")
    (root / "in").mkdir()
    for name, texts in (("b", TEXTS[150:]), ("a", TEXTS[:150])):
        (root / "in" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    save_tokenizer(root / "tokenizer")
    return root


def save_tokenizer(folder: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def documents(rows: torch.Tensor) -> list[str]:
    """The whole documents in consecutive blocks of bytes."""
    return bytes(rows[:, :-1].flatten().tolist()).decode().split("\0")[:-1]


@pytest.mark.slow(queued=False)
def test_a_stream_gives_the_documents_in_order_and_starts_again(root: Path) -> None:
    dataset = open_dataset(section("in"), root)
    assert dataset.blocks_per_epoch is None
    assert dataset.vocab_size == 256
    seen = documents(dataset.read(range(1500)))
    held = set(TEXTS) - set(seen)
    kept = [text for text in TEXTS if text not in held]
    assert seen == (kept * 3)[: len(seen)]
    assert len(seen) > 1.5 * len(kept)
    assert 15 <= len(held) <= 45
    heldout = documents(dataset.heldout(10**6))
    assert heldout == [text for text in TEXTS if text in held][: len(heldout)]
    assert len(heldout) >= len(held) - 3


def test_blocks_overlap_by_one_token(root: Path) -> None:
    rows = open_dataset(section("in"), root).read(range(20))
    assert rows.shape == (20, 17)
    assert rows.dtype == torch.int64
    assert torch.equal(rows[1:, 0], rows[:-1, -1])


@pytest.mark.slow(queued=False)
def test_blocks_in_any_order_are_the_same_blocks(root: Path) -> None:
    dataset = open_dataset(section("in"), root)
    rows = dataset.read(range(60))
    assert torch.equal(dataset.read([40, 3, 59, 3]), rows[[40, 3, 59, 3]])
    assert torch.equal(dataset.read([59]), rows[59:])


@pytest.mark.parametrize("last", [0, 7, 400, 1200])
def test_a_stream_resumes_where_it_was(root: Path, last: int) -> None:
    dataset = open_dataset(section("in"), root)
    dataset.read([last])
    state = json.loads(json.dumps(dataset.state_dict()))
    resumed = open_dataset(section("in"), root)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.read(range(last, last + 900)), dataset.read(range(last, last + 900)))
    assert torch.equal(resumed.read([2]), dataset.read([2]))


def test_a_stream_resumes_from_a_checkpoint_that_kept_tokens(root: Path) -> None:
    """Such a state has no `skip`, and its stream is past the block: to go on from there would leave text out."""
    dataset = open_dataset(section("in"), root)
    dataset.read([400])
    later = dataset._records.state_dict()  # type: ignore[attr-defined]
    resumed = open_dataset(section("in"), root)
    resumed.load_state_dict({"block": 400, "pending": [1, 2, 3], "stream": later})
    assert torch.equal(resumed.read(range(400, 450)), dataset.read(range(400, 450)))


@pytest.mark.parametrize("last", [0, 700, 5000, 30_000])
def test_what_is_kept_of_a_stream_is_small_amid_a_long_document(root: Path, tmp_path: Path, last: int) -> None:
    texts = [" ".join(map(str, range(start, start + 10_000))) for start in range(0, 80_000, 10_000)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset = open_dataset(section("long.jsonl", holdout=0.5), tmp_path)
    dataset.read([last])
    state = json.dumps(dataset.state_dict())
    assert len(state) < 1000
    resumed = open_dataset(section("long.jsonl", holdout=0.5), tmp_path)
    resumed.load_state_dict(json.loads(state))
    assert torch.equal(resumed.read(range(last, last + 500)), dataset.read(range(last, last + 500)))


@pytest.mark.parametrize("length", [256, 2**24])
def test_a_stream_without_one_block_is_refused(root: Path, tmp_path: Path, length: int) -> None:
    """It begins again at its end, so that a block would repeat a text, or fill the memory."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:9]))
    with pytest.raises(DataError, match=rf"a\.jsonl in .*: \d+ tokens do not make one training block of {length}"):
        open_dataset(section("a.jsonl", sequence_length=length, holdout=0.5), tmp_path)


def test_resuming_does_not_run_through_what_was_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(section("in"), root)
    dataset.read([300])
    resumed = open_dataset(section("in"), root)
    resumed.load_state_dict(dataset.state_dict())
    encoded: list[str] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    resumed.read([301])
    assert len(encoded) <= 2


def test_fingerprints(root: Path, tmp_path: Path) -> None:
    first, second, other = (
        open_dataset(section(*paths), root) for paths in (("in",), ("in/*.jsonl",), ("in/a.jsonl",))
    )
    assert first.fingerprint == second.fingerprint != other.fingerprint
    data = (root / "in" / "b.jsonl").read_text()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text((root / "in" / "a.jsonl").read_text())
    (tmp_path / "in" / "b.jsonl").write_text(data)
    assert open_dataset(section("in"), tmp_path).fingerprint == first.fingerprint
    (tmp_path / "in" / "b.jsonl").write_text(data.replace("299.", "298."))
    assert open_dataset(section("in"), tmp_path).fingerprint != first.fingerprint


def test_parquet_and_text_files(root: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": TEXTS}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(text)
    expected = open_dataset(section("in"), root).read(range(100))
    assert torch.equal(open_dataset(section("a.parquet", text_field="body"), tmp_path).read(range(100)), expected)
    assert torch.equal(open_dataset(section("texts"), tmp_path).read(range(100)), expected)


def test_a_name_with_brackets_is_not_a_pattern(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text((root / "in" / "a.jsonl").read_text())
    dataset = open_dataset(section("a[1].jsonl"), tmp_path)
    assert torch.equal(dataset.read([0, 1]), open_dataset(section("in/a.jsonl"), root).read([0, 1]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}\n' * 50, "no field 'text'"),
        ('{"text": 1}\n' * 50, "holds int, not text"),
        ('{"text": "x"\n' * 50, "cannot be read"),
        ("", r"a\.jsonl is empty"),
        ('{"text": ""}\n' * 50, "no text to train on"),
        ('{"text": "always the same"}\n' * 50, "no held-out block"),
    ],
)
def test_bad_streams_are_refused_when_opened(root: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        open_dataset(section("a.jsonl"), tmp_path)


def test_one_kind_of_file_at_a_time(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"files that end in \.jsonl, \.txt"):
        open_dataset(section("."), tmp_path)


# ---------------------------------------------------------------- tokenizer


def test_a_local_tokenizer_round_trips(root: Path) -> None:
    tokenizer = open_tokenizer("tokenizer", root)
    tokens = tokenizer.encode(TEXTS[3])
    assert tokens.dtype == np.uint16
    assert 256 < tokenizer.vocab_size <= 300
    assert len(tokens) < len(TEXTS[3])
    assert tokenizer.decode(tokens) == TEXTS[3]
    assert tokenizer.separator not in tokens
    assert open_tokenizer("tokenizer", root).fingerprint == tokenizer.fingerprint != ByteTokenizer.fingerprint


def test_a_tokenizer_works_with_every_source(root: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tokenizer": "tokenizer", "sequence_length": 8, "holdout": 0.1}
    tokenizer = open_tokenizer("tokenizer", root)
    pack([root / "in"], root / "packed.bin", tokenizer)
    shard = open_dataset(DataSection(source="shards", paths=("packed.bin",), **keys), root)
    text = open_dataset(DataSection(source="text", paths=("in",), **keys), root)
    stream = open_dataset(DataSection(source="hf", paths=("in",), **keys), root)
    assert shard.vocab_size == text.vocab_size == stream.vocab_size == tokenizer.vocab_size
    first = np.concatenate([tokenizer.encode(TEXTS[0]), [tokenizer.separator], tokenizer.encode(TEXTS[1])])
    assert shard.read([0])[0].tolist() == first[:9].tolist()
    (root / "packed.bin").unlink()


def test_a_tokenizer_that_leaves_numbers_out(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "tokenizer", tmp_path / "gaps")
    file = tmp_path / "gaps" / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["the"] = max(vocabulary.values()) + 700
    file.write_text(json.dumps(tree))
    tokenizer = open_tokenizer("gaps", tmp_path)
    assert max(tokenizer.encode("the")) == vocabulary["the"] < tokenizer.vocab_size


@pytest.mark.parametrize("damaged", ["", "[]", "null", '{"added_tokens": []}'])
def test_a_damaged_tokenizer_is_named(root: Path, tmp_path: Path, damaged: str) -> None:
    shutil.copytree(root / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(damaged)
    with pytest.raises(DataError, match="tokenizer holds no tokenizer"):
        open_tokenizer("tokenizer", tmp_path)


def test_no_tokenizer_there(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer folder at"):
        open_tokenizer("gpt2", tmp_path)
    with pytest.raises(DataError, match="in holds no tokenizer"):
        open_tokenizer("in", root)
    with pytest.raises(ConfigError, match="leads out of"):
        open_tokenizer("/etc", tmp_path)
