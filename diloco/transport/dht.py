"""The run's peer directory: members and their addresses, kept in a hivemind DHT by the peers themselves.

`Directory` is this peer's node of it. `Presence` keeps this peer's record fresh and the directory whole, and looks
there for members. The directory address of any member is enough to find the others, whichever peer founded the run and
whichever is gone. Nothing about correctness rests on it: records are hints from strangers, not authenticated, and a
peer that is reached at an address has to prove what it is.

The node runs in a process of its own, with hivemind's p2pd (libp2p) as its child. It is started afresh and not forked:
a child forked from a process with gRPC's threads hangs as soon as hivemind touches gRPC.

    peer process --pipe--> directory process (hivemind.dht.DHTNode) --UNIX socket--> p2pd --TCP--> other peers' p2pd

Both sit in a session of their own, so that Ctrl-C reaches only the peer, which leaves gracefully while its directory
still works; both end when the peer does, however it ends, and the node when its p2pd does. Only addresses given to
`open` and `join` are listened on and dialled: no relay, NAT probing, port mapping, multicast or public bootstrap nodes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError, UnreachableError, UsageError
from diloco.base.types import Member
from diloco.identity.keys import without_secret
from diloco.protocol.streams import Welcome
from diloco.transport.dht_node import MAX_MEMBERS, MAX_TTL_S

logger = logging.getLogger(__name__)

TTL_S = 300.0
"""Lifetime of a record in seconds. Ends by the wall clock: machines' clocks may differ by TTL_S - ANNOUNCE_EVERY_S."""

_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[\w.:-]+/tcp/\d{1,5}/p2p/\w+")
_PROGRAM = "from diloco.transport.dht_node import run_node; run_node()"


class Directory:
    """This peer's node of the run's hivemind directory. Methods block up to their timeouts, from any thread."""

    def __init__(self) -> None:
        """Start the directory's process, which imports hivemind (2 CPU-s) and then waits for `open`."""
        self.addresses: tuple[str, ...] = ()
        """Multiaddrs of the node, `/ip4/HOST/tcp/PORT/p2p/ID`: the `bootstrap` of others."""
        self._lock = threading.Lock()
        self._settings: tuple[str, str, float] | None = None
        """Run, multiaddr to listen on, and timeout of the node; None before `open`."""
        self._closed = False
        self._launch()

    def _launch(self) -> None:
        """Start the process of the hivemind directory, with our end of a pipe to it."""
        self._pipe, inner = mp.Pipe()
        self._answer_due = True  # the first answer is whether the node started
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(inner.fileno()), str(os.getpid())],
            pass_fds=[inner.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**without_secret(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        inner.close()

    def open(self, run: str, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> None:
        """Start the hivemind node: listen on `host` (an address of this machine) and `port` (0 takes a free one).

        Raises ResourceError (host or port cannot be listened on, p2pd does not run). A node that is only slow, on a
        machine under load, has no `addresses` when this returns, and gets them with the first question that it answers.
        """
        # Tried out here, for p2pd sets SO_REUSEPORT: two of them on one port would start and steal each other's calls.
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
        version = "ip6" if family == socket.AF_INET6 else "ip4"
        self._settings = run, f"/{version}/{address[0]}/tcp/{port}", timeout_s
        with suppress(OSError):  # it died: then the answer is missing
            self._pipe.send(self._settings)
        answer = self._receive(time.monotonic() + timeout_s)
        if isinstance(answer, tuple):
            self.addresses = answer
        # A process that died has ended its pipe, which then polls as readable; one that is only slow has not.
        elif answer is not None or self._process.poll() is not None or self._pipe.poll(0):
            cause = f"the peer directory did not start: {answer or 'no answer'}"
            raise ResourceError(cause, "check that hivemind's p2pd runs here")

    def join(self, bootstrap: Sequence[str], timeout_s: float = 10.0) -> None:
        """Join the hivemind directory that has nodes at the addresses `bootstrap`: both become one.

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
        """Start the hivemind node again if its process has ended, as after its p2pd's death. Returns whether it had.

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
        """Store `member` and its version in the hivemind directory for `ttl_s`. False, and a log line, if too late."""
        assert ttl_s <= MAX_TTL_S, f"nodes refuse records that last {ttl_s} s"
        record = json.dumps({**asdict(member), "version": version}, separators=(",", ":")).encode()
        return self._store(member.peer, record, ttl_s, timeout_s)

    def withdraw(self, peer: str, timeout_s: float = 5.0) -> bool:
        """Take the record of `peer` out of the hivemind directory again. False, and a log line, as `announce`."""
        return self._store(peer, b"", 0.0, timeout_s)

    def lookup(self, timeout_s: float = 5.0) -> dict[str, Member]:
        """All members with a valid record in the hivemind directory, by name. Empty for none, or no answer in time."""
        found = self._ask(("lookup",), timeout_s)
        if found is None:
            logger.warning("the directory did not answer a look-up")
        return found or {}

    def close(self, timeout_s: float = 5.0) -> None:
        """End the hivemind node and its p2pd: gracefully, or by force after `timeout_s`."""
        self._closed = True
        self._process.terminate()  # a thread that waits for its answer now waits no more
        with self._lock:
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        """End the process of the hivemind directory and its p2pd, by force after `timeout_s`."""
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
        """Answer of the hivemind node to a question; None if there is none in time or the node is gone."""
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

    def _receive(self, deadline: float) -> Any:
        """Next answer of the hivemind node; None if there is none before the deadline or the node is gone."""
        with suppress(EOFError, OSError):  # the process is gone
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                answer = self._pipe.recv()
                self._answer_due = False
                return answer
        return None


# ---------------------------------------------------------------- this peer in the directory

ANNOUNCE_EVERY_S = 60.0
"""Seconds between announcements and lookups of a peer: 0.2 kB/s sent per peer among four."""
LOOK_AGAIN_S = 10.0
"""Seconds between lookups when a peer is outside the view, or most of the view cannot be reached."""
MAX_PAUSE_S = 600.0
"""The longest pause between two attempts to mend the directory. Pauses begin with `LOOK_AGAIN_S` and double."""


class AnnouncedPeer(Protocol):
    """A peer that is announced in the hivemind directory, as its exchange presents it."""

    directory: tuple[str, ...]
    """Addresses of our directory node, for its welcomes."""

    @property
    def me(self) -> Member: ...

    @property
    def version(self) -> int: ...

    @property
    def alone(self) -> bool:
        """Whether the announced peer knows too few other members: then the hivemind directory is searched for more."""

    @property
    def others(self) -> Sequence[Member]:
        """Live members that the announced peer knows: the hivemind directory should hold a record of each."""

    def seek(self, listed: Sequence[Member]) -> None:
        """Ask at the addresses that the hivemind directory lists who is there: anybody may have listed them."""


class Presence:
    """Announces a peer in the hivemind directory, from a daemon thread, since the directory's calls block.

    It keeps the directory whole, too. A node whose p2pd dies is started again, as another. And where members that we
    know are not found in our directory, theirs is another: no node answered there when we came, or ours is a new one,
    or the network was cut. Then one of them is asked where its directory is now.
    """

    def __init__(self, directory: Directory, exchange: AnnouncedPeer, hello: Callable[[str], Welcome | None]) -> None:
        """`hello`: returns the welcome of the member at an address, None where none answers."""
        self._directory = directory
        self._exchange = exchange
        self._hello = hello
        self._pause_s = LOOK_AGAIN_S
        self._due_s: float | None = None  # None: the directory is whole
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                wait_s = self._turn()
            except (RuntimeError, CancelledError):  # the exchange's loop was closed
                if not self._ended.is_set():
                    raise

    def _turn(self) -> float:
        """Announce this peer in the hivemind directory, find others, mend it if due. Returns seconds until the next."""
        try:
            revived = self._directory.revive()
        except OSError as error:
            self._warn("short", f"the peer directory cannot be started again: {error.strerror}; trying again")
            return self._pause()
        if revived:
            self._warn("ended", "the peer directory ended, as it does when its p2pd is killed: starting it again")
            return self._pause()
        self._directory.announce(self._exchange.me, max(self._exchange.version, 0))
        self._exchange.directory = self._directory.addresses  # it may have started only now
        found = self._directory.lookup()
        looking = self._exchange.alone
        if looking:
            self._exchange.seek(list(found.values()))
        every_s = LOOK_AGAIN_S if looking else ANNOUNCE_EVERY_S
        missing = [member for member in self._exchange.others if member.peer not in found]
        if not missing or len(found) >= MAX_MEMBERS:
            self._pause_s, self._due_s = LOOK_AGAIN_S, None
            self._warned.clear()
            return every_s
        now_s = monotonic_s()
        if self._due_s is None or now_s >= self._due_s:
            if self._due_s is not None:  # not at once: a member that has just come may only have to announce itself
                self._join_that_of(random.choice(missing))
            self._due_s = now_s + self._pause()
        return min(every_s, self._due_s - now_s)

    def _join_that_of(self, member: Member) -> None:
        """Ask a member for the address of its hivemind directory, and join that."""
        try:
            welcome = self._hello(member.address)
            if welcome is None or not welcome.directory:
                raise UnreachableError(f"{member.peer} tells of no peer directory", "look at its log")
            self._directory.join(welcome.directory)
        except TimeoutError:  # our own exchange has ended, as we are about to
            return
        except (UnreachableError, UsageError) as error:
            text = f"{error.cause}: members are not found in our peer directory, trying again ever more rarely"
            self._warn("apart", text)

    def _pause(self) -> float:
        """Seconds to wait before the next attempt to mend the hivemind directory."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return pause_s

    def _warn(self, trouble: str, text: str) -> None:
        """Log a trouble of the hivemind directory once, until all is well again."""
        if trouble not in self._warned:
            self._warned.add(trouble)
            logger.warning("%s", text)

    def stop(self) -> None:
        """Stop announcing this peer in the hivemind directory. Its record expires, as if the peer had died."""
        self._ended.set()

    def end(self) -> None:
        """Stop announcing this peer, and withdraw its record from the hivemind directory."""
        self.stop()
        self._thread.join(5.0)
        self._directory.withdraw(self._exchange.me.peer)
