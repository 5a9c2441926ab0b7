"""Versions that the exchange closed and the training side has not applied yet: no more than the backlog keeps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from diloco.base.life import done
from diloco.base.types import Closed, Commit
from diloco.exchange.archive import Backlog


class Untaken:
    """Closed versions that wait for the training side, in order. The exchange adds them, any thread takes them.

    Their means are those of the backlog, so that they take no memory of their own. A peer that trains through more
    versions than that applies none of them: it copies the state.
    """

    def __init__(self, peer: str, backlog: Backlog, witness: bool) -> None:
        self._peer, self._backlog, self._witness = peer, backlog, witness
        self._closed: deque[Closed] = deque()
        self._changed = threading.Lock()
        self._news: Future[None] | None = None
        """Done when there are some."""
        self.passed: Commit | None = None
        """The first version that counts this peer among those that it is not going to apply."""

    def __bool__(self) -> bool:
        return bool(self._closed)

    def take(self) -> Sequence[Closed]:
        """Versions that closed since the last call, in order: whoever takes them applies them."""
        with self._changed:
            taken = tuple(self._closed)
            self._closed.clear()
            if taken:
                self._backlog.copying_from = None
            return taken

    def news(self, promise: Callable[[], Future[None]]) -> Future[None]:
        """A future that is done when there is something to take, made by `promise` where there is none yet."""
        with self._changed:
            if self._closed:
                return done(None)
            if self._news is None or self._news.done():
                self._news = promise()
            return self._news

    def add(self, closed: Closed, behind: bool) -> tuple[Commit | None, Future[None] | None]:
        """Add a version that closed, and that the backlog keeps. `behind`: a copy of the state comes before it.

        Returns the first version that is passed over, together with all later ones, if any is: then only a copy of the
        state helps. And the future of `news`, if somebody waits for it.
        """
        with self._changed:
            self._closed.append(closed)
            first = self._closed[0].commit
            kept = self._witness or (not behind and self._backlog.leads_on_from(first.version - 1))
            if not kept:
                self._pass_over()
            news, self._news = self._news, None
            return None if kept else first, news

    def _pass_over(self) -> None:
        commits = [closed.commit for closed in self._closed]
        self._closed.clear()
        if self.passed is None:
            self.passed = next((c for c in commits if any(entry.peer == self._peer for entry in c.counted)), None)

    def restart(self, version: int) -> tuple[Sequence[Commit], bool]:
        """The training side has copied the state of `version`: what closed since waits for it.

        Returns those commits, and whether versions are missing before them: then it is behind once more.
        """
        with self._changed:
            later = self._backlog.after(version)
            missing = bool(later) and later[0].commit.version != version + 1
            self._closed = deque(() if missing else later)
            self.passed = None
            if not later:
                self._backlog.copying_from = None
            return [closed.commit for closed in self._closed], missing

    def clear(self) -> None:
        """Forget all versions: they belong to a lineage that ended."""
        with self._changed:
            self._closed.clear()
