"""The machines under the simulated processes: which of them share one, and which deaths its kernel proves.

What a peer may take for proven is decided here, by the answers that it got, and not by what is really so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.protocol.streams import ProcessId
from diloco.simulate.virtual.oracle.gate import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.process import SimulatedProcess
    from diloco.simulate.virtual.world import SimulatedWorld

SOON_S = 0.001
"""A task that an event begins has begun by then."""


class SimulatedMachines:
    """Machines of a simulation: one for all processes, or one for each name."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._processes: dict[str, list[SimulatedProcess]] = {}
        """By name, the latest last."""
        self._listened: dict[str, SimulatedProcess] = {}
        """By address: the process that listens there, or was the last to do so."""
        self._lives: dict[int, SimulatedProcess] = {}
        self._known: set[tuple[int, int]] = set()
        """Life of a process that asked, and life of a process that it has seen on its own machine."""
        self._proofs: set[tuple[int, int]] = set()
        """Life of a process that asked, and life whose death the answer proves."""

    def starts(self, process: SimulatedProcess) -> None:
        """A process starts on its machine."""
        self._processes.setdefault(process.name, []).append(process)
        self._lives[process.life] = process

    def listens(self, process: SimulatedProcess) -> None:
        """A process listens at its address from now on."""
        self._listened[process.address] = process
        self._look_at_questions(process)

    def _look_at_questions(self, process: SimulatedProcess) -> None:
        """I7: whoever hears a life asks which process it is, until that answers."""
        assert process.service is not None
        exchange = process.service.exchange
        receive, ask = exchange.receive, exchange.lives.ask
        asked_s: dict[tuple[str, int], float] = {}

        async def on_ask(member: Member, boot: int, stranger: bool = False) -> bool:
            asked_s[member.peer, member.incarnation] = self.world.now
            return await ask(member, boot, stranger)

        def check(member: Member, heard_s: float) -> None:
            idle = not process.alive or process.loop.stopped or process.leaving
            if not idle and asked_s.get((member.peer, member.incarnation), -math.inf) < heard_s:
                raise Violation("I7", f"{process.name} hears {member.peer}, and does not ask which process it is")

        def on_receive(envelope: m.Envelope) -> m.Reply:
            reply = receive(envelope)
            if reply is m.Reply.OK and not exchange.lives.met(envelope.sender, envelope.boot):
                self.world.after(SOON_S, check, envelope.sender, self.world.now)
            return reply

        exchange.receive, exchange.lives.ask = on_receive, on_ask  # type: ignore[method-assign]

    def shared(self, name: str, other: str) -> bool:
        """Whether the processes of these names run on one machine."""
        return name == other or self.world.plan.proven

    def process_of(self, member: Member) -> SimulatedProcess | None:
        """The process that is, or was, this life of a peer."""
        for process in reversed(self._processes.get(member.peer, [])):
            if process.address == member.address and member.incarnation in process.incarnations:
                return process
        return None

    def latest_of(self, member: Member) -> SimulatedProcess | None:
        """The latest process of this life of a peer, wherever it listens."""
        lives = (
            one for one in reversed(self._processes.get(member.peer, [])) if member.incarnation in one.incarnations
        )
        return next(lives, None)

    def saved_at_least(self, versions: int) -> int:
        """Version that some disk must have a checkpoint of, or of a later one: it is known to be whole; or a life whose
        disk refused nothing saves one after it applied so many versions, and may die while it does."""
        disks = [disk for name, disk in self.world.disks.items() if name in self.world.plan_names]
        found = [disk.durable for disk in disks]
        for process in self.processes():
            whole = process.entered and process.disk in disks and not (process.disk.damaged or process.disk.refusals)
            if whole and process.progress is not None:
                saved = process.line.state.version - 2 * versions
                found += [saved] if saved >= process.progress.copied_version else []
        return max(found, default=-1)

    def processes(self) -> Iterator[SimulatedProcess]:
        """All processes of the simulation, the dead, too."""
        return itertools.chain.from_iterable(self._processes.values())

    def lives_of(self, name: str, incarnation: int) -> list[SimulatedProcess]:
        """Processes of this name that began their life under this number."""
        return [process for process in self._processes.get(name, []) if incarnation in process.incarnations]

    def former_life(self, process: SimulatedProcess) -> int | None:
        """The last number of the process of this name before this one; None: it is the first."""
        before = [one for one in self._processes[process.name] if one.life < process.life and one.incarnations]
        return max(before[-1].incarnations) if before else None

    def named(self, address: str) -> ProcessId | None:
        """The process that listens at an address, as it names itself."""
        there = self._listened.get(address)
        return ProcessId("", "", "", there.life + 1, 0) if there is not None else None

    def lives(self, asker: SimulatedProcess, process: ProcessId) -> bool | None:
        """The kernel's answer to a process: whether another one lives that named itself; None where it cannot know."""
        other = self._lives[process.pid - 1]
        if not self.shared(asker.name, other.name) or other.loses_power:
            return None
        (self._known if other.alive else self._proofs).add((asker.life, other.life))
        return other.alive

    def proved(self, process: SimulatedProcess, view: Sequence[Member]) -> set[str]:
        """Members of a view whose deaths were proven to a process."""
        found = ((member.peer, self.lives_of(member.peer, member.incarnation)) for member in view)
        return {peer for peer, gone in found if any((process.life, one.life) in self._proofs for one in gone)}

    def provable(self, asker: SimulatedProcess, member: Member) -> bool:
        """Whether a process would be told that this life of a peer is dead, if it asked: it knows its process."""
        gone = self.process_of(member)
        over = gone is not None and not gone.alive and not gone.loses_power
        return over and gone is not None and (asker.life, gone.life) in self._known
