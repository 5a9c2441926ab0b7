"""Model sizes by name: small byte-level ones, and those published with DiLoCo.

The comment of each gives its number of parameters with all embeddings, the byte-level ones with 256 tokens. The
published ones have 32,768 tokens; the names their papers gave them count the embedding once, which a tied head does
too, except for `async-20m`, whose name fits an untied one only. Their feed-forward layers were not gated; ours are
SwiGLU of 8/3 of `dim`, which has as many parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _bytes(layers: int, dim: int, heads: int) -> dict[str, Any]:
    return {"layers": layers, "dim": dim, "heads": heads, "tied": True, "qk_norm": True}


def _published(layers: int, dim: int, heads: int, *, tied: bool = True, qk_norm: bool = False) -> dict[str, Any]:
    sizes = {"layers": layers, "dim": dim, "heads": heads, "vocab_size": 32_768}
    return sizes | {"tied": tied, "qk_norm": qk_norm}


def _scaling(layers: int, heads: int) -> dict[str, Any]:
    """A model preset of the family of the streaming and scaling-law papers: heads of 64, QK-norm."""
    return _published(layers, 64 * heads, heads, qk_norm=True)


def _experts(experts: int, per_token: int, width: int, *, shared: int = 0) -> dict[str, Any]:
    return {"experts": experts, "experts_per_token": per_token, "expert_dim": width, "shared_experts": shared}


_OLMOE = _experts(64, 8, 1024) | {"vocab_size": 50_304, "balance": "loss"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Byte-level: a laptop, or one GPU.
    "0.3m": _bytes(2, 104, 4),  # 293,488
    # Of six shapes, 2 x 256 to 5 x 128, the best after 40 CPU-seconds of Python text: 1.695 nats, 4 x 144 1.737.
    "1m": _bytes(3, 160, 5) | {"ffn_dim": 480},  # 1,040,672
    "3m": _bytes(6, 192, 4),  # 2,706,432
    "10m": _bytes(8, 320, 5),  # 10,000,704
    # A mixture of experts: a token meets 1,182,776 of its parameters.
    "moe-3m": _bytes(3, 160, 5) | _experts(8, 2, 192, shared=1),  # 2,841,656
    "30m": _bytes(10, 512, 8),  # 31,764,224
    "85m": _bytes(12, 768, 12),  # 85,152,000
    "150m": _bytes(12, 1024, 16),  # 152,070,656
    # DiLoCo (arXiv 2311.08105). There the heads of the smaller two were 64 wide; here dim / heads is 56.
    "diloco-60m": _published(3, 896, 16),  # 58,353,792
    "diloco-150m": _published(12, 896, 16),  # 145,332,096
    "diloco-400m": _published(12, 1536, 12),  # 390,108,672
    # Asynchronous local SGD (arXiv 2401.09135).
    "async-20m": _published(6, 256, 4, tied=False),  # 21,597,440
    # Streaming DiLoCo (arXiv 2501.18512) and scaling laws for DiLoCo (arXiv 2503.09799).
    "scaling-35m": _scaling(6, 8),  # 35,757,312
    "scaling-90m": _scaling(9, 12),  # 88,882,560
    "scaling-180m": _scaling(12, 16),  # 185,362,944
    "scaling-335m": _scaling(15, 20),  # 337,511,040
    "scaling-550m": _scaling(18, 24),  # 559,998,720
    "scaling-1.3b": _scaling(24, 32),  # 1,276,744,704
    "scaling-2.4b": _scaling(30, 40),  # 2,448,257,280
    "scaling-4b": _scaling(36, 48),  # 4,177,755,648
    "scaling-10b": _scaling(48, 64),  # 9,810,880,512
    # OLMoE-1B-7B (arXiv 2409.02060): a token meets 1,281,955,840. There scores were softmax, and QK-norm went over all
    # heads at once.
    "olmoe-7b": _published(16, 2048, 16, tied=False, qk_norm=True) | _OLMOE,  # 6,919,100,416
}
