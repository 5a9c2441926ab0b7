"""Average and outer step of a version, part by part, while later parts of its mean are still on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diloco.average import mean_into
from diloco.compress import Codec
from diloco.fragments import Fragment
from diloco.outer import (
    STATE_CHUNK_BYTES,
    FragmentState,
    OuterOptimizer,
    OuterState,
    chunk_bounds,
    chunk_hash,
)

ELEMENT_BYTES = torch.float32.itemsize


class Stepping:
    """The next state of one fragment, as far as its mean is known. Not for several threads at once.

    Outer steps go element by element (`diloco.outer`), so a part takes no more than its own mean, and the bits are
    those of one step over all. What a repair changes is stepped again. A chunk is hashed as soon as it is whole.
    Host memory: 4 bytes per parameter and buffer, which become the next state.
    """

    def __init__(
        self,
        state: OuterState,
        fragment: Fragment,
        codecs: Sequence[Codec],
        optimizer: OuterOptimizer,
        share: float = 1.0,
    ) -> None:
        self.state = state
        """That the version is made on."""
        self.fragment = fragment
        self.share = share
        """Of an outer step (`diloco.weighing`)."""
        self._codecs = codecs
        self._optimizer = optimizer
        self._before = state.fragments[fragment.index]
        self._after: FragmentState | None = None
        self._means: list[bytes | None] = [None] * fragment.parts
        """What each part was stepped by."""
        self._bounds = chunk_bounds(fragment.elements * ELEMENT_BYTES)
        self._missing_bytes = [stop - start for start, stop in self._bounds]
        self._hashes: dict[tuple[str, int], str] = {}

    def take(self, part: int, mean: bytes) -> None:
        """Step one part. Raises PayloadError when these bytes are no mean."""
        start, stop = self.fragment.part_bounds(part)
        values = torch.empty(stop - start)
        mean_into(mean, self._codecs[self.fragment.group_of(part)], values)
        if self._after is None:
            self._after = self._before.unfilled()
        before, into = self._before.part(start, stop), self._after.part(start, stop)
        stepped = self._optimizer.step(before, values, into, self.share)
        self._after = replace(self._after, steps=stepped.steps)
        first, self._means[part] = self._means[part] is None, mean
        self._hash(self._after, start * ELEMENT_BYTES, stop * ELEMENT_BYTES, first)

    def finish(self, means: Sequence[bytes]) -> FragmentState:
        """The state after these means, most of which were taken before. Nothing may be taken afterwards.

        Raises PayloadError when one of them is no mean.
        """
        for part, mean in enumerate(means):
            if self._means[part] is not mean:
                self.take(part, mean)
        after, chunks = self._after, range(len(self._bounds))
        assert after is not None
        after.keep_hashes({name: [self._hashes[name, chunk] for chunk in chunks] for name in after.buffers()})
        return after

    def _hash(self, after: FragmentState, start_byte: int, stop_byte: int, first: bool) -> None:
        """Those chunks with these bytes that are whole now. `first`: the bytes were not there before."""
        for chunk in range(start_byte // STATE_CHUNK_BYTES, (stop_byte - 1) // STATE_CHUNK_BYTES + 1):
            bounds = self._bounds[chunk]
            if first:
                self._missing_bytes[chunk] -= min(stop_byte, bounds[1]) - max(start_byte, bounds[0])
            if not self._missing_bytes[chunk]:
                for name, buffer in after.buffers().items():
                    self._hashes[name, chunk] = chunk_hash(buffer, *bounds)
