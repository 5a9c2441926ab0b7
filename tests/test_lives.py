"""Proof that a peer is dead: its own word for its process, which was seen on this machine and is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.base.types import Member
from diloco.exchange.lives import MAX_ASKING, MAX_LISTED, STRANGERS, STRANGERS_PER_S, Lives
from diloco.protocol.messages import Reply
from diloco.protocol.streams import ProcessId, Welcome
from diloco.protocol.view import Timing
from diloco.transport import process as processes
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import serve
from diloco.transport.link import Link, LinkDown
from diloco.transport.process import process_lives, this_process
from tests.peers import KEYS
from tests.programs.forwarder import HOST, forward
from tests.test_link import Listener

HERE = this_process()
pytestmark = pytest.mark.skipif(HERE is None, reason="no /proc that names processes")
B = Member("b", 5, "127.0.0.1:1")
TIMEOUT_S = 5.0


def welcome(process: ProcessId | None, member: Member = B) -> Welcome:
    return Welcome(b"{}", "lineage", 0, True, (member,), (), "layout", "", process=process, boot=7)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    """Another process, and its name."""
    with subprocess.Popen(["sleep", "600"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        yield process, replace(HERE, pid=process.pid, started=int(stat.rpartition(")")[2].split()[19]))
        process.kill()


class Answering(Link):
    """A link on which every address answers a hello so."""

    def __init__(self, answer: Welcome | None) -> None:
        self.answer, self.asked = answer, 0

    async def hello(self, address: str, timeout_s: float) -> Welcome:
        self.asked += 1
        if self.answer is None:
            raise LinkDown(address)
        return self.answer


def asked(answer: Welcome | None, member: Member = B) -> tuple[Lives, Answering]:
    link = Answering(answer)
    lives = Lives(link, Timing(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S))
    asyncio.run(lives.ask(member, 7))
    return lives, link


# ---------------------------------------------------------------- processes


def test_a_process_lives_until_it_has_ended(child: tuple[subprocess.Popen[bytes], ProcessId]) -> None:
    process, name = child
    assert process_lives(name) is True
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process_lives(name) is True, "a stopped one goes on later"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_lives(name) is False, "a zombie does nothing more"
    process.wait()
    assert process_lives(name) is False


def test_a_pid_that_is_used_again_is_another_process() -> None:
    assert process_lives(HERE) is True
    assert process_lives(replace(HERE, started=HERE.started - 1)) is False
    assert process_lives(replace(HERE, pid=2**62)) is False, "no pid at all"


@pytest.mark.parametrize("elsewhere", ["boot", "pid_namespace", "network_namespace"])
def test_a_process_elsewhere_is_nothing_that_is_known_here(elsewhere: str) -> None:
    assert process_lives(replace(HERE, **{elsewhere: "another"})) is None
    assert process_lives(replace(HERE, pid=2**62, **{elsewhere: "another"})) is None


def test_a_hidden_process_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc with the option `hidepid` does not list processes of other users."""

    def hidden(pid: int) -> int:
        if pid != os.getpid():
            raise FileNotFoundError
        return HERE.started

    monkeypatch.setattr(processes, "_started", hidden)
    assert process_lives(replace(HERE, pid=1)) is None


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", missing)
    assert this_process() is None
    assert process_lives(HERE) is None


# ---------------------------------------------------------------- lives of peers


@pytest.mark.parametrize("address", ["127.0.0.1:1", "10.0.0.1:1", "example.org:1"])
def test_a_life_is_over_when_its_process_is_gone(
    address: str, child: tuple[subprocess.Popen[bytes], ProcessId]
) -> None:
    """Whatever its address: the far end says which machine it is of."""
    process, name = child
    member = replace(B, address=address)
    lives, link = asked(welcome(name, member), member)
    assert not lives.proven(member)
    process.kill()
    process.wait()
    assert lives.proven(member) == 7
    assert not lives.proven(replace(member, incarnation=6)), "its next life has a process of its own"
    asyncio.run(lives.ask(member, 7))
    assert link.asked == 1


def test_what_was_not_seen_alive_proves_nothing(child: tuple[subprocess.Popen[bytes], ProcessId]) -> None:
    """A release before this one; another life, or another peer, at the address; a process that nobody here sees."""
    process, name = child
    others = [replace(B, incarnation=4), replace(B, peer="c")]
    unseen = [None, replace(name, started=1), replace(name, boot="another"), replace(name, network_namespace="net:[1]")]
    answers = [*(welcome(name, other) for other in others), *map(welcome, unseen)]
    known = [asked(answer)[0] for answer in answers]
    process.kill()
    process.wait()
    assert not any(lives.proven(B) for lives in known)
    assert [lives.met(B, 7) for lives in known] == [False] * len(others) + [True] * len(unseen)


def test_a_life_that_goes_on_in_another_process_is_asked_again(
    child: tuple[subprocess.Popen[bytes], ProcessId],
) -> None:
    """The end of the process before it proves nothing of it, and that one's answer, late, nothing either."""
    process, name = child
    lives, link = asked(welcome(name))
    process.kill()
    process.wait()
    assert lives.proven(B) == 7
    assert not lives.met(B, 8)
    assert not asyncio.run(lives.ask(B, 8)), "the process before answers still"
    link.answer = replace(welcome(HERE), boot=8)
    assert asyncio.run(lives.ask(B, 8))
    assert lives.proven(B) is None


def test_a_life_that_did_not_answer_is_asked_again() -> None:
    lives, link = asked(None)
    assert not lives.met(B, 7)
    link.answer = welcome(HERE)
    asyncio.run(lives.ask(B, 7))
    assert lives.met(B, 7)
    assert not lives.proven(B)


def test_a_forwarder_that_ended_proves_nothing() -> None:
    """On one machine: its port refuses, and the process behind it, which answered the hello, lives."""

    class Founder(Listener):
        def on_hello(self) -> Welcome:
            return welcome(None, member)

    async def play() -> None:
        nonlocal member
        link = GrpcLink(rpc_s=TIMEOUT_S, keys=KEYS)
        server = await serve(Founder(), f"{HOST}:0", KEYS)
        port = int(server.address.rpartition(":")[2])
        forwarder = await asyncio.start_server(forward(lambda: asyncio.open_connection(HOST, port)), HOST, 0)
        member = replace(B, address=f"{HOST}:{forwarder.sockets[0].getsockname()[1]}")
        lives = Lives(link, Timing(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S))
        await lives.ask(member, 7)
        (answer,) = lives._answers.values()
        assert (answer.boot, answer.process) == (7, HERE)
        forwarder.close()
        await link.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*member.address.split(":"))
        assert not lives.proven(member)
        await server.stop(0)

    member = B
    asyncio.run(play())


def test_strangers_are_asked_so_often_and_members_always(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("diloco.exchange.lives.monotonic_s", lambda: now_s)
    link = Answering(None)
    lives = Lives(link, Timing(1.0, 4.0, 4.0))

    async def ask(strangers: int, stranger: bool = True) -> int:
        before = link.asked
        for number in range(strangers):
            await lives.ask(replace(B, peer=f"{now_s} {number}"), 7, stranger)
        return link.asked - before

    assert asyncio.run(ask(1000)) == STRANGERS
    assert asyncio.run(ask(1000, stranger=False)) == 1000
    now_s = 2.0
    assert asyncio.run(ask(1000)) == 2 * STRANGERS_PER_S


def test_so_many_strangers_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Answering(None)

    async def hello(address: str, timeout_s: float) -> Welcome:
        link.asked += 1
        await asyncio.sleep(0.01)
        raise LinkDown(address)

    monkeypatch.setattr(link, "hello", hello)
    lives = Lives(link, Timing(1.0, 4.0, 4.0))

    async def flood() -> None:
        await asyncio.gather(*(lives.ask(replace(B, peer=f"{number}"), 7, stranger=True) for number in range(200)))

    asyncio.run(flood())
    assert link.asked == MAX_ASKING


def test_what_the_directory_lists_is_asked_beside_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outsider lists as many addresses as it likes, where nobody may ever answer."""
    link, silent = Answering(welcome(None)), asyncio.Event()

    async def hello(address: str, timeout_s: float) -> Welcome:
        link.asked += 1
        await silent.wait()
        raise LinkDown(address)

    lives = Lives(link, Timing(1.0, 4.0, 4.0))

    async def play() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(link, "hello", hello)
            asking = [asyncio.create_task(lives.welcome_at(f"nobody:{number % 100}")) for number in range(200)]
            await asyncio.sleep(0)
        assert link.asked == MAX_LISTED
        assert await lives.welcome_at(B.address) is None
        assert await lives.ask(B, 7, stranger=True)
        silent.set()
        assert await asyncio.gather(*asking) == [None] * 200
        assert await lives.welcome_at("elsewhere:1") is None, "it says that it is at another address"
        assert await lives.welcome_at(B.address) == link.answer

    asyncio.run(play())


def test_a_stranger_that_does_not_answer_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("diloco.exchange.lives.monotonic_s", lambda: now_s)
    link, asked_s = Answering(None), []
    lives = Lives(link, Timing(1.0, 4.0, 4.0))
    for now_s in (0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 7.0, 15.0, 22.0, 23.0):
        before = link.asked
        asyncio.run(lives.ask(B, 7, stranger=True))
        asked_s += [now_s] * (link.asked - before)
    assert asked_s == [0.0, 1.0, 3.0, 7.0, 15.0, 23.0]


def test_a_refusal_counts_while_all_who_reply_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("diloco.exchange.lives.monotonic_s", lambda: now_s)
    lives = Lives(Answering(None), Timing(1.0, 4.0, 4.0))
    assert lives.refusal() is Reply.OK, "nobody has replied"
    lives.replied("b", Reply.UNREACHED)
    lives.replied("b", Reply.STALE)
    assert lives.refusal() is Reply.UNREACHED
    lives.replied("c", Reply.OK)
    assert lives.refusal() is Reply.OK, "c reaches us"
    now_s = 4.5
    lives.replied("b", Reply.UNREACHED)
    assert lives.refusal() is Reply.UNREACHED, "c has replied nothing lately"
