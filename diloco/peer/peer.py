"""One peer's life as the world sees it: found or join, get the state, close versions, leave.

    gate = Gate(site)                       # thread, link, directory process
    contract = gate.knock(address)          # a joiner only: who is there, and what do they train
    peer = Peer(name, contract, site, Weights.of(model), gate, events)
    peer.enter(patience)                    # state is here, and the view includes us
    peer.round(inner_steps, ...)            # as often as wanted: see diloco/round.py
    peer.leave(reason, on_closed)

`diloco.run.trainer` puts our inner loop around it, `diloco.run.library` somebody else's.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Opening
from diloco.base import failpoints
from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.errors import EvictedError, StateError
from diloco.base.types import Closed, Commit, Counted, Member, Phase, Progress, Skip
from diloco.compress import PayloadError
from diloco.compress.encoding import Encoder
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.engine import Exchange, Terms
from diloco.exchange.lanes import RankListener
from diloco.island import Island
from diloco.kernels.build import compiled_codecs
from diloco.observe.event_log import Events
from diloco.observe.events import (
    Departure,
    LineageReplaced,
    Listening,
    Remark,
    RoundSkipped,
    StateCopied,
    StateCopying,
    ViewChanged,
    Warned,
)
from diloco.outer.fragments import Weights
from diloco.outer.line import Diverged, keep_local
from diloco.outer.resync import adopt_state, drop_progress
from diloco.outer.state import OuterState
from diloco.peer.schedule import OFFERED_AGAIN, Cadence, Finish
from diloco.peer.terms import check_alike, lane_terms, lanes_of, open_line, rules_of, serve_bps_of, timing_of
from diloco.protocol.leases import handed_back
from diloco.protocol.messages import Reply
from diloco.protocol.streams import StateOffer, Welcome
from diloco.round import begin_round, finish_round, run_round, step_outer
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.line_state import restore_line, save_line
from diloco.storage.saving import Contents
from diloco.transport.presence import Presence
from diloco.transport.runtime import reachable
from diloco.transport.sockets import SocketBytes, SocketCounter

if TYPE_CHECKING:
    from diloco.transport.gate import Gate

logger = logging.getLogger(__name__)


class RunOver(Exception):
    """Nothing more is to be contributed."""


class Peer:
    """The outer side of one peer. All methods are for the training thread."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        site: Site,
        weights: Weights,
        gate: Gate,
        events: Events,
        checkpoint: Checkpoint | None = None,
        data: str = "",
        directory: Path | None = None,
        island: Island | None = None,
    ) -> None:
        """`data`: fingerprint of the training data, when leases say who trains on which block of it. `directory`:
        where the ledger goes, if anywhere. `island`: whose ranks divide the outer state; None: this process is all."""
        self.contract, self.site, self.gate, self.events = contract, site, gate, events
        self.island = island
        self.counter = SocketCounter()
        self._encoder = Encoder()
        compiled_codecs(site.device.compile_codecs)
        self.line = open_line(name, contract, weights, self._encoder, island, lanes_of(site, island))
        terms = self._terms(data)
        self.ending = Finish.of(contract, terms.rules.policy.max_peers)
        if checkpoint is not None:
            commit = restore_line(self.line, checkpoint)
            if commit is not None:
                self.ending.passed(commit, copied=True)
        welcome = gate.welcome
        lineage = welcome.lineage if welcome else secrets.token_hex(8)
        me = Member(name, new_incarnation(), "")
        link, loop = gate.runtime.link, gate.runtime.loop
        forks = welcome.forks if welcome else ()
        self.exchange = Exchange(me, terms, link, lineage, welcome is None, loop, self._on_reason, forks)
        self.line.spare = self._spare
        self.hide(Cadence.of(contract))
        self.address = ""
        opening = Opening(
            peer=name,
            incarnation=me.incarnation,
            run=contract.run.name,
            contract_digest=contract.digest,
            lineage=lineage,
            founds=welcome is None,
            resumed=checkpoint is not None,
        )
        self.journal = Journal(opening, self.line, directory, site.storage, self._warn)
        self._outgoing = self.journal.outgoing(self.exchange, self.exchange.whole)
        self.void_tokens = 0
        """Tokens of all peers, committed on lineages that we followed and that ended."""
        self.progress = Progress()
        self._told_s = monotonic_s()
        self._presence: Presence | None = None
        self.idle: Callable[[], bool] = lambda: True
        """Asked now and then whether we still want a state; the other ranks of an island are not to give us up."""
        self.copied: Callable[[], None] = lambda: None
        """Told that the line stands at a state that was copied, before anything is made of it."""
        self.saving: Callable[[], bool] = lambda: False
        """Whether a checkpoint is being written: of the outer state itself."""

    # ------------------------------------------------------------ entering

    @property
    def name(self) -> str:
        return self.line.peer

    @property
    def ticket(self) -> str:
        """What others give to `diloco peer --join`."""
        return f"{self.address}/{self.contract.digest[:12]}"

    @property
    def done(self) -> bool:
        """Whether the run has all its tokens."""
        return self.ending.done

    def open(self) -> None:
        """Listen, find the others, get the state. Afterwards `enter` waits for the view to include us.

        Raises ResourceError (port in use), StateError (nobody gives the state), IncompatibleError (other model).
        """
        network = self.site.network
        welcome = self.gate.welcome
        if welcome is not None:
            check_alike(welcome, self.exchange.terms.layout_digest, self.exchange.terms.data)
        served = self.gate.runtime.serve(self.exchange, network.listen)
        self.address = network.advertise or reachable(served, welcome.members[0].address if welcome else None)
        self.gate.open_directory(self.contract.run.name, self._warn)
        self.exchange.start(self.address, self.gate.directory.addresses, self._meet_ranks(welcome))
        self.journal.opened(self.contract)
        if welcome is not None:
            self.journal.discarded(drop_progress(self.line), "the run may have counted it before the restart")
            self._meet_members(welcome)
            self._get_state(welcome)
        self.exchange.hold(self.line.state, self.line.commit, copied=True)
        self._presence = Presence(self.gate.directory, self.exchange, self.gate.runtime.answer_of)
        self.events.emit(Listening(self.address, self.ticket))

    def _meet_ranks(self, welcome: Welcome | None) -> tuple[str, ...]:
        """Have the other ranks open their lanes. Returns where those listen."""
        island = self.island
        if island is None or island.size == 1:
            return ()
        key = secrets.token_bytes(32)
        listener = RankListener(island.host, key)
        toward = welcome.members[0].address if welcome else None
        island.announce("meet", host=island.host, port=listener.port, key=key.hex(), name=self.name, toward=toward)
        others = listener.accept_ranks(lanes_of(self.site, island) - 1, self.site.timeouts.collective_s)
        self.exchange.assign(others)
        self.exchange.lane.hold(self.line.state)
        island.all(True)
        return tuple(address for address in island.gather("") if address)

    def wire(self) -> SocketBytes | None:
        """Bytes sent and received so far, by all ranks of the island. None where nobody can tell."""
        own, others = self.counter.sample(), self.exchange.elsewhere_bytes()
        return replace(own, sent=own.sent + others[0], received=own.received + others[1]) if own else None

    def _meet_members(self, welcome: Welcome) -> None:
        found = self.gate.directory.lookup()
        known = {member.peer: member for member in (*found.values(), *welcome.members)}
        if self.name in known and self.line.commit is None:
            self._check_namesake(known[self.name].address)
        self.exchange.meet([member for name, member in known.items() if name != self.name])

    def _check_namesake(self, address: str) -> None:
        """Raises EvictedError where another peer of our name answers now. It may be a former life of ours, which does
        not; at our own address, we answer."""
        answer = self.gate.runtime.answer_of(address)
        there = answer.members[0] if answer is not None else None
        if there is not None and there.peer == self.name and there.incarnation != self.exchange.machine.me.incarnation:
            cause = f"the run has a live peer named {self.name}, at {address}"
            raise EvictedError(cause, "choose another --name, or --resume its folder once it is gone")
        logger.warning("the run has, or had, a peer named %s", self.name)

    def _get_state(self, welcome: Welcome) -> None:
        """From a checkpoint, if the run still goes on from there; else copied from the members."""
        if self.line.commit is not None and self.line.commit.lineage == welcome.lineage:
            return
        self.copy_state([member.address for member in welcome.members])

    def copy_state(self, sources: Sequence[str]) -> None:
        """Copy anchor and outer state from these members. Raises StateError."""
        self.report(phase=Phase.JOINING)
        total_bytes = sum(buffer.nbytes for _, buffer in self.line.state.buffers())
        self.events.emit(StateCopying(0, total_bytes))
        timeout_s = self.site.timeouts.join_s
        try:
            state, offer = self.exchange.copy_state(
                sources, self.line.state, self.line.stands_at, timeout_s, self._on_copied, self.idle
            )
        except TimeoutError as error:
            raise StateError(f"the state was not here within {timeout_s:g} s", "raise timeouts.join_s") from error
        self._adopt(state, offer)

    def _adopt(self, state: OuterState, offer: StateOffer) -> None:
        before = self.line.commit
        mine, discarded = adopt_state(self.line, state, offer.commit)
        self.journal.adopted(mine, discarded)
        if discarded:
            self._warn(f"{discarded:,} tokens sent before the copy count as discarded: a version may have counted them")
        if offer.commit is not None and offer.commit != before:
            self.ending.passed(offer.commit, copied=True)
        self.exchange.hold(state, offer.commit, copied=True)
        self.copied()
        wire = self.wire()
        received = wire.received if wire else None
        self.events.emit(StateCopied(state.version, state.digest, received))

    def _on_copied(self, done_bytes: int, total_bytes: int) -> None:
        failpoints.hit("copying-state")
        now = monotonic_s()
        if now - self._told_s >= 1.0 or done_bytes == total_bytes:
            self._told_s = now
            self.events.emit(StateCopying(done_bytes, total_bytes))

    def enter(self, patience: Callable[[], bool], on_closed: OnClosed) -> bool:
        """Wait until the view includes us: for the run to start, or for the next version. False: out of patience."""
        refused_s = monotonic_s()
        while not (self._stands_in_view() or self.done):
            if not patience():
                return False
            self.catch_up(on_closed, timeout_s=0.2)
            if self.exchange.refused is not Reply.FENCED:
                refused_s = monotonic_s()
            elif monotonic_s() - refused_s > 3 * self.site.timeouts.suspect_s:
                raise EvictedError(f"the run has a live peer named {self.name}", "choose another peer.name")
        return True

    def _stands_in_view(self) -> bool:
        """Whether the version that we have applied, and not only heard of, includes us."""
        commit = self.line.commit
        return self.exchange.in_view and commit is not None and commit.member(self.name) is not None

    # ------------------------------------------------------------ rounds

    def round(
        self,
        inner_steps: Callable[[], None],
        on_closed: OnClosed,
        patience: Callable[[], bool],
        leaving: Callable[[], bool] = lambda: False,
        overlapped_steps: Callable[[], None] = lambda: None,
    ) -> Sequence[Closed] | Skip:
        """One round of the straight line (`diloco.round.run_round`), with what keeps it going."""

        def first_steps() -> None:
            inner_steps()
            self._ready(on_closed)
            if not self._hides:
                self.report(phase=Phase.SYNCING)

        def last_steps() -> None:
            overlapped_steps()
            self.report(phase=Phase.SYNCING)

        def rounds(seconds: dict[str, float]) -> Sequence[Closed] | Skip:
            apply = partial(self._apply, on_closed=on_closed)
            last = last_steps if self._hides else None
            return run_round(self.line, first_steps, self._outgoing, apply, patience, leaving, seconds, last)

        return self._counted(self._surviving(rounds), on_closed, patience, leaving)

    def hide(self, cadence: Cadence) -> None:
        """The exchange has as long as these overlapped steps take, before anybody waits for it."""
        self.exchange.overlap_tokens = cadence.overlap * self.contract.tokens_per_step

    def begin(self, on_closed: OnClosed, leaving: bool = False) -> Skip | None:
        """The first half of a round, for a loop that is not ours: what was trained so far goes out. None: it does."""

        def offer(seconds: dict[str, float]) -> Sequence[Closed]:
            self._ready(on_closed)
            begin_round(self.line, self._outgoing, leaving, seconds)
            return ()

        outcome = self._surviving(offer)
        if self.done:
            return Skip("the run is over")
        return outcome if isinstance(outcome, Skip) else None

    def finish(self, on_closed: OnClosed, patience: Callable[[], bool]) -> Sequence[Closed] | Skip:
        """The second half: wait for what comes of it, and move to the new anchor."""
        self.report(phase=Phase.SYNCING)
        apply = partial(self._apply, on_closed=on_closed)
        outcome = self._surviving(lambda seconds: finish_round(self.line, self._outgoing, apply, patience, seconds))
        return self._counted(outcome, on_closed, patience)

    def _counted(
        self,
        outcome: Sequence[Closed] | Skip,
        on_closed: OnClosed,
        patience: Callable[[], bool],
        leaving: Callable[[], bool] = lambda: False,
    ) -> Sequence[Closed] | Skip:
        """Who was not counted may offer again at once, for the next version (`_offers_again`)."""
        apply = partial(self._apply, on_closed=on_closed)
        times = 0
        while not isinstance(outcome, Skip) and self._offers_again(outcome, times, patience, leaving):
            times += 1
            self.report(phase=Phase.SYNCING)
            again = self._surviving(
                lambda seconds: run_round(self.line, lambda: None, self._outgoing, apply, patience, leaving, seconds)
            )
            if isinstance(again, Skip):
                break
            outcome = [*outcome, *again]
        return outcome

    @property
    def _hides(self) -> bool:
        return self.contract.sync.overlap > 0

    def _offers_again(
        self, outcome: Sequence[Closed], times: int, patience: Callable[[], bool], leaving: Callable[[], bool]
    ) -> bool:
        """Who leaves does, for as long as it waits to be counted: no next round will take its progress.

        Under `async` so does, a few `times`, whoever offered after a version began; unless it has inner steps that hide
        the exchange (`sync.overlap`). Then it goes on with its next round and does not wait; and versions stay apart,
        and count many, which they would not if somebody waited for each.
        """
        membership, line = self.contract.membership, self.line
        counts_us = any(counted.peer == self.name for closed in outcome for counted in closed.commit.counted)
        if not outcome or counts_us or not line.trained.tokens or self.done:
            return False
        if leaving():
            return self.exchange.in_view and patience()
        at_once = membership.policy == "async" and line.state.version >= membership.sync_versions
        return at_once and not self._hides and times < OFFERED_AGAIN

    def _spare(self) -> bool:
        """Whether the next outer step may be made in the buffers of the state that we stand at."""
        in_place = not self.exchange.terms.lane.ahead
        return in_place and not self.saving() and self.exchange.spare()

    def _ready(self, on_closed: OnClosed) -> None:
        """Raises RunOver when the last version closed meanwhile: there is none to contribute to."""
        failpoints.hit("after-inner-steps")
        self.catch_up(on_closed)
        if self.done:
            raise RunOver

    def _surviving(self, work: Callable[[dict[str, float]], Sequence[Closed] | Skip]) -> Sequence[Closed] | Skip:
        """The outcome of a round, or of half of one, whatever happens to it."""
        try:
            outcome = work({})
        except RunOver:
            outcome = ()
        except Diverged as error:
            outcome = Skip(str(error))
            self._copy_again(str(error))
        except PayloadError as error:
            outcome = Skip(f"the progress is not finite and is discarded: {error}")
            self.journal.discarded(drop_progress(self.line), outcome.reason)
        except KeyboardInterrupt:  # who goes on all the same trains beside what is on its way
            keep_local(self.line)
            raise
        if isinstance(outcome, Skip):
            self.events.emit(RoundSkipped(self.line.state.version + 1, outcome.reason))
        keep_local(self.line)
        self.report(phase=Phase.TRAINING)
        return outcome

    def catch_up(self, on_closed: OnClosed, timeout_s: float = 0.0) -> None:
        """Apply versions that closed without us; copy the state when they are too many."""
        try:
            for closed in self.exchange.closed(timeout_s):
                self._apply(closed, {}, on_closed=on_closed)
        except Diverged as error:
            self._copy_again(str(error))
        if self.exchange.behind:
            self._tell_void_tokens()
            self._copy_again("too far behind to catch up by commits")

    def _tell_void_tokens(self) -> None:
        """Another lineage of the run went on, and ours is void since the two parted."""
        void = self.exchange.void_tokens - self.void_tokens
        if void:
            self.void_tokens += void
            self.events.emit(LineageReplaced(self.exchange.machine.lineage, void))

    def _copy_again(self, why: str) -> None:
        """Copy the state from the other members. When nobody gives it now, training goes on; the next round tries."""
        self.events.emit(Remark(f"{why}: copying the state"))
        try:
            self.copy_state(self.exchange.sources())
        except StateError as error:
            self.exchange.behind = True
            self.events.emit(Warned(error.cause))

    def _apply(self, closed: Closed, seconds: dict[str, float], on_closed: OnClosed) -> None:
        before = self.line.commit
        if before is not None and closed.commit.version <= before.version and closed.commit.fragment >= 0:
            return  # already in a state that was copied meanwhile
        failpoints.hit("before-outer")
        offered = self.line.sent is not None  # else an entry of our name is that of an earlier life
        mine = step_outer(self.line, closed, seconds)
        self.journal.committed(closed.commit, mine if offered else None)
        self.ending.passed(closed.commit)
        self.exchange.hold(self.line.state, closed.commit)
        if mine is not None and self.progress.first_counted_version < 0:
            self.report(first_counted_version=closed.commit.version)
        self.report(version=closed.commit.version, phase=Phase.TRAINING)
        self._emit_view(before, closed.commit)
        on_closed(closed.commit, before, mine, seconds)

    def _emit_view(self, before: Commit | None, after: Commit) -> None:
        old = {member.peer for member in before.view} if before else set()
        new = {member.peer for member in after.view}
        if old != new:
            reasons = self._reasons(old - new, before, after)
            left = tuple(Departure(peer, reasons[peer]) for peer in sorted(reasons))
            self.events.emit(ViewChanged(after.version, tuple(sorted(new - old)), left))

    def _reasons(self, gone: AbstractSet[str], before: Commit | None, after: Commit) -> dict[str, str]:
        """Who left and who was lost. Whoever leaves with its last contribution says goodbye when that is counted, which
        is too late to be heard here; but the commit hands its data back. Of those without any, a goodbye tells."""
        used = {counted.peer: counted.blocks for counted in after.counted}
        in_good_order = dict.fromkeys(self.exchange.said_goodbye(), True)
        if before is not None:
            in_good_order |= handed_back(before.leases, used, after.leases)
        return {peer: "left" if in_good_order.get(peer) else "lost" for peer in gone}

    def report(self, **changes: str | int | float) -> None:
        """Change what the heartbeats say of us. A loss that is not finite is left out: others refuse such a message."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, **finite)  # type: ignore[arg-type]
        self.exchange.report(self.progress)

    def _warn(self, text: str) -> None:
        self.events.emit(Warned(text))

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit(Remark(reason, routine))

    # ------------------------------------------------------------ leaving

    def leave(self, reason: str, on_closed: OnClosed) -> None:
        """Say goodbye: our vote goes to another member, our unused data goes back, our progress is discarded.

        What closed until then is applied before; but where the run is done we stay at the version that ended it.
        """
        self.report(phase=Phase.DONE if self.done else Phase.LEAVING)
        self.exchange.settle(self.site.timeouts.suspect_s)
        if not self.done:
            self._apply_last(on_closed)
        self.exchange.leave(self.site.timeouts.rpc_s + 1.0)
        sent = self.line.sent  # offered, and no version that we know was made with it or without it
        why = f"{reason}; a version may count {sent.contribution.tokens} of them" if sent is not None else reason
        self.journal.discarded(drop_progress(self.line), why)
        self.journal.closed(reason)
        if self._presence is not None:
            self._presence.end()

    def _apply_last(self, on_closed: OnClosed) -> None:
        """What closed since the last round. A state that only a copy would mend stays as it is."""
        try:
            for closed in self.exchange.closed():
                self._apply(closed, {}, on_closed=on_closed)
        except Diverged as error:
            self._warn(f"{error}; leaving with the one before")

    def close(self) -> None:
        """End the exchange, goodbye or not. The gate is the caller's."""
        if self._presence is not None:
            self._presence.stop()
        self.exchange.stop()
        self._encoder.close()
        self.journal.close()

    # ------------------------------------------------------------ checkpoints

    def to_save(self) -> Contents:
        """What a checkpoint holds of us, beside the inner side."""
        return save_line(self.line, self.contract)

    def _terms(self, data: str) -> Terms:
        contract, layout = self.contract, self.line.layout
        return Terms(
            contract_json=contract.to_json().encode(),
            rules=rules_of(contract, tuple(fragment.parts for fragment in layout.fragments)),
            timing=timing_of(self.site),
            lane=lane_terms(contract, self.site, layout, self.island.size if self.island is not None else 1),
            layout_digest=layout.digest,
            total_tokens=contract.run.total_tokens,
            data=data,
            serve_bps=serve_bps_of(self.site),
        )


OnClosed = Callable[[Commit, Commit | None, Counted | None, dict[str, float]], None]
"""Told of every version: its commit, the one before, our entry in it, and the seconds of each step."""
