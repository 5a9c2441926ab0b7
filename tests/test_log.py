"""The log of means: what is whole comes back, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.base.files import Disk, on_disk
from diloco.exchange.log import LOG, MeanLog, forget_means, logged_mean


class Disks(Disk):
    """A disk that refuses when it is told to, and counts syncs of files."""

    def __init__(self) -> None:
        self.full, self.syncs = False, 0

    def append(self, descriptor: int, path: Path, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().append(descriptor, path, data)

    def sync(self, descriptor: int, path: Path) -> None:
        self.syncs += path.is_file()
        super().sync(descriptor, path)


@pytest.fixture
def counted() -> Iterator[Disks]:
    with on_disk(made := Disks()):
        yield made


def logged(folder: Path, warnings: list[str], rank: int = 0) -> MeanLog:
    return MeanLog(folder, rank, warnings.append)


def test_a_whole_mean_comes_back_in_the_order_of_its_parts(tmp_path: Path, counted: Disks) -> None:
    log = logged(tmp_path, [])
    log.begin(7, 0, 3)
    log.put(2, b"two")
    log.put(0, b"once")
    log.put(0, b"zero")  # a repair took the first away
    log.put(1, b"")
    assert logged_mean(tmp_path, 0, 7, "d") is None
    log.end("d")
    assert counted.syncs == 1
    assert logged_mean(tmp_path, 0, 7, "d") == [b"zero", b"", b"two"]
    assert logged_mean(tmp_path, 0, 7, "e") is None
    assert logged_mean(tmp_path, 0, 8, "d") is None
    assert logged_mean(tmp_path, 1, 7, "d") is None


def test_each_rank_has_its_own_parts(tmp_path: Path) -> None:
    first, second = logged(tmp_path, []), logged(tmp_path, [], rank=1)
    first.fetched(3, "d", [b"a", b"b", b"c"], (0, 2))
    second.fetched(3, "d", [b"a", b"b", b"c"], (1,))
    assert logged_mean(tmp_path, 0, 3, "d") == [b"a", b"", b"c"]
    assert logged_mean(tmp_path, 1, 3, "d") == [b"", b"b", b""]
    second.fetched(4, "e", [b"", b"later", b""], (1,))
    forget_means(tmp_path, 3)
    assert logged_mean(tmp_path, 0, 3, "d") is None
    assert logged_mean(tmp_path, 1, 3, "d") is None
    assert logged_mean(tmp_path, 1, 4, "e") == [b"", b"later", b""]


def test_an_attempt_that_did_not_become_whole_goes(tmp_path: Path) -> None:
    log = logged(tmp_path, [])
    log.begin(4, 0, 2)
    log.put(0, b"early")
    log.begin(4, 1, 2)
    log.put(0, b"late")
    log.put(1, b"too")
    log.end("d")
    log.begin(5, 0, 2)
    log.fetched(5, "e", [b"whole"], (0,))
    log.put(0, b"goes on")
    log.drop()
    assert sorted(path.name for path in (tmp_path / LOG).iterdir()) == ["v00000004.a1.r0.mean", "v00000005.f.r0.mean"]
    assert logged_mean(tmp_path, 0, 4, "d") == [b"late", b"too"]


def test_a_file_that_is_cut_or_changed_anywhere_gives_nothing(tmp_path: Path) -> None:
    log = logged(tmp_path, [])
    log.fetched(3, "d", [b"first", b"second"], (0, 1))
    path = next((tmp_path / LOG).iterdir())
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert logged_mean(tmp_path, 0, 3, "d") is None, size
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert logged_mean(tmp_path, 0, 3, "d") in (None, [b"first", b"second"]), at
    path.write_bytes(whole)
    assert logged_mean(tmp_path, 0, 3, "d") == [b"first", b"second"]


def test_a_full_disk_is_a_warning_and_the_next_mean_is_logged(tmp_path: Path, counted: Disks) -> None:
    warnings = list[str]()
    log = logged(tmp_path, warnings)
    log.begin(4, 0, 1)
    counted.full = True
    log.put(0, b"lost")
    log.put(0, b"lost")
    log.end("d")
    log.fetched(5, "e", [b"lost"], (0,))
    assert len(warnings) == 1
    assert "no mean in the log: No space left on device" in warnings[0]
    assert not list((tmp_path / LOG).iterdir())
    counted.full = False
    log.fetched(6, "f", [b"kept"], (0,))
    assert logged_mean(tmp_path, 0, 6, "f") == [b"kept"]
