"""The protocol's state machines in a deterministic world: agreement whatever the network and the deaths."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from diloco.exchange.view import votes_needed
from tests.virtual import RULES, World

SEEDS_WITHOUT_MEMORY = (506, 652, 724, 790)
"""Seeds, of the first thousand, in which it matters that a later coordinator of one version remembers."""


def started(count: int, seed: int = 0, **options: float) -> World:
    world = World(seed, replace(RULES, start_peers=count), **options)
    world.found("p0")
    for index in range(1, count):
        world.join(f"p{index}", "p0")
    return world


def versions(world: World) -> dict[str, int]:
    return {name: peer.machine.version for name, peer in world.peers.items() if peer.alive}


def test_four_peers_commit_and_all_contributions_count():
    world = started(4)
    world.run(30)
    assert min(versions(world).values()) >= 10
    assert world.commits["L", 0].fragment == -1
    assert all(len(commit.counted) == 4 for (_, version), commit in world.commits.items() if version > 0)


def test_one_peer_alone_commits():
    world = started(1)
    world.run(20)
    assert versions(world)["p0"] >= 8


def test_a_late_joiner_is_taken_in_and_counted():
    world = started(3)
    world.run(10)
    world.join("late", "p1")
    world.run(20)
    last = max(version for _, version in world.commits)
    assert "late" in [counted.peer for counted in world.commits["L", last].counted]


def test_killed_peer_is_dropped_and_the_rest_go_on():
    world = started(3)
    world.run(10)
    world.kill("p1")
    before = versions(world)["p0"]
    world.run(20)
    assert versions(world)["p0"] >= before + 3
    assert [member.peer for member in world.peers["p0"].machine.view] == ["p0", "p2"]


def test_leaver_gives_its_vote_so_that_one_of_two_goes_on():
    world = started(2)
    world.run(10)
    world.leave("p1")
    before = versions(world)["p0"]
    world.run(20)
    assert versions(world)["p0"] >= before + 3


def test_without_a_majority_nothing_commits_but_training_goes_on():
    world = started(2)
    world.run(10)
    world.kill("p1")
    before = versions(world)["p0"]
    world.run(60)
    assert versions(world)["p0"] <= before + 1
    assert len(world.peers["p0"].skips) >= 5
    assert "voters can be reached" in world.peers["p0"].skips[-1]


def test_operator_evicts_the_dead_and_the_survivor_goes_on():
    from diloco.exchange import messages as m

    world = started(2)
    world.run(10)
    world.kill("p1")
    world.run(30)
    before = versions(world)["p0"]
    world.event("p0", m.Received(world.peers["p0"].machine.me, m.Evict("p1")))
    world.run(60)
    assert versions(world)["p0"] >= before + 3


def test_a_stopped_peer_finds_itself_outside_and_comes_back():
    world = started(3)
    world.run(10)
    world.freeze("p2", 30)
    world.run(39)
    assert [member.peer for member in world.peers["p0"].machine.view] == ["p0", "p1"]
    world.run(70)
    assert world.peers["p2"].machine.in_view
    assert versions(world)["p2"] >= versions(world)["p0"] - 1


def test_the_founder_may_die_and_a_peer_joins_through_another():
    world = started(3)
    world.run(10)
    world.kill("p0")
    world.run(20)
    world.join("late", "p2")
    world.run(40)
    assert world.peers["late"].machine.in_view


def test_half_against_half_never_forks():
    world = started(4)
    world.run(10)
    world.cut = lambda a, b: (a in ("p0", "p1")) != (b in ("p0", "p1"))
    before = max(versions(world).values())
    world.run(50)
    assert max(versions(world).values()) <= before + 1
    world.cut = lambda a, b: False
    world.run(80)
    assert min(versions(world).values()) >= before + 3


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_seeds_of_loss_deaths_stops_and_joins_never_disagree(first: int):
    disorders(range(first, first + 60))


def test_one_of_two_goes_on_when_the_others_death_is_proven():
    world = started(2)
    world.deaths_are_proven = True
    world.run(10)
    world.kill("p1")
    before = versions(world)["p0"]
    world.run(20)
    assert versions(world)["p0"] >= before + 3


@pytest.mark.parametrize("members", range(1, 12))
def test_votes_needed_always_meet(members: int):
    """Whatever deaths two coordinators know of, the later one more than the earlier: their quorums share a voter."""
    for known in range(members):
        for later in range(known, members):
            first, second = votes_needed(members, known), votes_needed(members, later)
            if second <= members - later:
                died_since = later - known
                assert max(first - died_since, 0) + second > members - later


def disorders(seeds: Iterable[int]) -> None:
    for seed in seeds:
        disorder(seed)


def disorder(seed: int) -> None:
    """One minute of a run in which much goes wrong; `World` checks agreement at every commit."""
    dice = random.Random(seed)
    count = dice.randint(2, 5)
    world = started(count, seed, loss=dice.choice([0.0, 0.02, 0.1]), delay_s=dice.choice([0.01, 0.1, 0.5]))
    world.deaths_are_proven = seed % 2 == 0
    for _ in range(dice.randint(1, 4)):
        name = f"p{dice.randrange(count)}"
        fault = dice.choice(["kill", "freeze", "leave", "join"])
        at_s = dice.uniform(3, 40)
        world.later(at_s, lambda name=name, fault=fault, at_s=at_s: disturb(world, fault, name, at_s))
    world.run(60)


def disturb(world: World, fault: str, name: str, at_s: float) -> None:
    alive = [peer for peer, state in world.peers.items() if state.alive and not state.frozen]
    if fault == "kill":
        world.kill(name)
    elif fault == "freeze" and name in alive:
        world.freeze(name, world.random.uniform(1, 20))
    elif fault == "leave" and name in alive:
        world.leave(name)
    elif fault == "join" and alive:
        world.join(f"late{at_s:.0f}", alive[0])


def test_the_world_notices_a_commit_without_a_majority(monkeypatch: pytest.MonkeyPatch):
    """The check above can fail: with the majority taken out, two halves of a run go on apart."""
    monkeypatch.setattr("diloco.exchange.machine.votes_needed", lambda members, gone: 1)
    world = started(4)
    world.run(10)
    world.cut = lambda a, b: (a in ("p0", "p1")) != (b in ("p0", "p1"))
    with pytest.raises(AssertionError, match="closed another version"):
        world.run(60)


def test_the_world_notices_promises_that_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """Nor does a later coordinator get away with forgetting what was accepted before."""
    monkeypatch.setattr("diloco.exchange.tally.Tally.accepted", lambda tally: None)
    with pytest.raises(AssertionError, match="closed another version"):
        disorders(SEEDS_WITHOUT_MEMORY)
