"""Saving while training goes on: what is copied when, one at a time, and what is told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.base.errors import ResourceError
from diloco.island import Island
from diloco.island.slices import Slices, whole_slices
from diloco.observe.event_log import EventLine, Events
from diloco.observe.events import to_json
from diloco.storage import checkpoint, saving
from diloco.storage.checkpoint import load
from diloco.storage.saving import CheckpointSchedule, Contents, Saver, Written
from diloco.storage.stateful import UserState, _device_of
from tests.fronts import drive
from tests.peers import DEADLINE_S


class Disk:
    """Writes only when it is let to."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def save(self, *arguments: Any) -> Path:
        assert self.free.wait(DEADLINE_S)
        return checkpoint.save(*arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(saving, "save", disk.save)
    yield disk
    disk.free.set()


class Training:
    """A peer of one process whose weights move."""

    def __init__(self, directory: Path, every: int = 1) -> None:
        self.directory = directory
        self.saver = Saver(Island(0, 1, torch.device("cpu")))
        self.weights, self.anchor = torch.zeros(1000), torch.zeros(1000)
        self.version = 0
        self.seen: list[EventLine] = []
        emit = Events(None, "a", [lambda stamped: self.seen.append(to_json(stamped))]).emit
        self.keeper = CheckpointSchedule(every, emit, emit, self.begin)

    def contents(self) -> Contents:
        return {"outer": whole_slices({"0/anchor": self.anchor})}, {"version": self.version}

    def begin(self) -> Future[Written]:
        groups, numbers = self.contents()
        live: Slices = {"local": whole_slices({"w": self.weights})}
        return self.saver.save(self.directory, self.version, groups, live, numbers, 2)

    def train(self) -> None:
        self.version += 1
        self.weights += 1
        self.anchor = self.anchor + 1

    def due(self) -> None:
        self.keeper.due(self.version)

    def last(self) -> Path:
        return drive(self.keeper.last(self.version))

    def events(self, kind: str) -> list[EventLine]:
        return [event for event in self.seen if event["kind"] == kind]


def held_by(path: Path) -> tuple[Tensor, Tensor]:
    found = load(path)
    return found.groups["local"]["w"], found.groups["outer"]["0/anchor"]


def test_a_checkpoint_is_of_the_moment_at_which_it_began(tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path)
    training.train()
    training.due()
    training.train()
    disk.free.set()
    training.saver.finish()
    weights, anchor = held_by(tmp_path)
    assert (weights == 1).all()
    assert (anchor == 1).all()
    assert load(tmp_path).meta == {"version": 1}


def test_one_at_a_time_and_the_last_is_waited_for(tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path)
    for _ in range(3):
        training.train()
        training.due()
    assert [event["text"] for event in training.events("reason")] == [
        "no checkpoint of version 2: that of version 1 is still being written",
        "no checkpoint of version 3: that of version 1 is still being written",
    ]
    assert not training.events("checkpoint")
    disk.free.set()
    path = training.last()
    assert path.name == "v00000003"
    assert (held_by(path)[0] == 3).all()
    first, last = training.events("checkpoint")
    assert (first["version"], last["version"]) == (1, 3)
    assert 0 < first["held_s"] < first["seconds"]
    assert last["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    training.train()
    training.due()
    training.saver.finish()
    training.keeper.look()
    assert training.events("checkpoint")[-1]["version"] == 4


def test_the_first_version_is_saved_and_the_first_after_a_copied_state(tmp_path: Path) -> None:
    """Before that the log leads on from nothing: a voter that is restarted would be another life."""
    training = Training(tmp_path, every=4)
    for version in range(1, 12):
        if version == 7:
            training.keeper.copied()
        training.train()
        training.due()
        training.saver.finish()
        training.keeper.look()
    assert [event["version"] for event in training.events("checkpoint")] == [1, 4, 7, 8]


def test_copies_are_made_in_the_same_memory_again(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.last()
    (first,) = training.saver._copies.values()
    place = first.data_ptr()
    training.train()
    training.last()
    (second,) = training.saver._copies.values()
    assert second.data_ptr() == place
    assert (second == 1).all()


def test_a_disk_that_refuses_is_a_warning_and_at_the_end_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    training = Training(tmp_path / "file")
    training.due()
    training.saver.finish()
    training.keeper.look()
    (warning,) = training.events("warning")
    assert warning["text"].startswith("no checkpoint: cannot write checkpoint")
    assert "\n" not in caplog.messages[0]  # a terminal is shown it as a backslash and an n
    with pytest.raises(ResourceError, match="cannot write checkpoint"):
        training.last()


@pytest.mark.parametrize(
    ("key", "options", "device"),
    [("row_var", {}, "meta"), ("step", {}, "cpu"), ("step", {"capturable": True}, "meta")],
)
def test_values_of_an_optimizer_come_back_where_its_kernels_read_them(key: str, options: Any, device: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([parameter], **options)
    assert _device_of(parameter, key, optimizer) == torch.device(device)


@pytest.mark.parametrize("name", ["opt", "opt/a"])
def test_an_optimizer_comes_back_with_its_moments_whatever_its_name(name: str, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.Adam, UserState]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, UserState({name: optimizer}, dict(model.named_parameters()), 0)

    model, optimizer, state = made()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, 1, {"user": state.slices()}, {}, 1)
    other, again, there = made()
    there.load(load(tmp_path).groups["user"])
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(again.state[after]["exp_avg"], optimizer.state[before]["exp_avg"])


def test_a_checkpoint_that_is_moved_at_once_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "save", lambda *arguments: tmp_path / "moved")
    saver = Saver(Island(0, 1, torch.device("cpu")))
    assert saver.save(tmp_path, 1, {}, {}, {}, 1).result(DEADLINE_S).size_bytes == 0


def test_an_optimizer_comes_back_with_lists_of_tensors(tmp_path: Path) -> None:
    def made() -> tuple[torch.optim.LBFGS, UserState]:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def loss() -> Tensor:
            optimizer.zero_grad()
            found = (model(torch.eye(3)) - torch.arange(3.0)[:, None]).pow(2).sum()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        for _ in range(2):
            optimizer.step(loss)
        return optimizer, UserState({"opt": optimizer}, dict(model.named_parameters()), 0)

    optimizer, state = made()
    (before,) = optimizer.state.values()
    checkpoint.save(tmp_path, 1, {"user": state.slices()}, {}, 1)
    expected = [one.clone() for one in before["old_dirs"]]
    assert expected
    again, there = made()
    again.state.clear()
    there.load(load(tmp_path).groups["user"])
    (after,) = again.state.values()
    assert after.keys() == before.keys()
    assert all(map(torch.equal, after["old_dirs"], expected))
    assert after["n_iter"] == before["n_iter"]
