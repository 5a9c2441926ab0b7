"""Average and outer step of a version, part by part, while later parts of its mean are still on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diloco.average import mean_into
from diloco.compress import Codec
from diloco.fragments import Fragment
from diloco.outer import FragmentState, OuterOptimizer, OuterState, part_hash


class Stepping:
    """The next state of one fragment, as far as its mean is known. Not for several threads at once.

    Outer steps go element by element (`diloco.outer`), so a part takes no more than its own mean, and the bits are
    those of one step over all, and hashed at once. What a repair changes is stepped again.
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
        self._means: dict[int, bytes] = {}
        """What each part was stepped by."""
        self._hashes: dict[str, dict[int, str]] = {}

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
        self._means[part] = mean
        for name, buffer in self._after.buffers().items():
            self._hashes.setdefault(name, {})[part] = part_hash(buffer, start, stop)

    def finish(self, means: Sequence[bytes]) -> FragmentState:
        """The state after these means, of all parts, most of which were taken before. Nothing may be taken afterwards.

        Raises PayloadError when one of them is no mean.
        """
        for part in self.fragment.cuts:
            if self._means.get(part) is not means[part]:
                self.take(part, means[part])
        after = self._after or replace(self._before.unfilled(), steps=self._before.steps + 1)  # this rank may hold none
        after.keep_own_hashes({name: dict(sorted(self._hashes.get(name, {}).items())) for name in after.buffers()})
        return after
