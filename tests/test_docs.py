"""README and docs say what is true: commands parse and run, links and folders exist, the pages build."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MAX_README_WORDS = 1200
TREE_FOLDER = re.compile(r"^  ([a-z]+)/ ", re.MULTILINE)
TOP_FOLDER = re.compile(r"(?:^|  )([a-z]+)/  ", re.MULTILINE)


def load(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


check = load("check")
generated = load("generated")


def tree() -> str:
    (found,) = (block.text for block in check.blocks(README) if block.language == "text" and "round.py" in block.text)
    return str(found)


def test_commands_parse_and_links_and_files_exist() -> None:
    assert [fault for page in check.pages() for fault in check.faults(page)] == []


def test_a_wrong_command_link_or_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\ndiloco peer --jion A\ndiloco bar\nscripts/none\nfrobnicate\n```\n\n[a](none.md) `docs/none.md`\n"
        "```python\nx = = 1\n```\n"
    )
    assert len(list(check.faults(page))) == 7


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MAX_README_WORDS


def test_the_tree_names_every_folder_and_no_other() -> None:
    packages = {path.parent.name for path in (ROOT / "diloco").glob("*/__init__.py")}
    assert set(TREE_FOLDER.findall(tree())) == packages
    for line in tree().splitlines():
        if not line.startswith(" "):
            for name in TOP_FOLDER.findall(line):
                assert (ROOT / name).is_dir(), name


def test_the_tree_is_in_the_order_of_the_layers() -> None:
    """The first folder that a folder imports from must not stand above it."""
    order = ["round.py", *TREE_FOLDER.findall(tree())]
    above = {name: place for place, name in enumerate(order)}
    wrong = {
        f"{name} imports {imported}"
        for name in order[1:]
        for file in (ROOT / "diloco" / name).rglob("*.py")
        for imported in imports(file.read_text())
        if imported in above and above[imported] < above[name]
    }
    assert wrong == set()


def imports(source: str) -> set[str]:
    """Folders of the package that a file imports when it runs; what only a type checker imports is indented."""
    return set(re.findall(r"^from diloco\.([a-z]+)[. ]", source, re.MULTILINE))


def test_pages_for_keys_commands_and_codes_say_what_the_sources_say() -> None:
    bounds = f"`> 0`, `<= {2**60}`"
    assert f"| `total_tokens` | whole number, {bounds} | required | The run ends at" in generated.contract()
    assert "## `[network]`" in generated.site()
    assert "## `diloco bench scaling`" in generated.commands()
    assert "| 10 | `ConfigError` |" in generated.exit_codes()
    assert "## `listening`" in generated.events()
    assert "| `ticket` | `str` |  | The string that others join with. |" in generated.events()
    assert "`round.py`" in generated.modules()


def test_every_placeholder_has_its_part() -> None:
    used = {name for page in check.pages() for name in generated.PLACE.findall(page.read_text())}
    assert used == set(generated.PARTS)


@pytest.mark.slow(queued=False)
def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    pytest.importorskip("myst_parser", reason="needs the extra `docs`")
    pytest.importorskip("furo", reason="needs the extra `docs`")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow(queued=True)
@pytest.mark.timeout(900)
def test_printed_commands_run() -> None:
    ran = [check.run_page(page, quick=True) for page in check.pages()]
    assert sum(ran) > 10
