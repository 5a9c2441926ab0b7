"""Options of `diloco peer`, checked as far as possible without torch; the data root that a peer's folder remembers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diloco.base.errors import StateError, UsageError
from diloco.base.files import replacing_file
from diloco.config.contract import Contract
from diloco.config.load import load_contract, load_site
from diloco.config.site import Site
from diloco.transport.address import split_ticket

logger = logging.getLogger(__name__)

CARD = "peer.json"
"""File in a peer's folder with the address where it listens."""
SITE_CARD = "site.json"
"""File in a peer's folder with the data root of its site, and whether its run had a secret."""


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
    """A launched peer's site, and its contract to found a run. Raises UsageError, ConfigError, IncompatibleError."""
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
    """The site to launch a peer with: the site file, overridden by the command line; a resumed peer's folder remembers
    settings for what neither sets. Raises ConfigError."""
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
    """HOST:PORT of a member for status or evict, from an address, a ticket, or a peer's folder on this machine.

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


def remember(directory: Path, site: Site, private: bool) -> None:
    """Write the site's data root to `site.json` in the folder of a peer that enters a run: what is resumed or evaluated
    later finds the same data. With the folder's inode, which disks keep over a remount: a copy, which anybody may have
    made, remembers no data root. And whether the run has a secret (`private`). Raises OSError."""
    root = str(Path(site.data.root).absolute())
    card = {"data": {"root": root}, "folder": directory.stat().st_ino, "private": private}
    with replacing_file(directory / SITE_CARD) as file:
        file.write(json.dumps(card).encode() + b"\n")


def remembered_private(folder: Path) -> bool:
    """Whether the run that a peer's folder was in had a secret, or this user's key; False where that is not known."""
    try:
        return json.loads((folder / SITE_CARD).read_text()).get("private") is True
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def remembered_root(path: Path) -> str | None:
    """Data root for a resume or eval, from a peer's folder, folder of checkpoints, or checkpoint; None: not known.

    A folder that was not written here, or where others could write, is a stranger's, and its contract could then name
    any file of this machine: it is passed over with a warning. Raises StateError for a damaged file.
    """
    folder = path.absolute()
    places = (folder, folder.parent, folder.parent.parent)
    found = next((place / SITE_CARD for place in places if (place / SITE_CARD).is_file()), None)
    if found is None:
        return None
    try:
        tree = json.loads(found.read_text())
        root, number = tree["data"]["root"], tree.get("folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "delete it, and name the data's folder: data.root, --data-root"
        raise StateError(f"{found} is damaged", fix) from error
    status, owners = found.parent.stat(), {found.parent.stat().st_uid, found.stat().st_uid}
    why = ""
    if owners != {os.getuid()} or status.st_mode & 0o022:  # who writes in place knows the inode
        why = "may be written by others"
    elif number != status.st_ino:
        why = "was copied or restored"
    if why:
        _warn_once(f"{found} {why}: name the folder of the data (data.root, --data-root)")
        return None
    return str(root)


@cache
def _warn_once(text: str) -> None:
    """Log a warning, once in a process: the options of a peer are read again by each step of its launch."""
    logger.warning("%s", text)
