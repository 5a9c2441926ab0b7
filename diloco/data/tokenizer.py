"""From text to tokens: bytes, or a Hugging Face tokenizer from a local folder (extra `hf`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from diloco.data.dataset import TokenArray, fingerprint
from diloco.data.files import inside


class Tokenizer(Protocol):
    """Conversion of text to tokens and back."""

    vocab_size: int
    separator: int
    """The token that ends a document."""
    fingerprint: str
    """Hexadecimal; differs between tokenizers that give other tokens."""

    def encode(self, text: str) -> TokenArray:
        """Tokens of `text`, without special ones: 1-D, of `token_dtype(vocab_size)`."""
        ...

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """Text of `tokens`; what is not text becomes U+FFFD."""
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
    """`bytes`, or the Hugging Face tokenizer in the folder `root / name`; nothing is ever downloaded.

    Raises DataError (no such tokenizer) and ConfigError (a path outside `root`, or the extra is missing).
    """
    if name == "bytes":
        return ByteTokenizer()
    from diloco.data.hf_tokenizer import HFTokenizer

    return HFTokenizer(inside(name, root))
