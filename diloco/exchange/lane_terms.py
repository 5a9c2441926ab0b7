"""Terms of a lane, the events that it reports, and versions with their outer step."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from diloco.base.types import Closed, Member
from diloco.compress import Codec
from diloco.outer.average import max_part_bytes
from diloco.outer.fragments import Layout
from diloco.outer.state import FragmentState, OuterOptimizer
from diloco.outer.stepping import Stepping
from diloco.outer.weighing import Weighing
from diloco.protocol import messages as m
from diloco.protocol.streams import StreamHeader


@dataclass(frozen=True)
class LaneTerms:
    """Settings of the run that a lane needs."""

    layout: Layout
    """Layout of the parts that are held here. Without fragments for a witness."""
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    stall_s: float
    max_norm_ratio: float = 0.0
    """A contribution that is so many times larger than the others' is refused; 0: none is."""
    radial: bool = False
    """Lengths and directions are averaged apart (`diloco.outer.radial`)."""
    ahead: bool = True
    """Outer steps are made part by part as the mean arrives; else in place, when the version is applied."""

    @property
    def max_part_bytes(self) -> int:
        """Largest part that others send, in bytes."""
        return max_part_bytes(self.layout, self.codecs)


@dataclass(frozen=True, slots=True)
class SteppedVersion(Closed):
    """A version that the lane averages and steps on a thread of its own, from the state that its commit names.

    It is a `diloco.base.life.Stepped`.
    """

    stepping: Stepping
    stepper: Executor
    averaging: Future[None]
    stepped: Future[FragmentState] | None
    """None: in place, once it is asked for."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Spent by step of the line."""
        return self.stepping.seconds

    def averaged(self) -> Future[None]:
        """Raises PayloadError when the mean is no mean."""
        return self.averaging

    def outer(self, in_place: bool) -> Future[FragmentState]:
        """The fragment's state after the outer step, which was made as the mean arrived, or is made now."""
        return self.stepped or self.stepper.submit(self.stepping.outer, self.parts, in_place)


class LaneEvents(Protocol):
    """Receiver of a lane's events: the exchange, in this process or on another rank."""

    def on_event(self, event: m.Event, content: bytes = b"") -> None:
        """Takes an event. `content`: for a part of a mean, its `content_hash`."""

    def on_lost(self, member: Member) -> None:
        """A stream to this member broke."""

    def admit(self, header: StreamHeader) -> Awaitable[m.Reply]:
        """Whether a stream may be read; waits until the reduction that it belongs to has begun here."""

    def failed(self, error: BaseException) -> None:
        """The lane is of no use any more."""
