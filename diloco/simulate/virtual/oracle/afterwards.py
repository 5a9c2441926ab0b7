"""Checks when a simulation is over: the ledgers on all disks (I2 and `diloco audit`), and what was to be kept (I5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.accounts.audit import examine
from diloco.accounts.books import Book, ChainRecord, RecordedLife, book_of, chain_of
from diloco.accounts.ledger import LEDGER, Totals, read_ledger
from diloco.base.errors import StateError
from diloco.base.types import Commit
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld


class SimulatedAftermath:
    """Checks of a simulated world in which all is well again."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world, self.invariants = world, world.invariants

    def check(self, hosts: Sequence[SimulatedProcess]) -> None:
        """Check the ledgers, and the chains of these simulated peers."""
        books = list(self._books())
        for book in books:
            for life in book.lives:
                self._check_totals(book, life)
        self._check_opened(books)
        self._audit(books)
        self._audit_without_founders(books)
        if self.invariants.ended:
            self._check_last_versions(self.invariants.ended)
        for host in hosts:
            if host.up and host.machine.commit is not None:
                self._check_kept(host, host.machine.commit)

    def _books(self) -> Iterator[Book]:
        """Books of all simulated disks. I2: nothing damages a ledger more than production can read."""
        folders = [folder for disk in self.world.disks.values() for folder in (*disk.put_away, disk.folder)]
        for folder in folders:
            if not (folder / LEDGER).is_file():
                continue
            try:
                found = read_ledger(folder / LEDGER)
            except StateError as error:
                raise Violation("I2", error.cause.replace(f"{folder.parent}/", "")) from error
            if any(record.kind == "open" for record in found.records):
                yield book_of(Path(folder.name), found)

    # ------------------------------------------------------------ I2: the ledgers

    def _check_opened(self, books: Sequence[Book]) -> None:
        """I2: each simulated life of which a disk must have a record is in a ledger."""
        opened = {(book.peer, life.opening["boot"]) for book in books for life in book.lives}
        for process in self.world.machines.processes() if self.world.keeps_disks else ():
            progress = process.progress
            if progress is None or not process.records.kept or process.records.rolled_back:
                continue
            if (process.name, progress.journal.opening.boot) not in opened:
                raise Violation("I2", f"no ledger tells that a life of {process.name} began")

    def _check_totals(self, book: Book, life: RecordedLife) -> None:
        """I2: a simulated life's ledger has the totals that were counted apart, record by record, and lacks none that
        was on the disk for certain."""
        name = book.peer, life.opening["boot"]
        known = [(one, one.progress) for one in self.world.machines.processes() if one.progress is not None]
        found = [(one, true) for one, true in known if (one.name, true.journal.opening.boot) == name]
        lives, counted = [one for one, _ in found], [true.booked for _, true in found]
        covered = [number for number in (_covered(life, true) for true in counted) if number is not None]
        if not covered:
            raise Violation("I2", f"the ledger of {book.peer} has totals that were not so: {life.records[-1].totals}")
        here = len(lives) == 1 and lives[0].disk.folder.name == book.directory.name
        if here and not lives[0].records.rolled_back and covered[0] < lives[0].records.kept:
            what = f"tells of {covered[0]} records of a life, of {lives[0].records.kept}"
            raise Violation("I2", f"the ledger of {book.peer} {what}")

    def _audit(self, books: Sequence[Book]) -> None:
        """Audit the ledgers that all simulated lives wrote, by the code of `diloco audit`. What the dead had alone, the
        operator may have given up for lost: of that version there may be two. What no disk had for certain is in no
        ledger, maybe."""
        given_up, chain = self.invariants.given_up(), chain_of(books)
        for finding in examine(books, chain).violations if books else ():
            if finding.rule in ("I1", "I8") and finding.version in given_up:
                continue
            if finding.rule == "I1" and finding.version in self.invariants.drifted:
                continue  # two states of it are in the ledgers: what an audit is for
            if finding.rule == "I5" and "in no ledger" in finding.text and not self._was_kept(finding.version, chain):
                continue
            where = f"{finding.peer}, version {finding.version}, line {finding.line} of its ledger"
            raise Violation(finding.rule, f"audit: {where}: {finding.text}")

    def _was_kept(self, version: int, chain: ChainRecord) -> bool:
        """Whether a disk must have the commit before one of this version, with which the ledgers' chain begins."""
        missing = {root.previous for root in chain.roots() if root.version == version}
        processes = list(self.world.machines.processes())
        return any(process.records.keeps_commit(digest) for digest in missing for process in processes)

    def _audit_without_founders(self, books: Sequence[Book]) -> None:
        """I8: who audits some of the simulated ledgers accuses nobody of what only the others can tell."""
        founders = {book.peer for book in books for life in book.lives if life.opening["founds"]}
        joined, given_up = [book for book in books if book.peer not in founders], self.invariants.given_up()
        for finding in examine(joined, chain_of(joined)).violations if joined else ():
            if finding.rule == "I8" and finding.version not in given_up:
                raise Violation("I8", f"audit without founders: version {finding.version}: {finding.text}")

    # ------------------------------------------------------------ I4: the end of the run

    def _check_last_versions(self, ended: Sequence[Commit]) -> None:
        """I4: after the run has its tokens each fragment moves once more, so that nothing is left over."""
        plan, commits = self.world.plan, self.invariants.commits
        left_over = plan.overlap > 0 or plan.policy != "sync"
        moved = []
        for head in ended:
            chain = [commits[digest] for digest in self.invariants.back_from(head)]
            last = [commit for commit in chain if commit.tokens >= plan.total_tokens]
            last = last[:-1] if left_over else last
            moved.append({commit.fragment for commit in last if commit.fragment >= 0})
        if max(map(len, moved)) < plan.fragments:
            raise Violation("I4", f"the run ends when of {plan.fragments} fragments {max(moved, key=len)} moved last")

    # ------------------------------------------------------------ I5: what was agreed on stays

    def _check_kept(self, host: SimulatedProcess, head: Commit) -> None:
        """I5: all that anybody closed is in a simulated peer's chain, but for what parted from it where it may."""
        commits = self.invariants.commits
        chain = list(self.invariants.back_from(head))
        after = {commits[digest].previous: commits[digest] for digest in chain}
        kept = set(chain)
        for digest, closed in commits.items():
            later = closed.lineage == head.lineage and closed.height > head.height
            if digest in kept or later or closed.version > head.version:
                continue
            branch = closed
            while branch.previous in commits and branch.previous not in kept:
                branch = commits[branch.previous]
            if not self._may_part(branch, after.get(branch.previous)):
                what = f"version {closed.version} was closed and is not in the chain of {host.name}"
                raise Violation("I5", what)

    def _may_part(self, branch: Commit, kept: Commit | None) -> bool:
        """Whether a commit that is not in a chain may be out of it, which goes on with `kept` after the same one. Under
        `continue` that is one of the side that ended: whoever had it and goes on left it, and said so."""
        invariants = self.invariants
        if invariants.lost_with_the_dead(branch.digest):
            return True
        if self.world.plan.without_majority == "continue":
            forks = [commit for commit in (branch, kept) if commit is not None and commit.founds]
            if forks:
                return invariants.abandoned(branch.digest)
        if kept is None or not kept.founds or kept.lineage not in invariants.refounded:
            return False
        return invariants.refounded[kept.lineage] in (None, kept.previous)


def _covered(life: RecordedLife, counted: Sequence[Totals]) -> int | None:
    """Number of the counted records, from the first on, that a ledger's life has, or tells of in gaps; None: it has
    others."""
    place = 0
    for record in life.records:
        if record.kind == "gap":
            place += int(record.fields["dropped"])
        elif place < len(counted) and counted[place] == record.totals:
            place += 1
        else:
            return None
    return place
