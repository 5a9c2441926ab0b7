"""The wheel, built by way of an sdist: what it holds, and what it says of itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import diloco

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "configs", "diloco")
SDIST = "import setuptools.build_meta as backend; print(backend.build_sdist('dist'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree)
    run([sys.executable, "-c", SDIST], tree)
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--wheel-dir", "wheels", str(sdist)], tree)
    (built,) = (tree / "wheels").glob("*.whl")
    return zipfile.ZipFile(built)


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow(queued=False)
def test_the_wheel_holds_the_package_and_the_contracts_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {path.relative_to(ROOT) for path in (ROOT / "diloco").rglob("*") if path.is_file()}
    wanted = {str(path) for path in ours if path.suffix in (".py", ".pyi", ".html", ".c")}
    contracts = {f"diloco/config/contracts/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert contracts
    missing = {*wanted, *contracts, "diloco/py.typed"} - files
    assert not missing
    assert {name.split("/")[0] for name in files} == {"diloco"}
    assert not {name for name in files if name.endswith("/mutants.toml")}


@pytest.mark.slow(queued=False)
def test_an_installed_package_finds_its_contracts_from_an_empty_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path / "site")!r})
import diloco.config.load as shipped
assert shipped.__file__.startswith({str(tmp_path)!r}), shipped.__file__
assert str(shipped.shipped_contracts()["quick"]).startswith({str(tmp_path)!r})
from diloco.config.load import load_contract
assert load_contract("quick").value.run.name == "quick"
"""
    run([sys.executable, "-c", program], empty)


@pytest.mark.slow(queued=False)
def test_the_version_comes_from_one_place(wheel: zipfile.ZipFile) -> None:
    about = metadata(wheel)
    assert about["Version"] == diloco.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", diloco.__version__)
    assert "version" not in PROJECT["project"]


def test_what_is_promised_of_python_and_torch_agrees_everywhere() -> None:
    project = PROJECT["project"]
    oldest = project["requires-python"].removeprefix(">=")
    named = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text]
    assert named[0] == oldest, "the classifiers begin with the oldest Python"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"OLDEST_PYTHON = ({oldest.replace('.', ', ')})" in (ROOT / "scripts" / "setup").read_text()
    (torch,) = (text.removeprefix("torch>=") for text in project["dependencies"] if text.startswith("torch"))
    assert f'TORCH = "torch=={torch}' in (ROOT / "scripts" / "setup").read_text(), "tested is the oldest one promised"
    for path in (ROOT / "diloco").rglob("*.py"):
        for wanted in re.findall(r"torch (\d+)\.(\d+)", path.read_text()):
            assert tuple(map(int, wanted)) <= tuple(map(int, torch.split("."))), f"{path} asks for a newer torch"


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_the_command_tells_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "diloco", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"diloco {diloco.__version__}\n"
