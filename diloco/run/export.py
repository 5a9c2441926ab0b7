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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.base.errors import ConfigError, IncompatibleError, StateError, UsageError
from diloco.base.limits import check_bytes, host_bytes
from diloco.base.paths import inside
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import contract_from_json
from diloco.data import open_dataset
from diloco.inner.loop import evaluate
from diloco.models import build_model, checked_vocab_size, logit_rows
from diloco.models.hf import llama_config, to_llama
from diloco.outer.fragments import Layout, named_parameters
from diloco.outer.optimizers import open_outer
from diloco.plan.model import activation_bytes, check_size
from diloco.run.past import checkpoint_at
from diloco.storage.checkpoint import Checkpoint, noted_shapes, outer_state
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
    if output.exists():
        names = {path.name for path in output.iterdir()} if output.is_dir() else {"a file"}
        if names and not (ABOUT in names and names <= {WEIGHTS, CONFIG, ABOUT}):
            raise UsageError(f"{output} exists and is not just an earlier export", "choose a new folder")
    source = checkpoint_at(checkpoint)
    anchor, digest = _anchor(source, data_root)
    trees = {ABOUT: _about(source, digest), CONFIG: _config(source, data_root)}
    with replacing(output, "export") as folder:
        write_tensors(folder / WEIGHTS, _exported(anchor, source.contract.model))
        for name, tree in trees.items():
            if tree is not None:
                (folder / name).write_text(json.dumps(tree, indent=2) + "\n")
    return output


def weights(checkpoint: Checkpoint, data_root: Path = HERE) -> dict[str, Tensor]:
    """Weights to export from a peer's checkpoint: its anchor by parameter name, fp32, in its shape, a view of it.

    Raises StateError or ConfigError when the checkpoint and the model that its contract describes do not fit.
    """
    return _anchor(checkpoint, data_root)[0]


def _anchor(checkpoint: Checkpoint, data_root: Path) -> tuple[dict[str, Tensor], str]:
    """The anchor to export from a checkpoint, by parameter as in `weights`, and the digest of its outer state."""
    contract = checkpoint.contract
    if contract.model.kind == "external":
        shapes = noted_shapes(checkpoint)  # of a model that we cannot build
    else:
        with torch.device("meta"):  # names and shapes without memory
            model = build_model(contract.model, checkpoint.value("vocab_size", int), 0, data_root)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in named_parameters(model).items()]
    layout = Layout.agreed(shapes, contract)
    state = outer_state(checkpoint, layout, open_outer(contract.outer))
    tensors = {}
    for fragment in layout.fragments:
        flat = state.fragments[fragment.index].anchor
        for entry in fragment.entries:
            tensors[entry.name] = flat[entry.offset : entry.offset + entry.elements].view(entry.shape)
    return tensors, state.digest


def _exported(parameters: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
    """Views of parameters by their names in an export."""
    match section.kind:
        case "transformer":
            return to_llama(parameters)
        case "hf":
            return {name.removeprefix("lm."): tensor for name, tensor in parameters.items()}
        case "external":
            return dict(parameters)


def _config(checkpoint: Checkpoint, data_root: Path) -> dict[str, Any] | None:
    """The contents of an export's config.json, if there is one."""
    section = checkpoint.contract.model
    match section.kind:
        case "transformer":
            vocab_size = checked_vocab_size(section, checkpoint.value("vocab_size", int))
            return llama_config(section, vocab_size, checkpoint.contract.data.sequence_length)
        case "hf":
            # Whatever dtype it asks for, fp32 is what was trained and what is written.
            return {**_read_json(inside(f"{section.hf_config}/{CONFIG}", data_root)), "dtype": "float32"}
        case "external":
            return None


def _about(checkpoint: Checkpoint, state_digest: str) -> dict[str, Any]:
    """The contents of an export's diloco.json."""
    contract, commit, data = checkpoint.contract, checkpoint.commit, checkpoint.contract.data
    if data.source == "shards":
        tokenizer = "the tokenizer that the token shards were packed with"
    elif data.tokenizer == "bytes":
        tokenizer = "bytes: a token is a byte of UTF-8 text (0 to 255); byte 0 ends a document"
    else:
        tokenizer = f"the Hugging Face tokenizer in the folder {data.tokenizer!r} of the site's data.root"
    return {
        "run": contract.run.name,
        "version": checkpoint.version,
        "tokens": _tokens(checkpoint),
        "state_digest": state_digest,
        "chain_digest": commit.digest if commit else "",
        "vocab_size": checkpoint.meta.get("vocab_size"),  # an external model may have none
        "tokenizer": tokenizer,
        "contract_digest": contract.digest,
        "contract": json.loads(contract.to_json()),
    }


def _tokens(checkpoint: Checkpoint) -> int:
    """Tokens of an exported run: committed, or under gossip, where nothing is, as many as the peer knew of."""
    return checkpoint.commit.tokens if checkpoint.commit else int(checkpoint.meta.get("run_tokens", 0))


# ---------------------------------------------------------------- eval


def evaluate_checkpoint(
    checkpoint: Path, data_root: Path = HERE, sequences: int | None = None, threads: int | None = None
) -> dict[str, int | float]:
    """For `diloco eval`: held-out loss of the anchor in a checkpoint (newest of several) or an export, on the CPU.

    `sequences`: at most so many; the contract's `eval.sequences` when not given. `threads`: torch's, from now on.

    Returns `version`, `tokens`, `val_loss` (nats per token), `perplexity`, and the `sequences` there were. Raises
    StateError, ConfigError, DataError, and IncompatibleError when data and model do not fit.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    contract, numbers, tensors = _trained(checkpoint, data_root)
    vocab_size = numbers["vocab_size"]
    dataset = open_dataset(contract.data, data_root)
    if dataset.vocab_size > vocab_size:
        cause = f"the data have {dataset.vocab_size} tokens, the model in {checkpoint} knows {vocab_size}"
        raise IncompatibleError(cause, "give the data root that the run was trained with")
    check_size(contract, vocab_size, None)
    batch_size = _batch_size(contract, vocab_size, data_root)
    model = build_model(contract.model, vocab_size, contract.run.seed, data_root)
    with torch.no_grad():
        views = _exported(named_parameters(model), contract.model)  # of the model, under their exported names
        if {name: view.shape for name, view in views.items()} != {n: t.shape for n, t in tensors.items()}:
            raise StateError("the weights are not those of the contract's model", "export the checkpoint again")
        for name, view in views.items():
            view.copy_(tensors[name])
    blocks = dataset.heldout(sequences or contract.eval.sequences)
    loss = evaluate(model, blocks, batch_size, torch.device("cpu"))
    return {
        "version": numbers["version"],
        "tokens": numbers["tokens"],
        "val_loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,  # exp(710) is no float
        "sequences": len(blocks),
    }


def _batch_size(contract: Contract, vocab_size: int, data_root: Path) -> int:
    """For eval: sequences of a batch, the contract's, or as many as take a quarter of this machine's memory.

    Raises ConfigError where memory does not hold one. A run's own devices may hold more than this machine does.
    """
    rows, length = logit_rows(contract.model, vocab_size, data_root), contract.data.sequence_length
    needed, available = activation_bytes(contract, rows, contract.inner.batch_size), host_bytes()
    what = f"a sequence of run {contract.run.name} ({length:,} tokens, {rows:,} logits each)"
    check_bytes(what, needed, available, "evaluate it on a machine with more memory")
    return max(1, min(contract.inner.batch_size, int(available / 4 / needed)))


def _trained(path: Path, data_root: Path) -> tuple[Contract, dict[str, int], Mapping[str, Tensor]]:
    """For eval: contract of an export or checkpoint; version, tokens, vocab_size; weights under exported names."""
    about = path / ABOUT
    if about.is_file():
        tree = _read_json(about)
        numbers: dict[str, Any] = {name: tree.get(name) for name in ("version", "tokens", "vocab_size")}
        if not all(type(number) is int for number in numbers.values()):
            raise StateError(f"{about} lacks one of {', '.join(numbers)}", "export the checkpoint again")
        return contract_from_json(json.dumps(tree.get("contract"))), numbers, read_tensors(path / WEIGHTS)
    source = checkpoint_at(path)
    tensors = _exported(_anchor(source, data_root)[0], source.contract.model)
    numbers = {"version": source.version, "tokens": _tokens(source), "vocab_size": source.value("vocab_size", int)}
    return source.contract, numbers, tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check that it is there and is JSON") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a JSON object", "check that it is the file it should be")
    return tree
