"""One rank of a peer: its parts of the outer state, and what it does with them when rank 0 decides."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from diloco.base import decisions as d
from diloco.base.clock import new_incarnation
from diloco.base.life import Life
from diloco.base.types import Closed, Commit
from diloco.compress import PayloadError
from diloco.compress.encoding import Encoder
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import LaneService, RemoteExchange
from diloco.exchange.log import DiskLog, logged_mean
from diloco.exchange.work import SteppedVersion
from diloco.identity.user_key import secrets_to_try
from diloco.inner.meter import Throughput
from diloco.island import Island
from diloco.island.slices import Slices
from diloco.kernels.build import compiled_codecs
from diloco.observe.event_log import Events
from diloco.observe.events import Event, Stamped, from_json, to_json
from diloco.outer.fragments import Weights
from diloco.outer.line import adopt, drop, keep_local, rehash, weights_at_anchor, weights_to_keep, withdraw
from diloco.outer.optimizers import SteppedHere
from diloco.outer.state import OuterState
from diloco.peer.terms import lane_terms, lanes_of, open_line
from diloco.round import Seconds, apply, measure
from diloco.storage.checkpoint import CHECKPOINTS, Checkpoint, reopen
from diloco.storage.saving import Contents, Saver, Written, line_slices, restore_line
from diloco.transport.address import join_address, split_address
from diloco.transport.endpoint import Runtime, reachable
from diloco.transport.sockets import SocketCounter

logger = logging.getLogger(__name__)
LANE_PORTS = 100
"""Above that of rank 0 are those of the other ranks; the peer directory's is the next one, usually."""


class PeerTraining(Protocol):
    """Whoever trains for a peer: the interface to it on every rank. All ranks are asked together."""

    usage: Throughput
    """Throughput of the inner steps."""

    def live(self, *, local: bool) -> Slices:
        """State of this rank of a peer that inner steps move, to save; `local`: with the weights, as group `local`."""

    def kept(self) -> Contents:
        """State that rank 0 of a peer saves beside that, which nobody writes to."""

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Take back this rank's state. The parameters are the anchor. Raises StateError on all ranks if one cannot."""

    def evaluate(self) -> float | None:
        """Held-out loss of the peer's weights as they are, nats per token; None: nobody evaluates."""

    def facts(self) -> dict[str, Any]:
        """Fields of a peer's event `Started` about model and hardware."""

    def version_fields(self) -> dict[str, Any]:
        """Fields of a peer's event `VersionClosed` about inner steps."""

    def used(self) -> dict[str, Any]:
        """Fields of a peer's event `HardwareUsed`, since the last call."""


class PeerRank:
    """One rank of a peer: its part of each decision. Methods are for the training thread of this rank."""

    def __init__(self, contract: Contract, site: Site, island: Island, weights: Weights, trains: PeerTraining) -> None:
        """All ranks of an island make theirs together. `weights`: what the ranks hold of the model (`Bridge`)."""
        self.contract, self.site, self.island, self.trains = contract, site, island, trains
        compiled_codecs(site.device.compile_codecs)
        self.encoder = Encoder()
        gossip = contract.membership.policy == "gossip"
        self.lanes = 1 if gossip else lanes_of(site, island)
        self.line = open_line("", contract, weights, self.encoder, island, self.lanes)
        self.counter = SocketCounter()
        self.saver = Saver(island)
        self.folder = Path()
        """Folder of its checkpoints."""
        self.events: Events | None = None
        """Where rank 0 records what happens."""
        self.subscribers: list[Callable[[Event], None]] = []
        self.caused: list[Event] = []
        """Told since somebody took them."""
        self.redone = False
        """Whether the last `Redo` found its mean in the logs of all ranks."""
        self.val_loss: float | None = None
        """Held-out loss of the last `Evaluate`."""
        self._lane: Lane | None = None
        self._first: RemoteExchange | None = None
        self._runtime: Runtime | None = None

    # ------------------------------------------------------------ rank 0 decides

    def lead(self, name: str, events: Events, directory: Path | None) -> None:
        """Make this rank 0 of the peer `name`. Events go to `events`, checkpoints to `directory`."""
        self.line.peer, self.events = name, events
        self.folder = (directory or Path()) / CHECKPOINTS

    def do(self, decision: d.Decision, own: Any = None, seconds: Seconds | None = None) -> Life[None]:
        """On rank 0: have every rank of the peer do this, this one included. `own`: what only this rank holds of it."""
        self.island.decide(decision)
        yield from self.perform(decision, own, seconds)

    def publish(self, event: Event) -> None:
        """On rank 0 of a peer: record what happened, and pass it to the subscribers of every rank."""
        assert self.events is not None
        self.events.emit(event)
        stamped = json.dumps(to_json(Stamped(0.0, 0.0, self.line.peer, event))) if self.island.size > 1 else ""
        now(self.do(d.Publish(stamped), event))

    def perform(self, decision: d.Decision, own: Any = None, seconds: Seconds | None = None) -> Life[None]:
        """Carry out on this rank of the peer what rank 0 decides. `own`: what only rank 0 holds of it."""
        line, seconds = self.line, {} if seconds is None else seconds
        match decision:
            case d.Measure():
                self._measure(decision, seconds)
            case d.KeepLocal():
                keep_local(line)
            case d.Withdraw():
                withdraw(line)
            case d.Apply():
                closed = own
                if closed is None:
                    commit = Commit.from_bytes(decision.commit.encode())
                    nothing = [b""] * line.layout.fragments[commit.fragment].parts
                    closed = self._lane.closed(commit) if self._lane is not None else Closed(commit, nothing)
                version = closed if isinstance(closed, SteppedVersion) else SteppedHere(line, closed)
                yield from apply(line, version, decision, seconds)
                self._hold()
            case d.Adopt():
                state = own
                if state is None and self._lane is not None:
                    state = self._lane.copied()
                adopt(line, state or standing_at(line.state, decision.version, decision.steps), decision.stays)
                self._hold()
            case d.Rehash():
                rehash(line)
                self._hold()
            case d.Drop():
                drop(line)
            case d.Restore():

                def opened() -> Checkpoint:
                    return own or reopen(Path(decision.path), decision.digest)

                restore_line(line, opened)
                self.trains.restore(opened)
            case d.Redo():
                yield from self._redo(decision)
            case d.SaveCheckpoint():
                self.save_part(local=decision.local)
            case d.Publish():
                event = own
                if event is None:
                    stamped = from_json(json.loads(decision.event))
                    assert stamped is not None
                    event = stamped.event
                self.caused.append(event)
                for subscriber in self.subscribers:
                    subscriber(event)
            case d.Evaluate():
                with weights_at_anchor(line):
                    self.val_loss = self.trains.evaluate()
            case d.GatherWeights():
                line.weights.read(line.layout.fragments[decision.fragment])
            case d.TakeWeights():
                fragment = line.layout.fragments[decision.fragment]
                line.weights.write(fragment, line.state.fragments[decision.fragment].anchor)
            case d.Meet():
                self._meet(decision)

    # ------------------------------------------------------------ the line

    def _measure(self, how: d.Measure, seconds: Seconds) -> None:
        try:
            sent = measure(self.line, how, seconds)
        except PayloadError:
            if self.island.leads:
                raise
            return  # rank 0 has found the same, and says what becomes of it
        if self._lane is not None:
            self._lane.measured(sent.contribution)
        self.island.all(True)  # have it, too, before anybody asks for it

    def _redo(self, how: d.Redo) -> Life[None]:
        line, commit = self.line, Commit.from_bytes(how.commit.encode())
        line.peer, fragment = how.name, line.layout.fragments[commit.fragment]
        at, digest, wanted = commit.version, commit.mean_digest, fragment.cuts
        parts = logged_mean(Path(how.folder), self.island.rank, at, digest, fragment.parts, wanted)
        self.redone = self.island.all(parts is not None)
        if self.redone and parts is not None:
            if how.drops:
                drop(line)
            version = SteppedHere(line, Closed(commit, parts))
            yield from apply(line, version, d.Apply(how.commit, False, False), {})

    def _hold(self) -> None:
        """This rank's lane gets the line's position before any rank goes on."""
        if self._lane is not None and self._first is not None and self._runtime is not None:
            self._lane.hold(self.line.state)
            wire = self.counter.sample()
            sent, received = (wire.sent, wire.received) if wire else (0, 0)
            self._first.rates(self._runtime.link.send_bps, sent, received)
        self.island.all(True)

    # ------------------------------------------------------------ checkpoints

    def save(self, contents: Contents, keep: int) -> Future[Written]:
        """Rank 0's part of `SaveCheckpoint`: `contents`, and what this rank holds. May come to ResourceError."""
        (groups, about), (kept, numbers) = contents, self.trains.kept()
        version, local = self.line.state.version, "local" in groups
        with weights_to_keep(self.line):
            live = self.trains.live(local=local)
            return self.saver.save(self.folder, version, {**groups, **kept}, live, {**numbers, **about}, keep)

    def save_part(self, *, local: bool) -> None:
        """The decision `SaveCheckpoint` on another rank of the peer."""
        with weights_to_keep(self.line):
            self.saver.save_part(line_slices(self.line), self.trains.live(local=local))

    # ------------------------------------------------------------ lanes

    def _meet(self, how: d.Meet) -> None:
        """Open this rank's lane, and report to rank 0 where others reach it."""
        self.line.peer = how.name
        address = ""
        if self.island.rank < self.lanes:
            address = self._open_lane(how)
        self._hold()
        self.island.gather(address)

    def log(self, folder: Path | None, warn: Callable[[str], None]) -> DiskLog | None:
        """This rank's log below the folder of its peer, where checkpoints are, too; `warn` gets sentences."""
        if folder is None or not self.site.storage.keeps_votes:
            return None
        return DiskLog(folder.resolve(), self.island.rank, new_incarnation(), warn)

    def _open_lane(self, how: d.Meet) -> str:
        site, rank_0, toward = self.site, (how.host, how.port), how.toward
        runtime = self._runtime = self.open_runtime(how.private)
        terms = lane_terms(self.contract, site, self.line.layout, self.island.size)
        log = self.log(Path(how.folder) if how.folder else None, logger.warning)
        lane = self._lane = Lane(terms, runtime.link, runtime.loop, log)
        self._first = RemoteExchange(self.island.call(rank_0, bytes.fromhex(how.key)), lane, runtime.loop)
        host, port = split_address(site.network.listen)
        own = port + LANE_PORTS + self.island.rank if port else 0
        served = runtime.serve(LaneService(lane, self._first), join_address(host, own))
        if not site.network.advertise:
            return reachable(served, toward)
        return join_address(split_address(site.network.advertise)[0], split_address(served)[1])

    def open_runtime(self, private: bool) -> Runtime:
        """The loop and the connections to other peers of this rank's lane: one of several. `private`: the run has a
        secret. Raises UsageError, ResourceError: it is this user's key, and this rank cannot read it."""
        network = self.site.network
        secrets = secrets_to_try(private=True) if private else ("",)
        return Runtime(secrets, self.site.timeouts.rpc_s, network.send_bps / self.lanes, network.streams)

    def close(self) -> None:
        """Free everything of this rank. Rank 0's exchange is its own."""
        self.encoder.close()
        if self._first is not None:
            self._first.close()
        if self._lane is not None:
            self._lane.stop()
        if self._runtime is not None:
            self._runtime.close()


def standing_at(state: OuterState, version: int, steps: Sequence[int]) -> OuterState:
    """On a peer's rank that holds no parts: the state at another version, after so many outer steps of each fragment.
    What is due depends on it on every rank."""
    fragments = (replace(fragment, steps=count) for fragment, count in zip(state.fragments, steps, strict=True))
    return OuterState(version, tuple(fragments))


def now(piece: Life[None]) -> None:
    """Carry out a piece of a peer's life that waits for nothing."""
    for wait in piece:
        raise AssertionError(f"it waits: {wait}")
