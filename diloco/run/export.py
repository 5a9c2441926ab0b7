"""Out of a run: a checkpoint's anchor as a plain model folder, and its held-out loss.

    <output>/model.safetensors    the weights, fp32; under Hugging Face's names where the model has any
             config.json          what `transformers` builds it from (not for kind `external`)
             diloco.json          version, tokens, digests and contract of the run, and how to tokenise

`transformers.AutoModelForCausalLM.from_pretrained(output)` then gives the trained model. Writing it does not need
`transformers`, except for kind `hf`, whose parameters only that package can name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.base.errors import ConfigError, IncompatibleError, StateError, UsageError
from diloco.base.types import Commit
from diloco.config.contract import Contract, DataSection, ModelSection
from diloco.config.load import contract_from_json
from diloco.data import open_dataset
from diloco.inner.loop import evaluate
from diloco.models import build_model, checked_vocab_size
from diloco.models.export_map import llama_config, to_llama
from diloco.outer.fragments import Layout, NamedShapes, named_parameters
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterState
from diloco.storage.checkpoint import Checkpoint, load, noted_shapes, outer_state
from diloco.storage.disk import read_tensors, replacing, write_tensors

WEIGHTS, CONFIG, ABOUT = "model.safetensors", "config.json", "diloco.json"
HERE = Path(".")


# ---------------------------------------------------------------- export


def export(checkpoint: Path, output: Path, data_root: Path = HERE) -> Path:
    """Write the anchor of a peer's checkpoint, or of the newest in a directory of several, as a plain model folder.

    `data_root`: the site's, which the contract's `model.hf_config` is relative to. Returns `output`, absolute. The
    checkpoint is mapped and no weight is copied. Raises StateError, ConfigError, ResourceError, and UsageError when
    `output` holds anything but an earlier export.
    """
    output = output.resolve()
    _check_free(output)
    source = load(checkpoint)
    contract, layout, state = _open(source, data_root)
    config = _config(contract, source, data_root)
    with replacing(output, "export") as folder:
        write_tensors(folder / WEIGHTS, _exported(_anchor(state, layout), contract.model))
        _write_json(folder / ABOUT, _about(source, contract, state))
        if config is not None:
            _write_json(folder / CONFIG, config)
    return output


def weights(checkpoint: Checkpoint, data_root: Path = HERE) -> dict[str, Tensor]:
    """The anchor in a peer's checkpoint: parameter name -> fp32 tensor in its shape, a view of the checkpoint's.

    Raises StateError or ConfigError when the checkpoint and the model that its contract describes do not fit.
    """
    _, layout, state = _open(checkpoint, data_root)
    return _anchor(state, layout)


def _open(checkpoint: Checkpoint, data_root: Path) -> tuple[Contract, Layout, OuterState]:
    contract = checkpoint.contract
    shapes = _shapes(checkpoint, contract.model, data_root)
    layout = Layout.agreed(shapes, contract)
    return contract, layout, outer_state(checkpoint, layout, open_outer(contract.outer))


def _shapes(checkpoint: Checkpoint, section: ModelSection, data_root: Path) -> NamedShapes:
    """Name and shape of each parameter in model order: from the model itself, or noted where we can't build it."""
    if section.kind == "external":
        return noted_shapes(checkpoint)
    with torch.device("meta"):  # names and shapes without memory
        model = build_model(section, checkpoint.value("vocab_size", int), 0, data_root)
    return [(name, tuple(parameter.shape)) for name, parameter in named_parameters(model).items()]


def _anchor(state: OuterState, layout: Layout) -> dict[str, Tensor]:
    return {
        entry.name: state.fragments[fragment.index]
        .anchor[entry.offset : entry.offset + entry.elements]
        .view(entry.shape)
        for fragment in layout.fragments
        for entry in fragment.entries
    }


def _exported(parameters: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
    """Views of parameters by their names in an export."""
    match section.kind:
        case "transformer":
            return to_llama(parameters)
        case "hf":
            return {name.removeprefix("lm."): tensor for name, tensor in parameters.items()}
        case "external":
            return dict(parameters)


def _config(contract: Contract, checkpoint: Checkpoint, data_root: Path) -> dict[str, Any] | None:
    """The contents of config.json."""
    section = contract.model
    match section.kind:
        case "transformer":
            length = contract.data.sequence_length
            vocab_size = checked_vocab_size(section, checkpoint.value("vocab_size", int))
            return llama_config(section, vocab_size, length)
        case "hf":
            # Whatever dtype it asks for, fp32 is what was trained and what is written.
            return {**_read_json(data_root / str(section.hf_config) / CONFIG), "dtype": "float32"}
        case "external":
            return None


def _about(checkpoint: Checkpoint, contract: Contract, state: OuterState) -> dict[str, Any]:
    """The contents of diloco.json."""
    commit = checkpoint.commit
    return {
        "run": contract.run.name,
        "version": checkpoint.version,
        "tokens": _tokens(checkpoint, commit),
        "state_digest": state.digest,
        "chain_digest": commit.digest if commit else "",
        "vocab_size": checkpoint.meta.get("vocab_size"),  # an external model may have none
        "tokenizer": _tokenizer(contract.data),
        "contract_digest": contract.digest,
        "contract": json.loads(contract.to_json()),
    }


def _tokens(checkpoint: Checkpoint, commit: Commit | None) -> int:
    """Of the run: committed, or under gossip, where nothing is, as many as the peer knew of."""
    return commit.tokens if commit else int(checkpoint.meta.get("run_tokens", 0))


def _tokenizer(section: DataSection) -> str:
    """How text became tokens, for people."""
    if section.source == "shards":
        return "the tokenizer that the token shards were packed with"
    if section.tokenizer == "bytes":
        return "bytes: a token is a byte of UTF-8 text (0 to 255); byte 0 ends a document"
    return f"the Hugging Face tokenizer in the folder {section.tokenizer!r} of the site's data.root"


def _check_free(output: Path) -> None:
    """Raises UsageError where an export would replace something else."""
    if not output.exists():
        return
    names = {path.name for path in output.iterdir()} if output.is_dir() else {"a file"}
    if names and not (ABOUT in names and names <= {WEIGHTS, CONFIG, ABOUT}):
        raise UsageError(f"{output} exists and is not just an earlier export", "choose a new folder")


# ---------------------------------------------------------------- eval


@dataclass(frozen=True)
class Trained:
    """Weights, under the names of an export, and what evaluating them takes."""

    contract: Contract
    version: int
    tokens: int
    vocab_size: int
    tensors: Mapping[str, Tensor]


def evaluate_checkpoint(
    checkpoint: Path, data_root: Path = HERE, sequences: int | None = None, threads: int | None = None
) -> dict[str, int | float]:
    """Held-out loss of the anchor in a checkpoint (or the newest of several) or of an exported folder, on the CPU.

    `sequences`: at most so many; the contract's `eval.sequences` when not given. `threads`: torch's, from now on.

    Returns `version`, `tokens`, `val_loss` (nats per token), `perplexity`, and the `sequences` there were. Raises
    StateError, ConfigError, DataError, and IncompatibleError when data and model do not fit.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    trained = _from_export(checkpoint) if (checkpoint / ABOUT).is_file() else _from_checkpoint(checkpoint, data_root)
    contract = trained.contract
    dataset = open_dataset(contract.data, data_root)
    if dataset.vocab_size > trained.vocab_size:
        cause = f"the data have {dataset.vocab_size} tokens, the model in {checkpoint} knows {trained.vocab_size}"
        raise IncompatibleError(cause, "give the data root that the run was trained with")
    model = build_model(contract.model, trained.vocab_size, contract.run.seed, data_root)
    _fill(model, trained)
    blocks = dataset.heldout(sequences or contract.eval.sequences)
    loss = evaluate(model, blocks, contract.inner.batch_size, torch.device("cpu"))
    return {
        "version": trained.version,
        "tokens": trained.tokens,
        "val_loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,  # exp(710) is no float
        "sequences": len(blocks),
    }


def _from_checkpoint(path: Path, data_root: Path) -> Trained:
    checkpoint = load(path)
    contract, layout, state = _open(checkpoint, data_root)
    commit = checkpoint.commit
    tokens = _tokens(checkpoint, commit)
    tensors = _exported(_anchor(state, layout), contract.model)
    return Trained(contract, checkpoint.version, tokens, checkpoint.value("vocab_size", int), tensors)


def _from_export(folder: Path) -> Trained:
    about = _read_json(folder / ABOUT)
    numbers: dict[str, Any] = {name: about.get(name) for name in ("version", "tokens", "vocab_size")}
    if not all(type(number) is int for number in numbers.values()):
        raise StateError(f"{folder / ABOUT} lacks one of {', '.join(numbers)}", "export the checkpoint again")
    contract = contract_from_json(json.dumps(about.get("contract")))
    return Trained(contract=contract, tensors=read_tensors(folder / WEIGHTS), **numbers)


def _fill(model: nn.Module, trained: Trained) -> None:
    """Copy the weights into the model, through views of its parameters under their exported names."""
    with torch.no_grad():
        views = _exported(named_parameters(model), trained.contract.model)
        if {name: view.shape for name, view in views.items()} != {n: t.shape for n, t in trained.tensors.items()}:
            raise StateError("the weights are not those of the contract's model", "export the checkpoint again")
        for name, view in views.items():
            view.copy_(trained.tensors[name])


# ---------------------------------------------------------------- files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check that it is there and is JSON") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a JSON object", "check that it is the file it should be")
    return tree


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n")
