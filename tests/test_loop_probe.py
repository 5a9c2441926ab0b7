"""The probe of the event loop, with which every test of real peers is watched."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from diloco.base.errors import UsageError
from diloco.transport import loop_probe
from diloco.transport.endpoint import Runtime

BUSY_S = 0.03


def callback_of_30_ms(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stolen_ticks: int = 0,
    interrupts: int = 1000,
    cpus: tuple[int, int] = (1, 1),
    nohz_full: str = "(null)\n",
) -> dict[str, float]:
    """The probe's line on one, while the host takes so many ticks of 10 ms from the second of two CPUs, and so many
    timer interrupts reach that one. The thread begins and ends on these CPUs."""
    folder.mkdir(exist_ok=True)
    stat, interrupted, quiet = (folder / name for name in ("stat", "interrupts", "nohz_full"))
    here = [cpus[0]]
    quiet.write_text(nohz_full)
    timer = "      CPU0 CPU1\n  0:  3 4  IO-APIC  timer\nLOC:  {1} {0}  Local timer interrupts\nSPU:  0 0  Spurious\n"
    text = "cpu  1 0 1 1 1 0 1 {0} 0 0\ncpu0 1 0 1 1 1 0 1 7 0 0\ncpu1 1 0 1 1 1 0 1 {0} 0 0\nintr 5\n"
    stat.write_text(text.format(3))
    interrupted.write_text(timer.format(50, 99))

    def callback() -> None:
        began_s = time.thread_time()
        while time.thread_time() < began_s + BUSY_S:
            pass
        stat.write_text(text.format(3 + stolen_ticks))
        interrupted.write_text(timer.format(50 + interrupts, 99 + 1000))
        here[0] = cpus[1]

    async def main() -> None:
        loop_probe.probe(loop_probe.folder_from_environment())
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0.01)

    monkeypatch.setenv(loop_probe.VARIABLE, str(folder / "loops"))
    monkeypatch.setattr(loop_probe, "_STAT", stat)
    monkeypatch.setattr(loop_probe, "_INTERRUPTS", interrupted)
    monkeypatch.setattr(loop_probe, "_get_cpu", lambda: here[0])
    monkeypatch.setattr(loop_probe, "_NOHZ_FULL", quiet)
    monkeypatch.setattr(loop_probe, "_TICK_S", 0.004)
    thread = threading.Thread(target=asyncio.run, args=(main(),))  # one that it may measure from now on
    thread.start()
    thread.join()
    [path] = (folder / "loops").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return next(line for line in lines if "callback_of_30_ms" in line["callback"])


def test_a_callback_is_charged_with_its_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = callback_of_30_ms(tmp_path, monkeypatch)
    assert line["cpu_s"] >= BUSY_S
    assert line["stolen_s"] == 0.0


def test_a_callback_is_not_charged_with_what_the_host_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = callback_of_30_ms(tmp_path, monkeypatch, stolen_ticks=1)
    assert honest["stolen_s"] == pytest.approx(0.01)
    assert honest["cpu_s"] >= BUSY_S - 0.01


@pytest.mark.parametrize(("cpus", "stolen_s"), [((1, 1), 0.01), ((0, 1), 0.01), ((1, 0), 0.01), ((0, 0), 0.0)])
def test_what_the_host_took_from_another_cpu_forgives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, int], stolen_s: float
) -> None:
    line = callback_of_30_ms(tmp_path, monkeypatch, stolen_ticks=1, cpus=cpus)
    assert line["stolen_s"] == pytest.approx(stolen_s)
    assert line["cpu_s"] >= BUSY_S - stolen_s


def test_a_cpu_without_timer_interrupts_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `nohz_full` one that runs a single thread gets about one in a second."""
    assert callback_of_30_ms(tmp_path, monkeypatch, interrupts=0, nohz_full="1-3\n")["cpu_s"] >= BUSY_S


def test_it_is_never_charged_with_less_than_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callback_of_30_ms(tmp_path, monkeypatch, stolen_ticks=100)["cpu_s"] == 0.0


def test_a_callback_is_not_charged_with_a_stop_of_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = callback_of_30_ms(tmp_path, monkeypatch, interrupts=2)
    assert stopped["cpu_s"] == pytest.approx(0.012)  # the ticks counted, and one that may have begun
    assert stopped["charged_s"] >= BUSY_S


@pytest.mark.skipif(loop_probe._interrupts_missing(), reason="nohz_full")
def test_interrupts_are_counted_on_this_machine() -> None:
    before, end_s = loop_probe._counters(), time.thread_time() + 2.0  # the host may stop the CPU for some of it
    while loop_probe._most_s(before, loop_probe._counters()) < BUSY_S:
        assert time.thread_time() < end_s


def test_a_slow_cpu_is_given_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_probe, "_USUAL_S", 1e-12)  # no CPU is as fast as the usual one then
    line = callback_of_30_ms(tmp_path, monkeypatch)
    assert line["slowness"] == loop_probe.MAX_SLOWNESS
    assert loop_probe.busy_s(line, with_gc=False) == line["cpu_s"] / line["slowness"]
    monkeypatch.setattr(loop_probe, "_USUAL_S", 1.0)
    assert callback_of_30_ms(tmp_path / "usual", monkeypatch)["slowness"] == 1.0


def test_a_folder_that_cannot_be_made_is_an_error_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread that makes the event loop: on the loop's own, nobody would hear of it, and no loop would run."""
    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setenv(loop_probe.VARIABLE, str(taken / "loops"))
    with pytest.raises(UsageError, match=f"{loop_probe.VARIABLE}: {taken}/loops") as caught:
        Runtime([""], 1.0)
    assert "unset" in caught.value.fix
