"""The end of a gossip run: the final average, until the peers are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.config.contract import Contract

SETTLED_WITH = 3
"""Peers that must be close by for the final average to be over; or all, where there are fewer."""


@dataclass
class Settling:
    """When the final average of a gossip run is over for a peer: the last few that it met were close to it.

    No peer sees all others, so that a few, each of them another one, stand for all.
    """

    tolerance: float
    max_swaps: int
    swaps: int = 0
    _spreads: dict[str, float] = field(default_factory=dict)
    """By peer, the latest last."""

    @staticmethod
    def of(contract: Contract) -> Settling:
        """The contract's."""
        return Settling(contract.gossip.tolerance, contract.gossip.final_swaps)

    def swapped(self, peer: str, spread: float) -> None:
        """One more swap; `spread` was found before it."""
        self.swaps += 1
        self._spreads.pop(peer, None)
        self._spreads[peer] = spread

    def met_least(self, peers: Sequence[str]) -> list[str]:
        """Those of `peers` whose turn it is: who was never met, or the one that was met longest ago.

        Who was close, and was met last, has nothing new for us.
        """
        strangers = [peer for peer in peers if peer not in self._spreads]
        latest = next(reversed(self._spreads), None)
        close = latest if latest is not None and self._spreads[latest] <= self.tolerance else None
        return strangers or [peer for peer in self._spreads if peer in peers and peer != close][:1]

    def remaining(self, others: int) -> float | None:
        """The largest spread found in the latest meetings with so many others, three at most; None: too few yet."""
        latest = list(self._spreads.values())[-min(others, SETTLED_WITH) :]
        return max(latest, default=0.0) if len(latest) >= min(others, SETTLED_WITH) else None

    def settled(self, others: int) -> bool:
        """Whether there is no need to go on. `others`: live peers that we know."""
        remaining = self.remaining(others) if others else 0.0
        return self.swaps >= self.max_swaps or (remaining is not None and remaining <= self.tolerance)
