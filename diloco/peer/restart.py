"""A process that goes on with what an earlier one left in its peer's folder: its life, its votes, the means in its log.

State = checkpoint + log. What bound the life binds it still; what it had accepted must be here again, for it may have
been decided; and versions that it closed and had not applied yet are applied, and booked, now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.accounts.journal import Journal
from diloco.accounts.left_off import booked
from diloco.base.decisions import Redo
from diloco.base.life import Life
from diloco.base.types import Closed, Commit
from diloco.exchange.log import logged_mean
from diloco.exchange.votes import VOTES, PastVotes, past_votes
from diloco.outer.fragments import Layout
from diloco.outer.line import book, book_drop
from diloco.protocol.vote import Restored
from diloco.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from diloco.peer.peer import Peer
    from diloco.transport.endpoint import Endpoint


class Restart:
    """A restart from a peer's folder, on rank 0."""

    def __init__(self, folder: Path, past: PastVotes, joins: bool) -> None:
        self._folder, self._past, self._joins = folder, past, joins
        self._booked = booked(folder)
        self.boot, self.earlier = self._booked.boot, self._booked.earlier
        self._unbooked: list[tuple[Commit, str]] = []
        """Commits that no ledger has, each with the digest of the state after it."""

    @staticmethod
    def of(folder: Path | None, checkpoint: Checkpoint | None, joins: bool) -> Restart | None:
        """The restart that a folder allows; None: nothing there binds anybody, or there is no state to begin from.
        `joins`: a person named the members to join, whatever their lineage lacks."""
        if folder is None or checkpoint is None or checkpoint.commit is None:
            return None
        past = past_votes(folder)
        return Restart(folder, past, joins) if past is not None else None

    def life(self, endpoint: Endpoint, warn: Callable[[str], None]) -> Restored | None:
        """The record of the life that goes on, and no `welcome` to a lineage that has less than this disk. None: this
        process begins a life, as that one had left in good order, or the run went on in another lineage."""
        restored, welcome = self._past.restored, endpoint.welcome
        head, last = restored.head, restored.accepted or restored.head
        if not self._past.goes_on:
            return None
        if welcome is not None and welcome.lineage != head.lineage:
            parted_at = next((fork.tokens for fork in welcome.forks if fork.lineage == head.lineage), -1)
            if self._joins or parted_at >= last.tokens:
                return None
            # With others that have it, too, this voter would take back a version that is committed.
            there = welcome.members[0].address
            warn(f"{there} went on without version {last.version}, which is here: not joining it, unless by --join")
            endpoint.welcome = None
        return restored

    def redo(self, peer: Peer, checkpoint: Checkpoint) -> Life[None]:
        """Apply again the versions since the checkpoint: the votes have the commits, the logs of the ranks the means.

        Where one of them counts this peer, the progress of the checkpoint goes: it may be what was counted.
        """
        line, folder = peer.line, str(self._folder.resolve())
        for commit in self._since(line.commit):
            if commit.moves:
                drops = any(counted.peer == peer.name for counted in commit.counted)
                yield from peer.do(Redo(commit.to_bytes().decode(), folder, peer.name, drops))
                if not peer.rank.redone:
                    head = self._past.restored.head.version
                    peer.warn(
                        f"the log has no mean of version {commit.version}: going on from the one before. This peer "
                        f"votes again when it has version {head} from another. Where none has that, stop all peers, "
                        f"move {self._folder / VOTES} away and resume: a new lineage goes on from the last checkpoint"
                    )
                    return
                if drops:
                    book_drop(line)
                    line.trained.blocks = 0  # the lease begins behind those that were counted
                book(line, commit, None)
                if self._booked.states.get(commit.digest, line.state.digest) != line.state.digest:
                    peer.warn(f"the log makes another state of version {commit.version}: going on from the checkpoint")
                    self._unbooked.clear()
                    yield from peer.restore(checkpoint)
                    return
                peer.ending.on_commit(commit)
            else:
                peer.found_again(line.commit, commit)
            if commit.digest not in self._booked.states:
                self._unbooked.append((commit, line.state.digest))

    def _since(self, commit: Commit | None) -> Sequence[Commit]:
        """The commits to apply after this one. Where they do not lead to where the voter stood last, a state of another
        lineage was copied: then those that led there, by the ledger."""
        found = self._past.since(commit)
        if found and found[-1] == self._past.restored.head:
            return found
        return [*takewhile(lambda one: one.digest in self._booked.stood, found)]

    def book(self, journal: Journal) -> None:
        """Book what the process before had closed and not applied."""
        for commit, state_digest in self._unbooked:
            journal.committed(commit, None, state_digest)

    def accepted(self, layout: Layout) -> Closed | None:
        """The version that was accepted last, with its mean from the log of the ranks here; None: there is none."""
        commit = self._past.restored.accepted
        if commit is None or not commit.moves:
            return None
        parts = layout.fragments[commit.fragment].parts
        found = logged_mean(self._folder, 0, commit.version, commit.mean_digest, parts, range(parts))
        return Closed(commit, found) if found is not None else None
