"""Throw damaged inputs at everything that reads bytes of others, and see that it refuses them or takes them.

    scripts/fuzz                                  10,000 inputs for each target
    scripts/fuzz --list
    scripts/fuzz --only codec-int4                or several, with commas
    scripts/fuzz --inputs 1000000 --seed 3 --json rows.json
    scripts/fuzz --short                          the form of the tests

Valid inputs are made by the code that writes them, and damaged: bit by bit, and by their structure where a checksum
comes first. With atheris installed (CPython 3.11; `pip install atheris`) those that reach new branches are damaged
further; else they are chosen by the seed alone. Readers of files and contracts get a tenth of the inputs.

A finding is an exception that is no refusal, a process that ends, more than 1 s of CPU for one input, more memory than
an input may take, memory that grows, or a valid input that is refused. It is printed with its input, and how to repeat
it: `scripts/fuzz --only TARGET --repeat < FILE`, which takes hexadecimal digits. The exit code is 1 then.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import FunctionType, ModuleType

from scripts.fuzzing.target import Target
from scripts.fuzzing.worker import Run, fuzzed

INPUTS = 10_000
SHORT = 500
PROGRESS_S = 10.0
KINDS = ("codecs", "messages", "files", "texts")
"""Modules with targets."""


def main() -> int:
    options = _parse()
    guide = importlib.import_module("atheris") if find_spec("atheris") else None
    targets = _targets(guide)
    chosen = [targets[name] for name in options.only or targets if name in targets]
    if unknown := set(options.only) - set(targets):
        raise SystemExit(f"no target {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
    if options.list:
        print(*targets, sep="\n")
        return 0
    if options.repeat:
        return _repeat(chosen[0], bytes.fromhex(sys.stdin.read().strip()))
    print("guided by atheris" if guide else f"by mutation, seed {options.seed}", flush=True)
    rows: list[dict[str, object]] = []
    for target in chosen:
        began_s = time.monotonic()
        inputs = max((SHORT if options.short else options.inputs) // target.share, 1)
        run = fuzzed(target, inputs, options.seed, guide, _Progress(target.name, inputs))
        rows.append(_row(target, run, "atheris" if guide else "mutation", time.monotonic() - began_s))
        print(_line(rows[-1]), flush=True)
        if run.finding:
            print(f"  repeat: echo {run.found.hex()} | scripts/fuzz --only {target.name} --repeat", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["finding"] for row in rows) else 0


def _targets(guide: ModuleType | None) -> dict[str, Target]:
    """All targets by name. Their modules are imported here, so that atheris counts the branches in them."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    counted = guide.instrument_imports(include=["diloco"], enable_loader_override=False) if guide else nullcontext()
    with redirect_stderr(StringIO()), counted:  # atheris names every module there
        modules = [importlib.import_module(f"scripts.fuzzing.{kind}") for kind in KINDS]
        found = {target.name: target for module in modules for target in module.targets()}
    if guide:
        from diloco.wire.convert import _SCOPE  # its functions are compiled from text, not imported

        for function in [one for one in _SCOPE.values() if isinstance(one, FunctionType)]:
            guide.instrument_func(function)
    gc.collect()
    gc.freeze()  # else a collection in each process copies all pages of this one
    return found


def _row(target: Target, run: Run, by: str, seconds: float) -> dict[str, object]:
    finding = f"{run.finding}; input {run.found.hex()}" if run.finding else ""
    return {
        "target": target.name, "inputs": run.inputs, "by": by, "seconds": round(seconds, 1), "refused": run.refused,
        "accepted": run.accepted, "edges": run.edges, "memory_mb": run.memory_mb, "finding": finding,
    }  # fmt: skip


def _line(row: dict[str, object]) -> str:
    """A row for people."""
    edges = "" if row["edges"] == -1 else f"{row['edges']:>5} edges"
    inputs, refused = f"{row['inputs']:>8} inputs", f"{row['refused']:>8} refused"
    line = f"{row['target']:27} {inputs} {refused} {row['seconds']:>6} s {row['memory_mb']:>5} MB {edges}".rstrip()
    return f"{line}\n  FOUND {str(row['finding']).partition('; input')[0]}" if row["finding"] else line


def _repeat(target: Target, data: bytes) -> int:
    """Read one input here, with all that it raises."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        target.corpus()  # some write files that the reader wants beside the input
        try:
            target.read(data)
        except target.refusals as error:
            print(f"refused: {error!r}")
        else:
            print("taken")
    return 0


class _Progress:
    """A line on a target every few seconds."""

    def __init__(self, name: str, inputs: int) -> None:
        self._name, self._inputs, self._due_s = name, inputs, time.monotonic() + PROGRESS_S

    def __call__(self, tried: int) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s += PROGRESS_S
            print(f"{self._name}: {tried:,} of {self._inputs:,}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the targets and read nothing")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAMES", help="with commas")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="for each target; files and contracts get a tenth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, again after each one")
    parser.add_argument("--short", action="store_true", help=f"{SHORT} inputs for each")
    parser.add_argument("--repeat", action="store_true", help="read one input, as hexadecimal digits, from stdin")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
