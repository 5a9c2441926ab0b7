"""Leases: no block is ever held twice, and every block ever given out is accounted for."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.base.types import Blocks, Leases
from diloco.protocol.leases import advance, count, found, front, handed_back, joined, without_front


def positions(held: tuple[Blocks, ...]) -> list[int]:
    return [position for blocks in held for position in range(blocks.start, blocks.stop)]


def test_founding_gives_each_peer_its_own_run_of_blocks() -> None:
    leases = found(["a", "b"], 10)
    assert leases == Leases(20, {"a": (Blocks(0, 10),), "b": (Blocks(10, 20),)})


def test_a_version_drops_what_is_used_and_tops_up_in_view_order() -> None:
    leases = advance(found(["a", "b"], 10), {"b": 10, "a": 4}, ["b", "a"], 10)
    assert leases.held == {"b": (Blocks(20, 30),), "a": (Blocks(4, 10), Blocks(30, 34))}
    assert leases.cursor == 34


def test_adjacent_grants_are_one_run() -> None:
    assert advance(found(["a"], 10), {"a": 4}, ["a"], 10).held == {"a": (Blocks(4, 14),)}


def test_what_a_leaver_hands_back_is_given_out_first() -> None:
    leases = advance(found(["a", "b"], 10), {"a": 10, "b": 3}, ["a"], 8, leaving={"b"})
    assert leases == Leases(cursor=21, held={"a": (Blocks(13, 21),)})
    kept = advance(found(["a", "b"], 10), {"a": 1, "b": 3}, ["a"], 10, leaving={"b"})
    assert kept == Leases(20, {"a": (Blocks(1, 10), Blocks(13, 14))}, returned=(Blocks(14, 20),))


def test_what_the_dead_held_is_lost_for_good() -> None:
    leases = advance(found(["a", "b"], 10), {"b": 3}, ["a", "c"], 10)
    assert leases == Leases(30, {"a": (Blocks(0, 10),), "c": (Blocks(20, 30),)}, lost=7)


def test_who_left_and_who_died_can_be_told_apart() -> None:
    """In one version, whoever gets the leaver's blocks; there is nothing to tell of one that used all of its own."""
    before, used = found(list("abcd"), 10), {"b": 3, "d": 10}
    for need in (10, 25):
        after = advance(before, used, ["a", "e"], need, leaving={"b", "d"})
        assert handed_back(before, used, after) == {"b": True, "c": False}
    assert handed_back(before, {}, before) == {}


def test_a_peer_that_stays_is_not_leaving() -> None:
    assert advance(found(["a"], 4), {}, ["a"], 4, leaving={"a"}) == found(["a"], 4)


def test_a_smaller_need_takes_nothing_away() -> None:
    assert advance(found(["a"], 10), {"a": 2}, ["a"], 4).held == {"a": (Blocks(2, 10),)}


@pytest.mark.parametrize("used", [{"a": 11}, {"stranger": 1}])
def test_more_used_than_held_is_refused(used: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"more than are held|without a lease"):
        advance(found(["a"], 10), used, ["a"], 10)


def test_front_and_rest() -> None:
    held = (Blocks(0, 3), Blocks(7, 9), Blocks(9, 12))
    assert front(held, 4) == (Blocks(0, 3), Blocks(7, 8))
    assert without_front(held, 4) == (Blocks(8, 12),)
    assert front(held, 0) == ()
    assert without_front(held, 8) == ()
    assert front(held, 99) == joined(held) == (Blocks(0, 3), Blocks(7, 12))


def test_pure_protocol_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, diloco.protocol.leases, diloco.data.reader; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


names = st.sampled_from("abcdef")


@pytest.mark.slow(queued=False)
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_block_is_with_one_peer_or_accounted_for(data: st.DataObject) -> None:
    """Random views: members join, leave, die, come back, and use any part of what they hold."""
    leases = found(data.draw(st.lists(names, unique=True)), data.draw(st.integers(0, 20)))
    used_ever: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        before = leases
        used = {
            p: data.draw(st.integers(0, count(held))) for p, held in before.held.items() if data.draw(st.booleans())
        }
        view = data.draw(st.lists(names, unique=True))
        need = data.draw(st.integers(0, 20))
        leases = advance(before, used, view, need, data.draw(st.sets(names)))
        for peer, blocks in used.items():
            used_ever += positions(before.held[peer])[:blocks]
        check_accounts(leases, used_ever)
        check_members(before, used, leases, view, need)


def check_accounts(leases: Leases, used: list[int]) -> None:
    given_out = used + [p for held in (*leases.held.values(), leases.returned) for p in positions(held)]
    assert max(Counter(given_out).values(), default=1) == 1
    assert set(given_out) <= set(range(leases.cursor))
    assert len(given_out) + leases.lost == leases.cursor
    assert positions(leases.returned) == sorted(positions(leases.returned))


def check_members(before: Leases, used: dict[str, int], after: Leases, view: list[str], need: int) -> None:
    assert list(after.held) == view
    for peer, held in after.held.items():
        rest = positions(before.held.get(peer, ()))[used.get(peer, 0) :]
        assert positions(held)[: len(rest)] == rest
        assert len(positions(held)) == max(need, len(rest))
        assert all(len(blocks) for blocks in held)
        assert all(a.stop != b.start for a, b in itertools.pairwise(held))


def test_long_runs_keep_few_ranges() -> None:
    """The record travels in every commit: 1,000 versions of churn must not make it grow."""
    dice, view, peers = random.Random(0), ["a", "b", "c", "d"], "abcdefgh"
    leases = found(view, 50)
    for _ in range(1000):
        used = {peer: dice.randint(0, count(held)) for peer, held in leases.held.items()}
        leaving = {view[0]} if dice.random() < 0.2 else set()
        view = [p for p in view if p not in leaving] or ["a"]
        view += [p for p in dice.sample(peers, 1) if p not in view and len(view) < 5]
        leases = advance(leases, used, view, 50, leaving)
    ranges = [[[b.start, b.stop] for b in held] for held in (*leases.held.values(), leases.returned)]
    assert len(json.dumps(ranges)) < 1500
