"""One word, one meaning: names in the sources and words in the pages, held against the glossary of docs/concepts.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNED = """born echo foresee foreseen knock largest_ least_ longest_ most_ story tell tells told unsent weather
    workbench"""
"""Words of our own making that say nothing to a stranger; a bound is a MAX_ or a MIN_."""
NOT_THE_TERM = "compressor experiment master"
"""Other words of the field for what the glossary has a term for: codec, run, anchor, pseudo-gradient."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "diloco").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if "wire/v1" not in name:
            yield name, ast.parse(path.read_text())


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives: to classes, functions, arguments, variables and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    """Parts of a name, and its beginning where it is a bound's."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    first = {parts[0].lower() + "_"} if parts and name.isupper() else set()
    return {part.lower() for part in parts} | first


def terms() -> list[str]:
    table = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[2]
    found = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[2:]
    return [term for entry in found for term in re.split(r", | / ", entry)]


def test_names_are_words_of_the_field() -> None:
    banned = set(f"{BANNED} {NOT_THE_TERM}".split())
    problems = {f"{at}: {name}" for at, tree in sources() for name in defined(tree) if words(name) & banned}
    assert not problems, "\n".join(sorted(problems))


def test_words_of_a_name_are_found() -> None:
    assert words("_follows_an_Echo") == {"follows", "an", "echo"}
    assert words("DHTNode") == {"dht", "node"}
    assert words("MOST_PARTS") & {"most_"}
    assert not words("most_parts") & {"most_"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_say_it_plainly(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL).lower()
    banned = "knock|foresee|workbench|born again|is told|are told|global step|outer epoch|pseudo gradient|compressor"
    assert not re.findall(rf"\b(?:{banned})\w*", prose)


def test_a_term_has_one_owner() -> None:
    """Of the classes that are called as a term of the glossary is, one is it."""
    owners = defaultdict(set)
    for at, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                owners[node.name].add(at)
    names = {"".join(word.capitalize() for word in re.findall(r"\w+", term)) for term in terms()}
    assert {"Contract", "Commit", "Fragment", "Contribution", "Skip"} <= names & owners.keys()
    doubled = {name: sorted(owners[name]) for name in names & owners.keys() if len(owners[name]) > 1}
    assert not doubled


def test_every_term_of_a_page_in_bold_is_in_the_glossary() -> None:
    idea = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[0]
    bold = {word.lower().rstrip("s") for word in re.findall(r"\*\*([\w -]+)\*\*", idea)}
    known = {term.lower().rstrip("s") for term in terms()} | {"outer optimizer"}
    assert bold
    assert bold <= known


def test_a_docstring_says_what_a_thing_is() -> None:
    """So do the strings below constants and fields."""
    found = []
    for at, tree in sources():
        for node in ast.walk(tree):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and re.match(r"(What|Who|Whose|How|Of) ", text):
                found.append(f"{at}:{node.lineno}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
