"""The table of the peers that one peer knows under gossip, with the latest word of each. Pure: times are arguments.

There is no view that all agree on, and no heartbeat to all. Whenever two peers exchange messages, each passes on its
table, so that word of one peer reaches n others within about log n swaps. Each word carries its age; clocks are not
compared. The table is bounded.

A word is hearsay unless its own peer says it. Hearsay makes nobody a partner and counts no tokens, before that life has
answered at its address. It does not pass for more than a peer's own word, and nobody is believed to leave by it.

A life that begins with fewer tokens than the earlier one had, for it has no checkpoint, takes none of them away. Each
peer remembers by itself what the earlier lives had, and hearsay of it counts only where a peer takes its weights.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low
from typing import Any

from diloco.base.types import Member, Phase, Progress
from diloco.protocol.greetings import Acquaintance
from diloco.protocol.roster import MAX_JUMP
from diloco.storage.checkpoint import Checkpoint

MAX_KNOWN = 4095
"""Other peers in the table. Beyond it the longest unheard go, first those that never answered."""
MAX_PUBLISHED = 255
"""Other peers in one message. Where more are known they take turns: a short greeting costs no long answer."""
ANSWER_S = 0.25
"""Least seconds between two answers to greetings of one peer."""
FORGET_S = 600.0
FORGET_SWAPS = 32
"""A peer counts as dead when no news of it came for `FORGET_S`, and for the time of so many swaps of ours: news comes
with swaps, and a large model's may take hours."""
MAX_FASTER = 16
"""A peer counts for at most so many times the tokens of this one, or of the median peer. Nobody can check what another
trained, and one that lies would end the run alone. Peers are alike within that, or the run goes on for longer."""
MAX_AHEAD = 2
"""The same of what others say of a peer: one that lies would say it of all. Its own next word counts whole."""


Row = tuple[str, int, str, int, int]
"""A peer in a checkpoint: name, life, address, tokens of all its lives, and of the earlier ones. The first is the one
that wrote it, with the tokens of earlier lives that its own lack."""


@dataclass(slots=True)
class _Known:
    word: Acquaintance
    said_at_s: float
    own: bool
    """The word came from its peer itself, and is no hearsay."""
    answered: bool
    """This life has answered at its address."""
    lost_at_s: float = -math.inf
    """When it last failed to answer."""
    vouched: int | None = None
    """Tokens of this peer by the member whose weights this one took. None: that said nothing of it."""
    own_tokens: int = field(default=0, init=False)
    """Tokens of this life by its own latest word."""
    earlier_tokens: int = 0
    """Tokens of its earlier lives, as they counted when this life took their place."""
    before: _Known | None = None
    """The life whose place this one took by hearsay: it may yet speak again."""
    greeted_at_s: float = -math.inf
    """When a greeting of it was last answered."""

    def __post_init__(self) -> None:
        self.own_tokens = self.word.progress.tokens if self.own else 0

    @property
    def sure(self) -> bool:
        """Whether more than hearsay says that there is such a peer."""
        return self.answered or self.vouched is not None

    def counted(self, most: int) -> int:
        """Tokens of all lives of this peer that count, where `most` do beside those that were vouched for; by hearsay
        since its own word no more than `MAX_AHEAD` of what others like it have."""
        heard = min(self.word.progress.tokens, most * MAX_AHEAD // MAX_FASTER + (self.vouched or 0))
        said = self.word.progress.tokens if self.own else max(self.own_tokens, heard)
        word = replace(self.word, progress=Progress(tokens=said if self.sure else 0))
        return min(_tokens(word, self.earlier_tokens), most + (self.vouched or 0))


class Acquaintances:
    """The table. Names are not authenticated: a member of the run can lie about other peers."""

    def __init__(self, me: Member, round_tokens: int) -> None:
        """`round_tokens`: of a peer between two swaps, by the contract."""
        self.me = me
        self.progress = Progress()
        self.start_tokens = 0
        """Tokens with which this life began."""
        self.earlier_tokens = 0
        """Tokens of this peer's earlier lives, by its checkpoint, and by the member whose weights it took."""
        self.spread = -1.0
        self.swap_s = 0.0
        """Mean seconds from one swap of this peer to the next."""
        self._round_tokens = round_tokens
        self._beat = self._turn = 0
        self._known: dict[str, _Known] = {}

    def restore(self, start_tokens: int, table: Sequence[Row], now_s: float) -> None:
        """Go on from a checkpoint: from this peer's own tokens in it, and the `table` of then."""
        self.start_tokens = start_tokens
        for place, (peer, life, address, tokens, earlier_tokens) in enumerate(table):
            if place == 0:
                self.earlier_tokens = start_tokens + tokens
                continue
            word = Acquaintance(Member(peer, life, address), 0, Progress(tokens=tokens), start_tokens=tokens)
            known = _Known(word, now_s, own=False, answered=False, lost_at_s=now_s, vouched=tokens)
            known.earlier_tokens = earlier_tokens
            self._known[peer] = known

    def table(self, now_s: float) -> list[Row]:
        """This peer and the others, for a checkpoint."""
        most, me = self._most_tokens(now_s), self.me
        rows = [(me.peer, me.incarnation, me.address, max(self.earlier_tokens - self.start_tokens, 0), 0)]
        for known in self._known.values():
            member, tokens = known.word.member, known.counted(most)
            if tokens:
                rows.append((member.peer, member.incarnation, member.address, tokens, known.earlier_tokens))
        return rows

    def myself(self) -> Acquaintance:
        """A new word of this peer about itself."""
        self._beat += 1
        return Acquaintance(self.me, self._beat, self.progress, self.spread, start_tokens=self.start_tokens)

    def publish(self, now_s: float) -> tuple[Acquaintance, ...]:
        """The table of acquaintances, for another peer: this one first."""
        sure = [entry for entry in self._known.values() if entry.sure]
        if len(sure) > MAX_PUBLISHED:
            self._turn = (self._turn + MAX_PUBLISHED) % len(sure)
            sure = (sure + sure)[self._turn : self._turn + MAX_PUBLISHED]
        most = self._most_tokens(now_s)
        others = (
            replace(
                entry.word,
                age_s=max(now_s - entry.said_at_s, 0.0),
                progress=replace(entry.word.progress, tokens=min(entry.word.progress.tokens, entry.counted(most))),
                earlier_tokens=min(entry.earlier_tokens, entry.counted(most)),
            )
            for entry in sure
        )
        return (self.myself(), *others)

    def hear(self, words: Sequence[Acquaintance], now_s: float, trusted: bool = False) -> bool:
        """Enter the words of a peer that has answered at its address: the first is of itself. Returns whether it is new
        here. `trusted`: this peer took its weights, and takes at face value what it says that others have trained."""
        is_new = not self._has_answered(words[0].member)
        for place, word in enumerate(words):
            self._enter(word, now_s, own=place == 0)
            if trusted:
                self._believe(word)
        excess = len(self._known) - MAX_KNOWN
        for peer in heapq.nsmallest(excess, self._known, key=self._worth):
            del self._known[peer]
        return is_new and self._has_answered(words[0].member)

    def _believe(self, word: Acquaintance) -> None:
        """Take at face value what a peer has trained until now, and what its earlier lives have."""
        known, tokens = self._known.get(word.member.peer), _tokens(word, word.earlier_tokens)
        life = (known.word.member if known is not None else self.me).incarnation
        earlier_tokens = tokens if word.member.incarnation < life else word.earlier_tokens
        if word.member.incarnation <= life and (known is not None or word.member.peer == self.me.peer):
            holder = known or self
            holder.earlier_tokens = max(holder.earlier_tokens, earlier_tokens)
        if known is not None:
            known.vouched = tokens

    def _enter(self, word: Acquaintance, now_s: float, own: bool) -> None:
        member, known = word.member, self._known.get(word.member.peer)
        if member.peer == self.me.peer:
            return
        said_at_s = now_s - word.age_s
        if known is None:
            self._known[member.peer] = _Known(word, said_at_s, own, answered=own)
        elif not self._is_news(word, known, own, now_s):
            return
        elif known.word.member != member:
            self._known[member.peer] = self._next_life(word, known, said_at_s, own, now_s)
        else:
            if known.answered and not own:  # hearsay moves nobody to another address
                word = replace(word, member=known.word.member)
            known.word, known.own, known.answered = word, own, own or known.answered
            known.own_tokens = word.progress.tokens if own else known.own_tokens
            known.said_at_s = max(known.said_at_s, said_at_s)

    def _next_life(self, word: Acquaintance, known: _Known, said_at_s: float, own: bool, now_s: float) -> _Known:
        """Another life of a peer, or one that was replaced by hearsay. It adds to what the lives before it trained."""
        before = known if known.answered or known.before is None else known.before
        later = word.member.incarnation > before.word.member.incarnation
        tokens = before.counted(self._most_tokens(now_s)) if later else before.earlier_tokens
        before.before = None
        return _Known(word, said_at_s, own, own, vouched=known.vouched, earlier_tokens=tokens, before=before)

    def _is_news(self, word: Acquaintance, known: _Known, own: bool, now_s: float) -> bool:
        """Whether a word takes the place of the one that is known of its peer."""
        lives, before = self._lives(known, now_s), known.word.member
        if word.member == before:  # one lie with the last number there is would make all later words old
            most = MAX_JUMP if lives else math.inf
            return (own and not known.own) or 0 < word.beat - known.word.beat <= most
        later = word.member.incarnation > before.incarnation
        if known.answered:
            return later and (own or not lives)
        return later or own or not lives

    def _worth(self, peer: str) -> tuple[bool, float]:
        """For the order in which peers make room for others."""
        entry = self._known[peer]
        return entry.sure, entry.said_at_s

    def answered(self, member: Member) -> bool:
        """Note that a life has answered at its address. Returns whether that is news here."""
        known = self._known.get(member.peer)
        here = known is not None and known.word.member == member and known.word.member.address == member.address
        if known is None or not here or known.answered:
            return False
        known.answered, known.lost_at_s = True, -math.inf
        return True

    def _has_answered(self, member: Member) -> bool:
        known = self._known.get(member.peer)
        return known is not None and known.answered and known.word.member == member

    def lost(self, peer: str, now_s: float) -> None:
        """Note that a peer did not answer, or answered nonsense. It is not met again before a newer word of it."""
        if peer in self._known:
            self._known[peer].lost_at_s = now_s

    def admits(self, member: Member) -> bool:
        """Whether to listen to a sender: not to one with this peer's name, nor to an earlier life of a peer than one
        that has answered."""
        known = self._known.get(member.peer)
        earlier = known is not None and known.answered and member.incarnation < known.word.member.incarnation
        return member.peer != self.me.peer and not earlier

    def greets_back(self, peer: str, now_s: float) -> bool:
        """Whether a greeting of this peer is to be answered now, as it is from now on for a while no more."""
        known = self._known.get(peer)
        if known is None or now_s - known.greeted_at_s < ANSWER_S:
            return False
        known.greeted_at_s = now_s
        return True

    def get(self, peer: str) -> Acquaintance | None:
        """The latest word of an acquaintance."""
        known = self._known.get(peer)
        return known.word if known is not None else None

    def everybody(self, now_s: float) -> list[tuple[Acquaintance, float, bool]]:
        """All other peers, the dead included: the word of each, its age in seconds, and whether the peer answered and
        lives."""
        entries = self._known.values()
        return [(one.word, now_s - one.said_at_s, one.answered and self._lives(one, now_s)) for one in entries]

    def alive(self, now_s: float) -> list[Acquaintance]:
        """The other peers that may be met for a swap."""
        return [word for word, _, lives in self.everybody(now_s) if lives]

    def strangers(self, now_s: float) -> list[Member]:
        """Peers that live by hearsay, and are yet to answer."""
        entries = self._known.values()
        return [one.word.member for one in entries if not one.answered and self._lives(one, now_s)]

    def silent(self, now_s: float) -> Member | None:
        """The peer that was tried longest ago, among those that do not live and did not announce that they leave."""
        entries = [one for one in self._known.values() if one.sure and one.word.progress.phase != Phase.LEAVING]
        gone = [one for one in entries if not self._lives(one, now_s)]
        return min(gone, key=lambda one: one.lost_at_s).word.member if gone else None

    def tokens(self, now_s: float) -> int:
        """Tokens trained by all other peers, the dead included, and by earlier lives of this one whose weights it does
        not go on from: as far as this peer knows and believes."""
        return tokens_in(self.table(now_s))

    def _most_tokens(self, now_s: float) -> int:
        """Tokens for which a peer counts at most, beside those that were vouched for (`MAX_FASTER`)."""
        others = [one for one in self._known.values() if one.answered and self._lives(one, now_s)]
        mine = self.progress.tokens
        median = median_low([mine, *(one.own_tokens for one in others)])  # hearsay of all is one peer's word
        return MAX_FASTER * max(mine, median, self._round_tokens)

    def _lives(self, entry: _Known, now_s: float) -> bool:
        patience_s = max(FORGET_S, FORGET_SWAPS * self.swap_s)
        heard = entry.said_at_s > entry.lost_at_s and now_s - entry.said_at_s <= patience_s
        return heard and not (entry.own and entry.word.progress.phase == Phase.LEAVING)

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
            "tokens": self.progress.tokens + self.tokens(now_s),
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


def table_of(checkpoint: Checkpoint) -> Sequence[Row]:
    """The table in a checkpoint; empty in those of earlier releases. Raises StateError: it may be a stranger's."""
    table = checkpoint.meta.get("known", [])
    if not (isinstance(table, list) and len(table) <= MAX_KNOWN + 1):
        raise checkpoint.malformed("its table of peers is none, or has too many")
    for row in table:
        kinds = [*map(type, row)] if isinstance(row, list) else []
        if kinds != [str, int, str, int, int] or not all(0 <= one < 2**63 for one in row if type(one) is int):
            raise checkpoint.malformed(f"{row!r} is no peer and its tokens")
    return [(peer, life, address, tokens, earlier) for peer, life, address, tokens, earlier in table]


def tokens_in(table: Sequence[Row]) -> int:
    """Tokens by a table that the peer's own ones lack."""
    return sum(tokens for *_, tokens, _ in table)


def _tokens(word: Acquaintance, earlier_tokens: int) -> int:
    """Tokens of a peer in all its lives: of the earlier ones, and those by which this life has gone on since it began.

    Its start is its own word. If it is a lie, no more count than the peer might claim anyway, and no fewer than before.
    """
    return max(earlier_tokens + max(word.progress.tokens - word.start_tokens, 0), word.progress.tokens)
