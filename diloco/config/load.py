"""Reading contract and site: files, presets, the command line; each value's origin; errors that name the likely key."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from diloco.base.errors import ConfigError, IncompatibleError, StateError
from diloco.config.contract import CONTRACT_VERSION, Contract
from diloco.config.presets import PRESETS
from diloco.config.section import Section, shown
from diloco.config.site import Site


@cache
def shipped_contracts() -> dict[str, Path]:
    """Path of each shipped contract by its name, sorted."""
    installed = Path(__file__).with_name("contracts")
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def contract_path(text: str | Path) -> Path:
    """The file that `text` names: the path itself where there is a file, else the shipped contract of that name."""
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
        """(dotted key, effective value, origin) for every key."""
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
    """The contract that another peer sent (`Contract.to_json`), or that is elsewhere, as `where` says.

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
    """The contract of these sections, by name, each a mapping. Raises ConfigError."""
    where = "the contract given"
    tree = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in settings.items()}
    origin = {f"{section}.{key}": where for section, keys in tree.items() for key in _keys(keys)}
    return _validated(Contract, tree, origin, where).value


def _load(schema: type[S], path: str | Path | None, overrides: Sequence[str]) -> Loaded[S]:
    where = str(path) if path is not None else COMMAND_LINE
    tree = _read_toml(Path(path), schema) if path is not None else {}
    origin = {f"{section}.{key}": where for section, keys in tree.items() for key in _keys(keys)}
    for text in overrides:
        section, key, value = _parse_override(text)
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section][key] = value
            origin[f"{section}.{key}"] = "--set"
    return _validated(schema, tree, origin, where)


def _validated(schema: type[S], tree: dict[str, Any], origin: dict[str, str], where: str) -> Loaded[S]:
    if schema is Contract:
        _check_contract_version(tree, where)
    _check_keys(tree, schema, origin, where)
    if schema is Contract:
        _apply_preset(tree, origin, where)
    try:
        return Loaded(schema.model_validate_json(json.dumps(tree, default=str)), origin)  # str: TOML has dates, we none
    except ValidationError as error:
        name, cause = _first_problem(error)
        place = origin.get(name) or _all_places(where, origin)
        raise ConfigError(f"{place}: {cause}", _advice(name, place)) from error


def _all_places(where: str, origin: Mapping[str, str]) -> str:
    """The file or option that set each of several keys, for an error that concerns all of them."""
    return f"{where} with --set" if "--set" in origin.values() and where != COMMAND_LINE else where


def _advice(name: str, place: str) -> str:
    """For `name`, a key, a section, or empty. A contract that is wrong cannot be shown, so one that is not is named."""
    shown = "`diloco config show quick` shows every key"
    return f"correct {name} in {place}; {shown}" if "." in name else shown


def _keys(section: Any) -> Iterator[str]:
    yield from section if isinstance(section, dict) else ()


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


def _parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(
            f"cannot read override {text!r}", "write --set section.key=value, for instance --set inner.lr=0.001"
        )
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return section, key, value


def _check_contract_version(tree: Mapping[str, Any], where: str) -> None:
    """Before anything else is judged: another version may have other keys."""
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
    """Name the first unknown or misplaced key, with a suggestion."""
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            is_section = section in schema.model_fields
            fix = f"write [{section}] on its own line, keys below" if is_section else _suggest("", section, schema)
            raise ConfigError(f"{where}: {section!r} is not a section", fix)
        names = [f"{section}.{key}" for key in keys]
        if section not in schema.model_fields:
            place = origin[names[0]] if names else where
            raise ConfigError(f"{place}: unknown section [{section}]", _suggest_section(section, schema))
        for key, name in zip(keys, names, strict=True):
            if name not in _dotted(schema):
                raise ConfigError(f"{origin[name]}: unknown key {name}", _suggest(section, key, schema))


def _dotted(schema: type[Section]) -> list[str]:
    names = []
    for section, field in schema.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        names += [f"{section}.{key}" for key in kind.model_fields]
    return names


def _other(schema: type[Section]) -> tuple[type[Section], str]:
    """The other schema and where its keys are written."""
    return (Site, "the site file (peers/*.toml)") if schema is Contract else (Contract, "the contract (configs/*.toml)")


def _suggest_section(section: str, schema: type[Section]) -> str:
    other, other_file = _other(schema)
    if section in other.model_fields:
        return f"[{section}] belongs in {other_file}"
    near = difflib.get_close_matches(section, schema.model_fields, n=1)
    return f"did you mean [{near[0]}]?" if near else f"known: {', '.join(schema.model_fields)}"


def _suggest(section: str, key: str, schema: type[Section]) -> str:
    """The likeliest meaning of a key: the same name elsewhere, else a similar one, else what the section has."""
    known, (other, other_file) = _dotted(schema), _other(schema)
    name = f"{section}.{key}" if section else key
    if name in _dotted(other):
        return f"move it to {other_file}"
    if same := [full for full in known if full.split(".")[1] == key]:
        return f"did you mean {_closest(name, same)}?"
    if same := [full for full in _dotted(other) if full.split(".")[1] == key]:
        return f"did you mean {_closest(name, same)} in {other_file}?"
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    keys = [full.removeprefix(f"{section}.") for full in known if full.startswith(f"{section}.")]
    return f"keys of [{section}]: {', '.join(keys)}" if keys else "write keys below a [section]"


def _closest(name: str, names: Sequence[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0)[0]


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The key of the first problem as `section.key`, and the problem in one line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    safe = name if name.isprintable() and len(name) <= 80 else shown(name)
    key = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "missing":
        return key, f"{safe} is missing"
    message = first["msg"].removeprefix("Value error, ")
    got = "" if isinstance(first["input"], dict) else f", got {shown(first['input'])}"
    return key, f"{safe}: {message}{got}" if name else message


NAME = "site.json"


def remember(directory: Path, site: Site) -> None:
    """Write `site.json` into the folder of a peer. Raises OSError."""
    path = directory / NAME
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"data": {"root": str(Path(site.data.root).absolute())}}) + "\n")
    beside.replace(path)


def remembered_root(path: Path) -> str | None:
    """The data root of the peer whose folder, folder of checkpoints, or checkpoint `path` is; None: not known.

    Raises StateError for a damaged file.
    """
    folder = path.absolute()
    places = (folder, folder.parent, folder.parent.parent)
    found = next((place / NAME for place in places if (place / NAME).is_file()), None)
    if found is None:
        return None
    try:
        root = json.loads(found.read_text())["data"]["root"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{found} is damaged", "delete it, and name the data's folder: data.root, --data-root"
        ) from error
    return str(root)
