"""The invariants I1 to I8 over everything that any simulated peer did: each check looks at what just changed.

Progress is followed in *pieces*: one piece is what one peer trained in one round. A piece is in the local weights until
a commit counts it or somebody reports it as discarded, never both, and never twice. Sets of pieces are bit masks, one
for each part of each fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diloco.accounts.audit import examine
from diloco.accounts.books import Chain, book_of, chain_of
from diloco.accounts.ledger import LEDGER, scan
from diloco.accounts.replay import Replay, Verdict
from diloco.base.types import Closed, Commit, Counted, Member
from diloco.compress import Codec
from diloco.outer.average import MIN_RMS, mean_digest, mean_into
from diloco.outer.line import Line, PendingContribution
from diloco.protocol import messages as m
from diloco.simulate.virtual.ballots import SimulatedBallots
from diloco.simulate.virtual.gate import SimulatedAdmissions, Violation
from diloco.simulate.virtual.lies import other_mean
from diloco.simulate.virtual.remake import plain_gathered, plain_mean, plain_radial, remake
from diloco.simulate.virtual.setup import PATIENCE_S

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

Masks = tuple[tuple[int, ...], ...]
"""Pieces of each part of each fragment."""
Pieces = tuple[Masks, tuple[Tensor, ...]]
"""Uncommitted pieces, and their sum for each fragment."""
TOLERANCE = 1e-3
ABSURD = 1e4
"""Times the size of others' contributions. The screens allow 100 for as many tokens, of which some have a few times
as many as others."""


@dataclass
class Made:
    """A contribution as the simulated peer that made it recorded it."""

    entry: Counted
    incarnation: int
    fragment: int
    parts: Sequence[bytes]
    pieces: tuple[int, ...]
    life: int


class SimulationInvariants:
    """Acts of all simulated peers, and the checks on them."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        fragments = world.setup.layout.fragments
        self.nothing: Masks = tuple((0,) * fragment.parts for fragment in fragments)
        self.commits: dict[str, Commit] = {}
        self.refounded: set[str] = set()
        """Lineages that an operator began from a checkpoint."""
        self.trained_tokens = 0
        self.discarded_tokens = 0
        self.void_tokens = 0
        self._digest_of: dict[tuple[str, int], str] = {}
        self._state_of: dict[tuple[str, int], str] = {}
        self._following: dict[str, str] = {}
        self._committed: dict[str, Masks] = {}
        self._made: dict[tuple[str, int], list[Made]] = {}
        self._recomputed: set[str] = set()
        self._closers: dict[str, list[SimulatedProcess]] = {}
        self.evicted = False
        """An operator declared somebody dead."""
        self._stands_on: dict[int, Commit] = {}
        """By life."""
        self.ballots = SimulatedBallots(world)
        self.gate = SimulatedAdmissions(world)
        self._chain = Chain()
        """Every version that anybody applied, and the state after it."""

    # ------------------------------------------------------------ what peers report

    def made(self, host: SimulatedProcess, sent: PendingContribution, pieces: tuple[int, ...]) -> None:
        """Record a contribution that a simulated peer measured."""
        c = sent.contribution
        entry = Counted(host.name, c.base_version, c.weight, c.tokens, c.blocks)
        incarnation = host.machine.me.incarnation
        record = Made(entry, incarnation, c.fragment, c.parts, pieces, host.life)
        self._made.setdefault((host.name, c.base_version), []).append(record)

    def on_closed(self, host: SimulatedProcess, closed: Closed) -> None:
        """Check a version that a simulated peer closed."""
        commit = closed.commit
        digest = commit.digest
        self._stands_on[host.life] = commit
        place = commit.lineage, commit.version
        known = self._digest_of.setdefault(place, digest)
        self._closers.setdefault(digest, []).append(host)
        if known != digest:
            if not self._lost_with_the_dead(known):
                raise Violation("I1", f"{host.name} closed another version {commit.version} than others did")
            self._state_of.pop(place, None)  # theirs
        self._digest_of[place] = digest
        self.ballots.closed(host, commit)
        if digest not in self.commits:
            self._first_close(host, commit, digest)
        if closed.parts and digest not in self._recomputed:
            self._recomputed.add(digest)
            self._recompute(closed)

    def _first_close(self, host: SimulatedProcess, commit: Commit, digest: str) -> None:
        self.world.log_commit(host, commit)
        other = self._following.setdefault(commit.previous, digest)
        if other != digest and not (self._may_fork(commit) or self._may_fork(self.commits[other])):
            if not self._lost_with_the_dead(other):
                raise Violation("I8", f"{host.name} closed a second version {commit.version} after the same one")
            del self.commits[other]
        before = self.commits.get(commit.previous)
        tokens = (before.tokens if before else 0) + sum(counted.tokens for counted in commit.counted)
        if commit.tokens != tokens:
            raise Violation("I2", f"version {commit.version} says {commit.tokens} tokens, its entries sum to {tokens}")
        self.commits[digest] = commit
        self._committed[digest] = self._masks_after(commit)

    def _lost_with_the_dead(self, digest: str) -> bool:
        """Whether the simulated operator declared dead, and rightly, all who had a version."""
        return self.evicted and not any(host.alive for host in self._closers[digest])

    def _may_fork(self, commit: Commit) -> bool:
        apart = commit.fragment == -1 and self.world.plan.without_majority == "continue"
        return apart or commit.lineage in self.refounded

    def committed(self, commit: Commit | None) -> Masks:
        """All simulated pieces in the chain that ends with this commit."""
        return self._committed.get(commit.digest, self.nothing) if commit else self.nothing

    def _masks_after(self, commit: Commit) -> Masks:
        before = self._committed.get(commit.previous, self.nothing)
        if commit.fragment == -1:
            return before
        masks = list(before[commit.fragment])
        for counted in commit.counted:
            made = self._maker(commit, counted)
            for part, pieces in enumerate(made.pieces):
                if not commit.counts(counted.peer, part):
                    continue
                if masks[part] & pieces:
                    raise Violation("I2", f"version {commit.version} counts progress of {counted.peer} a second time")
                masks[part] |= pieces
        return tuple(tuple(masks) if index == commit.fragment else entry for index, entry in enumerate(before))

    def _maker(self, commit: Commit, counted: Counted) -> Made:
        before = self.commits.get(commit.previous)
        member = before.member(counted.peer) if before else None
        candidates = self._made.get((counted.peer, counted.base_version), [])
        for made in reversed(candidates):
            if made.entry == counted and member is not None and made.incarnation == member.incarnation:
                return made
        raise Violation("I2", f"version {commit.version} counts a contribution that {counted.peer} never made")

    def on_start(self, host: SimulatedProcess) -> None:
        """Note the lineage that a simulated founder founds, and check the state that it begins with."""
        if host.founder and self.commits:
            self.refounded.add(host.machine.lineage)
            self.on_resume(host, host.line)

    def on_effect(self, host: SimulatedProcess, effect: m.Effect) -> None:
        """Check an effect that a simulated peer is about to carry out."""
        self.ballots.on_effect(host, effect)
        self.gate.on_effect(host, effect)

    # ------------------------------------------------------------ I3: the mean again, in one place

    def _recompute(self, closed: Closed) -> None:
        commit, setup = closed.commit, self.world.setup
        fragment = setup.layout.fragments[commit.fragment]
        made = [(counted, self._maker(commit, counted)) for counted in commit.counted]
        parts = []
        for part in range(fragment.parts):
            terms = [(c.weight, entry.parts[part]) for c, entry in made if commit.counts(c.peer, part)]
            start, stop = fragment.part_bounds(part)
            codec = setup.codecs[fragment.group_of(part)]
            parts.append((plain_radial if setup.radial else plain_mean)(terms, stop - start, codec))
            if self.world.hostile:
                self._check_sizes(commit, part, [codec.decode(payload, stop - start) for _, payload in terms])
            if codec.gathered and closed.parts[part] == parts[-1]:
                by_senders = setup.by_senders[fragment.group_of(part)]
                self._check_gathered(closed, part, codec, plain_gathered(terms, stop - start, codec, by_senders))
        sent = [self._excused(true, closed.parts[part]) for part, true in enumerate(parts)]
        if mean_digest(sent) != commit.mean_digest:
            wrong = [part for part, payload in enumerate(sent) if payload != closed.parts[part]]
            raise Violation("I3", f"parts {wrong} of version {commit.version} are not the mean of who they count")

    def _check_sizes(self, commit: Commit, part: int, values: Sequence[Tensor]) -> None:
        """I6: no simulated values that no training explains are counted, where there are others to compare with."""
        sizes = sorted(size for size in (one.square().mean().sqrt().item() for one in values) if size > 0)
        if len(sizes) > 1 and not sizes[-1] <= ABSURD * max(sizes[(len(sizes) - 1) // 2], MIN_RMS):
            raise Violation("I6", f"part {part} of version {commit.version} counts what is {sizes[-1]:.3g} large")

    def replayed(self) -> Replay:
        """Replay the whole simulation by the code of `diloco replay`: the outer steps, too. A mean that an owner lied
        about to everybody is what it is."""
        recorded = [(made.entry, made.fragment, made.parts) for entry in self._made.values() for made in entry]
        result = remake(self._chain, recorded, self.world.setup)
        two_faced = any(fault.how == "two-faced" for fault in self.world.plan.faults)
        for one in result.versions:
            if one.verdict is not Verdict.REPRODUCED and not two_faced:
                raise Violation("I3", f"replay of version {one.version} of {one.lineage}: {one.verdict} {one.detail}")
        return result

    def _check_gathered(self, closed: Closed, part: int, codec: Codec, expected: np.ndarray) -> None:
        mean = torch.empty(len(expected))
        mean_into(closed.parts[part], codec, mean)
        if not np.allclose(mean.numpy(), expected, rtol=1e-4, atol=1e-6):
            raise Violation("I3", f"part {part} of version {closed.commit.version} is read as another mean than it is")

    def _excused(self, true: bytes, sent: bytes) -> bytes:
        """The part that is let pass as a mean: a simulated owner's one lie to all others, which nobody can find out."""
        return sent if self.world.hostile and sent == other_mean(true) else true

    # ------------------------------------------------------------ states

    def on_state(self, host: SimulatedProcess, line: Line) -> None:
        """Check the new state of a simulated peer: after a version, or a copy."""
        commit = line.commit
        if commit is None:
            return
        key = (commit.lineage, line.state.version)
        if self._state_of.setdefault(key, line.state.digest) != line.state.digest:
            raise Violation("I1", f"{host.name} holds another state of version {line.state.version} than others")
        self._chain.add(commit, line.state.digest, host.name)

    def on_resume(self, host: SimulatedProcess, line: Line) -> None:
        """Check the state from which a simulated peer begins again, after all were dead."""
        commit = line.commit
        if commit is not None and self._state_of.get((commit.lineage, commit.version)) != line.state.digest:
            raise Violation("I5", f"{host.name} resumes from a state that is no version's")

    def on_resync(self, host: SimulatedProcess, source: Member, void_tokens: int) -> None:
        """Check the committed tokens that a simulated peer reports void as it leaves its lineage for another."""
        self.void_tokens += void_tokens
        there = self.world.at(source)
        mine, other = self._stands_on.pop(host.life, None), self._stands_on.get(there.life) if there else None
        if mine is None or other is None:
            return
        shared = set(self._back_from(other))
        parted = next((digest for digest in self._back_from(mine) if digest in shared), None)
        lost = mine.tokens - (self.commits[parted].tokens if parted else 0)
        if lost != void_tokens:
            raise Violation("I8", f"{host.name} says that {void_tokens} tokens are void with its lineage, {lost} are")

    def _audit(self) -> None:
        """Audit the ledgers that all simulated lives wrote, by the code of `diloco audit`. What the dead had alone, the
        operator may have given up for lost."""
        if self.evicted or not self.world.keeps_disks:
            return
        folders = [folder for disk in self.world.disks.values() for folder in (*disk.put_away, disk.folder)]
        ledgers = [folder / LEDGER for folder in folders if (folder / LEDGER).is_file()]
        found = [(path.parent.name, scan(path.read_bytes())) for path in ledgers]
        books = [
            book_of(Path(name), scanned) for name, scanned in found if any(r.kind == "open" for r in scanned.records)
        ]
        for finding in examine(books, chain_of(books)).violations:
            where = f"{finding.peer}, version {finding.version}, line {finding.line} of its ledger"
            raise Violation(finding.rule, f"audit: {where}: {finding.text}")

    def _back_from(self, commit: Commit) -> Iterator[str]:
        """Digests of the simulation's commits, from this one back to the first."""
        digest = commit.digest
        while digest in self.commits:
            yield digest
            digest = self.commits[digest].previous

    # ------------------------------------------------------------ waiting

    def on_machine(self, host: SimulatedProcess) -> None:
        """Check a simulated peer after an event: it may not wait in a round for longer than was promised."""
        self.ballots.on_machine(host)
        since_s, patience_s = host.waiting_since_s, PATIENCE_S + 1.0
        if since_s is not None and self.world.now - max(since_s, host.thawed_s) > patience_s:
            raise Violation("I7", f"{host.name} waits in a round since {since_s:.1f}")

    def at_the_end(self, hosts: Sequence[SimulatedProcess]) -> None:
        """Check the simulation's end: one chain with all that any peer ever closed, but for lineages that ended."""
        self._audit()
        if self.refounded or self.world.plan.without_majority == "continue":
            return
        for host in hosts:
            commit = host.machine.commit
            chain = set(self._back_from(commit)) if commit else set()
            for digest, closed in self.commits.items():
                kept = digest in chain or closed.version > host.machine.version
                if not kept and not self._lost_with_the_dead(digest):
                    raise Violation("I5", f"version {closed.version} was closed and is not in the chain of {host.name}")
