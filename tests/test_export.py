"""Exports: the anchor's weights, under the names and with the config that `transformers` computes the same with."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from diloco.base.errors import ConfigError, IncompatibleError, ResourceError, StateError, UsageError
from diloco.base.types import Commit, Leases
from diloco.cli.main import app
from diloco.config.contract import (
    Contract,
    DataSection,
    EvalSection,
    ModelSection,
    OuterSection,
    RunSection,
    SyncSection,
)
from diloco.data import open_dataset
from diloco.inner.loop import evaluate
from diloco.island.slices import whole_slices
from diloco.models import build_model
from diloco.models.hf import llama_config
from diloco.outer.fragments import Layout, named_parameters, read_fragment, write_fragment
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterState
from diloco.plan.model import activation_bytes
from diloco.run.export import evaluate_checkpoint, export, weights
from diloco.storage.checkpoint import load, save

SMALL = ModelSection(layers=3, dim=24, heads=4, kv_heads=2, ffn_dim=20, vocab_size=264, qk_norm=True)
CPU = torch.device("cpu")


def contract(section: ModelSection = SMALL, **data: Any) -> Contract:
    return Contract(
        run=RunSection(name="tiny", total_tokens=10_000),
        model=section,
        data=DataSection(source="text", paths=("*.txt",), sequence_length=16, holdout=0.5, **data),
        outer=OuterSection(optimizer="nesterov"),
        sync=SyncSection(fragments=2),
        eval=EvalSection(sequences=5),
    )


def make_checkpoint(directory: Path, terms: Contract, model: nn.Module, **changes: Any) -> OuterState:
    """A peer's checkpoint at version 3. `model` is left holding its anchor, which is not what the peer began with."""
    parameters = named_parameters(model)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    layout, optimizer = Layout.of(shapes, fragments=2), open_outer(terms.outer)
    generator = torch.Generator().manual_seed(0)
    fragments = []
    for fragment in layout.fragments:
        before = optimizer.start(read_fragment(parameters, fragment), fragment)
        mean = 0.1 * torch.randn(fragment.elements, generator=generator)
        fragments.append(optimizer.step(before, mean))
        write_fragment(parameters, fragment, fragments[-1].anchor)
    state = OuterState(3, tuple(fragments))
    commit = Commit(3, 3, "aa", "bb", 0, (), (), (), "cc", 4096, Leases(0, {}), "dd")
    meta = {
        "contract": terms.to_json(),
        "vocab_size": 264,
        "steps": [1, 1],
        "commit": commit.to_bytes().decode(),
        "parameters": [[name, list(shape)] for name, shape in shapes],
        **changes,
    }
    local = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    save(directory, 3, {"outer": whole_slices(dict(state.buffers())), "local": whole_slices(local)}, meta, keep=1)
    return state


@pytest.fixture
def text_root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for index in range(4):
        (root / f"{index}.txt").write_text(f"{index} the quick brown fox jumps over the lazy dog. " * 4)
    return root


def logits(model: nn.Module, vocab_size: int = 264) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocab_size, (2, 30), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return tokens, model(tokens)


# ---------------------------------------------------------------- weights and export


def test_weights_are_the_anchor_under_the_model_s_names(tmp_path: Path) -> None:
    model = build_model(SMALL, 264, seed=0)
    make_checkpoint(tmp_path, contract(), model)
    found = weights(load(tmp_path))
    parameters = named_parameters(model)
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in parameters.items())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"qk_norm": True, "tied": True}),
        ("Llama", {"qk_norm": False, "tied": False}),
        ("Glm4Moe", {"experts": 6, "experts_per_token": 3, "shared_experts": 2}),
        ("Glm4Moe", {"experts": 4, "experts_per_token": 1, "balance": "loss", "qk_norm": False}),
    ],
)
def test_transformers_computes_the_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    section = SMALL.model_copy(update=changes)
    model = build_model(section, 264, seed=0)
    make_checkpoint(tmp_path / "run", contract(section), model)
    output = export(tmp_path / "run", tmp_path / "out")
    twin, info = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    assert type(twin).__name__ == f"{kind}ForCausalLM"
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}
    tokens, expected = logits(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_what_an_export_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(tmp_path)
    terms = contract()
    state = make_checkpoint(tmp_path / "run", terms, build_model(SMALL, 264, seed=0))
    output = export(Path("run"), Path("out"))
    assert output == tmp_path / "out"
    assert {file.name for file in output.iterdir()} == {"model.safetensors", "config.json", "diloco.json"}
    about = json.loads((output / "diloco.json").read_text())
    assert Contract.model_validate_json(json.dumps(about.pop("contract"))) == terms
    assert about == {
        "run": "tiny",
        "version": 3,
        "tokens": 4096,
        "state_digest": state.digest,
        "chain_digest": Commit(3, 3, "aa", "bb", 0, (), (), (), "cc", 4096, Leases(0, {}), "dd").digest,
        "vocab_size": 264,
        "tokenizer": "bytes: a token is a byte of UTF-8 text (0 to 255); byte 0 ends a document",
        "contract_digest": terms.digest,
    }
    assert json.loads((output / "config.json").read_text()) == llama_config(SMALL, 264, max_length=16)
    assert load_file(output / "model.safetensors")["model.layers.2.self_attn.k_proj.weight"].shape == (12, 24)


def test_export_before_the_founding_has_no_chain(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", contract(), build_model(SMALL, 264, seed=0), commit=None)
    about = json.loads((export(tmp_path / "run", tmp_path / "out") / "diloco.json").read_text())
    assert (about["tokens"], about["chain_digest"]) == (0, "")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"tokenizer": "tok/gpt"}, "the Hugging Face tokenizer in the folder 'tok/gpt' of the site's data.root"),
        ({"source": "shards"}, "the tokenizer that the token shards were packed with"),
    ],
)
def test_how_to_tokenise(data: dict[str, str], expected: str, tmp_path: Path) -> None:
    terms = contract()
    terms = terms.model_copy(update={"data": terms.data.model_copy(update=data)})
    make_checkpoint(tmp_path / "run", terms, build_model(SMALL, 264, seed=0))
    about = json.loads((export(tmp_path / "run", tmp_path / "out") / "diloco.json").read_text())
    assert about["tokenizer"] == expected


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", contract(), build_model(SMALL, 264, seed=0))
    output = tmp_path / "out"
    output.mkdir()
    export(tmp_path / "run", output)
    (output / "model.safetensors").write_bytes(b"old")
    export(tmp_path / "run", output)
    assert load_file(output / "model.safetensors")
    (output / "tokenizer.json").touch()  # somebody added it: replacing the folder would delete it
    with pytest.raises(UsageError, match=r"out exists and is not just an earlier export"):
        export(tmp_path / "run", output)
    (tmp_path / "file").touch()
    for taken in (tmp_path / "run", tmp_path / "run" / "v00000003", tmp_path / "file"):
        with pytest.raises(UsageError, match="is not just an earlier export"):
            export(tmp_path / "run", taken)
    with pytest.raises(ResourceError, match="cannot write export"):
        export(tmp_path / "run", tmp_path / "file" / "below")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "out", "file"}


# ---------------------------------------------------------------- the other kinds of model


def hf_contract(root: Path, **changes: Any) -> Contract:
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "config.json").write_text(json.dumps({**llama_config(SMALL, 264), **changes}))
    return contract(ModelSection(kind="hf", hf_config="tiny"))


@pytest.mark.parametrize(("tied", "key"), [(True, "dtype"), (False, "torch_dtype")])
def test_a_hugging_face_model_comes_back_in_fp32(tied: bool, key: str, text_root: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    terms = hf_contract(text_root, tie_word_embeddings=tied, **{key: "bfloat16"})
    model = build_model(terms.model, 264, seed=0, root=text_root)
    make_checkpoint(tmp_path / "run", terms, model)
    output = export(tmp_path / "run", tmp_path / "out", text_root)
    twin, info = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    tokens, expected = logits(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert evaluate_checkpoint(output, text_root) == evaluate_checkpoint(tmp_path / "run", text_root)


def test_the_command_line_finds_a_hugging_face_config(text_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    terms = hf_contract(text_root)
    make_checkpoint(tmp_path / "run", terms, build_model(terms.model, 264, seed=0, root=text_root))
    folders = [str(tmp_path / "run"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["export", *folders, "--data-root", str(text_root)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_hugging_face_config_that_is_not_there_or_another(text_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    terms = hf_contract(text_root)
    make_checkpoint(tmp_path / "run", terms, build_model(terms.model, 264, seed=0, root=text_root))
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        export(tmp_path / "run", tmp_path / "out", tmp_path)
    hf_contract(tmp_path / "other", hidden_size=32)
    with pytest.raises(StateError, match="does not fit the model"):
        export(tmp_path / "run", tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_an_external_model_keeps_its_names(text_root: Path, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    make_checkpoint(tmp_path / "run", contract(ModelSection(kind="external")), nn.ModuleDict({"layers": layers}))
    output = export(tmp_path / "run", tmp_path / "out")
    found = load_file(output / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "layers.0.weight": (5, 3),
        "layers.0.bias": (5,),
        "layers.1.weight": (2, 5),
        "layers.1.bias": (2,),
    }
    assert torch.equal(found["layers.1.weight"], layers[1].weight)
    assert not (output / "config.json").exists()
    with pytest.raises(ConfigError, match="external"):
        evaluate_checkpoint(output, text_root)


@pytest.mark.parametrize("noted", [None, [["w"]], [["w", "x"]], [["w", 3]], [3]])
def test_an_external_model_whose_shapes_are_not_noted(noted: Any, tmp_path: Path) -> None:
    layers = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))})
    make_checkpoint(tmp_path / "run", contract(ModelSection(kind="external")), layers, parameters=noted)
    with pytest.raises(StateError, match="parameters"):
        export(tmp_path / "run", tmp_path / "out")


# ---------------------------------------------------------------- eval


def test_eval_is_inner_evaluate_of_the_anchor(text_root: Path, tmp_path: Path) -> None:
    terms, model = contract(), build_model(SMALL, 264, seed=0)
    make_checkpoint(tmp_path / "run", terms, model)
    heldout = open_dataset(terms.data, text_root).heldout(3)
    loss = evaluate(model, heldout, terms.inner.batch_size, CPU)
    expected = {"version": 3, "tokens": 4096, "val_loss": loss, "perplexity": math.exp(loss), "sequences": 3}
    output = export(tmp_path / "run", tmp_path / "out")
    for path in (tmp_path / "run", tmp_path / "run" / "v00000003", output):
        assert evaluate_checkpoint(path, text_root, sequences=3, threads=1) == expected
    assert torch.get_num_threads() == 1
    assert evaluate_checkpoint(output, text_root)["sequences"] == 5  # the contract's
    held = len(open_dataset(terms.data, text_root).heldout(10_000))
    assert evaluate_checkpoint(output, text_root, sequences=10_000)["sequences"] == held


def test_eval_takes_no_larger_batches_than_memory_holds(
    text_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = contract().model_copy(update={"inner": contract().inner.model_copy(update={"batch_size": 2**20})})
    make_checkpoint(tmp_path, terms, build_model(SMALL, 264, seed=0))
    loss = evaluate_checkpoint(tmp_path, text_root)["val_loss"]
    sizes: list[int] = []

    def noted(model: nn.Module, blocks: torch.Tensor, batch_size: int, device: torch.device) -> float:
        sizes.append(batch_size)
        return evaluate(model, blocks, batch_size, device)

    one = activation_bytes(terms, 264, terms.inner.batch_size)
    monkeypatch.setattr("diloco.run.export.evaluate", noted)
    monkeypatch.setattr("diloco.run.export.host_bytes", lambda: 9 * one)
    assert evaluate_checkpoint(tmp_path, text_root)["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert sizes == [2]
    monkeypatch.setattr("diloco.run.export.host_bytes", lambda: one - 1)
    with pytest.raises(ConfigError, match=r"a sequence of run .* takes at least [\s\S]* a machine with more memory"):
        evaluate_checkpoint(tmp_path, text_root)


def test_a_diverged_model_is_no_error(text_root: Path, tmp_path: Path) -> None:
    model = build_model(SMALL.model_copy(update={"tied": False}), 264, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(1e6)
    make_checkpoint(tmp_path, contract(SMALL.model_copy(update={"tied": False})), model)
    found = evaluate_checkpoint(tmp_path, text_root)
    assert found["val_loss"] > 1000
    assert found["perplexity"] == math.inf


def test_data_with_more_tokens_than_the_model_knows(text_root: Path, tmp_path: Path) -> None:
    section = SMALL.model_copy(update={"vocab_size": None})
    make_checkpoint(tmp_path / "run", contract(section), build_model(section, 100, seed=0), vocab_size=100)
    with pytest.raises(IncompatibleError, match=r"the data have 256 tokens, the model in .* knows 100"):
        evaluate_checkpoint(tmp_path / "run", text_root)


def test_checkpoints_that_were_not_written_by_a_peer(tmp_path: Path) -> None:
    model = build_model(SMALL, 264, seed=0)
    for name, value in {"contract": 3, "vocab_size": "many", "commit": "{}", "steps": [1]}.items():
        make_checkpoint(tmp_path / name, contract(), model, **{name: value})
        with pytest.raises(StateError):
            export(tmp_path / name, tmp_path / "out")
    make_checkpoint(tmp_path / "config", contract(), model, contract="{}")
    with pytest.raises(StateError):
        export(tmp_path / "config", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_exports(text_root: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", contract(), build_model(SMALL, 264, seed=0))
    output = export(tmp_path / "run", tmp_path / "out")
    about = json.loads((output / "diloco.json").read_text())
    for changes in ({"version": "3"}, {"tokens": None}, {"vocab_size": 264.0}):
        (output / "diloco.json").write_text(json.dumps(about | changes))
        with pytest.raises(StateError, match="lacks one of version, tokens, vocab_size"):
            evaluate_checkpoint(output, text_root)
    for text in ("not json", "[]", "[" * 200_000, json.dumps(about | {"contract": None})):
        (output / "diloco.json").write_text(text)
        with pytest.raises(ConfigError):
            evaluate_checkpoint(output, text_root)
    other = {**about["contract"], "model": {**about["contract"]["model"], "layers": 2}}
    (output / "diloco.json").write_text(json.dumps(about | {"contract": other}))
    with pytest.raises(StateError, match="not those of the contract's model"):
        evaluate_checkpoint(output, text_root)
    (output / "diloco.json").write_text(json.dumps(about))
    (output / "model.safetensors").write_bytes(b"")
    with pytest.raises(StateError, match=r"model\.safetensors cannot be read"):
        evaluate_checkpoint(output, text_root)
