"""`diloco report`, `audit`, `replay`, `export` and `eval`: what a run has left in its folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from diloco.base.errors import StateError
from diloco.cli.options import AsJson, PeerFolders, progress_in, raise_when_stopped, show

commands = Typer()

DataRoot = Annotated[
    Path | None,
    Option(help="Folder that the contract's paths are relative to; the one that the peer trained with."),
]


@commands.command(epilog="Examples:  diloco report runs/demo  ·  diloco report runs/async --table async.json")
def report(
    directory: Annotated[Path, Argument(help="A simulate folder, or one peer's.")],
    tables: Annotated[
        list[Path] | None, Option("--table", help="What a bench wrote with --json, to stand beside the run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html: one page that opens offline."""
    from diloco.observe.report import Table, write_plot, write_report

    if not (directory / "events.jsonl").is_file() and not any(directory.glob("*/events.jsonl")):
        fix = "give the --out folder of a simulation, or the --dir of a peer"
        raise StateError(f"no events in {directory.absolute()}", fix)
    page = write_report(directory, [Table.read(path) for path in tables or ()])
    plot = write_plot(directory)
    print(json.dumps({"report": str(page), "plot": str(plot)}) if as_json else f"{page}\n{plot}")


@commands.command(epilog="Example:  diloco audit runs/demo")
def audit(directories: PeerFolders, as_json: AsJson = False) -> None:
    """Lay the ledgers of several peers side by side: is everything counted once, on one chain, with one state?

    Exits with 1 when anything is not as it must be.
    """
    from diloco.accounts.audit import audit as audit_folders
    from diloco.accounts.audit import audit_text

    result = audit_folders(directories)
    show(json.dumps(result.tree(), indent=2) if as_json else audit_text(result))
    raise Exit(0 if result.clean else 1)


@commands.command(epilog="Example:  diloco simulate quick --set storage.record=true && diloco replay runs/quick")
def replay(directories: PeerFolders, data_root: DataRoot = None, as_json: AsJson = False) -> None:
    """Make every version once more from the contributions that the peers recorded, and compare the digests.

    Exits with 1 when one comes out otherwise.
    """
    from diloco.accounts.replay import replay as replay_folders
    from diloco.accounts.replay import replay_text

    result = replay_folders(directories, _root(data_root, *directories), progress_in("commits"))
    show(json.dumps(result.tree(), indent=2) if as_json else replay_text(result))
    raise Exit(0 if result.exact else 1)


@commands.command(epilog="Example:  diloco export runs/demo/p0 exported && ls exported")
def export(
    checkpoint: Annotated[Path, Argument(help="A checkpoint, or the folder of a peer.")],
    output: Annotated[Path, Argument(help="Folder to write.")],
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Write the anchor as a plain model: safetensors and config.json, usable with transformers."""
    from diloco.run.export import export as write_export

    raise_when_stopped()  # a folder half written is deleted
    path = write_export(checkpoint, output, _root(data_root, checkpoint))
    print(json.dumps({"exported": str(path)}) if as_json else f"exported to {path}")


@commands.command("eval", epilog="Example:  diloco eval runs/demo/p0 --json")
def evaluate(
    checkpoint: Annotated[Path, Argument(help="A checkpoint, the folder of a peer, or an exported model.")],
    data_root: DataRoot = None,
    sequences: Annotated[int | None, Option(min=1, help="Held-out sequences; the contract's by default.")] = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss of a checkpoint's anchor."""
    from diloco.run.export import evaluate_checkpoint

    result = evaluate_checkpoint(checkpoint, _root(data_root, checkpoint), sequences, threads)
    if as_json:
        print(json.dumps(result))
    else:
        at = f"version {result['version']}, {result['tokens']:,} tokens"
        print(f"{at}: held-out loss {result['val_loss']:.4f} nats/token")


def _root(given: Path | None, *folders: Path) -> Path:
    """The option `--data-root`: as given, else as the first of these folders, or of the peers in them, remembers."""
    from diloco.run.options import SITE_CARD, remembered_root

    places = [
        place
        for folder in folders
        for place in (folder, *sorted(card.parent for card in folder.glob(f"*/{SITE_CARD}")))
    ]
    remembered = (remembered_root(place) for place in places)
    return given or Path(next(filter(None, remembered), ""))
