"""A run, as whoever trains holds it: one per rank, with the same calls on all ranks of an island; and its record.

`Run` is what a training loop calls. `RunChronicle`, on rank 0 alone, makes the events of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Fail, Idle, Train
from diloco.base.errors import UsageError
from diloco.base.life import Life
from diloco.base.types import Commit, Counted
from diloco.config.contract import Contract
from diloco.gossip.peer import GossipLife, GossipPeer
from diloco.observe.events import (
    FLIGHT,
    Ended,
    Event,
    HardwareUsed,
    Started,
    SwapApplied,
    TrainingProgress,
    VersionClosed,
)
from diloco.outer.line import weights_at_anchor
from diloco.outer.robust import MIN_CONTRIBUTIONS
from diloco.peer.life import Ending, PeerLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank
from diloco.protocol.leases import front
from diloco.round import Seconds
from diloco.run.blocking import block

if TYPE_CHECKING:
    from diloco.data.reader import BlockReader

IDLE_SHARE = 0.1
"""Share of the time for which ranks wait for each other, after which rank 0 lets them know that it still waits."""


class Run:
    """This process's part in a run. Made by `found` or `join`; use it as a context manager.

    All ranks of an island make the same calls in the same order. What a caller may ask (`version`, `tokens`, `peers`,
    `digest`, `done`) changes only inside `wait`, `step`, `sync` and `leave`, on all ranks alike.

    Each of those blocks. `waiting`, `stepping` and `leaves` are the same as pieces of life, for whoever has another way
    to wait: a clock that jumps.
    """

    def __init__(self, rank: PeerRank, name: str, directory: Path | None, steps: int, leading: Leading | None) -> None:
        """Made by `diloco.run.door`. `steps`: of the lives before."""
        self.contract: Contract = rank.contract
        self.name, self.directory = name, directory
        self.address = ""
        """Address that others give to `diloco.join` or `diloco peer --join`; on all ranks."""
        self.steps = steps
        """Inner steps over all lives of this peer."""
        self.ending: Ending | None = None
        """End of the peer's life, on rank 0."""
        self._rank, self._leading = rank, leading
        self._seen = Train(0)
        self._broken = ""
        """Kind of the error that ended this peer's life, if one did."""
        self._meet_at = self._since = 0
        self._parting = self._closed = self._begun = False
        self._stepped_s = monotonic_s()
        self._aside_s = 0.0
        """Seconds since the last step that are none of the next: spent in `anchor`."""
        self._life: Life[None] | None = None
        rank.subscribers.append(self._on_event)

    # ------------------------------------------------------------ what a caller may ask

    @property
    def version(self) -> int:
        """Versions of the anchor agreed so far; under gossip, swaps of this peer."""
        return self._seen.version

    @property
    def tokens(self) -> int:
        """Tokens committed by all peers since the run began; under gossip, trained, as far as this peer knows."""
        return self._seen.tokens

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the peers in the run now; under gossip, as far as this peer knows."""
        return self._seen.peers

    @property
    def digest(self) -> str:
        """Digest of anchor and outer state: equal on all peers at this version, but under gossip each has its own."""
        return self._seen.digest

    @property
    def done(self) -> bool:
        """Whether the run has all its tokens."""
        return self._seen.done

    @property
    def leaving(self) -> bool:
        """Whether this peer was asked to leave, by a signal: nothing more is to be trained."""
        return self._seen.leaving

    @property
    def spread(self) -> float | None:
        """Under gossip: distance of this peer and the other of its latest swap, before it
        (`diloco.gossip.pairing.spread`)."""
        return self._seen.spread

    @property
    def comes_first(self) -> bool:
        """Whether this peer is the first of those that train: for what one should do, and it hardly matters who. The
        same on all ranks; False until the peer trains."""
        return self._seen.first

    def position(self, tokens: int) -> int:
        """Tokens of the whole run after a step of so many here, if all trainers go at this pace: for a schedule."""
        here = self._seen.uncommitted + self._since + tokens
        return self._seen.tokens + here * self._seen.trainers

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call `subscriber` with every event of the run, on all ranks: that of a version inside `step`, after its state
        is there and before the next."""
        self._rank.subscribers.append(subscriber)

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Context in which the model holds the agreed weights: to evaluate, or to save them. All ranks together."""
        began_s = monotonic_s()
        with weights_at_anchor(self._rank.line):
            yield
        self._aside_s += monotonic_s() - began_s

    # ------------------------------------------------------------ taking part

    def wait(self, timeout_s: float = 3600.0) -> bool:
        """Wait until this peer is in the view: until `membership.start_peers` are there, or the next version closes.

        Returns False after `timeout_s`. `step` waits by itself; call this to look at the data only then.
        """
        return block(self.waiting(timeout_s))

    def waiting(self, timeout_s: float = 3600.0) -> Life[bool]:
        """`wait` as a piece of the peer's life."""
        if not self._begun:
            yield from self._meet(monotonic_s() + timeout_s)
            self._begun = self._seen.steps > 0 or self.done or self.leaving
            if self._begun:
                self._rank.trains.usage.begin()
        self._stepped_s = monotonic_s()
        return self._begun

    def step(self, tokens: SupportsIndex, *, loss: float | None = None, blocks: int = 0) -> Sequence[Event]:
        """Call it last after every inner step, with the tokens trained in it by the whole island.

        Every H-th call (H / P with fragments) syncs, and the model's weights have moved to the new anchor; with
        `sync.overlap` the contribution leaves that many calls earlier, without waiting. Returns the events that this
        call has caused: `VersionClosed`, or `RoundSkipped` with the reason (nothing is lost then: the progress counts
        next time), `SwapApplied` under gossip. Once the run has all its tokens the call ends it: see `done`.

        `loss`: of the step, for the record. `blocks`: leased blocks of data that it read for the first time. Raises
        UsageError where `tokens` is no whole number: an int, or a tensor or numpy number that holds one.
        """
        return block(self.stepping(tokens, loss, blocks))

    def stepping(self, tokens: SupportsIndex, loss: float | None, blocks: int) -> Life[Sequence[Event]]:
        """`step` as a piece of the peer's life."""
        try:
            count = index(tokens)  # commits hold ints: with a tensor, as of a mask's sum, none could be made
        except TypeError:
            count = -1
        if count < 0:
            cause = f"step(tokens={tokens!r}): not a count of tokens"
            raise UsageError(cause, "say how many were trained in this step")
        self._check_open()
        if self.done or self.leaving:
            return ()
        seconds = max(monotonic_s() - self._stepped_s - self._aside_s, 1e-9)
        yield from self.waiting()
        self.steps += 1
        self._since += count
        self._rank.trains.usage.step(count, seconds)
        if self._leading is not None:
            self._leading.chronicle.trained(count, loss)
            self._leading.life.trained(count, blocks, seconds, loss)
        caused = (yield from self._meet()) if self.steps >= self._meet_at else ()
        self._stepped_s, self._aside_s = monotonic_s(), 0.0
        return caused

    def sync(self) -> Sequence[Event]:
        """The rest of a round, now, or all of it. Under gossip there is nothing to wait for. Returns as `step`."""
        self._check_open()
        self.wait()
        if self._leading is not None:
            self._leading.life.sync_now = True
        return block(self._meet())

    def leave(self) -> None:
        """Contribute what was trained since the last sync, if a version closes soon; say goodbye; write a last
        checkpoint; free everything. Who has left, or is closed, has left."""
        block(self.leaves())

    def leaves(self) -> Life[None]:
        """`leave` as a piece of the peer's life."""
        if self._closed:
            return
        try:
            self._parting = True
            if self._leading is not None and not self.done:
                self._leading.life.leave()
            yield from self._meet()
        finally:
            self.close()  # also after a Ctrl-C: it would live on as a member that never trains

    def close(self) -> None:
        """Free everything without a goodbye: to the others this peer has died."""
        if self._closed:
            return
        self._closed = True
        if self._leading is not None:
            peer = self._leading.life.peer
            peer.close()
            peer.endpoint.close()
            peer.events.close()
        else:
            self._rank.close()
        self._rank.saver.close(self._rank.site.timeouts.leave_s)
        self._rank.island.hang_up()

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:  # a Ctrl-C: nobody else has this peer, which would live on as a member that never trains
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.close()

    # ------------------------------------------------------------ meetings

    def begin(self) -> Life[None]:
        """The first meeting of the ranks: listen, get the state. Called by `diloco.run.door`."""
        if self._leading is not None:
            self._leading.chronicle.steps = self.steps
            self._life = self._unless_broken(self._whole(self._leading))
        yield from self._meet()
        self.address = self._rank.island.share(self._leading.life.peer.ticket if self._leading is not None else "")

    def emit(self, event: Event) -> None:
        """Record an event of whoever trains, where events are recorded: on rank 0."""
        if self._rank.events is not None:
            self._rank.events.emit(event)

    def _unless_broken(self, life: Life[None]) -> Life[None]:
        """A life that an error may end: whoever catches it, as a Ctrl-C amid a merge, must not train on alone."""
        try:
            yield from life
        except BaseException as error:
            self._broken = type(error).__name__
            raise

    def _whole(self, leading: Leading) -> Life[None]:
        """The life of this peer in the run, on rank 0, from its entrance to its goodbye."""
        life, rank, line, contract = leading.life, self._rank, self._rank.line, self.contract
        yield from life.open()
        started = Started(
            run=contract.run.name,
            contract_digest=contract.digest,
            resumed_version=line.state.version,
            total_tokens=contract.run.total_tokens,
            **rank.trains.facts(),
        )
        rank.publish(started)
        yield life.ready(0)
        yield from life.live()
        wall_s = monotonic_s() - leading.chronicle.began_s
        while not self._parting:
            yield life.ready(0)
        self.ending = yield from life.end()
        wire = life.peer.wire()
        rank.publish(Ended(**vars(self.ending), wire_bytes_sent=wire.sent if wire else None, wall_s=wall_s))
        if life.peer.directory is not None:
            yield from life.peer.keeper.last(line.state.version)

    def _meet(self, deadline_s: float = math.inf) -> Life[Sequence[Event]]:
        """A meeting of the ranks: do what rank 0 decides, until somebody is to train. Returns the events of it."""
        rank, leading = self._rank, self._leading
        rank.caused = []
        if leading is None:
            while not isinstance(decision := rank.island.decision(), Train):
                yield from rank.perform(decision)
            self._seen = decision
        else:
            try:
                ready = (yield from self._lived(deadline_s)) or leading.life.ready(0)
                rank.island.decide(ready)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    leading.life.interrupted()
                with suppress(Exception):  # the other ranks may be gone
                    rank.island.decide(Fail(f"{type(error).__name__}: {error}"))
                raise
            self._seen = ready
        self._since = 0
        self._meet_at = self.steps + self._seen.steps
        return tuple(rank.caused)

    def _lived(self, deadline_s: float) -> Life[Train | None]:
        """Live on until somebody has to train. None: the life has ended, or the deadline (`monotonic_s`) is over."""
        assert self._life is not None
        island, decided_s = self._rank.island, monotonic_s()
        for wanted in self._life:  # and not `yield from`: who stops waiting here does not end it
            if isinstance(wanted, Train):
                return wanted
            yield wanted
            if monotonic_s() - decided_s > IDLE_SHARE * island.timeout_s:
                decided_s = monotonic_s()
                island.decide(Idle())
            if monotonic_s() > deadline_s:
                return None
        if self._broken:
            raise UsageError(f"{self._broken} ended this peer's life", "close it, and join again")
        return None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, VersionClosed | SwapApplied):
            self.emit(HardwareUsed(version=event.version, **self._rank.trains.used()))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this peer has left the run", "join again")


REPORT_EVERY_S = 0.5
"""Least time between two reports of a peer's inner steps to the others."""


class RunReader:
    """Reader of a peer's data blocks in one run, on rank 0. This one reads on, whatever becomes of versions."""

    def __init__(self, blocks: BlockReader) -> None:
        self.blocks = blocks

    def closed(self, commit: Commit, before: Commit | None) -> None:
        """The run has applied a version, after `before`."""

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """The run has copied a state: its version is that of the line."""


class RunChronicle:
    """Record of one peer's run, on rank 0: the events of its training, and its data leases.

    It is the `PeerRecord` and the `SwapRecord` of the peer, which calls `closed` and `copied`.
    """

    def __init__(self, rank: PeerRank, emit: Callable[[Event], None], reader: RunReader | None) -> None:
        """`emit`: writes an event of the run. `reader`: reads the peer's data, unless a caller does."""
        self.rank, self.reader = rank, reader
        self.peer: Peer | GossipPeer | None = None
        """The peer whose record this is. Set before anything happens to it."""
        self.steps = 0
        """Inner steps over all lives."""
        self._emit = emit
        self.tokens_here = 0
        self._losses: list[float] = []
        self._warned_of_few = False
        self.began_s = self._reported_s = monotonic_s()

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this peer of the run trained per second, since its life began to train."""
        return self.tokens_here / max(monotonic_s() - self.began_s, 1e-9)

    def begin(self) -> None:
        """Start the clock of `tokens_per_s`: training begins in this run."""
        self.began_s = monotonic_s()

    def trained(self, tokens: int, loss: float | None) -> None:
        """Record an inner step of the run."""
        self.steps += 1
        self.tokens_here += tokens
        if loss is not None:
            self._losses.append(loss)
        now_s = monotonic_s()
        if now_s - self._reported_s >= REPORT_EVERY_S and self.peer is not None:
            self._reported_s = now_s
            wire, finite = self.peer.wire(), loss is not None and math.isfinite(loss)
            self.peer.report(
                inner_step=self.steps,
                tokens=self.tokens_here,
                tokens_per_s=self.tokens_per_s,
                wire_bytes_sent=wire.sent if wire else 0,
                **({"loss": loss} if loss is not None and finite else {}),
            )
            self._emit(TrainingProgress(self.steps, self.tokens_here, loss if finite else None))

    def take_loss(self) -> float | None:
        """Mean loss of the run's inner steps since the last call; None: whoever trains reports none."""
        losses, self._losses = self._losses, []
        return fmean(losses) if losses else None

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None, seconds: Seconds) -> Event | None:
        """Record that the run applied a version. Returns its event; a founding has none."""
        if self.reader is not None:
            self.reader.closed(commit, before)
        if before is None or not commit.moves:
            if commit.founds:
                self.begin()
            return None
        assert isinstance(self.peer, Peer)
        averaging, robust = self.peer.exchange.terms.lane.averaging, self.peer.contract.outer.aggregation != "mean"
        few = robust and averaging.is_mean_of_few([counted.weight for counted in commit.counted])
        if few and not self._warned_of_few:
            self._warned_of_few = True
            why = f"outer.aggregation {averaging.rule!r} takes {MIN_CONTRIBUTIONS} contributions, or it is the mean"
            self.peer.warn(f"version {commit.version} counts {len(commit.counted)}: {why}, with no defence")
        wire, flight_s = self.peer.wire(), seconds.pop(FLIGHT, None)
        use = self.peer.exchange.votes.use
        log_bytes, longest_sync_s = use.take() if use is not None else (None, None)
        blocks = front(before.leases.held.get(self.rank.line.peer, ()), mine.blocks) if mine else ()
        return VersionClosed(
            version=commit.version,
            lineage=commit.lineage,
            fragment=commit.fragment,
            tokens=commit.tokens,
            members=tuple(member.peer for member in commit.view),
            counted=tuple(counted.peer for counted in commit.counted),
            own=mine is not None,
            attempts=self.peer.exchange.machine.attempts,
            loss=self.take_loss(),
            inner_tokens=mine.tokens if mine else 0,
            blocks=tuple((run.start, run.stop) for run in blocks),
            tokens_per_s=self.tokens_per_s,
            wire_bytes_sent=wire.sent if wire else None,
            wire_bytes_received=wire.received if wire else None,
            seconds={name: round(value, 6) for name, value in seconds.items()},
            flight_s=flight_s,
            state_digest=self.rank.line.state.digest,
            repeats=self.reader.blocks.repeats if self.reader is not None else None,
            log_bytes=log_bytes,
            longest_sync_s=longest_sync_s,
            outliers=(averaging.take() or None) if robust else None,
            **self.rank.trains.version_fields(),
        )

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Record that the run copied a state: no version closed here, so its lease is not known yet."""
        if self.reader is not None:
            self.reader.copied(commit, before)

    def numbers(self) -> dict[str, Any]:
        """The run's inner steps and the trainer's place in its data, which a checkpoint holds beside the line."""
        read = {"reader": self.reader.blocks.state_dict()} if self.reader is not None else {}
        return {"run_steps": self.steps, **read}


@dataclass(frozen=True)
class Leading:
    """Objects of a run that rank 0 alone has."""

    life: PeerLife | GossipLife
    chronicle: RunChronicle
