"""Lines that the simulator runs in the seeds of a budget, without any mutant: a bug in another line cannot be found."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from itertools import pairwise

from scripts.mutation.catalogue import CatalogueError, Mutant
from scripts.mutation.trial import Simulation, Template

POLL_S = 0.1


def reached(template: Template, mutants: Sequence[Mutant], seeds: range, seconds: float, jobs: int) -> set[Mutant]:
    """Mutants with a line that some seed runs. Raises CatalogueError when a seed fails without any mutant."""
    files = {mutant.file for mutant in mutants}
    lines = _lines(template, files, seeds, seconds, jobs)
    return {
        mutant
        for mutant in mutants
        if lines.get(mutant.file, set()) & _places((template.unchanged / mutant.file).read_text(), mutant)
    }


def _lines(template: Template, files: Collection[str], seeds: range, seconds: float, jobs: int) -> dict[str, set[int]]:
    """Lines of the files that are run, by a measurement of coverage in `jobs` processes, each with a share of seeds."""
    folder = template.unchanged
    bounds = [seeds.start + len(seeds) * index // jobs for index in range(jobs + 1)]
    pieces = [range(start, stop) for start, stop in pairwise(bounds) if start < stop]
    before = ("-m", "coverage", "run", "--parallel-mode", f"--include={','.join(sorted(files))}")
    simulate_clean([Simulation(folder, piece, seconds, before) for piece in pieces])
    for step in (["combine", "-q"], ["json", "-q", "-o", "lines.json"]):
        subprocess.run([sys.executable, "-m", "coverage", *step], cwd=folder, check=True)
    tree = json.loads((folder / "lines.json").read_text())["files"]
    return {file: set(found["executed_lines"]) for file, found in tree.items()}


def simulate_clean(running: Sequence[Simulation]) -> None:
    """Wait for simulations of the unchanged package. Raises CatalogueError when one found anything, or did not run."""
    try:
        # Each is asked every time: that reminds it of its time.
        while sum(simulation.ended for simulation in running) < len(running):
            time.sleep(POLL_S)
    finally:
        for simulation in running:
            simulation.kill()
    for verdict in (simulation.verdict() for simulation in running):
        if verdict.outcome != "survived":
            raise CatalogueError(
                f"without any mutant: {verdict.outcome}, {verdict.by}\n"
                "mend that first: `diloco virtual --seed N` shows a seed"
            )


def _places(text: str, mutant: Mutant) -> set[int]:
    """Lines at which a measurement counts the code of a mutant: where its statements begin."""
    first, last = mutant.line, mutant.line + mutant.old.count("\n")
    places = set(range(first, last + 1))
    inside = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= first <= (node.end_lineno or node.lineno)
    ]
    innermost = max(inside, key=lambda node: node.lineno, default=None)
    return places | ({innermost.lineno} if innermost is not None else set())
