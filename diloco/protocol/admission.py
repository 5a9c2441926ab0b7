"""Admission of messages: those of another run, of an earlier life, or received twice are refused before they are
read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from diloco.protocol.messages import Envelope, Reply

WINDOW = 1024
"""Messages of one peer that may overtake each other. Calls run side by side, so that order is not kept."""
MAX_NAMES = 1024
"""Peers that are remembered whether or not they are still there."""


@dataclass(slots=True)
class _Seen:
    """Sequence numbers of one life of a peer: the highest, and one bit for each of those just below it."""

    incarnation: int
    highest: int = 0
    bits: int = field(default=0, repr=False)

    def take(self, sequence: int) -> bool:
        """Whether this number was not there before."""
        if sequence > self.highest:
            ahead = min(sequence - self.highest, WINDOW)  # a stranger's number is anything up to 2^63
            self.bits = (self.bits << ahead | 1) & ((1 << WINDOW) - 1)
            self.highest = sequence
            return True
        behind = self.highest - sequence
        if sequence <= 0 or behind >= WINDOW or self.bits >> behind & 1:
            return False
        self.bits |= 1 << behind
        return True


class Admission:
    """Remembers, for each peer, one number and 128 bytes."""

    def __init__(self, run: str, contract: str) -> None:
        self.run = run
        self.contract = contract
        self._seen: dict[str, _Seen] = {}

    def same_training(self, run: str, contract: str) -> Reply:
        """Whether the sender trains what we train."""
        if run != self.run:
            return Reply.OTHER_RUN
        return Reply.OK if contract == self.contract else Reply.OTHER_CONTRACT

    def replayed(self, envelope: Envelope) -> bool:
        """Whether this very message was here before. Asked once for each message of a life that may speak."""
        sender = envelope.sender
        seen = self._seen.get(sender.peer)
        if seen is None or seen.incarnation != sender.incarnation:
            seen = self._seen[sender.peer] = _Seen(sender.incarnation)
        return not seen.take(envelope.sequence)

    def __len__(self) -> int:
        return len(self._seen)

    def forget(self, keep: Collection[str]) -> None:
        """Drop peers that nobody talks to any more, when there are many: each may come new, under a new name."""
        if len(self._seen) > MAX_NAMES:
            self._seen = {peer: seen for peer, seen in self._seen.items() if peer in keep}
