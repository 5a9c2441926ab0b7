"""Books and the chain: the ledgers of a run's peers, read together.

A book is a peer's ledger, cut into the lives of that peer. The chain holds the commits of all books. It is one tree,
whose branches are the lineages. Books come from folders here; the deterministic simulator makes them from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.accounts.ledger import LEDGER, Record, Scan, Totals, read_ledger
from diloco.base.errors import StateError, UsageError
from diloco.base.types import Commit


@dataclass
class ChainRecord:
    """Tree of the commits that the ledgers of a run hold, each once."""

    commits: dict[str, Commit] = field(default_factory=dict)
    """Commits by digest."""
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digest of the commit -> digest of the state after it -> the first ledger line with it."""
    places: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    """Lineage and height -> digest of the commit -> the first ledger line with it. More than one is a broken run."""
    children: dict[str, list[Commit]] = field(default_factory=dict)
    """Digest -> commits that name it as `previous`."""

    def add(self, commit: Commit, state_digest: str, source: str) -> None:
        """Add a ledger's commit to the chain, known or new, that `source` applied, and the state that it then held."""
        digest = commit.digest
        if digest not in self.commits:
            self.commits[digest] = commit
            self.children.setdefault(commit.previous, []).append(commit)
        self.states.setdefault(digest, {}).setdefault(state_digest, source)
        self.places.setdefault((commit.lineage, commit.height), {}).setdefault(digest, source)

    def roots(self) -> list[Commit]:
        """Commits of the chain whose `previous` is in no ledger, oldest first, a founding before what follows it."""
        found = [commit for commit in self.commits.values() if commit.previous not in self.commits]
        return sorted(found, key=lambda commit: (commit.version, not commit.founds, commit.lineage))

    def heads(self) -> list[Commit]:
        """Commits of the ledgers' chain without a successor, the one that goes on first."""

        def rank(head: Commit) -> tuple[int, int, str]:  # as `diloco.protocol.view.goes_on` compares lineages
            return head.tokens, len({commit.lineage for commit in self.path(head)}), head.lineage

        found = [commit for digest, commit in self.commits.items() if digest not in self.children]
        return sorted(found, key=rank, reverse=True)

    def path(self, head: Commit) -> Iterator[Commit]:
        """Commits of the ledgers' chain from `head` back to its root."""
        commit: Commit | None = head
        while commit is not None:
            yield commit
            commit = self.commits.get(commit.previous)

    def forks(self) -> list[list[Commit]]:
        """Successors of each commit of the ledgers' chain that has several."""
        return [children for children in self.children.values() if len(children) > 1]


@dataclass
class RecordedLife:
    """A peer's life as its ledger records it."""

    records: list[Record]

    @property
    def opening(self) -> Mapping[str, Any]:
        """Fields of the `open` record of this life in the ledger."""
        return self.records[0].fields

    @property
    def totals(self) -> Totals:
        """Token totals at the end of this life, by the ledger."""
        return self.records[-1].totals

    @property
    def closed(self) -> bool:
        """Whether the ledger records that this life ended in good order."""
        return self.records[-1].kind == "close"

    def of(self, kind: str) -> list[Record]:
        """The ledger's records of one kind in this life."""
        return [record for record in self.records if record.kind == kind]

    @property
    def head(self) -> str:
        """Digest of this life's last commit in the ledger; empty before any."""
        return str([record.fields["digest"] for record in self.records if "digest" in record.fields][-1])


@dataclass(frozen=True)
class Book:
    """One peer's ledger, as the lives that belong to the run of the last one."""

    peer: str
    directory: Path
    lives: tuple[RecordedLife, ...]
    torn_bytes: int


def peer_folders(directories: Sequence[Path]) -> list[Path]:
    """Folders of peers with a ledger: those given, and the ones directly inside. Raises StateError."""
    found: list[Path] = []
    for directory in directories:
        # `glob` would pass over a folder that may not be read.
        inside = sorted(path for path in directory.iterdir() if (path / LEDGER).is_file()) if directory.is_dir() else []
        own = [directory] if (directory / LEDGER).is_file() else inside
        if not own:
            fix = "give folders of peers, or the --out folder of a simulation"
            raise StateError(f"no {LEDGER} in {directory.absolute()}", fix)
        found += own
    return list(dict.fromkeys(found))


def read_books(directories: Sequence[Path]) -> list[Book]:
    """Books of the peers with ledgers in these folders, all of one run. Raises as `open_books`, and for damage."""
    books, damaged = open_books(directories)
    for error in damaged.values():
        raise error
    return books


def open_books(directories: Sequence[Path]) -> tuple[list[Book], dict[Path, StateError]]:
    """Books of the peers with ledgers in these folders, and the faults of damaged ledgers, left out, by folder.

    A ledger without a life, of a peer that died before it wrote a line, has no book. Raises UsageError for folders of
    different runs or when no life is left, and StateError, the first fault, when no other ledger is left.
    """
    folders, books = peer_folders(directories), list[Book]()
    damaged: dict[Path, StateError] = {}
    parsed: set[str] = set()

    def check_commit(record: Record) -> None:
        # All peers write the same commits, and parsing takes 40 times as long as hashing: each is parsed once.
        if record.kind == "commit" and record.commit_digest not in parsed:
            parsed.add(record.commit.digest)

    for folder in folders:
        try:
            found = read_ledger(folder / LEDGER, check_commit)
        except StateError as error:
            damaged[folder] = error
            continue
        if any(record.kind == "open" for record in found.records):
            books.append(book_of(folder, found))
    if not books and damaged:
        raise next(iter(damaged.values()))
    if not books:
        raise UsageError(f"the ledger in {folders[0]} has no life in it", "give the folders of peers that lived")
    if len({book.lives[-1].opening["contract_digest"] for book in books}) > 1:
        raise UsageError("these ledgers belong to different runs", "give the peers of one run")
    return books, damaged


def book_of(directory: Path, found: Scan) -> Book:
    """Book of a peer from the records of its ledger, which has a life."""
    lives: list[RecordedLife] = []
    for record in found.records:
        if record.kind == "open":
            lives.append(RecordedLife([]))
        if lives:  # else a full disk refused the opening itself: there is a gap
            lives[-1].records.append(record)
    last = lives[-1].opening
    same = tuple(life for life in lives if life.opening["contract_digest"] == last["contract_digest"])
    return Book(last["peer"], directory, same, found.torn_bytes)


def chain_of(books: Iterable[Book]) -> ChainRecord:
    """ChainRecord of all commits in these books, which are the peers' ledgers."""
    chain = ChainRecord()
    for book in books:
        for life in book.lives:
            for record in life.of("commit"):
                commit = chain.commits.get(record.commit_digest) or record.commit
                chain.add(commit, record.fields["state"], f"{book.peer}, line {record.line}")
    return chain
