"""A rank that does not lead its island: it does to its parts of the outer state what rank 0 does to its own.

Rank 0 lives the peer's life (`diloco.peer.peer`) and announces each step of the straight line. Between steps the
exchange of
rank 0 has this rank's lane send, receive and average its parts (`diloco.exchange.lane`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from diloco.base.types import Closed, Commit
from diloco.compress import PayloadError
from diloco.compress.encoding import Encoder
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.lane import Lane
from diloco.exchange.lanes import FirstRank, LaneService
from diloco.inner.workbench import Bench
from diloco.island import Island
from diloco.kernels.build import compiled_codecs
from diloco.outer.eager import weights_to_keep, withdraw
from diloco.outer.line import kept_local, weights_at_anchor
from diloco.outer.resync import adopted, dropped
from diloco.outer.state import OuterState
from diloco.peer.terms import lane_terms, lanes_of, open_line
from diloco.round import measured, move_anchor
from diloco.storage.checkpoint import reopen
from diloco.storage.line_state import line_slices, restored_line
from diloco.transport.address import join_address, split_address
from diloco.transport.runtime import Runtime, reachable
from diloco.transport.sockets import SocketCounter

LANE_PORTS = 100
"""Above that of rank 0 are those of the other ranks; the peer directory's is the next one, usually."""


def follow(contract: Contract, site: Site, island: Island) -> None:
    """The life of a rank that does not lead."""
    if contract.membership.policy == "gossip":
        Bench.follow(contract, site, island)
    else:
        Follower(contract, site, island).serve()


class Follower:
    """One rank's line and lane."""

    def __init__(self, contract: Contract, site: Site, island: Island) -> None:
        self.site, self.island = site, island
        bench = self.bench = Bench(contract, site, island, int(island.share()))
        compiled_codecs(site.device.compile_codecs)
        self._encoder = Encoder()
        self.line = open_line("", contract, bench.weights, self._encoder, island, lanes_of(site, island))
        self._counter = SocketCounter()
        self._runtime: Runtime | None = None
        self._lane: Lane | None = None
        self._first: FirstRank | None = None
        self._standing = ExitStack()
        self._contract = contract
        bench.kept = lambda: line_slices(self.line)

    def serve(self) -> None:
        """Do what rank 0 announces, until the end."""
        try:
            self.bench.serve(
                meet=self._meet,
                measure=self._measure,
                keep_local=lambda: kept_local(self.line),
                withdraw=lambda: withdraw(self.line),
                apply=self._apply,
                adopt=self._adopt,
                drop=lambda: dropped(self.line),
                restore_line=self._restore_line,
                stand_at_anchor=lambda: self._standing.enter_context(weights_at_anchor(self.line)),
                stand_without_foreseen=lambda: self._standing.enter_context(weights_to_keep(self.line)),
                stand_back=self._standing.close,
            )
        finally:
            self._close()

    def _meet(self, host: str, port: int, key: str, name: str, toward: str | None) -> None:
        """Open our lane, and let rank 0 know where others reach it."""
        self.line.peer = name
        address = ""
        if self.island.rank < lanes_of(self.site, self.island):
            address = self._open_lane((host, port), bytes.fromhex(key), toward)
        self._hold()
        self.island.gather(address)

    def _open_lane(self, rank_0: tuple[str, int], key: bytes, toward: str | None) -> str:
        site, lanes = self.site, lanes_of(self.site, self.island)
        runtime = self._runtime = Runtime(site.timeouts.rpc_s, site.network.send_bps / lanes, site.network.streams)
        terms = lane_terms(self._contract, site, self.line.layout, self.island.size)
        lane = self._lane = Lane(terms, runtime.link, runtime.loop)
        self._first = FirstRank(rank_0, key, self.island.rank, lane, runtime.loop)
        host, port = split_address(site.network.listen)
        own = port + LANE_PORTS + self.island.rank if port else 0
        served = runtime.serve(LaneService(lane), join_address(host, own))
        if not site.network.advertise:
            return reachable(served, toward)
        return join_address(split_address(site.network.advertise)[0], split_address(served)[1])

    def _measure(self, staleness: float, trainers: int, overlaps: bool) -> None:
        try:
            self.line.sent = measured(self.line, staleness, trainers, overlaps, {})
        except PayloadError:
            return  # rank 0 has found the same, and says what becomes of it
        if self._lane is not None:
            self._lane.offer(self.line.sent.contribution)
        self.island.all(True)

    def _apply(self, commit: str, counted: bool, in_place: bool) -> None:
        record = Commit.from_bytes(commit.encode())
        nothing = [b""] * self.line.layout.fragments[record.fragment].parts
        closed = self._lane.closed(record) if self._lane is not None else Closed(record, nothing)
        move_anchor(self.line, closed, counted, in_place, {})
        self._hold()

    def _adopt(self, version: int, steps: list[int], stays: bool) -> None:
        state = self._lane.copied() if self._lane is not None else standing_at(self.line.state, version, steps)
        adopted(self.line, state, stays)
        self._hold()

    def _restore_line(self, path: str, digest: str) -> None:
        restored_line(self.line, lambda: reopen(Path(path), digest))

    def _hold(self) -> None:
        """Our lane is to know what we stand at before anybody goes on."""
        if self._lane is not None and self._first is not None and self._runtime is not None:
            self._lane.hold(self.line.state)
            wire = self._counter.sample()
            sent, received = (wire.sent, wire.received) if wire else (0, 0)
            self._first.rates(self._runtime.link.send_bps, sent, received)
        self.island.all(True)

    def _close(self) -> None:
        self._encoder.close()
        if self._first is not None:
            self._first.close()
        if self._lane is not None:
            self._lane.stop()
        if self._runtime is not None:
            self._runtime.close()


def standing_at(state: OuterState, version: int, steps: Sequence[int]) -> OuterState:
    """On a rank that holds no parts: the state at another version, after so many outer steps of each fragment. What is
    due depends on it on every rank."""
    fragments = (replace(fragment, steps=count) for fragment, count in zip(state.fragments, steps, strict=True))
    return OuterState(version, tuple(fragments))
