"""DiLoCo around your own loop: join a run, call one function where the sync happens, leave.

    with diloco.join("10.0.0.5:4000", model) as run:
        for inputs, targets in batches:
            train_step(model, optimizer, inputs, targets)
            run.step(tokens=inputs.numel())  # every H-th call ends a round: the model has moved to the new anchor

The model is any `torch.nn.Module` and stays yours: its trainable parameters are read and written in place. The
optimizer, the data and the learning rates are yours, too; a contract for such a run says `model.kind = "external"`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Self, SupportsIndex

from torch import nn

from diloco.base.clock import monotonic_s
from diloco.base.errors import UsageError
from diloco.base.types import Closed, Commit, Counted, Phase, Skip
from diloco.config.contract import Contract
from diloco.config.load import load_contract, load_site
from diloco.config.site import Site
from diloco.gossip.peer import GossipPeer
from diloco.observe.event_log import Events
from diloco.observe.events import VersionClosed
from diloco.outer.fragments import Weights
from diloco.peer.peer import Peer
from diloco.peer.schedule import Cadence, Stopwatch
from diloco.run.launch import peer_name
from diloco.transport.gate import Gate, listening


class Run(ABC):
    """This process's part in a run. Made by `found` or `join`; use it as a context manager."""

    _peer: Peer | GossipPeer

    def __init__(self, contract: Contract, site: Site, model: nn.Module, gate: Gate) -> None:
        directory = Path(site.storage.directory) if site.storage.directory else None
        name = peer_name(site, None)
        self.contract = contract
        self._gate = gate
        with ExitStack() as made:
            made.callback(gate.close)
            self._events = Events(directory / "events.jsonl" if directory else None, name)
            made.callback(self._events.close)
            self._make(name, site, model, directory)
            made.callback(self._peer.close)
            self._peer.open()
            self._made = made.pop_all()
        self._closed = False
        self._stepped_s = monotonic_s()
        """When the inner step that is being done began."""

    @abstractmethod
    def _make(self, name: str, site: Site, model: nn.Module, directory: Path | None) -> None:
        """The peer, and what the kind of run needs beside it."""

    @property
    def name(self) -> str:
        """This peer's name in the run."""
        return self._peer.name

    @property
    def address(self) -> str:
        """What others give to `diloco.join` or `diloco peer --join`."""
        return self._peer.ticket

    @property
    @abstractmethod
    def version(self) -> int:
        """Versions of the anchor agreed so far; under gossip, swaps of this peer."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens committed by all peers since the run began; under gossip, trained, as far as this peer knows."""

    @property
    @abstractmethod
    def peers(self) -> tuple[str, ...]:
        """Who is in the run now; under gossip, as far as this peer knows."""

    @property
    def digest(self) -> str:
        """Digest of anchor and outer state: equal on all peers at this version, but under gossip each has its own."""
        return self._peer.line.state.digest

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the run has all its tokens."""

    @abstractmethod
    def wait(self, timeout_s: float = 3600.0) -> bool:
        """Wait until this peer is in the view: until `membership.start_peers` are there, or the next version closes.

        Returns False after `timeout_s`. `step` waits by itself; call this to look at the data only then.
        """

    @abstractmethod
    def step(self, tokens: SupportsIndex) -> Sequence[Closed] | Skip | None:
        """Call it after every inner step, with the tokens trained in it. Every H-th call (H / P with fragments) syncs.
        Raises UsageError where `tokens` is no whole number: an int, or a tensor or numpy number that holds one.

        With `sync.overlap` the contribution leaves that many calls earlier, without waiting. Returns None between
        syncs; after one the versions that closed, or the reason why the round was skipped (nothing is lost then: the
        progress counts next time). The model's weights have moved to the new anchor.

        Under gossip it never waits and returns None: the weights move when a swap is there.
        """

    @abstractmethod
    def sync(self) -> Sequence[Closed] | Skip:
        """The rest of a round, now, or all of it: pseudo-gradient, compress, exchange, average, outer step, merge."""

    def leave(self) -> None:
        """Contribute what was trained since the last sync, if a version closes soon; say goodbye; free everything.

        Under gossip, when the run is done, this is the final average. Who has left, or is closed, has left.
        """
        if self._closed:
            return
        try:
            self._part()
        finally:
            self.close()  # also after a Ctrl-C: it would live on as a member that never trains

    @abstractmethod
    def _part(self) -> None:
        """All of `leave` but to free everything."""

    def close(self) -> None:
        """Free everything without a goodbye: to the others this peer has died."""
        self._closed = True
        self._made.close()

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


class AgreedRun(Run):
    """One in which all peers agree on each version."""

    _peer: Peer

    def _make(self, name: str, site: Site, model: nn.Module, directory: Path | None) -> None:
        self._peer = Peer(name, self.contract, site, Weights.of(model), self._gate, self._events, directory=directory)
        self._cadence = Cadence.of(self.contract)
        self._watch = Stopwatch()
        self._steps = 0
        """Inner steps of this round."""
        self._begun = False
        """Whether this round's contribution is on its way."""
        self._before = self._cadence.before(0)
        self._leave_by_s = math.inf
        """When to have left, whatever was counted."""

    # ------------------------------------------------------------ what a caller may ask

    @property
    def version(self) -> int:
        return self._peer.line.state.version

    @property
    def tokens(self) -> int:
        commit = self._peer.line.commit
        return commit.tokens if commit else 0

    @property
    def peers(self) -> tuple[str, ...]:
        commit = self._peer.line.commit
        return tuple(member.peer for member in commit.view) if commit else ()

    @property
    def done(self) -> bool:
        return self._peer.done

    # ------------------------------------------------------------ taking part

    def wait(self, timeout_s: float = 3600.0) -> bool:
        entered = self._peer.enter(self._patience(timeout_s), _nothing)
        self._stepped_s = monotonic_s()
        return entered

    def step(self, tokens: SupportsIndex) -> Sequence[Closed] | Skip | None:
        self._peer.journal.trained(_whole(tokens), 0)
        self._watch.step(self.contract.tokens_per_step, monotonic_s() - self._stepped_s)
        self._steps += 1
        outcome = self._sync_if_due()
        self._stepped_s = monotonic_s()
        return outcome

    def _sync_if_due(self) -> Sequence[Closed] | Skip | None:
        if not self._begun and (self._steps >= self._before or self._cut_short()):
            if self._cadence.overlap == 0:
                return self.sync()
            return self._begin()
        if self._begun and self._steps >= self._before + self._cadence.overlap:
            return self.sync()
        return None

    def _cut_short(self) -> bool:
        """Whether to sync early, because most others wait (`membership.stragglers`)."""
        return self.contract.membership.stragglers == "cut" and self._peer.exchange.awaited()

    def _begin(self) -> Skip | None:
        """Send what was trained so far, and go on training."""
        self.wait()
        skipped = self._peer.begin(_nothing, self._leaving)
        if skipped is not None:
            self._next_round()
        else:
            self._begun, self._before = True, self._steps
        return skipped

    def sync(self) -> Sequence[Closed] | Skip:
        round_s, before = self.contract.membership.round_deadline_s, self.version
        if self._begun:
            # Not `wait`: what closed meanwhile is this round's outcome, and comes before any later version.
            outcome = self._peer.finish(_nothing, self._patience(round_s))
        else:
            self.wait()
            outcome = self._peer.round(_no_steps, _nothing, self._patience(round_s), lambda: self._leaving)
        if self.version != before:
            self._events.emit(VersionClosed(version=self.version, tokens=self.tokens, state_digest=self.digest))
        self._next_round()
        return outcome

    def _next_round(self) -> None:
        self._steps, self._begun = 0, False
        pace = self._watch.round()
        self._peer.report(pace=pace)
        if self.contract.rounds_vary:
            self._cadence = Cadence.fitted(self.contract, pace, *self._peer.exchange.speeds())
            self._peer.hide(self._cadence)
        self._before = self._cadence.before(self._peer.line.trained.tokens)

    @property
    def _leaving(self) -> bool:
        return self._leave_by_s < math.inf

    def _patience(self, limit_s: float) -> Callable[[], bool]:
        """For so long at most. Who leaves waits until `timeouts.leave_s` are over, and for no version outside the view:
        it would be the next but one that counts it."""
        deadline_s = min(monotonic_s() + limit_s, self._leave_by_s)
        return lambda: monotonic_s() < deadline_s and (self._peer.exchange.in_view or not self._leaving)

    def _part(self) -> None:
        if not self.done:
            self._leave_by_s = monotonic_s() + self._peer.site.timeouts.leave_s
            if self._begun:
                self.sync()
            if self._peer.line.trained.tokens and self.wait():
                self.sync()
        self._peer.leave("left", _nothing)


class GossipRun(Run):
    """One in which peers swap in pairs, and nobody waits."""

    _peer: GossipPeer

    def _make(self, name: str, site: Site, model: nn.Module, directory: Path | None) -> None:
        self._peer = GossipPeer(name, self.contract, site, Weights.of(model), self._gate, self._events)

    @property
    def version(self) -> int:
        return self._peer.version

    @property
    def tokens(self) -> int:
        return self._peer.position()

    @property
    def peers(self) -> tuple[str, ...]:
        return (self.name, *(word.member.peer for word in self._peer.exchange.alive()))

    @property
    def done(self) -> bool:
        return self._peer.finishing

    @property
    def spread(self) -> float | None:
        """How far this peer and the other of its latest swap were apart, before it (`diloco.gossip.pairing.spread`)."""
        return self._peer.spread

    def wait(self, timeout_s: float = 3600.0) -> bool:
        if self._peer.progress.phase == Phase.WAITING:
            deadline_s = monotonic_s() + timeout_s
            self._peer.enter(lambda: monotonic_s() < deadline_s)
            self._stepped_s = monotonic_s()
        return True

    def step(self, tokens: SupportsIndex) -> None:
        self.wait()
        self._peer.trained(_whole(tokens), monotonic_s() - self._stepped_s, math.nan)
        self._peer.between_steps()
        self._stepped_s = monotonic_s()

    def sync(self) -> Skip:
        return Skip("under gossip there is no version to wait for")

    def _part(self) -> None:
        if self.done:
            self._peer.average(lambda: True)
        else:
            self._peer.leave(lambda: True)


def found(contract: str | Path | Contract, model: nn.Module, site: str | Path | Site | None = None) -> Run:
    """Begin a run; `Run.address` is what the others join.

    `contract`: a path (configs/*.toml) or a `Contract`; `site`: a path (peers/*.toml), a `Site`, or the defaults.
    Raises DilocoError: the contract is wrong, a port is in use, ...
    """
    local = site if isinstance(site, Site) else load_site(site).value
    agreed = contract if isinstance(contract, Contract) else load_contract(contract).value
    return _open(agreed, local, model, Gate(local))


def join(address: str, model: nn.Module, site: str | Path | Site | None = None) -> Run:
    """Join the run of the member at `address` (`HOST:PORT[/DIGEST]`), with a model of the same parameters.

    Several addresses, with commas between them, are tried in turn: any live member will do.

    Raises UnreachableError, TicketError, IncompatibleError, StateError.
    """
    local = listening(site if isinstance(site, Site) else load_site(site).value, address)
    gate = Gate(local)
    try:
        contract = gate.knock(address)
    except BaseException:
        gate.close()
        raise
    return _open(contract, local, model, gate)


def _open(contract: Contract, site: Site, model: nn.Module, gate: Gate) -> Run:
    kind = GossipRun if contract.membership.policy == "gossip" else AgreedRun
    return kind(contract, site, model, gate)


def _whole(tokens: SupportsIndex) -> int:
    """For commits, which hold ints: with a tensor, as of a mask's sum, none could be made. Raises UsageError."""
    try:
        count = index(tokens)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"step(tokens={tokens!r}): not a count of tokens", "say how many were trained in this step")
    return count


def _no_steps() -> None:
    """The caller has done them."""


def _nothing(commit: Commit, before: Commit | None, mine: Counted | None, seconds: dict[str, float]) -> None:
    """Nothing else hangs on a version."""
