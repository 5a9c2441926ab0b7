"""Models: one transformer of our own, its presets, and Hugging Face's by the extra `hf`.

Importing this package does not import torch: the configuration reads the presets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from diloco.config.contract import ModelSection


def build_model(
    section: ModelSection, vocab_size: int, seed: int, root: Path = Path("."), max_params: int | None = None
) -> nn.Module:
    """Build the transformer or Hugging Face model on the CPU, fp32: tokens int64 (B, T) -> logits (B, T, V).

    The weights depend on `seed` alone; torch's random state stays as it was. `vocab_size` is the tokenizer's, which
    `section.vocab_size` may exceed (multiples of 64 multiply faster) but not undercut. `root` is the site's
    `data.root`. `max_params`: largest number of parameters of a Hugging Face model; None: as many as fit into RAM.

    Raises ConfigError for kind `external`, for a vocabulary that is too small and for a Hugging Face config that
    cannot be used, or whose model is too large.
    """
    if section.kind == "external":
        fix = "pass the model to the library call, or set model.kind = 'transformer'"
        raise ConfigError("model.kind 'external' cannot be built from a contract", fix)
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed the GPUs, too
        if section.kind == "hf":
            from diloco.models.hf import load_causal_lm

            return load_causal_lm(section, vocab_size, root, max_params)
        from diloco.models.moe import MixtureOfExperts
        from diloco.models.transformer import SwiGLU, Transformer

        feed_forward = MixtureOfExperts if section.experts else SwiGLU
        return Transformer(section, checked_vocab_size(section, vocab_size), feed_forward)


def checked_vocab_size(section: ModelSection, vocab_size: int) -> int:
    """Rows of a model's embedding: the contract's, or as many as the tokenizer has. Raises ConfigError if too few."""
    rows = section.vocab_size or vocab_size
    if rows < vocab_size:
        cause = f"model.vocab_size {rows} is smaller than the tokenizer's {vocab_size}"
        raise ConfigError(cause, f"leave model.vocab_size out, or set it to at least {vocab_size}")
    return rows


def logit_rows(section: ModelSection, vocab_size: int, root: Path) -> int:
    """Number of logits for a token that the contract's model has, not built yet; not below the tokenizer's
    `vocab_size`. Raises ConfigError."""
    if section.kind == "hf":
        from diloco.models.hf import read_config

        return int(read_config(section, vocab_size, root).vocab_size)
    return checked_vocab_size(section, vocab_size)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters of a built model, transformer or Hugging Face's, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
