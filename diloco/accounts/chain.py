"""The commits of a run as several peers tell them: one tree, whose branches are the lineages.

Pure: ledgers and checkpoints are read elsewhere, the deterministic simulator fills it from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.base.types import Commit

Place = tuple[str, int]
"""Lineage and version."""


@dataclass
class Chain:
    """Every commit once, by its digest."""

    commits: dict[str, Commit] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digest of the commit -> digest of the state after it -> who said so first."""
    places: dict[Place, dict[str, str]] = field(default_factory=dict)
    """Lineage and version -> digest of the commit -> who said so first. More than one is a broken run."""
    children: dict[str, list[str]] = field(default_factory=dict)
    """Digest -> digests of the commits that name it as `previous`."""

    def add(self, commit: Commit, state_digest: str, source: str) -> None:
        """`source` applied the commit and then held this state."""
        digest = commit.digest
        if digest not in self.commits:
            self.commits[digest] = commit
            self.children.setdefault(commit.previous, []).append(digest)
        self.again(digest, state_digest, source)

    def again(self, digest: str, state_digest: str, source: str) -> None:
        """`source`, too, applied a commit that is known already."""
        commit = self.commits[digest]
        self.states.setdefault(digest, {}).setdefault(state_digest, source)
        self.places.setdefault((commit.lineage, commit.version), {}).setdefault(digest, source)

    def roots(self) -> list[str]:
        """Commits whose `previous` nobody told of, oldest first."""
        found = [digest for digest, commit in self.commits.items() if commit.previous not in self.commits]
        return sorted(found, key=self.order)

    def heads(self) -> list[str]:
        """Commits that nothing follows, the one that goes on first (`diloco.protocol.lineage.goes_on`)."""
        found = [digest for digest in self.commits if digest not in self.children]
        return sorted(found, key=self._rank, reverse=True)

    def _rank(self, head: str) -> tuple[int, int, str]:
        commit = self.commits[head]
        return commit.tokens, len({before.lineage for before in self.path(head)}), commit.lineage

    def order(self, digest: str) -> tuple[int, bool, str]:
        """Sorts commits by version; a founding stands before what follows it."""
        commit = self.commits[digest]
        return commit.version, commit.fragment >= 0, commit.lineage

    def path(self, head: str) -> Iterator[Commit]:
        """From `head` back to its root."""
        at: str | None = head
        while at in self.commits:
            commit = self.commits[at]
            yield commit
            at = commit.previous

    def forks(self) -> list[str]:
        """Digests with more than one child."""
        return [digest for digest, children in self.children.items() if len(children) > 1]
