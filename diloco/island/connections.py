"""Connections between rank 0 and the other ranks of an island, beside those of torch.distributed.

They belong to the island as those do: a caller must know a key that rank 0 made and sent over torch.distributed.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""So many ranks may call at once."""
GREETING_S = 60
"""Longest wait for a caller to prove that it is a rank of this island."""
AT_ONCE = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""Else the second of two short messages waits for the acknowledgement of the first, 40 ms or so."""


def call_rank_0(address: tuple[str, int], key: bytes, rank: int) -> Connection[Any, Any]:
    """Connect this rank of an island to the `RankListener` of rank 0.

    Raises OSError, EOFError and AuthenticationError when rank 0 refuses it.
    """
    connection = Client(address, authkey=key)
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
        end.setsockopt(*AT_ONCE)
    connection.send(rank)
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
                rank = int(connection.recv())
            except Exception as error:  # the thread's edge: whatever strangers send
                logger.warning("a caller that is no rank of this island was refused: %s", error)
                connection.close()
                return
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(0))  # later messages have no deadline
        self._came.put((rank, connection))


def _seconds(count: int) -> bytes:
    """Timeout of a socket between ranks of an island, as the operating system takes it, a `struct timeval`."""
    return struct.pack("ll", count, 0)
