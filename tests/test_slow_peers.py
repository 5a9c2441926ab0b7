"""Peers far slower than the others under `async`: the memory of versions that close while they train is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco.base.types import Commit
from tests.fronts import drive
from tests.local import LocalPeer, LocalWorld
from tests.peers import until

BACKLOG = 4
ASYNC = {"policy": "async", "grace_s": 0.0, "backlog_versions": BACKLOG}


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    made = LocalWorld(4, membership=ASYNC)
    yield made
    made.close()


def go_on(world: LocalWorld, slow: LocalPeer, versions: int) -> None:
    """So many versions close at least, also in the exchange of the slow peer, whose training takes none of them."""
    awake = [peer for peer in world.peers if peer is not slow]
    target = max(peer.peer.exchange.version for peer in awake) + versions
    while max(peer.peer.exchange.version for peer in awake) < target:
        world.rounds(awake, 1)
    until(lambda: slow.peer.exchange.version >= target, "the slow peer's exchange has closed them, too", 20.0)


def counted_tokens(commits: list[Commit], peer: str) -> int:
    return sum(entry.tokens for commit in commits for entry in commit.counted if entry.peer == peer)


@pytest.mark.xfail(strict=True, reason="every mean is kept until the training thread looks")
def test_no_more_means_than_the_backlog_wait_for_training(world: LocalWorld) -> None:
    slow = world.peers[3]
    go_on(world, slow, 3 * BACKLOG)
    assert len(slow.peer.exchange.closed()) <= BACKLOG


@pytest.mark.xfail(strict=True, reason="every mean is kept until the training thread looks")
def test_who_trains_through_more_versions_copies_the_state_and_goes_on(world: LocalWorld) -> None:
    """Its progress is kept, as in any copy, and counts with the next version that it contributes to."""
    slow = world.peers[3]
    slow.inner_step()
    joined = slow.copies
    go_on(world, slow, 3 * BACKLOG)
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


def test_who_trains_through_as_many_versions_as_the_backlog_applies_them(world: LocalWorld) -> None:
    slow = world.peers[3]
    slow.inner_step()
    at, joined = slow.peer.exchange.version, slow.copies
    world.rounds(world.peers[:1], 1)
    until(lambda: at < slow.peer.exchange.version <= at + BACKLOG, "some have closed here, too", 20.0)
    slow.catch_up()
    assert slow.copies == joined
    assert slow.peer.line.trained.tokens == 10


def test_what_a_version_counts_that_training_never_saw_is_booked_as_committed(world: LocalWorld) -> None:
    """Its contribution was on its way while it trained: of the versions that it does not apply, one counts it."""
    slow = world.peers[3]
    rest = slow.offer()
    slow.life.interrupted()
    slow.inner_step()  # beside what is on its way
    go_on(world, slow, 3 * BACKLOG)
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
