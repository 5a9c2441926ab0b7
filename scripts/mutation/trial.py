"""One mutant at a time in a copy of the package, and the simulator's command line, which looks for it.

The command line is the only interface to the simulator: `diloco virtual --seeds A:B --until-found --jobs 1 --json`.
SIGINT ends it early: it prints the seeds that it had time for.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.mutation.catalogue import PACKAGE, Mutant
from scripts.mutation.warm import WarmServer

VIRTUAL = ("-m", "diloco", "virtual", "--jobs", "1", "--json", "--seeds")
FIRST_SEED = 0
CRASH = "crash"
"""Begins the violation of a seed in which the code raised something."""
HUNG_S = 20.0
"""A seed that lasts longer hangs: the slowest of a thousand takes some seconds."""
GRACE_S = 30.0
"""Seconds for letting go and printing after SIGINT, on a machine that is short of all; then the process is killed."""
REMIND_S = 10.0
"""Seconds between two SIGINTs."""
MAX_TAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Verdict:
    """End of one search for one mutant."""

    outcome: str
    """A key of `OUTCOMES`."""
    seeds: int
    """Seeds that were simulated with the mutant, with the one that found it."""
    seconds: float
    by: str
    """Seed and violation that found it, or what happened in its place."""
    seed: int | None = None
    """The seed that found it."""


OUTCOMES = {
    "found": "an invariant broke in a seed, or the code crashed in one after the first",
    "survived": "no seed of the budget found it",
    "unreached": "no seed of the budget is changed by it",
    "hung": "a seed did not end",
    "broken": "the first seed crashed, or nothing began: no bug that a reader would write",
}


class Template:
    """A copy of the package, compiled, from which the copies with a bug are made. Later edits do not reach it."""

    def __init__(self, folder: Path, package: Path = PACKAGE) -> None:
        self.folder = folder
        self.unchanged = folder / "unchanged"
        shutil.copytree(package, self.unchanged / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        self.warm = WarmServer()
        compiling = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(self.unchanged)]
        subprocess.run(compiling, check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """End all that was started with the copies."""
        self.warm.close()

    def copy(self) -> Path:
        """A new copy of the package, whose files are links."""
        copy = Path(tempfile.mkdtemp(dir=self.folder)) / "copy"
        shutil.copytree(self.unchanged, copy, copy_function=os.link)
        return copy

    def copy_with(self, mutant: Mutant) -> Path:
        """A new copy of the package with the mutant in it."""
        copy = self.copy()
        file = copy / mutant.file
        mutated = mutant.applied_to(file.read_text())
        # Python compares only seconds and size with what it has compiled: neither need differ.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        file.unlink()
        file.write_text(mutated)
        return copy

    def remove(self, copy: Path) -> None:
        """Remove a copy, once its search is over."""
        shutil.rmtree(copy.parent)


class Simulation:
    """A process that simulates seeds with the package of a folder, and is given `seconds` for them."""

    def __init__(self, warm: WarmServer, copy: Path, seeds: Sequence[int], seconds: float) -> None:
        self.seeds = seeds
        self._seconds = seconds
        self._began_s = time.monotonic()
        self._stopped_s: float | None = None
        self._reminded_s = 0.0
        self._killed = False
        self._output, self._errors = copy.parent / "output.json", copy.parent / "errors.txt"
        words = [*VIRTUAL, ",".join(map(str, seeds)), "--until-found"]
        self._program = warm.start(copy, words, self._output, self._errors)

    @property
    def ended(self) -> bool:
        """Whether the process has ended. Reminds it of its time: first by SIGINT."""
        if self._program.ended:
            return True
        now_s = time.monotonic()
        if now_s - self._began_s <= self._seconds:
            return False
        self._stopped_s = self._stopped_s or now_s
        if now_s - self._stopped_s > GRACE_S:
            self._program.send(signal.SIGKILL)
            self._killed = True
        elif now_s - self._reminded_s > REMIND_S:  # Python drops one that comes within a callback of its own
            self._program.send(signal.SIGINT)
            self._reminded_s = now_s
        return False

    def kill(self) -> None:
        """End the process, unless it has ended; by SIGINT first, so that it removes its own temporary files."""
        self._program.send(signal.SIGINT)
        if not self._program.wait(GRACE_S):
            self._program.send(signal.SIGKILL)

    def verdict(self) -> Verdict:
        """The end of the search, once the process has ended."""
        seconds = round(time.monotonic() - self._began_s, 1)
        report = self._report()
        if report is None and self._stopped_s is not None:
            slow = f"did not stop within {GRACE_S:.0f} s of SIGINT"
            return Verdict("hung", 0, seconds, slow if self._killed else "had not begun when its time was up")
        if report is None:
            return Verdict("broken", 0, seconds, self._last_words())
        tried = int(report["seeds"])
        if report["violated"]:
            seed, violation = int(report["violated"][0]["seed"]), str(report["violated"][0]["violation"])
            at_once = violation.startswith(CRASH) and seed == FIRST_SEED
            by = f"seed {seed}: {violation}"
            return Verdict("broken" if at_once else "found", tried, seconds, by, seed)
        if report["interrupted"] and report["waited_s"] > HUNG_S:
            return Verdict("hung", tried, seconds, f"seed {self.seeds[tried]} did not end in {HUNG_S:.0f} s")
        return Verdict("survived", tried, seconds, "out of time" if report["interrupted"] else "")

    def _report(self) -> dict[str, Any] | None:
        """The JSON that the simulator printed; None if it printed none."""
        try:
            tree = json.loads(self._output.read_text())
        except (OSError, ValueError):
            return None
        return tree if isinstance(tree, dict) else None

    def _last_words(self) -> str:
        errors = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        return (errors.strip().splitlines() or ["it printed nothing"])[-1][:MAX_TAIL_CHARACTERS]
