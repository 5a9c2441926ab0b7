"""One peer's disk: the checkpoints that a later life finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from diloco.outer import OuterState
from diloco.sim.virtual.invariants import Pieces
from diloco.types import Commit


@dataclass(frozen=True)
class Snapshot:
    """What `Peer.save` writes, and the pieces that the local weights hold beyond the anchor."""

    state: OuterState
    commit: Commit | None
    local: Mapping[str, Tensor]
    """Empty when no tokens are uncommitted."""
    tokens: int
    blocks: int
    pieces: Pieces | None


@dataclass
class Disk:
    """Keeps whole checkpoints: a new one replaces nothing before it is complete."""

    full: bool = False
    _kept: list[Snapshot] = field(default_factory=list)

    def save(self, snapshot: Snapshot) -> bool:
        """False when there is no room."""
        if not self.full:
            self._kept = [*self._kept[-1:], snapshot]
        return not self.full

    def load(self) -> Snapshot | None:
        """The latest checkpoint."""
        return self._kept[-1] if self._kept else None

    def forget(self) -> None:
        """Power is lost and the latest checkpoint had not reached the platter."""
        self._kept = self._kept[:-1]
