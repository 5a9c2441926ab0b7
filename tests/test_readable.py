"""Numbers read as people expect them, and texts of other machines are safe to print."""

import pytest

from diloco.base.readable import (
    printable,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_percent,
    readable_text,
    readable_times,
)


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


def test_what_another_machine_sent_is_spelled_out_in_full() -> None:
    assert printable("zoë, 10 % – ok") == "zoë, 10 % – ok"
    assert printable("a\n\x1b[31m\u202eb" + "x" * 99) == "a\\n\\x1b[31m\\u202eb" + "x" * 99
