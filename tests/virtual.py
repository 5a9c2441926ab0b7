"""A small deterministic world for the protocol's state machines: virtual time, a seeded network, deaths and stops.

The machines are the production ones; only bytes are replaced by their names: a mean's digest is the hash of who was
counted, with which weights. Every commit is checked against all others when it closes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.exchange import messages as m
from diloco.exchange.machine import Machine, Rules, Timing
from diloco.types import Commit, Member

RULES = Rules(
    run="virtual", contract="c0", parts=(6,), start_peers=1, lease_blocks=8, match_deadline_s=20.0, backlog_versions=4
)
TIMING = Timing(heartbeat_s=1.0, suspect_s=5.0, stall_s=5.0)
BLOCKS = 4


@dataclass
class Peer:
    """One life of a peer and what its training side knows."""

    machine: Machine
    chain: list[Commit] = field(default_factory=list)
    alive: bool = True
    frozen: bool = False
    pending: m.Offer | None = None
    skips: list[str] = field(default_factory=list)
    left: bool = False
    inbox: list[tuple[str, Any]] = field(default_factory=list)


class World:
    """Peers, a clock, and a network that delays, loses and doubles messages as the seed says."""

    def __init__(self, seed: int, rules: Rules = RULES, loss: float = 0.0, delay_s: float = 0.05) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.loss = loss
        self.delay_s = delay_s
        self.now = 0.0
        self.peers: dict[str, Peer] = {}
        self.commits: dict[tuple[str, int], Commit] = {}
        self.transcript: list[str] = []
        self.cut: Callable[[str, str], bool] = lambda a, b: False
        self.deaths_are_proven = False
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._incarnation = itertools.count(1)

    # ------------------------------------------------------------ peers

    def found(self, name: str) -> Peer:
        return self._start(name, founder=True)

    def join(self, name: str, through: str) -> Peer:
        peer = self._start(name, founder=False)
        known = self.peers[through].machine
        peer.machine.roster.meet([known.me], self.now)
        peer.machine.roster.meet(known.view, self.now)
        self._download(name, through)
        return peer

    def _start(self, name: str, founder: bool) -> Peer:
        me = Member(name, next(self._incarnation), f"{name}:1")
        peer = self.peers[name] = Peer(Machine(me, self.rules, TIMING, "L", founder, self.now))
        if founder:
            self.event(name, m.StateHeld(0, "s0"))
        self._tick(name, peer)
        return peer

    def _download(self, name: str, through: str) -> None:
        source = self.peers[through]
        commit = source.chain[-1] if source.chain else None
        version = commit.version if commit else 0
        digest = self._state_digest(source.chain)
        self.peers[name].chain = list(source.chain)
        self.event(name, m.StateHeld(version, digest, commit))

    def kill(self, name: str) -> None:
        self.peers[name].alive = False

    def freeze(self, name: str, duration_s: float) -> None:
        peer = self.peers[name]
        peer.frozen = True
        self.later(duration_s, lambda: self._thaw(name, peer))

    def _thaw(self, name: str, peer: Peer) -> None:
        peer.frozen = False
        waiting, peer.inbox = peer.inbox, []
        for target, event in waiting:
            self.event(target, event)
        self._tick(name, peer)

    def leave(self, name: str) -> None:
        self.event(name, m.LeaveWanted())
        self.peers[name].alive = False
        self.peers[name].left = True

    # ------------------------------------------------------------ time

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until_s and not stop():
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _tick(self, name: str, peer: Peer) -> None:
        if peer.alive and not peer.frozen and self.peers[name] is peer:
            self.event(name, m.Tick())
            self.later(0.25, lambda: self._tick(name, peer))

    # ------------------------------------------------------------ events and effects

    def event(self, name: str, event: m.Event) -> None:
        peer = self.peers[name]
        if not peer.alive:
            return
        if peer.frozen:
            peer.inbox.append((name, event))
            return
        for effect in peer.machine.handle(event, self.now):
            self._perform(name, peer, effect)

    def _perform(self, name: str, peer: Peer, effect: m.Effect) -> None:
        match effect:
            case m.Send(to, body):
                self.deliver(name, to, m.Received(peer.machine.me, body))
            case m.SendContribution(version, attempt, span, to):
                for part in range(span.start, span.stop):
                    self.stream(name, to, m.ContributionArrived(version, attempt, name, part))
            case m.FoldPart(version, attempt, part):
                self.later(0.001, lambda: self.event(name, m.PartFolded(version, attempt, part)))
            case m.SendMean(version, attempt, part, to):
                for member in to:
                    self.stream(name, member, m.MeanArrived(version, attempt, name, part))
            case m.SealMean(version, attempt):
                assert peer.machine._reduction is not None
                digest = mean_digest(peer.machine._reduction.begin)
                self.later(0.001, lambda: self.event(name, m.MeanHeld(digest, version, attempt)))
            case m.FetchMean(commit, sources):
                if any(
                    self.reachable(name, s.peer) and commit.mean_digest in self.peers[s.peer].machine._held
                    for s in sources
                ):
                    self.later(0.1, lambda: self.event(name, m.MeanHeld(commit.mean_digest)))
            case m.CatchUp(source, _):
                if self.reachable(name, source.peer):
                    self.later(0.1, lambda: self._learn(name, source.peer))
            case m.Close(commit):
                self._closed(name, peer, commit)
            case m.GiveUp(reason, exposed):
                peer.skips.append(reason)
                peer.pending = peer.pending if exposed else None
                self._train(name)
            case m.Note(reason, _):
                self.transcript.append(f"{self.now:8.2f} {name}: {reason}")

    def reachable(self, a: str, b: str) -> bool:
        return self.peers[b].alive and not self.peers[b].frozen and not self.cut(a, b)

    def deliver(self, source: str, to: Member, event: m.Event) -> None:
        if to.peer not in self.peers or self.cut(source, to.peer) or self.random.random() < self.loss:
            return
        if not self.peers[to.peer].alive:
            self.later(self.delay_s, lambda: self.event(source, m.Unreachable(to, self.deaths_are_proven)))
            return
        for _ in range(2 if self.random.random() < self.loss else 1):
            self.later(self.delay_s * self.random.random(), lambda: self.event(to.peer, event))

    def stream(self, source: str, to: Member, event: m.ContributionArrived | m.MeanArrived) -> None:
        """Bytes do not overtake the `Begin` that makes room for them: a stream waits at its receiver's door."""
        if self.cut(source, to.peer) or not self.peers[to.peer].alive or self.random.random() < self.loss / 10:
            return
        deadline_s = self.now + TIMING.stall_s
        self.later(self.delay_s * self.random.random(), lambda: self._knock(to.peer, event, deadline_s))

    def _knock(self, name: str, event: m.ContributionArrived | m.MeanArrived, deadline_s: float) -> None:
        reducing = self.peers[name].machine.reducing or (-1, -1)
        if reducing >= (event.version, event.attempt):
            self.event(name, event)
        elif self.now < deadline_s:
            self.later(0.05, lambda: self._knock(name, event, deadline_s))

    def _learn(self, name: str, source: str) -> None:
        peer = self.peers[name]
        for commit in self.peers[source].chain:
            if commit.version > peer.machine.version or (peer.machine.commit is None and commit.version == 0):
                self.event(name, m.Learned(commit))

    # ------------------------------------------------------------ the training side

    def _closed(self, name: str, peer: Peer, commit: Commit) -> None:
        self._check(name, peer, commit)
        peer.chain.append(commit)
        peer.pending = None
        self.event(name, m.StateHeld(commit.version, self._state_digest(peer.chain)))
        self._train(name)

    def _check(self, name: str, peer: Peer, commit: Commit) -> None:
        known = self.commits.setdefault((commit.lineage, commit.version), commit)
        assert known.digest == commit.digest, (
            f"{name} closed another version {commit.version}: {commit} against {known}"
        )
        if peer.chain:
            assert commit.previous == peer.chain[-1].digest, f"{name}: the chain is broken at {commit.version}"

    def _train(self, name: str) -> None:
        peer = self.peers[name]
        life = peer.machine.me
        self.later(self.random.uniform(0.5, 1.5), lambda: self._offer(name, peer, life))

    def _offer(self, name: str, peer: Peer, life: Member) -> None:
        if self.peers[name] is not peer or not peer.machine.in_view or peer.machine._offer is not None:
            return
        if peer.machine.me != life or not peer.chain:
            return
        peer.pending = peer.pending or m.Offer(peer.chain[-1].version, 1, 100, BLOCKS)
        peer.pending = replace(peer.pending, base_version=peer.chain[-1].version)
        self.event(name, m.Offered(peer.pending))

    @staticmethod
    def _state_digest(chain: Sequence[Commit]) -> str:
        return hashlib.sha256("".join(commit.mean_digest for commit in chain).encode()).hexdigest() if chain else "s0"


def mean_digest(begin: m.Begin) -> str:
    text = f"{begin.version}{[(c.peer, c.weight) for c in begin.contributors]}"
    return hashlib.sha256(text.encode()).hexdigest()
