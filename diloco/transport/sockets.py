"""Counts the bytes that a process and its children really move over TCP, whichever library opened the sockets.

The kernel keeps both counts for every TCP socket and reports them to anybody over netlink (`sock_diag(7)`, attribute
INET_DIAG_INFO, which is `struct tcp_info` of `linux/tcp.h`; the names are those of RFC 4898). /proc has the sockets of
each process. So gRPC, gloo and hivemind's p2pd are counted alike, without root, and no socket is touched.

Counted is TCP payload, IPv4 and IPv6, loopback included: with TLS and retransmissions, without TCP/IP headers. Not
counted: UNIX sockets, UDP, other network namespaces, children that gave themselves away (double fork).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from typing import NamedTuple

from diloco.base.clock import monotonic_s

logger = logging.getLogger(__name__)

DEAR_S = 0.01
"""CPU time of a sample that has to do with more sockets than peers open."""


@dataclass(frozen=True, slots=True)
class SocketBytes:
    """TCP payload bytes on the sockets of a process tree, or on one socket."""

    sent: int
    received: int
    resent: int = 0
    """Bytes of `sent` that the kernel sent again. Even loopback has some when the receiver gets no processor."""

    def __add__(self, other: SocketBytes) -> SocketBytes:
        return SocketBytes(self.sent + other.sent, self.received + other.received, self.resent + other.resent)

    def __sub__(self, other: SocketBytes) -> SocketBytes:
        return SocketBytes(self.sent - other.sent, self.received - other.received, self.resent - other.resent)


class SocketCounter:
    """TCP bytes of the process `pid` (this one by default) and of all its descendants.

    Not counted is what no sample saw: sockets opened and closed between two samples, and what a socket moved between
    the last sample and its close. Sample often (`watch`) and once more before links are closed. A byte between two
    processes of the tree counts as sent and as received. A connection that ended counts up to one byte more than was
    received: the kernel counts the FIN.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._lock = threading.Lock()
        self._bytes: dict[int, SocketBytes] = {}
        """Our open sockets, by the kernel's cookie (never given twice): largest counts seen."""
        self._missed: set[int] = set()
        """Our sockets that the latest sample did not see: one may pass over a socket, two do not."""
        self._foreign: set[int] = set()
        """Cookies of other processes' open sockets, so that /proc is read only when a new socket shows up."""
        self._total = SocketBytes(0, 0)
        self._supported: bool | None = None
        """None: no sample was taken yet."""
        self._rests_until_s = 0.0
        """Until then the latest sample is good enough."""

    def sample(self) -> SocketBytes | None:
        """Bytes on the TCP sockets so far; None where the system does not count them (not Linux, or without sock_diag).

        Takes 0.5 ms with 50 sockets, half of it in the kernel; 1.2 ms when one is new, as /proc is read then. With
        5,000, whoever opened them, it takes 40 to 80 ms: after a sample of more than `DEAR_S` the same bytes are
        returned for as long as keeps the CPU time of samples to 2 %.
        """
        with self._lock:
            began_s = monotonic_s()
            if self._supported is not False and began_s >= self._rests_until_s:
                began_cpu_s = time.thread_time()
                try:
                    self._update(_tcp_sockets())
                    self._supported = True
                except OSError as error:
                    if self._supported is None:  # later a busy kernel may refuse: what was counted before stays true
                        self._supported = False
                        logger.warning("bytes on sockets are not counted: the system does not tell them (%s)", error)
                took_s = time.thread_time() - began_cpu_s
                self._rests_until_s = began_s + (50 * took_s if took_s > DEAR_S else 0.0)
            return self._total if self._supported else None

    @contextmanager
    def watch(self, interval_s: float = 0.2) -> Iterator[None]:
        """Sample the TCP sockets every `interval_s` in a daemon thread, and once more at the end."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(interval_s):
                self.sample()

        thread = threading.Thread(target=run, name="socket-counter", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.sample()

    def _update(self, sockets: list[_Socket]) -> None:
        """Count the bytes that our TCP sockets moved since the latest sample."""
        seen_now = {entry.cookie for entry in sockets}
        self._foreign &= seen_now
        for cookie in self._missed - seen_now:  # it is closed, and counted: a run of weeks opens very many
            del self._bytes[cookie]
        self._missed = self._bytes.keys() - seen_now
        # A connection that waits to be accepted has no inode yet: its owner is settled at a later sample.
        known = self._bytes.keys() | self._foreign
        unknown = any(entry.inode and entry.cookie not in known for entry in sockets)
        ours = _socket_inodes(_process_tree(self._pid)) if unknown else set()
        for entry in sockets:
            if entry.inode in ours:
                self._bytes.setdefault(entry.cookie, SocketBytes(0, 0))
            elif entry.inode and entry.cookie not in self._bytes:
                self._foreign.add(entry.cookie)
            seen = self._bytes.get(entry.cookie)
            if seen is not None and seen != entry.moved:
                self._bytes[entry.cookie] = entry.moved
                self._total = self._total + entry.moved - seen


# ---------------------------------------------------------------- the kernel's answers

_SOCK_DIAG, _DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_MESSAGE_ERROR, _MESSAGE_DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO
# Every TCP state but SYN_RECV, TIME_WAIT, LISTEN and NEW_SYN_RECV, which carry no bytes.
_STATES = sum(1 << state for state in (1, 2, 4, 5, 7, 8, 9, 11))

_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_REQUEST = struct.Struct("=BBBBI48x")  # inet_diag_req_v2: family, protocol, extensions, padding, states, socket id
_ENTRY = struct.Struct("=44xQ16xI")  # inet_diag_msg: cookie and inode; attributes follow
_ACKED_RECEIVED = struct.Struct("=120xQQ")  # tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_SENT_RESENT = struct.Struct("=200xQQ")  # tcp_info: tcpi_bytes_sent, tcpi_bytes_retrans


class _Socket(NamedTuple):
    cookie: int
    inode: int
    moved: SocketBytes


def _tcp_sockets() -> list[_Socket]:
    """All connected TCP sockets of this network namespace. Raises OSError where sock_diag is missing."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("no netlink")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(1.0)
        return [entry for family in (socket.AF_INET, socket.AF_INET6) for entry in _dump(link, family)]


def _dump(link: socket.socket, family: int) -> Iterator[_Socket]:
    """All TCP sockets of one address family, as the kernel reports them."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _STATES)
    link.send(_MESSAGE.pack(_MESSAGE.size + len(request), _DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
    while True:
        for kind, body in _records(_MESSAGE, link.recv(1 << 16)):
            if kind == _MESSAGE_DONE:
                return
            if kind == _MESSAGE_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise OSError(code, os.strerror(code))
            cookie, inode = _ENTRY.unpack_from(body)
            info = dict(_records(_ATTRIBUTE, body[_ENTRY.size :])).get(_INFO)
            if info:  # a socket that is just coming or going has none
                yield _Socket(cookie, inode, _bytes_in(info))


def _records(header: struct.Struct, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and bodies of netlink's messages about sockets, or attributes. Both headers begin with length and kind."""
    start = 0
    while start < len(data):
        length, kind, *_ = header.unpack_from(data, start)
        yield kind, data[start + header.size : start + length]
        start += (length + 3) & ~3


def _bytes_in(info: bytes) -> SocketBytes:
    """Bytes that one TCP socket moved, from its tcp_info, which is shorter the older the kernel is."""
    if len(info) < _ACKED_RECEIVED.size:
        raise OSError("the kernel does not count bytes per socket")
    acked, received = _ACKED_RECEIVED.unpack_from(info)
    if len(info) < _SENT_RESENT.size:  # before 4.19: with one byte more for the SYN, and no retransmissions
        return SocketBytes(acked, received)
    sent, resent = _SENT_RESENT.unpack_from(info)
    return SocketBytes(sent, received, resent)


# ---------------------------------------------------------------- the owners of sockets


def _process_tree(pid: int) -> Iterator[int]:
    """`pid` and its descendants, whose sockets are counted, as far as /proc shows them."""
    yield pid
    for path in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path) as file:
            for child in file.read().split():
                yield from _process_tree(int(child))


def _socket_inodes(pids: Iterable[int]) -> set[int]:
    """Inodes of all sockets these processes hold; those that may not be looked into are left out."""
    inodes = set()
    for pid in pids:
        for fd in glob(f"/proc/{pid}/fd/*"):
            with suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    return inodes
