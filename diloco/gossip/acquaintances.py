"""The table of the peers that one peer knows under gossip, with the latest word of each. Pure: times are arguments.

There is no view that all agree on, and no heartbeat to all. Whenever two peers exchange messages, each passes on its
whole table, so that word of one peer reaches n others within about log n swaps. Each word carries its age; clocks are
not compared. The table is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.base.types import Member, Phase, Progress
from diloco.protocol.greetings import Acquaintance

MAX_KNOWN = 4095
"""Other peers in the table: with this peer as many as one message may hold. Beyond it the longest unheard go."""
FORGET_S = 600.0
FORGET_SWAPS = 32
"""A peer counts as dead when no news of it came for `FORGET_S`, and for the time of so many swaps of ours: news comes
with swaps, and a large model's may take hours."""


@dataclass(slots=True)
class _Known:
    word: Acquaintance
    said_at_s: float
    lost_at_s: float = float("-inf")
    """When it last failed to answer."""


class Acquaintances:
    """The table. Names are not authenticated: a member of the run can lie about other peers."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.progress = Progress()
        self.spread = -1.0
        self.swap_s = 0.0
        """Mean seconds from one swap of this peer to the next."""
        self._beat = 0
        self._known: dict[str, _Known] = {}

    def myself(self) -> Acquaintance:
        """A new word of this peer about itself."""
        self._beat += 1
        return Acquaintance(self.me, self._beat, self.progress, self.spread)

    def publish(self, now_s: float) -> tuple[Acquaintance, ...]:
        """The whole table of acquaintances, for another peer: this one first."""
        others = (replace(entry.word, age_s=max(now_s - entry.said_at_s, 0.0)) for entry in self._known.values())
        return (self.myself(), *others)

    def hear(self, words: Sequence[Acquaintance], now_s: float) -> list[str]:
        """Enter the words that another peer passed on. Returns the peers that are new here."""
        new = []
        for word in words:
            member, known = word.member, self._known.get(word.member.peer)
            if member.peer == self.me.peer:
                continue
            if known is None:
                new.append(member.peer)
            elif (member.incarnation, word.beat) <= (known.word.member.incarnation, known.word.beat):
                continue  # no newer than what is known
            same_life = known is not None and known.word.member == member
            lost_at_s = known.lost_at_s if known is not None and same_life else float("-inf")
            self._known[member.peer] = _Known(word, now_s - word.age_s, lost_at_s)
        if len(self._known) > MAX_KNOWN:
            self._known = dict(sorted(self._known.items(), key=lambda item: item[1].said_at_s)[-MAX_KNOWN:])
        return [peer for peer in new if peer in self._known]

    def lost(self, peer: str, now_s: float) -> None:
        """Note that a peer did not answer, or answered nonsense. It is not met again before a newer word of it."""
        if peer in self._known:
            self._known[peer].lost_at_s = now_s

    def admits(self, member: Member) -> bool:
        """Whether to listen to a sender: not to an earlier life of a known peer, nor to one with this peer's name."""
        known = self._known.get(member.peer)
        return member.peer != self.me.peer and (known is None or member.incarnation >= known.word.member.incarnation)

    def get(self, peer: str) -> Acquaintance | None:
        """The latest word of an acquaintance."""
        known = self._known.get(peer)
        return known.word if known is not None else None

    def everybody(self, now_s: float) -> list[tuple[Acquaintance, float, bool]]:
        """All other peers, the dead included: the word of each, its age in seconds, and whether the peer lives."""
        return [(entry.word, now_s - entry.said_at_s, self._lives(entry, now_s)) for entry in self._known.values()]

    def alive(self, now_s: float) -> list[Acquaintance]:
        """The other peers that may be met for a swap."""
        return [word for word, _, lives in self.everybody(now_s) if lives]

    def silent(self, now_s: float) -> Member | None:
        """The peer that was tried longest ago, among those that do not live and did not announce that they leave."""
        entries = self._known.values()
        gone = [one for one in entries if not self._lives(one, now_s) and one.word.progress.phase != Phase.LEAVING]
        return min(gone, key=lambda one: one.lost_at_s).word.member if gone else None

    def tokens(self) -> int:
        """Tokens trained by all other peers, the dead included, as far as this peer knows."""
        return sum(entry.word.progress.tokens for entry in self._known.values())

    def _lives(self, entry: _Known, now_s: float) -> bool:
        patience_s = max(FORGET_S, FORGET_SWAPS * self.swap_s)
        heard = entry.said_at_s > entry.lost_at_s and now_s - entry.said_at_s <= patience_s
        return heard and entry.word.progress.phase != Phase.LEAVING

    def status(self, reason: str, now_s: float) -> dict[str, Any]:
        """The table as JSON for `diloco status`, with the names of `status_json`. Each peer has a version of its
        own, and `peers` lists those that this one knows."""
        everybody = [
            (Acquaintance(self.me, 0, self.progress, self.spread), 0.0, True),
            *sorted(self.everybody(now_s), key=lambda entry: entry[0].member.peer),
        ]
        return {
            "founded": True,
            "version": self.progress.version,
            "state_digest": "",
            "tokens": self.progress.tokens + self.tokens(),
            "answering": self.me.peer,
            "reason": reason,
            "spread": self.spread if self.spread >= 0 else None,
            "peers": [
                {
                    "peer": word.member.peer,
                    "address": word.member.address,
                    "incarnation": word.member.incarnation,
                    "alive": lives,
                    "in_view": lives,
                    "spread": word.spread if word.spread >= 0 else None,
                    "heard_s_ago": round(age_s, 1),
                    **asdict(word.progress),
                }
                for word, age_s, lives in everybody
            ],
        }
