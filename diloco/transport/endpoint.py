"""A peer's access to the network: the address where it listens, the member that it joins through, the directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from diloco.base import failpoints
from diloco.base.errors import TicketError, UnreachableError, UsageError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.config.site import NetworkSection, Site
from diloco.identity.keys import VARIABLE, secret_from_environment
from diloco.protocol.streams import Welcome
from diloco.transport.address import is_loopback, split_address, split_ticket
from diloco.transport.dht import Directory, Presence, Present
from diloco.transport.runtime import Runtime, reachable

PROBE_S = 1.0


async def nobody_listens(address: str) -> bool:
    """Whether the process that listened at `address` is gone for certain.

    Only loopback gives proof: nothing but the kernel itself refuses a connection there, and a refusal that crossed a
    network may be a firewall's.
    """
    if not is_loopback(address):
        return False
    host, port = split_address(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


logger = logging.getLogger(__name__)


class Endpoint:
    """The way out of this process. Made first: the directory's process imports hivemind while we build the model."""

    def __init__(self, site: Site, lanes: int = 1) -> None:
        """`lanes`: so many ranks of an island share `network.send_bps`."""
        failpoints.arm_from_environment()
        listen = site.network.listen
        secret = secret_from_environment()
        if not (is_loopback(listen) or site.network.insecure or secret):
            cause = f"listening on {listen} without a secret lets anybody in who can reach it"
            fix = f"export {VARIABLE} (16 characters or more, the same for every peer), or say --insecure"
            raise UsageError(cause, fix)
        self.site = site
        self.directory = Directory()
        self.runtime = Runtime(site.timeouts.rpc_s, site.network.send_bps / lanes, site.network.streams)
        self.welcome: Welcome | None = None

    def fetch_contract(
        self, tickets: str, say: Callable[[str], None] = logger.warning, wanted: Callable[[], bool] = lambda: True
    ) -> Contract:
        """Ask the member at `HOST:PORT[/DIGEST]` for the contract; of several, with commas, the first that answers and
        trains what it should.

        `say` is told why it takes so long; `wanted` is asked whether anybody still waits.
        Raises UsageError, UnreachableError, IncompatibleError, and TicketError when the contract is not the one in the
        ticket.
        """
        doors = dict(split_ticket(ticket) for ticket in tickets.split(","))

        def checked(address: str, welcome: Welcome) -> Contract:
            contract, expected = contract_from_json(welcome.contract), doors[address]
            if not contract.digest.startswith(expected):
                cause = f"{address} trains contract {contract.digest[:12]}, the address given names {expected}"
                raise TicketError(cause, "ask for the current join line: `diloco status` prints it")
            return contract

        contract, self.welcome = self.runtime.hello(list(doors), checked, say, wanted)
        return contract

    def open_directory(self, run: str, warn: Callable[[str], None]) -> None:
        """Take part in the peer directory. A joiner that finds nobody there goes on without: members tell of others,
        and `Presence` tries again."""
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
            except (UnreachableError, UsageError) as error:  # nobody is there; or those, a member's, are no addresses
                warn(f"{error.cause}; going on without it, and trying again later")

    def appear(self, exchange: Present) -> Presence:
        """Have the directory say where we are, from now on."""
        return Presence(self.directory, exchange, self.runtime.answer_of)

    def close(self) -> None:
        """End link, server and directory."""
        self.runtime.close()
        self.directory.close()


def known_here_only(network: NetworkSection) -> str:
    """Warning for a founder that listens for others and does not know at which address; empty: it does."""
    if network.advertise is not None or is_loopback(network.listen):
        return ""
    address = reachable(network.listen, None)
    if not is_loopback(address):
        return ""
    return f"no route tells this machine's address: others are told {split_address(address)[0]}; set network.advertise"


def listening(site: Site, tickets: str | None) -> Site:
    """The site of who joins with these tickets. It listens on loopback by default, where members on other machines
    would not reach it: then on a free port of all addresses instead. Raises UsageError."""
    network = site.network
    if not tickets or network.listen != NetworkSection().listen or network.advertise is not None:
        return site
    away = [address for address, _ in map(split_ticket, tickets.split(",")) if not is_loopback(address)]
    if not away:
        return site
    listen = "[::]:0" if all(address.startswith("[") for address in away) else "0.0.0.0:0"
    return site.model_copy(update={"network": network.model_copy(update={"listen": listen})})
