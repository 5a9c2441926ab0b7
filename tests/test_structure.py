"""The shape of the code as tests: what the contracts of import-linter in pyproject.toml cannot say.

The contracts are the map of the house: which folder imports which, and who owns which package of others.
"""

from __future__ import annotations

import ast
import importlib
import json
import resource
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

from diloco.transport.loop_probe import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "diloco" / "wire" / "v1"

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAX_FOLDER_FILES = 20
ROOT_MODULES = {"diloco", "diloco.__main__", "diloco.round"}

# Files that one round crosses, without base/, config/ and observe/: on the training thread and in all; with a folder,
# so with ledger, events and checkpoints, too. They may only fall: 10 and 30, 13 and 33 are the aim. Measured: 28 and
# 48, 33 and 54; on a busy machine a round also catches up or repairs. Votes and means that survive a restart brought
# draft, log, streams, vote and votes.
FILES_OF_A_ROUND = {"": (31, 59), "folder": (38, 65)}
OF_REFUSALS = "transport/link.py"
"""All that can run of it in a round is the error of a refusal, as of a message that comes late on a busy machine."""

FACTORIES = """
    arange asarray as_tensor empty empty_strided eye full linspace logspace normal ones rand randint randn randperm
    scalar_tensor tensor zeros"""
"""Functions of torch that take a dtype and a device that are not named from the process. `torch.*_like`, `new_*` and
`from_numpy` take them from another tensor."""
# A model, its training and the simulator own their process. diloco.gossip.swapping: its one factory is to follow.
DEFAULTS_ALLOWED = """
        diloco.models diloco.inner.loop diloco.inner.rank_model diloco.simulate diloco.data
        diloco.protocol.leases diloco.config.presets"""

# The simulator may name these of the code that it proves. All else of theirs is called by production alone.
NAMED_BY_SIMULATOR = {
    "diloco.round": "",
    "diloco.exchange": "Exchange ExchangeService LanePayloads",
    "diloco.outer.line": "Diverged Line PendingContribution",
    "diloco.outer.merge": "Mix",
    "diloco.outer.optimizers": "",
    "diloco.outer.pseudograd": "",
}

# The public API. A change here is an entry in CHANGELOG.md.
PUBLIC = ["Contract", "Run", "found", "join"]


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


class Import(NamedTuple):
    line: int
    name: str


@cache
def modules() -> tuple[Module, ...]:
    """Every hand-written module of the package."""
    paths = sorted(path for path in (ROOT / "diloco").rglob("*.py") if path.parent != GENERATED)
    return tuple(Module(dotted(path), path, ast.parse(path.read_text())) for path in paths)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within_any(name: str, areas: str) -> bool:
    return any(name == area or name.startswith(area + ".") for area in areas.split())


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, also those inside functions, without what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in node.orelse:
                yield from (other, *run_time_nodes(other))
        else:
            yield from (node, *run_time_nodes(node))


def imports(tree: ast.AST) -> list[Import]:
    """`from a import b` as `a.b`, and `torch.distributed` used by its full name too."""
    found = []
    for node in run_time_nodes(tree):
        match node:
            case ast.Import(names=names):
                found += [Import(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=module, names=names, level=0):
                found += [Import(node.lineno, f"{module}.{alias.name}") for alias in names]
            case ast.ImportFrom():
                raise AssertionError(f"line {node.lineno}: write the full name instead of a relative import")
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                found.append(Import(node.lineno, "torch.distributed"))
    return found


def complain(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_imports_are_found_wherever_they_hide() -> None:
    code = """
from typing import TYPE_CHECKING
import torch
if TYPE_CHECKING:
    import grpc
else:
    import socket
def f():
    from diloco.transport import dht
    return torch.distributed.get_rank()
"""
    names = {found.name for found in imports(ast.parse(code))}
    assert names == {"typing.TYPE_CHECKING", "torch", "socket", "diloco.transport.dht", "torch.distributed"}


# ---------------------------------------------------------------- the house


@cache
def graph() -> grimp.ImportGraph:
    """The imports between files, also inside functions, without what only a type checker imports."""
    return grimp.build_graph("diloco", include_external_packages=True, exclude_type_checking_imports=True)


def test_the_contracts_of_the_house_are_kept() -> None:
    # A process of its own: in ours it would silence every logger that exists, and tests of warnings after it.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    linted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not linted.returncode, linted.stdout + linted.stderr


def test_every_package_of_others_has_an_owner() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    owned = {name for contract in contracts for name in contract.get("protected_modules", [])}
    foreign = {name for name in graph().modules if name.split(".")[0] not in sys.stdlib_module_names}
    complain([f"{name} has no owner in pyproject.toml" for name in foreign - owned if not within_any(name, "diloco")])


def arrows() -> dict[str, set[str]]:
    """The files that each file imports. An import from another package runs that package's `__init__` as well."""
    found = {}
    for module in graph().modules:
        if within_any(module, "diloco"):
            targets = {name for name in graph().find_modules_directly_imported_by(module) if within_any(name, "diloco")}
            for name in [*targets]:
                parts = name.split(".")
                packages = {".".join(parts[:size]) for size in range(2, len(parts))}
                targets |= {package for package in packages if not within_any(module, package)}
            found[module] = targets
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_files() -> None:
    """import-linter compares what lies beside each other: not a file with the `__init__` of its own folder."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle(arrows()) == []


def test_no_circle_of_folders() -> None:
    """Folders are taken without those inside them: `simulate/local` is not `simulate`."""
    known = {module.name: module for module in modules()}
    folders: dict[str, set[str]] = defaultdict(set)
    for module, targets in arrows().items():
        if module in known and module not in ROOT_MODULES:
            here = str(known[module].path.parent)
            folders[here] |= {str(known[name].path.parent) for name in targets if name in known} - {here}
    assert circle(folders) == []


def test_torch_distributed_belongs_to_the_island() -> None:
    complain(
        [
            f"{module.at(line)}: torch.distributed belongs to diloco.island"
            for module in modules()
            if not within_any(module.name, "diloco.island")
            for line, name in imports(module.tree)
            if within_any(name, "torch.distributed")
        ]
    )


def test_pure_folders_open_no_file() -> None:
    """The other effects are imports, which the contracts forbid."""
    problems = []
    for module in modules():
        if within_any(module.name, "diloco.protocol diloco.outer"):
            calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
            problems += [
                f"{module.at(call.lineno)}: opens a file" for call in calls if ast.unparse(call.func) == "open"
            ]
    complain(problems)


def test_protocol_loads_nothing_heavy() -> None:
    """Loading a module loads its packages as well, which the imports do not show."""
    names = [module.name for module in modules() if within_any(module.name, "diloco.protocol diloco.config")]
    loaded = loaded_after(f"import {', '.join(names)}")
    assert not {"torch", "numpy", "grpc", "hivemind", "asyncio"} & loaded


def test_rooms_are_small() -> None:
    files = Counter(str(module.path.parent.relative_to(ROOT)) for module in modules())
    lines = {str(module.path.relative_to(ROOT)): len(module.path.read_text().splitlines()) for module in modules()}
    full = {folder for folder, count in files.items() if count > MAX_FOLDER_FILES}
    long = {path for path, count in lines.items() if count > MAX_FILE_LINES}
    complain([f"{folder} has over {MAX_FOLDER_FILES} files" for folder in sorted(full)])
    complain([f"{path} has over {MAX_FILE_LINES} lines" for path in sorted(long)])
    assert {module.name for module in modules() if module.path.parent == ROOT / "diloco"} <= ROOT_MODULES


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node.lineno))
    shared = sorted(name for name, found in places.items() if len(found) > 1)
    complain([f"{name} means two things: {', '.join(places[name])}" for name in shared])


# ---------------------------------------------------------------- habits


def test_only_the_command_line_prints() -> None:
    problems = []
    for module in modules():
        if module.name.startswith("diloco.cli.") or module.name == "diloco.observe.screen":
            continue
        for node in ast.walk(module.tree):
            prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            streams = isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}
            if prints or streams:
                problems.append(f"{module.at(node.lineno)}: return it or log it")
    complain(problems)


def unnamed(tree: ast.AST) -> list[int]:
    """Lines of calls that make a tensor of the process's default dtype or device."""
    factories = {f"torch.{name}" for name in FACTORIES.split()}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in factories)
    return [call.lineno for call in calls if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}]


def test_tensors_that_name_no_dtype_or_device_are_found() -> None:
    code = """
torch.empty(3)
torch.zeros(3, dtype=torch.float32)
torch.tensor([1.0], device="cpu")
torch.full((3,), 1.0, dtype=torch.float32, device="cpu")
torch.empty_like(x), x.new_empty(3), torch.from_numpy(y), numpy.zeros(3)
"""
    assert unnamed(ast.parse(code)) == [2, 3, 4]


def test_tensors_name_their_dtype_and_device() -> None:
    """The library runs in a user's script, which may have set other defaults."""
    problems = []
    for module in modules():
        if not within_any(module.name, DEFAULTS_ALLOWED):
            problems += [f"{module.at(line)}: name dtype and device" for line in unnamed(module.tree)]
        names = {name for _, name in imports(module.tree)}
        problems += [f"{module.at(1)}: write torch.{name}" for name in FACTORIES.split() if f"torch.{name}" in names]
    complain(problems)


def test_every_module_says_what_it_is() -> None:
    complain([f"{module.at(1)}: no docstring" for module in modules() if not ast.get_docstring(module.tree)])


def test_nothing_is_left_for_later() -> None:
    problems = []
    for module in modules():
        for number, line in enumerate(module.path.read_text().splitlines(), start=1):
            if any(word in line for word in ("TODO", "FIXME", "XXX", "raise NotImplementedError")):
                problems.append(f"{module.at(number)}: {line.strip()}")
    complain(problems)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FILES_OF_A_ROUND)
def test_a_round_crosses_few_files(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)  # the probe of the event loop would be one more
    command = [sys.executable, str(ROOT / "scripts" / "trace-round"), "--json"]
    given = [str(tmp_path / folder)] if folder else []
    found = json.loads(subprocess.run([*command, *given], check=True, capture_output=True).stdout)
    for where, limit in zip(("training", "all"), FILES_OF_A_ROUND[folder], strict=True):
        files = [file for file in found[where] if file != OF_REFUSALS]
        assert len(files) <= limit, " ".join(files)


def test_only_fronts_block() -> None:
    """The life of a peer yields what it waits for (`diloco.base.life`), so that another clock can drive it."""
    driven = ("diloco.run", "diloco.peer", "diloco.gossip", "diloco.round")
    problems = []
    for module in modules():
        if not within_any(module.name, " ".join(driven)) or module.name == "diloco.run.blocking":
            continue
        awaited = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Await)}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or id(node) in awaited:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            public = ast.unparse(node.func) in ("self.wait", "run.wait")  # `Run.wait`, which pushes the life on
            if name in ("result", "wait", "sleep") and not public:
                problems.append(f"{module.at(node.lineno)}: {ast.unparse(node.func)} blocks: yield a Wait")
    complain(problems)


OF_THE_MACHINE = (
    "diloco.base.clock diloco.observe.screen diloco.transport.dht diloco.transport.dht_node diloco.transport.loop_probe"
)
"""Modules that read the machine's clock: the directory, the screen and the probe are not in virtual time."""


def test_time_is_read_from_one_clock() -> None:
    """`diloco.base.clock`, which a simulation replaces: else that would decide by another time than it shows."""
    clocks = {
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "time",
        "time_ns",
        "now",
        "utcnow",
        "today",
    }
    problems = []
    for module in modules():
        if within_any(module.name, OF_THE_MACHINE):
            continue
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(ast.Name("time" | "datetime" | "date"), name) if name in clocks:
                    problems.append(f"{module.at(node.lineno)}: {ast.unparse(node)} is not the clock")
                case ast.ImportFrom("time"):
                    problems.append(f"{module.at(node.lineno)}: a name of time on its own")
    complain(problems)


def test_what_is_proved_is_what_runs() -> None:
    """No simulation calls the line's functions itself. Planted bugs replace some of them."""
    problems = []
    for module in modules():
        if not within_any(module.name, "diloco.simulate") or module.name == "diloco.simulate.virtual.planted":
            continue
        for found in imports(module.tree):
            for area, named in NAMED_BY_SIMULATOR.items():
                if within_any(found.name, area) and found.name.rpartition(".")[2] not in named.split():
                    problems.append(f"{module.at(found.line)}: {found.name} is called by production alone")
    complain(problems)


def test_no_function_needs_scrolling() -> None:
    problems = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    problems.append(f"{module.at(node.lineno)}: {node.name} has {lines} lines")
    complain(problems)


# ---------------------------------------------------------------- what users see


def loaded_after(code: str) -> set[str]:
    """Names of all modules that a fresh Python has loaded after running the code."""
    code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_public_api() -> None:
    diloco = importlib.import_module("diloco")
    assert sorted(diloco.__all__) == PUBLIC
    assert all(getattr(diloco, name).__doc__ for name in PUBLIC)


def test_importing_the_package_is_cheap() -> None:
    """The public names are loaded when they are used, so that `diloco.config.contract` can be read without torch."""
    assert "torch" not in loaded_after("import diloco")


ALL_HELP = """
import typer
from diloco.cli.main import app
from typer.testing import CliRunner

def ask(command, path):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, (path, result.output, result.exception)
    for name, below in getattr(command, "commands", {}).items():
        ask(below, [*path, name])

ask(typer.main.get_command(app), [])
"""


def test_no_help_loads_torch() -> None:
    heavy = {"torch", "numpy", "grpc", "hivemind", "matplotlib", "transformers"}
    assert not heavy & loaded_after(ALL_HELP)


def test_help_is_quick() -> None:
    """Beside the library that prints it, in CPU time: machines differ, and are busy."""
    help_s, typer_s = [], []
    for _ in range(3):
        help_s.append(cpu_s("-m", "diloco", "--help", says=b"Usage"))
        typer_s.append(cpu_s("-c", "import typer.rich_utils"))
    assert min(help_s) < 2 * min(typer_s)


def cpu_s(*arguments: str, says: bytes = b"") -> float:
    """CPU seconds of a Python that does and prints this."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    assert says in run.stdout
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
