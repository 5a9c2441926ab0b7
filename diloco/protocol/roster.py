"""The peers that live, as far as this peer knows. Time comes in as an argument and is this machine's own monotonic
clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from diloco.base.types import Member
from diloco.protocol.messages import Envelope, Heartbeat, Reply

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


FORGET_S = 60.0
"""Seconds for which a peer outside the view is remembered."""


MAX_FORMER_LIVES = 16
"""Earlier lives of a peer that are remembered, so that their messages are refused."""


@dataclass(slots=True)
class RosterEntry:
    """State of one peer as known here."""

    member: Member
    heard_at_s: float
    heartbeat: Heartbeat | None = None
    lag: int = 0
    """Versions that it was behind us when the heartbeat came: rounds may be shorter than heartbeats."""
    unreachable: bool = False
    left: bool = False
    former: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_FORMER_LIVES))


class Roster:
    """All peers heard of, members or not. A peer that was not heard for `suspect_s` is suspected, not forgotten."""

    def __init__(self, me: Member, suspect_s: float, offences_allowed: int) -> None:
        self.me = me
        self.suspect_s = suspect_s
        self.offences_allowed = offences_allowed
        self.offences: Counter[str] = Counter()
        """Contributions of a peer that no honest peer sends. Kept when the peer goes and comes back."""
        self._entries: dict[str, RosterEntry] = {}
        self._remembered: set[str] = set()
        self._strangers: dict[str, tuple[Member, float]] = {}

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._entries.values())

    def get(self, peer: str) -> RosterEntry | None:
        return self._entries.get(peer)

    def meet(self, members: Sequence[Member], now: float, before: Collection[Member] = ()) -> None:
        """Members of a view, or peers that somebody told of: those unknown so far get the benefit of the doubt.

        A life that was in the view `before` is over when the view has another of that name. Any other life that is
        heard here may be the later one: a view can be an old one, from a checkpoint.
        """
        for member in members:
            known = self._entries.get(member.peer)
            if member.peer == self.me.peer or (known is not None and member.incarnation == known.member.incarnation):
                continue
            if known is None or (member.incarnation not in known.former and known.member in before):
                self._entries[member.peer] = self._next_life(known, member, now)
            elif member.incarnation > known.member.incarnation and not self._lives(known, now):
                self._entries[member.peer] = RosterEntry(member, now, former=known.former)

    def may_speak(self, member: Member, now: float) -> bool:
        """Whether to listen to `member`: not to an earlier life of that peer, nor where another peer has the name."""
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        known = self._entries.get(member.peer)
        if known is None or known.member.incarnation == member.incarnation:
            return True
        return self._succeeds(member, known, now)

    def heard(self, member: Member, now: float, heartbeat: Heartbeat | None = None, version: int = 0) -> None:
        """A message came from `member`, who may speak."""
        if member.peer == self.me.peer:
            return
        known = self._entries.get(member.peer)
        if known is None or known.member.incarnation != member.incarnation:
            known = self._entries[member.peer] = self._next_life(known, member, now)
        known.member = member
        known.heard_at_s = now
        known.unreachable = False
        if heartbeat is not None:
            known.heartbeat, known.lag = heartbeat, version - heartbeat.version

    def _succeeds(self, member: Member, known: RosterEntry, now: float) -> bool:
        """Whether a life follows the known one. Two processes at one address are not alive at the same time."""
        later = member.incarnation > known.member.incarnation and member.incarnation not in known.former
        if later:
            return member.address == known.member.address or not self._lives(known, now)
        return not self._precedes(member, known, now)

    @staticmethod
    def _precedes(member: Member, known: RosterEntry, now: float) -> bool:
        """Whether a life is over. If the known one is long silent, the peer's clock was set back between the two."""
        earlier = member.incarnation < known.member.incarnation and now - known.heard_at_s <= FORGET_S
        return earlier or member.incarnation in known.former

    def is_earlier(self, member: Member, now: float) -> bool:
        """Whether it is an earlier life than the one of its name that is known here."""
        known = self._entries.get(member.peer)
        return known is not None and self._precedes(member, known, now)

    @staticmethod
    def _next_life(known: RosterEntry | None, member: Member, now: float) -> RosterEntry:
        entry = RosterEntry(member, now)
        if known is not None:
            entry.former.extend((*known.former, known.member.incarnation))
        return entry

    def introduce(self, member: Member, now: float) -> None:
        """A peer of another lineage spoke. It is to hear of ours, and says nothing of whoever has that name here."""
        self._strangers[member.peer] = (member, now)

    def strangers(self, now: float) -> list[Member]:
        """Peers of other lineages that spoke lately."""
        self._strangers = {peer: seen for peer, seen in self._strangers.items() if now - seen[1] <= self.suspect_s}
        return [member for member, _ in self._strangers.values()]

    def unreachable(self, peer: str) -> None:
        """Delivery to `peer` failed outright. The next word from it takes this back."""
        if peer in self._entries:
            self._entries[peer].unreachable = True

    def left(self, peer: str) -> None:
        """`peer` said goodbye."""
        if peer in self._entries:
            self._entries[peer].left = True

    def offended(self, peer: str) -> None:
        """`peer` sent what no honest peer sends."""
        self.offences[peer] += 1

    def barred(self, peer: str) -> bool:
        """Whether `peer` offended too often to be in the run."""
        return self.offences[peer] >= self.offences_allowed

    def part_with(self, peers: Collection[str]) -> None:
        """The run was cut. Go on calling those on the other side, however long they are silent: so it heals.

        What they and strangers said was said in another lineage: whoever wants in must ask again.
        """
        self._remembered |= set(peers)
        for entry in self:
            entry.heartbeat = None

    def alive(self, member: Member, now: float) -> bool:
        """Whether this very life of the peer is not suspected."""
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        known = self._entries.get(member.peer)
        return known is not None and known.member.incarnation == member.incarnation and self._lives(known, now)

    def last_heard_s(self, member: Member) -> float | None:
        """When this very life of a peer last spoke. None: it is over, or unknown, or the peer is barred."""
        known = self._entries.get(member.peer)
        if known is None or known.member.incarnation != member.incarnation or self.barred(member.peer):
            return None
        return known.heard_at_s

    def at_the_door(self, max_lag: int, now: float) -> list[Member]:
        """Live peers that ask to be taken in and were at most so many versions behind when last heard, by name."""
        waiting = [
            entry.member
            for entry in self
            if entry.heartbeat and entry.heartbeat.joining and entry.heartbeat.version >= 0
            and entry.lag <= max_lag and self._lives(entry, now) and not self.barred(entry.member.peer)
        ]  # fmt: skip
        return sorted(waiting, key=lambda member: member.peer)

    def deaf(self, now: float) -> bool:
        """Whether nobody at all was heard lately."""
        return all(now - entry.heard_at_s > self.suspect_s for entry in self)

    def forget(self, keep: Collection[str], now: float) -> None:
        """Drop strangers that were silent for long, so that nobody calls into the void for ever."""
        self._entries = {
            peer: entry
            for peer, entry in self._entries.items()
            if peer in keep or peer in self._remembered or now - entry.heard_at_s <= FORGET_S
        }  # fmt: skip

    def _lives(self, entry: RosterEntry, now: float) -> bool:
        deaf = entry.heartbeat is not None and entry.heartbeat.deaf
        return not (entry.left or entry.unreachable or deaf) and now - entry.heard_at_s <= self.suspect_s
