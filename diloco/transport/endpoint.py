"""A process's access to the network: event loop, link and server of gRPC, and the run's directory.

Every rank that exchanges parts has a `Runtime`. Rank 0 has an `Endpoint` around it, which joins through a member and
takes part in the directory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.errors import DilocoError, IncompatibleError, Interrupted, TicketError, UnreachableError, UsageError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.config.site import NetworkSection, Site
from diloco.identity.keys import FILE_VARIABLE, VARIABLE, keys_of, secret_from_environment
from diloco.identity.user_key import key_path, secrets_to_try
from diloco.protocol.messages import Reply
from diloco.protocol.streams import Welcome
from diloco.transport.address import is_loopback, join_address, split_address, split_ticket
from diloco.transport.dht import AnnouncedPeer, Directory, Presence
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import Server, keep_freed_memory, serve
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow, Service
from diloco.transport.loop_probe import folder_from_environment, probe
from diloco.transport.process import raise_file_limit

logger = logging.getLogger(__name__)
T = TypeVar("T")

JOIN_PATIENCE_S = 10.0
"""Seconds for which a joiner tries the addresses of members before it reports that no peer listens there."""
STARTING_S = 120.0
"""The same where a member answers that it is starting: its directory, and the ranks of its island, take their time.
Or it has no room for connections: those that say nothing go within seconds, and with luck the next one is ours."""


class StartingError(UnreachableError):
    """A peer is at that address, and takes no joiner yet."""


class Runtime:
    """The event loop of all gRPC connections of this process, in a daemon thread, with its gRPC client and gRPC server.

    `secrets` are those that the run may have. The first holds for all that this process dials and serves, unless `link`
    is set to that of `first_answer`. The other arguments are those of `GrpcLink`.
    """

    def __init__(self, secrets: Sequence[str], rpc_s: float, send_bps: float = 0.0, streams: int = 1) -> None:
        self._probes = folder_from_environment()
        # With a factory, for without it the caller's thread has the loop, too.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._live, name="exchange", daemon=True)
        self._thread.start()
        self._rpc_s = rpc_s
        self._streams = streams
        self._server: Server | None = None
        self._links = [GrpcLink(rpc_s, keys_of(secret), send_bps, streams) for secret in secrets]
        self.link = self._links[0]

    def _live(self) -> None:
        keep_freed_memory()
        probe(self._probes)
        with self._runner:  # which cancels what still runs in the end, and closes the loop
            self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the event loop of the gRPC connections and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def first_answer(self, ask: Callable[[GrpcLink], Coroutine[Any, Any, T]], timeout_s: float) -> tuple[T, GrpcLink]:
        """The answer to a caller's first question to a member, and the link that it came by: with the first of the
        secrets that the member accepts. Raises TicketError where it accepts none, and what `ask` raises."""
        refused: list[TicketError] = []
        for link in self._links:
            try:
                return self.run(ask(link), timeout_s), link
            except TicketError as error:
                refused.append(error)
        if len(refused) == 1:
            raise refused[0]
        raise TicketError(f"{refused[0].cause}; tried {key_path()}, and none", refused[0].fix) from refused[0]

    def first_hello(self, address: str) -> tuple[Welcome, GrpcLink]:
        """Welcome that the member at a network `address` sends to who does not know yet which of the secrets is the
        run's, and the link it came by. Raises StartingError, UnreachableError, TicketError, or IncompatibleError (it
        does not speak our protocol)."""
        return self.first_answer(lambda link: self._hello(link, address), self._rpc_s + 5.0)

    async def _hello(self, link: GrpcLink, address: str) -> Welcome:
        try:
            return await link.hello(address, self._rpc_s)
        except LinkRefused as error:
            if error.reply is Reply.TOO_EARLY:
                raise StartingError(f"{address} is still starting", "try again, or through another member") from error
            if error.reply is Reply.STALE:
                raise UnreachableError(f"{address} {error.detail}", "join through another member") from error
            raise IncompatibleError(f"{address} refuses to talk: {error}", "use the same diloco release") from error
        except (LinkDown, LinkSlow) as error:
            raise unanswered(address, error) from error

    def answer_of(self, address: str) -> Welcome | None:
        """Welcome that the member at a network `address` sends now; None where no member of our protocol answers."""
        try:
            return self.run(self._hello(self.link, address), self._rpc_s + 5.0)
        except (UnreachableError, TicketError, IncompatibleError):
            return None

    def is_there(self, address: str) -> bool:
        """Whether a member of our protocol answers at a network `address`, be it that it is still starting."""
        try:
            self.first_hello(address)
        except StartingError:
            return True
        except TicketError as error:
            logger.warning("%s (%s)", error.cause, error.fix)
            return False
        except (UnreachableError, IncompatibleError):
            return False
        return True

    def serve(self, service: Service, listen: str) -> str:
        """Start the gRPC server: `service` answers at `listen` (host:port, port 0: a free one). Returns the address.

        Raises ResourceError.
        """
        self._server = self.run(serve(service, listen, self.link.keys, rpc_s=self._rpc_s, streams=self._streams), 10.0)
        return self._server.address

    def close(self) -> None:
        """Stop the gRPC server, close all connections, end the thread and its loop with what still runs on it."""
        if self._server is not None:
            self.run(self._server.stop(0.2), 5.0)
        for link in self._links:
            self.run(link.close(), 5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


class Endpoint:
    """A peer's connections to other peers: gRPC client and server, and the hivemind directory.

    Made first: the directory's process imports hivemind while we build the model.
    """

    def __init__(self, site: Site, lanes: int = 1, joins: bool = False, private: bool = False) -> None:
        """`lanes`: the number of an island's ranks, which share `network.send_bps`. `joins`: it never founds a run.
        `private`: it goes on in a run that had a secret.

        Raises UsageError, and ResourceError where a founder without a secret cannot have its user's key."""
        failpoints.arm_from_environment()
        listen = site.network.listen
        insecure = site.network.insecure
        if not (is_loopback(listen) or insecure or secret_from_environment()):
            cause = f"listening on {listen} without a secret lets anybody in who can reach it"
            fix = f"export {VARIABLE} (16 characters or more, the same for every peer), or say --insecure"
            raise UsageError(cause, fix)
        secrets = secrets_to_try(insecure, joins, private)
        self.site = site
        raise_file_limit()  # the directory's process inherits it
        self.directory = Directory()
        self.runtime = Runtime(secrets, site.timeouts.rpc_s, site.network.send_bps / lanes, site.network.streams)
        self.welcome: Welcome | None = None

    @property
    def private(self) -> bool:
        """Whether the run has a secret: the one in the environment, or this user's key."""
        return self.runtime.link.keys != keys_of("")

    def fetch_contract(
        self, tickets: str, say: Callable[[str], None] = logger.warning, wanted: Callable[[], bool] = lambda: True
    ) -> Contract:
        """Fetch the contract over gRPC from the member at `HOST:PORT[/DIGEST]`; of several, with commas, from the first
        that answers and trains the contract of that digest. Keeps that member's welcome, and the secret it accepts.

        `say` gets the reasons why it takes so long; `wanted` returns whether the caller still waits. Raises UsageError.
        Raises UnreachableError when no member answered for `JOIN_PATIENCE_S` (`STARTING_S`); and IncompatibleError, or
        TicketError (another contract than the ticket's), when one answered and none fits: at an address where one peer
        was, another run's may be by now.
        """
        digests = dict(split_ticket(ticket) for ticket in tickets.split(","))
        began_s, reported = monotonic_s(), ""
        while True:
            silent: list[UnreachableError] = []
            others: list[DilocoError] = []
            for address, digest in digests.items():
                try:
                    welcome, link = self.runtime.first_hello(address)
                    contract = contract_from_json(welcome.contract)
                    if digest not in ("", contract.digest):
                        cause = f"{address} trains contract {contract.digest}, the address given names {digest}"
                        raise TicketError(cause, "ask for the current join line: `diloco status` prints it")
                    self.welcome, self.runtime.link = welcome, link
                    return contract
                except UnreachableError as error:
                    silent.append(error)
                except DilocoError as error:
                    others.append(error)
            starting = any(isinstance(error, StartingError) for error in silent)
            if others and not starting:
                raise others[0]
            patience_s = STARTING_S if starting else JOIN_PATIENCE_S
            why = "; ".join(error.cause for error in silent)
            if not wanted():
                raise Interrupted(f"stopped before anybody answered: {why}")
            if monotonic_s() - began_s >= patience_s:
                raise UnreachableError(why, silent[-1].fix) from silent[-1]
            if why != reported:
                reported = why
                say(f"{why}: trying for {patience_s:g} s")
            self.runtime.run(asyncio.sleep(0.25), 5.0)

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """Take part in the run's hivemind directory. A joiner that finds no node goes on without: members send it the
        addresses of others, and `Presence` tries again."""
        network = self.site.network
        if self.welcome is None and (warning := known_here_only(network)):
            warn(warning)
        host, _ = split_address(network.listen)
        self.directory.open(run, host, network.dht_port)
        if not self.directory.addresses:
            warn("the peer directory is slow to start: going on without it until it has")
        elif self.welcome is not None and self.welcome.directory:
            try:
                self.directory.join(self.welcome.directory)
            except (UnreachableError, UsageError) as error:  # none answers; or a member sent what are no addresses
                warn(f"{error.cause}; going on without it, and trying again later")

    def appear(self, exchange: AnnouncedPeer) -> Presence:
        """Announce this peer in the hivemind directory from now on."""
        return Presence(self.directory, exchange, self.runtime.answer_of)

    def close(self) -> None:
        """Close all connections: the gRPC client, the gRPC server and the hivemind directory."""
        self.runtime.close()
        self.directory.close()


def known_here_only(network: NetworkSection) -> str:
    """Warning for a founder that listens for others but has no network address they can reach; empty where it has."""
    if network.advertise is not None or is_loopback(network.listen):
        return ""
    address = reachable(network.listen, None)
    if not is_loopback(address):
        return ""
    return f"no route tells this machine's address: others are told {split_address(address)[0]}; set network.advertise"


def listening(site: Site, tickets: str | None) -> Site:
    """Site of a peer that joins with these tickets. It listens on loopback by default, where other machines do not
    reach it: then on a free port of all network addresses instead. Raises UsageError."""
    network = site.network
    if not tickets or network.listen != NetworkSection().listen or network.advertise is not None:
        return site
    away = [address for address, _ in map(split_ticket, tickets.split(",")) if not is_loopback(address)]
    if not away:
        return site
    listen = "[::]:0" if all(address.startswith("[") for address in away) else "0.0.0.0:0"
    return site.model_copy(update={"network": network.model_copy(update={"listen": listen})})


def unanswered(address: str, error: Exception) -> UnreachableError | TicketError:
    """The error for a person where a gRPC call to `address` ended with LinkDown or LinkSlow."""
    clause = str(error).rpartition(": ")[2]  # the last clause of gRPC's text is all that a person needs
    opened = "(" in clause or "[" in clause  # else what was opened before it closes at its end
    why = (clause if opened else clause.rstrip("])")) or "no connection"
    if VARIABLE in why:
        advice = (
            f"give both sides the same {VARIABLE} or {FILE_VARIABLE}; a run on loopback without one lets in "
            f"the user who founded it, without one, and in containers the founder's key as {FILE_VARIABLE}"
        )
        return TicketError(f"{address} does not let us in: {why}", advice)
    if why.startswith(("Handshake read failed", "Handshake write failed")):  # it took the connection, and closed it
        cause = f"{address} closes new connections: it has as many as it allows, or no peer is behind that port"
        fix = "try again, or through another member; keep strangers from a peer's port by a firewall"
        return StartingError(cause, fix)
    return UnreachableError(
        f"nobody answers at {address} ({why})", "check host and port; any live member of the run will do"
    )


def reachable(served: str, toward: str | None) -> str:
    """Network address at which other peers reach a server: where it listens on all of this machine's addresses, the one
    of the route to `toward`.

    `toward` is a member's `host:port`; None takes the default route, and so does a member of another family than the
    server's: `[::]` serves IPv4, too. Nothing is sent.
    """
    host, port = split_address(served)
    if host not in ("0.0.0.0", "::"):
        return served
    routes = {socket.AF_INET6: "2001:db8::1"} if ":" in host else {}  # an address of documentation (RFC 3849)
    routes[socket.AF_INET] = "192.0.2.1"  # the same (RFC 5737)
    goals = [(family, split_address(toward)[0]) for family in routes] if toward else []
    for family, goal in [*goals, *routes.items()]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((goal, port))
            return join_address(probe.getsockname()[0], port)
    return join_address("::1" if ":" in host else "127.0.0.1", port)  # no route: this machine reaches itself at least
