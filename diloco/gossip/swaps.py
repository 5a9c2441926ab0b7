"""A peer's place in a swap under gossip, without I/O: it is in one at a time, and applies each once at most.

    leader:      ASKING --agreed--> LEADING --weights whole--> WHOLE
    follower:                     FOLLOWING --weights whole--> WHOLE

Who leads asks first, then sends its weights; who follows applies the swap between two of its inner steps, and answers
with its own weights, upon which the leader applies it too. If the leader does not get the answer, one side has applied
the swap and the other has not. Gossip allows that: nobody's progress is lost by it, and none is counted twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from diloco.base.types import Member
from diloco.protocol.messages import Reply

MAX_SERVED = 4096
"""Peers of which is remembered what swap of theirs was served last."""


class SwapStage(StrEnum):
    """How far a swap is."""

    ASKING = "asking"  # the other was asked
    LEADING = "leading"  # it agreed: its weights are awaited, for ours
    FOLLOWING = "following"  # we agreed: its weights are awaited
    WHOLE = "whole"  # its weights are here: the training side goes on


@dataclass(eq=False)
class Swap:
    """One swap, as one of the two sees it."""

    number: int
    """The leader's count."""
    partner: Member
    leads: bool
    """Whether we lead."""
    stage: SwapStage
    deadline_s: float = math.inf

    @property
    def leader(self) -> tuple[str, int, int] | None:
        """Who leads, in which life, and its number; None: we do."""
        return None if self.leads else (self.partner.peer, self.partner.incarnation, self.number)


class Swaps:
    """The one swap that a peer is in, if any."""

    def __init__(self, me: str) -> None:
        self.current: Swap | None = None
        self._me = me
        self._led = 0
        self._answered = 0
        """The last swap that we led whose answer was whole."""
        self._served: dict[str, tuple[int, int]] = {}
        """By leader: incarnation and number of the swap that was served last."""

    def lead(self, partner: Member) -> Swap | None:
        """Begin to ask. None: we are in a swap."""
        if self.current is not None:
            return None
        self._led += 1
        self.current = Swap(self._led, partner, True, SwapStage.ASKING)
        return self.current

    def invited(self, sender: Member, number: int, now_s: float, patience_s: float) -> Reply:
        """Somebody asks us. Of two that ask each other at once the first by name leads."""
        current, mine = self.current, (sender.incarnation, number)
        if self.has_served(sender, number):
            return Reply.OK  # it is asked again: the answer is still known
        if mine < self._served.get(sender.peer, (0, 0)):
            return Reply.STALE
        if current is not None and current.leader == (sender.peer, *mine):
            return Reply.OK
        if current is not None and not self._yields(current, sender.peer):
            return Reply.BUSY
        self.current = Swap(number, sender, False, SwapStage.FOLLOWING, now_s + patience_s)
        return Reply.OK

    def _yields(self, current: Swap, sender: str) -> bool:
        """Whether our swap makes room for one that the same peer leads: ours is not begun, or one it has given up."""
        mine_first = current.stage is SwapStage.ASKING and self._me < sender
        return (
            current.partner.peer == sender
            and current.stage in (SwapStage.ASKING, SwapStage.FOLLOWING)
            and not mine_first
        )

    def agreed(self, swap: Swap) -> bool:
        """The other agreed. Whether we are still in that swap."""
        if self.current is not swap or swap.stage is not SwapStage.ASKING:
            return False
        swap.stage = SwapStage.LEADING
        return True

    def awaited(self, sender: Member, number: int, answer: bool) -> Swap | None:
        """The swap whose weights, or answer, these are; None: we do not wait for such."""
        swap = self.current
        stage = SwapStage.LEADING if answer else SwapStage.FOLLOWING
        fits = swap is not None and swap.stage is stage and swap.partner == sender and swap.number == number
        return swap if fits else None

    def moved(self, swap: Swap, now_s: float, patience_s: float) -> None:
        """There was progress: the other has so long for the next."""
        if swap.stage is not SwapStage.WHOLE:
            swap.deadline_s = now_s + patience_s

    def whole(self, swap: Swap) -> bool:
        """All weights of the other are here. Whether we are still in that swap, and this is news."""
        if self.current is not swap or swap.stage is SwapStage.WHOLE:
            return False
        swap.stage, swap.deadline_s = SwapStage.WHOLE, math.inf
        self._answered = swap.number if swap.leads else self._answered
        return True

    def has_whole(self, sender: Member, number: int, answer: bool) -> bool:
        """Whether these weights, or this answer, are here already: another stream of the same brought the last of them,
        or they are sent once more, as the line broke before we could say so."""
        swap, leader = self.current, (sender.peer, sender.incarnation, number)
        if answer:
            return number == self._answered
        return swap is not None and swap.stage is SwapStage.WHOLE and swap.leader == leader

    def served(self, swap: Swap) -> None:
        """We have applied, as the follower, what will not be applied again."""
        self._served.pop(swap.partner.peer, None)
        self._served[swap.partner.peer] = (swap.partner.incarnation, swap.number)
        while len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]

    def has_served(self, sender: Member, number: int) -> bool:
        """Whether that swap of this leader was applied here, and none of its later ones."""
        return self._served.get(sender.peer) == (sender.incarnation, number)

    def overdue(self, now_s: float) -> Swap | None:
        """The swap that must be given up, if it must."""
        return self.current if self.current is not None and now_s > self.current.deadline_s else None

    def end(self, swap: Swap) -> bool:
        """It is over. Whether we were still in it."""
        if self.current is not swap:
            return False
        self.current = None
        return True
