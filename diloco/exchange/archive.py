"""States, means and commits that a peer keeps: for its own next version, and for members that join or are behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from diloco.base.clock import monotonic_s
from diloco.base.life import done
from diloco.base.types import Closed, Commit
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import Lanes
from diloco.outer.state import OuterState, StateChunk
from diloco.protocol.streams import StateOffer

MAX_SNAPSHOTS = 2
"""States kept for peers that are copying them, besides the latest."""
UNREAD_STALLS = 3
"""A snapshot of which nobody asked for a chunk, nor took bytes of one, for so many `stall_s` is dropped."""


def make_offer(state: OuterState, commit: Commit | None) -> StateOffer:
    """The exchange's offer of a copy of the state to a joiner. Hashes only what no version hashed before."""
    steps = tuple(fragment.steps for fragment in state.fragments)
    hashes = tuple(chunk.digest for chunk in state.manifest())
    return StateOffer(state.version, commit, state.digest, steps, hashes)


@dataclass
class _Snapshot:
    state: OuterState
    offer: StateOffer
    manifest: tuple[StateChunk, ...]
    read_at_s: float


class Backlog:
    """The exchange's backlog: the latest commits with their means, for those who are behind.

    A copy over a slow link takes more versions than are kept otherwise, and would be too old whenever it is here. So
    all since the oldest snapshot stay, too, while their means fit in the memory of one state: 8 versions of int8, 16 of
    int4. A link that takes whole rounds for its part of the syncs brings a state in as many. The same holds for a copy
    that this peer itself makes.

    Args:
        versions: kept in any case.
        max_bytes: of all means, when more than `versions` are kept.
    """

    def __init__(self, versions: int, max_bytes: int) -> None:
        self._versions = versions
        self._max_bytes = max_bytes
        self._closed: deque[Closed] = deque()
        self._bytes = 0
        self.copying_from: int | None = None
        """The oldest version that this peer would copy now; None: it copies no state, and has taken what closed since
        it did."""

    @property
    def leads_from(self) -> int:
        """The oldest version from which the backlog leads on; 0 while it keeps none."""
        first = self._closed[0].commit if self._closed else None
        return first.version - first.moves if first is not None else 0

    def add(self, closed: Closed, read_version: int | None) -> None:
        """Add a version to the backlog. `read_version`: of the oldest snapshot that is being copied; None: none is."""
        self._closed.append(closed)
        self._bytes += _payload_bytes(closed)
        copying_from = self.copying_from  # another thread sets it to None
        if copying_from is not None:
            read_version = copying_from if read_version is None else min(copying_from, read_version)
        versions = sum(closed.commit.moves for closed in self._closed)
        while versions > self._versions and not self._is_read(self._closed[0], read_version):
            versions -= self._closed[0].commit.moves
            self._bytes -= _payload_bytes(self._closed.popleft())

    def _is_read(self, closed: Closed, read_version: int | None) -> bool:
        version = closed.commit.version
        after = read_version is not None and (
            version > read_version or (version == read_version and not closed.commit.moves)
        )
        return after and self._bytes <= self._max_bytes

    def after(self, version: int, commit: Commit | None = None) -> list[Closed]:
        """Versions that closed after `commit` in the backlog, or after that version; the next may be missing."""
        if commit is None:
            return [closed for closed in self._closed if closed.commit.version > version]
        return [closed for closed in self._closed if closed.commit.height > commit.height]

    def since(self, height: int) -> list[Closed]:
        """Commits that closed after that height, -1: since the founding; none, unless the next one is kept."""
        if height < 0:
            height = next((one.commit.height - 1 for one in reversed(self._closed) if one.commit.founds), -1)
        after = [closed for closed in self._closed if closed.commit.height > height]
        return after if after and after[0].commit.height == height + 1 else []

    def leads_on_from(self, version: int, commit: Commit | None) -> bool:
        """Whether the backlog keeps what closed next after `commit`, or after that version where it has none."""
        after = self.after(version, commit)
        next_one = after[0].commit if after else None
        if next_one is None or commit is None:
            return next_one is not None and next_one.version == version + 1
        return next_one.height == commit.height + 1

    def keeps(self, commit: Commit) -> bool:
        """Whether the backlog keeps this commit, and so all after it."""
        return any(closed.commit.height == commit.height for closed in self._closed)

    def state_of(self, version: int) -> str:
        """Digest of the state of `version` on which the backlog's next version was made; empty: it is not kept."""
        after = (closed.commit for closed in self._closed if closed.commit.version == version + 1)
        return next((commit.state_digest for commit in after if commit.moves), "")

    def means(self) -> set[str]:
        """Digests of the means that the backlog keeps."""
        return {closed.commit.mean_digest for closed in self._closed}

    def clear(self) -> None:
        """Forget all versions of the backlog."""
        self._closed.clear()
        self._bytes = 0


def _payload_bytes(closed: Closed) -> int:
    return sum(map(len, closed.parts))


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
            kept = self._witness or (not behind and self._backlog.keeps(first))
            if not kept:
                self._pass_over()
            news, self._news = self._news, None
            return None if kept else first, news

    def _pass_over(self) -> None:
        commits = [closed.commit for closed in self._closed]
        self._closed.clear()
        if self.passed is None:
            self.passed = next((c for c in commits if any(entry.peer == self._peer for entry in c.counted)), None)

    def restart(self, version: int, commit: Commit | None) -> tuple[Sequence[Commit], bool]:
        """The training side has copied the state of `version`, which is `commit`'s: what closed since waits for it.

        Returns those commits, and whether some are missing before them: then it is behind once more.
        """
        with self._changed:
            later = self._backlog.after(version, commit)
            missing = bool(later) and not self._backlog.leads_on_from(version, commit)
            self._closed = deque(() if missing else later)
            self.passed = None
            if not later:
                self._backlog.copying_from = None
            return [closed.commit for closed in self._closed], missing

    def pass_over(self) -> None:
        """Apply none of them: they belong to a lineage that ended. Some may belong to the one that goes on, too, and
        count this peer: the forks of the copied state tell."""
        with self._changed:
            self._pass_over()


class Snapshots:
    """States that others are copying. One that is being read stays, for as long as the backlog leads on from it.

    One that nobody reads for `UNREAD_STALLS` times `stall_s` is dropped. Whoever is offered an older one has not read
    it yet, and may be one that cannot use it, and asks again and again.
    """

    def __init__(self, backlog: Backlog, stall_s: float) -> None:
        self._backlog = backlog
        self._unread_s = UNREAD_STALLS * stall_s
        self._kept: dict[str, _Snapshot] = {}

    def oldest_version(self) -> int | None:
        """Oldest version whose state is kept for copies. None: there is none."""
        return min((snapshot.offer.version for snapshot in self._kept.values()), default=None)

    def offer(self, state: OuterState, offer: StateOffer, now_s: float) -> StateOffer:
        """Offer `state` for copying; or, when as many as are kept are being copied, the latest of those."""
        self.forget(state.version, now_s)
        full = len(self._kept) >= MAX_SNAPSHOTS and offer.digest not in self._kept
        if not full:
            self._kept[offer.digest] = _Snapshot(state, offer, state.manifest(), now_s)
            return offer
        return max(self._kept.values(), key=lambda snapshot: snapshot.offer.version).offer

    def digests(self) -> set[str]:
        """Digests of the states that are kept for copies."""
        return set(self._kept)

    def entry(self, digest: str, index: int, now_s: float) -> StateChunk | None:
        """Manifest entry of one chunk of the kept state with that digest, which a peer copies; None: not kept."""
        snapshot = self._kept.get(digest)
        if snapshot is None or not 0 <= index < len(snapshot.manifest):
            return None
        snapshot.read_at_s = now_s
        return snapshot.manifest[index]

    def read(self, digest: str, now_s: float) -> None:
        """Note that a peer takes bytes of a kept state: over a slow link a chunk takes long."""
        if digest in self._kept:
            self._kept[digest].read_at_s = now_s

    def chunk(self, digest: str, index: int, now_s: float) -> bytes | None:
        """One chunk of a kept state for another peer's copy, where one lane holds all of it."""
        entry = self.entry(digest, index, now_s)
        return self._kept[digest].state.chunk(entry) if entry is not None else None

    def keep_lineage(self, lineage: str) -> None:
        """Drop states whose commit is of another lineage. Whoever asks takes none of them, and asks again and again:
        they would never be idle, nor make room."""
        commits = {digest: snapshot.offer.commit for digest, snapshot in self._kept.items()}
        ended = {digest for digest, commit in commits.items() if commit is not None and commit.lineage != lineage}
        self._kept = {digest: snapshot for digest, snapshot in self._kept.items() if digest not in ended}

    def forget(self, version: int, now_s: float) -> None:
        """Drop states that nobody copies, or from which the backlog does not lead on to `version`, where we stand."""

        def wanted(snapshot: _Snapshot) -> bool:
            at = snapshot.offer.version
            leads_on = at >= version or self._backlog.leads_on_from(at, snapshot.offer.commit)
            return now_s - snapshot.read_at_s <= self._unread_s and leads_on

        self._kept = {digest: snapshot for digest, snapshot in self._kept.items() if wanted(snapshot)}


class Archive:
    """States, kept means and backlog in the lanes of one peer, by digest. On rank 0, on the loop's thread.

    Tensors and payloads are in the lanes of the ranks, which know a state by a number.

    Args:
        max_bytes: of all means of the backlog, while a state is copied (`Backlog`).
        stall_s: longest time that a link is still over which a state is copied (`Snapshots`).
    """

    def __init__(self, lanes: Lanes, means_kept: int, backlog_versions: int, max_bytes: int, stall_s: float) -> None:
        self._lanes = lanes
        self.backlog = Backlog(backlog_versions, max_bytes)
        self.snapshots = Snapshots(self.backlog, stall_s)
        self.state: OuterState | None = None
        """Where the training side stands."""
        self.commit: Commit | None = None
        """Commit that made that state, or founded a lineage on it: it says who is counted. View commits follow it."""
        self.reused = False
        """Whether the next version's outer step overwrites the state."""
        self.means: deque[str] = deque(maxlen=means_kept)
        """Digests of the latest means that are here, whole."""
        self._numbers: dict[str, int] = {}
        """The lanes' numbers of the states that are kept, by digest."""

    def hold(self, state: OuterState, commit: Commit | None, number: int) -> None:
        """Note that the training side stands at `state` now, which the lanes call `number`."""
        before = self.commit
        if commit is None or not commit.drafter or before is None or before.version != commit.version:
            self.commit = commit
        self.state, self.reused = state, False
        self._numbers[state.digest] = number
        if commit is not None:
            self.snapshots.keep_lineage(commit.lineage)
        self.snapshots.forget(state.version, monotonic_s())
        self.retain()

    def close(self, closed: Closed) -> bool:
        """Keep a version that closed. A founding makes the state here one of its lineage, and moves no anchor: whoever
        joins that lineage copies it before the training side knows. Returns whether it is such a founding."""
        commit = closed.commit
        self.backlog.add(closed, self.snapshots.oldest_version())
        state = self.state
        founds = commit.founds and state is not None and state.digest == commit.state_digest
        if founds:
            self.commit = commit
            self.snapshots.keep_lineage(commit.lineage)
        return founds

    def retain(self) -> None:
        """Have the lanes keep the latest state and those that others are copying, and forget all others."""
        read = self.snapshots.digests() | ({self.state.digest} if self.state is not None else set())
        self._numbers = {digest: number for digest, number in self._numbers.items() if digest in read}
        self._lanes.each(Lane.retain, tuple(self._numbers.values()))

    def reuse(self) -> bool:
        """Let the kept state be overwritten, unless a peer copies a state: an earlier one shares the buffers of all
        fragments that have not moved since. Until `hold` it is offered for no copy."""
        if self.state is not None:
            self.snapshots.forget(self.state.version, monotonic_s())
            self.reused = not self.snapshots.digests()
        return self.reused

    def number_at(self, version: int) -> int:
        """The lanes' number of the state, if it is of that version; else 0."""
        state = self.state
        return self._numbers[state.digest] if state is not None and state.version == version else 0

    def number_of(self, digest: str) -> int:
        """The lanes' number of the state, if it has that digest; else 0."""
        return self._numbers[digest] if self.state is not None and self.state.digest == digest else 0

    def offer(self, state: OuterState, offer: StateOffer) -> StateOffer:
        """Offer `state` to a peer that copies it, or an older one (`Snapshots.offer`), and have the lanes keep that."""
        given = self.snapshots.offer(state, offer, monotonic_s())
        self.retain()
        return given

    async def chunk(self, digest: str, index: int) -> bytes | None:
        """One chunk of a state that another peer is copying, from the lane that holds it; None when it is gone."""
        entry = self.snapshots.entry(digest, index, monotonic_s())
        if entry is None or digest not in self._numbers:
            return None
        return await self._lanes.chunk(self._numbers[digest], entry)

    async def take_mean(self, closed: Closed) -> bool:
        """Have the lanes keep the mean of a version that another peer gave, whole. Returns whether their logs have it,
        once they have it or have refused it."""
        digest = closed.commit.mean_digest
        self._lanes.take_mean(closed.commit.version, digest, closed.parts)
        self.keep_mean(digest)
        return await self._lanes.logged(digest)

    def log_again(self, version: int, fragment: int, digest: str) -> None:
        """Have the lanes log a mean once more that is here whole, where their logs have refused it."""
        self.keep_mean(digest)
        self._lanes.each(Lane.log_again, version, fragment, digest)

    def keep_mean(self, digest: str) -> None:
        """Have the lanes keep this mean, which is here whole, and forget those that nobody needs."""
        if digest in self.means:
            self.means.remove(digest)
        self.means.append(digest)
        self._lanes.each(Lane.keep_means, {*self.means, *self.backlog.means()})

    async def commits(self, since: int) -> AsyncIterator[Closed]:
        """Commits of the backlog after height `since` with their means from the lanes, without gaps. Each mean is
        gathered when it is asked for: of several ranks it takes time and memory."""
        for closed in self.backlog.since(since):
            parts = await self._lanes.mean(closed.commit.mean_digest) if closed.parts else ()
            if parts is None:
                return
            yield Closed(closed.commit, parts)
