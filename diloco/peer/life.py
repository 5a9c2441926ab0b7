"""One peer's life under agreement, top to bottom: enter, rounds, the end of the run or a goodbye. On rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.decisions import Evaluate, Train
from diloco.base.life import POLL_S, Life, Wait, answered
from diloco.base.types import Closed, Phase, Skip
from diloco.compress import PayloadError
from diloco.observe.events import RoundSkipped
from diloco.outer.line import Diverged
from diloco.peer.peer import Peer
from diloco.peer.schedule import OFFERED_AGAIN, Cadence, PeerStopwatch
from diloco.peer.waits import COUNTED_SHARE
from diloco.protocol import leases
from diloco.round import Seconds, run_round

MEETING_S = 0.5
"""Ranks meet at least so often, that a signal is heard."""


@dataclass(frozen=True)
class Ending:
    """The end of a peer's life."""

    reason: str
    """`done`: the run has its tokens; `left`: asked to leave."""
    version: int
    tokens: int
    state_digest: str
    chain_digest: str
    val_loss: float | None
    discarded_tokens: int
    spread: float | None = None
    """Under gossip: the largest that was left after the final average, as far as this peer saw."""


class RunOver(Exception):
    """Nothing more is to be contributed."""


class PeerLife:
    """The life of a peer where all agree on each version. Also what a round needs (`diloco.round.Rounds`)."""

    def __init__(self, peer: Peer, stop: Callable[[], bool]) -> None:
        """`stop`: whether this peer is asked to leave."""
        self.peer, self.line, self.contract, self.site = peer, peer.line, peer.contract, peer.site
        self._stop = stop
        self.steps = 0
        """Inner steps of this life."""
        self._round_steps = 0
        self._cadence = Cadence.of(self.contract)
        self._watch = PeerStopwatch()
        self._step_s = math.inf
        """Duration of the last inner step."""
        self._leave_by_s = math.inf
        """When the peer is to be gone."""
        self.sync_now = False
        """Whether somebody wants the rest of this round at once."""
        self._outcome: Future[Skip | None] | None = None
        """Outcome of the contribution on its way."""
        peer.asked_to_leave = lambda: self.leaving
        self._set_overlap()

    # ------------------------------------------------------------ what others ask

    @property
    def leaving(self) -> bool:
        """Whether the peer is asked to leave."""
        if self._leave_by_s == math.inf and self._stop():
            self.leave()
        return self._leave_by_s < math.inf

    def leave(self) -> None:
        """Leave, with what was trained, if a version closes soon."""
        self._leave_by_s = min(self._leave_by_s, monotonic_s() + self.site.timeouts.leave_s)

    def trained(self, tokens: int, blocks: int, seconds: float, loss: float | None) -> None:
        """An inner step was done, of so many tokens in so much time. Of its `blocks` of data as many count as it holds:
        an offer of more would be refused, each time."""
        self.steps += 1
        self._round_steps += 1
        self._step_s = seconds
        commit, line = self.peer.line.commit, self.peer.line
        held = leases.count(commit.leases.held.get(self.peer.name, ())) if commit is not None else 0
        self.peer.journal.trained(tokens, max(min(blocks, held - line.trained.blocks), 0))
        self._watch.step(self.contract.tokens_per_step, seconds)

    def ready(self, steps: int) -> Train:
        """The end of a meeting of the peer's ranks: its position, and how many inner steps are to be done."""
        line, commit = self.line, self.line.commit
        trainers = [member.peer for member in commit.view if not member.witness] if commit else []
        return Train(
            steps,
            version=line.state.version,
            tokens=commit.tokens if commit else 0,
            uncommitted=line.trained.tokens,
            trainers=line.trainers,
            peers=tuple(member.peer for member in commit.view) if commit else (),
            first=trainers[:1] == [self.peer.name],
            digest=line.state.digest,
            entered=self.peer.stands_in_view,
            done=self.peer.done,
            leaving=self.leaving,
        )

    def interrupted(self) -> None:
        """Somebody stopped waiting, and may train on beside what is on its way."""
        if self.peer.island.size == 1:
            self.peer.keep_local()

    # ------------------------------------------------------------ the life

    def open(self) -> Life[None]:
        """Listen, find the others, get the state."""
        yield from self.peer.open()

    def live(self) -> Life[None]:
        """The peer's life until the run is done, or it has contributed its last."""
        yield from self.enter()
        while not (self.peer.done or self.leaving):
            if self.peer.ending.finishing and not (yield from self.enter()):
                break  # without inner steps to do, rounds that are skipped at once would follow each other at once
            yield from self.round()
        if self.leaving and not self.peer.done and self.line.trained.tokens and self._patient(monotonic_s()):
            yield from self._guarded(run_round(self, 0, 0))

    def round(self) -> Life[Sequence[Closed] | Skip]:
        """One round of this peer, as long as speed and exchange ask for. Returns as `diloco.round.run_round`."""
        yield from self._size()
        steps = self._cadence.before(self.line.trained.tokens)
        outcome = yield from self._guarded(run_round(self, steps, self._cadence.overlap))
        outcome = yield from self._offer_until_counted(outcome)
        self.sync_now = False
        return outcome

    def enter(self) -> Life[bool]:
        """Wait until the view includes us. False: we are asked to leave."""
        return (yield from self.peer.enter(lambda: not self.leaving))

    def end(self) -> Life[Ending]:
        """Goodbye, and the held-out loss of the last anchor."""
        peer, done = self.peer, self.peer.done
        if not done:
            # What was not counted in time is discarded: a checkpoint of it would train its data twice.
            yield from peer.leave("left", self._leave_by_s)
            peer.stop()  # or it would ask to be taken in again, while we evaluate
        else:
            peer.report(phase=Phase.DONE)
        if self.line.commit is not None:
            yield from peer.do(Evaluate())
        if done:
            yield from peer.leave("done", monotonic_s() + self.site.timeouts.leave_s)
            peer.stop()
        commit, state = self.line.commit, self.line.state
        return Ending(
            reason="done" if done else "left",
            version=state.version,
            tokens=commit.tokens if commit else 0,
            state_digest=state.digest,
            chain_digest=commit.digest if commit else "",
            val_loss=peer.rank.val_loss,
            discarded_tokens=peer.journal.discarded_tokens,
        )

    def _offer_until_counted(self, outcome: Sequence[Closed] | Skip) -> Life[Sequence[Closed] | Skip]:
        """A peer that was not counted may offer again at once, for the next version (`_offers_again`)."""
        times = 0
        while not isinstance(outcome, Skip) and self._offers_again(outcome, times):
            times += 1
            again = yield from self._guarded(run_round(self, 0, 0))
            if isinstance(again, Skip):
                break
            outcome = [*outcome, *again]
        return outcome

    def _offers_again(self, outcome: Sequence[Closed], times: int) -> bool:
        """A peer that leaves does, for as long as it waits to be counted: no next round will take its progress.

        Under `async` so does, a few `times`, whoever offered after a version began; unless it has inner steps that hide
        the exchange (`sync.overlap`). Then it goes on with its next round and does not wait; and versions stay apart,
        and count many, which they would not if somebody waited for each.
        """
        membership, line = self.contract.membership, self.line
        counted = [entry for closed in outcome for entry in closed.commit.counted]
        counts_us = any((entry.peer, entry.boot) == (line.peer, line.boot) for entry in counted)
        if not outcome or counts_us or not line.trained.tokens or self.peer.done:
            return False
        if self.leaving:
            return self._patient(monotonic_s())
        at_once = membership.policy == "async" and line.state.version >= membership.sync_versions
        return at_once and not self.contract.sync.overlap and times < OFFERED_AGAIN

    def _guarded(self, round_: Life[Sequence[Closed] | Skip]) -> Life[Sequence[Closed] | Skip]:
        """The outcome of a round in a peer's life, whatever happens to it."""
        peer = self.peer
        self._round_steps, self._outcome = 0, None
        outcome: Sequence[Closed] | Skip
        try:
            outcome = yield from round_
        except RunOver:
            outcome = ()
        except Diverged as error:
            outcome = Skip(str(error))
            yield from peer.diverged(error)
        except PayloadError as error:
            outcome = Skip(f"the progress is not finite and is discarded: {error}")
            peer.drop(outcome.reason)
        if isinstance(outcome, Skip):
            peer.publish(RoundSkipped(self.line.state.version + 1, outcome.reason))
        peer.keep_local()
        peer.report(phase=Phase.TRAINING)
        return outcome

    # ------------------------------------------------------------ a round (`Rounds`)

    def train(self, steps: int) -> Life[None]:
        """So many inner steps, by whoever trains; fewer where others wait for us, or somebody wants the sync now."""
        end, cut = self.steps + steps, self.contract.membership.stragglers == "cut"
        while self.steps < end and not (self.peer.ending.finishing or self.leaving or self.sync_now):
            if cut and self._round_steps and (yield from answered(self.peer.exchange.awaited())):
                return  # most others wait (`membership.stragglers`)
            self.peer.keeper.look()
            yield self.ready(1 if cut else min(end - self.steps, self._until_meeting()))

    def _until_meeting(self) -> int:
        """Inner steps. A single rank meets nobody, and looks up after each."""
        return 1 if self.peer.island.size == 1 else max(int(MEETING_S / max(self._step_s, 1e-6)), 1)

    def offered(self, overlaps: bool, seconds: Seconds) -> Life[None]:
        """Offer the progress that was trained. Raises RunOver when there is no version to contribute to, or nothing."""
        peer, line = self.peer, self.line
        failpoints.hit("after-inner-steps")
        yield from peer.catch_up()
        if peer.done or (self.leaving and not line.trained.tokens and line.sent is None):
            raise RunOver
        if not overlaps:
            peer.report(phase=Phase.SYNCING)
        if line.sent is None:
            peer.limit_claim()
            yield from peer.do(line.measuring(overlaps), seconds=seconds)
        elif overlaps:
            peer.keep_local()
        assert line.sent is not None
        yield from peer.record(line.sent.contribution)
        self._outcome = peer.exchange.offer(line.sent.contribution, self.leaving)

    def exchanged(self) -> Life[Sequence[Closed] | Skip]:
        """Versions that closed, ours counted or not; or why none did. Out of patience the contribution is withdrawn."""
        assert self._outcome is not None
        self.peer.report(phase=Phase.SYNCING)
        since_s, withdrawn = monotonic_s(), False
        while not self._outcome.done():
            yield Wait(self._outcome, POLL_S)
            if not (withdrawn or self._outcome.done() or self._patient(since_s)):
                withdrawn = True
                self.peer.exchange.withdraw()
        skip = yield from answered(self._outcome)
        return self.peer.exchange.closed() if skip is None else skip

    def _patient(self, since_s: float) -> bool:
        """Whether this peer waits on, since then. One that leaves waits for no version outside the view: it would be
        the next but one that counts it."""
        counted_by_s = self._leave_by_s - (1.0 - COUNTED_SHARE) * self.site.timeouts.leave_s
        deadline_s = min(since_s + self.contract.membership.round_deadline_s, counted_by_s)
        return monotonic_s() < deadline_s and (self.peer.exchange.in_view or not self.leaving)

    def withdrawn(self) -> Life[None]:
        """Nobody holds the peer's contribution."""
        self.peer.withdraw()
        yield from ()

    def applied(self, closed: Closed, seconds: Seconds) -> Life[None]:
        """A version, applied by every rank."""
        yield from self.peer.apply(closed, seconds)

    # ------------------------------------------------------------ the size of a round

    def _size(self) -> Life[None]:
        """As many steps this time as our speed and the exchange ask for."""
        pace = self._watch.round()
        self.peer.report(pace=pace)
        if self.contract.rounds_vary:
            fastest, sync_s = yield from answered(self.peer.exchange.speeds())
            self._cadence = Cadence.fitted(self.contract, pace, fastest, sync_s)
            self._set_overlap()

    def _set_overlap(self) -> None:
        """The exchange has as long as the overlapped steps take, before anybody waits for it."""
        self.peer.exchange.overlap_tokens = self._cadence.overlap * self.contract.tokens_per_step
