"""Whom a peer knows under gossip, and what each told of itself last. Pure: times come in as arguments.

There is no view that all agree on and no heartbeat to everybody. Whenever two peers talk they tell each other all they
know, so that word of one peer reaches n others within about log n swaps. Each word says how long ago it was said;
clocks are not compared. What is kept is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.base.types import Member, Phase, Progress
from diloco.protocol.messages import Acquaintance

MAX_KNOWN = 4095
"""Others; with this peer as many as one message may tell of. Of more, those that were heard of longest ago go."""
FORGET_S = 600.0
FORGET_SWAPS = 32
"""Of whom nothing new was heard for so long, and for as long as so many swaps of our own take, is taken for dead:
word comes with swaps, and a model's may take hours."""


@dataclass(slots=True)
class _Known:
    word: Acquaintance
    said_at_s: float
    lost_at_s: float = float("-inf")
    """When it did not answer."""


class Acquaintances:
    """The table. Names are not authenticated: who is in the run may tell lies about others."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.progress = Progress()
        self.spread = -1.0
        self.swap_s = 0.0
        """How long this peer takes from one swap to the next."""
        self._beat = 0
        self._known: dict[str, _Known] = {}

    def myself(self) -> Acquaintance:
        """The latest word of this peer, said now."""
        self._beat += 1
        return Acquaintance(self.me, self._beat, self.progress, self.spread)

    def publish(self, now_s: float) -> tuple[Acquaintance, ...]:
        """All that is known, for another peer: this one first."""
        others = (replace(entry.word, age_s=max(now_s - entry.said_at_s, 0.0)) for entry in self._known.values())
        return (self.myself(), *others)

    def hear(self, words: Sequence[Acquaintance], now_s: float) -> list[str]:
        """Take in what another peer told. Returns who was not known before."""
        new = []
        for word in words:
            known = self._known.get(word.member.peer)
            if word.member.peer == self.me.peer or (known is not None and not _later(word, known.word)):
                continue
            lost_at_s = known.lost_at_s if known is not None and known.word.member == word.member else float("-inf")
            self._known[word.member.peer] = _Known(word, now_s - word.age_s, lost_at_s)
            if known is None:
                new.append(word.member.peer)
        if len(self._known) > MAX_KNOWN:
            latest = sorted(self._known.items(), key=lambda item: item[1].said_at_s)[-MAX_KNOWN:]
            self._known = dict(latest)
        return [peer for peer in new if peer in self._known]

    def lost(self, peer: str, now_s: float) -> None:
        """It does not answer, or nothing sensible: it is not met again before it says something new."""
        if peer in self._known:
            self._known[peer].lost_at_s = now_s

    def admits(self, member: Member) -> bool:
        """Whether this is no earlier life of a peer that we know, and not somebody with our own name."""
        known = self._known.get(member.peer)
        return member.peer != self.me.peer and (known is None or member.incarnation >= known.word.member.incarnation)

    def get(self, peer: str) -> Acquaintance | None:
        """What it told of itself last."""
        known = self._known.get(peer)
        return known.word if known is not None else None

    def everybody(self, now_s: float) -> list[tuple[Acquaintance, float, bool]]:
        """Each other peer ever heard of: its word, how many seconds ago it was said, and whether it lives."""
        return [(entry.word, now_s - entry.said_at_s, self._lives(entry, now_s)) for entry in self._known.values()]

    def alive(self, now_s: float) -> list[Acquaintance]:
        """The others that may be met."""
        return [word for word, _, lives in self.everybody(now_s) if lives]

    def silent(self, now_s: float) -> Member | None:
        """Of those that do not live, and have not said that they leave: who was tried longest ago."""
        entries = self._known.values()
        gone = [one for one in entries if not self._lives(one, now_s) and one.word.progress.phase != Phase.LEAVING]
        return min(gone, key=lambda one: one.lost_at_s).word.member if gone else None

    def tokens(self) -> int:
        """Trained by all others, the dead included, as far as is known."""
        return sum(entry.word.progress.tokens for entry in self._known.values())

    def _lives(self, entry: _Known, now_s: float) -> bool:
        patience_s = max(FORGET_S, FORGET_SWAPS * self.swap_s)
        heard = entry.said_at_s > entry.lost_at_s and now_s - entry.said_at_s <= patience_s
        return heard and entry.word.progress.phase != Phase.LEAVING


def _later(word: Acquaintance, known: Acquaintance) -> bool:
    return (word.member.incarnation, word.beat) > (known.member.incarnation, known.beat)


def gossip_status_json(acquaintances: Acquaintances, terms: Mapping[str, Any], reason: str, now: float) -> str:
    """The same under gossip: every peer has a state of its own, and `peers` are those that this one knows.

    `terms`: what does not come from the acquaintances, by its name in `status_json`.
    """
    known, mine = acquaintances, acquaintances.progress
    everybody = [
        (Acquaintance(known.me, 0, mine, known.spread), 0.0, True),
        *sorted(known.everybody(now), key=lambda entry: entry[0].member.peer),
    ]
    tree: dict[str, Any] = {
        **terms,
        "founded": True,
        "version": mine.version,
        "state_digest": "",
        "tokens": mine.tokens + known.tokens(),
        "answering": known.me.peer,
        "reason": reason,
        "spread": known.spread if known.spread >= 0 else None,
        "peers": [_acquaintance(word, said_s_ago, alive) for word, said_s_ago, alive in everybody],
    }
    return json.dumps(tree)


def _acquaintance(word: Acquaintance, said_s_ago: float, alive: bool) -> dict[str, Any]:
    return {
        "peer": word.member.peer,
        "address": word.member.address,
        "incarnation": word.member.incarnation,
        "alive": alive,
        "in_view": alive,
        "spread": word.spread if word.spread >= 0 else None,
        "heard_s_ago": round(said_s_ago, 1),
        **asdict(word.progress),
    }
