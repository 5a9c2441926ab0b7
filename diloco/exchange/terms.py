"""Settings of contract and site as the exchange and its lanes take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.compress import Codec
from diloco.outer.average import Averaging, max_mean_bytes
from diloco.outer.fragments import Layout
from diloco.outer.line import Weighing
from diloco.outer.state import OuterOptimizer
from diloco.protocol.view import Rules, Timing


@dataclass(frozen=True)
class LaneTerms:
    """Settings of the run that a lane needs."""

    layout: Layout
    """Layout of the parts that are held here. Without fragments for a witness."""
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    stall_s: float
    max_norm_ratio: float = 0.0
    """A contribution that is so many times larger than the others' is refused; 0: none is."""
    averaging: Averaging = field(default_factory=Averaging)
    """The rule by which parts are averaged."""
    ahead: bool = True
    """Outer steps are made part by part as the mean arrives; else in place, when the version is applied."""

    @property
    def max_part_bytes(self) -> int:
        """Largest part that a lane takes from other peers, in bytes."""
        return max_part_bytes(self.layout, self.codecs)


@dataclass(frozen=True)
class Terms:
    """Settings of the run that the exchange of a peer needs."""

    contract_json: bytes
    rules: Rules
    timing: Timing
    lane: LaneTerms
    """For the lane of each rank."""
    layout_digest: str
    """Digest of the canonical layout; a joiner's model must have the same."""
    total_tokens: int
    data: str
    """Fingerprint of the training data; empty when each peer has its own."""
    serve_bps: float = 0.0
    """Limit for serving the state to joiners, bits per second; 0: none."""


def max_part_bytes(layout: Layout, codecs: Sequence[Codec]) -> int:
    """Most bytes that a part of a mean has on its way between lanes; `codecs` by group of parameters."""
    sizes = (
        max_mean_bytes(codecs[group], min(elements, fragment.part_elements))
        for fragment in layout.fragments
        for group, elements in fragment.groups
    )
    return max(sizes, default=0)
