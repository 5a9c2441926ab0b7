"""The life before: what a peer's folder tells of it, and who of its run may still be there."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from diloco.accounts.ledger import LEDGER, left_off, read_ledger
from diloco.base.errors import StateError
from diloco.config.site import Site
from diloco.storage.checkpoint import Checkpoint, latest, load


@dataclass(frozen=True)
class Past:
    """What a folder tells of the life before."""

    folder: Path
    began_us: int
    written_s: float
    contract_digest: str
    version: int
    others: tuple[str, ...]
    """Where they listen."""

    @property
    def tickets(self) -> list[str]:
        """The others' addresses, with the contract they should train."""
        return [f"{address}/{self.contract_digest[:12]}" for address in self.others]

    def checkpoint(self) -> Checkpoint | None:
        """The newest of its run. Raises StateError when none is valid."""
        saved = latest(self.folder / "checkpoints")
        checkpoint = load(saved.parent) if saved is not None else None
        return checkpoint if checkpoint is not None and checkpoint.contract.digest == self.contract_digest else None


def past_of(folder: Path) -> Past | None:
    """From the ledger, which is newer than any checkpoint; from a checkpoint where there is none, as under gossip.

    None when nobody lived there. Raises StateError for a damaged checkpoint; a ledger's damage is told by its writer.
    """
    ledger, saved = folder / LEDGER, latest(folder / "checkpoints")
    try:
        left = left_off(read_ledger(ledger).records) if ledger.is_file() else None
    except (StateError, ValueError):
        left = None
    if left is not None:
        others = tuple(member.address for member in left.others if not member.witness)
        return Past(folder, left.began_us, ledger.stat().st_mtime, left.contract_digest, left.version, others)
    if saved is None:
        return None
    checkpoint = load(saved.parent)
    name, commit = checkpoint.value("peer", str), checkpoint.commit
    view = commit.view if commit is not None else ()
    met = checkpoint.meta.get("others")  # under gossip, where there is no view
    known = [address for address in met if isinstance(address, str)] if isinstance(met, list) else []
    others = (*(member.address for member in view if member.peer != name), *known)
    saved_at = saved_us(checkpoint)
    return Past(folder, saved_at, saved_at / 1e6, checkpoint.contract.digest, checkpoint.version, others)


def saved_us(checkpoint: Checkpoint) -> int:
    """When it was saved, as `new_incarnation` counts."""
    return int(1e6 * checkpoint.path.stat().st_mtime)


def peer_name(site: Site, checkpoint: Checkpoint | None) -> str:
    """A peer that comes back keeps its name."""
    if checkpoint is not None:
        return checkpoint.value("peer", str)
    return site.peer.name or f"{socket.gethostname()[:40]}-{secrets.token_hex(2)}"
