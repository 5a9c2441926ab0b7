"""The live screen and its plain lines, and the table at the end, as a person sees them."""

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from diloco.base.types import Progress
from diloco.exchange.service import status_json
from diloco.observe.events import Stamped, from_json
from diloco.observe.screen import STRAGGLER_S, Screen, status_text, summary_table
from diloco.protocol import messages as m
from diloco.transport.address import split_ticket
from tests.helpers_events import PEERS, peer_events
from tests.test_machine import B, standing

TOTAL = 1_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def version(peer: str, number: int, **fields: Any) -> dict[str, Any]:
    common = {"kind": "version", "peer": peer, "version": number, "tokens": 40_960 * number, "own": True}
    measured = {
        "loss": 2.0,
        "tokens_per_s": 5000.0,
        "wire_bytes_sent": 1_900_000,
        "seconds": {"inner": 2.0, "merge": 0.31},
    }
    return common | {"members": ["a", "b"], "counted": ["a", "b"]} | measured | fields


def stamped(event: dict[str, Any]) -> Stamped:
    read = from_json({"t": 0.0, "time": 0.0, **event})
    assert read is not None, event
    return read


def plain(events: list[dict[str, Any]], clock: Clock | None = None) -> list[str]:
    out = io.StringIO()
    with Screen("demo", ["a", "b"], TOTAL, live=False, out=out, clock=clock or Clock()) as screen:
        for event in events:
            screen.feed(stamped(event))
    return out.getvalue().splitlines()


def picture(events: list[dict[str, Any]], peers: list[str], width: int = 110) -> str:
    screen = Screen("demo", peers, TOTAL, live=True, out=io.StringIO(), clock=Clock())
    for event in events:
        screen.feed(stamped(event))
    console = Console(file=io.StringIO(), width=width)
    console.print(screen.render())
    return console.file.getvalue()


def test_a_version_is_one_line_over_all_its_peers() -> None:
    lines = plain([version("a", 10, loss=2.0), version("b", 10, loss=3.0, tokens_per_s=5200.0)])
    assert lines == [
        "demo: 2 peers, 1,000,000 tokens",
        "v10   41%   409,600 tok  loss 2.500  2 peers  10.2k tok/s  1.90 MB sent/peer  0.31 s sync",
    ]


def test_a_version_waits_for_its_peers_but_not_for_ever() -> None:
    clock, out = Clock(), io.StringIO()
    screen = Screen("demo", ["a", "b"], TOTAL, live=False, out=out, clock=clock)
    screen.feed(stamped(version("a", 1)))
    screen.tick()
    assert out.getvalue() == ""
    clock.now = STRAGGLER_S + 0.1
    screen.tick()
    assert out.getvalue().count("v1 ") == 1
    screen.feed(stamped(version("b", 1)))  # too late to be in the line, and no second one
    screen.feed(stamped(version("a", 2)))
    screen.feed(stamped(version("a", 3)))  # the next version closes the one before
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["v1", "v2"]


def test_what_all_peers_tell_is_said_once_and_after_its_version() -> None:
    left = [{"peer": "c", "reason": "no word for 5.0 s"}]
    lines = plain(
        [
            version("a", 4, counted=["a", "b"], members=["a", "b", "c"]),
            {"kind": "view", "peer": "a", "version": 4, "joined": ["d", "e"], "left": left},
            {"kind": "view", "peer": "b", "version": 4, "joined": ["d", "e"], "left": left},
            {"kind": "skip", "peer": "b", "version": 4, "reason": "no quorum", "t": 1.0},
            {"kind": "eval", "peer": "a", "version": 4, "tokens": 1, "val_loss": 2.4123},
            version("b", 4),
        ]
    )
    assert lines[1].startswith("v4 ")
    assert "2 of 3 peers" in lines[1]
    assert [line.strip() for line in lines[2:]] == [
        "d, e joined at v4",
        "c was lost at v4: no word for 5.0 s",
        "b skipped v4: no quorum",
        "v4 held-out loss 2.412",
    ]


def test_members_alone_tell_who_came_and_went() -> None:
    lines = plain(
        [
            version("a", 1, counted=["a"]),
            version("a", 2, counted=["a"], members=["a", "c"]),
            version("b", 1, counted=["a"]),  # late, and no reason to let b in again
            {"kind": "warning", "peer": "a", "text": "no checkpoint: disk full"},
        ]
    )
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "c joined at v2",
        "b is gone at v2",
        "a: no checkpoint: disk full",
    ]


def test_missing_numbers_are_dashes() -> None:
    (line,) = plain([version("a", 1, loss=None, wire_bytes_sent=None, seconds=None, counted=["a"])])[1:]
    assert "loss –" in line
    assert "– sync" in line


def test_the_live_picture_of_a_whole_run() -> None:
    events = peer_events(24)
    text = picture([event for event in events if event.get("version", 0) <= 16], list(PEERS))
    header, _, _, *rows = text.splitlines()
    assert "is gone" not in text
    assert re.match(r"demo   1,126,400 of 1,000,000 tokens   100%   held-out 2\.\d+ at v15", header)
    assert [row.split()[:2] for row in rows[:4]] == [
        ["tokyo", "training"],
        ["lima", "lost"],
        ["cairo", "training"],
        ["oslo", "training"],
    ]
    assert "lima was lost at v15: no word for 5.0 s" in text
    assert "v14" in rows[1]
    assert "v16" in rows[0]
    assert all(len(line) <= 110 for line in text.splitlines())


def test_hardware_has_columns_where_it_is_told() -> None:
    before = picture([version("a", 1)], ["a", "b"])
    assert "MFU" not in before
    assert "memory" not in before
    ranks = [{"device_peak_bytes": 0, "host_peak_bytes": 10**9}, {"device_peak_bytes": 3 * 10**9, "host_peak_bytes": 1}]
    told = {"kind": "usage", "peer": "a", "version": 1, "mfu": 0.42, "memory": ranks}
    told |= {"inner_s": 1.0, "wall_s": 1.0, "inner_tokens": 1, "phases": {}}
    text = picture([version("a", 1), told], ["a", "b"])
    assert re.search(r"tok/s +MFU +memory +sent", text)
    assert re.search(r"5\.00k +42 % +3\.00 GB +1\.90 MB", text)
    assert "MFU" not in picture([version("a", 1), told | {"mfu": None}], ["a", "b"])


def test_the_time_left_follows_the_pace() -> None:
    clock = Clock()
    screen = Screen("demo", ["a"], 409_600, live=True, out=io.StringIO(), clock=clock)
    for number in (1, 2, 3, 4):
        clock.now = 30.0 * number
        screen.feed(stamped(version("a", number)))
    clock.now += 10.0
    console = Console(file=io.StringIO(), width=110)
    console.print(screen.render())
    assert "40%   2:50 left" in console.file.getvalue()  # six versions of 30 s less the 10 s gone by


def test_progress_moves_a_row_between_versions() -> None:
    text = picture(
        [{"kind": "start", "peer": "a"}, {"kind": "progress", "peer": "a", "tokens": 77, "loss": 3.25}], ["a"]
    )
    assert "training" in text
    assert "3.250" in text


def test_names_and_reasons_from_others_stay_text() -> None:
    peer = "[red]x[/red]\x1b[31m"
    events = [version(peer, 1), {"kind": "skip", "peer": peer, "version": 1, "reason": "\x1b[2J[b]y"}]
    text = picture(events, [peer])
    assert "\x1b" not in text
    assert "[red]x[/red]" in text
    assert "\x1b" not in "\n".join(plain(events))


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_obeyed(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    clock, out = Clock(), io.StringIO()
    with Screen("demo", ["a", "b"], TOTAL, live=True, out=out, clock=clock) as screen:
        screen.feed(stamped(version("a", 1)))
        clock.now = 1.0
        screen.tick()
    colored = re.search(r"\x1b\[[0-9;]*\b[34]\d", out.getvalue())
    assert (colored is None) == no_color


SUMMARY = {
    "peers": 4,
    "versions": 24,
    "digest": "3fa2b1c9d0e1f2a3",
    "digests_agree": True,
    "val_loss": 2.312,
    "tokens": 450_560,
    "wall_s": 44.0,
    "wire_bytes_sent_per_peer": 1_900_000,
    "h": 20,
    "baseline": {"name": "ddp", "val_loss": 2.285, "wall_s": 90.0, "wire_bytes_sent_per_peer": 402_800_000},
    "comparisons": {"alone": {"val_loss": 2.5, "wall_s": 40.0, "wire_bytes_sent_per_peer": 0, "tokens": 450_560}},
}


def test_the_table_at_the_end() -> None:
    assert summary_table(SUMMARY).splitlines() == [
        "                 held-out loss   against DDP   wall time   sent per peer   fewer bytes    tokens",
        "DiLoCo                   2.312        +1.2 %      44.0 s         1.90 MB          212×   450,560",
        "DDP                      2.285             –        1:30          403 MB             –   450,560",
        "One peer alone           2.500        +9.4 %      40.0 s             0 B             –   450,560",
        "",
        "All peers hold the same state, bit for bit, after 24 versions (digest 3fa2b1c9d0e1).",
        "Against DDP, DiLoCo sent 212 times fewer bytes per peer (H = 20 inner steps between syncs), "
        "and its held-out loss is 1.2 % higher.",
    ]


def test_the_table_without_a_baseline_and_with_a_defect() -> None:
    bare = {key: value for key, value in SUMMARY.items() if key not in ("baseline", "comparisons")}
    table = summary_table(bare | {"digests_agree": False, "val_loss": None, "baseline": None})
    assert "against" not in table
    assert "DiLoCo" in table
    assert "DIFFER" in table


def test_what_a_member_answers_is_a_table() -> None:
    peer = {"address": "127.0.0.1:4000", "alive": True, "in_view": True, "version": 12, "heard_s_ago": 0.4}
    peer |= {"phase": "training", "inner_step": 240, "tokens": 1, "tokens_per_s": 2560.0, "loss": 2.31}
    peer |= {"wire_bytes_sent": 13_800_000, "first_counted_version": 1}
    joiner = {
        "first_counted_version": -1,
        "peer": "\x1b[31m",
        "in_view": False,
        "version": -1,
        "loss": 0.0,
        "wire_bytes_sent": 0,
        "tokens_per_s": 0.0,
    }
    status = {"run": "demo", "version": 12, "tokens": 450_560, "total_tokens": 1_000_000, "answering": "oslo"}
    digest = "c0ffee00" * 8
    status |= {"state_digest": "3fa2b1c9d0e1f2a3ff", "contract_digest": digest, "reason": "waiting for 2"}
    status |= {"peers": [peer | {"peer": "oslo"}, peer | joiner, peer | {"peer": "lima", "alive": False}]}
    lines = status_text(status).splitlines()
    assert lines == [
        "demo: version 12, 450,560 of 1,000,000 tokens (45%), says oslo",
        "state 3fa2b1c9d0e1f2a3  contract c0ffee00c0ffee00",
        "join with: diloco peer --join 127.0.0.1:4000/" + digest,
        "waiting for 2",
        "",
        "peer                     version   counted since    loss   tok/s      sent     heard          address",
        "oslo       training           12              v1   2.310   2.56k   13.8 MB   0 s ago   127.0.0.1:4000",
        "\\x1b[31m   at the door         0         not yet       –       –       0 B   0 s ago   127.0.0.1:4000",
        "lima       silent             12              v1   2.310   2.56k   13.8 MB   0 s ago   127.0.0.1:4000",
    ]
    assert split_ticket(lines[2].rpartition(" ")[2]) == ("127.0.0.1:4000", digest)


def test_who_answers_says_what_its_disk_takes() -> None:
    """It has no disk for votes, another one's is full."""
    machine = standing(7)
    machine.hear(B, m.Heartbeat(7, 7, False, Progress(), abstains=True), 0.2)
    text = status_text(json.loads(status_json(machine, None, 0, (), 0, 0.3, durable=False)))
    assert "its votes are on no disk: after a restart it votes no more until it was let in anew" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert " abstains " in rows["b"]
    assert " yes " in rows["a"]
    machine.handle(m.Saved(1, refused=True), 0.4)
    text = status_text(json.loads(status_json(machine, None, 0, (), 0, 0.5)))
    assert "its disk takes no votes, so that it abstains: make room there, and it votes again" in text
    assert "on no disk" not in text
