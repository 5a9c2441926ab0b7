"""The deterministic simulator: a seed is the same simulation again, in any process and after any others."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from diloco.simulate.virtual.plans.draw import draw
from diloco.simulate.virtual.search import world_of

pytestmark = pytest.mark.no_cover  # which makes a simulation nearly twice as slow

SEEDS = range(3000, 3006)


def hashed(seed: int) -> str:
    """The hash of all that is said and closed in a seed's simulation, with the states and the number of its events."""
    world = world_of(draw(seed, "async" if seed % 3 == 0 else "sync"), record=True)
    outcome = world.run()
    assert not outcome.violation
    seen = world.invariants
    told = [*world.lines, *seen.commits, *sorted(map(str, seen._state_of.items())), f"{outcome.events} events"]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


@pytest.mark.slow(queued=False)
def test_a_seed_has_the_same_hash_in_every_process_and_order() -> None:
    """Order of sets, addresses of objects, and caches that others filled, are what could differ."""
    command = [sys.executable, "-m", "tests.test_virtual_repeats"]
    orders = (SEEDS, reversed(SEEDS))
    processes = [
        subprocess.Popen(
            [*command, *map(str, order)],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, order in enumerate(orders)
    ]
    first, second = (process.communicate(timeout=300)[0].splitlines() for process in processes)
    assert len(first) == len(SEEDS)
    assert first == second[::-1]


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(text, hashed(int(text)))
