"""The network of a chaos drill: peers of one machine, with rules for each direction between two of them.

Every peer advertises a port of ours and listens elsewhere. The process that connects to it is found by its socket
(/proc), so that a rule can hold for the bytes from one peer to another and for no others. What is held back is not
read, so the sender sees what a lost route shows: an open socket on which nothing moves.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

READ_BYTES = 1 << 16
SOCK_DIAG, DIAG_BY_FAMILY, INODE_AT = 4, 20, 68
LOOPBACK = bytes([127, 0, 0, 1])
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


class ChaosNetwork:
    """A TCP proxy before every peer of a chaos drill, with rules for bytes; an asyncio loop on a thread of its own.

    Methods are for one other thread.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._rules: list[Rule] = []
        self._pids: dict[int, str] = {}
        self._changed = asyncio.Condition()
        self._pipes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def address(self, peer: str, port: int) -> str:
        """The drill's proxy address for `peer`, which listens on loopback at `port`; valid while the network exists."""
        return asyncio.run_coroutine_threadsafe(self._open(peer, port), self._loop).result(PATIENCE_S)

    def belongs(self, pid: int, peer: str) -> None:
        """Attribute connections of this process to `peer` of the drill."""
        self._pids = {**self._pids, pid: peer}

    def impose(self, rules: Sequence[Rule]) -> None:
        """Add faults of the drill as rules, also for open connections."""
        asyncio.run_coroutine_threadsafe(self._set([*self._rules, *rules]), self._loop).result(PATIENCE_S)

    def lift(self, rules: Sequence[Rule]) -> None:
        """Mend faults of the drill: take these rules back."""
        left = [rule for rule in self._rules if not any(rule is lifted for lifted in rules)]
        asyncio.run_coroutine_threadsafe(self._set(left), self._loop).result(PATIENCE_S)

    def close(self) -> None:
        """Close all ports and connections of the drill's network."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    # ------------------------------------------------------------ the loop's thread from here on

    async def _open(self, peer: str, port: int) -> str:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pipe = asyncio.current_task()
            assert pipe is not None
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)
            await self._connect(peer, port, reader, writer)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _set(self, rules: list[Rule]) -> None:
        async with self._changed:
            self._rules = rules
            self._changed.notify_all()

    async def _end(self) -> None:
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)

    async def _connect(self, peer: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a caller with the drilled peer behind this port until one of them is gone."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            # A dead peer's port is dialled once a second by everybody: the caller matters only while a way is cut.
            if not all(rule.passes for rule in self._rules):
                await self._passing(self._caller(writer), peer)
            writer.transport.abort()
            return
        caller = self._caller(writer)
        await self._passing(caller, peer)
        ways = [self._pump(reader, back, caller, peer), self._pump(there, writer, peer, caller)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.transport.abort()
            back.transport.abort()

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


def _inode(local_port: int, remote_port: int) -> str:
    """The socket of a drilled peer: bound to one loopback port and connected to the other; empty: it is gone.

    Asked of the kernel one by one (sock_diag(7)): its tables in /proc take 10 ms to read, however short they are.
    """
    sought = struct.pack(">HH4s12x4s12x", local_port, remote_port, LOOPBACK, LOOPBACK) + bytes(4) + b"\xff" * 8
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
