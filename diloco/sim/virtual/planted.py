"""Five bugs of the kind that other systems shipped, planted on purpose: each must break an invariant soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco import round as line_of
from diloco.average import unpack
from diloco.compress import Codec
from diloco.exchange import electorate
from diloco.exchange.work import Work
from diloco.fragments import Fragment, write_fragment
from diloco.round import Line, Sent, Trained, measure, step_outer
from diloco.sim.virtual import host, training
from diloco.sim.virtual.world import World
from diloco.types import Closed, Counted


@dataclass(frozen=True)
class Bug:
    """One planted bug."""

    what: str
    plant: Callable[[], Iterator[None]]


@contextmanager
def plant(name: str) -> Iterator[None]:
    """The named bug is in the code meanwhile."""
    with contextmanager(BUGS[name].plant)():
        yield


@contextmanager
def _replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """A name means something else meanwhile."""
    before = getattr(owner, name) if not isinstance(owner, type) else owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _no_majority() -> Iterator[None]:
    with _replaced(electorate, "votes_needed", lambda members, gone: 1):
        yield


def _early_divisor() -> Iterator[None]:
    fold = Work.fold

    def fold_for_all(work: Work, part: int, omitted: Sequence[str]) -> bytes:
        """Who is omitted adds nothing to the sum, but its weight to the divisor."""
        start, stop = work.fragment.part_bounds(part)
        for peer in omitted:
            work.put_contribution(peer, part, work.codec(part).encode(torch.zeros(stop - start)))
        return fold(work, part, ())

    with _replaced(Work, "fold", fold_for_all):
        yield


def _early_progress() -> Iterator[None]:
    def measure_and_finish(line: Line, seconds: dict[str, float]) -> Sent:
        """What was sent is taken for committed."""
        sent = measure(line, seconds)
        fragment = line.layout.fragments[sent.contribution.fragment]
        anchor = line.state.fragments[fragment.index].anchor
        write_fragment(line.parameters, fragment, anchor)
        line.trained = Trained()
        return replace(sent, local=anchor)

    with _replaced(training, "measure", measure_and_finish):
        yield


def _private_mean() -> Iterator[None]:
    """An owner goes on with its fp32 mean, the others with the bytes that it sent."""
    keep = Work.keep
    private: dict[tuple[str, bytes], Tensor] = {}
    current: list[str] = [""]

    def keep_private(work: Work, part: int, mean: bytes) -> bool:
        start, stop = work.fragment.part_bounds(part)
        total = sum(entry.weight for entry in work.begin.contributors)
        values = torch.zeros(stop - start)
        for entry in work.begin.contributors:
            payload = work._payloads[part].get(entry.peer)
            if payload is not None:
                values += work.codec(part).decode(payload, stop - start) * (entry.weight / total)
        private[work.me, mean] = values
        return keep(work, part, mean)

    def unpack_private(parts: Sequence[bytes], fragment: Fragment, codecs: Sequence[Codec]) -> Tensor:
        flat = unpack(parts, fragment, codecs)
        for part, payload in enumerate(parts):
            values = private.get((current[0], payload))
            if values is not None:
                start, stop = fragment.part_bounds(part)
                flat[start:stop] = values
        return flat

    def step_as(line: Line, closed: Closed, seconds: dict[str, float]) -> Counted | None:
        current[0] = line.peer
        return step_outer(line, closed, seconds)

    with (
        _replaced(Work, "keep", keep_private),
        _replaced(line_of, "unpack", unpack_private),
        _replaced(training, "step_outer", step_as),
    ):
        yield


def _stale_life() -> Iterator[None]:
    """A restarted process comes back as the life that the view has, of which it remembers nothing."""

    def same_incarnation(world: World, name: str) -> int:
        return sum(name.encode())

    with _replaced(host, "new_incarnation", same_incarnation):
        yield


BUGS: Mapping[str, Bug] = {
    "no-majority": Bug("commit with one vote instead of a majority", _no_majority),
    "early-divisor": Bug("divide by the weights of all who began, not of those who count in the part", _early_divisor),
    "early-progress": Bug("take progress for committed when it is sent", _early_progress),
    "private-mean": Bug("an owner applies its own mean instead of the bytes it sent", _private_mean),
    "stale-life": Bug("take the word of an earlier life of a peer for that of the present one", _stale_life),
}
