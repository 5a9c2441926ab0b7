"""A tokenizer by its name in the contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.data.files import inside
from diloco.data.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from diloco.data.tokenizer import Tokenizer


def open_tokenizer(name: str, root: Path) -> Tokenizer:
    """`bytes`, or the Hugging Face tokenizer in the folder `root / name`; nothing is ever downloaded.

    Raises DataError (no such tokenizer) and ConfigError (a path outside `root`, or the extra is missing).
    """
    if name == "bytes":
        return ByteTokenizer()
    from diloco.data.hf_tokenizer import HFTokenizer

    return HFTokenizer(inside(name, root))
