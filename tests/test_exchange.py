"""Peers with real bytes over the in-process link: what happens to state when peers misbehave or fall behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.base.clock import monotonic_s
from diloco.base.errors import StateError, UnreachableError
from diloco.base.types import Closed, Member, Skip
from diloco.compress import bundle
from diloco.exchange.service import ExchangeService
from diloco.outer.state import OuterState
from diloco.peer.waits import in_time
from diloco.protocol import coordinator
from diloco.protocol.effects import FetchMean, Resync
from diloco.protocol.messages import ContributionArrived, Offered, PartFolded, Reply
from diloco.protocol.streams import Kind, Part, StreamHeader, Welcome
from diloco.transport.dht import Presence
from diloco.transport.link import LinkDown, LinkRefused
from tests.fronts import drive
from tests.local import LocalPeer, LocalWorld, local_site
from tests.peers import DEADLINE_S, until

ALONE = {"policy": "quorum", "quorum_peers": 2, "grace_s": 0.0}
"""Two of three go on without the third."""

SITE = local_site(suspect_s=3.0, stall_s=2.0)
"""Many tests here wait until somebody counts as dead."""


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    made = LocalWorld(**{"count": 3, "site": SITE, **getattr(request, "param", {})})
    yield made
    made.close()


def counted(peer: LocalPeer) -> list[list[str]]:
    return [[entry.peer for entry in commit.counted] for commit in peer.commits]


def agree(peers: list[LocalPeer]) -> None:
    """Whatever version several peers stood at, they held the same bits."""
    versions = {version for peer in peers for version in peer.states}
    for version in versions:
        assert len({peer.states[version] for peer in peers if version in peer.states}) == 1


def test_an_error_in_what_a_lane_tells_ends_the_exchange(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane tells it within a call of another peer, to which gRPC would give it."""
    exchange = world.peers[0].peer.exchange

    def breaks(event: object, now: float) -> None:
        raise ArithmeticError("half done")

    monkeypatch.setattr(exchange.machine, "handle", breaks)
    world.ask(lambda: exchange.on_event(ContributionArrived(1, 0, "b", 0)))
    with pytest.raises(ArithmeticError, match="half done"):
        exchange.raise_failure()


def test_one_peer_comes_first_before_the_first_version_and_after(world: LocalWorld) -> None:
    """Rank 0 decides who: other ranks know no commit until they apply one."""
    for count in (0, 1):
        world.rounds(world.peers, count)
        assert [peer.life.ready(0).first for peer in world.peers] == [True, False, False]


def test_a_peer_that_reads_more_than_it_holds_is_counted_still(world: LocalWorld) -> None:
    """As a loop of somebody's own does while rounds are skipped."""
    world.peers[0].blocks = 10**6
    world.rounds(world.peers, 3)
    assert [["p0" in each for each in counted(peer)][-2:] for peer in world.peers] == [[True, True]] * 3


def test_an_earlier_life_that_is_kept_in_the_view_is_not_this_one(world: LocalWorld) -> None:
    """Whoever comes back under its name enters with the version that names its new life, and not with one before."""
    world.rounds(world.peers, 1)
    peer = world.peers[2].peer
    commit = peer.line.commit
    assert peer.stands_in_view
    assert commit is not None
    lives = [replace(member, incarnation=member.incarnation - 1) for member in commit.view]
    peer.line.commit = replace(commit, view=tuple(lives))
    assert not peer.stands_in_view


def test_peers_hold_the_same_bits_after_every_version(world: LocalWorld) -> None:
    outcomes = world.rounds(world.peers, 5)
    assert not any(isinstance(outcome, Skip) for each in outcomes for outcome in each)
    assert {peer.version for peer in world.peers} == {5}
    agree(world.peers)
    anchor = world.peers[0].peer.line.state.fragments[0].anchor
    assert all(torch.equal(peer.model.weight.flatten(), anchor) for peer in world.peers)
    assert all(peer.peer.line.trained.tokens == 0 for peer in world.peers)
    assert world.peers[0].commits[-1].tokens == 5 * 3 * 10


def test_versions_that_close_while_nobody_waits_for_them_are_applied_in_order(world: LocalWorld) -> None:
    """Somebody pressed Ctrl-C while the exchange went on, and the loop goes on all the same."""
    *others, mine = world.peers
    rest = mine.offer()
    mine.life.interrupted()
    mine.inner_step()  # beside what is on its way
    world.rounds(others, 1)
    until(lambda: mine.peer.exchange.version == 1, "the version has closed here, too")
    drive(rest)
    world.rounds(world.peers, 2)
    assert counted(others[0])[1:] == [["p0", "p1", "p2"]] * 3
    tokens = [entry.tokens for commit in others[0].commits for entry in commit.counted if entry.peer == "p2"]
    assert sum(tokens) == mine.peer.journal.trained_tokens == 40
    assert mine.peer.line.trained.tokens == 0
    agree(world.peers)


def test_what_fails_on_the_exchanges_thread_ends_the_wait_for_it(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = world.peers[0]
    handle = broken.peer.exchange.machine.handle

    def fails(event: Any, now_s: float) -> Any:
        if isinstance(event, Offered):
            raise ZeroDivisionError
        return handle(event, now_s)

    monkeypatch.setattr(broken.peer.exchange.machine, "handle", fails)
    with pytest.raises(ZeroDivisionError):
        broken.round()


def test_what_fails_while_a_message_is_handled_ends_the_exchange(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has done half of what it decided. The sender is answered with an error, and nobody else would know."""
    exchange = world.peers[0].peer.exchange

    def receive() -> None:
        monkeypatch.setattr(exchange.machine, "receive", lambda envelope, now_s: 1 / 0)  # others' messages come later
        with pytest.raises(ZeroDivisionError):
            exchange.receive(None)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            exchange.raise_failure()

    world.ask(receive)


def test_a_copy_ends_with_what_is_found_out_meanwhile() -> None:
    """A joiner that nobody reaches is told while the state comes over a slow link, and not after that."""

    def found() -> None:
        raise UnreachableError("nobody reaches this peer", "let connections in")

    copying: Future[Any] = Future()
    with pytest.raises(UnreachableError):
        drive(in_time(copying, 60.0, lambda: False, found))
    assert copying.cancelled()


def test_a_copy_goes_on_as_long_as_bytes_come() -> None:
    copying: Future[Any] = Future()
    asked: list[float] = []

    def came_s() -> float:
        asked.append(monotonic_s())
        return asked[min(len(asked), 5) - 1]

    with pytest.raises(StateError, match="no more of the state came"):
        drive(in_time(copying, 1e-3, lambda: False, came_s=came_s))
    assert len(asked) == 6
    assert copying.cancelled()


def test_bytes_of_a_repair_that_was_not_heard_of_are_too_early(world: LocalWorld) -> None:
    """Else they would count as bytes that nobody honest sends: the part had another owner."""
    exchange, sender = world.peers[0].peer.exchange, world.peers[1].peer.exchange.machine.me
    machine, rules = exchange.machine, exchange.terms.rules

    async def reply(generation: int) -> Reply:
        exchange.lane.work = SimpleNamespace(key=(machine.height, 0), generation=0)  # type: ignore[assignment]
        header = (rules.run, rules.contract, machine.lineage, sender, Kind.MEAN, machine.height, 0, generation)
        try:
            return await exchange.admit(StreamHeader(*header))
        finally:
            exchange.lane.work = None

    assert asyncio.run_coroutine_threadsafe(reply(0), world.loop).result(30.0) is Reply.OK
    assert asyncio.run_coroutine_threadsafe(reply(1), world.loop).result(30.0) is Reply.TOO_EARLY


def test_a_part_of_another_attempt_is_no_part_of_this_mean(world: LocalWorld) -> None:
    """Another rank may tell it late; the contributions that it averages may be others."""
    exchange = world.peers[0].peer.exchange
    height, me = exchange.machine.height, exchange.me.peer

    async def parts() -> list[int]:
        exchange.lane.work = SimpleNamespace(key=(height, 1), owners={0: me})  # type: ignore[assignment]
        try:
            found = []
            for attempt in (0, 1):
                exchange.on_event(PartFolded(height, attempt, 0), b"content")
                found.append(len(exchange._contents))
            return found
        finally:
            exchange.lane.work = None
            exchange._contents.take_out([0])

    assert world.run(parts()) == [0, 1]


IN_PLACE = SITE.model_copy(update={"device": SITE.device.model_copy(update={"outer_step": "in_place"})})


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("world", [{"site": IN_PLACE}], indirect=True)
def test_outer_steps_in_place_have_the_same_bits(world: LocalWorld) -> None:
    """And nobody who copies a state meanwhile gets half of the next."""
    buffers = [[buffer.data_ptr() for _, buffer in peer.peer.line.state.buffers()] for peer in world.peers]
    world.rounds(world.peers, 3)
    assert [[buffer.data_ptr() for _, buffer in peer.peer.line.state.buffers()] for peer in world.peers] == buffers
    ahead = LocalWorld()
    ahead.rounds(ahead.peers, 3)
    assert world.peers[0].states == ahead.peers[0].states
    ahead.close()
    world.let_in(world.add("p3"), world.peers[:3])
    world.rounds(world.peers, 2)
    assert world.peers[0].commits[-1].counted[-1].peer == "p3"
    agree(world.peers)


def test_what_is_being_overwritten_is_not_offered(world: LocalWorld) -> None:
    exchange, line = world.peers[0].peer.exchange, world.peers[0].peer.line
    assert exchange.state_unused().result(10.0)
    with pytest.raises(LinkRefused):
        world.run(ExchangeService(exchange).on_state_offer(""))
    waiting = asyncio.run_coroutine_threadsafe(ExchangeService(exchange).on_state_offer(""), world.loop)
    exchange.hold(line.state, line.commit)
    assert waiting.result(DEADLINE_S).digest == line.state.digest
    assert not exchange.state_unused().result(10.0)  # somebody is about to copy it
    other = world.peers[1].peer
    assert (
        world.run(ExchangeService(other.exchange).on_state_offer(other.line.state.digest)).digest
        == other.line.state.digest
    )
    assert other.exchange.state_unused().result(10.0)  # it was asked by one who has that state


def test_who_has_left_its_lineage_names_the_member_whose_state_it_is_to_copy(world: LocalWorld) -> None:
    exchange, source = world.peers[0].peer.exchange, Member("p9", 1, "own:9")

    def hello() -> tuple[Member, ...]:
        exchange.machine._leave_lineage("that goes on", (), ())
        exchange._perform([Resync(source, 0)])
        return ExchangeService(exchange).on_hello().members

    assert world.ask(hello)[:2] == (exchange.me, source)


def test_a_state_of_which_bytes_are_taken_counts_as_read(world: LocalWorld) -> None:
    exchange = world.peers[0].peer.exchange
    service = ExchangeService(exchange)
    digest = world.run(service.on_state_offer("")).digest
    kept = exchange.archive.snapshots._kept
    offered_s = kept[digest].read_at_s
    world.run(service.on_state_bytes(digest, 1))
    assert kept[digest].read_at_s > offered_s


def test_a_connection_that_breaks_once_is_no_death(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged bytes end a connection, too: the peer is there, its stream begins again, and every version counts it."""
    broken: list[tuple[str, str]] = []
    for peer in world.peers:
        link = peer.peer.exchange.link

        async def breaks_once(
            address: str, *rest: Any, sender: str = peer.name, send: Callable[..., Any] = link.send_parts
        ) -> Reply:
            if (sender, address) not in broken:
                broken.append((sender, address))
                raise LinkDown("the connection broke")
            reply: Reply = await send(address, *rest)
            return reply

        monkeypatch.setattr(link, "send_parts", breaks_once)
    world.rounds(world.peers, 3)
    assert len(broken) == 6
    assert [counted(peer)[-3:] for peer in world.peers] == [[["p0", "p1", "p2"]] * 3] * 3


def test_routes_of_members_that_are_gone_are_forgotten(world: LocalWorld) -> None:
    lane = world.peers[0].peer.exchange.lane
    world.rounds(world.peers)
    world.ask(lambda: lane.sender._routes.update({"p1:of its process before": ("p1:of its process before",)}))
    world.rounds(world.peers)
    assert lane.sender._routes == {"p1:1": ("p1:1",), "p2:1": ("p2:1",)}


@pytest.mark.parametrize("world", [{"codec": {"name": "topk", "zstd": False}}], indirect=True)
def test_nobody_is_sent_its_own_contribution(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three contributions to each part of a gathered mean travel to each peer; all hold the same mean."""
    sent: list[int] = []
    for peer in world.peers:
        link = peer.peer.exchange.link

        async def watched(
            address: str,
            header: StreamHeader,
            parts: AsyncIterator[Part],
            *rest: Any,
            send: Callable[..., Any] = link.send_parts,
        ) -> Reply:
            async def counted_parts() -> AsyncIterator[Part]:
                async for part in parts:
                    if header.kind is Kind.MEAN:
                        sent.append(len(part.payload))
                    yield part

            reply: Reply = await send(address, header, counted_parts(), *rest)
            return reply

        monkeypatch.setattr(link, "send_parts", watched)
    world.rounds(world.peers, 1)
    (commit,) = world.peers[0].commits[-1:]
    assert len(commit.counted) == 3
    agree(world.peers)
    held = world.peers[0].peer.exchange.lane.mean(commit.mean_digest) or ()
    one = [len(bundle.split(mean, 10**6)[0][1]) for mean in held]  # of these values all are as long
    assert sorted(sent) == sorted([len(mean) - size for mean, size in zip(held, one, strict=True)] * 2)


class Listing:
    """A peer's directory that lists these members."""

    addresses: tuple[str, ...] = ()

    def __init__(self, *listed: Member) -> None:
        self._listed = {one.peer: one for one in listed}

    def revive(self) -> bool:
        return False

    def announce(self, member: Member, version: int) -> bool:
        return True

    def lookup(self) -> dict[str, Member]:
        return self._listed


def test_who_is_alone_goes_on_with_the_others_whatever_the_directory_lists(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later lives in their names, no more than an outsider's word, took their places, and they were refused."""
    world.rounds_until_all_vote()
    peer, *others = world.peers
    exchange, roster = peer.peer.exchange, peer.peer.exchange.machine.roster
    members = [other.peer.exchange.me for other in others]
    asked, hello = set(), exchange.link.hello

    async def asking(address: str, timeout_s: float) -> Any:
        asked.add(address)
        return await hello(address, timeout_s)

    monkeypatch.setattr(exchange.link, "hello", asking)
    for other in others:
        world.ask(partial(world.network.detach, other.address))
    until(lambda: exchange.alone, "nobody is reached", 5.0)
    names = [*members, Member("new", 1, "new:1")]
    lies = [replace(one, incarnation=2**62, address=f"nobody:{port}") for port, one in enumerate(names)]
    presence = Presence(Listing(*lies), exchange, lambda _: None)  # type: ignore[arg-type]
    until(lambda: asked >= {lie.address for lie in lies}, "the listed addresses are asked", 5.0)
    presence.stop()
    assert world.ask(lambda: all(roster.may_speak(one, monotonic_s()) for one in names))
    assert world.ask(lambda: [roster.latest(one).address for one in members]) == [one.address for one in members]
    for other in others:
        world.ask(partial(world.network.attach, other.address, ExchangeService(other.peer.exchange)))
    until(lambda: not exchange.alone, "the others are reached", 5.0)
    assert not any(isinstance(outcome, Skip) for each in world.rounds(world.peers) for outcome in each)


def test_who_answers_at_an_address_of_the_directory_is_met_as_what_it_is(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a member that was restarted elsewhere is found by one that is alone; and no peer of another run, or by a way
    that is not its own."""
    exchange, (_, b, c) = world.peers[0].peer.exchange, [one.peer.exchange.me for one in world.peers]
    contract, roster = exchange.terms.contract_json, exchange.machine.roster
    moved, new = replace(b, incarnation=b.incarnation + 1, address="moved:1"), Member("new", 1, "new:1")
    answers = {
        "relay:1": (contract, replace(moved, incarnation=2**62)),
        "moved:1": (contract, moved, Member("friend", 1, "friend:1")),
        "another:1": (b"{}", replace(c, incarnation=2**62, address="another:1")),
        "new:1": (contract, new),
    }
    asked = set()

    async def hello(address: str, timeout_s: float) -> Welcome:
        asked.add(address)
        if address not in answers:
            raise LinkDown(address)
        trained, *members = answers[address]
        return Welcome(trained, "lineage", 0, True, tuple(members), (), "layout", "data")

    monkeypatch.setattr(exchange.link, "hello", hello)
    for one in (b, c):
        world.ask(partial(world.network.detach, one.address))
    until(lambda: world.ask(lambda: not any(map(roster.reaches, (b, c)))), "they are not reached", 5.0)
    exchange.seek([*(Member("any", 2**62, address) for address in answers), exchange.me])
    until(lambda: asked >= answers.keys() and not world.ask(lambda: exchange.lives._listed), "all have answered", 5.0)
    assert world.ask(lambda: {entry.member for entry in roster}) == {moved, c, new}
    assert exchange.me.address not in asked


def test_an_altered_state_is_noticed_and_copied_anew(world: LocalWorld) -> None:
    """One changed bit in an anchor: its owner is left out of the version, and has the others' state afterwards."""
    world.rounds(world.peers, 2)
    victim = world.peers[2]
    line = victim.peer.line
    anchor = line.state.fragments[0].anchor.clone()
    anchor[7] = -anchor[7]
    line.state = OuterState(line.state.version, (replace(line.state.fragments[0], anchor=anchor),))
    victim.peer.exchange.hold(line.state, line.commit)
    copies = victim.copies
    world.rounds(world.peers, 1)
    assert len(world.settle(world.peers)) == 1
    assert victim.copies > copies
    assert counted(world.peers[0])[-1] == ["p0", "p1"]
    assert victim.peer.line.trained.tokens == 10  # its progress is kept, and counts next time
    world.rounds(world.peers, 1)
    assert world.peers[0].commits[-1].counted[2].tokens == 20


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("world", [{"membership": {"backlog_versions": 2}}], indirect=True)
def test_a_peer_that_missed_too_many_versions_copies_the_state(world: LocalWorld) -> None:
    """It was cut off, was dropped, comes back, keeps its progress and is counted again."""
    awake, sleeper = world.peers[:2], world.peers[2]
    version = world.rounds_until_all_vote()
    for peer in awake:  # some time after they joined, nobody copies the state that all began with
        world.call(partial(peer.peer.exchange.archive.snapshots.forget, version, math.inf))
    world.call(lambda: world.network.freeze(sleeper.address))
    timing = sleeper.peer.exchange.machine.timing
    sleeper.peer.exchange.machine.timing = replace(timing, heartbeat_s=1e9)
    world.rounds(awake, 6)
    sleeper.inner_step()
    copies = sleeper.copies
    sleeper.peer.exchange.machine.timing = timing
    sleeper.peer.exchange.machine._membership._heartbeat_at = 0.0
    world.call(lambda: world.network.thaw(sleeper.address))

    def come_back() -> list[str]:
        while not (sleeper.peer.exchange.in_view and sleeper.version >= awake[0].version - 1):
            sleeper.catch_up()
        while "p2" not in counted(sleeper)[-1]:
            sleeper.round()
        return counted(sleeper)[-1]

    back = world.pool.submit(come_back)
    while not back.done():
        world.rounds(awake, 1)
    assert "p2" in back.result()
    assert sleeper.copies > copies
    agree(world.peers)


@pytest.mark.slow(queued=False)
def test_commits_that_take_long_to_come_are_not_asked_for_again(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each stall time they were, of whoever told of a later version, until the link was full of answers."""
    awake, sleeper = world.peers[:2], world.peers[2]
    version = world.rounds_until_all_vote()
    world.call(lambda: world.network.freeze(sleeper.address))
    sleeper.peer.exchange.machine.timing = replace(sleeper.peer.exchange.machine.timing, heartbeat_s=1e9)
    world.rounds(awake, 3)
    link, began_s, asked, answered = sleeper.peer.exchange.link, monotonic_s(), list[str](), list[str]()
    fetch = link.fetch_commits

    async def slow(address: str, *rest: Any) -> list[Closed]:
        if not answered:  # then it may ask for later ones
            asked.append(address)
        await asyncio.sleep(began_s + 6 * SITE.timeouts.stall_s - monotonic_s())
        found = await fetch(address, *rest)
        answered.append(address)
        return found

    monkeypatch.setattr(link, "fetch_commits", slow)
    world.call(lambda: world.network.thaw(sleeper.address))
    until(lambda: sleeper.peer.exchange.version >= version + 3, "it has caught up")
    assert sorted(asked) == sorted(set(asked))
    sleeper.catch_up()
    agree(world.peers)


def test_a_mean_that_takes_long_to_come_is_asked_for_of_two_at_most(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, others = world.peers[0].peer.exchange, [peer.peer.exchange.me for peer in world.peers[1:]]
    world.rounds(world.peers, 1)
    commit = world.peers[0].commits[-1]
    fetch, asked, comes = exchange.link.fetch_mean, list[str](), asyncio.Event()

    async def slow(address: str, *rest: Any) -> list[bytes]:
        asked.append(address)
        await comes.wait()
        return await fetch(address, *rest)

    monkeypatch.setattr(exchange.link, "fetch_mean", slow)
    for _ in range(4):
        world.ask(lambda: exchange._perform([FetchMean(commit, tuple(others))]))
    world.ask(lambda: exchange.archive.means.clear())
    world.ask(comes.set)
    until(lambda: list(exchange.archive.means) == [commit.mean_digest], "it is here")
    assert sorted(asked) == [member.address for member in others]


def test_a_hostile_contribution_is_left_out(world: LocalWorld) -> None:
    """Bytes that do not decode: the version closes without their sender, as if it had been absent."""
    world.rounds(world.peers, 1)
    bad = world.peers[2]
    (honest,) = bad.peer.line.codecs

    class Hostile:
        name = "hostile"

        def encode(self, values: torch.Tensor) -> bytes:
            return b"\xff" * len(honest.encode(values))

    bad.peer.line.codecs = [Hostile()]  # type: ignore[list-item]
    world.pool.submit(bad.round)
    world.rounds(world.peers[:2], 1)
    assert counted(world.peers[0])[-1] == ["p0", "p1"]
    agree(world.peers[:2])


def test_progress_that_is_not_finite_is_discarded(world: LocalWorld) -> None:
    world.rounds(world.peers, 1)
    bad = world.peers[2]
    with torch.no_grad():
        bad.model.weight[3] = float("nan")
    outcome = bad.round()
    assert isinstance(outcome, Skip)
    assert "not finite" in outcome.reason
    assert bad.peer.journal.discarded_tokens == 10
    assert torch.isfinite(bad.model.weight).all()
    world.rounds(world.peers, 1)
    assert counted(world.peers[0])[-1] == ["p0", "p1", "p2"]


def test_a_joiner_gets_the_state_and_is_counted(world: LocalWorld) -> None:
    world.rounds(world.peers, 3)
    first, late = world.peers[:3], world.add("p9")
    assert late.digest == first[0].digest

    def take_part() -> list[str]:
        late.enter()  # while a version is being made, which may close without it
        late.round()
        while len(counted(late)[-1]) < 4:
            late.round()
        return counted(late)[-1]

    part = world.pool.submit(take_part)
    while len(counted(first[0])[-1]) < 4:  # on a busy machine one may be late for the version that first counts it
        world.rounds(first, 1)
    assert part.result(DEADLINE_S) == ["p0", "p1", "p2", "p9"]
    agree(world.peers)


@pytest.mark.parametrize("world", [{"count": 5}], indirect=True)
def test_a_leaver_and_a_dead_peer_of_the_same_version_are_told_apart(world: LocalWorld) -> None:
    """By everybody, though the goodbye comes after the commit that counts the leaver's last contribution."""
    *staying, dead, leaver = world.peers
    world.rounds(world.peers, 1)
    dead.peer.close()
    last = world.pool.submit(leaver.round, True)
    world.rounds(staying, 1)
    assert [entry.peer for entry in last.result(DEADLINE_S)[-1].commit.counted] == ["p0", "p1", "p2", "p4"]
    for peer in staying:
        (view,) = (event for event in peer.told if event["kind"] == "view" and event["left"])
        assert view["left"] == [{"peer": "p3", "reason": "lost"}, {"peer": "p4", "reason": "left"}]
    leaver.leave()


@pytest.mark.parametrize(("world", "counts"), [({}, True), ({"membership": ALONE}, False)], indirect=["world"])
def test_who_leaves_applies_what_closed_before_its_goodbye(world: LocalWorld, counts: bool) -> None:
    """Whether it counts what was sent or not."""
    *staying, leaver = world.peers
    if counts:
        leaver.offer()
    else:
        leaver.inner_step()
    world.rounds(staying, 1)
    until(lambda: leaver.peer.exchange.version == 1, "it hears of the version")
    leaver.leave()
    assert (leaver.version, leaver.digest) == (1, staying[0].digest)
    totals = leaver.peer.journal.totals
    assert (totals.committed, totals.discarded) == ((10, 0) if counts else (0, 10))


def test_who_leaves_and_is_not_in_the_group_is_counted_in_the_next_version(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More contributions than a version takes: they take turns."""
    *staying, leaver = world.peers

    def first_without(group: Sequence[str], most: int | None, turn: int) -> tuple[str, ...]:
        return tuple(peer for peer in group if peer != leaver.name or turn > 0)

    monkeypatch.setattr(coordinator, "in_turn", first_without)
    last = world.pool.submit(leaver.round, True)
    world.rounds(staying, 2)
    last.result(DEADLINE_S)
    leaver.leave()
    assert counted(leaver)[1:] == [["p0", "p1"], ["p0", "p1", "p2"]]
    assert [member.peer for member in leaver.commits[-1].view] == ["p0", "p1"]
    totals = leaver.peer.journal.totals
    assert (totals.committed, totals.discarded) == (10, 0)


@pytest.mark.parametrize("world", [{"codec": {"name": "fp32", "zstd": False}}], indirect=True)
def test_who_is_counted_decides_the_bits_and_nothing_else(world: LocalWorld) -> None:
    """Two runs with other threads, other timings: the same states, bit for bit."""
    world.rounds(world.peers, 4)
    other = LocalWorld(3, codec={"name": "fp32", "zstd": False})
    try:
        other.rounds(list(reversed(other.peers)), 4)
        assert other.peers[0].digest == world.peers[0].digest
    finally:
        other.close()
