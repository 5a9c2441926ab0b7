"""The shape of the code as tests: who may import whom, who owns which dependency, what every file must have.

The tables are the rules; diloco/README.md says why they are so. A new module gets its line in `LAYERS`.
"""

from __future__ import annotations

import ast
import importlib
import json
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "diloco" / "wire" / "v1"

# From the top down: a module imports from its own layer and from those below. A package's line covers its modules,
# except those with a line of their own. Nothing imports a package that stands above it: not the CLI, not the simulator.
LAYERS = {
    "command line": "diloco diloco.__main__ diloco.cli",
    "programs": """
        diloco.inner.workbench diloco.simulate diloco.accounts diloco.observe diloco.run""",
    "peer": """
        diloco.gossip.peer diloco.accounts.journal diloco.peer diloco.storage.line_state diloco.transport.gate""",
    "round": """
        diloco.round diloco.inner.loop diloco.exchange diloco.peer.schedule diloco.compress.encoding
        diloco.outer.stepping diloco.gossip.swapping diloco.transport diloco.gossip.status diloco.outer.eager
        diloco.outer.gradients diloco.outer.landing diloco.outer.line diloco.outer.resync""",
    "edges": """
        diloco.transport.grpc_link diloco.transport.outbox diloco.transport.dht diloco.transport.sockets
        diloco.wire diloco.island diloco.base.clock diloco.observe.telemetry diloco.base.failpoints
        diloco.accounts.ledger diloco.accounts.recording diloco.data diloco.models diloco.base.ranks
        diloco.identity diloco.inner diloco.kernels diloco.storage diloco.base.files""",
    "tensor maths": """
        diloco.compress diloco.base.memory diloco.models.transformer diloco.models.moe diloco.models.export_map
        diloco.inner.muon diloco.gossip.pairing diloco.island.slices diloco.outer""",
    "protocol": """
        diloco.transport.link diloco.transport.address diloco.transport.pace diloco.accounts.chain
        diloco.data.order diloco.gossip diloco.protocol""",
    "values": """
        diloco.outer.weighing diloco.accounts.chain diloco.plan.suggest diloco.plan diloco.run.options
        diloco.base diloco.config""",
}
RANK = {layer: rank for rank, layer in enumerate(LAYERS)}

# Neither of the two pure layers needs the other, so neither imports it.
STRANGERS = {("tensor maths", "protocol")}

EFFECTS = """
    asyncio concurrent datetime grpc hivemind multiprocessing os random secrets select selectors signal socket
    subprocess threading time uuid"""
FORBIDDEN = {"tensor maths": EFFECTS, "protocol": EFFECTS + " numpy torch", "values": EFFECTS + " numpy torch"}

OWNERS = {
    "blake3": "diloco.base.hashing",
    "cryptography": "diloco.identity.keys",
    "datasets": "diloco.data.hf diloco.data.hf_tokenizer",
    "google.protobuf": "diloco.transport.grpc_link diloco.wire",
    "grpc": "diloco.transport.grpc_link diloco.wire",
    "hivemind": "diloco.transport.dht",
    "jinja2": "diloco.observe.report",
    "markupsafe": "diloco.observe.report",
    "matplotlib": "diloco.observe.report",
    "pydantic": """
        diloco.config.contract diloco.config.load diloco.config.section diloco.config.site""",
    "rich": "diloco.cli.main diloco.observe.screen",
    "safetensors": "diloco.storage.checkpoint",
    "tokenizers": "diloco.data.hf diloco.models.hf diloco.data.hf_tokenizer",
    "torch.distributed": "diloco.island",
    "transformers": "diloco.data.hf diloco.models.hf diloco.data.hf_tokenizer",
    "typer": "diloco.cli.main diloco.cli.plan diloco.cli.bench",
    "zstandard": "diloco.compress diloco.kernels.build",
}
DISTRIBUTIONS = {"google": "protobuf", "grpc": "grpcio"}  # where the import's name is not the package's
LONGEST_FUNCTION = 60

FACTORIES = """
    arange asarray as_tensor empty empty_strided eye full linspace logspace normal ones rand randint randn randperm
    scalar_tensor tensor zeros"""
"""Of torch, which take a dtype and a device that are not named from the process. Those of `torch.*_like`, `new_*` and
`from_numpy` have them from another tensor."""
# A model, its training and the simulator own their process. diloco.gossip.swapping: its one factory is to follow.
DEFAULTS_ALLOWED = """
        diloco.models diloco.inner.loop diloco.inner.workbench diloco.simulate diloco.data
        diloco.protocol.leases diloco.config.presets"""

# The public API. A change here is an entry in CHANGELOG.md.
PUBLIC = ["Run", "found", "join"]


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


def within(name: str, area: str) -> bool:
    return name == area or name.startswith(area + ".")


def within_any(name: str, areas: str) -> bool:
    return any(within(name, area) for area in areas.split())


def layer_of(module: str) -> str | None:
    """The layer whose most specific entry covers the module. `diloco` itself covers only its `__init__`."""
    entries = [(entry, layer) for layer, names in LAYERS.items() for entry in names.split()]
    covering = [pair for pair in entries if module == pair[0] or ("." in pair[0] and within(module, pair[0]))]
    return max(covering, key=lambda pair: len(pair[0]))[1] if covering else None


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, also those inside functions, without what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in node.orelse:
                yield from (other, *run_time_nodes(other))
        else:
            yield from (node, *run_time_nodes(node))


def imports(tree: ast.AST) -> list[Import]:
    """What the code reaches for: `from a import b` as `a.b`, and `torch.distributed` used by its full name too."""
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


# ---------------------------------------------------------------- the reader of imports itself


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


def test_the_most_specific_line_decides_the_layer() -> None:
    assert layer_of("diloco.protocol.machine") == "protocol"
    assert layer_of("diloco.exchange.engine") == "round"
    assert layer_of("diloco") == "command line"
    assert layer_of("diloco.unheard_of") is None


# ---------------------------------------------------------------- arrows


def test_every_module_has_a_layer() -> None:
    complain([f"{module.name} has no layer: add it to LAYERS" for module in modules() if layer_of(module.name) is None])


def arrows() -> Iterator[tuple[str, str, str]]:
    """(place in the code, importing module, imported module) for every import inside the package."""
    known = {module.name for module in modules()}
    for module in modules():
        for line, name in imports(module.tree):
            if within(name, "diloco"):
                target = name if name in known else name.rpartition(".")[0]
                yield module.at(line), module.name, target


def test_arrows_point_down() -> None:
    problems = []
    for place, source, target in arrows():
        above, below = layer_of(source), layer_of(target)
        if above and below and (RANK[above] > RANK[below] or (above, below) in STRANGERS):
            problems.append(f"{place}: {source} ({above}) imports {target} ({below})")
    complain(problems)


def test_pure_layers_have_no_effects() -> None:
    problems = []
    for module in modules():
        forbidden = FORBIDDEN.get(layer_of(module.name) or "", "")
        found = [entry for entry in imports(module.tree) if within_any(entry.name, forbidden)]
        problems += [f"{module.at(line)}: a pure module imports {name}" for line, name in found]
    complain(problems)


def test_protocol_loads_nothing_heavy() -> None:
    """Loading a module loads its packages as well, which the imports above do not show."""
    names = [module.name for module in modules() if layer_of(module.name) in {"protocol", "values"}]
    loaded = loaded_after(f"import {', '.join(names)}")
    assert not {"torch", "numpy", "grpc", "hivemind", "asyncio"} & loaded


# ---------------------------------------------------------------- owners


def test_every_dependency_has_one_owner() -> None:
    problems = []
    for module in modules():
        for line, name in imports(module.tree):
            for package, owners in OWNERS.items():
                if within(name, package) and not within_any(module.name, owners):
                    problems.append(f"{module.at(line)}: {package} belongs to {' and '.join(owners.split())}")
    complain(problems)


def test_every_dependency_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["hf"]
    declared = {line.split(">")[0].split("=")[0] for line in lines} | {"diloco"} | set(sys.stdlib_module_names)
    problems = []
    for module in modules():
        for line, name in imports(module.tree):
            package = name.split(".")[0]
            if DISTRIBUTIONS.get(package, package) not in declared:
                problems.append(f"{module.at(line)}: {package} is not in pyproject.toml")
    complain(problems)


# ---------------------------------------------------------------- habits


def test_only_the_command_line_prints() -> None:
    problems = []
    for module in modules():
        if module.name in {"diloco.cli.main", "diloco.cli.plan", "diloco.cli.bench", "diloco.observe.screen"}:
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


def test_no_function_needs_scrolling() -> None:
    problems = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
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
    """Best of three in CPU time: wall time would measure the neighbours on a busy machine."""
    assert min(help_cpu_s() for _ in range(3)) < 0.3


def help_cpu_s() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run([sys.executable, "-m", "diloco", "--help"], cwd=ROOT, check=True, capture_output=True)
    assert b"Usage" in run.stdout
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
