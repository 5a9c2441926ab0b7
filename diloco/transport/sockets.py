"""Counts the bytes that a process and its children really move over TCP, whichever library opened the sockets.

The kernel keeps both counts for every TCP socket and tells them to anybody over netlink (`sock_diag(7)`, attribute
INET_DIAG_INFO, which is `struct tcp_info` of `linux/tcp.h`; the names are those of RFC 4898). /proc says which sockets
are whose. So gRPC, gloo and hivemind's p2pd are counted alike, without root, and no socket is touched.

Counted is TCP payload, IPv4 and IPv6, loopback included: with TLS and retransmissions, without TCP/IP headers. Not
counted: UNIX sockets, UDP, other network namespaces, children that gave themselves away (double fork).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_SOCK_DIAG, _DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_MESSAGE_ERROR, _MESSAGE_DONE = 2, 3
_INFO = 2  # INET_DIAG_INFO
# Every TCP state but SYN_RECV, TIME_WAIT, LISTEN and NEW_SYN_RECV, which carry no bytes.
_STATES = sum(1 << state for state in (1, 2, 4, 5, 7, 8, 9, 11))
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI48x")  # inet_diag_req_v2: family, protocol, extensions, padding, states, socket id
_COOKIE_AT, _INODE_AT, _ATTRIBUTES_AT = 44, 68, 72  # in inet_diag_msg
# In tcp_info: tcpi_bytes_acked, _received, and since Linux 4.19 _sent and _retrans.
_ACKED_AT, _RECEIVED_AT, _SENT_AT, _RESENT_AT = 120, 128, 200, 208


@dataclass(frozen=True, slots=True)
class SocketBytes:
    """TCP payload bytes since the process started."""

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

    What it cannot see is what no sample saw: sockets opened and closed between two samples, and what a socket moved
    between the last sample and its close. Sample often (`watch`) and once more before links are closed. A byte
    between two processes of the tree counts as sent and as received. A connection that ended counts up to one byte
    more than was received: the kernel counts the FIN.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._lock = threading.Lock()
        self._bytes: dict[int, SocketBytes] = {}
        """Our open sockets, by the kernel's cookie (never given twice): largest counts seen."""
        self._missed: set[int] = set()
        """Those of ours that the latest sample did not see: one may pass over a socket, two do not."""
        self._foreign: set[int] = set()
        """Cookies of other processes' open sockets, so that /proc is read only when a new socket shows up."""
        self._total = SocketBytes(0, 0)
        self._unsupported = False
        self._supported = False

    def sample(self) -> SocketBytes | None:
        """Bytes so far; None where the system cannot tell (not Linux, or a sandbox without sock_diag).

        Takes 0.5 ms with 50 sockets, half of it in the kernel; 1.2 ms when one is new, as /proc is read then.
        """
        with self._lock:
            if self._unsupported:
                return None
            try:
                self._update(_tcp_sockets())
                self._supported = True
            except OSError as error:
                if self._supported:  # a busy kernel may refuse once; what was counted before stays true
                    return self._total
                self._unsupported = True
                logger.warning("bytes on sockets are not counted: the system does not tell them (%s)", error)
                return None
            return self._total

    @contextmanager
    def watch(self, interval_s: float = 0.2) -> Iterator[None]:
        """Sample every `interval_s` in a daemon thread, and once more at the end."""
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
        seen_now = {entry.cookie for entry in sockets}
        self._foreign &= seen_now
        for cookie in self._missed - seen_now:  # it is closed, and counted: a run of weeks opens very many
            del self._bytes[cookie]
        self._missed = self._bytes.keys() - seen_now
        # A connection that waits to be accepted has no inode yet: its owner is settled at a later sample.
        known = self._bytes.keys() | self._foreign
        if any(entry.inode and entry.cookie not in known for entry in sockets):
            self._assign(sockets)
        for entry in sockets:
            seen = self._bytes.get(entry.cookie)
            if seen is not None:
                self._bytes[entry.cookie] = entry.moved
                self._total = self._total + entry.moved - seen

    def _assign(self, sockets: list[_Socket]) -> None:
        """Tell the sockets not seen before apart: ours or foreign."""
        ours = _socket_inodes(_process_tree(self._pid))
        for entry in sockets:
            if entry.inode in ours:
                self._bytes.setdefault(entry.cookie, SocketBytes(0, 0))
            elif entry.inode and entry.cookie not in self._bytes:
                self._foreign.add(entry.cookie)


@dataclass(frozen=True, slots=True)
class _Socket:
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
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _STATES)
    link.send(_HEADER.pack(_HEADER.size + len(request), _DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
    while True:
        data = link.recv(1 << 16)
        start = 0
        while start < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, start)
            body = data[start + _HEADER.size : start + length]
            if kind == _MESSAGE_DONE:
                return
            if kind == _MESSAGE_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise OSError(code, os.strerror(code))
            entry = _parse(body)
            if entry is not None:
                yield entry
            start += (length + 3) & ~3


def _parse(body: bytes) -> _Socket | None:
    """None for a socket that is just coming or going: the kernel says nothing more of it."""
    (cookie,) = struct.unpack_from("=Q", body, _COOKIE_AT)
    (inode,) = struct.unpack_from("=I", body, _INODE_AT)
    info = _attribute(body, _INFO)
    if not info:
        return None
    if len(info) < _RECEIVED_AT + 8:
        raise OSError("the kernel does not count bytes per socket")
    (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    if len(info) >= _RESENT_AT + 8:
        sent, resent = struct.unpack_from("=QQ", info, _SENT_AT)
    else:  # only what was acknowledged: one more for the SYN, and no retransmissions
        (sent,), resent = struct.unpack_from("=Q", info, _ACKED_AT), 0
    return _Socket(cookie, inode, SocketBytes(sent, received, resent))


def _attribute(body: bytes, wanted: int) -> bytes:
    start = _ATTRIBUTES_AT
    while start < len(body):
        length, kind = struct.unpack_from("=HH", body, start)
        if kind == wanted:
            return body[start + 4 : start + length]
        start += (length + 3) & ~3
    return b""


def _process_tree(pid: int) -> Iterator[int]:
    """`pid` and its descendants, as far as /proc shows them."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    yield from _process_tree(int(child))


def _socket_inodes(pids: Iterator[int]) -> set[int]:
    """Inodes of all sockets these processes hold; those that may not be looked into are left out."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return inodes
