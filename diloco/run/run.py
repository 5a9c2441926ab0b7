"""A run, as whoever trains holds it: one per rank, with the same calls on all ranks of an island."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Fail, Idle, Train
from diloco.base.errors import UsageError
from diloco.base.life import Life
from diloco.config.contract import Contract
from diloco.observe.events import Ended, Event, HardwareUsed, SwapApplied, VersionClosed
from diloco.outer.line import weights_at_anchor
from diloco.peer.life import Ending
from diloco.peer.rank import PeerRank
from diloco.run.blocking import block
from diloco.run.chronicle import Chronicle

IDLE_SHARE = 0.1
"""Of the time for which ranks wait for each other: how often they are told that rank 0 still waits for the world."""


class LifeOf(Protocol):
    """A peer's life on rank 0: `diloco.peer.life.AgreedLife`, or `diloco.gossip.peer.GossipLife`."""

    sync_now: bool

    def open(self) -> Life[None]: ...

    def live(self) -> Life[None]: ...

    def end(self) -> Life[Ending]: ...

    def ready(self, steps: int) -> Train: ...

    def trained(self, tokens: int, blocks: int, seconds: float, loss: float | None) -> None: ...

    def leave(self) -> None: ...

    def interrupted(self) -> None: ...


class Leading:
    """What rank 0 has of a run beside its part of the work."""

    def __init__(self, life: LifeOf, peer: Any, chronicle: Chronicle, close: Callable[[], None]) -> None:
        """`peer`: the life's. `close`: frees what the peer does not own."""
        self.life, self.peer, self.chronicle, self.close = life, peer, chronicle, close


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
        """What others give to `diloco.join` or `diloco peer --join`; on all ranks."""
        self.steps = steps
        """Inner steps over all lives of this peer."""
        self.ending: Ending | None = None
        """How it ended, on rank 0."""
        self._rank, self._leading = rank, leading
        self._seen = Train(0)
        self._meet_at = self._since = 0
        self._parting = self._closed = self._begun = False
        self._stepped_s = monotonic_s()
        self._aside_s = 0.0
        """Of the step that is being done, what is none of it."""
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
        """Who is in the run now; under gossip, as far as this peer knows."""
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
        """Whether this peer is the first of those that train: for what one should do, and it hardly matters who."""
        commit = self._rank.line.commit
        if commit is None:
            return self.name == min(self.peers, default=self.name)
        return self.name == next((member.peer for member in commit.view if not member.witness), None)

    def position(self, tokens: int) -> int:
        """Tokens of the whole run after a step of so many here, if all trainers go at this pace: for a schedule."""
        seen = self._seen
        here = seen.uncommitted + self._since + tokens
        return seen.tokens + here * seen.trainers

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call `subscriber` with every event of the run, on all ranks: of a version inside `step`, when its state
        stands, before the next."""
        self._rank.subscribers.append(subscriber)

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Meanwhile the model holds the agreed weights: to evaluate, or to save them. All ranks together."""
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
        """`wait`."""
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
        """`step`."""
        count = whole(tokens)
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
        """`leave`."""
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
            self._leading.peer.close()
            self._leading.close()
        else:
            self._rank.close()
        self._rank.saver.finish(self._rank.site.timeouts.leave_s)

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
        """The first meeting: listen, get the state. By `diloco.run.door`."""
        if self._leading is not None:
            self._leading.chronicle.steps = self.steps
            self._life = self._whole(self._leading)
        yield from self._meet()
        self.address = self._rank.island.share(self._leading.peer.ticket if self._leading is not None else "")

    def emit(self, event: Event) -> None:
        """Record an event of whoever trains, where events are recorded: on rank 0."""
        if self._rank.events is not None:
            self._rank.events.emit(event)

    def _whole(self, leading: Leading) -> Life[None]:
        """The life of this peer, on rank 0, from door to goodbye."""
        life, rank = leading.life, self._rank
        yield from life.open()
        contract, line = self.contract, rank.line
        started = leading.chronicle.started(
            contract.run.name, contract.digest, line.state.version, contract.run.total_tokens
        )
        rank.publish(started)
        yield life.ready(0)
        yield from life.live()
        wall_s = monotonic_s() - leading.chronicle.began_s
        while not self._parting:
            yield life.ready(0)
        self.ending = yield from life.end()
        wire = leading.peer.wire()
        rank.publish(Ended(**vars(self.ending), wire_bytes_sent=wire.sent if wire else None, wall_s=wall_s))
        if leading.peer.directory is not None:
            yield from leading.peer.keeper.last(line.state.version)

    def _meet(self, deadline_s: float = math.inf) -> Life[Sequence[Event]]:
        """Do what is decided, until somebody is to train. Returns what it has caused."""
        self._rank.caused = []
        if self._leading is not None:
            self._seen = yield from self._lead(self._leading, deadline_s)
        else:
            self._seen = yield from self._follow()
        self._since = 0
        self._meet_at = self.steps + self._seen.steps
        return tuple(self._rank.caused)

    def _lead(self, leading: Leading, deadline_s: float) -> Life[Train]:
        island = self._rank.island
        try:
            ready = (yield from self._lived(deadline_s)) or leading.life.ready(0)
            island.decide(ready)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                leading.life.interrupted()
            with suppress(Exception):  # they may be gone
                island.decide(Fail(f"{type(error).__name__}: {error}"))
            raise
        return ready

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
                break
        return None

    def _follow(self) -> Life[Train]:
        while not isinstance(decision := self._rank.island.decision(), Train):
            yield from self._rank.perform(decision)
        return decision

    def _on_event(self, event: Event) -> None:
        if isinstance(event, VersionClosed | SwapApplied):
            used = self._rank.trains.used()
            self.emit(HardwareUsed(version=event.version, **used))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this peer has left the run", "join again")


def whole(tokens: SupportsIndex) -> int:
    """For commits, which hold ints: with a tensor, as of a mask's sum, none could be made. Raises UsageError."""
    try:
        count = index(tokens)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"step(tokens={tokens!r}): not a count of tokens", "say how many were trained in this step")
    return count
