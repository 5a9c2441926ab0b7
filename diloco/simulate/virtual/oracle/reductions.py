"""The reductions of every simulated life, and the commits that come of them: rules of what is averaged and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.base.types import Commit
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

ROUNDING_S = 1e-6


@dataclass(slots=True)
class Work:
    """One process's part in the reduction under way."""

    spans: dict[int, str] = field(default_factory=dict)
    """Owners of the parts."""
    folded: set[int] = field(default_factory=set)
    """Parts that it has averaged."""
    began: tuple[tuple[int, int], float] = ((-1, -1), 0.0)
    """Version and attempt of the reduction under way, and since when; a version of -1: there is none."""
    exposed: tuple[str, int] = ("", -1)
    """The commit at which it stood, and the version that may count bytes which it sent."""


class SimulatedReductions:
    """Checks of all reductions of a simulation (I2, I3)."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._works: dict[int, Work] = {}
        """By life."""

    def on_effects(self, host: SimulatedProcess, effects: Sequence[fx.Effect]) -> None:
        """Check the effects of a step of a simulated peer that are about its reduction."""
        work = self._works.get(host.life)
        if work is None:
            work = self._works[host.life] = Work()
        for effect in effects:
            match effect:
                case fx.BeginReduction(begin):
                    self._begins(host, work, begin)
                case fx.RepairReduction(repair):
                    self._repairs(host, work, repair, effects)
                case fx.FoldPart(_, attempt, part) if part in work.folded:
                    raise Violation("I3", f"{host.name} averages part {part} of attempt {attempt} once more")
                case fx.FoldPart(_, _, part):
                    work.folded.add(part)
                case fx.Send(_, m.Envelope(body=m.Repair() as repair)):
                    self._gives_away(host, repair)
                case fx.Close(commit) if commit.moves and work.began[0][0] >= 0:
                    took_s = host.now - work.began[1]
                    if host.machine.sync_s < took_s - ROUNDING_S:
                        raise Violation("I7", f"{host.name} forgets that version {commit.version} took {took_s:.2f} s")
                case fx.Close(commit) if commit.fragment < 0 and work.exposed == (commit.previous, commit.version + 1):
                    work.exposed = commit.digest, commit.version + 1
                    if host.machine._contributor._exposed_at < 0:
                        raise Violation("I2", f"{host.name} forgets at a founding what others may count")
        if host.machine.reducing is None or host.machine.reducing[:2] != work.began[0]:
            work.began = (-1, -1), 0.0

    def _begins(self, host: SimulatedProcess, work: Work, begin: m.Begin) -> None:
        """Check that a peer that takes part in a reduction has the very contribution that it counts, and stands at that
        attempt: the mean of another one nobody votes for."""
        machine = host.machine
        here = begin.height == machine.height
        if begin.height < machine.since_height or (here and begin.attempt != machine.attempt):
            what = f"takes part in attempt {begin.attempt} at height {begin.height}"
            raise Violation("I2", f"{host.name} {what}, and is in attempt {machine.attempt} at {machine.height}")
        work.spans = {part: span.owner for span in begin.spans for part in range(span.start, span.stop)}
        work.folded, work.began = set(), (begin.key, host.now)
        mine = [entry for entry in begin.contributors if entry.peer == host.name]
        offer = machine._contributor.offer
        if not mine:
            return
        entry = mine[0]
        counted = entry.base_version, entry.weight, entry.tokens, entry.blocks
        if offer is None or counted != (offer.base_version, offer.weight, offer.tokens, offer.blocks):
            raise Violation("I2", f"{host.name} takes part with {offer}, and {counted} is counted")
        commit = machine.commit
        work.exposed = commit.digest if commit is not None else "", machine.making

    def _repairs(self, host: SimulatedProcess, work: Work, repair: m.Repair, effects: Sequence[fx.Effect]) -> None:
        """Parts that a repair moves are sent to their new owners, and awaited from them."""
        after = {part: span.owner for span in repair.spans for part in range(span.start, span.stop)}
        moved = {part for part, owner in after.items() if work.spans.get(part, owner) != owner}
        owed = {part for part in moved if after[part] != host.name}
        work.spans = after
        work.folded -= moved
        machine = host.machine._contributor
        reduction = machine.reduction
        if reduction is None or reduction.key != repair.key or reduction.generation != repair.generation:
            return
        if not moved <= reduction.absent or (moved and reduction.mean_digest):
            raise Violation("I3", f"{host.name} keeps parts of the mean that a repair moved")
        sent = {
            part
            for effect in effects
            if isinstance(effect, fx.SendContribution) and effect.generation == repair.generation
            for part in range(effect.span.start, effect.span.stop)
        }
        if reduction.contributes and machine.offer is not None and not owed <= sent:
            raise Violation("I3", f"{host.name} does not send parts {sorted(owed - sent)} to their new owners")

    def _gives_away(self, host: SimulatedProcess, repair: m.Repair) -> None:
        """Check that those left out own no part that is still to come. A coordinator that leaves itself out owns none
        at all: others may lack even what it has made."""
        reduction = host.machine._contributor.reduction
        absent = reduction.absent if reduction is not None and reduction.key == repair.key else set()
        for span in repair.spans:
            lacking = span.owner == host.name or not absent.isdisjoint(range(span.start, span.stop))
            if span.owner in repair.gone and lacking:
                raise Violation("I3", f"{host.name} leaves {span.owner} out, which keeps parts {span.start} on")

    def on_stalled(self, host: SimulatedProcess, sender: str, stalled: m.Stalled, effects: Sequence[fx.Effect]) -> None:
        """Check whom a coordinator leaves out after a complaint: its sender, where nothing comes to that from most
        contributors, and else those that it misses."""
        reduction = host.machine._contributor.reduction
        if reduction is None or sender in stalled.missing:
            return
        cut_off = stalled.still and 2 * len(stalled.missing) > len(reduction.begin.contributors)
        for effect in effects:
            match effect:
                case fx.Send(_, m.Envelope(body=m.Repair() as repair)) if (sender in repair.gone) != cut_off:
                    what = f"leaves {', '.join(repair.gone)} out as {sender} misses {', '.join(stalled.missing)}"
                    raise Violation("I7", f"{host.name} {what}")

    def on_commit(self, commit: Commit, before: Commit) -> None:
        """Check the contributions and leases of a commit that follows another."""
        parts = self.world.setup.layout.fragments[commit.fragment].parts if commit.fragment >= 0 else 0
        for entry in commit.counted:
            if not any(commit.counts(entry.peer, part) for part in range(parts)):
                raise Violation("I2", f"version {commit.version} counts {entry.peer}, which is in no part of the mean")
        self._check_lost_blocks(commit, before)

    def _check_lost_blocks(self, commit: Commit, before: Commit) -> None:
        """Blocks of the lost are not leased again: they may have been trained on."""
        leased = [*commit.leases.returned, *(run for held in commit.leases.held.values() for run in held)]
        for peer in before.leases.held.keys() - commit.leases.held.keys():
            member = before.member(peer)
            machines = self.world.machines
            # A view has the address of an earlier process, where the life went on at another one since.
            found = [machines.process_of(member), machines.latest_of(member)] if member is not None else []
            lives = [process for process in found if process is not None]
            if not lives or any(one.leaving or (one.run is not None and one.run.done) for one in lives):
                continue  # who is late for the final sync is done while the others go on, and says goodbye
            for lost in before.leases.held[peer]:
                if any(run.start < lost.stop and lost.start < run.stop for run in leased):
                    raise Violation("I2", f"version {commit.version} leases blocks of {peer} again, which is lost")
