"""Your own text: text files, JSONL files, folders and globs, tokenised into memory when opened.

For text that does not fit, make a shard first (`diloco data pack`).
"""

from __future__ import annotations

from pathlib import Path

from diloco.config.contract import DataSection
from diloco.data.dataset import ArrayDataset, Dataset, fingerprint
from diloco.data.documents import pieces
from diloco.data.files import TEXT_SUFFIXES, find
from diloco.data.split import split
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
    training, heldout = split(documents, section.holdout, section.sequence_length)
    return ArrayDataset(
        [training],
        [heldout],
        sequence_length=section.sequence_length,
        vocab_size=tokenizer.vocab_size,
        fingerprint=fingerprint(section.sequence_length, tokenizer.vocab_size, training, heldout),
        where=f"{', '.join(section.paths)} in {root}",
    )
