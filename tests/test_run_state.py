"""One reducer tells what happened: on recorded events, on events that come late or twice, and for a month."""

import random
import tracemalloc
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from diloco.observe.event_log import read_events
from diloco.observe.events import (
    CheckpointWritten,
    Departure,
    Ended,
    Evaluated,
    Event,
    HardwareUsed,
    Remark,
    RoundSkipped,
    Stamped,
    Started,
    StateCopied,
    SwapApplied,
    TrainingProgress,
    VersionClosed,
    ViewChanged,
    Warned,
    from_json,
)
from diloco.observe.run_folder import read_state
from diloco.observe.run_state import Notice, RunClock, RunState, Stay, Version
from tests.alone import alone
from tests.helpers_events import DYING, LATE, LEAVING, STEADY, peer_events

RECORDED = sorted((Path(__file__).parent / "data" / "bb50371" / "run").glob("*/events.jsonl"))


def told(peer: str, at_s: float, event: Event, t_s: float | None = None) -> Stamped:
    return Stamped(at_s if t_s is None else t_s, 100.0 + at_s, peer, event)


def closed(version: int, *members: str, **fields: Any) -> VersionClosed:
    return VersionClosed(version, 1000 * version, members=members, counted=members, **fields)


def folded(*events: Stamped) -> RunState:
    state = RunState()
    for event in events:
        state.fold(event)
    return state


def kinds(notices: Sequence[Notice]) -> list[tuple[str, str, int]]:
    return [(notice.peer, notice.kind, notice.version) for notice in notices]


# ---------------------------------------------------------------- recorded events


def test_a_run_of_an_earlier_release_is_what_its_events_say() -> None:
    events = {path.parent.name: list(read_events(path)) for path in RECORDED}
    state = read_state(RECORDED)
    assert (state.name, state.total_tokens, sorted(state.peers)) == ("recorded", 1_000_000, ["p0", "p1"])
    assert list(state.versions) == list(range(1, 12))
    for reports in state.versions.values():
        assert len({report.event.state_digest for report in reports.values()}) == 1  # type: ignore[union-attr]
    for name, peer in state.peers.items():
        mine = [one.event for one in events[name]]
        last = [event for event in mine if isinstance(event, VersionClosed)][-1]
        assert (peer.version, peer.tokens, peer.loss) == (last.version, last.tokens, last.loss)
        usage = [event for event in mine if isinstance(event, HardwareUsed)]
        assert peer.used is not None
        assert peer.used.inner_tokens == sum(event.inner_tokens for event in usage)
        assert peer.used.inner_s == pytest.approx(sum(event.inner_s for event in usage))
        assert peer.used.phases["forward"] == pytest.approx(sum(event.phases["forward"] for event in usage))
        assert peer.checkpoint == [event for event in mine if isinstance(event, CheckpointWritten)][-1]
    assert state.evaluations == [one.event for one in events["p0"] if isinstance(one.event, Evaluated)]
    assert kinds(state.notices) == [("p1", "left", 7)]
    assert state.peers["p1"].phase == "left"
    assert [end.version for end in state.ends] == [7]
    assert state.tokens == state.peers["p0"].tokens
    last_s, end_s = events["p0"][-1].time_s, next(one.time_s for one in events["p1"] if one.event.kind == "end")
    staying, leaving = state.stays()
    assert (staying.peer, staying.stop_s) == ("p0", last_s)
    assert (leaving.peer, leaving.stop_s <= end_s < last_s) == ("p1", True)


@pytest.mark.parametrize("seed", range(20))
def test_peers_may_be_somewhat_late(seed: int) -> None:
    """A screen reads one file after the other: what it says is the same, whoever comes first."""
    lines = peer_events(24)
    stamps = [stamped for line in lines if (stamped := from_json(line))]
    draw, state, said = random.Random(seed), RunState(), list[Notice]()
    for _, group in groupby(stamps, key=lambda stamped: stamped.time_s // 0.7):
        by_peer = {
            name: list(some) for name, some in groupby(sorted(group, key=lambda one: one.peer), lambda o: o.peer)
        }
        for name in draw.sample(list(by_peer), len(by_peer)):
            for stamped in by_peer[name]:
                said += state.fold(stamped)
    in_order = folded(*stamps)
    assert (
        sorted(kinds(said))
        == sorted(kinds(in_order.notices))
        == sorted([(LATE, "joined", 7), (LATE, "skipped", 12), (DYING, "died", 15), (LEAVING, "left", 20)])
    )
    assert said == state.notices
    assert {name: peer.phase for name, peer in state.peers.items()} == {
        STEADY: "done", DYING: "lost", LEAVING: "left", LATE: "done"
    }  # fmt: skip
    for version, reports in in_order.versions.items():
        assert state.versions[version] == reports
    assert not state.view


# ---------------------------------------------------------------- who is there


def test_the_founding_is_no_news_and_a_change_is_news_once() -> None:
    state = RunState()
    assert not state.fold(told("a", 0.0, ViewChanged(0, ("a", "b"))))
    assert not state.fold(told("b", 0.1, ViewChanged(0, ("a", "b"))))
    changed = ViewChanged(3, ("c", "d"), (Departure("b", "no word for 5 s"),))
    assert kinds(state.fold(told("a", 1.0, changed))) == [("c", "joined", 3), ("d", "joined", 3), ("b", "died", 3)]
    assert not state.fold(told("c", 1.1, changed))
    assert not state.fold(told("c", 1.1, closed(3, "a", "c", "d")))
    assert list(state.view) == ["a", "c", "d"]
    assert state.stays()[1] == Stay("b", 100.0, 101.0)


def test_peers_that_meet_one_by_one_under_gossip_found_the_run() -> None:
    met = [("p0", ("p0",)), ("p0", ("p1",)), ("p1", ("p1",)), ("p1", ("p0",)), ("p0", ("p2",))]
    state = folded(*(told(peer, 0.0, ViewChanged(0, names)) for peer, names in met))
    assert not state.notices
    assert kinds(state.fold(told("p0", 1.0, ViewChanged(4, ("p3",))))) == [("p3", "joined", 4)]


def test_members_alone_say_who_is_gone_and_its_own_end_says_how() -> None:
    both = [told("a", 0.0, closed(1, "a", "b")), told("b", 0.1, closed(1, "a", "b"))]
    state = folded(*both)
    assert kinds(state.fold(told("a", 1.0, closed(2, "a")))) == [("b", "gone", 2)]
    assert state.peers["b"].phase == "gone"
    assert not state.fold(told("b", 1.5, Ended("left", 1, 1000)))
    assert kinds(state.notices) == [("b", "left", 2)]
    assert state.peers["b"].phase == "left"


def test_a_late_report_does_not_bring_back_who_has_ended() -> None:
    state = folded(told("a", 0.0, closed(1, "a", "b")), told("b", 0.5, Ended("left", 1, 1000)))
    assert not state.fold(told("a", 1.0, closed(2, "a", "b")))  # the commit that leaves it out comes after
    assert list(state.view) == ["a"]
    assert not state.fold(told("b", 5.0, Started(run="x"), t_s=0.0))
    assert kinds(state.fold(told("a", 6.0, ViewChanged(3, ("b",))))) == [("b", "joined", 3)]
    assert [stay.peer for stay in state.stays()] == ["a", "b", "b"]


def test_skips_and_warnings_are_news_each_time() -> None:
    state = folded(told("a", 0.0, closed(4, "a")))
    news = [*state.fold(told("a", 1.0, RoundSkipped(5, "no quorum"))), *state.fold(told("a", 1.0, Warned("disk full")))]
    assert news == [Notice("a", 101.0, "skipped", 5, "no quorum"), Notice("a", 101.0, "warned", 4, "disk full")]
    assert [str(notice) for notice in news] == ["a skipped: no quorum", "a warned: disk full"]


# ---------------------------------------------------------------- a peer


def test_the_phases_of_a_peer() -> None:
    state, seen = RunState(), []
    events = [
        Started(run="x"), StateCopied(6), TrainingProgress(1, 10, 2.5), closed(7, "a", tokens_per_s=9.0),
        SwapApplied(8, 1, final=True), Ended("done", 9, 9000, wire_bytes_sent=5),
    ]  # fmt: skip
    for at_s, event in enumerate(events):
        state.fold(told("a", at_s, event))
        seen.append((state.peers["a"].phase, state.peers["a"].version))
    assert seen == [("joining", 0), ("joining", 6), ("training", 6), ("training", 7), ("averaging", 8), ("done", 9)]
    peer = state.peers["a"]
    assert (peer.loss, peer.tokens_per_s, peer.wire_bytes_sent) == (2.5, 9.0, 5)
    assert peer.over
    assert not folded(told("a", 0.0, events[-1]), told("a", 1.0, events[0], t_s=0.0)).peers["a"].over


def test_hardware_is_summed_since_the_last_start() -> None:
    used = HardwareUsed(1.0, 2.0, 100, (), {"forward": 0.5}, flops=10.0, mfu=0.1)
    later = HardwareUsed(1.0, 2.0, 100, (), {"forward": 0.5, "data": 0.1}, mfu=0.3)
    events = (Started(), used, Started(), used, later)
    peer = folded(*(told("a", at_s, event) for at_s, event in enumerate(events))).peers["a"]
    assert peer.used == HardwareUsed(2.0, 4.0, 200, (), {"forward": 1.0, "data": 0.1}, flops=10.0, mfu=0.3)


def test_a_checkpoint_or_a_skip_is_no_version_of_the_peer() -> None:
    state = folded(told("a", 0.0, closed(5, "a")), told("a", 1.0, CheckpointWritten(3, 1.0, 0.1, 9)))
    state.fold(told("a", 2.0, RoundSkipped(6, "no quorum")))
    assert state.peers["a"].version == 5


# ---------------------------------------------------------------- versions and time


def test_a_version_is_a_mean_over_its_peers_as_they_reported_it_last() -> None:
    a = closed(1, "a", "b", loss=2.0, seconds={"inner": 1.0}, tokens_per_s=100.0, wire_bytes_sent=10)
    again = closed(1, "a", "b", loss=1.0, seconds={"inner": 3.0}, tokens_per_s=100.0, wire_bytes_sent=20)
    b = closed(1, "a", "b", loss=None, tokens_per_s=50.0)
    state = folded(told("a", 0.0, a), told("b", 1.0, b), told("a", 2.0, again))
    row = Version.of(state.versions[1].values())
    assert (row.loss, row.tokens_per_s, row.sent_bytes, row.reports, row.at_s) == (1.0, 150.0, 20, 2, 101.0)
    assert row.seconds["inner"] == 3.0
    assert sum(row.seconds.values()) == 3.0


def test_the_clock_of_the_run_leaves_out_when_nobody_lived() -> None:
    state = folded(
        told("a", 0.0, Remark("1 of 2 are here")), told("b", 5.0, Remark("x")), told("a", 10.0, closed(1, "a", "b")),
        told("b", 20.0, Remark("x")), told("a", 500.0, Started(), t_s=0.0), told("a", 510.0, closed(2, "a"), t_s=10.0),
    )  # fmt: skip
    clock = RunClock(state)
    assert [clock(100.0 + at_s) for at_s in (0.0, 10.0, 20.0, 500.0, 510.0)] == [0.0, 0.0, 10.0, 10.0, 20.0]
    assert clock.resumed_s == [10.0]
    quiet = folded(told("a", 0.0, Remark("x")), told("b", 490.0, Started(), t_s=0.0), told("a", 500.0, Remark("x")))
    assert not RunClock(quiet).resumed_s


def live(state: RunState, first: int, count: int) -> None:
    for version in range(first, first + count):
        for event in (closed(version, "a"), RoundSkipped(version, f"reason {version}"), Evaluated(1, version, 2.0)):
            state.fold(told("a", version, event))


def kept_bytes_of_months() -> int:
    state = RunState(kept=3)
    live(state, 1, 100)
    tracemalloc.start()
    live(state, 101, 2000)
    return tracemalloc.get_traced_memory()[0]


def test_a_process_of_months_remembers_what_it_is_asked_to() -> None:
    state = RunState(kept=3)
    live(state, 1, 2100)
    assert list(state.versions) == [2098, 2099, 2100]
    assert [notice.reason for notice in state.notices] == ["reason 2098", "reason 2099", "reason 2100"]
    assert (state.tokens, len(state.evaluations)) == (2_100_000, 3)
    assert alone(kept_bytes_of_months) < 100_000
