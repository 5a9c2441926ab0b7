"""The ledgers of several peers, read from their folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.accounts.ledger import LEDGER, Record, Scan, Totals, forged, read_ledger
from diloco.base.errors import StateError, UsageError
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
        """Commits that nothing follows, the one that goes on first (`diloco.protocol.view.goes_on`)."""
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


@dataclass
class Life:
    """The records of one process of a peer."""

    peer: str
    lines: list[tuple[int, Record]]
    """With the number of their line in the ledger."""

    @property
    def opening(self) -> Mapping[str, Any]:
        """Fields of the record that opens this life."""
        return self.lines[0][1].fields

    @property
    def totals(self) -> Totals:
        """Token totals at the end of this life."""
        return self.lines[-1][1].totals

    @property
    def closed(self) -> bool:
        return self.lines[-1][1].kind == "close"

    def of(self, kind: str) -> list[tuple[int, Record]]:
        return [(line, record) for line, record in self.lines if record.kind == kind]

    @property
    def head(self) -> str:
        """Digest of the last commit that it applied; empty before any."""
        places = [record.fields["digest"] for _, record in self.lines if "digest" in record.fields]
        return str(places[-1])


@dataclass(frozen=True)
class Book:
    """One peer's folder."""

    peer: str
    directory: Path
    lives: tuple[Life, ...]
    torn_bytes: int


def peer_folders(directories: Sequence[Path]) -> list[Path]:
    """Folders with a ledger: those given, and the ones directly inside (of a simulation, say). Raises StateError."""
    found: list[Path] = []
    for directory in directories:
        inside = sorted(path.parent for path in directory.glob(f"*/{LEDGER}"))
        own = [directory] if (directory / LEDGER).is_file() else inside
        if not own:
            cause = f"no {LEDGER} in {directory.absolute()}"
            raise StateError(cause, "give folders of peers, or the --out folder of a simulation")
        found += own
    return list(dict.fromkeys(found))


def read_books(directories: Sequence[Path]) -> list[Book]:
    """The lives of each peer that belong to one run: that of the latest life of the first ledger.

    A ledger without a life, of a peer that died before it wrote a line, says nothing. Raises UsageError for folders of
    different runs or when no life is left, and StateError for a damaged ledger.
    """
    books, damaged = _open_books(directories)
    for error in damaged.values():
        raise error
    return books


def _open_books(directories: Sequence[Path]) -> tuple[list[Book], dict[Path, StateError]]:
    """The same, and what is wrong with the ledgers that are left out, by folder. Raises the first of these, too, where
    no ledger is left."""
    folders, books = peer_folders(directories), list[Book]()
    damaged: dict[Path, StateError] = {}
    known: set[str] = set()
    for folder in folders:
        try:
            found = read_ledger(folder / LEDGER)
            _check_commits(folder / LEDGER, found, known)
        except StateError as error:
            damaged[folder] = error
            continue
        if any(record.kind == "open" for record in found.records):
            books.append(book_of(folder, found))
    if not books and damaged:
        raise next(iter(damaged.values()))
    if not books:
        raise UsageError(f"the ledger in {folders[0]} has no life in it", "give the folders of peers that lived")
    contracts = {book.lives[-1].opening["contract_digest"] for book in books}
    if len(contracts) > 1:
        raise UsageError("these ledgers belong to different runs", "give the peers of one run")
    return books, damaged


def _check_commits(path: Path, found: Scan, known: set[str]) -> None:
    """Parse those that are not `known`, which grows. Raises StateError."""
    for line, record in enumerate(found.records, 1):
        try:
            if record.kind == "commit" and record.commit_digest not in known:
                known.add(record.commit.digest)
        except ValueError as error:
            raise forged(path, line, error) from error


def book_of(directory: Path, found: Scan) -> Book:
    """The lives in a ledger that belong to the run of the last one. Raises ValueError when there is none."""
    lives: list[Life] = []
    for line, record in enumerate(found.records, 1):
        if record.kind == "open":
            lives.append(Life(record.fields["peer"], []))
        if lives:  # else a full disk refused the opening itself: the gap says so
            lives[-1].lines.append((line, record))
    if not lives:
        raise ValueError("has no life in it")
    contract = lives[-1].opening["contract_digest"]
    same = tuple(life for life in lives if life.opening["contract_digest"] == contract)
    return Book(lives[-1].peer, directory, same, found.torn_bytes)


def chain_of(books: Iterable[Book]) -> Chain:
    """All commits that the ledgers tell of."""
    chain = Chain()
    for book in books:
        for life in book.lives:
            for line, record in life.of("commit"):
                digest, state, source = record.commit_digest, record.fields["state"], f"{book.peer}, line {line}"
                if digest in chain.commits:
                    chain.again(digest, state, source)
                else:
                    chain.add(record.commit, state, source)
    return chain
