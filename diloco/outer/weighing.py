"""What a contribution weighs, and how large the outer step of a version is that counts some of the trainers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.base.types import Counted, Member
    from diloco.config.contract import Contract


MIN_RMS = 1e-3
"""The others count as at least that large. Where they hardly moved (rows of an embedding that few saw, the first steps
of a warm-up) any honest step would be a hundred times theirs; weights begin at about 0.02."""


def outlier(sizes: Sequence[float], max_norm_ratio: float) -> int | None:
    """The index of the largest contribution, if it is beyond `max_norm_ratio` times the others' lower median.

    `sizes`: the root mean square of each contribution to the part; sums over elements round differently from CPU to
    CPU, so the part's owner alone decides. One is never judged; of two, the larger by the
    smaller, for nobody could say which one lies. Zeros are peers that did not train: they set no measure. A ratio of 0
    lets everything pass.
    """
    moved = sorted(size for size in sizes if size > 0)
    if not max_norm_ratio or len(moved) < 2:
        return None
    lower_median = moved[(len(moved) - 1) // 2]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return largest if sizes[largest] > max_norm_ratio * max(lower_median, MIN_RMS) else None


FINE = 1000
"""Weight of a contribution where weights are not all the same: weights are whole numbers."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """The contract's rule. The same for all peers: the share that follows from a commit goes into the state."""

    by_tokens: bool = False
    """Contributions weigh as many as their tokens; else all weigh the same."""
    whole: int = 1
    """Weight of one with a round's inner steps that is not late."""
    staleness_power: float = 0.0
    """`OuterSection.staleness_power`."""
    shares: bool = False
    """A version's outer step is in proportion to what it counts (`OuterSection.partial`)."""

    @staticmethod
    def of(contract: Contract) -> Weighing:
        """The contract's."""
        outer = contract.outer
        by_tokens = outer.weighting == "tokens"
        same = FINE if outer.staleness_power else 1
        whole = contract.steps_per_round * contract.tokens_per_step if by_tokens else same
        return Weighing(by_tokens, whole, outer.staleness_power, contract.partial == "share")

    def weight(self, tokens: int, staleness: float) -> int:
        """Of a contribution of so many tokens. `staleness`: versions that closed while it was made, over the trainers:
        one that is not slower than the others has at most about 1."""
        late: float = max(staleness, 1.0) ** -self.staleness_power
        return max(round((tokens if self.by_tokens else self.whole) * late), 1)

    def share(self, counted: Sequence[Counted], view: Sequence[Member]) -> float:
        """Of the outer step: the weights that a version counts over the whole weight of all trainers in the `view`,
        those included that it counts and that are not in it; 1 at most, and always where `shares` is off."""
        if not self.shares:
            return 1.0
        trainers = {member.peer for member in view if not member.witness} | {entry.peer for entry in counted}
        return min(sum(entry.weight for entry in counted) / (len(trainers) * self.whole), 1.0)
