"""Commits and means that a peer missed, fetched from members that keep them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from diloco.base.threads import one_thread
from diloco.base.types import Closed, Commit, Member
from diloco.exchange.archive import Archive
from diloco.exchange.terms import Terms
from diloco.outer.average import is_mean_of
from diloco.outer.state import state_bytes
from diloco.protocol import messages as m
from diloco.protocol.machine import Machine
from diloco.protocol.streams import Limits
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

logger = logging.getLogger(__name__)

MAX_ASKED_AT_ONCE = 2
"""Members asked for one mean, or for missed commits. Over a slow link these take many stall times; were one more asked
after each, no answer would come to its end. With one alone, a member that sends drop by drop could stop this peer."""

MAX_TOO_FAR = 3
"""Members without the next commit after which this peer is too far behind: each costs a call, and all keep as many."""


class Fetcher:
    """Fetches missed commits and means from members' backlogs, checks them, feeds the machine. On the loop's thread."""

    def __init__(
        self,
        terms: Terms,
        link: Link,
        machine: Machine,
        archive: Archive,
        feed: Callable[[m.Event], None],
    ) -> None:
        self.hasher = one_thread("check")
        """Hashes what was fetched. One core takes 2 s for the mean of 10B parameters, which the loop has not. To hash a
        state for a joiner takes longer, so another thread does that: a vote may wait for this mean."""
        self._terms, self._link, self._machine, self._archive, self._feed = terms, link, machine, archive, feed
        self._asked: set[tuple[str, Member]] = set()
        """Mean digests (or "commits") that are being fetched, and from whom."""
        rules, lane = terms.rules, terms.lane
        parts = max(rules.parts, default=0)
        mean_bytes = parts * lane.max_part_bytes
        lanes = max((fragment.lanes for fragment in lane.layout.fragments), default=1)  # ours has one share of a state
        kept_bytes = lanes * state_bytes(lane.layout, lane.optimizer) + rules.backlog_versions * mean_bytes
        self._limits = Limits(parts, lane.max_part_bytes, kept_bytes)
        """Bounds of an answer from another peer's backlog: no larger than this peer's own may be."""

    async def mean(self, commit: Commit, sources: Sequence[Member]) -> None:
        """Fetch a commit's mean from the first member whose exchange keeps it."""
        digest, stall_s = commit.mean_digest, self._terms.timing.stall_s
        for source in sources:
            try:
                with self._asking(digest, source):
                    parts = await self._link.fetch_mean(source.address, digest, self._limits, stall_s)
                    fits = await self._fitting([closed := Closed(commit, parts)])
            except (_Asked, LinkDown, LinkSlow, LinkRefused):
                continue
            if fits:
                # Else it came from elsewhere meanwhile, and not with an earlier version whose mean is equal.
                if commit.version > self._machine.version or digest not in self._archive.means:
                    logged = await self._archive.take_mean(closed)
                    self._feed(m.MeanHeld(digest, logged=logged))
                return

    async def commits(self, source: Member) -> bool:
        """Fetch missed commits with their means from a member's backlog, or from those of others where it keeps no next
        one, as it may have joined a moment ago. False: only a copy of the state helps."""
        if await self._commits(source) is not False:
            return True
        for member in self._others(source)[: MAX_TOO_FAR - 1]:
            if await self._commits(member):
                return True
        return False

    def _others(self, source: Member) -> list[Member]:
        """Other trainers of the view: first those that stand on later commits, then those that were heard of late."""
        machine, since, alive = self._machine, self._since(), self._machine.alive()
        beats = {one: machine.roster.heartbeat(one) for one in machine.view if not one.witness}
        ahead = {one for one, beat in beats.items() if beat is not None and beat.height > since}
        others = [one for one in beats if one not in (machine.me, source)]
        return sorted(others, key=lambda one: (one not in ahead, one not in alive))

    async def _commits(self, source: Member) -> bool | None:
        """Fetch missed commits from one member's backlog. False: it keeps no next one; None: it did not answer, or has
        been asked."""
        since, stall_s = self._since(), self._terms.timing.stall_s
        try:
            with self._asking("commits", source):
                missed = await self._link.fetch_commits(source.address, since, self._limits, stall_s)
                fitting = await self._fitting(missed)
        except _Asked:
            return None
        except (LinkDown, LinkSlow, LinkRefused) as error:
            logger.info("no commits from %s: %s", source.peer, error)
            return None
        if len(fitting) < len(missed):
            logger.warning("%s sent a mean that does not match its commit", source.peer)
        for closed in fitting:
            if closed.commit.height > self._since():  # else it closed here meanwhile
                await self._archive.take_mean(closed)
                self._feed(m.Learned(closed.commit, source))
        return bool(missed) or since != self._since()  # or a version closed here meanwhile

    async def _fitting(self, fetched: Sequence[Closed]) -> Sequence[Closed]:
        """Fetched versions up to the first whose mean is not that of its commit."""
        layout = self._terms.lane.layout

        def check() -> Sequence[Closed]:
            return list(takewhile(lambda closed: is_mean_of(closed.parts, closed.commit, layout), fetched))

        return await asyncio.get_running_loop().run_in_executor(self.hasher, check)

    def _since(self) -> int:
        """The height after which the exchange misses commits; -1: from the founding."""
        return self._machine.height

    @contextmanager
    def _asking(self, what: str, source: Member) -> Iterator[None]:
        """Raises _Asked if the member is asked for this missed item already, or `MAX_ASKED_AT_ONCE` others are."""
        if (what, source) in self._asked or sum(one == what for one, _ in self._asked) >= MAX_ASKED_AT_ONCE:
            raise _Asked
        self._asked.add((what, source))
        try:
            yield
        finally:
            self._asked.discard((what, source))


class _Asked(Exception):
    """The missed mean or commits are being fetched already."""
