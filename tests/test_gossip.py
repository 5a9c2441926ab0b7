"""Gossip's pure parts: what a swap does to weights, whose turn it is, whom a peer knows, when it is over; refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from diloco.base.errors import StateError
from diloco.base.types import Member, Phase, Progress
from diloco.compress import PayloadError
from diloco.data.reader import block_at, own_seed
from diloco.gossip import acquaintances
from diloco.gossip.acquaintances import Acquaintances, table_of
from diloco.gossip.pairing import Pairing, Settling, check_partner, pair_mean, settle, spread
from diloco.gossip.swaps import MAX_SERVED, Swap, Swaps, SwapStage
from diloco.outer.state import TILE_ELEMENTS, FragmentState
from diloco.protocol.greetings import Acquaintance
from diloco.protocol.messages import Reply
from diloco.protocol.roster import MAX_JUMP
from diloco.storage.checkpoint import Checkpoint
from tests.gossips import contract

NOLOCO = Pairing(0.7, 0.5)


def start(values: Tensor) -> FragmentState:
    return FragmentState(values, {"momentum": torch.zeros_like(values)}, 0)


# ---------------------------------------------------------------- the maths


def noloco(slow: np.ndarray, momentum: np.ndarray, fast: np.ndarray, of: int) -> tuple[np.ndarray, np.ndarray]:
    """NoLoCo's update as it is published, in float64: row `of` of slow and fast weights of two peers."""
    delta = fast - slow
    momentum = 0.5 * momentum + 0.7 * delta.mean(axis=0) + 0.7 * (slow.mean(axis=0) - slow[of])
    return slow[of] + momentum, momentum


def test_a_few_swaps_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(1)
    count = TILE_ELEMENTS + 1000
    states = [start(torch.randn(count, generator=generator)) for _ in range(2)]
    slow = np.stack([state.anchor.double().numpy() for state in states])
    momenta = np.zeros_like(slow)
    for _ in range(5):
        fast = [state.anchor + 0.1 * torch.randn(count, generator=generator) for state in states]
        exact = np.stack([local.double().numpy() for local in fast])
        mean = pair_mean(*fast)
        states = [NOLOCO.step(state, mean) for state in states]
        both = [noloco(slow, momenta[of], exact, of) for of in range(2)]
        slow, momenta = (np.stack(rows) for rows in zip(*both, strict=True))
    for of, state in enumerate(states):
        np.testing.assert_allclose(state.anchor.numpy(), slow[of], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.slots["momentum"].numpy(), momenta[of], rtol=1e-5, atol=1e-5)
        assert state.steps == 5


VECTORS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8)


@given(VECTORS, st.integers(0, 2**32 - 1))
def test_no_progress_is_lost_whoever_meets_whom(values: list[float], seed: int) -> None:
    """Without momentum from before, the sum of what two gain is twice η of their mean progress."""
    generator = torch.Generator().manual_seed(seed)
    slow = [torch.tensor(values), torch.randn(len(values), generator=generator)]
    fast = [one + torch.randn(len(values), generator=generator) for one in slow]
    mean = pair_mean(*fast)
    gained = sum(NOLOCO.step(start(one), mean).anchor.double() - one.double() for one in slow)
    progress = sum(new.double() - old.double() for new, old in zip(fast, slow, strict=True))
    assert torch.allclose(gained, 0.7 * progress, atol=1e-3)


@pytest.mark.slow(queued=False)
@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
def test_plain_averaging_keeps_the_mean_and_brings_all_together(count: int, seed: int) -> None:
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    weights = [torch.randn(50, generator=generator) for _ in range(count)]
    mean = torch.stack(weights).double().mean(dim=0)
    before = max(spread(one, other) for one in weights for other in weights)
    for _ in range(40 * count):
        a, b = draw.sample(range(count), 2)
        met = pair_mean(weights[a], weights[b])
        weights[a] = weights[b] = settle(start(weights[a]), met).anchor
    assert torch.allclose(torch.stack(weights).double().mean(dim=0), mean, atol=1e-5)
    assert max(spread(one, other) for one in weights for other in weights) < before / 1000


@pytest.mark.parametrize(("momentum", "calm"), [(0.5, True), (0.9, False)])
def test_many_peers_stay_together_if_the_contract_lets_them(momentum: float, calm: bool) -> None:
    """The bound of the contract, by trying: 128 peers that meet at random and do nothing else."""
    pairing = Pairing(0.7, momentum)
    generator, draw = torch.Generator().manual_seed(1), random.Random(1)
    states = [start(torch.randn(64, generator=generator)) for _ in range(128)]
    apart = torch.stack([state.anchor for state in states]).var(dim=0).mean()
    for _ in range(40):
        order = draw.sample(range(128), 128)
        for a, b in zip(order[::2], order[1::2], strict=True):
            mean = pair_mean(states[a].anchor, states[b].anchor)
            states[a], states[b] = pairing.step(states[a], mean), pairing.step(states[b], mean)
    after = torch.stack([state.anchor for state in states]).var(dim=0).mean()
    assert (after < apart / 1000) if calm else (after > apart * 10)


def test_the_mean_does_not_overflow_and_inputs_stay() -> None:
    largest = torch.full((3,), 3e38)
    assert pair_mean(largest, largest).tolist() == largest.tolist()
    state = start(torch.ones(3))
    NOLOCO.step(state, torch.zeros(3))
    assert state.anchor.tolist() == [1.0] * 3
    assert state.slots["momentum"].tolist() == [0.0] * 3


def test_a_swap_takes_no_memory_of_the_model_s_size_but_for_what_it_makes() -> None:
    """Nor do the sums, which are of wider numbers: 8 bytes for each of a tile, and not of all."""
    mine, theirs = torch.ones(3 * TILE_ELEMENTS), torch.full((3 * TILE_ELEMENTS,), 2.0)
    mean = pair_mean(mine, theirs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        check_partner(mine, theirs, 100.0)
        spread(mine, theirs)
        assert pair_mean(mine, theirs, out=theirs) is theirs
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert 0 < largest <= 8 * TILE_ELEMENTS
    assert torch.equal(theirs, mean)


def test_spread() -> None:
    assert spread(torch.ones(4), torch.ones(4)) == 0.0
    assert spread(torch.zeros(4), torch.zeros(4)) == 0.0
    assert spread(torch.ones(4), torch.full((4,), 3.0)) == pytest.approx(2 / math.sqrt(5))
    assert math.isfinite(spread(torch.full((4,), 1e38), torch.full((4,), -1e38)))


def test_absurd_weights_are_refused() -> None:
    mine = torch.ones(10)
    check_partner(mine, mine * 99, 100.0)
    check_partner(mine, mine * 1e6, 0.0)
    with pytest.raises(PayloadError, match="absurdly large"):
        check_partner(mine, mine * 101, 100.0)
    with pytest.raises(PayloadError, match="too large"):
        check_partner(mine, torch.full((10,), 3e38), 0.0)


# ---------------------------------------------------------------- one swap at a time

A, B, C = (Member(name, 5, f"{name}:1") for name in "abc")


def test_a_leaders_swap() -> None:
    swaps = Swaps("a")
    swap = swaps.lead(B)
    assert swap is not None
    assert swaps.lead(C) is None
    assert swaps.awaited(B, swap.number, answer=True) is None  # it has not agreed
    assert swaps.agreed(swap)
    swaps.moved(swap, 10.0, 4.0)
    assert swaps.overdue(13.9) is None
    assert swaps.overdue(14.1) is swap
    assert swaps.awaited(C, swap.number, answer=True) is None
    assert swaps.awaited(B, swap.number + 1, answer=True) is None
    assert swaps.awaited(B, swap.number, answer=False) is None
    assert swaps.awaited(B, swap.number, answer=True) is swap
    assert not swaps.has_whole(B, swap.number, answer=True)
    assert swaps.whole(swap)
    assert not swaps.whole(swap)
    assert swaps.has_whole(B, swap.number, answer=True)
    assert swaps.overdue(math.inf) is None  # it is our own training that it waits for
    assert swaps.end(swap)
    assert swaps.has_whole(B, swap.number, answer=True)  # a second stream of it may come late
    assert swaps.lead(B) is not None


def test_a_followers_swap_is_served_once() -> None:
    swaps = Swaps("a")
    assert swaps.invited(B, 3, 0.0, 4.0) is Reply.OK
    assert swaps.invited(B, 3, 0.0, 4.0) is Reply.OK  # asked again
    assert swaps.invited(C, 1, 0.0, 4.0) is Reply.BUSY
    swap = swaps.awaited(B, 3, answer=False)
    assert swap is not None
    assert swaps.overdue(4.1) is swap
    swaps.whole(swap)
    swaps.served(swap)
    swaps.end(swap)
    assert swaps.has_served(B, 3)
    assert swaps.awaited(B, 3, answer=False) is None
    assert swaps.invited(B, 2, 5.0, 4.0) is Reply.STALE
    assert swaps.invited(B, 4, 5.0, 4.0) is Reply.OK
    assert swaps.invited(B, 5, 5.0, 4.0) is Reply.OK  # it gave up the other
    assert swaps.current is not None
    assert swaps.current.number == 5
    assert swaps.invited(replace(B, incarnation=6), 1, 5.0, 4.0) is Reply.OK  # a new life counts anew


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_that_ask_each_other_one_leads(first: str) -> None:
    swaps = {"a": Swaps("a"), "b": Swaps("b")}
    members = {"a": A, "b": B}
    other = {"a": "b", "b": "a"}
    asked = {name: swaps[name].lead(members[other[name]]) for name in "ab"}
    replies = {}
    for name in (first, other[first]):  # whichever message comes first
        swap = asked[name]
        assert swap is not None
        replies[name] = swaps[other[name]].invited(members[name], swap.number, 0.0, 4.0)
    assert replies == {"a": Reply.OK, "b": Reply.BUSY}
    assert asked["a"] is not None
    assert swaps["a"].agreed(asked["a"])
    assert asked["b"] is not None
    assert not swaps["b"].agreed(asked["b"])  # it follows now
    assert swaps["b"].current is not None
    assert swaps["b"].current.stage is SwapStage.FOLLOWING


def test_what_was_served_is_remembered_for_so_many() -> None:
    swaps = Swaps("a")
    for number in range(MAX_SERVED + 5):
        swaps.served(Swap(1, Member(f"p{number}", 1, "x:1"), False, SwapStage.WHOLE))
    assert len(swaps._served) == MAX_SERVED


# ---------------------------------------------------------------- whom a peer knows


def word(
    member: Member, beat: int, tokens: int = 0, age_s: float = 0.0, phase: str = Phase.TRAINING, start: int = 0
) -> Acquaintance:
    return Acquaintance(member, beat, Progress(phase=phase, tokens=tokens), -1.0, age_s, start)


def names(known: Acquaintances, now_s: float) -> set[str]:
    return {entry.member.peer for entry in known.alive(now_s)}


def table(me: Member) -> Acquaintances:
    return Acquaintances(me, round_tokens=1000)


def each_says(known: Acquaintances, now_s: float, *words: Acquaintance) -> None:
    """Each peer says so itself."""
    for one in words:
        known.hear([one], now_s)


def test_the_later_word_holds_whoever_passes_it_on() -> None:
    known = table(A)
    assert known.hear([word(B, 2, 20), word(A, 99, 10**9), word(C, 1, 5)], 100.0)
    assert known.answered(C)
    assert known.tokens(100.0) == 25  # nobody tells us about ourselves
    assert not known.hear([word(B, 3, 30), word(B, 1, 10), word(C, 1, 3)], 100.0)
    assert known.tokens(100.0) == 35
    later = replace(B, incarnation=6, address="b:2")
    assert known.hear([word(later, 1, 7)], 100.0)
    assert known.tokens(100.0) == 42
    assert known.admits(later)
    assert not known.admits(B)
    assert not known.admits(replace(A, incarnation=9))  # our name is ours


def test_who_does_not_answer_is_met_again_when_it_says_something_new() -> None:
    known = table(A)
    each_says(known, 100.0, word(B, 1))
    known.lost("b", 101.0)
    assert names(known, 101.0) == set()
    each_says(known, 102.0, word(B, 2, age_s=5.0))  # said before that, and passed on
    assert names(known, 102.0) == set()
    each_says(known, 103.0, word(B, 3))
    assert names(known, 103.0) == {"b"}
    each_says(known, 104.0, word(B, 4, phase=Phase.LEAVING))
    assert names(known, 104.0) == set()


def test_those_that_fell_silent_are_tried_in_turn() -> None:
    known = table(A)
    each_says(known, 100.0, word(B, 1), word(C, 1), word(Member("d", 5, "d:1"), 1, phase=Phase.LEAVING))
    assert known.silent(100.0) is None
    known.lost("b", 101.0)
    known.lost("c", 102.0)
    assert known.silent(103.0) == B
    known.lost("b", 103.0)
    assert known.silent(104.0) == C
    each_says(known, 105.0, word(C, 2))
    assert known.silent(106.0) == B
    assert known.silent(107.0 + acquaintances.FORGET_S) == C  # b was tried after it


def test_the_dead_are_forgotten_but_for_their_tokens() -> None:
    known = table(A)
    each_says(known, 0.0, word(B, 1, 20))
    assert names(known, acquaintances.FORGET_S - 1) == {"b"}
    assert names(known, acquaintances.FORGET_S + 1) == set()
    assert known.tokens(acquaintances.FORGET_S + 1) == 20
    known.swap_s = acquaintances.FORGET_S  # where a swap takes that long, word does, too
    assert names(known, acquaintances.FORGET_S + 1) == {"b"}


def test_a_life_without_a_checkpoint_takes_no_tokens_away() -> None:
    """Nor does one with an older checkpoint: others have what it had trained since. Peers that hear of it early or
    late, that joined later, or are it, come to one number."""
    early, late = table(A), table(C)
    anew, again = replace(B, incarnation=6), replace(B, incarnation=7)
    for known in (early, late):
        known.progress = Progress(tokens=20_000)
        each_says(known, 0.0, word(B, 1, 50_000))
        known.lost("b", 1.0)
    each_says(early, 2.0, word(anew, 1))
    assert early.tokens(2.0) == 50_000
    for known in (early, late):
        each_says(known, 3.0, word(anew, 2, 10_000))
        assert known.tokens(3.0) == 60_000
    joiner, itself = table(Member("d", 1, "d:1")), table(anew)
    itself.progress = Progress(tokens=10_000)
    for known in (joiner, itself):
        known.hear(early.publish(4.0), 4.0, trusted=True)
    assert joiner.tokens(4.0) == 60_000 + 20_000
    assert itself.tokens(4.0) == 50_000 + 20_000
    each_says(joiner, 5.0, word(anew, 3, 12_000))
    assert joiner.tokens(5.0) == 62_000 + 20_000
    for known in (early, late):
        each_says(known, 6.0, word(anew, 3, 12_000), word(again, 1, 9_000, start=8_000))
        assert known.tokens(6.0) == 63_000


def test_a_run_that_goes_on_from_checkpoints_counts_those_that_are_gone_for_good() -> None:
    before = table(A)
    before.progress = Progress(tokens=20_000)
    each_says(before, 0.0, word(B, 9, 30_000), word(C, 9, 5_000))
    each_says(before, 1.0, word(replace(C, incarnation=6), 1, 40_000))
    known, later = table(replace(A, incarnation=9)), replace(B, incarnation=9)
    known.restore(20_000, before.table(2.0), 0.0)
    known.progress = Progress(tokens=20_000)
    assert known.tokens(0.0) == 75_000
    assert not names(known, 0.0)
    each_says(known, 1.0, word(later, 1, 30_000, start=30_000))
    each_says(known, 2.0, word(later, 2, 31_000, start=30_000))
    assert known.tokens(2.0) == 76_000
    each_says(known, 3.0, word(replace(C, incarnation=6), 2, 41_000))  # it had gone on meanwhile
    assert known.tokens(3.0) == 77_000


def test_what_is_told_says_how_old_it_is() -> None:
    known, other = table(A), table(C)
    each_says(known, 100.0, word(B, 1, 20, age_s=3.0))
    me, b = known.publish(110.0)
    assert (me.member, me.age_s, b.member, b.age_s) == (A, 0.0, B, 13.0)
    other.hear([me, b], 0.0)
    assert known.publish(110.0)[0].beat > me.beat
    assert {entry.member.peer: round(age_s) for entry, age_s, _ in other.everybody(0.0)} == {"a": 0, "b": 13}


def test_the_table_is_bounded_and_hearsay_makes_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquaintances, "MAX_KNOWN", 10)
    known = table(A)
    each_says(known, 1000.0, word(B, 1, age_s=500.0))
    known.hear([word(C, 1), *(word(Member(f"p{number}", 1, "x:1"), 1) for number in range(50))], 1000.0)
    assert len(known.everybody(1000.0)) == 10
    assert names(known, 1000.0) == {"b", "c"}
    each_says(known, 1000.0, *(word(Member(f"q{number}", 1, "x:1"), 1, age_s=float(number)) for number in range(50)))
    assert len(known.alive(1000.0)) == 10
    assert "c" in names(known, 1000.0)


def test_a_short_message_has_peers_in_turn() -> None:
    known, heard = table(A), set[str]()
    count = 3 * acquaintances.MAX_PUBLISHED - 10
    each_says(known, 0.0, *(word(Member(f"p{number}", 1, "x:1"), 1) for number in range(count)))
    for _ in range(3):
        me, *others = known.publish(0.0)
        assert me.member == A
        assert len(others) == acquaintances.MAX_PUBLISHED
        heard |= {one.member.peer for one in others}
    assert len(heard) == count


# ---------------------------------------------------------------- a member that lies

LIAR = Member("liar", 1, "liar:1")
LAST = 2**63 - 1


def test_greetings_of_one_peer_are_answered_now_and_then() -> None:
    known = table(A)
    assert not known.greets_back("b", 0.0)
    each_says(known, 0.0, word(B, 1), word(C, 1))
    assert [known.greets_back(peer, 1.0) for peer in "bbc"] == [True, False, True]
    assert known.greets_back("b", 1.0 + acquaintances.ANSWER_S)


def test_hearsay_is_no_partner_counts_nothing_and_goes_no_further() -> None:
    known = table(A)
    known.hear([word(LIAR, 1), *(word(Member(f"p{number}", 1, "x:1"), 1, 1000) for number in range(100))], 0.0)
    assert known.tokens(0.0) == 0
    assert names(known, 0.0) == {"liar"}
    assert [one.member.peer for one in known.publish(0.0)] == ["a", "liar"]
    stranger = known.strangers(0.0)[0]
    assert not known.answered(replace(stranger, address="y:1"))
    assert known.answered(stranger)
    assert known.tokens(0.0) == 1000
    assert len(known.strangers(0.0)) == 99


@pytest.mark.parametrize(
    "lie",
    [
        word(replace(B, incarnation=LAST, address="x:1"), LAST, phase=Phase.LEAVING),
        word(B, LAST, phase=Phase.LEAVING),
        word(B, MAX_JUMP, phase=Phase.LEAVING),
        word(replace(B, address="x:1"), MAX_JUMP),
        word(B, MAX_JUMP, age_s=1e9),
    ],
)
def test_hearsay_mutes_nobody(lie: Acquaintance) -> None:
    known = table(A)
    each_says(known, 0.0, word(B, 3, 100))
    known.hear([word(LIAR, 1), lie], 1.0)
    assert known.admits(B)
    (heard,) = (one for one in known.alive(2.0) if one.member == B)
    assert heard.member.address == "b:1"
    assert heard.beat <= 3 + MAX_JUMP
    each_says(known, 3.0, word(B, 4, 200))
    mine = known.get("b")
    assert mine is not None
    assert (mine.member, mine.member.address, mine.beat, mine.progress.tokens) == (B, "b:1", 4, 200)


@pytest.mark.parametrize("lives", [True, False])
def test_a_peers_own_word_beats_what_was_heard_of_it_before(lives: bool) -> None:
    """Whether nothing was known of it, or it was silent for long."""
    known, now_s = table(A), 0.0
    if not lives:
        each_says(known, 0.0, word(B, 3))
        now_s = acquaintances.FORGET_S + 1
    known.hear([word(LIAR, 1), word(replace(B, incarnation=LAST), LAST, phase=Phase.LEAVING)], now_s)
    assert known.admits(B)
    each_says(known, now_s, word(B, 4))
    assert "b" in names(known, now_s)


def test_a_life_that_never_answered_makes_room_for_an_earlier_one() -> None:
    known = table(A)
    known.hear([word(LIAR, 1), word(replace(B, incarnation=LAST), LAST)], 0.0)
    known.hear([word(C, 1), word(B, 3)], 1.0)
    assert known.strangers(1.0) == [replace(B, incarnation=LAST)]
    known.lost("b", 2.0)
    known.hear([word(C, 2), word(B, 3)], 3.0)
    assert known.strangers(3.0) == [B]


def test_a_later_life_is_known_by_its_own_word_or_when_the_one_before_is_gone() -> None:
    known, later = table(A), replace(B, incarnation=6, address="b:2")
    each_says(known, 0.0, word(B, 3, 50))
    known.hear([word(C, 1), word(later, 1, 70)], 1.0)
    assert known.tokens(1.0) == 50
    known.lost("b", 2.0)
    known.hear([word(C, 2), word(later, 2, 70, start=50)], 3.0)
    assert known.strangers(3.0) == [later]
    assert known.answered(later)
    assert known.tokens(3.0) == 70
    each_says(known, 4.0, word(replace(B, incarnation=7), 1, 90, start=70), word(later, 9, 80))
    assert known.tokens(4.0) == 90


def test_one_liars_tokens_are_those_of_so_many_others() -> None:
    known, most = table(A), acquaintances.MAX_FASTER
    each_says(known, 0.0, word(LIAR, 1, 2**62))
    assert known.tokens(0.0) == most * 1000  # a round's, of a peer that has just begun
    each_says(known, 0.0, word(B, 1, 50_000), word(C, 1, 40_000))
    assert known.tokens(0.0) == 90_000 + most * 40_000  # the median, this one's 0 among them
    known.progress = Progress(tokens=60_000)
    assert known.tokens(0.0) == 90_000 + most * 60_000
    liar = {one.member.peer: one.progress.tokens for one in known.publish(0.0)}["liar"]
    assert liar == most * 60_000  # nor does its number go further


def test_a_liars_lives_count_as_one_and_a_made_up_life_hides_none() -> None:
    known, most = table(A), acquaintances.MAX_FASTER
    for life in range(2, 9):
        each_says(known, 0.0, word(replace(LIAR, incarnation=life), 1, 2**62))
    assert known.tokens(0.0) == most * 1000
    known = table(A)
    known.progress = Progress(tokens=20_000)
    each_says(known, 0.0, word(B, 1, 30_000), word(LIAR, 1))
    known.lost("b", 1.0)
    for life in (LAST - 1, LAST):
        known.hear([word(LIAR, 2), word(replace(B, incarnation=life), 1, 10**9, start=LAST)], 2.0)
        assert known.tokens(2.0) == 30_000
    each_says(known, 3.0, word(B, 2, 31_000))
    assert known.tokens(3.0) == 31_000


def test_a_joiner_believes_once_what_the_member_says_whose_weights_it_took() -> None:
    """A run may have gone on for a month, and nobody else be there."""
    known, month = table(A), 10**12
    each_says(known, 0.0, word(C, 2, month))
    assert known.tokens(0.0) == acquaintances.MAX_FASTER * 1000
    known.hear([word(B, 1, month), word(C, 1, month), word(Member("dead", 1, "d:1"), 1, month, age_s=1e6)], 1.0, True)
    assert known.tokens(1.0) == 3 * month
    known.progress = Progress(tokens=10_000)
    each_says(known, 2.0, word(B, 2, month + 50_000), word(LIAR, 1, 2**62))
    assert known.tokens(2.0) >= 3 * month + 50_000
    assert {one.member.peer for one in known.publish(2.0)} == {"a", "b", "c", "dead", "liar"}


# ---------------------------------------------------------------- when it is over


def test_the_final_average_ends_when_the_latest_three_were_close() -> None:
    settling = Settling(tolerance=0.01, max_swaps=100)
    assert settling.settled(0)
    assert not settling.settled(5)
    for peer, apart in (("b", 0.5), ("c", 0.001), ("d", 0.002), ("c", 0.003)):
        settling.swapped(peer, apart)
    assert settling.remaining(5) == 0.5
    assert settling.remaining(2) == 0.003
    settling.swapped("e", 0.004)
    assert settling.settled(5)
    settling.swapped("f", 0.1)  # one that came late
    assert not settling.settled(5)


def test_the_final_average_goes_round() -> None:
    settling = Settling(tolerance=0.01, max_swaps=3)
    assert settling.met_least(["b", "c"]) == ["b", "c"]
    settling.swapped("b", 0.5)
    assert settling.met_least(["b", "c"]) == ["c"]
    settling.swapped("c", 0.5)
    assert settling.met_least(["b", "c"]) == ["b"]
    assert settling.met_least([]) == []
    settling.swapped("b", 0.005)
    assert settling.settled(2)  # that was the last one it may
    assert settling.met_least(["b"]) == []
    assert settling.met_least(["b", "c"]) == ["c"]


# ---------------------------------------------------------------- data and contract


def test_peers_read_in_orders_of_their_own() -> None:
    orders = [[block_at(place, 1000, own_seed(7, peer)) for place in range(1000)] for peer in ("a", "b", "a")]
    assert orders[0] == orders[2]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(1000))
    assert sum(one == other for one, other in zip(orders[0], orders[1], strict=True)) < 20


@pytest.mark.parametrize(
    ("section", "values", "complaint"),
    [
        ("codec", {"name": "int8"}, "codec.name to be fp32, fp16 or bf16"),
        ("codec", {"groups": ({"match": ("*",), "name": "topk"},)}, "codec.name"),
        ("codec", {"error_feedback": 0.9}, "codec.error_feedback"),
        ("outer", {"optimizer": "sgd"}, "outer.optimizer to be 'nesterov'"),
        ("outer", {"warmup_steps": 3}, "outer.warmup_steps to be 0"),
        ("outer", {"weighting": "tokens"}, "outer.weighting"),
        ("outer", {"averaging": "radial"}, "outer.averaging"),
        ("outer", {"aggregation": "clip"}, "outer.aggregation"),
        ("outer", {"momentum": 0.9}, "must be below 2 .* = 0.38"),
        ("sync", {"fragments": 2}, "sync.fragments to be 1"),
        ("sync", {"overlap": 1}, "sync.overlap to be 0"),
        ("inner", {"sized_by": "speed"}, "inner.sized_by"),
        ("membership", {"stragglers": "cut"}, "membership.stragglers"),
        ("membership", {"without_majority": "continue"}, "membership.without_majority"),
        ("membership", {"sync_versions": 2}, "membership.sync_versions"),
        ("data", {"source": "hf", "paths": ("x",)}, "data.source"),
        ("gossip", {"tolerance": 0.0}, "tolerance"),
    ],
)
def test_what_does_not_apply_is_refused(section: str, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        contract(**{"inner": {"steps": 2}, section: {"steps": 2, **values} if section == "inner" else values})


def test_hearsay_of_all_peers_neither_ends_a_run_nor_hides_what_they_trained() -> None:
    """Whoever says of each that it has trained much would raise the median with them, which bounds what each counts."""
    table = Acquaintances(Member("a", 1, "a:1"), 1000)
    table.progress = Progress(tokens=20_000)
    honest = [Acquaintance(Member(name, 1, f"{name}:1"), 1, Progress(tokens=20_000)) for name in "bcde"]
    for word in honest:
        table.hear([word], 0.0)
    liar = Acquaintance(Member("liar", 1, "liar:1"), 1, Progress())
    for beat, tokens, counted in ((2, 2**60, 160_000), (3, 0, 80_000), (4, 30_000, 120_000)):
        said = [replace(word, beat=beat, progress=Progress(tokens=tokens)) for word in honest]
        table.hear([replace(liar, beat=beat), *said], 1.0)
        assert table.tokens(1.0) == counted
    table.hear([replace(honest[0], beat=5, progress=Progress(tokens=50_000))], 2.0)
    assert table.tokens(2.0) == 140_000


@pytest.mark.parametrize(
    "table",
    [{}, [5], [["p1", 1, "a:1", 5]], [["p1", 1, "a:1", -5, 0]], [["p1", 1, "a:1", 2**63, 0]], [[]] * 9999],
)
def test_a_table_that_no_peer_writes_is_refused(table: object) -> None:
    with pytest.raises(StateError):
        table_of(Checkpoint(1, {}, {"known": table}, Path("v00000001")))


def test_a_checkpoint_of_an_earlier_release_has_no_table() -> None:
    assert table_of(Checkpoint(1, {}, {}, Path("v00000001"))) == []
