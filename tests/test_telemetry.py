"""Events survive threads, crashes and full disks; numbers read as people expect them."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco.base.errors import ResourceError
from diloco.observe.telemetry import (
    TAIL_BYTES,
    Events,
    departures,
    printable,
    read_events,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_percent,
    readable_text,
    readable_times,
    timed,
)


def test_an_event_is_one_line_with_its_stamp_and_fields(tmp_path: Path) -> None:
    events = Events(tmp_path / "deep" / "events.jsonl", "tokyo")
    events.emit("version", version=3, members=["tokyo"], seconds={"inner": 1.5})
    (line,) = (tmp_path / "deep" / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert list(event) == ["t", "time", "peer", "kind", "version", "members", "seconds"]
    assert event["peer"] == "tokyo"
    assert event["seconds"] == {"inner": 1.5}
    assert 0 <= event["t"] < 10 < event["time"]


def test_floats_that_are_not_finite_become_null(tmp_path: Path) -> None:
    heard: list[dict] = []
    events = Events(tmp_path / "e", "p", [heard.append])
    events.emit("version", loss=float("nan"), deep=[{"x": float("inf")}, (1.5, float("-inf"))])
    (event,) = read_events(tmp_path / "e")
    assert event["loss"] is None
    assert event["deep"] == [{"x": None}, [1.5, None]]
    assert "NaN" not in (tmp_path / "e").read_text()
    assert heard == [event]


def test_events_of_many_threads_stay_whole(tmp_path: Path) -> None:
    events = Events(tmp_path / "e", "p")
    threads = [
        threading.Thread(target=lambda: [events.emit("x", text="a" * 500) for _ in range(100)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event["text"] for event in read_events(tmp_path / "e")] == ["a" * 500] * 400


def test_a_restart_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "e"
    first = Events(path, "p")
    first.emit("start", run=1)
    first.close()
    with path.open("a") as file:
        file.write('{"t": 1.0, "kind": "ver')
    assert [event["kind"] for event in read_events(path)] == ["start"]
    Events(path, "p").emit("start", run=2)
    assert [event["run"] for event in read_events(path)] == [1, 2]
    assert path.read_text().count("\n") == 2


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(b'{"kind":"a"}\n\x00\xff\x00\n[1]\n{"no":"kind"}\n{"kind":"b"}\n{"kind":')
    assert [event["kind"] for event in read_events(tmp_path / "e")] == ["a", "b"]
    assert list(read_events(tmp_path / "missing")) == []


def test_a_full_disk_ends_the_writing_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "e").symlink_to("/dev/full")
    heard: list[dict] = []
    events = Events(tmp_path / "e", "p", [heard.append])
    for step in range(3):
        events.emit("x", step=step)
    assert [event["step"] for event in heard] == [0, 1, 2]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    events.close()


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write events"):
        Events(tmp_path / "file" / "e", "p")


def test_without_a_path_only_listeners_hear() -> None:
    heard: list[dict] = []
    Events(None, "p", [heard.append]).emit("x")
    assert heard[0]["kind"] == "x"


def test_timed_adds_up_also_when_the_body_raises() -> None:
    seconds = {"inner": 100.0}
    with timed(seconds, "inner"), timed(seconds, "merge"):
        pass
    assert 100.0 < seconds["inner"] < 101.0
    with pytest.raises(ZeroDivisionError), timed(seconds, "outer"):
        _ = 1 / 0
    assert seconds["outer"] >= 0.0


def test_departures_take_names_and_records() -> None:
    event = {"kind": "view", "left": ["a", {"peer": "b", "reason": "silent"}], "reason": "left"}
    assert departures(event) == [("a", "left"), ("b", "silent")]
    assert departures({"kind": "view"}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (readable_bytes(0), "0 B"),
        (readable_bytes(999), "999 B"),
        (readable_bytes(999_499), "999 kB"),
        (readable_bytes(999_500), "1.00 MB"),
        (readable_bytes(1_934_000), "1.93 MB"),
        (readable_bytes(2.5e18), "2,500 PB"),
        (readable_bytes(None), "–"),
        (readable_count(10_240), "10.2k"),
        (readable_count(7), "7"),
        (readable_duration(0.306), "0.31 s"),
        (readable_duration(44), "44.0 s"),
        (readable_duration(59.96), "1:00"),
        (readable_duration(3723), "1:02:03"),
        (readable_percent(0.0124), "+1.2 %"),
        (readable_percent(-0.004), "−0.4 %"),
        (readable_times(212.4), "212×"),
        (readable_times(3.87), "3.87×"),
        (readable_text("peer-1"), "peer-1"),
        (readable_text("a\n\x1b[31m\u202eb"), "a\\n\\x1b[31m\\u202eb"),
        (readable_text("x" * 32), "x" * 32),
        (readable_text("x" * 33), "x" * 31 + "…"),
    ],
)
def test_numbers_read_as_people_write_them(text: str, expected: str) -> None:
    assert text == expected


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        f"import sys; from pathlib import Path; from diloco.observe.telemetry import *; path = Path({str(path)!r}); "
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
    events.emit("x")
    assert [event["peer"] for event in read_events(path)] == ["b"]
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
        events.emit("version" if step in (0, 7, 8, 11, 14) else "progress", step=step)
    steps = [event["step"] for event in read_events(tmp_path / "e", "progress")]
    assert steps == [0, 1, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 19]


def test_what_another_machine_sent_is_spelled_out_in_full() -> None:
    assert printable("zoë, 10 % – ok") == "zoë, 10 % – ok"
    assert printable("a\n\x1b[31m\u202eb" + "x" * 99) == "a\\n\\x1b[31m\\u202eb" + "x" * 99
