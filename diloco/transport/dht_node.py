"""The process of the peer directory: a node of hivemind's DHT, which answers its peer's questions over a pipe."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from diloco.base.collector import started, starts
from diloco.base.readable import printable
from diloco.base.types import Member

logger = logging.getLogger(__name__)

MAX_TTL_S = 600.0
"""A DHT node takes no record that lasts longer: the longest lasting wins, so a stranger's could stay for ever. An
honest one lasts half as long, by a clock that may be ahead by the rest."""
MAX_RECORD_BYTES = 1024
MAX_MEMBERS = 256
"""A look-up returns no more, drawn at random: strangers may list others, and 256 records fit in a pipe."""

_SHUTDOWN_S = 2.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as PeerSection.name
_HOST_AND_PORT = re.compile(r"[\w.:\[\]-]{1,255}:\d{1,5}")


def run_node() -> None:
    """Main function of the hivemind directory's process: serve until terminated or orphaned; leave no p2pd behind."""
    starts()
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # not so p2pd, which ends: only its session keeps Ctrl-C from it
    try:
        with suppress(asyncio.CancelledError):
            asyncio.run(_serve(pipe, parent))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


async def _serve(pipe: Connection, parent: int) -> None:
    """Start a hivemind node, send its addresses (or, as text, why there is none), answer questions until cancelled."""
    task = asyncio.current_task()
    assert task is not None
    _end_with(parent, task)
    inbox: asyncio.Queue[Any] = asyncio.Queue()  # the settings that `Directory.open` sends, then questions
    loop = asyncio.get_running_loop()

    def receive() -> None:
        try:
            inbox.put_nowait(pipe.recv())
        except (EOFError, OSError):  # the parent is gone (where there is no PR_SET_PDEATHSIG)
            loop.remove_reader(pipe.fileno())
            _end_silently(task)

    loop.add_reader(pipe.fileno(), receive)
    _import_hivemind()  # 0.4 s, which the peer has other uses for
    started()
    run, listen, timeout_s = await inbox.get()
    from hivemind.p2p import P2PDaemonError

    try:
        node = await asyncio.wait_for(_start_node(run, listen, timeout_s), timeout_s)
    except (P2PDaemonError, RuntimeError, TimeoutError) as error:
        pipe.send(str(error) or "no answer")
        _silence()  # the peer reports why; asyncio would report that a p2pd was left behind
        return
    watching = asyncio.create_task(_end_without(node.p2p._child, task))
    records = _DirectoryRecords(node, run)
    with suppress(asyncio.CancelledError):
        pipe.send(tuple(str(address) for address in await node.get_visible_maddrs()))
        while True:
            timeout_s, question, *arguments = await inbox.get()
            try:
                answer = await asyncio.wait_for(getattr(records, question)(*arguments), timeout_s)
            except (OSError, EOFError):  # TimeoutError is one; or p2pd is gone, which ends this process, too
                answer = None
            pipe.send(answer)
    watching.cancel()
    with suppress(TimeoutError):
        await asyncio.wait_for(node.shutdown(), _SHUTDOWN_S)


def _end_with(parent: int, task: asyncio.Task[Any]) -> None:
    """End the hivemind node with its peer: at SIGTERM and (Linux) at the parent's death, SIGKILL included."""
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


async def _end_without(p2pd: Any, task: asyncio.Task[Any]) -> None:
    """End the hivemind node when its p2pd ends. Without one it would go on, store records nowhere, and find its own."""
    await p2pd.wait()
    _end_silently(task)


def _end_silently(task: asyncio.Task[Any]) -> None:
    """End the hivemind node after SIGTERM, or without parent or p2pd. asyncio would log that a p2pd is left behind,
    where its start was cut short, and that the loop of its pipes is closed."""
    _silence()
    task.cancel()


def _silence() -> None:
    """Drop what hivemind and asyncio write while the hivemind directory's process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _import_hivemind() -> None:
    """Import hivemind in the directory's process only, not in its parent: it changes torch's sharing and log levels."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "fatal")  # p2pd's: it calls its own end, and every lost peer, an error
    import hivemind  # noqa: F401

    log = logging.getLogger("hivemind")
    log.handlers.clear()
    log.propagate = True
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainLines())
    logging.getLogger().addHandler(handler)


class _PlainLines(logging.Formatter):
    """Formatter of the hivemind process's log: plain characters, also of what strangers sent, and one line of an
    exception.

    When p2pd dies, the ends of its sockets are often seen before its own. hivemind's tasks that read them then fail,
    and asyncio logs each with its traceback, on the terminal of a peer that goes on with a new node.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(f"{ei[0].__name__}: {ei[1]}")


async def _start_node(run: str, listen: str, timeout_s: float) -> Any:
    """A hivemind DHT node that keeps the records of `run` only, and listens at the multiaddr `listen`."""
    from hivemind.dht import DHTNode

    from diloco.transport.dht_storage import RecordStorage

    validator = _RecordValidator(run)
    node = await DHTNode.create(
        host_maddrs=[listen],
        record_validator=validator,
        startup_timeout=timeout_s,
        strict=False,  # True refuses peers whose clock differs by 3 s
        # Every look-up asks the others: caches would only add traffic and old answers.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        # Nothing leaves for anywhere but the addresses given to `join` and the peers found through them.
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        use_auto_relay=False,
        use_ipfs=False,
    )
    node.protocol.storage = node.protocol.cache = RecordStorage(validator.key)
    return node


class _DirectoryRecords:
    """The run's records: one dictionary in hivemind's DHT, from peer names to JSON; empty bytes for a peer that left.

    Its public methods are the questions that `Directory` asks.
    """

    def __init__(self, node: Any, run: str) -> None:
        self._node = node
        self._key = _key(run)
        self._expires_at: dict[str, float] = {}

    async def join(self, addresses: Sequence[str]) -> str:
        """Connect to the hivemind nodes at these addresses. Empty when one of them answers; else why none does."""
        causes = await asyncio.gather(*map(self._meet, addresses))
        if all(causes):
            return "; ".join(causes)
        await self._node.find_nearest_nodes([self._node.node_id])  # who is near us is to know us, too
        return ""

    async def _meet(self, address: str) -> str:
        """Connect to one hivemind node. Empty when it answers; else why it does not."""
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
        """Store the record of a peer in hivemind's DHT, in place of its earlier one."""
        # Of two records the one that lasts longer wins, so a withdrawal must outlast what it withdraws; unless nobody
        # took that, as it came by a clock that was far ahead and has been set right.
        now_s, last_s = time.time(), self._expires_at.get(peer, 0.0)
        expires_at = max(now_s + ttl_s, last_s + 0.001 if last_s <= now_s + MAX_TTL_S else 0.0)
        self._expires_at[peer] = expires_at
        # Its result is the word of whichever node answered last, who may be a liar.
        await self._node.store(self._key, record, expires_at, subkey=peer)
        return True

    async def lookup(self) -> dict[str, Member]:
        """Members that have a record in hivemind's DHT, by name, `MAX_MEMBERS` at most."""
        found = await self._node.get(self._key, latest=True)  # latest: asks every node that may have some
        entries = list(found.value.items()) if found else []
        random.shuffle(entries)
        members = filter(None, (_parse_record(peer, entry.value) for peer, entry in entries))
        return {member.peer: member for member in islice(members, MAX_MEMBERS)}


def _key(run: str) -> str:
    """The key of a run's records in hivemind's DHT."""
    return f"diloco/{run}/peers"


def _parse_record(peer: Any, value: Any) -> Member | None:
    """The member that a record in hivemind's DHT describes; None for a peer that left and for other bytes."""
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


class _RecordValidator:
    """hivemind's record validator: the records that this node stores for others, and believes when others return them.

    Without it one value that is not msgpack would end every look-up, one plain value under the key would keep all
    peers out, and one record that never expires would stay for ever.
    """

    def __init__(self, run: str) -> None:
        from hivemind.dht import DHTID
        from hivemind.utils import MSGPackSerializer

        self.key = DHTID.generate(source=_key(run)).to_bytes()
        self._pack = MSGPackSerializer.dumps

    def validate(self, record: Any) -> bool:
        return (
            record.key == self.key
            # Exactly a packed name, or packed bytes, checked without unpacking a stranger's: 1 to 3 bytes of header.
            and any(self._is_name(record.subkey, header) for header in (1, 2))
            and len(record.value) <= MAX_RECORD_BYTES
            and record.value in (self._pack(record.value[2:]), self._pack(record.value[3:]))
            and record.expiration_time <= time.time() + MAX_TTL_S
        )

    def _is_name(self, subkey: bytes, header: int) -> bool:
        name = _NAME.fullmatch(subkey[header:].decode("latin-1"))
        return name is not None and subkey == self._pack(name[0])

    def sign_value(self, record: Any) -> bytes:
        return bytes(record.value)

    strip_value = sign_value  # nothing is signed
