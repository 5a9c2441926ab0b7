"""A run's folder adds up, and the report is one page that opens offline, whole, with whatever there is."""

import json
import math
import re
import subprocess
import sys
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from diloco.base.errors import ResourceError, UsageError
from diloco.observe import report
from diloco.observe.event_log import read_events
from diloco.observe.events import STEPS, TrainingProgress
from diloco.observe.report import Table, write_plot, write_report
from diloco.observe.run_folder import MAX_FLIGHTS, Outlier, PeerTime, outcomes, read_run
from diloco.observe.run_state import Notice, Stay
from tests.helpers_events import (
    DYING,
    LATE,
    LEAVING,
    PEERS,
    ROUND_S,
    STEADY,
    peer_events,
    write_events,
    write_run,
)

pytestmark = pytest.mark.handmade_events
HOSTILE = ("<script>alert(1)</script>", "$\\frac{a", "\u202eevil\x1b[31m", "_x\" onload='y'")


def version(peer: str, number: int, at_s: float, **fields: Any) -> dict[str, Any]:
    stamp = {"t": at_s, "time": 100.0 + at_s, "kind": "version", "peer": peer, "version": number}
    return stamp | {"tokens": 1000 * number, "members": ["a", "b"], "counted": ["a", "b"], "own": True} | fields


def page_of(directory: Path) -> ElementTree.Element:
    """The page as a tree; raises where it is not well-formed."""
    return ElementTree.fromstring(write_report(directory).read_text().removeprefix("<!doctype html>"))


def write_table(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({"table": {"title": "An ablation", "header": ["row", "loss"], "rows": []} | fields}))
    return path


def text_of(page: ElementTree.Element) -> str:
    return re.sub(r"\s+", " ", " ".join(page.itertext()))


# ---------------------------------------------------------------- tables of a bench


def test_a_table_stands_in_the_report_as_text(tmp_path: Path) -> None:
    rows = [["`async`", "2.19"], [HOSTILE[0], HOSTILE[3]]]
    table = Table.read(write_table(tmp_path / "async.json", rows=rows))
    write_events(tmp_path / "events.jsonl", [version("a", 0, 0.0), version("a", 1, 1.0, loss=2.0)])
    page = text_of(ElementTree.fromstring(write_report(tmp_path, [table]).read_text().removeprefix("<!doctype html>")))
    assert "An ablation" in page
    assert f"async 2.19 {HOSTILE[0]}" in page


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"title": "x"}}', '{"table": 3}'])
def test_a_file_without_a_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no table"):
        Table.read(path)


def test_a_crooked_or_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not as long as the header"):
        Table.read(write_table(tmp_path / "async.json", rows=[["one"]]))
    with pytest.raises(UsageError, match="cannot read"):
        Table.read(tmp_path / "nothing.json")


# ---------------------------------------------------------------- hardware


def usage(at_s: float, **fields: Any) -> dict[str, Any]:
    memory = [
        {"host_peak_bytes": 10**9, "device_peak_bytes": 0},
        {"host_peak_bytes": 2 * 10**9, "device_peak_bytes": 0},
    ]
    told = {"inner_tokens": 1000, "inner_s": 2.0, "wall_s": 4.0, "flops": 1e12, "memory": memory}
    phases = {"forward": 0.5, "backward": 1.0}
    stamp = {"t": at_s, "time": 100.0 + at_s, "kind": "usage", "peer": "a", "version": round(at_s)}
    return stamp | told | {"phases": phases} | fields


def test_hardware_is_told_since_the_last_start(tmp_path: Path) -> None:
    start = {"t": 0.0, "time": 100.0, "kind": "start", "peer": "a", "run": "x", "device": "NVIDIA <B>", "ranks": 2}
    island = {"mesh": {"tp": 2}, "peak_flops_per_rank": 1e12}
    again = start | island | {"time": 102.5}
    earlier = usage(1.0, inner_tokens=10**9)  # before it was started again
    events = [start | island, version("a", 1, 1.0), earlier, again, usage(3.0), usage(4.0, inner_s=3.0)]
    write_events(tmp_path / "events.jsonl", events)
    (one,) = read_run(tmp_path).hardware
    assert (one.tokens_per_s, one.flops_per_s) == (2000 / 5, 2e12 / 5)
    assert (one.mfu, one.mfu_wall) == (pytest.approx(0.2), pytest.approx(0.125))
    assert one.phases == {"forward": 1.0, "backward": 2.0, "other": 2.0}
    page = text_of(page_of(tmp_path))
    assert "NVIDIA <B> 2: tp 2 400 400 GFLOP/s 20 % 12 % 2.00 GB – 20.0 % 40.0 % 40.0 %" in page
    assert "a 0 1.00 GB – 1 2.00 GB –" in page


def test_a_run_that_tells_nothing_of_its_hardware_has_no_such_section(tmp_path: Path) -> None:
    write_events(tmp_path / "events.jsonl", [version("a", 0, 0.0), version("a", 1, 1.0, loss=2.0)])
    assert "Hardware" not in text_of(page_of(tmp_path))


# ---------------------------------------------------------------- the folder


def test_versions_are_means_over_peers(tmp_path: Path) -> None:
    a = version("a", 1, 1.0, loss=2.0, seconds={"inner": 1.0, "merge": 0.5}, tokens_per_s=100.0, state_digest="x")
    b = version("b", 1, 1.5, loss=3.0, seconds={"inner": 3.0}, tokens_per_s=50.0, state_digest="x")
    write_events(tmp_path / "events.jsonl", [version("a", 0, 0.0), a, b])
    _, row = read_run(tmp_path).versions
    assert (row.loss, row.tokens_per_s, row.at_s, row.reports) == (2.5, 150.0, 1.0, 2)
    assert row.seconds["inner"] == 2.0
    assert row.seconds["merge"] == 0.25
    assert row.digests == {"x"}


@pytest.mark.slow(queued=False)
def test_who_computed_and_who_waited(tmp_path: Path) -> None:
    a1 = version("a", 1, 10.0, seconds={"inner": 2.0, "exchange": 6.0, "outer": 0.5, "merge": 0.5}, inner_tokens=300)
    b1 = version("b", 1, 10.0, seconds={"inner": 8.0, "exchange": 1.0}, inner_tokens=100)
    b2 = version("b", 2, 20.0, seconds={"inner": 9.0, "exchange": 1.0}, inner_tokens=0, own=False)
    write_events(tmp_path / "events.jsonl", [version("a", 0, 0.0), a1, b1, b2])
    run = read_run(tmp_path)
    assert run.times == [PeerTime("a", 1, 300, 2.0, 6.0, 1.0), PeerTime("b", 1, 100, 17.0, 2.0, 0.0)]
    assert run.waits == [Stay("a", 3.0, 9.0), Stay("b", 9.0, 10.0), Stay("b", 19.0, 20.0)]
    text = text_of(page_of(tmp_path))
    assert "a 1 300 22.2 % 66.7 % 11.1 %" in text
    assert "b 1 100 89.5 % 10.5 % 0.0 %" in text


def test_outliers_by_peer(tmp_path: Path) -> None:
    a1, a2 = version("a", 1, 10.0, outliers={"c": 2, "b": 1}), version("a", 2, 20.0, outliers={"c": 3})
    write_events(tmp_path / "events.jsonl", [version("a", 0, 0.0), a1, version("b", 1, 10.0, outliers={"c": 4}), a2])
    assert read_run(tmp_path).outliers == [Outlier("c", 2, 9), Outlier("b", 1, 1)]
    assert "peer versions parts c 2 9 b 1 1" in text_of(page_of(tmp_path))


def test_when_a_contribution_was_on_its_way(tmp_path: Path) -> None:
    seconds = {"inner": 4.0}
    flown = version("a", 1, 10.0, seconds=seconds, flight_s=3.0)
    told = [version("a", 0, 0.0), flown, version("b", 1, 11.0, seconds=seconds, flight_s=None)]
    write_events(tmp_path / "events.jsonl", told)
    run = read_run(tmp_path)
    assert run.flights == [Stay("a", 7.0, 10.0)]
    assert "sent, and counted at the dot" in text_of(page_of(tmp_path))
    many = [flown | {"version": number, "t": float(number)} for number in range(MAX_FLIGHTS + 1)]
    write_events(tmp_path / "events.jsonl", many)
    assert read_run(tmp_path).flights == []


def test_bytes_are_those_of_a_peer_counted_all_along(tmp_path: Path) -> None:
    events = [
        version("a", 1, 1.0, wire_bytes_sent=100),
        version("b", 1, 1.0, wire_bytes_sent=300),
        version("a", 2, 2.0, wire_bytes_sent=200),
        version("c", 2, 2.0, wire_bytes_sent=7, own=False),  # has just joined
        version("a", 3, 3.0, wire_bytes_sent=50),  # has restarted: its counter began again
        version("c", 3, 3.0, wire_bytes_sent=157),
    ]
    write_events(tmp_path / "events.jsonl", events)
    assert [row.sent_bytes for row in read_run(tmp_path).versions] == [200.0, 300.0, 400.0]


def test_digests_that_differ_are_found(tmp_path: Path) -> None:
    same = [version("a", 1, 1.0, state_digest="x"), version("b", 1, 1.0, state_digest="x")]
    write_events(tmp_path / "events.jsonl", same)
    assert read_run(tmp_path).summary["digests_agree"] is True
    apart = [version("a", 2, 2.0, state_digest="x"), version("b", 2, 2.0, state_digest="y")]
    write_events(tmp_path / "events.jsonl", same + apart)
    assert read_run(tmp_path).summary["digests_agree"] is False
    assert "differ" in text_of(page_of(tmp_path))
    write_events(tmp_path / "events.jsonl", same[:1])
    assert read_run(tmp_path).summary["digests_agree"] is None


def test_stays_and_marks_tell_who_came_and_went(tmp_path: Path) -> None:
    write_run(tmp_path, versions=20)
    run = read_run(tmp_path)
    stays = {stay.peer: (stay.start_s / ROUND_S, stay.stop_s / ROUND_S) for stay in run.stays}
    assert len(run.stays) == 4
    assert stays[DYING] == pytest.approx((0, 12), abs=0.1)
    assert stays[LEAVING] == pytest.approx((0, 16), abs=0.1)
    assert stays[LATE] == pytest.approx((6, 20), abs=0.3)
    assert stays[STEADY] == pytest.approx((0, 20), abs=0.3)
    assert [(notice.peer, notice.kind) for notice in run.notices] == [
        (LATE, "joined"),
        (LATE, "skipped"),
        (DYING, "died"),
        (LEAVING, "left"),
    ]
    assert run.versions[11].notes == ["lima died: no word for 5.0 s"]


def test_a_peer_may_come_back(tmp_path: Path) -> None:
    view = {"kind": "view", "peer": "a", "t": 0.0}
    events = [
        view | {"time": 100.0, "version": 0, "joined": ["a", "b"]},
        view | {"time": 110.0, "version": 1, "left": [{"peer": "b", "reason": "silent"}]},
        view | {"time": 120.0, "version": 2, "joined": ["b"]},
        version("a", 3, 30.0),
    ]
    write_events(tmp_path / "events.jsonl", events)
    run = read_run(tmp_path)
    assert run.stays == [Stay("a", 0.0, 30.0), Stay("b", 0.0, 10.0), Stay("b", 20.0, 30.0)]
    assert run.notices == [Notice("b", 10.0, "died", 1, "silent"), Notice("b", 20.0, "joined", 2)]


def test_members_alone_tell_who_came_and_went(tmp_path: Path) -> None:
    end = {"t": 25.0, "kind": "end", "version": 2, "tokens": 2000, "val_loss": None, "reason": "left"}
    events = [
        version("a", 1, 10.0, members=["a", "b", "c"]),
        version("b", 1, 10.0, members=["a", "b", "c"]),
        version("c", 1, 10.0, members=["a", "b", "c"]),
        version("a", 2, 20.0, members=["a", "d"]),
        version("b", 1, 21.0, members=["a", "b", "c"]),  # says late what is long over
        end | {"peer": "c", "time": 125.0},
        version("a", 3, 30.0, members=["a"]),
    ]
    write_events(tmp_path / "events.jsonl", events)
    run = read_run(tmp_path)
    assert run.stays == [Stay("a", 0.0, 20.0), Stay("b", 0.0, 10.0), Stay("c", 0.0, 10.0), Stay("d", 10.0, 20.0)]
    assert [str(notice) for notice in run.notices] == ["d joined", "b died", "c left", "d left"]


def test_a_simulation_inside_is_a_baseline(tmp_path: Path) -> None:
    write_run(tmp_path, versions=6)
    for folder in (tmp_path / "average" / "p0", tmp_path / "average"):
        write_events(folder / "events.jsonl", [event for event in peer_events(4) if event["peer"] == STEADY])
    run = read_run(tmp_path)
    assert [curve.name for curve in run.curves] == ["DiLoCo", "DDP", "Plain averaging", "One peer alone"]
    assert [curve.key for curve in run.curves] == ["diloco", "ddp", "average", "alone"]
    assert len(run.curves[2].train) == 4
    assert len(run.versions) == 6


def test_the_time_between_a_crash_and_the_resume_is_cut_out(tmp_path: Path) -> None:
    start = {"kind": "start", "t": 0.0, "run": "demo"}
    events = [
        start | {"peer": "a", "time": 95.0},
        start | {"peer": "b", "time": 96.0},
        version("a", 1, 10.0, loss=5.0),
        version("b", 1, 11.0),
        version("a", 2, 20.0, loss=4.0),  # never checkpointed: done again below
        start | {"peer": "b", "time": 1000.0, "kind": "listening", "address": "b:1", "ticket": "b:1/0"},
        start | {"peer": "a", "time": 1001.0},
        version("a", 2, 910.0, loss=4.5) | {"t": 9.0},
        version("b", 2, 911.0) | {"t": 11.0},
    ]
    write_events(tmp_path / "events.jsonl", events)
    run = read_run(tmp_path)
    assert [(row.version, row.at_s, row.loss) for row in run.versions] == [(1, 0.0, 5.0), (2, 20.0, 4.5)]
    assert run.resumed_s == [10.0]
    assert "resumed" in text_of(page_of(tmp_path))


def test_the_run_begins_when_peers_are_in_the_view(tmp_path: Path) -> None:
    early = {"peer": "a", "kind": "reason", "t": 0.0, "time": 90.0, "text": "1 of 2 peers are here"}
    warning = {"peer": "a", "kind": "warning", "t": 5.0, "time": 105.0, "text": "no checkpoint: disk full"}
    write_events(tmp_path / "events.jsonl", [early, version("a", 1, 2.0), warning, version("a", 2, 6.0)])
    run = read_run(tmp_path)
    assert [row.at_s for row in run.versions] == [0.0, 4.0]
    assert run.versions[0].notes == ["a warned: no checkpoint: disk full"]


def test_a_baseline_is_read_at_its_own_steps(tmp_path: Path) -> None:
    write_events(tmp_path / "a" / "events.jsonl", [version("a", 1, 1.0)])
    step = {"kind": "step", "peer": "ddp", "time": 0.0, "t": 0.0}
    steps = [step | {"tokens": 10 * n, "loss": 5.0 - n, "wall": 0.5 * n, "wire_bytes_sent": 7 * n} for n in (1, 2, 3)]
    evaluation = {"kind": "eval", "peer": "ddp", "time": 0.0, "t": 0.0, "tokens": 20, "val_loss": 3.5}
    write_events(tmp_path / "ddp" / "events.jsonl", [*steps, evaluation])
    run = read_run(tmp_path)
    assert [curve.name for curve in run.curves] == ["DiLoCo", "DDP"]
    assert [(p.loss, p.tokens, p.wall_s, p.sent_bytes) for p in run.curves[1].train[:2]] == [
        (4, 10, 0.5, 7),
        (3, 20, 1, 14),
    ]
    assert [(p.loss, p.tokens, p.wall_s, p.sent_bytes) for p in run.curves[1].held_out] == [(3.5, 20, 1.0, 14)]
    assert run.summary["baseline"]["wire_bytes_sent_per_peer"] == 21
    assert run.stays == [Stay("a", 0.0, 0.0), Stay("b", 0.0, 0.0)]


def test_outcomes_stand_beside_the_baseline() -> None:
    baseline = {"name": "ddp", "val_loss": 2.0, "wall_s": 9.0, "wire_bytes_sent_per_peer": 800}
    other = {"val_loss": 3.0, "wall_s": 5.0, "wire_bytes_sent_per_peer": 0, "tokens": 60}
    ours = {"val_loss": 2.1, "wall_s": 4.0, "wire_bytes_sent_per_peer": 4, "tokens": 50}
    rows = outcomes(ours | {"baseline": baseline, "comparisons": {"alone": other, "ddp": {"tokens": 51}}})
    assert [(row.name, row.fewer, row.tokens) for row in rows] == [
        ("DiLoCo", 200.0, 50),
        ("DDP", None, 51),
        ("One peer alone", None, 60),
    ]
    assert [row.worse for row in rows] == [pytest.approx(0.05), None, pytest.approx(0.5)]


# ---------------------------------------------------------------- the page


def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = page_of(tmp_path)
    text = text_of(page)
    for peer in PEERS:
        assert f" {peer} " in text
    assert "+1.4 % 2.114 beside 2.084" in text
    assert "90.1×" in text
    assert "One peer alone" in text
    assert '"demo"' in text  # the contract
    assert len(page.findall(".//svg")) == 7  # three panels; the view and the steps, wide and narrow
    raw = (tmp_path / "report.html").read_text()
    assert re.findall(r"https?:|//[a-z]|@import|\bsrc=|url\((?!#)|#fe01", raw) == []
    ids = re.findall(r'\bid="([^"]*)"', raw)
    assert len(ids) == len(set(ids))
    used = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', raw)
    assert {first or second for first, second in used} <= set(ids)
    assert set(re.findall(r"var\(--([\w-]+)\)", raw)) <= set(re.findall(r"--([\w-]+):", raw))


@pytest.mark.slow(queued=False)
def test_hostile_names_are_shown_and_do_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, versions=12, peers=HOSTILE, folders=("a", "b", "c", "d"))
    page = page_of(tmp_path)
    assert not page.findall(".//script")
    assert all(not name.startswith("on") for element in page.iter() for name in element.attrib)
    text = text_of(page)
    for shown in ("<script>alert(1)</s…", "$\\frac{a", "\\u202eevil\\x1b[31m", "_x\" onload='y'"):
        assert shown in text
    assert "\u202e" not in text
    assert write_plot(tmp_path).is_file()


@pytest.mark.slow(queued=False)
def test_one_peers_directory_is_enough(tmp_path: Path) -> None:
    events = [event for event in peer_events(24) if event["peer"] == LATE]
    write_events(tmp_path / "events.jsonl", events)
    text = text_of(page_of(tmp_path))
    assert "told by one peer only" in text
    assert "no baseline to compare with" in text
    assert all(peer in text for peer in PEERS)


@pytest.mark.parametrize("versions", [0, pytest.param(1, marks=pytest.mark.slow(queued=False))])
def test_short_runs_are_pages_too(tmp_path: Path, versions: int) -> None:
    write_run(tmp_path, versions)
    text = text_of(page_of(tmp_path))
    assert ("no data yet" in text) == (versions == 0)
    assert write_plot(tmp_path).is_file()


def test_an_empty_directory_is_a_page(tmp_path: Path) -> None:
    assert text_of(page_of(tmp_path)).count("no data yet") > 5
    assert write_plot(tmp_path).is_file()


@pytest.mark.slow(queued=False)
def test_a_run_of_hundreds_of_versions_stays_small(tmp_path: Path) -> None:
    events = peer_events(200)
    write_events(tmp_path / "events.jsonl", [event for event in events if event["kind"] != "eval"])
    page = page_of(tmp_path)
    assert len(page.findall(".//section/div[@tabindex]/table/tr")) == 201
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


@pytest.mark.slow(queued=False)
def test_older_versions_of_a_long_run_share_rows(tmp_path: Path) -> None:
    events = [version("a", n, float(n), loss=1000.0 - n, counted=["a", "b"][: 1 + (n != 3)]) for n in range(1, 1101)]
    skip = {"t": 7.0, "time": 107.4, "peer": "a", "kind": "skip", "version": 7, "reason": "r7"}
    skips = [skip, {**skip, "time": 1199.4, "version": 1099, "reason": "r1099"}]
    often = [{**skip, "time": 200.0 + n / 100, "version": 9999} for n in range(10_000)]  # of none that is shown
    write_events(tmp_path / "events.jsonl", [*events, *skips, *often])
    page = page_of(tmp_path)
    rows = [[cell.text for cell in row.findall("td")] for row in page.findall(".//section/div[@tabindex]/table/tr")]
    shown = {row[0]: row for row in rows[1:]}
    assert list(shown)[:4] == ["1 to 5", "6 to 10", "7", "11 to 15"]
    assert list(shown)[-101:-98] == ["996 to 1000", "1001", "1002"]
    assert len(shown) == 200 + 100 + 1
    assert shown["1 to 5"][1:4] == ["5,000", "1 of 2", "997.000"]
    assert [shown[name][-1] for name in ("6 to 10", "7", "1099")] == ["1 note", "a skipped: r7", "a skipped: r1099"]
    assert "1100 in all; the table scrolls. Of the older ones, 5 share a row" in text_of(page)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


@pytest.mark.slow(queued=False)
def test_the_report_of_the_same_run_is_the_same(tmp_path: Path) -> None:
    write_run(tmp_path, versions=1)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_a_contract_as_json_and_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_text(json.dumps({"inner": {"steps": 25, "betas": [0.9, 0.95]}}))
    text = text_of(page_of(tmp_path))
    assert "inner.betas [0.9, 0.95]" in text
    assert "H = 25" in text
    (tmp_path / "contract.json").unlink()
    (tmp_path / "contract.toml").write_text("[nonsense]\nkey = 1\n")
    page_of(tmp_path)


def test_the_plot_is_a_picture_of_three_panels(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert write_plot(tmp_path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ---------------------------------------------------------------- damage, and size


def test_lines_that_are_damaged_but_json_are_passed_over(tmp_path: Path) -> None:
    events = peer_events(6)
    kinds = {event["kind"]: event for event in [*events, usage(1.0), {**version("a", 1, 1.0), "kind": "swap"}]}
    pairs = [(event, lost) for event in kinds.values() for lost in event]
    damaged = [{key: value for key, value in event.items() if key != lost} for event, lost in pairs]
    damaged += [{**event, lost: None} for event, lost in pairs]
    write_events(tmp_path / "events.jsonl", [*events, *damaged])
    assert [row.version for row in read_run(tmp_path).versions] == [1, 2, 3, 4, 5, 6]
    page_of(tmp_path)


NONSENSE = [
    True,
    -1,
    10**400,
    2**60,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [[]],
    [None],
    {},
    {"a": "b"},
    {"inner": []},
]


def test_whatever_a_field_holds_there_is_a_page(tmp_path: Path) -> None:
    fields = {"seconds": {"inner": 1.0}, "flight_s": 0.1, "spread": 0.1, "val_loss": 2.0, "attempts": 1, "fragment": 0}
    start = {"t": 0.0, "time": 100.0, "kind": "start", "peer": "a", "ranks": 2, "mesh": {"tp": 2}, "device": "cpu"}
    start |= {"peak_flops_per_rank": 1e12, "run": "x"}
    rows = [version("a", 1, 1.0, loss=2.0, tokens_per_s=9.0, wire_bytes_sent=5, state_digest="x", **fields)]
    rows += [{**rows[0], "kind": "swap"}, {**rows[0], "kind": "step", "wall": 1.0}, {**rows[0], "kind": "eval"}]
    events = [start, *rows, usage(1.0), *peer_events(3)]
    kinds = {event["kind"]: event for event in events}.values()
    forged = [{**event, name: value} for event in kinds for name in event for value in NONSENSE]
    lines = [json.dumps(event) for event in [*events, *forged, *events]]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "[" * 100_000, ""]))
    page_of(tmp_path)
    for event in forged:  # one alone: nothing may hide behind what is passed over in front of it
        write_events(tmp_path / "alone" / "events.jsonl", [start, version("a", 0, 0.0), event])
        read_run(tmp_path / "alone")


def test_whatever_a_summary_holds_there_is_a_page(tmp_path: Path) -> None:
    """A field that does not fit is as if it were not there."""
    whole = write_run(tmp_path, versions=1)
    (tmp_path / "summary.json").unlink()
    told = read_run(tmp_path).summary
    forged = [{**whole, name: value} for name in whole for value in NONSENSE]
    for cost in (whole["baseline"], whole["comparisons"]["ddp"]):
        for name, value in product(list(cost), NONSENSE):
            cost[name], before = value, cost[name]
            forged.append(deepcopy(whole))
            cost[name] = before
    for summary in forged:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        list(report._cards(read_run(tmp_path)))
    (tmp_path / "summary.json").write_text(json.dumps({name: ["x"] for name in whole}))
    assert read_run(tmp_path).summary == told
    page_of(tmp_path)


@pytest.mark.parametrize(
    "text", [pytest.param("[" * 100_000, id="nested"), "", '{"inner": {"steps"', "[]", '{"versions": 3, "inner": 5}']
)
def test_half_a_contract_or_summary_is_as_none(tmp_path: Path, text: str) -> None:
    write_events(tmp_path / "events.jsonl", [version("a", 1, 1.0, loss=2.0)])
    for name in ("contract.json", "summary.json"):
        (tmp_path / name).write_text(text)
    assert "DiLoCo run" in text_of(page_of(tmp_path))


def test_a_folder_that_takes_no_page_is_an_error_for_people(tmp_path: Path) -> None:
    write_events(tmp_path / "events.jsonl", [version("a", 1, 1.0, loss=2.0)])
    for name in ("report.html", "plot.png"):
        (tmp_path / name).mkdir()
    for write in (write_report, write_plot):
        with pytest.raises(ResourceError, match=r"cannot write .*: Is a directory"):
            write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "report.html", "plot.png"}


def test_a_report_takes_the_place_of_a_link_in_a_folder_that_was_given(tmp_path: Path) -> None:
    write_events(tmp_path / "events.jsonl", [version("a", 1, 1.0, loss=2.0)])
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for write, name in ((write_report, "report.html"), (write_plot, "plot.png")):
        (tmp_path / name).symlink_to(mine)
        assert write(tmp_path).stat().st_size > 1000
        assert not (tmp_path / name).is_symlink()
    assert mine.read_text() == "mine"


def test_a_month_of_signs_of_life_is_read_by_its_ends(tmp_path: Path) -> None:
    sign = {"kind": "progress", "peer": "a", "inner_step": 1, "tokens": 1, "loss": 2.0}
    signs = [sign | {"t": 1.0 + n / 1e4, "time": 101.0 + n / 1e4} for n in range(10_000)]
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        for event in [version("a", 1, 1.0, loss=2.0), *signs, version("a", 2, 3.0, loss=2.0)]:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    run = read_run(tmp_path)
    assert [row.at_s for row in run.versions] == [0.0, 2.0]
    assert [one.event.kind for one in read_events(path, TrainingProgress)] == [
        "version",
        "progress",
        "progress",
        "version",
    ]


def test_a_month_of_versions_fits_in_memory(tmp_path: Path) -> None:
    digest, seconds = "0123456789abcdef" * 4, dict.fromkeys(STEPS, 0.123456)
    more = {"lineage": digest, "blocks": [[1000, 1020]], "seconds": seconds, "lr": 1e-3, "flight_s": None}
    versions = [version("a", n, n, **more, loss=2.5, state_digest=f"{n:064x}") for n in range(1, 1001)]
    used = [usage(n, mfu=0.4, mfu_wall=0.3, flops_per_s=1e12, flops_per_s_wall=1e12) for n in range(1, 1001)]
    told = [event for pair in zip(versions, used, strict=True) for event in pair]
    write_events(tmp_path / "events.jsonl", [{**told[0], "kind": "start", "ranks": 2}, *told])
    run = read_run(tmp_path)
    # In a process of its own: threads that earlier tests left in this one allocate, too.
    program = (
        "import sys, tracemalloc; from pathlib import Path; from diloco.observe.run_folder import read_run\n"
        "tracemalloc.start(); run = read_run(Path(sys.argv[1])); print(tracemalloc.get_traced_memory()[1])"
    )
    peak_bytes = int(subprocess.check_output([sys.executable, "-c", program, str(tmp_path)]))
    assert len(run.versions) == 1000
    assert run.hardware[0].tokens_per_s == 500
    assert run.hardware[0].phases["forward"] == 500
    assert peak_bytes < 4_000 * len(run.versions)  # of one peer: each row of the report is its own


def test_a_curve_of_a_long_run_has_some_hundred_points(tmp_path: Path) -> None:
    events = [version("a", n, float(n), loss=float(n)) for n in range(1, 2001)]
    evals = [{**events[n - 1], "kind": "eval", "val_loss": float(n)} for n in range(1, 2001)]
    write_events(tmp_path / "events.jsonl", [*events, *evals])
    run = read_run(tmp_path)
    train, held_out = run.curves[0].train, run.curves[0].held_out
    assert [(point.loss, point.tokens) for point in train[:2]] == [(2.5, 4000), (6.5, 8000)]
    assert (train[-1].tokens, held_out[-1].loss, held_out[-2].loss) == (2_000_000, 2000, 1996)
    assert len(train) == len(held_out) == 500
    assert run.summary["val_loss"] == 2000


def test_notes_stand_at_their_version(tmp_path: Path) -> None:
    """And are not looked for in all versions, which takes hours for a month."""
    skips = [{"t": 1.0, "time": 102.0, "peer": "a", "kind": "skip", "version": n, "reason": f"r{n}"} for n in (1, 1, 2)]
    write_events(tmp_path / "events.jsonl", [version("a", 1, 1.0), version("a", 2, 2.0), *skips])
    rows = read_run(tmp_path).versions
    assert [list(row.notes) for row in rows] == [["a skipped: r1", "a skipped: r1"], ["a skipped: r2"]]
