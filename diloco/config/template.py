"""Contract and site as commented files to start from: every key with its default and what it means."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from diloco.config.contract import Contract
from diloco.config.section import Section, sections_of
from diloco.config.site import Site

WIDTH = 118

CONTRACT_HEAD = """\
The contract: what is trained, the same for all peers of the run, which fetch it from the first.

  diloco simulate {contract} --peers 2              two peers on this machine
  diloco peer {contract} --site {site}          found a run; prints the line that others run to join

A line that begins with # is the default. Take the # away to change it."""
SITE_HEAD = """\
The site: what is local to this peer. It is read with --site, and no other peer sees it.

A line that begins with # is the default. Take the # away to change it."""
CONTRACT_VALUES: Mapping[str, Any] = {
    "run.name": "first",
    "run.total_tokens": "500k",
    "data.sequence_length": 64,
    "model.preset": "0.3m",
    "inner.steps": 20,
    "inner.batch_size": 8,
    "inner.lr": 2e-3,
}
"""Settings of a run that takes a minute on a laptop."""
SITE_VALUES: Mapping[str, Any] = {"network.listen": "127.0.0.1:0"}


def contract_template(contract: str, site: str) -> str:
    """A commented contract that can be trained as it is. The arguments are the paths that its head names."""
    return _template(Contract, CONTRACT_HEAD.format(contract=contract, site=site), CONTRACT_VALUES)


def site_template() -> str:
    """A commented site of the defaults."""
    return _template(Site, SITE_HEAD, SITE_VALUES)


def key_docs(section: type[Section]) -> dict[str, str]:
    """The text that follows each key of a contract or site section in the schema, by key; base classes first."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, Section):
            body = ast.parse(inspect.getsource(kind)).body[0]
            assert isinstance(body, ast.ClassDef)
            found |= docs_of(body)
    return found


def docs_of(body: ast.ClassDef) -> dict[str, str]:
    """The text that follows each key in the source of a schema's class, by name."""
    return {
        key.target.id: inspect.cleandoc(text.value.value)
        for key, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _template(schema: type[Section], head: str, values: Mapping[str, Any]) -> str:
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for name, section in sections_of(schema).items():
        lines += ["", f"[{name}]"]
        docs = key_docs(section)
        for key, field in section.model_fields.items():
            text = " ".join(docs.get(key, "").split())
            lines += ["", *(f"# {line}" for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False))]
            value = values.get(f"{name}.{key}")
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            if value is not None:
                lines.append(f"{key} = {_toml(value)}")
            else:
                lines.append(f"# {key} = {_toml(default)}" if default is not None else f"# {key}: not set")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
