"""The thread and event loop that the exchange lives on, its link and its server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from diloco.base.clock import monotonic_s
from diloco.base.errors import DilocoError, IncompatibleError, Interrupted, TicketError, UnreachableError
from diloco.identity.keys import VARIABLE, keys_from_environment
from diloco.protocol.messages import Reply
from diloco.protocol.streams import Welcome
from diloco.transport.address import join_address, split_address
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import Server, serve
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service

T = TypeVar("T")

JOIN_PATIENCE_S = 10.0
"""Seconds for which a joiner tries an address before it reports that nobody listens there."""
STARTING_S = 120.0
"""The same for one that answers that it is starting: its directory, and the ranks of its island, take their time."""


class StartingError(UnreachableError):
    """A peer is there, and takes nobody in yet."""


class Runtime:
    """An event loop on a daemon thread, with the gRPC link of this process. `DILOCO_SECRET` makes its keys.

    The arguments are those of `GrpcLink`.
    """

    def __init__(self, rpc_s: float, send_bps: float = 0.0, streams: int = 1) -> None:
        self._keys = keys_from_environment()
        # With a factory, for without it the caller's thread has the loop, too.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._live, name="exchange", daemon=True)
        self._thread.start()
        self._rpc_s = rpc_s
        self._server: Server | None = None
        self.link = self.run(self._open_link(send_bps, streams), 10.0)

    def _live(self) -> None:
        with self._runner:  # which cancels what still runs in the end, and closes the loop
            self.loop.run_forever()

    async def _open_link(self, send_bps: float, streams: int) -> GrpcLink:
        return GrpcLink(self._rpc_s, self._keys, send_bps, streams)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run on the loop, wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def hello(
        self,
        addresses: Sequence[str],
        check: Callable[[str, Welcome], T],
        say: Callable[[str], None],
        wanted: Callable[[], bool],
    ) -> tuple[T, Welcome]:
        """Ask who is there, at each address in turn: the first that answers and passes `check`, what that returns, and
        what the member says.

        `say` is told why it takes so long; `wanted`: whether anybody still waits. Raises UnreachableError when none
        answered for `JOIN_PATIENCE_S` (`STARTING_S`); and IncompatibleError, or a DilocoError of `check`, when somebody
        answered and nobody passed: where one peer was, another run's may be by now.
        """
        began_s, said = monotonic_s(), ""
        while True:
            silent: list[UnreachableError] = []
            others: list[DilocoError] = []
            for address in addresses:
                try:
                    welcome = self._hello(address)
                    return check(address, welcome), welcome
                except UnreachableError as error:
                    silent.append(error)
                except DilocoError as error:
                    others.append(error)
            if others:
                raise others[0]
            patience_s = STARTING_S if any(isinstance(error, StartingError) for error in silent) else JOIN_PATIENCE_S
            why = "; ".join(error.cause for error in silent)
            if not wanted():
                raise Interrupted(f"stopped before anybody answered: {why}")
            if monotonic_s() - began_s >= patience_s:
                raise UnreachableError(why, silent[-1].fix) from silent[-1]
            if why != said:
                said = why
                say(f"{why}: trying for {patience_s:g} s")
            self.run(asyncio.sleep(0.25), 5.0)

    def _hello(self, address: str) -> Welcome:
        try:
            return self.run(self.link.hello(address, self._rpc_s), self._rpc_s + 5.0)
        except LinkRefused as error:
            if error.reply is Reply.TOO_EARLY:
                raise StartingError(f"{address} is still starting", "try again, or through another member") from error
            raise IncompatibleError(f"{address} refuses to talk: {error}", "use the same diloco release") from error
        except (LinkDown, LinkSlow) as error:
            raise unanswered(address, short(error)) from error

    def answer_of(self, address: str) -> Welcome | None:
        """Present welcome of the member at `address`; None where no member answers, or none that speaks our
        protocol."""
        try:
            return self._hello(address)
        except (UnreachableError, TicketError, IncompatibleError):
            return None

    def serve(self, service: Service, listen: str) -> str:
        """Answer at `listen` (host:port, port 0 takes a free one). Returns the address. Raises ResourceError."""
        self._server = self.run(serve(service, listen, self._keys), 10.0)
        return self._server.address

    def close(self) -> None:
        """Stop serving, end the thread and its loop: what still runs on it is cancelled."""
        if self._server is not None:
            self.run(self._server.stop(0.2), 5.0)
        self.run(self.link.close(), 5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


def unanswered(address: str, why: str) -> UnreachableError | TicketError:
    """The error where nobody is at `address`, or it does not let us in; `why`: as `short` has it."""
    if VARIABLE in why:
        advice = f"export the {VARIABLE} with which the run was founded"
        return TicketError(f"{address} does not let us in: {why}", advice)
    return UnreachableError(
        f"nobody answers at {address} ({why})", "check host and port; any live member of the run will do"
    )


def short(error: Exception) -> str:
    """The last clause of gRPC's account of a failed call, which is all that a person needs."""
    clause = str(error).rpartition(": ")[2]
    opened = "(" in clause or "[" in clause  # else what was opened before it closes at its end
    return (clause if opened else clause.rstrip("])")) or "no connection"


def reachable(served: str, toward: str | None) -> str:
    """The address to tell others when we listen on all of this machine's: the one that the route to `toward` leaves by.

    `toward` is a member's `host:port`; None takes the default route. Nothing is sent.
    """
    host, port = split_address(served)
    if host not in ("0.0.0.0", "::"):
        return served
    other = split_address(toward)[0] if toward else ("192.0.2.1" if "." in host else "2001:db8::1")  # RFC 5737, 3849
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, port))
            return join_address(probe.getsockname()[0], port)
        except OSError:  # no route: at least this machine can be reached from itself
            return join_address("::1" if family == socket.AF_INET6 else "127.0.0.1", port)
