"""The ledger on real files and on disks that refuse and forget."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from diloco.accounts.ledger import (
    LEDGER,
    DamagedLine,
    Ledger,
    LogFile,
    Opening,
    Position,
    Record,
    Totals,
    encode,
    open_ledger,
    read_ledger,
    scan,
)
from diloco.base.errors import ResourceError, StateError

NOTHING = Totals(0, 0, 0, 0)
LINES = [encode(Record(n, "discard", {"reason": "ä" * n, "tokens": {}})) for n in range(4)]
WHOLE = b"".join(LINES)


class Disk:
    """A file in memory that may run full, and forgets what was not synced."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.durable, self.room_bytes = data, data, 10**9

    def read(self) -> bytes:
        return self.data

    def append(self, data: bytes) -> None:
        room = self.room_bytes - len(self.data)
        self.data += data[: max(room, 0)]
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self) -> None:
        self.durable = self.data

    def truncate(self, size: int) -> None:
        self.data = self.data[:size]

    def close(self) -> None: ...

    def lose_power(self, kept_bytes: int = 0) -> Disk:
        """The disk after a loss of power: all that was synced, and perhaps some of the rest."""
        return Disk(self.data[: max(len(self.durable), kept_bytes)])


class DiskThatDoesNotSync(Disk):
    """A file in memory on a disk that takes all bytes, and cannot keep them."""

    def sync(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def note(ledger: Ledger, reason: str) -> None:
    ledger.discarded(1, 0, reason, NOTHING)


def kinds(data: bytes) -> list[str]:
    return [record.kind for record in scan(data).records]


def reasons(data: bytes) -> list[str]:
    return [record.fields["reason"] for record in scan(data).records if record.kind == "discard"]


# ---------------------------------------------------------------- torn and damaged


@pytest.mark.parametrize("tail", [b"", b"\0" * 700, b"\0\n\n\n", b"junk\nmore junk\n", LINES[0][:-1], b"\xff" * 20])
def test_cut_anywhere_the_whole_records_before_it_are_read(tail: bytes) -> None:
    """Every byte offset, with whatever a file system may leave behind it."""
    ends = [sum(map(len, LINES[:count])) for count in range(5)]
    for cut in range(len(WHOLE) + 1):
        found = scan(WHOLE[:cut] + tail)
        whole = sum(end <= cut for end in ends[1:])
        assert len(found.records) == whole
        assert found.whole_bytes == ends[whole]
        assert found.torn_bytes == cut + len(tail) - ends[whole]


@given(st.binary(max_size=300))
def test_any_tail_is_torn_or_damage_and_never_a_record(tail: bytes) -> None:
    assert scan(WHOLE + tail).records == scan(WHOLE).records


@given(st.integers(0, len(WHOLE) - len(LINES[-1]) - 1), st.integers(1, 255))
def test_a_changed_byte_before_the_last_line_is_named(at: int, flip: int) -> None:
    changed = bytearray(WHOLE)
    changed[at] ^= flip
    line = WHOLE[:at].count(b"\n") + 1
    with pytest.raises(DamagedLine) as caught:
        scan(bytes(changed))
    assert caught.value.line == line


def test_a_line_taken_out_or_doubled_is_named() -> None:
    with pytest.raises(DamagedLine, match="line 2 holds record 2, record 1 was expected"):
        scan(LINES[0] + LINES[2] + LINES[3])
    with pytest.raises(DamagedLine, match="line 3"):
        scan(LINES[0] + LINES[1] + LINES[1])


def test_a_torn_tail_is_cut_off_at_open_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    path.write_bytes(WHOLE + LINES[0][:11])
    notes: list[str] = []
    ledger = open_ledger(tmp_path, notes.append)
    assert path.read_bytes() == WHOLE
    note(ledger, "after")
    ledger.close()
    assert "11 bytes" in notes[0]
    assert reasons(path.read_bytes())[-1] == "after"
    assert scan(path.read_bytes()).records[-1].number == 4


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b"9" * 5000, b"{}", b'{"n":"1"}'])
def test_a_line_that_is_no_record_is_damage_though_its_checksum_is_right(text: bytes) -> None:
    forged = xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"
    with pytest.raises(DamagedLine, match="line 2"):
        scan(LINES[0] + forged + LINES[1])


def test_damage_in_the_middle_is_an_error_for_people(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    path.write_bytes(WHOLE.replace(b'"n":1', b'"n":7'))
    for read in (lambda: read_ledger(path), lambda: open_ledger(tmp_path, print)):
        with pytest.raises(StateError, match="line 2 was changed"):
            read()
    assert path.read_bytes().count(b'"n":7') == 1  # nothing was cut


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="ledger"):
        open_ledger(tmp_path / "file", print)


def test_a_ledger_that_is_a_link_leaves_alone_what_it_leads_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("no record\n")
    (tmp_path / LEDGER).symlink_to(mine)
    with pytest.raises(StateError, match="is a symbolic link"):
        open_ledger(tmp_path, print)
    assert mine.read_text() == "no record\n"


# ---------------------------------------------------------------- disks


def test_a_full_disk_is_warned_of_once_and_leaves_a_gap() -> None:
    disk = Disk()
    notes: list[str] = []
    ledger = Ledger(disk, notes.append)
    note(ledger, "first")
    disk.room_bytes = len(disk.data) + 20  # half a record
    for lost in "abc":
        note(ledger, lost)
    assert len(notes) == 1
    assert "No space left" in notes[0]
    disk.room_bytes = 10**9
    note(ledger, "last")
    assert kinds(disk.data) == ["discard", "gap", "discard"]
    assert scan(disk.data).records[1].fields["dropped"] == 3
    assert reasons(disk.data) == ["first", "last"]
    disk.room_bytes = 0
    note(ledger, "again")
    assert len(notes) == 2


def begin(ledger: Ledger) -> None:
    ledger.opened(Opening("p0", 1, 1, "run", "", "", True, False), {}, Position(0, "", ""), NOTHING)


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["new", "continued"])
def test_a_life_that_a_full_disk_does_not_record_does_not_begin(before: bytes) -> None:
    """Its tokens would belong to the life before, or to none. Nothing of the record stays behind."""
    disk = Disk(before)
    ledger = Ledger(disk, print)
    disk.room_bytes = len(before) + 20  # half a record
    with pytest.raises(ResourceError, match="No space left"):
        begin(ledger)
    assert disk.data == before
    disk.room_bytes = 10**9
    begin(Ledger(disk, print))
    assert kinds(disk.data)[-1] == "open"


def test_a_first_record_that_is_written_and_not_synced_does_not_stay() -> None:
    """Whoever reads the file would take it for a life, which never began."""
    disk = DiskThatDoesNotSync(WHOLE)
    with pytest.raises(ResourceError, match="Input/output error"):
        begin(Ledger(disk, print))
    assert disk.data == WHOLE


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["write", "full", "room", "power"]), max_size=25), st.integers(0, 400))
def test_what_was_written_is_there_whatever_the_disk_does(steps: list[str], kept_bytes: int) -> None:
    """A record whose `write` returned without a warning survives any loss of power; a gap counts all others."""
    disk = Disk()
    notes: list[str] = []
    written: list[str] = []
    ledger = Ledger(disk, notes.append)
    for number, step in enumerate(steps):
        if step == "write":
            before = disk.durable
            note(ledger, str(number))
            if disk.durable != before:
                written.append(str(number))
        elif step == "power":
            disk = disk.lose_power(len(disk.durable) + kept_bytes)
            ledger = Ledger(disk, notes.append)
        else:
            disk.room_bytes = 10**9 if step == "room" else len(disk.data) + 30
        assert reasons(disk.durable) == written


ON_A_REAL_DISK = """
import resource, signal, sys
from pathlib import Path
from diloco.base import failpoints
from diloco.accounts.ledger import LEDGER, Totals, open_ledger

folder = Path(sys.argv[1])
ledger = open_ledger(folder, lambda text: print("warned", flush=True))
for reason in sys.argv[2:]:
    if reason == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / LEDGER).stat().st_size + 20, resource.RLIM_INFINITY))
    elif reason == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif reason == "kill":
        failpoints.arm("before-ledger-sync=kill")
    else:
        ledger.discarded(1, 0, reason, Totals(0, 0, 0, 0))
"""


def on_a_real_disk(folder: Path, *steps: str) -> str:
    command = [sys.executable, "-c", ON_A_REAL_DISK, str(folder), *steps]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def test_a_real_file_that_may_not_grow(tmp_path: Path) -> None:
    """The kernel takes 20 bytes of a record and refuses the rest."""
    assert on_a_real_disk(tmp_path, "one", "full", "two", "three", "room", "four") == "warned\n"
    data = (tmp_path / LEDGER).read_bytes()
    assert reasons(data) == ["one", "four"]
    assert kinds(data) == ["discard", "gap", "discard"]


def test_killed_while_it_writes(tmp_path: Path) -> None:
    on_a_real_disk(tmp_path, "one", "kill", "two", "three")
    on_a_real_disk(tmp_path, "four")
    assert reasons((tmp_path / LEDGER).read_bytes()) == ["one", "two", "four"]  # a page cache survives a killed process


def test_real_disk_and_twin_write_the_same_bytes(tmp_path: Path) -> None:
    disk = Disk()
    for file in (disk, None):
        ledger = Ledger(disk, print) if file else open_ledger(tmp_path, print)
        note(ledger, "one")
        note(ledger, "two")
    assert (tmp_path / LEDGER).read_bytes() == disk.data


def test_the_seam_is_what_the_twin_has() -> None:
    file: LogFile = Disk()
    assert file.read() == b""


# ---------------------------------------------------------------- numbers


def test_tokens_add_up_or_do_not() -> None:
    assert Totals(10, 4, 1, 5).balanced
    assert not Totals(10, 4, 1, 4).balanced
    assert not Totals(10, 14, 0, -4).balanced  # credited with what it did not train


def test_the_simulator_can_load_it_without_torch() -> None:
    code = "import diloco.accounts.ledger, diloco.accounts.books, sys"
    code += "; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
