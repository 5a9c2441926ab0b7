"""Settings that all tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import hypothesis
import pytest

# Several peers share a machine's cores in many tests; one thread each keeps them from fighting. Read when torch loads,
# and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run: a failure is a failure for everybody. No deadline: CI machines are noisy.
hypothesis.settings.register_profile("diloco", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("diloco")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Slow tests, which mostly start processes and wait for them, queue in one worker, while another takes all others:
    those marked `slow(queued=False)`, too, and those that name a group of their own."""
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow and slow.kwargs.get("queued", True) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("slow"))
