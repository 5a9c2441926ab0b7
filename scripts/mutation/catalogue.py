"""Mutants that were written down: in `mutants.toml` of the folder whose code they change, beside what they break.

    [[mutant]]
    name = "one-vote-decides"          unique among all
    file = "view.py"                   in this folder
    rule = "majority"                  a key of `RULES`
    why = "One vote decides a version, in place of a majority of the view."
    old = "members // 2 + 1"           occurs exactly once in the file
    new = "1"

    [survivors]
    "protocol.view.decide.edge-1f00ba" = "Equal times come from one event: the order of names decides, as before."

`[survivors]` explains mutants that no seed finds, by name: those of this folder that were written, or drawn
(`scripts/mutation/drawn.py`).
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from scripts.environment import ROOT

PACKAGE = ROOT / "diloco"
LIST = "mutants.toml"
KEYS = ("name", "file", "rule", "why", "old", "new")

AGREEMENT: Mapping[str, str] = {
    "one-coordinator": "An attempt has one coordinator, one life of one peer; nobody else begins or proposes.",
    "promise": "A member that entered an attempt accepts nothing of an earlier one.",
    "latest-accepted": "A later attempt proposes again what was accepted in the latest attempt before it.",
    "majority": "A version takes the votes of a majority of the view, each cast and counted once.",
    "view-in-commit": "The voters are those of the commit before, and nobody else.",
    "holds-mean": "Who accepts holds the whole mean, or is a witness.",
    "last-votes": "The coordinator votes last, and a witness is asked last.",
    "lives": "A restarted process never votes or speaks for its earlier life.",
    "proven-death": "Only proof of death takes a vote away; suspicion does not.",
    "durable": "What binds a voter is on its disk before it says what follows from it.",
    "learners": "A new life votes only when a version commit names it, and those that have voted stay the majority.",
    "view-commits": "Members change while a version is being made, and nothing of it is lost.",
    "leavers": "A leaver votes and serves until most voters of a commit without it stand on one.",
    "evict": "An operator's word takes the vote of one life away, and of no other.",
    "lineages": "Under `wait` a run never splits; under `continue` both sides agree which lineage goes on.",
    "founding": "A lineage is founded once, by one peer, on the state that those in its view hold.",
}
"""Rules of agreement, as docs/how/protocol.md has them."""
PROMISES: Mapping[str, str] = {
    "counts-once": "Progress counts once: by one version, or as discarded.",
    "leases": "No block of data is given to two peers.",
    "mean": "The mean is that of the contributions that it counts, and the same bytes for everybody.",
    "residual": "What a codec or a part left out stays the peer's progress.",
    "repair": "A reduction goes on without those who died or stalled.",
    "hostile": "What no honest peer sends is refused, and who sends it again and again is put out.",
    "replay": "No message is taken twice.",
    "liveness": "When the faults are over, versions close and all are in the view.",
    "resend": "What is not answered is sent again.",
    "lanes": "All ranks of an island make the same versions, each of its own parts.",
    "catching-up": "Who missed versions applies all of them, in order, or copies the state.",
    "joining": "Who may join is taken into the view, and nobody else.",
    "ending": "Who leaves, and the run itself, ends with all that was agreed on.",
    "state-copy": "A copied state is the members' state, bit for bit.",
    "ledger": "Every token that was trained is booked once, and the ledger survives a crash.",
    "checkpoint": "A checkpoint is whole or is not there, and its peer goes on from it.",
    "bounded": "Waits and memory have a bound.",
}
"""Promises of the run beside them."""
RULES: Mapping[str, str] = {**AGREEMENT, **PROMISES}


class CatalogueError(Exception):
    """A list of mutants does not fit the code, or a name is unknown."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file of the package, which makes it wrong."""

    name: str
    file: str
    """Path of the changed file, from the folder that has the package on."""
    rule: str
    """Key of `RULES`, or of the kinds of drawn mutants."""
    why: str
    line: int
    """Line of the file in which the change begins."""
    start: int
    """Where `old` is, in characters of the file."""
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The file's text with the bug in it. Raises CatalogueError when the file was edited meanwhile."""
        stop = self.start + len(self.old)
        if text[self.start : stop] != self.old:
            raise CatalogueError(f"{self.file} was edited since its mutants were read: start again")
        return text[: self.start] + self.new + text[stop:]


@dataclass(frozen=True)
class Catalogue:
    """Mutants that were written down, and explanations of those that survive."""

    mutants: tuple[Mutant, ...]
    survivors: Mapping[str, str]
    """By name of a mutant, written or drawn: the reason why no seed finds it."""


def read_catalogue(package: Path = PACKAGE) -> Catalogue:
    """All mutants that were written down. Raises CatalogueError, with everything that is wrong with them."""
    mutants: list[Mutant] = []
    survivors: dict[str, str] = {}
    faults: list[str] = []
    for path in sorted(package.rglob(LIST)):
        place = path.relative_to(package.parent)
        try:
            tree = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            faults.append(f"{place}: {error}")
            continue
        faults += [f"{place}: unknown key {key}" for key in tree.keys() - {"mutant", "survivors"}]
        for entry in tree.get("mutant", []):
            try:
                mutants.append(_mutant(path.parent, package, entry))
            except CatalogueError as error:
                faults.append(f"{place}: {entry.get('name', 'a mutant without a name')}: {error}")
        survivors |= tree.get("survivors", {})
    faults += [f"two mutants are named {name}" for name in doubled(mutant.name for mutant in mutants)]
    if faults:
        raise CatalogueError("\n".join(faults))
    return Catalogue(tuple(mutants), survivors)


def doubled(names: Iterable[str]) -> list[str]:
    """Names that occur more than once."""
    return [name for name, times in Counter(names).items() if times > 1]


def _mutant(folder: Path, package: Path, entry: Mapping[str, Any]) -> Mutant:
    """The mutant that an entry of a folder's list describes. Raises CatalogueError."""
    if entry.keys() != set(KEYS) or not all(isinstance(value, str) and value for value in entry.values()):
        raise CatalogueError(f"has {', '.join(entry)}; wanted are texts for {', '.join(KEYS)}")
    file, old = folder / entry["file"], entry["old"]
    if file.parent != folder or not file.is_file():
        raise CatalogueError(f"{entry['file']} is no file of this folder")
    if entry["rule"] not in RULES:
        raise CatalogueError(f"unknown rule {entry['rule']}; {nearest(entry['rule'], RULES)}")
    text = file.read_text()
    times = text.count(old)
    if times != 1:
        raise CatalogueError(f"`old` occurs {times} times in {entry['file']}, not once: fit the mutant to the code")
    start = text.index(old)
    name = str(file.relative_to(package.parent))
    mutant = Mutant(entry["name"], name, entry["rule"], entry["why"], line_of(text, start), start, old, entry["new"])
    if fault := fault_of(text, mutant):
        raise CatalogueError(fault)
    return mutant


def line_of(text: str, start: int) -> int:
    """Number of the line in which a character is, from 1."""
    return text.count("\n", 0, start) + 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice about a name that does not exist: those that look like it."""
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"nearest: {', '.join(close)}" if close else "`scripts/mutants --list` has all names"


def fault_of(text: str, mutant: Mutant) -> str:
    """The reason why a change of this file is no mutant; empty if it is one."""
    mutated = mutant.applied_to(text)
    try:
        code = _compiled(mutated)
    except SyntaxError as error:
        return f"the mutated file does not compile: {error.msg} in line {error.lineno}"
    return "`new` runs as `old` does" if _alike(code, _compiled(text)) else ""


@lru_cache
def _compiled(text: str) -> CodeType:
    return compile(text, "", "exec", dont_inherit=True)


def _alike(one: object, other: object) -> bool:
    """Whether two pieces of compiled code run alike, wherever their lines are."""
    if not (isinstance(one, CodeType) and isinstance(other, CodeType)):
        return type(one) is type(other) and one == other
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_flags", "co_name")
    same = all(getattr(one, part) == getattr(other, part) for part in parts)
    return same and len(one.co_consts) == len(other.co_consts) and all(map(_alike, one.co_consts, other.co_consts))


def unknown_survivors(catalogue: Catalogue, drawn: Sequence[Mutant]) -> Iterator[str]:
    """Names that are explained and that no mutant has, written or drawn: their code was edited."""
    known = {mutant.name for mutant in (*catalogue.mutants, *drawn)}
    return (name for name in catalogue.survivors if name not in known)
