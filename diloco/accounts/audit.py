"""`diloco audit`: compares the ledgers and checkpoints of a run's peers. Did the run lose, double or fork anything?

    I1  every peer that applied a version has the same commit and holds the same state
    I2  a contribution and a data block are in at most one version; tokens trained = committed + discarded + uncommitted
        and the tokens that a version counts of a life, that life books as committed or as discarded
    I5  every checkpoint is of a committed version, with its state; no version is missing between the first and the last
    I8  under `wait` a commit has one successor; a new lineage begins only where a peer founded it
    I9  a commit is one that an honest peer makes of the commit before, by the contract (`diloco.protocol.claims`)

A ledger that is damaged, or that no peer wrote so, is left out and reported as a violation (`ledger`).

Under `continue` a fork is no violation: it is reported with the tokens that it discarded, and whether all peers are on
one lineage again. A life without a `close` record still runs or was killed. The tokens that its last record calls
uncommitted, and those trained after it, are then lost with the crash, unless a later life took them over from a
checkpoint.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.accounts.books import Book, ChainRecord, RecordedLife, chain_of, open_books, peer_folders
from diloco.accounts.ledger import Record
from diloco.base.errors import DilocoError, StateError
from diloco.base.readable import readable_text
from diloco.base.types import Commit, Counted, Member
from diloco.config.load import contract_from_json
from diloco.protocol.claims import Bounds, why_malformed, why_no_successor
from diloco.protocol.leases import front
from diloco.storage.checkpoint import CHECKPOINTS, load, saved_state


@dataclass(frozen=True)
class Finding:
    """An audit's finding: a violation of an invariant, or a note, about a place in a run's ledgers."""

    rule: str
    peer: str
    version: int
    line: int
    """Line of the peer's ledger, from 1; 0 where it is about more than one line."""
    text: str


@dataclass(frozen=True)
class ChainFork:
    """A commit of the ledgers' chain with several successors."""

    version: int
    lineages: tuple[str, ...]
    """The one that went on first."""
    discarded_tokens: int
    """Tokens committed in lineages that did not go on."""
    healed: bool
    """Whether every peer that closed its ledger did so in the lineage that went on."""


@dataclass
class Audit:
    """Findings of an audit of ledgers and checkpoints, with the numbers that it rests on."""

    peers: list[dict[str, Any]] = field(default_factory=list)
    versions: int = 0
    """Version of the head that went on."""
    tokens: int = 0
    lineages: int = 0
    checkpoints: int = 0
    forks: list[ChainFork] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    violations: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the audit found no violated invariant."""
        return not self.violations

    def tree(self) -> dict[str, Any]:
        """The audit as JSON values."""
        return {"clean": self.clean, **asdict(self)}


def audit(directories: Sequence[Path]) -> Audit:
    """Audit of the ledgers and checkpoints in folders of peers.

    A damaged ledger is a violation, and the others are checked without it. Raises UsageError and StateError when there
    is nothing that can be checked, PermissionError for checkpoints that may not be listed.
    """
    folders = [folder / CHECKPOINTS for folder in peer_folders(directories)]
    listed = [sorted(folder.iterdir()) if folder.is_dir() else [] for folder in folders]  # `glob` hides a refusal
    kept = [path for path in itertools.chain(*listed) if path.match("v*") and (path / "manifest.json").is_file()]
    # Only now the ledgers: a peer writes its ledger first, so that all checkpoints listed above must be in it.
    books, damaged = open_books(directories)
    chain = chain_of(books)
    result = examine(books, chain)
    result.violations += [Finding("ledger", path.name, -1, 0, error.cause) for path, error in damaged.items()]
    result.checkpoints = len(kept)
    gaps = {str(life.opening["peer"]) for book in books for life in book.lives if life.of("gap")}
    _audit_checkpoints(kept, chain, gaps, result)
    return result


def examine(books: Sequence[Book], chain: ChainRecord) -> Audit:
    """Audit of ledgers without checkpoints, from files or from memory; `chain` is built from their commits."""
    result = Audit(lineages=len({commit.lineage for commit in chain.commits.values()}))
    lives = [(life.opening["peer"], life) for book in books for life in book.lives]  # a folder may have seen two names
    result.violations += [*_agreement(chain), *_exactly_once(chain), *_balances(lives)]
    result.violations += [*_kept_and_counted(lives, chain), *_lineage_findings(books, chain), *_lies(books, chain)]
    # Where a disk was full, records are missing for a known reason. Then a missing version is only a note.
    (result.notes if any(life.of("gap") for _, life in lives) else result.violations).extend(_missing(chain))
    result.notes += _notes(books, chain)
    result.forks = list(_forks(books, chain))
    result.peers = [_row(book, chain) for book in books]
    for head in chain.heads()[:1]:
        result.versions, result.tokens = head.version, head.tokens
    return result


# ---------------------------------------------------------------- I1


def _agreement(chain: ChainRecord) -> Iterator[Finding]:
    """Audit of I1: several commits of a height, or several states of a commit, in the ledgers' chain."""
    for (lineage, _), digests in chain.places.items():
        if len(digests) > 1:
            version = chain.commits[next(iter(digests))].version
            named = "; ".join(f"{digest[:12]} ({source})" for digest, source in digests.items())
            yield Finding("I1", "", version, 0, f"lineage {lineage} has several commits in one place: {named}")
    for digest, states in chain.states.items():
        if len(states) > 1:
            named = "; ".join(f"{state[:12]} ({source})" for state, source in states.items())
            yield Finding("I1", "", chain.commits[digest].version, 0, f"several states of one commit: {named}")
    for commit in chain.commits.values():
        before = chain.states.get(commit.previous)
        if before and not commit.drafter and commit.state_digest not in before:
            yield Finding("I1", "", commit.version, 0, f"made on state {commit.state_digest[:12]}, which nobody held")


# ---------------------------------------------------------------- I2


def _exactly_once(chain: ChainRecord) -> list[Finding]:
    """Audit of I2 on every path from a root of the ledgers' chain to a head. Paths share commits: each finding once."""
    paths = (list(chain.path(head))[::-1] for head in chain.heads())
    return list(dict.fromkeys(finding for path in paths for finding in _counted_twice(path)))


def _counted_twice(path: Sequence[Commit]) -> Iterator[Finding]:
    """Audit of a path of commits: contributions and data blocks that two of them count."""
    seen: dict[tuple[str, int, int], int] = {}
    for commit in path:
        for counted in commit.counted:
            key = counted.peer, counted.base_version, commit.fragment
            if key in seen:
                text = f"its contribution on version {counted.base_version} is already in version {seen[key]}"
                yield Finding("I2", counted.peer, commit.version, 0, text)
            seen.setdefault(key, commit.version)
    # Blocks are numbered over all epochs, so that even in the next epoch no number comes again.
    used = sorted(
        (blocks.start, blocks.stop, counted.peer, commit.version)
        for before, commit in itertools.pairwise(path)
        for counted in commit.counted
        for blocks in front(before.leases.held.get(counted.peer, ()), counted.blocks)
        if len(blocks)
    )
    for (_, stop, peer, version), (start, _, other, again) in itertools.pairwise(used):
        if start < stop:
            yield Finding("I2", other, again, 0, f"block {start} was trained for version {version} by {peer} already")


def _balances(lives: Iterable[tuple[str, RecordedLife]]) -> Iterator[Finding]:
    """Audit of I2 in a ledger's totals: at each record, and at the end of a life against the sum of its records."""
    for peer, life in lives:
        version, credited, given_up = life.opening["version"], 0, 0
        for record in life.records:
            fields, totals = record.fields, record.totals
            version = fields.get("commit", fields).get("version", version)
            if not totals.balanced:
                text = f"tokens do not add up: {totals.trained} trained, {totals.committed} committed"
                text += f" + {totals.discarded} discarded + {totals.uncommitted} uncommitted"
                yield Finding("I2", peer, version, record.line, text)
            if record.kind == "commit" and fields["own"]:  # the name alone may be that of an earlier life
                credited += sum(entry["tokens"] for entry in fields["commit"]["counted"] if entry["peer"] == peer)
            credited += fields.get("counted", 0)
            given_up += fields.get("discarded", 0)
        if life.of("gap"):
            continue  # the records that no disk had room for may hold the difference
        last, end = life.records[-1].line, life.totals
        if credited != end.committed:
            text = f"{end.committed} tokens are booked as committed, the commits count {credited}"
            yield Finding("I2", peer, version, last, text)
        if given_up != end.discarded:
            text = f"{end.discarded} tokens are booked as discarded, the records tell of {given_up}"
            yield Finding("I2", peer, version, last, text)


def _kept_and_counted(lives: Iterable[tuple[str, RecordedLife]], chain: ChainRecord) -> Iterator[Finding]:
    """Audit of I2 where a ledger passes over a version, for instance when the peer copied a later state.

    If that version counts progress of this life, and the life neither booked it as committed nor discarded it, then the
    progress stays in the weights and is counted once more. Conversely, a version must count what a life booked so.
    """
    for peer, life in lives:
        before, given_up = "", 0
        for record in life.records:
            claimed = record.fields.get("counted", 0)
            given_up += record.fields.get("discarded", 0) + claimed
            at = "" if record.kind == "gap" else record.fields.get("digest", before)
            if at == before:
                continue
            passed = _first_after(before, record, chain)
            entry = _contribution(life, before, passed, chain) if passed else None
            if passed and entry and entry.tokens > given_up and not record.fields.get("own", False):
                text = f"it counts {entry.tokens} tokens of this life, which says that it gave up {given_up}"
                yield Finding("I2", peer, passed.version, record.line, text)
            if passed and claimed > (entry.tokens if entry else 0):
                text = f"it does not count the {claimed} tokens that this life took for counted"
                yield Finding("I2", peer, passed.version, record.line, text)
            before, given_up = at, 0


def _first_after(before: str, record: Record, chain: ChainRecord) -> Commit | None:
    """First version commit on the chain from a ledger's last commit `before` to a record's, or else the first commit;
    None where no path is known."""
    if before not in chain.commits:
        return None
    commit, path = chain.commits.get(record.fields["digest"]) if "digest" in record.fields else None, list[Commit]()
    while commit is not None and commit.previous != before:
        path.append(commit)
        commit = chain.commits.get(commit.previous) if record.kind == "adopt" else None
    return next((one for one in (commit, *path[::-1]) if one.moves), commit) if commit is not None else None


MAX_LIVES_OF_A_PROCESS = 1000
"""A peer that was away for a while takes the next incarnation; that of another process is a time in microseconds."""


def _contribution(life: RecordedLife, before: str, passed: Commit, chain: ChainRecord) -> Counted | None:
    """Entry in commit `passed` for a contribution of this ledger's life, which the view before names; None without."""
    name = life.opening["peer"], life.opening["boot"]
    return next((entry for entry in passed.counted if (entry.peer, entry.boot) == name), None)


def _lived(life: RecordedLife, member: Member) -> bool:
    """Whether a ledger's life is that of this member of a view."""
    lives: int = member.incarnation - life.opening["incarnation"]
    return bool(member.peer == life.opening["peer"]) and 0 <= lives < MAX_LIVES_OF_A_PROCESS


# ---------------------------------------------------------------- I5


def _missing(chain: ChainRecord) -> Iterator[Finding]:
    """Audit of I5: no ledger has a commit's predecessor, though one has an older commit."""
    for commit in chain.roots():
        older = [other.version for other in chain.commits.values() if other.version < commit.version]
        if older:
            text = f"version {commit.version - 1}, on which it was made, is in no ledger; {max(older)} is"
            yield Finding("I5", "", commit.version, 0, text)


def _audit_checkpoints(paths: Iterable[Path], chain: ChainRecord, gaps: Collection[str], result: Audit) -> None:
    """Audit of I5: checkpoints that are damaged, of an unknown commit, or of another state than the ledgers'.

    An unknown commit of a peer whose ledger has `gaps` is a note: its record found no room. So is a damaged one beside
    a whole one: resuming passes it over, and a peer that is killed while it deletes an old one leaves such a folder.
    """
    whole: set[Path] = set()
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            checkpoint = load(path)
            commit = checkpoint.commit
            state = saved_state(checkpoint).digest if commit is not None else ""
        except StateError as error:
            if path.exists():  # a running peer may just have deleted it
                damaged[path] = error.cause
            continue
        whole.add(path.parent)
        if commit is None:
            continue  # saved before the run began: nothing is committed yet
        known = chain.states.get(commit.digest, {})
        if state not in known:
            text = f"is of commit {commit.digest[:12]}, which is in no ledger"
            if known:
                text = f"holds state {state[:12]}, the ledgers say {next(iter(known))[:12]}"
            peer, name = str(checkpoint.meta.get("peer")), checkpoint.path.name
            findings = result.notes if peer in gaps and not known else result.violations
            findings.append(Finding("I5", peer, commit.version, 0, f"checkpoint {name} {text}"))
    for path, cause in damaged.items():
        findings = result.notes if path.parent in whole else result.violations
        findings.append(Finding("I5", path.parent.parent.name, -1, 0, cause))


# ---------------------------------------------------------------- I8 and forks


def _lineage_findings(books: Sequence[Book], chain: ChainRecord) -> Iterator[Finding]:
    """Audit of I8. Both where the ledgers' chain forks and where a lineage begins, only a founding may do it."""
    for children in chain.forks():
        plain = [commit for commit in children if not commit.founds]
        if len(plain) > 1:
            names = ", ".join(sorted(commit.digest[:12] for commit in plain))
            yield Finding("I8", "", plain[0].version, 0, f"one commit has several successors: {names}")
    for commit in chain.commits.values():
        before = chain.commits.get(commit.previous)
        if before and not commit.founds and before.lineage != commit.lineage:
            text = f"goes on in lineage {commit.lineage} after {before.lineage} without a founding"
            yield Finding("I8", "", commit.version, 0, text)
    if books[0].lives[-1].opening["contract"]["membership"].get("without_majority", "wait") != "wait":
        return
    founded = {life.opening["lineage"] for book in books for life in book.lives if life.opening["founds"]}
    # A ledger with a gap is left out: its peer may have founded any lineage there. An old copy lacks whole lives.
    lives = [life for book in books if not any(one.of("gap") for one in book.lives) for life in book.lives]
    for commit in chain.commits.values():
        if not commit.founds or commit.evicted or commit.lineage in founded:
            continue
        if all(any(_lived(life, member) for life in lives) for member in commit.view):
            yield Finding("I8", "", commit.version, 0, f"lineage {commit.lineage} begins here, and nobody founded it")


def _forks(books: Sequence[Book], chain: ChainRecord) -> Iterator[ChainFork]:
    """Audit: forks of the ledgers' chain, which only `continue` allows, with the tokens that they discarded."""
    main = {commit.digest for head in chain.heads()[:1] for commit in chain.path(head)}
    for found in chain.forks():
        children = sorted(found, key=lambda commit: commit.digest not in main)
        lost, ahead = [], [commit for commit in children if commit.digest not in main]
        while ahead:  # and all that stand on a lost one
            commit = ahead.pop(0)
            lost.append(commit)
            ahead += chain.children.get(commit.digest, ())
        digests = {commit.digest for commit in lost}
        discarded = sum(counted.tokens for commit in lost for counted in commit.counted)
        stranded = [book for book in books if book.lives[-1].head in digests and book.lives[-1].closed]
        lineages = tuple(dict.fromkeys(commit.lineage for commit in children))
        yield ChainFork(children[0].version, lineages, discarded, not stranded)


# ---------------------------------------------------------------- I9


def _lies(books: Sequence[Book], chain: ChainRecord) -> Iterator[Finding]:
    """Audit of I9, by the contract whose digest the ledgers name: commits that no honest peer drafts or follows."""
    bounds = _bounds_of(books)
    if bounds is None:
        return
    for commit in chain.commits.values():
        before = chain.commits.get(commit.previous)
        lie = why_no_successor(before, commit, bounds) if before is not None else why_malformed(commit, bounds)
        if lie:
            yield Finding("I9", "", commit.version, 0, lie)


def _bounds_of(books: Iterable[Book]) -> Bounds | None:
    """Bounds of the contract that the ledgers name; None: none of them has it."""
    openings = (life.opening for book in books for life in book.lives)
    return next((bounds for opening in openings if (bounds := _bounds(opening)) is not None), None)


def _bounds(opening: Mapping[str, Any]) -> Bounds | None:
    """Bounds of the contract in a ledger's `open` record; None: it is not the one with the digest there, or none."""
    try:
        contract = contract_from_json(json.dumps(opening["contract"]))
    except DilocoError:
        return None
    return Bounds.of(contract) if contract.digest == opening["contract_digest"] else None


# ---------------------------------------------------------------- notes and the table


def _notes(books: Sequence[Book], chain: ChainRecord) -> Iterator[Finding]:
    """Audit notes: ledgers that begin late, end in half a record, miss records for which the disk had no room, or have
    no contract to compare with; peers without a ledger."""
    if _bounds_of(books) is None:
        yield Finding("", "", -1, 0, "I9 was not checked: no ledger has the contract whose digest it names")
    for first in chain.roots()[:1]:
        if first.version > 0 or not first.founds:  # else it founds the run
            yield Finding("", "", first.version, 0, f"the ledgers given begin at version {first.version}")
    counted = {entry.peer for commit in chain.commits.values() for entry in commit.counted}
    if others := sorted(counted - {life.opening["peer"] for book in books for life in book.lives}):
        yield Finding("", "", -1, 0, f"versions count peers whose ledgers are not among these: {', '.join(others)}")
    for book in books:
        if book.torn_bytes:
            text = f"the ledger ends in {book.torn_bytes} bytes of a record that was never finished"
            yield Finding("", book.peer, -1, 0, text)
        for life in book.lives:
            for gap in life.of("gap"):
                yield Finding("", book.peer, -1, gap.line, f"{gap.fields['dropped']} records found no room on the disk")


def _row(book: Book, chain: ChainRecord) -> dict[str, Any]:
    """Audit sums over all lives in a peer's ledger."""
    totals, last = [life.totals for life in book.lives], book.lives[-1]
    # What a life took over from a checkpoint, it counts as trained. So did the life before, which left it uncommitted.
    taken_over = sum(life.records[0].totals.trained for life in book.lives)
    committed = sum(one.committed for one in totals)
    at = chain.commits.get(last.head)
    states = [record.fields["state"] for record in last.records if "state" in record.fields]
    names = {life.opening["peer"] for life in book.lives}
    entries = (entry for commit in chain.commits.values() for entry in commit.counted)
    counted = sum(entry.tokens for entry in entries if entry.peer in names)
    return {
        "peer": book.peer,
        "lives": len(book.lives),
        "version": at.version if at else last.opening["version"],
        "state": str(states[-1]),
        "trained": sum(one.trained for one in totals) - taken_over,
        "committed": committed,
        "discarded": sum(one.discarded for one in totals),
        # By versions that this peer did not apply: it was gone, or copied a state past them.
        "counted_elsewhere": counted - committed,
        "without_goodbye": sum(not life.closed for life in book.lives),
        "uncommitted": sum(one.uncommitted for one in totals) - taken_over,
    }


_WIDTHS = {
    "lives": 6,
    "without_goodbye": 17,
    "version": 9,
    "trained": 15,
    "committed": 15,
    "discarded": 12,
    "uncommitted": 12,
}
"""Columns of numbers in the table of peers: key of a row, and characters."""


def audit_text(result: Audit) -> str:
    """An audit for people to read: a line for each peer, then forks, notes and violations."""
    head = f"{result.versions} versions, {result.tokens:,} tokens, lineages {result.lineages}"
    titles = "".join(name.replace("_", " ").rjust(width) for name, width in _WIDTHS.items())
    lines = [f"{head}, checkpoints {result.checkpoints}", "", f"{'peer':20}{titles}  state"]
    for row in result.peers:
        numbers = "".join(f"{row[name]:,}".rjust(width) for name, width in _WIDTHS.items())
        lines.append(f"{readable_text(row['peer'], 19):20}{numbers}  {readable_text(row['state'][:12])}")
    for fork in result.forks:
        goes_on, *others = (readable_text(lineage) for lineage in fork.lineages)
        lost = f"{fork.discarded_tokens:,} committed tokens of {', '.join(others) or 'the others'} do not count"
        healed = "all are on one lineage again" if fork.healed else "NOT HEALED"
        lines.append(f"fork at version {fork.version}: {goes_on} goes on, {lost}; {healed}")
    lines += [f"note: {_finding_text(finding)}" for finding in result.notes]
    lines += [f"VIOLATION {finding.rule}: {_finding_text(finding)}" for finding in result.violations]
    verdict = f"{len(result.violations)} violations" if result.violations else "no violations of I1, I2, I5, I8, I9"
    return "\n".join([*lines, "", verdict])


def _finding_text(finding: Finding) -> str:
    peer = f"{readable_text(finding.peer)}: " if finding.peer else ""
    version = f"version {finding.version}: " if finding.version >= 0 else ""
    line = f" (line {finding.line} of its ledger)" if finding.line else ""
    return f"{peer}{version}{readable_text(finding.text, 400)}{line}"
