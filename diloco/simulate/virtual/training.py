"""One life of a simulated peer, the training half: does what `diloco.peer.peer` and `diloco.run.trainer` do, on a model
of a few numbers.

Inner steps are noise added to the local weights. Measuring, encoding, the outer step, merging and copying the state are
the production code of `diloco.round`. What blocks the training thread there is an event in virtual time here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Ledger, Opening, Position
from diloco.base.errors import ResourceError
from diloco.base.types import Closed, Commit, Counted, Member, Skip
from diloco.compress import PayloadError
from diloco.config.site import StorageSection
from diloco.outer.fragments import Weights
from diloco.outer.line import (
    Diverged,
    Line,
    PendingContribution,
    UncommittedProgress,
    adopt,
    adoption,
    book,
    book_adoption,
    book_drop,
    drop,
    expect,
    keep_local,
    weights_to_keep,
    withdraw,
)
from diloco.outer.merge import open_merge
from diloco.outer.optimizers import SteppedHere
from diloco.outer.state import OuterState
from diloco.peer.schedule import OFFERED_AGAIN, PeerStopwatch
from diloco.protocol import leases
from diloco.protocol import messages as m
from diloco.round import apply, measure
from diloco.simulate.virtual.copying import SimulatedStateCopy
from diloco.simulate.virtual.disk import SimulatedCheckpoint
from diloco.simulate.virtual.invariants import SimulatedProgress
from diloco.simulate.virtual.lies import falsified
from diloco.simulate.virtual.setup import STEPS

if TYPE_CHECKING:
    from diloco.simulate.virtual.host import SimulatedHost

APPLY_S = 0.02
"""The training thread takes about so long to apply a version, and to see one."""
POLL_S = 0.2


def step_outer(line: Line, closed: Closed, state_unused: bool = False) -> Counted | None:
    """A simulated peer's outer step: apply a version to a line of one rank, at once. Returns its entry in it, if any.

    `state_unused`: nobody else reads the state before it, which may be overwritten.

    Raises Diverged when the version was made on another state, and PayloadError when the mean is no mean.
    """
    commit = closed.commit
    if commit.fragment < 0:  # a founding moves no anchor: what was sent stays what it is
        line.commit = commit
        return None
    try:
        mine = expect(line, commit)
    except Diverged as error:
        if error.uncounted:
            take_back(line)
        raise
    for wait in apply(line, SteppedHere(line, closed), line.applying(commit, mine is not None, state_unused), {}):
        raise AssertionError(f"it waits: {wait}")
    book(line, commit, mine)
    return mine


def take_back(line: Line) -> None:
    """Make what a simulated peer sent progress again, unless a version counts it."""
    if line.sent is None or line.sent.passed is None:
        withdraw(line)


def adopt_state(line: Line, state: OuterState, commit: Commit | None) -> tuple[Counted | None, int]:
    """Take over a state that a simulated peer copied. Returns its entry counted on the way, tokens discarded."""
    taken = adoption(line, commit)
    adopt(line, state, taken.stays)
    book_adoption(line, taken)
    return taken.mine, taken.discarded


def drop_progress(line: Line) -> int:
    """Take a simulated peer back to the anchor. Returns the tokens that are discarded."""
    drop(line)
    return book_drop(line)


class SimulatedTraining:
    """The training thread of a simulated peer, as events in virtual time."""

    def __init__(self, host: SimulatedHost) -> None:
        setup = host.world.setup
        self.host = host
        plan = host.world.plan
        self.line = Line(
            host.name,
            Weights(setup.parameters()),
            setup.layout,
            setup.codecs,
            setup.optimizer,
            setup.weighing,
            setup.start,
            merge=open_merge(plan.merge, 0.5),
            feedback=plan.feedback if plan.feedback >= 0 else None,
        )
        self.step_s = plan.round_s / STEPS / plan.speed(int(host.name[1:]))
        """Virtual seconds of one inner step."""
        self.cadence = setup.cadence
        self._watch = PeerStopwatch()
        self.overlapping = False
        self._early: Sequence[Closed] | Skip | None = None
        """Outcome of the simulated round while the overlapped steps still went on."""
        self.books = SimulatedProgress(host, self.line)
        self.journal: Journal | None = None
        self.leaving = False
        self.entered = False
        self.waiting_since_s: float | None = None
        self.waited_s = 0.0
        """In all rounds so far."""
        self._offered_again = 0
        """Times that the contribution on its way was offered without further inner steps."""

    def waited(self, now: float) -> float:
        """Virtual seconds in which this simulated life waited for a round."""
        return self.waited_s + (now - self.waiting_since_s if self.waiting_since_s is not None else 0.0)

    # ------------------------------------------------------------ entering

    def _open(self) -> bool:
        """Begin the ledger of this simulated life, with what a checkpoint brought. False: its disk is full; the process
        ends, and is started again until there is room."""
        host, rules, line = self.host, self.host.world.setup.rules, self.line
        me, founds = host.machine.me, host.machine.founder
        opening = Opening(host.name, me.incarnation, rules.run, rules.contract, host.machine.lineage, founds, False)
        ledger = Ledger(host.world.invariants.page(host), lambda text: None) if host.world.keeps_ledgers else None
        self.journal = Journal(opening, line, None, StorageSection(), lambda text: None, ledger)
        if ledger is not None:
            stands = Position(line.state.version, line.commit.digest if line.commit else "", line.state.digest)
            try:
                ledger.opened(opening, host.world.setup.contract, stands, self.journal.totals)
            except ResourceError as error:
                self.host.die(error.cause)
                self.host.world.after(POLL_S, self.host.world.join, self.host.name, True)
                return False
        return True

    def _drop(self, reason: str) -> None:
        """Give up all progress of the simulated peer."""
        discarded = drop_progress(self.line)
        self.books.dropped(discarded)
        if self.journal is not None:
            self.journal.discarded(discarded, reason)

    def found(self) -> None:
        """Begin a simulated run, or go on with one from a checkpoint."""
        if self.journal is None and not self._open():
            return
        self.host.hold(self.line.state, self.line.commit, copied=True)
        self._enter()

    def join(self, members: Sequence[Member]) -> None:
        """Copy the state from these simulated members, unless the run goes on from ours."""
        if not self._open():
            return
        self._drop("the run may have counted it before the restart")
        commit = self.line.commit
        if commit is not None and commit.lineage == self.host.machine.lineage:
            self.found()
        else:
            self._copy(members, self._enter, lambda: self._start_again("nobody gave the state"))

    def _start_again(self, why: str) -> None:
        """End the simulated process with an error; it is started again."""
        self.host.die(why)
        self.host.world.join(self.host.name, with_disk=True)

    def restore(self, snapshot: SimulatedCheckpoint) -> None:
        """Take outer state, commit and uncommitted progress from a simulated checkpoint."""
        line = self.line
        adopt_state(line, snapshot.state, snapshot.commit)
        for name, tensor in snapshot.local.items():
            line.parameters[name].copy_(tensor)
        line.trained = UncommittedProgress(snapshot.tokens, snapshot.blocks)
        self.books.restored(snapshot)

    def _enter(self) -> None:
        """Wait in virtual time until the version that the simulated peer has applied includes it."""
        if self.host.fenced_for_s > 3 * self.host.world.setup.timing.suspect_s:
            self._start_again("fenced")
        else:
            self._catch_up(self._stand)

    def _stand(self) -> None:
        commit = self.line.commit
        if self.host.machine.in_view and commit is not None and commit.member(self.host.name) is not None:
            self.entered = True
            self._inner_steps()
        else:
            self.host.later(POLL_S, self._enter)

    # ------------------------------------------------------------ rounds

    def _inner_steps(self) -> None:
        """Do the simulated inner steps before the contribution is measured."""
        self._size()
        steps = self.cadence.before(self.line.trained.tokens)
        if steps:
            self._train(steps, lambda: self._catch_up(self._contribute))
        else:
            self._catch_up(self._contribute)

    def _size(self) -> None:
        """Set as many simulated inner steps as the speed has room for, as `diloco.run.trainer` does."""
        machine, world = self.host.machine, self.host.world
        machine.progress = replace(machine.progress, pace=self._watch.round())
        if world.plan.sized_by == "speed":
            self.cadence = world.setup.cadence.sized(machine.progress.pace, machine.fastest())

    @property
    def slack_s(self) -> float:
        """Virtual seconds of inner steps left to do while a contribution is on its way."""
        return self.cadence.overlap * self.step_s if self.overlapping and not self.leaving else 0.0

    def _train(self, steps: int, then: Callable[[], None]) -> None:
        world = self.host.world
        jitter = world.plan.jitter
        lasts_s = steps * self.step_s * world.dice.uniform(1 - jitter, 1 + jitter)
        self.host.later(lasts_s, self._trained, steps, lasts_s, then)

    def _trained(self, steps: int, lasted_s: float, then: Callable[[], None]) -> None:
        line = self.line
        keep_local(line)
        for name, noise in self.books.train(steps).items():
            line.parameters[name].add_(noise)
        assert self.journal is not None
        self.journal.trained(steps, self._fresh_blocks())
        self._watch.step(steps, lasted_s)
        then()

    def _fresh_blocks(self) -> int:
        """Blocks of the lease that this simulated round read for the first time."""
        line = self.line
        held = leases.count(line.commit.leases.held.get(self.host.name, ())) if line.commit else 0
        return max(0, min(self.host.world.setup.blocks, held - line.trained.blocks))

    def _contribute(self) -> None:
        self.overlapping = self.cadence.overlap > 0 and not self._offered_again
        if not self._offer():
            self._inner_steps()
        elif self.overlapping:
            self._train(self.cadence.overlap, self._overlapped)
        else:
            self._wait()

    def _offer(self) -> bool:
        """Offer the simulated peer's contribution. False: the progress is not finite, and is dropped."""
        line = self.line
        if line.sent is None:
            try:
                sent = measure(line, line.measuring(self.overlapping), {})
            except PayloadError:
                self._drop("not finite")
                return False
            line.sent = self._falsified(sent) if self.host.lie else sent
            self.books.measured(line.sent)
        self.host.offer(line.sent.contribution, self.leaving)
        return True

    def _overlapped(self) -> None:
        """End the simulated steps that hid the exchange."""
        self.overlapping = False
        early, self._early = self._early, None
        if early is None:
            self._wait()
        else:
            self._came_to(early)

    def _wait(self) -> None:
        self.waiting_since_s = self.host.world.now
        self.host.later(self.host.world.setup.patience_s, self._withdraw, self.waiting_since_s)

    def _falsified(self, sent: PendingContribution) -> PendingContribution:
        parts, fragment = sent.contribution.parts, self.line.layout.fragments[sent.contribution.fragment]
        codecs = [self.line.codecs[fragment.group_of(part)] for part in range(fragment.parts)]
        parts = falsified(self.host.lie, parts, codecs)
        return replace(sent, contribution=replace(sent.contribution, parts=parts))

    def _withdraw(self, waiting_since_s: float) -> None:
        if self.waiting_since_s == waiting_since_s:
            self.host.feed(m.Withdrawn())

    def outcome(self, outcome: Sequence[Closed] | Skip) -> None:
        """Take the outcome of a simulated round, sooner or later than the steps that hide it."""
        if self.overlapping:
            self._early = outcome
        else:
            self._came_to(outcome)

    def _came_to(self, outcome: Sequence[Closed] | Skip) -> None:
        self.waited_s, self.waiting_since_s = self.waited(self.host.world.now), None
        again, self._offered_again = self._offered_again, 0
        if isinstance(outcome, Skip):
            if not outcome.exposed:
                take_back(self.line)
            self.host.world.log(self.host.name, f"skips the round: {outcome.reason}")
            self._next_round()
            return
        try:
            for closed in outcome:
                self._apply(closed)
        except Diverged:
            self._copy_again(self._next_round)
            return
        if again < OFFERED_AGAIN and self._offers_again(outcome):
            self._offered_again = again + 1
            self._contribute()
        else:
            self._next_round()

    def _offers_again(self, outcome: Sequence[Closed]) -> bool:
        """Whether a simulated peer offers progress once more, as `Peer.round` does when it leaves and under `async`."""
        line, policy = self.line, self.host.world.setup.rules.policy
        counts_us = any(entry.peer == self.host.name for closed in outcome for entry in closed.commit.counted)
        if not outcome or counts_us or not line.trained.tokens:
            return False
        if self.leaving:
            return self.host.machine.in_view
        at_once = policy.uses_slack and line.state.version >= policy.sync_versions
        return at_once and not self.cadence.overlap

    def _next_round(self) -> None:
        if self.leaving:
            self._settle(self.host.now + self.host.world.setup.timing.suspect_s)
        else:
            self._inner_steps()

    def _catch_up(self, then: Callable[[], None]) -> None:
        """Apply versions that closed without the simulated peer; copy the state when they are too many."""
        try:
            for closed in self.host.take_closed():
                self._apply(closed)
        except Diverged:
            self._copy_again(then)
            return
        if self.host.behind:
            self._copy_again(then)
        else:
            then()

    def _apply(self, closed: Closed) -> None:
        line, before = self.line, self.line.commit
        if before is not None and closed.commit.version <= before.version and closed.commit.fragment >= 0:
            return  # already in a state that was copied meanwhile
        offered = line.sent is not None  # else an entry of our name is that of an earlier life
        mine = step_outer(line, closed)
        assert self.journal is not None
        self.journal.committed(closed.commit, mine if offered else None)
        self.books.applied(closed, mine)
        self.host.world.invariants.on_state(self.host, line)
        self.host.hold(line.state, closed.commit)
        self._keep_lease(before, closed.commit)
        self._save()

    def _keep_lease(self, before: Commit | None, commit: Commit) -> None:
        """After a simulated time outside the view the lease is all new, and nothing of it is used."""
        name = self.host.name
        if name in commit.leases.held and (before is None or name not in before.leases.held):
            self.line.trained.blocks = 0

    def leave(self) -> None:
        """Let the simulated peer contribute once more if a version closes soon, then go."""
        self.leaving = True
        if not self.entered:
            self._goodbye()

    def leave_now(self) -> None:
        """Let the simulated peer go whatever is under way, as when nobody counted it within `leave_s`."""
        self.leaving = True
        self._goodbye()

    def _settle(self, deadline_s: float) -> None:
        """Wait in virtual time until the others have the latest version too, so that it does not die with this peer."""
        if self.host.machine.settled() or self.host.now >= deadline_s:
            self._goodbye()
        else:
            self.host.later(POLL_S, self._settle, deadline_s)

    def _goodbye(self) -> None:
        """Give the vote of the simulated peer away and go."""
        self.host.feed(m.LeaveWanted())
        if self.host.alive:
            self._drop("left")
            if self.journal is not None:
                self.journal.closed("left")
            self.host.die("left")

    # ------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        line = self.line
        trained = line.trained
        with weights_to_keep(line):
            local = {name: tensor.clone() for name, tensor in line.parameters.items()} if trained.tokens else {}
        pieces = self.books.pieces() if local else None
        if self.host in self.host.world.ghosts:
            return  # its disk is not the one that later lives have
        snapshot = SimulatedCheckpoint(line.state, line.commit, local, trained.tokens, trained.blocks, pieces)
        if not self.host.world.disks[self.host.name].save(snapshot):
            self.host.world.log(self.host.name, "no checkpoint: the disk is full")

    # ------------------------------------------------------------ copying the state

    def _copy_again(self, then: Callable[[], None]) -> None:
        """Copy the state to a simulated peer; when nobody gives it now, training goes on and the next round tries."""

        def failed() -> None:
            self.host.behind = True
            then()

        self._copy(self.host.sources(), then, failed)

    def _copy(self, sources: Sequence[Member], then: Callable[[], None], failed: Callable[[], None]) -> None:
        SimulatedStateCopy(self.host, sources, self.line.stands_at, partial(self._adopt, then), failed).start()

    def _adopt(self, then: Callable[[], None], state: OuterState, commit: Commit | None) -> None:
        line, sent, before = self.line, self.line.sent, self.line.commit
        mine, discarded = adopt_state(line, state, commit)
        assert self.journal is not None
        self.journal.adopted(mine, discarded)
        self.books.adopted(sent, mine, discarded, before)
        self.host.world.invariants.on_state(self.host, line)
        self.host.hold(state, commit, copied=True)
        then()
