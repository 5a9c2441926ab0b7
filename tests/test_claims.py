"""Claims that no honest peer makes: each check of `diloco.protocol.claims` alone refuses something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco.base.turns import Turns
from diloco.base.types import MAX_LIST, Blocks, Commit, Counted, Leases, Member, Omitted, Voter
from diloco.config.load import load_contract
from diloco.protocol import leases
from diloco.protocol.claims import CLAIMED_ROUNDS, Bounds, why_malformed, why_no_successor, why_not_counted

A, B, C, D, E = (Member(name, 1, f"{name}:1") for name in "abcde")
WITNESS = Member("w", 1, "w:1", witness=True)
BOUNDS = Bounds("contract", Turns(2), lease_blocks=4, whole=8, max_tokens=100)
VIEW = (A, B, C, D, WITNESS)
TRAINERS = [member.peer for member in VIEW if not member.witness]
VOTERS = tuple(Voter(member.peer, 5, -1) for member in (A, B, C, WITNESS))
GIVEN = leases.found(TRAINERS, BOUNDS.lease_blocks)
FOUNDING = Commit(
    0,
    0,
    "contract",
    "lineage",
    -1,
    VIEW,
    (),
    (),
    "",
    0,
    leases.found(TRAINERS, 4),
    "state",
    voters=(Voter("a", 5, -1),),
)
BEFORE = Commit(7, 9, "earlier", "lineage", 0, VIEW, (), (), "mean", 1000, GIVEN, "state", voters=VOTERS)
COUNTED = tuple(Counted(name, 5, 7, 8, 10, 2) for name in "ab")
USED = {entry.peer: entry.blocks for entry in COUNTED}


def advanced(view: tuple[Member, ...], used: dict[str, int], left: set[str] = set()) -> Leases:  # noqa: B006
    trainers = [member.peer for member in view if not member.witness]
    return leases.advance(BEFORE.leases, used, trainers, BOUNDS.lease_blocks, left)


VERSION = replace(
    BEFORE, version=8, height=10, previous=BEFORE.digest, fragment=1, counted=COUNTED, tokens=1020,
    omitted=(Omitted("a", 0, 2),), leases=advanced(VIEW, USED), voters=(*VOTERS, Voter("d", 5, 8)),
)  # fmt: skip
JOINED = (*VIEW, E)
CHANGE = replace(
    BEFORE, height=10, previous=BEFORE.digest, fragment=-1, view=JOINED, mean_digest="", state_digest="", drafter="b",
    leases=leases.advance(GIVEN, {}, [*TRAINERS, "e"], BOUNDS.lease_blocks),
)  # fmt: skip
APART = replace(
    CHANGE, drafter="", state_digest="state", lineage="another", view=VIEW, voters=(Voter("b", 5, 6),),
    evicted=("c",), leases=advanced(VIEW, {}),
)  # fmt: skip
CLAIM = COUNTED[0]


def test_what_honest_peers_draft_is_taken() -> None:
    assert why_malformed(FOUNDING, BOUNDS) == ""
    for commit in (VERSION, CHANGE, APART):
        assert why_no_successor(BEFORE, commit, BOUNDS) == ""
        assert why_malformed(commit, BOUNDS) == ""


# ---------------------------------------------------------------- a contribution


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peer": "w"}, "w holds no lease"),
        ({"blocks": 5}, "claims 5 data blocks, and its lease has 4"),
        ({"base_version": 6}, "measured on version 6, and not on 7"),
        ({"tokens": 101}, "claims 101 tokens, and a contribution has 100 at most"),
        ({"weight": 9}, "claims weight 9"),
        ({"weight": 7}, "claims weight 7"),
        ({"weight": 0}, "claims weight 0"),
    ],
)
def test_a_contribution_claims_no_more_than_it_may(changes: dict[str, Any], reason: str) -> None:
    claim = replace(CLAIM, **changes)
    assert why_not_counted(CLAIM, BEFORE, BOUNDS) == ""
    assert reason in why_not_counted(claim, BEFORE, BOUNDS)
    counted = (claim, *VERSION.counted[1:])
    assert why_no_successor(BEFORE, replace(VERSION, counted=counted, omitted=(), tokens=1010 + claim.tokens), BOUNDS)


@pytest.mark.parametrize(
    ("bounds", "claim", "fits"),
    [
        (replace(BOUNDS, by_tokens=True), replace(CLAIM, weight=10), True),
        (replace(BOUNDS, by_tokens=True), replace(CLAIM, weight=8), False),
        (replace(BOUNDS, by_tokens=True), replace(CLAIM, tokens=0, weight=1), True),
        (replace(BOUNDS, by_tokens=True, turns=Turns(2, total_tokens=1001)), replace(CLAIM, weight=10), True),
        (replace(BOUNDS, by_tokens=True, turns=Turns(2, total_tokens=1000)), replace(CLAIM, weight=10), False),
        (replace(BOUNDS, by_tokens=True, turns=Turns(2, total_tokens=1000)), replace(CLAIM, tokens=0), True),
        (replace(BOUNDS, by_tokens=True, turns=Turns(1, total_tokens=1000)), replace(CLAIM, weight=10), True),
        (replace(BOUNDS, late_weigh_less=True), replace(CLAIM, weight=1), True),
        (replace(BOUNDS, late_weigh_less=True), replace(CLAIM, weight=0), False),
        (replace(BOUNDS, late_weigh_less=True), replace(CLAIM, weight=9), False),
        (BOUNDS, replace(CLAIM, tokens=100), True),
        (BOUNDS, replace(CLAIM, blocks=4), True),
    ],
)
def test_what_a_contribution_weighs_follows_from_the_contract(bounds: Bounds, claim: Counted, fits: bool) -> None:
    assert (why_not_counted(claim, BEFORE, bounds) == "") is fits


def test_a_contract_bounds_the_tokens_of_a_contribution() -> None:
    contract = load_contract("quick").value
    rounds = CLAIMED_ROUNDS * contract.max_steps_per_round * contract.tokens_per_step
    assert Bounds.of(contract).max_tokens == rounds
    own_loop = contract.model_copy(
        update={
            "model": contract.model.model_copy(update={"kind": "external"}),
            "run": contract.run.model_copy(update={"total_tokens": rounds + 1}),
        }
    )
    assert Bounds.of(own_loop).max_tokens == rounds + 1
    more = contract.model_copy(update={"run": own_loop.run})
    assert Bounds.of(more).max_tokens == rounds
    few = own_loop.model_copy(update={"run": contract.run.model_copy(update={"total_tokens": 1})})
    assert Bounds.of(few).max_tokens == rounds


# ---------------------------------------------------------------- a commit by itself


@pytest.mark.parametrize(
    ("commit", "changes", "reason"),
    [
        (VERSION, {"view": (*VIEW, A)}, "a member or a voter twice"),
        (VERSION, {"voters": (*VOTERS, VOTERS[0])}, "a member or a voter twice"),
        (VERSION, {"voters": ()}, "it has no voters"),
        (VERSION, {"voters": (*VOTERS, Voter("x", 5, 8))}, "some that are no members"),
        (CHANGE, {"view": tuple(replace(one, witness=True) for one in JOINED)}, "no voter of it trains"),
        (VERSION, {"voters": (VOTERS[3],)}, "no voter of it trains"),
        (FOUNDING, {"previous": "another"}, "the first of a run"),
        (FOUNDING, {"version": 1}, "the first of a run"),
        (FOUNDING, {"tokens": 1}, "the first of a run"),
        (FOUNDING, {"leases": replace(GIVEN, cursor=99)}, "the first of a run"),
        (FOUNDING, {"drafter": "a", "state_digest": ""}, "the first of a run"),
        (FOUNDING, {"fragment": 0, "state_digest": "state", "mean_digest": "mean"}, "the first of a run"),
        (FOUNDING, {"mean_digest": "mean"}, "it makes no version"),
        (VERSION, {"drafter": "a"}, "does not move fragment"),
        (VERSION, {"fragment": 0}, "does not move fragment"),
        (VERSION, {"mean_digest": ""}, "names no mean"),
        (VERSION, {"state_digest": ""}, "not the state before"),
        (VERSION, {"counted": (), "omitted": ()}, "counts nobody"),
        (VERSION, {"counted": (CLAIM, CLAIM), "omitted": ()}, "somebody twice"),
        (VERSION, {"counted": (replace(CLAIM, base_version=6),)}, "another version than the one before"),
        (VERSION, {"omitted": (Omitted("c", 0, 1),)}, "that it does not count"),
        (VERSION, {"omitted": (Omitted("a", 1, 1),)}, "that it does not count"),
        (VERSION, {"counted": (replace(CLAIM, tokens=101),)}, "100 at most"),
        (CHANGE, {"counted": COUNTED}, "it makes no version"),
        (CHANGE, {"omitted": (Omitted("a", 0, 1),)}, "it makes no version"),
        (CHANGE, {"mean_digest": "mean"}, "it makes no version"),
        (CHANGE, {"state_digest": "state"}, "neither a view commit nor a founding"),
        (CHANGE, {"drafter": ""}, "neither a view commit nor a founding"),
        (APART, {"voters": (Voter("a", 5, 6), Voter("b", 5, 6))}, "a founding has one voter"),
        (APART, {"voters": (Voter("b", 5, 5),)}, "a founding has one voter"),
    ],
)
def test_a_commit_that_no_honest_peer_drafts_is_malformed(commit: Commit, changes: dict[str, Any], reason: str) -> None:
    assert why_malformed(commit, BOUNDS) == ""
    assert reason in why_malformed(replace(commit, **changes), BOUNDS)


# ---------------------------------------------------------------- a commit after another


@pytest.mark.parametrize(
    ("commit", "changes", "reason"),
    [
        (VERSION, {"previous": "another"}, "does not follow height 9"),
        (VERSION, {"height": 11}, "height 11 does not follow height 9"),
        (VERSION, {"mean_digest": ""}, "names no mean"),
        (CHANGE, {"version": 8}, "version 8 does not follow version 7"),
        (VERSION, {"lineage": "another"}, "only a founding begins a lineage"),
        (APART, {"lineage": "lineage"}, "only a founding begins a lineage"),
        (VERSION, {"tokens": 1021}, "1,021 tokens are not"),
        (CHANGE, {"tokens": 1001}, "1,001 tokens are not"),
        (CHANGE, {"view": (replace(A, witness=True), *JOINED[1:])}, "names a trainer as a witness"),
        (CHANGE, {"view": (*VIEW[:4], replace(WITNESS, witness=False), E)}, "or a witness as a trainer"),
        (VERSION, {"evicted": ("d",)}, "evicts one that is no voter"),
        (VERSION, {"leases": replace(VERSION.leases, cursor=99)}, "its leases are not those"),
        (CHANGE, {"leases": GIVEN}, "its leases are not those"),
        (APART, {"leases": replace(GIVEN, lost=1)}, "its leases are not those"),
        (CHANGE, {"drafter": "d"}, "which drafted it, is no voter"),
        (CHANGE, {"view": (A, replace(B, incarnation=2), C, D, WITNESS, E)}, "another life of a peer"),
        (VERSION, {"voters": (replace(VOTERS[0], since=3), *VOTERS[1:])}, "a voter with another history"),
        (VERSION, {"voters": (replace(VOTERS[0], boot=4), *VOTERS[1:])}, "a voter with another history"),
        (VERSION, {"voters": (*VOTERS, Voter("d", 5, 7))}, "a voter that was no member"),
        (CHANGE, {"voters": (*VOTERS, Voter("d", 5, 7))}, "names 1 voters beside the 4 that stay"),
    ],
)
def test_a_commit_follows_from_the_one_before(commit: Commit, changes: dict[str, Any], reason: str) -> None:
    assert why_no_successor(BEFORE, commit, BOUNDS) == ""
    assert reason in why_no_successor(BEFORE, replace(commit, **changes), BOUNDS)


def test_a_life_that_is_new_and_holds_a_lease_still_is_not_let_in() -> None:
    """Two lives of a peer would train on the same data."""
    gone = replace(BEFORE, view=(A, B, C, WITNESS))  # d was left out while the version was made, and holds its lease
    back = replace(CHANGE, previous=gone.digest, view=(A, B, C, WITNESS, replace(D, incarnation=2)), leases=GIVEN)
    assert "another life of a peer" in why_no_successor(gone, back, BOUNDS)


def test_a_voter_was_a_member_of_the_commit_before() -> None:
    new = replace(VERSION, view=JOINED, voters=(*VOTERS, Voter("e", 5, 8)), leases=advanced(JOINED, USED))
    assert "a voter that was no member" in why_no_successor(BEFORE, new, BOUNDS)


def test_at_most_half_as_many_voters_are_named_as_stay() -> None:
    few = replace(BEFORE, voters=VOTERS[:2])
    new = replace(VERSION, previous=few.digest, voters=(*VOTERS[:2], Voter("c", 5, 8)))
    assert why_no_successor(few, new, BOUNDS) == ""
    more = replace(new, voters=(*new.voters, Voter("d", 5, 8)))
    assert "names 2 voters beside the 2 that stay" in why_no_successor(few, more, BOUNDS)


def test_where_no_voter_trains_any_more_those_that_stay_are_named() -> None:
    lone = replace(BEFORE, voters=(VOTERS[0], VOTERS[3]))
    view = (B, C, D, WITNESS)
    named = (VOTERS[3], *(Voter(name, 5, 7) for name in "bcd"))
    change = replace(CHANGE, previous=lone.digest, view=view, voters=named, drafter="a", leases=GIVEN)
    assert why_no_successor(lone, change, BOUNDS) == ""


def test_a_founding_may_evict_all_voters_and_gives_no_blocks_back() -> None:
    assert why_no_successor(BEFORE, replace(APART, evicted=tuple(voter.peer for voter in VOTERS)), BOUNDS) == ""
    view = (A, B, C, WITNESS)
    fewer = replace(APART, view=view, leases=advanced(view, {}))
    assert why_no_successor(BEFORE, fewer, BOUNDS) == ""
    given_back = replace(fewer, leases=advanced(view, {}, {"d"}))
    assert "its leases are not those" in why_no_successor(BEFORE, given_back, BOUNDS)


def test_a_contract_says_whether_who_is_late_weighs_less() -> None:
    contract = load_contract("quick").value
    for power, less in ((0.0, False), (0.5, True)):
        outer = contract.outer.model_copy(update={"staleness_power": power})
        assert Bounds.of(contract.model_copy(update={"outer": outer})).late_weigh_less is less


@pytest.mark.parametrize("left", [set(), {"d"}])
def test_who_is_gone_gives_its_blocks_back_or_loses_them(left: set[str]) -> None:
    """Only the coordinator knows which; either is taken."""
    view = (A, B, C, WITNESS)
    commit = replace(VERSION, view=view, voters=VOTERS, leases=advanced(view, USED, left))
    assert why_no_successor(BEFORE, commit, BOUNDS) == ""
    stolen = replace(commit.leases, held=commit.leases.held | {"a": (Blocks(0, 99),)})
    assert "its leases are not those" in why_no_successor(BEFORE, replace(commit, leases=stolen), BOUNDS)


def test_bytes_of_a_commit_are_bounded() -> None:
    """A name that no message can carry would end the peer that passes it on, and a list without end take its memory."""
    held = {**GIVEN.held, "a": (Blocks(1, 1),) * (MAX_LIST + 1)}
    for bad in (
        replace(CHANGE, view=(*VIEW, replace(E, peer="e\ud800"))),
        replace(VERSION, mean_digest="\udfff"),
        replace(APART, evicted=("c",) * (MAX_LIST + 1)),
        replace(VERSION, omitted=VERSION.omitted * (MAX_LIST + 1)),
        replace(VERSION, leases=replace(GIVEN, held=held)),
        replace(VERSION, leases=replace(GIVEN, held={f"p{n}": () for n in range(MAX_LIST + 1)})),
    ):
        with pytest.raises(ValueError, match=r"surrogates not allowed|at most 4096"):
            Commit.from_bytes(bad.to_bytes())
    for good in (CHANGE, VERSION, APART):
        assert Commit.from_bytes(good.to_bytes()) == good
