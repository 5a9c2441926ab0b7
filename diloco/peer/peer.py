"""One peer as the world sees it: found or join, get the state, apply versions, leave. On rank 0 of its island.

Every method that waits is a piece of life (`diloco.base.life`). `diloco.peer.life` puts them in order.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Opening
from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.decisions import Adopt, Drop, KeepLocal, Meet, Rehash, Restore, SaveCheckpoint, Withdraw
from diloco.base.errors import EvictedError, Interrupted, StateError
from diloco.base.life import POLL_S, Life, Wait, answered
from diloco.base.types import Closed, Commit, Contribution, Counted, Member, Phase, Progress
from diloco.exchange.engine import Exchange
from diloco.exchange.log import forget_means
from diloco.exchange.service import ExchangeService
from diloco.exchange.votes import DiskVotes
from diloco.observe.event_log import Events
from diloco.observe.events import (
    CheckpointWritten,
    Departure,
    Event,
    LineageReplaced,
    Listening,
    Remark,
    StateCopied,
    StateCopying,
    ViewChanged,
    Warned,
)
from diloco.outer.line import Diverged, adoption, book, book_adoption, book_drop, expect
from diloco.peer.rank import PeerRank, now
from diloco.peer.restart import Restart
from diloco.peer.schedule import RunEnd
from diloco.peer.terms import check_alike, exchange_terms, forks_of, lanes_of, lineage_of
from diloco.peer.waits import Refusal, in_time, left, settled
from diloco.protocol.leases import ended_leases
from diloco.protocol.messages import Fork
from diloco.protocol.streams import Welcome
from diloco.round import Seconds
from diloco.storage.checkpoint import Checkpoint, oldest_kept
from diloco.storage.saving import CheckpointSchedule, book_restored, save_line
from diloco.transport.dht import Presence
from diloco.transport.endpoint import reachable
from diloco.transport.sockets import SocketBytes

if TYPE_CHECKING:
    from diloco.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)


class PeerRecord(Protocol):
    """Receiver of what happens to a peer (`diloco.run.run.RunChronicle`)."""

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None, seconds: Seconds) -> Event | None:
        """A version was applied, after `before`; it counts `mine`. Returns the event to publish, if any."""

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """The peer's line has a copied state now."""

    def numbers(self) -> dict[str, Any]:
        """Numbers of the peer's trainer for a checkpoint, on rank 0 alone: JSON."""


class Peer:
    """The outer side of one peer. All methods are for the training thread."""

    def __init__(
        self,
        name: str,
        rank: PeerRank,
        endpoint: Endpoint,
        events: Events,
        chronicle: PeerRecord,
        checkpoint: Checkpoint | None = None,
        data: str = "",
        directory: Path | None = None,
        restart: Restart | None = None,
    ) -> None:
        """`data`: fingerprint of the training data, when leases say who trains on which block of it. `directory`:
        where ledger, log and checkpoints go, if anywhere. `checkpoint`: to go on from; `restart`: and from the versions
        since, as far as the log has them."""
        self.rank, self.endpoint, self.events, self.chronicle = rank, endpoint, events, chronicle
        self.contract, self.site, self.island = rank.contract, rank.site, rank.island
        self.line, self.counter = rank.line, rank.counter
        self.directory = directory
        rank.lead(name, events, directory)
        self.do, self.publish = rank.do, rank.publish
        terms = exchange_terms(
            self.contract, self.site, self.line.layout, self.line.layout.digest, data, self.island.size
        )
        self.ending = RunEnd.of(self.contract, terms.rules.policy.max_peers)
        self._checkpoint, self._restart = checkpoint, restart
        restored = self._restored = restart.life(endpoint, self.warn) if restart is not None else None
        welcome = endpoint.welcome
        if restart is not None:  # the clock may have been set back
            self.line.boot = max(self.line.boot, restart.boot + 1)
        founds = welcome is None and restored is None
        me = Member(name, restored.life if restored is not None else self.line.boot, "")
        lineage = restored.head.lineage if restored is not None else lineage_of(me, self.contract.digest)
        lineage = welcome.lineage if welcome else lineage
        link, loop = endpoint.runtime.link, endpoint.runtime.loop
        self.forks: tuple[Fork, ...] = ()
        """Lineages that led to that of the line's commit."""
        forks = welcome.forks if welcome else ()
        log = rank.log(directory, self.warn)
        votes = DiskVotes(directory, self.warn, log.use) if log is not None and directory is not None else None
        self.exchange = Exchange(
            me, terms, link, lineage, founds, loop, self._on_reason, forks, log, votes, self.line.boot, restored
        )
        self.address = ""
        opening = Opening(
            peer=name, incarnation=me.incarnation, boot=self.line.boot, run=self.contract.run.name,
            contract_digest=self.contract.digest, lineage=lineage, founds=founds, resumed=checkpoint is not None,
        )  # fmt: skip
        self.journal = Journal(opening, self.line, directory, self.site.storage, self.warn)
        every = self.site.storage.checkpoint_every if directory is not None else 0
        self.keeper = CheckpointSchedule(every, self._saved, events.emit, self._begin_save)
        self.void_tokens = 0
        """Tokens of all peers, committed on lineages that we followed and that ended."""
        self.progress = Progress()
        self.asked_to_leave: Callable[[], bool] = lambda: False
        self._reported_s = self._copied_s = monotonic_s()
        """When it told last how much of a state it has copied, and when bytes of one came last."""
        self._presence: Presence | None = None

    # ------------------------------------------------------------ deciding

    def keep_local(self) -> None:
        """Inner steps follow in the peer's life, while a contribution may be on its way."""
        if self.line.sent is not None and self.line.sent.local is None:
            now(self.do(KeepLocal()))

    def withdraw(self) -> None:
        """The peer's contribution is progress again, unless a version counts it, be it one that was passed over."""
        sent = self.line.sent
        if sent is None or (sent.passed is None and self.exchange.untaken.passed is None):
            now(self.do(Withdraw()))

    def drop(self, reason: str) -> None:
        """Give up all progress of this peer."""
        now(self.do(Drop()))
        self.journal.discarded(book_drop(self.line), reason)

    def limit_claim(self) -> None:
        """Give up the credit for tokens that one contribution may not claim (`Bounds`). Their progress counts."""
        more = self.line.trained.tokens - self.exchange.terms.rules.bounds.max_tokens
        if more > 0:
            self.line.trained.tokens -= more
            self.journal.discarded(more, "more tokens than a contribution may claim: the progress stays")

    # ------------------------------------------------------------ entering

    @property
    def name(self) -> str:
        """This peer's name."""
        return self.line.peer

    @property
    def ticket(self) -> str:
        """The ticket that others give to `diloco peer --join`, to meet this peer."""
        return f"{self.address}/{self.contract.digest}"

    @property
    def done(self) -> bool:
        """Whether the run has all its tokens, as far as this peer has applied its versions."""
        return self.ending.done

    def open(self) -> Life[None]:
        """Listen, find the others, get the state. Afterwards `stands_in_view` tells when the view includes us.

        Raises ResourceError (port in use, no room for the ledger), StateError (nobody gives the state),
        IncompatibleError (other model).
        """
        if self._checkpoint is not None:
            yield from self.restore(self._checkpoint)
            if self._restart is not None:
                yield from self._restart.redo(self, self._checkpoint)
            self.journal.trained_tokens = self.line.trained.tokens
        network, welcome, restored = self.site.network, self.endpoint.welcome, self._restored
        founds, commit = self.exchange.machine.founder, self.line.commit
        if welcome is None:
            left = (Fork(commit.lineage, commit.tokens),) if founds and commit is not None else ()
            self.exchange.machine.comes_after((*self.forks, *left))
        else:
            check_alike(welcome, self.exchange.terms.layout_digest, self.exchange.terms.data)
        self.journal.opened(self.contract)  # before anybody hears of this life
        if self._restart is not None:
            self._restart.book(self.journal)
        served = self.endpoint.runtime.serve(ExchangeService(self.exchange), network.listen)
        toward = welcome.members[0].address if welcome else None
        self.address = network.advertise or reachable(served, toward)
        self.endpoint.open_directory(self.contract.run.name, self.warn)
        lanes = self._meet_ranks(toward) if self.island.size > 1 else ()
        self.exchange.start(self.address, self.endpoint.directory.addresses, lanes)
        if not founds:
            self.drop("the run may have counted it before the restart")
        if self._restart is not None and self._checkpoint is not None:  # who founds keeps the blocks of its progress
            self.chronicle.copied(self.line.commit, self._checkpoint.commit)
        ours = lineage = commit.lineage if commit is not None else ""
        members: Sequence[Member] = ()
        if welcome is not None:
            self._meet_members(welcome)
            members, lineage = welcome.members, welcome.lineage
        elif restored is not None and self._restart is not None:
            self.exchange.remember(self._restart.earlier)
            members, lineage = restored.head.view, restored.head.lineage  # the checkpoint may be of one before
        if lineage == ours or self.done:  # a run that has ended is resumed at its last state
            self.exchange.hold(self.line.state, self.line.commit, copied=True)
        else:
            refusal = Refusal(self.exchange, self.site)  # before all of the state has come over a slow link
            yield from self.copy_state([one.address for one in members if one.peer != self.name], refusal.check)
        accepted = self._restart.accepted(self.line.layout) if self._restart is not None else None
        if accepted is not None:
            self.exchange.hold_mean(accepted)
        self._presence = self.endpoint.appear(self.exchange)
        self.events.emit(Listening(self.address, self.ticket))

    def restore(self, checkpoint: Checkpoint) -> Life[None]:
        """Go on from a checkpoint."""
        yield from self.do(Restore(str(checkpoint.path.resolve()), checkpoint.digest), checkpoint)
        book_restored(self.line, checkpoint)
        self.forks = forks_of(checkpoint)
        if self.line.commit is not None:
            self.ending.on_commit(self.line.commit, copied=True)

    def found_again(self, before: Commit | None, commit: Commit) -> None:
        """A founding closed: it moves no anchor, and may be of another lineage."""
        if before is not None and before.lineage != commit.lineage:
            self.forks = (*self.forks, Fork(before.lineage, before.tokens))
        self.line.commit = commit

    def _meet_ranks(self, toward: str | None) -> tuple[str, ...]:
        """Have the other ranks of the island open their lanes. Returns the addresses where those listen."""
        island, key = self.island, secrets.token_bytes(32)
        listener = island.listen(key)
        about = (self.name, toward, str(self.directory or ""), self.endpoint.private)
        island.decide(Meet(island.host, listener.port, key.hex(), *about))
        self.exchange.assign(listener.wires(lanes_of(self.site, island) - 1, self.site.timeouts.collective_s))
        self.exchange.lane.hold(self.line.state)
        island.all(True)
        return tuple(address for address in island.gather("") if address)

    def wire(self) -> SocketBytes | None:
        """Bytes sent and received so far, by all ranks of the peer. None where they cannot be counted."""
        own, others = self.counter.sample(), self.exchange.lanes.wire_bytes
        return replace(own, sent=own.sent + others[0], received=own.received + others[1]) if own else None

    def _meet_members(self, welcome: Welcome) -> None:
        """Know the members of the run. Raises EvictedError where another live peer has this peer's name."""
        found = self.endpoint.directory.lookup()
        known = {member.peer: member for member in (*found.values(), *welcome.members)}
        if self.name in known and self.line.commit is None:
            # A former life of this peer does not answer any more, and at its own address it answers itself.
            address = known[self.name].address
            answer = self.endpoint.runtime.answer_of(address)
            there = answer.members[0] if answer is not None else None
            if there is not None and there.peer == self.name and there.incarnation != self.exchange.me.incarnation:
                cause = f"the run has a live peer named {self.name}, at {address}"
                raise EvictedError(cause, "choose another --name, or --resume its folder once it is gone")
            logger.warning("the run has, or had, a peer named %s", self.name)
        self.exchange.meet(welcome.members)
        self.exchange.seek(list(found.values()))

    def copy_state(self, sources: Sequence[str] = (), check: Callable[[], None] = lambda: None) -> Life[None]:
        """Copy anchor and outer state from these members, and from all that the exchange knows. Raises StateError,
        Interrupted once this peer is to leave, and what `check` raises meanwhile."""
        self.report(phase=Phase.JOINING)
        total_bytes = sum(buffer.nbytes for _, buffer in self.line.state.buffers())
        self.events.emit(StateCopying(0, total_bytes))
        copying = self.exchange.copy_state(sources, self.line.state, self.line.commit, self._on_copied)
        join_s = self.site.timeouts.join_s
        state, offer, forks = yield from in_time(copying, join_s, self.asked_to_leave, check, lambda: self._copied_s)
        line, before = self.line, self.line.commit
        if line.sent is not None:
            line.sent = replace(line.sent, passed=line.sent.passed or self.exchange.untaken.passed)
        taken = adoption(line, offer.commit, forks)
        steps = tuple(fragment.steps for fragment in state.fragments)
        yield from self.do(Adopt(state.version, steps, taken.stays), state)
        book_adoption(line, taken)
        self.forks = tuple(takewhile(lambda fork: offer.commit is None or fork.lineage != offer.commit.lineage, forks))
        self.journal.adopted(taken.mine, taken.discarded, self.forks)
        if taken.discarded:
            tokens = f"{taken.discarded:,} tokens sent before the copy"
            self.warn(f"{tokens} count as discarded: a version may have counted them")
        if offer.commit is not None and offer.commit != before:
            self.ending.on_commit(offer.commit, copied=True)
            if self.ending.late:
                self.warn(f"version {state.version} was copied in the run's final sync: its last one may be later")
        self.exchange.hold(state, offer.commit, copied=True)
        self.keeper.copied()
        self.chronicle.copied(offer.commit, before)
        wire = self.wire()
        self.publish(StateCopied(state.version, state.digest, wire.received if wire else None))

    def _on_copied(self, done_bytes: int, total_bytes: int) -> None:
        failpoints.hit("copying-state")
        now_s = self._copied_s = monotonic_s()
        if now_s - self._reported_s >= 1.0 or done_bytes == total_bytes:
            self._reported_s = now_s
            self.events.emit(StateCopying(done_bytes, total_bytes))

    def enter(self, patience: Callable[[], bool]) -> Life[bool]:
        """Wait until the view includes us: for the run to start, or for the next version. False: out of patience."""
        refusal = Refusal(self.exchange, self.site)
        while not (self.stands_in_view or self.done):
            if not patience():
                return False
            yield from self.catch_up()
            if not (self.stands_in_view or self.done):
                yield Wait(self.exchange.closes(), POLL_S)
            refusal.check()
        return True

    @property
    def stands_in_view(self) -> bool:
        """Whether the version that we have applied, and not only heard of, includes us: this life, and no earlier one
        of our name, which may still be kept there."""
        commit, life = self.line.commit, self.exchange.me.incarnation
        member = commit.member(self.name) if commit is not None else None
        return self.exchange.in_view and member is not None and member.incarnation == life

    # ------------------------------------------------------------ versions

    def record(self, contribution: Contribution) -> Life[None]:
        """Write the peer's contribution to disk before it is offered, where the site wants that."""
        if self.journal.records(contribution):
            self.journal.record(contribution, (yield from answered(self.exchange.whole(contribution))))

    def apply(self, closed: Closed, seconds: Seconds) -> Life[None]:
        """Apply a version, in every rank. Raises Diverged if it was made on another state, PayloadError if damaged."""
        line, commit, before = self.line, closed.commit, self.line.commit
        if before is not None and commit.version <= before.version and commit.fragment >= 0:
            return  # already in a state that was copied meanwhile
        failpoints.hit("before-outer")
        offered, mine = line.sent is not None, None  # else an entry of our name is that of an earlier life
        if commit.fragment < 0:  # a founding moves no anchor: what was sent stays what it is
            self.found_again(before, commit)
        else:
            mine = expect(line, commit)
            state_unused = False  # whether the outer step may be made in the buffers of the state before
            if mine is not None and not (self.exchange.terms.lane.ahead or self.keeper.busy):
                state_unused = yield from answered(self.exchange.state_unused())
            yield from self.do(line.applying(commit, mine is not None, state_unused), closed, seconds)
            book(line, commit, mine)
        self.journal.committed(commit, mine if offered else None)
        self.ending.on_commit(commit)
        self.exchange.hold(line.state, commit)
        if mine is not None and self.progress.first_counted_version < 0:
            self.report(first_counted_version=commit.version)
        self.report(version=commit.version, phase=Phase.TRAINING)
        yield from self._emit_view(before, commit)
        if self._data_went_back(before, commit) and not self.asked_to_leave():
            self.drop("the process before said goodbye, and the data of this progress went back to the others")
        event = self.chronicle.closed(commit, before, mine, seconds)
        seconds.clear()  # of what closes next
        if event is not None:
            self.publish(event)
            self.keeper.due(commit.version)

    def catch_up(self) -> Life[None]:
        """Apply versions that closed without us; copy the state when they are too many."""
        try:
            for closed in self.exchange.closed():
                yield from self.apply(closed, {})
        except Diverged as error:
            yield from self.diverged(error)
        if self.exchange.behind:
            if void := self.exchange.void_tokens - self.void_tokens:  # another lineage of the run went on
                self.void_tokens += void
                self.publish(LineageReplaced(self.exchange.machine.lineage, void))
            yield from self.copy_again("too far behind to catch up by commits")

    def diverged(self, error: Diverged) -> Life[None]:
        """Handle a version made on another state than this peer's."""
        if error.uncounted:
            self.withdraw()
        self.exchange.behind = True
        yield from self.copy_again(str(error))

    def copy_again(self, why: str) -> Life[None]:
        """Copy the state from the other members. When nobody gives it now, training goes on; the next round tries."""
        self.events.emit(Remark(f"{why}: copying the state"))
        yield from self.do(Rehash())  # a part that changed in memory is not one that is here already
        self.exchange.lane.hold(self.line.state)  # as the other ranks do: all call it by one number
        try:
            yield from self.copy_state()
        except (Interrupted, StateError) as error:
            self.events.emit(Warned(error.cause))

    def _data_went_back(self, before: Commit | None, after: Commit) -> bool:
        """Whether others may train on the data of our progress, as they take us for one that has left. Who is only lost
        keeps it: its data is nobody's."""
        if before is None or self.name in after.leases.held or not self.line.trained.tokens:
            return False
        return ended_leases(before, after).get(self.name, False)

    def _emit_view(self, before: Commit | None, after: Commit) -> Life[None]:
        old = {member.peer for member in before.view} if before else set()
        new = {member.peer for member in after.view}
        if old != new:
            goodbyes = (yield from answered(self.exchange.said_goodbye())) if old - new else set()
            reasons = _reasons(old - new, goodbyes, before, after)
            left = tuple(Departure(peer, reasons[peer]) for peer in sorted(reasons))
            self.publish(ViewChanged(after.version, tuple(sorted(new - old)), left))

    def report(self, **changes: str | int | float) -> None:
        """Change the progress that heartbeats carry. Other peers refuse a loss that is not finite: it is left out."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, **finite)  # type: ignore[arg-type]
        self.exchange.report(self.progress)

    def warn(self, text: str) -> None:
        """Say this to whoever watches the peer."""
        self.events.emit(Warned(text))

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit(Remark(reason, routine))

    # ------------------------------------------------------------ leaving

    def leave(self, reason: str, by_s: float) -> Life[None]:
        """Leave in good order: a commit leaves us out, our unused data goes back, our progress is discarded.

        We are gone at `by_s`, also where no commit left us out. What closed until then is applied before; but where the
        run is done we stay at the version that ended it.
        """
        self.report(phase=Phase.DONE if self.done else Phase.LEAVING)
        yield from settled(self.exchange, self.site, by_s)
        if not self.done:
            try:
                for closed in self.exchange.closed():
                    yield from self.apply(closed, {})
            except Diverged as error:  # only a copy would mend the state: it stays as it is
                if error.uncounted:
                    self.withdraw()
                self.warn(f"{error}; leaving with the one before")
        yield from left(self.exchange, self.site, by_s)
        sent = self.line.sent  # offered, and no version that we know was made with it or without it
        why = f"{reason}; a version may count {sent.contribution.tokens} of them" if sent is not None else reason
        self.drop(why)
        self.journal.closed(reason)
        if self._presence is not None:
            self._presence.end()

    def stop(self) -> None:
        """End the peer's exchange, goodbye or not. Twice is no error."""
        if self._presence is not None:
            self._presence.stop()
        self.exchange.stop()

    def close(self) -> None:
        """Free everything of this peer. The endpoint is the caller's."""
        self.stop()
        self.rank.close()
        self.journal.close()

    # ------------------------------------------------------------ checkpoints

    def _saved(self, event: CheckpointWritten) -> None:
        if self.directory is not None and self.site.storage.log:
            with suppress(OSError):
                oldest = oldest_kept(self.rank.folder, event.version, self.site.storage.keep)
                forget_means(self.directory, oldest)
                self.exchange.votes.forget(oldest)
        self.publish(event)

    def _begin_save(self) -> Any:
        groups, about = save_line(self.line, self.contract)
        about["forks"] = [[fork.lineage, fork.tokens] for fork in self.forks]
        self.island.decide(SaveCheckpoint("local" in groups))
        return self.rank.save((groups, {**about, **self.chronicle.numbers()}), self.site.storage.keep)


def _reasons(
    gone: AbstractSet[str], goodbyes: AbstractSet[str], before: Commit | None, after: Commit
) -> dict[str, str]:
    """Why peers left the view: `left` or `lost`. One that leaves with its last contribution says goodbye when that is
    counted, which is too late for this peer to hear; but the commit hands its data back. Others said goodbye before."""
    if after.drafter:  # it leaves out who wants to go, and nobody else
        return dict.fromkeys(gone, "left")
    in_good_order = dict.fromkeys(goodbyes, True)
    if before is not None:
        in_good_order |= ended_leases(before, after)
    return {peer: "left" if in_good_order.get(peer) else "lost" for peer in gone}
