"""Joining a run through addresses where peers are starting, gone, or of another run."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import diloco
from diloco.base.errors import Interrupted, TicketError, UnreachableError, UsageError
from diloco.base.types import Member, Voter
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.log import DiskUse
from diloco.exchange.service import ExchangeService
from diloco.exchange.votes import VOTES, DiskVotes
from diloco.identity.keys import VARIABLE
from diloco.observe.events import Remark, Stamped
from diloco.protocol.streams import Welcome
from diloco.protocol.vote import VoteRecord
from diloco.run.door import asked_members, fetched
from diloco.run.launch import fetch_contract
from diloco.run.past import PastRun
from diloco.run.run import Run
from diloco.transport import endpoint as runtime
from diloco.transport.endpoint import Endpoint, Runtime, StartingError, reachable
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.link import LinkRefused
from tests.local import NoDirectory
from tests.peers import DEADLINE_S, until
from tests.test_votes import NEXT, save, stand
from tests.warm import run_ranks


def contract(name: str = "joining") -> Contract:
    return Contract.model_validate({"run": {"name": name, "total_tokens": 1000}, "model": {"kind": "external"}})


class Nowhere(NoDirectory):
    """Instead of a process that takes two seconds to start."""

    def open(self, *settings: Any) -> None:
        """Nothing is opened."""

    def close(self) -> None:
        """Nothing was begun."""


@pytest.fixture(autouse=True)
def _without_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    _has_no_directory(monkeypatch)


def _has_no_directory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diloco.transport.endpoint.Directory", Nowhere)
    patch.setattr(Endpoint, "open_directory", lambda endpoint, run, warn: None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    """Where peers listen, as they begin to."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    serve = Runtime.serve

    def noted(own: Runtime, *rest: Any) -> str:
        address = serve(own, *rest)
        found.put(address)
        return address

    monkeypatch.setattr(Runtime, "serve", noted)
    return found


@pytest.fixture
def starting(served: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[Run]]:
    """A founder that listens, and goes on only when somebody has knocked in vain: before its directory is open, and
    before the ranks of its island are there."""
    may_go_on = threading.Event()
    hello = Runtime.first_hello

    def slow(endpoint: Endpoint, run: str, warn: Callable[[str], None]) -> None:
        assert endpoint.welcome is not None or may_go_on.wait(DEADLINE_S)

    def knocked(own: Runtime, address: str) -> tuple[Welcome, GrpcLink]:
        try:
            return hello(own, address)
        except StartingError:
            may_go_on.set()
            raise

    monkeypatch.setattr(Endpoint, "open_directory", slow)
    monkeypatch.setattr(Runtime, "first_hello", knocked)
    with ThreadPoolExecutor(1) as pool:
        founding = pool.submit(diloco.found, contract(), nn.Linear(4, 4))
        try:
            yield founding
        finally:
            may_go_on.set()
            founding.result(DEADLINE_S).close()


def test_who_knocks_at_a_founder_that_is_starting_waits_for_it(
    starting: Future[Run], served: queue.SimpleQueue[str]
) -> None:
    joiner = diloco.join(served.get(timeout=DEADLINE_S), nn.Linear(4, 4))
    assert joiner.digest == starting.result(DEADLINE_S).digest
    joiner.close()


def test_a_member_of_the_run_to_resume_that_is_starting_is_there(
    starting: Future[Run], served: queue.SimpleQueue[str]
) -> None:
    """Else whoever starts again a little later founds the run, too."""
    others = (served.get(timeout=DEADLINE_S),)
    past = PastRun(Path(), 0, 0.0, contract().digest, 0, others)
    with closing(Endpoint(Site())) as endpoint:
        agreed = asked_members(past, endpoint)
    assert agreed is not None
    assert agreed.digest == past.contract_digest


@pytest.fixture
def left(tmp_path: Path) -> Iterator[DiskVotes]:
    """Votes of a life that is not in the last commit there: the others went on without it."""
    votes = DiskVotes(tmp_path, lambda _: None, DiskUse())
    without = replace(NEXT, view=(Member("b", 8, "b:1"),), voters=(Voter("b", 1, 0),))
    assert save(votes, 1, VoteRecord(without.digest), None, without)
    yield votes
    votes.stop()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[DiskVotes]:
    """Votes of a life that is in the last commit there."""
    votes = DiskVotes(tmp_path, lambda _: None, DiskUse())
    stand(votes)
    yield votes
    votes.stop()


@pytest.mark.parametrize("named", [False, True])
def test_who_had_left_founds_the_run_anew_by_a_persons_word_alone(
    left: DiskVotes, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leave in good order and are started again: each of them would found a lineage."""
    monkeypatch.setattr(runtime, "JOIN_PATIENCE_S", 0.0)
    past = PastRun(tmp_path, 0, 0.0, contract().digest, 0, ("127.0.0.1:1",))
    with closing(Endpoint(Site())) as endpoint:
        if named:
            assert asked_members(past, endpoint, named=True) is None
            return
        with pytest.raises(UnreachableError, match="went on without this peer") as raised:
            asked_members(past, endpoint)
    assert f"--resume {tmp_path}" in raised.value.fix


def test_a_voter_goes_on_without_an_answer_of_its_own_run(kept: DiskVotes, tmp_path: Path) -> None:
    """Two that ask each other for the run would both wait: after a power cut of all somebody has to be first."""

    def nobody() -> Contract:
        raise UnreachableError("nobody answers", "")

    checkpoint: Any = SimpleNamespace(contract=contract())
    ours, others = f"a:1/{contract().digest}", f"a:1/{contract('other').digest}"
    assert fetched(f"{ours},{ours}", nobody, checkpoint, tmp_path) is None
    for tickets, folder in ((f"{ours},{others}", tmp_path), ("a:1", tmp_path), (ours, tmp_path / "none"), (ours, None)):
        with pytest.raises(UnreachableError):
            fetched(tickets, nobody, checkpoint, folder)
    assert fetched(others, contract, checkpoint, tmp_path) == contract()


def test_who_had_left_does_not_go_on_without_an_answer(left: DiskVotes, tmp_path: Path) -> None:
    def nobody() -> Contract:
        raise UnreachableError("nobody answers", "")

    checkpoint: Any = SimpleNamespace(contract=contract())
    with pytest.raises(UnreachableError):
        fetched(f"a:1/{contract().digest}", nobody, checkpoint, tmp_path)


@pytest.mark.parametrize("log", [True, False])
def test_a_voter_without_a_log_is_another_life(log: bool, tmp_path: Path) -> None:
    """Its votes are on no disk from then on. Those that are there bind a life that is over."""
    agreed = Contract.model_validate({**contract().model_dump(), "inner": {"steps": 1}})
    lives = []
    for site in (Site(), Site.model_validate({"storage": {"log": log}})):
        run = diloco.found(agreed, nn.Linear(4, 4), directory=tmp_path, site=site, resume=bool(lives))
        lives.append(run._leading.life.peer.exchange.me.incarnation)
        until(lambda run=run: run.step(tokens=1, loss=0.0) or run.version > 0, "a version closes")
        until((tmp_path / "checkpoints" / "v00000001").is_dir, "its checkpoint is there")
        run.close()
    assert (lives[0] == lives[1]) is log
    assert (tmp_path / VOTES).exists() is log


def test_a_member_that_is_starting_is_waited_for_though_another_run_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several addresses may be of another run by now: that says nothing of the others."""
    asked: list[str] = []

    def hello(own: Runtime, address: str) -> tuple[Welcome, GrpcLink]:
        asked.append(address)
        if asked == ["a:1", "b:1"]:
            raise StartingError("b:1 is still starting", "try again")
        trained = contract("other") if address == "a:1" else contract()
        return Welcome(trained.to_json().encode(), "lineage", 0, True, (), (), "layout", "data"), own.link

    monkeypatch.setattr(Runtime, "first_hello", hello)
    with closing(Endpoint(Site())) as endpoint:
        assert endpoint.fetch_contract(f"a:1/{contract().digest},b:1") == contract()
    assert asked == ["a:1", "b:1", "a:1", "b:1"]


def test_who_has_said_goodbye_welcomes_nobody() -> None:
    """Its process lives on while it evaluates and saves: who joined through it would wait for ever."""
    run = diloco.found(contract(), nn.Linear(4, 4))
    run.leave()
    exchange = run._leading.life.peer.exchange
    with pytest.raises(LinkRefused, match="has left the run"):
        ExchangeService(exchange).on_hello()


def test_who_ends_without_a_goodbye_leaves_no_thread_and_no_open_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on announcing this peer, through a directory that was closed, once a minute for ever."""
    raised: list[object] = []
    looks, ended = threading.Event(), threading.Event()

    def lookup(directory: NoDirectory) -> dict[str, Member]:
        looks.set()
        assert ended.wait(DEADLINE_S)
        return {}

    monkeypatch.setattr(NoDirectory, "lookup", lookup)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(threading.enumerate())  # those of other tests
    run = diloco.found(contract(), nn.Linear(4, 4))
    (presence,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "presence"]
    assert looks.wait(DEADLINE_S)
    monkeypatch.setattr(type(run._leading.life.peer.exchange), "alone", True)  # whom it finds it is to tell of
    loop = run._leading.life.peer.endpoint.runtime.loop
    run.close()
    ended.set()
    presence.join(10.0)
    assert not presence.is_alive()
    assert loop.is_closed()
    assert raised == []


def _leaves_no_file_open(place: int, folder: str | None) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    with pytest.MonkeyPatch.context() as patch:
        _has_no_directory(patch)
        for number in range(5):
            directory = Path(folder, str(number)) if folder is not None else None
            diloco.found(contract(), nn.Linear(4, 4), directory=directory).close()
            counts.append(open_files())
    fewest = min(counts)  # the first has opened what gRPC keeps; its threads close others a moment later
    until(lambda: open_files() <= fewest, f"no more than {fewest} open files, of {counts}")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing tells which files are open")
@pytest.mark.parametrize("with_folder", [False, True])
def test_a_run_that_is_closed_leaves_no_file_open(tmp_path: Path, with_folder: bool) -> None:
    """Each left three of its loop's, for as long as the process lived. With a folder it has a ledger, too. In a process
    of its own: what other tests have left running opens files, too."""
    run_ranks(_leaves_no_file_open, 1, str(tmp_path) if with_folder else None)


def test_what_runs_when_a_loop_is_closed_is_cancelled() -> None:
    own = Runtime([""], 1.0)
    endless = asyncio.run_coroutine_threadsafe(asyncio.sleep(1000.0), own.loop)
    own.close()
    assert endless.cancelled()
    assert own.loop.is_closed()


def test_who_knocks_in_vain_is_told_at_once_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "JOIN_PATIENCE_S", 0.5)
    endpoint, heard = Endpoint(Site()), list[Stamped]()
    try:
        with pytest.raises(UnreachableError, match="nobody answers"):
            fetch_contract("127.0.0.1:1", endpoint, heard.append, lambda: False)  # `stop`
        assert [type(stamped.event) for stamped in heard] == [Remark]  # once, and not for each knock
        assert "nobody answers at 127.0.0.1:1" in heard[0].event.text
        monkeypatch.setattr(runtime, "JOIN_PATIENCE_S", 60.0)
        with pytest.raises(Interrupted, match="nobody answers"):
            fetch_contract("127.0.0.1:1", endpoint, heard.append, lambda: True)
    finally:
        endpoint.close()


def test_where_another_run_is_by_now_the_next_address_is_tried() -> None:
    """As for an island that comes back to the members of its last version: ports are used again."""
    other = diloco.found(contract("other"), nn.Linear(4, 4))
    founder = diloco.found(contract(), nn.Linear(4, 4))
    endpoint = Endpoint(Site())
    try:
        digest = contract().digest
        tickets = f"{other.address.partition('/')[0]}/{digest},127.0.0.1:1,{founder.address}"
        assert endpoint.fetch_contract(tickets) == contract()
        assert endpoint.welcome is not None
        assert endpoint.welcome.members[0].peer == founder.name
        with pytest.raises(TicketError, match=f"names {digest}"):
            endpoint.fetch_contract(tickets.rpartition(",")[0])
    finally:
        endpoint.close()
        founder.close()
        other.close()


def test_addresses_of_a_directory_that_are_none_end_no_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a member's to tell."""
    monkeypatch.undo()
    endpoint, warnings = Endpoint(Site()), list[str]()
    try:
        endpoint.welcome = Welcome(b"", "lineage", 0, True, (), ("/dnsaddr/example.org",), "layout", "data")
        monkeypatch.setattr("diloco.transport.endpoint.Directory", Nowhere)
        endpoint.open_directory("run", warnings.append)
        assert "'/dnsaddr/example.org'; going on without it" in warnings[0]
    finally:
        endpoint.close()


def test_a_secret_that_is_too_short_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("diloco.transport.endpoint.Directory", lambda: made.append("directory"))
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UsageError, match="5 characters"):
        Endpoint(Site())
    assert made == []


@pytest.mark.parametrize(
    ("served", "toward", "address"),
    [
        ("127.0.0.1:7", "10.0.0.5:9", "127.0.0.1:7"),
        ("0.0.0.0:7", "127.0.0.1:9", "127.0.0.1:7"),
        ("[::]:7", "[::1]:9", "[::1]:7"),
        ("[::]:7", "127.0.0.1:9", "127.0.0.1:7"),
    ],
)
def test_a_server_for_all_addresses_is_reached_by_the_route_to_the_member(
    served: str, toward: str, address: str
) -> None:
    """An IPv4 member, too, where it listens on all of IPv6, which serves both."""
    assert reachable(served, toward) == address


def test_a_member_of_another_family_is_no_reason_to_advertise_loopback() -> None:
    assert reachable("0.0.0.0:7", "[fd00::5]:9") == reachable("0.0.0.0:7", None)
