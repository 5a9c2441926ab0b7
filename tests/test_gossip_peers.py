"""Swaps between real peers, over gRPC and inside the process: nobody waits, and nothing counts twice or is lost."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.base.clock import monotonic_s
from diloco.base.errors import Interrupted
from diloco.base.types import Member, Phase, Progress
from diloco.compress import open_codecs
from diloco.config.contract import CodecSection
from diloco.gossip import greeter
from diloco.gossip.pairing import Pairing, pair_mean, spread
from diloco.gossip.swaps import Arriving, Swap, SwapStage
from diloco.observe.screen import status_text
from diloco.outer.fragments import Layout
from diloco.protocol.greetings import Acquaintance, Greeting, Invite
from diloco.protocol.messages import Envelope, Evict, Heartbeat, Reply
from diloco.protocol.streams import Kind, Part, StreamHeader
from diloco.storage.checkpoint import load
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.link import Link, LinkRefused
from diloco.transport.pace import MAX_STREAMS
from tests.fronts import drive
from tests.gossips import ELEMENTS, TOKENS, Gossiper, World, as_if_answered
from tests.peers import DEADLINE_S, KEYS, until

FP32 = CodecSection(name="fp32", zstd=False)
PARTS = 5
"""Parts of 1024 elements, the last one shorter."""


@pytest.fixture(params=["grpc", "memory"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def world(*arguments: Any, **sections: dict[str, Any]) -> World:
        worlds.append(World(request.param == "memory", *arguments, **sections))
        return worlds[-1]

    yield world
    for one in worlds:
        one.close()


def progress(peer: Gossiper) -> torch.Tensor:
    return peer.local - peer.anchor


# ---------------------------------------------------------------- how it goes


def test_a_swap_is_the_papers_on_both_sides(make: Callable[..., World]) -> None:
    world = make(2)
    a, b = world.peers
    slow = [a.anchor.clone(), b.anchor.clone()]
    fast: list[torch.Tensor] = []

    def swapped() -> bool:
        if a.version == b.version == 0:  # as long as nobody has read them for a swap
            fast[:] = [a.local, b.local]
        return a.version == b.version == 1

    b.peer.trained(TOKENS, 0.001)
    a.step()
    world.until(swapped, "both have swapped")
    mean = pair_mean(*fast)
    expected = [slow_one + 0.7 * (mean - slow_one) for slow_one in slow]
    assert torch.allclose(a.anchor, expected[0], atol=1e-6)
    assert torch.allclose(b.anchor, expected[1], atol=1e-6)
    assert [peer.peer.line.trained.tokens for peer in (a, b)] == [0, 0]
    assert torch.equal(a.local, a.anchor)  # nothing was trained since
    events = [peer.events("swap")[0] for peer in (a, b)]
    assert {event["leads"] for event in events} == {True, False}
    assert events[0]["spread"] == pytest.approx(events[1]["spread"])
    assert {event["tokens"] for event in events} == {2 * TOKENS}


@pytest.mark.slow(queued=False)
def test_a_part_may_take_longer_than_nothing_may_come() -> None:
    """4 MB at 12 Mbit/s are 2.7 s; after 1 s without a byte a swap is given up."""
    world = World(False, elements=1_000_000, send_bps=12e6, sync={"part_elements": 2**20})
    try:
        a, b = world.peers
        a.step()
        world.until(lambda: a.version == b.version == 1, "both have swapped")
    finally:
        world.close()


def test_what_is_trained_while_a_swap_is_on_its_way_is_kept(make: Callable[..., World]) -> None:
    world = make(2)
    a, b = world.peers
    a.step()
    world.until(lambda: a.peer._led is not None, "a has sent its weights")
    sent = a.local
    for _ in range(3):  # b does nothing meanwhile, so that there is no answer
        a.step()
    since = a.local - sent
    assert a.version == 0
    assert float(since.abs().max()) > 0
    moved = until(lambda: b.peer.between_steps() or a.peer.between_steps() or a.version, "the answer is here")
    assert moved
    until(lambda: a.peer.between_steps() or a.version, "a has applied it")
    assert torch.allclose(progress(a), since, atol=1e-6)
    assert a.peer.line.trained.tokens == 3 * TOKENS


@pytest.mark.slow(queued=False)
def test_peers_that_pull_apart_stay_together_and_end_alike(make: Callable[..., World]) -> None:
    world = make(3, run={"name": "gossip", "total_tokens": 3 * 40 * TOKENS}, inner={"steps": 2})
    all_done = lambda: all(peer.peer.finishing and peer.version > 5 for peer in world.peers)  # noqa: E731
    world.until(all_done, "the run has its tokens, and each peer has swapped", *world.peers)
    assert sum(peer.peer.tokens for peer in world.peers) >= 3 * 40 * TOKENS
    assert all(len(peer.events("swap")) > 5 for peer in world.peers)
    at_rest = lambda: not any(peer.peer.exchange.busy or peer.peer._steps >= 2 for peer in world.peers)  # noqa: E731
    world.until(at_rest, "the last swaps with momentum have ended")
    wholes = torch.stack([peer.local for peer in world.peers]).mean(dim=0)
    finish(world.peers)
    assert all(peer.peer.spread is not None and peer.peer.spread <= 0.005 for peer in world.peers)
    for one in world.peers:
        assert torch.equal(one.local, one.anchor)
        assert spread(one.anchor, world.peers[0].anchor) <= 0.01
        assert torch.allclose(one.anchor, wholes, rtol=0.02)  # plain swaps leave the mean of all as it was


def finish(peers: list[Gossiper]) -> None:
    """All average, each on a thread of its own, as in real life."""

    async def together() -> None:
        await asyncio.gather(*(asyncio.to_thread(drive, peer.peer.average()) for peer in peers))

    asyncio.run(asyncio.wait_for(together(), 40))


@pytest.mark.slow(queued=False)
def test_a_dozen_peers_each_on_its_own_hear_of_all_and_end_alike() -> None:
    """Nobody knows all but by hearsay, and none waits for another before the final average."""
    count = 12
    run = {"name": "gossip", "total_tokens": count * 40 * TOKENS}
    world = World(True, count, run=run, inner={"steps": 4})

    def live(peer: Gossiper) -> None:
        while not peer.peer.finishing:
            peer.step()
            time.sleep(0.005)
        drive(peer.peer.average())

    async def together() -> None:
        await asyncio.gather(*(asyncio.to_thread(live, peer) for peer in world.peers))

    try:
        with ThreadPoolExecutor(count) as pool:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(pool)
            loop.run_until_complete(asyncio.wait_for(together(), 50))
            loop.close()
        trained = sum(peer.peer.tokens for peer in world.peers)
        assert {peer.peer.position() for peer in world.peers} == {trained}
        assert all(peer.peer.spread is not None and peer.peer.spread <= 0.005 for peer in world.peers)
        assert max(spread(peer.anchor, world.peers[0].anchor) for peer in world.peers) <= 0.01
        assert all(len({event["partner"] for event in peer.events("swap")}) > 3 for peer in world.peers)
    finally:
        world.close()


def test_a_joiner_begins_where_another_stands_and_everybody_hears_of_it(make: Callable[..., World]) -> None:
    world = make(2)
    a, b = world.peers
    world.until(lambda: min(a.version, b.version) >= 3, "some swaps", a, b)
    c = world.add("p2")
    assert torch.equal(c.anchor, a.anchor)
    assert torch.equal(*(peer.peer.line.state.fragments[0].slots["momentum"] for peer in (a, c)))
    assert c.version == 0
    drive(c.peer.enter())
    partners = lambda: {event["partner"] for event in c.events("swap")}  # noqa: E731
    assert c.peer.exchange.trusted == ""  # it has heard what others trained, and believes that once
    world.until(lambda: partners() == {"p0", "p1"}, "p2 has met both", a, b, c)
    status = json.loads(c.peer.exchange._ask(c.peer.exchange.on_status).result(10.0))
    assert [entry["peer"] for entry in status["peers"]] == ["p2", "p0", "p1"]
    assert status["spread"] == c.peer.spread
    assert re.search(r"peer +version +spread", status_text(status))
    assert c.peer.position() >= 6 * TOKENS


def test_a_state_that_was_copied_is_kept_no_longer_than_somebody_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was until the next joiner but one came: one or two states of the model's size, or of many."""
    world = World(True, 1)
    (a,) = world.peers
    world.until(lambda: a.version > 0, "it steps alone", a)
    world.add("p1")
    snapshots = a.peer.exchange._snapshots
    assert len(snapshots.digests()) == 1
    monkeypatch.setattr(snapshots, "_unread_s", 0.0)
    until(lambda: not snapshots.digests(), "the state is dropped")
    world.close()


def test_who_is_asked_to_leave_copies_no_state_to_its_end() -> None:
    """Nor from the next of those who might give it."""
    world = World(True, 2)
    try:
        b = world.peers[1].peer
        world.ask(lambda: world.network.freeze("p0:1"))
        asked: list[float] = []
        b.asked_to_leave = lambda: bool(asked.append(monotonic_s())) or len(asked) >= 3
        with pytest.raises(Interrupted, match="asked to leave"):
            drive(b._copy_state(["p0:1"] * 9))
        assert len(asked) in (3, 4)
    finally:
        world.close()


def leaves(peer: Gossiper, beside: Gossiper) -> None:
    """A peer leaves, while another goes on."""

    async def together() -> None:
        leaving = asyncio.create_task(asyncio.to_thread(drive, peer.peer.leave()))
        while not leaving.done():
            beside.peer.between_steps()
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(together(), 20))


def test_a_peer_that_leaves_gives_its_progress_away(make: Callable[..., World]) -> None:
    world = make(2, inner={"steps": 100})
    a, b = world.peers
    a.step()

    leaves(a, beside=b)
    until(lambda: b.peer.between_steps() or b.version == 1, "b has it")
    assert a.version == b.version == 1
    assert a.peer.line.trained.tokens == 0
    assert float((b.anchor - 1.0).abs().max()) > 0
    assert b.peer.exchange.alive() == []  # nobody meets a any more
    assert b.peer.position() == TOKENS


def test_a_peer_that_leaves_while_it_swaps_gives_away_what_it_trained_since(make: Callable[..., World]) -> None:
    world = make(2)
    a, b = world.peers
    a.step()
    a.step()  # the swap is under way, most often
    until(lambda: b.peer.between_steps() or a.peer.exchange.busy or a.version > 0, "they swap")
    a.step()

    leaves(a, beside=b)
    assert a.peer.line.trained.tokens == 0
    assert a.peer.exchange.sending == 0
    until(lambda: b.peer.between_steps() or b.peer.position() == 3 * TOKENS, "b has it")


def test_who_joins_in_an_old_folder_saves_later_checkpoints_than_those_there(
    make: Callable[..., World], tmp_path: Path
) -> None:
    """Without a ledger the newest is the one to resume from, and those before it go."""
    world = make(2)
    (tmp_path / "checkpoints" / "v00000057").mkdir(parents=True)
    assert world.add("p2", directory=tmp_path).version == 57
    assert world.add("p3").version == 0


def test_who_has_no_state_yet_welcomes_nobody(make: Callable[..., World]) -> None:
    """A joiner that came in there would ask it alone for the state."""
    exchange = make(1).peers[0].peer.exchange
    exchange.state = None
    with pytest.raises(LinkRefused) as refused:
        exchange.on_hello()
    assert refused.value.reply is Reply.TOO_EARLY


def test_a_peer_that_is_alone_steps_alone(make: Callable[..., World]) -> None:
    (a,) = make(1, inner={"steps": 2}).peers
    slow = a.anchor.clone()
    a.step()
    assert a.version == 0
    with torch.no_grad():
        local = a.local + (a.target.flatten() - a.local) * 0.1
    assert a.step()
    assert torch.allclose(a.anchor, slow + 0.7 * (local - slow), atol=1e-6)
    assert torch.equal(a.local, a.anchor)
    (event,) = a.events("swap")
    assert (event["partner"], event["spread"], event["inner_tokens"]) == ("p0", None, 2 * TOKENS)
    a.step()
    drive(a.peer.average())  # what was trained since is in the end's anchor, too
    assert torch.equal(a.local, a.anchor)
    assert a.version == 2


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.slow(queued=False)
def test_a_follower_killed_in_the_middle_costs_nothing(make: Callable[..., World]) -> None:
    world = make(3)
    a, b, c = world.peers
    a.step()

    def reserved() -> Gossiper | None:
        a.peer.between_steps()
        swaps = {peer: peer.peer.exchange._swaps.current for peer in (b, c)}
        return next((peer for peer, swap in swaps.items() if swap is not None and swap.stage is SwapStage.WHOLE), None)

    victim = until(reserved, "somebody has a's weights and has not served them")
    other = c if victim is b else b
    before, trained = a.local, a.peer.line.trained.tokens
    victim.die()
    world.until(lambda: a.events("skip"), "a gives it up")
    assert torch.equal(a.local, before)
    assert (a.version, a.peer.line.trained.tokens) == (0, trained)
    world.until(lambda: a.version == 1, "a swaps with the other")
    assert a.events("swap")[0]["partner"] == other.name
    assert a.peer.line.trained.tokens == 0


def test_a_partner_has_the_time_of_two_inner_steps_from_the_first_swap_on(make: Callable[..., World]) -> None:
    """Nobody has swapped yet, so that nobody has told a pace over a whole round."""
    a, b = make(2).peers
    a.peer.trained(TOKENS, 30.0)
    a.peer.between_steps()
    asked = until(lambda: b.peer.exchange._swaps.current, "b is asked for a swap")
    assert asked.deadline_s - monotonic_s() > 50.0  # a reads its weights after its next step only
    until(lambda: a.peer.between_steps() or a.peer._led is not None, "b agreed")
    led = a.peer.exchange._swaps.current
    assert led is not None
    until(lambda: led.deadline_s < math.inf, "a has sent its weights")
    assert led.deadline_s - monotonic_s() > 50.0  # b has told of no step yet: it is taken to be as slow as a


def test_a_frozen_peer_holds_nobody_up_and_is_met_again_when_it_thaws() -> None:
    world = World(True, 2)
    try:
        a, b = world.peers
        world.ask(lambda: world.network.freeze("p1:1"))
        world.until(lambda: len(a.events("swap")) >= 2, "a goes on alone", a)
        assert {event["partner"] for event in a.events("swap")} == {"p0"}
        assert b.version == 0
        world.ask(lambda: world.network.thaw("p1:1"))
        b.peer.exchange.greet(a.peer.exchange.me)
        world.until(lambda: b.version and a.events("swap")[-1]["partner"] == "p1", "they swap", a, b)
    finally:
        world.close()


def test_peers_that_were_cut_off_from_each_other_find_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have noticed, so that neither takes the other for alive, and there is no directory to tell."""
    monkeypatch.setattr(greeter, "SEEK_S", 0.2)
    world = World(True, 2)
    try:
        a, b = world.peers
        for peer in (a, b):
            world.ask(lambda peer=peer: world.network.detach(f"{peer.name}:1"))
        alone = lambda peer: peer.events("swap") and peer.events("swap")[-1]["partner"] == peer.name  # noqa: E731
        world.until(lambda: alone(a) and alone(b), "each goes on alone", a, b)
        for peer in (a, b):
            world.ask(lambda peer=peer: world.network.attach(f"{peer.name}:1", peer.peer.exchange))
        world.until(lambda: not alone(a) and not alone(b), "they swap", a, b)
    finally:
        world.close()


def test_a_leader_killed_in_the_middle_costs_nothing(make: Callable[..., World]) -> None:
    world = make(3)
    a, b, c = world.peers
    a.step()
    reserved = lambda: next((peer for peer in (b, c) if peer.peer.exchange.busy), None)  # noqa: E731
    victim = until(reserved, "somebody waits for a's weights")
    a.die()
    other = c if victim is b else b
    world.until(lambda: not victim.peer.exchange.busy, "it gives up waiting")
    assert victim.events("skip")
    victim.step()
    world.until(lambda: victim.version == 1, "it swaps with the other", victim)
    assert victim.events("swap")[0]["partner"] == other.name


def test_weights_that_are_not_finite_are_thrown_away_and_not_sent(make: Callable[..., World]) -> None:
    world = make(2)
    a, b = world.peers
    with torch.no_grad():
        a.model.weight[0] = float("nan")
    a.peer.trained(TOKENS, 0.001)
    world.until(lambda: a.events("skip"), "a notices")
    assert a.peer.discarded_tokens == TOKENS
    assert torch.equal(a.local, a.anchor)
    world.until(lambda: a.version and b.version, "they go on", a, b)
    assert torch.isfinite(b.local).all()


# ---------------------------------------------------------------- a hostile peer, over real gRPC


class Stranger:
    """A member of the run that says what it likes."""

    def __init__(self, victim: Gossiper) -> None:
        self.victim, exchange = victim, victim.peer.exchange
        self.me = Member("stranger", 1, "127.0.0.1:1")
        as_if_answered(exchange, self.me)
        terms = exchange.terms
        self.envelope = Envelope(
            terms.run, terms.contract, exchange.lineage, self.me, 5, 0, 0, "", 1, Invite(1, self.word())
        )
        self.header = StreamHeader(
            terms.run, terms.contract, exchange.lineage, self.me, Kind.WEIGHTS, 1, 0, 0, (self.word(),)
        )

    def word(self, **changes: Any) -> Acquaintance:
        return replace(Acquaintance(self.me, 1, Progress(phase=Phase.TRAINING)), **changes)

    def _run(self, ask: Callable[[Link], Any]) -> Any:
        async def asked() -> Any:
            link = GrpcLink(2.0, KEYS)
            try:
                return await ask(link)
            finally:
                await link.close()

        return asyncio.run(asyncio.wait_for(asked(), 10))

    def say(self, **changes: Any) -> Reply:
        envelope = replace(self.envelope, **changes)
        reply: Reply = self._run(lambda link: link.deliver(self.victim.peer.address, envelope))
        return reply

    def stream(self, payloads: list[bytes], **changes: Any) -> Reply:
        async def parts() -> AsyncIterator[Part]:
            for index, payload in enumerate(payloads):
                yield Part(index, payload)

        header = replace(self.header, **changes)
        reply: Reply = self._run(lambda link: link.send_parts(self.victim.peer.address, header, parts(), 2.0))
        return reply


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    world = World(False, 1)
    yield Stranger(world.peers[0])
    world.close()


def weights(value: float, parts: int = PARTS) -> list[bytes]:
    whole = torch.full((ELEMENTS,), value).numpy().tobytes()
    return [whole[start : start + 4096] for start in range(0, len(whole), 4096)][:parts]


def test_what_does_not_belong_here_is_refused(stranger: Stranger) -> None:
    assert stranger.say(run="other") is Reply.OTHER_RUN
    assert stranger.say(contract="0" * 64) is Reply.OTHER_CONTRACT
    assert stranger.say(lineage="other") is Reply.OTHER_LINEAGE
    assert stranger.say(sender=replace(stranger.me, peer="p0")) is Reply.FENCED
    assert stranger.say(body=Heartbeat(1, 1, False, Progress())) is Reply.MALFORMED
    assert stranger.say(body=Invite(1, stranger.word(member=Member("another", 1, "x:1")))) is Reply.MALFORMED
    assert stranger.say(body=Greeting((), False)) is Reply.MALFORMED
    assert stranger.say(body=Evict("nobody", 1)) is Reply.OK
    assert stranger.stream(weights(1.0)) is Reply.STALE  # nobody asked for it
    assert stranger.stream(weights(1.0), contract="0" * 64) is Reply.OTHER_CONTRACT
    assert stranger.stream(weights(1.0), kind=Kind.MEAN) is Reply.MALFORMED
    assert stranger.stream(weights(1.0), known=()) is Reply.MALFORMED
    with pytest.raises(LinkRefused, match="4097 known"):
        stranger.say(body=Greeting((stranger.word(),) * 4097, False))
    with pytest.raises(LinkRefused, match="spread is nan"):
        stranger.say(body=Greeting((stranger.word(spread=float("nan")),), False))
    with pytest.raises(LinkRefused, match="age_s"):
        stranger.say(body=Greeting((stranger.word(age_s=-1.0),), False))


NOT_A_NUMBER = weights(float("nan"))


@pytest.mark.parametrize(
    ("payloads", "reason"),
    [
        (NOT_A_NUMBER, "not finite"),
        ([b"short"], "payload of 5 bytes"),
        ([*weights(1.0, 4), weights(1.0)[0]], "part 4 has 4096 bytes"),
        ([*weights(1.0, 4), b"", b""], "payload of 0 bytes"),
    ],
)
def test_bytes_that_no_honest_peer_sends_end_the_swap(stranger: Stranger, payloads: list[bytes], reason: str) -> None:
    victim = stranger.victim
    before = victim.local
    assert stranger.say() is Reply.OK
    assert victim.peer.exchange.busy
    assert stranger.stream(payloads) is Reply.MALFORMED
    until(lambda: victim.peer.between_steps() or victim.events("skip"), "the victim tells")
    assert reason in victim.events("skip")[0]["reason"]
    assert not victim.peer.exchange.busy
    assert torch.equal(victim.local, before)
    assert victim.peer.exchange.alive() == []  # it is not met again


def test_a_part_too_many_or_too_large_is_refused(stranger: Stranger) -> None:
    assert stranger.say() is Reply.OK
    with pytest.raises(LinkRefused, match="at most 4096 may be"):
        stranger.stream([bytes(4097)])
    number = replace(stranger.envelope.body, number=2)  # type: ignore[type-var]
    assert stranger.say(body=number) is Reply.OK
    assert stranger.stream([*weights(1.0), bytes(4096)], height=2) is Reply.OK  # it reads no more


def test_absurd_weights_come_to_nothing_and_their_sender_is_barred(stranger: Stranger) -> None:
    victim = stranger.victim
    for number in range(1, 4):
        assert stranger.say(body=Invite(number, stranger.word(beat=number))) is Reply.OK
        assert stranger.stream(weights(1e4), height=number, known=(stranger.word(beat=number),)) is Reply.OK
        until(lambda: victim.peer.between_steps() or not victim.peer.exchange.busy, "it is refused")
    assert "absurdly large" in victim.events("skip")[0]["reason"]
    assert victim.version == 0
    assert stranger.say(body=Invite(9, stranger.word(beat=9))) is Reply.BARRED


def test_a_swap_that_is_sent_again_counts_once(stranger: Stranger) -> None:
    victim = stranger.victim
    assert stranger.say() is Reply.OK
    assert stranger.stream(weights(2.0)) is Reply.OK
    until(lambda: victim.peer.between_steps() or victim.version == 1, "it is applied")
    once = victim.anchor.clone()
    expected = Pairing(0.7, 0.5).step(victim.peer.line.state.fragments[0], once).anchor
    assert not torch.equal(once, expected)
    assert torch.allclose(once, torch.full((ELEMENTS,), 1.35))  # 1 + 0.7 (1.5 - 1)
    assert stranger.stream(weights(5.0)) is Reply.OK  # answered from memory
    assert stranger.say() is Reply.OK
    assert stranger.stream(weights(5.0)) is Reply.OK
    victim.peer.between_steps()
    assert victim.version == 1
    assert torch.equal(victim.anchor, once)
    assert stranger.say(body=Invite(2, stranger.word(beat=5))) is Reply.OK
    assert stranger.stream(weights(1.0), height=1) is Reply.OK  # still from memory


def test_weights_that_come_again_before_they_are_applied_are_no_news(stranger: Stranger) -> None:
    """The line broke before the reply was out, or another stream had nothing left to bring (`network.streams`)."""
    victim = stranger.victim
    assert stranger.say() is Reply.OK
    assert stranger.stream(weights(2.0)) is Reply.OK
    assert stranger.stream(weights(5.0)) is Reply.OK
    assert stranger.stream([]) is Reply.OK
    assert stranger.stream(weights(2.0), height=2) is Reply.STALE
    until(lambda: victim.peer.between_steps() or victim.version == 1, "it is applied")
    assert torch.allclose(victim.anchor, torch.full((ELEMENTS,), 1.35))  # 1 + 0.7 (1.5 - 1)


def test_a_part_that_is_here_is_never_written_again() -> None:
    """When the last one is here the training thread reads them, and another stream may still bring some."""
    (fragment,) = Layout.of([("weight", (ELEMENTS,))], part_elements=1024).fragments
    arriving = Arriving(Swap(1, Member("a", 1, "a:1"), False, SwapStage.FOLLOWING), fragment, open_codecs(FP32))
    for index, payload in enumerate(weights(2.0)):
        arriving.take(Part(index, payload))
        arriving.take(Part(index, NOT_A_NUMBER[index]))
    assert not arriving.missing
    assert torch.equal(arriving.values, torch.full((ELEMENTS,), 2.0))


def test_who_asks_and_falls_silent_is_given_up(stranger: Stranger) -> None:
    victim = stranger.victim
    assert stranger.say() is Reply.OK
    assert stranger.stream(weights(1.0, 2)) is Reply.OK  # the rest never comes
    until(lambda: victim.peer.between_steps() or victim.events("skip"), "it is given up")
    assert "no weights from stranger in time" in victim.events("skip")[0]["reason"]
    assert not victim.peer.exchange.busy


def greets(victim: Gossiper, member: Member, tokens: int = 0, *hearsay: Member) -> None:
    """A member greets the victim in this name, with so many tokens for all."""
    exchange = victim.peer.exchange
    progress = Progress(phase=Phase.TRAINING, tokens=tokens)
    terms, known = exchange.terms, tuple(Acquaintance(one, 1, progress) for one in (member, *hearsay))
    envelope = Envelope(
        terms.run, terms.contract, exchange.lineage, member, 0, 0, 0, "", 1, Greeting(known, answer=False)
    )
    greeting = asyncio.run_coroutine_threadsafe(exchange.on_envelope(envelope), exchange._loop)
    assert greeting.result(DEADLINE_S) is Reply.OK


def test_a_flood_of_made_up_names_dials_a_bystander_seldom_and_keeps_no_connection(stranger: Stranger) -> None:
    victim, dialled = stranger.victim, Counter[str]()

    async def bystander(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled["all"] += 1
        writer.close()

    async def flood() -> None:
        async with await asyncio.start_server(bystander, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for number in range(300):
                await asyncio.to_thread(greets, victim, Member(f"j{number}", 1, f"127.0.0.1:{port}"), 2**40)
            exchange = victim.peer.exchange
            while exchange.lives._asking:
                await asyncio.sleep(0.01)
            assert isinstance(exchange.link, GrpcLink)
            assert not exchange.link._connections

    asyncio.run(asyncio.wait_for(flood(), DEADLINE_S))
    assert 0 < dialled["all"] < 300
    assert victim.peer.exchange.acquaintances.everybody(monotonic_s()) == []
    assert victim.peer.exchange.others_tokens == 0


def test_who_gives_the_address_of_another_is_not_heard(make: Callable[..., World]) -> None:
    a, b = make(2).peers
    exchange, came = a.peer.exchange, Counter[str]()
    take = b.peer.exchange.on_envelope

    async def watched(envelope: Envelope) -> Reply:
        came[type(envelope.body).__name__] += 1
        return await take(envelope)

    b.peer.exchange.on_envelope = watched  # type: ignore[method-assign]
    liar = Member("liar", 1, b.peer.address)
    greets(a, liar, 2**40)
    until(lambda: ("liar", 1, b.peer.address) in exchange.lives._unanswered, "a has asked")
    exchange.greet(Member("another", 1, b.peer.address))  # as the directory may name one
    until(lambda: ("another", 1, b.peer.address) in exchange.lives._unanswered, "a has asked")
    until(lambda: not exchange.lives._asking, "b has said its name")
    assert exchange.acquaintances.get("liar") is None
    assert not came
    assert exchange.others_tokens == 0


def test_the_table_of_a_stranger_is_not_kept_while_it_is_asked(make: Callable[..., World]) -> None:
    a, b = make(2).peers
    exchange, ghost = a.peer.exchange, Member("ghost", 1, "127.0.0.1:1")
    exchange.lives._answers.clear()
    greets(a, b.peer.exchange.me, 0, ghost)
    until(lambda: exchange.lives.met(b.peer.exchange.me, 0), "b has answered")
    assert exchange.acquaintances.get("ghost") is None
    greets(a, b.peer.exchange.me, 0, ghost)
    until(lambda: exchange.acquaintances.get("ghost"), "now it is heard")


def test_one_liars_number_does_not_end_the_run(stranger: Stranger) -> None:
    victim = stranger.victim
    victim.step()
    greets(victim, stranger.me, 2**40)
    until(lambda: victim.peer.exchange.others_tokens, "it is heard")
    assert victim.peer.position() < victim.peer.contract.run.total_tokens
    assert not victim.peer.finishing


def test_who_invites_unknown_is_asked_first(make: Callable[..., World]) -> None:
    """Its weights would be averaged, and ours go to an address of which nobody knows whose it is."""
    a, b = make(2).peers
    exchange = a.peer.exchange
    exchange.lives._answers.clear()
    word = Acquaintance(b.peer.exchange.me, 10**6, Progress(phase=Phase.TRAINING))
    terms = exchange.terms
    invite = Envelope(terms.run, terms.contract, exchange.lineage, word.member, 0, 0, 0, "", 1, Invite(1, word))
    ask = lambda: asyncio.run_coroutine_threadsafe(exchange.on_envelope(invite), exchange._loop).result(DEADLINE_S)  # noqa: E731
    assert ask() is Reply.BUSY
    until(lambda: exchange.lives.met(word.member, 0), "b has answered")
    assert ask() is Reply.OK


# ---------------------------------------------------------------- checkpoints


def test_a_peer_comes_back_with_all_it_had(make: Callable[..., World], tmp_path: Path) -> None:
    world = make(2, inner={"steps": 3})
    a, b = world.peers
    world.until(lambda: min(a.version, b.version) >= 2, "some swaps", a, b)
    while not a.peer.line.trained.tokens:
        a.step()
    a.peer.rank.folder = tmp_path
    drive(a.peer.keeper.last(a.version))
    assert load(tmp_path).meta["others"] == [b.peer.address]
    local, version, tokens = a.local, a.version, a.peer.tokens
    a.die()
    again = world.add("p0", load(tmp_path))
    assert torch.equal(again.local, local)
    assert torch.equal(again.anchor, a.anchor)
    assert (again.version, again.peer.tokens) == (version, tokens)
    assert again.peer.line.trained.tokens == a.peer.line.trained.tokens
    drive(again.peer.enter())
    world.until(lambda: again.version > version, "it swaps again", again, b)
    assert b.peer.exchange._ask(lambda: b.peer.exchange.acquaintances.tokens(monotonic_s())).result(10.0) >= tokens


def test_who_comes_back_anew_takes_no_tokens_away(make: Callable[..., World], tmp_path: Path) -> None:
    """Neither others nor itself nor later joiners lack them, nor one that goes on from a checkpoint alone."""
    world = make(2, inner={"steps": 2})
    a, b = world.peers
    world.until(lambda: min(a.version, b.version) >= 2, "some swaps", a, b)
    b.die()
    before = a.peer.exchange.others_tokens
    again = world.add("p1")
    drive(again.peer.enter())
    world.until(lambda: again.version, "it swaps again", again)
    later = world.add("p2")
    drive(later.peer.enter())
    total = before + a.peer.tokens + again.peer.tokens

    def all_know() -> bool:
        for one, other in ((a, again), (again, later), (later, a)):
            one.peer.exchange.greet(other.peer.exchange.me)
        return {one.peer.position() for one in (a, again, later)} == {total}

    until(all_know, "all know of all tokens")
    a.peer.rank.folder = tmp_path
    drive(a.peer.keeper.last(a.version))
    for one in (a, again, later):
        one.die()
    alone = world.add("p0", load(tmp_path))
    alone.step()
    assert alone.peer.position() == total + TOKENS


def test_a_partner_has_so_many_streams_here_and_no_more(make: Callable[..., World]) -> None:
    """Streams of weights that say nothing after their header, once their sender has been let into a swap."""
    exchange = make(1).peers[0].peer.exchange
    liar, terms = Member("liar", 1, "127.0.0.1:9"), exchange.terms
    word = Acquaintance(liar, 1, Progress(), -1.0)
    as_if_answered(exchange, liar)
    let_in = list[int]()

    async def nothing() -> AsyncIterator[Part]:
        let_in.append(1)
        await asyncio.sleep(DEADLINE_S)
        yield Part(0, b"")

    async def flood() -> list[asyncio.Task[Reply]]:
        invite = Envelope(terms.run, terms.contract, exchange.lineage, liar, 0, 0, 0, "", 1, Invite(1, word))
        assert await exchange.on_envelope(invite) is Reply.OK
        header = StreamHeader(terms.run, terms.contract, exchange.lineage, liar, Kind.WEIGHTS, 1, 0, 0, (word,))
        streams = [asyncio.ensure_future(exchange.on_parts(header, nothing())) for _ in range(MAX_STREAMS + 50)]
        while len(let_in) + len(ended := [stream for stream in streams if stream.done()]) < len(streams):
            await asyncio.sleep(0.01)
        for stream in streams:
            stream.cancel()
        return ended

    ended = asyncio.run_coroutine_threadsafe(flood(), exchange._loop).result(DEADLINE_S)
    assert len(ended) == 50
    assert all(
        isinstance(error := stream.exception(), LinkRefused) and error.reply is Reply.TOO_EARLY for stream in ended
    )
