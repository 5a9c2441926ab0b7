"""The files that one round of two bare library peers crosses, and how often the training thread moves between them.

    scripts/trace-round            # a library run without a folder
    scripts/trace-round FOLDER     # with ledger, events and checkpoints there

`base/`, `config/` and `observe/` are not counted: values and records that every file uses.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent.parent / "diloco"
UNCOUNTED = ("base/", "config/", "observe/")
ROUNDS, STEPS, TOKENS = 4, 2, 10
CONTRACT = {
    "run": {"name": "trace", "total_tokens": 10**9},
    "membership": {"start_peers": 2},
    "model": {"kind": "external"},
    "inner": {"steps": STEPS},
    "sync": {"part_elements": 1024},
}


class Trace:
    """Calls into the package, by thread, in order: each file once for as long as it is not left."""

    def __init__(self) -> None:
        self.on = False
        self.paths: dict[str, list[str]] = defaultdict(list)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """As `sys.setprofile` wants it."""
        name = frame.f_code.co_filename
        if self.on and event == "call" and name.startswith(f"{ROOT}/"):
            file, path = name[len(f"{ROOT}/") :], self.paths[threading.current_thread().name]
            if not file.startswith(UNCOUNTED) and path[-1:] != [file]:
                path.append(file)


def traced(folder: str | None) -> dict[str, Any]:
    """One round, after some others: files on the training thread and in all, and moves on the training thread."""
    import torch

    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    import diloco

    torch.set_num_threads(1)
    first, second = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    run, over = diloco.found(CONTRACT, first, directory=folder), threading.Event()

    def beside() -> None:
        other = diloco.join(run.address, second)
        other.wait()
        for _ in range(ROUNDS * STEPS):
            other.step(TOKENS)
        over.wait(20.0)
        other.close()

    thread = threading.Thread(target=beside, name="other peer")
    thread.start()
    run.wait()
    for step in range(ROUNDS * STEPS):
        trace.on = step >= (ROUNDS - 1) * STEPS
        run.step(TOKENS)
    trace.on = False
    over.set()
    run.close()
    thread.join()
    main = trace.paths["MainThread"]
    everywhere = {file for path in trace.paths.values() for file in path}
    return {"training": sorted(set(main)), "all": sorted(everywhere), "moves": len(main) - 1}


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from diloco.base.errors import DilocoError

    try:
        found = traced(arguments.folder)
    except DilocoError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{len(found['training']):5}  files on the training thread, {found['moves']} moves between them")
    print(f"{len(found['all']):5}  files on all threads")
    print("\n".join(f"       {'*' if file in found['training'] else ' '} {file}" for file in found["all"]))
