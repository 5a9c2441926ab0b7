"""Numbers of the house: sizes, folders, arrows and functions, so that growth is a choice.

    scripts/numbers              of this checkout
    scripts/numbers DIRECTORY    of another one

A line of code is one that is not blank, not only a comment, and not within a docstring (also those below a constant or
a field). Generated code is left out. An arrow leads from a folder to one that it imports, also inside a function, but
not for type checkers alone; a floor is a line of the first contract of import-linter in pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "diloco"
GENERATED = "wire/v1"
SIMULATION = ("simulate", "sim")  # the second: as it was called before


@dataclass(frozen=True)
class Source:
    """One module, parsed."""

    path: Path
    """Below the package."""
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return str(self.path.parent)

    def of_simulation(self) -> bool:
        return self.path.parts[0] in SIMULATION


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT, help="a checkout (this one)")
    directory = parser.parse_args().directory
    if not (directory / PACKAGE).is_dir():
        sys.exit(f"error: no folder {PACKAGE} in {directory.absolute()}")
    print("\n".join(report(directory)))
    return 0


def report(directory: Path) -> Iterator[str]:
    """The lines to print."""
    sources = read(directory / PACKAGE)
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.folder] += len(code_lines(source))
    for folder, lines in sorted(sizes.items()):
        yield f"{lines:7,}  {PACKAGE}/{'' if folder == '.' else folder}"
    without = sum(len(code_lines(source)) for source in sources if not source.of_simulation())
    yield f"{sum(sizes.values()):7,}  lines of code in all"
    yield f"{without:7,}  without simulation"
    comments = sum(map(count_comments, sources))
    lines = sum(source.text.count("\n") for source in sources)
    yield f"{1000 * comments / lines:7.1f}  comments per 1,000 of {lines:,} lines in all"
    lengths = sorted(function_lengths(sources))
    longest, p95 = lengths[-1], lengths[int(len(lengths) * 0.95)]
    yield f"{len(lengths):7,}  functions: {median(lengths):g} lines in the median, p95 {p95}, longest {longest}"
    arrows = folder_arrows(sources)
    circles = circles_of(arrows)
    floors = count_floors(directory / "pyproject.toml")
    yield f"{len(sizes):7}  folders on {floors or '?'} floors, {sum(map(len, arrows.values()))} arrows between them"
    yield f"{len(circles):7}  circles" + "".join(f"; {' '.join(sorted(circle))}" for circle in circles)


def read(package: Path) -> list[Source]:
    """Every module that is written by hand."""
    found = []
    for path in sorted(package.rglob("*.py")):
        below = path.relative_to(package)
        if GENERATED not in below.as_posix():
            text = path.read_text()
            found.append(Source(below, text, ast.parse(text)))
    return found


def code_lines(source: Source) -> set[int]:
    """Numbers of the lines that hold code."""
    held = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in skipped:
            held |= set(range(token.start[0], token.end[0] + 1))
    blank = {number for number, line in enumerate(source.text.splitlines(), 1) if not line.strip()}
    return held - docstring_lines(source.tree) - blank


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_comments(source: Source) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def function_lengths(sources: list[Source]) -> Iterator[int]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def folder_arrows(sources: list[Source]) -> Mapping[str, set[str]]:
    """The folders that each folder imports from. The root's modules count as a folder each."""
    places = {dotted(source.path): place(source.path) for source in sources}
    arrows: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        here = place(source.path)
        arrows[here] |= {there for name in imported(source.tree) if (there := nearest(name, places)) != here and there}
    return arrows


def dotted(path: Path) -> str:
    parts = [PACKAGE, *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(path: Path) -> str:
    return path.parent.as_posix() if path.parent.parts else path.stem


def nearest(name: str, places: Mapping[str, str]) -> str | None:
    """The folder of a module, or of the module that a name is imported from."""
    return places.get(name) or places.get(name.rpartition(".")[0])


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules and names that the code imports, without what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


def circles_of(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of folders each of which reaches all others of its group."""
    reached = {folder: reach(folder, arrows) for folder in arrows}
    groups = {frozenset(other for other in reached[folder] if folder in reached.get(other, ())) for folder in arrows}
    return [set(group) for group in groups if group]


def reach(folder: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """All folders that imports lead to, itself only if they lead back."""
    found: set[str] = set()
    ahead = [*arrows[folder]]
    while ahead:
        if (here := ahead.pop()) not in found:
            found.add(here)
            ahead += arrows.get(here, ())
    return found


def count_floors(pyproject: Path) -> int:
    """Lines of the contract of floors; a group of neighbours is one."""
    tool = tomllib.loads(pyproject.read_text())["tool"]
    contracts = tool.get("importlinter", {}).get("contracts", [])
    layers = [contract["layers"] for contract in contracts if contract.get("containers") == [PACKAGE]]
    return len(layers[0]) if layers else 0
