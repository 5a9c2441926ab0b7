"""`diloco audit`: the ledgers of several peers laid side by side. Did the run lose, double or fork anything?

    I1  every peer that applied a version has the same commit and holds the same state
    I2  a contribution and a data block are in at most one version; tokens trained = committed + discarded + uncommitted
        and what a version counts of a life, that life took for counted or gave up
    I5  every checkpoint is a committed version, with its state; no version is missing between the first and the last
    I8  under `wait` a commit has one successor; a new lineage begins only where somebody founded it anew

A ledger that is damaged, or that no peer wrote so, is left out and reported as a violation (`ledger`).

Under `continue` a fork is no violation: it is reported with what it discarded, and whether everybody is on one lineage
again. A life without a goodbye runs still or was killed: what its last record calls uncommitted, and what was trained
after it, is then lost with the crash, unless a later life took it over from a checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.accounts.books import Book, Chain, Life, _open_books, chain_of, peer_folders
from diloco.accounts.ledger import Record, Totals
from diloco.base.errors import ConfigError, StateError
from diloco.base.readable import readable_text
from diloco.base.types import Commit, Counted
from diloco.outer.fragments import Layout
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterState
from diloco.protocol.leases import front
from diloco.storage.checkpoint import Checkpoint, load, noted_shapes, outer_state

MAX_LIVES_OF_A_PROCESS = 1000
"""A peer that was away for a while takes the next incarnation; that of another process is a time in microseconds."""


@dataclass(frozen=True)
class Finding:
    """Something that must not be, or that one should know."""

    rule: str
    peer: str
    version: int
    line: int
    """Line of the peer's ledger, from 1; 0 where it is about more than one line."""
    text: str


@dataclass(frozen=True)
class ChainFork:
    """A place where the chain parts."""

    version: int
    lineages: tuple[str, ...]
    """The one that went on first."""
    discarded_tokens: int
    """Committed in lineages that did not go on."""
    healed: bool
    """Whether nobody's last record stands in a lineage that did not go on, except of peers that died there."""


@dataclass
class Audit:
    """Findings of an audit, with the numbers that it rests on."""

    peers: list[dict[str, Any]] = field(default_factory=list)
    versions: int = 0
    """On the longest way through the chain."""
    tokens: int = 0
    lineages: int = 0
    checkpoints: int = 0
    forks: list[ChainFork] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    violations: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True when no invariant is violated."""
        return not self.violations

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return {"clean": self.clean, **asdict(self)}


# ---------------------------------------------------------------- reading


# ---------------------------------------------------------------- auditing


def audit(directories: Sequence[Path]) -> Audit:
    """Check everything. A damaged ledger is a violation, and the others are checked without it. Raises UsageError and
    StateError when there is nothing that can be checked, PermissionError for checkpoints that may not be listed."""
    kept = [path for folder in peer_folders(directories) for path in _checkpoints(folder)]
    books, damaged = _open_books(directories)  # after the checkpoints were listed: a peer writes its ledger first
    chain = chain_of(books)
    result = examine(books, chain)
    result.violations += [Finding("ledger", path.name, -1, 0, error.cause) for path, error in damaged.items()]
    result.checkpoints = len(kept)
    _audit_checkpoints(kept, chain, result)
    return result


def examine(books: Sequence[Book], chain: Chain) -> Audit:
    """Audit of ledgers, wherever they are from; `chain` is built from their commits."""
    result = Audit(lineages=len({commit.lineage for commit in chain.commits.values()}))
    result.violations += [*_agreement(chain), *_exactly_once(chain), *_balances(books)]
    result.violations += [*_kept_and_counted(books, chain), *_lineage_findings(books, chain)]
    full = any(life.of("gap") for book in books for life in book.lives)  # what is missing found no room on a disk
    (result.notes if full else result.violations).extend(_missing(chain))
    result.notes += [*_beginnings(chain), *_notes(books)]
    result.forks = list(_forks(books, chain))
    result.peers = [_row(book, chain) for book in books]
    if chain.commits:
        head = chain.commits[chain.heads()[0]]
        result.versions, result.tokens = head.version, head.tokens
    return result


def _agreement(chain: Chain) -> Iterator[Finding]:
    """I1."""
    for (lineage, version), digests in chain.places.items():
        if len(digests) > 1:
            named = "; ".join(f"{digest[:12]} ({source})" for digest, source in digests.items())
            yield Finding("I1", "", version, 0, f"lineage {lineage} has several commits of one version: {named}")
    for digest, states in chain.states.items():
        if len(states) > 1:
            named = "; ".join(f"{state[:12]} ({source})" for state, source in states.items())
            yield Finding("I1", "", chain.commits[digest].version, 0, f"several states of one commit: {named}")
    for commit in chain.commits.values():
        before = chain.states.get(commit.previous)
        if before and commit.state_digest not in before:
            text = f"made on state {commit.state_digest[:12]}, which nobody held"
            yield Finding("I1", "", commit.version, 0, text)


def _exactly_once(chain: Chain) -> Iterator[Finding]:
    """I2 on every way through the chain."""
    found = set()
    for head in chain.heads():
        path = list(chain.path(head))[::-1]
        for finding in itertools.chain(_contributions_once(path), _blocks_once(path), _tokens_add_up(path)):
            if finding not in found:
                found.add(finding)
                yield finding


def _contributions_once(path: Sequence[Commit]) -> Iterator[Finding]:
    """Violations of I2: contributions that two versions of the audited chain count."""
    seen: dict[tuple[str, int, int], int] = {}
    for commit in path:
        for counted in commit.counted:
            key = counted.peer, counted.base_version, commit.fragment
            if key in seen:
                text = f"its contribution on version {counted.base_version} is already in version {seen[key]}"
                yield Finding("I2", counted.peer, commit.version, 0, text)
            seen.setdefault(key, commit.version)


def _blocks_once(path: Sequence[Commit]) -> Iterator[Finding]:
    """Blocks are counted over all epochs, so that a position is trained once."""
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


def _tokens_add_up(path: Sequence[Commit]) -> Iterator[Finding]:
    for before, commit in itertools.pairwise(path):
        counted = sum(counted.tokens for counted in commit.counted)
        if commit.tokens != before.tokens + counted:
            text = f"{commit.tokens} tokens, but {before.tokens} were committed before and {counted} are counted"
            yield Finding("I2", "", commit.version, 0, text)


def _balances(books: Iterable[Book]) -> Iterator[Finding]:
    """I2 of every life: its totals at each record, and against what the commits credit it with."""
    for book in books:
        for life in book.lives:
            version = life.opening["version"]
            for line, record in life.lines:
                version = record.fields.get("commit", record.fields).get("version", version)
                if not record.totals.balanced:
                    yield Finding("I2", book.peer, version, line, f"tokens do not add up: {_sum(record.totals)}")
            credited = sum(_credit(book.peer, record) for _, record in life.of("commit"))
            credited += sum(_claimed(record) for _, record in life.lines)
            if credited != life.totals.committed and not life.of("gap"):
                text = f"{life.totals.committed} tokens are booked as committed, the commits count {credited}"
                yield Finding("I2", book.peer, version, life.lines[-1][0], text)
            reported = sum(_discarded(record) for _, record in life.lines)
            if reported != life.totals.discarded and not life.of("gap"):
                text = f"{life.totals.discarded} tokens are booked as discarded, the records tell of {reported}"
                yield Finding("I2", book.peer, version, life.lines[-1][0], text)


def _discarded(record: Record) -> int:
    """Tokens that a record says were given up."""
    return int(record.fields.get("discarded", 0))


def _claimed(record: Record) -> int:
    """Tokens that a version counts of this life, as the record of a copied state says."""
    return int(record.fields.get("counted", 0))


def _kept_and_counted(books: Iterable[Book], chain: Chain) -> Iterator[Finding]:
    """I2: progress that a version counts, and that its maker, who went past that version, neither took for counted nor
    gave up, is trained upon, and counted once more. And what its maker took for counted over a copied state is."""
    for book in books:
        for life in book.lives:
            before, given_up = "", 0
            for line, record in life.lines:
                given_up += _discarded(record) + _claimed(record)
                at = "" if record.kind == "gap" else record.fields.get("digest", before)
                if at == before:
                    continue
                passed = _first_after(before, record, chain)
                entry = _contribution(life, before, passed, chain) if passed else None
                if passed and entry and entry.tokens > given_up and not record.fields.get("own", False):
                    text = f"it counts {entry.tokens} tokens of this life, which says that it gave up {given_up}"
                    yield Finding("I2", book.peer, passed.version, line, text)
                if passed and _claimed(record) > (entry.tokens if entry else 0):
                    text = f"it does not count the {_claimed(record)} tokens that this life took for counted"
                    yield Finding("I2", book.peer, passed.version, line, text)
                before, given_up = at, 0


def _first_after(before: str, record: Record, chain: Chain) -> Commit | None:
    """The version after the one that a peer was at, when a record brings it further. None: it leads elsewhere."""
    if before not in chain.commits:
        return None
    commit = chain.commits.get(record.fields["digest"]) if "digest" in record.fields else None
    while commit is not None and commit.previous != before:
        commit = chain.commits.get(commit.previous) if record.kind == "adopt" else None
    return commit


def _contribution(life: Life, before: str, passed: Commit, chain: Chain) -> Counted | None:
    """Contribution of this very life that a version counts and that the view before it knows; None: there is none."""
    member = chain.commits[before].member(life.peer)
    since = member.incarnation - life.opening["incarnation"] if member is not None else -1
    if not 0 <= since < MAX_LIVES_OF_A_PROCESS:
        return None
    return next((entry for entry in passed.counted if entry.peer == life.peer), None)


def _credit(peer: str, record: Record) -> int:
    """Tokens that a commit counts of this life; the name alone may be that of an earlier one."""
    counted = record.fields["commit"]["counted"] if record.fields["own"] else ()
    return sum(entry["tokens"] for entry in counted if entry["peer"] == peer)


def _sum(totals: Totals) -> str:
    kinds = f"{totals.committed} committed + {totals.discarded} discarded + {totals.uncommitted} uncommitted"
    return f"{totals.trained} trained, {kinds}"


def _missing(chain: Chain) -> Iterator[Finding]:
    """I5: below a commit whose predecessor nobody has, somebody has older ones."""
    for digest in chain.roots():
        commit = chain.commits[digest]
        older = [other.version for other in chain.commits.values() if other.version < commit.version]
        if older and not _founds(commit, chain):
            text = f"version {commit.version - 1}, on which it was made, is in no ledger; {max(older)} is"
            yield Finding("I5", "", commit.version, 0, text)


def _founds(commit: Commit, chain: Chain) -> bool:
    """Whether it begins the run: the only commit that needs no other."""
    return commit.fragment < 0 and commit.version == 0 and commit.previous not in chain.commits


def _beginnings(chain: Chain) -> Iterator[Finding]:
    roots = chain.roots()
    if roots and not _founds(chain.commits[roots[0]], chain):
        version = chain.commits[roots[0]].version
        yield Finding("", "", version, 0, f"the ledgers given begin at version {version}")


def _notes(books: Iterable[Book]) -> Iterator[Finding]:
    for book in books:
        if book.torn_bytes:
            text = f"the ledger ends in {book.torn_bytes} bytes of a record that was never finished"
            yield Finding("", book.peer, -1, 0, text)
        for life in book.lives:
            for line, record in life.of("gap"):
                yield Finding("", book.peer, -1, line, f"{record.fields['dropped']} records found no room on the disk")


# ---------------------------------------------------------------- checkpoints


def _checkpoints(directory: Path) -> list[Path]:
    inside = directory / "checkpoints"
    found = inside.iterdir() if inside.is_dir() else ()  # unlike `glob`, it raises where it may not read
    return sorted(path for path in found if path.match("v*") and (path / "manifest.json").is_file())


def _audit_checkpoints(paths: Iterable[Path], chain: Chain, result: Audit) -> None:
    """I5. A damaged one beside a whole one is a note: whoever resumes passes it over, and a peer that is killed while
    it deletes an old one leaves such a folder."""
    whole: set[Path] = set()
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            finding = _checkpoint_finding(load(path), chain)
        except StateError as error:
            if path.exists():  # a running peer may just have deleted it
                damaged[path] = error.cause
            continue
        whole.add(path.parent)
        result.violations += [finding] if finding else []
    for path, cause in damaged.items():
        findings = result.notes if path.parent in whole else result.violations
        findings.append(Finding("I5", path.parent.parent.name, -1, 0, cause))


def _checkpoint_finding(checkpoint: Checkpoint, chain: Chain) -> Finding | None:
    commit = checkpoint.commit
    if commit is None:
        return None  # saved before the run began: nothing is committed yet
    known = chain.states.get(commit.digest)
    name, state = str(checkpoint.meta.get("peer")), saved_state(checkpoint).digest
    if known is None:
        why = f"checkpoint {checkpoint.path.name} is of commit {commit.digest[:12]}, which is in no ledger"
    elif state not in known:
        why = f"checkpoint {checkpoint.path.name} holds state {state[:12]}, the ledgers say {next(iter(known))[:12]}"
    else:
        return None
    return Finding("I5", name, commit.version, 0, why)


def saved_state(checkpoint: Checkpoint) -> OuterState:
    """The outer state of a checkpoint, whatever the model. Raises StateError."""
    try:
        layout = Layout.agreed(noted_shapes(checkpoint), checkpoint.contract)
    except ConfigError as error:
        cause = f"checkpoint {checkpoint.path}: its contract does not fit its model: {error.cause}"
        raise StateError(cause[:300], "use a checkpoint that `diloco peer` wrote") from error
    return outer_state(checkpoint, layout, open_outer(checkpoint.contract.outer))


# ---------------------------------------------------------------- lineages


def _lineage_findings(books: Sequence[Book], chain: Chain) -> Iterator[Finding]:
    """I8. The same rule where the chain parts and where a lineage begins: only a founding may do it."""
    waits = books[0].lives[-1].opening["contract"]["membership"].get("without_majority", "wait") == "wait"
    for previous in chain.forks():
        plain = [digest for digest in chain.children[previous] if chain.commits[digest].fragment >= 0]
        if len(plain) > 1:
            version = chain.commits[plain[0]].version
            names = ", ".join(digest[:12] for digest in sorted(plain))
            yield Finding("I8", "", version, 0, f"one commit has several successors: {names}")
    for commit in chain.commits.values():
        before = chain.commits.get(commit.previous)
        if before and commit.fragment >= 0 and before.lineage != commit.lineage:
            text = f"goes on in lineage {commit.lineage} after {before.lineage} without a founding"
            yield Finding("I8", "", commit.version, 0, text)
    founded = {life.opening["lineage"] for book in books for life in book.lives if life.opening["founds"]}
    given = {(book.peer, lineage) for book in books for lineage in _named_lineages(book)}
    for commit in chain.commits.values():
        here = all((member.peer, commit.lineage) in given for member in commit.view)
        if waits and here and commit.fragment < 0 and commit.lineage not in founded:
            text = f"lineage {commit.lineage} begins here, and nobody founded it"
            yield Finding("I8", "", commit.version, 0, text)


def _named_lineages(book: Book) -> set[str]:
    """Lineages that a ledger names; none where its disk was full: it may have founded any."""
    if any(life.of("gap") for life in book.lives):
        return set()
    joined = {str(life.opening["lineage"]) for life in book.lives}
    return joined | {record.commit.lineage for life in book.lives for _, record in life.of("commit")}


def _forks(books: Sequence[Book], chain: Chain) -> Iterator[ChainFork]:
    heads = chain.heads()
    if not heads:
        return
    main = {commit.digest for commit in chain.path(heads[0])}
    for previous in chain.forks():
        children = sorted(chain.children[previous], key=lambda digest: digest not in main)
        lost = _descendants(chain, [digest for digest in children if digest not in main])
        discarded = sum(counted.tokens for digest in lost for counted in chain.commits[digest].counted)
        stranded = [book for book in books if book.lives[-1].head in lost and book.lives[-1].closed]
        lineages = tuple(dict.fromkeys(chain.commits[digest].lineage for digest in children))
        yield ChainFork(chain.commits[children[0]].version, lineages, discarded, not stranded)


def _descendants(chain: Chain, digests: Sequence[str]) -> set[str]:
    found, todo = set(digests), list(digests)
    while todo:
        below = chain.children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


# ---------------------------------------------------------------- the table


def _row(book: Book, chain: Chain) -> dict[str, Any]:
    """A peer's lives in sum; what a life took over from a checkpoint was trained, and left uncommitted, before it."""
    totals = [life.totals for life in book.lives]
    taken_over = sum(life.lines[0][1].totals.trained for life in book.lives)
    at = chain.commits.get(book.lives[-1].head)
    return {
        "peer": book.peer,
        "lives": len(book.lives),
        "version": at.version if at else book.lives[-1].opening["version"],
        "state": _state(book.lives[-1]),
        "trained": sum(one.trained for one in totals) - taken_over,
        "committed": sum(one.committed for one in totals),
        "discarded": sum(one.discarded for one in totals),
        "counted_elsewhere": _counted_elsewhere(book, chain),
        "without_goodbye": sum(not life.closed for life in book.lives),
        "uncommitted": sum(one.uncommitted for one in totals) - taken_over,
    }


def _state(life: Life) -> str:
    return str([record.fields["state"] for _, record in life.lines if "state" in record.fields][-1])


def _counted_elsewhere(book: Book, chain: Chain) -> int:
    """Tokens of this peer that versions count which it did not apply: it was gone, or copied a state past them."""
    counted = sum(
        entry.tokens for commit in chain.commits.values() for entry in commit.counted if entry.peer == book.peer
    )
    return counted - sum(life.totals.committed for life in book.lives)


def audit_text(result: Audit) -> str:
    """For people: a line per peer, then what is wrong."""
    head = f"{result.versions} versions, {result.tokens:,} tokens, lineages {result.lineages}"
    lines = [f"{head}, checkpoints {result.checkpoints}", "", _TITLES]
    lines += [_row_text(row) for row in result.peers]
    lines += [_fork_text(fork) for fork in result.forks]
    lines += [f"note: {_finding_text(finding)}" for finding in result.notes]
    lines += [f"VIOLATION {finding.rule}: {_finding_text(finding)}" for finding in result.violations]
    verdict = f"{len(result.violations)} violations" if result.violations else "no violations of I1, I2, I5, I8"
    return "\n".join([*lines, "", verdict])


_COLUMNS = {
    "lives": 6,
    "without_goodbye": 17,
    "version": 9,
    "trained": 15,
    "committed": 15,
    "discarded": 12,
    "uncommitted": 12,
}
_TITLES = (
    "peer".ljust(20) + "".join(name.replace("_", " ").rjust(width) for name, width in _COLUMNS.items()) + "  state"
)


def _row_text(row: Mapping[str, Any]) -> str:
    numbers = "".join(f"{row[name]:,}".rjust(width) for name, width in _COLUMNS.items())
    return readable_text(row["peer"], 19).ljust(20) + numbers + f"  {row['state'][:12]}"


def _fork_text(fork: ChainFork) -> str:
    goes_on, *others = (readable_text(lineage) for lineage in fork.lineages)
    lost = f"{fork.discarded_tokens:,} committed tokens of {', '.join(others) or 'the others'} do not count"
    healed = "all are on one lineage again" if fork.healed else "NOT HEALED"
    return f"fork at version {fork.version}: {goes_on} goes on, {lost}; {healed}"


def _finding_text(finding: Finding) -> str:
    peer = f"{readable_text(finding.peer)}: " if finding.peer else ""
    version = f"version {finding.version}: " if finding.version >= 0 else ""
    line = f" (line {finding.line} of its ledger)" if finding.line else ""
    return f"{peer}{version}{readable_text(finding.text, 400)}{line}"
