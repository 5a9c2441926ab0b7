"""The settings that `scripts/bench-sync` hands to each process of sync_peer.py, whichever Python runs it."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = 16
WIDTH = 1024


@dataclass(frozen=True)
class Task:
    """The settings of one peer."""

    system: str
    codec: str
    rank: int
    peers: int
    mebi_params: float
    host: str
    """Address to listen on."""
    interface: str
    scratch: str
    """A folder of its own."""
    streams: int = 1
    """diloco's `network.streams`."""
    log: bool = True
    """diloco's `storage.log`."""

    @property
    def elements(self) -> int:
        return LAYERS * WIDTH * self.rows

    @property
    def rows(self) -> int:
        """Rows of each layer's matrix."""
        return max(round(self.mebi_params * 2**20 / (LAYERS * WIDTH)), 1)

    @property
    def mean_length(self) -> float:
        """Average distance that the peers have moved."""
        return (self.peers + 1) / 2
