"""Questions for a new reader, who sees the README's tree and nothing else: in which folder is this function?

    scripts/readers --seed 1             20 functions, drawn by that seed: name, signature, docstring
    scripts/readers --seed 1 --answers   their folders

Only functions and methods with a docstring of their own are drawn, each as likely as another.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

from scripts.house.numbers import GENERATED, PACKAGE, ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="which functions are drawn (1)")
    parser.add_argument("--count", type=int, default=20, help="how many (20)")
    parser.add_argument("--answers", action="store_true", help="where they are")
    options = parser.parse_args()
    drawn = random.Random(options.seed).sample(sorted(functions(ROOT / PACKAGE)), options.count)
    for number, (folder, question) in enumerate(drawn, start=1):
        print(f"{number}. {folder if options.answers else question}")
    return 0


def functions(package: Path) -> Iterator[tuple[str, str]]:
    """(folder, question) of each."""
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        if GENERATED not in str(inside):
            folder = inside.parts[0] if len(inside.parts) > 1 else inside.name
            for name, node in named(ast.parse(path.read_text()), ""):
                docstring = ast.get_docstring(node)
                if docstring and not node.name.startswith("__"):
                    yield folder, f"{name}({ast.unparse(node.args)})\n   {' '.join(docstring.split())}\n"


def named(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Functions with the names of their classes before their own; none from within a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from named(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield f"{prefix}{node.name}", node
