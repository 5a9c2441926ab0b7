"""The garbage collector stays out of a program's imports and of its end."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, gc
from diloco.base.collector import started, starts

usual = gc.get_threshold()
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # the first to be registered is the last to run
starts()
print(gc.get_threshold()[0] > 10 * usual[0], gc.get_freeze_count())
started()
print(gc.get_threshold() == usual, gc.get_freeze_count())
"""


def test_it_comes_seldom_until_all_is_imported_and_finds_nothing_in_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "True", "0", "True"]
