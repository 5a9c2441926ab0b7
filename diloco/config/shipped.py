"""The contracts that come with diloco: `configs/` of the repository, which the wheel holds as `config/contracts`."""

from __future__ import annotations

from functools import cache
from pathlib import Path


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
