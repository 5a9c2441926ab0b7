"""Event files survive threads, crashes and full disks."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco.base.errors import ResourceError, StateError
from diloco.observe.event_log import TAIL_BYTES, Events, read_events, read_lines, read_on
from diloco.observe.events import Remark, Stamped, Started, TrainingProgress, VersionClosed, Warned

pytestmark = pytest.mark.handmade_events


def test_an_event_is_one_line_with_its_stamp_and_fields(tmp_path: Path) -> None:
    heard = list[Stamped]()
    events = Events(tmp_path / "deep" / "events.jsonl", "tokyo", [heard.append])
    events.emit(VersionClosed(version=3, tokens=9, members=("tokyo",), seconds={"inner": 1.5}))
    (line,) = (tmp_path / "deep" / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert list(event)[:6] == ["t", "time", "peer", "kind", "version", "tokens"]
    assert event["peer"] == "tokyo"
    assert event["seconds"] == {"inner": 1.5}
    assert 0 <= event["t"] < 10 < event["time"]
    assert heard == list(read_events(tmp_path / "deep" / "events.jsonl"))


def test_events_of_many_threads_stay_whole(tmp_path: Path) -> None:
    events = Events(tmp_path / "e", "p")
    threads = [threading.Thread(target=lambda: [events.emit(Remark("a" * 500)) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [stamped.event for stamped in read_events(tmp_path / "e")] == [Remark("a" * 500)] * 400


def test_a_restart_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "e"
    first = Events(path, "p")
    first.emit(Started(run="1"))
    first.close()
    with path.open("a") as file:
        file.write('{"t": 1.0, "kind": "ver')
    assert [stamped.event for stamped in read_events(path)] == [Started(run="1")]
    Events(path, "p").emit(Started(run="2"))
    assert [event["run"] for event in read_lines(path)] == ["1", "2"]
    assert path.read_text().count("\n") == 2


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b'{"kind":"a"}\n\x00\xff\x00\n[1]\n{"no":"kind"}\n{"kind":"b"}\n{"kind":')
    assert [event["kind"] for event in read_lines(tmp_path / "e")] == ["a", "b"]
    assert list(read_events(tmp_path / "e")) == []
    assert list(read_lines(tmp_path / "missing")) == []


def refuse(descriptor: int, data: bytes) -> int:
    """A full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_writing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[Stamped]()
    events = Events(tmp_path / "e", "p", [heard.append])
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", refuse)
        for step in range(3):
            events.emit(TrainingProgress(step))
    assert [stamped.event for stamped in heard] == list(map(TrainingProgress, range(3)))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    events.close()


def test_a_log_that_cannot_be_written_or_was_moved_away_leaves_the_folder_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its votes and its ledger are still written there. The log of an earlier release has no lock beside it."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"a"}\n')
    events = Events(path, "a")
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", refuse)
        events.emit(Warned("x"))
    path.rename(tmp_path / "events.jsonl.1")
    for _ in range(2):
        with pytest.raises(ResourceError, match="another run in this one, writes to"):
            Events(path, "b")
    assert not path.exists()
    events.close()
    Events(path, "b").close()
    assert {one.name for one in tmp_path.iterdir()} == {"events.jsonl", "events.jsonl.1", ".events.lock"}


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write events"):
        Events(tmp_path / "file" / "e", "p")


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("a line\nhalf a line")
    (tmp_path / "e").symlink_to(mine)
    with pytest.raises(StateError, match="e is a symbolic link"):
        Events(tmp_path / "e", "p")
    assert mine.read_text() == "a line\nhalf a line"


def test_without_a_path_only_listeners_hear() -> None:
    heard = list[Stamped]()
    Events(None, "p", [heard.append]).emit(Warned("x"))
    assert heard[0].event == Warned("x")


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        f"import sys; from pathlib import Path; from diloco.observe.event_log import *; path = Path({str(path)!r}); "
    )
    program += "Events(path, 'a'); read_events(path); print(flush=True); sys.stdin.read()"  # which leaves it the lock
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        path.write_bytes(b'{"half')
        with pytest.raises(ResourceError, match=r"another process, or .* writes to"):
            Events(path, "b")
        assert path.read_bytes() == b'{"half'
        other.kill()
    events = Events(path, "b")
    events.emit(Warned("x"))
    assert [stamped.peer for stamped in read_events(path)] == ["b"]
    with pytest.raises(ResourceError, match="another run in this one, writes to"):
        Events(path, "c")
    events.close()
    Events(path, "c").close()


def test_a_restart_looks_for_the_last_line_from_the_end(tmp_path: Path) -> None:
    for begun in (b"", b"x" * 3, b"x" * (2 * TAIL_BYTES), b"x" * TAIL_BYTES, b"x" * (TAIL_BYTES - 1)):
        for before in (b"", b'{"kind":"a"}\n', b'{"kind":"a"}\n' * 9000):
            (tmp_path / "e").write_bytes(before + begun)
            Events(tmp_path / "e", "p").close()
            assert (tmp_path / "e").read_bytes() == before


def test_of_many_alike_the_ends_are_read(tmp_path: Path) -> None:
    events = Events(tmp_path / "e", "p")
    for step in range(20):
        events.emit(VersionClosed(step, 0) if step in (0, 7, 8, 11, 14) else TrainingProgress(step))
    read = read_events(tmp_path / "e", TrainingProgress)
    steps = [getattr(one.event, "version", None) or getattr(one.event, "inner_step", 0) for one in read]
    assert steps == [0, 1, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 19]


def test_a_growing_file_is_read_on_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "e"
    assert read_on(path, 0) == ([], 0)
    path.write_bytes(b'{"kind":"a"}\n\xff\n{"kind":')
    assert read_on(path, 0) == ([{"kind": "a"}], 15)
    path.write_bytes(path.read_bytes() + b'"b"}\n')
    assert read_on(path, 15) == ([{"kind": "b"}], 28)
    assert read_on(path, 28) == ([], 28)
