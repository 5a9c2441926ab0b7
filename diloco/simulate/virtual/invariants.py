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
from diloco.accounts.ledger import scan
from diloco.accounts.replay import Replay, Verdict
from diloco.base.types import Closed, Commit, Counted, Member
from diloco.compress import Codec
from diloco.outer.average import MIN_RMS, mean_digest, mean_into
from diloco.outer.fragments import Fragment, read_fragment
from diloco.outer.line import Line, PendingContribution
from diloco.outer.merge import Mix
from diloco.protocol import messages as m
from diloco.simulate.virtual.ballots import SimulatedBallots
from diloco.simulate.virtual.disk import SimulatedLedger
from diloco.simulate.virtual.gate import SimulatedAdmissions, Violation
from diloco.simulate.virtual.lies import other_mean
from diloco.simulate.virtual.remake import plain_gathered, plain_mean, plain_radial, remake
from diloco.simulate.virtual.setup import NOISES, flat_noise, noises

if TYPE_CHECKING:
    from diloco.simulate.virtual.disk import SimulatedCheckpoint
    from diloco.simulate.virtual.host import SimulatedHost
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
        self._closers: dict[str, list[SimulatedHost]] = {}
        self.evicted = False
        """An operator declared somebody dead."""
        self._stands_on: dict[int, Commit] = {}
        """By life."""
        self.ballots = SimulatedBallots(world)
        self.gate = SimulatedAdmissions(world)
        self._pages: list[tuple[str, SimulatedLedger]] = []
        self._chain = Chain()
        """Every version that anybody applied, and the state after it."""

    def page(self, host: SimulatedHost) -> SimulatedLedger:
        """A new ledger in memory, for one life of a simulated peer."""
        page = SimulatedLedger(self.world.disks[host.name])
        self._pages.append((host.name, page))
        return page

    # ------------------------------------------------------------ what peers report

    def made(self, host: SimulatedHost, sent: PendingContribution, pieces: tuple[int, ...]) -> None:
        """Record a contribution that a simulated peer measured."""
        c = sent.contribution
        entry = Counted(host.name, c.base_version, c.weight, c.tokens, c.blocks)
        incarnation = host.machine.me.incarnation
        record = Made(entry, incarnation, c.fragment, c.parts, pieces, host.life)
        self._made.setdefault((host.name, c.base_version), []).append(record)

    def on_closed(self, host: SimulatedHost, closed: Closed) -> None:
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

    def _first_close(self, host: SimulatedHost, commit: Commit, digest: str) -> None:
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

    def on_effect(self, host: SimulatedHost, effect: m.Effect) -> None:
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

    def on_state(self, host: SimulatedHost, line: Line) -> None:
        """Check the new state of a simulated peer: after a version, or a copy."""
        commit = line.commit
        if commit is None:
            return
        key = (commit.lineage, line.state.version)
        if self._state_of.setdefault(key, line.state.digest) != line.state.digest:
            raise Violation("I1", f"{host.name} holds another state of version {line.state.version} than others")
        self._chain.add(commit, line.state.digest, host.name)

    def on_resume(self, host: SimulatedHost, snapshot: SimulatedCheckpoint) -> None:
        """Check the checkpoint from which a simulated peer begins again, after all were dead."""
        commit = snapshot.commit
        if commit is not None and self._state_of.get((commit.lineage, commit.version)) != snapshot.state.digest:
            raise Violation("I5", f"{host.name} resumes from a state that is no version's")

    def on_resync(self, host: SimulatedHost, source: Member, void_tokens: int) -> None:
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
        if self.evicted or not self._pages:
            return
        found = [(name, scan(page.read())) for name, page in self._pages]
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

    def on_machine(self, host: SimulatedHost) -> None:
        """Check a simulated peer after an event: it may not wait in a round for longer than was promised."""
        self.ballots.on_machine(host)
        since_s = host.training.waiting_since_s
        patience_s = self.world.setup.patience_s + 1.0
        if since_s is not None and self.world.now - max(since_s, host.thawed_s) > patience_s:
            raise Violation("I7", f"{host.name} waits in a round since {since_s:.1f}")

    def at_the_end(self, hosts: Sequence[SimulatedHost]) -> None:
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


class SimulatedProgress:
    """The pieces of one simulated life: which are in its weights, to compare with what production code has."""

    def __init__(self, host: SimulatedHost, line: Line) -> None:
        self.host = host
        self.line = line
        self.invariants = host.world.invariants
        self.uncommitted: list[list[int]] = [list(masks) for masks in self.invariants.nothing]
        self.sums: list[Tensor] = [torch.zeros(fragment.elements) for fragment in line.layout.fragments]
        self.mine = 0
        """All pieces of this life."""
        self.discarded: list[list[int]] = [list(masks) for masks in self.invariants.nothing]
        self.tokens = 0
        """Trained in this life or brought from a checkpoint, and neither counted nor discarded by now."""
        self._sent_pieces: tuple[int, ...] = ()
        self._sent_parts: Sequence[bytes] = ()
        self._sent_sum: Tensor | None = None
        self._residuals = [torch.zeros(fragment.elements) for fragment in line.layout.fragments]
        """Errors of the codec in counted contributions, by fragment."""

    def pieces(self) -> Pieces:
        """Pieces of progress for a simulated peer's checkpoint."""
        return tuple(map(tuple, self.uncommitted)), tuple(total.clone() for total in self.sums)

    def restored(self, snapshot: SimulatedCheckpoint) -> None:
        """Take pieces of progress from a simulated peer's checkpoint."""
        if snapshot.pieces is not None:
            masks, sums = snapshot.pieces
            self.uncommitted = [list(entry) for entry in masks]
            self.sums = [total.clone() for total in sums]
        self.tokens = snapshot.tokens
        self._check("restored")

    def train(self, tokens: int) -> dict[str, Tensor]:
        """One more simulated piece of progress. Returns what it does to the weights."""
        piece = self.host.world.next_piece()
        self.mine |= 1 << piece
        for fragment in self.line.layout.fragments:
            self.sums[fragment.index] += flat_noise(piece % NOISES, fragment)
            self.uncommitted[fragment.index] = [masks | 1 << piece for masks in self.uncommitted[fragment.index]]
        self.tokens += tokens
        self.invariants.trained_tokens += tokens
        return noises()[piece % NOISES]

    def measured(self, sent: PendingContribution) -> None:
        """Note that all uncommitted pieces of a fragment went into a simulated contribution."""
        index = sent.contribution.fragment
        self._sent_pieces = tuple(self.uncommitted[index])
        self._sent_parts = sent.contribution.parts
        self._sent_sum = self.sums[index].clone()
        self.invariants.made(self.host, sent, self._sent_pieces)
        if sent.target is not None and self.line.feedback is not None and self._exact:
            target = self.line.feedback * self._residuals[index] - self.sums[index]
            self._alike("sends", sent.target, target, self.line.layout.fragments[index])

    def applied(self, closed: Closed, mine: Counted | None) -> None:
        """Check the pieces of a simulated peer after it applied a version."""
        commit = closed.commit
        if mine is not None:
            self.tokens -= mine.tokens
            fragment = self.line.layout.fragments[commit.fragment]
            counted = [part for part in range(fragment.parts) if commit.counts(mine.peer, part)]
            self._leave_over(fragment, counted)
            self._take_out(fragment, counted)
        self._check(f"version {commit.version}")

    def _take_out(self, fragment: Fragment, parts: Sequence[int]) -> None:
        """Move the sent values of these parts out of simulated progress: they are the run's now."""
        if self._sent_sum is None:
            return
        masks, total = self.uncommitted[fragment.index], self.sums[fragment.index]
        for part in parts:
            start, stop = fragment.part_bounds(part)
            masks[part] &= ~self._sent_pieces[part]
            total[start:stop] -= self._sent_sum[start:stop]

    def _leave_over(self, fragment: Fragment, counted: Sequence[int]) -> None:
        """Keep the codec's error in the counted parts of a simulated contribution, to be sent later."""
        feedback, codecs = self.line.feedback, self.line.codecs
        if feedback is None or self._sent_sum is None or not self._exact:
            return
        residual = self._residuals[fragment.index]
        for part in counted:
            start, stop = fragment.part_bounds(part)
            target = feedback * residual[start:stop] - self._sent_sum[start:stop]
            decoded = codecs[fragment.group_of(part)].decode(self._sent_parts[part], stop - start)
            residual[start:stop] = target - decoded

    def adopted(
        self, sent: PendingContribution | None, mine: Counted | None, discarded_tokens: int, before: Commit | None
    ) -> None:
        """Check the pieces after a simulated copy of the state: those sent are counted, given up, or still sent."""
        if sent is not None and self.line.sent is None:
            fragment = self.line.layout.fragments[sent.contribution.fragment]
            self._discard(fragment.index, self._sent_pieces)
            self._take_out(fragment, range(fragment.parts))
        self.tokens -= discarded_tokens + (mine.tokens if mine is not None else 0)
        self.invariants.discarded_tokens += discarded_tokens
        old, new = self.invariants.committed(before), self.invariants.committed(self.line.commit)
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            self._discard(index, [a & ~b for a, b in zip(was, now, strict=True)])  # of a lineage that ended
        if before is None or self.line.commit != before:
            for residual in self._residuals:
                residual.zero_()  # it was measured on another anchor
        self._check(f"the copied version {self.line.state.version}")

    def dropped(self, discarded_tokens: int) -> None:
        """Note that a simulated peer gave up all its progress."""
        for index, masks in enumerate(self.uncommitted):
            self._discard(index, masks)
            self.uncommitted[index] = [0] * len(masks)
            self.sums[index].zero_()
        self.tokens -= discarded_tokens
        self.invariants.discarded_tokens += discarded_tokens
        self._check("discarding")

    def _discard(self, index: int, masks: Sequence[int]) -> None:
        self.discarded[index] = [a | b for a, b in zip(self.discarded[index], masks, strict=True)]

    def _check(self, after: str) -> None:
        """I2 and I4: a simulated peer's weights are the anchor and exactly the pieces that are still its own."""
        name, line = self.host.name, self.line
        if line.trained.tokens != self.tokens or self.tokens < 0:
            raise Violation("I2", f"{name} after {after}: {line.trained.tokens} tokens of progress, not {self.tokens}")
        committed = self.invariants.committed(line.commit)
        for index, masks in enumerate(self.uncommitted):
            for part, (ours, theirs, gone) in enumerate(
                zip(masks, committed[index], self.discarded[index], strict=True)
            ):
                if ours & theirs:
                    raise Violation("I2", f"{name} after {after}: keeps progress in part {part} that is committed")
                if self.mine & ~(ours | theirs | gone):
                    raise Violation("I4", f"{name} after {after}: progress in part {part} is nowhere")
        if self._exact:
            self._check_values(after)

    @property
    def _exact(self) -> bool:
        """Whether simulated weights are nothing but anchor and progress: `mix` keeps a share of what is committed."""
        return not self.host.world.hostile and not isinstance(self.line.merge, Mix)

    def _check_values(self, after: str) -> None:
        for fragment, total in zip(self.line.layout.fragments, self.sums, strict=True):
            sent, base = self.line.sent, self.line.state.fragments[fragment.index].anchor
            if sent is not None and sent.contribution.fragment == fragment.index:
                base = sent.base_if_skipped  # `eager` shows what is on its way at its expected effect
            progress = read_fragment(self.line.parameters, fragment) - base
            error = (progress - total).abs_().max().item()
            if not error <= TOLERANCE:
                what = f"{self.host.name} after {after}: the weights are off by {error:.2g} from anchor plus progress"
                raise Violation("I4", what)
            if self.line.feedback is not None:
                kept = self.line.residuals.get(fragment.index)
                dropped = torch.zeros(fragment.elements) if kept is None else kept
                self._alike(f"keeps after {after}", dropped, self._residuals[fragment.index], fragment)

    def _alike(self, does: str, found: Tensor, true: Tensor, fragment: Fragment) -> None:
        """Check that nothing of what a simulated peer's codec drops is lost, or sent twice."""
        error = (found - true).abs_().max().item()
        if not error <= TOLERANCE * (1 + true.abs().max().item()):
            what = f"{self.host.name} {does} what is off by {error:.2g} from progress and residual"
            raise Violation("I4", f"{what} of fragment {fragment.index}")
