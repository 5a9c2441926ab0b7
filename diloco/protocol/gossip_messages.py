"""Messages of the policy `gossip`, in which no version is agreed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from diloco.base.types import Member, MinValue, Progress


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """A peer's own account of itself, as others pass it on (policy `gossip`)."""

    member: Member
    beat: int
    """Counts what it told of itself in this life: the later word holds."""
    progress: Progress
    """Its tokens are those of all its lives, as far as its weights come from them."""
    spread: float = -1.0
    """Between it and the other of its last swap (`diloco.gossip.pairing.spread`); negative: it had none yet."""
    age_s: Annotated[float, MinValue(0)] = 0.0
    """Since it said so, as far as those who passed it on can tell."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """This is me, and these are the others I know."""

    known: tuple[Acquaintance, ...]
    """The sender first."""
    answer: bool
    """To a greeting: it wants none back."""


@dataclass(frozen=True, slots=True)
class Invite:
    """Swap weights with me. The answer is OK when my stream of parts is awaited."""

    number: int
    """Counts the swaps that the sender led in this life, from 1."""
    sender: Acquaintance
