"""Peers far slower than the others under `async`: the memory of versions that close while they train is bounded."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from diloco.base.types import Closed, Commit, Leases
from diloco.exchange.lane import Lane
from tests.fronts import drive
from tests.local import LocalPeer, LocalWorld
from tests.peers import until
from tests.test_lanes import two_ranks

BACKLOG = 4
ASYNC = {"policy": "async", "grace_s": 0.0, "backlog_versions": BACKLOG}


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    made = LocalWorld(4, membership=ASYNC)
    yield made
    made.close()


def go_on(world: LocalWorld, *slow: LocalPeer, versions: int = 3 * BACKLOG) -> None:
    """So many versions close at least, also in the exchanges of the slow peers, whose training takes none of them."""
    awake = [peer for peer in world.peers if peer not in slow]
    target = max(peer.peer.exchange.version for peer in awake) + versions
    while max(peer.peer.exchange.version for peer in awake) < target:
        world.rounds(awake, 1)
    exchanges = [peer.peer.exchange for peer in slow]
    until(lambda: all(one.version >= target for one in exchanges), "their exchanges have closed them, too")


def means() -> list[Closed]:
    """All closed versions with their means in the memory of this process."""
    return [one for one in gc.get_objects() if issubclass(type(one), Closed) and one.parts]


def counted_tokens(commits: list[Commit], peer: str) -> int:
    return sum(entry.tokens for commit in commits for entry in commit.counted if entry.peer == peer)


def has_offer(world: LocalWorld, slow: LocalPeer) -> bool:
    """Whether a coordinator knows that the slow peer contributes."""
    tallies = [peer.peer.exchange.machine._coordinator._tally for peer in world.peers]
    promises = [tally.ready.get(slow.name) for tally in tallies if tally is not None]
    return any(promise is not None and promise.offer is not None for promise in promises)


def test_no_more_means_than_the_backlog_wait_for_training(world: LocalWorld) -> None:
    """All that closed are counted, wherever they are kept: each peer has those of its backlog, and perhaps the next."""
    slow = world.peers[3]
    gc.collect()
    before = {id(one) for one in means()}
    go_on(world, slow, versions=8 * BACKLOG)
    assert slow.peer.exchange.behind
    assert slow.peer.exchange.closed() == ()
    gc.collect()
    kept = Counter(one.commit.version for one in means() if id(one) not in before)
    assert len(kept) <= BACKLOG + 1
    assert max(kept.values()) <= 2 * len(world.peers)


def test_who_trains_through_more_versions_copies_the_state_and_goes_on(world: LocalWorld) -> None:
    """Its progress is kept, as in any copy, and counts with the next version that it contributes to."""
    slow = world.peers[3]
    slow.inner_step()
    joined = slow.copies
    go_on(world, slow)
    slow.catch_up()
    assert slow.copies == joined + 1
    assert slow.version > 2 * BACKLOG
    assert slow.peer.line.trained.tokens == 10
    while not counted_tokens(slow.commits, slow.name):
        slow.round()
    assert len(world.settle(world.peers)) == 1
    totals = slow.peer.journal.totals
    assert totals.balanced
    assert totals.discarded == 0
    assert totals.committed == counted_tokens(world.peers[0].commits, slow.name)


def test_of_many_slow_peers_each_copies_the_state_of_the_fast_one(world: LocalWorld) -> None:
    """Most members offer the state at which all slow peers are: it would lead nowhere."""
    slow = world.peers[1:]
    go_on(world, *slow)
    for peer in slow:
        joined = peer.copies
        peer.catch_up()
        assert peer.version > 2 * BACKLOG
        assert peer.copies == joined + 1
    assert len(world.settle(world.peers)) == 1


def test_versions_that_close_while_a_slow_peer_copies_are_applied(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than the backlog keeps otherwise."""
    slow = world.peers[3]
    go_on(world, slow)
    fetch, asked = slow.peer.exchange.link.fetch_state, list[str]()

    async def late(*what: Any) -> AsyncIterator[tuple[int, Sequence[bytes]]]:
        if not asked:
            asked.append(what[0])
            await asyncio.to_thread(go_on, world, *world.peers[1:], versions=BACKLOG + 1)
        async for found in fetch(*what):
            yield found

    monkeypatch.setattr(slow.peer.exchange.link, "fetch_state", late)
    joined = slow.copies

    def applied() -> bool:
        slow.catch_up()
        return slow.version > 4 * BACKLOG

    until(applied, "it has applied them")
    assert asked
    assert slow.copies == joined + 1
    go_on(world, slow, versions=1)
    assert len(slow.peer.exchange.archive.backlog.after(0)) <= BACKLOG


def test_who_trains_through_as_many_versions_as_the_backlog_applies_them(world: LocalWorld) -> None:
    slow = world.peers[3]
    slow.inner_step()
    at, joined = slow.peer.exchange.version, slow.copies
    world.rounds(world.peers[:1], 1)
    until(lambda: at < slow.peer.exchange.version <= at + BACKLOG, "some have closed here, too")
    slow.catch_up()
    assert slow.copies == joined
    assert slow.peer.line.trained.tokens == 10


def test_what_a_version_counts_that_training_never_saw_is_booked_as_committed(world: LocalWorld) -> None:
    """Its contribution was on its way while it trained: of the versions that it does not apply, one counts it."""
    slow = world.peers[3]
    at, rest = slow.peer.exchange.version, slow.offer()
    # Under load others would make a version before it has reached its coordinator, and it would be measured anew.
    until(lambda: has_offer(world, slow) or slow.peer.exchange.version > at, "its contribution is on its way")
    slow.life.interrupted()
    slow.inner_step()  # beside what is on its way
    go_on(world, slow)
    drive(rest, slow.inner_step)
    slow.catch_up()
    counted = counted_tokens(world.peers[0].commits, slow.name)
    assert counted == 10
    totals = slow.peer.journal.totals
    assert (totals.committed, totals.discarded, totals.uncommitted) == (10, 0, 10)
    while counted_tokens(slow.commits, slow.name) < 10:
        slow.round()
    assert len(world.settle(world.peers)) == 1
    assert slow.peer.journal.totals.balanced


def commit_of(version: int) -> Commit:
    return Commit(version, version, "", "", 0, (), (), (), f"mean of {version}", 0, Leases(0, {}), "")


def test_another_rank_keeps_the_means_of_just_the_versions_that_it_is_to_apply() -> None:
    """Those that rank 0 has in its hands, however many close meanwhile, but none that a copied state passes over."""
    with two_ranks() as (remote, heard, lane, _, _):

        def close(versions: Sequence[int]) -> None:
            for version in versions:
                remote.post(Lane.keep_mean, f"mean of {version}", [bytes([version])])
                remote.post(Lane.close_for_follower, commit_of(version), 0)
                remote.post(Lane.keep_means, {f"mean of {version}"})

        close(range(1, 9))
        remote.post(Lane.pass_over, 5, ())  # 1 to 4 are in the hands of rank 0
        assert [lane.closed(commit_of(version)).parts for version in (1, 2, 4)] == [[b"\1"], [b"\2"], [b"\4"]]
        close([9])
        remote.post(Lane.pass_over, 9, ())
        founding = replace(commit_of(9), fragment=-1, mean_digest="")  # of the lineage that the copied state is of
        remote.post(Lane.pass_over, 0, [commit_of(9), founding])  # that state is of version 8
        assert lane.closed(commit_of(9)).parts == [b"\t"]
        assert not lane._closed
        assert heard.failures.empty()
