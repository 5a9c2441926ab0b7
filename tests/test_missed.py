"""Missed commits and means that an exchange fetches: their hashing holds up nobody."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from diloco.base.types import Closed, Commit, Member
from diloco.exchange import missed
from diloco.exchange.engine import Exchange
from diloco.exchange.service import ExchangeService
from diloco.outer import average
from diloco.protocol.effects import FetchMean
from diloco.protocol.messages import Learned
from tests.local import LocalPeer, LocalWorld
from tests.peers import DEADLINE_S, until

ALONE = {"policy": "quorum", "quorum_peers": 2, "grace_s": 0.0}
"""Two of three go on without the third."""
MOMENT_S = 30.0
"""Seconds after which whatever hashes on the loop, which then cannot let it end, is let go."""


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    made = LocalWorld(3, membership=ALONE)
    yield made
    made.close()


class Hashing:
    """The check of a fetched mean, which takes until it may end, but no longer than a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[int] = set()
        self.ended: list[bool] = []
        """Whether it might end, each time."""
        self.began, self.may_end = threading.Event(), threading.Event()
        self._is_mean_of = average.is_mean_of
        monkeypatch.setattr(missed, "is_mean_of", self)

    def __call__(self, parts: Sequence[bytes], commit: Commit, layout: Any) -> bool:
        self.threads.add(threading.get_ident())
        self.began.set()
        self.ended.append(self.may_end.wait(MOMENT_S))
        return self._is_mean_of(parts, commit, layout)


def left_behind(world: LocalWorld, versions: int) -> LocalPeer:
    """A peer whose exchange heard nothing of so many versions; now it does."""
    awake, sleeper = world.peers[:2], world.peers[2]
    world.call(lambda: world.network.freeze(sleeper.address))
    at = sleeper.peer.exchange.version
    world.rounds(awake, versions)
    assert sleeper.peer.exchange.version == at
    world.call(lambda: world.network.thaw(sleeper.address))
    return sleeper


def test_the_loop_answers_while_fetched_commits_are_hashed(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = Hashing(monkeypatch)
    version = world.rounds_until_all_vote()
    sleeper = left_behind(world, 3)
    assert hashing.began.wait(DEADLINE_S)
    world.call(hashing.may_end.set)
    until(lambda: sleeper.peer.exchange.version == version + 3, "it has caught up")
    sleeper.catch_up()
    assert [commit.version for commit in sleeper.commits if not commit.drafter] == list(range(version + 4))
    assert sleeper.digest == world.peers[0].digest
    assert all(hashing.ended)


def fetching_a_mean(world: LocalWorld) -> tuple[Exchange, Commit]:
    """The exchange of a peer that fetches the mean of the first version, and that version's commit."""
    world.rounds(world.peers, 1)
    exchange, others = world.peers[0].peer.exchange, [peer.peer.exchange.me for peer in world.peers[1:]]
    commit = world.peers[0].commits[-1]
    world.ask(lambda: exchange.archive.means.clear())
    world.ask(lambda: exchange._perform([FetchMean(commit, tuple(others))]))
    return exchange, commit


def test_a_mean_is_hashed_beside_the_loop(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = Hashing(monkeypatch)
    exchange, commit = fetching_a_mean(world)
    hashing.may_end.set()
    until(lambda: list(exchange.archive.means) == [commit.mean_digest], "it is here")
    assert world.ask(threading.get_ident) not in hashing.threads


def test_a_state_is_offered_while_a_fetched_mean_is_hashed(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other way round: a state of 10B parameters takes a minute to hash, and a mean 2 s."""
    hashing = Hashing(monkeypatch)
    exchange, commit = fetching_a_mean(world)
    assert hashing.began.wait(DEADLINE_S)
    assert world.run(ExchangeService(exchange).on_state_offer("")).version == 1
    assert not hashing.ended
    hashing.may_end.set()
    until(lambda: list(exchange.archive.means) == [commit.mean_digest], "the mean is here")


def test_versions_that_close_while_fetched_ones_are_hashed_come_once_and_in_order(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = world.rounds_until_all_vote()
    chain = world.peers[2].peer.exchange.machine._chain
    world.call(lambda: setattr(chain, "_catching_up_until", math.inf))  # it asks nobody before all is in place here
    sleeper = left_behind(world, 3)
    exchange, is_mean_of, kept = sleeper.peer.exchange, average.is_mean_of, list[int]()
    take_mean = exchange.archive.take_mean

    async def asked(commit: Commit, sources: Sequence[Member]) -> None:
        """The mean alone, which it asks for where it heard of an accepted version, is of no interest here."""

    monkeypatch.setattr(exchange._fetcher, "mean", asked)

    async def noted(closed: Closed) -> bool:
        kept.append(exchange.version)
        return await take_mean(closed)

    monkeypatch.setattr(exchange.archive, "take_mean", noted)

    def overtaken(parts: Sequence[bytes], commit: Commit, layout: Any) -> bool:
        async def learn() -> None:
            if commit.version > exchange.version:
                await noted(Closed(commit, parts))
                exchange._feed(Learned(commit, exchange.machine.others()[0]))

        if commit.version < version + 3:
            world.run(learn())  # from another member
        return is_mean_of(parts, commit, layout)

    monkeypatch.setattr(missed, "is_mean_of", overtaken)
    world.call(lambda: setattr(chain, "_catching_up_until", -math.inf))
    until(lambda: exchange.version == version + 3, "it has caught up")
    sleeper.catch_up()
    assert [commit.version for commit in sleeper.commits if not commit.drafter] == list(range(version + 4))
    assert sleeper.digest == world.peers[0].digest
    assert kept == [version, version + 1, version + 2]


def test_another_member_is_asked_where_the_first_has_just_joined(world: LocalWorld) -> None:
    """Its backlog begins with what closed since: that says nothing of what the others keep."""
    version = world.rounds_until_all_vote()
    awake, sleeper = world.peers[:2], world.peers[2]
    exchange, newcomer = sleeper.peer.exchange, awake[0].peer.exchange
    world.call(lambda: setattr(exchange.machine._chain, "_catching_up_until", math.inf))  # it asks nobody by itself
    left_behind(world, 2)
    until(lambda: awake[1].peer.exchange.version == version + 2, "the other has them")
    world.call(newcomer.archive.backlog.clear)

    def has_caught_up() -> bool:  # one version may close meanwhile, by what had been on its way
        world.run(exchange._catch_up(newcomer.me))
        return exchange.version == version + 2

    until(has_caught_up, "it has them")
    assert not exchange.behind
