"""One swap under gossip: its stages, the weights that arrive and leave, and its news for the training thread.

    leader:      ASKING --agreed--> LEADING --weights whole--> WHOLE
    follower:                     FOLLOWING --weights whole--> WHOLE

The leader asks first, then sends its weights. The follower applies the swap between two of its inner steps and answers
with its own weights, upon which the leader applies it too. If the answer is lost, the follower has applied the swap and
the leader has not. Gossip allows that: no progress is lost by it, and none is counted twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from diloco.base.memory import floats
from diloco.base.types import Member
from diloco.compress import Codec, PayloadError
from diloco.outer.fragments import Fragment
from diloco.protocol.messages import Reply
from diloco.protocol.streams import Part

MAX_SERVED = 4096
"""Leaders whose last swap served here is remembered."""


class SwapStage(StrEnum):
    """The progress of a swap, as one of its two peers sees it."""

    ASKING = "asking"  # we asked the other peer
    LEADING = "leading"  # it agreed: it gets our weights, and we wait for its own
    FOLLOWING = "following"  # we agreed: we wait for its weights
    WHOLE = "whole"  # its weights are here: the training thread goes on


@dataclass(eq=False)
class Swap:
    """One swap, as one of its two peers sees it."""

    number: int
    """The leader's count of the swaps that it led."""
    partner: Member
    leads: bool
    """Whether this peer leads."""
    stage: SwapStage
    deadline_s: float = math.inf

    def led_by(self, sender: Member, number: int) -> bool:
        """Whether this life of `sender` leads it, under that number. A peer may change its address meanwhile."""
        ours = (self.partner.peer, self.partner.incarnation, self.number)
        return not self.leads and ours == (sender.peer, sender.incarnation, number)


class Swaps:
    """A peer's place in swaps, without I/O: it is in one swap at a time, and applies each at most once."""

    def __init__(self, me: str) -> None:
        self.current: Swap | None = None
        self._me = me
        self._led = 0
        self._answered = 0
        """Number of the last swap led by this peer whose answer arrived whole."""
        self._served: dict[str, tuple[int, int]] = {}
        """By leader: incarnation and number of its last swap served here."""

    def lead(self, partner: Member) -> Swap | None:
        """Begin a swap by asking `partner`. None: this peer is in a swap."""
        if self.current is not None:
            return None
        self._led += 1
        self.current = Swap(self._led, partner, True, SwapStage.ASKING)
        return self.current

    def invited(self, sender: Member, number: int, now_s: float, patience_s: float) -> Reply:
        """Take an invitation of `sender`, or refuse it. Of two peers that ask each other at once the first by name
        leads."""
        current = self.current
        if self.has_served(sender, number):
            return Reply.OK  # it is asked again: the answer is still known
        if (sender.incarnation, number) < self._served.get(sender.peer, (0, 0)):
            return Reply.STALE
        if current is not None:
            if current.led_by(sender, number):
                return Reply.OK
            # Ours makes room only for a swap with the same peer: where ours is not begun, or the peer gave it up.
            begun = current.stage not in (SwapStage.ASKING, SwapStage.FOLLOWING)
            mine_first = current.stage is SwapStage.ASKING and self._me < sender.peer
            if current.partner.peer != sender.peer or begun or mine_first:
                return Reply.BUSY
        self.current = Swap(number, sender, False, SwapStage.FOLLOWING, now_s + patience_s)
        return Reply.OK

    def agreed(self, swap: Swap) -> bool:
        """Note that the partner agreed. False: this peer left that swap meanwhile."""
        if self.current is not swap or swap.stage is not SwapStage.ASKING:
            return False
        swap.stage = SwapStage.LEADING
        return True

    def awaited(self, sender: Member, number: int, answer: bool) -> Swap | None:
        """The swap that waits for these weights of `sender`, or for this `answer`. None: no swap does."""
        swap = self.current
        stage = SwapStage.LEADING if answer else SwapStage.FOLLOWING
        fits = swap is not None and swap.stage is stage and swap.partner == sender and swap.number == number
        return swap if fits else None

    def moved(self, swap: Swap, now_s: float, patience_s: float) -> None:
        """Note progress of a swap: the partner has so many seconds for the next."""
        if swap.stage is not SwapStage.WHOLE:
            swap.deadline_s = now_s + patience_s

    def whole(self, swap: Swap) -> bool:
        """Note that all weights of the partner are here. False: this is known, or this peer left the swap meanwhile."""
        if self.current is not swap or swap.stage is SwapStage.WHOLE:
            return False
        swap.stage, swap.deadline_s = SwapStage.WHOLE, math.inf
        self._answered = swap.number if swap.leads else self._answered
        return True

    def has_whole(self, sender: Member, number: int, answer: bool) -> bool:
        """Whether these weights, or this answer, are here already: another stream brought the last of them, or the
        line broke before the reply was out, and they are sent once more."""
        if answer:
            return number == self._answered
        swap = self.current
        return swap is not None and swap.stage is SwapStage.WHOLE and swap.led_by(sender, number)

    def served(self, swap: Swap) -> None:
        """Remember that this peer has applied the swap as its follower. It applies it no second time."""
        self._served.pop(swap.partner.peer, None)
        self._served[swap.partner.peer] = (swap.partner.incarnation, swap.number)
        while len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]

    def has_served(self, sender: Member, number: int) -> bool:
        """Whether this peer has applied that swap of this leader, and none of its later ones."""
        return self._served.get(sender.peer) == (sender.incarnation, number)

    def overdue(self, now_s: float) -> Swap | None:
        """The current swap, where its deadline is over."""
        return self.current if self.current is not None and now_s > self.current.deadline_s else None

    def end(self, swap: Swap) -> bool:
        """Leave the swap. False: this peer had left it."""
        if self.current is not swap:
            return False
        self.current = None
        return True


# ---------------------------------------------------------------- news for the training thread


@dataclass(frozen=True)
class Agreed:
    """The partner agreed to a swap that this peer leads: hand over the weights."""

    swap: Swap


@dataclass(frozen=True)
class Here:
    """The partner's weights have arrived: apply the swap. A follower then hands over its own."""

    swap: Swap
    weights: Tensor
    """Flat fp32."""
    phase: str
    """The partner's last known phase."""


@dataclass(frozen=True)
class Failed:
    """The current swap came to nothing on this side."""

    reason: str


# ---------------------------------------------------------------- weights on their way


class Arriving:
    """The partner's weights while they arrive: over several streams, and again after one broke."""

    def __init__(self, swap: Swap, fragment: Fragment, codecs: Sequence[Codec]) -> None:
        self.swap = swap
        self.values = floats(fragment.elements)
        self.missing = set(range(fragment.parts))
        self._fragment, self._codecs = fragment, codecs

    def take(self, part: Part) -> None:
        """Decode one part of the partner's weights to its place, the first time that it comes. Raises PayloadError."""
        if part.index >= self._fragment.parts:
            raise PayloadError(f"part {part.index} of weights in {self._fragment.parts} parts")
        if part.index not in self.missing:
            return  # sent again; with all others here, the training thread reads the values by now
        start, stop = self._fragment.part_bounds(part.index)
        codec = self._codecs[self._fragment.group_of(part.index)]
        if len(part.payload) > codec.max_bytes(stop - start):
            raise PayloadError(f"part {part.index} has {len(part.payload)} bytes")
        codec.decode_into(part.payload, self.values[start:stop])
        self.missing.discard(part.index)


class Outgoing:
    """This peer's weights for one swap. Each part is encoded once, when a stream first asks for it."""

    def __init__(self, swap: Swap, weights: Tensor, fragment: Fragment, codecs: Sequence[Codec]) -> None:
        self.swap = swap
        self._weights, self._fragment, self._codecs = weights, fragment, codecs
        self._encoded: list[bytes] = []

    async def parts(self) -> AsyncGenerator[Part]:
        """All parts of this peer's weights for a swap, from the first. Several streams may read at once."""
        for index in range(self._fragment.parts):
            while index >= len(self._encoded):
                start, stop = self._fragment.part_bounds(index)
                codec = self._codecs[self._fragment.group_of(index)]
                payload = await asyncio.to_thread(codec.encode, self._weights[start:stop])
                if index == len(self._encoded):  # else another stream was faster
                    self._encoded.append(payload)
            if len(self._encoded) == self._fragment.parts:
                self._weights = self._weights[:0].clone()  # frees the memory of the weights
            yield Part(index, self._encoded[index])
