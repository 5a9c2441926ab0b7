"""Network namespaces for a chaos drill: each has a loopback of its own, and nothing else.

A program inside makes sockets for the drill and hands them out (SCM_RIGHTS). So no process but the peer's is inside,
and no rights are needed but to make a user namespace.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from diloco.base.errors import ResourceError
from diloco.simulate.local.processes import die_with_parent

LOOPBACK = "127.0.0.1"
BACKLOG = 128
ERRNO_BYTES = 4
LAST_WORDS_S = 5.0


class ChaosNamespace:
    """A network namespace of a chaos drill, which lasts until `close`. Its methods are for any thread."""

    def __init__(self) -> None:
        """Raises ResourceError where no such namespaces can be made."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        program = [sys.executable, "-m", "diloco.simulate.chaos.namespaces", str(theirs.fileno())]
        words = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        try:
            self._keeper = subprocess.Popen(
                [*words, *program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except FileNotFoundError as error:
            raise ResourceError(f"no network namespaces here: {error}", _FIX) from error
        finally:
            theirs.close()
        if not self._socket.recv(1):
            said = self._keeper.communicate()[1].decode(errors="replace").strip()
            raise ResourceError(f"no network namespaces here: {said}", _FIX)

    @property
    def inside(self) -> Sequence[str]:
        """Words before a command of the chaos drill that is to run inside."""
        return ["nsenter", "--user", "--net", "--preserve-credentials", "--target", str(self._keeper.pid), "--"]

    def listening(self, port: int) -> socket.socket:
        """A socket of the drill that listens at this port of the namespace's loopback. Raises OSError."""
        return self._ask(f"listen {port}")

    def connected(self, port: int) -> socket.socket:
        """A socket of the drill that is connected to this port of the namespace's loopback. Raises OSError."""
        return self._ask(f"connect {port}")

    def close(self) -> None:
        """End the drill's program inside. The namespace goes with the last process in it."""
        self._socket.close()
        self._keeper.kill()
        self._keeper.communicate(timeout=LAST_WORDS_S)

    def _ask(self, wanted: str) -> socket.socket:
        with self._lock:
            self._socket.send(wanted.encode())
            answer, ancillary, _, _ = self._socket.recvmsg(ERRNO_BYTES, socket.CMSG_SPACE(array.array("i").itemsize))
        if not ancillary:
            number = int.from_bytes(answer, "little")
            raise OSError(number, os.strerror(number))
        (descriptor,) = array.array("i", ancillary[0][2])
        return socket.socket(fileno=descriptor)


_FIX = "install iproute2 and util-linux, and allow user namespaces (user.max_user_namespaces)"


def _keep(asked: socket.socket) -> None:
    """Make sockets in this process's namespace for who asks, until it is gone."""
    asked.send(b".")
    while wanted := asked.recv(64).decode():
        what, _, port = wanted.partition(" ")
        try:
            if what == "listen":
                made = socket.create_server((LOOPBACK, int(port)), backlog=BACKLOG)
            else:
                made = socket.create_connection((LOOPBACK, int(port)))
        except OSError as error:
            asked.send((error.errno or 0).to_bytes(ERRNO_BYTES, "little"))
            continue
        with made:
            descriptors = array.array("i", [made.fileno()])
            asked.sendmsg([bytes(ERRNO_BYTES)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


if __name__ == "__main__":
    _keep(socket.socket(fileno=int(sys.argv[1])))
