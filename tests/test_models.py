"""The models: each piece against a slow and obvious version, the whole against Hugging Face's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from diloco.base.errors import ConfigError
from diloco.config.contract import ModelSection
from diloco.config.presets import PRESETS
from diloco.models import build_model, count_parameters
from diloco.models.hf import llama_config, to_llama
from diloco.models.transformer import INIT_STD, Attention, SwiGLU, rotary_table, rotate

CPU = torch.device("cpu")
SMALL = ModelSection(layers=2, dim=32, heads=4, kv_heads=2)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Rounding of unlucky ones goes beyond a tolerance."""
    torch.manual_seed(0)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """All parameters random, norms too: a norm of ones would hide a mistake in where it is applied."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


# ---------------------------------------------------------------- rotary embedding


def test_rotation_of_one_pair_by_hand() -> None:
    cos, sin = rotary_table(length=3, width=2, theta=10_000.0, device=CPU)
    turned = rotate(torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2), cos, sin).squeeze()
    expected = torch.tensor([[math.cos(p), math.sin(p)] for p in range(3)])
    torch.testing.assert_close(turned, expected)


def test_rotation_preserves_length_and_depends_on_distance_only() -> None:
    cos, sin = rotary_table(length=64, width=16, theta=100.0, device=CPU)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    queries = rotate(q.expand(1, 64, 1, 16), cos, sin).squeeze()
    keys = rotate(k.expand(1, 64, 1, 16), cos, sin).squeeze()
    torch.testing.assert_close(queries.norm(dim=-1), q.norm().expand(64))
    scores = queries @ keys.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=2e-5, rtol=0)
    assert not torch.allclose(scores[1, 0], scores[0, 0], atol=1e-3)


# ---------------------------------------------------------------- attention, SwiGLU


def naive_attention(attention: Attention, x: torch.Tensor, theta: float) -> torch.Tensor:
    """One head and one query at a time, in fp64, rotating by complex numbers."""
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
    x = x.double()
    matrices = (attention.q.weight, attention.k.weight, attention.v.weight)
    rows = torch.cat(matrices).double().split(width)  # one matrix per head: H queries, K keys, K values
    frequencies = theta ** -(torch.arange(0, width, 2).double() / width)

    def turned(vector: torch.Tensor, position: int, norm: torch.nn.Module) -> torch.Tensor:
        if isinstance(norm, torch.nn.RMSNorm):
            vector = vector / (vector.square().mean() + norm.eps).sqrt() * norm.weight.double()
        half = width // 2
        spun = torch.complex(vector[:half], vector[half:]) * torch.polar(
            torch.ones(half).double(), position * frequencies
        )
        return torch.cat((spun.real, spun.imag))

    out = torch.zeros(x.shape[0], heads * width).double()
    for head in range(heads):
        shared = head // (heads // kv_heads)
        query, key, value = rows[head], rows[heads + shared], rows[heads + kv_heads + shared]
        keys = [turned(key @ x[t], t, attention.k_norm) for t in range(len(x))]
        for t in range(len(x)):
            q = turned(query @ x[t], t, attention.q_norm)
            share = torch.stack([q @ keys[s] / math.sqrt(width) for s in range(t + 1)]).softmax(0)
            out[t, head * width : (head + 1) * width] = sum(share[s] * (value @ x[s]) for s in range(t + 1))
    return (out @ attention.out.weight.double().T).float()


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_the_naive_one(kv_heads: int, qk_norm: bool) -> None:
    section = ModelSection(dim=32, heads=4, kv_heads=kv_heads, qk_norm=qk_norm, rope_theta=500.0)
    attention = randomised(Attention(section))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2))
    got = attention(x, *rotary_table(9, 8, 500.0, CPU))
    expected = torch.stack([naive_attention(attention, sequence, 500.0) for sequence in x])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_grouped_attention_equals_repeated_kv_heads() -> None:
    grouped = randomised(Attention(ModelSection(dim=32, heads=4, kv_heads=2)))
    full = Attention(ModelSection(dim=32, heads=4))
    heads = {name: getattr(grouped, name).weight.view(-1, 8, 32).repeat_interleave(2, 0) for name in "kv"}
    repeated = {f"{name}.weight": weight.flatten(0, 1) for name, weight in heads.items()}
    full.load_state_dict({**grouped.state_dict(), **repeated})
    x, table = torch.randn(1, 12, 32), rotary_table(12, 8, 1e4, CPU)
    torch.testing.assert_close(grouped(x, *table), full(x, *table))


def test_swiglu_by_hand() -> None:
    ffn = SwiGLU(SMALL)
    gate, up = ffn.gate.weight, ffn.up.weight
    x = torch.randn(5, 32)
    hidden = (x @ gate.T) * torch.sigmoid(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(ffn(x), hidden @ ffn.down.weight.T)


@pytest.mark.parametrize(("dim", "expected"), [(96, 256), (144, 384), (128, 352), (1024, 2752)])
def test_ffn_width_is_eight_thirds_rounded_up_to_32(dim: int, expected: int) -> None:
    assert ModelSection(dim=dim).ffn_width == expected
    assert ModelSection(dim=dim, ffn_dim=40).ffn_width == 40


# ---------------------------------------------------------------- the whole model


def test_a_token_changes_only_later_logits_at_any_length() -> None:
    model = randomised(build_model(SMALL, 50, seed=0))
    tokens = torch.randint(0, 50, (2, 300))
    changed = tokens.clone()
    changed[:, 200] = (changed[:, 200] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 300, 50)
    torch.testing.assert_close(before[:, :200], after[:, :200])
    assert (before[:, 200:] - after[:, 200:]).abs().amax(dim=-1).min() > 1e-4
    torch.testing.assert_close(model(tokens[:, :7]), before[:, :7], atol=1e-5, rtol=1e-4)


def test_no_buffers_and_names_tell_the_layer() -> None:
    model = build_model(SMALL.model_copy(update={"tied": False}), 50, seed=0)
    names = [name for name, _ in model.named_parameters()]
    assert list(model.state_dict()) == names
    assert {name for name in names if not name.startswith("blocks.")} == {"embed.weight", "norm.weight", "head.weight"}
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {"0", "1"}


def test_a_tied_head_is_the_embedding() -> None:
    tied = build_model(SMALL, 50, seed=0)
    untied = build_model(SMALL.model_copy(update={"tied": False}), 50, seed=0)
    assert count_parameters(untied) - count_parameters(tied) == 50 * 32
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embed.weight})
    tokens = torch.randint(0, 50, (1, 8))
    assert torch.equal(tied(tokens), untied(tokens))


def test_initial_weights_and_loss() -> None:
    model = build_model(ModelSection(layers=8, dim=128, heads=4), 256, seed=0)
    block = model.blocks[3]
    for weight in (model.embed.weight, block.attn.q.weight, block.attn.k.weight, block.ffn.gate.weight):
        assert weight.std().item() == pytest.approx(INIT_STD, rel=0.03)
    for weight in (block.attn.out.weight, block.ffn.down.weight):
        assert weight.std().item() == pytest.approx(INIT_STD / 4, rel=0.03)  # sqrt(2 x 8 layers) = 4
    assert torch.equal(block.attn_norm.weight, torch.ones(128))
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_same_seed_same_weights_and_global_random_state_untouched() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build_model(SMALL, 50, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    second = build_model(SMALL, 50, seed=3).state_dict()
    other = build_model(SMALL, 50, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_autocast_gives_bf16_logits_near_the_fp32_ones() -> None:
    model = build_model(SMALL, 50, seed=0)
    tokens = torch.randint(0, 50, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens)
    assert rounded.dtype == torch.bfloat16
    exact = model(tokens)
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


# ---------------------------------------------------------------- build_model's choices


def test_external_and_small_vocabularies_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="external"):
        build_model(ModelSection(kind="external"), 256, seed=0)
    with pytest.raises(ConfigError, match=r"model\.vocab_size 100 is smaller than the tokenizer's 256"):
        build_model(ModelSection(vocab_size=100), 256, seed=0)
    wide = build_model(SMALL.model_copy(update={"vocab_size": 64}), 50, seed=0)
    assert wide(torch.zeros(1, 1, dtype=torch.int64)).shape[-1] == 64


def test_presets_are_read_without_importing_torch() -> None:
    code = "import sys, diloco.config.contract, diloco.config.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_as_many_parameters_as_its_name_says(name: str) -> None:
    size = name.rpartition("-")[2]
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    section = ModelSection(**PRESETS[name])
    with torch.device("meta"):
        count = count_parameters(build_model(section, section.vocab_size or 256, seed=0))
    assert count == pytest.approx(named, rel=0.15)
    source = Path(sys.modules["diloco.config.presets"].__file__ or "").read_text()
    line = next(line for line in source.splitlines() if f'"{name}":' in line)
    assert line.endswith(f"# {count:,}")


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_exported_weights_give_the_same_logits(qk_norm: bool, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    section = ModelSection(layers=2, dim=48, heads=6, kv_heads=2, qk_norm=qk_norm, tied=tied, rope_theta=700.0)
    model = randomised(build_model(section, 64, seed=0)).eval()
    (tmp_path / "config.json").write_text(json.dumps(llama_config(section, 64)))
    config = transformers.AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
    twin = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(twin).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    missing, unexpected = twin.load_state_dict(to_llama(model.state_dict()), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    twin.tie_weights()
    assert count_parameters(twin) == count_parameters(model)
    tokens = torch.randint(0, 64, (2, 70))
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)


def test_export_of_an_unknown_name_fails() -> None:
    with pytest.raises(KeyError):
        to_llama({"blocks.0.mystery.weight": torch.zeros(1)})


def hf_folder(root: Path, **changes: object) -> ModelSection:
    folder = root / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config(SMALL, 64) | changes))
    return ModelSection(kind="hf", hf_config="tiny")


def test_hf_model_from_a_local_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    section = hf_folder(tmp_path, torch_dtype="bfloat16")  # exchange and optimizer want fp32 weights all the same
    state = torch.get_rng_state()
    model, again = (build_model(section, 64, seed=1, root=tmp_path) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    tokens = torch.randint(0, 64, (2, 5))
    logits = model(tokens)
    assert logits.shape == (2, 5, 64)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, again(tokens))


@pytest.mark.slow(queued=False)
def test_hf_mistakes_are_config_errors(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    section = hf_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_model(ModelSection(kind="hf", hf_config="absent"), 64, seed=0, root=tmp_path)
    with pytest.raises(ConfigError, match="vocab_size 64 is smaller than the tokenizer's 65"):
        build_model(section, 65, seed=0, root=tmp_path)
    senseless = [json.dumps(llama_config(SMALL, 64) | {key: 0}) for key in ("num_attention_heads", "dtype")]
    for broken in ('{"model_type": "no_such_model"}', "not json", '{"model_type": "vit"}', "[]", *senseless):
        (tmp_path / "tiny" / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match="does not describe a causal LM"):
            build_model(section, 64, seed=0, root=tmp_path)


def test_hf_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as caught:
        build_model(hf_folder(tmp_path), 64, seed=0, root=tmp_path)
    assert "pip install 'diloco[hf]'" in caught.value.fix
