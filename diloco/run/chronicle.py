"""The record of one peer's run, on rank 0: its events, as far as they tell of training, and its data leases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Protocol

from diloco.base.clock import monotonic_s
from diloco.base.types import Commit, Counted
from diloco.observe.events import FLIGHT, Event, Started, TrainingProgress, VersionClosed
from diloco.peer.rank import PeerRank
from diloco.protocol.leases import front
from diloco.round import Seconds
from diloco.transport.sockets import SocketBytes

REPORT_EVERY_S = 0.5


class Leased(Protocol):
    """Whoever reads the blocks of data that a peer leases (`diloco.run.trainer`)."""

    @property
    def repeats(self) -> int:
        """Blocks read again because the lease had no others."""

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None) -> None:
        """A version was applied."""

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """The line stands at a copied state."""

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""


class Chronicled(Protocol):
    """The peer whose record it is."""

    def wire(self) -> SocketBytes | None:
        """Bytes on the wire so far."""

    def report(self, **changes: str | int | float) -> None:
        """Change what others hear of it."""


class Chronicle:
    """Also `diloco.peer.peer.Chronicle`."""

    def __init__(self, rank: PeerRank, emit: Callable[[Event], None], reader: Leased | None) -> None:
        """`emit`: writes an event of this process's. `reader`: of leased data."""
        self.rank, self.reader = rank, reader
        self.peer: Chronicled | None = None
        """Set before anything happens to it."""
        self.attempts: Callable[[], int] = lambda: 0
        """Of the exchange at the version that closed."""
        self.steps = 0
        """Inner steps over all lives."""
        self._emit = emit
        self.tokens_here = 0
        self._losses: list[float] = []
        self._loss: float | None = None
        self.began_s = self._reported_s = monotonic_s()

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this peer trained per second, since its life began to train."""
        return self.tokens_here / max(monotonic_s() - self.began_s, 1e-9)

    def begin(self) -> None:
        """Training begins here."""
        self.began_s = monotonic_s()

    def started(self, run: str, contract_digest: str, version: int, total_tokens: int) -> Started:
        """The event that tells what is trained, on which hardware."""
        about = {"run": run, "contract_digest": contract_digest, "total_tokens": total_tokens}
        return Started(**about, resumed_version=version, **self.rank.trains.facts())  # type: ignore[arg-type]

    def trained(self, tokens: int, loss: float | None) -> None:
        """An inner step was done."""
        self.steps += 1
        self.tokens_here += tokens
        self._loss = loss if loss is not None and math.isfinite(loss) else None
        if loss is not None:
            self._losses.append(loss)
        now_s = monotonic_s()
        if now_s - self._reported_s >= REPORT_EVERY_S and self.peer is not None:
            self._reported_s = now_s
            wire = self.peer.wire()
            self.peer.report(
                inner_step=self.steps,
                tokens=self.tokens_here,
                tokens_per_s=self.tokens_per_s,
                wire_bytes_sent=wire.sent if wire else 0,
                **({} if self._loss is None else {"loss": self._loss}),
            )
            self._emit(TrainingProgress(self.steps, self.tokens_here, self._loss))

    def take_loss(self) -> float | None:
        """Mean over the inner steps since it was taken last; None: nobody tells one."""
        losses, self._losses = self._losses, []
        return fmean(losses) if losses else None

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None, seconds: Seconds) -> Event | None:
        """A version was applied. Returns its event; a founding has none."""
        if self.reader is not None:
            self.reader.closed(commit, before, mine)
        if before is None or commit.version == before.version:
            self.begin()
            return None
        assert self.peer is not None
        wire, flight_s = self.peer.wire(), seconds.pop(FLIGHT, None)
        blocks = front(before.leases.held.get(self.rank.line.peer, ()), mine.blocks) if mine else ()
        return VersionClosed(
            version=commit.version,
            lineage=commit.lineage,
            fragment=commit.fragment,
            tokens=commit.tokens,
            members=tuple(member.peer for member in commit.view),
            counted=tuple(counted.peer for counted in commit.counted),
            own=mine is not None,
            attempts=self.attempts(),
            loss=self.take_loss(),
            inner_tokens=mine.tokens if mine else 0,
            blocks=tuple((run.start, run.stop) for run in blocks),
            tokens_per_s=self.tokens_per_s,
            wire_bytes_sent=wire.sent if wire else None,
            wire_bytes_received=wire.received if wire else None,
            seconds=rounded(seconds),
            flight_s=flight_s,
            state_digest=self.rank.line.state.digest,
            repeats=self.reader.repeats if self.reader is not None else None,
            **self.rank.trains.version_fields(),
        )

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """The line stands at a copied state: no version closed here, so its lease is not known yet."""
        if self.reader is not None:
            self.reader.copied(commit, before)

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of the run beside the line."""
        return {"run_steps": self.steps, **(self.reader.numbers() if self.reader is not None else {})}


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """To microseconds."""
    return {name: round(value, 6) for name, value in seconds.items()}
