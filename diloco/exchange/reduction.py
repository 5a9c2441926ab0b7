"""Bookkeeping of one attempt's butterfly: which parts are here, which are missing and from whom. No bytes."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.exchange.messages import Begin, Span


class Reduction:
    """One peer's share of one reduction.

    A part that I own is complete when every contributor's bytes for it are here; it is then averaged in the order of
    `begin.contributors`, never of arrival. The mean is complete when every part of the fragment is here.
    """

    def __init__(self, begin: Begin, me: str, now: float) -> None:
        self.begin = begin
        self.me = me
        self.progress_at_s = now
        self.mean_digest = ""
        self._owner = {part: span.owner for span in begin.spans for part in range(span.start, span.stop)}
        self._absent_mean = set(self._owner)
        contributors = {counted.peer for counted in begin.contributors}
        self._absent = {part: set(contributors) for part, owner in self._owner.items() if owner == me}

    @property
    def key(self) -> tuple[int, int]:
        return self.begin.version, self.begin.attempt

    @property
    def contributes(self) -> bool:
        return any(counted.peer == self.me for counted in self.begin.contributors)

    @property
    def complete(self) -> bool:
        return not self._absent_mean

    def own_spans(self) -> list[Span]:
        return [span for span in self.begin.spans if span.owner == self.me]

    def contribution(self, sender: str, part: int, now: float) -> bool:
        """`sender`'s bytes of `part` are here. True when that was the last one missing."""
        absent = self._absent.get(part)
        if absent is None or sender not in absent:
            return False
        self.progress_at_s = now
        absent.remove(sender)
        return not absent

    def mean(self, part: int, sender: str, now: float) -> bool:
        """`part` of the mean is here. True when that was the last one missing."""
        if self._owner.get(part) != sender or part not in self._absent_mean:
            return False
        self.progress_at_s = now
        self._absent_mean.remove(part)
        return self.complete

    def missing(self) -> tuple[str, ...]:
        """Peers whose bytes are missing: contributors to my parts first, then owners of parts of the mean."""
        late = {peer for absent in self._absent.values() for peer in absent}
        if not late:
            late = {self._owner[part] for part in self._absent_mean}
        return tuple(sorted(late - {self.me}))


def well_formed(begin: Begin, parts: int, view: Sequence[str]) -> bool:
    """Whether spans cover all parts once, in order, and everybody named may be."""
    contributors = [counted.peer for counted in begin.contributors]
    bounds = [0, *(span.stop for span in begin.spans)]
    starts = [span.start for span in begin.spans]
    return (
        len(set(contributors)) == len(contributors) > 0
        and set(contributors) <= set(view) & {member.peer for member in begin.receivers}
        and all(span.owner in contributors and span.start < span.stop for span in begin.spans)
        and starts == bounds[:-1]
        and bounds[-1] == parts
    )
