"""Average and outer step of a version, part by part: while later parts of its mean are on their way, or in place.

Ahead of its commit, each part is stepped as its mean arrives, into new buffers; so the step is over when the exchange
is. That takes a fragment once more for the anchor, and once for each slot. In place it waits for the commit, and
overwrites the state before it; a mean that arrives is only checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from diloco.base.life import done
from diloco.base.memory import floats
from diloco.base.types import Closed
from diloco.compress import Codec
from diloco.compress.codec import magnitude
from diloco.observe.events import timed
from diloco.outer.average import check_mean, mean_into
from diloco.outer.fragments import Fragment
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState, part_hash

if TYPE_CHECKING:
    from concurrent.futures import Future

    from diloco.outer.line import Line


class Stepping:
    """The next outer state of one fragment, as far as its mean is known. Not for several threads at once.

    Outer steps go element by element (`diloco.outer.optimizers`), so a part takes no more than its own mean, the bits
    are those of one step over all, and they are hashed at once. A part that a repair changes is stepped again. Host
    memory: 4 bytes per parameter and buffer, which become the next state; in place, of one part.
    """

    def __init__(
        self,
        state: OuterState,
        fragment: Fragment,
        codecs: Sequence[Codec],
        optimizer: OuterOptimizer,
        share: float = 1.0,
        ahead: bool = True,
    ) -> None:
        self.state = state
        """The outer state that the version is made on."""
        self.fragment = fragment
        self.share = share
        """Share of an outer step (`diloco.outer.line.Weighing`)."""
        self._codecs = codecs
        self._optimizer = optimizer
        self._ahead = ahead
        self._before = state.fragments[fragment.index]
        self._after: FragmentState | None = None
        self._means: dict[int, bytes] = {}
        """Mean by which each part was stepped, or, if not ahead, that is known to be decodable."""
        self._hashes: dict[str, dict[int, str]] = {}
        self._largest: dict[int, float] = {}
        """Largest absolute value of each part's anchor."""
        self.seconds = {"average": 0.0, "outer": 0.0}
        """Seconds spent so far on decoding means, and on outer steps."""

    def take(self, part: int, mean: bytes) -> None:
        """Step one part, if ahead. Raises PayloadError when these bytes are no mean."""
        if self._ahead:
            self._step(part, mean)
        else:
            with timed(self.seconds, "average"):
                check_mean(mean, self._codecs[self.fragment.group_of(part)], self.fragment.size_of(part))
        self._means[part] = mean

    def average(self, means: Sequence[bytes]) -> None:
        """Decode the mean pseudo-gradient, as far as it did not arrive part by part. Raises PayloadError when a part is
        no mean, with nothing overwritten."""
        for part in self.fragment.cuts:
            if self._means.get(part) is not means[part]:
                self.take(part, means[part])

    def outer(self, means: Sequence[bytes], in_place: bool = False) -> FragmentState:
        """The fragment's outer state after these means, once they were averaged. Nothing may be taken afterwards.

        `in_place`: the state before may be overwritten, if nothing was done ahead.
        """
        if not self._ahead:
            self._after = self._before if in_place else None
            for part in self.fragment.cuts:
                self._step(part, means[part])
        after = replace(self._after or self._before.unfilled(), steps=self._before.steps + 1)
        hashes = {name: dict(sorted(self._hashes.get(name, {}).items())) for name in after.buffers()}
        # Not by max(), which drops a nan where it is not the first.
        after.keep(hashes, magnitude(torch.tensor(list(self._largest.values()), dtype=torch.float32, device="cpu")))
        return after

    def _step(self, part: int, mean: bytes) -> None:
        with timed(self.seconds, "average"):
            values = floats(self.fragment.size_of(part))
            mean_into(mean, self._codecs[self.fragment.group_of(part)], values)
        with timed(self.seconds, "outer"):
            start, stop = self.fragment.part_bounds(part)
            if self._after is None:
                self._after = self._before.unfilled()
            into = self._after.part(start, stop)
            self._optimizer.step(self._before.part(start, stop), values, into, self.share)
            self._largest[part] = magnitude(into.anchor)
            for name, buffer in into.buffers().items():
                self._hashes.setdefault(name, {})[part] = part_hash(buffer, 0, stop - start)


class SteppedHere:
    """A version whose average and outer step are made at once, on the thread that asks (`diloco.base.life.Stepped`)."""

    def __init__(self, line: Line, closed: Closed) -> None:
        """`line`: the line that the version is applied to next."""
        self.commit, self._parts = closed.commit, closed.parts
        share = line.weighing.share(closed.commit.counted, closed.commit.view)
        fragment = line.layout.fragments[closed.commit.fragment]
        self._stepping = Stepping(line.state, fragment, line.codecs, line.optimizer, share, ahead=False)
        self.seconds: Mapping[str, float] = self._stepping.seconds
        """Seconds spent by step of the line."""

    def averaged(self) -> Future[None]:
        """Raises PayloadError when the mean is no mean."""
        self._stepping.average(self._parts)
        return done(None)

    def outer(self, in_place: bool) -> Future[FragmentState]:
        """The fragment's next outer state, in new buffers or in those of the one before."""
        return done(self._stepping.outer(self._parts, in_place))
