"""The life of a peer before: what its folder holds of it, and the members of its run that may still be there."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from diloco.accounts.ledger import LEDGER, read_ledger
from diloco.accounts.left_off import LeftOff, left_off
from diloco.base.errors import StateError
from diloco.config.site import Site
from diloco.exchange.votes import past_votes
from diloco.storage.checkpoint import CHECKPOINTS, Checkpoint, latest, load, newest


@dataclass(frozen=True)
class PastRun:
    """The run that a peer's folder was in before, and the members of it that may still be there."""

    folder: Path
    began_us: int
    written_s: float
    contract_digest: str
    version: int
    others: tuple[str, ...]
    """Addresses of the other members; of earlier ones where there is none."""
    left: LeftOff | None = None
    """Contents of the ledger; None: there is none."""

    @property
    def was_left_out(self) -> bool:
        """Whether the last commit there leaves that life out: the others went on, and to found the run anew would fork
        it."""
        past = past_votes(self.folder)
        return past is not None and not past.goes_on

    @property
    def tickets(self) -> list[str]:
        """Addresses of the other members of the run to resume, with the contract they should train."""
        return [f"{address}/{self.contract_digest}" for address in self.others]

    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the run to resume, and of the history in its ledger: a folder may hold those of
        a run, or of a lineage, that was left. None: there is none. Raises StateError when none is valid."""
        saved = latest(self.folder / CHECKPOINTS)
        return newest(saved.parent, self._is_ours) if saved is not None else None

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        commit, left = checkpoint.commit, self.left
        if checkpoint.contract.digest != self.contract_digest:
            return False
        if left is None or (commit.digest if commit else "") in left.history.get(checkpoint.version, ()):
            return True
        # A full disk refuses records, and may take a checkpoint. Times alone prove nothing: a copy has its own.
        unwritten = checkpoint.version > self.version and saved_us(checkpoint) > 1e6 * self.written_s
        return (unwritten or not left.whole) and commit is not None and commit.lineage in left.lineages


def past_of(folder: Path) -> PastRun | None:
    """The run to resume from a peer's folder: by its ledger, which is newer than any checkpoint; by a checkpoint where
    there is no ledger, as under gossip.

    None when no peer wrote there. Raises StateError for a damaged checkpoint; the next writer of a ledger reports its
    damage.
    """
    ledger, saved = folder / LEDGER, latest(folder / CHECKPOINTS)
    try:
        left = left_off(read_ledger(ledger).records) if ledger.is_file() else None
    except (StateError, ValueError):
        left = None
    if left is not None:
        members = [one for one in left.others if not one.witness] or left.earlier
        others = tuple(member.address for member in members)
        written_s, contract = ledger.stat().st_mtime, left.contract_digest
        return PastRun(folder, left.began_us, written_s, contract, left.version, others, left)
    if saved is None:
        return None
    checkpoint = load(saved.parent)
    name, commit = checkpoint.peer, checkpoint.commit
    known = [member.address for member in commit.view if member.peer != name] if commit is not None else []
    met = checkpoint.meta.get("others")  # under gossip, where there is no view
    known += [address for address in met if isinstance(address, str)] if isinstance(met, list) else []
    saved_at = saved_us(checkpoint)
    return PastRun(folder, saved_at, saved_at / 1e6, checkpoint.contract.digest, checkpoint.version, tuple(known))


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint that a person names, or the one to resume from in the folder of a peer. Raises StateError."""
    folder = path.parent if path.name == CHECKPOINTS else path
    past = past_of(folder) if (folder / LEDGER).is_file() else None
    found = past.checkpoint() if past is not None else load(checkpoints_in(path))
    if found is None:
        cause = f"no checkpoint in {path.absolute()} is of the run that its ledger ends with"
        raise StateError(cause, "name the one that is meant: FOLDER/checkpoints/v00000001")
    return found


def checkpoints_in(path: Path) -> Path:
    """The checkpoints to resume from in a peer's folder; what is no such folder stays as it is."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def saved_us(checkpoint: Checkpoint) -> int:
    """Time at which the checkpoint of the run to resume was saved, as `new_incarnation` counts."""
    return int(1e6 * checkpoint.path.stat().st_mtime)


def peer_name(site: Site, checkpoint: Checkpoint | None) -> str:
    """Name under which a peer enters a run. One that resumes keeps the name in its checkpoint."""
    if checkpoint is not None:
        return checkpoint.peer
    return site.peer.name or f"{socket.gethostname()[:40]}-{secrets.token_hex(2)}"
