"""Hugging Face tokenizers from local folders (extra `hf`). Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco.base.errors import DataError
from diloco.data.dataset import TokenArray, fingerprint, token_dtype
from diloco.data.files import missing_extra

try:
    import transformers
except ImportError as missing:
    raise missing_extra(missing) from missing


class HFTokenizer:
    """A tokenizer that `transformers` reads from a local folder; its end-of-text token ends a document."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer. Raises DataError when `folder` holds no usable one."""
        if not folder.is_dir():
            fix = "name 'bytes' or a local folder, in a contract one below the site's data.root; nothing is downloaded"
            raise DataError(f"no tokenizer folder at {folder}", fix)
        try:
            auto = transformers.AutoTokenizer  # loaded here, by its name
            self._tokenizer = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of a damaged file the builders raise anything, `Exception` itself as well
            raise DataError(f"{folder} holds no tokenizer: {error}", "save one with save_pretrained()") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {folder} has no eos_token to end a document", "set its eos_token")
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # more than `len` where numbers were left out
        self.separator: int = self._tokenizer.eos_token_id
        self.fingerprint = fingerprint("hf", json.dumps(vocabulary, sort_keys=True), self.separator)

    def encode(self, text: str) -> TokenArray:
        tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(tokens, token_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        return str(self._tokenizer.decode(np.asarray(tokens).tolist()))
