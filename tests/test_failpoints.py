"""Failpoints: their names, their settings, and deaths of real peers at some of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.base import failpoints
from diloco.base.errors import UsageError
from diloco.exchange.engine import _FAILPOINTS as STEPS
from diloco.simulate.chaos.sweep import ChaosSweep

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def run(settings: str, code: str) -> int:
    """Exit code of a Python that arms failpoints from the environment and runs the code."""
    program = f"from diloco.base import failpoints\nfailpoints.arm_from_environment()\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], env={failpoints.VARIABLE: settings}, cwd=ROOT, check=False
    ).returncode


def test_every_point_is_hit_once_in_the_code_and_nothing_else_is() -> None:
    code = "".join(path.read_text() for path in (ROOT / "diloco").rglob("*.py") if path.name != "failpoints.py")
    named = re.findall(r'failpoints\.hit\("([a-z-]+)"\)', code)
    named += [
        f"{when}-{step}" for when in re.findall(r'failpoints\.hit\(f"(\w+)-{step}"\)', code) for step in STEPS.values()
    ]
    assert sorted(named) == sorted(failpoints.POINTS)


def test_nothing_happens_unless_armed() -> None:
    for point in failpoints.POINTS:
        failpoints.hit(point)


def test_kill_at_the_third_time() -> None:
    hits = "for time in range({}): failpoints.hit('before-fold')"
    assert run("before-fold=kill@3", hits.format(2)) == 0
    assert run("before-fold=kill@3", hits.format(3)) == -signal.SIGKILL
    assert run("before-fold=kill", "failpoints.hit('after-fold')") == 0


def test_sleep_goes_on_from_the_nth_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failpoints.arm("mid-mean=sleep:0.05@2, after-fold=sleep:9")
    slept_s: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", slept_s.append)
    failpoints.hit("mid-mean")
    assert slept_s == []
    failpoints.hit("mid-mean")
    failpoints.hit("mid-mean")
    assert slept_s == [0.05, 0.05]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("before-folds=kill", "did you mean before-fold?"),
        ("nonsense=kill", "known: after-inner-steps"),
        ("before-fold=explode", "write NAME=kill"),
        ("before-fold=kill@0", "write NAME=kill"),
        ("before-fold", "write NAME=kill"),
    ],
)
def test_a_wrong_setting_is_refused(settings: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        failpoints.arm(settings)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_peers")
def test_deaths_and_a_stop_cost_the_survivors_nothing(tmp_path: Path) -> None:
    """Three peers that stay and a fourth that dies; all failpoints: `scripts/chaos --failpoints`."""
    sweep = ChaosSweep(ROOT / "configs" / "chaos.toml", tmp_path / "peers")
    try:
        sweep.begin()
        rows = [sweep.kill_at(point) for point in ("mid-contribution", "mid-mean", "before-commit")]
        rows.append(sweep.stop_at("mid-mean", 5.0))
    finally:
        sweep.end()
    assert all(row.holds for row in rows), "\n".join(map(str, rows))
