"""Mechanical mutants of whole folders, and a sample of them drawn by a seed.

    turn     a comparison turned: `<` becomes `>=`, `==` becomes `!=`, `in` becomes `not in`
    edge     off by one: `<` becomes `<=`; 0, 1 or 2 in a function becomes one more
    drop     a statement dropped: a call, an assignment to an attribute or item, `+=`, `continue`, a bare `return`
    guard    a guard dropped: an `if` that only leaves, one side of `and` or `or`, the condition of a comprehension

Only the changed text of the file differs. Docstrings, logging, reasons for people, assertions, `raise`, annotations and
names for a type checker are left alone, and so are indices: a wrong one fails at once.

A name has the place and a digest of the change: it stays when other code is edited, and goes when this code is.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path

from scripts.mutation.catalogue import PACKAGE, Mutant, fault_of, line_of

FOLDERS = ("protocol", "exchange", "accounts")
QUIET = {"debug", "info", "warning", "error", "exception", "Note", "_note", "_warn", "warn"}
"""Functions that only report to people."""
KINDS = {
    "turn": "a comparison turned",
    "edge": "off by one",
    "drop": "a statement dropped",
    "guard": "a guard dropped",
}
TURNED = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
EDGED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
TEXT = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: r"not\s+in", ast.Is: "is", ast.IsNot: r"is\s+not",
}  # fmt: skip
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def all_mutants(folders: Sequence[str] = FOLDERS, package: Path = PACKAGE) -> list[Mutant]:
    """Every mechanical mutant of these folders of the package."""
    paths = [path for folder in folders for path in sorted((package / folder).rglob("*.py"))]
    return [mutant for path in paths for mutant in mutants_of(path, package)]


def sample(mutants: Sequence[Mutant], size: int, seed: int, package: Path = PACKAGE) -> list[Mutant]:
    """The mutants that a seed draws, without those that do not compile. Edited code changes only its own part of it."""
    order = sorted(mutants, key=lambda mutant: sha256(f"{seed} {mutant.name}".encode()).digest())
    sound = (mutant for mutant in order if not fault_of((package.parent / mutant.file).read_text(), mutant))
    drawn = set(islice(sound, size))
    return [mutant for mutant in mutants if mutant in drawn]


def mutants_of(path: Path, package: Path = PACKAGE) -> list[Mutant]:
    """Every mechanical mutant of a file, in the order of its text."""
    text = path.read_text()
    module, file = ".".join(path.relative_to(package).with_suffix("").parts), str(path.relative_to(package.parent))
    times: Counter[str] = Counter()
    found = []
    for kind, scope, start, stop, new in sorted(_Walk(text).found, key=lambda change: change[2]):
        old = text[start:stop]
        # The whole line is in the digest: the changed text alone may be `1`.
        change = f"{scope} {kind} {_line(text, start)} {old} {new}"
        times[change] += 1
        digest = sha256(f"{change} {times[change]}".encode()).hexdigest()[:6]
        name, why = f"{module}.{scope}.{kind}-{digest}", f"{KINDS[kind]}: {_short(old)} -> {_short(new)}"
        found.append(Mutant(name, file, kind, why, line_of(text, start), start, old, new))
    return found


def _line(text: str, start: int) -> str:
    return text[text.rfind("\n", 0, start) + 1 :].partition("\n")[0].strip()


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


class _Walk:
    """Changes that can be made to a module: kind, function, first character, end, new text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[str, str, int, int, str]] = []
        lines = text.splitlines(keepends=True)
        self._lines = [line.encode() for line in lines]
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._visit_all(ast.parse(text).body, "", in_function=False)

    def _at(self, line: int, column: int) -> int:
        """Place in the text of a column, which a syntax tree counts in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _bounds(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _change(self, kind: str, scope: str, node: ast.expr | ast.stmt, new: str) -> None:
        self.found.append((kind, scope, *self._bounds(node), new))

    def _visit_all(self, nodes: Sequence[ast.AST], scope: str, in_function: bool) -> None:
        for node in nodes:
            self._visit(node, scope, in_function)

    def _visit(self, node: ast.AST, scope: str, in_function: bool) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{scope}.{node.name}" if scope else node.name
            self._visit_all(node.body, inner, in_function or not isinstance(node, ast.ClassDef))
        elif in_function and not _is_left_alone(node):
            self._statement(node, scope)
            self._expression(node, scope)
            self._visit_all(list(_parts(node)), scope, in_function)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            self._visit_all(list(_parts(node)), scope, in_function)

    def _statement(self, node: ast.AST, scope: str) -> None:
        match node:
            case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
                pass  # without it the function may be no generator
            case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Return(value=None) | ast.Continue() | ast.Break():
                self._change("drop", scope, node, "pass")
            case ast.Assign(targets=targets) if not scope.endswith("__init__"):
                if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                    self._change("drop", scope, node, "pass")
            case ast.If(test=test, body=[*_, last], orelse=[]) if isinstance(last, LEAVES):
                self._change("guard", scope, test, "False")
            case _:
                pass

    def _expression(self, node: ast.AST, scope: str) -> None:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for before, operator, after in zip([left, *comparators], ops, comparators, strict=False):
                    self._operator(scope, before, operator, after)
            case ast.BoolOp(op=operator, values=values):
                for value in values:
                    self._change("guard", scope, value, "True" if isinstance(operator, ast.And) else "False")
            case ast.comprehension(ifs=ifs):
                for condition in ifs:
                    self._change("guard", scope, condition, "True")
            case ast.Constant(value=value) if type(value) is int and value in (0, 1, 2):
                self._change("edge", scope, node, str(value + 1))
            case _:
                pass

    def _operator(self, scope: str, before: ast.expr, operator: ast.cmpop, after: ast.expr) -> None:
        start = self._bounds(before)[1]
        found = re.search(TEXT[type(operator)], self.text[start : self._bounds(after)[0]])
        assert found is not None
        for kind, news in (("turn", TURNED), ("edge", EDGED)):
            if type(operator) in news:
                self.found.append((kind, scope, start + found.start(), start + found.end(), news[type(operator)]))


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.Global():
            return True
        case ast.Import() | ast.ImportFrom() | ast.Nonlocal():
            return True
        case (
            ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))
            | ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)))
        ):
            return name in QUIET
        case _:
            return False


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without annotations and without the index of a single item."""
    match node:
        case ast.AnnAssign(target=target, value=value):
            yield from filter(None, (target, value))
        case ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp()):
            yield value
        case ast.arguments():
            pass  # of a lambda
        case _:
            yield from ast.iter_child_nodes(node)
