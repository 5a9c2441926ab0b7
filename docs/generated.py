"""The reference pages, made from the sources: keys, events, commands, exit codes, modules. Nothing of it is committed.

`fill` replaces `<!-- generated: NAME -->` in the text of a page; `python docs/generated.py NAME` prints one part.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "diloco"
PLACE = re.compile(r"<!-- generated: ([a-z-]+) -->")

Row = tuple[str, ...]


def fill(page: str) -> str:
    """The page with every placeholder replaced. Raises KeyError for an unknown name."""
    return PLACE.sub(lambda match: PARTS[match[1]](), page)


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table; line breaks become spaces, bars are escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------- contract and site


def contract() -> str:
    """Every key of a contract."""
    from diloco.config.contract import Contract

    return _sections(Contract)


def site() -> str:
    """Every key of a site."""
    from diloco.config.site import Site

    return _sections(Site)


def _sections(schema: type[Any]) -> str:
    text = []
    for name, field in schema.model_fields.items():
        section = field.annotation
        text += [f"## `[{name}]`", "", *_section_doc(section), *_keys(name, section), ""]
    return "\n".join(text)


def _section_doc(section: type[Any]) -> list[str]:
    """The docstring of the section itself; that of a base class says nothing about it."""
    doc = section.__dict__.get("__doc__")
    return [inspect.cleandoc(doc), ""] if doc else []


def _keys(name: str, section: type[Any]) -> Iterator[str]:
    from diloco.config.template import key_docs

    docs = key_docs(section)
    rows: list[Row] = []
    groups: list[tuple[str, type[Any]]] = []
    for key, field in section.model_fields.items():
        kind, bounds = _kind(field.annotation), _bounds(field.metadata)
        rows.append((f"`{key}`", f"{kind}{bounds}", _default(field), docs.get(key, "")))
        groups += [(key, part) for part in _schemas(field.annotation)]
    yield table(("key", "type", "default", "meaning"), rows)
    for key, part in groups:
        yield from (f"### `[[{name}.{key}]]`", "", *_section_doc(part), *_keys(f"{name}.{key}", part))


def _schemas(annotation: Any) -> list[type[Any]]:
    """Section classes that a key holds a list of."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _schemas(part)]


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"`{_shown(value)}`"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(part) for part in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(annotation: Any) -> str:
    """A type as a reader of TOML calls it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{_shown(part)}`" for part in parts)
    if origin is typing.Annotated:
        limits = [limit for part in parts[1:] for limit in getattr(part, "metadata", [part])]
        return f"{_kind(parts[0])}{_bounds(limits)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts if part is not type(None))
    if origin in (tuple, list):
        return f"list of {_kind(parts[0])}"
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return "table"
    names: dict[Any, str] = {str: "text", bool: "`true` or `false`", int: "whole number", float: "number"}
    return names.get(annotation, str(annotation))


def _bounds(limits: Sequence[Any]) -> str:
    signs = {"gt": "> ", "ge": ">= ", "lt": "< ", "le": "<= ", "pattern": "matches ", "min_length": "length >= ",
             "max_length": "length <= "}  # fmt: skip
    values = [(sign, getattr(limit, name, None)) for limit in limits for name, sign in signs.items()]
    found = [f"`{sign}{_plain(value)}`" for sign, value in values if value is not None]
    return f", {', '.join(found)}" if found else ""


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- events


def events() -> str:
    """Every kind of event, with its fields."""
    from diloco.config.template import docs_of
    from diloco.observe import events as module

    classes = {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}
    text = []
    for kind, event in sorted(module.KINDS.items()):
        docs = docs_of(classes[event.__name__])
        fields = dataclasses.fields(event)  # type: ignore[arg-type]
        rows = [_event_field(field, docs.get(field.name, "")) for field in fields]
        text += [f"## `{kind}`", "", inspect.cleandoc(event.__doc__ or ""), ""]
        text += [table(("field", "type", "", "meaning"), rows)] if rows else []
    return "\n".join(text)


def _event_field(field: dataclasses.Field[Any], doc: str) -> Row:
    """Its name in files, its type as the source has it, and whether it may be missing."""
    free = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return f"`{field.metadata.get('json', field.name)}`", f"`{field.type}`", "may be missing" if free else "", doc


# ---------------------------------------------------------------- command line


def commands() -> str:
    """Every command with its arguments and options."""
    import typer.main

    from diloco.cli.main import app

    return "\n".join(_command("diloco", typer.main.get_command(app)))


def _command(name: str, command: Any) -> Iterator[str]:
    subcommands = getattr(command, "commands", None)
    if subcommands:
        for part, subcommand in subcommands.items():
            yield from _command(f"{name} {part}", subcommand)
        return
    yield f"## `{name}`\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    context = command.make_context(name, [], resilient_parsing=True)
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [(f"`{record[0]}`", record[1]) for record in records if record]
    if rows:
        yield table(("argument or option", "meaning"), rows)
    if command.epilog:
        yield f"{_example(command.epilog)}\n"


def _example(epilog: str) -> str:
    """An epilog has commands behind a colon and between bars; each gets a line of its own."""
    lines = [part.strip() for part in epilog.partition(":")[2].split("   |   ")]
    return "```text\n" + "\n".join(lines) + "\n```"


# ---------------------------------------------------------------- exit codes


BUG_OR_FINDING = "`audit`, `replay`, `virtual`: something is wrong in the run. Else a bug: please report it"


def exit_codes() -> str:
    """Each class of errors with its code."""
    from diloco.base.errors import DilocoError

    rows: list[Row] = [("0", "", "done, or left in good order")]
    errors: list[type[DilocoError]] = [DilocoError, *DilocoError.__subclasses__()]
    for error in sorted(errors, key=lambda kind: kind.exit_code):
        meaning = BUG_OR_FINDING if error is DilocoError else inspect.getdoc(error) or ""
        rows.append((str(error.exit_code), f"`{error.__name__}`", meaning))
    rows.append(("141", "", "nobody reads the output to its end"))
    rows.append(("129, 143", "", "ended at once by a second SIGHUP or SIGTERM; by a second Ctrl-C it is 130"))
    return table(("code", "raised in the library", "meaning"), rows)


# ---------------------------------------------------------------- modules


def modules() -> str:
    """Every folder and file of the package with the first sentence of its docstring, in the order of the tree."""
    text = []
    for folder in _folders():
        title = folder.relative_to(ROOT).as_posix()
        files = sorted(folder.glob("*.py"))
        text += [f"## `{title}/`", ""]
        if about := _first_sentence(folder / "__init__.py"):
            text += [about, ""]
        rows = [(f"`{file.name}`", _first_sentence(file)) for file in files if file.name != "__init__.py"]
        text.append(table(("file", "content"), rows) if rows else "")
    return "\n".join(text)


def _folders() -> Iterator[Path]:
    """The package's folders, in the order in which the README's tree names them."""
    tree = (ROOT / "README.md").read_text()
    yield PACKAGE
    for name in re.findall(r"^  ([a-z]+)/ ", tree, re.MULTILINE):
        folders = [PACKAGE / name, *sorted((PACKAGE / name).rglob("*"))]
        yield from (path for path in folders if (path / "__init__.py").is_file() and path.parts[-2:] != ("wire", "v1"))


def _first_sentence(file: Path) -> str:
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return doc.split("\n\n")[0]


PARTS: dict[str, Callable[[], str]] = {
    "contract": contract,
    "site": site,
    "commands": commands,
    "events": events,
    "exit-codes": exit_codes,
    "modules": modules,
}

if __name__ == "__main__":
    print(PARTS[sys.argv[1]]())
