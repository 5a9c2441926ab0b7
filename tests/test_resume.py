"""Loops of somebody else's that are killed whole, and go on: the same bits as if nothing had happened."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.accounts.ledger import read_ledger
from diloco.observe.event_log import read_lines
from diloco.observe.events import STEPS
from tests.peers import until
from tests.programs import own_loop
from tests.warm import Program

DEADLINE_S = 60.0
pytestmark = pytest.mark.slow


def contract(name: str, peers: int = 1, versions: int = 8) -> dict[str, Any]:
    """H = 5 inner steps of 8 tokens."""
    return {
        "run": {"name": name, "total_tokens": versions * 5 * 8 * peers},
        "membership": {"start_peers": peers},
        "model": {"kind": "external"},
        "inner": {"steps": 5},
        "codec": {"name": "int8"},
        "sync": {"part_elements": 1024},
    }


class Loops:
    """Processes of the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Program] = []
        self.latest: list[Program] = []

    def start(self, name: str, ranks: int = 1, **told: Any) -> list[Program]:
        """All ranks of one peer."""
        about = {"name": name, "peer": ord(name[0]), "kind": "plain", "out": str(self.folder / name), **told}
        meeting = self.folder / f"meeting-{secrets.token_hex(4)}"
        text, started = json.dumps({**about, "meeting": f"file://{meeting}"}), []
        (self.folder / f"{name}.address").unlink(missing_ok=True)
        for rank in range(ranks):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            started.append(Program(own_loop.live, [text], self.folder / f"{name}-{rank}.log", variables=variables))
        self.processes += started
        self.latest = started
        return started

    def address(self, name: str) -> str:
        path = self.folder / f"{name}.address"
        failed = lambda: any(process.poll() for process in self.processes)  # noqa: E731
        until(lambda: path.is_file() or failed(), f"{name} listens", DEADLINE_S)
        assert path.is_file(), "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
        return path.read_text()

    def kill(self, **ranks: int) -> None:
        """All of these at one moment, with no chance to say anything, once each rank has come to its `stop_at`."""
        files = [self.folder / f"{name}.{rank}.stopped" for name, count in ranks.items() for rank in range(count)]
        until(lambda: all(file.is_file() for file in files), "all have stopped", DEADLINE_S)
        for process in self.processes if len(ranks) > 1 else self.latest:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.processes = [process for process in self.processes if process.poll() is None]

    def ended(self, name: str, processes: list[Program]) -> list[dict[str, Any]]:
        """What each rank wrote at its end."""
        over = lambda: all(process.poll() == 0 for process in processes)  # noqa: E731
        try:
            until(lambda: over() or any(process.poll() for process in self.processes), f"{name} ends", DEADLINE_S)
            assert over(), "one of them failed"
        except AssertionError as error:
            for process in self.processes:
                process.show_stacks()
            logs = sorted(self.folder.glob("*.log"))
            raise AssertionError("\n".join(f"{log.name}: {log.read_text()[-6000:]}" for log in logs)) from error
        return [json.loads((self.folder / f"{name}.{rank}").read_text()) for rank in range(len(processes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    made = Loops(tmp_path)
    yield made
    made.close()


def lineages(folder: Path) -> set[str]:
    """Of all lives in a ledger."""
    return {
        record.fields["lineage"] for record in read_ledger(folder / "ledger.jsonl").records if record.kind == "open"
    }


def forget_what_one_lacks(folders: list[Path]) -> None:
    """A peer passes a version over while it still writes the last one: they go on from what each of them saved.

    From two versions there could not be the same bits: whoever copies the state keeps its own inner optimizer.
    """
    saved = [{path.name for path in folder.glob("v*")} for folder in folders]
    common = set.intersection(*saved)
    assert common, f"no version that all saved: {saved}"
    for folder, names in zip(folders, saved, strict=True):
        for name in names - common:
            shutil.rmtree(folder / name)


def test_one_rank_killed_and_resumed_ends_with_the_same_bits(loops: Loops, tmp_path: Path) -> None:
    whole, broken = {"contract": contract("alone"), "dropout": 0.2}, tmp_path / "broken"
    (plain,) = loops.ended("a", loops.start("a", **whole, directory=str(tmp_path / "plain")))
    loops.start("a", **whole, directory=str(broken), stop_at=22)
    loops.kill(a=1)
    (resumed,) = loops.ended("a", loops.start("a", **whole, directory=str(broken), resume=True))
    assert (resumed["digest"], resumed["steps"], resumed["version"]) == (plain["digest"], 40, 8)
    first = resumed["closed"][0]
    assert first in (2, 3, 4, 5)  # the last checkpoint may have been under way
    assert resumed["closed"] == list(range(first, 9))
    assert resumed["anchor"] == plain["anchor"]
    diloco = [sys.executable, "-m", "diloco"]
    subprocess.run([*diloco, "export", str(broken), str(tmp_path / "exported")], check=True, capture_output=True)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    subprocess.run([*diloco, "audit", str(broken)], check=True, capture_output=True)
    fields = {line["kind"]: set(line) for line in read_lines(broken / "events.jsonl")}
    assert set(fields) >= {"start", "listening", "view", "version", "usage", "checkpoint", "end"}
    peer = [*diloco, "peer", "quick", "--dir", str(tmp_path / "peer"), "--name", "p", "--set", "run.total_tokens=10240"]
    subprocess.run([*peer, "--set", "membership.start_peers=1", "--insecure"], check=True, capture_output=True)
    ours = {line["kind"]: set(line) for line in read_lines(tmp_path / "peer" / "events.jsonl")}
    shared = set(fields) & set(ours)
    assert {kind: fields[kind] for kind in shared} == {kind: ours[kind] for kind in shared}
    assert set(ours) - set(fields) <= {"eval", "progress", "reason"}


def test_each_step_of_the_line_took_its_time(loops: Loops, tmp_path: Path) -> None:
    """On the thread that did the work: `average` and `outer` on the lane's, `compress` on the encoder's."""
    loops.ended("a", loops.start("a", contract=contract("timed"), directory=str(tmp_path / "a")))
    versions = [line for line in read_lines(tmp_path / "a" / "events.jsonl") if line["kind"] == "version"]
    assert len(versions) == 8
    for version in versions:
        assert set(version["seconds"]) == set(STEPS) - {"other"}
        assert min(version["seconds"].values()) > 0


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_an_island_beside_a_plain_peer_killed_whole_and_resumed(kind: str, loops: Loops, tmp_path: Path) -> None:
    """Two ranks found the run, a plain peer joins; all three processes are killed at one moment, and go on."""
    agreed = contract(f"island-{kind}", peers=2)

    def both(tag: str, resume: bool = False, **told: Any) -> list[dict[str, Any]] | None:
        folders = {name: str(tmp_path / f"{tag}-{name}") for name in "ab"}
        island = loops.start("a", 2, kind=kind, contract=agreed, directory=folders["a"], resume=resume, **told)
        plain = loops.start("b", join=loops.address("a"), directory=folders["b"], resume=resume, **told)
        if told:
            loops.kill(a=2, b=1)
            forget_what_one_lacks([Path(folder, "checkpoints") for folder in folders.values()])
            return None
        return [*loops.ended("a", island), *loops.ended("b", plain)]

    expected = both("whole")
    assert expected is not None
    assert len({ended["digest"] for ended in expected}) == 1
    assert [ended["closed"] for ended in expected] == [list(range(1, 9))] * 3
    both("broken", stop_at=22)
    resumed = both("broken", resume=True)
    assert resumed is not None
    assert {ended["digest"] for ended in resumed} == {expected[0]["digest"]}
    assert [ended["steps"] for ended in resumed] == [40] * 3
    assert len({ended["anchor"] for ended in resumed}) == 1


def test_a_founder_that_is_killed_and_resumed_joins_who_is_left(loops: Loops, tmp_path: Path) -> None:
    """Or there would be two lineages."""
    agreed = contract("founder", peers=3, versions=50)
    agreed["membership"] |= {"policy": "quorum", "quorum_peers": 2, "grace_s": 0.2, "start_peers": 3}
    founder = loops.start("a", contract=agreed, directory=str(tmp_path / "a"), stop_at=20)
    told = {"join": loops.address("a"), "pause_s": 0.08}  # they are there yet when it is back
    others = {name: loops.start(name, directory=str(tmp_path / name), **told) for name in "bc"}
    loops.latest = founder
    loops.kill(a=1)
    ended = loops.ended("a", loops.start("a", contract=agreed, directory=str(tmp_path / "a"), resume=True))
    ended += [one for name, processes in others.items() for one in loops.ended(name, processes)]
    assert len({one["digest"] for one in ended}) == 1
    assert len({lineage for name in "abc" for lineage in lineages(tmp_path / name)}) == 1
