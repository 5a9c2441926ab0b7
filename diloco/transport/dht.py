"""The run's peer directory: who is in the run and where, kept in a hivemind DHT by the peers themselves.

Any member's directory address is enough to find the others, whoever started the run and whoever is gone. Nothing
about correctness rests on it: records are hints from strangers, not authenticated, and whoever is reached at an
address has to prove what it is.

The node runs in a process of its own, with hivemind's p2pd (libp2p) as its child. It is started afresh and not forked:
a child forked from a process with gRPC's threads hangs as soon as hivemind touches gRPC.

    peer process --pipe--> directory process (hivemind.dht.DHTNode) --UNIX socket--> p2pd --TCP--> other peers' p2pd

Both sit in a session of their own, so that Ctrl-C reaches only the peer, which leaves gracefully while its directory
still works; both end when the peer does, however it ends, and the node when its p2pd does. Only what `open` and `join`
are told is listened on and dialled: no relay, no NAT probing, no port mapping, no multicast, no public bootstrap nodes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from diloco.base.errors import ResourceError, UnreachableError, UsageError
from diloco.base.types import Member

logger = logging.getLogger(__name__)

ANNOUNCE_EVERY_S = 60.0
"""Seconds between announcements and lookups of a peer: 0.2 kB/s sent per peer among four."""
TTL_S = 300.0
"""Lifetime of a record in seconds. Ends by the wall clock: machines' clocks may differ by TTL_S - ANNOUNCE_EVERY_S."""
MAX_TTL_S = 3600.0
"""A node takes no record that lasts longer: the longest lasting wins, so a stranger's could stay for ever."""
MAX_RECORD_BYTES = 1024
MAX_MEMBERS = 256
"""A look-up returns no more: bounds what strangers can make us hold, and 256 records fit in a pipe."""

_SHUTDOWN_S = 2.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[\w.:-]+/tcp/\d{1,5}/p2p/\w+")
_PROGRAM = "from diloco.transport.dht import run_node; run_node()"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as PeerSection.name
_HOST_AND_PORT = re.compile(r"[\w.:\[\]-]{1,255}:\d{1,5}")


class Directory:
    """This peer's node of the run's directory. Methods block up to their timeouts; any thread may call them."""

    def __init__(self) -> None:
        """Start the directory's process, which imports hivemind (2 CPU-s) and then waits for `open`."""
        self.addresses: tuple[str, ...] = ()
        """Multiaddrs, `/ip4/HOST/tcp/PORT/p2p/ID`: what others give as `bootstrap`."""
        self._lock = threading.Lock()
        self._settings: _Settings | None = None
        self._closed = False
        self._launch()

    def _launch(self) -> None:
        self._pipe, inner = mp.Pipe()
        self._answer_due = True  # the first says whether the node started
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(inner.fileno()), str(os.getpid())],
            pass_fds=[inner.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        inner.close()

    @classmethod
    def start(
        cls, run: str, bootstrap: Sequence[str] = (), host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0
    ) -> Directory:
        """A directory that is open, and in that of `bootstrap`, if there is any. Raises as `open` and `join` do."""
        directory = cls()
        try:
            directory.open(run, host, port, timeout_s)
            if bootstrap:
                directory.join(bootstrap, timeout_s)
        except BaseException:
            directory.close()
            raise
        return directory

    def open(self, run: str, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> None:
        """Start the node: listen on `host` (an address of this machine) and `port` (0 takes a free one).

        Raises ResourceError (host or port cannot be listened on, p2pd does not run). A node that is only slow, on a
        machine under load, has no `addresses` when this returns, and gets them with the first question that it answers.
        """
        self._settings = _Settings(run, _listen_address(host, port), timeout_s)
        with suppress(OSError):  # it died: the answer says so
            self._pipe.send(self._settings)
        answer = self._receive(time.monotonic() + timeout_s)
        if isinstance(answer, tuple):
            self.addresses = answer
        elif answer is not None or not self._lives():
            cause = f"the peer directory did not start: {answer or 'no answer'}"
            raise ResourceError(cause, "check that hivemind's p2pd runs here")

    def join(self, bootstrap: Sequence[str], timeout_s: float = 10.0) -> None:
        """Become one with the directory of which these are addresses: of one node, or of several.

        Raises UsageError (an address makes no sense) and UnreachableError (none answers; known within 0.5 s when
        refused, 5 s when silent, `timeout_s` at the latest): then all is as before.
        """
        for address in bootstrap:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(f"not a directory address: {address!r}", "write /ip4/HOST/tcp/PORT/p2p/ID")
        why = self._ask(("join", tuple(bootstrap)), timeout_s)
        if why != "":
            raise UnreachableError(
                f"no peer directory answers at {', '.join(bootstrap)}: {why or 'no answer'}",
                "check that a peer of the run lives there and that its directory's port is open from here",
            )

    def revive(self) -> bool:
        """Start the node again if its process has ended, as it does when its p2pd dies. Whether it had.

        The new one has other `addresses`, from when it answers the first question, and knows no other node.
        """
        with self._lock:
            if self._closed or self._settings is None or self._process.poll() is None:
                return False
            self._end(0.0)
            self.addresses = ()
            self._launch()
            with suppress(OSError):  # it died at once: so the next call finds it
                self._pipe.send(self._settings)
            return True

    def announce(self, member: Member, version: int, ttl_s: float = TTL_S, timeout_s: float = 5.0) -> bool:
        """Tell for `ttl_s` where `member` is and how far. False, and a log line, if not done within `timeout_s`."""
        assert ttl_s <= MAX_TTL_S, f"nodes refuse records that last {ttl_s} s"
        record = json.dumps({**asdict(member), "version": version}, separators=(",", ":")).encode()
        return self._store(member.peer, record, ttl_s, timeout_s)

    def withdraw(self, peer: str, timeout_s: float = 5.0) -> bool:
        """Take back what this directory announced of `peer`. False, and a log line, as `announce`."""
        return self._store(peer, b"", 0.0, timeout_s)

    def lookup(self, timeout_s: float = 5.0) -> dict[str, Member]:
        """All members with a valid record, by name. Empty when there is none or no answer in time."""
        found = self._ask(("lookup",), timeout_s)
        if found is None:
            logger.warning("the directory did not answer a look-up")
        return found or {}

    def close(self, timeout_s: float = 5.0) -> None:
        """End the node and its p2pd: gracefully, or by force after `timeout_s`."""
        self._closed = True
        self._process.terminate()  # whoever waits for its answer now waits no more
        with self._lock:
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        with suppress(ProcessLookupError):  # p2pd, had its parent no time to end it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _store(self, peer: str, record: bytes, ttl_s: float, timeout_s: float) -> bool:
        stored = bool(self._ask(("store", peer, record, ttl_s), timeout_s))
        if not stored:
            logger.warning("the directory did not take the record of %s", peer)
        return stored

    def _ask(self, question: tuple[Any, ...], timeout_s: float) -> Any:
        """The node's answer; None if there is none in time or the node is gone."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None
        try:
            if self._answer_due:  # to a question that was given up, or whether the node started
                late = self._receive(deadline)
                if isinstance(late, tuple) and not self.addresses:
                    self.addresses = late
            if self._answer_due:  # a frozen node gets no more questions: the pipe would fill and block
                return None
            self._pipe.send((timeout_s, *question))
            self._answer_due = True
            return self._receive(deadline)
        except OSError:
            return None
        finally:
            self._lock.release()

    def _lives(self) -> bool:
        """Whether the process is there, though it says nothing: at the end of a dead one's pipe there is its end."""
        return self._process.poll() is None and not self._pipe.poll(0)

    def _receive(self, deadline: float) -> Any:
        with suppress(EOFError, OSError):  # the process is gone
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                answer = self._pipe.recv()
                self._answer_due = False
                return answer
        return None


def _listen_address(host: str, port: int) -> str:
    """The multiaddr to listen on. Raises ResourceError if that is not possible.

    Tried out here, because p2pd sets SO_REUSEPORT: two of them on one port would start and steal each other's calls.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ResourceError(
            f"the peer directory cannot listen on {host} port {port}: {error.strerror}",
            "set network.listen to an address of this machine and network.dht_port to a free port, or 0 for any",
        ) from error
    return f"/{'ip6' if family == socket.AF_INET6 else 'ip4'}/{address[0]}/tcp/{port}"


# ---------------------------------------------------------------- the directory's process


@dataclass(frozen=True, slots=True)
class _Settings:
    run: str
    listen: str
    timeout_s: float


def run_node() -> None:
    """The directory's process: serve until told to end or orphaned; leave no p2pd behind."""
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # not so p2pd, which ends: only its session keeps Ctrl-C from it
    try:
        with suppress(asyncio.CancelledError):
            asyncio.run(_serve(pipe, parent))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


async def _serve(pipe: Connection, parent: int) -> None:
    """Start a node, send its addresses (or, as text, why there is none), then answer questions until cancelled."""
    _end_with(parent)
    _import_hivemind()  # 0.4 s, which the peer has other uses for
    settings = await _receive_settings(pipe)
    from hivemind.p2p import P2PDaemonError

    try:
        node = await asyncio.wait_for(_start_node(settings), settings.timeout_s)
    except (P2PDaemonError, RuntimeError, TimeoutError) as error:
        pipe.send(str(error) or "no answer")
        _silence()  # the peer says why; asyncio would say that a p2pd was left behind
        return
    watching = asyncio.create_task(_end_without(node.p2p._child, asyncio.current_task()))
    with suppress(asyncio.CancelledError):
        pipe.send(tuple(str(address) for address in await node.get_visible_maddrs()))
        await _answer_questions(pipe, _Records(node, settings.run))
    watching.cancel()
    with suppress(TimeoutError):
        await asyncio.wait_for(node.shutdown(), _SHUTDOWN_S)


async def _receive_settings(pipe: Connection) -> _Settings:
    """The settings that `Directory.open` sends; the wait ends with the process, or when the parent's end closes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    await readable.wait()
    loop.remove_reader(pipe.fileno())
    try:
        settings: _Settings = pipe.recv()
    except EOFError:
        raise asyncio.CancelledError from None
    return settings


def _end_with(parent: int) -> None:
    """Cancel the current task, silently, at SIGTERM, and (Linux) at the death of the parent, SIGKILL included."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def end_if_orphaned() -> None:
        if os.getppid() != parent:
            _end_silently(task)

    loop.add_signal_handler(signal.SIGTERM, _end_silently, task)
    # The kernel also sends it when only the thread that forked us ends: then the parent is still the parent.
    loop.add_signal_handler(signal.SIGHUP, end_if_orphaned)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    end_if_orphaned()  # it may have died before it was watched


async def _end_without(p2pd: Any, task: asyncio.Task[Any] | None) -> None:
    """Without p2pd hivemind's node goes on as if all were well: it stores records nowhere, and finds its own."""
    await p2pd.wait()
    assert task is not None
    _end_silently(task)


def _end_silently(task: asyncio.Task[Any]) -> None:
    """The parent wants no more, or is gone, or p2pd is. asyncio would say that a p2pd is left behind, where its start
    was cut short, and that the loop of its pipes is closed."""
    _silence()
    task.cancel()


def _silence() -> None:
    """Drop what hivemind and asyncio write while this process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _import_hivemind() -> None:
    """Here only, and not in the parent: the import changes torch's sharing strategy and the names of log levels."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "fatal")  # p2pd's: it calls its own end, and every lost peer, an error
    import hivemind  # noqa: F401

    log = logging.getLogger("hivemind")
    log.handlers.clear()
    log.propagate = True
    handler = logging.StreamHandler()
    handler.setFormatter(_WithoutTraceback())
    logging.getLogger().addHandler(handler)


class _WithoutTraceback(logging.Formatter):
    """A log line ends with the exception itself.

    When p2pd dies, the ends of its sockets are often seen before its own. hivemind's tasks that read them then fail,
    and asyncio logs each with its traceback, on the terminal of a peer that goes on with a new node.
    """

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return f"{ei[0].__name__}: {ei[1]}"


async def _start_node(settings: _Settings) -> Any:
    from hivemind.dht import DHTNode

    return await DHTNode.create(
        host_maddrs=[settings.listen],
        record_validator=_Bounds(settings.run),
        startup_timeout=settings.timeout_s,
        strict=False,  # True refuses peers whose clock differs by 3 s
        # Every look-up asks the others: caches would only add traffic and old answers.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        # Nothing leaves for anywhere but the addresses that `join` is told and the peers found through them.
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        use_auto_relay=False,
        use_ipfs=False,
    )


async def _answer_questions(pipe: Connection, records: _Records) -> None:
    """One question at a time, as they come. An answer is None when it took longer than the question allows."""
    questions: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def receive() -> None:
        try:
            questions.put_nowait(pipe.recv())
        except (EOFError, OSError):  # the parent is gone (where there is no PR_SET_PDEATHSIG)
            loop.remove_reader(pipe.fileno())
            _end_silently(task)

    loop.add_reader(pipe.fileno(), receive)
    while True:
        timeout_s, *question = await questions.get()
        try:
            answer = await asyncio.wait_for(records.answer(*question), timeout_s)
        except (OSError, EOFError):  # TimeoutError is one; or p2pd is gone, which ends this process, too
            answer = None
        pipe.send(answer)


class _Records:
    """The run's records: one dictionary in the DHT, from peer names to JSON; empty bytes for a peer that left."""

    def __init__(self, node: Any, run: str) -> None:
        self._node = node
        self._key = _key(run)
        self._expires_at: dict[str, float] = {}

    async def answer(self, kind: str, *arguments: Any) -> Any:
        kinds: dict[str, Callable[..., Awaitable[Any]]] = {
            "join": self.join,
            "store": self.store,
            "lookup": self.lookup,
        }
        return await kinds[kind](*arguments)

    async def join(self, addresses: Sequence[str]) -> str:
        """Meet the nodes at these addresses. Empty when one of them answers; else why none does."""
        causes = await asyncio.gather(*map(self._meet, addresses))
        if all(causes):
            return "; ".join(causes)
        await self._node.find_nearest_nodes([self._node.node_id])  # who is near us is to know us, too
        return ""

    async def _meet(self, address: str) -> str:
        from hivemind.p2p import P2PDaemonError, PeerID
        from hivemind.utils.networking import Multiaddr

        try:
            place, _, name = address.rpartition("/p2p/")
            peer = PeerID.from_base58(name)
            await self._node.p2p._client.connect(peer, [Multiaddr(place)])
        except (P2PDaemonError, OSError, EOFError, ValueError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        return "" if await self._node.protocol.call_ping(peer, validate=True, strict=False) else "no answer to a ping"

    async def store(self, peer: str, record: bytes, ttl_s: float) -> bool:
        # Of two records the one that lasts longer wins, so a withdrawal must outlast what it withdraws; unless nobody
        # took that, as it came by a clock that was far ahead and has been set right.
        now_s, last_s = time.time(), self._expires_at.get(peer, 0.0)
        expires_at = max(now_s + ttl_s, last_s + 0.001 if last_s <= now_s + MAX_TTL_S else 0.0)
        self._expires_at[peer] = expires_at
        # Its result is the word of whichever node answered last, who may be a liar.
        await self._node.store(self._key, record, expires_at, subkey=peer)
        return True

    async def lookup(self) -> dict[str, Member]:
        found = await self._node.get(self._key, latest=True)  # latest: asks every node that may have some
        entries = found.value.items() if found else ()
        members = (_parse_record(peer, entry.value) for peer, entry in entries)
        return {member.peer: member for member in islice((m for m in members if m is not None), MAX_MEMBERS)}


def _key(run: str) -> str:
    return f"diloco/{run}/peers"


def _parse_record(peer: Any, value: Any) -> Member | None:
    """The member that a record of the DHT describes; None for a peer that left and for what is not a record."""
    if value == b"":
        return None
    try:
        tree = json.loads(value)
        member = Member(tree["peer"], tree["incarnation"], tree["address"])
        if type(member.peer) is not str or member.peer != peer or not _NAME.fullmatch(member.peer):
            raise ValueError("name")
        if type(member.incarnation) is not int or not 0 <= member.incarnation < 2**63:
            raise ValueError("incarnation")
        if type(member.address) is not str or not _HOST_AND_PORT.fullmatch(member.address):
            raise ValueError("address")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        logger.debug("ignored a bad record of the directory: %r", error)
        return None
    return member


class _Bounds:
    """hivemind's record validator: what this node stores for others, and believes when others return it.

    Without it one value that is not msgpack would end every look-up, one plain value under the key would keep all
    peers out, and one record that never expires would stand for ever.
    """

    def __init__(self, run: str) -> None:
        from hivemind.dht import DHTID
        from hivemind.utils import MSGPackSerializer

        self._key = DHTID.generate(source=_key(run)).to_bytes()
        self._pack = MSGPackSerializer.dumps

    def validate(self, record: Any) -> bool:
        return (
            record.key == self._key
            and record.subkey != self._pack(None)
            and len(record.subkey) <= MAX_RECORD_BYTES
            and len(record.value) <= MAX_RECORD_BYTES
            # Exactly packed bytes, told without unpacking a stranger's: 2 or 3 bytes of header, then the bytes.
            and record.value in (self._pack(record.value[2:]), self._pack(record.value[3:]))
            and record.expiration_time <= time.time() + MAX_TTL_S
        )

    def sign_value(self, record: Any) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        return bytes(record.value)
