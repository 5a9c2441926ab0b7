"""The invariants I1 to I8 over everything that any simulated peer did: each check looks at what just changed.

Progress is followed in *pieces*: one piece is what one peer trained in one round. A piece is in the local weights until
a commit counts it or somebody reports it as discarded, never both, and never twice. Sets of pieces are bit masks, one
for each part of each fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diloco.accounts.books import ChainRecord
from diloco.accounts.journal import Recording
from diloco.accounts.replay import Replay, Replayer, Verdict, shelve
from diloco.base.types import Closed, Commit, Counted, Member
from diloco.compress import Codec
from diloco.outer.average import MIN_RMS, mean_digest, mean_into
from diloco.outer.line import Line, PendingContribution
from diloco.outer.robust import Rule
from diloco.outer.state import OuterState
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.applied import SimulatedBlocks
from diloco.simulate.virtual.oracle.ballots import SimulatedBallots
from diloco.simulate.virtual.oracle.conduct import SimulatedConduct
from diloco.simulate.virtual.oracle.departures import SimulatedDepartures
from diloco.simulate.virtual.oracle.gate import SimulatedAdmissions, Violation
from diloco.simulate.virtual.oracle.reductions import SimulatedReductions
from diloco.simulate.virtual.oracle.robust import plain_robust
from diloco.simulate.virtual.plans.lies import other_mean
from diloco.simulate.virtual.plans.setup import PATIENCE_S, SimulationSetup

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
        self.refounded: dict[str, str | None] = {}
        """Lineages that an operator began, and the commit of the checkpoint from which; None: from nothing."""
        self.trained_tokens = 0
        self.discarded_tokens = 0
        self.void_tokens = 0
        self._digest_of: dict[tuple[str, int], str] = {}
        self._state_of: dict[tuple[str, int], str] = {}
        self._following: dict[str, str] = {}
        self._committed: dict[str, Masks] = {}
        self._made: dict[tuple[str, int], list[Made]] = {}
        self.ended: list[Commit] = []
        """Last commits of those that saw the run's end."""
        self._recomputed: set[str] = set()
        self._holders: dict[str, set[tuple[SimulatedProcess, Member]]] = {}
        """By commit, lives that closed it or copied its state."""
        self._lost: set[str] = set()
        """Digests of commits that died with all that had them, where another was made."""
        self._given_up: set[int] = set()
        """Versions of which a commit died with all that had it, and another was made."""
        self._closed_by: dict[int, set[str]] = {}
        """By life: digests of the versions that it closed."""
        self._stands_on: dict[int, Commit] = {}
        """By life."""
        self._resynced: set[int] = set()
        """Lives that left a lineage for another, and said so."""
        self.ballots = SimulatedBallots(world)
        self.gate = SimulatedAdmissions(world)
        self.departures = SimulatedDepartures(world)
        self.blocks = SimulatedBlocks(self.back_from)
        self.conduct = SimulatedConduct(world)
        self.reductions = SimulatedReductions(world)
        self.drifted: set[int] = set()
        """Versions of which somebody had another state than the others."""
        self._chain = ChainRecord()
        """Every version that anybody applied, and the state after it."""

    # ------------------------------------------------------------ what peers report

    def made(self, host: SimulatedProcess, sent: PendingContribution, pieces: tuple[int, ...]) -> None:
        """Record a contribution that a simulated peer measured."""
        c = sent.contribution
        entry = Counted(host.name, c.boot, c.base_version, c.weight, c.tokens, c.blocks)
        incarnation = host.machine.me.incarnation
        record = Made(entry, incarnation, c.fragment, c.parts, pieces, host.life)
        self._made.setdefault((host.name, c.base_version), []).append(record)

    def on_closed(self, host: SimulatedProcess, closed: Closed) -> None:
        """Check a version that a simulated peer closed."""
        commit = closed.commit
        digest = commit.digest
        self._closed_by.setdefault(host.life, set()).add(digest)
        place = commit.lineage, commit.height
        known = self._digest_of.setdefault(place, digest)
        self._holders.setdefault(digest, set()).add((host, host.machine.me))
        if known != digest:
            if not self.lost_with_the_dead(known):
                raise Violation("I1", f"{host.name} closed another version {commit.version} than others did")
            self._state_of.pop((commit.lineage, commit.version), None)  # theirs
        self._digest_of[place] = digest
        self.ballots.closed(host, commit)
        if digest not in self.commits:
            self._first_close(host, commit, digest)
        if closed.parts:
            self.on_mean(host, closed)

    def on_mean(self, host: SimulatedProcess, closed: Closed) -> None:
        """Check the mean with which a simulated peer closed a version."""
        commit = closed.commit
        if mean_digest(closed.parts) != commit.mean_digest:
            raise Violation("I3", f"{host.name} closed version {commit.version} with another mean than it names")
        if commit.digest not in self._recomputed:
            self._recomputed.add(commit.digest)
            self._recompute(closed)

    def _first_close(self, host: SimulatedProcess, commit: Commit, digest: str) -> None:
        self.world.log_commit(host, commit)
        other = self._following.setdefault(commit.previous, digest)
        if other != digest and not (self._may_fork(commit) or self._may_fork(self.commits[other])):
            if not self.lost_with_the_dead(other):
                raise Violation("I8", f"{host.name} closed a second version {commit.version} after the same one")
            self._given_up.add(self.commits.pop(other).version)
            self._lost.add(other)
        before = self.commits.get(commit.previous)
        tokens = (before.tokens if before else 0) + sum(counted.tokens for counted in commit.counted)
        if commit.tokens != tokens:
            raise Violation("I2", f"version {commit.version} says {commit.tokens} tokens, its entries sum to {tokens}")
        if commit.founds and before is not None:
            self._check_founding(host, commit, before)
        if before is not None and self.world.drifts and commit.moves:
            self._agree_on_state(commit, before)
        if before is not None:
            self.conduct.on_commit(commit, before)
            self.reductions.on_commit(commit, before)
        self.commits[digest] = commit
        self._committed[digest] = self._masks_after(commit)

    def _check_founding(self, host: SimulatedProcess, commit: Commit, before: Commit) -> None:
        """I5: a lineage begins with the version and the state of the commit that it goes on from."""
        state = self._state_of.get((before.lineage, before.version), commit.state_digest)
        if (commit.version, commit.state_digest) != (before.version, state):
            what = f"version {commit.version} and state {commit.state_digest[:8]} after version {before.version}"
            raise Violation("I5", f"{host.name} founds {commit.lineage} with {what} and state {state[:8]}")

    def closed_here(self, host: SimulatedProcess, commit: Commit) -> bool:
        """Whether a simulated peer closed this version itself, and did not only copy its state."""
        return commit.digest in self._closed_by.get(host.life, ())

    def lives_from(self, commit: Commit, height: int) -> set[Member]:
        """Lives that closed a commit of that lineage at this height or later, or copied its state."""
        later = [one.digest for one in self.commits.values() if one.lineage == commit.lineage and one.height >= height]
        return {me for digest in later for _, me in self._holders.get(digest, ())}

    def lost_with_the_dead(self, digest: str) -> bool:
        """Whether all who had a version are dead, and an operator answers for each of them that had a vote on it: by
        an eviction, or as somebody brought back a copy of its disk from before that version."""
        commit = self.commits.get(digest)
        before = self.commits.get(commit.previous) if commit else None
        if commit is None:
            return True  # it was found lost before
        if before is None:
            return commit.previous in self._lost and not any(host.alive for host, _ in self._holders[digest])
        evicted = {one for one in before.view if (one.peer, one.incarnation) in self.world.promise.evicted}
        held = self._holders[digest]
        kept = {me for host, me in held if not host.records.lost_commit(digest)}
        answered = evicted | (set(before.view).intersection(me for _, me in held) - kept)
        return bool(answered) and not any(host.alive or me in set(before.view) - answered for host, me in held)

    def abandoned(self, digest: str) -> bool:
        """Whether all trainers that had a version and still live said that they leave its lineage."""
        living = [host for host, _ in self._holders[digest] if host.alive and not host.witness]
        return all(host.life in self._resynced or host.name in self.world.liars for host in living)

    def _may_fork(self, commit: Commit) -> bool:
        apart = commit.founds and (bool(commit.evicted) or self.world.plan.without_majority == "continue")
        return apart or commit.lineage in self.refounded

    def committed(self, commit: Commit | None) -> Masks:
        """All simulated pieces in the chain that ends with this commit."""
        return self._committed.get(commit.digest, self.nothing) if commit else self.nothing

    def _masks_after(self, commit: Commit) -> Masks:
        before = self._committed.get(commit.previous, self.nothing)
        if not commit.moves:
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

    def counts(self, commit: Commit, host: SimulatedProcess) -> int:
        """Tokens of a simulated life that a version counts."""
        entries = [(entry, self._maker(commit, entry)) for entry in commit.counted if entry.peer == host.name]
        return sum(entry.tokens for entry, made in entries if made.life == host.life)

    def _maker(self, commit: Commit, counted: Counted) -> Made:
        candidates = self._made.get((counted.peer, counted.base_version), [])
        for made in reversed(candidates):
            if made.entry == counted:
                return made
        raise Violation("I2", f"version {commit.version} counts a contribution that {counted.peer} never made")

    def on_start(self, host: SimulatedProcess) -> None:
        """Check the state with which a simulated peer begins a run again, and note the lineage that it founds; as the
        same voter it founds none, and is in the one that it was in."""
        if host.founder and self.commits:
            commit, saved = host.line.commit, self.world.machines.saved_at_least(self.world.plan.checkpoint_every)
            if host.line.state.version < saved:
                what = f"{host.name} founds anew from version {host.line.state.version}"
                raise Violation("I5", f"{what}, one from {saved} on must be on a disk")
            if host.machine.founder:
                self.refounded[host.machine.lineage] = commit.digest if commit is not None else None
            self.on_resume(host, host.line)

    def on_effect(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Check an effect that a simulated peer is about to carry out."""
        if isinstance(effect, fx.Send):
            self.gate.travels(host, effect.envelope)
            if isinstance(effect.envelope.body, m.Heartbeat):
                return  # most of all that is sent: it binds nobody
        self.ballots.on_effect(host, effect)
        self.gate.on_effect(host, effect)
        self.departures.on_effect(host, effect)

    # ------------------------------------------------------------ I3: the mean again, in one place

    def _recompute(self, closed: Closed) -> None:
        commit, setup = closed.commit, self.world.setup
        fragment = setup.layout.fragments[commit.fragment]
        made = [(counted, self._maker(commit, counted)) for counted in commit.counted]
        parts, sent = [], []
        for part in range(fragment.parts):
            terms = [(c.weight, entry.parts[part]) for c, entry in made if commit.counts(c.peer, part)]
            start, stop = fragment.part_bounds(part)
            codec = setup.codecs[fragment.group_of(part)]
            parts.append(plain_fold(terms, stop - start, codec, setup.rule))
            here = closed.parts[part]
            lied = self.world.hostile and here != parts[-1] and here in _lies(terms, parts[-1], stop - start, codec)
            sent.append(here if lied else parts[-1])
            if self.world.hostile:
                self._check_sizes(commit, part, [codec.decode(payload, stop - start) for _, payload in terms])
            if codec.gathered and closed.parts[part] == parts[-1]:
                by_senders = setup.by_senders[fragment.group_of(part)]
                expected = plain_robust(terms, stop - start, codec, setup.rule)
                if expected is None:
                    expected = plain_gathered(terms, stop - start, codec, by_senders)
                self._check_gathered(closed, part, codec, expected)
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
        result, closed = remake(self._chain, recorded, self.world.setup), len(self._chain.commits)
        if len(result.versions) != closed:
            raise Violation("I3", f"replay makes {len(result.versions)} versions again, of {closed}")
        two_faced = any(fault.how == "two-faced" for fault in self.world.plan.faults)
        drifts_from = min(self.drifted, default=math.inf)  # of two states of a version either may be the right one
        for one in result.versions:
            if one.verdict is not Verdict.REPRODUCED and not two_faced and one.version < drifts_from:
                raise Violation("I3", f"replay of version {one.version} of {one.lineage}: {one.verdict} {one.detail}")
        return result

    def _check_gathered(self, closed: Closed, part: int, codec: Codec, expected: np.ndarray) -> None:
        mean = torch.empty(len(expected))
        mean_into(closed.parts[part], codec, mean)
        if not np.allclose(mean.numpy(), expected, rtol=1e-4, atol=1e-6):
            raise Violation("I3", f"part {part} of version {closed.commit.version} is read as another mean than it is")

    # ------------------------------------------------------------ states

    def on_state(self, host: SimulatedProcess, line: Line) -> None:
        """Check the new state of a simulated peer: after a version, or a copy."""
        commit = line.commit
        if commit is None:
            return
        self._holders.setdefault(commit.digest, set()).add((host, host.machine.me))
        key = (commit.lineage, line.state.version)
        made_on_it = host.drifted and key not in self._state_of  # nobody else may have another state to compare it with
        alike = self._state_of.setdefault(key, line.state.digest) == line.state.digest
        if self.world.drifts:
            host.drifted = not alike or hashed_again(line.state) != line.state.digest
            if host.drifted or made_on_it:
                self.drifted.add(commit.version)
        elif not alike:
            raise Violation("I1", f"{host.name} holds another state of version {line.state.version} than others")
        if not host.drifted:
            self._chain.add(commit, line.state.digest, host.name)

    def _agree_on_state(self, commit: Commit, before: Commit) -> None:
        """A simulated version that several states have: its successor names the right one, which the others copy."""
        self._state_of[before.lineage, before.version] = commit.state_digest
        for host in self.world.living():
            stands = host.progress.line if host.progress is not None else None
            there = stands.commit if stands is not None else None
            here = there is not None and (there.lineage, there.version) == (before.lineage, before.version)
            if stands is not None and here and stands.state.digest != commit.state_digest:
                host.drifted = True
                self.drifted.add(before.version)

    def redone(self, name: str, commit: Commit, state_digest: str) -> None:
        """A simulated peer applied a version again, to which its log led."""
        known = self._state_of.setdefault((commit.lineage, commit.version), state_digest)
        if known != state_digest and not self.world.drifts:
            raise Violation("I5", f"{name} applies version {commit.version} again, and comes to another state")
        self._chain.add(commit, state_digest, name)

    def on_resume(self, host: SimulatedProcess, line: Line) -> None:
        """Check the state from which a simulated peer begins again, after all were dead."""
        commit = line.commit
        if commit is None:
            return
        known = self._state_of.get((commit.lineage, commit.version))  # none: it closed, and nobody had applied it yet
        if known not in (None, line.state.digest):
            raise Violation("I5", f"{host.name} resumes from a state that is no version's")

    def on_resync(self, host: SimulatedProcess, source: Member, void_tokens: int) -> None:
        """Check the committed tokens that a simulated peer reports void as it leaves its lineage for another."""
        self.void_tokens += void_tokens
        self._resynced.add(host.life)
        if host.progress is not None:
            self.blocks.brought |= reduce(or_, (one for masks in host.progress.uncommitted for one in masks), 0)
        there = self.world.at(source)
        mine, other = self._stands_on.pop(host.life, None), self._stands_on.get(there.life) if there else None
        if mine is None or other is None:
            return
        shared = set(self.back_from(other))
        parted = next((digest for digest in self.back_from(mine) if digest in shared), None)
        lost = mine.tokens - (self.commits[parted].tokens if parted else 0)
        if lost != void_tokens:
            raise Violation("I8", f"{host.name} says that {void_tokens} tokens are void with its lineage, {lost} are")

    def given_up(self) -> set[int]:
        """Versions of which a commit was lost with the dead, and another may have been made."""
        lost = {commit.version for digest, commit in self.commits.items() if self.lost_with_the_dead(digest)}
        return lost | self._given_up

    def back_from(self, commit: Commit) -> Iterator[str]:
        """Digests of the simulation's commits, from this one back to the first."""
        digest = commit.digest
        while digest in self.commits:
            yield digest
            digest = self.commits[digest].previous

    # ------------------------------------------------------------ waiting

    def on_machine(self, host: SimulatedProcess) -> None:
        """Check a simulated peer after an event: it may not wait in a round for longer than was promised."""
        self.ballots.on_machine(host)
        if host.machine.commit is not None:
            self._stands_on[host.life] = host.machine.commit  # which it closed, or copied
        since_s, patience_s = host.waiting_since_s, PATIENCE_S + 1.0
        if host.leaving and host.progress is not None:
            host.steps.waits()
        if since_s is not None and self.world.now - max(since_s, host.thawed_s) > patience_s:
            raise Violation("I7", f"{host.name} waits in a round since {since_s:.1f}")


def _lies(terms: Sequence[tuple[int, bytes]], true: bytes, size: int, codec: Codec) -> list[bytes]:
    """Means that are let pass: a simulated owner's one lie to all others, which nobody can find out. Where the codec is
    gathered a receiver has its own contribution already, and the lie is in the last of the others."""
    lies = [other_mean(true)]
    for last in range(max(0, len(terms) - 2), len(terms)) if codec.gathered else ():
        pieces = [*terms]
        pieces[last] = terms[last][0], other_mean(terms[last][1])
        lies.append(plain_mean(pieces, size, codec))
    return lies


def hashed_again(state: OuterState) -> str:
    """Digest of the numbers that an outer state of a simulated peer has now."""
    return OuterState(state.version, tuple(map(replace, state.fragments))).digest


# ---------------------------------------------------------------- made once more


@dataclass(frozen=True)
class Kept(Recording):
    """A simulated peer's recorded contribution that stays in memory."""

    held: Sequence[bytes] = ()

    def payloads(self) -> Iterator[bytes]:
        return iter(self.held)


def remake(
    chain: ChainRecord, recorded: Iterable[tuple[Counted, int, Sequence[bytes]]], setup: SimulationSetup
) -> Replay:
    """Replay a simulation. `recorded`: how a commit counts each contribution, its fragment, its parts."""
    fragments = setup.layout.fragments
    shelf = shelve(Kept(Path(), fragments[index], counted, 0, (), parts) for counted, index, parts in recorded)
    made_with = setup.codecs, setup.optimizer, setup.weighing
    replayer = Replayer(chain, shelf, *made_with, lambda: setup.start, {}, setup.rule)
    return replayer.replay(lambda done, total: None)


def plain_fold(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec, rule: Rule) -> bytes:
    """The simulator's check of a mean by any rule, encoded."""
    robust = None if codec.gathered else plain_robust(terms, elements, codec, rule)
    if robust is not None:
        return codec.encode(torch.from_numpy(robust.astype(np.float32)))
    return (plain_radial if rule == "radial" else plain_mean)(terms, elements, codec)


def plain_mean(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec) -> bytes:
    """The simulator's check of a weighted mean, encoded: fp32 in the order given, apart from
    `diloco.outer.average.fold`. Or the bundle."""
    if codec.gathered:
        table = b"".join(weight.to_bytes(8, "little") + len(payload).to_bytes(4, "little") for weight, payload in terms)
        return len(terms).to_bytes(4, "little") + table + b"".join(payload for _, payload in terms)
    unit = math.gcd(*(weight for weight, _ in terms)) or 1
    total = np.zeros(elements, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, (weight, payload) in enumerate(terms):
            values = codec.decode(payload, elements).numpy() * np.float32(weight // unit)
            total = values if index == 0 else total + values
        mean = total / np.float32(sum(weight for weight, _ in terms) // unit)
    return codec.encode(torch.from_numpy(mean).nan_to_num_())


def plain_radial(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec) -> bytes:
    """The simulator's check of a radial mean, encoded: mean length in the mean direction, in fp64, in plain numpy."""
    counted = [(weight, codec.decode(payload, elements)) for weight, payload in terms if weight > 0]
    if len(counted) == 1:
        return codec.encode(counted[0][1].nan_to_num_())
    values = np.stack([value.double().numpy() for _, value in counted])
    weights = np.array([float(weight) for weight, _ in counted])
    lengths = np.sqrt((values**2).sum(axis=1))
    units = values / np.where(lengths == 0, 1.0, lengths)[:, None]
    direction = (weights[:, None] * units).sum(axis=0)
    resultant = np.sqrt((direction**2).sum())
    if resultant <= weights.sum() * 2.0**-23:
        return codec.encode(torch.zeros(elements))
    mean = direction * ((weights * lengths).sum() / weights.sum() / resultant)
    return codec.encode(torch.from_numpy(mean.astype(np.float32)).nan_to_num_())


def plain_gathered(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec, by_senders: bool) -> np.ndarray:
    """The simulator's check of a bundle's mean, in fp64: over the weights of all, or of those with a value not zero."""
    values = np.stack([codec.decode(payload, elements).double().numpy() for _, payload in terms])
    weights = np.array([float(weight) for weight, _ in terms])[:, None]
    divisor = (weights * (values != 0)).sum(axis=0) if by_senders else weights.sum(axis=0)
    mean: np.ndarray = (weights * values).sum(axis=0) / np.where(divisor == 0, 1.0, divisor)
    return mean
