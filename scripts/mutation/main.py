"""Plant bugs one at a time in a copy of the package, and see how many the simulator finds.

Without --sample: the bugs that were written down, in `mutants.toml` of the folders of the package. With it: mechanical
ones, drawn by --seed from protocol/, exchange/ and accounts/. Each gets seeds from 0 on until an invariant breaks or
the budget ends, without those that it does not change: one run of each seed, first of all, tells which these are. A
crash in the first seed does not count as found. One whose survival is explained gets a quarter of the time.

Explanations of those that survive are in `[survivors]` of the same files, by name. The exit code is 1 while there is a
survivor without one, or a written mutant that crashes at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scripts.mutation.catalogue import RULES, Catalogue, CatalogueError, Mutant, nearest, read_catalogue
from scripts.mutation.drawn import FOLDERS, KINDS, all_mutants, sample
from scripts.mutation.reach import POLL_S, changed_seeds
from scripts.mutation.trial import OUTCOMES, Simulation, Template, Verdict

EXAMPLES = """examples:
  scripts/mutants                                        all written mutants: 45 minutes at most on 2 cores
  scripts/mutants --list
  scripts/mutants --only one-vote-decides --only 'lease-*' --budget 50
  scripts/mutants --sample 200 --seed 1 --json drawn.json
"""
MAX_STATUS_CHARACTERS = 79
EXPLAINED_SHARE = 0.25
"""Share of the seconds that a mutant gets whose survival is explained: it is run to see whether that still holds."""
REACH_S = 900.0
"""Time for the seeds without a mutant: after it, as many seeds as were done are the budget."""


@dataclass(frozen=True)
class Budget:
    """Seeds and seconds that a mutant may stay hidden for."""

    seeds: int = 600
    seconds: float = 360.0

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `SEEDS`, `SECONDSs` or `SEEDS,SECONDSs`."""
        match = re.fullmatch(r"(?:([1-9]\d*))?(?:(?:^|,)(\d+(?:\.\d+)?)s)?", text)
        if not match or not any(match.groups()):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no budget: give seeds, seconds or both, as 300, 60s or 300,60s"
            )
        # One that is not given does not limit.
        seeds, seconds = match.groups()
        return cls(int(seeds) if seeds else 10**6, float(seconds) if seconds else 10.0**6)


@dataclass
class Row:
    """Result of one mutant."""

    name: str
    file: str
    found: bool
    seeds: int
    """Seeds of the budget, up to the one that found it."""
    run: int
    """Those of them that it changes, and that were simulated with it."""
    seconds: float
    by: str
    """Seed and violation that found it."""
    outcome: str
    """A key of `OUTCOMES`."""
    rule: str
    line: int
    why: str
    explained: str
    """The reason why it survives, where one is written down."""

    @classmethod
    def of(cls, mutant: Mutant, verdict: Verdict, budget: range, changed: Sequence[int], explained: str) -> Row:
        """Result of a mutant, from the end of its search in the seeds of the budget that it changes."""
        found = verdict.outcome == "found"
        after = changed[verdict.seeds] if verdict.seeds < len(changed) else budget.stop
        seeds = verdict.seed + 1 if verdict.seed is not None else after
        return cls(
            mutant.name, mutant.file, found, seeds - budget.start, verdict.seeds, verdict.seconds, verdict.by,
            verdict.outcome, mutant.rule, mutant.line, mutant.why, explained,
        )  # fmt: skip

    @property
    def open(self) -> bool:
        """Whether somebody has to explain it, or to write another in its place."""
        if self.outcome == "broken":
            return self.rule in RULES  # a drawn one that breaks everything at once says nothing
        return not (self.found or self.explained)

    def __str__(self) -> str:
        explained = f"explained: {self.explained}" if self.explained and not self.found else ""
        stale = "found, so its explanation is wrong" if self.explained and self.found else ""
        text = "; ".join(filter(None, (self.by, explained, stale)))
        head = f"{self.outcome:9} {self.name:44} {self.file}:{self.line}"
        return f"{head:100} {self.seeds:5} seeds ({self.run} run) {self.seconds:6.1f} s  {text}".rstrip()


@dataclass
class Score:
    """Rows of all mutants so far, and the file that has them as JSON."""

    command: str
    file: Path | None
    mutants: int
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def add(self, row: Row) -> None:
        """Add a mutant's row and write the file anew, so that nothing is lost."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write the file, all at once."""
        if self.file is not None:
            beside = self.file.with_name(f"{self.file.name}.part")
            beside.write_text(json.dumps(self.as_json(), indent=2) + "\n")
            beside.replace(self.file)

    def as_json(self) -> dict[str, Any]:
        """Everything that was found, for programs."""
        counts = Counter(row.outcome for row in self.rows)
        running = [row for row in self.rows if row.outcome != "broken"]
        found = [row for row in running if row.found]
        return {
            "command": self.command,
            "interrupted": self.interrupted,
            "mutants": self.mutants,
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            "unexplained": sum(row.open for row in self.rows),
            "score": round(len(found) / len(running), 3) if running else None,
            "median_seeds": statistics.median(row.seeds for row in found) if found else None,
            "seconds": round(time.monotonic() - self.began_s, 1),
            "rules": {
                rule: {"mutants": len(rows), "found": sum(row.found for row in rows)}
                for rule in dict.fromkeys([*RULES, *KINDS])
                if (rows := [row for row in self.rows if row.rule == rule])
            },
            "rows": [asdict(row) for row in self.rows],
        }

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        tree = self.as_json()
        score = f" ({tree['score']:.1%} of those that run)" if tree["score"] is not None else ""
        others = ", ".join(f"{tree[outcome]} {outcome}" for outcome in OUTCOMES if outcome != "found" and tree[outcome])
        yield ""
        after = f"interrupted after {len(self.rows)} of " if self.interrupted else ""
        yield f"{after}{self.mutants} mutants: {tree['found']} found{score}{', ' if others else ''}{others}"
        if tree["median_seeds"] is not None:
            yield f"median of those found: {tree['median_seeds']:g} seeds; {tree['seconds']:.0f} s in all"
        yield "  ".join(f"{rule} {entry['found']}/{entry['mutants']}" for rule, entry in tree["rules"].items())
        for row in self.rows:
            if row.open:
                yield f"to do: {row.name} ({row.outcome}): {row.why}"


class Hunt:
    """Searches for mutants, `jobs` at a time, each in its own copy of the package."""

    def __init__(self, template: Template, budget: Budget, jobs: int, survivors: Mapping[str, str]) -> None:
        self.template = template
        self.budget = budget
        self.jobs = jobs
        self.survivors = survivors
        self.seeds = range(budget.seeds)
        self.changed: dict[str, list[int]] = {}
        """By name of a mutant: the seeds that it changes."""
        self.running: dict[str, tuple[Mutant, Path, Simulation]] = {}
        """By name of the mutant: its copy of the package, and the process that searches."""

    def look(self, mutants: Sequence[Mutant]) -> Iterator[Row]:
        """Run the seeds without a mutant. Rows of those that change none of them."""
        progress = lambda done: _status(f"{done} of {len(self.seeds)} seeds")  # noqa: E731
        self.seeds, self.changed = changed_seeds(self.template, mutants, self.seeds, REACH_S, self.jobs, progress)
        for mutant in mutants:
            if not self.changed[mutant.name]:
                yield self._row(mutant, Verdict("unreached", 0, 0.0, ""))

    def rows(self, mutants: Sequence[Mutant]) -> Iterator[Row]:
        """Rows of the others as their searches end."""
        waiting = deque(mutant for mutant in mutants if self.changed[mutant.name])
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    mutant = waiting.popleft()
                    copy = self.template.copy_with(mutant)
                    seconds = self.budget.seconds * (EXPLAINED_SHARE if mutant.name in self.survivors else 1.0)
                    simulation = Simulation(self.template.warm, copy, self.changed[mutant.name], seconds)
                    self.running[mutant.name] = mutant, copy, simulation
                over = [name for name, (_, _, simulation) in self.running.items() if simulation.ended]
                for name in over:
                    mutant, copy, simulation = self.running.pop(name)
                    row = self._row(mutant, simulation.verdict())
                    self.template.remove(copy)
                    yield row
                if not over:
                    time.sleep(POLL_S)
        finally:
            for _, _, simulation in self.running.values():
                simulation.kill()

    def _row(self, mutant: Mutant, verdict: Verdict) -> Row:
        explained = self.survivors.get(mutant.name, "")
        return Row.of(mutant, verdict, self.seeds, self.changed[mutant.name], explained)


# ---------------------------------------------------------------- the command


def main() -> int:
    options = _parser().parse_args()
    try:
        catalogue = read_catalogue()
        mutants = chosen(catalogue, options)
        if options.list:
            _print_list(mutants, catalogue)
            return 0
        return _search(mutants, catalogue, options)
    except CatalogueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the mutants and run nothing")
    add("--only", action="append", metavar="NAME", help="only this one, written or drawn, or a pattern; repeatable")
    add("--sample", type=_positive, metavar="N", help="N mechanical mutants in place of the written ones")
    add("--seed", type=int, default=0, metavar="S", help="draws the sample; 0")
    default = f"{Budget.seeds},{Budget.seconds:g}s"
    add("--budget", type=Budget.parse, default=Budget(), help=f"seeds, seconds or both for each mutant; {default}")
    add("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="mutants at a time; one for each core")
    add("--json", type=Path, metavar="FILE", help="write the rows here, again after each one")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def chosen(catalogue: Catalogue, options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the options ask for. Raises CatalogueError."""
    if options.sample and not options.only:
        return sample(all_mutants(), options.sample, options.seed)
    if not options.only:
        return list(catalogue.mutants)
    known = {mutant.name: mutant for mutant in (*catalogue.mutants, *all_mutants())}
    found: dict[str, Mutant] = {}
    for name in options.only:
        matching = [known[name]] if name in known else [known[other] for other in known if fnmatchcase(other, name)]
        if not matching:
            raise CatalogueError(f"no mutant {name}; {nearest(name, known)}")
        found |= {mutant.name: mutant for mutant in matching}
    return sample(list(found.values()), options.sample, options.seed) if options.sample else list(found.values())


def _print_list(mutants: Sequence[Mutant], catalogue: Catalogue) -> None:
    for mutant in mutants:
        explained = catalogue.survivors.get(mutant.name)
        print(f"{mutant.name:44} {mutant.rule:16} {mutant.file}:{mutant.line}  {mutant.why}")
        if explained:
            print(f"{'':44} survives: {explained}")
    print(f"{len(mutants)} mutants; drawn ones lie in {', '.join(FOLDERS)}", file=sys.stderr)


def _search(mutants: Sequence[Mutant], catalogue: Catalogue, options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    score = Score(" ".join(["scripts/mutants", *sys.argv[1:]]), options.json, len(mutants))
    try:
        score.write()  # whether there is room for it is known before the work
    except OSError as error:
        raise CatalogueError(f"cannot write {options.json}: {error.strerror}") from error
    budget = options.budget
    each = f"{budget.seeds:,} seeds or {budget.seconds:,g} s for each, a quarter of that time where explained"
    print(f"{len(mutants)} mutants, {options.jobs} at a time: {each}")
    with tempfile.TemporaryDirectory(prefix="diloco-mutants-") as folder, closing(Template(Path(folder))) as template:
        try:
            hunt = Hunt(template, budget, options.jobs, catalogue.survivors)
            _show(f"first {budget.seeds:,} seeds without a mutant: which of them would each change?")
            for row in hunt.look(mutants):
                score.add(row)
                _show(row)
            for row in hunt.rows(mutants):
                score.add(row)
                _show(row, f"{len(score.rows)} of {len(mutants)}; running: {', '.join(hunt.running)}")
        except KeyboardInterrupt:
            score.interrupted = True
            score.write()
    print("\n".join(score.lines()))
    return 130 if score.interrupted else 1 if any(row.open for row in score.rows) else 0


def _show(line: object, status: str = "") -> None:
    """Print a line, and below it on a terminal what goes on, which the next line takes the place of."""
    _status("")
    print(line, flush=True)
    _status(status)


def _status(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:MAX_STATUS_CHARACTERS]}")
        sys.stderr.flush()
