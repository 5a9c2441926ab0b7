"""Our transformer as Hugging Face knows it: the same function under other names.

Without QK-norm it is a `LlamaForCausalLM`, with it a `Qwen3ForCausalLM` (per-head RMSNorm of queries and keys before
the rotation). Rotary convention, norm epsilon and SwiGLU are the same, so only names differ. Nothing here needs
`transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diloco.config import ModelSection
from diloco.models.transformer import INIT_STD, NORM_EPS, ffn_width

TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
IN_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def llama_config(section: ModelSection, vocab_size: int, max_length: int = 2048) -> dict[str, Any]:
    """The `config.json` with which `transformers` computes our logits from `to_llama`'s tensors.

    `vocab_size` counts the rows of the embedding. `max_length` is advice to generation code; the model has no limit.
    """
    architecture, model_type = ("Qwen3ForCausalLM", "qwen3") if section.qk_norm else ("LlamaForCausalLM", "llama")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": section.dim,
        "intermediate_size": ffn_width(section),
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads or section.heads,
        "head_dim": section.dim // section.heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": section.rope_theta,
        "initializer_range": INIT_STD,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": section.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def to_llama(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Transformer.state_dict()` under Hugging Face's names; the tensors are the given ones.

    A tied head has no entry: `tie_word_embeddings` says it. Raises KeyError for a name that is not the transformer's.
    """
    return {_renamed(name): tensor for name, tensor in state.items()}


def _renamed(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{IN_BLOCK[rest]}"
