"""Messages of the policy `gossip`, and what peers report of each other in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from diloco.base.types import Member, MinValue, Progress


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """A peer's report of its own progress, as other peers pass it on."""

    member: Member
    beat: int
    """Counts the reports of one life of the peer: the later one holds."""
    progress: Progress
    """Its tokens are those of all lives of the peer that its weights come from."""
    spread: float = -1.0
    """Between the two peers of its last swap (`diloco.gossip.pairing.spread`); negative: it had none yet."""
    age_s: Annotated[float, MinValue(0)] = 0.0
    """Age of the report, summed by the peers that passed it on."""
    start_tokens: int = 0
    """Tokens with which this life of the peer began, by its checkpoint."""
    earlier_tokens: int = 0
    """Tokens of the peer's earlier lives, as far as the one knows that passes the report on. None in its own report."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The peers that the sender knows."""

    known: tuple[Acquaintance, ...]
    """The sender first."""
    answer: bool  # to a greeting: it asks for none back


@dataclass(frozen=True, slots=True)
class Invite:
    """Asks for a swap of weights. The reply is OK when the receiver awaits the sender's parts."""

    number: int  # counts the swaps that the sender led in this life, from 1
    sender: Acquaintance
