"""A causal language model made from a local Hugging Face config: fresh weights, nothing downloaded, no foreign code.

The only file of the models that imports `transformers` (extra `hf`).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from diloco.base.errors import ConfigError
from diloco.config.contract import ModelSection


class CausalLM(nn.Module):
    """A `transformers` causal LM with our calling convention: tokens int64 (B, T) -> logits (B, T, V)."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits


def load_causal_lm(section: ModelSection, vocab_size: int, root: Path) -> CausalLM:
    """The model that `root / section.hf_config` describes, initialised from torch's global random state.

    Raises ConfigError: `transformers` missing, no such folder, an unreadable config, an architecture that is no
    causal LM, or a vocabulary smaller than the tokenizer's `vocab_size`.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        cause = f"model.kind 'hf' needs transformers: {error}"
        raise ConfigError(cause, "install it with: pip install 'diloco[hf]'") from error
    folder = root / str(section.hf_config)
    if not (folder / "config.json").is_file():
        cause = f"model.hf_config: no config.json in {folder}"
        raise ConfigError(cause, "give the folder's path relative to the site's data.root")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        lm: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of a config that does not make sense transformers raises anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]  # some fill a screen
        cause = f"model.hf_config: {folder} does not describe a causal LM that transformers knows: {reason}"
        raise ConfigError(cause, "use a config.json of an architecture built into transformers") from error
    if config.vocab_size < vocab_size:
        cause = f"{folder}/config.json: vocab_size {config.vocab_size} is smaller than the tokenizer's {vocab_size}"
        raise ConfigError(cause, f"set vocab_size in that config.json to at least {vocab_size}")
    return CausalLM(lm.float().train())
