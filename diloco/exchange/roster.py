"""Who lives, as far as this peer knows. Time comes in as an argument and is this machine's own monotonic clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from diloco.exchange.messages import Heartbeat
from diloco.types import Member

FORGET_S = 60.0
"""How long a peer outside the view is remembered."""


@dataclass(slots=True)
class Entry:
    """What is known of one peer."""

    member: Member
    heard_at_s: float
    heartbeat: Heartbeat | None = None
    lag: int = 0
    """Versions that it was behind us when the heartbeat came: rounds may be shorter than heartbeats."""
    unreachable: bool = False
    left: bool = False


class Roster:
    """All peers heard of, members or not. A peer that was not heard for `suspect_s` is suspected, not forgotten."""

    def __init__(self, me: Member, suspect_s: float) -> None:
        self.me = me
        self.suspect_s = suspect_s
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, peer: str) -> Entry | None:
        return self._entries.get(peer)

    def meet(self, members: Sequence[Member], now: float) -> None:
        """Members of a view that was adopted: those unknown so far get the benefit of the doubt."""
        for member in members:
            known = self._entries.get(member.peer)
            if member.peer != self.me.peer and (known is None or known.member.incarnation != member.incarnation):
                self._entries[member.peer] = Entry(member, now)

    def heard(self, member: Member, now: float, heartbeat: Heartbeat | None = None, version: int = 0) -> bool:
        """A message came from `member`. False: another life of that name is alive, so this one is an impostor."""
        known = self._entries.get(member.peer)
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        if known is None or known.member.incarnation != member.incarnation:
            if known is not None and self._lives(known, now):
                return False
            known = self._entries[member.peer] = Entry(member, now)
        known.member = member
        known.heard_at_s = now
        known.unreachable = False
        if heartbeat is not None:
            known.heartbeat, known.lag = heartbeat, version - heartbeat.version
        return True

    def unreachable(self, peer: str) -> None:
        """Delivery to `peer` failed outright. The next word from it takes this back."""
        if peer in self._entries:
            self._entries[peer].unreachable = True

    def left(self, peer: str) -> None:
        """`peer` said goodbye."""
        if peer in self._entries:
            self._entries[peer].left = True

    def alive(self, member: Member, now: float) -> bool:
        """Whether this very life of the peer is not suspected."""
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        known = self._entries.get(member.peer)
        return known is not None and known.member.incarnation == member.incarnation and self._lives(known, now)

    def at_the_door(self, most_lag: int, now: float) -> list[Member]:
        """Live peers that ask to be taken in and were at most so many versions behind when last heard, by name."""
        waiting = [
            entry.member
            for entry in self
            if entry.heartbeat and entry.heartbeat.joining and entry.heartbeat.version >= 0
            and entry.lag <= most_lag and self._lives(entry, now)
        ]  # fmt: skip
        return sorted(waiting, key=lambda member: member.peer)

    def forget(self, keep: Collection[str], now: float) -> None:
        """Drop strangers that were silent for long, so that nobody calls into the void for ever."""
        self._entries = {
            peer: entry
            for peer, entry in self._entries.items()
            if peer in keep or now - entry.heard_at_s <= FORGET_S
        }  # fmt: skip

    def _lives(self, entry: Entry, now: float) -> bool:
        return not entry.left and not entry.unreachable and now - entry.heard_at_s <= self.suspect_s
