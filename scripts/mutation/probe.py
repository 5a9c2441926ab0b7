"""Run seeds with a copy of the package in which `reach.py` looks at the code of mutants: `probe.py FILE SEED,SEED,...`.

Appends a line for each seed as it ends: its number, its violation, and the names of the mutants that change it.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

changed: set[str] = set()
"""Names of the mutants that change the present seed."""
FAILED = object()
"""What a mutant makes of an expression that cannot be evaluated."""


def _runs(name: str) -> None:
    """The statement that a mutant changes is about to run, or has run."""
    changed.add(name)


def _tried(mutated: Callable[[], Any]) -> Any:
    """What a mutant makes of an expression."""
    try:
        return mutated()
    except Exception:
        return FAILED


def _differs(name: str, mutated: Any, value: Any, fresh: bool) -> Any:
    """The expression's value, after a look at what a mutant makes of it."""
    if name not in changed and not alike(value, mutated, fresh):
        changed.add(name)
    return value


def alike(one: Any, other: Any, fresh: bool = False) -> bool:
    """Whether nothing that goes on with one value would go on otherwise with the other. `fresh`: nobody else holds
    either of them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    if isinstance(one, frozenset) or (fresh and isinstance(one, list | set | deque)):
        return len(one) == len(other) and all(map(alike, one, other))  # order, too: somebody may go through them
    if fresh and isinstance(one, dict):
        return len(one) == len(other) and all(map(alike, one.items(), other.items()))
    frozen = is_dataclass(one) and getattr(one, "__dataclass_params__").frozen  # noqa: B009
    return bool((isinstance(one, int | str | bytes | Enum) or frozen) and one == other)


def main() -> None:
    """Run the seeds of the command line."""
    for name, function in {"runs": _runs, "tried": _tried, "differs": _differs}.items():
        setattr(builtins, f"_mutant_{name}", function)
    from diloco.simulate.virtual.search import run_seeds

    at_import = set(changed)
    with Path(sys.argv[1]).open("w") as file:
        for seed in map(int, sys.argv[2].split(",")):
            changed.clear()
            changed.update(at_import)
            (violation,) = [entry["violation"] for entry in run_seeds([seed]).violations] or [""]
            row = {"seed": seed, "violation": violation, "changed": sorted(changed)}
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
