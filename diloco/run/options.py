"""Options of `diloco peer` on the command line, checked as far as that goes before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.base.errors import StateError, UsageError
from diloco.config.contract import Contract
from diloco.config.load import load_contract, load_site, remembered_root
from diloco.config.site import Site
from diloco.transport.address import split_ticket

CARD = "peer.json"
"""File in a peer's folder with the address where it listens."""


@dataclass(frozen=True)
class PeerOptions:
    """Options of `diloco peer` and `diloco witness`."""

    contract: Path | None
    join: str | None
    site: Path | None
    resume: Path | None
    contract_overrides: Sequence[str] = ()
    site_overrides: Sequence[str] = ()
    insecure: bool = False
    name: str | None = None
    directory: Path | None = None


def checked(options: PeerOptions) -> tuple[Site, Contract | None]:
    """The site, and the contract to found a run with, if any. Raises UsageError, ConfigError and IncompatibleError."""
    if options.contract and options.join:
        raise UsageError("a contract and --join do not go together", "the contract travels: leave it out to join")
    if not (options.contract or options.join or options.resume):
        raise UsageError("nothing to do", "give a contract to found a run, or --join HOST:PORT, or --resume FOLDER")
    if options.contract_overrides and not options.contract:
        fix = "a joiner takes the contract as it is" if options.join else "the checkpoint holds its contract"
        raise UsageError("--set changes a contract only when founding", fix)
    if options.contract and options.resume:
        raise UsageError("a contract and --resume do not go together", "the checkpoint holds its contract")
    for ticket in options.join.split(",") if options.join else ():
        split_ticket(ticket)
    given = load_contract(options.contract, options.contract_overrides).value if options.contract else None
    return open_site(options), given


def open_site(options: PeerOptions) -> Site:
    """The site file, overridden by the command line; a resumed peer's folder remembers settings for what neither sets.
    Raises ConfigError."""
    overrides = list(options.site_overrides)
    if options.insecure:
        overrides.append("network.insecure=true")
    if options.name:
        overrides.append(f"peer.name={json.dumps(options.name)}")
    site = load_site(options.site, overrides)
    root = remembered_root(options.resume) if options.resume else None
    if root is not None and "data.root" not in site.origin:
        site = load_site(options.site, [*overrides, f"data.root={json.dumps(root)}"])
    return site.value


def member_address(text: str) -> str:
    """HOST:PORT of a member, from an address, a ticket, or the folder of a peer on this machine.

    Raises UsageError, and StateError where a folder is not that of a peer.
    """
    folder = Path(text)
    if not (folder.is_dir() or ("/" in text and ":" not in text)):
        return split_ticket(text)[0]
    try:
        return str(json.loads((folder / CARD).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"no peer has written its address to {folder.absolute() / CARD}"
        raise StateError(cause, "give the folder of a peer, or HOST:PORT of a live member") from error
