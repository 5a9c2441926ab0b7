"""The log of means: what is whole comes back, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.base.errors import StateError
from diloco.base.files import Disk, on_disk
from diloco.exchange.log import LOG, SYNC_BYTES, DiskLog, DiskUse, MeanFile, forget_means, logged_mean


class Disks(Disk):
    """A disk that refuses or hangs when it is told to, and counts syncs of files."""

    def __init__(self) -> None:
        self.full, self.syncs = False, 0
        self.free = threading.Event()
        self.free.set()

    def write(self, descriptor: int, path: Path, data: bytes) -> None:
        self.free.wait(10.0)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(descriptor, path, data)

    def sync(self, descriptor: int, path: Path) -> None:
        self.syncs += path.is_file()
        super().sync(descriptor, path)


@pytest.fixture
def counted() -> Iterator[Disks]:
    with on_disk(made := Disks()):
        yield made


def log_in(folder: Path, rank: int = 0, life: int = 1) -> tuple[DiskLog, list[str]]:
    warnings = list[str]()
    return DiskLog(folder, rank, life, warnings.append), warnings


def durable(log: DiskLog, digest: str) -> bool:
    return asyncio.run(log.durable(digest))


def read(folder: Path, digest: str, parts: int = 2, version: int = 7, rank: int = 0) -> list[bytes] | None:
    return logged_mean(folder, rank, version, digest, parts, range(parts))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / LOG).iterdir())


def test_a_large_mean_is_synced_as_it_comes_so_that_little_is_left_for_its_end(tmp_path: Path, counted: Disks) -> None:
    log, warnings = log_in(tmp_path)
    draft = log.begin(7)
    for part in range(4):
        draft.put(part, bytes(SYNC_BYTES // 2 + 1))
    draft.end("mean")
    assert durable(log, "mean")
    assert (counted.syncs, warnings) == (3, [])  # after two parts, after four, and of the end
    log.stop()


def test_a_whole_mean_comes_back_in_the_order_of_its_parts(tmp_path: Path, counted: Disks) -> None:
    log, _ = log_in(tmp_path)
    draft = log.begin(7)
    draft.put(2, b"two")
    draft.put(0, b"zero")
    draft.put(1, b"")
    draft.end("d")
    assert durable(log, "d")
    assert counted.syncs == 1
    assert read(tmp_path, "d", 3) == [b"zero", b"", b"two"]
    assert read(tmp_path, "e", 3) is None
    assert read(tmp_path, "d", 3, version=8) is None
    assert read(tmp_path, "d", 4) is None


def test_bytes_and_the_longest_sync_are_counted(tmp_path: Path) -> None:
    log, _ = log_in(tmp_path)
    log.fetched(7, "digest", [b"one", b"two"], [0, 1])
    assert durable(log, "digest")
    size_bytes, longest_s = log.use.take()
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / LOG).iterdir())
    assert 0 < longest_s < 10
    assert log.use.take() == (0, 0.0)
    log.stop()


def test_a_repair_brings_another_mean_and_both_are_there(tmp_path: Path) -> None:
    log, _ = log_in(tmp_path)
    draft = log.begin(7)
    draft.put(0, b"a")
    draft.put(1, b"b")
    draft.end("first")
    draft.put(1, b"c")
    draft.end("second")
    draft.drop()
    assert durable(log, "second")
    assert (read(tmp_path, "first"), read(tmp_path, "second")) == ([b"a", b"b"], [b"a", b"c"])


def test_parts_that_other_ranks_logged_are_found(tmp_path: Path) -> None:
    """Also where the island has another number of ranks by now."""
    for rank in (0, 1):
        log, _ = log_in(tmp_path, rank)
        log.fetched(3, "d", [b"a", b"b", b"c"], range(rank, 3, 2))
        assert durable(log, "d")
    assert logged_mean(tmp_path, 0, 3, "d", 3, (0, 2)) == [b"a", b"", b"c"]
    assert logged_mean(tmp_path, 1, 3, "d", 3, (1,)) == [b"", b"b", b""]
    assert logged_mean(tmp_path, 0, 3, "d", 3, range(3)) == [b"a", b"b", b"c"]
    assert logged_mean(tmp_path, 5, 3, "d", 3, ()) == [b"", b"", b""]


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad sector must not end every start of this peer. Another file may have the same mean."""
    log, _ = log_in(tmp_path)
    log.fetched(7, "d", [b"x", b"y"], (0, 1))
    assert durable(log, "d")
    (whole,) = (tmp_path / LOG).iterdir()
    (tmp_path / LOG / "v00000007.0-1.r0.mean").mkdir()
    assert read(tmp_path, "d") == [b"x", b"y"]
    assert "v00000007.0-1.r0.mean cannot be read: Is a directory" in caplog.text
    whole.unlink()
    assert read(tmp_path, "d") is None


def test_another_life_takes_nothing_away(tmp_path: Path) -> None:
    first, _ = log_in(tmp_path, life=1)
    first.fetched(7, "d", [b"x", b"y"], (0, 1))
    assert durable(first, "d")
    second, _ = log_in(tmp_path, life=2)
    draft = second.begin(7)
    draft.put(0, b"other")
    draft.drop()
    second.fetched(7, "e", [b"v", b"w"], (0, 1))
    assert durable(second, "e")
    assert (read(tmp_path, "d"), read(tmp_path, "e")) == ([b"x", b"y"], [b"v", b"w"])
    assert len(names(tmp_path)) == 2  # what was dropped is gone
    forget_means(tmp_path, 6)
    assert len(names(tmp_path)) == 2
    forget_means(tmp_path, 7)
    assert (read(tmp_path, "d"), read(tmp_path, "e")) == (None, None)


def test_the_next_mean_is_written_over_one_that_a_checkpoint_has(tmp_path: Path) -> None:
    log, _ = log_in(tmp_path)
    for version, rank in ((7, 0), (8, 0), (7, 1)):
        one = log if rank == 0 else log_in(tmp_path, rank)[0]
        one.fetched(version, "d", [b"a longer part", b"b"], (0, 1))
        assert durable(one, "d")
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / LOG).iterdir()}
    forget_means(tmp_path, 7)
    assert len(names(tmp_path)) == 3, "their files stay"
    log.fetched(9, "e", [b"x", b"y"], (0, 1))
    assert durable(log, "e")
    assert (tmp_path / LOG / "v00000009.1-3.r0.mean").stat().st_ino == inodes["v00000007.1-1.r0.mean"]
    assert read(tmp_path, "e", version=9) == [b"x", b"y"]
    assert (read(tmp_path, "d"), read(tmp_path, "d", version=9)) == (None, None)
    assert read(tmp_path, "d", version=8) == [b"a longer part", b"b"]
    forget_means(tmp_path, 9)
    assert names(tmp_path) == ["spare.v00000008.1-2.r0.mean", "spare.v00000009.1-3.r0.mean"], "no more than means"


def test_no_mean_is_written_over_what_a_link_leads_to(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / LOG
    mine.write_text("mine")
    folder.mkdir()
    (folder / "spare.v00000007.1-1.r0.mean").symlink_to(mine)
    file = MeanFile(folder / "v00000008.1-1.r0.mean", DiskUse())
    with pytest.raises(StateError, match="is a symbolic link"):
        file.put(0, b"x")
    assert mine.read_text() == "mine"


def test_nothing_of_a_mean_that_was_written_over_comes_back(tmp_path: Path) -> None:
    """Whatever pages of the new one a loss of power takes, and though the old one was of the same digest and sizes."""
    log, _ = log_in(tmp_path)
    log.fetched(7, "d", [b"first", b"second"], (0, 1))
    assert durable(log, "d")
    old = (tmp_path / LOG / "v00000007.1-1.r0.mean").read_bytes()
    forget_means(tmp_path, 7)
    log.fetched(8, "d", [b"1st..", b"2nd..."], (0, 1))
    assert durable(log, "d")
    path = tmp_path / LOG / "v00000008.1-2.r0.mean"
    new = path.read_bytes()
    assert len(new) == len(old)
    for cut in range(len(new)):
        for mixed in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            path.write_bytes(mixed)
            assert read(tmp_path, "d", version=8) == ([b"1st..", b"2nd..."] if mixed == new else None), cut


def test_a_file_to_which_a_mean_is_still_written_is_not_written_over(tmp_path: Path) -> None:
    log, _ = log_in(tmp_path)
    never_whole = log.begin(7)
    never_whole.put(0, b"part of an attempt")
    log.submit(lambda: None).result(10.0)
    forget_means(tmp_path, 7)
    log.fetched(8, "d", [b"a", b"b"], (0, 1))
    never_whole.put(1, b"late")
    assert durable(log, "d")
    never_whole.drop()
    log.submit(lambda: None).result(10.0)
    assert read(tmp_path, "d", version=8) == [b"a", b"b"]


def test_what_is_dropped_or_comes_late_goes_nowhere(tmp_path: Path, counted: Disks) -> None:
    """A part of an attempt that is over must not go into the next one's mean, nor hold memory on a disk that hangs."""
    log, _ = log_in(tmp_path)
    counted.free.clear()
    old = log.begin(7)
    for part in range(4):
        old.put(part, bytes(100))
    old.drop()
    assert not old._payloads
    new = log.begin(7)
    new.put(0, b"a")
    old.put(0, b"late")
    new.put(1, b"b")
    new.end("d")
    counted.free.set()
    assert durable(log, "d")
    assert read(tmp_path, "d") == [b"a", b"b"]
    assert names(tmp_path) == ["v00000007.1-2.r0.mean"]


def test_a_file_that_is_cut_or_changed_anywhere_gives_nothing_wrong(tmp_path: Path) -> None:
    log, _ = log_in(tmp_path)
    log.fetched(7, "d", [b"first", b"second"], (0, 1))
    assert durable(log, "d")
    path = next((tmp_path / LOG).iterdir())
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read(tmp_path, "d") is None, size
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read(tmp_path, "d") in (None, [b"first", b"second"]), at
    path.write_bytes(whole)
    assert read(tmp_path, "d") == [b"first", b"second"]


def test_a_full_disk_is_a_warning_and_the_next_mean_is_logged(tmp_path: Path, counted: Disks) -> None:
    log, warnings = log_in(tmp_path)
    counted.full = True
    for digest in ("d", "e"):
        log.fetched(7, digest, [b"lost", b"lost"], (0, 1))
        assert not durable(log, digest)
    assert len(warnings) == 1
    assert "no mean in the log: No space left on device" in warnings[0]
    counted.full = False
    log.fetched(7, "f", [b"kept", b"kept"], (0, 1))
    assert durable(log, "f")
    assert len(names(tmp_path)) == 1
    log.stop()
    assert durable(log, "unknown")


def test_what_the_disk_refused_is_logged_again_and_what_it_has_is_not(tmp_path: Path, counted: Disks) -> None:
    log, _ = log_in(tmp_path)
    draft = log.begin(7)
    draft.put(0, b"first")
    draft.end("taken")
    assert durable(log, "taken")
    draft.drop()
    draft = log.begin(7)
    draft.put(0, b"first")
    log.submit(lambda: setattr(counted, "full", True)).result()
    draft.put(1, b"second")
    draft.end("d")
    assert not durable(log, "d")
    assert len(names(tmp_path)) == 1  # what was written of it would take the room that it needs
    log.again(7, "d", [b"first", b"second"], (0, 1))
    assert not durable(log, "d")
    counted.full = False
    for digest in ("d", "taken", "unknown", "d"):
        log.again(7, digest, [b"first", b"second"], (0, 1))
        assert durable(log, digest)
    assert len(names(tmp_path)) == 2
    assert read(tmp_path, "d") == [b"first", b"second"]


def test_what_is_being_logged_is_not_begun_again(tmp_path: Path, counted: Disks) -> None:
    log, _ = log_in(tmp_path)
    counted.free.clear()
    log.fetched(7, "d", [b"x", b"y"], (0, 1))
    log.again(7, "d", [b"x", b"y"], (0, 1))
    counted.free.set()
    assert durable(log, "d")
    assert len(names(tmp_path)) == 1


def test_who_waits_may_be_cancelled_and_others_not(tmp_path: Path, counted: Disks) -> None:
    log, _ = log_in(tmp_path)
    counted.free.clear()
    log.fetched(7, "d", [b"x", b"y"], (0, 1))

    async def both() -> bool:
        first, second = asyncio.create_task(log.durable("d")), asyncio.create_task(log.durable("d"))
        await asyncio.sleep(0)
        first.cancel()
        counted.free.set()
        return await second

    assert asyncio.run(both())
    assert read(tmp_path, "d") == [b"x", b"y"]
