"""The peer directory: real hivemind nodes on loopback, killed, frozen and lied to."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.base.errors import ResourceError, UnreachableError, UsageError
from diloco.base.types import Member
from diloco.config.site import Site
from diloco.protocol.streams import Welcome
from diloco.transport import dht as presence_module
from diloco.transport.dht import TTL_S, Directory, Presence
from diloco.transport.dht_node import MAX_RECORD_BYTES, MAX_TTL_S, _DirectoryRecords, _parse_record
from diloco.transport.endpoint import Endpoint
from diloco.transport.sockets import _socket_inodes
from tests.peers import DEADLINE_S, PeerProcess, ending, run_cli, tiny_contract

NOBODY = "12D3KooWRewQaQbxfswwda6yHi83rGL497ErE691b7UYGoAmfTj5"


def member(name: str, port: int = 4000) -> Member:
    return Member(name, incarnation=7, address=f"127.0.0.1:{port}")


def becomes(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def session(leader: int) -> list[int]:
    """Processes of the session that `leader` leads, zombies left out: the directory's process and its p2pd."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, owner, *_ = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(owner) == leader and state != "Z":
            members.append(int(stat.parent.name))
    return members


def start_directory(run: str, bootstrap: Sequence[str] = (), host: str = "127.0.0.1", port: int = 0) -> Directory:
    """A directory that is open, and joined to that of `bootstrap`, if any. Raises as `open` and `join` do."""
    directory = Directory()
    try:
        directory.open(run, host, port)
        if bootstrap:
            directory.join(bootstrap, 30.0)
    except BaseException:
        directory.close()
        raise
    return directory


def leader_of(directory: Directory) -> int:
    pid = directory._process.pid
    assert pid is not None
    return pid


# ---------------------------------------------------------------- records from strangers


def test_parses_what_is_announced() -> None:
    record = json.dumps({"peer": "a", "incarnation": 7, "address": "127.0.0.1:4000", "version": 3})
    assert _parse_record("a", record.encode()) == member("a")


GOOD: dict[str, Any] = {"peer": "a", "incarnation": 7, "address": "127.0.0.1:4000", "version": 3}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"[" * MAX_RECORD_BYTES,
        b"null",
        b"[]",
        b'"a"',
        b"{}",
        17,
        None,
        *(json.dumps(GOOD | change).encode() for change in (
            {"peer": "b"},
            {"peer": ["a"]},
            {"peer": None},
            {"incarnation": True},
            {"incarnation": -1},
            {"incarnation": 2**63},
            {"incarnation": "7"},
            {"address": "127.0.0.1"},
            {"address": "127.0.0.1:4000\n"},
            {"address": "x" * 300 + ":1"},
            {"address": {"host": "x"}},
        )),
    ],
)  # fmt: skip
def test_ignores_what_is_no_record(value: object) -> None:
    assert _parse_record("a", value) is None


@pytest.mark.parametrize("name", ["", "../a", "a b", "x" * 65, "a\n", b"a", 1, None])
def test_ignores_a_record_whose_name_is_none(name: object) -> None:
    named = name.decode() if isinstance(name, bytes) else name
    assert _parse_record(name, json.dumps(GOOD | {"peer": named}).encode()) is None


def test_a_clock_that_was_far_ahead_makes_no_record_that_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    expirations: list[float] = []

    class Node:
        async def store(self, key: str, record: bytes, expires_at: float, subkey: str) -> None:
            expirations.append(expires_at)

    records = _DirectoryRecords(Node(), "run")
    for now_s in (86_400.0, 0.0, 10.0, 0.0):  # set right, and then a little back
        monkeypatch.setattr("diloco.transport.dht_node.time", SimpleNamespace(time=lambda now_s=now_s: now_s))
        asyncio.run(records.store("a", b"{}", TTL_S))
    assert expirations == pytest.approx([86_400 + TTL_S, TTL_S, 10 + TTL_S, 10 + TTL_S + 0.001], abs=1e-6)


@pytest.mark.slow
def test_outsiders_fill_a_node_with_so_many_records_and_take_none_out() -> None:
    """Any number was kept for an hour, and so was a trace of each that was replaced."""
    from hivemind.dht import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    from diloco.transport.dht_node import _RecordValidator
    from diloco.transport.dht_storage import MAX_RECORDS, RecordStorage

    validator, pack = _RecordValidator("run"), MSGPackSerializer.dumps
    storage, key, now_s = RecordStorage(validator.key), DHTID.from_bytes(validator.key), time.time()

    def stores(name: object, last_s: float, value: bytes = b"{}") -> bool:
        packed = pack(value)
        record = SimpleNamespace(key=validator.key, subkey=pack(name), value=packed, expiration_time=now_s + last_s)
        return validator.validate(record) and storage.store_subkey(key, name, packed, now_s + last_s)

    assert storage.get(key) is None
    assert stores("honest", TTL_S)
    for name in ("n" * 64, "0" * 48, "a.b_c-d"):
        assert stores(name, TTL_S)
    for name in (None, 1, b"bytes", "", "x" * 65, "a b", ("a",)):
        assert not stores(name, TTL_S)
    assert sum(stores(f"s{number}", TTL_S) for number in range(2 * MAX_RECORDS)) == MAX_RECORDS - 4
    assert not stores("honest", 0.5 * TTL_S), "it would go earlier"
    assert not stores("honest", MAX_TTL_S + 60.0)
    for number in range(4 * MAX_RECORDS):
        stores("s0", TTL_S + 0.01 * number)
    assert stores("honest", TTL_S + 1.0), "who is known finds room"
    records = storage.get(key).value
    assert len(records) == MAX_RECORDS
    assert len(records.expiration_heap) <= 2 * MAX_RECORDS + 1
    read = MSGPackSerializer.loads(pack(records))
    assert type(read) is DictionaryDHTValue
    assert dict(read.items()) == dict(records.items())


def test_importing_it_is_cheap() -> None:
    code = "import sys, diloco.transport.dht; assert not {'hivemind', 'torch', 'grpc'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)


# ---------------------------------------------------------------- starting


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["", "hello", "127.0.0.1:4000", "/ip4/127.0.0.1/tcp/1", f"/ip4/::1,/tcp/1/p2p/{NOBODY}"]
)
def test_refuses_an_address_that_makes_no_sense(address: str) -> None:
    with pytest.raises(UsageError, match="not a directory address"):
        start_directory("run", [address])


def test_says_that_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceError, match=f"127.0.0.1 port {port}"):
            start_directory("run", port=port)


def test_says_that_a_host_is_not_of_this_machine() -> None:
    with pytest.raises(ResourceError, match=r"192\.0\.2\.77"):
        start_directory("run", host="192.0.2.77")


# ---------------------------------------------------------------- finding each other


@pytest.fixture(scope="module")
def three() -> Iterator[list[Directory]]:
    """Each joined through the one before, so the third never heard of the first."""
    directories: list[Directory] = []
    try:
        for _ in range(3):
            directories.append(start_directory("run", directories[-1].addresses if directories else ()))
        yield directories
    finally:
        for directory in directories:
            directory.close()


@pytest.mark.slow
def test_all_find_all_and_a_leaver_is_gone(three: list[Directory]) -> None:
    members = {name: member(name, port) for name, port in (("a", 1), ("b", 2), ("c", 3))}
    for directory, announced in zip(three, members.values(), strict=True):
        assert directory.announce(announced, version=0)
    assert [directory.lookup() for directory in three] == [members] * 3
    assert three[1].withdraw("b")
    assert [set(directory.lookup()) for directory in three] == [{"a", "c"}] * 3
    assert three[1].announce(members["b"], version=1)
    assert set(three[2].lookup()) == {"a", "b", "c"}


@pytest.mark.slow
def test_the_last_word_counts(three: list[Directory]) -> None:
    assert three[0].announce(member("moves", 1), version=0)
    assert three[0].announce(member("moves", 2), version=1)
    assert [directory.lookup()["moves"].address for directory in three] == ["127.0.0.1:2"] * 3


@pytest.mark.slow
def test_a_record_expires(three: list[Directory]) -> None:
    assert three[0].announce(member("brief"), version=0, ttl_s=1.5)
    assert "brief" in three[2].lookup()
    assert becomes(lambda: not any("brief" in directory.lookup() for directory in three))


@pytest.mark.slow
def test_listens_on_loopback_only(three: list[Directory]) -> None:
    inodes = _socket_inodes(iter(session(leader_of(three[0]))))
    tables = {name: Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp", "udp6")}
    rows = {name: [row.split() for row in table if int(row.split()[9]) in inodes] for name, table in tables.items()}
    assert rows["tcp"]
    assert all(row[1].startswith("0100007F:") for row in rows["tcp"])  # 127.0.0.1
    assert not rows["tcp6"] + rows["udp"] + rows["udp6"]


@pytest.mark.slow
def test_others_go_on_when_the_first_is_killed() -> None:
    first = start_directory("run")
    second = start_directory("run", first.addresses)
    third = start_directory("run", second.addresses)
    with closing(first), closing(second), closing(third):
        for name, directory in (("a", first), ("b", second), ("c", third)):
            assert directory.announce(member(name), version=0)
        os.killpg(leader_of(first), signal.SIGKILL)
        assert becomes(lambda: not session(leader_of(first)))
        assert {"b", "c"} <= set(second.lookup())
        assert {"b", "c"} <= set(third.lookup())
        with closing(start_directory("run", [*first.addresses, *third.addresses])) as late:
            assert late.announce(member("d"), version=1)
            assert {"b", "c", "d"} <= set(late.lookup())
            assert "d" in second.lookup()
        assert first.lookup(timeout_s=1.0) == {}
        assert not first.announce(member("a"), version=1, timeout_s=1.0)


@pytest.mark.slow
def test_says_that_nobody_answers() -> None:
    with pytest.raises(UnreachableError, match="/tcp/1/"):
        start_directory("run", [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"])


@pytest.mark.slow
def test_gives_up_on_a_silent_address_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody ever answers
        silent = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{NOBODY}"
        with closing(start_directory("run")) as directory:
            assert directory.announce(member("a"), version=0, timeout_s=60.0)
            started = time.monotonic()
            with pytest.raises(UnreachableError):
                directory.join([silent], timeout_s=2.0)
            assert time.monotonic() - started < 4.0
            assert set(directory.lookup(timeout_s=60.0)) == {"a"}


# ---------------------------------------------------------------- hostile and broken surroundings

SOON, TOO_LATE = 60.0, 2 * MAX_TTL_S
LIES: dict[str, list[tuple[str | None, object, float]]] = {
    "values": [
        ("number", 5, SOON),
        ("list", [[[]]], SOON),
        ("text", "not bytes", SOON),
        ("large", bytes(MAX_RECORD_BYTES), SOON),
        ("other", json.dumps(GOOD | {"peer": "b"}).encode(), SOON),
    ],
    "a record that outlasts the true one": [
        ("b", json.dumps(GOOD | {"peer": "b", "address": "6.6.6.6:6"}).encode(), TOO_LATE)
    ],
    "a plain value that bars records": [(None, b"plain", SOON), (None, b"plain", TOO_LATE)],
}


async def lie(
    bootstrap: tuple[str, ...], lies: list[tuple[str | None, object, float]], then: Callable[[], None]
) -> None:
    """Join as a node without our checks, store `lies` under the run's key, here and elsewhere, and run `then`."""
    from hivemind.dht import DHTID, DHTNode

    node = await DHTNode.create(initial_peers=list(bootstrap), use_relay=False, auto_nat=False, nat_port_map=False)
    try:
        for subkey, value, last_s in lies:
            await node.store("diloco/run/peers", value, time.time() + last_s, subkey=subkey)
        key = DHTID.generate("diloco/run/peers")
        for peer in list(node.protocol.routing_table.uid_to_peer_id.values()):
            await node.protocol.call_store(peer, [key], [b"\xc1"], [time.time() + SOON], ["no msgpack"])
        await asyncio.to_thread(then)
    finally:
        await node.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIES)
def test_lies_are_ignored(three: list[Directory], kind: str) -> None:
    names = set(three[0].lookup())

    def others_find_each_other() -> None:
        assert three[1].announce(member("b", 2), version=1)
        for directory in three:
            found = directory.lookup()
            assert set(found) == names | {"b"}
            assert found["b"] == member("b", 2)

    asyncio.run(lie(three[0].addresses, LIES[kind], others_find_each_other))
    others_find_each_other()


@pytest.mark.slow
def test_a_frozen_node_costs_no_more_than_the_timeout() -> None:
    directory = start_directory("run")
    os.killpg(leader_of(directory), signal.SIGSTOP)
    started = time.monotonic()
    assert not directory.announce(member("a"), version=0, timeout_s=0.2)
    assert not any(directory.lookup(timeout_s=0.001) for _ in range(500))  # more than a pipe holds
    directory.close(timeout_s=0.2)
    assert time.monotonic() - started < 10.0
    assert not session(leader_of(directory))


@pytest.mark.slow
def test_a_late_answer_is_not_taken_for_the_next() -> None:
    with closing(start_directory("run")) as directory:
        assert directory.announce(member("a"), version=0)
        os.kill(leader_of(directory), signal.SIGSTOP)
        assert not directory.announce(member("b"), version=0, timeout_s=0.1)
        os.kill(leader_of(directory), signal.SIGCONT)
        assert set(directory.lookup()) <= {"a", "b"}


@pytest.mark.slow
def test_close_leaves_nothing_behind() -> None:
    directory = start_directory("run")
    assert len(session(leader_of(directory))) == 2
    directory.close()
    assert becomes(lambda: not session(leader_of(directory)))
    directory.close()


@pytest.mark.slow
def test_closes_before_it_was_opened() -> None:
    directory = Directory()
    directory.close()
    assert becomes(lambda: not session(leader_of(directory)))


@pytest.mark.slow
def test_outlives_the_thread_that_started_it() -> None:
    started: list[Directory] = []
    thread = threading.Thread(target=lambda: started.append(start_directory("run")))
    thread.start()
    thread.join()
    with closing(started[0]) as directory:  # the kernel's death signal comes per thread, not per process
        assert directory.announce(member("a"), version=0)
        assert set(directory.lookup()) == {"a"}


OWNER = """
import os, signal, time
from diloco.transport.dht import Directory
from diloco.base.types import Member
from tests.peers import DEADLINE_S, PeerProcess, ending, run_cli, tiny_contract
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
directory = Directory()
directory.open("run")
if os.fork() == 0:  # as a data loader's worker: holds our end of the directory's pipe open
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    time.sleep(60)
    os._exit(0)
try:
    print(directory._process.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    deadline_s = time.monotonic() + 30.0  # an answer takes seconds where every core is busy
    while not (directory.announce(Member("a", 1, "127.0.0.1:1"), version=0) and directory.withdraw("a")):
        assert time.monotonic() < deadline_s
    directory.close()
    print("left", flush=True)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that owns a directory, in a process group of its own, and the pid of the directory's process."""
    command = [sys.executable, "-c", OWNER]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0) as process,
    ):
        assert process.stdout is not None
        node = int(process.stdout.readline())
        yield process, node
        os.killpg(process.pid, signal.SIGKILL)
    assert becomes(lambda: not session(node))


@pytest.mark.slow
@pytest.mark.parametrize("without_p2pd", [False, True])
def test_ends_with_an_owner_that_is_killed(
    owner: tuple[subprocess.Popen[str], int], tmp_path: Path, without_p2pd: bool
) -> None:
    """Whoever has the terminal now is told nothing: not by hivemind either, which finds its p2pd gone."""
    process, node = owner
    (p2pd,) = set(session(node)) - {node}
    if without_p2pd:
        os.kill(p2pd, signal.SIGKILL)
        assert becomes(lambda: session(node) == [node])
    process.kill()
    assert becomes(lambda: not session(node))
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.slow
def test_works_on_after_ctrl_c(owner: tuple[subprocess.Popen[str], int]) -> None:
    """A terminal interrupts the process group of the peer, where neither the node nor its p2pd may be."""
    process, node = owner
    assert len(session(node)) == 2
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "left\n"
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow(queued=False)
def test_a_joiner_goes_on_without_the_directory_when_nobody_answers_there():
    dead = start_directory("run")
    addresses = dead.addresses
    dead.close()
    endpoint = Endpoint(Site())
    warnings: list[str] = []
    try:
        endpoint.welcome = Welcome(b"", "lineage", 0, True, (), addresses, "layout", "data")
        endpoint.open_directory("run", warnings.append)
        assert "going on without it" in warnings[0]
        assert becomes(lambda: endpoint.directory.announce(member("a"), version=0))
        assert endpoint.directory.addresses
        assert endpoint.directory.addresses != addresses
    finally:
        endpoint.close()


@pytest.mark.slow(queued=False)
def test_a_directory_that_is_slow_to_start_ends_nobody_and_is_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where many peers start at once."""
    endpoint = Endpoint(Site())
    warnings: list[str] = []
    receive = Directory._receive
    try:
        os.killpg(leader_of(endpoint.directory), signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "_receive", lambda own, _: receive(own, time.monotonic() + 0.2))
            endpoint.open_directory("run", warnings.append)
        assert "going on without it" in warnings[0]
        assert endpoint.directory.addresses == ()
        os.killpg(leader_of(endpoint.directory), signal.SIGCONT)
        assert becomes(lambda: endpoint.directory.announce(member("a"), version=0))
        assert endpoint.directory.addresses
        exchange = Exchanging()
        presence = Presence(endpoint.directory, exchange, endpoint.runtime.answer_of)
        assert becomes(lambda: exchange.directory == endpoint.directory.addresses)
        presence.end()
    finally:
        endpoint.close()


class Exchanging:
    """An exchange as the directory sees it: the member that is announced."""

    version, alone = 1, False
    directory: tuple[str, ...] = ()

    def __init__(self, name: str = "a", *others: Member) -> None:
        self.me, self.others = member(name), others


# ---------------------------------------------------------------- what keeps it whole


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers look after their directory all the time."""
    monkeypatch.setattr(presence_module, "LOOK_AGAIN_S", 0.2)
    monkeypatch.setattr(presence_module, "ANNOUNCE_EVERY_S", 0.2)
    monkeypatch.setattr(presence_module, "MAX_PAUSE_S", 1.0)


class Kept:
    """A peer's directory, with what looks after it. `told`: the addresses that the other one, when asked, tells of."""

    def __init__(self, directory: Directory, name: str, other: str, told: Callable[[], Sequence[str]]) -> None:
        self.directory = directory
        self.exchange = Exchanging(name, member(other))
        self.presence = Presence(
            directory,
            self.exchange,
            lambda _: Welcome(b"", "lineage", 0, True, (member(other),), tuple(told()), "layout", "data"),
        )

    def finds(self, *names: str) -> bool:
        return becomes(lambda: set(self.directory.lookup()) == set(names))

    def close(self) -> None:
        self.presence.stop()
        self.directory.close()


@pytest.mark.slow(queued=False)
@pytest.mark.usefixtures("impatient")
def test_a_directory_that_cannot_be_started_again_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is out of file descriptors or memory for a moment."""
    with closing(Kept(start_directory("run"), "a", "b", lambda: ())) as a:
        assert becomes(lambda: a.finds("a"))

        def short() -> bool:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(a.directory, "revive", short)
            assert becomes(lambda: "Too many open files" in caplog.text)
        assert a.presence._thread.is_alive()
        assert a.finds("a")


@pytest.mark.slow(queued=False)
@pytest.mark.usefixtures("impatient")
def test_who_finds_nobody_in_the_directory_joins_it_later(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = [f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"]
    with (
        closing(Kept(start_directory("run"), "a", "b", lambda: ())) as a,
        closing(Kept(start_directory("run"), "b", "a", lambda: told)) as b,
    ):
        assert becomes(lambda: "/tcp/1/" in caplog.text)
        assert set(b.directory.lookup()) <= {"b"}
        told[:] = a.directory.addresses
        assert b.finds("a", "b")
        assert a.finds("a", "b")
        with closing(start_directory("run", b.directory.addresses)) as late:  # who asks the joiner finds all
            assert becomes(lambda: set(late.lookup()) == {"a", "b"})
    said = [record for record in caplog.records if "/tcp/1/" in record.message]
    assert len(said) == 1


@pytest.mark.slow(queued=False)
@pytest.mark.usefixtures("impatient")
def test_a_directory_whose_p2pd_dies_comes_back(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its node took records, and found its own, as if all were well."""
    at: dict[str, Sequence[str]] = {"a": (), "b": ()}
    with (
        closing(Kept(start_directory("run"), "a", "b", lambda: at["b"])) as a,
        closing(Kept(start_directory("run", a.directory.addresses), "b", "a", lambda: at["a"])) as b,
    ):
        at.update(a=a.directory.addresses, b=b.directory.addresses)
        assert a.finds("a", "b")
        node, before = leader_of(a.directory), a.directory.addresses
        (p2pd,) = set(session(node)) - {node}
        os.kill(p2pd, signal.SIGKILL)
        assert becomes(lambda: leader_of(a.directory) != node)
        assert becomes(lambda: a.exchange.directory not in ((), before))
        assert becomes(lambda: not session(node))
        at.update(a=a.exchange.directory)
        assert a.finds("a", "b")
        assert b.finds("a", "b")
        with closing(start_directory("run", a.exchange.directory)) as late:
            assert becomes(lambda: set(late.lookup()) == {"a", "b"})
    assert caplog.text.count("starting it again") == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_closed_directory_is_not_revived() -> None:
    directory = start_directory("run")
    directory.close()
    assert not directory.revive()
    assert not session(leader_of(directory))

    def seek(self, listed: Sequence[Member]) -> None:
        """Nobody looks."""


def test_a_directory_that_dies_before_it_started_is_told_of() -> None:
    directory = Directory()
    os.killpg(leader_of(directory), signal.SIGKILL)
    with closing(directory), pytest.raises(ResourceError, match="did not start"):
        directory.open("run")


def directory_of(peer: PeerProcess) -> int:
    """The pid of a peer's directory process."""
    pid = json.loads((peer.directory / "peer.json").read_text())["pid"]
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    names = {int(child): Path(f"/proc/{child}/comm").read_text() for some in children for child in some}
    return next(child for child, name in names.items() if name == "directory\n")


@pytest.mark.slow
def test_peers_find_the_run_through_who_joined_while_its_directory_was_silent(tmp_path: Path) -> None:
    settings = ("--set", "device.step_s=0.05", "--set", "storage.checkpoint_every=0")
    with ending([]) as peers:
        peers.append(PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)), *settings))
        ticket = peers[0].ticket()
        silent = directory_of(peers[0])
        os.killpg(silent, signal.SIGSTOP)
        try:
            peers.append(PeerProcess("b", tmp_path, "--join", ticket, *settings))
            door = peers[1].ticket()
        finally:
            os.killpg(silent, signal.SIGCONT)
        assert any("trying again later" in event["text"] for event in peers[1].events("warning"))
        addresses = json.loads(run_cli("status", door, "--json").stdout)["directory"]
        with closing(start_directory("tiny", addresses)) as late:
            assert becomes(lambda: set(late.lookup()) == {"a", "b"})
