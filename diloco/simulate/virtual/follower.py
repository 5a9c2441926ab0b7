"""A rank of a simulated peer that does not lead: it runs `Run` and its own lane, as a process of torchrun does.

To the network it is a place of its own, where its lane listens, on the machine of its peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.base.errors import DilocoError
from diloco.base.life import Life
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.island import Island
from diloco.outer.fragments import Weights
from diloco.outer.line import Line
from diloco.peer.rank import PeerRank, PeerTraining
from diloco.run.door import Entrance, Parts, open_run
from diloco.simulate.virtual.checkpoints import SimulatedLog, SimulatedSaving
from diloco.simulate.virtual.endpoint import NoSockets, SimulatedRuntime
from diloco.simulate.virtual.network import SimulatedLink
from diloco.simulate.virtual.plans.setup import RPC_S, noises
from diloco.simulate.virtual.ranks.island import SimulatedIsland
from diloco.simulate.virtual.training import SimulatedTraining
from diloco.transport.link import Service

if TYPE_CHECKING:
    from diloco.exchange.lane import Lane
    from diloco.simulate.virtual.process import SimulatedProcess

FIRST_PORT = 1000
"""Between the ports of two ranks."""


class SimulatedFollower:
    """Another rank than 0 of one life of a simulated peer."""

    def __init__(self, process: SimulatedProcess, rank: int) -> None:
        self.process = process
        self.name, self.loop = process.name, process.loop
        host, _, port = process.address.partition(":")
        self.address = f"{host}:{FIRST_PORT * rank + int(port)}"
        self.lie = ""
        """Only peers of one rank lie."""
        self.service: Service | None = None
        """Its answers to other peers, once its lane listens."""
        self.calls: dict[Any, None] = {}
        """Calls of others that it is answering."""
        self.link = SimulatedLink(process.world.network, self, RPC_S)  # type: ignore[arg-type]
        self.rank: PeerRank | None = None
        assert process.ranks is not None
        self._island = SimulatedIsland(process.ranks, rank)

    @property
    def send_bps(self) -> int:
        """The uplink that this simulated rank reports, bits per second."""
        return self.process.send_bps

    @property
    def working(self) -> bool:
        """Whether the process of the simulated rank lives, and is not stopped."""
        return self.process.working

    @property
    def line(self) -> Line | None:
        """The line of the parts that this simulated rank holds."""
        return self.rank.line if self.rank is not None else None

    @property
    def lane(self) -> Lane | None:
        """The lane of this simulated rank, once it is open."""
        return self.rank._lane if self.rank is not None else None

    def life(self) -> Life[None]:
        """The life of this simulated rank: whatever rank 0 decides, and the same inner steps."""
        training, plan = SimulatedTraining(self.process, self._island), self.process.world.plan

        def build(contract: Contract) -> Parts:
            return Parts(training.weights, training)

        run = yield from open_run(_nobody, self.process.world.setup.site, self._island, build, self._take_place)
        yield from run.waiting(float("inf"))
        while not (run.done or run.leaving):
            training.follow(noises(plan.elements)[int(self._island.share())])
            yield from run.stepping(1, None, 0)
        yield from run.leaves()

    def _take_place(
        self, contract: Contract, site: Site, island: Island, weights: Weights, trains: PeerTraining
    ) -> PeerRank:
        rank = self.rank = SimulatedRank(contract, site, island, weights, trains)
        rank.follower, rank.counter = self, NoSockets()
        SimulatedSaving(self.process, rank.saver, leads=False)
        return rank

    def serve(self, service: Service) -> None:
        """The simulated rank's lane listens from now on. What goes wrong in it is a finding, whoever looks."""
        self.service = service
        self.process.world.network.listen(self)
        lane = self.lane
        assert lane is not None
        SimulatedLog(self.process, lane)
        failed = lane.failed

        def on_failed(error: BaseException) -> None:
            if isinstance(error, Exception) and not isinstance(error, DilocoError):
                self.loop.reports(error)
            failed(error)

        lane.failed = on_failed  # type: ignore[method-assign]


class SimulatedRank(PeerRank):
    """`PeerRank` of a simulated rank that does not lead."""

    follower: SimulatedFollower

    def open_runtime(self, private: bool) -> Any:
        """The loop of the simulated process, and the link of this rank."""
        return SimulatedRuntime(self.follower)  # type: ignore[arg-type]


def _nobody() -> Entrance:
    raise AssertionError("only rank 0 enters")
