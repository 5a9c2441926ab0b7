"""Peers that this peer knows: which lives of them may speak, which messages came before (`Admission`), and which peers
live (`Roster`). Time comes in as an argument and is this machine's own monotonic clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from diloco.base.types import Member, Phase
from diloco.protocol.messages import Envelope, Heartbeat, Reply

WINDOW = 1024
"""Messages of one peer that may overtake each other. Calls run side by side, so that order is not kept."""
MAX_JUMP, QUIET_S = 1 << 20, 16.0
"""Numbers that a peer may leave out between two messages, unless it was not heard for so many seconds: it may have been
cut off. One lie with the last number there is would make all later ones of a peer that speaks count as old."""
MAX_NAMES = 1024
"""Peers that are remembered whether or not they are still there."""


class Admission:
    """Refuses protocol messages of another run or contract, and replayed ones: two numbers and 128 bytes per peer."""

    def __init__(self, run: str, contract: str) -> None:
        self.run = run
        self.contract = contract
        self._seen: dict[str, tuple[tuple[int, int], int, int, float]] = {}
        """By peer: its latest life and process, the highest number of its messages, a bit for each just below, and the
        time of the latest that was taken."""

    def same_training(self, run: str, contract: str) -> Reply:
        """OK if a protocol message's sender trains this run under this contract, else the reply that refuses it."""
        if run != self.run:
            return Reply.OTHER_RUN
        return Reply.OK if contract == self.contract else Reply.OTHER_CONTRACT

    def replayed(self, envelope: Envelope, now: float) -> bool:
        """Whether this very protocol message came before, or its number is too far from those before (`MAX_JUMP`).
        Asked once for each message of a life that may speak."""
        sender, sequence = envelope.sender, envelope.sequence
        process = sender.incarnation, envelope.boot
        known, highest, bits, taken_at_s = self._seen.get(sender.peer, (process, 0, 0, -math.inf))
        if known != process:
            highest, bits, taken_at_s = 0, 0, -math.inf
        if sequence > highest + MAX_JUMP and now - taken_at_s <= QUIET_S:
            return True
        behind = max(highest - sequence, 0)
        replayed = sequence <= 0 or behind >= WINDOW
        if sequence > highest:
            ahead = min(sequence - highest, WINDOW)  # a stranger's number is anything up to 2^63
            highest, bits = sequence, (bits << ahead) & ((1 << WINDOW) - 1)
        if not replayed:
            replayed = bool(bits >> behind & 1)
            bits |= 1 << behind
        self._seen[sender.peer] = (process, highest, bits, taken_at_s if replayed else now)
        return replayed

    def __len__(self) -> int:
        return len(self._seen)

    def forget(self, keep: Collection[str]) -> None:
        """Drop message numbers of peers outside the roster, when there are many: each may come under a new name."""
        if len(self._seen) > MAX_NAMES:
            self._seen = {peer: seen for peer, seen in self._seen.items() if peer in keep}


REACHED_WITHIN, MAX_UNREACHED_S = 1.5, 5.0
"""Times `suspect_s` after which a joiner that is heard, and answers nobody, is told so; and the longest such time."""
FORGET_S = 60.0
"""Seconds for which a peer outside the view is remembered."""
GOING = (Phase.LEAVING, Phase.DONE)
MAX_FORMER_LIVES = 16
"""Earlier lives of a peer that are remembered, so that their messages are refused."""


@dataclass(slots=True)
class RosterEntry:
    """One peer on the roster: its latest life, and the last sign of it."""

    member: Member
    heard_at_s: float
    heartbeat: Heartbeat | None = None
    lag: int = 0
    """Versions that it was behind us when the heartbeat came: rounds may be shorter than heartbeats."""
    since_s: float = field(init=False)
    """Time at which the life came onto the roster."""
    vouched: bool = False
    """A view or a welcome named it; else it named itself."""
    answered: bool = False
    """It has answered a message of ours. To be heard is another matter."""
    boot: int = 0
    """The latest process of this life that was heard."""
    saved: int = 0
    """Times that its disk has been written to, as it says."""
    moved_at_s: float = -math.inf
    """Time at which a heartbeat first had its latest count of bytes that moved in rounds."""
    unreachable: bool = False
    """Nothing could be delivered to it since it answered last."""
    turned_away: bool = False
    """It asks to join and nobody reaches it, as people here have been told."""
    left: bool = False
    """Its latest process said goodbye, or an operator said that it is dead."""
    former: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_FORMER_LIVES))

    def __post_init__(self) -> None:
        self.since_s = self.heard_at_s

    def moves_to(self, address: str) -> None:
        """This life is found at that address from now on. Nothing else changes: the directory does not list who is a
        witness."""
        self.member = replace(self.member, address=address)

    @property
    def located(self) -> bool:
        """Whether its address is more than its own word: before that nothing but one `Hello` at a time goes there."""
        return self.vouched or self.answered

    @property
    def going(self) -> bool:
        """Whether it said goodbye, or is about to."""
        beat = self.heartbeat
        return self.left or (beat is not None and (beat.leaving or beat.progress.phase in GOING))


@dataclass(frozen=True, slots=True)
class Stranger:
    """A peer of another lineage on the roster."""

    member: Member
    seen_s: float
    """Time at which it spoke last."""
    answered: bool = False
    """It has answered a message of ours at its address."""


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
        self._strangers: dict[str, Stranger] = {}
        self._turned_away_s = -math.inf
        """Time at which a joiner was turned away last, and people heard so."""

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._entries.values())

    def get(self, member: Member) -> RosterEntry | None:
        """The entry of this very life of a peer. None: the roster has another one, or none."""
        known = self._entries.get(member.peer)
        return known if known is not None and known.member.incarnation == member.incarnation else None

    def heartbeat(self, member: Member) -> Heartbeat | None:
        """The last heartbeat of this life of a peer on the roster."""
        entry = self.get(member)
        return entry.heartbeat if entry is not None else None

    def boot_of(self, member: Member) -> int:
        """The latest process of this life that was heard; 0: none was."""
        entry = self.get(member)
        return entry.boot if entry is not None else 0

    def latest(self, member: Member) -> Member:
        """This life of a peer, with the address that it gave last."""
        peer, incarnation = member.peer, member.incarnation
        if peer == self.me.peer and incarnation == self.me.incarnation:
            return self.me
        known = self._entries.get(peer)
        stranger, heard_at_s = self._strangers.get(peer), known.heard_at_s if known is not None else -math.inf
        went_on = stranger is not None and stranger.answered and stranger.seen_s > heard_at_s  # in another lineage
        if stranger is not None and went_on and stranger.member == member:
            return stranger.member
        return known.member if known is not None and known.member.incarnation == incarnation else member

    # ------------------------------------------------------------ lives of a peer

    def meet(self, members: Sequence[Member], now: float, before: Collection[Member] = ()) -> None:
        """Add to the roster members of a view, or peers of a welcome. New ones count as alive.

        A life that was in the view `before` is over when the view has another of that name. Any other life that is
        heard here may be the later one: a view can be an old one, from a checkpoint.
        """
        for member in members:
            known = self._entries.get(member.peer)
            if member.peer == self.me.peer:
                continue
            if known is not None and member.incarnation == known.member.incarnation:
                known.vouched = True
                if not self._lives(known, now):
                    known.moves_to(member.address)  # it may have gone on at another address
                continue
            if known is not None and member.incarnation in known.former:
                continue  # a view may keep its vote; that does not bring it back
            if known is None or known.member in before:
                self._add(self._next_life(known, member, now, vouched=True))
            elif member.incarnation > known.member.incarnation and not self._lives(known, now):
                self._add(RosterEntry(member, now, vouched=True, former=known.former))

    def may_speak(self, member: Member, now: float) -> bool:
        """Whether the roster lets `member` speak: not an earlier life, nor where another process has the name."""
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        known = self._entries.get(member.peer)
        return known is None or known.member.incarnation == member.incarnation or self._succeeds(member, known, now)

    def boots(self, envelope: Envelope) -> Reply:
        """OK for the latest process of a life; OLD_COPY for an earlier one, or one that began with an old copy of the
        disk."""
        known = self.get(envelope.sender)
        if known is None or envelope.sender == self.me:
            return Reply.OK
        earlier = envelope.boot < known.boot
        copied = envelope.boot > known.boot and envelope.before < known.saved
        return Reply.OLD_COPY if earlier or copied else Reply.OK  # its disk lacks what the life has said

    def runs(self, envelope: Envelope, evicted: bool) -> None:
        """Note on the roster which process of a life a message is of, once the life is on it. `evicted`: an operator
        said that this life is over, and no process brings it back."""
        known = self.get(envelope.sender)
        if known is None:
            return
        if envelope.boot > known.boot and not evicted:
            known.left = False  # a voter that went, uncounted, is back with its disk, and its vote is needed
        known.boot, known.saved = envelope.boot, max(known.saved, envelope.saved)

    def is_old_copy(self, envelope: Envelope) -> bool:
        """Whether a process that began later than the latest on the roster goes on with an earlier life of its peer."""
        known = self._entries.get(envelope.sender.peer)
        earlier = known is not None and envelope.sender.incarnation < known.member.incarnation
        return known is not None and earlier and 0 < known.boot < envelope.boot

    def heard(self, member: Member, now: float, heartbeat: Heartbeat | None = None, version: int = 0) -> None:
        """Note on the roster a message of `member`, who may speak. `version`: ours, to compare a heartbeat with."""
        if member.peer == self.me.peer:
            return
        known = self.get(member)
        if known is None:
            known = self._add(self._next_life(self._entries.get(member.peer), member, now))
        # It goes on at another address once it has answered there. That it is a witness only itself says.
        known.member = member if not known.located else replace(member, address=known.member.address)
        known.heard_at_s = now
        if heartbeat is not None:
            if known.heartbeat is not None and heartbeat.moved_bytes > known.heartbeat.moved_bytes:
                known.moved_at_s = now
            known.heartbeat, known.lag = heartbeat, version - heartbeat.version

    def _succeeds(self, member: Member, known: RosterEntry, now: float) -> bool:
        """Whether a life follows the one on the roster. Two processes at one address are not alive at the same time."""
        later = member.incarnation > known.member.incarnation and member.incarnation not in known.former
        if later:
            return member.address == known.member.address or not self._lives(known, now)
        return not self._precedes(member, known, now)

    @staticmethod
    def _precedes(member: Member, known: RosterEntry, now: float) -> bool:
        """Whether a life is over. If the roster's own is long silent, the peer's clock was set back between the two."""
        earlier = member.incarnation < known.member.incarnation and now - known.heard_at_s <= FORGET_S
        return earlier or member.incarnation in known.former

    def is_earlier(self, member: Member, now: float) -> bool:
        """Whether a message is of an old conversation, heard again: the roster has a later life of its sender."""
        if member.peer == self.me.peer:
            return member.incarnation < self.me.incarnation
        known = self._entries.get(member.peer)
        return known is not None and self._precedes(member, known, now)

    def _add(self, entry: RosterEntry) -> RosterEntry:
        """Add an entry to the roster. Where that is full, of those whom nobody vouched for one that never answered, and
        was heard longest ago, makes room."""
        if len(self._entries) >= MAX_NAMES and entry.member.peer not in self._entries:
            others = [one for one in self if not one.vouched]
            if others:
                del self._entries[min(others, key=lambda one: (one.answered, one.heard_at_s)).member.peer]
        self._entries[entry.member.peer] = entry
        return entry

    @staticmethod
    def _next_life(known: RosterEntry | None, member: Member, now: float, vouched: bool = False) -> RosterEntry:
        entry = RosterEntry(member, now, vouched=vouched)
        if known is not None:
            entry.former.extend((*known.former, known.member.incarnation))
        return entry

    # ------------------------------------------------------------ signs of life

    def introduce(self, member: Member, now: float) -> None:
        """Note on the roster a peer of another lineage. It gets our heartbeats once it has answered, and no entry under
        its name changes."""
        if member.peer in self._strangers or len(self._strangers) < MAX_NAMES:
            self._strangers[member.peer] = Stranger(member, now, self.is_located(member))

    def strangers(self, now: float) -> list[Member]:
        """Peers of other lineages on the roster that spoke lately."""
        self._strangers = {peer: one for peer, one in self._strangers.items() if now - one.seen_s <= self.suspect_s}
        return [one.member for one in self._strangers.values() if one.answered]

    def has_later(self, member: Member) -> bool:
        """Whether another life of a peer has taken its place on the roster."""
        known = self._entries.get(member.peer)
        return known is not None and known.member.incarnation != member.incarnation

    def unreachable(self, member: Member) -> None:
        """Note on the roster that nothing can be delivered to this life. Its next answer takes this back."""
        if (known := self.get(member)) is not None:
            known.unreachable = True

    def answered(self, member: Member) -> None:
        """Note on the roster that this life of a peer answered a message at this address: it can be reached."""
        if (known := self.get(member)) is not None:
            known.moves_to(member.address)
            known.answered, known.unreachable = True, False
        stranger = self._strangers.get(member.peer)
        if stranger is not None and stranger.member == member and stranger.member.address == member.address:
            self._strangers[member.peer] = replace(stranger, answered=True)

    def is_located(self, member: Member) -> bool:
        """Whether the roster has more than the own word of this life of a peer that it is at this address."""
        known, stranger = self.get(member), self._strangers.get(member.peer)
        found = [known.member] if known is not None and known.located else []
        found += [stranger.member] if stranger is not None and stranger.answered else []
        return any(one == member and one.address == member.address for one in found)

    def awaits(self, member: Member) -> bool:
        """Whether this life of a peer, of this lineage or another, is on the roster and not proven at this address."""
        stranger = self._strangers.get(member.peer)
        here = self.get(member) is not None or (stranger is not None and stranger.member == member)
        return here and not self.is_located(member)

    def reaches(self, member: Member) -> bool:
        """Whether this life of a peer has answered at this address, and nothing since then could not be delivered."""
        known = self.get(member)
        here = known is not None and known.member.address == member.address
        return here and known is not None and known.answered and not known.unreachable

    def is_unreached(self, member: Member, now: float) -> bool:
        """Whether a joiner has been heard for a while and never answered: others cannot reach the address it gives."""
        known = self._entries.get(member.peer)
        patient = known is None or now - known.since_s <= min(REACHED_WITHIN * self.suspect_s, MAX_UNREACHED_S)
        return known is not None and not known.answered and not patient

    def turns_away(self, joiner: Member, now: float) -> bool:
        """Note on the roster that a joiner, which is heard, is turned away. Returns whether that is news: of one joiner
        a second, lest a flood of them fill the log."""
        known = self._entries[joiner.peer]
        news = not known.turned_away and now >= self._turned_away_s + 1.0
        if news:
            known.turned_away, self._turned_away_s = True, now
        return news

    def left(self, member: Member) -> None:
        """Note on the roster that this life said goodbye, or that an operator said so."""
        if (known := self.get(member)) is not None:
            known.left = True

    def offended(self, peer: str) -> None:
        """Count on the roster that `peer` sent what no honest peer sends."""
        self.offences[peer] += 1

    def barred(self, peer: str) -> bool:
        """Whether the roster bars `peer`: it offended too often to be in the view."""
        return self.offences.get(peer, 0) >= self.offences_allowed

    def part_with(self, peers: Collection[str]) -> None:
        """The run was cut in lineages. Peers of the other side get our heartbeats even if they are silent: so it heals.

        Heartbeats so far were of another lineage: peers that want to join must ask again.
        """
        self._remembered |= set(peers)
        for entry in self:
            entry.heartbeat = None

    def alive(self, member: Member, now: float) -> bool:
        """Whether this very life of the peer is on the roster and not suspected."""
        if member.peer == self.me.peer:
            return member.incarnation == self.me.incarnation
        known = self.get(member)
        return known is not None and self._lives(known, now)

    def last_heard_s(self, member: Member) -> float | None:
        """Time at which the roster last heard this life of a peer. None: it is over, unknown or barred."""
        known = self.get(member)
        return known.heard_at_s if known is not None and not self.barred(member.peer) else None

    def moved_at_s(self, peers: Collection[str]) -> float:
        """Time at which bytes last moved at one of these peers, as their heartbeats on the roster say."""
        return max((entry.moved_at_s for entry in self if entry.member.peer in peers), default=-math.inf)

    def at_the_door(self, max_lag: int, now: float) -> list[Member]:
        """Live peers on the roster that ask to join, by name: who was reached, and lagged at most `max_lag` versions
        when last heard. One that nobody reaches would be waited for, and stop the run."""
        waiting = [
            entry.member
            for entry in self
            if entry.heartbeat and entry.heartbeat.joining and entry.heartbeat.version >= 0
            and entry.answered and entry.lag <= max_lag and not entry.going
            and self._lives(entry, now) and not self.barred(entry.member.peer)
        ]  # fmt: skip
        return sorted(waiting, key=lambda member: member.peer)

    def holds(self, version: int) -> bool:
        """Whether a peer on the roster that is not going, too, has reported this version or a later one; also where all
        are, as there is nobody to wait for."""
        there = [entry.heartbeat for entry in self if not entry.going]
        return not there or any(beat is not None and beat.version >= version for beat in there)

    def deaf(self, now: float) -> bool:
        """Whether no peer on the roster was heard lately."""
        return all(now - entry.heard_at_s > self.suspect_s for entry in self)

    def forget(self, keep: Collection[str], now: float) -> None:
        """Drop from the roster peers that are silent for long, so that nobody sends them heartbeats for ever."""
        keep = {*keep, *self._remembered}
        entries = self._entries.items()
        self._entries = {peer: entry for peer, entry in entries if peer in keep or now - entry.heard_at_s <= FORGET_S}

    def _lives(self, entry: RosterEntry, now: float) -> bool:
        deaf = entry.heartbeat is not None and entry.heartbeat.deaf
        return not (entry.left or entry.unreachable or deaf) and now - entry.heard_at_s <= self.suspect_s
