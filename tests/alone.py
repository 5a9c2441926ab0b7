"""A measurement in a process of its own: threads that earlier tests left in this one allocate, too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def alone(measurement: Callable[[], Any]) -> Any:
    """The result, as JSON has it, of a function of a test module that takes nothing."""
    module, name = measurement.__module__, measurement.__name__
    program = f"import json; from {module} import {name}; print(json.dumps({name}()))"
    return json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT))
