"""Your own text: text files, JSONL files, folders and globs, tokenised into memory when opened.

For text that does not fit, make a shard first (`diloco data pack`).
"""

from __future__ import annotations

from pathlib import Path

from diloco.config.contract import DataSection
from diloco.data.dataset import Dataset
from diloco.data.documents import pieces
from diloco.data.files import TEXT_SUFFIXES, find
from diloco.data.split import split_dataset
from diloco.data.tokenizers import open_tokenizer


def open_text(section: DataSection, root: Path) -> Dataset:
    """Documents are files, or the lines of `.jsonl` files, in the order of their paths.

    Raises DataError (missing, empty, not UTF-8, not JSON, no such field) and ConfigError (a path outside `root`).
    """
    tokenizer = open_tokenizer(section.tokenizer, root)
    documents = {
        file.relative_to(root).as_posix(): [piece.tokens for piece in pieces(file, tokenizer, section.text_field)]
        for file in find(section.paths, root, TEXT_SUFFIXES)
    }
    where = f"{', '.join(section.paths)} in {root}"
    return split_dataset(documents, section, tokenizer.vocab_size, (tokenizer.vocab_size,), where)
