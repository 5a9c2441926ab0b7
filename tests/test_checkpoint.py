"""Checkpoints: what was saved comes back, damage is noticed, and no crash or full disk costs an older one."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.base.errors import ResourceError, StateError
from diloco.island.slices import Slice, Slices, whole_slices
from diloco.outer.fragments import Layout
from diloco.outer.optimizers import Nesterov, Sgd
from diloco.outer.state import OuterState
from diloco.storage import checkpoint, disk
from diloco.storage.checkpoint import Checkpoint, latest, load, outer_state
from diloco.storage.disk import JsonValue
from tests.peers import DEADLINE_S

META = {
    "tokens": 12_345,
    "lr": 0.1 + 0.2,
    "note": 'Δ \ud800 "quoted"',
    "none": None,
    "steps": [1, 2],
    "in": {"b": True},
}


def groups(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "outer": {"0/anchor": torch.randn(50, generator=generator), "0/momentum": torch.randn(50, generator=generator)},
        "inner": {
            "w/step": torch.tensor(7.0),
            "bf16": torch.randn(3, 5, generator=generator).bfloat16(),
            "int64": torch.tensor([2**62, -1]),
            "nothing": torch.empty(0, 4),
            "flags": torch.tensor([True, False]),
        },
        "random": {"torch": torch.arange(99, dtype=torch.uint8)},
        "local": {},
    }


def save(
    directory: Path,
    version: int,
    groups: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, JsonValue],
    keep: int,
) -> Path:
    """As one process that has all tensors whole."""
    slices = {group: whole_slices(tensors) for group, tensors in groups.items()}
    return checkpoint.save(directory, version, slices, meta, keep)


def assert_equal(found: Checkpoint, expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.groups.keys() == {group for group, tensors in expected.items() if tensors}
    for group, tensors in found.groups.items():
        assert tensors.keys() == expected[group].keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[group][name].dtype
            assert tensor.shape == expected[group][name].shape
            assert torch.equal(tensor, expected[group][name])


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ---------------------------------------------------------------- save and load


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "not" / "yet", 12, groups(), META, keep=2)
    assert path == tmp_path / "not" / "yet" / "v00000012"
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "outer.safetensors",
        "inner.safetensors",
        "random.safetensors",
    }
    for where in (path, path.parent):
        found = load(where)
        assert (found.version, found.path, found.meta) == (12, path, META)
        assert_equal(found, groups())


def test_parameters_views_and_strange_names(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"../../etc/x": torch.nn.Parameter(whole[:, 1:]), "": whole[0, :1], "t": whole.T}
    found = load(save(tmp_path / "run", 0, {"local": tensors}, {}, keep=1))
    assert_equal(found, {"local": tensors})
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {"local.safetensors", "manifest.json"}


def test_a_number_as_a_key_becomes_text_and_the_manifest_stays_valid(tmp_path: Path) -> None:
    meta: Any = {"held": {2: "b", 10: "a"}, "pair": (1, 2)}
    assert load(save(tmp_path, 0, groups(), meta, keep=1)).meta == {"held": {"2": "b", "10": "a"}, "pair": [1, 2]}


def test_loaded_tensors_are_ours_to_change_and_outlive_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, 0, groups(), {}, keep=1)
    anchor = load(path).groups["outer"]["0/anchor"]
    anchor += 1
    assert_equal(load(path), groups())
    shutil.rmtree(path)
    assert torch.equal(anchor, groups()["outer"]["0/anchor"] + 1)


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        path = save(tmp_path, 0, groups(), {}, keep=1)
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, groups(0), {"attempt": 1}, keep=2)
    path = save(tmp_path, 3, {"outer": groups(1)["outer"]}, {"attempt": 2}, keep=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["v00000003"]
    assert load(path).meta == {"attempt": 2}
    assert_equal(load(path), {"outer": groups(1)["outer"]})


def test_values_of_meta_are_checked_for_their_type(tmp_path: Path) -> None:
    found = load(save(tmp_path, 0, groups(), META, keep=1))
    assert found.value("tokens", int) == 12_345
    with pytest.raises(StateError, match="its tokens should be of type str, but is 12345"):
        found.value("tokens", str)
    with pytest.raises(StateError, match="its contract should be of type str, but is None"):
        found.value("contract", str)


# ---------------------------------------------------------------- which are kept


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 5, 9, 10):
        save(tmp_path, version, groups(), {}, keep=3)
    assert names(tmp_path) == ["v00000005", "v00000009", "v00000010"]
    assert latest(tmp_path) == tmp_path / "v00000010"
    assert latest(tmp_path / "absent") is None


def test_old_ones_that_cannot_be_deleted_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2):
        save(tmp_path, version, groups(), {}, keep=2)
    rename, entries = Path.rename, Path.iterdir

    def full(path: Path, target: Path) -> Path:
        if path.name == "v00000002":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    save(tmp_path, 3, groups(), {}, keep=1)
    assert names(tmp_path) == ["v00000002", "v00000003"]
    assert "cannot delete" in caplog.text
    assert "No space left on device" in caplog.text

    def unlisted(path: Path) -> Iterator[Path]:
        if (tmp_path / "v00000004").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return entries(path)

    monkeypatch.setattr(Path, "iterdir", unlisted)
    save(tmp_path, 4, groups(), {}, keep=1)
    assert load(tmp_path / "v00000004").version == 4
    assert "Input/output error" in caplog.text


def test_more_than_eight_digits_sort_as_numbers(tmp_path: Path) -> None:
    for version in (99_999_999, 100_000_000):
        save(tmp_path, version, groups(), {}, keep=2)
    assert load(tmp_path).version == 100_000_000


def test_versions_of_a_history_that_was_left_are_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (7, 8, 3, 4, 5):
        save(tmp_path, version, groups(), {}, keep=2)
    assert names(tmp_path) == ["v00000004", "v00000005", "v00000007", "v00000008"]
    assert "holds v00000008, v00000007, later than the version 5 just saved" in caplog.text


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    others = ["events.jsonl", "v1", "v00000001.bak", ".v00000001.1.tmp.txt", "version"]
    for name in others:
        (tmp_path / name).mkdir()
    save(tmp_path, 4, groups(), {}, keep=1)
    save(tmp_path, 5, groups(), {}, keep=1)
    assert names(tmp_path) == sorted([*others, "v00000005"])


def test_leftovers_of_dead_writers_are_deleted_and_those_of_others_are_not(tmp_path: Path) -> None:
    dead, alive = dead_pid(), 1
    for pid in (dead, os.getpid(), alive):
        shutil.copytree(save(tmp_path / "other", 4, groups(), {}, keep=1), tmp_path / f".v00000004.{pid}.tmp")
    with pytest.raises(StateError, match="no checkpoint at"):
        load(tmp_path)
    save(tmp_path, 2, groups(), {}, keep=1)
    assert names(tmp_path) == [f".v00000004.{alive}.tmp", "other", "v00000002"]


def test_one_that_was_put_aside_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    """As if its writer was killed between the two renames."""
    aside = tmp_path / f".v00000004.{dead_pid()}.old"
    save(tmp_path, 4, groups(4), {}, keep=3).rename(aside)
    assert latest(tmp_path) == aside
    assert_equal(load(tmp_path), groups(4))
    save(tmp_path, 5, groups(5), {}, keep=3)
    assert names(tmp_path) == ["v00000004", "v00000005"]
    shutil.copytree(tmp_path / "v00000004", aside)  # killed after the second one
    assert load(tmp_path).path == tmp_path / "v00000005"
    save(tmp_path, 6, groups(6), {}, keep=3)
    assert names(tmp_path) == ["v00000004", "v00000005", "v00000006"]


# ---------------------------------------------------------------- damage


FILES = ["manifest.json", "outer.safetensors", "inner.safetensors", "random.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_goes_unnoticed(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1, groups(), META, keep=1)
    data = (path / name).read_bytes()
    for position in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        (path / name).write_bytes(flipped)
        with pytest.raises(StateError, match="is damaged"):
            load(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, extend, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_passed_over_for_an_older_one(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for version in (1, 2):
        save(tmp_path, version, groups(version), {}, keep=2)
    damage(tmp_path / "v00000002" / name)
    found = load(tmp_path)
    assert found.version == 1
    assert_equal(found, groups(1))
    assert f"passed over: checkpoint {tmp_path}/v00000002 is damaged: {name}" in caplog.text
    damage(tmp_path / "v00000001" / name)
    with pytest.raises(StateError) as caught:
        load(tmp_path)
    assert "v00000002 is damaged" in caught.value.cause
    assert "v00000001 is damaged" in caught.value.cause
    assert caught.value.fix


def test_a_truncated_file_is_named_with_its_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"outer": {"x": torch.zeros(3)}}, {}, keep=1)
    size = (path / "outer.safetensors").stat().st_size
    os.truncate(path / "outer.safetensors", 10)
    with pytest.raises(StateError, match=rf"outer\.safetensors has 10 bytes, not {size}"):
        load(path)


def test_one_that_is_deleted_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors opens a file for its header, torch opens it again to map it: between them its owner may delete it."""
    path = save(tmp_path, 1, groups(), META, keep=1)
    monkeypatch.setattr(disk, "load_file", lambda file: torch.UntypedStorage.from_file(f"{file}.gone", False, 8))
    with pytest.raises(StateError, match=r"is damaged: .*No such file"):
        load(path)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "absent", "file"):
        with pytest.raises(
            StateError, match=r"no checkpoint at .*: neither manifest\.json nor a folder like v00000001"
        ):
            load(tmp_path / name)


def forge(path: Path, **changes: Any) -> None:
    """A manifest with other fields and the right digest, as anybody can make one."""
    tree = {**json.loads((path / "manifest.json").read_bytes()), **changes}
    fields = {name: value for name, value in tree.items() if name != "digest" and value is not ...}
    digest = hashlib.sha256((json.dumps(fields, sort_keys=True, indent=1) + "\n").encode()).hexdigest()
    text = json.dumps({**fields, "digest": digest}, sort_keys=True, indent=1) + "\n"
    (path / "manifest.json").write_text(text)


ENTRY = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../x.safetensors": ENTRY}},
        {"files": {"/x.safetensors": ENTRY}},
        {"files": {"X.safetensors": ENTRY}},
        {"files": {"x.safetensors": ENTRY, "y.safetensors": ENTRY}},
        {"files": {"x.safetensors": {**ENTRY, "bytes": 3.0}}},
        {"files": {"x.safetensors": {**ENTRY, "sha256": None}}},
        {"files": {"x.safetensors": {**ENTRY, "sha256": "é" * 64}}},
        {"files": {"x.safetensors": {"bytes": 3}}},
        {"files": {"x.safetensors": []}},
        {"files": []},
        {"meta": ...},
        {"meta": [1]},
        {"version": True},
        {"version": -1},
        {"version": "1"},
        {"more": 1},
        {"format": 1},
    ],
)
def test_forged_manifests(changes: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1, groups(), {}, keep=1)
    for file in (path / "x.safetensors", tmp_path / "run" / "x.safetensors"):
        file.write_bytes(b"abc")
    forge(path)
    assert load(path).version == 1
    forge(path, **changes)
    with pytest.raises(StateError, match="is damaged"):
        load(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_hash_that_fits_does_not_make_a_tensor_file(header: bytes, tmp_path: Path) -> None:
    path = save(tmp_path, 1, groups(), {}, keep=1)
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (path / "x.safetensors").write_bytes(data)
    forge(path, files={"x.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})
    with pytest.raises(StateError, match="is damaged"):
        load(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = save(tmp_path, 1, groups(), {}, keep=1)
    (path / "outer.safetensors").unlink()
    os.mkfifo(path / "outer.safetensors")
    with pytest.raises(StateError, match=r"outer\.safetensors is missing"):
        load(path)


# ---------------------------------------------------------------- several ranks


class Team:
    """Ranks as threads: what they say to each other, without a network."""

    def __init__(self, size: int) -> None:
        self.said: list[str] = [""] * size
        self.meeting = threading.Barrier(size, timeout=DEADLINE_S)

    def member(self, rank: int) -> Member:
        return Member(self, rank)


@dataclass(frozen=True)
class Member:
    team: Team
    rank: int

    def share(self, text: str = "") -> str:
        return self.gather(text)[0]

    def gather(self, text: str) -> list[str]:
        self.team.said[self.rank] = text
        self.team.meeting.wait()
        said = list(self.team.said)
        self.team.meeting.wait()
        return said


def save_together(directory: Path, version: int, parts: list[Slices]) -> Path:
    """Rank 0 saves, the others save their parts; what rank 0 raises is raised."""
    team = Team(len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        others = [
            pool.submit(checkpoint.save_part, part, team.member(rank)) for rank, part in enumerate(parts[1:], start=1)
        ]
        try:
            return checkpoint.save(directory, version, parts[0], {"note": "all"}, 2, team.member(0))
        finally:
            for other in others:
                other.result()


W = torch.arange(24.0).view(6, 4)


def shares() -> list[Slices]:
    """Slices of three ranks: rows of a matrix, one of them with nothing else, one with a group of its own."""
    rows = [Slice.of("w/exp_avg", W.shape, (start, 0), W[start : start + 2]) for start in (0, 2, 4)]
    inner = [*whole_slices({"w/step": torch.tensor(7.0)}), rows[0]]
    return [
        {"outer": whole_slices(groups()["outer"]), "inner": inner},
        {"inner": [rows[1]], "local": []},
        {"inner": [rows[2]], "local": whole_slices({"b": torch.ones(3)})},
    ]


def test_each_rank_writes_its_part_and_all_of_it_is_read(tmp_path: Path) -> None:
    path = save_together(tmp_path, 3, shares())
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "outer.safetensors",
        "inner.safetensors",
        "inner.1.safetensors",
        "inner.2.safetensors",
        "local.2.safetensors",
    }
    found = load(tmp_path)
    expected = {"w/exp_avg": W, "w/step": torch.tensor(7.0)}
    assert_equal(found, {"outer": groups()["outer"], "inner": expected, "local": {"b": torch.ones(3)}})
    assert found.meta == {"note": "all"}


def test_a_rank_reads_only_the_files_that_hold_what_it_wants(tmp_path: Path) -> None:
    path = save_together(tmp_path, 3, shares())
    digest = load(path).digest
    data = bytearray((path / "inner.1.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "inner.1.safetensors").write_bytes(data)
    found = checkpoint.reopen(path, digest).groups["inner"]
    into = torch.zeros(1, 4)
    found.read(Slice.of("w/exp_avg", W.shape, (5, 0), into))
    assert torch.equal(into, W[5:])
    with pytest.raises(StateError, match=r"is damaged: .*inner\.1\.safetensors was changed"):
        found.read(Slice.of("w/exp_avg", W.shape, (3, 0), into))


def test_a_rank_that_sees_another_checkpoint_says_so(tmp_path: Path) -> None:
    path = save_together(tmp_path, 3, shares())
    with pytest.raises(StateError, match="it is not the one that rank 0 has") as caught:
        checkpoint.reopen(path, "0" * 64)
    assert "one file system" in caught.value.fix
    with pytest.raises(StateError, match="this rank cannot read checkpoint"):
        checkpoint.reopen(tmp_path / "elsewhere", "0" * 64)


def test_what_a_rank_cannot_write_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    before = save_together(tmp_path, 1, shares())
    broken = shares()
    broken[2] = {"inner": broken[2]["inner"], "Local": broken[2]["local"]}
    with pytest.raises(ResourceError, match=r"cannot write checkpoint .*v00000002: rank 2: group 'Local'"):
        save_together(tmp_path, 2, broken)
    assert names(tmp_path) == [before.name]
    assert load(tmp_path).version == 1


def test_a_directory_that_cannot_be_keeps_no_rank_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot write checkpoint"):
        save_together(tmp_path / "file", 1, shares())


def test_ranks_without_one_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another node the folder is not there, or another of the same name is."""
    report = json.loads(checkpoint._report(tmp_path / "not" / ".v00000001.9.tmp", shares()[1], 1))
    assert "of rank 0 is not here" in report["refused"]
    write_groups = checkpoint._write_groups

    def elsewhere(folder: Path, part: Slices, rank: int) -> dict[str, JsonValue]:
        written = write_groups(folder, part, rank)
        if rank == 2:
            (folder / "inner.2.safetensors").unlink()
        return written

    monkeypatch.setattr(checkpoint, "_write_groups", elsewhere)
    with pytest.raises(ResourceError, match=r"rank 2: inner\.2\.safetensors was written, and is not here") as caught:
        save_together(tmp_path, 1, shares())
    assert "one file system" in caught.value.fix
    assert names(tmp_path) == []


def forge_file(path: Path, name: str, tensors: dict[str, Tensor], slices: Any) -> None:
    """A file of tensors that tells this of its slices, with the right hash and manifest."""
    text = slices if isinstance(slices, str) else json.dumps(slices)
    disk.write_tensors(path / name, tensors, {"slices": text})
    data = (path / name).read_bytes()
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    forge(path, files={**files, name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})


ROWS = {"x": torch.zeros(2, 4)}


@pytest.mark.parametrize(
    "slices",
    [
        {"x": ["w/exp_avg", [6, 4], [3, 0]]},
        {"x": ["w/exp_avg", [6, 4], [5, 0]]},
        {"x": ["w/exp_avg", [6, 4], [4, 1]]},
        {"x": ["w/exp_avg", [6, 4], [4]]},
        {"x": ["w/exp_avg", [6, 4, 1], [4, 0, 0]]},
        {"x": ["w/exp_avg", [6, 5], [4, 0]]},
        {"x": ["w/exp_avg", [2**62, 2**62], [4, 0]]},
        {"x": ["w/exp_avg", [6, 4], [-4, 0]]},
        {"x": ["w/exp_avg", [6, 4], [4.0, 0]]},
        {"x": ["w/exp_avg", [6, 4], [True, 0]]},
        {"x": ["w/exp_avg", [6, 4]]},
        {"x": [7, [6, 4], [4, 0]]},
        {"x": "w/exp_avg"},
        {"y": ["w/exp_avg", [6, 4], [4, 0]]},
        {},
        [],
        "no JSON",
        "[" * 100_000,
    ],
    ids=lambda slices: str(slices)[:40],
)
def test_forged_slices(slices: Any, tmp_path: Path) -> None:
    path = save_together(tmp_path, 1, shares())
    forge_file(path, "inner.2.safetensors", ROWS, {"x": ["w/exp_avg", [6, 4], [4, 0]]})
    assert torch.equal(load(path).groups["inner"]["w/exp_avg"][4:], torch.zeros(2, 4))
    forge_file(path, "inner.2.safetensors", ROWS, slices)
    with pytest.raises(StateError, match="is damaged"):
        load(path)


def test_slices_of_different_types(tmp_path: Path) -> None:
    path = save_together(tmp_path, 1, shares())
    rows = {"x": torch.zeros(2, 4, dtype=torch.float16)}
    forge_file(path, "inner.2.safetensors", rows, {"x": ["w/exp_avg", [6, 4], [4, 0]]})
    with pytest.raises(StateError, match="different types"):
        load(path)


# ---------------------------------------------------------------- outer state


LAYOUT = Layout.of([("blocks.0.w", (3, 4)), ("blocks.1.w", (5,)), ("head", (2, 2))], fragments=2)


def moved_state(optimizer: Nesterov) -> OuterState:
    generator = torch.Generator().manual_seed(0)
    fragments = [optimizer.start(torch.randn(f.elements, generator=generator)) for f in LAYOUT.fragments]
    state = OuterState(0, tuple(fragments))
    for version, index in enumerate((0, 1, 0), start=1):
        mean = torch.randn(LAYOUT.fragments[index].elements, generator=generator)
        state = state.replace(index, optimizer.step(state.fragments[index], mean), version)
    return state


def test_the_outer_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    optimizer = Nesterov(0.7, 0.9)
    state = moved_state(optimizer)
    steps = [fragment.steps for fragment in state.fragments]
    path = save(tmp_path, state.version, {"outer": dict(state.buffers())}, {"steps": steps}, keep=1)
    found = outer_state(load(path), LAYOUT, optimizer)
    assert (found.version, found.digest) == (3, state.digest)
    assert [fragment.steps for fragment in found.fragments] == [2, 1]


@pytest.mark.parametrize("steps", [[2], [2, -1], [2, 1.0], [2, True], [2, 1, 0], []])
def test_step_counts_that_do_not_fit(steps: list[Any], tmp_path: Path) -> None:
    state = moved_state(Nesterov(0.7, 0.9))
    path = save(tmp_path, 3, {"outer": dict(state.buffers())}, {"steps": steps}, keep=1)
    with pytest.raises(StateError, match="does not fit the model"):
        outer_state(load(path), LAYOUT, Nesterov(0.7, 0.9))


def test_an_outer_state_of_another_model_or_optimizer(tmp_path: Path) -> None:
    optimizer = Nesterov(0.7, 0.9)
    buffers = dict(moved_state(optimizer).buffers())
    other = Layout.of([("blocks.0.w", (3, 4)), ("blocks.1.w", (6,)), ("head", (2, 2))], fragments=2)
    good = load(save(tmp_path / "good", 3, {"outer": buffers}, {"steps": [2, 1]}, keep=1))
    for layout, unfit in ((other, optimizer), (LAYOUT, Sgd(0.7))):
        with pytest.raises(StateError, match="does not fit the model"):
            outer_state(good, layout, unfit)
    wrong: list[dict[str, Tensor]] = [{}, {**buffers, "0/anchor": buffers["0/anchor"].view(torch.int32)}]
    for tensors in wrong:
        bad = load(save(tmp_path / "bad", 3, {"outer": tensors}, {"steps": [2, 1]}, keep=1))
        with pytest.raises(StateError, match="does not fit the model"):
            outer_state(bad, LAYOUT, optimizer)


# ---------------------------------------------------------------- a disk that refuses


def assert_refused(directory: Path, why: str, version: int = 2) -> None:
    """A large checkpoint of `version` is refused, and that of version 1 is all there is."""
    with pytest.raises(
        ResourceError, match=rf"cannot write checkpoint {directory}/v0000000{version}: .*{why}"
    ) as caught:
        save(directory, version, {**groups(2), "large": {"x": torch.zeros(2**20)}}, {}, keep=1)
    assert caught.value.fix
    assert names(directory) == ["v00000001"]
    assert_equal(load(directory), groups(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "diloco-test", disk], check=False, capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_full_disk_costs_only_the_new_checkpoint(small_disk: Path, version: int) -> None:
    save(small_disk, 1, groups(1), {}, keep=1)
    assert_refused(small_disk, "No space left on device", version)
    save(small_disk, 2, groups(2), {}, keep=1)
    assert names(small_disk) == ["v00000002"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 1 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_file_that_may_not_grow_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, groups(1), {}, keep=1)
    assert_refused(tmp_path, "File too large")


@pytest.mark.usefixtures("small_files")
def test_a_manifest_that_may_not_grow(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot write checkpoint .*: File too large"):
        save(tmp_path, 1, groups(), {"long": "x" * 2**21}, keep=1)
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResourceError, match="cannot write checkpoint"):
            save(directory, 1, groups(), {}, keep=1)


# ---------------------------------------------------------------- kill -9


COMMON = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from diloco.storage.checkpoint import load, save
from diloco.island.slices import whole_slices

torch.set_num_threads(1)
directory = Path(sys.argv[1])

def write(step, elements):
    groups = {name: whole_slices({"x": torch.full((elements,), float(step))}) for name in ("outer", "inner")}
    save(directory, step // 2, groups, {"step": step}, keep=2)  # each version is saved, and saved again

def check(least):
    found = load(directory)
    step = found.meta["step"]
    assert step >= least, f"step {least} was there, now it is {step}"
    assert found.version == step // 2
    assert set(found.groups) == {"outer", "inner"}
    assert all((group["x"] == step).all() for group in found.groups.values())
    return step

def between_renames():
    return any(not (directory / p.name[1:10]).exists() for p in directory.glob(".v*.old"))
"""

EVERY_OPERATION = """
def kill_at(operation):
    countdown = iter(range(operation - 1, -1, -1))
    def hook(event, arguments):
        if event in {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "open"} and not next(countdown):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

step, operation, status = 4, 0, 9
write(3, 10)
write(4, 10)
while status:
    operation += 1
    child = os.fork()
    if not child:
        kill_at(operation)
        write(step + 1, 10)
        write(step + 2, 10)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), int(between_renames()))
    step = check(step)
"""

RANDOM_MOMENTS = """
random.seed(0)
step = 0
write(step, 200_000)
for _ in range(25):
    child = os.fork()
    while not child:
        step += 1
        write(step, 200_000)
    time.sleep(random.uniform(0, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(len(list(directory.glob(".*"))))
    step = check(step)
"""


def run(script: str, directory: Path) -> list[list[int]]:
    """Numbers in each line that the script prints, in a process of its own, which forks those that are killed."""
    command = [sys.executable, "-c", COMMON + script, str(directory)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return [[int(word) for word in line.split()] for line in result.stdout.splitlines()]


@pytest.mark.slow(queued=False)
def test_killed_at_every_operation_on_the_disk(tmp_path: Path) -> None:
    lives = run(EVERY_OPERATION, tmp_path)
    exits = [exit_code for exit_code, _ in lives]
    assert exits == [-9] * (len(lives) - 1) + [0]
    assert len(lives) > 40
    assert any(between for _, between in lives)


@pytest.mark.slow(queued=False)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    unfinished = [count for (count,) in run(RANDOM_MOMENTS, tmp_path)]
    assert len(unfinished) == 25
    assert any(unfinished)
