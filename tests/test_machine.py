"""The protocol's parts, each by itself; the whole machine is in `test_virtual.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest

from diloco.exchange import messages as m
from diloco.exchange.admission import WINDOW, Admission
from diloco.exchange.electorate import Electorate
from diloco.exchange.lineage import goes_on, parted_at
from diloco.exchange.reduction import Reduction, covers, well_formed
from diloco.exchange.roster import Roster
from diloco.exchange.view import Policy, coordinator, decide, in_turn, respan, spans, votes_needed
from diloco.types import Counted, Member, Omitted

NAMES = ["a", "b", "c", "d"]
A, B, C, D = MEMBERS = [Member(name, number, f"{name}:1") for number, name in enumerate(NAMES, 1)]
WITNESS = Member("w", 9, "w:1", witness=True)
SYNC = Policy(None, 0.0, 20.0)


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize("members", range(1, 7))
def test_two_quorums_share_a_voter_whatever_deaths_their_coordinators_know_of(members: int) -> None:
    """Else of two coordinators each must have known the other dead before it decided: only one can have been first."""
    names = range(members)
    decisions = [
        (set(quorum), set(dead))
        for known in range(members)
        for dead in combinations(names, known)
        for quorum in combinations([name for name in names if name not in dead], votes_needed(members, known))
    ]
    for (first, dead_to_first), (second, dead_to_second) in product(decisions, decisions):
        assert first & second or (second <= dead_to_first and first <= dead_to_second)


def test_one_of_two_decides_only_when_the_other_is_dead_or_left_it_the_vote() -> None:
    electorate = Electorate()
    electorate.stand([A, B])
    assert electorate.needed() == 2
    electorate.bequeath(["b"], "a")
    assert electorate.held_by("a") == ("b",)
    assert electorate.reachable(["a"]) == 2
    electorate.died(replace(B, incarnation=77))  # another life of b
    assert electorate.needed() == 2
    electorate.died(B)
    assert electorate.needed() == 1
    electorate.stand([A])
    assert (electorate.needed(), electorate.held_by("a")) == (1, ())


def test_a_witness_never_coordinates() -> None:
    seats = {coordinator("run", version, attempt, [A, WITNESS, B]) for version in range(9) for attempt in range(3)}
    assert seats == {A, B}


# ---------------------------------------------------------------- when a version closes


@pytest.mark.parametrize(
    ("policy", "now", "offered_at", "group"),
    [
        (SYNC, 5.0, {"a": 0.0, "b": 1.0}, None),
        (SYNC, 5.0, {"a": 0.0, "b": 1.0, "c": 4.0}, ("a", "b", "c")),
        (SYNC, 20.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (Policy(2, 3.0, 20.0), 3.9, {"a": 0.0, "b": 1.0}, None),
        (Policy(2, 3.0, 20.0), 4.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (Policy(2, 3.0, 20.0), 99.0, {"a": 0.0}, None),
        (Policy(2, 3.0, 20.0), 1.0, {"a": 0.0, "b": 0.5, "c": 1.0}, ("a", "b", "c")),
    ],
    ids=["one is late", "all are ready", "deadline", "grace", "grace is over", "no quorum", "nobody is missing"],
)
def test_who_contributes(
    policy: Policy, now: float, offered_at: dict[str, float], group: tuple[str, ...] | None
) -> None:
    live = ["a", "b", "c"]
    decision = decide(policy, now, NAMES, live, offered_at, dict.fromkeys(live, "state"))
    assert decision.group == group
    assert decision.reason


def test_who_stands_on_another_state_is_left_out() -> None:
    states = {"a": "right", "b": "wrong", "c": "right"}
    decision = decide(SYNC, 0.0, NAMES, ["a", "b", "c"], dict.fromkeys("abc", 0.0), states)
    assert decision.group == ("a", "c")
    assert "without b" in decision.reason


# ---------------------------------------------------------------- parts and their owners


def begin(parts: int = 6, owners: str = "abc") -> m.Begin:
    counted = tuple(Counted(name, 0, 1, 10, 2) for name in owners)
    return m.Begin(1, 0, counted, tuple(MEMBERS[:3]), spans(parts, list(owners)))


def test_only_parts_that_are_wanted_get_new_owners() -> None:
    before = spans(6, ["a", "b", "c"])
    after = respan(before, wanted={0, 4}, gone={"a"}, owners=["b", "c"])
    assert covers(after, 6, ["a", "b", "c"])
    assert [(span.owner, span.start, span.stop) for span in after] == [
        ("c", 0, 1),
        ("a", 1, 2),
        ("b", 2, 4),
        ("c", 4, 6),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        replace(begin(), spans=()),
        replace(begin(), spans=(m.Span("a", 0, 5),)),
        replace(begin(), spans=(m.Span("stranger", 0, 6),)),
        replace(begin(), contributors=()),
        replace(begin(), contributors=begin().contributors * 2),
        replace(begin(), receivers=(A,)),
    ],
)
def test_a_begin_that_makes_no_sense_is_seen(bad: m.Begin) -> None:
    assert well_formed(begin(), 6, NAMES)
    assert not well_formed(bad, 6, NAMES)


def test_a_part_counts_whoever_came_before_it_was_averaged_and_says_whom_not() -> None:
    reduction = Reduction(begin(), "a", 0.0)
    for part in (0, 1):
        assert not reduction.contribution("a", part, 1.0)
    assert not reduction.contribution("c", 0, 1.0)
    assert reduction.contribution("b", 0, 1.0)
    assert reduction.average(0) == ()
    repair = m.Repair(1, 0, 1, ("b",), (m.Span("a", 0, 2), m.Span("c", 2, 4), m.Span("c", 4, 6)), "b died")
    moved, ready = reduction.repair(repair, 2.0)
    assert [(span.owner, span.start, span.stop) for span in moved] == [("c", 2, 4)]
    assert ready == []  # part 1 still waits for c, who lives
    assert reduction.contribution("c", 1, 3.0)
    assert reduction.average(1) == ("b",)
    assert not reduction.contribution("b", 1, 4.0)  # too late: the sum is made


def test_the_commit_names_the_parts_that_omit_somebody() -> None:
    reduction = Reduction(begin(), "a", 0.0)
    for part in range(6):
        owner = "abc"[part // 2]
        omitted = ("b",) if part in (0, 1, 4) else ()
        assert reduction.mean(part, owner, omitted, 1.0) == (part == 5)
    counted, omitted_ranges = reduction.counted()
    assert [entry.peer for entry in counted] == ["a", "b", "c"]
    assert omitted_ranges == (Omitted("b", 0, 2), Omitted("b", 4, 5))


def test_who_is_in_no_part_is_not_counted() -> None:
    reduction = Reduction(begin(), "a", 0.0)
    for part in range(6):
        reduction.mean(part, "abc"[part // 2], ("c",), 1.0)
    assert [entry.peer for entry in reduction.counted()[0]] == ["a", "b"]


def test_a_mean_counts_only_from_the_parts_present_owner() -> None:
    reduction = Reduction(begin(parts=3), "a", 0.0)
    assert not reduction.mean(1, "c", (), 1.0)
    assert reduction.absent == {0, 1, 2}


# ---------------------------------------------------------------- who may speak


def envelope(sequence: int, sender: Member = B) -> m.Envelope:
    return m.Envelope("run", "contract", "lineage", sender, "", sequence, m.Evict("nobody"))


def test_no_message_is_taken_twice_whatever_the_order() -> None:
    admission = Admission("run", "contract")
    order = [3, 1, 2, 5, 4, WINDOW + 5]
    assert [admission.replayed(envelope(sequence)) for sequence in order] == [False] * 6
    assert [admission.replayed(envelope(sequence)) for sequence in order] == [True] * 6
    assert admission.replayed(envelope(6)) is False
    assert admission.replayed(envelope(0)) is True
    assert admission.replayed(envelope(1, replace(B, incarnation=99))) is False


def test_an_earlier_life_is_not_heard_again() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    later = replace(B, incarnation=50)
    assert roster.heard(B, 0.0)
    assert not roster.heard(replace(later, address="elsewhere:1"), 1.0)  # two processes of one name
    assert roster.heard(later, 1.0)  # the same address: the former process is gone
    assert not roster.heard(B, 99.0)
    roster.meet([B], 99.0)
    assert roster.alive(later, 2.0)


def test_a_suspected_peer_refutes_with_its_next_word() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    roster.meet([B], 0.0)
    assert not roster.alive(B, 4.1)
    roster.heard(B, 4.2)
    roster.unreachable("b")
    assert not roster.alive(B, 4.3)
    roster.heard(B, 4.4)
    assert roster.alive(B, 4.5)


def test_three_offences_bar_a_peer() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    for _ in range(2):
        roster.offended("b")
    assert not roster.barred("b")
    roster.offended("b")
    assert roster.barred("b")


# ---------------------------------------------------------------- lineages


def history(*steps: tuple[str, int]) -> tuple[m.Fork, ...]:
    return tuple(m.Fork(lineage, tokens) for lineage, tokens in steps)


@pytest.mark.parametrize(
    ("mine", "other", "parted"),
    [
        (history(("L", 300)), history(("L", 100), ("F", 250)), 100),
        (history(("L", 100), ("E", 180)), history(("L", 100), ("F", 250)), 100),
        (history(("L", 100), ("E", 180), ("G", 400)), history(("L", 100), ("E", 150), ("F", 250)), 150),
        (history(("X", 5)), history(("Y", 5)), 0),
    ],
)
def test_where_two_histories_parted(mine: tuple[m.Fork, ...], other: tuple[m.Fork, ...], parted: int) -> None:
    assert parted_at(mine, other) == parted_at(other, mine) == parted


def test_one_of_two_lineages_goes_on_and_both_sides_agree_which() -> None:
    histories = [history(("L", 10)), history(("L", 5), ("F", 10)), history(("L", 5), ("E", 10)), history(("L", 11))]
    for mine, other in combinations(histories, 2):
        assert goes_on(mine, other) != goes_on(other, mine)
    assert goes_on(history(("L", 11)), histories[1])
    assert goes_on(histories[1], histories[0])  # a tie: whoever was left behind could not go on


def test_more_peers_than_a_version_takes_contribute_in_turn() -> None:
    group = [f"p{index}" for index in range(10)]
    assert in_turn(group, None, 7) == tuple(group)
    assert in_turn(group, 10, 7) == tuple(group)
    turns = [in_turn(group, 4, version) for version in range(5)]
    assert turns[2] == ("p0", "p1", "p8", "p9")
    assert all(list(turn) == sorted(turn) and len(turn) == 4 for turn in turns)
    assert Counter(peer for turn in turns for peer in turn) == dict.fromkeys(group, 2)
