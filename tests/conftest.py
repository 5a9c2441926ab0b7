"""Settings that all tests share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from diloco.observe.event_log import read_lines
from diloco.observe.events import from_json, to_json
from diloco.transport.loop_probe import LIMIT_S, VARIABLE, busy_s

# Several peers share a machine's cores in many tests; one thread each keeps them from fighting. Read when torch loads,
# and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where a shell runs the tests in the background they ignore it, and so would all that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BESIDE_A_BUSY_THREAD = 1.6
"""Times as long as usual that some work takes on a CPU whose other hyperthread computes, too."""
DOUBTED = 2
"""Times that a callback may seem long by chance in the tests of a worker. The host of a virtual machine with two CPUs
took 4 to 8 ms without a word once in 30 seconds of CPU, and 10 ms twice from one kind of callback in all tests."""

# The same examples on every run: a failure is a failure for everybody. No deadline: CI machines are noisy.
hypothesis.settings.register_profile("diloco", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("diloco")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Slow tests, which mostly start processes and wait for them, queue in two workers, file by file in turn, while
    another takes all others: those marked `slow(queued=False)`, too, and those that name a group of their own."""
    queues: dict[Path, str] = {}
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow and slow.kwargs.get("queued", True) and not item.get_closest_marker("xdist_group"):
            queue = queues.setdefault(item.path, f"slow-{len(queues) % 2}")
            item.add_marker(pytest.mark.xdist_group(queue))


@pytest.fixture
def warm_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that a drill starts from this process begin where all imports are done."""
    from tests.warm import popen  # it imports torch

    monkeypatch.setattr(subprocess, "Popen", popen)


@pytest.fixture(autouse=True, scope="session")
def _key_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All peers that tests start, in this process and in others, have a key of their own user, and not the real one."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state")


@dataclass
class _Probed:
    """Lines of the event loops of all peers that tests start, as far as they were looked at."""

    lines: dict[Path, int] = field(default_factory=dict)
    """Lines looked at, by file."""
    doubted: dict[str, set[str]] = field(default_factory=dict)
    """Lines of the few times that a callback was over the limit by at most `BESIDE_A_BUSY_THREAD`, by its name."""


@pytest.fixture(autouse=True, scope="session")
def _loop_probe(tmp_path_factory: pytest.TempPathFactory) -> _Probed:
    """Probe the event loops of all peers that tests start, in this process and in others."""
    os.environ[VARIABLE] = str(tmp_path_factory.getbasetemp() / "loops")
    return _Probed()


@pytest.fixture(autouse=True)
def _loops_are_never_busy_for_long(_loop_probe: _Probed) -> Iterator[None]:
    """No callback of a peer's event loop takes more CPU time than the limit, also while it catches up.

    What garbage collection takes there counts in `diloco peer` and `diloco witness`, and not in somebody's own program;
    what the host of a virtual machine took meanwhile counts nowhere, and on a slow CPU the limit is as much longer. How
    slow it was is measured after the callback, when the other hyperthread may have stopped to compute, and a host does
    not tell of each time that it stops a CPU: so each may a few times, in all tests of a worker, take as much longer as
    a busy hyperthread costs.
    """
    yield
    long: list[str] = []
    for path in Path(os.environ[VARIABLE]).glob("*.jsonl"):
        lines = path.read_text().split("\n")[:-1]  # the last may be on its way
        new, _loop_probe.lines[path] = lines[_loop_probe.lines.get(path, 0) :], len(lines)
        long += [line for line in new if _busy_s(json.loads(line)) > LIMIT_S]
    again = [line for line in long if _is_proof(line, _loop_probe.doubted)]
    assert not again, f"an event loop was busy for more than {1e3 * LIMIT_S:g} ms of CPU:\n" + "\n".join(again)


def _is_proof(line: str, doubted: dict[str, set[str]]) -> bool:
    """Whether a callback over the limit shows that it can be: it is far over, or it is so too often for chance."""
    read = json.loads(line)
    lines = doubted.setdefault(read["callback"], set())
    lines.add(line)
    return len(lines) > DOUBTED or _busy_s(read) > BESIDE_A_BUSY_THREAD * LIMIT_S


def _busy_s(line: dict[str, Any]) -> float:
    program, command = [*line["process"].split(), "", ""][:2]
    ours = program.endswith(("diloco", "diloco/__main__.py")) and command in ("peer", "witness")
    return busy_s(line, with_gc=ours)


@pytest.fixture(autouse=True)
def _events_fit_the_schema(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every event file that peers wrote into a test's folder; not where a test writes such files by hand."""
    handmade = request.node.get_closest_marker("handmade_events")
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames and not handmade else None
    yield
    if folder is not None:
        check_events(folder)


@pytest.fixture(autouse=True, scope="session")
def _shared_events_fit_the_schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same of the folders that several tests share."""
    yield
    for folder in tmp_path_factory.getbasetemp().iterdir():
        if folder.is_dir() and not folder.name.startswith("test_"):
            check_events(folder)


def check_events(folder: Path) -> None:
    """Each line of each event file in there is what its kind says: all of its fields, and no others."""
    for path in folder.rglob("events.jsonl"):
        for line in read_lines(path):
            stamped = from_json(line)
            assert stamped is not None, f"{path}: no event of the schema: {line}"
            assert to_json(stamped) == line, f"{path}: {line}"
