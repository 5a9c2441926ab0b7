"""The library around somebody else's loop: the example program, run as it is written."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diloco
from diloco.base.errors import ConfigError, IncompatibleError, ResourceError, TicketError, UnreachableError, UsageError
from diloco.base.life import done
from diloco.config.contract import Contract
from diloco.config.site import PeerSection, Site
from diloco.exchange.service import ExchangeService
from diloco.island import Island
from diloco.observe.event_log import read_lines
from diloco.observe.events import VersionClosed
from diloco.protocol.draft import Drafter
from diloco.run import run as run_module
from diloco.run.blocking import block
from diloco.run.door import Entrance, OwnLoop, Parts, open_run
from diloco.run.run import Run
from diloco.transport.endpoint import Endpoint
from tests.local import ELEMENTS, LocalEndpoint, LocalWorld
from tests.peers import until

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_loop.py"


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-u", str(EXAMPLE), *arguments], stdout=output, stderr=output)


@pytest.mark.slow
def test_the_example_trains_one_model_in_two_processes(tmp_path: Path) -> None:
    logs = [tmp_path / "founder.txt", tmp_path / "joiner.txt"]
    founder = start(logs[0])
    processes = [founder]
    try:
        line = until(lambda: re.search(r"own_loop.py (127\S+)", logs[0].read_text()), "the founder prints its address")
        processes.append(start(logs[1], line.group(1)))
        assert [process.wait(90) for process in processes] == [0, 0], [log.read_text() for log in logs]
        ends = [re.search(r"version (\d+), loss (\S+), state (\S+)", log.read_text()) for log in logs]
        assert all(ends)
        assert ends[0].group(1, 3) == ends[1].group(1, 3)
        assert all(float(end.group(2)) < 0.02 for end in ends)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_alone_and_left_in_good_order() -> None:
    """One peer, outer SGD at rate 1, fp32: plain training, to rounding."""
    tree = {
        "run": {"name": "alone", "total_tokens": 10**6},
        "model": {"kind": "external"},
        "inner": {"steps": 5},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "codec": {"name": "fp32"},
    }
    torch.manual_seed(0)
    model, twin = (torch.nn.Linear(8, 8) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batches = torch.randn(12, 16, 8)
    with diloco.found(Contract.model_validate(tree), model) as run:
        assert run.peers == (run.name,)
        outcomes = []
        for batch in batches:
            for each in (model, twin):
                each.zero_grad()
                (each(batch) - 1.0).square().mean().backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.sub_(parameter.grad * 0.1)
            outcomes.append(run.step(tokens=16))
        assert [index for index, outcome in enumerate(outcomes) if outcome] == [4, 9]
        assert run.version == 2
        assert run.tokens == 160
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, plain)
    assert run.version == 3  # what was trained since the last sync was contributed on leaving


@pytest.mark.slow
def test_a_loop_beside_a_faster_peer_syncs_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "run": {"name": "sized", "total_tokens": 10**6},
        "model": {"kind": "external"},
        "inner": {"steps": 32, "sized_by": "speed"},
    }
    with diloco.found(Contract.model_validate(tree), torch.nn.Linear(8, 8)) as run:
        monkeypatch.setattr(
            peer_of(run).exchange, "speeds", lambda: done((1e12, 0.0))
        )  # another peer's pace, tokens per second
        closed = [step for step in range(1, 41) if run.step(tokens=16)]
        assert peer_of(run).progress.pace > 0
    assert closed == [32, 34, 36, 38, 40]  # a whole round before anything is known, then H / 16


@pytest.mark.slow
def test_how_long_a_step_takes_does_not_depend_on_the_tokens_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one second by the clock, exchanges of 10: half of a round is 10 steps, whatever a caller says of tokens.

    And `sync.overlap` says to the others how long more inner steps are done: one second.
    """
    tree = {
        "run": {"name": "paced", "total_tokens": 10**12},
        "membership": {"policy": "async", "grace_s": 0.0},
        "model": {"kind": "external"},
        "inner": {"steps": 4, "comm_share": 0.5, "most_steps": 100},
        "sync": {"overlap": 1},
    }
    clock = [0.0]
    monkeypatch.setattr(run_module, "monotonic_s", lambda: clock[0])

    def step(run: Run) -> bool:
        clock[0] += 1.0
        return bool(run.step(tokens=1_000_000))

    with diloco.found(Contract.model_validate(tree), torch.nn.Linear(8, 8)) as run:
        exchange = peer_of(run).exchange
        monkeypatch.setattr(exchange, "speeds", lambda: done((0.0, 11.0)))
        closed = [count for count in range(1, 28) if step(run)]
        assert exchange.overlap_tokens / peer_of(run).progress.pace == pytest.approx(1.0)
    assert closed == [5, 15, 25]


@pytest.mark.slow
def test_two_loops_gossip_and_end_alike() -> None:
    tree = {
        "run": {"name": "pairs", "total_tokens": 2000},
        "membership": {"policy": "gossip", "start_peers": 2},
        "model": {"kind": "external"},
        "inner": {"steps": 3},
        "outer": {"momentum": 0.5},
        "codec": {"name": "fp32"},
    }

    met: list[int] = []

    def train(run: diloco.Run, model: torch.nn.Linear, target: float) -> None:
        most = 0
        with run:
            while not run.done:
                with torch.no_grad():
                    model.weight.add_((target - model.weight) * 0.2)
                run.step(tokens=10)
                time.sleep(0.002)
                most = max(most, len(run.peers))  # at the end the other may have left
        met.append(most)

    models = [torch.nn.Linear(8, 8) for _ in range(2)]
    founder = diloco.found(Contract.model_validate(tree), models[0])
    joiner = diloco.join(founder.address, models[1])
    threads = [
        threading.Thread(target=train, args=(run, model, target))
        for run, model, target in zip((founder, joiner), models, (1.0, 3.0), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert met == [2, 2]
    assert min(founder.version, joiner.version) >= 3
    assert founder.tokens >= 2000
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0.01, atol=0.01)
    assert 1.2 < models[0].weight.mean().item() < 2.8  # between what the two pull to


@pytest.mark.slow
def test_mistakes_are_named() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="contract not found"):
        diloco.found("no/such.toml", model)
    with pytest.raises(UnreachableError, match="nobody answers"):
        diloco.join("127.0.0.1:1", model)
    tree = {"run": {"name": "shapes", "total_tokens": 1000}, "model": {"kind": "external"}}
    founder = diloco.found(Contract.model_validate(tree), model)
    try:
        with pytest.raises(TicketError, match=f"the address given names {64 * '0'}"):
            diloco.join(f"127.0.0.1:1,{founder.address.partition('/')[0]}/{64 * '0'}", model)
        with pytest.raises(IncompatibleError, match="parameters"):  # through the second address: nobody is at the first
            diloco.join(f"127.0.0.1:1, {founder.address}", torch.nn.Linear(4, 5))
    finally:
        founder.close()


def test_what_fails_before_it_is_a_run_frees_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates: list[Endpoint] = []

    def endpoint(site: Site, lanes: int, joins: bool, private: bool) -> Endpoint:
        gates.append(Endpoint(site, lanes, joins, private))
        return gates[-1]

    monkeypatch.setattr("diloco.run.door.Endpoint", endpoint)
    model = torch.nn.Linear(4, 4)
    tree = {"run": {"name": "freed", "total_tokens": 1000}, "model": {"kind": "external"}}
    nobody = {"codec": {"groups": ({"match": ("nothing*",), "name": "bf16"},)}}
    with pytest.raises(ConfigError, match="is empty"):
        diloco.found({**tree, **nobody}, model)
    (tmp_path / "file").touch()
    no_folder = Site.model_validate({"storage": {"directory": str(tmp_path / "file")}})
    with pytest.raises(ResourceError):
        diloco.found(Contract.model_validate(tree), model, site=no_folder)
    assert [endpoint.runtime.loop.is_running() for endpoint in gates] == [False, False]
    assert all(endpoint.directory._process.poll() is not None for endpoint in gates)


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("policy", ["sync", "gossip"])
def test_tokens_are_counted_whatever_holds_them(policy: str) -> None:
    """With a mask's sum in it no commit could be made, and the exchange failed."""
    tree = {
        "run": {"name": "counts", "total_tokens": 10**6},
        "membership": {"policy": policy},
        "model": {"kind": "external"},
        "inner": {"steps": 3},
        "outer": {"momentum": 0.5},
        "codec": {"name": "fp32"},
    }
    with diloco.found(Contract.model_validate(tree), torch.nn.Linear(4, 4)) as run:
        for tokens in (1, torch.ones(2, dtype=torch.bool).sum(), np.int64(3)):
            run.step(tokens)
        assert run.tokens == 6
        for tokens in (-1, 2.5, torch.tensor(2.5)):
            with pytest.raises(UsageError, match="not a count of tokens"):
                run.step(tokens)  # type: ignore[arg-type]


# ---------------------------------------------------------------- among others


def life_of(run: Run) -> Any:
    assert run._leading is not None
    return run._leading.life


def peer_of(run: Run) -> Any:
    return life_of(run).peer


class Own:
    """A loop with H = 4 and an overlap of 2 around a model of its own, among three peers, on a network in memory.

    Two would keep a lost third for its vote.
    """

    def __init__(self, world: LocalWorld) -> None:
        self.world = world
        self.model = torch.nn.Linear(1, ELEMENTS, bias=False)
        endpoint: Any = LocalEndpoint(world, "own:1", world.ask(ExchangeService(world.peers[0].peer.exchange).on_hello))
        site = world.site.model_copy(update={"peer": PeerSection(name="p9")})
        island = Island(0, 1, torch.device("cpu"))
        loop = OwnLoop(self.model, island, {})
        entrance = Entrance(world.contract, endpoint, "p9", None)
        self.run = block(open_run(lambda: entrance, site, island, lambda contract: Parts(loop.weights, loop)))
        self.peer = peer_of(self.run)
        self.others_round()
        self.enter()
        self.others_round()  # who was let in since the version before is not waited for
        self.enter()

    def others_round(self) -> None:
        self.world.rounds(self.world.peers)

    def enter(self) -> None:
        while not self.run.wait(2.0):  # it was not at the door when that version closed
            self.others_round()

    def steps(self, count: int) -> Any:
        """Returns what the last one does."""
        for _ in range(count):
            with torch.no_grad():
                self.model.weight.add_(0.01)
            outcome = self.run.step(10)
        return outcome

    def counted(self) -> int:
        """Tokens of ours in all versions."""
        commits = self.world.peers[0].commits
        return sum(entry.tokens for commit in commits for entry in commit.counted if entry.peer == self.run.name)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    # Of a run with this name one of the others coordinates the first versions.
    world = LocalWorld(3, run={"name": "own-1"}, inner={"steps": 4}, sync={"overlap": 2})
    made = Own(world)

    def copied(sources: list[str]) -> None:
        raise AssertionError("it was to go on without a copy")

    monkeypatch.setattr(made.peer, "copy_state", copied)
    yield made
    made.run.close()
    world.close()


@contextmanager
def nobody_reaches(name: str) -> Iterator[None]:
    """Its connections are broken whenever a version closes: it may be counted, and is left out of the view."""
    version_commit: Callable[..., Any] = Drafter.version_commit

    def without(drafter: Drafter, *rest: Any) -> Any:
        assert drafter.membership.me.peer != name
        roster = drafter.membership.roster
        for member in [entry.member for entry in roster if entry.member.peer == name]:
            roster.unreachable(member)
        return version_commit(drafter, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "version_commit", without)
        yield


@pytest.mark.slow(queued=False)
def test_a_round_is_finished_before_later_versions_are_looked_at(own: Own) -> None:
    """It was counted by a version whose view leaves it out, as does the next, and both closed before it looked."""
    own.steps(4)
    begun_at = own.run.version
    with nobody_reaches(own.run.name):
        own.others_round()
        own.others_round()
    until(lambda: own.peer.exchange.version == begun_at + 2, "it hears of both")
    versions = [event.version for event in own.steps(2) if isinstance(event, VersionClosed)]
    assert versions[0] == begun_at + 1
    own.enter()
    assert own.peer.journal.totals.committed == own.counted() == 40
    assert own.peer.journal.totals.uncommitted == own.peer.line.trained.tokens == 20


@pytest.mark.slow(queued=False)
def test_whoever_leaves_does_not_wait_to_be_let_in_once_more(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last contribution was counted by a version whose view leaves it out; the others then are quiet."""
    own.steps(5)
    life = life_of(own.run)
    exchanged = life.exchanged

    def while_others_round() -> Any:
        own.others_round()
        return (yield from exchanged())

    monkeypatch.setattr(life, "exchanged", while_others_round)
    with nobody_reaches(own.run.name):
        leaving = threading.Thread(target=own.run.leave, daemon=True)
        leaving.start()
        leaving.join(10.0)
    assert not leaving.is_alive()
    totals = own.peer.journal.totals
    assert (totals.committed, totals.discarded, totals.uncommitted) == (own.counted(), 10, 0) == (40, 10, 0)


@pytest.mark.slow(queued=False)
def test_whoever_leaves_outside_the_view_is_told_what_was_counted(own: Own) -> None:
    own.steps(5)
    with nobody_reaches(own.run.name):
        own.others_round()
    until(lambda: not own.peer.exchange.in_view, "it hears of the version")
    own.run.leave()
    totals = own.peer.journal.totals
    assert (totals.committed, totals.discarded) == (own.counted(), 10) == (40, 10)


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("when", ["it enters", "it leaves"])
def test_a_ctrl_c_leaves_no_peer_behind(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enters = when == "it enters"
    tree = {"run": {"name": "waits", "total_tokens": 10}, "membership": {"start_peers": 2 if enters else 1}}
    before = set(threading.enumerate())  # those of other tests
    run = diloco.found(Contract.model_validate(tree | {"model": {"kind": "external"}}), torch.nn.Linear(8, 8))
    if enters:
        monkeypatch.setattr(peer_of(run), "catch_up", interrupted)
    else:
        monkeypatch.setattr(peer_of(run).exchange, "settled", interrupted)
    with pytest.raises(KeyboardInterrupt), run:
        pass
    assert not any(thread.name == "exchange" for thread in set(threading.enumerate()) - before)
    with socket.socket() as door:
        assert door.connect_ex(("127.0.0.1", int(run.address.partition("/")[0].rpartition(":")[2])))


@pytest.mark.slow(queued=False)
def test_a_run_whose_life_an_error_ended_says_so_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever catches it, as a Ctrl-C amid a merge, would train on alone, and leave without a word."""
    tree = {"run": {"name": "broken", "total_tokens": 10**6}, "model": {"kind": "external"}, "inner": {"steps": 1}}
    before = set(threading.enumerate())  # those of other tests
    run = diloco.found(Contract.model_validate(tree), torch.nn.Linear(8, 8))
    run.step(tokens=10)
    monkeypatch.setattr(peer_of(run).exchange, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step(tokens=10)
    for call in (lambda: run.step(tokens=10), run.sync, run.leave):
        with pytest.raises(UsageError, match="KeyboardInterrupt ended this peer's life"):
            call()
    assert not any(thread.name == "exchange" for thread in set(threading.enumerate()) - before)
    run.leave()


@pytest.mark.slow(queued=False)
def test_a_loop_that_goes_on_when_the_run_is_over_and_leaves_twice(tmp_path: Path) -> None:
    tree = {"run": {"name": "over", "total_tokens": 20}, "model": {"kind": "external"}, "inner": {"steps": 1}}
    site = Site.model_validate({"storage": {"directory": str(tmp_path)}})
    with diloco.found(Contract.model_validate(tree), torch.nn.Linear(8, 8), site=site) as run:
        while not run.done:
            run.step(tokens=10)
        assert [run.step(tokens=10) for _ in range(3)] == [()] * 3
        run.leave()
    assert run.version == 2
    assert run.steps == 2  # what comes after the end is not trained for anybody
    events = read_lines(tmp_path / "events.jsonl")
    assert [event["version"] for event in events if event["kind"] == "version"] == [1, 2]
