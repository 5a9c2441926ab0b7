"""Connections between rank 0 and the other ranks of an island, beside those of torch.distributed.

They run over the network that the ranks of an island share, and belong to the island as those do: a caller must know a
key that rank 0 made and sent over torch.distributed, which encrypts nothing. So what comes is data (`plain.py`), and
never code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError
from diloco.island.plain import packed, unpacked

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""So many ranks may call at once."""
GREETING_S = 60
"""Longest wait for a caller to prove that it is a rank of this island."""
MAX_RANK_BYTES = 64
"""Longest greeting, in which a rank says its number."""
AT_ONCE = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""Else the second of two short messages waits for the acknowledgement of the first, 40 ms or so."""


def call_rank_0(address: tuple[str, int], key: bytes, rank: int) -> Connection[Any, Any]:
    """Connect this rank of an island to the `RankListener` of rank 0.

    Raises OSError, EOFError and AuthenticationError when rank 0 refuses it.
    """
    connection = Client(address, authkey=key)
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
        end.setsockopt(*AT_ONCE)
    connection.send_bytes(packed(rank))
    return connection


class RankListener:
    """Listening socket of rank 0, to which the other ranks of the island connect."""

    def __init__(self, host: str, key: bytes) -> None:
        """`host`: where the other ranks reach this one."""
        self._key = key
        try:
            self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        except OSError:  # a name or an address that only others know: of a service, of a translated network
            self._listener = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
        self._came: queue.SimpleQueue[tuple[int, Connection[Any, Any]]] = queue.SimpleQueue()

    @property
    def port(self) -> int:
        """Port on which rank 0 listens for the other ranks of the island."""
        return int(self._listener.getsockname()[1])

    def accept_ranks(self, count: int, timeout_s: float) -> dict[int, Connection[Any, Any]]:
        """Connections of an island's ranks 1 to `count`, by rank. Raises ResourceError when one is late."""
        threading.Thread(target=self._open, name="rank-listener", daemon=True).start()
        connections: dict[int, Connection[Any, Any]] = {}
        deadline_s = monotonic_s() + timeout_s
        try:
            while missing := [str(rank) for rank in range(1, count + 1) if rank not in connections]:
                rank, connection = self._came.get(timeout=max(deadline_s - monotonic_s(), 0.0))
                connections[rank] = connection
        except queue.Empty:
            cause = f"rank {', '.join(missing)} of this island did not call rank 0 within {timeout_s:g} s"
            raise ResourceError(cause, "its output says why") from None
        finally:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread in accept()
            self._listener.close()
        return connections

    def wires(self, count: int, timeout_s: float) -> dict[int, RankWire]:
        """Wires to an island's ranks 1 to `count`, by rank. Raises ResourceError when one is late."""
        return {rank: RankWire(connection) for rank, connection in self.accept_ranks(count, timeout_s).items()}

    def _open(self) -> None:
        """Accept ranks of the island until the socket is closed. A silent caller keeps none waiting."""
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(caller,), name="rank-listener", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        with caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(GREETING_S))
            caller.setsockopt(*AT_ONCE)
            connection: Connection[Any, Any] = Connection(os.dup(caller.fileno()))
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                rank = int(unpacked(connection.recv_bytes(MAX_RANK_BYTES)))
            except Exception as error:  # the thread's edge: whatever strangers send
                logger.warning("a caller that is no rank of this island was refused: %s", error)
                connection.close()
                return
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(0))  # later messages have no deadline
        self._came.put((rank, connection))


def _seconds(count: int) -> bytes:
    """Timeout of a socket between ranks of an island, as the operating system takes it, a `struct timeval`."""
    return struct.pack("ll", count, 0)


class WireEnd(Protocol):
    """Whoever is told what comes over a `RankWire`, on its loop (`diloco.exchange.lanes.LaneChannel`)."""

    failed: Callable[[BaseException], None]
    """Told that something from the other rank cannot be read."""

    def arrived(self, *item: Any) -> None:
        """An item has come from the other rank."""

    def unsaid(self, item: tuple[Any, ...], error: Exception) -> None:
        """An item cannot be sent to the other rank."""

    def broken(self) -> None:
        """The other rank is gone, or hung up."""


class RankWire:
    """Items that rank 0 and another rank of an island send to each other. A thread each reads and writes; what comes is
    handled on a loop."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open(self, loop: asyncio.AbstractEventLoop, end: WireEnd) -> None:
        """Begin to carry items to and from the other rank. `end` is called on the loop."""
        self._loop, self._end = loop, end
        self._writer = threading.Thread(target=self._write, name="lane", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="lane", daemon=True).start()

    def put(self, item: tuple[Any, ...]) -> None:
        """Send an item to the other rank, after all that was put before."""
        self._outgoing.put(item)

    def close(self) -> None:
        """Close the connection to the other rank after all that was put."""
        self._outgoing.put(None)

    def _write(self) -> None:
        with suppress(OSError):  # the reader sees it, too
            while (item := self._outgoing.get()) is not None:
                try:
                    data = packed(item)
                except Exception as error:  # the thread's edge: raised where somebody looks
                    self._on_loop(self._end.unsaid, item, error)
                else:
                    self._connection.send_bytes(data)
        # The other side reads to the end, and hangs up, too; then the reader closes.
        self._hang_up(socket.SHUT_WR)

    def _read(self) -> None:
        try:
            while True:
                self._loop.call_soon_threadsafe(self._end.arrived, *unpacked(self._connection.recv_bytes()))
        except (EOFError, OSError, RuntimeError):  # closed, broken; the loop is closed
            pass
        except Exception as error:  # the thread's edge: raised where somebody looks
            self._on_loop(self._end.failed, error)
        self._on_loop(self._end.broken)
        self._outgoing.put(None)
        self._hang_up(socket.SHUT_RDWR)
        self._writer.join()  # the number of a connection that is closed may be another's by the time it writes
        self._connection.close()

    def _hang_up(self, how: int) -> None:
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            end.shutdown(how)

    def _on_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)
