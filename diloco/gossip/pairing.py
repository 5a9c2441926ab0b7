"""What two peers do with each other's weights under gossip (NoLoCo, arXiv 2506.10911): no all-reduce, only pairs.

Each peer has slow weights θ of its own (its anchor) and a momentum m. With δ = local - θ, a swap is

    m ← β m + η mean(δ) + η (mean(θ) - θ);   θ ← θ + m        means over the two

Both terms have one coefficient, so that only the mean of the two local weights is needed, and one payload travels in
each direction:

    m ← β m + η (mean(local) - θ);   θ ← θ + m

The sum of what both gain is η (δ₁ + δ₂), so that no progress is lost; and each is pulled towards the other, or the
peers would drift apart for ever. Among many peers that meet at random the pull wins if η < 2 (1 - β²): written as a
linear recursion of E θ², E θ m and E m² over peers of mean zero, the largest eigenvalue is 1 there. Beyond it momentum
carries the peers past each other, further at each swap.

fp32 on the host, each operation rounded on its own, as in `diloco.outer.optimizers`. Nobody compares bits here, but a
swap that is
replayed gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diloco.compress import PayloadError
from diloco.compress.codec import magnitude
from diloco.config.contract import Contract
from diloco.outer.state import FragmentState, tiles


@dataclass(frozen=True)
class CountedWeights:
    """Our weights as a swap counts them, and the progress that they hold."""

    local: Tensor
    """As the parameters' dtype holds them; flat fp32, as `exact` is."""
    exact: Tensor
    """The same on the exact anchor: what others get. `local` itself where parameters hold fp32."""
    steps: int
    tokens: int


@dataclass(frozen=True)
class Pairing:
    """A pure function from a peer's state and the mean of two local weights to its next state."""

    lr: float
    """η."""
    momentum: float
    """β."""

    def step(self, state: FragmentState, mean: Tensor) -> FragmentState:
        """The state after a swap. `mean`: `pair_mean` of the two local weights."""
        after = state.unfilled()
        for tile in tiles(mean.numel()):
            pull = (mean[tile] - state.anchor[tile]).mul_(self.lr)
            momentum = torch.mul(state.slots["momentum"][tile], self.momentum, out=after.slots["momentum"][tile])
            torch.add(state.anchor[tile], momentum.add_(pull), out=after.anchor[tile])
        return replace(after, steps=state.steps + 1)


def settle(state: FragmentState, mean: Tensor) -> FragmentState:
    """The state after a swap of the final average: the mean itself, and no momentum any more."""
    return FragmentState(mean, {"momentum": torch.zeros_like(mean)}, state.steps + 1, state.fragment)


def pair_mean(mine: Tensor, theirs: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of two local weights, flat fp32: `out`, which may be one of them, or new. Halves are summed, lest a sum
    overflow."""
    mean = torch.empty_like(mine) if out is None else out
    for tile in tiles(mine.numel()):
        torch.add(mine[tile] * 0.5, theirs[tile] * 0.5, out=mean[tile])
    return mean


def spread(mine: Tensor, theirs: Tensor) -> float:
    """How far two weights are apart: root mean square of their difference over that of the weights; 0: nothing.

    For people, and for when the final average is over: a sum over elements is not the same bits everywhere.
    """
    apart, size = 0.0, 0.0
    for tile in tiles(mine.numel()):
        apart += _squares(mine[tile] - theirs[tile])
        size += (_squares(mine[tile]) + _squares(theirs[tile])) / 2
    return math.sqrt(apart / size) if size else 0.0


def check_partner(mine: Tensor, theirs: Tensor, max_norm_ratio: float) -> None:
    """Raises PayloadError when the other's weights are so many times larger than ours that no honest peer has them.

    `max_norm_ratio` 0: any size will do, but none may overflow.
    """
    own, other = (math.sqrt(_squares(values) / max(values.numel(), 1)) for values in (mine, theirs))
    if max_norm_ratio and own and other > max_norm_ratio * own:
        raise PayloadError(f"the weights are absurdly large: root mean square {other:.3g}, ours {own:.3g}")
    if not magnitude(mine) + magnitude(theirs) <= torch.finfo(torch.float32).max / 4:
        raise PayloadError("the weights are too large to be averaged")


def _squares(values: Tensor) -> float:
    """Their sum. The squares of what fp32 holds do not fit in it."""
    wide = (values[tile].double() for tile in tiles(values.numel()))
    return math.fsum(float(torch.dot(tile, tile)) for tile in wide)


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
