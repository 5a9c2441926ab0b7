"""`diloco config`, `diloco init` and `diloco data`: contracts and sites, shown or written, and token shards."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from diloco.base.errors import ResourceError, UsageError
from diloco.cli.options import AsJson, ContractArgument, Overrides, SitePath, progress_in, raise_when_stopped

config_app = Typer(help="Look at contracts and sites.", no_args_is_help=True)
data_app = Typer(help="Prepare training data.", no_args_is_help=True)


@config_app.command("show", epilog="Example:  diloco config show demo --site peers/local.toml")
def config_show(
    contract: ContractArgument, site: SitePath = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Print every effective value and where it comes from."""
    from diloco.config.load import load_contract, load_site, split_overrides

    site_overrides, contract_overrides = split_overrides(overrides or [])
    loaded, local = load_contract(contract, contract_overrides), load_site(site, site_overrides)
    rows = [*loaded.rows(), *local.rows()]
    if as_json:
        values = {name: {"value": value, "from": origin} for name, value, origin in rows}
        print(json.dumps({"digest": loaded.value.digest, "values": values}, indent=2))
        return
    width = max(len(name) for name, _, _ in rows)
    shown = [(name, json.dumps(value), origin) for name, value, origin in rows]
    middle = min(max(len(value) for _, value, _ in shown), 40)
    for name, value, origin in shown:
        print(f"{name:{width}}  {value:{middle}}  {origin}")
    print(f"contract digest {loaded.value.digest}")


@config_app.command("presets")
def config_presets() -> None:
    """List the model presets."""
    from diloco.config.presets import PRESETS

    for name, sizes in PRESETS.items():
        print(f"{name:16} {', '.join(f'{key} {value}' for key, value in sizes.items())}")


@config_app.command("suggest", epilog="Example:  diloco config suggest --params 150M --peers 4")
def config_suggest(
    params: Annotated[str, Option(help="Parameters of the model, embeddings included: 150M, 1.3B.")],
    peers: Annotated[int, Option(min=1, help="Peers that train it together.")],
    steps: Annotated[int, Option(min=1, help="H, inner steps between two syncs.")] = 30,
    sequence_length: Annotated[int, Option(min=1, help="Tokens of one sequence.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Print learning rates and batch for a model size and a number of peers, by the published scaling laws."""
    from diloco.plan.suggest import parse_parameters, suggest, to_toml

    suggestion = suggest(parse_parameters(params), peers, steps, sequence_length)
    print(json.dumps(asdict(suggestion), indent=2) if as_json else to_toml(suggestion), end="\n" if as_json else "")


@data_app.command("pack", epilog="Example:  diloco data pack corpus/*.txt --output train.bin")
def data_pack(
    paths: Annotated[list[Path], Argument(help="Text or JSONL files, or folders of them.")],
    output: Annotated[Path, Option(help="The shard to write (.bin).")],
    tokenizer: Annotated[str, Option(help="'bytes', or a local Hugging Face tokenizer folder.")] = "bytes",
    text_field: Annotated[str, Option(help="Field of a JSONL record that holds the text.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Turn text into a memory-mapped token shard (data.source = "shards")."""
    from diloco.data.shards import pack
    from diloco.data.text import open_tokenizer

    raise_when_stopped()  # a shard half written is deleted
    progress = None if as_json else progress_in("bytes")
    result = pack(paths, output, open_tokenizer(tokenizer, Path()), text_field, progress)
    if as_json:
        print(json.dumps({"output": str(output), **asdict(result)}))
    else:
        files = "1 file" if result.files == 1 else f"{result.files:,} files"
        print(f"{output}: {result.tokens:,} tokens from {files}, {result.bytes:,} bytes")


commands = Typer()


@commands.command(epilog="Example:  diloco init my-run && diloco simulate my-run/contract.toml --peers 2")
def init(
    directory: Annotated[Path, Argument(metavar="[DIR]", help="Folder to write to; this one.")] = Path(),
) -> None:
    """Write contract.toml and site.toml, with every key, its default and what it means."""
    from diloco.config.template import contract_template, site_template

    contract, site = directory / "contract.toml", directory / "site.toml"
    for path in (contract, site):
        if path.exists():
            raise UsageError(f"{path.absolute()} is there already", "name another folder: diloco init DIR")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        contract.write_text(contract_template(str(contract), str(site)))
        site.write_text(site_template())
    except OSError as error:
        cause = f"cannot write to {directory.absolute()}: {error.strerror}"
        raise ResourceError(cause, "name another folder") from error
    print(f"{contract}\n{site}\ntry:  diloco simulate {contract} --peers 2")
