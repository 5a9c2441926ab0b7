"""A swarm of many simulated peers of different speeds that come and go: what each sends, holds and waits for.

The figures are of the protocol, not of the small model: control messages in bytes as they are sealed, streams
in sizes S of an encoded contribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import Any

import torch

from diloco.base.types import Commit
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.draw import draw_speeds
from diloco.simulate.virtual.plans.plan import Fault, FaultPlan
from diloco.simulate.virtual.process import SimulatedProcess
from diloco.simulate.virtual.world import SimulatedWorld
from diloco.wire.convert import seal

SETTLE_S = 5.0
"""After the first round of the slowest, whose pace nobody knows before. Then the measuring begins."""
JITTER = 0.05
"""Spread of the time of a peer's inner steps: the same hardware does the same each time."""
COMINGS = ("kill", "stop", "leave", "cut", "join")
AWAY_S = (2.0, 12.0)
"""Seconds that a peer is stopped, cut off or dead: the least and the most."""


@dataclass(frozen=True)
class SwarmOptions:
    """Settings of a simulated swarm."""

    peers: int
    seconds: float = 60.0
    """Measured time in virtual seconds."""
    speeds: tuple[float, float] = (0.1, 1.0)
    churn_per_minute: float = 0.1
    """Share of the peers to which something happens in a minute: killed and back, stopped, cut off, gone, come new."""
    policy: str = "async"
    sized_by: str = "speed"
    round_s: float = 2.0
    """Seconds of a round of a peer of speed 1."""
    overlap: float = 1.0
    """Share of it that hides the exchange."""
    seed: int = 0

    @property
    def warm_s(self) -> float:
        """Virtual seconds before measuring begins: one round of the slowest peer, and time to settle."""
        return self.round_s / self.speeds[0] + SETTLE_S

    def plan(self) -> FaultPlan:
        """Plan of faults of the simulated swarm with these options."""
        dice = Random(f"swarm {self.seed}")
        return FaultPlan(
            seed=self.seed,
            peers=self.peers,
            codec="int8",
            weighting="tokens",
            policy=self.policy,
            optimizer="delayed_nesterov" if self.policy == "async" else "nesterov",
            round_s=self.round_s,
            jitter=JITTER,
            overlap=self.overlap,
            speeds=draw_speeds(dice, self.peers, self.speeds),
            sized_by=self.sized_by,
            faults=tuple(self._churn(dice)),
        )

    def _churn(self, dice: Random) -> Iterator[Fault]:
        """Faults of a simulated swarm, at even distances in time, lest many coincide; half of the peers have none."""
        count = round(self.churn_per_minute * self.peers * self.seconds / 60)
        for number in range(count):
            at_s = round(self.warm_s + self.seconds * (number + dice.random()) / count, 2)
            kind, away_s = dice.choice(COMINGS), round(dice.uniform(*AWAY_S), 2)
            peer = f"p{dice.randrange(self.peers // 2, self.peers)}"
            if kind == "join":
                yield Fault(at_s, "join", f"j{number}")
            elif kind in ("kill", "leave"):
                yield Fault(at_s, kind, peer)
                yield Fault(round(at_s + away_s, 2), "restart", peer, 0.0, "disk")
            else:
                yield Fault(at_s, kind, peer, away_s, "both" if kind == "cut" else "")


class SwarmMeter:
    """Counter of messages and bytes that a simulated swarm sends; it changes nothing."""

    def __init__(self) -> None:
        self.messages: Counter[tuple[str, str]] = Counter()
        """By sender and kind."""
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._body: m.Body | None = None
        self._size = 0

    def sent(self, name: str, envelope: m.Envelope) -> None:
        """Count a simulated peer's message: the same words to many have one size, but for their number's digits."""
        if envelope.body is not self._body:
            self._body, self._size = envelope.body, seal(envelope).ByteSize()
        key = name, type(envelope.body).__name__
        self.messages[key] += 1
        self.bytes[key] += self._size


@dataclass(frozen=True)
class SwarmMark:
    """Progress of the simulated swarm at a time."""

    at_s: float
    version: int
    tokens: int
    trained_tokens: int
    discarded_tokens: int
    """Tokens discarded by all peers since the beginning, as are those trained."""
    waited_s: Mapping[tuple[str, int], float]
    """By peer and life: of those that take part."""
    held: Mapping[str, int]
    """The most that any peer holds of each."""


class SimulatedSwarm(SimulatedWorld):
    """The simulated world of a swarm, with a meter in it."""

    keeps_disks = False
    """They hold every commit, of O(n) bytes, n times."""

    def __init__(self, options: SwarmOptions) -> None:
        super().__init__(options.plan())
        self.options = options
        self.meter = SwarmMeter()

    def performed(self, host: SimulatedProcess, effect: fx.Effect) -> None:
        """Meter an effect that a simulated peer is about to carry out; no transcript is written."""
        if isinstance(effect, fx.Send):
            self.meter.sent(host.name, effect.envelope)

    def measure(self) -> dict[str, Any]:
        """Simulate the swarm and return its figures. Raises Violation."""
        options = self.options
        with self.surroundings():
            self._begin()
            first, events = self._mark_at(options.warm_s), self.timeline.events
            self.meter = SwarmMeter()
            middle = self._mark_at(options.warm_s + options.seconds / 2)
            last = self._mark_at(options.warm_s + options.seconds)
            result = figures(self, first, middle, last) | {"events": self.timeline.events - events}
            self._heal()
        return result

    def newest_commit(self) -> Commit | None:
        """Newest commit that any simulated peer has."""
        commits = [host.machine.commit for host in self._honest() if host.machine.commit]
        return max(commits, key=lambda commit: commit.height, default=None)

    def _mark_at(self, at_s: float) -> SwarmMark:
        self._until(at_s, lambda: False)
        newest = self.newest_commit()
        if newest is None:
            raise Violation("I7", f"not founded after {at_s:g} s")
        hosts = [host for host in self._honest() if host.entered]
        waited_s = {(host.name, host.life): host.waited(self.now) for host in hosts}
        seen = self.invariants
        tokens = newest.tokens, seen.trained_tokens, seen.discarded_tokens
        return SwarmMark(self.now, newest.version, *tokens, waited_s, max_held(hosts))


@torch.inference_mode()
def measure_swarm(options: SwarmOptions) -> dict[str, Any]:
    """The figures of one simulated swarm. Raises Violation."""
    return SimulatedSwarm(options).measure()


# ---------------------------------------------------------------- figures


def max_held(hosts: Sequence[SimulatedProcess]) -> dict[str, int]:
    """The most that any one of these simulated peers has in memory, by kind."""
    held = [host.held() for host in hosts]
    return {name: max(entry[name] for entry in held) for name in held[0]}


def figures(swarm: SimulatedSwarm, first: SwarmMark, middle: SwarmMark, last: SwarmMark) -> dict[str, Any]:
    """Figures of a simulated swarm from the first mark to the last."""
    seconds, versions = last.at_s - first.at_s, last.version - first.version
    commits = swarm.invariants.commits.values()
    closed = [commit for commit in commits if commit.moves and first.version < commit.version <= last.version]
    views = [one for one in commits if one.drafter and first.version <= one.version < last.version]
    return {
        "peers": swarm.options.peers,
        "seconds": round(seconds, 1),
        "versions": versions,
        "versions_per_s": round(versions / seconds, 3),
        "view_commits": len(views),
        **_traffic(swarm, seconds, max(versions, 1)),
        **_contributions(closed),
        **_waiting(swarm, first, last),
        "tokens_committed_share": round(last.tokens / last.trained_tokens, 4),
        "tokens_discarded_share": round(last.discarded_tokens / last.trained_tokens, 4),
        "held_half_way": dict(middle.held),
        "held": dict(last.held),
        "faults": dict(sorted(swarm.faults.items())),
    }


def _traffic(swarm: SimulatedSwarm, seconds: float, versions: int) -> dict[str, Any]:
    """Control messages that a peer of the simulated swarm sends."""
    peers, meter = swarm.options.peers, swarm.meter
    kinds: Counter[str] = Counter()
    by_peer: Counter[str] = Counter()
    for (name, kind), size in meter.bytes.items():
        kinds[kind] += size
        by_peer[name] += size
    sent, total = meter.messages.total(), kinds.total()
    return {
        "messages_per_peer_per_s": round(sent / peers / seconds, 1),
        "bytes_per_peer_per_s": round(total / peers / seconds),
        "bytes_of_the_busiest_per_s": round(max(by_peer.values()) / seconds),
        "bytes_per_peer_per_version": round(total / peers / versions),
        "bytes_per_peer_per_s_by_kind": {kind: round(size / peers / seconds) for kind, size in kinds.most_common()},
    }


def _contributions(closed: Sequence[Commit]) -> dict[str, Any]:
    """Contributions per version of a simulated swarm, uploads by peer, and versions since a peer's last one."""
    groups = [len(commit.counted) for commit in closed]
    uploads = [upload_shares(len(commit.counted), len(commit.view)) for commit in closed]
    before: dict[str, int] = {}
    stale = []
    for commit in closed:
        stale += [commit.version - before[entry.peer] - 1 for entry in commit.counted if entry.peer in before]
        before |= {entry.peer: commit.version for entry in commit.counted}
    return {
        "contributors": round(mean(groups), 1),
        "contributors_least": min(groups),
        "upload_sizes": round(mean(uploads), 2),
        "upload_sizes_most": round(max(uploads), 2),
        "commit_bytes": max(len(commit.to_bytes()) for commit in closed),
        "staleness": round(mean(stale), 2),
        "staleness_most": max(stale),
    }


def upload_shares(contributors: int, receivers: int) -> float:
    """Bytes that each simulated contributor uploads for a version, in sizes of its contribution, where there are parts
    enough: the parts of its own that others own, and its part of the mean to all who receive it."""
    return 1 - 1 / contributors + (receivers - 1) / contributors


def _waiting(swarm: SimulatedSwarm, first: SwarmMark, last: SwarmMark) -> dict[str, Any]:
    """Waiting of the simulated peers to which nothing happened."""
    touched = {fault.peer for fault in swarm.plan.faults}
    spared = [life for life in last.waited_s if life in first.waited_s and life[0] not in touched]
    shares = [(last.waited_s[life] - first.waited_s[life]) / (last.at_s - first.at_s) for life in spared]
    return {"waited_share": round(mean(shares), 4), "waited_share_most": round(max(shares), 4)}
