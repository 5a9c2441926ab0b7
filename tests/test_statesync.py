"""Copying the state from members that die, lie, stall and move on, and the rate at which it is served."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

import diloco.outer.optimizers
import diloco.outer.state
from diloco.base.errors import Interrupted, StateError
from diloco.base.life import Life
from diloco.base.types import Closed, Commit, Counted
from diloco.config.contract import OuterSection
from diloco.config.site import NetworkSection, Site
from diloco.exchange import statesync
from diloco.exchange.archive import MAX_SNAPSHOTS, UNREAD_STALLS, Archive, Backlog, Snapshots, Untaken, make_offer
from diloco.exchange.service import ExchangeService
from diloco.exchange.statesync import (
    MAX_COPIED_TIMES,
    MAX_FRUITLESS_PASSES,
    PAUSE_S,
    STRIPE_BYTES,
    download,
    why_useless,
)
from diloco.outer.fragments import Layout
from diloco.outer.line import leads_to
from diloco.outer.optimizers import open_outer
from diloco.outer.state import COPIED_AT_ONCE_BYTES, OuterState, copied_bytes
from diloco.peer.peer import Peer
from diloco.peer.terms import serve_bps_of
from diloco.protocol.messages import Fork, Reply
from diloco.protocol.streams import StateOffer
from diloco.simulate.memory_link import MemoryNetwork
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import serve
from diloco.transport.link import LinkRefused
from diloco.transport.pace import BURST_S, SERVE_BPS_PER_CORE, RateLimit
from tests.fronts import drive
from tests.local import LocalPeer, LocalWorld
from tests.peers import DEADLINE_S, KEYS, until
from tests.test_link import Listener, commit

ELEMENTS = 3 * 2**20
LAYOUT = Layout.of([("layers.0.a", (ELEMENTS,)), ("layers.1.a", (ELEMENTS,))], fragments=2, part_elements=2**20)
OPTIMIZER = open_outer(OuterSection(warmup_steps=0))
CHUNKS = 12
STATE_CHUNK_BYTES = 4 * 2**20
"""Two fragments of an anchor and a momentum of 12 MiB each: 48 MiB in chunks of 4."""
STATE_BYTES = CHUNKS * STATE_CHUNK_BYTES
STRIPE_CHUNKS = STRIPE_BYTES // STATE_CHUNK_BYTES
STALL_S = 4.0
IDLE_S = UNREAD_STALLS * STALL_S
"""A snapshot that nobody reads for so long goes."""


def start(seed: int) -> OuterState:
    """A state before its first step: momenta are zero."""
    generator = torch.Generator().manual_seed(seed)
    anchors = (torch.randn(ELEMENTS, generator=generator) for _ in LAYOUT.fragments)
    return OuterState(0, tuple(map(OPTIMIZER.start, anchors, LAYOUT.fragments)))


def step(state: OuterState, fragment: int) -> OuterState:
    """The next version: one fragment moves."""
    mean = torch.full((ELEMENTS,), 1e-3)
    return state.replace(fragment, OPTIMIZER.step(state.fragments[fragment], mean), state.version + 1)


@pytest.fixture(scope="module")
def state() -> OuterState:
    return step(step(start(1), 0), 1)


class Holder(Listener):
    """A member that serves its state, and counts what it served."""

    def __init__(self, state: OuterState, bps: float = 0.0) -> None:
        super().__init__()
        self.held = state
        self.backlog = Backlog(4, STATE_BYTES)
        self.snapshots = Snapshots(self.backlog, STALL_S)
        self.limit = RateLimit(bps)
        self.served: list[int] = []
        self.spoils = False

    async def on_state_offer(self, have: str) -> StateOffer:
        return self.snapshots.offer(self.held, make_offer(self.held, None), time.monotonic())

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        payload = self.snapshots.chunk(digest, chunk, time.monotonic())
        if payload is not None:
            self.served.append(chunk)
        return payload[:-1] + b"?" if payload and self.spoils else payload

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        self.snapshots.read(digest, time.monotonic())
        await asyncio.sleep(self.limit.delay_s(size_bytes, time.monotonic()))

    def close(self, mean_bytes: int) -> None:
        """One more version, with a mean of that size."""
        self.held = step(self.held, 0)
        closed = Closed(commit(self.held.version, ()), (bytes(mean_bytes),))
        self.backlog.add(closed, self.snapshots.oldest_version())
        self.snapshots.forget(self.held.version, time.monotonic())


class Members:
    """Members on a network in memory, and one who copies from them. `after` is told how many chunks are here."""

    def __init__(self, *holders: Holder) -> None:
        self.network = MemoryNetwork()
        self.holders = {f"member:{index}": holder for index, holder in enumerate(holders)}
        for address, holder in self.holders.items():
            self.network.attach(address, holder)

    async def copy(self, local: OuterState, after: Callable[[int], None] = lambda chunks: None) -> OuterState:
        def told(done_bytes: int, total_bytes: int) -> None:
            assert total_bytes == STATE_BYTES
            after(done_bytes // STATE_CHUNK_BYTES)

        task = download(
            self.network.link(0.5), lambda: list(self.holders), local, LAYOUT, OPTIMIZER, 0.5, progress=told
        )
        state, offer = await asyncio.wait_for(task, 20)
        assert offer.digest == state.digest
        return state


def served(members: Members) -> list[int]:
    return sorted(chunk for holder in members.holders.values() for chunk in holder.served)


# ---------------------------------------------------------------- copying


def test_chunks_are_striped_over_all_members_and_fetched_once(state: OuterState) -> None:
    async def scenario() -> None:
        members = Members(Holder(state), Holder(state), Holder(state))
        assert (await members.copy(start(2))).digest == state.digest
        assert served(members) == list(range(CHUNKS))
        assert all(holder.served for holder in members.holders.values())

    asyncio.run(scenario())


@pytest.mark.parametrize("dies_after", [1, 7, 11])
def test_when_a_member_dies_only_what_is_missing_is_fetched_again(state: OuterState, dies_after: int) -> None:
    async def scenario() -> None:
        members = Members(Holder(state), Holder(state))
        dead: list[str] = []

        def after(chunks: int) -> None:
            if chunks == dies_after and not dead:
                dead.append(max(members.holders, key=lambda address: len(members.holders[address].served)))
                members.network.detach(dead[0])

        assert (await members.copy(start(2), after)).digest == state.digest
        assert dead
        assert set(served(members)) == set(range(CHUNKS))
        assert len(served(members)) * STATE_CHUNK_BYTES <= STATE_BYTES + STRIPE_BYTES

    asyncio.run(scenario())


def test_chunks_that_are_here_already_are_not_fetched(state: OuterState) -> None:
    """One fragment moved since: its anchor and momentum, six chunks, are all that travels."""

    async def scenario() -> None:
        members = Members(Holder(step(state, 0)))
        assert (await members.copy(state)).version == state.version + 1
        assert served(members) == list(range(CHUNKS // 2))

    asyncio.run(scenario())


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize(("mean_bytes", "leads_on"), [(STATE_BYTES // 24, True), (STATE_BYTES // 4, False)])
def test_a_copy_that_takes_many_versions_is_not_in_vain(state: OuterState, mean_bytes: int, leads_on: bool) -> None:
    """Each member closes two versions per chunk: 24, of which it would keep 4. Where their means are too large for
    that, a copy is cut off and begins again."""

    async def scenario() -> None:
        members = Members(Holder(state), Holder(state))

        def after(chunks: int) -> None:
            for holder in members.holders.values():
                if holder.held.version < state.version + 24:
                    holder.close(mean_bytes)
                    holder.close(mean_bytes)

        copied = await members.copy(start(2), after)
        assert (copied.version == state.version) == leads_on
        latest = max(holder.held.version for holder in members.holders.values())
        assert latest == state.version + 24
        backlogs = [holder.backlog for holder in members.holders.values()]
        assert all(backlog.leads_on_from(copied.version, None) for backlog in backlogs) == leads_on

    asyncio.run(scenario())


def test_when_the_members_move_on_only_what_changed_is_fetched_again(state: OuterState) -> None:
    """The snapshot is gone from all of them half-way: the copy aims at what they hold then."""

    async def scenario() -> None:
        members = Members(Holder(state), Holder(state))
        later = step(state, 1)

        def after(chunks: int) -> None:
            if chunks == 8 and members.holders["member:0"].held is state:
                for holder in members.holders.values():
                    holder.held = later
                    holder.snapshots.forget(state.version + 100, time.monotonic())

        copied = await members.copy(start(2), after)
        assert (copied.version, copied.digest) == (later.version, later.digest)
        again = len(served(members)) - CHUNKS
        assert 0 < again <= CHUNKS // 2, "the fragment that did not move is not fetched twice"

    asyncio.run(scenario())


def test_a_copy_that_is_out_of_date_again_and_again_fails(state: OuterState) -> None:
    """As where versions close faster than a link carries the state: it would never be done, and bytes always come."""

    async def scenario() -> None:
        member = Holder(state)

        def after(chunks: int) -> None:
            if chunks == CHUNKS - 2:
                member.held = step(step(member.held, 0), 1)
                member.snapshots.forget(member.held.version + 100, time.monotonic())

        with pytest.raises(StateError, match="each out of date") as failed:
            await Members(member).copy(start(2), after)
        assert "backlog_versions" in failed.value.fix
        assert MAX_COPIED_TIMES * CHUNKS < len(member.served) < (MAX_COPIED_TIMES + 1) * CHUNKS

    asyncio.run(scenario())


def test_the_same_state_is_not_copied(state: OuterState) -> None:
    async def scenario() -> None:
        members = Members(Holder(state))
        assert (await members.copy(replace(state, version=0))).version == state.version
        assert served(members) == []

    asyncio.run(scenario())


def test_a_state_that_the_run_did_not_go_on_from_is_of_no_use(state: OuterState) -> None:
    """To a joiner, to who stands on that state, and to who stands on a third one."""

    async def scenario() -> None:
        right, wrong, third = step(state, 0), step(state, 1), step(step(start(3), 0), 1)
        backlog = Backlog(2, STATE_BYTES)
        backlog.add(Closed(replace(commit(right.version + 1, ()), state_digest=right.digest), ()), None)
        members = Members(Holder(wrong), Holder(wrong), Holder(right))
        link, asked, fixed = members.network.link(0.5), lambda: list(members.holders), (LAYOUT, OPTIMIZER, 0.5)

        def useless(offer: StateOffer) -> str:
            return why_useless(offer, "", None, 0, backlog.state_of(offer.version))

        for local in (start(2), wrong, third):
            copied, _ = await download(link, asked, local, *fixed, useless=useless)
            assert copied.digest == right.digest  # though most offer the other
        del members.holders["member:2"]
        with pytest.raises(StateError, match="none of 2 members"):
            await download(link, asked, wrong, *fixed, useless=useless)

    asyncio.run(scenario())


def test_the_state_that_is_here_is_not_taken_where_a_later_one_is_offered(state: OuterState) -> None:
    """Else several that are behind would each take what the others have, and be behind for good."""

    async def scenario() -> None:
        later, ended = step(state, 0), step(start(3), 0)
        same, one = [Holder(state), Holder(state)], Members(Holder(state), Holder(later), Holder(state))
        assert (await one.copy(state)).digest == later.digest
        assert (await Members(*same, Holder(ended)).copy(state)).digest == state.digest  # which is no later one
        members = Members(*same, Holder(later))
        link, asked = members.network.link(0.5), lambda: list(members.holders)
        joined, _ = await download(link, asked, state, LAYOUT, OPTIMIZER, 0.5, patient=True)
        assert joined.digest == state.digest  # from which commits may lead on

    asyncio.run(scenario())


def test_the_state_of_a_version_is_the_one_that_the_next_was_made_on() -> None:
    backlog = Backlog(4, STATE_BYTES)
    backlog.add(Closed(replace(commit(7, ()), state_digest="of 6"), ()), None)
    backlog.add(
        Closed(replace(commit(7, ()), fragment=-1, state_digest="of 7, from which a lineage goes on"), ()), None
    )
    backlog.add(Closed(replace(commit(8, ()), state_digest="of 7"), ()), None)
    assert [backlog.state_of(version) for version in (5, 6, 7, 8)] == ["", "of 6", "of 7", ""]


def test_a_version_that_counts_us_is_known_when_our_lineage_ends() -> None:
    """Whether it is of the lineage that goes on, too, is told by the forks that led to the copied state."""
    ours, untaken = Counted("a", 0, 0, 1, 8, 1), Untaken("a", Backlog(4, STATE_BYTES), witness=True)
    first, second, third = (replace(commit(at, ()), tokens=10 * at, counted=(ours,) * (at > 1)) for at in (1, 2, 3))
    for one in (first, second, third):
        untaken.add(Closed(one, ()), behind=False)
    untaken.pass_over()
    assert not untaken.take()
    assert untaken.passed == second
    goes_on = replace(third, lineage="apart")
    assert leads_to(second, third, ())
    assert leads_to(second, goes_on, [Fork("lineage", 20)])
    assert not leads_to(second, goes_on, [Fork("lineage", 19), Fork("another", 30)])


def test_a_founding_on_the_copied_state_waits_for_the_training_side() -> None:
    """It closed while the state of the version before it was copied, and has that version itself."""
    backlog = Backlog(4, STATE_BYTES)
    before, untaken = commit(7, ()), Untaken("a", backlog, witness=False)
    apart = replace(before, height=8, fragment=-1, lineage="apart", previous=before.digest)
    after = replace(commit(8, ()), height=9, lineage="apart", previous=apart.digest)
    for one in (before, apart, after):
        backlog.add(Closed(one, ()), None)
    assert untaken.restart(7, before) == ([apart, after], False)
    assert [closed.commit for closed in untaken.take()] == [apart, after]
    assert untaken.restart(7, apart) == ([after], False)


def test_a_member_that_spoils_chunks_is_left_out(state: OuterState) -> None:
    async def scenario() -> None:
        members = Members(Holder(state), Holder(state))
        liar = members.holders["member:0"]
        liar.spoils = True
        assert (await members.copy(start(2))).digest == state.digest
        assert len(liar.served) <= STRIPE_CHUNKS

    asyncio.run(scenario())


def test_offers_that_do_not_fit_are_left_out(state: OuterState) -> None:
    """Newer than all others, and with a digest that is not that of its manifest, or of another model."""

    async def scenario() -> None:
        members = Members(Holder(state), Holder(state), Holder(state))
        honest = make_offer(state, None)
        lies = [
            replace(honest, version=99, chunk_hashes=("0" * 64, *honest.chunk_hashes[1:])),
            replace(honest, version=99, chunk_hashes=honest.chunk_hashes[1:]),
        ]
        for address, lie in zip(("member:0", "member:1"), lies, strict=True):
            members.holders[address].on_state_offer = AsyncMock(return_value=lie)  # type: ignore[method-assign]
        assert (await members.copy(start(2))).version == state.version
        assert served(members) == list(range(CHUNKS))

    asyncio.run(scenario())


def test_when_nobody_delivers_the_copy_fails_and_says_how_far_it_came(
    state: OuterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statesync, "PAUSE_S", 0.01)

    async def scenario() -> None:
        holder = Holder(state)
        members = Members(holder)
        asked = 0

        async def chunk(digest: str, index: int) -> bytes | None:
            nonlocal asked
            asked += 1
            return state.chunk(state.manifest()[index]) if asked <= 3 else None

        holder.on_state_chunk = chunk  # type: ignore[method-assign]
        with pytest.raises(StateError, match=f"{3 * STATE_CHUNK_BYTES} of {STATE_BYTES} bytes") as failed:
            await members.copy(start(2))
        assert "try again" in failed.value.fix
        assert asked == 4 + MAX_FRUITLESS_PASSES

    asyncio.run(scenario())


def test_when_nobody_offers_what_fits_the_copy_fails_at_once(state: OuterState) -> None:
    async def scenario() -> None:
        holder, asked = Holder(versions(1)[0]), []
        offer = holder.on_state_offer

        async def counted(have: str) -> StateOffer:
            asked.append(have)
            return await offer(have)

        holder.on_state_offer = counted  # type: ignore[method-assign]
        with pytest.raises(StateError, match="none of 1 members"):
            await Members(holder).copy(start(2))
        assert len(asked) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("offered", "ours", "useless"),
    [
        ((6, "lineage"), (7, "lineage"), True),
        ((7, "lineage"), (7, "lineage"), False),  # ours may be damaged
        ((6, "lineage"), (7, "one that ended"), False),
        ((8, "one that ended"), (7, "one that ended"), True),
        ((6, "lineage"), None, False),
    ],
    ids=["older", "the same version", "we leave ours", "of the one that we leave", "we have none"],
)
def test_nobody_goes_back_in_its_lineage(offered: tuple[int, str], ours: tuple[int, str] | None, useless: bool) -> None:
    def of(version: int, lineage: str) -> Commit:
        return replace(commit(version, ()), lineage=lineage)

    offer = StateOffer(offered[0], of(*offered), "", (), ())
    assert bool(why_useless(offer, "lineage", of(*ours) if ours else None)) is useless


def test_an_older_state_is_not_copied(state: OuterState) -> None:
    async def scenario() -> None:
        members = Members(Holder(state))
        older = StateOffer(state.version - 1, commit(state.version - 1, ()), state.digest, (), ())
        members.holders["member:0"].snapshots.offer = lambda *_: older  # type: ignore[method-assign]
        link, how = members.network.link(0.5), (start(2), LAYOUT, OPTIMIZER, 0.5)
        useless = partial(why_useless, lineage="", commit=commit(state.version, ()))
        with pytest.raises(StateError, match="none of 1 members"):
            await download(link, lambda: list(members.holders), *how, useless=useless)
        assert served(members) == []

    asyncio.run(scenario())


@pytest.mark.slow(queued=False)
def test_a_member_that_cannot_be_reached_is_asked_again(state: OuterState) -> None:
    async def scenario() -> None:
        members = Members(Holder(state))
        members.network.detach("member:0")
        back = partial(members.network.attach, "member:0", Holder(state))
        asyncio.get_running_loop().call_later(1.5 * PAUSE_S, back)
        assert (await members.copy(start(2))).digest == state.digest

    asyncio.run(scenario())

    asyncio.run(scenario())


def has_none_at_first(holder: Holder, times: int) -> list[str]:
    """Have a member refuse so many times to offer its state. Returns what it is asked."""
    asked: list[str] = []
    offer = holder.on_state_offer

    async def early(have: str) -> StateOffer:
        asked.append(have)
        if len(asked) <= times:
            raise LinkRefused(Reply.TOO_EARLY, "no state here yet")
        return await offer(have)

    holder.on_state_offer = early  # type: ignore[method-assign]
    return asked


def test_a_member_that_has_no_state_yet_is_asked_again(state: OuterState, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun to listen a moment ago."""
    monkeypatch.setattr(statesync, "PAUSE_S", 0.01)

    async def scenario() -> None:
        holder = Holder(state)
        asked = has_none_at_first(holder, 1)
        assert (await Members(holder).copy(start(2))).digest == state.digest
        assert len(asked) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("patient", [True, False], ids=["who waits", "who trains on"])
def test_a_member_that_copies_a_state_itself_is_waited_for(
    state: OuterState, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Whoever has no state yet has nothing else to do. Who is behind trains on, and asks in the next round."""
    monkeypatch.setattr(statesync, "PAUSE_S", 0.001)

    async def scenario() -> None:
        holder = Holder(state)
        asked = has_none_at_first(holder, 3 * MAX_FRUITLESS_PASSES)
        members = Members(holder)
        link, how = members.network.link(0.5), (start(2), LAYOUT, OPTIMIZER, 0.5)
        copying = download(link, lambda: list(members.holders), *how, patient=patient)
        if patient:
            assert (await copying)[0].digest == state.digest
        else:
            with pytest.raises(StateError, match="none of 1 members"):
                await copying
            assert len(asked) == MAX_FRUITLESS_PASSES

    asyncio.run(scenario())


def test_a_joiner_follows_when_the_run_goes_on_as_another_lineage(
    state: OuterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member that let it in has not heard of that yet; one that it hears of later has that lineage's state."""
    monkeypatch.setattr(statesync, "PAUSE_S", 0.001)

    async def scenario() -> None:
        members = Members(Holder(start(3)), Holder(state))
        for address, lineage in zip(members.holders, ("before", "after"), strict=True):
            holder = members.holders[address]
            commits = replace(commit(holder.held.version, ()), lineage=lineage)
            offer = make_offer(holder.held, commits)
            holder.snapshots.offer(holder.held, offer, time.monotonic())
            holder.on_state_offer = AsyncMock(return_value=offer)  # type: ignore[method-assign]
        passes = 0

        def sources() -> list[str]:
            nonlocal passes
            passes += 1
            return list(members.holders)[: 1 if passes < 3 else 2]

        link = members.network.link(0.5)
        how = (start(2), LAYOUT, OPTIMIZER, 0.5)
        useless = partial(why_useless, lineage="after", commit=None)
        copied, _ = await download(link, sources, *how, useless=useless, patient=True)
        assert copied.digest == state.digest
        assert passes == 3

    asyncio.run(scenario())


def test_a_copy_that_became_useless_meanwhile_is_not_taken(state: OuterState) -> None:
    """Until its last chunk is here, whoever trains on may leave the lineage, or hear that the run has another state."""

    async def scenario() -> None:
        members, why = Members(Holder(state)), [""]

        def told(done_bytes: int, total_bytes: int) -> None:
            if done_bytes == total_bytes:
                why[0] = "its state belongs to a lineage that ended"

        how = (start(2), LAYOUT, OPTIMIZER, 0.5)
        link, asked = members.network.link(0.5), lambda: list(members.holders)
        with pytest.raises(StateError, match="none of 1 members"):
            await download(link, asked, *how, useless=lambda offer: why[0], progress=told)
        assert why[0]

    asyncio.run(scenario())


def test_a_state_that_is_here_already_and_useless_by_now_is_not_taken(state: OuterState) -> None:
    """While a slow member has yet to answer, whoever asks may leave the lineage of those that did."""

    async def scenario() -> None:
        members, looked, ended = Members(Holder(state), Holder(state)), asyncio.Event(), False
        slow = members.holders["member:1"]
        offer_of = slow.on_state_offer

        async def late(have: str) -> StateOffer:
            nonlocal ended
            await looked.wait()
            ended = True
            return await offer_of(have)

        def useless(offer: StateOffer) -> str:
            looked.set()
            return "its state belongs to a lineage that ended" if ended else ""

        slow.on_state_offer = late  # type: ignore[method-assign]
        asked, how = lambda: list(members.holders), (state, LAYOUT, OPTIMIZER, 0.5)
        with pytest.raises(StateError, match="none of 2 members"):
            await download(members.network.link(0.5), asked, *how, useless=useless)

    asyncio.run(scenario())


# ---------------------------------------------------------------- keeping what others read


def versions(count: int) -> list[OuterState]:
    small = Layout.of([("a", (8,))])
    first = OuterState(0, (OPTIMIZER.start(torch.zeros(8)),))
    assert len(small.fragments) == 1
    states = [first]
    for _ in range(count - 1):
        moved = OPTIMIZER.step(states[-1].fragments[0], torch.ones(8))
        states.append(states[-1].replace(0, moved, states[-1].version + 1))
    return states


def offered(snapshots: Snapshots, state: OuterState, now_s: float) -> int:
    return snapshots.offer(state, make_offer(state, None), now_s).version


def backlog_of(versions: range, kept: int = 4, max_bytes: int = 0, read_version: int | None = None) -> Backlog:
    """These versions closed, with means of 10 bytes."""
    backlog = Backlog(kept, max_bytes)
    for version in versions:
        backlog.add(Closed(commit(version, ()), (bytes(4), bytes(6))), read_version)
    return backlog


def kept(backlog: Backlog) -> list[int]:
    return [closed.commit.version for closed in backlog.after(-1)]


def test_the_latest_commits_are_kept() -> None:
    backlog = backlog_of(range(1, 10))
    assert kept(backlog) == [6, 7, 8, 9]
    assert [closed.commit.version for closed in backlog.after(7)] == [8, 9]
    for before in (None, commit):  # of a state that has none, its version tells
        leads_on = [backlog.leads_on_from(at, before and before(at, ())) for at in (4, 5, 8, 9)]
        assert leads_on == [False, True, True, False]
    backlog.clear()
    assert kept(backlog) == []


def view_commit(before: Commit) -> Commit:
    """Members changed, and nothing else."""
    return replace(before, height=before.height + 1, previous=before.digest, fragment=-1, drafter="a", mean_digest="")


def test_a_commit_that_only_changes_members_makes_no_version() -> None:
    """It takes no place among those that are kept, and whoever has the state of its version needs it and no more."""
    backlog, before = backlog_of(range(1, 5), kept=2), commit(4, ())
    changed = view_commit(before)
    after = replace(commit(5, ()), height=6, previous=changed.digest)
    backlog.add(Closed(changed, ()), None)
    assert (kept(backlog), backlog.leads_from) == ([3, 4, 4], 2)
    assert [closed.commit for closed in backlog.after(4, before)] == [changed]
    assert backlog.leads_on_from(4, before)
    backlog.add(Closed(after, ()), None)
    assert (kept(backlog), backlog.leads_from) == ([4, 4, 5], 3)
    assert [closed.commit for closed in backlog.after(4, before)] == [changed, after]
    assert [closed.commit for closed in backlog.after(4, changed)] == [after]
    assert [closed.commit for closed in backlog.since(4)] == [changed, after]
    assert backlog.leads_on_from(4, before)
    assert backlog.leads_on_from(4, changed)
    assert backlog.leads_on_from(4, None)  # what made version 5 was made on that state, whoever its members were


@pytest.mark.parametrize(
    ("max_bytes", "read_version", "versions"),
    [
        (1000, 2, [3, 4, 5, 6, 7, 8, 9]),  # all since the state that is being copied
        (60, 2, [4, 5, 6, 7, 8, 9]),  # as many as fit
        (59, 2, [5, 6, 7, 8, 9]),
        (10, 2, [6, 7, 8, 9]),  # never fewer than without a copy
        (1000, 8, [6, 7, 8, 9]),
    ],
)
def test_commits_since_a_snapshot_are_kept_within_bounds(
    max_bytes: int, read_version: int, versions: list[int]
) -> None:
    assert kept(backlog_of(range(1, 10), 4, max_bytes, read_version)) == versions


def test_when_the_copy_is_over_only_the_latest_commits_are_kept() -> None:
    backlog = backlog_of(range(1, 10), 4, 1000, 0)
    assert len(kept(backlog)) == 9
    backlog.add(Closed(commit(10, ()), (bytes(10),)), None)
    assert kept(backlog) == [7, 8, 9, 10]


def test_a_snapshot_stays_while_it_is_read_and_goes_when_it_is_not() -> None:
    snapshots, states = Snapshots(backlog_of(range(1, 2)), STALL_S), versions(3)
    offered(snapshots, states[0], 0.0)
    for now_s in (IDLE_S, 2 * IDLE_S):
        snapshots.forget(1, now_s)
        assert snapshots.chunk(states[0].digest, 0, now_s) is not None
    assert snapshots.oldest_version() == 0
    snapshots.forget(1, 3 * IDLE_S + 0.1)
    assert snapshots.chunk(states[0].digest, 0, 3 * IDLE_S + 0.1) is None
    assert snapshots.oldest_version() is None


def test_a_snapshot_from_which_no_commits_lead_on_goes() -> None:
    backlog, states = backlog_of(range(1, 3), kept=2), versions(4)
    snapshots = Snapshots(backlog, STALL_S)
    offered(snapshots, states[0], 0.0)
    snapshots.forget(2, 1.0)
    assert snapshots.chunk(states[0].digest, 0, 1.0) is not None
    backlog.add(Closed(commit(3, ()), ()), None)
    snapshots.forget(3, 1.0)
    assert snapshots.chunk(states[0].digest, 0, 1.0) is None


def test_when_as_many_as_are_kept_are_being_read_a_newcomer_reads_along() -> None:
    """Memory is bounded however many joiners come, and nobody who reads is cut off."""
    snapshots, states = Snapshots(backlog_of(range(1, 10), kept=10), STALL_S), versions(MAX_SNAPSHOTS + 2)
    assert [offered(snapshots, state, 0.0) for state in states[:MAX_SNAPSHOTS]] == list(range(MAX_SNAPSHOTS))
    assert offered(snapshots, states[MAX_SNAPSHOTS], 1.0) == MAX_SNAPSHOTS - 1
    assert all(snapshots.chunk(state.digest, 0, 1.0) for state in states[:MAX_SNAPSHOTS])
    assert snapshots.chunk(states[MAX_SNAPSHOTS].digest, 0, 1.0) is None
    assert offered(snapshots, states[MAX_SNAPSHOTS + 1], 2 * IDLE_S) == MAX_SNAPSHOTS + 1


def test_a_snapshot_that_is_offered_again_and_again_and_not_read_goes() -> None:
    """Whoever cannot use it may be offered a later one then."""
    snapshots, states = Snapshots(backlog_of(range(1, 10), kept=10), STALL_S), versions(MAX_SNAPSHOTS + 1)
    for state in states[:MAX_SNAPSHOTS]:
        offered(snapshots, state, 0.0)
    assert offered(snapshots, states[MAX_SNAPSHOTS], 0.6 * IDLE_S) == MAX_SNAPSHOTS - 1
    assert offered(snapshots, states[MAX_SNAPSHOTS], 1.2 * IDLE_S) == MAX_SNAPSHOTS


def test_a_snapshot_of_which_bytes_are_taken_stays() -> None:
    """One chunk takes longer over a slow link than a snapshot stays that nobody reads."""
    snapshots, states = Snapshots(backlog_of(range(1, 2)), STALL_S), versions(1)
    offered(snapshots, states[0], 0.0)
    snapshots.read(states[0].digest, 0.6 * IDLE_S)
    snapshots.forget(1, 1.2 * IDLE_S)
    assert snapshots.oldest_version() == 0


@pytest.mark.parametrize("elements", [0, 1, COPIED_AT_ONCE_BYTES // 4, COPIED_AT_ONCE_BYTES // 4 + 3])
def test_bytes_of_a_state_are_copied_in_pieces_and_whole(elements: int) -> None:
    values = torch.arange(elements, dtype=torch.float32)
    copy = copied_bytes(values)
    assert copy == values.numpy().tobytes()
    if elements:
        copy[0] ^= 1
        assert copy != values.numpy().tobytes()


class NoLanes:
    """An archive's lanes without any bytes, that count the means which are asked for."""

    means = 0

    def each(self, *work: Any) -> None:
        """Nothing is kept here."""

    async def mean(self, digest: str) -> Sequence[bytes]:
        self.means += 1
        return (b"",)


def test_the_first_of_several_commits_is_sent_before_the_others_are_gathered() -> None:
    """Whoever asks waits `stall_s` for it, in which an island of several ranks gathers no whole backlog."""
    lanes = NoLanes()
    archive = Archive(lanes, 2, 4, 10**6, STALL_S)  # type: ignore[arg-type]
    for version in (1, 2, 3):
        archive.backlog.add(Closed(commit(version, (b"",)), (b"",)), None)

    async def ask() -> list[int]:
        commits = archive.commits(0)
        first = await anext(commits)
        assert (first.commit.version, lanes.means) == (1, 1)
        return [closed.commit.version async for closed in commits]

    assert asyncio.run(ask()) == [2, 3]


def test_no_state_is_overwritten_while_an_earlier_one_is_copied() -> None:
    """They share the buffers of each fragment that has not moved in between."""
    archive, states = Archive(NoLanes(), 2, 4, 10**6, STALL_S), versions(2)  # type: ignore[arg-type]
    archive.hold(states[0], None, 1)
    archive.offer(states[0], make_offer(states[0], None))
    archive.backlog.add(Closed(commit(1, ()), ()), 0)
    archive.hold(states[1], None, 2)
    assert archive.snapshots.oldest_version() == 0
    assert not archive.reuse()
    archive.backlog.clear()  # nothing leads on from the earlier one any more
    assert archive.reuse()


def test_chunks_that_do_not_exist_are_not_there() -> None:
    snapshots, states = Snapshots(backlog_of(range(0)), STALL_S), versions(1)
    offered(snapshots, states[0], 0.0)
    assert [snapshots.chunk(states[0].digest, index, 0.0) is None for index in (-1, 0, 2)] == [True, False, True]
    assert snapshots.chunk("other", 0, 0.0) is None


def test_a_state_is_hashed_once_however_many_joiners_come(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    real = diloco.outer.state.part_hash

    def counting(buffer: torch.Tensor, start_byte: int, stop_byte: int) -> str:
        nonlocal hashed
        hashed += 1
        return real(buffer, start_byte, stop_byte)

    monkeypatch.setattr(diloco.outer.state, "part_hash", counting)
    first = start(3)
    for _ in range(3):
        make_offer(first, None)
    chunks = [chunk.buffer for chunk in first.manifest()]
    assert hashed == len(chunks)
    make_offer(step(first, 1), None)
    moved = sum(buffer.startswith("1/") for buffer in chunks)
    assert 0 < moved < len(chunks)
    assert hashed == len(chunks) + moved, "only the fragment that moved"


# ---------------------------------------------------------------- the rate


def test_the_rate_is_kept_and_shared() -> None:
    limit = RateLimit(bps=8000.0)
    limit.delay_s(0, 100.0)
    sent_bytes = 0
    now_s = 100.0
    while now_s < 110.0:  # whoever asks, waits, and sends
        now_s += limit.delay_s(50, now_s)
        sent_bytes += 50
    assert sent_bytes == pytest.approx(1000 * (10 + BURST_S), abs=101)


def test_two_senders_wait_for_each_other() -> None:
    limit = RateLimit(bps=8000.0)
    burst_bytes = int(1000 * BURST_S)
    assert limit.delay_s(burst_bytes, 0.0) == 0.0
    assert [round(limit.delay_s(500, 0.0), 9) for _ in range(3)] == [0.0, 0.5, 1.0]


def test_an_idle_time_is_not_saved_up() -> None:
    limit = RateLimit(bps=8000.0)
    limit.delay_s(1000, 0.0)
    limit.delay_s(1000, 1000.0)
    assert limit.delay_s(0, 1000.0) == pytest.approx(1.0 - BURST_S)


def test_no_limit_is_no_delay() -> None:
    limit = RateLimit(bps=0.0)
    assert {limit.delay_s(10**9, 0.0) for _ in range(3)} == {0.0}


def test_the_state_is_served_at_the_rate_over_grpc(state: OuterState) -> None:
    """Two members at 40 MB/s each: 48 MiB take 0.6 s at least. A slow rate is no stall: bytes come all the time."""

    async def scenario() -> None:
        holders = [Holder(state, bps=320e6) for _ in range(2)]
        servers = [await serve(holder, "127.0.0.1:0", KEYS) for holder in holders]
        link = GrpcLink(rpc_s=1.0, keys=KEYS)
        started = time.monotonic()
        sources = [server.address for server in servers]
        copied, _ = await download(link, lambda: sources, start(2), LAYOUT, OPTIMIZER, stall_s=0.5)
        took_s = time.monotonic() - started
        await link.close()
        for server in servers:
            await server.stop(0)
        assert copied.digest == state.digest
        assert took_s > STATE_BYTES * 8 / (2 * 320e6) - 2 * BURST_S

    asyncio.run(scenario())


# ---------------------------------------------------------------- commits before the state


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    made = LocalWorld(3)
    yield made
    made.close()


def test_a_peer_that_missed_a_few_versions_catches_up_by_their_commits(world: LocalWorld) -> None:
    """As long as a member keeps them; the state is not copied."""
    awake, sleeper = world.peers[:2], world.peers[2]
    version = world.rounds_until_all_vote()
    world.call(lambda: world.network.freeze(sleeper.address))
    timing = sleeper.peer.exchange.machine.timing
    sleeper.peer.exchange.machine.timing = replace(timing, heartbeat_s=1e9)
    world.rounds(awake, 3)
    copies = sleeper.copies
    sleeper.peer.exchange.machine.timing = timing
    sleeper.peer.exchange.machine._membership._heartbeat_at = 0.0
    world.call(lambda: world.network.thaw(sleeper.address))
    assert len(world.settle(world.peers)) == 1
    assert [commit.version for commit in sleeper.commits if commit.moves][-3:] == [
        version + 1,
        version + 2,
        version + 3,
    ]
    assert sleeper.copies == copies


def test_a_founding_that_closes_before_a_joiner_is_done_opening_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others hear that it has the state, and found the run with it, before whoever trains for it goes on."""
    copies, opens = Peer.copy_state, Peer.open

    def slowly(peer: Peer, *given: Any) -> Life[None]:
        yield from copies(peer, *given)
        until(lambda: peer.exchange.in_view, "the run is founded")

    def whole(peer: Peer) -> Life[None]:
        yield from opens(peer)
        peer.exchange.alive().result(DEADLINE_S)  # the loop has done what it was told before

    monkeypatch.setattr(Peer, "copy_state", slowly)
    monkeypatch.setattr(Peer, "open", whole)
    monkeypatch.setattr(LocalPeer, "enter", lambda peer: None)
    world = LocalWorld(2)
    (founding,) = world.peers[1].peer.exchange.closed()
    assert (founding.commit.version, founding.commit.fragment) == (0, -1)
    world.close()


def test_nobody_waits_for_a_state_that_is_not_wanted_any_more(world: LocalWorld) -> None:
    """Ctrl-C while a large state is copied."""
    leaving, source = world.peers[:2]
    world.call(lambda: world.network.freeze(source.address))
    leaving.peer.asked_to_leave = lambda: True
    with pytest.raises(Interrupted, match="asked to leave"):
        drive(leaving.peer.copy_state([source.address]))
    world.call(lambda: world.network.thaw(source.address))


# ---------------------------------------------------------------- a state that turned out to be wrong


def damage(peer: LocalPeer) -> None:
    """A bit of its anchor, which nobody is told of."""
    line = peer.peer.line
    anchor = line.state.fragments[0].anchor.clone()
    anchor[7] = -anchor[7]
    line.state = OuterState(line.state.version, (replace(line.state.fragments[0], anchor=anchor),))


@pytest.mark.parametrize("failures", [0, pytest.param(2, marks=pytest.mark.slow(queued=False))])
def test_what_a_version_counts_is_not_sent_again_by_who_could_not_apply_it(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """However long nobody gives it the state meanwhile."""
    victim, failing = world.peers[2], iter([True] * failures)
    copy = victim.peer.exchange.copy_state

    def fails_at_first(*rest: Any) -> Future[tuple[OuterState, StateOffer, tuple[Fork, ...]]]:
        if next(failing, False):
            raise StateError("nobody gives it", "")
        return copy(*rest)

    monkeypatch.setattr(victim.peer.exchange, "copy_state", fails_at_first)
    world.rounds(world.peers, 2)
    damage(victim)
    world.rounds(world.peers, 4)
    assert len(world.settle(world.peers)) == 1
    counted = sum(entry.tokens for made in world.peers[0].commits for entry in made.counted if entry.peer == "p2")
    totals = victim.peer.journal.totals
    assert (totals.committed, totals.discarded, totals.trained) == (counted, 0, 60)


@pytest.mark.slow(queued=False)
def test_who_diverged_waits_for_a_state_that_is_no_older_than_its_own(world: LocalWorld) -> None:
    """Joiners read as many snapshots of every member as it keeps. An older state would have it apply versions again,
    which count what it sent before, and book them for what it sends now."""
    victim = world.peers[2]
    for _ in range(MAX_SNAPSHOTS):
        world.rounds(world.peers, 1)
        for peer in world.peers:
            world.run(ExchangeService(peer.peer.exchange).on_state_offer(""))
    world.rounds(world.peers, 1)
    damage(victim)
    copies = victim.copies
    victim.peer.exchange.hold(victim.peer.line.state, victim.peer.line.commit)
    world.rounds(world.peers, 3)
    assert len(world.settle(world.peers)) == 1
    assert victim.copies > copies + 1  # what is offered while the others read is of no use to it
    versions = [commit.version for commit in victim.commits]
    assert versions == sorted(set(versions))


def serves(limit_bps: float | None) -> float:
    return serve_bps_of(Site(network=NetworkSection(serve_bps=limit_bps)))


def test_unless_set_the_rate_goes_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    assert serves(None) == 3 * SERVE_BPS_PER_CORE
    assert (serves(0.0), serves(20e6)) == (0.0, 20e6)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert serves(None) == 4 * SERVE_BPS_PER_CORE
