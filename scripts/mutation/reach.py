"""The seeds that a mutant changes: all others run as without it, and need no simulation to say that they find nothing.

One run of each seed without any mutant answers for all of them. In the copy of the package that is run so, the code
that a mutant changes is looked at:

    an expression    what the mutant makes of it is evaluated as well: does it differ here?
    a statement      does it run? So, too, an expression that may change something, in the mutant or without it.

A simulated seed is the same in every process and order, so a seed in which no answer is yes has the same log with the
mutant: `tests/test_mutants.py` compares the numbers of events of some.
"""

from __future__ import annotations

import ast
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.mutation.catalogue import CatalogueError, Mutant
from scripts.mutation.trial import Template

PROBE = Path(__file__).with_name("probe.py")
POLL_S = 0.1
PURE_FUNCTIONS = {
    "abs", "all", "any", "bool", "deque", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len", "list",
    "max", "min", "monotonic_s", "range", "round", "set", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
PURE_METHODS = {
    "get", "items", "keys", "values", "index", "count", "startswith", "endswith", "union", "issuperset",
    "holds", "still_s",
}  # fmt: skip
"""Methods that change nothing: the last two are queries of roles."""
FRESH = (ast.ListComp, ast.SetComp, ast.DictComp, ast.List, ast.Set, ast.Dict)
FRESH_CALLS = {"deque", "dict", "list", "set", "sorted"}
"""Expressions whose value nobody else holds: equal ones are as good as the same."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
UNREPEATABLE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def changed_seeds(
    template: Template,
    mutants: Sequence[Mutant],
    seeds: range,
    seconds: float,
    jobs: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[range, dict[str, list[int]]]:
    """The seeds that there was time to look at, from the first on, and by mutant those of them that it changes.

    `progress` hears of seeds done. Raises CatalogueError when a seed fails without any mutant.
    """
    copy = template.copy()
    always = [name for name, seen in _instrument(copy, mutants) if not seen]
    results = [copy / f"seeds.{number}.jsonl" for number in range(jobs)]
    pieces = [(seeds[number::jobs], result) for number, result in enumerate(results)]
    start = partial(template.warm.start, copy)
    errors = copy.parent / "errors.txt"
    words = [(str(PROBE), str(result), ",".join(map(str, piece))) for piece, result in pieces if piece]
    began_s = time.monotonic()
    running = [start(each, copy.parent / "output.txt", errors) for each in words]
    try:
        while not all(program.ended for program in running) and time.monotonic() < began_s + seconds:
            time.sleep(POLL_S)
            progress(sum(len(_rows(result)) for result in results))
        by_itself = all(program.ended for program in running)
    finally:
        for program in running:
            program.send(signal.SIGKILL)
    found = {row["seed"]: row for result in results for row in map(json.loads, _rows(result))}
    if by_itself and len(found) < len(seeds):
        last_words = (errors.read_text(errors="replace").strip().splitlines() or ["no word of it"])[-1]
        raise CatalogueError(f"without any mutant: {len(found)} of {len(seeds)} seeds ended: {last_words}")
    done = next((seed for seed in seeds if seed not in found), seeds.stop)
    for seed in range(seeds.start, done):
        if found[seed]["violation"]:
            raise CatalogueError(
                f"without any mutant: seed {seed}: {found[seed]['violation']}\n"
                "mend that first: `diloco virtual --seed N` shows a seed"
            )
    if done == seeds.start:
        raise CatalogueError("without any mutant: no seed ended in time")
    looked_at = range(seeds.start, done)
    changed = {mutant.name: [seed for seed in looked_at if mutant.name in found[seed]["changed"]] for mutant in mutants}
    template.remove(copy)
    return looked_at, {**changed, **{name: list(looked_at) for name in always}}


def _rows(result: Path) -> list[str]:
    """Whole lines of a file, which may not be there yet."""
    lines = result.read_text().splitlines(keepends=True) if result.exists() else []
    return [line for line in lines if line.endswith("\n")]


# ---------------------------------------------------------------- places in the code


@dataclass
class Looks:
    """What is looked at in the syntax tree of one file, by `id` of its nodes."""

    expressions: dict[int, list[tuple[str, ast.expr]]] = field(default_factory=dict)
    """Names of mutants, with what each makes of an expression."""
    before: dict[int, list[str]] = field(default_factory=dict)
    """Names of mutants whose change comes before this statement, or is this statement."""
    after: dict[int, list[str]] = field(default_factory=dict)


def _instrument(copy: Path, mutants: Sequence[Mutant]) -> Iterator[tuple[str, bool]]:
    """Look at the code of mutants in this copy. Names, and whether that is possible: code of a module itself always
    runs."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    for name, group in by_file.items():
        path = copy / name
        text = path.read_text()
        tree, looks = ast.parse(text), Looks()
        for mutant in group:
            yield mutant.name, look_at(tree, ast.parse(mutant.applied_to(text)), mutant.name, looks)
        looked_at = ast.fix_missing_locations(_Looking(looks).visit(tree))
        path.unlink()  # it is a link
        path.write_text(ast.unparse(looked_at) + "\n")


def look_at(one: ast.AST, other: ast.AST, name: str, looks: Looks) -> bool:
    """Note in `looks` where the second of two trees differs from the first. False: outside of all functions, or in one
    whose results outlast a seed."""
    statement: tuple[ast.stmt, dict[int, list[str]]] | None = None
    expression: tuple[ast.expr, ast.expr] | None = None
    in_function = False
    while type(one) is type(other):
        differing = list(_differing(one, other))
        if len(differing) != 1:
            break
        mine, theirs = differing[0]
        if isinstance(one, FUNCTIONS) and (mine is not one.body or _is_cached(one)):
            return False
        in_function = in_function or isinstance(one, FUNCTIONS)
        if isinstance(mine, list):
            place = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if not _same(*pair)), None)
            if place is None:
                place = min(len(mine), len(theirs))
            if in_function and mine and isinstance(mine[0], ast.stmt):
                last = place == len(mine)
                statement, expression = (mine[place - last], looks.after if last else looks.before), None
            if len(mine) != len(theirs) or not all(map(_same, mine[place + 1 :], theirs[place + 1 :])):
                break
            mine, theirs = mine[place], theirs[place]
        if not isinstance(mine, ast.AST) or not isinstance(theirs, ast.AST) or isinstance(mine, ast.pattern):
            break
        if isinstance(one, ast.Call) and mine is one.func:
            break
        if isinstance(mine, ast.expr) and isinstance(theirs, ast.expr) and _is_value(mine):
            expression = mine, theirs
        one, other = mine, theirs
    if expression is not None and in_function and all(map(_is_pure, expression)):
        looks.expressions.setdefault(id(expression[0]), []).append((name, expression[1]))
    elif statement is not None:
        statement[1].setdefault(id(statement[0]), []).append(name)
    else:
        return False
    return True


def _differing(one: ast.AST, other: ast.AST) -> Iterator[tuple[Any, Any]]:
    for name in one._fields:
        mine, theirs = getattr(one, name, None), getattr(other, name, None)
        if not _same(mine, theirs):
            yield mine, theirs


def _is_cached(function: ast.AST) -> bool:
    return any("cache" in ast.unparse(decorator) for decorator in getattr(function, "decorator_list", []))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return ast.dump(one) == ast.dump(other)
    return type(one) is type(other) and one == other


def _is_value(node: ast.expr) -> bool:
    """Whether a function may stand in the place of an expression."""
    return not isinstance(node, ast.Starred | ast.Slice | ast.FormattedValue) and isinstance(
        getattr(node, "ctx", ast.Load()), ast.Load
    )


def _is_pure(node: ast.expr) -> bool:
    """Whether an expression can be evaluated once more and changes nothing by that."""
    return not any(
        isinstance(part, UNREPEATABLE)
        or (
            isinstance(part, ast.Call)
            and not (isinstance(part.func, ast.Name) and part.func.id in PURE_FUNCTIONS)
            and not (isinstance(part.func, ast.Attribute) and part.func.attr in PURE_METHODS)
        )
        for part in ast.walk(node)
    )


class _Looking(ast.NodeTransformer):
    """Puts calls of `probe.py`, which are builtins there, where something is looked at."""

    def __init__(self, looks: Looks) -> None:
        self.looks = looks

    def visit(self, node: ast.AST) -> Any:
        found = super().visit(node)
        if isinstance(node, ast.expr):
            for name, mutated in self.looks.expressions.get(id(node), []):
                fresh = _is_fresh(node) and _is_fresh(mutated)
                nothing = ast.arguments([], [], None, [], [], None, [])
                tried = _call("_mutant_tried", ast.Lambda(nothing, mutated))
                found = _call("_mutant_differs", ast.Constant(name), tried, found, ast.Constant(fresh))
        elif isinstance(node, ast.stmt):
            marks = [
                [ast.Expr(_call("_mutant_runs", ast.Constant(name))) for name in looks.get(id(node), [])]
                for looks in (self.looks.before, self.looks.after)
            ]
            return [*marks[0], found, *marks[1]]
        return found


def _is_fresh(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(node, FRESH) or (isinstance(called, ast.Name) and called.id in FRESH_CALLS)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
