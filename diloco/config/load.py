"""Reading contract and site: files, presets, the command line; each value's origin; errors that name the likely key.

Also the contracts that come with diloco.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from diloco.base.errors import ConfigError, IncompatibleError
from diloco.config.codec import CodecGroup
from diloco.config.contract import CONTRACT_VERSION, Contract
from diloco.config.presets import PRESETS
from diloco.config.section import Section, sections_of, shown
from diloco.config.site import Site


@cache
def shipped_contracts() -> dict[str, Path]:
    """Path of each shipped contract by its name, sorted: `configs/` of the repository, which the wheel holds as
    `config/contracts`."""
    installed = Path(__file__).with_name("contracts")
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def contract_path(text: str | Path) -> Path:
    """The contract file that `text` names: that path where there is a file, else the shipped contract of that name."""
    path = Path(text)
    return path if path.is_file() else shipped_contracts().get(str(text), path)


S = TypeVar("S", Contract, Site)


COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A validated schema and, for each dotted key, where its value came from."""

    value: S
    origin: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, effective value, origin) for every key of the contract or site."""
        for section, keys in self.value.model_dump().items():
            for key, value in keys.items():
                yield f"{section}.{key}", value, self.origin.get(f"{section}.{key}", "default")


def load_contract(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded[Contract]:
    """Read a contract by its path or shipped name, or make one of defaults alone.

    `overrides` are `section.key=value` texts that beat the file. Raises ConfigError (what, where, how to mend) and
    IncompatibleError (another contract version).
    """
    return _load(Contract, contract_path(path) if path is not None else None, overrides)


def load_site(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded[Site]:
    """Read a site file, or take the defaults. Raises ConfigError."""
    return _load(Site, path, overrides)


def split_overrides(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--set` texts of the site and of the contract, by section (both have a `data` section: only `root` is local)."""
    sections = set(Site.model_fields) - {"data"}
    local = [text for text in texts if text.split(".")[0] in sections or text.startswith("data.root")]
    return local, [text for text in texts if text not in local]


def contract_from_json(text: str | bytes, where: str = "the contract received") -> Contract:
    """Load the contract that another peer sent (`Contract.to_json`), or that is elsewhere, as `where` says.

    Raises ConfigError or IncompatibleError.
    """
    fix = "ask who runs the peer at that address; it should send what its own `diloco config show` prints"
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {shown(str(error))}", fix) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} is not a table", fix)
    _check_contract_version(tree, where)
    try:
        return Contract.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where} is not valid: {_first_problem(error)[1]}", fix) from error


def contract_of(settings: Mapping[str, Any]) -> Contract:
    """Load a contract from mappings of keys, by name of their section. Raises ConfigError."""
    tree = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in settings.items()}
    return _validated(Contract, tree, "the contract given").value


def _load(schema: type[S], path: str | Path | None, overrides: Sequence[str]) -> Loaded[S]:
    where = str(path) if path is not None else COMMAND_LINE
    tree = _read_toml(Path(path), schema) if path is not None else {}
    overridden = set()
    for text in overrides:
        name, equals, written = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            fix = "write --set section.key=value, for instance --set inner.lr=0.001"
            raise ConfigError(f"cannot read override {text!r}", fix)
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except (ValueError, RecursionError):  # a text without quotes
            value = written
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section][key] = value
            overridden.add(f"{section}.{key}")
    return _validated(schema, tree, where, overridden)


def _validated(schema: type[S], tree: dict[str, Any], where: str, overridden: Collection[str] = ()) -> Loaded[S]:
    """The contract or site of these sections, which `where` has and the command line overrides in part."""
    sections = {section: keys for section, keys in tree.items() if isinstance(keys, dict)}
    origin = {f"{section}.{key}": where for section, keys in sections.items() for key in keys}
    origin |= dict.fromkeys(overridden, COMMAND_LINE)
    if schema is Contract:
        _check_contract_version(tree, where)
    _check_keys(tree, schema, origin, where)
    if schema is Contract:
        _check_groups(tree, origin)
        _apply_preset(tree, origin, where)
    try:
        text = json.dumps(tree, default=str)  # str: TOML has dates, we none
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: a number has too many digits, or lists are too deep", "shorten it") from error
    try:
        return Loaded(schema.model_validate_json(text), origin)
    except ValidationError as error:
        name, cause = _first_problem(error)
        # A problem of several keys has no place of its own: the file and the command line may both have a part in it.
        all_places = f"{where} with {COMMAND_LINE}" if overridden and where != COMMAND_LINE else where
        place = origin.get(name, all_places)
        fix = "`diloco config show quick` shows every key"  # this contract is wrong and cannot be shown
        raise ConfigError(f"{place}: {cause}", f"correct {name} in {place}; {fix}" if "." in name else fix) from error


def _read_toml(path: Path, schema: type[Contract] | type[Site]) -> dict[str, Any]:
    what = "contract" if schema is Contract else "site file"
    fix = f"give the path of a {what} (TOML)"
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{what} not found: {path.absolute()}", _near(path, schema) or fix) from error
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}", fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", fix) from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists too deep
        fix = 'mend that line: [section], then key = 1 or key = "text" or key = true'
        raise ConfigError(f"{path} is not valid TOML: {error}", fix) from error


def _near(path: Path, schema: type[Contract] | type[Site]) -> str:
    """The file or shipped contract whose name is nearest to that of a missing file; empty: there is none."""
    contracts = schema is Contract
    files = (*Path("configs" if contracts else "peers").glob("*.toml"), *path.parent.glob("*.toml"))
    shipped = shipped_contracts() if contracts else {}
    known = {**{file.stem: str(file) for file in files}, **{name: name for name in shipped}}
    close = difflib.get_close_matches(path.stem, known, n=1)
    hint = f"did you mean {known[close[0]]}?" if close else ""
    listed = f"shipped contracts: {', '.join(shipped)}" if shipped else ""
    return " ".join(filter(None, (hint, listed)))


def _check_contract_version(tree: Mapping[str, Any], where: str) -> None:
    """Refuse a contract of another version before its keys are judged: it may have others. Raises IncompatibleError."""
    run = tree.get("run")
    version = run.get("contract_version", CONTRACT_VERSION) if isinstance(run, dict) else CONTRACT_VERSION
    if version != CONTRACT_VERSION:
        raise IncompatibleError(
            f"{where}: contract version {shown(version)}, this diloco reads version {CONTRACT_VERSION}",
            "use the diloco release that wrote it, or check its keys against CHANGELOG.md",
        )


def _apply_preset(tree: dict[str, Any], origin: dict[str, str], where: str) -> None:
    model = tree.get("model", {})
    name = model.get("preset")
    if not isinstance(name, str):  # absent, or for the schema to refuse
        return
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        place = origin.get("model.preset", where)
        raise ConfigError(f"{place}: model.preset {name!r} does not exist", f"{hint}known: {', '.join(PRESETS)}")
    for key, value in PRESETS[name].items():
        if key not in model:
            model[key] = value
            origin[f"model.{key}"] = f"preset {name}"


def _check_keys(
    tree: Mapping[str, Any], schema: type[Contract] | type[Site], origin: Mapping[str, str], where: str
) -> None:
    """Refuse the first unknown or misplaced key of a contract or site, with a suggestion. Raises ConfigError."""
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            is_section = section in schema.model_fields
            fix = f"write [{section}] on its own line, keys below" if is_section else _suggest("", section, schema)
            raise ConfigError(f"{where}: {section!r} is not a section", fix)
        names = [f"{section}.{key}" for key in keys]
        if section not in schema.model_fields:
            place = origin[names[0]] if names else where
            other, other_file = _other(schema)
            if section in other.model_fields:
                fix = f"[{section}] belongs in {other_file}"
            elif near := difflib.get_close_matches(section, schema.model_fields, n=1):
                fix = f"did you mean [{near[0]}]?"
            else:
                fix = f"known: {', '.join(schema.model_fields)}"
            raise ConfigError(f"{place}: unknown section [{section}]", fix)
        for key, name in zip(keys, names, strict=True):
            if name not in _dotted(schema):
                raise ConfigError(f"{origin[name]}: unknown key {name}", _suggest(section, key, schema))


def _check_groups(tree: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    """Refuse the first unknown key of a contract's `[[codec.groups]]`, with a suggestion. Raises ConfigError."""
    groups, known = tree.get("codec", {}).get("groups"), CodecGroup.model_fields
    for number, group in enumerate(groups if isinstance(groups, list | tuple) else (), 1):
        for key in group if isinstance(group, dict) else ():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"keys of [[codec.groups]]: {', '.join(known)}"
                raise ConfigError(f"{origin['codec.groups']}: unknown key {key} in group {number} of codec.groups", fix)


def _dotted(schema: type[Section]) -> list[str]:
    """All keys of a contract or site, as `section.key`."""
    return [f"{name}.{key}" for name, section in sections_of(schema).items() for key in section.model_fields]


def _other(schema: type[Section]) -> tuple[type[Section], str]:
    """The other schema of contract and site, and the file in which its keys are written."""
    return (Site, "the site file (peers/*.toml)") if schema is Contract else (Contract, "the contract (configs/*.toml)")


def _suggest(section: str, key: str, schema: type[Section]) -> str:
    """Advice on an unknown key of a contract or site: the same name elsewhere, else a similar one, else the section's
    keys."""
    known, (other, other_file) = _dotted(schema), _other(schema)
    name = f"{section}.{key}" if section else key
    if name in _dotted(other):
        return f"move it to {other_file}"
    for names, file in ((known, ""), (_dotted(other), f" in {other_file}")):
        if same := [full for full in names if full.split(".")[1] == key]:
            return f"did you mean {difflib.get_close_matches(name, same, n=1, cutoff=0)[0]}{file}?"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    keys = [full.removeprefix(f"{section}.") for full in known if full.startswith(f"{section}.")]
    return f"keys of [{section}]: {', '.join(keys)}" if keys else "write keys below a [section]"


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The first key that a contract or site has wrong, as `section.key`, and the problem in one line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    safe = name if name.isprintable() and len(name) <= 80 else shown(name)
    key = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "missing":
        return key, f"{safe} is missing"
    message = first["msg"].removeprefix("Value error, ")
    got = "" if isinstance(first["input"], dict) else f", got {shown(first['input'])}"
    return key, f"{safe}: {message}{got}" if name else message
