"""Simulated peers under gossip: `GossipLife` on the same network, disks and timeline, with checks of its own.

There is no ledger, no vote and no view. Instead:

    G1    every token that a life trained is counted by one swap, discarded with a word, or still in its weights
    G2    weights are the anchor and the progress since they were last counted, and nothing else
    G3    nobody claims that more was trained than was
    G4    everybody ends with `done`, whatever happened to others, and those that average after the last fault end alike
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco.base.life import Life
from diloco.base.types import Member
from diloco.gossip.pairing import spread
from diloco.gossip.peer import GossipLife, GossipPeer
from diloco.gossip.swapping import MAX_STEP_S, Swapping
from diloco.island import Island
from diloco.island.slices import Pieces, held
from diloco.observe.events import Stamped, SwapApplied
from diloco.outer.fragments import read_fragment
from diloco.outer.line import Line
from diloco.run.run import Leading, Run
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.plan import EXCHANGE_S, Fault, FaultPlan
from diloco.simulate.virtual.plans.setup import FINAL_S, NOISES, STEPS, flat_noise, noises
from diloco.simulate.virtual.process import SimulatedProcess
from diloco.simulate.virtual.training import SimulatedTraining
from diloco.simulate.virtual.world import HEAL_S, SimulatedWorld
from diloco.storage.checkpoint import Checkpoint
from diloco.transport.link import Service

TOLERANCE = 1e-3
FAR = 10.0
"""Times the contract's tolerance by which two may differ in the end: each met a few others only."""
KINDS = (
    "kill", "power", "stop", "cut", "link", "tunnel", "slow", "late", "join", "leave", "jump", "full", "disk", "second",
    "corrupt", "flip", "replay", "restart",
)  # fmt: skip
"""Faults that there are under gossip."""


class GossipWorld(SimulatedWorld):
    """A simulation in which peers swap weights in pairs."""

    def __init__(self, plan: FaultPlan, record: bool = False) -> None:
        super().__init__(plan, record)
        rounds = plan.total_tokens / STEPS / max(1, plan.peers // 2)
        self.heal_s = HEAL_S + FINAL_S + rounds * (plan.longest_round_s + EXCHANGE_S)
        if any(fault.kind == "jump" for fault in plan.faults):
            self.heal_s += 2 * MAX_STEP_S  # whose clock jumps seems as slow, and is waited for
        self.trained: dict[str, int] = {}
        """Tokens of all lives, by peer."""
        self.swaps = 0
        self._ended: dict[str, Tensor] = {}
        """Weights of those that averaged after the faults."""

    def process_of(self, name: str, life: int, address: str, founder: bool, resumes: bool) -> SimulatedProcess:
        return GossipProcess(self, name, life, address, founder, resumes)

    def happens(self, fault: Fault) -> bool:
        return fault.kind in KINDS

    def directory(self, asker: SimulatedProcess) -> list[Member]:
        others = [host for host in self.hosts.values() if host is not asker and host.alive and host.up]
        return [host.exchange.me for host in others if self.network.connected(asker.name, host.name)]

    def _heal(self) -> None:
        self.network.loss = 0.0
        self.log("", "the faults are over")
        if not any(host.alive for host in self.hosts.values()):
            self.start("p0", founder=True, resumes=True)
        if not self._until(self.now + self.heal_s, self._all_ended):
            hosts = [host for host in self.hosts.values() if host.up and host.alive]
            living = ", ".join(f"{host.name} ({host.standing()})" for host in hosts if isinstance(host, GossipProcess))
            raise Violation("G4", f"{self.heal_s:g} s after the faults these go on: {living}")
        self._check_alike()

    def _all_ended(self) -> bool:
        """Whether all that trained have ended; who knocks, and nobody is left, has nothing to end."""
        return not any(host.alive and host.up for host in self.hosts.values())

    def versions(self) -> int:
        return self.swaps

    def claims(self, tokens: int, who: str) -> None:
        """Check what a peer says was trained by all."""
        if tokens > sum(self.trained.values()):
            raise Violation("G3", f"{who} knows of {tokens} tokens, {sum(self.trained.values())} were trained")

    def ends(self, host: SimulatedProcess, run: Run) -> None:
        self.count("ends")
        assert isinstance(host, GossipProcess)
        if host.line.trained.tokens:
            raise Violation("G1", f"{host.name} ends, and {host.line.trained.tokens} of its tokens are nowhere")
        if run.tokens < self.plan.total_tokens:
            raise Violation("G4", f"{host.name} ends after {run.tokens} tokens of {self.plan.total_tokens}")
        tolerance = self.setup.contract.gossip.tolerance
        if host.averaged_since_s > self.plan.quiet_s and run.spread is not None and run.spread <= tolerance:
            self._ended[host.name] = host.line.state.fragments[0].anchor.clone()

    def _check_alike(self) -> None:
        tolerance = self.setup.contract.gossip.tolerance
        ended = sorted(self._ended.items())
        for place, (name, mine) in enumerate(ended):
            for other, theirs in ended[place + 1 :]:
                if not (apart := spread(mine, theirs)) <= FAR * tolerance:
                    raise Violation("G4", f"{name} and {other} end {apart:.2g} apart, {tolerance:g} was wanted")


class GossipProcess(SimulatedProcess):
    """The process of a simulated peer under gossip."""

    @property
    def listeners(self) -> Any:  # type: ignore[override]
        """They hear the events of the peer."""
        return (self.on_event,)

    swapping: Swapping
    averaged_since_s = -1.0
    """Virtual time at which its final average began."""

    @property
    def exchange(self) -> Any:  # type: ignore[override]
        return self.swapping

    def standing(self) -> str:
        """Where it is, in words."""
        peer = self._peer()
        others = len(self.swapping.alive())
        return f"{peer.progress.phase} with {peer.position()} tokens, {others} others: {self.swapping.reason}"

    def close_files(self) -> None:
        if self._leading is not None:
            self._peer().events.close()

    def serve(self, service: Service) -> None:
        assert isinstance(service, Swapping)
        self.service, self.swapping = service, service  # type: ignore[assignment]
        self.world.network.listen(self)

    def lies(self, header: Any, address: str, parts: Any) -> Any:
        return parts

    def held(self) -> dict[str, int]:
        return {"tasks": len(self.swapping._tasks)}

    def _training(self, island: Island) -> SimulatedTraining:
        return GossipTraining(self, island)

    def _peer(self) -> GossipPeer:
        assert self._leading is not None
        assert isinstance(self._leading.life, GossipLife)
        return self._leading.life.peer

    def on_event(self, stamped: Stamped) -> None:
        """Look at an event of this peer."""
        if isinstance(stamped.event, SwapApplied):
            assert isinstance(self.training, GossipTraining)
            self.training.counted(stamped.event)

    def _observe(self, leading: Leading) -> None:
        peer = self._peer()
        training = self.training
        assert isinstance(training, GossipTraining)
        count, apply, average = peer._count, peer._apply, peer.average

        def on_count(swap: Any = None) -> Any:
            mine = count(swap)
            training.measured(mine)
            return mine

        def on_apply(mine: Any, *rest: Any) -> None:
            apply(mine, *rest)
            training.applied(mine, peer)

        def on_average() -> Life[None]:
            self.averaged_since_s = self.world.now
            return average()

        peer._count, peer._apply, peer.average = on_count, on_apply, on_average  # type: ignore[assignment, method-assign]


class GossipTraining(SimulatedTraining):
    """Whoever trains for a simulated peer under gossip, and the progress that no swap has counted."""

    def __init__(self, process: SimulatedProcess, island: Island) -> None:
        super().__init__(process, island)
        self._sum: Tensor | None = None
        """All progress of this life."""
        self._at: tuple[object, Tensor] | None = None
        """Weights that were counted last, and the progress until then."""
        self._base: Tensor | float = 0.0
        """Progress that swaps counted."""
        self.trained = self.booked = 0
        """Tokens of this life, with those that its checkpoint brought; those that swaps counted."""

    def _line(self) -> Line:
        return self._process.line

    def _local(self) -> Tensor:
        line = self._line()
        return read_fragment(line.parameters, line.layout.fragments[0]) - line.state.fragments[0].anchor

    def step(self) -> int:
        """An inner step."""
        self.steps += 1
        world, fragment = self._process.world, self._line().layout.fragments[0]
        assert isinstance(world, GossipWorld)
        if self._sum is None:
            self._sum, self.trained = self._local(), self._line().trained.tokens
        piece, elements = world.next_piece() % NOISES, world.plan.elements
        self._sum = self._sum + flat_noise(piece, fragment, elements)
        for name, noise in noises(elements)[piece].items():
            self.weights.parameters[name].data.add_(noise)
        self.trained += 1
        world.trained[self._process.name] = world.trained.get(self._process.name, 0) + 1
        return 0

    def measured(self, mine: object) -> None:
        """Note the progress that is in weights which are about to be counted."""
        if mine is not None and self._sum is not None:
            self._at = mine, self._sum

    def applied(self, mine: object, peer: GossipPeer) -> None:
        """Check the weights after a swap (G2)."""
        if self._sum is None or self._at is None or self._at[0] is not mine or peer.settling is not None:
            return
        self._base = self._at[1]
        error = (self._local() - (self._sum - self._base)).abs().max().item()
        if not error <= TOLERANCE:
            what = f"the weights are off by {error:.2g} from anchor plus progress"
            raise Violation("G2", f"{self._process.name} after swap {peer.version}: {what}")

    def counted(self, event: SwapApplied) -> None:
        """Check the tokens after a swap (G1, G3)."""
        process = self._process
        assert isinstance(process, GossipProcess)
        assert isinstance(process.world, GossipWorld)
        peer = process._peer()
        self.booked += event.inner_tokens
        process.world.swaps += event.leads
        process.world.log(
            process.name, f"swap {event.version} with {event.partner}{', finally' if event.final else ''}"
        )
        process.world.claims(event.tokens, process.name)
        known = self.booked + peer.line.trained.tokens + peer.discarded_tokens
        if self._sum is not None and peer.settling is None and known != self.trained:
            what = f"{self.booked} tokens counted, {peer.line.trained.tokens} kept, {peer.discarded_tokens} discarded"
            raise Violation("G1", f"{process.name} after swap {event.version}: {what}, {self.trained} trained")
        if torch.isnan(self._local()).any():
            raise Violation("G2", f"{process.name} has weights that are no numbers")

    def kept(self) -> Any:
        """Nothing: its progress is in its weights."""
        return {}, {}

    def restore(self, opened: Any) -> None:
        """Take the weights from a checkpoint."""
        weights = opened().groups.get("local", Pieces(()))
        for name, parameter in self.weights.parameters.items() if weights else ():
            weights.read(held(name, parameter.detach()))

    def reader(self, line: Line, checkpoint: Checkpoint | None) -> Any:
        """None: nothing is read."""
