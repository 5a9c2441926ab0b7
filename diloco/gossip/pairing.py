"""The arithmetic of a swap under gossip (NoLoCo, arXiv 2506.10911): two peers average, and there is no all-reduce.

Each peer has slow weights θ of its own (its anchor) and a momentum m. With δ = local - θ, a swap is

    m ← β m + η mean(δ) + η (mean(θ) - θ);   θ ← θ + m        means over the two

Both terms have one coefficient. So only the mean of the two local weights is needed, and one payload travels in each
direction:

    m ← β m + η (mean(local) - θ);   θ ← θ + m

Both gain η (δ₁ + δ₂) in sum, so no progress is lost. Each is pulled towards the other; without this pull the peers
would drift apart for ever. Among many peers that meet at random the pull wins if η < 2 (1 - β²): written as a linear
recursion of E θ², E θ m and E m² over peers of mean zero, the largest eigenvalue is 1 there. Beyond it momentum carries
the peers past each other, further at each swap.

The final average is plainer: peers that train no more replace their anchor by the mean (`settle`) until they are alike
(`Settling`).

fp32 on the host, each operation rounded on its own, as in `diloco.outer.optimizers`. Nobody compares bits here, but a
swap that is replayed gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diloco.compress import PayloadError
from diloco.compress.codec import magnitude
from diloco.outer.state import FragmentState, tiles


@dataclass(frozen=True)
class CountedWeights:
    """This peer's weights as one swap counts them, and the progress that they hold."""

    local: Tensor
    """The weights as the parameters' dtype holds them; flat fp32, as `exact` is."""
    exact: Tensor
    """The same progress on the exact anchor: the other peer receives this. `local` itself where parameters hold
    fp32."""
    steps: int
    tokens: int


@dataclass(frozen=True)
class Pairing:
    """The outer step of a swap, with the contract's coefficients."""

    lr: float
    """η."""
    momentum: float
    """β."""

    def step(self, state: FragmentState, mean: Tensor) -> FragmentState:
        """A new outer state, one swap later. `mean`: `pair_mean` of the two local weights."""
        after = state.unfilled()
        for tile in tiles(mean.numel()):
            pull = (mean[tile] - state.anchor[tile]).mul_(self.lr)
            momentum = torch.mul(state.slots["momentum"][tile], self.momentum, out=after.slots["momentum"][tile])
            torch.add(state.anchor[tile], momentum.add_(pull), out=after.anchor[tile])
        return replace(after, steps=state.steps + 1)


def settle(state: FragmentState, mean: Tensor) -> FragmentState:
    """The outer state after a swap of the final average: the mean itself as anchor, and zero momentum."""
    return FragmentState(mean, {"momentum": torch.zeros_like(mean)}, state.steps + 1, state.fragment)


def pair_mean(mine: Tensor, theirs: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of two partners' local weights, flat fp32, in `out` (which may be one of them) or in a new tensor."""
    mean = torch.empty_like(mine) if out is None else out
    for tile in tiles(mine.numel()):  # halves are summed: the sum of two wholes may overflow
        torch.add(mine[tile] * 0.5, theirs[tile] * 0.5, out=mean[tile])
    return mean


def spread(mine: Tensor, theirs: Tensor) -> float:
    """Distance of two partners' weights: root mean square of their difference over that of the weights; 0: equal.

    It serves people, and the end of the final average. Nothing else: a sum over elements differs in its last bits from
    machine to machine.
    """
    apart, size = 0.0, 0.0
    for tile in tiles(mine.numel()):
        apart += _squares(mine[tile] - theirs[tile])
        size += (_squares(mine[tile]) + _squares(theirs[tile])) / 2
    return math.sqrt(apart / size) if size else 0.0


def check_partner(mine: Tensor, theirs: Tensor, max_norm_ratio: float) -> None:
    """Check a gossip partner's weights. Raises PayloadError when they are over `max_norm_ratio` times larger than ours,
    or would overflow. Honest peers have weights of like size. `max_norm_ratio` 0: any ratio will do."""
    own, other = (math.sqrt(_squares(values) / max(values.numel(), 1)) for values in (mine, theirs))
    if max_norm_ratio and own and other > max_norm_ratio * own:
        raise PayloadError(f"the weights are absurdly large: root mean square {other:.3g}, ours {own:.3g}")
    if not magnitude(mine) + magnitude(theirs) <= torch.finfo(torch.float32).max / 4:
        raise PayloadError("the weights are too large to be averaged")


def _squares(values: Tensor) -> float:
    """For the spread of two partners: the sum of the squares of all values."""
    wide = (values[tile].double() for tile in tiles(values.numel()))  # the squares of large fp32 do not fit in fp32
    return math.fsum(float(torch.dot(tile, tile)) for tile in wide)


SETTLED_WITH = 3
"""Peers that must be close to this one before its final average is over; or all, where there are fewer."""


@dataclass
class Settling:
    """One peer's record of its swaps in the final average, which is over once the last few partners were close to it.

    No peer meets all others. A few different ones stand for all.
    """

    tolerance: float
    max_swaps: int
    swaps: int = 0
    _spreads: dict[str, float] = field(default_factory=dict)
    """Spread by peer, in the order of their last swaps."""

    def swapped(self, peer: str, spread: float) -> None:
        """Record one more swap. `spread`: the distance of the two before it."""
        self.swaps += 1
        self._spreads.pop(peer, None)  # it becomes the latest
        self._spreads[peer] = spread

    def met_least(self, peers: Sequence[str]) -> list[str]:
        """The candidates among `peers` for the next swap: all that were never met, or else the one met longest ago."""
        strangers = [peer for peer in peers if peer not in self._spreads]
        latest = next(reversed(self._spreads), None)
        # A peer that was close and was met last has nothing new for us.
        close = latest if latest is not None and self._spreads[latest] <= self.tolerance else None
        return strangers or [peer for peer in self._spreads if peer in peers and peer != close][:1]

    def remaining(self, others: int) -> float | None:
        """The largest spread among the last `SETTLED_WITH` partners, or the last `others` where those are fewer. None:
        too few were met."""
        latest = list(self._spreads.values())[-min(others, SETTLED_WITH) :]
        return max(latest, default=0.0) if len(latest) >= min(others, SETTLED_WITH) else None

    def settled(self, others: int) -> bool:
        """Whether this peer needs no further swap. `others`: live peers that it knows."""
        remaining = self.remaining(others) if others else 0.0
        return self.swaps >= self.max_swaps or (remaining is not None and remaining <= self.tolerance)
