"""An outer state that the ranks of an island divide: the parts of each, what they make together, and real islands."""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Adopt, Measure
from diloco.base.errors import ResourceError
from diloco.base.ranks import Alone
from diloco.base.types import Contribution, Counted, Member
from diloco.compress import PayloadError, open_codec, open_codecs
from diloco.config.codec import CodecChoice
from diloco.config.contract import Contract, OuterSection
from diloco.config.site import Site
from diloco.exchange import copying, statesync
from diloco.exchange import lane as lanes_of_ranks
from diloco.exchange import work as work_module
from diloco.exchange.background import ExchangeTasks
from diloco.exchange.copying import StateCopier
from diloco.exchange.engine import Exchange
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import Lanes, LaneService, RemoteExchange, RemoteLane
from diloco.exchange.sending import STREAM_PAUSE_S
from diloco.exchange.statesync import Elsewhere
from diloco.exchange.work import LaneEvents, LanePayloads
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.connections import RankListener, RankWire, call_rank_0
from diloco.island.plain import packed
from diloco.outer.average import unpack
from diloco.outer.fragments import Fragment, Layout, read_fragment, write_fragment
from diloco.outer.line import Line, complete
from diloco.outer.optimizers import Stepping, open_outer
from diloco.outer.state import OuterState, StateChunk
from diloco.peer.rank import PeerRank
from diloco.peer.terms import lane_terms
from diloco.protocol.messages import Begin, Reply, Span
from diloco.protocol.streams import Kind, Part, StateOffer, StreamHeader
from diloco.run.door import WRITTEN
from diloco.transport.endpoint import Runtime
from diloco.transport.link import LinkRefused
from diloco.transport.pace import MAX_STREAMS
from tests.fronts import drive
from tests.peers import DEADLINE_S, PeerProcess, ending, ranks_of, run_cli, tiny_contract
from tests.test_run import agree
from tests.warm import run_ranks

SHAPES = [("a.weight", (70, 100)), ("b.weight", (90, 101)), ("b.bias", (77,))]
LAYOUT = Layout.of(SHAPES, part_elements=1024, groups=[["b.*"]])
LANES = (1, 2, 3, 7, 40)
"""Lanes for 17 parts; 40 leave some ranks nothing."""
CPU = torch.device("cpu")


def on_lanes(lanes: int) -> list[Fragment]:
    return [LAYOUT.fragments[0].on_lane(lane, lanes) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", LANES)
def test_every_part_is_held_once(lanes: int) -> None:
    whole, held = LAYOUT.fragments[0], on_lanes(lanes)
    assert sorted(part for fragment in held for part in fragment.cuts) == list(range(whole.parts))
    assert sum(fragment.elements for fragment in held) == whole.total == whole.elements
    assert max(fragment.elements for fragment in held) <= (whole.parts // lanes + 1) * whole.part_elements
    assert {fragment.parts for fragment in held} == {whole.parts}
    assert whole.on_lane(lanes, lanes).elements == 0
    assert Layout((held[0],)).digest == LAYOUT.digest


@pytest.mark.parametrize("lanes", LANES)
def test_the_pieces_of_parameters_make_them_whole(lanes: int) -> None:
    whole = LAYOUT.fragments[0]
    flat = torch.arange(float(whole.total))
    parameters = {name: torch.empty(shape) for name, shape in SHAPES}
    write_fragment(parameters, whole, flat)
    for fragment in on_lanes(lanes):
        own = torch.cat([flat[slice(*whole.place_of(part))] for part in fragment.cuts] or [torch.empty(0)])
        for spot in fragment.spots:
            piece = parameters[spot.name].flatten()[spot.start : spot.stop]
            assert torch.equal(own[spot.offset : spot.offset + spot.elements], piece)
            parameters[spot.name].view(-1)[spot.start : spot.stop] = -1.0
    assert all(bool((value == -1.0).all()) for value in parameters.values())


class Told(Alone):
    """Ranks of which the others have said their hashes."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def gather(self, text: str) -> list[str]:
        assert text in self.said
        return self.said


@pytest.mark.parametrize("lanes", LANES)
def test_steps_of_the_parts_are_a_step_of_the_whole(lanes: int) -> None:
    """The state has the same bits, and the same digest once the ranks have told each other their hashes."""
    optimizer, codecs = open_outer(OuterSection()), [open_codec(CodecChoice(name=name)) for name in ("int8", "fp16")]
    generator = torch.Generator().manual_seed(1)
    whole = LAYOUT.fragments[0]
    anchor, values = (torch.randn(whole.total, generator=generator) for _ in range(2))
    means = [codecs[whole.group_of(part)].encode(values[slice(*whole.place_of(part))]) for part in range(whole.parts)]
    start = OuterState(0, (optimizer.start(anchor, whole),))
    expected = start.replace(0, optimizer.step(start.fragments[0], unpack(means, whole, codecs)), 1)
    stepped = []
    for fragment in on_lanes(lanes):
        own = torch.cat([anchor[slice(*whole.place_of(part))] for part in fragment.cuts] or [torch.empty(0)])
        state = OuterState(0, (optimizer.start(own, fragment),))
        held = [mean if part in fragment.cuts else b"" for part, mean in enumerate(means)]
        stepping = Stepping(state, fragment, codecs, optimizer)
        stepping.average(held)
        after = stepping.outer(held)
        stepped.append(after)
        for part, (begin, end) in fragment.cuts.items():
            place = slice(*whole.place_of(part))
            for name, buffer in after.buffers().items():
                assert torch.equal(buffer[begin:end], expected.fragments[0].buffers()[name][place])
    said = [" ".join(text for hashes in one.own_hashes.values() for text in hashes.values()) for one in stepped]
    for after in stepped:
        if lanes > 1:
            complete(line_of(Told(said)), after)
        assert OuterState(1, (after,)).digest == expected.digest


def line_of(ranks: Told) -> Line:
    """A line, as far as telling hashes needs one."""
    line = object.__new__(Line)
    line.ranks = ranks
    return line


# ---------------------------------------------------------------- the bridge, on real ranks

MESHES = {"copies": {}, "fsdp": {"shard": "parameters"}, "tp": {"tp": 2}, "pp": {"pp": 2, "micro_batches": 2}}


def contract(fragments: int = 1) -> Contract:
    return Contract.model_validate(
        {
            "run": {"name": "lanes", "total_tokens": 10**6},
            "data": {"source": "text", "paths": ("text.txt",), "sequence_length": 16},
            "model": {"layers": 2, "dim": 32, "heads": 4, "ffn_dim": 64},
            "inner": {"batch_size": 4},
            "sync": {"part_elements": 1024, "fragments": fragments},
        }
    )


def live(place: int, root: Path) -> None:
    """On both ranks: read, write something else, read again, by every mesh and number of lanes."""
    island = Island.at(place, 2, CPU, rendezvous=f"file://{root / 'meeting'}")
    expected = whole_of(RankModel(contract(), site(root, {}), Island(0, 1, CPU)).weights.parameters)
    found, pool = {}, ThreadPoolExecutor(1)
    for name, mesh in MESHES.items():
        bench = RankModel(contract(), site(root, mesh), island)
        for lanes in (1, 2):
            layout = Layout.agreed(bench.weights.shapes, contract()).on_lane(island.rank, lanes)
            for fragment in layout.fragments:
                before = bench.weights.read(fragment)
                assert torch.equal(before, part_of(expected, fragment)), f"{name}: what is read over {lanes} lanes"
                asked = [(part, pool.submit(values)) for part, values in bench.weights.parts(fragment)]
                assert [part for part, _ in asked] == list(fragment.cuts)
                assert all(torch.equal(one.result(), before[slice(*fragment.cuts[part])]) for part, one in asked)
                assert bench.weights.within(fragment, float(expected.abs().max()))
                assert not island.all(bench.weights.within(fragment, 1e-3))
                other = torch.full_like(before, -0.0)
                bench.weights.write(fragment, other)
                again = bench.weights.read(fragment)
                assert torch.equal(again.view(torch.int32), other.view(torch.int32)), f"{name}: the bits of zeros"
                bench.weights.change(fragment, lambda local, at, before=before: local + before[at])
                assert torch.equal(bench.weights.read(fragment), before)
                assert bench.weights.rounded(fragment, before) is before
                if name != "pp":  # there parameters travel as fp32
                    narrow = Bridge({key: value.bfloat16() for key, value in bench.weights.parameters.items()}, island)
                    narrow.write(fragment, before)
                    assert torch.equal(narrow.read(fragment), narrow.rounded(fragment, before))
        found[name] = True
    (root / f"done-{place}").write_text(" ".join(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def site(root: Path, mesh: dict[str, object], network: dict[str, object] | None = None) -> Site:
    sections = {"mesh": mesh, "network": network or {}, "device": {"kind": "cpu"}, "data": {"root": str(root)}}
    return Site.model_validate(sections)


def whole_of(parameters: Mapping[str, Tensor]) -> Tensor:
    shapes = [(name, tuple(value.shape)) for name, value in parameters.items()]
    (fragment,) = Layout.agreed(shapes, contract()).fragments
    return read_fragment(parameters, fragment)


def part_of(whole: Tensor, fragment: Fragment) -> Tensor:
    return torch.cat([whole[slice(*fragment.place_of(part))] for part in fragment.cuts] or [torch.empty(0)])


@pytest.mark.slow
def test_ranks_read_and_write_their_parts_of_any_mesh(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    run_ranks(live, 2, tmp_path)
    assert [(tmp_path / f"done-{place}").read_text().split() for place in range(2)] == [list(MESHES)] * 2


def adopting(place: int, root: Path) -> None:
    """Rank 0 holds all parts. It is given a state of version 1, and then measures a fragment."""
    island = Island.at(place, 2, CPU, rendezvous=f"file://{root / 'meeting'}", timeout_s=60.0)
    one_lane = site(root, {"shard": "parameters"}, {"lanes": 1})
    model = RankModel(contract(2), one_lane, island)
    rank = PeerRank(contract(2), one_lane, island, model.weights, model)
    line = rank.line
    moved = [replace(one, anchor=one.anchor + 1.0, steps=1) for one in line.state.fragments]
    drive(rank.perform(Adopt(1, (1, 1), False), OuterState(1, tuple(moved)) if island.leads else None))
    drive(rank.perform(Measure(1, 0.0, 1, True)))
    state = line.state
    assert line.sent is not None
    assert line.sent.local is not None
    assert torch.equal(line.sent.local, state.fragments[1].anchor)
    rank.close()
    island.close()
    (root / f"at-{place}").write_text(f"{state.version} {[one.steps for one in state.fragments]}")


@pytest.mark.slow
def test_ranks_that_hold_no_parts_stand_at_the_version_that_the_island_copied(tmp_path: Path) -> None:
    """Or what they measure is of another version than what rank 0 does."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    run_ranks(adopting, 2, tmp_path)
    assert [(tmp_path / f"at-{place}").read_text() for place in range(2)] == ["1 [1, 1]"] * 2


@pytest.mark.parametrize(
    ("outer_step", "ranks", "ahead"),
    [("auto", 1, True), ("auto", 2, False), ("ahead", 2, True), ("in_place", 1, False)],
)
def test_an_island_steps_in_place_unless_told_otherwise(outer_step: str, ranks: int, ahead: bool) -> None:
    site = Site.model_validate({"device": {"outer_step": outer_step}})
    assert lane_terms(contract(), site, LAYOUT, ranks).ahead == ahead


# ---------------------------------------------------------------- what the ranks tell each other


class Heard:
    """Events that reach the exchange of rank 0 from a lane on another rank."""

    def __init__(self) -> None:
        self.failures: queue.Queue[BaseException] = queue.Queue()

    def failed(self, error: BaseException) -> None:
        self.failures.put(error)


class Blocked(Sequence[bytes]):
    """Parts whose encoding does not end before it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.fails = False

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if index:
            raise IndexError
        self.may_end.wait(60.0)
        if self.fails:
            raise PayloadError("this cannot be encoded")
        return b""


@contextmanager
def two_ranks() -> Iterator[tuple[RemoteLane, Heard, Lane, RemoteExchange, asyncio.AbstractEventLoop]]:
    """The lane of rank 1, on a loop of its own, as rank 0 sees it; somebody else has called first."""
    key = secrets.token_bytes(32)
    listener = RankListener("127.0.0.1", key)
    with ThreadPoolExecutor(1) as pool:
        welcome = pool.submit(listener.wires, 1, 30.0)
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            Client(("127.0.0.1", listener.port), authkey=b"a guess")
        with socket.create_connection(("127.0.0.1", listener.port)):
            pass
        silent = socket.create_connection(("127.0.0.1", listener.port))
        with socket.create_connection(("127.0.0.1", listener.port)) as probe:
            probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with suppress(ConnectionError):  # it is hung up on
                while probe.recv(1024):
                    pass
        here, there = Runtime([""], 1.0), Runtime([""], 1.0)
        lane = Lane(lane_terms(contract(), Site(), LAYOUT), there.link, there.loop)
        first = RemoteExchange(RankWire(call_rank_0(("127.0.0.1", listener.port), key, 1)), lane, there.loop)
        wires = welcome.result(DEADLINE_S)
        silent.close()
    heard = Heard()
    remote = RemoteLane(wires[1], here.loop, cast(LaneEvents, heard), 1, lambda sender: False)
    try:
        yield remote, heard, lane, first, here.loop
    finally:
        remote.end()
        first.close()
        lane.stop()
        here.close()
        there.close()


def lanes_with(own: Lane, *others: RemoteLane) -> Lanes:
    lanes = Lanes(own)
    lanes.others += others
    return lanes


def test_strangers_at_the_door_do_not_keep_the_ranks_out() -> None:
    with two_ranks() as (remote, _, _, _, loop):
        question = remote.ask(Lane.chunk, 7, StateChunk("0/anchor", 0, "no such state"))
        assert asyncio.run_coroutine_threadsafe(question, loop).result(DEADLINE_S) is None


@pytest.mark.slow(queued=False)
def test_a_rank_that_never_calls_is_not_waited_for_for_ever() -> None:
    key = secrets.token_bytes(32)
    listener = RankListener("127.0.0.1", key)
    with ThreadPoolExecutor(1) as pool:
        welcome = pool.submit(listener.accept_ranks, 3, 5.0)
        with Client(("127.0.0.1", listener.port), authkey=key) as rank:
            rank.send_bytes(packed(2))
            with pytest.raises(ResourceError, match="rank 1, 3 of this island did not call rank 0 within 5 s"):
                welcome.result(DEADLINE_S)


class Unsayable(Sequence[Any]):
    """It cannot be encoded; on request not before it may end."""

    def __init__(self, *, waits: bool = False) -> None:
        self.encoded, self.may_end = threading.Event(), threading.Event()
        self._waits = waits

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise IndexError

    def __iter__(self) -> Iterator[Any]:
        self.encoded.set()
        if self._waits:
            assert self.may_end.wait(DEADLINE_S)
            return iter(())
        raise TypeError("this cannot be said")


def test_what_cannot_be_said_to_another_rank_ends_the_island_and_says_why() -> None:
    with two_ranks() as (remote, heard, _, _, loop):
        question = asyncio.run_coroutine_threadsafe(remote.ask(Lane.mean, cast(str, Unsayable())), loop)
        with pytest.raises(TypeError, match="this cannot be said"):
            question.result(DEADLINE_S)
        assert "this cannot be said" in str(heard.failures.get(timeout=DEADLINE_S))
    with two_ranks() as (remote, heard, lane, _, loop):
        lane.measured(Contribution(0, 0, 1, 1, 1, 1, cast(Sequence[bytes], [Unsayable()])))
        asyncio.run_coroutine_threadsafe(remote.ask(Lane.contributed), loop)
        assert "rank 1 of this island failed: TypeError: this cannot be said" in str(
            heard.failures.get(timeout=DEADLINE_S)
        )
        with pytest.raises(TypeError):
            lane.copied()


def test_a_rank_that_goes_while_something_is_said_to_it_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is not closed under the hands of who writes, whose bytes might go to the next file."""
    unhandled: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    with two_ranks() as (remote, heard, _, first, _):
        late = Unsayable(waits=True)
        remote.post(Lane.keep_mean, "digest", cast(Sequence[bytes], [late]))
        assert late.encoded.wait(DEADLINE_S)
        first.close()
        assert "another rank of this island is gone" in str(heard.failures.get(timeout=DEADLINE_S))
        late.may_end.set()
        for thread in threading.enumerate():
            if thread.name == "lane":
                thread.join(DEADLINE_S)
    assert not unhandled


def test_a_question_to_a_rank_that_goes_is_not_waited_for() -> None:
    """Or the training side would wait for ever for a contribution of which a dead rank held a part."""
    with two_ranks() as (remote, heard, lane, first, loop):
        parts = Blocked()
        lane.measured(Contribution(0, 0, 1, 1, 1, 1, parts))
        question = asyncio.run_coroutine_threadsafe(remote.ask(Lane.contributed), loop)
        with pytest.raises(TimeoutError):
            question.result(0.05)
        first.close()
        with pytest.raises(ResourceError, match="another rank of this island is gone"):
            question.result(DEADLINE_S)
        assert isinstance(heard.failures.get(timeout=DEADLINE_S), ResourceError)
        with pytest.raises(ResourceError, match="gone"):
            asyncio.run_coroutine_threadsafe(remote.ask(Lane.mean, "any"), loop).result(DEADLINE_S)
        parts.may_end.set()


def test_parts_of_a_contribution_are_not_waited_for_once_the_exchange_failed() -> None:
    with two_ranks() as (remote, _, lane, _, loop):
        parts = Blocked()
        lane.measured(Contribution(0, 0, 1, 1, 1, 1, parts))
        exchange = object.__new__(Exchange)  # as far as asking other ranks needs one
        ExchangeTasks.__init__(exchange, loop)
        exchange.lanes = lanes_with(lane, remote)
        asked = exchange.whole(Contribution(0, 0, 1, 1, 1, 1, [b"", b""]))
        exchange.failed(ResourceError("the exchange failed"))
        with pytest.raises(ResourceError, match="the exchange failed"):
            asked.result(DEADLINE_S)
        parts.may_end.set()


@pytest.mark.parametrize(("here", "there", "together"), [(7, 0, 0), (0, 5, 0), (7, 5, 12)])
def test_how_fast_an_island_uploads_is_unknown_as_long_as_any_lane_has_not_measured(
    here: int, there: int, together: int
) -> None:
    with two_ranks() as (remote, _, lane, first, _):
        lane.sender.link = Mock(send_bps=here)
        first.rates(there, 1, 2)
        deadline_s = monotonic_s() + 30.0
        while remote.wire_bytes != (1, 2):
            assert monotonic_s() < deadline_s
            time.sleep(0.01)
        assert lanes_with(lane, remote).send_bps == together


def test_what_fails_on_another_rank_ends_the_island_and_says_where() -> None:
    with two_ranks() as (remote, heard, lane, _, _):
        remote.post(Lane.fill, "0/anchor", 0, b"of a copy that was never begun")
        assert "rank 1 of this island failed: KeyError" in str(heard.failures.get(timeout=DEADLINE_S))
        lane.failed(PayloadError("of a task of its own"))
        assert "PayloadError: of a task of its own" in str(heard.failures.get(timeout=DEADLINE_S))
        with pytest.raises(KeyError):
            lane.copied()


def test_an_answer_that_fails_on_another_rank_ends_the_island_and_says_why() -> None:
    with two_ranks() as (remote, heard, lane, _, loop):
        parts = Blocked()
        lane.measured(Contribution(0, 0, 1, 1, 1, 1, parts))
        asyncio.run_coroutine_threadsafe(remote.ask(Lane.contributed), loop)
        parts.fails = True
        parts.may_end.set()
        said = str(heard.failures.get(timeout=DEADLINE_S))
        assert "rank 1 of this island failed: PayloadError: this cannot be encoded" in said
        with pytest.raises(PayloadError):
            lane.copied()


def test_a_state_that_still_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has all of it before this rank: it may have taken it from others faster than it passes it on."""
    monkeypatch.setattr(lanes_of_ranks, "NEWS_S", 0.5)
    with two_ranks() as (remote, _, lane, _, _), ThreadPoolExecutor(1) as pool:
        state = state_of(lane)
        lane.hold(state)
        remote.post(Lane.begin_copy)
        asked, began_s = pool.submit(lane.copied), monotonic_s()
        part = state.chunk(StateChunk("0/anchor", 0, ""))
        while monotonic_s() - began_s < 1.5:
            remote.post(Lane.fill, "0/anchor", 0, part)
            assert not asked.done(), asked.exception()
            time.sleep(0.05)
        remote.post(Lane.end_copy, 7, [7])
        assert asked.result(DEADLINE_S).version == 7
        asked = pool.submit(lane.copied)
        with pytest.raises(TimeoutError, match="the copied state did not come from rank 0 within"):
            asked.result(DEADLINE_S)


def test_a_connection_that_breaks_counts_once_however_many_streams_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three damaged streams, as one reset of four makes, had a contributor left out of a version."""
    now_s = 7.0
    monkeypatch.setattr(work_module, "monotonic_s", lambda: now_s)
    (fragment,) = Layout.agreed([("a", (16,))], contract()).fragments
    member = Member("a", 1, "a:1")
    begin = Begin(1, 0, (Counted("a", 0, 0, 1.0, 1, 1),), (member,), (Span("a", 0, 1),), "")
    payloads = LanePayloads(begin, "a", fragment, open_codecs(contract().codec))
    assert [payloads.damaged("a") for _ in range(4)] == [1, 1, 1, 1]
    now_s += STREAM_PAUSE_S
    assert payloads.damaged("a") == 2


def test_the_loop_of_another_rank_copies_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of 10 GB held it for seconds, in which streams to the lane stood still."""
    threads: list[int] = []
    copied_bytes = statesync.copied_bytes

    def noted(buffer: Tensor) -> bytearray:
        threads.append(threading.get_ident())
        return copied_bytes(buffer)

    monkeypatch.setattr(statesync, "copied_bytes", noted)
    with two_ranks() as (remote, _, lane, _, _):
        lane.hold(state_of(lane))
        remote.post(Lane.begin_copy)
        remote.post(Lane.end_copy, 7, [7])
        assert lane.copied().version == 7
        assert threads
        assert loop_thread(lane._loop) not in threads


def loop_thread(loop: asyncio.AbstractEventLoop) -> int:
    async def ident() -> int:
        return threading.get_ident()

    return asyncio.run_coroutine_threadsafe(ident(), loop).result(DEADLINE_S)


def state_of(lane: Lane) -> OuterState:
    terms = lane.terms
    anchors = (torch.zeros(fragment.elements) for fragment in terms.layout.fragments)
    return OuterState(0, tuple(map(terms.optimizer.start, anchors, terms.layout.fragments)))


def test_a_copy_that_was_given_up_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a moment to end. Then the other ranks drop what they have of it, and parts that still come are nobody's:
    a rank without a copy to put them in ended the island."""
    with two_ranks() as (remote, heard, lane, _, loop):
        state, began, ended = state_of(lane), threading.Event(), threading.Event()
        lane.hold(state)
        part = state.chunk(StateChunk("0/anchor", 0, ""))
        copies: list[str] = []

        async def download(*fitting: Any, elsewhere: Elsewhere, **wanted: Any) -> tuple[OuterState, StateOffer]:
            copies.append("")
            if len(copies) == 1:
                began.set()
                try:
                    await asyncio.sleep(60.0)
                finally:
                    loop.call_later(0.2, lambda: (elsewhere("0/anchor", 1, part), ended.set()))
                    await asyncio.sleep(0.1)  # as the streams that it reads from take
            while not ended.is_set():
                await asyncio.sleep(0.01)
            elsewhere("0/anchor", 1, part)
            return state, StateOffer(3, None, "", (3,), ())

        monkeypatch.setattr(copying, "download", download)
        other = cast(Any, Mock())
        one = StateCopier(other, other, other, other, lanes_with(lane, remote))
        one.givers = list  # type: ignore[method-assign]
        never = asyncio.run_coroutine_threadsafe(one.copy([], state, None, print), loop)
        assert began.wait(DEADLINE_S)
        never.cancel()
        copied, *_ = asyncio.run_coroutine_threadsafe(one.copy([], state, None, print), loop).result(DEADLINE_S)
        assert copied is state
        assert lane.copied().version == 3
        assert heard.failures.empty()


# ---------------------------------------------------------------- real islands


@pytest.mark.slow
def test_islands_with_lanes_are_founded_joined_copied_from_recorded_and_replayed(tmp_path: Path) -> None:
    """An island founds; two islands copy its state, which two ranks hold each a half of. One does all on rank 0."""
    island = ("--set", "device.ranks=2", "--set", "storage.record=true", "--set", "device.step_s=0.05")
    with ending([]) as peers:
        peers.append(PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)), *island))
        ticket = peers[0].ticket()
        peers[0].reaches(2, ["a"])
        peers.append(PeerProcess("b", tmp_path, "--join", ticket, *island, "--set", "network.lanes=1"))
        peers.append(PeerProcess("c", tmp_path, "--join", ticket, *island, "--set", "mesh.shard=parameters"))
        reached = peers[0].reaches(4, ["a", "b", "c"], deadline_s=150.0)["version"]
        peers[0].reaches(reached + 2, ["a", "b", "c"])
        assert all(event["wire_bytes_sent"] > 0 for event in peers[2].events("version"))
        for peer in peers[::-1]:
            peer.interrupt()
            assert peer.wait() == 0, peer.log.read_text()
        assert agree(peers) > 4
    assert {path.name for path in peers[0].directory.iterdir()} - {"log.txt"} <= {*WRITTEN}
    done = run_cli("replay", str(tmp_path), timeout_s=120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISMATCH" not in done.stdout


@pytest.mark.slow
def test_a_rank_that_dies_in_a_sync_takes_its_island_out_and_nobody_else(tmp_path: Path) -> None:
    """The island sends so slowly that it is always in a sync; what it had sent by then may be counted or not."""
    with ending([]) as peers:
        peers.append(PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=2)), "--set", "device.step_s=0.02"))
        ticket = peers[0].ticket()
        peers.append(PeerProcess("b", tmp_path, "--join", ticket))
        slow = ("--set", "device.ranks=2", "--set", "network.send_bps=400000")
        peers.append(PeerProcess("c", tmp_path, "--join", ticket, *slow))
        a, b, c = peers
        together = a.reaches(2, ["a", "b", "c"], deadline_s=150.0)["version"]
        os.kill(ranks_of(c)[1], signal.SIGKILL)
        without = a.reaches(together + 1, ["a", "b"])["version"]
        a.reaches(without + 1, ["a", "b", "c"], deadline_s=150.0)
        assert not a.events("skip") + b.events("skip")
        for peer in (c, b, a):
            peer.interrupt()
            assert peer.wait() == 0, peer.log.read_text()
        assert agree(peers) > without
        assert [peer.events("end")[-1]["discarded_tokens"] for peer in (a, b)] == [0, 0]


async def floods(service: LaneService, names: Sequence[str], let_in: Sized) -> int:
    """Number of streams that a lane refuses of those that senders of these names open, and never end. The lane has a
    place for each of the others: they are `let_in`."""
    members = [Member(name, 1, "127.0.0.1:9") for name in names]
    headers = [StreamHeader("run", "contract", "lineage", member, Kind.MEAN, 1, 0, 0) for member in members]
    nothing = cast(AsyncIterator[Part], None)
    streams = [asyncio.ensure_future(service.on_parts(header, nothing)) for header in headers]
    while len(let_in) + len(ended := [stream for stream in streams if stream.done()]) < len(streams):
        await asyncio.sleep(0.01)  # rank 0 is asked for each
    for stream in streams:
        stream.cancel()
    refused = await asyncio.gather(*ended, return_exceptions=True)
    assert all(isinstance(error, LinkRefused) and error.reply is Reply.TOO_EARLY for error in refused)
    return len(refused)


def test_a_lane_has_so_many_streams_of_one_sender_and_of_all_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_in = list[StreamHeader]()

    async def endless(header: StreamHeader, parts: Any) -> Reply:
        let_in.append(header)
        await asyncio.sleep(DEADLINE_S)
        return Reply.OK

    with two_ranks() as (remote, _, lane, first, _loop):
        monkeypatch.setattr(remote, "_is_located", lambda sender: sender.peer == "known")
        monkeypatch.setattr(lane, "on_parts", endless)
        monkeypatch.setattr(type(lane.terms), "max_part_bytes", 1)
        service = LaneService(lane, first)
        flood = [*(f"stranger{number}" for number in range(MAX_STREAMS + 50)), *["known"] * MAX_STREAMS]
        refused = asyncio.run_coroutine_threadsafe(floods(service, flood, let_in), lane._loop).result(DEADLINE_S)
        assert refused == 50
