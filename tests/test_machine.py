"""The protocol's parts, each by itself; the whole machine is in `test_virtual.py`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, count, product
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.base.turns import Turns
from diloco.base.types import Commit, Counted, Leases, Member, Omitted, Progress, Voter
from diloco.exchange.service import status_json
from diloco.protocol import effects as fx
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.protocol.acceptor import seat_after
from diloco.protocol.claims import Bounds
from diloco.protocol.machine import Machine
from diloco.protocol.reduction import Reduction, Tally, Times, covers, well_formed
from diloco.protocol.roster import MAX_JUMP, MAX_NAMES, QUIET_S, WINDOW, Admission, Roster
from diloco.protocol.view import (
    MAX_EVICTED,
    SAME_RATES,
    Electorate,
    Policy,
    Rules,
    Timing,
    decide,
    goes_on,
    in_turn,
    parted_at,
    respan,
    spans,
    upload_shares,
)
from diloco.protocol.vote import Restored, VoteRecord, Voters, most_named
from diloco.simulate.virtual.plans.plan import parse
from diloco.simulate.virtual.search import narrate, outcome_lines

NAMES = ["a", "b", "c", "d"]
A, B, C, D = MEMBERS = [Member(name, number, f"{name}:1") for number, name in enumerate(NAMES, 1)]
WITNESS = Member("w", 9, "w:1", witness=True)
SYNC = Policy(None, 0.0, 20.0)
RULES = Rules("run", "contract", (6,), 1, Bounds("contract", Turns(1), lease_blocks=2), SYNC, 4)
NEAR = 3
"""Versions from which commits bring a peer to ours: the backlog of `standing` less one."""
BodyT = TypeVar("BodyT")


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize("members", range(1, 7))
def test_two_quorums_share_a_voter_whatever_deaths_their_coordinators_know_of(members: int) -> None:
    """Else of two coordinators each must have known the other dead before it decided: only one can have been first."""
    names = "abcdef"[:members]
    named = Voters(dict.fromkeys(names, 0))
    decisions = [
        (set(quorum), set(dead))
        for known in range(members)
        for dead in combinations(names, known)
        for size in range(1, members - known + 1)
        for quorum in combinations([name for name in names if name not in dead], size)
        if named.suffice(dict.fromkeys(quorum, 0), {(name, 0) for name in dead})
    ]
    assert decisions
    for (first, dead_to_first), (second, dead_to_second) in product(decisions, decisions):
        assert first & second or (second <= dead_to_first and first <= dead_to_second)


def naming(*voting: Member) -> Commit:
    """A commit that names these voters, the first process of each."""
    return Commit(7, 7, "", "lineage", 0, voting, (), (), "", 0, Leases(0, {}), "", voters=voters(voting))


def test_one_of_two_decides_only_when_the_other_is_dead_for_certain() -> None:
    electorate = Electorate()
    electorate.stand(naming(A, B))
    assert (electorate.needed({}), electorate.reachable(["a"])) == (2, 1)
    electorate.died(B, 0)
    assert (electorate.needed({}), electorate.suffice({"a": 0})) == (1, True)
    # A later process may have promised what the proof knows nothing of.
    assert (electorate.needed({"a": 1}), electorate.suffice({"a": 1})) == (2, False)
    electorate.stand(naming(A, C))
    assert not electorate.suffice({"a": 0})
    electorate.died(C, 1)
    assert (electorate.needed({}), electorate.suffice({"a": 0})) == (1, True)
    electorate.stand(naming(A))
    assert electorate.needed({}) == 1
    electorate.stand(None)
    assert electorate.names() == set()


def test_that_another_life_is_over_proves_nothing() -> None:
    electorate = Electorate()
    electorate.stand(naming(A, B))
    electorate.died(replace(B, incarnation=77), 9)
    assert (electorate.needed({}), electorate.suffice({"a": 0})) == (2, False)


def test_that_an_earlier_process_is_over_proves_nothing() -> None:
    electorate, commit = Electorate(), naming(A, B)
    electorate.stand(replace(commit, voters=(Voter("a", 0, -1), Voter("b", 5, -1))))
    electorate.died(B, 4)
    assert (electorate.needed({}), electorate.suffice({"a": 0})) == (2, False)
    electorate.died(B, 5)
    assert (electorate.needed({}), electorate.suffice({"a": 0})) == (1, True)


def test_what_was_said_of_a_member_is_not_said_of_its_next_life() -> None:
    """Else an operator who declared the old one dead silences the new one."""
    electorate, b_again = Electorate(), replace(B, incarnation=B.incarnation + 1)
    electorate.stand(naming(A, B))
    electorate.evict("b", B.incarnation)
    assert electorate.voters() == {"a"}
    electorate.stand(naming(A, b_again))
    assert (electorate.voters(), electorate.evicted, electorate.needed({})) == ({"a", "b"}, set(), 2)
    electorate.evict("b", B.incarnation)  # heard once more, and late
    electorate.evict("c", C.incarnation)  # of a view that we do not know yet
    assert (electorate.voters(), electorate.needed({})) == ({"a", "b"}, 2)
    electorate.stand(naming(A, b_again, D))
    electorate.stand(naming(A, b_again, C))
    assert electorate.voters() == {"a", "b"}


def test_an_eviction_takes_a_vote_and_lowers_nothing() -> None:
    """A majority stays one of all: when an operator evicted too many, the others decide nothing within this lineage."""
    electorate = Electorate()
    electorate.stand(naming(A, B, C))
    assert not electorate.is_lost({})
    electorate.evict("b", B.incarnation)
    assert (electorate.voters(), electorate.needed({}), electorate.is_lost({})) == ({"a", "c"}, 2, False)
    assert electorate.missing(["a"]) == ["c"]
    assert electorate.suffice({"a": 0, "c": 0})
    assert not electorate.suffice({"a": 0, "b": 0})
    electorate.evict("c", C.incarnation)
    assert (electorate.voters(), electorate.needed({}), electorate.is_lost({})) == ({"a"}, 2, True)
    assert electorate.names() == {"a", "b", "c"}
    electorate.stand(naming(A, B))
    electorate.died(B, 0)
    assert (electorate.needed({}), electorate.is_lost({})) == (1, False)  # that b is dead is proven, too
    assert electorate.is_lost({"a": 1}), "no commit names this process of a"


def test_witnesses_alone_are_no_majority() -> None:
    """Only voters that train propose: however many others would vote, without one of them nothing is decided."""
    electorate = Electorate()
    electorate.stand(naming(A, WITNESS, Member("v", 9, "v:1", witness=True)))
    assert electorate.suffice({"v": 0, "w": 0})
    assert (electorate.seats({"v", "w"}), electorate.seats({"a", "w"})) == (0, 1)
    electorate.evict("v", 9)
    assert not electorate.is_lost({})
    electorate.stand(naming(A, WITNESS))
    electorate.died(A, 0)
    electorate.evict("a", A.incarnation)
    assert (electorate.needed({}), electorate.seats(electorate.names()), electorate.is_lost({})) == (1, 0, True)


def test_a_witness_never_coordinates() -> None:
    machine = standing(7, view=(A, WITNESS, B))
    assert {machine._acceptor.seat(attempt) for attempt in range(3)} == {A, B}


# ---------------------------------------------------------------- when a version closes


@pytest.mark.parametrize(
    ("policy", "now", "offered_at", "group"),
    [
        (SYNC, 5.0, {"a": 0.0, "b": 1.0}, None),
        (SYNC, 5.0, {"a": 0.0, "b": 1.0, "c": 4.0}, ("a", "b", "c")),
        (SYNC, 20.9, {"a": 0.0, "b": 1.0}, None),
        (SYNC, 21.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (SYNC, 79.9, {"a": 0.0}, None),
        (SYNC, 80.0, {"a": 0.0}, ("a",)),
        (Policy(2, 3.0, 20.0), 3.9, {"a": 0.0, "b": 1.0}, None),
        (Policy(2, 3.0, 20.0), 4.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (Policy(2, 3.0, 20.0), 99.0, {"a": 0.0}, None),
        (Policy(2, 3.0, 20.0), 1.0, {"a": 0.0, "b": 0.5, "c": 1.0}, ("a", "b", "c")),
        (Policy(2, 3.0, 20.0, sync_versions=4).at(4, False), 4.0, {"a": 0.0, "b": 1.0}, None),
        (Policy(2, 3.0, 20.0, sync_versions=4).at(5, False), 4.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (Policy(1, 0.0, 20.0, uses_slack=True).at(5, False), 4.0, {"a": 0.0, "b": 1.0}, ("a", "b")),
        (Policy(1, 0.0, 20.0, uses_slack=True).at(5, True), 4.0, {"a": 0.0, "b": 1.0}, None),
    ],
    ids=[
        "one is late",
        "all are ready",
        "half are ready",
        "deadline",
        "one is early",
        "the others hang",
        "grace",
        "grace is over",
        "no quorum",
        "nobody is missing",
        "still sync",
        "no longer sync",
        "the first closes it",
        "the run is ending",
    ],
)
def test_who_contributes(
    policy: Policy, now: float, offered_at: dict[str, float], group: tuple[str, ...] | None
) -> None:
    live = ["a", "b", "c"]
    decision = decide(policy, now, NAMES, live, offered_at, dict.fromkeys(live, "state"))
    assert decision.group == group
    assert decision.reason


@pytest.mark.parametrize(
    ("offered_at", "waits_from", "begins_at"),
    [
        ({"a": 1.0}, {"a": 1.0}, 1.5),  # no slack: the grace alone
        ({"a": 1.0}, {"a": 4.0}, 4.0),
        ({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 3.0}, 3.0),  # nobody of them waits
        ({"a": 1.0}, {"a": -5.0}, 1.5),
        ({"a": 1.0}, {"a": 1e300}, 21.0),  # whatever somebody claims
    ],
)
def test_async_waits_for_others_as_long_as_it_costs_nothing(
    offered_at: dict[str, float], waits_from: dict[str, float], begins_at: float
) -> None:
    policy = Policy(1, 0.5, 20.0, uses_slack=True)
    states = dict.fromkeys("abc", "state")
    for now, group in ((begins_at - 0.1, None), (begins_at, tuple(offered_at))):
        assert decide(policy, now, NAMES, list("abc"), offered_at, states, waits_from).group == group


def test_the_slack_is_what_is_left_after_the_sync() -> None:
    tally = Tally(0)
    tally.hear("a", 0, m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3, slack_s=5.0), "digest"), 10.0)
    tally.hear("a", 0, m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3, slack_s=5.0), "digest"), 11.0)  # said again
    tally.hear("b", 0, m.Ready(1, 0, None, "digest"), 10.0)
    assert tally.waits_from(2.0) == {"a": 13.0}


def test_who_stands_on_another_state_is_left_out() -> None:
    states = {"a": "right", "b": "wrong", "c": "right"}
    decision = decide(SYNC, 0.0, NAMES, ["a", "b", "c"], dict.fromkeys("abc", 0.0), states)
    assert decision.group == ("a", "c")
    assert "without b" in decision.reason


# ---------------------------------------------------------------- parts and their owners


def begin(parts: int = 6, owners: str = "abc") -> m.Begin:
    counted = tuple(Counted(name, 0, 0, 1, 10, 2) for name in owners)
    return m.Begin(1, 0, counted, tuple(MEMBERS[:3]), spans(parts, list(owners)), "state")


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


def lengths(parts: int, send_bps: list[int]) -> list[int]:
    """Parts of each owner."""
    found = {span.owner: span.stop - span.start for span in spans(parts, NAMES[: len(send_bps)], send_bps)}
    return [found.get(name, 0) for name in NAMES[: len(send_bps)]]


@pytest.mark.parametrize(
    ("send_bps", "expected"),
    [
        ([5, 5000], [6, 6]),  # of two each uploads the same, whatever it owns
        ([0, 0, 0], [4, 4, 4]),
        ([100, 132, 110], [4, 4, 4]),
        ([14 * 10**8, 40 * 10**8, 30 * 10**8], [4, 4, 4]),
        ([0, 100, 0], [4, 4, 4]),
        ([10, 10, 20], [0, 0, 12]),  # a, b: 1 of 10; c: 1 + 1 of 20
        ([20, 20, 40], [0, 0, 12]),
        ([10, 0, 30, 20], [0, 3, 6, 3]),  # b as 20, the median; nobody is done before a with its contribution
        ([1, 2**63 - 1, 2**63 - 1], [0, 6, 6]),
        ([11, 15, 15], [1, 6, 5]),  # shares 3/41, 19/41, 19/41: (1 + 3/41) / 11 = (1 + 19/41) / 15
    ],
)
def test_who_uploads_faster_owns_more(send_bps: list[int], expected: list[int]) -> None:
    assert lengths(12, send_bps) == expected


def slowest_s(shares: tuple[float, ...], send_bps: tuple[int, ...]) -> float:
    """When the last upload of one bit ends, for these shares of it."""
    others = len(shares) - 2
    return max((1 + others * share / sum(shares)) / bps for share, bps in zip(shares, send_bps, strict=True))


def test_the_status_tells_the_rate() -> None:
    machine = Machine(A, RULES, Timing(0.5, 4.0, 4.0), "lineage", True, 0.0)
    assert json.loads(status_json(machine, None, 0, (), 7, 0.0))["send_bps"] == 7


@pytest.mark.slow(queued=False)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=4).map(tuple))
def test_no_other_division_ends_earlier(send_bps: tuple[int, ...]) -> None:
    parts = 6
    divisions = (each for each in product(range(parts + 1), repeat=len(send_bps)) if sum(each) == parts)
    best_s = min(slowest_s(division, send_bps) for division in divisions)
    shares = upload_shares(send_bps)
    assert (
        not shares
        if max(send_bps) < SAME_RATES * min(send_bps)
        else slowest_s(tuple(shares), send_bps) <= best_s + 1e-9
    )


@given(st.integers(1, 9), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_every_part_has_one_owner_whatever_anybody_claims(parts: int, send_bps: list[int]) -> None:
    names = NAMES[: len(send_bps)]
    found = spans(parts, names, send_bps)
    assert covers(found, parts, names)
    assert covers(respan(found, range(parts), {found[0].owner}, names[::-1], send_bps), parts, names)


def test_a_repair_gives_more_to_who_uploads_faster() -> None:
    before = spans(8, NAMES)
    after = respan(before, wanted=range(8), gone={"d"}, owners=["a", "b", "c"], send_bps=[10, 10, 20])
    assert [(span.owner, span.start, span.stop) for span in after] == [("a", 0, 2), ("b", 2, 4), ("c", 4, 8)]


def test_a_tally_knows_the_rates_of_the_offers() -> None:
    tally = Tally(0)
    tally.hear("a", 0, m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3, send_bps=7), "digest"), 0.0)
    tally.hear("b", 0, m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3), "digest"), 0.0)
    tally.hear("c", 0, m.Ready(1, 0, None, "digest"), 0.0)
    assert tally.send_bps() == {"a": 7, "b": 0}


def test_an_older_word_does_not_change_what_an_attempt_began_with() -> None:
    tally = Tally(0)
    tally.hear("a", 0, m.Ready(1, 0, m.Offer(0, 0, 1, 2, 3), "now"), 0.0)
    tally.begun = True
    tally.hear("a", 0, m.Ready(1, 0, None, "before"), 1.0)
    assert tally.state_digests == {"a": "now"}
    assert tally.counted("a").tokens == 2


@pytest.mark.slow(queued=False)
def test_a_coordinator_divides_the_parts_by_what_the_peers_offer() -> None:
    outcome = narrate(parse("peers 3\nuplinks 10+10+20"))
    begins = {line.partition("; ")[2] for line in outcome_lines(outcome) if "Begin" in line}
    assert not outcome.violation
    assert begins == {"p2:0-5"}


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
    reduction = Reduction(begin(), A, "a", 0.0)
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


def test_parts_that_were_owed_before_a_repair_are_owed_after_it() -> None:
    reduction = Reduction(begin(), A, "a", 0.0)
    for part, sender in product((0, 1), "ab"):
        reduction.contribution(sender, part, 1.0)
    reduction.look(1.0, 5.0, 20.0, {*"abc"})
    assert reduction.missing() == ("c",)
    assert reduction.times.until_s == 21.0  # nobody else owed anything
    repair = m.Repair(1, 0, 1, ("b",), (m.Span("a", 0, 2), m.Span("c", 2, 6)), "b died")
    moved, ready = reduction.repair(repair, 2.0)
    assert ([(span.owner, span.start, span.stop) for span in moved], ready) == ([("c", 2, 4)], [])
    reduction.look(2.0, 5.0, 20.0, {*"abc"})
    assert reduction.missing() == ("c",)
    assert reduction.times.until_s == 22.0
    assert [reduction.contribution("c", part, 3.0) for part in (0, 1)] == [True, True]
    assert [reduction.average(part) for part in (0, 1)] == [(), ()]  # b's bytes came before it died
    assert reduction.missing() == ("c",)  # which owes the means of its own parts, and of those of b
    for part, sender in enumerate("aacccc"):
        assert reduction.mean(part, sender, (), 4.0) == (part == 5)


@pytest.mark.parametrize(
    ("members", "voters", "until_s"),
    [
        ("abcd", "abcd", 21.0),
        ("abc", "abc", 21.0),  # the other receiver is a joiner
        ("ac", "ac", math.inf),  # the other receivers are joiners
        ("abcd", "a", 21.0),
        ("abcd", "ac", math.inf),
        ("ac", "a", math.inf),
    ],
)
def test_half_of_the_members_or_of_those_who_vote_are_waited_for(members: str, voters: str, until_s: float) -> None:
    reduction = Reduction(replace(begin(owners="c"), receivers=tuple(MEMBERS[:4])), A, "a", 0.0)
    reduction.look(1.0, 5.0, 20.0, {*members}, {*voters})
    assert reduction.missing() == ("c",)
    assert reduction.times.until_s == until_s


def test_what_the_first_of_a_few_took_is_what_others_have() -> None:
    times = Times(0.0)
    times.look(0.1, {"b", "c"}, few=True, direct=True, grace_s=5.0, alone_s=480.0)
    assert times.until_s == 480.1  # there is nothing to compare with
    times.look(100.0, {"c"}, few=True, direct=True, grace_s=5.0, alone_s=480.0)
    assert times.until_s == 100.0 + 300.0
    times.look(200.0, {"c"}, few=True, direct=True, grace_s=5.0, alone_s=480.0)
    assert times.until_s == 100.0 + 300.0


def test_bytes_have_the_time_that_versions_take_of_late_and_twice_that_in_the_next_attempt() -> None:
    policy = Policy(1, 5.0, 120.0)
    assert policy.bytes_grace(0.0, 0) == (5.0, 480.0)
    assert policy.bytes_grace(10.0, 0) == (5.0, 30.0)
    assert policy.bytes_grace(1000.0, 0) == (5.0, 3000.0)
    assert policy.bytes_grace(10.0, 2) == (5.0, 120.0)
    assert policy.bytes_grace(0.0, 99) == policy.bytes_grace(1e9, 0) == (5.0, 16 * 480.0)


def test_the_commit_names_the_parts_that_omit_somebody() -> None:
    reduction = Reduction(begin(), A, "a", 0.0)
    for part in range(6):
        owner = "abc"[part // 2]
        omitted = ("b",) if part in (0, 1, 4) else ()
        assert reduction.mean(part, owner, omitted, 1.0) == (part == 5)
    counted, omitted_ranges = reduction.counted()
    assert [entry.peer for entry in counted] == ["a", "b", "c"]
    assert omitted_ranges == (Omitted("b", 0, 2), Omitted("b", 4, 5))


def test_who_is_in_no_part_is_not_counted() -> None:
    reduction = Reduction(begin(), A, "a", 0.0)
    for part in range(6):
        reduction.mean(part, "abc"[part // 2], ("c",), 1.0)
    assert [entry.peer for entry in reduction.counted()[0]] == ["a", "b"]


def test_a_mean_counts_only_from_the_parts_present_owner() -> None:
    reduction = Reduction(begin(parts=3), A, "a", 0.0)
    assert not reduction.mean(1, "c", (), 1.0)
    assert reduction.absent == {0, 1, 2}


# ---------------------------------------------------------------- who may speak


def said(sender: Member, body: m.Body, sequence: int = 1, head: str = "", lineage: str = "lineage") -> m.Envelope:
    return m.Envelope(
        "run", "contract", lineage, sender, boot=0, before=0, saved=0, head=head, sequence=sequence, body=body
    )


def envelope(sequence: int, sender: Member = B) -> m.Envelope:
    return said(sender, m.Evict("nobody", 1), sequence)


def test_no_message_is_taken_twice_whatever_the_order() -> None:
    admission = Admission("run", "contract")
    order = [3, 1, 2, 5, 4, WINDOW + 5]
    assert [admission.replayed(envelope(sequence), 0.0) for sequence in order] == [False] * 6
    assert [admission.replayed(envelope(sequence), 0.0) for sequence in order] == [True] * 6
    assert admission.replayed(envelope(6), 0.0) is False
    assert admission.replayed(envelope(0), 0.0) is True
    assert admission.replayed(envelope(1, replace(B, incarnation=99)), 0.0) is False


def test_a_number_far_ahead_costs_no_memory() -> None:
    """A bit for each number that was left out would fill all of it."""
    admission = Admission("run", "contract")
    order = [2**63 - 1, 2, 2**63 - 2, 2**63 - 1]
    assert [admission.replayed(envelope(sequence), 0.0) for sequence in order] == [False, True, False, True]


def test_one_lie_about_a_number_mutes_no_peer_that_speaks() -> None:
    admission = Admission("run", "contract")
    order = [(1, 0.0), (2**63 - 1, 0.5), (2, 1.0), (2 + MAX_JUMP, 1.5), (3, 2.0)]
    assert [admission.replayed(envelope(sequence), now) for sequence, now in order] == [False, True, False, False, True]


def test_a_peer_that_was_cut_off_for_long_is_heard_again() -> None:
    admission = Admission("run", "contract")
    order = [(1, 0.0), (3 * MAX_JUMP, QUIET_S), (3 * MAX_JUMP, QUIET_S + 0.1)]
    assert [admission.replayed(envelope(sequence), now) for sequence, now in order] == [False, True, False]


def test_names_are_forgotten_only_when_there_are_many() -> None:
    admission = Admission("run", "contract")
    for number in range(MAX_NAMES):
        admission.replayed(envelope(1, replace(B, peer=f"p{number}")), 0.0)
    admission.forget(["p7"])
    assert len(admission) == MAX_NAMES
    admission.replayed(envelope(1, C), 0.0)
    admission.forget(["p7"])
    assert len(admission) == 1
    assert admission.replayed(envelope(1, replace(B, peer="p7")), 0.0)


def sends(effects: Sequence[fx.Effect], kind: type[BodyT]) -> list[tuple[Member, BodyT]]:
    """Messages of that kind, and to whom they go."""
    found = [(effect.to, effect.envelope.body) for effect in effects if isinstance(effect, fx.Send)]
    return [(to, body) for to, body in found if isinstance(body, kind)]


class OnPaper(Machine):
    """A machine whose disk has at once what is to be saved."""

    def __init__(
        self, me: Member, rules: Rules, timing: Timing, restored: Restored | None = None, boot: int = 0
    ) -> None:
        super().__init__(me, rules, timing, "lineage", False, 0.0, boot=boot, restored=restored)
        self.numbers = count(1)
        """Numbers of messages that it hears."""

    def handle(self, event: m.Event, now: float) -> list[fx.Effect]:
        return self._saved(super().handle(event, now), now)

    def receive(self, envelope: m.Envelope, now: float) -> tuple[m.Reply, list[fx.Effect]]:
        reply, effects = super().receive(envelope, now)
        return reply, self._saved(effects, now)

    def hear(self, sender: Member, body: m.Body, now: float) -> list[fx.Effect]:
        """Effects of a message of a peer that stands where this one does."""
        head = self.commit.digest if self.commit is not None else ""
        return self.receive(said(sender, body, next(self.numbers), head, self.lineage), now)[1]

    def _saved(self, effects: list[fx.Effect], now: float) -> list[fx.Effect]:
        numbers = [effect.number for effect in effects if isinstance(effect, fx.Save)]
        return [*effects, *(self.handle(m.Saved(max(numbers)), now) if numbers else ())]


def voters(members: Iterable[Member], since: int = -1) -> tuple[Voter, ...]:
    """Members as voters: for long, if nothing else is said."""
    return tuple(Voter(member.peer, 0, since) for member in members)


def standing(
    version: int,
    policy: Policy = SYNC,
    view: tuple[Member, ...] = (A, B, C),
    voting: Sequence[Voter] | None = None,
    seat: Member | None = None,
    stall_s: float = 4.0,
    rules: Rules = RULES,
) -> OnPaper:
    """The machine of a, which has just come to that version with b and c. `seat`: who leads the first attempt."""
    rules = replace(rules, start_peers=3, policy=policy)
    machine = OnPaper(A, rules, Timing(0.5, 4.0, stall_s))
    names = voters(view) if voting is None else tuple(voting)
    held = leases.found([member.peer for member in view if not member.witness], RULES.bounds.lease_blocks)
    commits = (
        Commit(version, version, "", "lineage", 0, view, (), (), "", tokens, held, "", voters=names)
        for tokens in count()
    )
    commit = next(commit for commit in commits if seat is None or seat_after(commit, 0) == seat)
    machine.handle(m.StateHeld(version, "state", commit), 0.0)
    return machine


def following(before: Commit, mean_digest: str) -> Commit:
    """The commit of the next version, which counts b."""
    counted, version, height = (Counted("b", 0, before.version, 1, 10, 0),), before.version + 1, before.height + 1
    tokens, digests = before.tokens + 10, {"mean_digest": mean_digest, "state_digest": "state"}
    return replace(
        before, version=version, height=height, previous=before.digest, counted=counted, tokens=tokens, **digests
    )


@pytest.mark.parametrize(
    ("version", "now", "told"),
    [(6, 0.4, False), (6, 0.6, True), (5, 0.1, True), (7, 0.6, False)],
    ids=["its heartbeat crossed with the commit", "it missed the commit", "it is far behind", "it is here"],
)
def test_who_is_behind_is_told_of_the_commit(version: int, now: float, told: bool) -> None:
    beat = m.Heartbeat(version, version, False, Progress())
    _, effects = standing(7).receive(said(B, beat), now)
    assert any(isinstance(e, fx.Send) and isinstance(e.envelope.body, m.Committed) for e in effects) is told


@pytest.mark.parametrize(("others", "asked"), [([WITNESS, B], [B]), ([B, C], [B]), ([WITNESS], [])])
def test_who_is_behind_asks_a_trainer_for_the_commits(others: list[Member], asked: list[Member]) -> None:
    """A witness has none to give: who asked it copied the whole state, and gave up its contribution."""
    machine = standing(7)
    effects: list[fx.Effect] = []
    for other in others:
        beat = m.Heartbeat(9, 9, False, Progress())
        effects += machine.receive(said(other, beat), 0.1)[1]
    assert [effect.source for effect in effects if isinstance(effect, fx.CatchUp)] == asked


def test_a_copy_of_the_version_that_we_stand_at_forgets_no_promise() -> None:
    machine = standing(7)
    commit = machine.commit
    assert commit is not None
    seated = machine._acceptor.seat(1)
    assert seated in (B, C)
    machine.hear(seated, m.Gather(7, 1, "again"), 0.1)
    assert machine.attempt == 1
    machine.handle(m.StateHeld(7, "as the others have it", replace(commit)), 0.2)
    assert machine.attempt == 1
    machine.handle(m.StateHeld(8, "state", replace(commit, version=8, height=8)), 0.3)
    assert (machine.attempt, machine.version) == (0, 8)


def test_nobody_speaks_in_our_own_name() -> None:
    """Our own commits are not checked again: in our name a member could have us take any."""
    machine = standing(7)
    before = machine.commit
    assert before is not None
    forged = replace(following(before, ""), fragment=-1, drafter="b", counted=(), state_digest="", tokens=10**15)
    reply, effects = machine.receive(said(A, m.Committed(forged), 1, before.digest), 0.1)
    assert (reply, effects, machine.commit) == (m.Reply.MALFORMED, [], before)
    assert machine.admits("run", "contract", "lineage", A, 0.1) is m.Reply.MALFORMED


def begun(machine: OnPaper, *receivers: Member) -> m.Begin:
    """The reduction of version 8, led by b, as the machine of a takes part in it."""
    attempt = next(attempt for attempt in range(9) if machine._acceptor.seat(attempt) == B)
    counted = tuple(Counted(name, 0, 7, 1, 2, 2) for name in ("b", "c"))
    begin = m.Begin(7, attempt, counted, receivers, (m.Span("b", 0, 6),), "state")
    (began,) = [e.begin for e in machine.hear(B, begin, 0.1) if isinstance(e, fx.BeginReduction)]
    return began


def test_the_mean_goes_to_no_stranger_that_only_a_coordinator_names() -> None:
    strangers = [Member(f"s{number}", 1, f"bystander:{number}") for number in range(3)]
    assert begun(standing(7), A, B, C, *strangers, replace(C, incarnation=77)).receivers == (A, B, C)


def test_a_repair_leaves_somebody() -> None:
    """A mean of nobody's bytes is an error of some codecs, and makes no sense with the others."""
    machine = standing(7)
    key = begun(machine, A, B, C).key
    for gone, taken in ((("b", "c"), False), (("c",), True)):
        effects = machine.hear(B, m.Repair(*key, 1, gone, (m.Span("b", 0, 6),), "a lie"), 0.2)
        assert any(isinstance(effect, fx.RepairReduction) for effect in effects) is taken
    effects = machine.hear(B, m.Repair(*key, 2, ("b",), (m.Span("c", 0, 6),), "in two steps"), 0.3)
    assert not any(isinstance(effect, fx.RepairReduction) for effect in effects)


def test_nobody_takes_part_in_a_begin_out_of_turn() -> None:
    """Only the coordinator of an attempt begins it, and a peer that has gone on to a later one does not go back."""

    def begins(attempt: int, sender: Member, height: int = 7) -> bool:
        begin = m.Begin(height, attempt, (Counted("b", 0, 7, 1, 2, 2),), (A, B, C), (m.Span("b", 0, 6),), "state")
        return any(isinstance(effect, fx.BeginReduction) for effect in machine.hear(sender, begin, 0.1))

    machine = standing(7)
    turns = [machine._acceptor.seat(attempt) for attempt in range(6)]
    early, late = [attempt for attempt in range(6) if turns[attempt] == B]
    assert not begins(early, C)
    assert not begins(late, C)
    assert not begins(late, B, height=6)
    assert not begins(late, B, height=8)
    assert (machine.attempt, machine.reducing) == (0, None)
    assert begins(late, B)
    assert machine.reducing == (7, late, 0)
    assert not begins(early, B)
    assert machine.reducing == (7, late, 0)


@pytest.mark.parametrize("asks", [m.Gather, m.Propose])
def test_who_said_goodbye_promises_and_accepts_nothing_more(asks: type) -> None:
    """Others take it for dead: what it would say beside that they would not know of."""
    machine = standing(7)
    commit = machine.commit
    assert commit is not None
    attempt = next(attempt for attempt in (1, 2, 3) if machine._acceptor.seat(attempt) == C)
    machine.handle(m.MeanHeld("mean"), 0.1)
    goodbyes = sends(machine.handle(m.LeaveWanted(now=True), 0.2), m.Goodbye)
    assert [to for to, _ in goodbyes] == [B, C]
    assert machine.gone
    proposed = following(commit, "mean")
    body = m.Gather(7, attempt, "again") if asks is m.Gather else m.Propose(7, attempt, proposed)
    assert machine.receive(said(C, body, head=commit.digest), 0.3) == (m.Reply.STALE, [])
    assert machine.handle(m.Tick(), 9.0) == []


def test_a_mean_equal_to_an_earlier_version_s_has_to_be_here_anew() -> None:
    """The earlier one may be here no more, and the log on the disk has it under the earlier version."""
    machine = standing(7)
    first = machine.commit
    assert first is not None
    machine.handle(m.MeanHeld("mean"), 0.1)
    second = following(first, "mean")
    machine.receive(said(C, m.Committed(second), head=second.digest), 0.2)
    assert machine.commit == second
    third = following(second, "mean")
    leader = machine._acceptor.seat(0)
    machine.receive(said(leader, m.Propose(8, 0, third), head=second.digest), 0.3)
    assert machine._acceptor.accepted == (-1, None)
    machine.handle(m.MeanHeld("mean"), 0.4)
    assert machine._acceptor.accepted == (0, third)


@pytest.mark.parametrize(
    ("policy", "until_s"),
    [(SYNC, 14.0), (Policy(1, 0.2, 20.0, uses_slack=True), 12.0)],
    ids=["a moment", "while all have inner steps to do"],
)
def test_a_commit_with_its_majority_waits_for_those_that_are_silent(policy: Policy, until_s: float) -> None:
    machine, tally = standing(7, policy), Tally(0)
    assert machine._coordinator._patient_until_s(tally) == math.inf
    for peer, slack_s in (("a", 5.0), ("b", 9.0)):
        tally.hear(peer, 0, m.Ready(7, 0, m.Offer(0, 7, 1, 2, 3, slack_s=slack_s), "state"), 7.0)
    tally.majority_at_s = 10.0
    assert machine._coordinator._patient_until_s(tally) == until_s


def test_an_earlier_life_is_not_heard_again() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    later = replace(B, incarnation=50)
    assert roster.may_speak(B, 0.0)
    roster.heard(B, 0.0)
    assert not roster.may_speak(replace(later, address="elsewhere:1"), 1.0)  # two processes of one name
    assert roster.may_speak(later, 1.0)  # the same address: the former process is gone
    roster.heard(later, 1.0)
    assert not roster.may_speak(B, 99.0)
    roster.meet([B], 99.0)
    assert roster.alive(later, 2.0)


def test_a_life_whose_vote_is_kept_does_not_take_its_place_back() -> None:
    """Its next life had a clock that began anew, and had heard nobody yet."""
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    roster.meet([B], 0.0)
    next_life = replace(B, incarnation=B.incarnation - 1)
    assert not roster.may_speak(next_life, 59.0)
    assert roster.may_speak(next_life, 61.0)
    roster.heard(next_life, 61.0, m.Heartbeat(-1, -1, True, Progress(), deaf=True))
    roster.meet([A, B, C], 61.1, before=[A, B, C])
    assert roster.may_speak(next_life, 61.2)


@pytest.mark.parametrize(
    ("life", "lineage", "reply", "voters"),
    [
        (B.incarnation, "lineage", m.Reply.OK, "ac"),
        (B.incarnation - 1, "lineage", m.Reply.STALE, "abc"),
        (B.incarnation + 1, "lineage", m.Reply.OK, "abc"),
        (B.incarnation, "another", m.Reply.OTHER_LINEAGE, "abc"),
    ],
    ids=["of its life in the view", "of the life before", "of one that comes yet", "of another lineage"],
)
def test_an_eviction_is_of_one_life_of_a_peer(life: int, lineage: str, reply: m.Reply, voters: str) -> None:
    """One that came late, when the next life was in the view, took that life's vote and called it gone."""
    machine = standing(7)
    told = said(Member("operator", 0, ""), m.Evict("b", life), 0, lineage=lineage)
    for now in (0.1, 0.2):  # it may be heard twice
        assert machine.receive(told, now)[0] is reply
    assert machine.electorate.voters() == set(voters)
    assert {member.peer for member in machine.alive()} == set(voters)
    next_life = replace(B, incarnation=B.incarnation + 1)
    assert machine.commit is not None
    later = replace(machine.commit, version=8, height=8, view=(A, next_life, C))
    machine.handle(m.StateHeld(8, "state", later), 0.3)
    assert ("b" in machine.electorate.voters()) is (life <= B.incarnation)


@pytest.mark.parametrize(
    ("gone", "accepts", "given_up"),
    [("b", False, False), ("bc", False, True), ("bc", True, False)],
    ids=["one of two", "both", "both, and one that has it lives"],
)
def test_a_mean_is_given_up_only_when_an_operator_answers_for_all_who_may_have_it(
    gone: str, accepts: bool, given_up: bool
) -> None:
    """One of them was evicted, and another, which was only out of reach, had made the version that was given up. Who
    accepted has the mean: it may take long to come over its uplink."""
    machine = standing(7, view=(A, B, C, D, WITNESS))
    commit = machine.commit
    assert commit is not None
    attempt = next(attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) == A)
    accepted = following(commit, "with b and c")
    now = 4.5  # b and c are silent
    notes: list[str] = []

    def note(effects: list[fx.Effect]) -> None:
        notes.extend(effect.reason for effect in effects if isinstance(effect, fx.Note))

    for peer in gone:
        evict = m.Evict(peer, {"b": B, "c": C}[peer].incarnation)
        machine.receive(said(Member("operator", 0, ""), evict, 0), now)
    lost_with: set[str] = set()
    while now < 15.5 and machine.height == 7:
        now += 0.25
        for sender in (D, WITNESS):
            machine.hear(sender, m.Heartbeat(7, 7, False, Progress()), now)
        note(machine.hear(D, m.Ready(7, attempt, None, "state"), now))
        note(machine.hear(WITNESS, m.Ready(7, attempt, None, "state", 0, accepted), now))
        if accepts:
            note(machine.hear(D, m.Accept(7, attempt, accepted.digest), now))
        note(machine.handle(m.Tick(), now))
        lost_with.update(json.loads(status_json(machine, None, 0, (), 0, now))["mean_lost_with"])
    assert any("died with an evicted peer" in note for note in notes) is given_up
    assert lost_with == (set() if given_up or accepts else {"c"})
    assert machine.commit is not None
    if given_up:  # in a lineage apart: within one, what was accepted is never passed over
        assert (machine.commit.founds, machine.commit.evicted, machine.view) == (True, ("b", "c"), (A, D, WITNESS))
    else:
        assert machine.commit == commit


def test_evictions_that_never_matter_are_forgotten_in_the_end() -> None:
    electorate = Electorate()
    for life in range(MAX_EVICTED + 1):
        electorate.evict("b", B.incarnation + life)
    electorate.stand(naming(A, B))
    assert electorate.voters() == {"a", "b"}
    electorate.stand(naming(A, replace(B, incarnation=B.incarnation + 1)))
    assert electorate.voters() == {"a"}


def test_one_that_left_and_goes_on_in_another_lineage_is_spoken_to_at_its_address() -> None:
    roster, elsewhere = Roster(A, suspect_s=4.0, offences_allowed=3), replace(C, address="elsewhere:1")
    roster.meet([B, C], 0.0)
    for member in (B, C):
        roster.left(member)
    roster.introduce(B, 1.0)
    roster.introduce(elsewhere, 1.0)
    assert roster.strangers(1.0) == [B]
    roster.answered(elsewhere)
    assert [one.address for one in roster.strangers(1.0)] == [B.address, elsewhere.address]


def test_what_the_directory_lists_without_saying_so_is_a_witness_by_its_own_word() -> None:
    """It would coordinate, otherwise, where it has no state."""
    roster, listed = Roster(A, suspect_s=4.0, offences_allowed=3), replace(WITNESS, witness=False)
    for at_s in (0.0, 9.0):  # then it is silent
        roster.meet([listed], at_s)
        roster.answered(listed)
        if not at_s:
            roster.heard(WITNESS, 1.0)
        assert roster.latest(WITNESS).witness


def test_a_process_is_of_one_life_of_its_peer() -> None:
    """Or a voter would be named in a process that it never had, and no proof of death would be of that."""
    roster, later = Roster(A, suspect_s=4.0, offences_allowed=3), replace(B, incarnation=B.incarnation + 1)
    for member, boot in ((B, 5), (later, 7)):
        roster.heard(member, 0.0)
        roster.runs(m.Envelope("run", "contract", "lineage", member, boot, 0, 0, "", 1, m.Goodbye()), evicted=False)
        assert roster.boot_of(member) == boot
    assert roster.boot_of(B) == 0


def test_a_suspected_peer_refutes_with_its_next_word() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    roster.meet([B], 0.0)
    assert not roster.alive(B, 4.1)
    roster.heard(B, 4.2)
    roster.unreachable(B)
    assert not roster.alive(B, 4.3)
    roster.heard(B, 4.4)
    assert not roster.alive(B, 4.5)  # one that is heard may still be out of reach
    roster.answered(B)
    assert roster.alive(B, 4.7)


def test_nothing_goes_to_an_address_that_is_a_strangers_word_until_it_answers() -> None:
    machine = standing(7)
    behind = m.Heartbeat(-1, -1, True, Progress())
    assert not sends(machine.receive(said(X, behind, 1), 0.5)[1], m.Committed)
    assert X not in [to for to, _ in sends(machine.handle(m.Tick(), 1.0), m.Heartbeat)]
    machine.handle(m.Reached(replace(X, address="elsewhere:1")), 1.1)
    assert sends(machine.receive(said(X, behind, 2), 1.2)[1], m.Committed)[0][0].address == "elsewhere:1"
    assert X in [to for to, _ in sends(machine.handle(m.Tick(), 2.0), m.Heartbeat)]


@pytest.mark.parametrize("reached", [False, True])
def test_no_commits_and_no_state_are_fetched_from_an_address_that_is_a_strangers_word(reached: bool) -> None:
    ahead = m.Heartbeat(99, 99, False, Progress(), committed_tokens=10**9)
    machine = standing(7)
    machine.hear(X, m.Heartbeat(7, 7, True, Progress()), 0.4)
    if reached:
        machine.handle(m.Reached(X), 0.5)
    assert [effect.source for effect in machine.hear(X, ahead, 5.0) if isinstance(effect, fx.CatchUp)] == [X] * reached
    apart = standing(7, rules=replace(RULES, continue_after_s=1.0))
    for now in (0.5, 0.7):
        _, effects = apart.receive(said(X, ahead, next(apart.numbers), lineage="another"), now)
        if reached:
            apart.handle(m.Reached(X), now + 0.1)
    assert [effect.source for effect in effects if isinstance(effect, fx.Resync)] == [X] * reached


def test_a_voter_is_called_where_the_view_has_it_though_a_later_life_has_its_place() -> None:
    """That it is dead can still be proven there."""
    machine = standing(7)
    machine.receive(said(replace(B, incarnation=9, address="b:9"), m.Heartbeat(-1, -1, True, Progress()), 1), 60.0)
    assert B in [to for to, _ in sends(machine.handle(m.Tick(), 61.0), m.Heartbeat)]


def test_the_roster_is_bounded_and_those_who_answered_stay_longest() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    roster.meet([B], 0.0)
    roster.heard(C, 0.1)
    roster.answered(C)
    for number in range(2 * MAX_NAMES):
        roster.heard(replace(D, peer=f"stranger{number}"), 1.0 + number)
    assert len([*roster]) == MAX_NAMES
    assert all(map(roster.is_located, (B, C)))
    assert roster.awaits(replace(D, peer=f"stranger{2 * MAX_NAMES - 1}"))


def test_an_attempt_far_ahead_is_a_lie() -> None:
    """It would leave no later number for anybody."""
    machine = standing(7)
    gathers = [(attempt, m.Gather(7, attempt, "")) for attempt in (m.MAX_ATTEMPTS_AHEAD + 1, m.MAX_ATTEMPTS_AHEAD)]
    replies = [machine.receive(said(B, body, number), 0.5)[0] for number, (_, body) in enumerate(gathers, 1)]
    assert [reply is m.Reply.MALFORMED for reply in replies] == [True, False]


def test_lineages_are_learnt_from_members_and_only_so_many() -> None:
    machine = standing(7)
    forks = tuple(m.Fork(f"F{number}", number) for number in range(m.MAX_FORKS))
    machine.hear(X, m.Heartbeat(7, 7, True, Progress(), forks=forks), 0.5)
    assert machine.forks == ()
    machine.hear(B, m.Heartbeat(7, 7, False, Progress(), forks=forks), 0.6)
    assert machine.forks == forks
    machine.comes_after((*forks, m.Fork("latest", 99)))
    assert machine.forks == (*forks[1:], m.Fork("latest", 99))


@pytest.mark.parametrize(("suspect_s", "until_s"), [(2.0, 3.0), (4.0, 5.0), (15.0, 5.0)])
def test_a_joiner_that_answers_nobody_is_not_waited_for_long(suspect_s: float, until_s: float) -> None:
    roster = Roster(A, suspect_s, offences_allowed=3)
    roster.heard(B, 0.0)
    assert [roster.is_unreached(B, now) for now in (until_s, until_s + 0.1)] == [False, True]
    roster.answered(B)
    assert not roster.is_unreached(B, until_s + 0.1)


@pytest.mark.parametrize(("sequence", "reply", "alive"), [(1, m.Reply.REPLAYED, False), (2, m.Reply.OK, True)])
def test_what_a_dead_peer_said_once_is_no_sign_of_life_when_it_comes_again(
    sequence: int, reply: m.Reply, alive: bool
) -> None:
    machine = standing(7)

    def hear(sequence: int, now: float) -> m.Reply:
        beat = m.Heartbeat(7, 7, False, Progress())
        return machine.receive(said(B, beat, sequence), now)[0]

    assert hear(1, 0.5) is m.Reply.OK
    assert machine.roster.alive(B, 1.0)
    machine.handle(m.Unreachable(B), 1.0)
    machine.handle(m.Reached(B), 98.0)
    assert hear(sequence, 99.0) is reply
    assert machine.roster.alive(B, 99.0) is alive


@pytest.mark.slow(queued=False)
def test_nobody_waits_for_a_peer_that_hears_nobody() -> None:
    """It lives, for all that the others hear; but what they say to it as their coordinator never arrives."""
    outcome = narrate(parse("peers 3\n5 cut p0 for 20: in"))
    closed = [float(line.split()[0]) for line in outcome_lines(outcome) if "CLOSES" in line]
    assert not outcome.violation
    assert sum(7.0 < at_s < 25.0 for at_s in closed) > 10


def test_who_was_deaf_is_heard_again() -> None:
    machine = standing(7)
    for sequence, deaf in enumerate((False, True, False), 1):
        beat = m.Heartbeat(7, 7, False, Progress(), deaf=deaf)
        machine.receive(said(B, beat, sequence), sequence)
        assert machine.roster.alive(B, sequence) is not deaf
    assert not machine.roster.deaf(7.0)
    assert machine.roster.deaf(7.1)


def test_each_joiner_that_nobody_reaches_is_told_of_once() -> None:
    machine = standing(7)
    notes: list[str] = []
    for second in range(10):
        for name in ("x", "y"):
            joiner = Member(name, 1, f"{name}:1")
            beat = m.Heartbeat(-1, -1, True, Progress())
            reply, effects = machine.receive(said(joiner, beat, second + 1), second)
            notes += [effect.reason for effect in effects if isinstance(effect, fx.Note)]
    assert reply is m.Reply.UNREACHED
    assert notes == [f"nobody reaches {name}:1, so that {name} cannot join" for name in ("x", "y")]


def test_what_is_sent_to_the_address_that_a_life_left_says_nothing_of_the_life() -> None:
    machine = standing(7)
    elsewhere = replace(B, address="b:2")
    machine.receive(said(elsewhere, m.Heartbeat(7, 7, False, Progress()), 1), 0.5)
    assert machine.roster.latest(B).address == B.address, "so far it is only its own word"
    machine.handle(m.Reached(elsewhere), 0.5)
    machine.handle(m.Unreachable(B), 0.6)
    assert machine.roster.alive(B, 0.7)
    machine.handle(m.Unreachable(elsewhere), 0.8)
    assert not machine.roster.alive(B, 0.9)


def test_a_coordinator_that_goes_on_elsewhere_says_where() -> None:
    """The view still has its old address."""
    machine = standing(7, seat=A)
    machine.listen_at("a:2")
    offer = m.Offer(0, 7, 1, 10, 0)
    machine.handle(m.Offered(offer), 0.1)
    effects = [effect for sender in (B, C) for effect in machine.hear(sender, m.Ready(7, 0, offer, "state"), 0.1)]
    bodies = [effect.envelope.body for effect in effects if isinstance(effect, fx.Send)]
    begins = [body for body in bodies if isinstance(body, m.Begin)]
    assert {member.address for begin in begins for member in begin.receivers} == {"a:2", B.address, C.address}


def test_three_offences_bar_a_peer() -> None:
    roster = Roster(A, suspect_s=4.0, offences_allowed=3)
    for _ in range(2):
        roster.offended("b")
    assert not roster.barred("b")
    roster.offended("b")
    assert roster.barred("b")


# ---------------------------------------------------------------- members that come and go

X, Y = (Member(name, 20, f"{name}:1") for name in "xy")


def reducing() -> OnPaper:
    """The machine of a, which leads at version 7: a, b and c contribute to the reduction under way."""
    machine = standing(7, seat=A)
    offer = m.Offer(0, 7, 1, 10, 0)
    machine.handle(m.Offered(offer), 0.1)
    for sender in (B, C):
        machine.hear(sender, m.Ready(7, 0, offer, "state"), 0.1)
    machine.handle(m.Tick(), 0.15)  # what was not answered is said again: not soon another time
    assert machine.reducing == (7, 0, 0)
    return machine


def completes(machine: OnPaper, logged: bool = True) -> list[tuple[Member, m.Propose]]:
    """All of the mean comes, and the log takes it or not: what the machine proposes, and to whom."""
    for part, sender in product((0, 1), (B, C)):
        machine.handle(m.ContributionArrived(7, 0, sender.peer, part), 0.5)
    for part in (0, 1):
        machine.handle(m.PartFolded(7, 0, part), 0.5)
    for part, owner in enumerate("bbcc", 2):
        machine.handle(m.MeanArrived(7, 0, owner, part), 0.5)
    return sends(machine.handle(m.MeanHeld("mean", 7, 0, logged), 0.6), m.Propose)


def admits_x(machine: OnPaper) -> tuple[list[Member], Commit]:
    """x asks to join: what the machine proposes at its next tick, and to whom."""
    machine.hear(X, m.Heartbeat(7, -1, True, Progress()), 0.2)
    machine.handle(m.Reached(X), 0.2)
    proposals = sends(machine.handle(m.Tick(), 0.3), m.Propose)
    return [to for to, _ in proposals], proposals[0][1].commit


def test_bytes_go_where_a_life_listens_now() -> None:
    """A process that goes on with the disk of a life may have another address than the commit that names it."""
    machine, offer, moved = standing(7, seat=A), m.Offer(0, 7, 1, 10, 0), replace(B, address="b:2")
    machine.handle(m.Offered(offer), 0.1)
    machine.handle(m.Reached(moved), 0.1)
    effects = [effect for sender in (moved, C) for effect in machine.hear(sender, m.Ready(7, 0, offer, "state"), 0.1)]
    (begin,) = {to.address for to, _ in sends(effects, m.Begin) if to == B}
    (contribution,) = {
        effect.to.address for effect in effects if isinstance(effect, fx.SendContribution) and effect.to == B
    }
    assert (begin, contribution) == ("b:2", "b:2")
    for part, sender in product((0, 1), (B, C)):
        machine.handle(m.ContributionArrived(7, 0, sender.peer, part), 0.5)
    (mean,) = (effect for effect in machine.handle(m.PartFolded(7, 0, 0), 0.5) if isinstance(effect, fx.SendMean))
    assert [to.address for to in mean.to] == ["b:2", "c:1"]


def test_a_joiner_is_let_in_at_once_and_the_reduction_goes_on() -> None:
    machine = reducing()
    asked, commit = admits_x(machine)
    assert asked == [B, C]
    assert (commit.version, commit.height, commit.moves, commit.drafter) == (7, 8, False, "a")
    assert (commit.view, commit.voters) == ((A, B, C, X), voters((A, B, C)))
    machine.hear(B, m.Accept(7, 0, commit.digest), 0.4)
    assert (machine.commit, machine.version, machine.since_height) == (commit, 7, 7)
    assert machine.reducing == (7, 0, 0)
    assert machine._contributor.offer is not None


def test_the_mean_is_proposed_under_the_head_that_came_meanwhile() -> None:
    machine = reducing()
    _, head = admits_x(machine)
    machine.hear(B, m.Accept(7, 0, head.digest), 0.4)
    proposals = completes(machine)
    assert [to for to, _ in proposals] == [B, C, X]
    propose = proposals[0][1]
    assert (propose.key, propose.reduction_height, propose.reduction_attempt) == ((8, 0), 7, 0)
    commit = propose.commit
    assert (commit.version, commit.height, commit.previous, commit.drafter) == (8, 9, head.digest, "")
    assert (commit.mean_digest, [one.peer for one in commit.counted]) == ("mean", ["a", "b", "c"])
    assert (commit.view, commit.voters) == ((A, B, C, X), voters((A, B, C)))
    machine.hear(C, m.Accept(8, 0, commit.digest), 0.7)
    machine.hear(X, m.Accept(8, 0, commit.digest), 0.7)
    machine.hear(B, m.Accept(8, 0, commit.digest), 0.7)
    assert (machine.commit, machine.reducing, machine._contributor.offer) == (commit, None, None)


def test_a_leaver_goes_when_most_that_stay_stand_on_a_commit_without_it() -> None:
    """That it was decided is not enough: the vote that decided it may be the leaver's own, and known to it alone."""
    machine = standing(7, view=(A, B, C, D), seat=B)
    commit = machine.commit
    assert commit is not None
    machine.handle(m.LeaveWanted(), 0.1)
    effects = machine.handle(m.Tick(), 0.2)
    assert [(to, beat.leaving) for to, beat in sends(effects, m.Heartbeat)] == [(B, True), (C, True), (D, True)]
    view = (B, C, D)
    without = replace(
        commit, height=8, previous=commit.digest, fragment=-1, drafter="b", view=view, voters=voters(view)
    )
    machine.hear(B, m.Committed(without), 0.3)
    assert (machine.commit, machine.in_view, machine.gone) == (without, False, False)
    for sender, stands, goes in ((B, 8, False), (C, 7, False), (A, 8, False), (X, 8, False), (C, 8, True)):
        machine.hear(sender, m.Heartbeat(7, 8, False, Progress(), stands=stands), 0.4)
        goodbyes = sends(machine.handle(m.Tick(), 0.5), m.Goodbye)
        assert (bool(goodbyes), machine.gone) == (goes, goes)


def test_a_leaver_does_not_wait_for_voters_that_have_left() -> None:
    """Two leave at once, and the one that decided the commit without the other is alone after it and goes first: the
    other waited until its `leave_s` was over."""
    machine = standing(7, view=(A, B), seat=B)
    commit = machine.commit
    assert commit is not None
    machine.handle(m.LeaveWanted(), 0.1)
    without = replace(
        commit, height=8, previous=commit.digest, fragment=-1, drafter="b", view=(B,), voters=voters((B,))
    )
    machine.hear(B, m.Committed(without), 0.2)
    machine.handle(m.Tick(), 0.3)
    assert not machine.gone
    machine.hear(B, m.Goodbye(), 0.4)
    machine.handle(m.Tick(), 0.5)
    assert machine.gone


@pytest.mark.parametrize("evicted", [False, True], ids=["left", "evicted"])
def test_a_voter_that_left_uncounted_and_is_started_again_is_there_and_one_that_was_evicted_is_not(
    evicted: bool,
) -> None:
    """The one that stayed took it for gone for ever: one of two, which a restart with its disk did not help."""
    machine = standing(7, view=(A, B), seat=B)
    machine.hear(B, m.Heartbeat(7, 7, False, Progress(), leaving=True), 0.1)
    machine.hear(B, m.Goodbye(), 0.2)
    if evicted:
        machine.receive(said(Member("operator", 0, ""), m.Evict("b", B.incarnation), 0), 0.3)
    assert machine.alive() == [A]
    head = machine.commit.digest if machine.commit is not None else ""
    beat = said(B, m.Heartbeat(7, 7, False, Progress()), 1, head)
    assert machine.receive(replace(beat, boot=1), 5.0)[0] is m.Reply.OK
    assert machine.alive() == ([A] if evicted else [A, B])
    assert {to for to, _ in sends(machine.handle(m.Tick(), 5.0), m.Heartbeat)} == (set() if evicted else {B})


def test_of_voters_that_all_want_to_leave_one_stays() -> None:
    machine = standing(7)
    machine.handle(m.LeaveWanted(), 0.1)
    assert machine._membership.leavers() == {"a"}
    for sender, leavers in ((B, {"a", "b"}), (C, {"b", "c"})):
        machine.hear(sender, m.Heartbeat(7, 7, False, Progress(), leaving=True), 0.2)
        assert machine._membership.leavers() == leavers


@pytest.mark.parametrize("silent", [False, True])
def test_a_learner_votes_where_no_voter_that_lives_stays(silent: bool) -> None:
    """Also where another voter is silent: a commit that names nobody who votes would be the last."""
    machine = standing(7, voting=voters((A, B)))
    machine.hear(B, m.Heartbeat(7, 7, False, Progress(), leaving=not silent, reaches=("c",), stands=7), 0.1)
    machine.handle(m.Reached(C), 0.1)
    now = 20.0 if silent else 0.2
    machine.hear(C, m.Heartbeat(7, 7, False, Progress(), stands=7), now)
    machine.handle(m.LeaveWanted(), now)
    assert machine._membership.leavers() == ({"a"} if silent else {"a", "b"})
    commit = machine._drafter.view_commit()
    assert [voter.peer for voter in commit.voters] == ["c"]
    assert all(voter.peer in {member.peer for member in commit.view} for voter in commit.voters)


@pytest.mark.parametrize("old", range(1, 10))
def test_those_who_have_voted_before_stay_the_majority(old: int) -> None:
    """All that a commit names anew may die before they vote. The one exception is the second voter."""
    for proven in range(old + 1):
        named, most = most_named(old, proven), max(1, old // 2)
        assert named == 0 or 2 * proven > old + named or (old, named) == (1, 1)
        assert named == most or 2 * proven <= old + named + 1


@pytest.mark.parametrize(
    ("voting", "since", "stand", "named"),
    [
        ("a", -1, "a", "b"),
        ("ab", -1, "ab", "c"),
        ("ab", 7, "ab", ""),
        ("abc", -1, "abc", "d"),
        ("abc", -1, "ab", ""),
        ("abcd", -1, "abcd", "xy"),
        ("abcd", -1, "abc", "x"),
    ],
    ids=["the second", "the third", "named just now", "one of three", "one is behind", "two of four", "three of four"],
)
def test_a_version_commit_names_few_learners(voting: str, since: int, stand: str, named: str) -> None:
    view = (A, B, C, D, X, Y)
    learners = [member for member in view if member.peer not in voting]
    machine = standing(7, view=view, voting=[Voter(peer, 0, since) for peer in voting])
    reaches = tuple(member.peer for member in learners)
    for sender in view[1:]:
        stands = 7 if sender in learners or sender.peer in stand else 6
        machine.hear(sender, m.Heartbeat(7, 7, False, Progress(), reaches=reaches, stands=stands), 0.1)
        machine.handle(m.Reached(sender), 0.1)
    members, now_voting = machine._drafter._next_view(())
    assert tuple(members) == view
    assert now_voting == (*(Voter(peer, 0, since) for peer in voting), *(Voter(peer, 0, 8) for peer in named))


def test_a_learner_has_no_vote() -> None:
    machine = standing(7, voting=voters((A, B)), seat=A)
    _, commit = admits_x(machine)
    machine.hear(C, m.Accept(7, 0, commit.digest), 0.4)
    assert machine.height == 7
    machine.hear(B, m.Accept(7, 0, commit.digest), 0.4)
    assert machine.commit == commit


def test_a_learner_has_no_promise_to_give() -> None:
    machine = standing(7, voting=voters((A, B)), seat=B)
    machine.hear(X, m.Heartbeat(7, -1, True, Progress()), 0.2)
    machine.handle(m.Reached(X), 0.2)
    assert not sends(machine.hear(C, m.Ready(7, 1, None, "state"), 0.3), m.Propose)
    assert (machine.attempt, machine.reason) == (1, "attempt 1: 1 of 2 promises")
    assert sends(machine.hear(B, m.Ready(7, 1, None, "state"), 0.4), m.Propose)


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
        (history(("K", 90), ("L", 100), ("E", 180)), history(("L", 110), ("F", 250)), 100),  # one forgot the oldest
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
    turns = [in_turn(group, 4, turn) for turn in range(5)]
    assert turns[2] == ("p0", "p1", "p8", "p9")
    assert all(list(turn) == sorted(turn) and len(turn) == 4 for turn in turns)
    assert Counter(peer for turn in turns for peer in turn) == dict.fromkeys(group, 2)


@pytest.mark.slow(queued=False)
def test_each_fragment_has_the_contributions_of_all_peers_in_turn() -> None:
    outcome = narrate(parse("peers 4\ncodec topk\nmost_peers 2\nfragments 2\ncalm_s 7"))
    begins = [line.partition("Begin ")[2] for line in outcome_lines(outcome) if "Begin" in line]
    counted = {(int(begin.partition(".")[0]) % 2, begin.partition("with ")[2].partition(",")[0]) for begin in begins}
    assert not outcome.violation
    assert counted == {(0, "p0 p1"), (0, "p2 p3"), (1, "p0 p1"), (1, "p2 p3")}


def test_the_status_tells_of_who_answers_also_outside_the_view() -> None:
    """Else there is no address to print, and `diloco status` of a peer at the door failed. A former life is another."""
    machine = Machine(B, RULES, Timing(0.5, 4.0, 4.0), "lineage", False, 0.0)
    machine._chain.commit = Commit(
        1, 1, "", "lineage", 0, (A, replace(B, incarnation=1), C), (), (), "", 0, Leases(0, {}), ""
    )
    peers = {one["peer"]: one for one in json.loads(status_json(machine, None, 0, (), 0, 0.0))["peers"]}
    assert {name: one["in_view"] for name, one in peers.items()} == {"a": True, "c": True, "b": False}
    assert peers["b"]["address"] == B.address


# ---------------------------------------------------------------- disks, processes, histories


def bare(machine: OnPaper) -> Machine:
    """The same machine, whose disk takes its time."""
    machine._saved = lambda effects, now: effects  # type: ignore[method-assign]
    return machine


def test_a_promise_is_said_when_it_is_on_the_disk() -> None:
    machine = standing(7)
    seat = next(attempt for attempt in (1, 2, 3) if machine._acceptor.seat(attempt) == C)
    slow = bare(machine)
    effects = machine.hear(C, m.Gather(7, seat, "again"), 0.1)
    (save,) = [effect for effect in effects if isinstance(effect, fx.Save)]
    assert (save.record.promised, sends(effects, m.Ready)) == (seat, [])
    assert [to for to, _ in sends(slow.handle(m.Saved(save.number), 0.2), m.Ready)] == [C]


def test_a_disk_that_refuses_makes_a_voter_abstain_until_it_takes_the_promise() -> None:
    machine = standing(7)
    seat = next(attempt for attempt in (1, 2, 3) if machine._acceptor.seat(attempt) == C)
    slow = bare(machine)
    (save,) = [e for e in machine.hear(C, m.Gather(7, seat, "again"), 0.1) if isinstance(e, fx.Save)]
    assert sends(slow.handle(m.Saved(save.number, refused=True), 0.2), m.Ready) == []
    effects = slow.handle(m.Tick(), 1.0)
    assert {body.abstains for _, body in sends(effects, m.Heartbeat)} == {True}
    (again,) = [effect for effect in effects if isinstance(effect, fx.Save)]
    assert again.record == save.record
    assert [to for to, _ in sends(slow.handle(m.Saved(again.number), 1.1), m.Ready)] == [C]
    assert not machine._acceptor.abstains


def test_a_promise_of_an_attempt_that_is_over_is_not_said() -> None:
    """The disk has that of the attempt before. Said of the next, a restart would forget it: two commits of one head."""
    machine = standing(7)
    first, second = [attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) in (B, C)][:2]
    slow, commit = bare(machine), machine.commit
    assert commit is not None
    seats = [machine._acceptor.seat(attempt) for attempt in (first, second)]
    (save,) = [e for e in slow.hear(seats[0], m.Gather(7, first, "again"), 0.1) if isinstance(e, fx.Save)]
    slow.hear(seats[1], m.Propose(7, second, following(commit, "not here")), 0.2)
    assert machine.attempt == second
    assert sends(slow.handle(m.Saved(save.number), 0.3), m.Ready) == []


def test_a_head_that_the_disk_refused_is_on_it_before_anything_is_said() -> None:
    """Another record was on its way and was taken: alone it names no commit, and a restart would find a hole."""
    machine = standing(7, stall_s=0.4)
    slow, before = bare(machine), machine.commit
    assert before is not None
    slow.handle(m.MeanHeld("m8"), 0.1)
    (head,) = [e for e in slow.hear(B, m.Committed(following(before, "m8")), 0.2) if isinstance(e, fx.Save)]
    attempt = next(attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) == C)
    (promise,) = [e for e in slow.hear(C, m.Gather(8, attempt, "again"), 0.21) if isinstance(e, fx.Save)]
    assert (head.head, promise.head) == (machine.commit, None)
    assert slow.handle(m.Saved(head.number, refused=True), 0.22) == []
    assert sends(slow.handle(m.Saved(promise.number), 0.23), m.Ready) == []
    assert machine._acceptor.abstains
    assert machine._chain.standing == before
    (again,) = [e for e in slow.handle(m.Tick(), 0.3) if isinstance(e, fx.Save)]
    assert (again.head, again.record) == (machine.commit, promise.record)
    assert sends(slow.handle(m.Saved(again.number), 0.4), m.Ready)
    assert machine._chain.standing == machine.commit


def test_those_that_an_operator_leaves_alone_wait_for_each_other() -> None:
    """Two that did not hear each other for a moment, when the others were evicted, would each found a lineage."""
    machine = standing(7, view=(A, B, C, D), seat=A)
    beat = m.Heartbeat(7, 7, False, Progress())
    for gone in (C, D):
        machine.receive(said(Member("operator", 0, ""), m.Evict(gone.peer, gone.incarnation)), 5.0)
    machine.handle(m.Tick(), 5.1)
    assert machine.lineage == "lineage"
    assert "1 of 2 voters can be reached" in machine._membership.no_majority()
    machine.hear(B, beat, 5.2)
    machine.handle(m.Tick(), 5.3)
    assert machine.lineage != "lineage"
    assert [member.peer for member in machine.view] == ["a", "b"]


def proposed_unlogged() -> tuple[OnPaper, Member, m.Propose, list[fx.Effect]]:
    """The machine of a, whose log has refused a mean, when another proposes that."""
    machine, seat, attempt = led()
    assert machine.commit is not None
    machine.handle(m.MeanHeld("mean", logged=False), 0.1)
    proposal = m.Propose(7, attempt, following(machine.commit, "mean"))
    return machine, seat, proposal, machine.hear(seat, proposal, 0.2)


def test_who_lacks_the_mean_in_its_log_accepts_when_it_has_room_for_it() -> None:
    """Rule 5. The vote has a kB, and may fit on a disk that has no room for the mean."""
    machine, seat, proposal, effects = proposed_unlogged()
    assert (sends(effects, m.Accept), machine._acceptor.accepted) == ([], (-1, None))
    effects = machine.handle(m.Tick(), 1.0)
    assert {body.abstains for _, body in sends(effects, m.Heartbeat)} == {True}
    assert fx.LogMean("mean") in effects
    assert fx.LogMean("mean") not in machine.handle(m.Tick(), 1.2)
    assert fx.LogMean("mean") in machine.handle(m.Tick(), 1.6)
    machine.handle(m.MeanHeld("mean", logged=False), 1.7)
    assert [to for to, _ in sends(machine.handle(m.MeanHeld("mean"), 1.8), m.Accept)] == [seat]
    assert machine._acceptor.accepted == (proposal.attempt, proposal.commit)
    assert not machine.abstains
    assert fx.LogMean("mean") not in machine.handle(m.Tick(), 9.0)


def test_what_others_decide_closes_with_the_mean_in_memory_alone() -> None:
    """And this voter is passed over as coordinator until its log takes the mean of a later version."""
    machine, seat, proposal, _ = proposed_unlogged()
    assert fx.Close(proposal.commit) in machine.hear(seat, m.Committed(proposal.commit), 0.3)
    assert machine.abstains
    assert fx.LogMean("mean") not in machine.handle(m.Tick(), 9.0)
    machine.handle(m.MeanHeld("later", logged=False), 9.1)
    machine.handle(m.MeanHeld("later"), 9.2)
    assert not machine.abstains


def test_a_disk_that_takes_votes_again_has_not_logged_the_mean_and_the_other_way_round() -> None:
    machine, seat, attempt = led()
    slow = bare(machine)
    (save,) = [e for e in machine.hear(seat, m.Gather(7, attempt, "again"), 0.1) if isinstance(e, fx.Save)]
    slow.handle(m.Saved(save.number, refused=True), 0.2)
    slow.handle(m.MeanHeld("mean", logged=False), 0.3)
    again = slow.handle(m.Tick(), 1.0)
    assert fx.LogMean("mean") in again
    (save,) = [effect for effect in again if isinstance(effect, fx.Save)]
    slow.handle(m.Saved(save.number), 1.1)
    assert machine.abstains
    assert not any(isinstance(effect, fx.Save) for effect in slow.handle(m.Tick(), 2.0))
    slow.handle(m.MeanHeld("mean"), 2.1)
    assert not machine.abstains
    slow.handle(m.MeanHeld("mean", logged=False), 2.2)
    slow.handle(m.Saved(save.number, refused=True), 2.3)
    slow.handle(m.MeanHeld("mean"), 2.4)
    assert machine.abstains


def test_a_lone_voter_with_a_full_disk_closes_nothing_until_there_is_room() -> None:
    machine = standing(7, view=(A,))
    machine.handle(m.Offered(m.Offer(0, 7, 1, 10, 0)), 0.1)
    for part in range(RULES.parts[0]):
        machine.handle(m.PartFolded(7, 0, part), 0.2)
    machine.handle(m.MeanHeld("mean", 7, 0, logged=False), 0.3)
    begun = 0
    for tick in range(1, 100):
        begun += sum(isinstance(effect, fx.BeginReduction) for effect in machine.handle(m.Tick(), 0.3 + tick))
    assert (machine.version, machine._acceptor.accepted, begun) == (7, (-1, None), 0)
    assert machine.reason.startswith("the log refuses the mean")
    machine.hear(X, m.Heartbeat(7, -1, True, Progress()), 99.6)
    machine.handle(m.Reached(X), 99.6)
    machine.handle(m.Tick(), 99.7)
    assert (machine.height, machine.view) == (8, (A, X))  # members come and go meanwhile
    machine.handle(m.MeanHeld("mean"), 100.0)
    for now in (100.1, 105.0):  # x is given a moment to accept it, too
        machine.handle(m.Tick(), now)
    assert machine.version == 8


def test_a_coordinator_without_room_for_the_mean_asks_for_no_votes_and_gives_way() -> None:
    """It may die with the mean: whoever has voted by then, a witness for one, would wait for that for good."""
    machine = reducing()
    assert completes(machine, logged=False) == []
    machine.handle(m.Tick(), 0.7)
    assert machine._acceptor.seat(machine.attempt) != A


@pytest.mark.parametrize("abstains", [True, False])
def test_nobody_waits_for_the_vote_of_one_that_abstains(abstains: bool) -> None:
    machine = reducing()
    assert [to for to, _ in completes(machine)] == [B, C]
    machine.hear(B, m.Heartbeat(7, 7, False, Progress(), abstains=abstains), 0.7)
    proposal = machine._coordinator._tally.proposal  # type: ignore[union-attr]
    machine.hear(C, m.Accept(7, 0, proposal.digest), 0.8)  # type: ignore[union-attr]
    assert machine.version == (8 if abstains else 7)


def test_who_leads_on_with_what_was_accepted_before_votes_for_it_when_its_log_has_it() -> None:
    machine = standing(7)
    assert machine.commit is not None
    attempt = next(attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) == A)
    earlier = following(machine.commit, "mean")
    machine.handle(m.MeanHeld("mean", logged=False), 0.1)
    machine.hear(B, m.Ready(7, attempt, None, "state", 0, earlier), 0.2)
    assert [body.commit for _, body in sends(machine.handle(m.Tick(), 0.3), m.Propose)] == [earlier, earlier]
    machine.hear(B, m.Accept(7, attempt, earlier.digest), 0.4)
    assert (machine.version, machine._acceptor.accepted) == (7, (-1, None))
    machine.hear(C, m.Accept(7, attempt, earlier.digest), 0.5)
    assert machine.version == 7
    machine.handle(m.MeanHeld("mean"), 0.6)
    assert machine.version == 8


@pytest.mark.parametrize(
    ("version", "abstains", "passed_over"),
    [(7, True, True), (7, False, False), (7 - NEAR, False, False), (7 - NEAR - 1, False, True)],
    ids=["its disk refuses", "it votes", "commits bring it here", "it must copy the state first"],
)
def test_a_seat_that_cannot_lead_soon_is_passed_over(version: int, abstains: bool, passed_over: bool) -> None:
    machine = standing(7, seat=B)
    machine.handle(m.Offered(m.Offer(1, 7, 1, 2, 3)), 0.1)
    machine.hear(B, m.Heartbeat(version, version, False, Progress(), abstains=abstains), 0.2)
    machine.handle(m.Tick(), 0.3)
    assert (machine._acceptor.seat(machine.attempt) != B) is passed_over


@pytest.mark.parametrize(
    ("boot", "before", "reply"),
    [(5, 0, m.Reply.OK), (4, 9, m.Reply.OLD_COPY), (6, 8, m.Reply.OLD_COPY), (6, 9, m.Reply.OK)],
    ids=["the same process", "the one before", "an old copy of the disk", "the next one"],
)
def test_of_a_life_the_latest_process_speaks_with_all_that_was_said(boot: int, before: int, reply: m.Reply) -> None:
    machine = standing(7)

    def hear(boot: int, before: int, saved: int, sequence: int) -> m.Reply:
        beat = m.Heartbeat(7, 7, False, Progress())
        return machine.receive(replace(said(B, beat, sequence), boot=boot, before=before, saved=saved), 0.1)[0]

    assert hear(5, 3, 9, 1) is m.Reply.OK
    assert hear(boot, before, max(before, 9), 2) is reply


def test_two_histories_that_meet_stop_the_vote_until_a_person_decides() -> None:
    machine = standing(7)
    seat = next(attempt for attempt in (1, 2, 3) if machine._acceptor.seat(attempt) == C)
    beat = m.Heartbeat(7, 7, False, Progress())
    machine.receive(said(B, beat, 1, head="another"), 0.1)
    assert "two histories" in machine.conflict
    assert "b stands on commit another" in machine.conflict
    assert sends(machine.hear(C, m.Gather(7, seat, "again"), 0.2), m.Ready) == []
    machine.receive(said(Member("operator", 0, ""), m.Evict("b", B.incarnation), 0), 0.3)
    assert machine.conflict == ""
    assert [to for to, _ in sends(machine.hear(C, m.Gather(7, seat, "again"), 0.4), m.Ready)] == [C]
    machine.receive(said(B, beat, 2, head="another"), 0.5)  # it is not gone, and goes on to say so
    assert machine.conflict == ""


def test_a_restarted_voter_has_no_part_in_votes_before_the_one_of_its_record() -> None:
    """Its disk has the later vote in the place of what it said in the earlier one, and its state may lag behind."""
    past = standing(7).commit
    assert past is not None
    later = following(past, "mean")
    machine = OnPaper(
        A, RULES, Timing(0.5, 4.0, 4.0), Restored(A.incarnation, 5, VoteRecord(later.digest), None, later)
    )
    answers: list[list[Member]] = []
    for now, commit in enumerate((past, later)):
        machine.handle(m.StateHeld(commit.version, "state", commit), float(now))
        attempt, seat = next(
            (one, machine._acceptor.seat(one)) for one in range(1, 9) if machine._acceptor.seat(one) != A
        )
        asked = machine.hear(seat, m.Gather(commit.version, attempt, "again"), now + 0.5)
        answers.append([to for to, _ in sends(asked, m.Ready)])
    assert answers == [[], [seat]]


def test_a_restarted_voter_keeps_its_life_though_its_checkpoint_names_an_earlier_one() -> None:
    """It had copied the state as this life, and was killed before it saved that. What the run was before is no sign
    that it went on without it; what comes after its record is."""
    past = standing(7).commit
    assert past is not None
    mine = replace(A, incarnation=50)
    later = replace(following(past, "mean"), height=20, view=(mine, B), voters=voters((mine, B)))
    record = VoteRecord(later.digest, promised=2)
    machine = OnPaper(mine, RULES, Timing(0.5, 4.0, 4.0), Restored(50, 5, record, None, later), boot=60)
    found = []
    for commit in (past, later, replace(following(later, "mean"), view=(B, C), voters=voters((B, C)))):
        machine.handle(m.StateHeld(commit.version, "state", commit), float(commit.version))
        beat = sends(machine.handle(m.Tick(), commit.version + 0.5), m.Heartbeat)[0][1]
        found.append((machine.me.incarnation, beat.joining, machine.in_view, machine.attempt))
    assert found == [(50, False, False, 0), (50, False, True, 2), (60, True, False, 0)]


def test_two_processes_of_a_founder_give_their_lineages_two_names() -> None:
    """The first may be killed before its founding is on the disk, and others may have heard of that."""
    head = standing(7, rules=replace(RULES, continue_after_s=1.0)).commit
    assert head is not None
    names = set()
    for boot in (1, 2):
        rules, restored = replace(RULES, continue_after_s=1.0), Restored(1, 5, VoteRecord(head.digest), None, head)
        machine = OnPaper(A, rules, Timing(0.5, 4.0, 4.0), restored, boot)
        machine.handle(m.StateHeld(7, "state", head), 0.0)
        for now in (6.0, 8.0):
            machine.handle(m.Tick(), now)
        names.add(machine.lineage)
    assert len(names - {"lineage"}) == 2


# ---------------------------------------------------------------- members that lie


def led() -> tuple[OnPaper, Member, int]:
    """The machine of a at version 7, with the coordinator and the number of a later attempt that is not its own."""
    machine = standing(7)
    attempt = next(attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) != A)
    return machine, machine._acceptor.seat(attempt), attempt


LIES: list[dict[str, object]] = [
    {"version": 9},
    {"height": 9},
    {"tokens": 10**15},
    {"voters": ()},
    {"voters": (Voter("b", 0, -1), Voter("x", 0, 8))},
    {"voters": voters((A, B, C), since=3)},
    {"view": (A, B, C, A)},
    {"leases": Leases(10**9, {})},
    {"counted": ()},
    {"counted": (Counted("b", 0, 7, 2**40, 10, 0),)},
    {"counted": (Counted("b", 0, 7, 1, 10, 3),)},
    {"counted": (Counted("b", 0, 6, 1, 10, 0),)},
    {"counted": (Counted("x", 0, 7, 1, 10, 0),)},
    {"omitted": (Omitted("c", 0, 1),)},
    {"evicted": ("x",)},
    {"mean_digest": ""},
    {"state_digest": ""},
    {"fragment": 1},
    {"fragment": -1},
    {"drafter": "b"},
]
"""Each changes one thing in a commit that an honest peer drafts."""


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: f"{next(iter(lie.items()))}"[:60])
def test_a_commit_that_no_honest_peer_drafts_is_not_voted_for_nor_followed(lie: dict[str, object]) -> None:
    for told in (m.Propose, m.Committed):
        machine, seat, attempt = led()
        assert machine.commit is not None
        before, commit = machine.commit, replace(following(machine.commit, "mean"), **lie)  # type: ignore[arg-type]
        machine.handle(m.MeanHeld("mean"), 0.1)
        effects = machine.hear(seat, m.Propose(7, attempt, commit) if told is m.Propose else m.Committed(commit), 0.2)
        assert (machine._acceptor.accepted, machine.commit) == ((-1, None), before)
        assert any(isinstance(effect, fx.Note) and f"refused, from {seat.peer}" in effect.reason for effect in effects)
        assert machine.roster.offences == {seat.peer: 1}
        assert machine.attempt == (attempt + 1 if told is m.Propose else 0)  # the next in turn coordinates


def test_the_honest_one_is_voted_for_and_followed() -> None:
    machine, seat, attempt = led()
    assert machine.commit is not None
    commit = following(machine.commit, "mean")
    machine.handle(m.MeanHeld("mean"), 0.1)
    machine.hear(seat, m.Propose(7, attempt, commit), 0.2)
    assert machine._acceptor.accepted == (attempt, commit)
    machine.hear(seat, m.Committed(commit), 0.3)
    assert machine.commit == commit


def test_another_history_at_our_height_accuses_nobody() -> None:
    """Two histories may meet where a disk lied. Heartbeats name it, and a person decides."""
    machine, seat, attempt = led()
    assert machine.commit is not None
    other = replace(following(machine.commit, "mean"), previous="another")
    machine.handle(m.MeanHeld("mean"), 0.1)
    machine.hear(seat, m.Propose(7, attempt, other), 0.2)
    assert (machine._acceptor.accepted, machine.attempt, machine.roster.offences) == ((-1, None), 0, {})
    machine = standing(7, seat=A)
    machine.hear(C, m.Ready(7, 0, m.Offer(0, 7, 1, 10, 0), "state", 0, other), 0.1)
    tally = machine._coordinator._tally
    assert tally is None or "c" not in tally.ready
    assert not machine.roster.offences


def test_a_founding_within_a_lineage_is_not_followed() -> None:
    """It needs no mean and no vote: any member could take the run over with it."""
    machine = standing(7)
    before = machine.commit
    assert before is not None
    names = {"view": (B,), "voters": voters((B,), since=6), "leases": leases.found(["b"], 2)}
    founding = replace(before, height=8, previous=before.digest, fragment=-1, state_digest="state", **names)
    machine.hear(B, m.Committed(founding), 0.1)
    assert machine.commit == before


@pytest.mark.parametrize(
    "offer", [m.Offer(0, 7, 2**40, 10, 0), m.Offer(0, 7, 1, 10**16, 0), m.Offer(0, 7, 1, 10, 3)], ids=str
)
def test_a_claim_that_no_honest_peer_makes_is_not_counted_and_not_waited_for(offer: m.Offer) -> None:
    machine = standing(7, seat=A)
    honest = m.Offer(0, 7, 1, 10, 0)
    machine.handle(m.Offered(honest), 0.1)
    effects = machine.hear(C, m.Ready(7, 0, offer, "state"), 0.1)
    assert any(isinstance(effect, fx.Note) and "refused, from c: c claims" in effect.reason for effect in effects)
    begins = sends(machine.hear(B, m.Ready(7, 0, honest, "state"), 0.2), m.Begin)
    assert {tuple(entry.peer for entry in begin.contributors) for _, begin in begins} == {("a", "b")}
    assert machine.roster.offences == {"c": 1}


def test_a_begin_with_such_a_claim_is_refused() -> None:
    machine = standing(7, seat=B)
    begin = m.Begin(7, 0, (Counted("b", 0, 7, 2**40, 2, 2),), (A, B, C), (m.Span("b", 0, 6),), "state")
    stalled = sends(machine.hear(B, begin, 0.1), m.Stalled)
    assert ([to for to, _ in stalled], machine.reducing) == ([B], None)


@pytest.mark.parametrize("counts", [3, 1])
def test_a_proposal_counts_whom_its_mean_was_made_of(counts: int) -> None:
    """Else what the others gave is in the weights and stays their progress: it counts twice."""
    machine = reducing()
    commit = completes(machine)[0][1].commit
    counted = commit.counted[:counts]
    proposed = replace(commit, counted=counted, tokens=sum(entry.tokens for entry in counted) - 30 + commit.tokens)
    attempt = next(attempt for attempt in range(1, 9) if machine._acceptor.seat(attempt) == B)
    machine.hear(B, m.Propose(7, attempt, proposed, 7, 0), 0.7)
    assert machine._acceptor.accepted[1] == (commit if counts == 3 else None)
