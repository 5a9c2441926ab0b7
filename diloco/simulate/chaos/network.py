"""The network of a chaos drill: peers of one machine, with rules for each direction between two of them.

Every peer advertises a port of ours and listens elsewhere. Who connects to it is known by its process, which its
socket leads to (/proc), or by its network namespace. So a rule can hold for the bytes from one peer to another and for
no others. What is held back is not read, so the sender sees what a lost route shows: an open socket on which nothing
moves.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco.simulate.chaos.namespaces import LOOPBACK, ChaosNamespace

T = TypeVar("T")

READ_BYTES = 1 << 16
SOCK_DIAG, DIAG_BY_FAMILY, INODE_AT = 4, 20, 68
RESETS = struct.pack("ii", 1, 0)
"""`SO_LINGER`: what closes a socket resets its connection."""
PATIENCE_S = 60.0
"""For the loop, which shares the cores with the peers."""


@dataclass(frozen=True)
class Rule:
    """A chaos drill's treatment of bytes on their way from one of `sources` to one of `targets`; None: anybody."""

    sources: frozenset[str] | None
    targets: frozenset[str] | None
    passes: bool = True
    bytes_per_s: float = math.inf
    flips: float = 0.0
    """Chance that one bit of what was read at once (at most 64 KiB) is turned over."""

    def holds(self, source: str, target: str) -> bool:
        """Whether this rule of a chaos drill applies to bytes from `source` to `target`."""
        return (self.sources is None or source in self.sources) and (self.targets is None or target in self.targets)


@dataclass
class _Door:
    """A port of the network before a peer."""

    place: str
    """The peer on whose loopback it is; empty: this machine's."""
    port: int
    server: asyncio.Server | None = None
    """None while it is shut."""
    filtered: Sequence[socket.socket] = ()
    """While it is filtered: a socket that listens and takes nobody, and one that fills its queue."""

    def unfilter(self) -> None:
        for end in self.filtered:
            end.close()
        self.filtered = ()


class ChaosNetwork:
    """A TCP proxy before every peer of a chaos drill, with rules for bytes; an asyncio loop on a thread of its own.

    Methods are for one other thread. `apart`: each peer is in a network namespace with its own loopback, where the
    proxies of all others listen, as forwarders of `ssh -L` do.
    """

    def __init__(self, seed: int, apart: bool = False) -> None:
        self.apart = apart
        self._dice = random.Random(seed)
        self._rules: list[Rule] = []
        self._pids: dict[int, str] = {}
        self._spaces: dict[str, ChaosNamespace] = {}
        """By peer, if they are apart."""
        self._ports: dict[str, int] = {}
        """By peer, where it listens."""
        self._doors: dict[str, list[_Door]] = {}
        """By the peer behind it."""
        self._changed = asyncio.Condition()
        self._pipes: dict[asyncio.Task[None], frozenset[str]] = {}
        """Connections that are open, and the peer behind the door and the one that came."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def address(self, peer: str, port: int) -> str:
        """The drill's proxy address for `peer`, which listens on loopback at `port`; valid while the network exists."""
        return self._call(self._open(peer, port))

    def inside(self, peer: str) -> Sequence[str]:
        """Words before a command that runs as this peer of the drill, which has an address."""
        return self._spaces[peer].inside if self.apart else ()

    def belongs(self, pid: int, peer: str) -> None:
        """Attribute connections of this process to `peer` of the drill."""
        self._pids = {**self._pids, pid: peer}

    def impose(self, rules: Sequence[Rule]) -> None:
        """Add faults of the drill as rules, also for open connections."""
        self._call(self._set([*self._rules, *rules]))

    def lift(self, rules: Sequence[Rule]) -> None:
        """Mend faults of the drill: take these rules back."""
        self._call(self._set([rule for rule in self._rules if not any(rule is lifted for lifted in rules)]))

    def shut(self, peers: Iterable[str]) -> None:
        """A fault of the drill: nothing listens before these peers. Connections to them break, new ones are refused."""
        self._call(self._shut(frozenset(peers)))

    def filter(self, peers: Iterable[str]) -> None:
        """A fault of the drill: connections to these peers break, and those who dial them hear nothing, as behind a
        firewall that drops what comes in. They themselves reach all others."""
        self._call(self._filter(frozenset(peers)))

    def reopen(self, peers: Iterable[str]) -> None:
        """Mend these faults of the drill."""
        self._call(self._reopen(frozenset(peers)))

    def reset(self, peers: Iterable[str]) -> None:
        """A fault of the drill: all connections from and to these peers break at once."""
        self._call(self._reset(frozenset(peers)))

    def close(self) -> None:
        """Close all ports, connections and namespaces of the drill's network."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()
        for space in self._spaces.values():
            space.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    # ------------------------------------------------------------ the loop's thread from here on

    async def _open(self, peer: str, port: int) -> str:
        self._ports[peer] = port
        if not self.apart:
            door = await self._door(peer, "", 0)
            return f"{LOOPBACK}:{door.port}"
        self._spaces[peer] = ChaosNamespace()
        for other in self._spaces.keys() - {peer}:
            await self._door(peer, other, port)
            await self._door(other, peer, self._ports[other])
        return f"{LOOPBACK}:{port}"

    async def _door(self, peer: str, place: str, port: int) -> _Door:
        """A proxy before `peer` on the loopback of another one; at no place: on this machine's."""
        door = _Door(place, port)
        self._doors.setdefault(peer, []).append(door)
        await self._listen(peer, door)
        return door

    async def _listen(self, peer: str, door: _Door) -> None:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pipe = _this_task()
            self._pipes[pipe] = frozenset((peer,))
            pipe.add_done_callback(self._pipes.pop)
            await self._connect(peer, door.place, reader, writer)

        made = self._listening(door)
        door.server = await asyncio.start_server(accepted, sock=made)
        door.port = int(made.getsockname()[1])

    def _listening(self, door: _Door) -> socket.socket:
        if door.place:
            return self._spaces[door.place].listening(door.port)
        return socket.create_server((LOOPBACK, door.port))

    def _connected(self, place: str, port: int) -> socket.socket:
        return self._spaces[place].connected(port) if place else socket.create_connection((LOOPBACK, port))

    async def _shut(self, peers: frozenset[str]) -> None:
        for door in [door for peer in peers for door in self._doors.get(peer, [])]:
            if door.server is not None:
                door.server.close()
                door.server = None
        await self._reset(peers)

    async def _filter(self, peers: frozenset[str]) -> None:
        await self._shut(peers)
        for door in [door for peer in peers for door in self._doors.get(peer, [])]:
            listens = self._listening(door)
            listens.listen(0)  # its queue has room for one, and the kernel drops the first packet of the next
            door.filtered = (listens, self._connected(door.place, door.port))

    async def _reopen(self, peers: frozenset[str]) -> None:
        for peer in peers:
            for door in self._doors.get(peer, []):
                door.unfilter()
                if door.server is None:
                    await self._listen(peer, door)

    async def _reset(self, peers: frozenset[str]) -> None:
        for pipe, ends in self._pipes.items():
            if ends & peers:
                pipe.cancel()

    async def _set(self, rules: list[Rule]) -> None:
        async with self._changed:
            self._rules = rules
            self._changed.notify_all()

    async def _end(self) -> None:
        for door in [door for doors in self._doors.values() for door in doors]:
            door.unfilter()
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)

    async def _connect(self, peer: str, place: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a caller with the drilled peer behind this door until one of them is gone."""
        ends = [writer]
        try:
            try:
                there, back = await self._dial(peer)
            except OSError:
                # A dead peer's port is dialled once a second by everybody: the caller matters only while a way is cut.
                if not all(rule.passes for rule in self._rules):
                    await self._passing(place or self._caller(writer), peer)
                return
            ends.append(back)
            caller = place or self._caller(writer)
            self._pipes[_this_task()] = frozenset((peer, caller))
            await self._passing(caller, peer)
            ways = [self._pump(reader, back, caller, peer), self._pump(there, writer, peer, caller)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        except asyncio.CancelledError:
            for end in ends:
                with suppress(OSError):  # it is closed
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
        finally:
            for end in ends:
                end.transport.abort()

    async def _dial(self, peer: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.apart:
            return await asyncio.open_connection(LOOPBACK, self._ports[peer])
        made = await self._loop.run_in_executor(None, self._spaces[peer].connected, self._ports[peer])
        return await asyncio.open_connection(sock=made)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str) -> None:
        with suppress(OSError):
            while data := await self._read(reader, source, target):
                rules = list(self._about(source, target))
                await asyncio.sleep(len(data) / min((rule.bytes_per_s for rule in rules), default=math.inf))
                flips = max((rule.flips for rule in rules), default=0.0)
                writer.write(self._spoilt(data) if self._dice.random() < flips else data)
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, source: str, target: str) -> bytes:
        """The drill proxy's next bytes; empty at the end, which is not seen either while a fault cuts the way."""
        try:
            data = await reader.read(READ_BYTES)
        except OSError:
            data = b""
        await self._passing(source, target)
        return data

    async def _passing(self, source: str, target: str) -> None:
        """Wait until no fault of the drill holds up bytes on this way."""
        async with self._changed:
            while not all(rule.passes for rule in self._about(source, target)):
                await self._changed.wait()

    def _about(self, source: str, target: str) -> Iterator[Rule]:
        return (rule for rule in self._rules if rule.holds(source, target))

    def _spoilt(self, data: bytes) -> bytes:
        at = self._dice.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._dice.randrange(8)]) + data[at + 1 :]

    def _caller(self, writer: asyncio.StreamWriter) -> str:
        """The drilled peer at the other end of a connection that was just accepted; empty when it is none of ours."""
        _, theirs = writer.get_extra_info("peername")
        _, ours = writer.get_extra_info("sockname")
        inode = _inode(theirs, ours)
        return next((peer for pid, peer in self._pids.items() if inode and _holds(pid, inode)), "")


def _this_task() -> asyncio.Task[None]:
    task: asyncio.Task[None] | None = asyncio.current_task()
    assert task is not None
    return task


def _inode(local_port: int, remote_port: int) -> str:
    """The socket of a drilled peer: bound to one loopback port and connected to the other; empty: it is gone.

    Asked of the kernel one by one (sock_diag(7)): its tables in /proc take 10 ms to read, however short they are.
    """
    sought = (
        struct.pack(">HH4s12x4s12x", local_port, remote_port, *2 * [socket.inet_aton(LOOPBACK)])
        + bytes(4)
        + b"\xff" * 8
    )
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + sought
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(struct.pack("=IHHII", 16 + len(request), DIAG_BY_FAMILY, 1, 0, 0) + request)
        answer = link.recv(1 << 12)
    (kind,) = struct.unpack_from("=H", answer, 4)
    return str(struct.unpack_from("=I", answer, 16 + INODE_AT)[0]) if kind == DIAG_BY_FAMILY else ""


def _holds(pid: int, inode: str) -> bool:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{descriptor}") == f"socket:[{inode}]":
                    return True
    return False
