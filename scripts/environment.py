"""The project's own Python, and how an entry starts a program in it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"


def run(program: str) -> None:
    """Run `main` of a module below scripts/, in a Python that has what it needs, and exit with its status."""
    enter_environment()
    from diloco.base.collector import started, starts

    starts()
    module = importlib.import_module(f"scripts.{program}")
    started()
    sys.exit(module.main())


def enter_environment() -> None:
    """Go on in the project's own Python, which `scripts/setup` makes, unless this one has what is needed."""
    if find_spec("torch") is None:
        subprocess.run([ROOT / "scripts" / "setup", "--quiet"], check=True)
        os.execv(PYTHON, [str(PYTHON), *sys.argv])


def our_code() -> dict[str, str]:
    """Environment variable with which another process imports `diloco` and `scripts` from this checkout."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
