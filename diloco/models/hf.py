"""Hugging Face's side of the models: our transformer under its names, and causal language models of its configs.

Without QK-norm our transformer is a `LlamaForCausalLM`, with it a `Qwen3ForCausalLM` (per-head RMSNorm of queries and
keys before the rotation), and with experts a `Glm4MoeForCausalLM` (GLM-4.5: sigmoid scores, a balancing bias in the
choice, shared experts). Rotary convention, norm epsilon and SwiGLU are the same, so only names differ, and our stacked
experts have one name each. An export needs no `transformers`; only `load_causal_lm` imports it (extra `hf`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from diloco.base.errors import ConfigError
from diloco.base.limits import check_bytes, check_parameters, host_bytes
from diloco.base.paths import inside
from diloco.config.contract import ModelSection
from diloco.models.transformer import INIT_STD, NORM_EPS

# ---------------------------------------------------------------- export

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
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
STACKS = {"ffn.experts.gate": "gate_proj", "ffn.experts.up": "up_proj", "ffn.experts.down": "down_proj"}
"""Experts of a block, stacked in one tensor; an export has `mlp.experts.<i>.<name>.weight`."""


def llama_config(section: ModelSection, vocab_size: int, max_length: int = 2048) -> dict[str, Any]:
    """Hugging Face's `config.json` with which `transformers` computes our logits from `to_llama`'s tensors.

    `vocab_size` counts the rows of the embedding. `max_length` is advice to generation code; the model has no limit.
    """
    architecture, model_type = ("Qwen3ForCausalLM", "qwen3") if section.qk_norm else ("LlamaForCausalLM", "llama")
    experts: dict[str, Any] = {}
    if section.experts:
        architecture, model_type = "Glm4MoeForCausalLM", "glm4_moe"
        experts = {
            "n_routed_experts": section.experts,
            "num_experts_per_tok": section.experts_per_token,
            "n_shared_experts": section.shared_experts,
            "moe_intermediate_size": section.expert_width,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": section.experts_per_token > 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": section.qk_norm,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        }
    return experts | {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": section.dim,
        "intermediate_size": section.ffn_width,
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
    """`Transformer.state_dict()` under Hugging Face's names; the tensors are the given ones, or views of stacks.

    A tied head has no entry: `tie_word_embeddings` says it. Raises KeyError for a name that is not the transformer's.
    """
    # Hugging Face's model has in any case what ours may lack: a bias of zero, and shared experts of width 0.
    implied: dict[str, Tensor] = {}
    for name, weight in state.items():
        if name.endswith("ffn.router.weight"):
            experts, dim = weight.shape
            ffn = name.removesuffix("router.weight")
            implied[f"{ffn}router.bias"] = weight.new_zeros(experts)
            implied |= {f"{ffn}shared.{matrix}.weight": weight.new_empty(0, dim) for matrix in ("gate", "up")}
            implied[f"{ffn}shared.down.weight"] = weight.new_empty(dim, 0)
    renamed: dict[str, Tensor] = {}
    for name, tensor in {**implied, **state}.items():
        if name in TOP:
            renamed[TOP[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        block = f"model.layers.{layer}."
        if rest in STACKS:
            for expert, one in enumerate(tensor):
                renamed[f"{block}mlp.experts.{expert}.{STACKS[rest]}.weight"] = one
        else:
            renamed[block + IN_BLOCK[rest]] = tensor
    return renamed


# ---------------------------------------------------------------- models of its configs


class CausalLM(nn.Module):
    """A `transformers` causal LM with our calling convention: tokens int64 (B, T) -> logits (B, T, V)."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits


MAX_TENSORS = 2**17
"""Parameters, each a tensor, of the Hugging Face model of a config. DeepSeek-V3 has 46,000 with each expert apart."""


def read_config(section: ModelSection, vocab_size: int, root: Path) -> Any:
    """The Hugging Face config in `root / section.hf_config`.

    Raises ConfigError: `transformers` missing, no such folder below `root`, an unreadable config, one that names code
    to fetch, or a vocabulary smaller than the tokenizer's `vocab_size`.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        cause = f"model.kind 'hf' needs transformers: {error}"
        raise ConfigError(cause, "install it with: pip install 'diloco[hf]'") from error
    folder = inside(f"{section.hf_config}/config.json", root).parent
    if not (folder / "config.json").is_file():
        cause = f"model.hf_config: no config.json in {folder}"
        raise ConfigError(cause, "give the folder's path relative to the site's data.root")
    with _understood(folder):
        json.loads((folder / "config.json").read_text(), object_hook=_without_code)
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        rows = int(config.vocab_size)
    if rows < vocab_size:
        cause = f"{folder}/config.json: vocab_size {rows} is smaller than the tokenizer's {vocab_size}"
        raise ConfigError(cause, f"set vocab_size in that config.json to at least {vocab_size}")
    return config


def load_causal_lm(section: ModelSection, vocab_size: int, root: Path, max_params: int | None) -> CausalLM:
    """The Hugging Face model that `root / section.hf_config` describes, initialised from torch's global random state.

    Raises ConfigError as `read_config` does, for an architecture that is no causal LM, and for more parameters than
    `max_params`, or than memory holds in fp32: they are counted before any is allocated.
    """
    config = read_config(section, vocab_size, root)
    from transformers import AutoModelForCausalLM

    folder = root / str(section.hf_config)
    with _understood(folder), torch.random.fork_rng(devices=[]), torch.device("meta"), _few_tensors():
        counted = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    name = f"the model in {folder}"
    check_parameters(name, sum(parameter.numel() for parameter in counted.parameters()), max_params)
    buffers = sum(buffer.nbytes for buffer in counted.buffers())  # masks, for instance, of length squared
    check_bytes(f"{name}, in buffers alone,", buffers, host_bytes(), "use a config with shorter sequences")
    with _understood(folder):
        lm: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return CausalLM(lm.float().train())


def _without_code(table: dict[str, Any]) -> dict[str, Any]:
    """A table of a Hugging Face config. Raises ValueError where it names an implementation that is fetched and run, or
    so many layers that transformers would list them before anything is counted."""
    own = ["eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm", None]
    own += ["flash_attention_2"] if find_spec("flash_attn") else []  # else it is fetched, too
    for key, value in table.items():
        if "_implementation" in key and value not in own:
            raise ValueError(f"{key} {value!r} is code to fetch")
        if "layer" in key and isinstance(value, int) and value > MAX_TENSORS:
            raise ValueError(f"{key} {value:,}: it has more than {MAX_TENSORS:,} tensors")
    return table


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Raise ConfigError for whatever transformers raises of a Hugging Face config without sense: it may be anything."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]  # some fill a screen
        cause = f"model.hf_config: {folder} does not describe a causal LM that transformers knows: {reason}"
        raise ConfigError(cause, "use a config.json of an architecture built into transformers") from error


@contextmanager
def _few_tensors() -> Iterator[None]:
    """Raise ValueError for the Hugging Face model that is being built once it has `MAX_TENSORS`: a layer of a billion
    takes no memory on the meta device, but time, and memory of Python's."""
    number = count(1)

    def registered(*_: object) -> None:
        if next(number) > MAX_TENSORS:
            raise ValueError(f"it has more than {MAX_TENSORS:,} tensors")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
